"""Running daemons among hostile peers: floods of nonsense, rooms of others, borrowed names.

The peers here are authenticated: they may connect, and some were welcomed. They may not end, complete or delay rooms of others,
kill a process, or make a process grow. Every test ends with the question of `serves_afterwards`: does the next good room cross?
"""

import contextlib
import random
import socket
import time
from collections.abc import Callable

import psutil
import pytest
import zmq

from kvbridge.control.local import framed
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import REQUEST_SPACES, IndexSpace
from kvbridge.core.plan.operations import Amount
from kvbridge.core.wire import messages
from kvbridge.core.wire.codec import ENGINE_TO_NODE, PEER, WORKER_TO_NODE, MessageCodec, pack_rank, unpack_rank
from tests.fuzz.decoders import MESSAGES
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, ends, frames_refused, http, metric, refuses, report
from tests.helpers.raw_peers import WAIT_S, RawDecode, RawPeer, raw_prefill
from tests.integration.endpoints.rooms import RANK, TOKENS, admitted, give_up, offered_to, welcomed

FLOOD_FRAMES = 4_000
BUSY_S = 10.0
"""Processor seconds of a daemon: many times what an introduction takes, and far below what a look at each page takes."""
GROWTH_BYTES = 96 << 20
"""More than a process grows by when it meets each kind of message for the first time, and less than a flood brings."""


def interleaved(real: messages.NodeDescription) -> tuple[bytes, ...]:
    """Pairs of regions with endless pages that never touch: to look at each page would take minutes."""
    rank = unpack_rank(real.ranks[0])
    on_device = [region for region in rank.manifest.regions if region.space is not IndexSpace.HOST]
    regions, pages = [], 2**21
    for number, region in enumerate(on_device):
        pair, second = divmod(number, 2)
        form = {"extent_addresses": ((pair + 1) << 40 | second << 20,), "page_count": pages, "pages_per_extent": pages}
        regions.append(region.model_copy(update=form | {"page_stride_bytes": (4 + 4 * second) << 20}))
    manifest = rank.manifest.model_copy(update={"regions": tuple(regions)})
    return (pack_rank(rank.model_copy(update={"manifest": manifest})),)


def many_ranks(real: messages.NodeDescription) -> tuple[bytes, ...]:
    """As many ranks as a node may have, each with as many extents as fit, and no way to reach any."""
    rank = unpack_rank(real.ranks[0])
    extents = 9_000 // 8 // len(rank.manifest.regions)
    regions = []
    for number, region in enumerate(rank.manifest.regions):
        addresses = tuple((number + 1) << 40 | extent << 20 for extent in range(extents))
        form = {"extent_addresses": addresses, "page_count": extents, "pages_per_extent": 1}
        regions.append(region.model_copy(update=form))
    manifest = rank.manifest.model_copy(update={"regions": tuple(regions)})
    return (pack_rank(rank.model_copy(update={"manifest": manifest, "endpoints": ()})),) * messages.MAX_NODE_RANKS


@pytest.mark.parametrize(("ranks", "code"), [(interleaved, "invalid_input"), (many_ranks, "transport_failed")])
def test_no_introduction_holds_the_daemon_up(live, raw, real, ranks, code):
    hello = raw.introduction(real, instance="hostile", ranks=ranks(real))
    before_s = processor_s(live.prefill)
    raw.send(hello)
    assert raw.take(messages.Rejected).code == code
    assert processor_s(live.prefill) - before_s < BUSY_S


def processor_s(daemon: DaemonProcess) -> float:
    assert daemon.process is not None
    used = psutil.Process(daemon.process.pid).cpu_times()
    return used.user + used.system


@pytest.mark.parametrize("who", ["a stranger", "a welcomed node"])
def test_an_abort_ends_no_room_of_others(live: LiveCluster, met: RawDecode, who: str) -> None:
    """Neither one that nobody has offered yet, nor one that another node has. A stranger's is counted."""
    before = frames_refused(live.prefill, "unmet")
    with RawDecode(live.control) as stranger:
        peer = stranger if who == "a stranger" else met
        waiting, running = admitted(live), live.pair(TOKENS)
        eventually("offered", lambda: report(live.prefill, running)["state"] == "offered")
        for room in (waiting, running):
            peer.send(messages.Abort(room=room, generation=1, code="aborted", message="mine"))
            peer.take(messages.Drained, room)  # the truth: we do not write to this peer's pages
    assert frames_refused(live.prefill, "unmet") - before == (2 if who == "a stranger" else 0)
    assert report(live.prefill, waiting)["state"] == "admitted"
    live.cross(TOKENS, running)
    http("DELETE", live.prefill, f"/v1/requests/{waiting}")


