from __future__ import annotations

import pytest

from kvbridge.core.errors import BridgeError, ConfigError, FingerprintMismatchError, PeerError
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Role
from kvbridge.core.wire.messages import (
    Heartbeat,
    Hello,
    NodeDescription,
    RankDescription,
    Rejected,
    TransportEndpoint,
    Welcome,
)
from kvbridge.core.wire.worker_messages import ConnectPeer, DisconnectPeer, PeerConnected
from kvbridge.service import meeting
from kvbridge.service.meeting import DecodeNodes, PrefillNodes, Self
from tests.helpers.rooms import ADDRESS, DECODE, GEOMETRY, OTHER_ADDRESS, PREFILL, R0, R1, FakeWorkers, manifest, pick

NEXT_LIFE = "dddd000000000002"


def description(incarnation: str = DECODE, endpoint: bytes = b"1", **fields) -> NodeDescription:
    rank = RankDescription(manifest=manifest(), endpoints=(TransportEndpoint(transport="local", data=endpoint),))
    fields = {"role": Role.DECODE, "geometry": GEOMETRY, "ranks": (rank,)} | fields
    return NodeDescription(instance="decode", node="d0", incarnation=incarnation, **fields)


class PrefillSide:
    def __init__(self) -> None:
        self.workers = FakeWorkers(R0, R1)
        self.messages: list[tuple[object, object]] = []
        self.gone: list[tuple[str, str]] = []
        self.nodes = DecodeNodes(
            Self("prefill", "p0", PREFILL),
            GEOMETRY,
            self.workers,
            send=lambda peer, message: self.messages.append((peer, message)),
            on_gone=lambda peer, reason: self.gone.append((peer, reason)),
        )

    def hello(self, peer: str = DECODE, **fields) -> None:
        self.nodes.hello(peer, Hello(node=description(peer, **fields)))

    def connected(self, rank=R0, peer: str = DECODE, **fields) -> None:
        self.nodes.worker_connected(PeerConnected(rank=rank, peer=peer, transports=("local",), **fields))

    def meet(self) -> None:
        self.hello()
        self.connected(R0)
        self.connected(R1)


