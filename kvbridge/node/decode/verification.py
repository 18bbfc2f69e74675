"""The digests of one room on a decode node: as its writers state them, as this node's ranks find them, and the difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from kvbridge.core.errors import ProtocolError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.plan.digests import DigestKey, DigestSums, Mismatch
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import destination_regions
from kvbridge.core.wire.messages import Digests, Done, to_wire
from kvbridge.core.wire.worker_messages import Digested, Verify
from kvbridge.node.room import Room

_REMEDY = (
    "bytes changed on their way or in memory: admit the request again, and when it recurs look at the network between "
    "the nodes and the memory of both"
)

Holdings = dict[DigestKey, list[int]]
"""The layers that a rank or the host pool holds."""


class Verification:
    """The digests of one room, from its offer until they have been compared."""

    def __init__(self, geometry: ModelGeometry, manifests: Sequence[RankManifest], room: Room[Any]) -> None:
        """`manifests`: of all ranks of this node, in the order in which they are introduced to peers."""
        self._room = room
        self._held: dict[Rank, Holdings] = {}
        self._host: Holdings = {}
        self._spaces: dict[DigestKey, IndexSpace] = {}
        for manifest in manifests:
            mine = self._held[manifest.rank] = {}
            for (kind, layer), region in destination_regions(manifest).items():
                holdings = self._host if manifest.in_host_pool(region) else mine
                key = DigestKey(kind, region.lane_start, region.lane_stop)
                self._spaces[key] = region.space
                layers = holdings.setdefault(key, [])
                if layer not in layers:
                    layers.append(layer)
        allowed = frozenset((*self._host, *(key for held in self._held.values() for key in held)))
        prompt, prefix = room.prompt_tokens, room.prefix_tokens
        whole = Section(prompt_tokens=prompt, prefix_tokens=prefix, start_token=0, stop_token=prompt)
        sums = partial(DigestSums, geometry, whole, allowed=allowed)
        self._expected = sums()
        self._parts: Counter[Rank] = Counter()
        self._found = {rank: sums() for rank in self._held}
        self._found_host = sums()
        self._waiting = set(self._held)

    def expect(self, message: Digests) -> None:
        """Take a part of a writer's digests. Raises ProtocolError for a part out of turn, InvalidInputError."""
        if message.part != self._parts[message.writer]:
            raise ProtocolError(
                f"rank {message.writer} of the prefill node sent part {message.part} of its digests where part "
                f"{self._parts[message.writer]} was due"
            )
        self._expected.merge(message.digests)
        self._parts[message.writer] += 1

    def require_all(self, done: Done) -> None:
        """Raise ProtocolError unless all digests of a writer have come."""
        if done.digest_parts != self._parts[done.writer]:
            raise ProtocolError(
                f"rank {done.writer} of the prefill node has sent {done.digest_parts} parts of digests, but "
                f"{self._parts[done.writer]} have come"
            )

    def orders(self) -> Iterator[tuple[Rank, Verify]]:
        """Yield the order to each rank of this node: its own memory and a share of the host pool."""
        room = self._room
        tokens = {"prompt_tokens": room.prompt_tokens, "prefix_tokens": room.prefix_tokens}
        about = {**room.about, **tokens, "tables": to_wire(room.tables), "host_count": len(self._held)}
        for index, rank in enumerate(self._held):
            yield rank, Verify(**about, host_index=index)

    def find(self, message: Digested) -> None:
        """Take digests that a rank of this node has computed. Raises InvalidInputError."""
        in_host = [entry for entry in message.digests if entry.key in self._host]
        self._found_host.merge(in_host)
        self._found[message.rank].merge(entry for entry in message.digests if entry.key not in self._host)

    def answered(self, rank: Rank) -> bool:
        """Note that a rank has said everything; return whether all have."""
        self._waiting.discard(rank)
        return not self._waiting

    def differences(self) -> tuple[Counter[ComponentKind], str]:
        """Return how many pages of each component differ from the sent ones, and one sentence about the first; empty if none do."""
        tables, pages = self._room.tables, Counter[ComponentKind]()
        text = ""
        for where, space, wrong in self._mismatches():
            pages[wrong.key.component] += 1
            if not text:
                page = int(tables[space].ids[wrong.page - tables[space].first_page])
                text = (
                    f"{wrong.key.component} of layer {wrong.layer}, logical page {wrong.page}: page {page} of space '{space}' "
                    f"in {where} has the digest {wrong.found:08x}, the prefill node read {wrong.expected:08x}"
                )
        if pages.total() > 1:
            counts = ", ".join(f"{count} of {kind}" for kind, count in pages.items())
            text += f"; {pages.total()} pages differ ({counts})"
        return pages, text and f"{text}; {_REMEDY}"

    def _mismatches(self) -> Iterator[tuple[str, IndexSpace, Mismatch]]:
        """Yield the place, the space and the page of each difference."""
        for key, layers in self._host.items():
            for wrong in self._expected.mismatches(self._found_host, key, layers):
                yield "the host pool", self._spaces[key], wrong
        for rank, held in self._held.items():
            for key, layers in held.items():
                for wrong in self._expected.mismatches(self._found[rank], key, layers):
                    yield f"rank {rank}", self._spaces[key], wrong
