from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    FeatureError,
    InvalidInputError,
    UnauthorizedError,
)
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.core.wire.features import PEER_FEATURES, Features
from kvbridge.core.wire.messages import (
    Heartbeat,
    Hello,
    NodeDescription,
    Offer,
    RankDescription,
    Rejected,
    TransportEndpoint,
    Welcome,
    WireTable,
)
from kvbridge.core.wire.packed_ranks import pack_rank, unpack_rank
from kvbridge.core.wire.worker_messages import ConnectPeer, DisconnectPeer, PathsChanged, PeerConnected
from kvbridge.node.handshake import decode_nodes, inspections, prefill_nodes
from kvbridge.node.handshake.decode_nodes import DecodeNodes
from kvbridge.node.handshake.inspections import Inspections
from kvbridge.node.handshake.introduction import ClaimedName, Self, check_name
from kvbridge.node.handshake.prefill_nodes import PrefillNodes
from kvbridge.telemetry.events import PeerAccepted, PeerFact, PeerLost, PeerRejected
from kvbridge.telemetry.path_events import PathLost, PathsFound
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import (
    ADDRESS,
    DECODE,
    GEOMETRY,
    OTHER_ADDRESS,
    PREFILL,
    R0,
    R1,
    FakeWorkers,
    RecordedEvents,
    manifest,
    pick,
    run_inspection,
)

NEXT_LIFE = "dddd000000000002"


def description(incarnation: str = DECODE, endpoint: bytes = b"1", **fields) -> NodeDescription:
    rank = RankDescription(manifest=manifest(), endpoints=(TransportEndpoint(transport="local", data=endpoint),))
    fields = {"role": Role.DECODE, "geometry": GEOMETRY, "ranks": (pack_rank(rank),)} | fields
    return NodeDescription(instance="decode", node="d0", incarnation=incarnation, **fields)


def welcome(incarnation: str = PREFILL, node: str = "p0", **fields) -> Welcome:
    fields = {"tp_size": 1, "ranks": (R0,), "features": PEER_FEATURES} | fields
    return Welcome(instance="prefill", node=node, incarnation=incarnation, pp_size=1, **fields)


def handshakes(events: RecordedEvents) -> list[PeerFact]:
    return events.of(PeerFact)


class PrefillSide:
    def __init__(self, **about) -> None:
        self.events = RecordedEvents()
        self.workers = FakeWorkers(R0, R1)
        self.clock = ManualClock()
        self.later: list[tuple[Any, Any]] | None = None
        """Inspections that have not ended; None: each ends at once."""
        self.delivered: list[tuple[str, object]] = []
        self.messages: list[tuple[object, object]] = []
        self.gone: list[tuple[str, str]] = []
        inspections = Inspections(self.inspect, limit_s=20, clock=self.clock)
        inspections.deliver_to(lambda *said: self.delivered.append(said))
        self.nodes = DecodeNodes(
            Self(welcome(tp_size=2, ranks=(R0, R1), **about), GEOMETRY),
            self.workers,
            inspections=inspections,
            events=self.events,
            send=lambda peer, message: self.messages.append((peer, message)),
        )
        self.nodes.watch(self.peer_gone)

    def peer_gone(self, peer: str, reason: str) -> None:
        self.gone.append((peer, reason))

    def inspect(self, work, ended) -> None:
        if self.later is None:
            run_inspection(work, ended)
        else:
            self.later.append((work, ended))

    def hello(self, peer: str = DECODE, **fields) -> None:
        features = fields.pop("features", Features())
        self.nodes.hello(peer, Hello(node=description(peer, **fields), features=features))

    def connected(self, rank=R0, peer: str = DECODE, **fields) -> None:
        self.nodes.worker_connected(PeerConnected(rank=rank, peer=peer, transports=("local",), **fields))

    def introduce(self) -> None:
        self.hello()
        self.connected(R0)
        self.connected(R1)


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"geometry": preset("tiny-v4")}, "fingerprint_mismatch", "hold different models"),
        ({"role": Role.PREFILL}, "invalid_input", "must come from a decode node"),
        ({"ranks": ()}, "invalid_input", "no rank"),
        (
            {"ranks": (pack_rank(RankDescription(manifest=manifest(preset("tiny-v4")), endpoints=())),)},
            "fingerprint_mismatch",
            "manifest has fingerprint",
        ),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(fields, code, text):
    side = PrefillSide()
    side.hello(**fields)
    [rejected] = pick(side.messages, Rejected, DECODE)
    assert rejected.code == code
    assert text in rejected.message
    assert not side.nodes.known()
    assert side.workers.messages == []


