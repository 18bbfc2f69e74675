"""Copies between device pages and their host copies: what is legal, and what is copied."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.errors import ConfigError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.tiers import copied_components, copy_pieces
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.copies import copy_operations
from kvbridge.kernels.cuda import runtime
from kvbridge.tier import copies
from kvbridge.tier.copies import CopyMeans, Direction, _Pair, copy_backend, joined
from tests.helpers.fake_cuda import FakeEvent
from tests.helpers.manifests import new_region
from tests.helpers.twin_pools import TwinPools, pages

TINY, GQA, V32 = preset("tiny-v4"), preset("tiny-gqa"), preset("deepseek-v3.2")
LF, PF = HostLayout
DEVICE_LF, DEVICE_PF = DeviceLayout
KERNEL, DIRECT = CopyBackend
FULL, SWA = IndexSpace.FULL, IndexSpace.SWA


def test_the_copy_engines_copy_what_is_one_stretch_on_both_sides_and_the_kernel_all_else():
    for host, device in product(HostLayout, DeviceLayout):
        is_stretch = (host, device) == (PF, DEVICE_PF)
        assert copy_backend(None, host=host, device=device) is (DIRECT if is_stretch else KERNEL)
        assert copy_backend(KERNEL, host=host, device=device) is KERNEL
        if is_stretch:
            assert copy_backend(DIRECT, host=host, device=device) is DIRECT
        else:
            with pytest.raises(
                ConfigError, match=f"tier.host.layout is {host} and pools.device_layout is {device}: the copy"
            ):
                copy_backend(DIRECT, host=host, device=device)


def test_page_ids_are_checked_before_anything_is_copied():
    good = {SWA: (pages(0), pages(0))}
    with TwinPools(TINY) as pools, pools.copier(Direction.LOAD_BACK) as copier:
        before = pools.content()
        for wrong, kind, reason in (
            ((pages(12), pages(0)), PageOutOfBoundsError, "pages 12 to 12 of 'full' do not all exist among 12"),
            (
                (pages(0, 1), pages(3, -1)),
                PageOutOfBoundsError,
                "pages -1 to 3 of 'full_twin' do not all exist among 10",
            ),
            ((pages(0, 1), pages(3)), InvalidInputError, "2 pages of 'full' cannot have 1 host copies"),
            ((pages(0).astype(np.int64), pages(3)), InvalidInputError, "int32, got int64"),
        ):
            with pytest.raises(kind, match=reason):
                copier.copy(good | {FULL: wrong})
        with pytest.raises(InvalidInputError, match="pages of space 'host' have no host copies here"):
            copier.copy(good | {IndexSpace.HOST: (pages(0), pages(0))})
        pools.compare(before)


def test_pairs_that_follow_each_other_are_joined():
    def pair(source: int, target: int, length: int, group: int = 0, table: int = 0) -> _Pair:
        both = (new_region(ComponentKind.MHA_KV, 0, (at,), pages=4, page_bytes=1000) for at in (source, target))
        return _Pair(group, table, *both, length)

    both = [pair(1, 5000, 300), pair(301, 5300, 200)]
    assert joined(both[::-1]) == [pair(1, 5000, 500)]
    assert len(joined([pair(1, 5000, 300), pair(301, 5400, 200)])) == 2, "apart on one side"
    assert len(joined([pair(1, 5000, 300), pair(301, 5300, 200, group=1)])) == 2
    assert len(joined([pair(1, 5000, 300), pair(301, 5300, 200, table=1)])) == 2
    assert len(joined([pair(1, 5000, 600), pair(601, 5600, 600)])) == 2, "longer than a page's stride"


class Queue:
    """A device that records its orders, and that is done when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[FakeEvent] = []
        self.held: list[tuple[FakeEvent, int]] = []
        self.batches: list[list[int]] = []
        self.launches = 0
        self.warm = False
        monkeypatch.setattr(runtime.Event, "create", self._event)
        monkeypatch.setattr(runtime, "copy_batch", self._batch)
        monkeypatch.setattr(copies, "StretchCopier", self._copier)

    def _event(self, device: int) -> FakeEvent:
        self.events.append(event := FakeEvent())
        event.hold = lambda stream: self.held.append((event, stream))  # type: ignore[attr-defined]
        event.synchronize = lambda: setattr(event, "done", True)  # type: ignore[attr-defined]
        return event

    def _batch(self, operations: Operations, *, device: int, stream: int) -> None:
        copy_operations(operations.source, operations.destination, operations.length)
        self.batches.append(operations.length.tolist())

    def _copier(self, device: int, *, blocks: int) -> Queue:
        assert blocks == 8
        return self

    def reserve(self, operations: int, submissions: int) -> None:
        assert operations * submissions >= 1 << 16

    def warm_up(self) -> None:
        self.warm = True

    def submit(self, operations: Operations, *, stream: int) -> None:
        assert self.warm, "the first launch of a kernel waits for all that the device does"
        copy_operations(operations.source, operations.destination, operations.length)
        self.launches += 1

    def close(self) -> None:
        pass


