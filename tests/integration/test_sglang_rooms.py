"""Rooms of the SGLang adapter over two real nodes and tensors, with this test in the place of SGLang's schedulers."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Role
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.kit.node import NodePlace, NodePlan, open_node
from kvbridge.engine.memory import AdoptedWorker
from kvbridge.engine.sglang import SGLANG
from kvbridge.engine.sglang.pools import Buffer, RankPools, instance_geometry, rank_regions
from kvbridge.engine.sglang.rooms import FetchedRoom, Poll, Prompt, Rooms, SentRoom, room_of
from tests.helpers.cluster import eventually

R0 = Rank(pp=0, tp=0)
TOKENS, LAYERS, ROW_BYTES, CHUNK = 70_000, 2, 64, 8_192
"""More pages of one token than 16 bits can number."""
SETTINGS = {"transports": {"order": ["mooncake"]}}


class Side:
    """A scheduler process with pages of one token."""

    def __init__(self, role: Role) -> None:
        self.tensors = [torch.randint(256, (TOKENS, ROW_BYTES), dtype=torch.uint8) for _ in range(2 * LAYERS)]
        buffers = [
            Buffer(
                kind=ComponentKind.MHA_KV, layer=number, address=at.data_ptr(), page_bytes=ROW_BYTES, page_count=TOKENS
            )
            for number, at in enumerate(self.tensors)
        ]
        pools = RankPools(page_tokens=1, buffers=tuple(buffers), device="cpu")
        cache = instance_geometry({R0: pools}, name="m", tp_size=1, facts={})
        place = NodePlace(SGLANG, role, f"test-{uuid.uuid4()}", SETTINGS)
        self.regions, self.runtime_dir = rank_regions(cache.geometry, pools, R0), place.runtime_dir
        with ExitStack() as stack:
            self.node = open_node(NodePlan(place, cache, 1, {R0: "cpu"}))
            stack.callback(self.node.close)
            stack.callback(self.release)
            self.resume()
            attachment = NodeAttachment(role, place.runtime_dir)
            stack.callback(attachment.close)
            attachment.begin()
            attachment.wait(60.0)
            self.rooms = Rooms(attachment, leads=True)
            self.rooms.look()
            self.close = stack.pop_all().close

    def release(self) -> None:
        self._worker.close()

    def resume(self) -> None:
        self._worker = AdoptedWorker(self.runtime_dir, R0, self.regions)


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Side, Side]]:
    with (
        tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        patch.setenv("XDG_RUNTIME_DIR", home)
        made = []
        for role in (Role.PREFILL, Role.DECODE):
            made.append(Side(role))
            stack.callback(made[-1].close)
        yield made[0], made[1]


def asked(
    sides: tuple[Side, Side], tokens: int, attempt: int = 1, number: int = 0, *, held_first: bool = False
) -> tuple[SentRoom, FetchedRoom]:
    """A room with pages on decode, of which prefill has told."""
    prefill, decode = sides
    room = room_of(number or uuid.uuid4().int % 2**63, attempt)
    sent = SentRoom(room, Prompt(tokens, b"d", attempt), prefill.rooms)
    fetched = FetchedRoom(room, Prompt(tokens, b"d", attempt), decode.rooms)
    if held_first:
        sent.hold()
    fetched.fetch([prefill.node.endpoint().control])
    fetched.provide({IndexSpace.FULL: PageTable(IndexSpace.FULL, np.arange(tokens, dtype=np.int32))}, 0)
    if not held_first:
        sent.hold()
    return sent, fetched


def pages(tokens: int) -> np.ndarray:
    """Two stretches: the second half of the pages is before the first one."""
    return np.roll(np.arange(tokens, dtype=np.int32), tokens // 2)


def publish(sent: SentRoom, tokens: int) -> None:
    """Tell of further tokens, in chunks."""
    stop = sent.published + tokens
    while sent.published < stop:
        some = pages(sent.prompt.tokens)[sent.published : min(stop, sent.published + CHUNK)]
        last = sent.published + len(some) == sent.prompt.tokens
        sent.publish(len(some), {IndexSpace.FULL: sent.next_table(some)}, b"m" if last else None)


def wait_over(*rooms: SentRoom | FetchedRoom) -> None:
    def over() -> bool:
        for room in rooms:
            room.rooms.look()
        return all(room.is_over for room in rooms)

    eventually("the rooms are over", over)
    for room in rooms:
        room.rooms.forget(room)


def assert_crosses(sides: tuple[Side, Side], tokens: int, **more: Any) -> FetchedRoom:
    """See that a prompt arrives, byte for byte. Return decode's room."""
    prefill, decode = sides
    for tensor in prefill.tensors:
        tensor.random_(256)
    sent, fetched = asked(sides, tokens, **more)
    publish(sent, tokens)
    wait_over(sent, fetched)
    assert (sent.state, fetched.state) == (Poll.SUCCESS, Poll.SUCCESS), (sent.reason, fetched.reason)
    where = torch.from_numpy(pages(tokens)).long()
    assert all(
        torch.equal(ours[where], theirs[:tokens]) for ours, theirs in zip(prefill.tensors, decode.tensors, strict=True)
    )
    return fetched


def test_pages_of_one_token_are_moved_by_the_stretch(sides: tuple[Side, Side]) -> None:
    fetched = assert_crosses(sides, TOKENS)
    assert fetched.event is not None
    stretches = -(-TOKENS // CHUNK) + 1
    assert fetched.event.amounts[ComponentKind.MHA_KV].operations <= stretches * 2 * LAYERS


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
def test_memory_is_released_in_the_middle_of_a_room(sides: tuple[Side, Side], side: int) -> None:
    """Nobody touches the memory afterwards. The other side hears that the room has failed."""
    releases, rooms = sides[side], asked(sides, 4_000)
    publish(rooms[0], 2_000)
    releases.release()
    for tensor in releases.tensors:
        tensor.fill_(7)
    releases.rooms.give_up_all("memory is released")
    assert (rooms[side].state, rooms[side].reason) == (Poll.FAILED, "memory is released")
    wait_over(*rooms)
    assert rooms[1 - side].state is Poll.FAILED
    waiting = asked(sides, 4_000)
    publish(waiting[0], 4_000)
    assert all((tensor == 7).all() for tensor in releases.tensors)
    releases.resume()
    wait_over(*waiting)
    assert [room.state for room in waiting] == [Poll.SUCCESS, Poll.SUCCESS], [room.reason for room in waiting]
    assert_crosses(sides, 4_000)


@pytest.mark.parametrize("held_first", [True, False])
def test_an_attempt_follows_another_one_that_prefill_has_not_forgotten(
    sides: tuple[Side, Side], *, held_first: bool
) -> None:
    number = 7 + held_first
    rooms = asked(sides, 500, number=number)
    publish(rooms[0], 500)
    eventually("decode has it", lambda: rooms[1].rooms.look() or rooms[1].is_over)
    assert_crosses(sides, 500, attempt=2, number=number, held_first=held_first)
    wait_over(*rooms)
    assert [room.state for room in rooms] == [Poll.SUCCESS, Poll.SUCCESS]