def test_nobody_introduces_himself_under_another_name():
    side = PrefillSide()
    side.nodes.hello("somebody", Hello(node=description()))
    assert pick(side.messages, Rejected, "somebody")


def test_a_worker_that_cannot_connect_rejects_the_node():
    side = PrefillSide()
    side.hello()
    side.connected(R0, error_code="transport_failed", error="no route " * 400)
    assert pick(side.messages, Rejected)[0].code == "transport_failed"
    assert len(pick(side.workers.messages, DisconnectPeer)) == 2
    side.connected(R1)
    assert pick(side.messages, Welcome) == []
    assert not side.nodes.known()


def test_a_new_life_ends_the_old_one():
    side = PrefillSide()
    side.introduce()
    side.hello(NEXT_LIFE)
    assert side.gone == [(DECODE, f"it was restarted (now {NEXT_LIFE})")]
    assert len(pick(side.workers.messages, DisconnectPeer)) == 2
    assert side.nodes.known() == {NEXT_LIFE}


def test_a_worker_that_is_back_is_connected_to_everybody():
    side = PrefillSide()
    side.introduce()
    side.workers.messages.clear()
    side.nodes.worker_ready(R1)
    assert [rank for rank, _ in side.workers.messages] == [R1]
    side.connected(R1)
    assert len(pick(side.messages, Welcome)) == 2
    side.nodes.worker_ready(R1)
    side.connected(R1, error_code="transport_failed", error="gone")
    assert side.gone[0][0] == DECODE
    assert pick(side.messages, Rejected)


def test_a_prefill_node_tells_of_its_handshakes_as_facts():
    side = PrefillSide()
    side.introduce()
    side.nodes.gone("nobody", "silent")
    side.hello(NEXT_LIFE)
    side.connected(R0, NEXT_LIFE, error_code="transport_failed", error="no way there")
    accepted, restarted, rejected = handshakes(side.events)
    assert accepted == PeerAccepted(peer=DECODE, name="decode/d0", features=())
    assert restarted == PeerLost(peer=DECODE, reason=f"it was restarted (now {NEXT_LIFE})")
    assert rejected == PeerRejected(peer=NEXT_LIFE, code="transport_failed", reason="no way there")


def test_a_decode_node_tells_of_its_handshakes_as_facts():
    side = DecodeSide()
    side.introduce()
    side.nodes.lost(ADDRESS, "silent")
    side.nodes.known_node(ADDRESS)
    side.nodes.rejected(ADDRESS, Rejected(code="fingerprint_mismatch", message="another model"))
    side.nodes.known_node(ADDRESS)
    side.welcome("aaaa000000000002")
    side.welcome("aaaa000000000003")
    accepted, lost, rejected, *others = handshakes(side.events)
    assert accepted == PeerAccepted(peer=PREFILL, name="prefill/p0", features=())
    assert lost == PeerLost(peer=PREFILL, reason="silent")
    assert (rejected.peer, rejected.code) == (ADDRESS.endpoint, "fingerprint_mismatch")
    assert "rejected us: another model" in rejected.reason
    assert [(type(fact), fact.peer) for fact in others] == [
        (PeerAccepted, "aaaa000000000002"),
        (PeerLost, "aaaa000000000002"),
        (PeerAccepted, "aaaa000000000003"),
    ]


