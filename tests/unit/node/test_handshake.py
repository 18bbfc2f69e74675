"""How a prefill node meets decode nodes: which ones are let in, in which order messages are handled, and when a node is gone."""

from typing import Any

import pytest

from kvbridge.core.errors import UnauthorizedError
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.core.wire import messages
from kvbridge.core.wire.codec import pack_rank
from kvbridge.core.wire.worker_messages import ConnectPeer, DisconnectPeer, PathsChanged, PeerConnected
from kvbridge.node.prefill import decode_nodes
from kvbridge.node.prefill.decode_nodes import ClaimedName, DecodeNodes, check_name
from kvbridge.telemetry.facts import PathLost, PathsFound, PeerAccepted, PeerFact, PeerLost, PeerRejected
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import (
    DECODE,
    GEOMETRY,
    PREFILL,
    R0,
    R1,
    FakeWorkers,
    RecordedEvents,
    describe_decode,
    manifest,
    pick,
    run_inspection,
    welcome_of,
)

NEXT_LIFE = "dddd000000000002"

ONE, TWO = ModelIdentity(name="m", revision="1"), ModelIdentity(name="m", revision="2")

NONE = messages.Features()


class PrefillSide:
    def __init__(self, **about) -> None:
        self.events = RecordedEvents()
        self.workers = FakeWorkers(R0, R1)
        self.clock = ManualClock()
        self.later: list[tuple[Any, Any]] | None = None
        """Inspections that have not ended; None: each ends at once."""
        self.delivered: list[object] = []
        self.messages: list[tuple[object, object]] = []
        self.gone: list[tuple[str, str]] = []
        self.key = ""
        introduction = welcome_of(tp_size=2, ranks=(R0, R1), **about)
        self.nodes = DecodeNodes(introduction, GEOMETRY, self.workers, self, self.events, check_s=20, clock=self.clock)
        self.nodes.rooms = self

    def send(self, peer: str, message: object) -> None:
        self.messages.append((peer, message))

    def key_of(self, peer: str) -> str:
        return self.key

    def names_of(self, key: str) -> frozenset[str]:
        return frozenset()

    def hear(self, peer: str, message: object) -> None:
        self.delivered.append(message)

    def peer_gone(self, peer: str, reason: str) -> None:
        self.gone.append((peer, reason))

    def inspect(self, work, ended) -> None:
        if self.later is None:
            run_inspection(work, ended)
        else:
            self.later.append((work, ended))

    def end_inspection(self) -> None:
        run_inspection(*self.later.pop(0))

    def hello(self, peer: str = DECODE, *, key: str = "", features: messages.Features = NONE, **fields) -> None:
        self.key = key
        self.nodes.received(peer, messages.Hello(node=describe_decode(peer, **fields), features=features))

    def connected(self, rank=R0, peer: str = DECODE, **fields) -> None:
        self.nodes.worker_connected(PeerConnected(rank=rank, peer=peer, transports=("local",), **fields))

    def introduce(self) -> None:
        self.hello()
        self.connected(R0)
        self.connected(R1)

    @property
    def rejected(self) -> str:
        return pick(self.messages, messages.Rejected)[-1].code


def test_a_node_is_welcomed_once_every_worker_can_write_to_it():
    side = PrefillSide()
    side.hello()
    side.connected(R0)
    side.hello()
    assert side.messages == []
    assert side.nodes.peers()[0].connecting == ("pp0.tp1",)
    side.connected(R1)
    [welcome] = pick(side.messages, messages.Welcome, DECODE)
    assert (welcome.instance, welcome.node, welcome.incarnation, welcome.ranks) == ("prefill", "p0", PREFILL, (R0, R1))
    side.hello()
    assert len(pick(side.messages, messages.Welcome)) == 2
    assert len(pick(side.workers.messages, ConnectPeer)) == 2
    assert side.nodes.peers()[0].transports == {"pp0.tp0": ("local",), "pp0.tp1": ("local",)}


def test_a_worker_that_is_starting_gets_one_order_once_it_is_ready():
    """It would answer an earlier order, which a later one has replaced, with an error."""
    side = PrefillSide()
    side.workers.starting = {R1}
    side.hello()
    side.connected(R0)
    side.workers.starting = set()
    side.nodes.worker_ready(R1)
    assert len(pick(side.workers.messages, ConnectPeer)) == 2
    assert side.messages == []
    side.connected(R1)
    assert len(pick(side.messages, messages.Welcome)) == 1


