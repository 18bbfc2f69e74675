"""The store of files: its bound, its order, several of them on one directory, and what a disk can do to it."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.stores import FileStoreSettings
from kvbridge.core.errors import ConfigError
from kvbridge.tier.stores import files
from kvbridge.tier.stores.base import StoredObject
from kvbridge.tier.stores.files import FileStore

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
        cuts = np.linspace(0, length, pieces + 1).astype(np.int64)
        addresses = self.memory.ctypes.data + cuts[:-1]
        self.object = StoredObject(name(number), np.stack([addresses, np.diff(cuts)], axis=1).astype(np.uint64))


def put(store: FileStore, number: int, length: int = LENGTH) -> str:
    held = Held(number, length)
    return store.write([held.object], soon()).outcomes[0].value


def get(store: FileStore, number: int, length: int = LENGTH) -> str:
    held = Held(0, length)
    outcome = store.read([StoredObject(name(number), held.object.pieces)], soon()).outcomes[0].value
    assert outcome != "hit" or (held.memory == number % 251).all()
    return outcome


def numbers(directory: Path) -> set[int]:
    return {int(path.name.split("-")[1], 16) for path in directory.glob("store/??/*")}


def total(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("store/*/*") if path.is_file())


def usage(directory: Path) -> int:
    return int.from_bytes((directory / "store/usage").read_bytes()[:8], "little")


def test_the_bound_holds_and_the_longest_unused_go(make: Make, tmp_path: Path):
    store = make(8)
    for number in range(8):
        assert put(store, number) == "stored"
    assert numbers(tmp_path) == set(range(8))
    assert get(store, 0) == "hit"
    assert put(store, 8) == "stored"
    assert {1, 2} & numbers(tmp_path) == set()
    assert {0, 7, 8} <= numbers(tmp_path)
    for number in range(9, 100):
        assert put(store, number) == "stored"
        assert total(tmp_path) <= 8 * LENGTH
    assert usage(tmp_path) == total(tmp_path)


def test_what_is_larger_than_the_bound_is_refused_and_costs_nobody_his_place(make: Make, tmp_path: Path):
    store = make(8)
    assert put(store, 1) == "stored"
    assert put(store, 2, 8 * LENGTH + 1) == "full"
    assert numbers(tmp_path) == {1}


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


def test_a_smaller_bound_holds_from_the_next_put_on(make: Make, tmp_path: Path):
    store = make(8)
    for number in range(8):
        put(store, number)
    store.close()
    assert put(make(3), 8) == "stored"
    assert total(tmp_path) <= 3 * LENGTH


def test_two_processes_keep_one_bound_and_one_order(make: Make, tmp_path: Path):
    one, other = make(8), make(8)
    for number in range(4):
        put(one, number)
    for number in range(4, 8):
        put(other, number)
    assert get(one, 5) == "hit", "each finds what the other has put"
    assert put(other, 8) == "stored"
    assert 0 not in numbers(tmp_path), "what goes first is the oldest of all, whoever put it"
    assert {4, 5, 7, 8} <= numbers(tmp_path)
    for number in range(10, 60):
        assert put(one if number % 3 else other, number) == "stored"
        assert total(tmp_path) <= 8 * LENGTH
        assert usage(tmp_path) == total(tmp_path)


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


def test_what_dead_processes_were_writing_is_removed_and_not_counted(make: Make, tmp_path: Path):
    alive = make(8)
    dead = tmp_path / "store" / "writing-00"
    dead.mkdir()
    (dead / "half").write_bytes(bytes(5 * LENGTH))
    put(alive, 1)
    make(8)
    assert not dead.exists()
    assert len(list(tmp_path.glob("store/writing-*"))) == 2, "those of the living stay"
    assert usage(tmp_path) == LENGTH


def test_a_wrong_count_is_put_right_before_anybody_is_told_full(make: Make, tmp_path: Path):
    store = make(8)
    put(store, 1)
    with (tmp_path / "store/usage").open("r+b") as file:
        file.write((100 * LENGTH).to_bytes(8, "little"))
    assert put(store, 2) == "stored"
    assert usage(tmp_path) == total(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_in_the_middle_leaves_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
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
    assert usage(tmp_path) == total(tmp_path) == LENGTH
    assert put(store, 2) == "stored"


def get_outcome(store: FileStore, number: int) -> str:
    return store.read([Held(number).object], soon()).outcomes[0].value


@pytest.mark.parametrize("code", [0, errno.EIO])
def test_whoever_lists_while_another_writes_counts_it_right(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    one, other = make(8), make(8)
    put(one, 1)
    move = files._move

    def listed_meanwhile(call, descriptor, pieces):
        with other._alone(soon()):
            assert other._list() == 2 * LENGTH
        if code:
            raise OSError(code, os.strerror(code))
        return move(call, descriptor, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_move", listed_meanwhile)
        assert put(one, 2) == ("unreachable" if code else "stored")
    assert usage(tmp_path) == total(tmp_path) == (1 if code else 2) * LENGTH


def test_another_process_that_keeps_the_lock_costs_no_more_than_the_deadline(make: Make):
    store, other = make(8), make(8)
    put(store, 1)
    with other._alone(soon()):
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


def test_short_moves_go_on_where_they_stopped(make: Make, monkeypatch: pytest.MonkeyPatch):
    store = make(8)
    preadv = files._libc.preadv

    def stingy(descriptor: int, vectors: int, count: int, offset: int) -> int:
        first = np.ctypeslib.as_array((files.ctypes.c_uint64 * 2).from_address(vectors)).copy()
        first[1] = min(int(first[1]), 37)
        return preadv(descriptor, first.ctypes.data, 1, offset)

    held, source = Held(0), Held(9)
    source.memory[:] = np.arange(LENGTH) % 251
    store.write([source.object], soon())
    descriptor = os.open(store._path(name(9)), os.O_RDONLY)
    assert files._move(stingy, descriptor, held.object.pieces) == LENGTH
    os.close(descriptor)
    assert (held.memory == source.memory).all()


_HAMMER = """
import sys
from pathlib import Path
import numpy as np
from tests.unit.tier.test_file_store import FileStore, FileStoreSettings, LENGTH, get, name, put, soon
seed, count = int(sys.argv[2]), int(sys.argv[3])
store = FileStore(FileStoreSettings(directory=Path(sys.argv[1]), max_bytes=8 * LENGTH))
print("open", flush=True)
random = np.random.default_rng(seed)
for _ in range(count):
    number = int(random.integers(0, 20))
    act = random.integers(0, 8)
    if act == 0:
        store.remove([name(number)], soon())
    else:
        outcome = put(store, number) if act < 4 else get(store, number)
        assert outcome in ({"stored"} if act < 4 else {"hit", "absent"}), outcome
