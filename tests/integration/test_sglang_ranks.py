"""The rooms of SGLang servers with several ranks over real nodes and tensors, with this test in place of SGLang's schedulers."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Role
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.kit.node import START_S, NodePlace, NodePlan, open_node
from kvbridge.engine.memory import AdoptedWorker
from kvbridge.engine.sglang import SGLANG
from kvbridge.engine.sglang.pools import Buffer, RankPools, instance_geometry, rank_regions
from kvbridge.engine.sglang.rooms import FetchedRoom, Poll, Prompt, Room, Rooms, SentRoom

LIMIT_S, OFFER_S = 60.0, 20.0
"""Prefill's own limit is the shorter one: a killed decode node may not have said that it comes."""
THOROUGH = pytest.mark.thorough
PAGE, PAGES, LAYERS, TOKEN_BYTES = 16, 8, 4, 512
PROMPT = Prompt(3 * PAGE - 1, b"p")


@pytest.fixture(autouse=True)
def runtime_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home:
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield


class Server:
    """All ranks of an SGLang without the model, in this process."""

    def __init__(self, role: Role, *, tp_size: int = 1, pp_size: int = 1) -> None:
        self.ranks = [Rank(pp=pp, tp=tp) for pp in range(pp_size) for tp in range(tp_size)]
        each, width = 2 * LAYERS // pp_size, PAGE * TOKEN_BYTES // tp_size
        self.pages = {
            rank: {
                layer: torch.randint(0, 256, (PAGES, width), dtype=torch.uint8)
                for layer in range(rank.pp * each, (rank.pp + 1) * each)
            }
            for rank in self.ranks
        }
        pools = {
            rank: RankPools(PAGE, tuple(_buffer(*item) for item in held.items()), "cpu")
            for rank, held in self.pages.items()
        }
        cache = instance_geometry(pools, name="m", tp_size=tp_size, facts={"dtype": "uint8"})
        settings = {"transports": {"order": ["mooncake"]}, "timeouts": {"offer_s": OFFER_S}}
        place = NodePlace(SGLANG, role, f"test-{uuid.uuid4()}", settings)
        with ExitStack() as stack:
            self.node = open_node(NodePlan(place, cache, tp_size, dict.fromkeys(self.ranks, "cpu")))
            stack.callback(self.node.close)
            self.workers = [
                AdoptedWorker(place.runtime_dir, rank, rank_regions(cache.geometry, pools[rank], rank))
                for rank in self.ranks
            ]
            for worker in self.workers:
                stack.callback(worker.close)
            led = {rank: [one for one in self.ranks if one.pp == rank.pp and not rank.tp] for rank in self.ranks}
            attached = [NodeAttachment(role, place.runtime_dir, led[rank]) for rank in self.ranks]
            for one in attached:
                stack.callback(one.close)
                one.begin()
            for one in attached:
                one.wait(START_S)
            self.rooms = [
                Rooms(one, leads=bool(led[rank]), holds_back=True)
                for one, rank in zip(attached, self.ranks, strict=True)
            ]
            self.look()
            self._closing = stack.pop_all()
        self.close = self._closing.close

    def look(self) -> None:
        for rooms in self.rooms:
            rooms.look()

    def stack(self, layer: int, *ids: int) -> torch.Tensor:
        """Return pages of a layer from all ranks that hold it, side by side."""
        return torch.cat([held[layer][list(ids)] for held in self.pages.values() if layer in held], dim=1)


def _buffer(layer: int, pages: torch.Tensor) -> Buffer:
    return Buffer(
        kind=ComponentKind.MHA_KV, layer=layer, address=pages.data_ptr(), page_bytes=pages.shape[1], page_count=PAGES
    )


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:

        def made(role: Role, **split: int) -> Server:
            server = Server(role, **split)
            stack.callback(server.close)
            return server

        yield made


def until(servers: Sequence[Server], done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline_s, what
        for server in servers:
            server.look()
        time.sleep(0.001)


def table(*ids: int, first: int = 0) -> dict[IndexSpace, PageTable]:
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32), first)}


def fetch(decode: Server, prefill: Server, room: int, *ids: int) -> list[FetchedRoom]:
    made = [FetchedRoom(room, PROMPT, rooms) for rooms in decode.rooms]
    for one in made:
        one.fetch([prefill.node.endpoint().control])
    until([decode], lambda: all(one.poll >= Poll.WAITING for one in made), "every rank hears")
    for one in made:
        one.provide(table(*ids), 0)
    return made


def hold(prefill: Server, room: int) -> list[SentRoom]:
    made = [SentRoom(room, PROMPT, rooms) for rooms in prefill.rooms]
    for one in made:
        one.hold()
    return made


def over(rooms: Sequence[Room], state: Poll) -> bool:
    return min(room.poll for room in rooms) == state


