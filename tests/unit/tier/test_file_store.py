"""The store of files: its bound, its order, several of them on one directory, and what a disk can do to it."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.tier import FileStoreSettings
from kvbridge.core.errors import ConfigError, NotReadyError
from kvbridge.tier.stores import files
from kvbridge.tier.stores.files import FileStore
from kvbridge.tier.stores.objects import StoredObject

LENGTH = 1_000
Make = Callable[..., FileStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened = []

    def make_one(objects: int = 8) -> FileStore:
        opened.append(FileStore(FileStoreSettings(directory=tmp_path / "store", max_bytes=objects * LENGTH)))
        return opened[-1]

    yield make_one
    for store in opened:
        store.close()


def soon() -> float:
    return time.monotonic() + 20.0


def name(number: int) -> str:
    return f"{0:032x}-{number:032x}"


class Held:
    """Memory that an object lies in, in several pieces."""

    def __init__(self, number: int, length: int = LENGTH, pieces: int = 7) -> None:
        self.memory = np.full(length, number % 251, dtype=np.uint8)
        cuts = np.linspace(0, length, pieces + 1).astype(np.int64).tolist()
        start = self.memory.ctypes.data
        stretches = [(start + at, stop - at) for at, stop in pairwise(cuts)]
        self.object = StoredObject(name(number), np.array(stretches, dtype=np.uint64))


def put(store: FileStore, number: int, length: int = LENGTH) -> str:
    held = Held(number, length)
    return store.write([held.object], soon()).outcomes[0].value


def get(store: FileStore, number: int, length: int = LENGTH) -> str:
    held = Held(0, length)
    outcome = store.read([StoredObject(name(number), held.object.stretches)], soon()).outcomes[0].value
    assert outcome != "hit" or (held.memory == number % 251).all()
    return outcome


def numbers(directory: Path) -> set[int]:
    return {int(path.name.split("-")[1], 16) for path in directory.glob("store/??/*")}


def total(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("store/*/*") if path.is_file())


def test_a_store_that_is_opened_again_knows_everything_and_its_order(make: Make, tmp_path: Path):
    store = make(8)
    for number in range(8):
        put(store, number)
    get(store, 0)
    store.close()
    again = make(8)
    assert [get(again, number) for number in (3, 1)] == ["hit", "hit"]
    put(again, 8)
    assert numbers(tmp_path) >= {0, 1, 3, 8}
    assert 2 not in numbers(tmp_path)


def test_files_that_others_remove_are_misses(make: Make, tmp_path: Path):
    one, other = make(8), make(8)
    put(one, 1)
    put(one, 2)
    other.remove([name(1)], soon())
    (tmp_path / "store" / name(2)[-2:] / name(2)).unlink()
    assert [get(one, 1), get(one, 2)] == ["absent", "absent"]
    assert one.present([name(1)], soon()).outcomes == ("absent",)
    assert put(one, 1) == "stored"


def test_a_file_that_is_removed_while_it_is_read_stays_readable(make: Make, monkeypatch: pytest.MonkeyPatch):
    one, other = make(8), make(8)
    put(one, 1)
    move = files._move

    def remove_first(call, descriptor, pieces):
        other.remove([name(1)], soon())
        return move(call, descriptor, pieces)

    monkeypatch.setattr(files, "_move", remove_first)
    assert get(one, 1) == "hit"
    assert get(one, 1) == "absent"


def test_a_count_that_others_have_made_wrong_is_put_right_and_costs_nobody_his_place(make: Make, tmp_path: Path):
    store = make(8)
    put(store, 1)
    for number in range(2, 9):
        put(store, number)
        (tmp_path / "store" / name(number)[-2:] / name(number)).unlink()
    assert put(store, 10) == "stored"
    assert store.total_bytes == total(tmp_path) == 2 * LENGTH
    assert numbers(tmp_path) == {1, 10}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_in_the_middle_leaves_nothing(make, tmp_path, monkeypatch, code):
    store = make(8)
    put(store, 1)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(files, "_move", fail)
        answer = store.write([Held(2).object], soon())
        assert get_outcome(store, 1) == ("unreachable" if code == errno.EIO else "full")
    assert answer.outcomes == ("unreachable" if code == errno.EIO else "full",)
    assert os.strerror(code) in answer.detail
    assert numbers(tmp_path) == {1}
    assert store.total_bytes == total(tmp_path) == LENGTH
    assert put(store, 2) == "stored"


def get_outcome(store: FileStore, number: int) -> str:
    return store.read([Held(number).object], soon()).outcomes[0].value


def test_the_same_object_from_two_processes_at_once_is_there_once(make, tmp_path, monkeypatch):
    one, other = make(8), make(8)
    move = files._move

    def put_meanwhile(call, descriptor, pieces):
        monkeypatch.setattr(files, "_move", move)
        assert put(other, 1) == "stored"
        return move(call, descriptor, pieces)

    monkeypatch.setattr(files, "_move", put_meanwhile)
    assert put(one, 1) == "stored"
    assert total(tmp_path) == LENGTH


def test_a_large_store_evicts_old_ones_by_samples(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "SAMPLE", 64)
    store, count = make(1_000), 3_000
    for number in range(count):
        held = Held(number)
        object_name = f"{0:032x}-{number * 2_654_435_761 % 2**32:032x}"
        assert store.write([StoredObject(object_name, held.object.stretches)], soon()).outcomes == ("stored",)
    kept = numbers(tmp_path)
    assert store.total_bytes == total(tmp_path) <= 1_000 * LENGTH
    ages = [number for number in range(count) if number * 2_654_435_761 % 2**32 in kept]
    assert len(ages) > 900
    assert min(ages) > count - 2_000, "nobody stays who is twice as old as a store of strict order would keep"


def test_another_request_that_is_long_at_work_costs_no_more_than_the_deadline(make: Make):
    store = make(8)
    put(store, 1)
    with store._alone(soon()):
        answer = store.write([Held(2).object], time.monotonic() + 0.05)
        assert answer.outcomes == ("timed_out",)
        assert get(store, 1) == "hit", "reading needs no lock"
    assert put(store, 2) == "stored"


def test_an_object_of_more_pieces_than_a_call_takes(make: Make):
    store = make(8)
    held = Held(3, 8 * LENGTH - 5, pieces=2_500)
    assert store.write([held.object], soon()).outcomes == ("stored",)
    held.memory[:] = 0
    assert store.read([held.object], soon()).outcomes == ("hit",)
    assert (held.memory == 3).all()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_can_write_is_refused(make: Make, tmp_path: Path, mode: int):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 0700"):
        make()


@pytest.mark.parametrize("what", ["all of it", "what is in it"])
def test_a_directory_that_is_removed_is_noticed_by_whoever_writes_next(make: Make, tmp_path: Path, what: str) -> None:
    """A store that kept the removed directory open would lose all that it writes, and miss all that it is asked for."""
    store, directory = make(), tmp_path / "store"
    assert put(store, 1) == "stored"
    for path in [directory] if what == "all of it" else list(directory.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(
        NotReadyError, match=f"somebody has removed the store's directory {directory}, or folders in it"
    ):
        put(store, 2)
    again = make()
    assert (put(again, 2), get(again, 2)) == ("stored", "hit")
