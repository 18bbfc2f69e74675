"""Source pages that follow while a room is sent."""

from __future__ import annotations

import numpy as np

from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.wire.messages import WireTable, to_wire
from kvbridge.core.wire.worker_messages import OpenRoom
from kvbridge.worker.orders import OpenedRoom


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