def test_a_node_is_welcomed_once_every_worker_can_write_to_it():
    side = PrefillSide()
    side.hello()
    assert len(pick(side.workers.messages, ConnectPeer)) == 2
    side.connected(R0)
    side.hello()
    assert side.messages == []
    assert side.nodes.peers()[0]["connecting"] == ["pp0.tp1"]
    side.connected(R1)
    [welcome] = pick(side.messages, Welcome, DECODE)
    assert (welcome.instance, welcome.node, welcome.incarnation, welcome.ranks) == ("prefill", "p0", PREFILL, (R0, R1))
    side.hello()
    assert len(pick(side.messages, Welcome)) == 2
    assert len(pick(side.workers.messages, ConnectPeer)) == 2
    assert side.nodes.known() == [DECODE]
    assert side.nodes.peers()[0]["transports"] == {"pp0.tp0": ["local"], "pp0.tp1": ["local"]}


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"geometry": preset("tiny-v4")}, "fingerprint_mismatch", "hold different models"),
        ({"role": Role.PREFILL}, "invalid_input", "must come from a decode node"),
        ({"ranks": ()}, "invalid_input", "no rank"),
        (
            {"ranks": (RankDescription(manifest=manifest(preset("tiny-v4")), endpoints=()),)},
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
    assert side.nodes.known() == []
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
    assert side.nodes.known() == []


def test_a_node_that_has_changed_is_connected_anew_and_only_the_last_answer_counts():
    side = PrefillSide()
    side.hello()
    side.hello(endpoint=b"2")
    side.connected(R0, error_code="transport_failed", error="the old endpoint is dead")
    side.connected(R1)
    assert side.messages == []
    side.connected(R0)
    side.connected(R1)
    assert len(pick(side.messages, Welcome)) == 1
    assert pick(side.workers.messages, ConnectPeer, R0)[-1].ranks[0].endpoints[0].data == b"2"


def test_a_new_life_ends_the_old_one():
    side = PrefillSide()
    side.meet()
    side.hello(NEXT_LIFE)
    assert side.gone == [(DECODE, f"it was restarted (now {NEXT_LIFE})")]
    assert len(pick(side.workers.messages, DisconnectPeer)) == 2
    assert side.nodes.known() == [NEXT_LIFE]


def test_a_worker_that_is_back_is_connected_to_everybody():
    side = PrefillSide()
    side.meet()
    side.workers.messages.clear()
    side.nodes.worker_ready(R1)
    assert [rank for rank, _ in side.workers.messages] == [R1]
    side.connected(R1)
    assert len(pick(side.messages, Welcome)) == 2
    side.nodes.worker_ready(R1)
    side.connected(R1, error_code="transport_failed", error="gone")
    assert side.gone[0][0] == DECODE
    assert pick(side.messages, Rejected)


def test_a_worker_that_died_while_it_connected_is_asked_again():
    side = PrefillSide()
    side.hello()
    side.connected(R0)
    side.nodes.worker_ready(R1)
    side.connected(R1)
    assert len(pick(side.messages, Welcome)) == 1


def test_a_new_life_of_a_worker_owes_no_answers_of_the_old_one():
    side = PrefillSide()
    side.hello()
    side.connected(R0)
    side.hello(endpoint=b"2")
    side.connected(R0)
    side.nodes.worker_ready(R1)
    side.connected(R1)
    assert len(pick(side.messages, Welcome)) == 1


def test_a_lost_node_is_forgotten_once_and_strangers_are_ignored():
    side = PrefillSide()
    side.meet()
    side.nodes.gone(DECODE, "silent")
    side.nodes.gone(DECODE, "silent")
    side.connected(R0)
    side.connected(R0, peer="nobody")
    assert side.gone == [(DECODE, "silent")]
    assert len(pick(side.messages, Welcome)) == 1


def test_nobody_takes_a_name_over_from_another_key():
    side = PrefillSide()
    side.nodes.hello(DECODE, Hello(node=description()), key="its key")
    side.nodes.hello(NEXT_LIFE, Hello(node=description(NEXT_LIFE)), key="another key")
    [rejected] = pick(side.messages, Rejected, NEXT_LIFE)
    assert rejected.code == "unauthorized"
    assert (side.nodes.known(), side.gone) == ([DECODE], [])
    side.nodes.hello(NEXT_LIFE, Hello(node=description(NEXT_LIFE)), key="its key")
    assert side.nodes.known() == [NEXT_LIFE]


# ------------------------------------------------------------------------------------------- decode side


class DecodeSide:
    def __init__(self) -> None:
        self.opened: list[object] = []
        self.closed: list[object] = []
        self.messages: list[tuple[object, object]] = []
        self.changes = 0
        self.gone: list[str] = []
        self.error: BridgeError | None = None
        self.nodes = PrefillNodes(
            describe=description,
            links=self,
            on_changed=self.changed,
            on_gone=lambda peer, reason: self.gone.append(peer),
        )
        self.met_at_change: list[object] = []

    def open(self, address) -> None:
        if self.error is not None:
            raise self.error
        self.opened.append(address)

    def send(self, address, message) -> None:
        self.messages.append((address, message))

    def close(self, address) -> None:
        self.closed.append(address)

    def changed(self) -> None:
        self.changes += 1
        try:
            self.met_at_change.append(self.nodes.met(ADDRESS))
        except BridgeError as error:
            self.met_at_change.append(error)

    def welcome(self, incarnation: str = PREFILL, node: str = "p0", address=ADDRESS) -> None:
        self.nodes.welcome(address, Welcome(instance="prefill", node=node, incarnation=incarnation, ranks=(R0,)))

    def meet(self) -> None:
        assert self.nodes.met(ADDRESS) is None
        self.welcome()

    @property
    def hellos(self) -> int:
        return len(pick(self.messages, Hello, ADDRESS))


def test_a_node_is_greeted_once_and_then_known():
    side = DecodeSide()
    assert side.nodes.met(ADDRESS) is None
    assert side.nodes.met(ADDRESS) is None
    assert (side.opened, side.hellos) == ([ADDRESS], 1)
    side.welcome()
    met = side.nodes.met(ADDRESS)
    assert met is not None
    assert (met.peer, met.name, met.ranks) == (PREFILL, "prefill/p0", (R0,))
    assert side.changes == 1
    side.nodes.send(PREFILL, Heartbeat())
    side.nodes.send("nobody", Heartbeat())
    assert len(pick(side.messages, Heartbeat, ADDRESS)) == 1
    assert side.nodes.addresses() == [ADDRESS]
    assert side.nodes.peers()[0]["incarnation"] == PREFILL


def test_an_address_that_cannot_be_opened_is_not_remembered():
    side = DecodeSide()
    side.error = ConfigError("no public key is known")
    for _ in range(2):
        with pytest.raises(ConfigError):
            side.nodes.met(ADDRESS)
    assert side.nodes.addresses() == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [("fingerprint_mismatch", FingerprintMismatchError), ("never heard of", PeerError)],
)
def test_a_rejection_reaches_every_waiting_room_and_the_next_one_greets_anew(code, kind):
    side = DecodeSide()
    side.nodes.met(ADDRESS)
    side.nodes.rejected(ADDRESS, Rejected(code=code, message="no"))
    assert isinstance(side.met_at_change[0], kind)
    assert side.closed == [ADDRESS]
    assert side.nodes.met(ADDRESS) is None
    assert side.opened == [ADDRESS, ADDRESS]
    assert side.hellos == 2
    assert side.gone == []