def test_nobody_takes_a_name_over_from_another_key():
    side = PrefillSide()
    side.nodes.hello(DECODE, Hello(node=description()), key="its key")
    side.nodes.hello(NEXT_LIFE, Hello(node=description(NEXT_LIFE)), key="another key")
    [rejected] = pick(side.messages, Rejected, NEXT_LIFE)
    assert rejected.code == "unauthorized"
    assert (side.nodes.known(), side.gone) == ({DECODE}, [])
    side.nodes.hello(NEXT_LIFE, Hello(node=description(NEXT_LIFE)), key="its key")
    assert side.nodes.known() == {NEXT_LIFE}


# ------------------------------------------------------------------------------------------- inspections


def slow() -> PrefillSide:
    """A prefill node whose checks end when the test says so; DECODE is known to it."""
    side = PrefillSide()
    side.introduce()
    side.workers.messages.clear()
    side.later = []
    return side


def offer(room: int = 1, payload_bytes: int = 0) -> Offer:
    tables = (WireTable(space=IndexSpace.FULL, ids=bytes(payload_bytes)),)
    return Offer(room=room, generation=1, prompt_tokens=1, tables=tables)


def end_inspection(side: PrefillSide) -> None:
    run_inspection(*side.later.pop(0))


def test_an_introduction_behind_an_introduction_is_checked_in_its_turn():
    side = slow()

    def deliver(peer, message):
        side.delivered.append((peer, message))
        if isinstance(message, Hello):
            side.nodes.hello(peer, message)

    side.nodes._inspections._deliver = deliver
    side.hello(endpoint=b"2")
    side.nodes.holds(DECODE, Hello(node=description(endpoint=b"3")))
    side.nodes.holds(DECODE, offer())
    end_inspection(side)
    assert [type(message) for _, message in side.delivered] == [Hello]
    end_inspection(side)
    assert [type(message) for _, message in side.delivered] == [Hello, Offer]
    assert unpack_rank(pick(side.workers.messages, ConnectPeer, R0)[-1].ranks[0]).endpoints[0].data == b"3"


def test_what_a_peer_said_is_forgotten_with_it():
    side = slow()
    side.hello(endpoint=b"2")
    side.nodes.holds(DECODE, offer())
    side.nodes.gone(DECODE, "it begins anew")
    end_inspection(side)
    assert side.delivered == []
    assert pick(side.workers.messages, ConnectPeer) == []


def test_an_introduction_that_is_not_checked_in_time_is_rejected():
    side = slow()
    side.hello(endpoint=b"2")
    side.nodes.holds(DECODE, offer())
    side.clock.advance(21)
    end_inspection(side)
    [rejected] = pick(side.messages, Rejected, DECODE)
    assert rejected.code == "deadline"
    assert "timeouts.handshake_s" in rejected.message
    assert len(side.delivered) == 1, "an offer of a stranger is answered, too"


def test_a_defect_of_the_check_is_said_and_hides_nothing():
    side = slow()
    side.hello(endpoint=b"2")
    side.later.pop()[1](ZeroDivisionError("ours"))
    [rejected] = pick(side.messages, Rejected, DECODE)
    assert (rejected.code, rejected.message) == ("internal", "its introduction could not be checked: ZeroDivisionError")


def test_a_name_that_another_key_has_taken_meanwhile_is_refused():
    side = PrefillSide()
    side.later = []
    side.nodes.hello(DECODE, Hello(node=description()), key="its key")
    side.nodes.hello(NEXT_LIFE, Hello(node=description(NEXT_LIFE)), key="another key")
    end_inspection(side)
    end_inspection(side)
    assert side.nodes.known() == {DECODE}
    assert pick(side.messages, Rejected, NEXT_LIFE)[0].code == "unauthorized"


