"""Digests that one rank computes: of the rows that its orders send, and of the rows that have arrived for a room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import MemoryKind, Tables
from kvbridge.core.plan.digests import ChecksumArray, DigestPieces, DigestSums, PageDigests, digest_pieces, followed_by
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import LayerGroup, Stripe, held_groups
from kvbridge.core.process import Clock
from kvbridge.core.wire.worker_messages import Digested, Verified, Verify
from kvbridge.kernels.digest import raw_checksums
from kvbridge.worker.rank import NodeLink, RankIdentity, answered, contained

SLICE_BYTES = 4 << 20
"""Bytes read between two checks of the transfers: 0.3 to 0.4 ms on one core, in host memory and pieces of 37 KiB and more."""
PIECE_BYTES = 2_048
"""The fixed cost of a piece, in bytes read."""
COST_DIVISOR = {MemoryKind.DRAM: 1, MemoryKind.VRAM: 16}
"""How much faster a memory is read than host memory: a slice of device memory is one launch, and takes no longer."""


class DigestWork:
    """The digests of one section, computed slice by slice."""

    def __init__(
        self,
        geometry: ModelGeometry,
        groups: Sequence[LayerGroup],
        section: Section,
        source: Tables,
        destination: Tables,
    ) -> None:
        """Rows are read in `source`; in `destination` the peer, or this rank itself, keeps them."""
        self.sums = DigestSums(geometry, section)
        self._pieces = digest_pieces(groups, section, source, destination)
        self._present: DigestPieces | None = None
        self._checksums: list[ChecksumArray] = []
        """Checksums of the present pieces, as far as they have been read."""
        self._read = 0

    def step(self) -> bool:
        """Compute one slice. Return whether it was the last. Raises UnsupportedError, and what `digest_pieces` raises."""
        left_bytes = SLICE_BYTES
        while left_bytes > 0:
            if self._present is None:
                self._present = next(self._pieces, None)
                if self._present is None:
                    return True
            left_bytes -= self._read_some(self._present, left_bytes)
        return False

    def _read_some(self, pieces: DigestPieces, most_bytes: int) -> int:
        """Read present pieces, at least one, until `most_bytes` are used up. Return the bytes used."""
        costs = np.cumsum(pieces.length[self._read :] + PIECE_BYTES) // COST_DIVISOR[pieces.memory]
        count = max(1, int(np.searchsorted(costs, most_bytes, side="right")))
        part = slice(self._read, self._read + count)
        self._checksums.append(raw_checksums(pieces.address[part], pieces.length[part], pieces.memory, pieces.device))
        self._read += count
        if self._read == len(pieces):
            values = followed_by(np.concatenate(self._checksums), pieces.behind)
            self.sums.add(pieces.key, pieces.layer, pieces.page, values)
            self._present, self._checksums, self._read = None, [], 0
        return int(costs[count - 1])


class Verifications:
    """Computes digests of the rows that have arrived, one room after another."""

    def __init__(self, identity: RankIdentity, link: NodeLink, *, clock: Clock) -> None:
        self._identity = identity
        self._link = link
        self._clock = clock
        self._waiting: deque[tuple[Verify, float]] = deque()
        """Orders, and when each was received."""
        self._work: DigestWork | None = None
        """The work of the first order."""
        self._busy_s = 0.0
        self._groups: dict[Stripe, tuple[LayerGroup, ...]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, request: Verify) -> None:
        """Queue an order."""
        self._waiting.append((request, self._clock()))

    def step(self) -> bool:
        """Compute one slice of the first room. Return whether there was one. A failure fails that room alone."""
        if not self._waiting:
            return False
        request, begun_s = self._waiting[0][0], self._clock()
        try:
            with contained("the digest", room=request.room):
                if self._work is None:
                    self._work = self._begin(request)
                done = self._work.step()
        except BridgeError as error:
            self._end((), error)
            return True
        self._busy_s += self._clock() - begun_s
        if done:
            self._end(self._work.sums.parts())
        return True

    def _begin(self, request: Verify) -> DigestWork:
        share = Stripe(request.host_index, request.host_count)
        groups = self._groups.get(share)
        if groups is None:
            groups = held_groups(self._identity.geometry, self._identity.manifest, host_share=share)
            self._groups = {share: groups}
        tokens = request.prompt_tokens
        whole = Section(prompt_tokens=tokens, prefix_tokens=request.prefix_tokens, start_token=0, stop_token=tokens)
        tables = tables_from_wire(request.tables)
        asked = [group for group in groups if group.source.form.space in tables]
        return DigestWork(self._identity.geometry, asked, whole, tables, tables)

    def _end(self, digests: Iterable[tuple[PageDigests, ...]], error: BridgeError | None = None) -> None:
        request, received_s = self._waiting.popleft()
        room, generation, rank = request.room, request.generation, self._identity.rank
        for part in digests:
            self._link.send(Digested(room=room, generation=generation, rank=rank, digests=part))
        seconds = {"verify": self._clock() - received_s, "verify_busy": self._busy_s}
        self._link.send(Verified(room=room, generation=generation, rank=rank, seconds=seconds, **answered(error)))
        self._work, self._busy_s = None, 0.0