print("done", flush=True)
sys.stdin.read()
"""


def test_several_processes_at_once_and_one_that_is_killed(make: Make, tmp_path: Path):
    """Their wild mixture of everything is never an error, never beyond the bound, and leaves nothing that is counted twice."""
    endless = 1 << 40
    command = [sys.executable, "-c", _HAMMER, str(tmp_path / "store")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, str(seed), str(count)], **pipes) for seed, count in enumerate((400, 400, endless))
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "open\n"
        for process in processes[:2]:
            assert process.stdout.readline() == "done\n"
        processes[2].kill()
        processes[2].wait(20)
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=20)
    store = make(8)
    assert usage(tmp_path) == total(tmp_path) <= 8 * LENGTH
    assert len(list(tmp_path.glob("store/writing-*"))) == 1, "the dead ones' are removed"
    for number in numbers(tmp_path):
        assert get(store, number) == "hit"


def test_nobody_else_can_read_or_write_it(make: Make, tmp_path: Path):
    before = os.umask(0)
    try:
        put(make(8), 1)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "store", *tmp_path.glob("store/**/*")]}
    assert set(modes.values()) == {0o700, 0o600}
    assert all((mode == 0o700) == path.is_dir() for path, mode in modes.items())


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_can_write_is_refused(make: Make, tmp_path: Path, mode: int):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 0700"):
        make()


def test_a_directory_that_cannot_be_made_is_told(make: Make, tmp_path: Path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be used"):
        make()
