"""How a decode node meets prefill nodes: which claims of a node it believes, and when it asks again."""

from functools import partial

import pytest

from kvbridge.core.errors import BridgeError, FeatureError, InvalidInputError
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.core.wire.messages import Features, Heartbeat, Hello, Rejected
from kvbridge.node.decode import prefill_nodes
from kvbridge.node.decode.prefill_nodes import PrefillNodes
from kvbridge.telemetry.facts import PeerRejected
from tests.helpers.rooms import ADDRESS, OTHER_ADDRESS, PREFILL, R0, RecordedEvents, describe_decode, pick, welcome_of

NEXT_LIFE = "dddd000000000002"

ONE, TWO = ModelIdentity(name="m", revision="1"), ModelIdentity(name="m", revision="2")


class DecodeSide:
    def __init__(self, **about) -> None:
        self.events = RecordedEvents()
        self.opened: list[object] = []
        self.closed: list[object] = []
        self.messages: list[tuple[object, object]] = []
        self.gone: list[str] = []
        self.found_at_change: list[object] = []
        self.nodes = PrefillNodes(partial(describe_decode, **about), self, self.events)
        self.nodes.rooms = self

    def names_of(self, key: str) -> frozenset[str]:
        return frozenset()

    def soon(self, do) -> None:
        do()

    def connect(self, address) -> None:
        self.opened.append(address)

    def send(self, address, message) -> None:
        self.messages.append((address, message))

    def disconnect(self, address) -> None:
        self.closed.append(address)

    def peer_gone(self, peer: str, reason: str) -> None:
        self.gone.append(peer)

    def nodes_changed(self) -> None:
        try:
            self.found_at_change.append(self.nodes.known_node(ADDRESS))
        except BridgeError as error:
            self.found_at_change.append(error)

    def welcome(self, incarnation: str = PREFILL, address=ADDRESS, **fields) -> None:
        self.nodes.received(address, incarnation, welcome_of(incarnation, **fields))

    def introduce(self) -> None:
        assert self.nodes.known_node(ADDRESS) is None
        self.welcome()

    @property
    def hellos(self) -> int:
        return len(pick(self.messages, Hello, ADDRESS))


def at(port: int, **fields):
    return ADDRESS.model_copy(update={"endpoint": f"tcp://10.0.0.9:{port}"} | fields)


def test_a_node_is_greeted_once_and_then_known():
    side = DecodeSide()
    for _ in range(2):
        assert side.nodes.known_node(ADDRESS) is None
    assert (side.opened, side.hellos) == ([ADDRESS], 1)
    side.welcome()
    found = side.nodes.known_node(ADDRESS)
    assert (found.incarnation, found.name, found.ranks) == (PREFILL, "prefill/p0", (R0,))
    side.nodes.send(PREFILL, Heartbeat())
    side.nodes.send("nobody", Heartbeat())
    assert len(pick(side.messages, Heartbeat, ADDRESS)) == 1
    assert list(side.nodes._known) == [ADDRESS]
    assert side.nodes.peers()[0].incarnation == PREFILL


def test_a_node_that_takes_too_long_to_describe_says_so_to_the_room():
    side = DecodeSide(ranks=(bytes(1 << 20),) * 3)
    with pytest.raises(InvalidInputError, match=r"3145728 bytes to describe its 3 ranks.*pools\.host\.extent_bytes"):
        side.nodes.known_node(ADDRESS)
    assert (side.opened, list(side.nodes._known)) == ([], [])


@pytest.mark.parametrize("how", ["lost", "rejected", "restarted", "another life"])
def test_a_known_node_that_is_out_of_reach_is_gone(how):
    side = DecodeSide()
    side.introduce()
    match how:
        case "lost":
            side.nodes.lost(ADDRESS, "silent")
        case "rejected":
            side.nodes.received(
                ADDRESS, PREFILL, Rejected(code="transport_failed", message="cannot reach you any more")
            )
        case "restarted":
            side.nodes.restarted(ADDRESS)
        case _:
            side.welcome(NEXT_LIFE)
    assert side.gone == [PREFILL]
    side.nodes.send(PREFILL, Heartbeat())
    assert pick(side.messages, Heartbeat) == []
    assert side.hellos == (2 if how == "restarted" else 1)
    assert side.closed == ([ADDRESS] if how in {"lost", "rejected"} else [])


def test_nobody_speaks_in_the_name_of_a_node_behind_another_key():
    side = DecodeSide()
    side.introduce()
    assert side.nodes.speaks(ADDRESS, PREFILL)
    stranger, same = at(1, public_key="k" * 40), at(2)
    for address in (stranger, same):
        assert side.nodes.known_node(address) is None
        assert not side.nodes.speaks(address, PREFILL)
    side.welcome(address=stranger)
    assert isinstance(side.found_at_change[-1], BridgeError) or stranger not in list(side.nodes._known)
    assert not side.nodes.speaks(stranger, PREFILL)
    side.welcome(address=same)
    assert side.nodes.speaks(same, PREFILL), "one node may have two addresses"
    side.nodes.lost(ADDRESS, "silent")
    assert side.nodes.speaks(ADDRESS, PREFILL), "the proof that it is quiet may still come"


def test_a_further_address_of_a_node_is_the_node_as_long_as_its_link_stands():
    side = DecodeSide()
    side.introduce()
    other = at(2)
    assert side.nodes.known_node(other) is None
    side.nodes.same(other, ADDRESS)
    assert side.closed == [other]
    assert side.nodes.known_node(other) is side.nodes.known_node(ADDRESS)
    assert list(side.nodes._known) == [ADDRESS]
    side.nodes.restarted(ADDRESS)
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


DIGESTS = Features(has=("digests",), requires=("digests",))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (Features(has=("something_else",)), ("'digests'", "upgrade the prefill node prefill/p0", ADDRESS.endpoint)),
        (Features(has=("digests",), requires=("later",)), ("upgrade this decode node",)),
    ],
)
def test_a_prefill_node_of_a_release_that_does_not_fit_is_refused_by_name(theirs, words, monkeypatch):
    monkeypatch.setattr(prefill_nodes, "FEATURES", DIGESTS)
    side = DecodeSide()
    assert side.nodes.known_node(ADDRESS) is None
    assert pick(side.messages, Hello, ADDRESS)[0].features.requires == ("digests",)
    side.welcome(features=theirs)
    [error] = side.found_at_change
    assert isinstance(error, FeatureError)
    assert all(word in str(error) for word in words)
    assert side.closed == [ADDRESS]


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"), [(ONE, ONE, True), (None, ONE, True), (ONE, TWO, False), (ONE, None, False)]
)
def test_a_decode_node_looks_for_itself_whose_pages_it_takes(ours, theirs, fits):
    """A prefill node of an earlier release says nothing, and does not look."""
    side = DecodeSide(model_identity=ours)
    side.nodes.known_node(ADDRESS)
    side.welcome(model_identity=theirs)
    refused = side.events.of(PeerRejected)
    assert [one.code for one in refused] == ["fingerprint_mismatch"] * (not fits)
    assert all("tier.model_revision" in one.reason for one in refused)
    assert side.closed == [ADDRESS] * (not fits)