@pytest.mark.parametrize(("count", "payload_bytes"), [(inspections.MOST_MESSAGES, 0), (64, 256 * 1024)])
def test_what_waits_is_bounded(count, payload_bytes):
    side = slow()
    side.hello(endpoint=b"2")
    for room in range(count + 1):
        side.nodes.holds(DECODE, offer(room + 1, payload_bytes))
        if pick(side.messages, Rejected):
            break
    assert pick(side.messages, Rejected, DECODE)[0].code == "capacity"
    assert not side.nodes.known()
    end_inspection(side)
    assert side.delivered == []


def test_the_bytes_of_one_peer_count_once_towards_what_all_may_keep(monkeypatch):
    monkeypatch.setattr(inspections, "MOST_BYTES", 10 * inspections.MESSAGE_BYTES)
    held = Inspections(lambda _work, _ended: None, limit_s=20, clock=ManualClock())
    held.begin(DECODE, hello_of(0), lambda _look: None, lambda _error: None)
    for _ in range(9):
        held.hold(DECODE, Heartbeat())
    with pytest.raises(CapacityError, match="too much waits"):
        held.hold(DECODE, Heartbeat())


def test_messages_that_were_delivered_do_not_count_for_the_introduction_that_the_rest_waits_for(monkeypatch):
    monkeypatch.setattr(inspections, "MOST_BYTES", 6 * inspections.MESSAGE_BYTES)
    ends: list[Any] = []
    held = Inspections(lambda _work, ended: ends.append(ended), limit_s=20, clock=ManualClock())

    def deliver(peer: str, message: object) -> None:
        if isinstance(message, Hello):
            held.begin(peer, message, lambda _look: None, lambda _error: None)

    held.deliver_to(deliver)
    held.begin(DECODE, hello_of(0), lambda _look: None, lambda _error: None)
    for message in (Heartbeat(), Heartbeat(), hello_of(0), Heartbeat()):
        held.hold(DECODE, message)
    ends[0](None)
    for _ in range(4):
        held.hold(DECODE, Heartbeat())


def hello_of(payload_bytes: int) -> Hello:
    node = description()
    return Hello(node=node.model_copy(update={"ranks": (bytes(payload_bytes),) if payload_bytes else ()}))


def test_what_is_kept_of_a_peer_is_what_it_has_said_in_bytes():
    """Not the thousands of objects that it becomes: those are made for a check, and let go."""
    ranks = [
        pack_rank(RankDescription(manifest=manifest(rank=Rank(pp=0, tp=tp), tp_size=4, base=tp << 40), endpoints=()))
        for tp in range(4)
    ]
    side = PrefillSide()
    side.hello(ranks=tuple(ranks * 64))
    [known] = side.nodes._known.values()
    assert known.ranks == tuple(ranks * 64)
    assert all(order.ranks == tuple(ranks * 64) for order in pick(side.workers.messages, ConnectPeer))


# ------------------------------------------------------------------------------------------- decode side


class DecodeSide:
    def __init__(self, features: Features = PEER_FEATURES, **about) -> None:
        self.events = RecordedEvents()
        self.opened: list[object] = []
        self.closed: list[object] = []
        self.messages: list[tuple[object, object]] = []
        self.changes = 0
        self.gone: list[str] = []
        self.error: BridgeError | None = None
        self.nodes = PrefillNodes(
            describe=partial(description, **about),
            links=self,
            events=self.events,
            features=features,
        )
        self.nodes.watch(self)
        self.found_at_change: list[object] = []

    def open(self, address) -> None:
        if self.error is not None:
            raise self.error
        self.opened.append(address)

    def send(self, address, message) -> None:
        self.messages.append((address, message))

    def close(self, address) -> None:
        self.closed.append(address)

    def peer_gone(self, peer: str, reason: str) -> None:
        self.gone.append(peer)

    def nodes_changed(self) -> None:
        self.changes += 1
        try:
            self.found_at_change.append(self.nodes.known_node(ADDRESS))
        except BridgeError as error:
            self.found_at_change.append(error)

    def welcome(self, incarnation: str = PREFILL, node: str = "p0", address=ADDRESS, **fields) -> None:
        self.nodes.welcome(address, welcome(incarnation, node, **fields))

    def introduce(self) -> None:
        assert self.nodes.known_node(ADDRESS) is None
        self.welcome()

    @property
    def hellos(self) -> int:
        return len(pick(self.messages, Hello, ADDRESS))


