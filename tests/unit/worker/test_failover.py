"""A path that is lost in every place of a transfer: what is sent again, over what, and what the node is told."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.core.wire.worker_messages import ConnectPeer, PathsChanged, PeerConnected, Rerouted
from kvbridge.worker import peers as rank_peers
from tests.helpers.rooms import DECODE
from tests.helpers.worker_bench import DONE, QUIET, Bench, node_ranks


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
