"""Where a rank's orders stand, and that waiting ones cost a step nothing."""

from __future__ import annotations

import pytest

from kvbridge.core.plan.operations import Section
from kvbridge.core.wire.worker_messages import CloseRoom, Send
from kvbridge.worker import loop as rank_worker
from kvbridge.worker.order_book import OrderBook
from kvbridge.worker.orders import Order
from tests.helpers.executed_lines import executed_lines
from tests.helpers.worker_bench import DONE, QUIET, TOKENS, Bench, node_ranks

SECTION = Section(prompt_tokens=TOKENS, start_token=0, stop_token=TOKENS)
PEERS = [f"dddd{number:012x}" for number in range(3)]


def order(number: int, room: int = 1) -> Order:
    return Order(Send(room=room, generation=1, order=number, section=SECTION), 0.0)


def begun(book: OrderBook, most: int = 2, *, busy: str = "", unwritten: tuple[int, ...] = ()) -> list[int]:
    found = book.begin(
        most, is_ready=lambda peer: peer != busy, is_written=lambda order: order.request.order not in unwritten
    )
    return [order.request.order for order in found]


def test_orders_begin_in_their_order_and_no_peer_has_more_than_its_share() -> None:
    book = OrderBook()
    orders = [order(number) for number in range(1, 7)]
    for one, peer in zip(orders, "aaabab", strict=True):
        book.add(one, peer)
    assert begun(book) == [1, 2, 4, 6]
    assert begun(book) == []
    book.end(orders[0])
    assert (begun(book), book.waiting, len(book), [one.request.order for one in book.active]) == (
        [3],
        1,
        5,
        [2, 4, 6, 3],
    )


def test_a_peer_that_is_not_ready_and_memory_that_is_not_written_hold_nobody_else_up() -> None:
    book = OrderBook()
    for number, peer in enumerate("aabb", start=1):
        book.add(order(number), peer)
    assert begun(book, busy="b", unwritten=(1,)) == [2]
    assert begun(book) == [1, 3, 4]


def test_an_order_that_fails_while_it_waits_takes_no_place_of_another_and_ends_alone() -> None:
    book = OrderBook()
    orders = [order(number, room=number) for number in (1, 2, 3)]
    for one in orders:
        book.add(one, "a")
    assert begun(book, most=1) == [1]
    book.fail(orders[1], "aborted", "the room was closed")
    assert list(book.waiting_for("a")) == [orders[2]]
    assert list(book.active) == orders[:2]
    for one in orders[:2]:
        book.end(one)
    assert begun(book, most=1) == [3]
    book.end(orders[2])
    assert (len(book), list(book.of_room(orders[2].key))) == (0, [])


def crowded_bench(queued: int) -> Bench:
    """Several peers that have all that they may have in flight, and as many orders behind that in rooms of their own."""
    bench = Bench()
    for number, peer in enumerate(PEERS):
        bench.connect(peer, node_ranks(data=b"%d" % number))
    rooms = len(PEERS) * rank_worker.ACTIVE_ORDERS + queued
    for room in range(rooms):
        bench.open(room=room, peer=PEERS[room % len(PEERS)])
    sends = [Send(room=room, generation=1, order=room + 1, section=SECTION) for room in range(rooms)]
    while sends:
        bench.say(*sends[: rank_worker.MESSAGES_A_STEP])
        del sends[: rank_worker.MESSAGES_A_STEP]
    bench.say(steps=2)
    assert len(bench.transport().transfers) == len(PEERS) * rank_worker.ACTIVE_ORDERS
    return bench


@pytest.fixture(autouse=True)
def few_active(monkeypatch) -> None:
    monkeypatch.setattr(rank_worker, "ACTIVE_ORDERS", 4)
    monkeypatch.setattr(rank_worker.time, "sleep", lambda _: None)


WORK = {
    "nothing ends": lambda bench: bench.worker.step(),
    "one ends and another begins": lambda bench: bench.end(DONE, which=0),
    "one fails": lambda bench: bench.end(QUIET, which=0),
    "a room is closed": lambda bench: bench.say(CloseRoom(room=0, generation=1)),
}


@pytest.mark.parametrize("name", WORK)
def test_a_step_is_the_same_work_however_many_orders_wait(name: str) -> None:
    """What is given to a library is refilled by the loop only, so a burst of rooms must not slow it down."""
    few, many = (crowded_bench(queued) for queued in (6, 150))
    lines = [executed_lines(lambda bench=bench: WORK[name](bench), of="kvbridge.worker") for bench in (few, many)]
    assert lines[0] == lines[1] > 0
