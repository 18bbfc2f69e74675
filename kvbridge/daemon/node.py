"""A prefill or decode daemon from its start to its end.

HTTP and sockets open before memory is made, so that `/ready` can report the progress of large pools.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from kvbridge.api.endpoint_file import DaemonEndpoint, remove_endpoint, write_endpoint
from kvbridge.control.kv_events import KvEvents
from kvbridge.control.peers import PeerIdentity
from kvbridge.control.unix_sockets import group_number, prepare_runtime_directory
from kvbridge.daemon.announce import Announcer
from kvbridge.daemon.kept_pools import KeptJournal, PageDigests, RestoredCopies
from kvbridge.daemon.lifecycle import Daemon
from kvbridge.daemon.links import Links, curve_keys
from kvbridge.daemon.memory import file_prefix, memory_directory, require_memory_directory
from kvbridge.daemon.parts import NodeParts
from kvbridge.daemon.status import NodeOverview
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.node.admission import AdmissionController
from kvbridge.node.rooms import Rooms
from kvbridge.pool.memory.leftovers import remove_leftovers
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.telemetry.spans import PARTS
from kvbridge.tier.events import CacheFeed

log = structlog.get_logger(__name__)

BOOTSTRAP_CALL_S = 5.0
TICK_S = 0.05
"""Time between two checks of deadlines."""
CLOSING_PARTS = 10
"""`timeouts.shutdown_close_s` has so many equal parts: one for rooms that are aborted, two for HTTP, one for the store below host
memory, four for rank workers, one for peers, one for spans."""


class NodeDaemon(Daemon):
    """A prefill or decode daemon."""

    def __init__(self, parts: NodeParts, peers: Links, rooms: Rooms[Any]) -> None:
        self._closing_part_s = parts.config.timeouts.shutdown_close_s / CLOSING_PARTS
        super().__init__(parts.metrics, spans_s=self._closing_part_s, seldom=parts.seldom)
        self.parts = parts
        self.peers = peers
        self.rooms = rooms
        self.admission = AdmissionController(rooms, parts.book, limits=parts.config.admission, events=parts.events)
        parts.engines.serve(rooms, self.admission, attached=parts.attached)
        self.overview = NodeOverview(parts, peers, rooms.book, self.admission)
        self._journal: KeptJournal | None = None
        self._kv_events: KvEvents | None = None

    # ------------------------------------------------------------------ from start to end

    async def start(self) -> None:
        """Open sockets and HTTP, make the memory, and begin to start the workers."""
        parts, config = self.parts, self.parts.config
        require_memory_directory(config, parts.layout)
        role, names = parts.identity.role, parts.identity._asdict()
        self.open_traces(config.telemetry.traces, names, parts.events, PARTS[role], parts.record)
        group = None if config.runtime_group is None else group_number(config.runtime_group)
        prepare_runtime_directory(config.runtime_dir, group)
        parts.workers.open(parts.identity.incarnation)
        parts.engines.open(parts.identity.incarnation, config.runtime_dir)
        keys = curve_keys(config.control.curve)
        identity = PeerIdentity(parts.identity.incarnation, keys, insecure=config.insecure)
        self.overview.control = self.peers.open(identity)
        if config.tier.events is not None and parts.prefixes is not None:
            index, settings = parts.prefixes.index, config.tier.events
            feed = CacheFeed(index, parts.geometry.tokens_per_page, checkpoints=settings.checkpoints)
            self._kv_events = KvEvents(settings, feed)
        build = partial(create_daemon_app, self.admission, self.rooms, self.overview)
        self.open(config.http, build, shutdown_s=self._closing_part_s)
        self._announce(self.url)
        self.background(self._ticks(), "ticks")
        await self._create_memory(group)
        parts.workers.start(
            lambda rank: parts.worker_setup(rank, self.peers.epoch), None if parts.adopted else parts.identity
        )
        self.background(parts.workers.failed(), "workers")
        if parts.stored is not None:
            parts.stored.open(parts.memory.copies, parts.memory.host, log_level=config.telemetry.log_level.value)
            self.background(parts.stored.failed(), "store")

    async def drain(self) -> None:
        """Admit no more rooms, let rooms end, and abort those that do not end within `timeouts.shutdown_rooms_s`."""
        limit_s = self.parts.config.timeouts.shutdown_rooms_s
        self.admission.close("the daemon is shutting down")
        leaving = [] if self.overview.announcer is None else [self.background(self.overview.announcer.leave(), "leave")]
        log.info("draining", rooms=len(self.rooms.book.open), limit_s=limit_s)
        if not await self._wait_idle(limit_s):
            log.warning("rooms_aborted", rooms=len(self.rooms.book.open), limit="timeouts.shutdown_rooms_s")
            for room in list(self.rooms.book.open):
                await self.rooms.cancel(room.room, "the daemon was shut down")
            await self._wait_idle(self._closing_part_s)
        elif leaving:
            await asyncio.wait(leaving, timeout=self._closing_part_s)

    def close_parts(self, last_first: AsyncExitStack) -> None:
        parts = self.parts
        last_first.callback(parts.memory.close)
        last_first.push_async_callback(self._leave_pools)
        if self._kv_events is not None:
            last_first.callback(self._kv_events.close)
        last_first.callback(remove_endpoint, parts.config.runtime_dir, parts.identity.incarnation)
        last_first.callback(parts.engines.close)
        last_first.push_async_callback(self.peers.close, min(1.0, self._closing_part_s))
        last_first.push_async_callback(parts.workers.close, 2 * self._closing_part_s)
        if parts.stored is not None:
            last_first.push_async_callback(parts.stored.close, self._closing_part_s)
        if self.overview.announcer is not None:
            last_first.push_async_callback(self.overview.announcer.close)

    async def _wait_idle(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.rooms.book.open and time.monotonic() < deadline_s:  # noqa: ASYNC110 - rooms end in many ways
            await asyncio.sleep(TICK_S)
        return not self.rooms.book.open

    async def _ticks(self) -> None:
        heartbeat_s = self.parts.config.timeouts.control_heartbeat_s
        next_heartbeat_s = time.monotonic() + heartbeat_s
        while True:
            await asyncio.sleep(TICK_S)
            self.rooms.tick()
            self.admission.tick()
            self.peers.tick()
            self.parts.workers.watch()
            if self.parts.backups is not None:
                self.parts.backups.tick()
            if self._kv_events is not None:
                self._kv_events.tick()
            if self.parts.memory.kept is not None:
                self.parts.memory.kept.renew()
            self.tell(None if self.admission.closed else self.overview.readiness())
            if self.overview.announcer is not None:
                self.overview.announcer.look(self.overview.obstacles())
            if (now_s := time.monotonic()) >= next_heartbeat_s:
                next_heartbeat_s = now_s + heartbeat_s  # heartbeats missed while stopped are not sent later
                self.peers.watch()

    # ------------------------------------------------------------------ parts

    async def _create_memory(self, group: int | None) -> None:
        config, begun_s = self.parts.config, time.monotonic()
        directory = memory_directory(config)
        proofs = Path(config.transports.local.proof_directory)
        await asyncio.to_thread(remove_leftovers, (directory, DEFAULT_DIRECTORY, proofs))
        identity = self.parts.identity
        memory = self.parts.memory
        memory.group = group
        prefix = file_prefix(identity.instance, f"{identity.role}-{identity.node}")
        header = self.parts.kept_header() if config.pools.keep_s else None
        await asyncio.to_thread(memory.keep, config, prefix, header)
        await memory.create(directory, prefix + identity.incarnation, cancel_s=config.timeouts.shutdown_close_s / 2)
        self._go_on_with_pools()
        seconds = round(time.monotonic() - begun_s, 3)
        log.info("memory_created", bytes=self.parts.layout.node_bytes, seconds=seconds)

    def _go_on_with_pools(self) -> None:
        """Begin the journal of kept pools, and restore their pages."""
        parts, memory = self.parts, self.parts.memory
        copies = None if parts.prefixes is None else parts.prefixes.copies
        if memory.kept is None or memory.header is None or memory.restored is None or copies is None:
            return
        digest = PageDigests(memory.regions)
        self._journal = journal = KeptJournal(memory.kept.journal, memory.header, digest, memory.found)
        copies.watchers.append(journal)
        if memory.found.pages:
            restored = RestoredCopies(parts.book, copies, digest, memory.found, memory.restored, lost=journal.removed)
            self.background(restored.run(), "kept pools")

    async def _leave_pools(self) -> None:
        """Complete the journal of kept pools, after the last copy of a page."""
        if self._journal is not None:
            await self._journal.finish(self._closing_part_s)

    # ------------------------------------------------------------------ the directory

    def _announce(self, url: str) -> None:
        config, control = self.parts.config, self.overview.control
        endpoint = DaemonEndpoint(**self.parts.identity._asdict(), pid=os.getpid(), http_url=url, control=control)
        write_endpoint(config.runtime_dir, endpoint)
        log.info("daemon_listens", http=url, control=control.endpoint if control else "")
        if not config.bootstrap.url:
            return
        self.overview.http_url = url
        replicas = self.open_directory(config.bootstrap, timeout_s=BOOTSTRAP_CALL_S)
        self.overview.announcer = announcer = Announcer(
            replicas,
            registration=self.overview.registration,
            load=self.overview.load,
            interval_s=config.bootstrap.heartbeat_interval_s,
        )
        self.background(announcer.run(), "announcer")
