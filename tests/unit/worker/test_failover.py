"""A path that is lost in every place of a transfer: what is sent again, over what, and what the node is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.core.wire.worker_messages import (
    CloseRoom,
    ConnectPeer,
    PathsChanged,
    PeerConnected,
    RenewEndpoints,
    Rerouted,
    RevokeEndpoints,
    WorkerReady,
)
from kvbridge.worker import peers as rank_peers
from tests.helpers.rooms import DECODE
from tests.helpers.worker_bench import ACTIVE, DONE, NOT_QUIET, QUIET, Bench, node_ranks


def pair(*names: str, **ranks: object) -> Bench:
    """A peer that has all of these transports, each of them connected."""
    bench = Bench(*names)
    bench.connect(ranks=node_ranks(*names, **ranks))
    bench.worker.step()
    bench.worker.step()
    bench.open()
    bench.link.said.clear()
    return bench


def operations_of(bench: Bench, name: str, which: int = -1) -> set[tuple[int, int, int]]:
    return triples(bench.transport(name).transfers[which].operations)


def triples(operations: Operations) -> set[tuple[int, int, int]]:
    columns = (operations.source, operations.destination, operations.length)
    return set(zip(*(column.tolist() for column in columns), strict=True))


def test_further_paths_are_connected_after_the_first_and_said() -> None:
    bench = Bench("one", "two", "three")
    bench.connect(ranks=node_ranks("one", "two", "three"))
    [connected] = bench.link.take(PeerConnected)
    assert connected.transports == ("one",)
    bench.worker.step()
    assert [len(bench.transport(name).peers) for name in ("one", "two", "three")] == [1, 1, 1]
    assert bench.link.take(PathsChanged)[-1].standby == ("three", "two")


@pytest.mark.parametrize("in_transit", [True, False])
def test_only_what_was_not_confirmed_is_sent_again(in_transit: bool) -> None:
    bench = pair("one", "two")
    bench.order()
    [transfer] = bench.transport("one").transfers
    count = len(transfer.operations)
    assert count >= 3
    transfer.unconfirmed, transfer.in_transit = (slice(1, 2), slice(count - 1, count)), in_transit
    bench.end(QUIET)
    expected = triples(transfer.operations[1:2]) | triples(transfer.operations[count - 1 : count])
    assert operations_of(bench, "two") == expected
    assert bench.sent() == []
    [told] = bench.link.take(Rerouted)
    assert (told.lost, told.over, told.in_transit, told.epoch) == ("one", "two", in_transit, 0)
    [paths] = bench.link.take(PathsChanged)
    assert (paths.lost, paths.transports, paths.error) == ("one", ("two",), "cable")
    bench.end(DONE, "two")
    [sent] = bench.sent()
    assert (sent.error_code, sent.quiet, sent.in_transit) == ("", True, in_transit)
    assert sent.amounts


def test_longer_operations_than_the_next_path_takes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pair("one", "two")
    monkeypatch.setattr(type(bench.transport("two")), "max_operation_bytes", property(lambda self: 100))
    bench.order()
    whole = bench.transport("one").transfers[0].operations
    bench.end(QUIET)
    cut = bench.transport("two").transfers[0].operations
    assert cut.total_bytes == whole.total_bytes
    assert int(cut.length.max()) == 100


def test_new_orders_take_the_next_path_and_the_lost_one_comes_back_later() -> None:
    bench = pair("one", "two")
    bench.order()
    bench.end(QUIET)
    bench.order()
    assert [len(bench.transport(name).transfers) for name in ("one", "two")] == [1, 2]
    bench.worker.step()
    assert bench.transport("one").peers == [], "nothing uses the lost path, so it is let go"
    bench.clock.advance(rank_peers.RETRY_S)
    bench.transport("one").refuse = TransportError("still down")
    bench.worker.step()
    bench.order()
    assert len(bench.transport("two").transfers) == 3
    bench.clock.advance(rank_peers.RETRY_S)
    bench.transport("one").refuse = None
    bench.worker.step()
    bench.order()
    assert len(bench.transport("one").transfers) == 2
    assert bench.link.take(PathsChanged)[-1].transports == ("one",)


def test_an_order_is_not_over_before_what_would_not_become_quiet_is_closed() -> None:
    bench = pair("one", "two")
    bench.connect("dddd00000000000f", node_ranks("one", data=b"another"))
    bench.open(room=2, peer="dddd00000000000f")
    bench.order()
    bench.order(room=2)
    first = bench.built["one"][0]
    first.transfers[0].state = NOT_QUIET
    bench.worker.step()
    assert operations_of(bench, "two") == triples(first.transfers[0].operations)
    assert bench.link.take(Rerouted)[0].in_transit
    bench.end(DONE, "two")
    assert bench.sent() == []
    assert not first.closed, "another peer's transfer goes by it"
    first.transfers[1].state = DONE
    bench.worker.step()
    bench.worker.step()
    assert first.closed
    assert {sent.room: sent.error_code for sent in bench.sent()} == {1: "", 2: ""}


def test_with_every_path_lost_the_order_fails_with_all_causes() -> None:
    bench = pair("one", "two")
    bench.order()
    bench.transport("one").transfers[0].in_transit = True
    bench.end(QUIET)
    bench.end(QUIET, "two")
    [sent] = bench.sent()
    assert (sent.error_code, sent.in_transit) == ("transport_failed", True)
    assert sent.error == "two: cable; before that, one: cable"


def test_what_is_lost_waits_for_a_path_that_is_being_connected() -> None:
    bench = Bench("one", "two")
    bench.transport("two").silent.add(b"peer0")
    bench.connect(ranks=node_ranks("one", "two"))
    bench.open()
    bench.order()
    bench.end(QUIET)
    assert bench.sent() == []
    bench.transport("two").silent.clear()
    bench.worker.step()
    bench.worker.step()
    assert operations_of(bench, "two") == operations_of(bench, "one")


def test_a_room_that_is_closed_is_not_sent_again() -> None:
    bench = pair("one", "two")
    bench.order()
    bench.say(CloseRoom(room=1, generation=1))
    bench.end(QUIET)
    assert bench.transport("two").transfers == []
    assert [sent.error_code for sent in bench.sent()] == ["aborted"]
    assert bench.closed == [1]


def test_the_node_is_told_once_for_each_room_and_again_when_something_was_in_transit() -> None:
    bench = pair("one", "two")
    bench.open(room=2)
    for room in (1, 1, 2):
        bench.order(room=room)
    transfers = bench.transport("one").transfers
    transfers[1].in_transit = True
    for transfer in transfers:
        transfer.state = QUIET
    bench.worker.step()
    assert [(told.room, told.in_transit) for told in bench.link.take(Rerouted)] == [(1, False), (1, True), (2, False)]
    assert len([paths for paths in bench.link.take(PathsChanged) if paths.lost]) == 1


def test_a_new_endpoint_of_one_transport_leaves_the_others_and_is_taken_when_its_time_has_come() -> None:
    bench = pair("one", "two")
    [kept] = bench.transport("two").peers
    bench.order()
    bench.end(QUIET)
    [first] = node_ranks("one", "two")
    moved = first.replace(b"peer0", b"next0", 1)
    assert moved != first
    bench.say(ConnectPeer(peer=DECODE, ranks=(moved,)), steps=2)
    assert bench.link.take(PeerConnected)[-1].transports == ("two",)
    assert bench.transport("two").peers == [kept]
    bench.end(DONE, "two")
    assert bench.sent()[0].error_code == ""
    bench.clock.advance(rank_peers.RETRY_S)
    bench.worker.step()
    bench.worker.step()
    assert [peer.data for peer in bench.transport("one").peers] == [b"next0"]
    bench.order()
    assert bench.transport("one").peers[0].transfers


def test_endpoints_of_one_transport_are_renewed_and_revoked_alone() -> None:
    bench = Bench("one", "two")
    bench.say(RenewEndpoints(epoch=3, transports=("two",)))
    [ready] = bench.link.take(WorkerReady)
    assert [(end.transport, end.epoch) for end in ready.description.endpoints] == [("one", 0), ("two", 3)]
    assert [len(bench.built[name]) for name in ("one", "two")] == [1, 2]
    bench.transport("one").writers_before = 9  # nobody asks
    bench.say(RevokeEndpoints(before_epoch=3, transports=("two",)))
    assert [bench.built["two"][0].closed, bench.built["one"][0].closed] == [True, False]
    assert type(bench.link.said[-1]).__name__ == "EndpointsRevoked"


FATES = st.lists(
    st.tuples(st.sampled_from((DONE, QUIET, NOT_QUIET)), st.booleans(), st.integers(0, 6), st.integers(0, 6)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(fates=FATES)
def test_an_order_ends_well_only_when_every_byte_was_confirmed(fates) -> None:
    """Transfers end one after the other as drawn, and well when nothing is drawn any more."""
    bench = pair("one", "two", "three")
    bench.order()
    wanted = operations_of(bench, "one")
    confirmed: set[tuple[int, int, int]] = set()
    script = iter(fates)
    for _ in range(40):
        every = [transfer for built in bench.built.values() for transport in built for transfer in transport.transfers]
        active = [transfer for transfer in every if transfer.state is ACTIVE]
        for transfer in active[:1]:
            state, transfer.in_transit, first, length = next(script, (DONE, False, 0, 0))
            left = slice(first, first + length)
            transfer.unconfirmed = (left,)
            done = triples(transfer.operations)
            confirmed |= done if state is DONE else done - triples(transfer.operations[left])
            transfer.state = state
        bench.worker.step()
    [sent] = bench.sent()
    rerouted = bench.link.take(Rerouted)
    assert len(rerouted) == 2 if sent.error_code else wanted <= confirmed
    every = [transfer for built in bench.built.values() for transport in built for transfer in transport.transfers]
    unsure = [
        transfer
        for transfer in every
        if transfer.state is NOT_QUIET or (transfer.state is QUIET and transfer.in_transit)
    ]
    assert sent.in_transit == bool(unsure)
    if not sent.error_code:
        assert sum(told.in_transit for told in rerouted) == len(unsure)
        closed = {id(transport) for built in bench.built.values() for transport in built if transport.closed}
        for built in bench.built.values():
            for transport in built:
                quiet = all(transfer.state is not NOT_QUIET for transfer in transport.transfers)
                assert quiet or id(transport) in closed


@given(
    lengths=st.lists(st.integers(1, 5_000), max_size=20),
    most=st.integers(1, 2_000),
    parts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4),
)
def test_operations_that_are_cut_or_taken_copy_the_same_bytes(lengths, most, parts) -> None:
    length = np.array(lengths, dtype=np.uint64)
    starts = (np.cumsum(length) - length).astype(np.uint64) if len(length) else length
    whole = Operations(starts + np.uint64(10_000), starts + np.uint64(1 << 40), length)

    def moved(operations: Operations) -> list[tuple[int, int]]:
        return [(source + at, to + at) for source, to, size in sorted(triples(operations)) for at in range(size)]

    cut = whole.cut(most)
    assert moved(cut) == moved(whole)
    assert not len(cut) or int(cut.length.max()) <= most
    taken = whole.taken([slice(first, first + count) for first, count in parts])
    assert len(taken) == sum(len(range(len(lengths))[first : first + count]) for first, count in parts)
