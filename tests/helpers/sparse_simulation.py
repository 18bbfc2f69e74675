"""A hot buffer beside a plain model of what it must hold, which knows nothing of slots, rings or pages."""

from dataclasses import dataclass, field

import numpy as np
import torch

from kvbridge.core.geometry.components import Component, ComponentKind
from kvbridge.core.geometry.costs import AGE_PLANES, SparseSettings
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.sparse import ReleasedRequest, SparseCache
from tests.helpers.manifests import new_region

QUIET_S = 20.0


def c4_component(name: str = "tiny-v4") -> Component:
    return preset(name).component(ComponentKind.C4_KV)


def settings(**changes) -> SparseSettings:
    facts = {"max_requests": 3, "hot_rows": 128, "ring_pages": 2, "top_k": 48, "max_tokens": 4 * 1024} | changes
    return SparseSettings(**facts)


def row_bytes_of(component: Component, serial: int, layer: int, rows: np.ndarray) -> np.ndarray:
    """The rows of one request in one layer: uint8 [n, row_bytes]; no two of any request, layer or number are equal."""
    count = component.row_bytes // 4
    base = (rows.astype(np.uint32) * np.uint32(2654435761)) ^ np.uint32(serial * 40503 + layer * 97)
    words = base[:, None] + np.arange(count, dtype=np.uint32) * np.uint32(2246822519)
    words[:, 0], words[:, -1] = rows.astype(np.uint32), np.uint32(serial << 8 | layer)
    return words.astype("<u4").view(np.uint8).reshape(len(rows), component.row_bytes)