@pytest.mark.parametrize("how", ["lost", "rejected", "restarted"])
def test_a_known_node_that_is_out_of_reach_is_gone(how):
    side = DecodeSide()
    side.meet()
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
    side.meet()
    side.welcome(NEXT_LIFE)
    assert side.gone == [PREFILL]
    side.welcome(NEXT_LIFE)
    assert side.gone == [PREFILL]


def test_nobody_speaks_in_the_name_of_a_node_behind_another_key():
    side = DecodeSide()
    side.meet()
    assert side.nodes.speaks(ADDRESS, PREFILL)
    stranger = ADDRESS.model_copy(update={"endpoint": "tcp://10.0.0.9:1", "public_key": "k" * 40})
    same = ADDRESS.model_copy(update={"endpoint": "tcp://10.0.0.9:2"})
    for address in (stranger, same):
        assert side.nodes.met(address) is None
        assert not side.nodes.speaks(address, PREFILL)
    side.welcome(address=stranger)
    assert isinstance(side.met_at_change[-1], BridgeError) or stranger not in side.nodes.addresses()
    assert not side.nodes.speaks(stranger, PREFILL)
    side.welcome(address=same)
    assert side.nodes.speaks(same, PREFILL), "one node may have two addresses"
    side.nodes.lost(ADDRESS, "silent")
    assert side.nodes.speaks(ADDRESS, PREFILL), "the proof that it is quiet may still come"


def test_few_of_those_who_were_met_once_are_remembered(monkeypatch):
    monkeypatch.setattr(meeting, "FORMER_KEPT", 1)
    side = DecodeSide()
    side.meet()
    side.nodes.lost(ADDRESS, "silent")
    assert side.nodes.met(OTHER_ADDRESS) is None
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


def test_everybody_hears_when_we_have_changed():
    side = DecodeSide()
    side.meet()
    side.nodes.met(OTHER_ADDRESS)
    side.nodes.refresh()
    assert side.hellos == 2
    assert len(pick(side.messages, Hello, OTHER_ADDRESS)) == 2
