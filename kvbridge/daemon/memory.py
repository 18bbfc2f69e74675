"""The pools of a node: made in shared memory or taken over from the daemon before, and removed or kept at the end."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kvbridge.config.pools import DecodePools
from kvbridge.core.errors import DeadlineError, IntegrityError, RegistrationError, UnavailableError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import SharedRegion
from kvbridge.daemon.kept_pools import Contents, KeptFile, KeptHeader, Restored, read_journal
from kvbridge.daemon.layout import NodeConfig, NodeLayout
from kvbridge.pool.memory.layout import Placement, Progress, ignore_progress
from kvbridge.pool.memory.leftovers import POOL_PREFIX, ForeignFilesError, KeptFiles, discard_files
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, why_not_memory

log = structlog.get_logger(__name__)

KEPT_POOLS_S = 15.0
"""Time for the processes of the daemon before to let go of the pools of `pools.keep_s`; after it the pools are made anew."""


class _CancelledError(Exception):
    """The creation has been cancelled."""


@dataclass
class NodeMemory:
    """The pools that a node makes."""

    layout: NodeLayout
    problem: str = "memory is being created"
    """Why the memory is missing; empty when it is there."""
    device: dict[Rank, tuple[SharedRegion, ...]] = field(default_factory=dict)
    host: tuple[SharedRegion, ...] = ()
    copies: tuple[SharedRegion, ...] = ()
    """The host tier."""
    regions: tuple[Region, ...] = ()
    """Regions of the host pool and of the host copies in this process."""
    group: int | None = None
    """Group whose members may map the pools, besides this user."""
    kept: KeptFiles | None = None
    """Files of the host pool and the host copies that outlive this process; None: none do."""
    header: KeptHeader | None = None
    """Header of this daemon's journal of kept pools; `files` grows with the pools."""
    found: Contents = field(default_factory=Contents)
    """Reusable contents of the kept pools, by the journal of the daemon before."""
    restored: Restored | None = None
    """Result for the pools of the daemon before; None: no pools are to be kept."""
    _old: dict[str, Path] = field(default_factory=dict)
    """Files to take over, by the part of their names behind the incarnation."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def keep(self, config: NodeConfig, prefix: str, header: KeptHeader | None) -> None:
        """Get the kept pools of a node whose shared files' names begin with `prefix`; remove pools that cannot be reused.

        Without a header this process keeps none, and removes those of an earlier process. With a header it waits for an ending
        daemon of the same name. Raises RegistrationError when that daemon does not end. If a name is taken by something else,
        nothing is kept: any user of the host can take a name, and must not be able to keep this daemon from starting.
        """
        directory, name = memory_directory(config), f"{prefix}keep"
        if header is None:
            discard_files(directory, name)
            return
        try:
            files = KeptFiles(directory, name, keep_s=config.pools.keep_s, wait_s=KEPT_POOLS_S)
        except ForeignFilesError as error:
            log.warning("kept_pools_refused", pages=0, reason=str(error))
            self.restored = Restored(refused=str(error))
            return
        self.kept, self.header, self.restored = files, header, Restored()
        try:
            before, self.found = read_journal(files.read_journal())
            why_not = before.why_not(header)
            self._old = {} if why_not else _same_files(files, before)
        except FileNotFoundError:
            files.remove_pools()
            return
        except (IntegrityError, OSError) as error:
            why_not = str(error)
        if why_not:
            self._refuse(files, header, why_not)
        else:
            pages, damaged = len(self.found.pages), self.found.damaged
            self.restored.waiting_pages = pages
            log.info("kept_pools_found", of=before.incarnation, pages=pages, damaged=damaged)

    def _refuse(self, files: KeptFiles, header: KeptHeader, why: str) -> None:
        """Have the pools made anew, because the present ones cannot be reused."""
        pages = len(self.found.pages)
        log.warning("kept_pools_refused", pages=pages, reason=why)
        self.restored = Restored(refused_pages=pages, refused=why)
        self.found, self._old = Contents(), {}
        files.remove_pools(besides=header.incarnation)

    async def create(
        self, directory: Path, prefix: str, *, cancel_s: float, on_progress: Progress = ignore_progress
    ) -> None:
        """Create every pool in `directory`, in a thread, in files whose names begin with `prefix`.

        Raises RegistrationError, leaving nothing. After a cancellation the thread stops behind the present chunks and removes the
        pools that it has made; only then the cancellation goes on. Raises DeadlineError when that takes longer than `cancel_s`; the
        thread goes on removing.
        """
        work = asyncio.create_task(asyncio.to_thread(self._create, directory, prefix, on_progress))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._cancelled.set()
            done, _ = await asyncio.wait({work}, timeout=cancel_s)
            if not done:
                raise DeadlineError(
                    f"the pools in {directory} were being made and could not be removed within {cancel_s:g} s "
                    "(timeouts.shutdown_close_s): the machine is short of memory or of time"
                ) from None
            work.exception()  # the cancellation
            self.close()
            raise
        self.problem = ""

    def _create(self, directory: Path, prefix: str, on_progress: Progress) -> None:
        done = 0
        total = self.layout.node_bytes

        def report(pool_bytes: int, _: int) -> None:
            if self._cancelled.is_set():
                raise _CancelledError
            share = (done + pool_bytes) / max(1, total)
            self.problem = f"memory is being created ({share:.0%} of {total} bytes)"
            on_progress(done + pool_bytes, total)

        wanted: list[tuple[Rank | str, Placement | None]] = [
            *self.layout.shared_device().items(),
            ("host", self.layout.host),
            ("twins", self.layout.copies),
        ]
        try:
            for whose, placement in wanted:
                if placement is not None:
                    self._have(whose, self._make(placement, str(whose), directory / prefix, report))
                    done += placement.total_bytes
        except BaseException:
            self.close()
            raise

    def _make(self, placement: Placement, name: str, prefix: Path, report: Progress) -> MemoryPool:
        if self.kept is None or self.header is None or placement not in (self.layout.host, self.layout.copies):
            return MemoryPool.in_files(placement, prefix.parent, f"{prefix.name}.{name}", on_progress=report)
        path = self.kept.new_path(f"{self.header.incarnation}.{name}")
        pool = None
        if self._old:
            try:
                old = [self._old[f"{name}.{planned.name}"] for planned in placement.mappings]
                pool = MemoryPool.taken_over(placement, old, path, wait_s=KEPT_POOLS_S, on_progress=report)
            except (KeyError, RegistrationError) as error:
                self._refuse(self.kept, self.header, str(error))
        if pool is None:
            pool = MemoryPool.in_files(placement, path.parent, path.name, on_progress=report)
        pool.leave()  # whenever this process ends, it leaves what the journal says
        made = tuple(
            KeptFile(name=f"{name}.{planned.name}", length_bytes=planned.length_bytes, inode=mapping.path.stat().st_ino)
            for planned, mapping in zip(placement.mappings, pool.mappings, strict=True)
        )
        self.header = self.header.model_copy(update={"files": (*self.header.files, *made)})
        return pool

    def _have(self, whose: Rank | str, pool: MemoryPool) -> None:
        self._stack.callback(pool.close)
        if self.group is not None:
            for mapping in pool.mappings:
                mapping.share(self.group)
        if isinstance(whose, Rank):
            self.device[whose] = pool.shared_regions()
            return
        self.regions += pool.regions
        if whose == "host":
            self.host = pool.shared_regions()
        else:
            self.copies = pool.shared_regions()

    def close(self) -> None:
        """Remove every pool except kept pools with a journal. Nothing may write to pools any more."""
        self._stack.close()
        if self.kept is not None:
            self.kept.close(keep=self.kept.journal.exists())
        self.device.clear()
        self.host = self.copies = ()
        self.regions = ()


def _same_files(files: KeptFiles, before: KeptHeader) -> dict[str, Path]:
    """Return the files of a journal. Raises IntegrityError when one is missing or replaced."""
    there = files.pools()
    found = {}
    for wanted in before.files:
        for path in there.get(wanted.name, ()):
            status = path.stat()
            if (status.st_ino, status.st_size) == (wanted.inode, wanted.length_bytes):
                found[wanted.name] = path
        if wanted.name not in found:
            raise IntegrityError(f"its file {wanted.name} of {wanted.length_bytes} bytes is gone")
    return found


def memory_directory(config: NodeConfig) -> Path:
    """Return the directory of a node's shared files."""
    return config.pools.host.directory if isinstance(config.pools, DecodePools) else DEFAULT_DIRECTORY


def require_memory_directory(config: NodeConfig, layout: NodeLayout) -> None:
    """Raise UnavailableError when the node would make shared files outside of memory."""
    directory = memory_directory(config)
    if layout.node_bytes and (problem := why_not_memory(directory)):
        key = "pools.host.directory" if isinstance(config.pools, DecodePools) else "the pools' directory"
        raise UnavailableError(f"{key}: {problem}; the pools need a directory in memory, such as {DEFAULT_DIRECTORY}")


def file_prefix(instance: str, node: str) -> str:
    """Return the beginning of the names of a node's shared files: equal for all processes of the node, and for no other node."""
    digest = hashlib.blake2b(f"{instance}/{node}".encode(), digest_size=6).hexdigest()
    return f"{POOL_PREFIX}{digest}-"
