"""The daemon's Unix socket with its workers and engines: joining, order, going, refusals."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvbridge.control import unix_sockets
from kvbridge.control.local import LocalClient, LocalServer, framed
from kvbridge.control.unix_sockets import prepare_runtime_directory
from kvbridge.core.errors import CapacityError, ConfigError, ConflictError, NotReadyError, PeerError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.messages import Heartbeat
from kvbridge.core.wire.worker_messages import CloseRoom, ConnectPeer, RoomClosed, Shutdown, WorkerFailed

WAIT_S = 20.0
R0 = Rank(pp=0, tp=0)


class Node:
    def __init__(self, path):
        self.path = path
        self.events, self.handler = [], None
        self.pids, self.follows = [], False
        self._changed = asyncio.Event()
        refused = lambda kind, _detail: self._note("refused", str(kind))  # noqa: E731
        calls = {"on_message": self._on_message, "on_gone": self._on_gone, "on_refused": refused}
        self.server = LocalServer("node", path, WORKER_TO_NODE, NODE_TO_WORKER, **calls)
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

    def client(self):
        client = LocalClient(self.path, NODE_TO_WORKER, WORKER_TO_NODE)
        self.closers.append(client.close)
        return client

    async def joined(self):
        """A client that has said something, and its name here."""
        client = self.client()
        client.send(Heartbeat())
        known = len(self.events)
        await self.until(lambda: len(self.events) > known)
        return client, self.events[-1][0]

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_events(self, *events):
        await self.until(lambda: len(self.events) >= len(events))
        assert self.events == list(events)


@pytest.fixture
async def node(tmp_path):
    node = Node(prepare_runtime_directory(tmp_path / "run") / "worker.sock")
    yield node
    for closer in reversed(node.closers):
        closer()


def closed(room):
    return RoomClosed(room=room, generation=1, rank=R0, quiet=True)


async def told(client, count):
    """Messages of a client, while the loop sends what the kernel did not take."""
    return [await asyncio.to_thread(client.receive, WAIT_S) for _ in range(count)]


async def test_both_ends_talk_in_order(node):
    client = node.client()
    for room in range(500):
        client.send(closed(room))
        await asyncio.sleep(0)
    await node.until(lambda: len(node.events) == 500)
    [name] = {name for name, _ in node.events}
    assert name == f"worker-{os.getpid()}.1"
    assert [message for _, message in node.events] == [closed(room) for room in range(500)]
    for room in range(500):
        node.server.send(name, CloseRoom(room=room, generation=1))
    assert [message.room for message in await told(client, 500)] == list(range(500))
    assert client.receive(0) is None
    assert client.receive(0.001) is None
    assert client.daemon == "node"


_LEAVING = """
import sys
from pathlib import Path
from kvbridge.control.local import LocalClient
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.messages import Heartbeat
client = LocalClient(Path(sys.argv[1]), NODE_TO_WORKER, WORKER_TO_NODE)
client.send(Heartbeat(), 20.0)
sys.stdin.readline()
client.close()
sys.stdin.read()
"""


@pytest.mark.parametrize("named_by", ["pidfd", "pid"])
async def test_the_end_of_a_process_is_told_apart_from_that_of_its_connection(node, named_by, monkeypatch):
    if named_by == "pid":  # as on a kernel before Linux 6.5, which answers an unknown option so
        monkeypatch.setattr(unix_sockets, "_SO_PEERPIDFD", 0x7FFF)
    node.follows = True
    command = [sys.executable, "-c", _LEAVING, str(node.path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)  # noqa: ASYNC220 - returns at once
    try:
        victim = f"worker-{child.pid}.1"
        await node.until(lambda: (victim, Heartbeat()) in node.events)
        assert (node.server.process(victim).pid, node.server.process(victim).followed) == (child.pid, True)
        child.stdin.write("leave\n")
        child.stdin.flush()
        await node.until(lambda: node.events[-1] == ("gone", victim))
        assert (child.poll(), node.pids) == (None, [child.pid])
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)
    await node.until_events((victim, Heartbeat()), ("gone", victim), ("ended", victim))


@pytest.mark.parametrize("ended", [True, False])
async def test_a_client_learns_that_its_daemon_has_ended_or_given_it_up(node, ended):
    """The client reads its earlier messages first. A daemon that lives serves its other clients on."""
    (client, name), (other, other_name) = await node.joined(), await node.joined()
    node.server.send(name, Shutdown())
    for _ in range(2):
        node.server.close() if ended else node.server.drop(name)
        await asyncio.sleep(0)
    why = "daemon has ended" if ended else "does not know this client"
    with pytest.raises(PeerError, match=why):
        client.send(Heartbeat())
    assert client.receive(0) == Shutdown()
    with pytest.raises(PeerError, match=why):
        client.receive(WAIT_S)
    assert client.daemon_ended is ended
    assert ("gone", name) not in node.events
    client.close()
    with pytest.raises(ConflictError, match="closed"):
        client.send(Heartbeat())
    if not ended:
        node.server.send(other_name, Shutdown())
        assert other.receive(WAIT_S) == Shutdown()


def sent_until(error, send):
    """How many messages were sent before one was refused."""
    for number in range(100_000):
        try:
            send(number)
        except error:
            return number
    raise AssertionError("nothing was refused")


async def test_neither_end_waits_for_one_that_does_not_read(node):
    """Messages wait whole in bounded memory; a message too many is refused whole, and the others arrive."""
    client, name = await node.joined()
    much = WorkerFailed(rank=R0, code="c", message="x" * 4_000)
    sent = sent_until(NotReadyError, lambda _: client.send(much, 0.0))
    node.events.clear()
    await asyncio.to_thread(client.send, Heartbeat(), WAIT_S)
    while node.events[-1:] != [(name, Heartbeat())]:
        assert client.receive(0) is None
        await asyncio.sleep(0)
    assert node.events == [(name, much)] * sent + [(name, Heartbeat())]

    big = (bytes(1 << 20), bytes(1 << 20))
    sent = sent_until(CapacityError, lambda number: node.server.send(name, ConnectPeer(peer=str(number), ranks=big)))
    assert [message.peer for message in await told(client, sent)] == list(map(str, range(sent)))


async def test_a_burst_of_small_messages_leaves_without_another_call_of_the_client(node):
    """An engine may post for many rooms in one step, and call nothing more for a long time."""
    client, _ = await node.joined()
    node.events.clear()
    for _ in range(500):
        client.send(Heartbeat())
    await node.until(lambda: len(node.events) == 500)


def raw(path):
    """A client that writes bytes."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