def test_a_prefill_node_ends_no_room_that_it_does_not_write(live: LiveCluster) -> None:
    with raw_prefill() as writer, raw_prefill() as other:
        others, room = welcomed(live, other), welcomed(live, writer)
        strange = metric(live.decode, "kvbridge_room_messages_refused_total", code="foreign_done")
        other.send(messages.Failed(room=room, generation=1, code="x", message="not yours"))
        other.send(messages.Drained(room=room, generation=1))
        other.send(messages.Done(room=room, generation=1, writer=RANK, amounts={}, phases_s={}))
        eventually(
            "the Done of another refused",
            lambda: metric(live.decode, "kvbridge_room_messages_refused_total", code="foreign_done") > strange,
        )
        assert report(live.decode, room)["state"] == "offered"
        give_up(live, writer, room)
        give_up(live, other, others)


def test_a_prefill_node_does_not_speak_before_its_welcome_nor_in_another_name(live: LiveCluster) -> None:
    with raw_prefill() as writer, raw_prefill() as other:
        room, waiting = welcomed(live, writer), offered_to(live, other)
        other.take(messages.Hello)
        facts = {"instance": "raw", "node": "n", "incarnation": writer.incarnation, "pp_size": 1, "tp_size": 1}
        with refuses(live.decode, "unmet", 3):
            other.send(messages.Drained(room=room, generation=1))
            other.send(messages.Welcome(**facts, ranks=(RANK,)))
            other.send(messages.Done(room=room, generation=1, writer=RANK, amounts={}, phases_s={}))
        assert report(live.decode, room)["state"] == "offered"
        give_up(live, writer, room)
        ends(live.decode, waiting, "failed", "deadline")


def test_sums_that_nobody_can_have_sent_are_refused_on_arrival(live: LiveCluster) -> None:
    with raw_prefill() as peer:
        room = welcomed(live, peer)
        done = messages.Done(room=room, generation=1, writer=RANK, amounts={}, phases_s={})
        with refuses(live.decode, "field"):
            peer.send(done.model_copy(update={"amounts": {ComponentKind("c4_kv"): Amount(lane_rows=2**50 + 1)}}))
        peer.sent -= 1
        give_up(live, peer, room)


def spoiled(source: random.Random, data: bytes) -> bytes:
    """A frame with a few things wrong."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 5))):
        place = source.randrange(len(changed))
        match source.randrange(4):
            case 0:
                changed[place] = source.randrange(256)
            case 1:
                changed[place:place] = source.randbytes(source.randrange(1, 9))
            case 2:
                del changed[place : place + source.randrange(1, 17)]
            case 3:
                changed = changed[:place] + changed[max(0, place - 40) :]
        if not changed:
            return b"\x00"
    return bytes(changed)


class Watch:
    """A daemon's process and counters before a flood, and the verdict after it."""

    def __init__(self, live: LiveCluster, daemon: DaemonProcess) -> None:
        assert daemon.process is not None
        self._live, self._daemon = live, daemon
        self._processes = [psutil.Process(daemon.process.pid)]
        self._processes += self._processes[0].children()
        self._before = [process.memory_info().rss for process in self._processes]
        self._refused = self._count()

    def _count(self) -> float:
        kinds = ("malformed", "envelope", "type", "field", "stale", "version", "wrong_direction", "unmet", "protocol")
        return sum(frames_refused(self._daemon, kind) for kind in kinds)

    def judge(self) -> None:
        """Everybody lives, nobody has grown, what was wrong was counted, nothing escaped to the loop."""
        assert http("GET", self._daemon, "/health").status_code == 200
        assert all(process.is_running() for process in self._processes)
        grown = [p.memory_info().rss - before for p, before in zip(self._processes, self._before, strict=True)]
        assert max(grown) < GROWTH_BYTES, grown
        assert self._count() > self._refused
        assert "Traceback" not in self._daemon.log_path.read_text()
        self._live.serves()


