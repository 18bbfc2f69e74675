"""A trial between two processes: real bytes, compared; one trial at a time; and no figure for bytes that did not arrive."""

import asyncio
import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvbridge.transport.local.transport  # noqa: F401 - here, so that no test is the first to import it
from kvbridge.config.transports import TransportSettings
from kvbridge.control.keys import CurveKeys, generate_keys
from kvbridge.control.peers import PeerIdentity
from kvbridge.control.requests import RequestClient, RequestServer
from kvbridge.core.errors import ConfigError, DigestMismatchError, PeerError, UnauthorizedError
from kvbridge.core.plan.operations import Operations
from kvbridge.doctor import bench
from kvbridge.doctor.bench import IDLE_S, Answer, Effort, Lender, Question, Trial, make_buffer
from kvbridge.transport.base import Endpoint, TransferState, TransferStatus

COMMAND = [sys.executable, "-m", "kvbridge", "bench-peer"]
START_S = 60.0
SMALL = 1 << 20


@contextmanager
def serving(answer, keys: CurveKeys | None = None) -> Iterator[str]:
    """A request server in a loop of its own thread; gives its endpoint."""
    started, loop, found = threading.Event(), asyncio.new_event_loop(), []

    async def live() -> None:
        with RequestServer(PeerIdentity("test", keys), "tcp://127.0.0.1:0", answer, lambda _: None) as server:
            found.extend([server.endpoint, asyncio.Event()])
            started.set()
            await found[1].wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(live()))
    thread.start()
    assert started.wait(20)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(found[1].set)
        thread.join(20)
        loop.close()


@contextmanager
def listening() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`kvbridge bench-peer --listen` as a process; gives its address."""
    process = subprocess.Popen(
        [*COMMAND, "127.0.0.1:0", "--listen", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START_S)[0]
        yield json.loads(process.stdout.readline())["address"], process
    finally:
        process.kill()
        process.communicate()


def test_bytes_move_by_a_real_transport_and_a_signal_leaves_nothing_behind() -> None:
    before = set(Path("/dev/shm").glob("*.bench-*"))
    with listening() as (address, process):
        command = [*COMMAND, address, "--brief", "--json", "--transport", "local"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        assert ended.returncode == 0, ended.stderr
        said = json.loads(ended.stdout)
        assert [each["operation_bytes"] for each in said["measured"]] == [37_440, 1 << 20]
        assert all(each["bytes_per_s"] > 1e6 and 0 < each["latency_s"] < 1 for each in said["measured"])
        assert "memcpy" in said["wire"]
        assert said["wire_bytes_per_s"] > 1e6
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0
    mine = {path for path in set(Path("/dev/shm").glob("*.bench-*")) - before if f".bench-{process.pid}" in path.name}
    assert not mine


class Forgetful:
    """Reports every write as done and moves nothing; or moves nothing and says so."""

    name = "local"
    max_operation_bytes = 1 << 20

    def __init__(self, status: TransferStatus) -> None:
        self.status = status

    def register(self, memory) -> None:
        pass

    def endpoint(self) -> Endpoint:
        return Endpoint(transport="local", data=b"")

    def connect(self, endpoint: Endpoint):
        return self

    def poll(self):
        return self.status

    def submit(self, peer, operations: Operations, *, deadline_s: float):
        assert int(operations.length.max()) <= self.max_operation_bytes
        return self

    def close(self) -> None:
        pass


@pytest.fixture
def lender() -> Iterator[Lender]:
    with Lender(make_buffer(length_bytes=4 * SMALL), TransportSettings()) as made:
        yield made


def trial_with(lender: Lender, status: TransferStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "create_transport", lambda *_: Forgetful(status))
    with (
        serving(lender.answer) as endpoint,
        RequestClient(endpoint, keys=None, server_key="", timeout_s=20) as client,
        make_buffer(length_bytes=4 * SMALL) as source,
        Trial(client, source, TransportSettings(), "local") as trial,
    ):
        trial.measure(3 * SMALL, Effort(round_bytes=4 * SMALL, rounds=1))


def test_bytes_that_did_not_arrive_give_no_figure(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DigestMismatchError, match="local reported 1 operations of 3145728 B as done, and other"):
        trial_with(lender, TransferStatus(TransferState.DONE), monkeypatch)


def ask(lender: Lender, trial: str, ask: str, **asked) -> Answer:
    return Answer.model_validate_json(lender.answer(Question(ask=ask, trial=trial, **asked).model_dump_json().encode()))


def test_one_trial_at_a_time_and_a_silent_one_gives_way() -> None:
    now = [100.0]
    with Lender(make_buffer(length_bytes=SMALL), TransportSettings(), clock=lambda: now[0]) as lender:
        assert len(list(Path("/dev/shm").glob(f"*.bench-{os.getpid()}"))) == 1
        opened = ask(lender, "a", "open", transport="local")
        assert opened.length_bytes == SMALL
        assert base64.b64decode(opened.endpoint)
        assert "another trial is under way" in ask(lender, "b", "fill", value=1).error
        assert not ask(lender, "a", "fill", value=7).error
        now[0] += IDLE_S - 1
        assert "another trial is under way" in ask(lender, "b", "fill", value=1).error
        now[0] += 1
        assert not ask(lender, "b", "fill", value=1).error
        assert "another trial is under way" in ask(lender, "a", "fill", value=1).error
        assert not ask(lender, "b", "close").error
        assert not ask(lender, "a", "fill", value=1).error
    assert not list(Path("/dev/shm").glob(f"*.bench-{os.getpid()}"))


def test_wrong_questions_are_answered_with_an_error(lender: Lender) -> None:
    assert "does not know the question" in Answer.model_validate_json(lender.answer(b"\x00")).error
    assert "does not know the question" in Answer.model_validate_json(lender.answer(b'{"ask": "dance"}')).error
    assert "there is no transport" in ask(lender, "a", "open", transport="pigeon").error
    assert "asked for" in ask(lender, "a", "checksum", length_bytes=1 << 40).error
    assert "asked for" not in ask(lender, "a", "checksum", length_bytes=4 * SMALL).error


def test_the_handshake_is_tried_with_keys_and_without() -> None:
    server, stranger = generate_keys(), generate_keys()
    with serving(lambda packed: packed, server) as endpoint:
        RequestClient(endpoint, keys=server, server_key="", timeout_s=20).close()
        with pytest.raises(UnauthorizedError, match="does not allow our key"):
            RequestClient(endpoint, keys=stranger, server_key=server.public, timeout_s=20).close()
        with pytest.raises(PeerError):  # another key than the server's
            RequestClient(endpoint, keys=server, server_key=stranger.public, timeout_s=1).close()
        with pytest.raises(PeerError):
            RequestClient(endpoint, keys=None, server_key="", timeout_s=1).close()
    with serving(lambda packed: packed[::-1]) as endpoint:
        RequestClient(endpoint, keys=None, server_key="", timeout_s=20).close()
        with RequestClient(endpoint, keys=None, server_key="", timeout_s=20) as client:
            assert client.ask(b"abc") == b"cba"
            assert client.ask(b"de") == b"ed"


def test_listening_to_the_network_wants_keys() -> None:
    async def listen() -> None:
        RequestServer(PeerIdentity("test"), "tcp://0.0.0.0:0", lambda packed: packed, lambda _: None)

    with pytest.raises(ConfigError, match="without CURVE keys"):
        asyncio.run(listen())
