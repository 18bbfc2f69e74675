"""The daemon's Unix socket with its workers and engines: joining, order, going, refusals."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio
import zmq

from kvbridge.control import processes
from kvbridge.control.local import LocalCallbacks, LocalClient, LocalServer
from kvbridge.control.runtime_directory import prepare_runtime_directory
from kvbridge.core.errors import ConfigError, ConflictError, PeerError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.codec import NODE_TO_WORKER, PEER, WORKER_TO_NODE, Envelope
from kvbridge.core.wire.messages import Heartbeat
from kvbridge.core.wire.worker_messages import CloseRoom, RoomClosed, Shutdown

pytestmark = pytest.mark.asyncio

WAIT_S = 20.0


class Node:
    """A server whose callbacks remember, and its clients."""

    def __init__(self, path):
        self.path = path
        self.events, self.handler = [], None
        self.pids, self.follows = [], False
        self._changed = asyncio.Event()
        callbacks = LocalCallbacks(
            self._on_message,
            on_gone=self._on_gone,
            on_refused=lambda kind, detail: self._note("refused", str(kind)),
        )
        self.server = LocalServer("node", path, WORKER_TO_NODE, NODE_TO_WORKER, callbacks)
        self.closers = [self.server.close]

    def _note(self, *event):
        self.events.append(event)
        self._changed.set()

    def _on_message(self, client, message):
        self._note(client, message)
        if self.handler:
            self.handler(client, message)

    def _on_gone(self, client, process):
        self._note("gone", client)
        self.pids.append(process.pid)
        if self.follows:
            process.when_ended(lambda: self._note("ended", client))

    def client(self, name="worker-pp0.tp0"):
        client = LocalClient(name, self.path, NODE_TO_WORKER, WORKER_TO_NODE)
        self.closers.append(client.close)
        return client

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_events(self, *events):
        await self.until(lambda: len(self.events) >= len(events))
        assert self.events == list(events)


@pytest_asyncio.fixture
async def node(tmp_path):
    node = Node(prepare_runtime_directory(tmp_path / "run") / "worker.sock")
    yield node
    for closer in reversed(node.closers):
        closer()


def closed(room):
    return RoomClosed(room=room, generation=1, rank=Rank(pp=0, tp=0), quiet=True)


async def test_a_client_joins_with_its_first_message_and_both_talk_in_order(node):
    client = node.client()
    for room in range(500):
        client.send(closed(room))
    await node.until(lambda: len(node.events) == 500)
    assert node.events == [("worker-pp0.tp0", closed(room)) for room in range(500)]
    for room in range(500):
        node.server.send("worker-pp0.tp0", CloseRoom(room=room, generation=1))
    assert [client.receive(WAIT_S).room for _ in range(500)] == list(range(500))
    assert client.receive(0) is None
    assert client.receive(0.001) is None
    assert node.server.clients == ("worker-pp0.tp0",)


_LEAVING = """
import sys
from pathlib import Path
from kvbridge.control.local import LocalClient
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.messages import Heartbeat
client = LocalClient("victim", Path(sys.argv[1]), NODE_TO_WORKER, WORKER_TO_NODE)
client.send(Heartbeat(), 20.0)
sys.stdin.readline()
client.close()
sys.stdin.read()
"""


@pytest.mark.parametrize("named_by", ["pidfd", "pid"])
async def test_the_end_of_a_process_is_told_apart_from_that_of_its_connection(node, named_by, monkeypatch):
    if named_by == "pid":  # as on a kernel before Linux 6.5, which answers an unknown option so
        monkeypatch.setattr(processes, "_SO_PEERPIDFD", 0x7FFF)
    node.follows = True
    command = [sys.executable, "-c", _LEAVING, str(node.path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)  # noqa: ASYNC220 - returns at once
    try:
        await node.until(lambda: ("victim", Heartbeat()) in node.events)
        assert (node.server.process("victim").pid, node.server.process("victim").followed) == (child.pid, True)
        child.stdin.write("leave\n")
        child.stdin.flush()
        await node.until(lambda: node.events[-1] == ("gone", "victim"))
        assert (child.poll(), node.pids) == (None, [child.pid])
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)
    await node.until_events(("victim", Heartbeat()), ("gone", "victim"), ("ended", "victim"))


async def test_the_newer_of_two_with_one_name_stays(node):
    first, second = node.client(), node.client()
    first.send(Heartbeat())
    await node.until(lambda: len(node.events) == 1)
    second.send(Heartbeat())
    await node.until(lambda: len(node.events) == 3)
    assert [event[0] for event in node.events] == ["worker-pp0.tp0", "gone", "worker-pp0.tp0"]
    first.send(Heartbeat())
    await node.until(lambda: node.events[-1] == ("refused", "stale"))
    with pytest.raises(PeerError, match=r"does not know this client"):
        first.receive(WAIT_S)
    assert not first.daemon_ended, "it has only given this client up, and goes on with what it was told"
    node.server.send("worker-pp0.tp0", Shutdown())
    assert second.receive(WAIT_S) == Shutdown()


async def test_a_client_learns_that_its_daemon_ended(node):
    client = node.client()
    client.send(Heartbeat())
    await node.until(lambda: len(node.events) == 1)
    node.server.close()
    with pytest.raises(PeerError, match=r"daemon has ended"):
        await asyncio.to_thread(client.receive, WAIT_S)
    with pytest.raises(PeerError, match=r"daemon has ended"):
        client.send(Heartbeat())
    assert client.daemon_ended


async def test_refusals_are_counted_and_kill_nothing(node):
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"ipc://{node.path}")

    def frame(sequence, sender="raw", body=None):
        return WORKER_TO_NODE.encode(Envelope(sender, sequence=sequence, body=body or Heartbeat()))

    try:
        for data in (b"", b"\xc1", frame(7), frame(1), frame(1), frame(2, "other"), frame(2), frame(9), frame(3)):
            raw.send(data)
        raw.send_multipart([b"a", b"b"])
        raw.send(PEER.encode(Envelope("raw", sequence=1, body=CloseRoom(room=1, generation=1))))
        raw.send(bytes(WORKER_TO_NODE.max_frame_bytes + 1))
        await node.until(lambda: ("refused", "oversized") in node.events)
    finally:
        raw.close(0)
        context.term()
    assert node.events == [
        ("refused", "malformed"),
        ("refused", "malformed"),
        ("refused", "stale"),
        ("raw", Heartbeat()),
        ("refused", "duplicate"),
        ("refused", "out_of_order"),
        ("raw", Heartbeat()),
        ("refused", "out_of_order"),
        ("gone", "raw"),
        ("refused", "stale"),
        ("refused", "malformed"),
        ("refused", "type"),
        ("refused", "oversized"),
    ]


async def test_a_served_path_is_not_taken_over_and_a_dead_one_is(node, tmp_path):
    with pytest.raises(ConflictError, match="another process serves"):
        Node(node.path)
    left_behind = tmp_path / "run" / "dead.sock"
    process = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(left_behind)!r})"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", process], check=True, timeout=WAIT_S)
    assert left_behind.exists()
    Node(left_behind).server.close()


async def test_a_server_that_ends_leaves_the_socket_of_another_one(node):
    """Somebody may have removed the file by hand and started a daemon there. A socket that is left looks like a daemon."""
    node.path.unlink()
    other = Node(node.path)
    node.server.close()
    assert node.path.exists()
    other.server.close()
    assert not node.path.exists()


async def test_the_runtime_directory_is_private(tmp_path):
    made = prepare_runtime_directory(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o750)
    with pytest.raises(ConfigError, match=f"run: chmod 700 {made}"):
        prepare_runtime_directory(made)
    made.chmod(0o705)
    with pytest.raises(ConfigError, match=f"run: chmod 700 {made}"):
        prepare_runtime_directory(made, os.getgid())
    made.chmod(0o700)
    prepare_runtime_directory(made, os.getgid())
    assert made.stat().st_mode & 0o777 == 0o750
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(ConfigError, match="not a directory of this user"):
        prepare_runtime_directory(tmp_path / "link")
    with pytest.raises(ConfigError, match="cannot be made"):
        prepare_runtime_directory(Path("/dev/null/run"))


@pytest.mark.parametrize("way", ["mode", "owner", "link"])
async def test_a_client_believes_nobody_in_a_directory_that_is_not_its_user_s_alone(tmp_path, way, monkeypatch):
    folder = prepare_runtime_directory(tmp_path / "run")
    if way == "mode":
        folder.chmod(0o711)
    elif way == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    with pytest.raises(ConfigError, match=r"can be entered by others|is not a directory of this user"):
        LocalClient("w", folder / "worker.sock", NODE_TO_WORKER, WORKER_TO_NODE)