OTHER_MANIFEST = pack_rank(messages.RankDescription(manifest=manifest(preset("tiny-v4")), endpoints=()))


@pytest.mark.parametrize(
    ("ours", "fields", "code", "text"),
    [
        (None, {"geometry": preset("tiny-v4")}, "fingerprint_mismatch", "hold different models"),
        (None, {"role": Role.PREFILL}, "invalid_input", "must come from a decode node"),
        (None, {"ranks": ()}, "invalid_input", "no rank"),
        (None, {"ranks": (OTHER_MANIFEST,)}, "fingerprint_mismatch", "manifest has fingerprint"),
        (ONE, {"model_identity": TWO}, "fingerprint_mismatch", f"the decode side holds {TWO}"),
        (None, {"model_identity": TWO}, "fingerprint_mismatch", f"the decode side holds {TWO}"),
        (ONE, {"model_identity": ONE}, "", ""),
        (ONE, {"model_identity": None}, "", ""),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(ours, fields, code, text):
    side = PrefillSide(model_identity=ours)
    side.hello(**fields)
    assert [(one.code, text in one.message) for one in pick(side.messages, messages.Rejected, DECODE)] == [
        (code, True)
    ] * bool(code)
    assert bool(side.nodes.known()) is bool(side.workers.messages) is (not code)


def test_a_new_life_ends_the_old_one_and_a_worker_that_cannot_connect_rejects_a_node():
    side = PrefillSide()
    side.introduce()
    side.nodes.gone("nobody", "silent")
    side.hello(NEXT_LIFE)
    assert side.gone == [(DECODE, f"it was restarted (now {NEXT_LIFE})")]
    assert len(pick(side.workers.messages, DisconnectPeer)) == 2
    assert side.nodes.known() == {NEXT_LIFE}
    reason = "no route " * 400
    side.connected(R0, NEXT_LIFE, error_code="transport_failed", error=reason)
    side.connected(R1, NEXT_LIFE)
    assert (side.rejected, len(pick(side.messages, messages.Welcome)), len(side.nodes.known())) == (
        "transport_failed",
        1,
        0,
    )
    assert len(pick(side.workers.messages, DisconnectPeer)) == 4
    assert side.events.of(PeerFact) == [
        PeerAccepted(peer=DECODE, name="decode/d0", features=()),
        PeerLost(peer=DECODE, reason=f"it was restarted (now {NEXT_LIFE})"),
        PeerRejected(peer=NEXT_LIFE, code="transport_failed", reason=reason),
    ]


@pytest.mark.parametrize("at_once", [True, False])
def test_nobody_takes_a_name_over_from_another_key(at_once):
    """Nor from a key that has taken it while his introduction was checked."""
    side = PrefillSide()
    side.later = None if at_once else []
    side.hello(key="its key")
    side.hello(NEXT_LIFE, key="another key")
    while side.later:
        side.end_inspection()
    assert (side.rejected, side.nodes.known(), side.gone) == ("unauthorized", {DECODE}, [])
    side.later = None
    side.hello(NEXT_LIFE, key="its key")
    assert side.nodes.known() == {NEXT_LIFE}


KNOWN_NAMES = [ClaimedName("decode-0", "node-0", "old key")]
ANY, DECODE_0, DECODE_1 = frozenset(), frozenset({"decode-0"}), frozenset({"decode-1"})


@pytest.mark.parametrize(
    ("key", "bound_to", "node", "refused"),
    [
        ("old key", DECODE_0, "node-0", ""),
        ("new key", ANY, "node-1", ""),
        ("new key", DECODE_0, "node-0", ""),
        ("new key", ANY, "node-0", "known here under another key"),
        ("old key", DECODE_1, "node-0", "speaks for instance decode-1, not for decode-0"),
        ("new key", DECODE_1, "node-1", "speaks for instance decode-1, not for decode-0"),
    ],
)
def test_a_name_belongs_to_its_key(key, bound_to, node, refused):
    claim = ClaimedName("decode-0", node, key)
    if not refused:
        check_name(claim, bound_to=bound_to, present=KNOWN_NAMES)
        return
    with pytest.raises(UnauthorizedError, match=refused):
        check_name(claim, bound_to=bound_to, present=KNOWN_NAMES)


def test_what_reaches_a_decode_node_is_shown_as_it_changes():
    side = PrefillSide()
    side.introduce()
    side.nodes.paths_changed(PathsChanged(rank=R0, peer=DECODE, transports=("local",), standby=("nixl",)))
    lost = PathsChanged(rank=R0, peer=DECODE, transports=("nixl",), lost="local", error="cable")
    side.nodes.paths_changed(lost)
    [shown] = side.nodes.peers()
    assert (shown.transports["pp0.tp0"], shown.standby["pp0.tp0"]) == (("nixl",), ())
    assert side.nodes.transport(DECODE, R0) == "nixl"
    [found, fact] = [fact for fact in side.events.facts if isinstance(fact, PathsFound | PathLost)]
    assert found == PathsFound(peer=DECODE, rank=R0, transports=("local",), standby=("nixl",))
    assert fact == PathLost(peer=DECODE, rank=R0, transport="local", transports=("nixl",), reason="cable")
    side.nodes.paths_changed(lost.model_copy(update={"peer": "unknown"}))


def slow() -> PrefillSide:
    """A prefill node that knows DECODE and checks what it says anew, which ends when the test says so."""
    side = PrefillSide()
    side.introduce()
    side.workers.messages.clear()
    side.later = []
    side.hello(endpoint=b"2")
    return side


def offer(room: int = 1, payload_bytes: int = 0) -> messages.Offer:
    tables = (messages.WireTable(space=IndexSpace.FULL, ids=bytes(payload_bytes)),)
    return messages.Offer(room=room, generation=1, prompt_tokens=1, tables=tables)


def test_what_a_peer_said_is_forgotten_with_it():
    side = slow()
    side.nodes.received(DECODE, offer())
    side.nodes.gone(DECODE, "it begins anew")
    side.end_inspection()
    assert side.delivered == []
    assert pick(side.workers.messages, ConnectPeer) == []


@pytest.mark.parametrize(
    ("defect", "code", "text"),
    [(None, "deadline", "timeouts.handshake_s"), (ZeroDivisionError("ours"), "internal", "checked: ZeroDivisionError")],
)
def test_an_introduction_that_is_not_checked_in_time_or_by_a_defect_is_rejected(defect, code, text):
    side = slow()
    side.nodes.received(DECODE, offer())
    side.clock.advance(21)
    if defect is None:
        side.end_inspection()
    else:
        side.later.pop()[1](defect)
    [rejected] = pick(side.messages, messages.Rejected, DECODE)
    assert (rejected.code, text in rejected.message) == (code, True)
    assert pick(side.messages, messages.Failed, DECODE)[0].code == "not_ready", (
        "an offer of a stranger is answered, too"
    )


@pytest.mark.parametrize(("count", "payload_bytes"), [(decode_nodes.MOST_MESSAGES, 0), (64, 256 * 1024)])
def test_what_waits_is_bounded(count, payload_bytes):
    side = slow()
    for room in range(count + 1):
        side.nodes.received(DECODE, offer(room + 1, payload_bytes))
        if pick(side.messages, messages.Rejected):
            break
    assert side.rejected == "capacity"
    assert not side.nodes.known()
    side.end_inspection()
    assert side.delivered == []


def test_the_bytes_of_one_peer_count_once_towards_what_all_may_keep(monkeypatch):
    monkeypatch.setattr(decode_nodes, "MOST_BYTES", 200 * decode_nodes.MESSAGE_BYTES)
    side = slow()
    for room in range(1, 151):
        side.nodes.received(DECODE, offer(room))
    assert not pick(side.messages, messages.Rejected)


def test_an_older_decode_node_is_welcomed_with_what_both_have(monkeypatch):
    side = PrefillSide()
    side.introduce()
    assert pick(side.messages, messages.Welcome, DECODE)[0].features == messages.FEATURES
    assert side.nodes.peers()[0].features == ()
    monkeypatch.setattr(decode_nodes, "FEATURES", messages.Features(has=("digests",)))
    side.hello(features=messages.Features(has=("digests", "later")))
    assert side.nodes.peers()[0].features == ("digests",)


def test_what_is_kept_of_a_peer_is_what_it_has_said_in_bytes():
    """Not the thousands of objects that it becomes: those are made for a check, and let go."""
    ranks = [
        pack_rank(
            messages.RankDescription(manifest=manifest(rank=Rank(pp=0, tp=tp), tp_size=4, base=tp << 40), endpoints=())
        )
        for tp in range(4)
    ]
    side = PrefillSide()
    side.hello(ranks=tuple(ranks * 64))
    [known] = side.nodes._known.values()
    assert known.ranks == tuple(ranks * 64)
    assert all(order.ranks == tuple(ranks * 64) for order in pick(side.workers.messages, ConnectPeer))
