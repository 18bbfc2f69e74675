"""The orders of a rank: which begin, and source pages that follow while a room is sent."""

import numpy as np

from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.plan.operations import Section
from kvbridge.core.wire.messages import WireTable, to_wire
from kvbridge.core.wire.worker_messages import OpenRoom, Send
from kvbridge.worker.orders import OpenedRoom, Order, OrderBook
from tests.helpers.worker_bench import TOKENS

SECTION = Section(prompt_tokens=TOKENS, start_token=0, stop_token=TOKENS)


def order(number: int, peer: str) -> Order:
    return Order(Send(room=1, generation=1, order=number, section=SECTION), 0.0, peer)


def begun(book: OrderBook, most: int = 2, *, busy: str = "", unwritten: tuple[int, ...] = ()) -> list[int]:
    found = book.begin(
        most, is_ready=lambda peer: peer != busy, is_written=lambda order: order.request.order not in unwritten
    )
    return [order.request.order for order in found]


def test_orders_begin_in_their_order_and_no_peer_has_more_than_its_share() -> None:
    book = OrderBook()
    orders = [order(number, peer) for number, peer in enumerate("aaabab", start=1)]
    for one in orders:
        book.add(one)
    assert begun(book) == [1, 2, 4, 6]
    assert begun(book) == []
    book.end(orders[0])
    assert (begun(book), len(book.waiting_for("a"))) == ([3], 1)
    assert [one.request.order for one in book.active] == [2, 4, 6, 3]


def test_a_step_looks_at_no_order_behind_others_of_a_busy_peer() -> None:
    """A burst of rooms would starve the transfers that it waits for."""
    book, looked = OrderBook(), list[str]()

    class Looked(Order):
        def __getattribute__(self, name: str) -> object:
            looked.append(name)
            return super().__getattribute__(name)

    for number in range(1, 501):
        book.add(Looked(order(number, "a").request, 0.0, "ab"[number % 2]))
    assert begun(book) == [1, 3, 2, 4]
    looked.clear()
    assert (begun(book), looked) == ([], [])


def test_a_peer_that_is_not_ready_and_memory_that_is_not_written_hold_nobody_else_up() -> None:
    book = OrderBook()
    for number, peer in enumerate("aabb", start=1):
        book.add(order(number, peer))
    assert begun(book, busy="b", unwritten=(1,)) == [2]
    assert begun(book) == [1, 3, 4]


def pages(*ids: int, first: int = 0):
    return to_wire({IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32), first)})


def opened() -> OpenedRoom:
    facts = {"room": 5, "generation": 2, "peer": "decode", "prompt_tokens": 9, "prefix_tokens": 0}
    opening = OpenRoom(**facts, source=pages(3), destination=pages(7, 8))
    return OpenedRoom(opening, tables_from_wire(opening.source), tables_from_wire(opening.destination))


def test_pages_follow_those_that_are_known_and_orders_that_have_begun_keep_theirs():
    room = opened()
    grown = room.grown(pages(4, 5, first=1))
    assert grown.source[IndexSpace.FULL].ids.tolist() == [3, 4, 5]
    assert room.source[IndexSpace.FULL].ids.tolist() == [3]
    assert grown.key == room.key == (5, 2)


def test_malformed_pages_fail_the_orders_of_their_room():
    broken = opened().grown((WireTable(space=IndexSpace.FULL, first_page=1, ids=b"odd"),))
    assert broken.error is not None
    assert "malformed" in str(broken.error)
