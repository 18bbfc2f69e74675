"""A store behind its process, when either of them cannot be opened, ends, hangs or comes back.

What becomes of pages when the process of a store hangs or dies: `test_stored_prefixes`.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbridge.config.tier import FileStoreSettings, StoreLimits
from kvbridge.tier.stores.base import Outcome
from tests.contract.stores_harness import LIMITS, READY_S, TIMEOUT_S, Client, settings_of
from tests.helpers.mooncake_servers import MooncakeServers
from tests.helpers.stopping import stop
from tests.helpers.stored_pages import HALF, StoredPages, ids, new_keys


@pytest.fixture(scope="module")
def pages() -> Iterator[StoredPages]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path:
        made = StoredPages(Path(path))
        yield made
        made.close()


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
from tests.helpers.stopping import stop
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


# ------------------------------------------------------------------------------------------- Mooncake


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


def test_an_owner_of_mooncakes_memory_that_hangs_keeps_no_page(
    mooncake: tuple[Client, MooncakeServers], pages: StoredPages
):
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
    """The store takes and gives pages, at last."""
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