def test_a_node_is_greeted_once_and_then_known():
    side = DecodeSide()
    assert side.nodes.known_node(ADDRESS) is None
    assert side.nodes.known_node(ADDRESS) is None
    assert (side.opened, side.hellos) == ([ADDRESS], 1)
    side.welcome()
    found = side.nodes.known_node(ADDRESS)
    assert found is not None
    assert (found.peer, found.name, found.ranks) == (PREFILL, "prefill/p0", (R0,))
    assert found.parallelism == ("prefill", 1, 1, ())
    assert side.changes == 1
    side.nodes.send(PREFILL, Heartbeat())
    side.nodes.send("nobody", Heartbeat())
    assert len(pick(side.messages, Heartbeat, ADDRESS)) == 1
    assert side.nodes.addresses() == [ADDRESS]
    assert side.nodes.peers()[0].incarnation == PREFILL


def test_a_node_that_takes_too_long_to_describe_says_so_to_the_room():
    side = DecodeSide()
    side.nodes._describe = lambda: description(ranks=(bytes(1 << 20),) * 3)
    with pytest.raises(InvalidInputError, match=r"3145728 bytes to describe its 3 ranks.*pools\.host\.extent_bytes"):
        side.nodes.known_node(ADDRESS)
    assert (side.opened, side.nodes.addresses()) == ([], [])


@pytest.mark.parametrize("how", ["lost", "rejected", "restarted"])
def test_a_known_node_that_is_out_of_reach_is_gone(how):
    side = DecodeSide()
    side.introduce()
    if how == "lost":
        side.nodes.lost(ADDRESS, "silent")
    elif how == "rejected":
        side.nodes.rejected(ADDRESS, Rejected(code="transport_failed", message="cannot reach you any more"))
    else:
        side.nodes.restarted(ADDRESS)
    assert side.gone == [PREFILL]
    side.nodes.send(PREFILL, Heartbeat())
    assert pick(side.messages, Heartbeat) == []
    assert side.hellos == (2 if how == "restarted" else 1)
    assert side.closed == ([] if how == "restarted" else [ADDRESS])


def test_a_welcome_of_another_life_ends_the_one_before():
    side = DecodeSide()
    side.introduce()
    side.welcome(NEXT_LIFE)
    assert side.gone == [PREFILL]
    side.welcome(NEXT_LIFE)
    assert side.gone == [PREFILL]


def test_nobody_speaks_in_the_name_of_a_node_behind_another_key():
    side = DecodeSide()
    side.introduce()
    assert side.nodes.speaks(ADDRESS, PREFILL)
    stranger = ADDRESS.model_copy(update={"endpoint": "tcp://10.0.0.9:1", "public_key": "k" * 40})
    same = ADDRESS.model_copy(update={"endpoint": "tcp://10.0.0.9:2"})
    for address in (stranger, same):
        assert side.nodes.known_node(address) is None
        assert not side.nodes.speaks(address, PREFILL)
    side.welcome(address=stranger)
    assert isinstance(side.found_at_change[-1], BridgeError) or stranger not in side.nodes.addresses()
    assert not side.nodes.speaks(stranger, PREFILL)
    side.welcome(address=same)
    assert side.nodes.speaks(same, PREFILL), "one node may have two addresses"
    side.nodes.lost(ADDRESS, "silent")
    assert side.nodes.speaks(ADDRESS, PREFILL), "the proof that it is quiet may still come"


