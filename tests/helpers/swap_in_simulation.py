"""A whole world for swap-in in torch tensors on any device: a host pool, a hot region and the state; rows are random bytes."""

from dataclasses import dataclass

import numpy as np
import torch

from kvbridge.kernels.swap_in import LayerMemory, Step, SwapInShape, SwapInState


@dataclass
class SwapInSimulation:
    """One world on one device; the host pool is pinned where the device is a GPU. Admission here is a plain copy."""

    shape: SwapInShape
    layers: int
    requests: int
    device: torch.device
    seed: int = 0
    extents: int = 1
    page_first: bool = False

    def __post_init__(self) -> None:
        shape, device = self.shape, self.device
        self.random = np.random.default_rng(self.seed)
        self.page_bytes = -(-shape.slots_per_page * sum(shape.row_parts_bytes) // 64) * 64
        self.host_pages = self.requests * shape.max_pages
        self.host_pages = -(-self.host_pages // self.extents) * self.extents
        pin = device.type == "cuda"
        content = self.random.integers(0, 256, (self.layers, self.host_pages, self.page_bytes), dtype=np.uint8)
        if self.page_first:
            content = np.ascontiguousarray(content.transpose(1, 0, 2))
        self.host = torch.from_numpy(content)
        if pin:
            self.host = self.host.pin_memory()
        hot_pages = self.requests * shape.rows_per_request // shape.slots_per_page
        self.hot = torch.zeros((self.layers, hot_pages, self.page_bytes), dtype=torch.uint8, device=device)
        self.slot_of_row = torch.full(
            (self.layers, self.requests, shape.max_rows), -1, dtype=torch.int16, device=device
        )
        self.row_of_slot = torch.full(
            (self.layers, self.requests, shape.hot_rows), -1, dtype=torch.int32, device=device
        )
        self.ages = torch.zeros((self.layers, self.requests, shape.hot_rows // 32, 4), dtype=torch.int32, device=device)
        self.tallies = torch.zeros((self.layers, self.requests, 4), dtype=torch.int32, device=device)
        pages = self.random.permutation(self.host_pages)[: self.requests * shape.max_pages]
        self.page_ids = pages.reshape(self.requests, shape.max_pages).astype(np.int32)
        ranks = np.argsort(np.argsort(self.page_ids, axis=1), axis=1).astype(np.int32)
        self.pages = torch.from_numpy(np.stack([self.page_ids, ranks], axis=2)).to(device)
        self.ring_begin = torch.zeros(self.requests, dtype=torch.int32, device=device)

    def arrays(self) -> dict[str, torch.Tensor]:
        names = ("hot", "slot_of_row", "row_of_slot", "ages", "tallies")
        return {name: getattr(self, name).cpu() for name in names}

    def state(self) -> SwapInState:
        return SwapInState(
            requests=self.requests,
            slot_of_row=self.slot_of_row.data_ptr(),
            row_of_slot=self.row_of_slot.data_ptr(),
            ages=self.ages.data_ptr(),
            tallies=self.tallies.data_ptr(),
            pages=self.pages.data_ptr(),
            ring_begin=self.ring_begin.data_ptr(),
        )

    def layer_memory(self) -> list[LayerMemory]:
        each = self.host_pages // self.extents
        stride = self.page_bytes * (self.layers if self.page_first else 1)
        step = self.page_bytes if self.page_first else self.host_pages * self.page_bytes
        base = self.host.data_ptr()
        return [
            LayerMemory(
                host_addresses=tuple(base + layer * step + extent * each * stride for extent in range(self.extents)),
                pages_per_extent=each,
                host_stride_bytes=stride,
                hot_address=self.hot[layer].data_ptr(),
                hot_stride_bytes=self.page_bytes,
            )
            for layer in range(self.layers)
        ]

    def admit(self, request: int, rows: int) -> None:
        """Nothing resident; the rows of the last partial page are in the ring."""
        shape = self.shape
        self.slot_of_row[:, request] = -1
        self.row_of_slot[:, request] = -1
        self.ages[:, request] = 0
        self.tallies[:, request] = 0
        begin = rows // shape.slots_per_page * shape.slots_per_page
        self.ring_begin[request] = begin
        self.fill_ring(request, begin, rows)

    def fill_ring(self, request: int, start: int, stop: int) -> None:
        for layer in range(self.layers):
            for row in range(start, stop):
                self.write(layer, self.ring_place(request, row), self.host_row(layer, request, row))

    def ring_place(self, request: int, row: int) -> int:
        return request * self.shape.rows_per_request + self.shape.hot_rows + row % self.shape.ring_rows

    def host_row(self, layer: int, request: int, row: int) -> np.ndarray:
        page = int(self.page_ids[request, row // self.shape.slots_per_page])
        content = self.host[page, layer] if self.page_first else self.host[layer, page]
        return _row(self.shape, content.numpy(), row % self.shape.slots_per_page)

    def hot_row(self, layer: int, place: int, hot: np.ndarray) -> np.ndarray:
        """The bytes at a physical row; `hot` is the region as a CPU array."""
        page, slot = divmod(place, self.shape.slots_per_page)
        return _row(self.shape, hot[layer, page], slot)

    def write(self, layer: int, place: int, content: np.ndarray) -> None:
        page, slot = divmod(place, self.shape.slots_per_page)
        at = 0
        for part, length in enumerate(self.shape.row_parts_bytes):
            offset = self.shape.slots_per_page * sum(self.shape.row_parts_bytes[:part]) + slot * length
            self.hot[layer, page, offset : offset + length] = torch.from_numpy(content[at : at + length].copy()).to(
                self.device
            )
            at += length

    def check(self, layer: int, requests: list[int], rows: list[int], selected: np.ndarray, found: np.ndarray) -> None:
        """Every selected row is where the answer says, byte for byte; -1 exactly where it is due."""
        hot = self.hot.cpu().numpy()
        for entry, request in enumerate(requests):
            for row, place in zip(selected[entry].tolist(), found[entry].tolist(), strict=True):
                if request < 0 or not 0 <= row < rows[entry]:
                    assert place == -1, (request, row, place)
                    continue
                first = request * self.shape.rows_per_request
                assert first <= place < first + self.shape.rows_per_request, (request, row, place)
                np.testing.assert_array_equal(
                    self.hot_row(layer, place, hot), self.host_row(layer, request, row), err_msg=f"row {row} at {place}"
                )
        self.check_state()

    def check_state(self) -> None:
        forward, backward = self.slot_of_row.cpu().numpy(), self.row_of_slot.cpu().numpy()
        for layer, request in np.ndindex(self.layers, self.requests):
            rows = np.flatnonzero(forward[layer, request] >= 0)
            assert (backward[layer, request][forward[layer, request][rows]] == rows).all()
            assert len(rows) == (backward[layer, request] >= 0).sum()


def _row(shape: SwapInShape, page: np.ndarray, slot: int) -> np.ndarray:
    parts = []
    for part, length in enumerate(shape.row_parts_bytes):
        offset = shape.slots_per_page * sum(shape.row_parts_bytes[:part]) + slot * length
        parts.append(page[offset : offset + length])
    return np.concatenate(parts)


def selections(random: np.random.Generator, *, top_k: int, rows: int, hot: list[int], fresh: float) -> np.ndarray:
    """Distinct-ish rows: mostly of `hot`, a share of any; with repeats, -1 and rows that do not exist yet."""
    chosen = random.choice(hot, top_k) if hot else random.integers(0, max(rows, 1), top_k)
    anywhere = random.random(top_k) < fresh
    chosen = np.where(anywhere, random.integers(0, max(rows, 1), top_k), chosen)
    chosen = np.where(random.random(top_k) < 0.02, -1, chosen)
    chosen = np.where(random.random(top_k) < 0.01, rows + random.integers(0, 5, top_k), chosen)
    return chosen.astype(np.int32)


def step_of(requests: torch.Tensor, rows: torch.Tensor) -> Step:
    """A step's addresses; the tensors must live as long as it is used."""
    return Step(batch=len(requests), request_slots=requests.data_ptr(), rows=rows.data_ptr())