GOOD = framed(WORKER_TO_NODE.encode_body(Heartbeat()))


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (framed(b""), "malformed"),
        (framed(b"\xc1"), "malformed"),
        (framed(b"\x80"), "type"),
        (b"\x02\0\0\1\xc0", "version"),
        (b"\1\xff\xff\xff", "oversized"),
        (b"HTTP/1.1 200", "version"),
    ],
)
async def test_refusals_are_counted_and_end_a_connection_on_which_nothing_can_be_read_any_more(node, data, refused):
    name, ends = f"worker-{os.getpid()}.1", refused in {"version", "oversized"}
    with raw(node.path) as wire:
        wire.sendall(data + GOOD[:3])
        await node.until_events(("refused", refused), *[("gone", name)] * ends)
        if not ends:
            wire.sendall(GOOD[3:] + GOOD[:5])
    if not ends:
        await node.until_events(("refused", refused), (name, Heartbeat()), ("gone", name))
    await node.joined()


async def test_the_last_messages_of_a_client_are_read_though_it_is_found_dead_by_a_write(node):
    with raw(node.path) as wire:
        wire.sendall(GOOD)
        await node.until(lambda: node.events)
        [(name, _)] = node.events
        wire.sendall(GOOD * 3)
    for _ in range(3):
        node.server.send(name, Shutdown())
    await node.until_events(*[(name, Heartbeat())] * 4, ("gone", name))


async def test_a_defect_costs_one_message(node):
    def fail(_client, message):
        if message != Heartbeat():
            raise ZeroDivisionError

    found = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: found.append(context["exception"]))
    node.handler = fail
    with raw(node.path) as wire:
        wire.sendall(framed(WORKER_TO_NODE.encode_body(closed(1))) + GOOD)
        await node.until(lambda: len(node.events) == 2)
    assert [type(error) for error in found] == [ZeroDivisionError]


async def test_a_served_path_is_not_taken_over_and_a_dead_one_is(node, tmp_path):
    with pytest.raises(ConflictError, match="another process serves"):
        Node(node.path)
    left_behind = tmp_path / "run" / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left_behind))
    Node(left_behind).server.close()
    assert not left_behind.exists(), "a socket that is left looks like a daemon"
    node.path.unlink()  # by hand, and another daemon is started there
    other = Node(node.path)
    node.server.close()
    assert node.path.exists()
    other.server.close()
    assert not node.path.exists()


async def test_the_runtime_directory_is_private(tmp_path):
    made = prepare_runtime_directory(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    for mode, group in ((0o750, None), (0o705, os.getgid())):
        made.chmod(mode)
        with pytest.raises(ConfigError, match=f"run: chmod 700 {made}"):
            prepare_runtime_directory(made, group)
    made.chmod(0o700)
    prepare_runtime_directory(made, os.getgid())
    assert made.stat().st_mode & 0o777 == 0o750
    (tmp_path / "link").symlink_to(made)
    for path, why in ((tmp_path / "link", "not a directory of this user"), (Path("/dev/null/run"), "cannot be made")):
        with pytest.raises(ConfigError, match=why):
            prepare_runtime_directory(path)


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
        LocalClient(folder / "worker.sock", NODE_TO_WORKER, WORKER_TO_NODE)