def test_a_further_address_of_a_node_is_the_node_as_long_as_its_link_stands():
    side = DecodeSide()
    side.introduce()
    other = ADDRESS.model_copy(update={"endpoint": "tcp://10.0.0.9:2"})
    assert side.nodes.known_node(other) is None
    side.nodes.same(other, ADDRESS)
    assert side.closed == [other]
    assert side.nodes.known_node(other) is side.nodes.known_node(ADDRESS)
    assert side.nodes.addresses() == [ADDRESS]
    side.nodes.restarted(ADDRESS)
    assert side.gone == [PREFILL]
    assert side.nodes.known_node(other) is None, "it is asked anew"
    assert side.opened == [ADDRESS, other, other]


def test_few_of_those_who_were_met_once_are_remembered(monkeypatch):
    monkeypatch.setattr(prefill_nodes, "FORMER_KEPT", 1)
    side = DecodeSide()
    side.introduce()
    side.nodes.lost(ADDRESS, "silent")
    assert side.nodes.known_node(OTHER_ADDRESS) is None
    side.welcome(NEXT_LIFE, address=OTHER_ADDRESS)
    side.nodes.lost(OTHER_ADDRESS, "silent")
    assert not side.nodes.speaks(ADDRESS, PREFILL)
    assert side.nodes.speaks(OTHER_ADDRESS, NEXT_LIFE)


def test_nothing_is_said_to_addresses_that_nobody_knows():
    side = DecodeSide()
    side.welcome(address=OTHER_ADDRESS)
    side.nodes.rejected(OTHER_ADDRESS, Rejected(code="x", message="y"))
    side.nodes.lost(OTHER_ADDRESS, "silent")
    side.nodes.restarted(OTHER_ADDRESS)
    assert (side.messages, side.changes, side.gone) == ([], 0, [])


# ------------------------------------------------------------------------------------------- two releases

LACKING = Features(has=("something_else",))
DEMANDING = Features(requires=("later",))


def test_an_older_decode_node_is_welcomed_with_what_both_have(monkeypatch):
    side = PrefillSide()
    side.hello()
    side.connected(R0)
    side.connected(R1)
    [welcome] = pick(side.messages, Welcome, DECODE)
    assert welcome.features == PEER_FEATURES
    assert side.nodes.peers()[0].features == ()
    monkeypatch.setattr(decode_nodes, "PEER_FEATURES", Features(has=("digests",)))
    side.hello(features=Features(has=("digests", "later")))
    assert side.nodes.peers()[0].features == ("digests",)


@pytest.mark.parametrize("theirs", [LACKING, Features()])
def test_a_prefill_node_without_a_required_feature_is_refused_by_name(theirs):
    side = DecodeSide(Features(has=("digests",), requires=("digests",)))
    assert side.nodes.known_node(ADDRESS) is None
    assert pick(side.messages, Hello, ADDRESS)[0].features.requires == ("digests",)
    side.welcome(features=theirs)
    [error] = side.found_at_change
    assert isinstance(error, FeatureError)
    for words in ("'digests'", "upgrade the prefill node prefill/p0", ADDRESS.endpoint):
        assert words in str(error)
    assert side.closed == [ADDRESS]


def test_a_prefill_node_that_requires_what_we_lack_is_refused_and_one_that_has_it_is_met():
    side = DecodeSide(Features(has=("digests",), requires=("digests",)))
    assert side.nodes.known_node(ADDRESS) is None
    side.welcome(features=DEMANDING.model_copy(update={"has": ("digests",)}))
    assert "upgrade this decode node" in str(side.found_at_change[0])
    assert side.nodes.known_node(ADDRESS) is None
    side.welcome(features=Features(has=("digests", "later")))
    assert side.nodes.peers()[0].features == ("digests",)


