"""Every store, asked directly and through a store process: what it must give back, and what it must never give."""

import ctypes
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.tier import FileStoreSettings, StoreLimits
from kvbridge.core.errors import InvalidInputError
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.objects import TRAILER_BYTES, VERSION, ObjectForm, Outcome
from kvbridge.tier.stores.process import open_store
from tests.contract.stores_harness import KINDS, LIMITS, READY_S, TIMEOUT_S, WAYS, Asked, Client, asked_of, settings_of
from tests.helpers.local_servers import SEGMENT_BYTES, MooncakeServers, stop
from tests.helpers.stored_pages import HALF, PAGES, StoredPages, ids, new_keys, stored_object


@pytest.fixture(scope="module")
def pages() -> Iterator[StoredPages]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path:
        made = StoredPages(Path(path))
        yield made
        made.close()


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest, pages: StoredPages) -> Iterator[dict[str, Asked]]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path,
        settings_of(request.param, Path(path)) as (settings, _),
    ):
        raw = open_store(settings)
        with (
            asked_of(request.param, "direct", raw, settings, pages) as direct,
            asked_of(request.param, "process", raw, settings, pages) as process,
        ):
            yield {"direct": direct, "process": process}


@pytest.fixture(params=WAYS)
def asked(request: pytest.FixtureRequest, store: dict[str, Asked]) -> Asked:
    found = store[request.param]
    found.pages.fill()
    return found


@pytest.mark.parametrize("form", [0, 1])
def test_a_page_comes_back_as_it_was_into_pools_of_either_layout(asked: Asked, form: int):
    keys = new_keys(HALF)
    assert asked("has", keys) == ["absent"] * HALF
    assert asked("put", keys, *range(HALF)) == ["stored"] * HALF
    assert asked("has", keys) == ["present"] * HALF
    assert asked("get", keys, *reversed(range(HALF, PAGES)), form=form) == ["hit"] * HALF
    for page in range(HALF):
        assert asked.pages.read(PAGES - 1 - page, form=form) == asked.pages.read(page)


def test_what_is_there_stays_and_can_be_dropped(asked: Asked):
    keys = new_keys(2)
    assert asked("put", keys, 0, 1) == ["stored"] * 2
    assert asked("put", keys, 0, 1) == ["stored"] * 2
    assert asked("drop", keys[:1]) == ["dropped"]
    assert asked("drop", keys[:1]) == ["dropped"]
    assert asked("has", keys) == ["absent", "present"]
    assert asked("get", keys, HALF, HALF + 1) == ["absent", "hit"]
    assert asked.pages.read(HALF + 1) == asked.pages.read(1)


def test_all_objects_of_a_form_are_dropped_whoever_put_them_there_and_no_others(asked, store, pages):
    keys, others = new_keys(HALF), new_keys(3)
    foreign = ObjectForm(pages.forms[0], "another model").object_name(keys[0])
    asked.plant(foreign, b"theirs")
    asked.clear()
    assert asked("put", keys, *range(HALF)) == ["stored"] * HALF
    assert store["direct"]("put", others, 0, 1, 2) == ["stored"] * 3
    answer = asked.clear()
    assert ([outcome.value for outcome in answer.outcomes], answer.cleared) == (["dropped"], HALF + 3)
    assert asked("has", keys) == ["absent"] * HALF
    assert asked("has", others) == ["absent"] * 3
    assert asked.taken(foreign, 6) == b"theirs"
    assert asked.clear().cleared == 0
    assert asked("put", keys[:1], 0) == ["stored"]
    assert asked("get", keys[:1], HALF) == ["hit"]