@pytest.mark.parametrize(
    ("prefill_split", "decode_split"),
    [*(pytest.param(*split, marks=THOROUGH) for split in (((2, 1), (2, 1)), ((1, 2), (1, 1)))), ((2, 2), (2, 1))],
)
def test_every_rank_gets_its_own_pages(
    serve: Callable[..., Server], prefill_split: tuple[int, int], decode_split: tuple[int, int]
) -> None:
    """Each stage publishes in its own time, the last stage first."""
    prefill, decode = (
        serve(role, tp_size=tp, pp_size=pp)
        for role, (tp, pp) in ((Role.PREFILL, prefill_split), (Role.DECODE, decode_split))
    )
    for number in range(3):
        fetched, sent = fetch(decode, prefill, 7 + number, 5, 0, 3), hold(prefill, 7 + number)
        for one in reversed(sent):
            for tokens, pages, metadata in ((2 * PAGE, table(1, 6), None), (PAGE - 1, table(2, first=2), b"row")):
                one.publish(tokens, pages, metadata)
                prefill.look()
        until([prefill, decode], lambda: over(fetched, Poll.SUCCESS) and over(sent, Poll.SUCCESS), "transferred")  # noqa: B023
        for layer in range(2 * LAYERS):
            assert torch.equal(decode.stack(layer, 5, 0), prefill.stack(layer, 1, 6)), layer
            live = torch.cat(
                [
                    held[layer][2, : (PAGE - 1) * held[layer].shape[1] // PAGE]
                    for held in prefill.pages.values()
                    if layer in held
                ]
            )
            got = torch.cat(
                [
                    held[layer][3, : (PAGE - 1) * held[layer].shape[1] // PAGE]
                    for held in decode.pages.values()
                    if layer in held
                ]
            )
            assert torch.equal(got, live), layer
        for held in decode.pages.values():
            for pages in held.values():
                pages.zero_()
        for room in (*sent, *fetched):
            room.rooms.forget(room)


def test_decodes_node_is_killed_while_ranks_are_written_to(serve: Callable[..., Server]) -> None:
    """The client hears at once. Pages are free when all ranks serve the next node, which then serves the next room."""
    prefill, decode = serve(Role.PREFILL, tp_size=2), serve(Role.DECODE, tp_size=2)
    fetched, sent = fetch(decode, prefill, 7, 5, 0, 3), hold(prefill, 7)
    sent[0].publish(2 * PAGE, table(1, 6))
    os.kill(decode.node.endpoint().pid, signal.SIGKILL)
    until([prefill, decode], lambda: over(fetched, Poll.FAILED), "decode's request has failed")
    assert fetched[0].may_be_written
    until([prefill, decode], lambda: not fetched[0].may_be_written, "its pages can be used again")
    until([prefill, decode], lambda: over(sent, Poll.FAILED), "prefill's request has failed")
    for room in (*sent, *fetched):
        room.rooms.forget(room)
    fetched, sent = fetch(decode, prefill, 8, 5, 0, 3), hold(prefill, 8)
    sent[0].publish(PROMPT.tokens, table(1, 6, 2), b"row")
    until([prefill, decode], lambda: over(fetched, Poll.SUCCESS) and over(sent, Poll.SUCCESS), "the next one")
    assert torch.equal(decode.stack(0, 5, 0), prefill.stack(0, 1, 6))


@pytest.mark.parametrize("side", [pytest.param(0, marks=THOROUGH), 1])
def test_the_end_of_one_rank_ends_the_rooms_of_both_sides(serve: Callable[..., Server], side: int) -> None:
    prefill, decode = servers = serve(Role.PREFILL, tp_size=2), serve(Role.DECODE, tp_size=2)
    before = fetch(decode, prefill, 7, 7, 1, 2), hold(prefill, 7)
    before[1][0].publish(PROMPT.tokens, table(1, 6, 2), b"row")
    until(servers, lambda: all(over(rooms, Poll.SUCCESS) for rooms in before), "the nodes know each other")
    fetched, sent = fetch(decode, prefill, 8, 5, 0, 3), hold(prefill, 8)
    sent[0].publish(2 * PAGE, table(1, 6))
    servers[side].workers[1].close()
    until(servers, lambda: all(room.state is Poll.FAILED for room in (*fetched, *sent)), "all ranks of both sides know")
    assert not any(room.may_be_written for room in fetched)
    # A writer may see the connection end before the node hears that the rank is gone.
    assert all("pp0.tp1" in room.reason for room in fetched), [room.reason for room in fetched]


def test_another_split_of_heads_is_refused_by_name(
    serve: Callable[..., Server], capfd: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = serve(Role.PREFILL, tp_size=2), serve(Role.DECODE)
    fetched, sent = fetch(decode, prefill, 7, 5, 0, 3), hold(prefill, 7)
    until([prefill, decode], lambda: over(fetched, Poll.FAILED), "decode's request has failed")
    told = "attention_heads is split over 2 ranks (--tp-size)"
    assert told in fetched[0].reason
    logs = capfd.readouterr().err.splitlines()
    assert {role for role in Role if any(told in line and f"role={role}" in line for line in logs)} == {*Role}
    assert not sent[0].is_over
