"""Rooms that engines admit themselves, with pages of their own, through real daemons."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import PeerError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Tables
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.memory import adopted_region
from kvbridge.engine.prefill import PrefillEngine
from tests.helpers.cluster import Cluster, cluster

TINY = preset("tiny-gqa")
PAGE = TINY.tokens_per_page
R0 = Rank(pp=0, tp=0)
PAGES = 16
LIMIT_S = 30.0


def memory(fill: int) -> tuple[torch.Tensor, list[Region]]:
    """All layers in one tensor [layer, page, byte], as vLLM has them on a CPU."""
    [component] = TINY.components
    tensor = torch.full((TINY.layer_count, PAGES, component.page_bytes()), fill, dtype=torch.uint8)
    return tensor, [
        adopted_region(component, layer, tensor[layer], lanes=(0, component.lanes)) for layer in component.layers
    ]


def pages(*ids: int, first: int = 0) -> Tables:
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32), first)}


@dataclass
class Pair:
    running: Cluster
    sender: PrefillEngine
    reader: DecodeEngine
    source: torch.Tensor
    target: torch.Tensor

    @property
    def place(self) -> tuple[PeerAddress, ...]:
        control = self.running.prefill.endpoint().control
        return (PeerAddress(endpoint=control.endpoint, public_key=control.public_key),)

    def write(self, *ids: int) -> None:
        for page in ids:
            self.source[:, page] = torch.randint(0, 256, self.source[:, page].shape, dtype=torch.uint8)

    def hear(self, engine: PrefillEngine | DecodeEngine, room: int) -> RoomEvent:
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            for event in engine.events(0.2):
                if event.room == room:
                    return event
        raise AssertionError(f"nothing was said of room {room}")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with running_pair() as made:
        yield made


@contextmanager
def running_pair() -> Iterator[Pair]:
    pools = {"memory": "adopted"}
    with (
        cluster(
            {"preset": "tiny-gqa"},
            transport="mooncake",
            prefill={"pools": pools},
            decode={"pools": pools | {"host": {"components": []}}},
            wait=False,
        ) as running,
        engines(running) as made,
    ):
        yield made


@contextmanager
def engines(running: Cluster) -> Iterator[Pair]:
    for daemon in (running.prefill, running.decode):
        daemon.endpoint()
    (source, theirs), (target, ours) = memory(1), memory(2)
    with ExitStack() as stack:
        sender = stack.enter_context(PrefillEngine.adopt(running.prefill.runtime_dir, {R0: theirs}))
        reader = stack.enter_context(DecodeEngine.adopt(running.decode.runtime_dir, {R0: ours}))
        running.wait_ready()
        made = Pair(running, sender, reader, source, target)
        sender.hold(99, prompt_tokens=1, pages=[0], published_tokens=1)
        reader.fetch(99, prompt_tokens=1, prefill=made.place, pages=[0])
        heard = made.hear(reader, 99)
        assert heard.kind == "committed", heard.reason  # so the nodes know each other
        assert made.hear(sender, 99).kind == "completed"
        yield made


def test_a_prompt_crosses_by_one_message_a_side(pair: Pair) -> None:
    pair.write(3, 4)
    pair.sender.hold(1, prompt_tokens=PAGE + 9, pages=[3, 4], published_tokens=PAGE + 9, metadata=b"first token")
    pair.reader.fetch(1, prompt_tokens=PAGE + 9, prefill=pair.place, pages=[7, 6])
    event = pair.hear(pair.reader, 1)
    assert (event.kind, event.metadata) == ("committed", {str(R0): b"first token"})
    assert pair.hear(pair.sender, 1).kind == "completed"
    assert torch.equal(pair.target[:, 7], pair.source[:, 3])


def test_pages_follow_while_it_is_computed_and_decode_comes_when_it_has_some(pair: Pair) -> None:
    pair.reader.fetch(2, prompt_tokens=3 * PAGE, prefill=pair.place)
    pair.sender.hold(2, prompt_tokens=3 * PAGE)
    pair.write(8, 9, 10)
    room = pair.sender.begin(2, prompt_tokens=3 * PAGE, pages=[8])
    room.publish(PAGE)
    pair.reader.fetch(2, pages=[8, 9], held_by_decode=PAGE)
    room.publish(2 * PAGE, pages=[9])
    room.publish(3 * PAGE, pages=[10])
    room.finish()
    assert pair.hear(pair.reader, 2).kind == "committed"
    assert pair.hear(pair.sender, 2).kind == "completed"
    assert torch.equal(pair.target[:, 8:10], pair.source[:, 9:11])


def test_the_end_of_a_node_is_seen_by_its_engine_and_its_worker_holds_nothing_any_more() -> None:
    with running_pair() as pair:
        pair.reader.fetch(1, prompt_tokens=PAGE, prefill=pair.place, pages=[3])
        pair.running.decode.kill()
        deadline_s, ends = time.monotonic() + LIMIT_S, []
        while not ends and time.monotonic() < deadline_s:
            ends = pair.reader.worker_ends()
            time.sleep(0.01)
        assert [end.rank for end in ends] == [R0]
        with pytest.raises(PeerError):
            pair.hear(pair.reader, 1)
