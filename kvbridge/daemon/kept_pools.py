"""The pools in host memory that outlive a daemon: what it finds of the one before, and what it leaves.

Owns: which pool this daemon can go on with, and what becomes of the others. Must not know: pages, prefixes, when an entry of the
journal is due (`twin_journal.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kvbridge.core.errors import IntegrityError, RegistrationError
from kvbridge.pool.memory.extent import Progress
from kvbridge.pool.memory.kept_files import KeptFiles
from kvbridge.pool.memory.mapped_pool import MappedPool
from kvbridge.pool.memory.placement import Placement
from kvbridge.tier.journal import Contents, KeptFile, KeptHeader, read_header, replay

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Restored:
    """What became of the pages that a daemon finds in kept pools."""

    waiting: int = 0
    """Still to be compared."""
    pages: int = 0
    bytes: int = 0
    checkpoints: int = 0
    lost: int = 0
    """Pages that did not hold what the journal says, or go on from such pages."""
    refused: int = 0
    """In pools that could not be gone on with."""
    why_not: str = ""
    seconds: float = 0.0


@dataclass
class KeptPools:
    """The kept pools of a node, for one daemon."""

    files: KeptFiles
    header: KeptHeader
    """Of the journal of this daemon; `files` are filled in as pools come."""
    wait_s: float
    """How long processes of the daemon before may take to let go."""
    found: Contents | None = None
    """What the pools hold by the journal of the one before; None: nothing that could be gone on with."""
    restored: Restored = field(default_factory=Restored)
    _old: dict[str, Path] = field(default_factory=dict)
    """The files that are to be taken over, by what their names have after the incarnation."""

    @classmethod
    def look(cls, files: KeptFiles, header: KeptHeader, wait_s: float) -> KeptPools:
        """Read what there is, and remove it when this daemon cannot go on with it. `files` are this process's."""
        kept = cls(files, header, wait_s)
        try:
            data = files.read_journal()
        except FileNotFoundError:
            files.remove_pools()
            return kept
        except OSError as error:
            kept.refuse(str(error))
            return kept
        try:
            before, start = read_header(data)
            kept.found = replay(data[start:])
            why_not = before.why_not(header)
            kept._old = {} if why_not else _same_files(files, before)
        except (IntegrityError, OSError) as error:
            why_not = str(error)
        if why_not:
            kept.refuse(why_not)
        elif kept.found is not None:
            kept.restored.waiting = len(kept.found.pages)
            log.info("kept_pools_found", of=before.incarnation, pages=len(kept.found.pages), damaged=kept.found.damaged)
        return kept

    def refuse(self, why: str) -> None:
        """What there is cannot be gone on with: the pools are made anew."""
        pages = 0 if self.found is None else len(self.found.pages)
        log.warning("kept_pools_refused", pages=pages, reason=why)
        self.restored = Restored(refused=pages, why_not=why)
        self.found, self._old = None, {}
        self.files.remove_pools(besides=self.header.incarnation)

    def pool(self, placement: Placement, name: str, on_progress: Progress) -> MappedPool:
        """Take a pool over, or make it. Raises RegistrationError when it can neither be had nor made."""
        prefix = self.files.new_path(self.header.incarnation)
        prefix = prefix.with_name(f"{prefix.name}.{name}")
        pool = self._take_over(placement, name, prefix, on_progress) if self._old else None
        if pool is None:
            pool = MappedPool.create(placement, prefix.parent, prefix.name, on_progress=on_progress)
        pool.leave()  # the end of this process, at any moment, leaves what the journal says
        made = tuple(
            KeptFile(name=f"{name}.{planned.name}", length_bytes=planned.length_bytes, inode=mapping.path.stat().st_ino)
            for planned, mapping in zip(placement.mappings, pool.mappings, strict=True)
        )
        self.header = self.header.model_copy(update={"files": (*self.header.files, *made)})
        return pool

    def _take_over(self, placement: Placement, name: str, prefix: Path, on_progress: Progress) -> MappedPool | None:
        try:
            old = [self._old[f"{name}.{planned.name}"] for planned in placement.mappings]
            return MappedPool.take_over(placement, old, prefix, wait_s=self.wait_s, on_progress=on_progress)
        except (KeyError, RegistrationError) as error:
            self.refuse(str(error))
            return None

    def close(self) -> None:
        """Give them up, behind the pools themselves; without a journal they are removed. Harmless when closed."""
        self.files.close(keep=self.files.journal.exists())


def _same_files(files: KeptFiles, before: KeptHeader) -> dict[str, Path]:
    """Find the files that a journal is about. Raises IntegrityError when one is missing, or is another."""
    there = files.pools()
    found = {}
    for wanted in before.files:
        same = [
            path
            for path in there.get(wanted.name, ())
            if (status := path.stat()).st_ino == wanted.inode and status.st_size == wanted.length_bytes
        ]
        if not same:
            raise IntegrityError(f"its file {wanted.name} of {wanted.length_bytes} bytes is gone")
        found[wanted.name] = same[0]
    return found
