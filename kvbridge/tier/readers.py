"""Readers of an index: the pages that each pins, and the answer that an admitted owner gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvbridge.core.errors import BridgeError, IntegrityError
from kvbridge.core.ids import IndexSpace, PageIdArray, Pages
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.records import RecordArray
from kvbridge.tier.residence import Residence
from kvbridge.tier.retention import Claim

NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Admitted:
    """The pages that an owner got: cached ones of its prompt's first `prefix_pages` pages, and its own for the rest."""

    prefix: Pages
    """Cached pages, to be read only, until it lets go: on the device of the first `device_pages` of them, in the home of all."""
    prefix_pages: int
    device_pages: int
    copies: Pages
    """Host copies of the others, which are on the host only. Their contents belong into the first of its `own` device pages."""
    checkpoint: PageIdArray
    """Windows and states at the end of the prefix, to be read only; empty unless they were asked for and are on the device."""
    checkpoint_copy: PageIdArray
    """The same when they are on the host only: they belong into `checkpoint_own`, pages of its own."""
    checkpoint_own: PageIdArray
    own: Pages
    """Pages that are its own alone, beside those."""


@dataclass(slots=True, eq=False)
class Reader:
    """Pins a path from a prompt's first page on: so many of its first records on the device, so many on the host."""

    path: RecordArray
    device: int
    host: int = 0
    checkpoints: tuple[tuple[Residence, int], ...] = ()
    """The checkpoints that it reads, each by its residence and its record."""
    checkpoint_own: PageIdArray = field(default_factory=lambda: NO_PAGES)
    """Pages of its own into which a checkpoint is to be loaded."""
    kept: RecordArray = field(default_factory=lambda: NO_PAGES)
    """The records of its path whose pages on the device were its own."""
    claim: Claim | None = None
    """The retention that it asks for its path, with every use."""

    @classmethod
    def of(cls, index: PrefixIndex, path: RecordArray, device: int, *, from_checkpoint: bool) -> Reader:
        """Return a reader that goes on behind a path: so far on the device, then on the host, with its checkpoint where that is."""
        host, end = len(path) if device < len(path) else 0, path[-1:]
        if not (from_checkpoint and len(path)):
            return cls(path, device, host)
        if index.host is None or index.device.checkpointed(end)[0]:
            return cls(path, device, host, ((index.device, int(end[0])),))
        return cls(path, device, len(path), ((index.host, int(end[0])),))

    def pin(self, index: PrefixIndex) -> None:
        """Begin. Raises NotFoundError when a checkpoint is not there (any more), and pins nothing."""
        index.pin(self.path, device=self.device, host=self.host)
        begun: list[tuple[Residence, int]] = []
        try:
            for residence, record in self.checkpoints:
                residence.pin_checkpoint(record)
                begun.append((residence, record))
        except BridgeError:
            self.checkpoints = tuple(begun)
            self.unpin(index)
            raise

    def unpin(self, index: PrefixIndex) -> Pages:
        """End it, once. Returns pages of dropped records that nobody reads any more."""
        for residence, record in self.checkpoints:
            residence.checkpoints.unpin(record)
        return index.unpin(self.path, device=self.device, host=self.host)

    def shared(self, index: PrefixIndex) -> dict[IndexSpace, int]:
        """Return the number of cached pages of each space that it reads in place."""
        return {space: self.device if space in index.device.spaces else len(self.path) for space in index.spaces}

    def checkpoint(self, residence: Residence | None) -> PageIdArray:
        """Return the pages of the checkpoint that it reads in a residence; empty when there is none."""
        found = [residence.checkpoints.pages(record) for where, record in self.checkpoints if where is residence]
        return found[0] if found else NO_PAGES

    def admitted(self, index: PrefixIndex, own: Pages) -> Admitted:
        """Return the owner's answer, with these pages of its own."""
        return Admitted(
            prefix=index.device.pages(self.path[: self.device]) | index.home_pages(self.path),
            prefix_pages=len(self.path),
            device_pages=self.device,
            copies={} if index.host is None else without_empty(index.host.pages(self.path[self.device :])),
            checkpoint=self.checkpoint(index.device),
            checkpoint_copy=self.checkpoint(index.host),
            checkpoint_own=self.checkpoint_own,
            own=own,
        )


def without_empty(pages: Pages) -> Pages:
    """Leave out spaces of which there is no page: the node may not have them."""
    return {space: ids for space, ids in pages.items() if len(ids)}


def check_pins(index: PrefixIndex, readers: Iterable[Reader]) -> None:
    """Raise IntegrityError unless the readers' pins are all the pins, everywhere."""
    for residence in index.residences:
        pins, checkpoint_pins = residence.pins()
        expected, restoring = np.zeros_like(pins), dict.fromkeys(checkpoint_pins, 0)
        for reader in readers:
            stop = {id(index.device): reader.device, id(index.host): reader.host}.get(id(residence))
            expected[reader.path[:stop]] += 1  # a path has no record twice
            for where, record in reader.checkpoints:
                if where is residence:
                    restoring[record] = restoring.get(record, 0) + 1
        if not np.array_equal(pins, expected) or restoring != checkpoint_pins:
            raise IntegrityError(f"pins do not add up to what is read of {residence!r}")