@pytest.mark.parametrize("backend", CopyBackend)
@pytest.mark.parametrize("direction", Direction)
def test_what_a_gpu_is_told_and_who_waits_for_it(monkeypatch: pytest.MonkeyPatch, backend, direction):
    queue = Queue(monkeypatch)
    monkeypatch.setattr(copies, "MOST_GROUPS", 2)
    moves = {FULL: (pages(7, 0, 3), pages(2, 9, 5)), SWA: (pages(1, 4), pages(3, 0))}
    with TwinPools(TINY, layout=PF, page_first=True) as pools:
        expected = pools.expected(moves, direction)
        with pools.copier(direction, CopyMeans(backend, device=0)) as copier:
            # Only loads are waited for by layer.
            groups = 2 if backend is KERNEL and direction is Direction.LOAD_BACK else 1
            first, second = copier.copy(moves, stream=5), copier.copy({}, stream=5)
            pools.compare(expected)
            assert [event.streams for event in queue.events] == [[5]] * 2 * groups
            assert (copier.done(first), copier.done(second)) == (False, False)
            copier.wait(first, stream=8)
            assert queue.held == [(queue.events[groups - 1], 8)]
            layers = sorted({region.layer for region in pools.twins})
            for layer in layers:
                copier.wait_layer(layer, second, stream=9)
            marks = queue.events[groups : 2 * groups]
            halves = [marks[position * groups // len(layers)] for position in range(len(layers))]
            assert queue.held[1:] == [(mark, 9) for mark in halves]
            if backend is CopyBackend.DIRECT:
                # C4, which decode may keep on its host, has a block of its own in device pools: two stretches a page.
                assert [len(lengths) for lengths in queue.batches] == [2 * 3 + 2 * len(pieces_of_checkpoints()), 0]
            else:
                assert queue.launches == 2 * groups
            queue.events[0].done = True
            assert copier.done(first) is (groups == 1), "a copy is done with its last group"
            queue.events[groups - 1].done = True
            assert (copier.done(first), copier.done(second)) == (True, False)
            third = copier.copy({}, stream=5)
            assert sorted(len(one.streams) for one in queue.events[:groups]) == [2] * groups, "events are used again"
            for mark in marks:
                mark.done = True
            assert [copier.done(each) for each in (first, second, third)] == [True, True, False]
            copier.wait(second, stream=10)
            copier.wait_layer(layers[0], second, stream=10)
            assert 10 not in {stream for _, stream in queue.held}
        assert all(event.closed for event in queue.events)


def pieces_of_checkpoints() -> list[object]:
    """Return the pieces of one checkpoint of the model."""
    swa = [each for each in copied_components(TINY, (), checkpoints=True) if each.space is SWA]
    return [piece for each in swa for _ in each.layers for piece in copy_pieces(TINY, each, (0, 1), (0, 1))]