ONE, TWO = ModelIdentity(name="m", revision="1"), ModelIdentity(name="m", revision="2")


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [(ONE, ONE, True), (ONE, None, True), (None, None, True), (ONE, TWO, False), (None, TWO, False)],
)
def test_a_prefill_node_writes_to_whoever_does_not_hold_other_weights(ours, theirs, fits):
    side = PrefillSide(model_identity=ours)
    side.hello(model_identity=theirs)
    rejected = pick(side.messages, Rejected, DECODE)
    assert not rejected if fits else rejected[0].code == "fingerprint_mismatch"
    assert fits or f"the decode side holds {theirs}" in rejected[0].message
    assert bool(side.workers.messages) is fits


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"), [(ONE, ONE, True), (None, ONE, True), (ONE, TWO, False), (ONE, None, False)]
)
def test_a_decode_node_looks_for_itself_whose_pages_it_takes(ours, theirs, fits):
    """A prefill node of an earlier release says nothing, and does not look."""
    side = DecodeSide(model_identity=ours)
    side.nodes.known_node(ADDRESS)
    side.nodes.welcome(ADDRESS, welcome(model_identity=theirs))
    if fits:
        assert side.nodes.known_node(ADDRESS).peer == PREFILL
        return
    [rejected] = side.events.of(PeerRejected)
    assert (rejected.code, "tier.model_revision" in rejected.reason) == ("fingerprint_mismatch", True)
    assert side.closed == [ADDRESS]


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


# ------------------------------------------------------------------------------------------- names

OLD, NEW = "old key", "new key"
KNOWN_NAMES = [ClaimedName("decode-0", "node-0", OLD)]
ANY, DECODE_0, DECODE_1 = frozenset(), frozenset({"decode-0"}), frozenset({"decode-1"})


@pytest.mark.parametrize(
    ("key", "bound_to", "node", "refused"),
    [
        (OLD, ANY, "node-0", ""),
        (OLD, DECODE_0, "node-0", ""),
        (NEW, ANY, "node-1", ""),
        (NEW, DECODE_0, "node-0", ""),
        (NEW, ANY, "node-0", "known here under another key"),
        (OLD, DECODE_1, "node-0", "speaks for instance decode-1, not for decode-0"),
        (NEW, DECODE_1, "node-1", "speaks for instance decode-1, not for decode-0"),
    ],
)
def test_a_name_belongs_to_its_key(key, bound_to, node, refused):
    claim = ClaimedName("decode-0", node, key)
    if not refused:
        check_name(claim, bound_to=bound_to, present=KNOWN_NAMES)
        return
    with pytest.raises(UnauthorizedError, match=refused):
        check_name(claim, bound_to=bound_to, present=KNOWN_NAMES)


def test_a_node_is_welcomed_once_every_worker_can_write_to_it():
    side = PrefillSide()
    side.hello()
    assert len(pick(side.workers.messages, ConnectPeer)) == 2
    side.connected(R0)
    side.hello()
    assert side.messages == []
    assert side.nodes.peers()[0].connecting == ("pp0.tp1",)
    side.connected(R1)
    [welcome] = pick(side.messages, Welcome, DECODE)
    assert (welcome.instance, welcome.node, welcome.incarnation, welcome.ranks) == ("prefill", "p0", PREFILL, (R0, R1))
    assert (welcome.pp_size, welcome.tp_size, welcome.stage_boundaries) == (1, 2, ())
    side.hello()
    assert len(pick(side.messages, Welcome)) == 2
    assert len(pick(side.workers.messages, ConnectPeer)) == 2
    assert side.nodes.known() == {DECODE}
    assert side.nodes.peers()[0].transports == {"pp0.tp0": ("local",), "pp0.tp1": ("local",)}


def test_a_lost_node_is_forgotten_once_and_strangers_are_ignored():
    side = PrefillSide()
    side.introduce()
    side.nodes.gone(DECODE, "silent")
    side.nodes.gone(DECODE, "silent")
    side.connected(R0)
    side.connected(R0, peer="nobody")
    assert side.gone == [(DECODE, "silent")]
    assert len(pick(side.messages, Welcome)) == 1
