"""Digests that one rank computes: of the rows that its orders send, and of the rows that have arrived for a room."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import MemoryKind, Tables
from kvbridge.core.plan.digests import ChecksumArray, DigestPieces, DigestSums, digest_pieces, followed_by
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import LayerGroup, Stripe, held_groups
from kvbridge.core.process import Clock
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.core.wire.worker_messages import Digested, Verified, Verify
from kvbridge.kernels.digest import raw_checksums
from kvbridge.worker.rank import NodeLink, RankIdentity, contained

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
        """`source`: pages where the rows are read. `destination`: pages where the peer (or this rank itself) keeps the rows."""
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


@dataclass(eq=False)
class _Verification:
    request: Verify
    received_s: float
    work: DigestWork | None = None
    busy_s: float = 0.0


class Verifications:
    """Computes digests of the rows that have arrived, one room after another."""

    def __init__(self, identity: RankIdentity, link: NodeLink, *, clock: Clock) -> None:
        self._identity = identity
        self._link = link
        self._clock = clock
        self._waiting: deque[_Verification] = deque()
        self._groups: dict[Stripe, tuple[LayerGroup, ...]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, request: Verify) -> None:
        """Queue an order."""
        self._waiting.append(_Verification(request, self._clock()))

    def step(self) -> bool:
        """Compute one slice of the first room. Return whether there was one. A failure fails that room alone."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        begun_s = self._clock()
        try:
            with contained("the digest", room=first.request.room):
                if first.work is None:
                    first.work = self._begin(first.request)
                done = first.work.step()
        except BridgeError as error:
            self._end(first, error)
            return True
        first.busy_s += self._clock() - begun_s
        if done:
            self._end(first)
        return True

    def _begin(self, request: Verify) -> DigestWork:
        share = Stripe(request.host_index, request.host_count)
        groups = self._groups.get(share)
        if groups is None:
            groups = held_groups(self._identity.geometry, self._identity.manifest, host_share=share)
            self._groups = {share: groups}
        whole = Section(
            prompt_tokens=request.prompt_tokens,
            prefix_tokens=request.prefix_tokens,
            start_token=0,
            stop_token=request.prompt_tokens,
        )
        tables = tables_from_wire(request.tables)
        asked = [group for group in groups if group.source.form.space in tables]
        return DigestWork(self._identity.geometry, asked, whole, tables, tables)

    def _end(self, ended: _Verification, error: BridgeError | None = None) -> None:
        self._waiting.popleft()
        request, rank = ended.request, self._identity.rank
        room, generation = request.room, request.generation
        if error is None and ended.work is not None:
            for part in ended.work.sums.parts():
                self._link.send(Digested(room=room, generation=generation, rank=rank, digests=part))
        self._link.send(
            Verified(
                room=room,
                generation=generation,
                rank=rank,
                seconds={"verify": self._clock() - ended.received_s, "verify_busy": ended.busy_s},
                error_code="" if error is None else error.code,
                error="" if error is None else str(error)[:REASON_CHARS],
            )
        )