@dataclass
class HostPool:
    """Host memory of all layers, with its regions; `page_first` puts all layers of a page together, in two extents."""

    component: Component
    pages: int
    pinned: bool = False
    page_first: bool = False
    memory: torch.Tensor = field(init=False)
    regions: list[Region] = field(init=False)

    def __post_init__(self) -> None:
        layers, page_bytes = len(self.component.layers), self.component.page_bytes()
        shape = (self.pages, layers, page_bytes) if self.page_first else (layers, self.pages, page_bytes)
        memory = torch.full(shape, 0xEE, dtype=torch.uint8, pin_memory=self.pinned)
        self.memory = memory.transpose(0, 1) if self.page_first else memory
        each = -(-self.pages // 2) if self.page_first else self.pages
        sizes = {"pages": self.pages, "page_bytes": page_bytes, "per_extent": each, "stride": self.memory.stride(1)}
        self.regions = []
        for position, layer in enumerate(self.component.layers):
            starts = [self.memory[position, first].data_ptr() for first in range(0, self.pages, each)]
            self.regions.append(new_region(self.component.kind, layer, starts, space=IndexSpace.HOST, **sizes))

    def part(self, number: int) -> torch.Tensor:
        """One part of all rows: uint8 [layers, pages, slots, part bytes]."""
        offset, size = self.component.part_offset(number), self.component.row_parts_bytes[number]
        slots = self.component.slots_per_page
        return self.memory[:, :, offset : offset + slots * size].unflatten(2, (slots, size))

    def put(self, page_ids: np.ndarray, serial: int, rows: int) -> None:
        numbers, slots = np.arange(rows), self.component.slots_per_page
        pages = torch.from_numpy(page_ids[numbers // slots].astype(np.int64))
        places = torch.from_numpy(numbers % slots)
        for position, layer in enumerate(self.component.layers):
            content = torch.from_numpy(row_bytes_of(self.component, serial, layer, numbers))
            start = 0
            for number, size in enumerate(self.component.row_parts_bytes):
                self.part(number)[position][pages, places] = content[:, start : start + size]
                start += size

    def get(self, page_ids: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        slots = self.component.slots_per_page
        pages, places = page_ids[rows // slots].astype(np.int64), rows % slots
        parts = [self.part(nth)[position].numpy()[pages, places] for nth in range(len(self.component.row_parts_bytes))]
        return np.concatenate(parts, axis=1)


@dataclass
class PlainRequest:
    serial: int
    tokens: int
    pages: np.ndarray
    reserved: np.ndarray
    """Pages that the request has in the pool but does not name to the cache yet, for `extend`."""
    complete_rows_on_host: int

    @property
    def rows(self) -> int:
        return self.tokens // 4


class SparseSimulation:
    def __init__(
        self,
        options: SparseSettings | None = None,
        *,
        component: Component | None = None,
        host_pages: int = 96,
        device: str = "cpu",
        page_first: bool = False,
        seed: int = 0,
    ) -> None:
        self.settings = options or settings()
        self.component = component or c4_component()
        self.device = torch.device(device)
        self.pool = HostPool(self.component, host_pages, pinned=self.device.type == "cuda", page_first=page_first)
        self.cache = SparseCache(self.settings, self.component, self.pool.regions, self.device)
        self.random = np.random.default_rng(seed)
        self.free_pages = list(self.random.permutation(host_pages))
        self.requests: dict[int, PlainRequest] = {}
        self.serial = 0
        self.answers: list[np.ndarray] = []
        """Answers of swap_in in the last step, layer by layer."""

    def admit(self, slot: int, tokens: int, *, more_tokens: int = 256, named_pages: int | None = None) -> None:
        self.serial += 1
        slots = self.component.slots_per_page
        count = -(-((tokens + more_tokens) // 4) // slots)
        pages = np.array([self.free_pages.pop() for _ in range(count)], dtype=np.int32)
        self.pool.put(pages, self.serial, tokens // 4)
        named = count if named_pages is None else max(named_pages, -(-(tokens // 4) // slots))
        self.cache.admit(slot, pages[:named], tokens // 4)
        complete = tokens // 4 // slots * slots
        self.requests[slot] = PlainRequest(self.serial, tokens, pages[:named], pages[named:], complete)

    def extend(self, slot: int) -> None:
        request = self.requests[slot]
        request.pages = np.concatenate([request.pages, request.reserved[:1]])
        request.reserved = request.reserved[1:]
        self.cache.extend(slot, request.pages)

    def can_step(self, slot: int) -> bool:
        request = self.requests[slot]
        rows = (request.tokens + 1) // 4
        return rows <= len(request.pages) * self.component.slots_per_page and rows <= self.cache.memory.shape.max_rows

    def step(self, slots: list[int], *, padding: int = 0, choose=None, verify: bool = True) -> None:
        """One token for each of `slots`; `choose(slot, layer)` picks the selected rows, -1 and nonsense included."""
        entries = []
        for slot in slots:
            self.requests[slot].tokens += 1
            entries.append((slot, self.requests[slot].rows))
        self.cache.begin_step(entries)
        batch = len(slots) + padding
        self.answers.clear()
        for layer in self.component.layers:
            top_k = self.selected(slots, layer, batch, choose or self.choose)
            self.cache.append(layer, self.new_rows(slots, layer, batch))
            found = self.cache.swap_in(layer, torch.from_numpy(top_k).to(self.device))
            self.answers.append(found.cpu().numpy().copy())
            if verify:
                self.verify(slots, layer, top_k, self.answers[-1])
        self.cache.end_step()
        self.note_backups(slots)

    def note_backups(self, slots: list[int]) -> None:
        for slot in slots:
            request, each = self.requests[slot], self.component.slots_per_page
            request.complete_rows_on_host = max(request.complete_rows_on_host, request.rows // each * each)

    def release(self, slot: int) -> ReleasedRequest:
        """Its host pages are free for others when the result is reached, and here at once: so wait for it."""
        counts = self.cache.counts(slot)
        quiet = self.cache.release(slot)
        quiet.wait(QUIET_S)
        told = quiet.rows()
        assert (told.hit, told.loaded, told.preloaded) == (counts.hits, counts.loaded, counts.preloaded)
        self.verify_host(slot)
        request = self.requests.pop(slot)
        gone = np.concatenate([request.pages, request.reserved])
        self.pool.memory[:, torch.from_numpy(gone.astype(np.int64))] = 0xDD
        self.free_pages = [*self.free_pages, *gone.tolist()]
        self.random.shuffle(self.free_pages)
        return quiet

    def choose(self, slot: int, layer: int) -> np.ndarray:
        """A mixture: recent rows, a wandering neighbourhood, anything, duplicates, -1 and rows that do not exist."""
        rows, k = max(self.requests[slot].rows, 1), self.settings.top_k
        recent = rows - 1 - self.random.integers(0, 80, k)
        near = (rows // 3 + self.requests[slot].tokens // 3 + self.random.integers(0, 60, k)) % rows
        anywhere = self.random.integers(0, rows, k)
        wrong = self.random.choice(np.array([-1, -1, rows, rows + 7, -5, 1 << 20]), k)
        kind = self.random.random(k)
        chosen = np.select([kind < 0.3, kind < 0.6, kind < 0.9], [recent, near, anywhere], wrong)
        chosen[:1] = rows - 1  # the newest
        return chosen.astype(np.int32)

    def selected(self, slots: list[int], layer: int, batch: int, choose) -> np.ndarray:
        top_k = np.full((batch, self.settings.top_k), 5, dtype=np.int32)  # padding entries select, too
        for number, slot in enumerate(slots):
            top_k[number] = choose(slot, layer)
        return top_k

    def new_rows(self, slots: list[int], layer: int, batch: int) -> torch.Tensor:
        content = np.full((batch, self.component.row_bytes), 0xAB, dtype=np.uint8)
        for number, slot in enumerate(slots):
            request = self.requests[slot]
            if request.tokens % 4 == 0:
                content[number] = row_bytes_of(self.component, request.serial, layer, np.array([request.rows - 1]))[0]
        return torch.from_numpy(content).to(self.device)

    def state(self) -> dict[str, np.ndarray]:
        """The tables of the requests that are there, to be compared with those of another device."""
        memory, slots = self.cache.memory, sorted(self.requests)
        by_layer = {name: getattr(memory, name)[:, slots] for name in ("slot_of_row", "row_of_slot", "ages", "tallies")}
        by_slot = {name: getattr(memory, name)[slots] for name in ("host_pages", "ring_begin")}
        tables = {name: tensor.cpu().numpy() for name, tensor in (by_layer | by_slot).items()}
        tables["tallies"] = tables["tallies"][..., :3]  # the fourth is the kernel's own
        return tables

    def verify(self, slots: list[int], layer: int, top_k: np.ndarray, found: np.ndarray) -> None:
        for number, slot in enumerate(slots):
            request = self.requests[slot]
            valid = (top_k[number] >= 0) & (top_k[number] < request.rows)
            assert (found[number] >= 0).tolist() == valid.tolist(), f"-1 in the wrong places, request slot {slot}"
            rows = self.cache.rows(layer, torch.from_numpy(found[number][valid]).to(self.device)).cpu().numpy()
            expected = row_bytes_of(self.component, request.serial, layer, top_k[number][valid])
            wrong = np.flatnonzero((rows != expected).any(axis=1))
            assert not len(wrong), (
                f"request slot {slot} at {request.tokens} tokens, layer {layer}: not themselves are rows "
                f"{top_k[number][valid][wrong][:8]}"
            )
        assert (found[len(slots) :] == -1).all(), "padding must be -1"

    def verify_host(self, slot: int) -> None:
        request = self.requests[slot]
        rows = np.arange(request.complete_rows_on_host)
        for position, layer in enumerate(self.component.layers):
            found = self.pool.get(request.pages, position, rows)
            expected = row_bytes_of(self.component, request.serial, layer, rows)
            assert (found == expected).all(), f"request slot {slot}, layer {layer}: host pages differ"


def check_tables(cache: SparseCache) -> None:
    """Check every request in every layer. Waits for the device."""
    memory = cache.memory
    cache._streams.synchronize()
    slot_of_row, row_of_slot = memory.slot_of_row.cpu().numpy(), memory.row_of_slot.cpu().numpy()
    ages, tallies = memory.ages.cpu().numpy().view(np.uint32), memory.tallies.cpu().numpy()
    pages, ring_begin = memory.host_pages.cpu().numpy(), memory.ring_begin.cpu().numpy()
    for slot in cache.requests._requests:
        request = cache.requests.get(slot)
        count = len(request.pages)
        assert ring_begin[slot] == request.ring_begin
        assert np.array_equal(pages[slot, :count, 0], request.pages)
        assert (pages[slot, count:] == -1).all()
        assert np.array_equal(pages[slot, np.argsort(request.pages), 1], np.arange(count)), "ranks of the page ids"
        for layer in range(len(slot_of_row)):
            rows = np.flatnonzero(slot_of_row[layer, slot] >= 0)
            held = row_of_slot[layer, slot]
            assert np.array_equal(held[slot_of_row[layer, slot][rows]], rows), "resident rows are in their slots"
            assert len(rows) == np.count_nonzero(held >= 0), "slots hold resident rows only"
            assert (rows < cache.requests.shape.ring_start(request.rows, request.ring_begin)).all(), (
                "rows in the ring are in no hot slot"
            )
            planes = ages[layer, slot][:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None] & np.uint32(1)
            bits = planes.reshape(-1, AGE_PLANES)
            assert not bits[held < 0].any(), "an empty slot has no age"
            assert bits[:, 0].sum() == tallies[layer, slot, 0], "slots of the present generation are counted"