def _changed(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        found = bytearray(data)
        found[at] ^= 0x10
        return bytes(found)

    return change


def _of_another_version(data: bytes) -> bytes:
    at = len(data) - TRAILER_BYTES + 7
    return data[:at] + bytes([VERSION + 1]) + data[at + 1 :]


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "one wrong bit in the page": (_changed(0), "wrong_digest"),
    "one wrong bit in a key": (_changed(30 - TRAILER_BYTES), "wrong_digest"),
    "one wrong bit in a digest": (_changed(50 - TRAILER_BYTES), "wrong_digest"),
    "zeros": (lambda data: bytes(len(data)), "wrong_digest"),
    "another version": (_of_another_version, "other_version"),
    "one byte less": (lambda data: data[:-1], "short"),
    "one byte more": (lambda data: data + b"x", "short"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_a_miss_of_its_kind_and_gone(asked: Asked, lie: str):
    change, kind = LIES[lie]
    [key] = keys = new_keys(1)
    name = asked.pages.form.object_name(key)
    assert asked("put", keys, 0) == ["stored"]
    asked.plant(name, change(asked.taken(name, asked.pages.form.object_bytes)))
    assert asked("get", keys, HALF) == [kind]
    assert asked("has", keys) == ["absent"], "a bad object is dropped"
    assert asked("put", keys, 0) == ["stored"]
    assert asked("get", keys, HALF) == ["hit"]
    assert asked.pages.read(HALF) == asked.pages.read(0)


def test_the_bytes_of_another_key_are_a_miss(asked: Asked):
    mine, theirs = new_keys(1), new_keys(1, namespace="another")
    names = [asked.pages.form.object_name(keys[0]) for keys in (mine, theirs)]
    assert names[0] != names[1]
    assert asked("put", theirs, 1) == ["stored"]
    asked.plant(names[0], asked.taken(names[1], asked.pages.form.object_bytes))
    assert asked("get", mine, HALF) == ["other_key"]
    assert asked("get", theirs, HALF) == ["hit"]


@pytest.mark.parametrize("store", ["mooncake"], indirect=True)
def test_a_mooncake_that_is_full_says_so_and_takes_pages_again_later(store: dict[str, Asked], pages: StoredPages):
    """An object that was just read is leased and cannot be evicted, so a later one finds no room."""
    pages.fill()
    raw, until_s = store["direct"].raw, time.monotonic() + 30.0
    buffer = ctypes.create_string_buffer(SEGMENT_BYTES // 8)
    large = [stored_object(pages.form.object_name(key), buffer) for key in new_keys(9)]
    found = []
    for each in large:
        answer = raw.write([each], until_s)
        assert answer.settled
        found += answer.outcomes
        if answer.outcomes == ("stored",):
            assert raw.read([each], until_s).outcomes == ("hit",)
    assert set(found) == {"stored", "full"}
    assert raw.remove([each.name for each in large], until_s).outcomes == ("dropped",) * len(large)
    assert raw.write(large[-1:], until_s).outcomes == ("stored",)
    assert store["process"]("put", new_keys(1), 0) == ["stored"]
    raw.remove([large[-1].name], until_s)


def test_a_deadline_that_has_passed_touches_nothing(asked: Asked):
    keys = new_keys(1)
    assert asked("put", keys, 0) == ["stored"]
    asked.pages.write(HALF, asked.pages.read(1))
    answer = asked.ask("get", keys, ids(HALF), timeout_s=-1.0)
    assert [outcome.value for outcome in answer.outcomes] == ["timed_out"]
    assert asked("get", keys, HALF + 1) == ["hit"], "the one after it has its turn, so the first one's is over"
    assert asked.pages.read(HALF) == asked.pages.read(1)


NEVER = {
    "no such page": (new_keys(1), ids(PAGES)),
    "negative": (new_keys(1), ids(-1)),
    "too few": (new_keys(2), ids(1)),
    "two spaces": (new_keys(1), np.array([[0, 1]], dtype=np.int32)),
    "nothing": (Keys(), np.empty((0, 1), dtype=np.int32)),
    "twice": (Keys(new_keys(1).data * 2), ids(0, 1)),
    "too many": (new_keys(257), ids(*[0] * 257)),
}


def test_what_can_never_work_is_refused_before_it_begins(asked: Asked):
    for keys, rows in NEVER.values():
        for verb in ("put", "get"):
            with pytest.raises(InvalidInputError):
                asked.ask(verb, keys, rows, timeout_s=1.0)
    with pytest.raises(InvalidInputError):
        asked.ask("get", new_keys(1), ids(0), form=2, timeout_s=1.0)


@contextmanager
def client_of_files(pages: StoredPages, limits: StoreLimits = LIMITS) -> Iterator[tuple[Client, Path]]:
    """A client of a store of files of its own, which lies in that directory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path:
        directory = Path(path) / "store"
        yield Client(FileStoreSettings(directory=directory, max_bytes=1 << 20), pages, limits), directory


def outcomes(client: Client, verb: str, keys, pages=None, timeout_s: float = TIMEOUT_S) -> tuple[str, ...]:
    return tuple(each.value for each in client.answer(client.begin(verb, keys, pages, timeout_s)).outcomes)


def test_a_store_that_cannot_be_opened_is_told_and_tried_again(pages: StoredPages):
    with client_of_files(pages) as (client, directory):
        directory.mkdir(mode=0o755)
        try:
            client.until("the reason is known", lambda: "chmod 0700" in client.client.why_not)
            answer = client.answer(client.begin("get", new_keys(1), ids(HALF)))
            assert answer.outcomes == (Outcome.UNREACHABLE,)
            assert "chmod 0700" in answer.detail or "being started" in answer.detail
            directory.chmod(0o700)
            client.until_ready()
            assert outcomes(client, "put", new_keys(1), ids(0)) == ("stored",)
        finally:
            client.close()


def test_after_close_everything_is_settled(pages: StoredPages):
    with client_of_files(pages, StoreLimits(start_s=READY_S)) as (client, _):
        client.until_ready()
        pid = client.client.pid
        stop(pid)
        operation = client.begin("get", new_keys(1), ids(HALF))
        client.close(0.4)
        assert operation.settled.done()
        assert operation.answer.result().outcomes == (Outcome.UNREACHABLE,)
        assert not Path(f"/proc/{pid}").exists()


_NODE = """
import asyncio, sys
from pathlib import Path
from kvbridge.config.tier import FileStoreSettings
from tests.contract.stores_harness import Client
from tests.helpers.local_servers import stop
from tests.helpers.stored_pages import StoredPages
folder = Path(sys.argv[1])
client = Client(FileStoreSettings(directory=folder / "store", max_bytes=1 << 20), StoredPages(folder))
client.until_ready()
print("pid", client.client.pid, flush=True)
sys.stdin.read()
"""


def test_a_store_process_ends_with_its_node():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path:
        node = subprocess.Popen(
            [sys.executable, "-c", _NODE, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            said = next(line for line in node.stdout if line.startswith("pid "))
            pidfd = os.pidfd_open(int(said.split()[1]))
        finally:
            node.kill()
            node.communicate(timeout=READY_S)
        ended, _, _ = select.select([pidfd], [], [], READY_S)
        os.close(pidfd)
        assert ended


@pytest.fixture(scope="module")
def mooncake(pages: StoredPages) -> Iterator[tuple[Client, MooncakeServers]]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path,
        settings_of("mooncake", Path(path)) as (settings, servers),
    ):
        assert servers is not None
        client = Client(settings, pages, StoreLimits(start_s=READY_S, settle_s=0.5, failures=1_000, remember_s=0.0))
        client.until_ready()
        yield client, servers
        client.close()


def test_mooncakes_master_is_killed_and_comes_back(mooncake: tuple[Client, MooncakeServers], pages: StoredPages):
    client, servers = mooncake
    pages.fill()
    client.until_ready()
    keys = new_keys(1)
    assert outcomes(client, "put", keys, ids(0)) == ("stored",)
    servers.kill_master()
    answer = client.answer(client.begin("get", keys, ids(HALF), 0.5))
    assert answer.outcomes[0] in {"timed_out", "unreachable"}
    servers.start_master()
    stored_again(client, pages)


def test_an_owner_of_mooncakes_memory_that_hangs_keeps_no_page(mooncake, pages):
    client, servers = mooncake
    pages.fill()
    client.until_ready()
    stored_again(client, pages)
    keys, pid = new_keys(1), client.client.pid
    assert outcomes(client, "put", keys, ids(0)) == ("stored",)
    servers.halt_owner()
    try:
        operation = client.begin("get", keys, ids(HALF), 0.5)
        assert client.answer(operation).outcomes[0] in {"timed_out", "unreachable"}
        client.settled(operation)
        assert not Path(f"/proc/{pid}").exists()
        mark = pages.read(1)
        pages.write(HALF, mark)
    finally:
        servers.go_on()
    stored_again(client, pages)
    assert pages.read(HALF) == mark, "the transfer that hung has ended with its process"


def stored_again(client: Client, pages: StoredPages) -> None:
    ends_s = time.monotonic() + READY_S
    while time.monotonic() < ends_s:
        client.until_ready()
        keys = new_keys(1)
        stored = outcomes(client, "put", keys, ids(2), 5.0) == ("stored",)
        if stored and outcomes(client, "get", keys, ids(HALF + 2), 5.0) == ("hit",):
            assert pages.read(HALF + 2) == pages.read(2)
            return
        client.rest(0.1)
    raise AssertionError(f"the store does not work again within {READY_S:g} s")
