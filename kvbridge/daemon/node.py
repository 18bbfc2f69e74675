"""A prefill or decode daemon: its parts, made before anything is opened, and its life.

HTTP and sockets open before memory is made, so that `/ready` can report the progress of large pools.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from kvbridge.api.endpoint_file import DaemonEndpoint, remove_endpoint, write_endpoint
from kvbridge.config.pools import MemoryOwner
from kvbridge.config.tier import CopyBackend
from kvbridge.control.kv_events import KvEvents
from kvbridge.control.peers import PeerIdentity
from kvbridge.control.unix_sockets import group_number, prepare_runtime_directory
from kvbridge.core.errors import ConfigError, NotReadyError
from kvbridge.core.geometry.components import Liveness
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.pages import GROWING_SPACES
from kvbridge.core.ids import HOST_COPIES, IndexSpace, NodeIdentity, Rank, Role
from kvbridge.core.wire.engine_messages import Attached
from kvbridge.core.wire.messages import FEATURES, NodeDescription
from kvbridge.core.wire.worker_messages import PagesCopied, WorkerSetup
from kvbridge.daemon.announce import Announcer
from kvbridge.daemon.kept_pools import KEPT_SPACES, KeptHeader, KeptJournal, PageDigests, RestoredCopies
from kvbridge.daemon.layout import NodeConfig, load_geometry, plan_memory
from kvbridge.daemon.lifecycle import Daemon
from kvbridge.daemon.links import Links, curve_keys
from kvbridge.daemon.memory import NodeMemory, file_prefix, memory_directory, require_memory_directory
from kvbridge.daemon.status import NodeOverview
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.node.admission import AdmissionController
from kvbridge.node.backups import Backups
from kvbridge.node.engines import Engines
from kvbridge.node.rooms import Rooms
from kvbridge.node.stored_prefixes import StoredPrefixes
from kvbridge.node.workers import Reports, WorkerSet
from kvbridge.pool.memory.layout import even_boundaries
from kvbridge.pool.memory.leftovers import remove_leftovers
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.telemetry.facts import EventStream
from kvbridge.telemetry.metrics import PHASES, RECEIVED, SENT
from kvbridge.telemetry.record import NodeRecord
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.spans import PARTS
from kvbridge.tier.copies import copy_backend
from kvbridge.tier.events import CacheFeed
from kvbridge.tier.host_copies import BackupController
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.prefix_cache import PrefixCache

log = structlog.get_logger(__name__)

BOOTSTRAP_CALL_S = 5.0
TICK_S = 0.05
"""Time between two ticks."""
CLOSING_PARTS = 10
"""Equal parts of `timeouts.shutdown_close_s`: one for aborted rooms, two for HTTP, one for the store below host memory, four for
rank workers, one for peers, one for spans."""


class NodeDaemon(Daemon):
    """A prefill or decode daemon. Its role adds links and rooms with `serve`."""

    peers: Links
    rooms: Rooms[Any]
    admission: AdmissionController
    overview: NodeOverview

    def __init__(self, config: NodeConfig, role: Role) -> None:
        """Make the parts that do not depend on the role. Raises ConfigError, InvalidInputError."""
        self.config = config
        self.identity = NodeIdentity(role, config.instance, config.node, secrets.token_hex(8))
        self.geometry = load_geometry(config.model)
        self.layout = plan_memory(config, self.geometry)
        self.memory = NodeMemory(self.layout)
        self.book = self.layout.book()
        self._closing_part_s = config.timeouts.shutdown_close_s / CLOSING_PARTS
        super().__init__(self._metrics(), spans_s=self._closing_part_s)
        self.events = EventStream()
        self.record = NodeRecord(self.events, self.metrics, self.seldom)
        layers = {rank: part.layers for rank, part in self.layout.parts.items()}
        self.workers = WorkerSet(config, layers, self.events, self.seldom)
        self.engines = Engines(tuple(layers), self.events, settle_s=config.timeouts.engine_settle_s)
        self.prefixes = self._prefixes()
        """Prefixes in pages of the book; None when none are kept."""
        if self.prefixes is None and config.tier.events is not None:
            raise ConfigError(
                "tier.events: this node keeps no prefixes of its own to tell of, because its engines bring their memory or its "
                "model has no pages that can be shared; have the engines publish their KV events, or set tier.events to null"
            )
        self.backups: Backups | None = None
        """Copies of these pages in host memory; None without a host tier."""
        self.stored: StoredPrefixes | None = None
        """Copies of host pages in a store below host memory; None without a store."""
        tier, copies = config.tier, None if self.prefixes is None else self.prefixes.copies
        if self.prefixes is not None and copies is not None and tier.host is not None:
            self.prefixes.controller = controller = BackupController(copies, tier.host.backup)
            self.backups = Backups(
                controller,
                self.workers,
                self.book,
                self.events,
                copy_s=config.timeouts.copy_s,
                link_share=tier.host.backup.link_share,
            )
        if self.prefixes is not None and copies is not None and tier.store is not None:
            self.stored = StoredPrefixes(self.prefixes, copies, self.book, tier, self.geometry)
        self._journal: KeptJournal | None = None
        self._kv_events: KvEvents | None = None

    def serve(self, peers: Links, rooms: Rooms[Any]) -> NodeDaemon:
        """Add the links and the rooms of the role, and return the daemon."""
        self.peers, self.rooms = peers, rooms
        self.admission = AdmissionController(rooms, self.book, limits=self.config.admission, events=self.events)
        self.engines.serve(rooms, self.admission, attached=self.attached)
        self.overview = NodeOverview(self)
        return self

    # ------------------------------------------------------------------ from start to end

    async def start(self) -> None:
        """Open sockets and HTTP, make the memory, and begin to start the workers."""
        config = self.config
        require_memory_directory(config, self.layout)
        role, names = self.identity.role, self.identity._asdict()
        self.open_traces(config.telemetry.traces, names, self.events, PARTS[role], self.record)
        group = None if config.runtime_group is None else group_number(config.runtime_group)
        prepare_runtime_directory(config.runtime_dir, group)
        self.workers.open(self.identity.incarnation)
        self.engines.open(self.identity.incarnation, config.runtime_dir)
        keys = curve_keys(config.control.curve)
        identity = PeerIdentity(self.identity.incarnation, keys, insecure=config.insecure)
        self.overview.control = self.peers.open(identity)
        if config.tier.events is not None and self.prefixes is not None:
            index, settings = self.prefixes.index, config.tier.events
            feed = CacheFeed(index, self.geometry.tokens_per_page, checkpoints=settings.checkpoints)
            self._kv_events = KvEvents(settings, feed)
        build = partial(create_daemon_app, self.admission, self.rooms, self.overview)
        self.open(config.http, build, shutdown_s=self._closing_part_s)
        self._announce(self.url)
        self.background(self._ticks(), "ticks")
        await self._create_memory(group)
        self.workers.start(
            lambda rank: self.worker_setup(rank, self.peers.epoch), None if self.adopted else self.identity
        )
        self.background(self.workers.failed(), "workers")
        if self.stored is not None:
            self.stored.open(self.memory.copies, self.memory.host, log_level=config.telemetry.log_level.value)
            self.background(self.stored.failed(), "store")

    async def drain(self) -> None:
        """Admit no more rooms, let rooms end, and abort rooms that take longer than `timeouts.shutdown_rooms_s`."""
        limit_s = self.config.timeouts.shutdown_rooms_s
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
        last_first.callback(self.memory.close)
        last_first.push_async_callback(self._leave_pools)
        if self._kv_events is not None:
            last_first.callback(self._kv_events.close)
        last_first.callback(remove_endpoint, self.config.runtime_dir, self.identity.incarnation)
        last_first.callback(self.engines.close)
        last_first.push_async_callback(self.peers.close, min(1.0, self._closing_part_s))
        last_first.push_async_callback(self.workers.close, 2 * self._closing_part_s)
        if self.stored is not None:
            last_first.push_async_callback(self.stored.close, self._closing_part_s)
        if self.overview.announcer is not None:
            last_first.push_async_callback(self.overview.announcer.close)

    async def _wait_idle(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.rooms.book.open and time.monotonic() < deadline_s:  # noqa: ASYNC110 - rooms end in many ways
            await asyncio.sleep(TICK_S)
        return not self.rooms.book.open

    async def _ticks(self) -> None:
        heartbeat_s = self.config.timeouts.control_heartbeat_s
        next_heartbeat_s = time.monotonic() + heartbeat_s
        while True:
            await asyncio.sleep(TICK_S)
            self.rooms.tick()
            self.admission.tick()
            self.peers.tick()
            self.workers.watch()
            if self.backups is not None:
                self.backups.tick()
            if self._kv_events is not None:
                self._kv_events.tick()
            if self.memory.kept is not None:
                self.memory.kept.renew()
            self.tell(None if self.admission.closed else self.overview.readiness())
            if self.overview.announcer is not None:
                self.overview.announcer.look(self.overview.obstacles())
            if (now_s := time.monotonic()) >= next_heartbeat_s:
                next_heartbeat_s = now_s + heartbeat_s  # heartbeats missed while stopped are not sent later
                self.peers.watch()

    # ------------------------------------------------------------------ memory

    async def _create_memory(self, group: int | None) -> None:
        config, begun_s = self.config, time.monotonic()
        directory = memory_directory(config)
        proofs = Path(config.transports.local.proof_directory)
        await asyncio.to_thread(remove_leftovers, (directory, DEFAULT_DIRECTORY, proofs))
        identity = self.identity
        memory = self.memory
        memory.group = group
        prefix = file_prefix(identity.instance, f"{identity.role}-{identity.node}")
        header = self.kept_header() if config.pools.keep_s else None
        await asyncio.to_thread(memory.keep, config, prefix, header)
        await memory.create(directory, prefix + identity.incarnation, cancel_s=config.timeouts.shutdown_close_s / 2)
        self._go_on_with_pools()
        seconds = round(time.monotonic() - begun_s, 3)
        log.info("memory_created", bytes=self.layout.node_bytes, seconds=seconds)

    def _go_on_with_pools(self) -> None:
        """Begin the journal of kept pools, and restore their pages."""
        memory = self.memory
        copies = None if self.prefixes is None else self.prefixes.copies
        if memory.kept is None or memory.header is None or memory.restored is None or copies is None:
            return
        digest = PageDigests(memory.regions)
        self._journal = journal = KeptJournal(memory.kept.journal, memory.header, digest, memory.found)
        copies.watchers.append(journal)
        if memory.found.pages:
            restored = RestoredCopies(self.book, copies, digest, memory.found, memory.restored, lost=journal.removed)
            self.background(restored.run(), "kept pools")

    async def _leave_pools(self) -> None:
        """Complete the journal of kept pools, after the last copy of a page."""
        if self._journal is not None:
            await self._journal.finish(self._closing_part_s)

    # ------------------------------------------------------------------ the directory

    def _announce(self, url: str) -> None:
        config, control = self.config, self.overview.control
        endpoint = DaemonEndpoint(**self.identity._asdict(), pid=os.getpid(), http_url=url, control=control)
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

    # ------------------------------------------------------------------ what the parts tell each other

    def _metrics(self) -> Metrics:
        """Return metrics with every series that is possible with the configuration and the model."""
        config, identity, layout = self.config, self.identity, self.layout
        values: dict[str, Sequence[str]] = {
            "component": [component.kind.value for component in self.geometry.components],
            "direction": [SENT if identity.role is Role.PREFILL else RECEIVED],
            "transport": [name.value for name in config.transports.order],
            "space": [space.value for space in (*layout.owned, *layout.adopted)],
            "phase": list(PHASES[identity.role]),
        }
        metrics = Metrics(role=identity.role.value, values=values)
        name = f"{config.instance}/{config.node}"
        metrics.built(identity.role.value, name, self.geometry.name, fingerprint(self.geometry))
        return metrics

    def _prefixes(self) -> PrefixCache | None:
        """Return the prefix cache, if it is wanted and this node gives out all pages of a prefix.

        Engines that bring their memory have prefix caches of their own. A page of `full` with other than growing components is
        written again, so it cannot be cached.
        """
        config, owned = self.config, self.layout.owned
        spaces = tuple(space for space in GROWING_SPACES if space in owned)
        in_full = {part.liveness for part in self.geometry.components if part.space is IndexSpace.FULL}
        if not (config.tier.enabled and spaces) or self.layout.adopted or in_full != {Liveness.GROWING}:
            return None
        copies = {HOST_COPIES[space]: owned.get(HOST_COPIES[space], 0) for space in spaces if space in HOST_COPIES}
        index = PrefixIndex(
            spaces,
            min(owned[space] + copies.get(HOST_COPIES.get(space, space), 0) for space in spaces),
            has_copies=any(copies.values()),
            retained_share=config.tier.retained_share,
        )
        return PrefixCache(self.book, index, restores=True)

    @property
    def adopted(self) -> bool:
        """Whether engines bring the device memory."""
        return self.config.pools.memory is MemoryOwner.ADOPTED

    @property
    def stage_boundaries(self) -> tuple[int, ...]:
        """The first layer of each pipeline stage of the instance after the first stage."""
        sizes = self.config.parallelism
        return sizes.stage_boundaries or even_boundaries(self.geometry.layer_count, sizes.pp_size)

    def description(self) -> NodeDescription:
        """Return the description for peers."""
        return NodeDescription(
            **self.identity._asdict(),
            model_identity=self.config.tier.model,
            geometry=self.geometry,
            ranks=self.workers.packed(),
        )

    def kept_header(self) -> KeptHeader:
        """Return the header of the journal of kept pools. Only a node that states its model keeps pools."""
        model = self.config.tier.model
        assert model is not None, "prefixes stay only where their model is known"
        return KeptHeader(
            incarnation=self.identity.incarnation,
            form={
                "model": f"{model.name} {model.revision} (tier.model_name, tier.model_revision)",
                "geometry": fingerprint(self.geometry),
                "ranks": ", ".join(map(str, self.layout.parts)),
                "layout": f"{self.layout.kept_form} (pools.host, tier.host)",
            },
            page_counts={space: count for space, count in self.layout.owned.items() if space in KEPT_SPACES},
        )

    def worker_setup(self, rank: Rank, epoch: int) -> WorkerSetup:
        """Return the setup of a rank worker, once the memory exists. `epoch`: that of its endpoints."""
        config = self.config
        return WorkerSetup(
            geometry=self.geometry,
            rank=rank,
            pp_size=config.parallelism.pp_size,
            tp_size=config.parallelism.tp_size,
            layers=self.layout.parts[rank].layers,
            device=self.memory.device.get(rank, ()),
            allocate=self.layout.orders.get(rank),
            host=self.memory.host,
            own_host=tuple(sorted(self.layout.own_host)),
            twins=self.memory.copies,
            stage_tp_ranks=tuple(sorted(other.tp for other in self.layout.parts if other.pp == rank.pp)),
            copy_backend=self._copy_backend.value,
            transports=config.transports.model_dump_json(),
            transfer_timeout_s=config.timeouts.transfer_s,
            epoch=epoch,
        )

    def attached(self, call: int, ranks: tuple[Rank, ...]) -> Attached:
        """Answer an attach. Raises NotReadyError while the memory is being made."""
        if self.memory.problem and self.layout.total_bytes:  # engines that adopt still share our host pool
            raise NotReadyError(f"nothing to attach to yet: {self.memory.problem}; try again shortly")
        made = {rank: self.workers.device(rank) for rank in ranks if rank in self.layout.orders}
        return Attached(
            call=call,
            instance=self.identity.instance,
            incarnation=self.identity.incarnation,
            geometry=self.geometry,
            model_identity=self.config.tier.model,
            ranks=ranks,
            layers={str(rank): self.layout.parts[rank].layers for rank in ranks},
            pp_size=self.config.parallelism.pp_size,
            tp_size=self.config.parallelism.tp_size,
            device={str(rank): made.get(rank) or self.memory.device.get(rank, ()) for rank in ranks},
            host=self.memory.host,
            own_host=tuple(sorted(self.layout.own_host)),
            twins=self.memory.copies,
            copy_backend=self._copy_backend.value,
            features=FEATURES,
        )

    @property
    def _copy_backend(self) -> CopyBackend:
        tier, device = self.config.tier.host, self.config.pools.device_layout
        return CopyBackend.KERNEL if tier is None else copy_backend(tier.backend, host=tier.layout, device=device)

    @property
    def reports(self) -> Reports:
        """Handlers of reports from rank workers of either role."""
        return {} if self.backups is None else {PagesCopied: self.backups.copied}

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """Have engines and prefixes release the device memory that a lost rank worker had made, if any. The caller tells its rooms.

        Copies in the host tier are kept. Pages that exist only in the host pool are dropped, because a prefix is useless unless all
        ranks hold it.
        """
        if self.backups is not None:
            self.backups.gone(rank, reason)
        if rank in self.layout.orders:
            if self.prefixes is not None:
                self.prefixes.lose_device()
            self.engines.memory_lost(rank, f"rank worker {rank} is gone: {reason}")