def flood(wire: zmq.Socket[bytes], send: Callable[[bytes], object], make: Callable[[], bytes]) -> None:
    """Send without a wait; what the other side does not take is dropped here."""
    limit_ms = wire.getsockopt(zmq.SNDTIMEO)
    wire.setsockopt(zmq.SNDTIMEO, 0)
    for _ in range(FLOOD_FRAMES):
        try:
            send(make())
        except zmq.Again:
            time.sleep(0.001)
    wire.setsockopt(zmq.SNDTIMEO, limit_ms)


def in_order(peer: RawPeer, source: random.Random, room: int) -> bytes:
    """A frame that belongs to the peer's own conversation, with a body that may be anything, right or spoiled."""
    body = source.choice(MESSAGES[PEER])
    if "room" in type(body).model_fields and source.random() < 0.5:
        body = body.model_copy(update={"room": room, "generation": 1})
    peer.sent += source.random() < 0.9
    acknowledged = source.choice((peer.got, peer.got + 1, 10**6))
    data = peer.frame(body, sequence=peer.sent + source.choice((0, 0, 0, 1, 3)), acknowledged=acknowledged)
    return spoiled(source, data) if source.random() < 0.3 else data


def test_a_flood_from_a_welcomed_decode_node(live: LiveCluster, met: RawDecode) -> None:
    source, watch, room = random.Random(1), Watch(live, live.prefill), live.pair(TOKENS)
    flood(met.socket, met.put, lambda: in_order(met, source, room))
    live.cross(TOKENS, room)
    watch.judge()


def test_a_flood_from_a_prefill_node(live: LiveCluster) -> None:
    source, watch = random.Random(3), Watch(live, live.decode)
    with raw_prefill() as peer:
        room, own = live.pair(TOKENS), offered_to(live, peer)
        peer.take(messages.Hello)
        peer.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        flood(peer.socket, peer.put, lambda: in_order(peer, source, source.choice((own, room))))
    live.cross(TOKENS, room)
    http("DELETE", live.decode, f"/v1/requests/{own}")
    watch.judge()


@pytest.mark.parametrize(("name", "codec"), [("engine.sock", ENGINE_TO_NODE), ("worker.sock", WORKER_TO_NODE)])
def test_a_flood_on_a_socket_of_the_node(live: LiveCluster, name: str, codec: MessageCodec) -> None:
    """From a process of the same user, which is trusted not to lie, but may be broken."""
    source, watch = random.Random(4), Watch(live, live.prefill)
    # Not WorkerHello: whoever says it in the name of a rank takes its place, and so it is meant to be.
    bodies = [body for body in MESSAGES[codec] if getattr(body, "type", "") != "worker_hello"]
    frames = [framed(codec.encode_body(body)) for body in bodies]
    connections = []
    for _ in range(FLOOD_FRAMES // 100):  # a frame whose head is spoiled ends its connection
        connections.append(socket.socket(socket.AF_UNIX))
        connections[-1].connect(str(live.prefill.runtime_dir / name))
        connections[-1].settimeout(WAIT_S)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                whole = source.choice(frames)
                connections[-1].sendall(whole[:4] + spoiled(source, whole[4:])[: len(whole) - 4].ljust(len(whole) - 4))
            connections[-1].sendall(spoiled(source, whole))
    for each in connections:
        each.close()
    watch.judge()


def test_messages_before_their_turn_are_dropped(live: LiveCluster, met: RawDecode) -> None:
    """A node that leaves its first message out, and sends megabytes behind it: they are dropped, not kept."""
    watch = Watch(live, live.prefill)
    tables = tuple({"space": space, "ids": bytes(1 << 18)} for space in REQUEST_SPACES)
    offer = messages.Offer.model_validate({"room": 1, "generation": 1, "prompt_tokens": 1, "tables": tables})
    before = frames_refused(live.prefill, "out_of_order")
    for number in range(2, 300):
        met.put(met.frame(offer, sequence=met.sent + number))
    eventually("dropped", lambda: frames_refused(live.prefill, "out_of_order") - before >= 100)
    with refuses(live.prefill, "malformed"):
        met.put(b"\xc1")
    watch.judge()
