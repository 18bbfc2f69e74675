"""What both roles are built on: made in one order, before anything is opened."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvbridge.config.pools import MemoryOwner
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.config.tier import CopyBackend
from kvbridge.core.errors import NotReadyError
from kvbridge.core.geometry.components import Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.pages import GROWING_SPACES
from kvbridge.core.ids import HOST_COPIES, IndexSpace, NodeIdentity, Rank, Role
from kvbridge.core.wire.engine_messages import Attached
from kvbridge.core.wire.features import FEATURES
from kvbridge.core.wire.messages import NodeDescription
from kvbridge.core.wire.worker_messages import PagesCopied, WorkerSetup
from kvbridge.daemon.engine_socket import EngineSocket
from kvbridge.daemon.kept_journal import KEPT_SPACES, KeptHeader
from kvbridge.daemon.memory import NodeLayout, NodeMemory, plan_memory
from kvbridge.daemon.model import load_geometry
from kvbridge.daemon.worker_host import Reports, WorkerHost
from kvbridge.node.backups import Backups, CopyLimits
from kvbridge.node.engines import Engines
from kvbridge.node.rooms import RoomParts
from kvbridge.node.stored_prefixes import StoredPrefixes
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.memory.layout import even_boundaries
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import PHASES, RECEIVED, SENT
from kvbridge.telemetry.readers import LogReader, MetricsReader, PeerNames
from kvbridge.telemetry.recent import Recent
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.stream import EventStream
from kvbridge.tier.controller import BackupController
from kvbridge.tier.copies import copy_backend
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.prefix_cache import PrefixCache

NodeConfig = PrefillConfig | DecodeConfig


@dataclass(frozen=True)
class NodeParts:
    """Everything of a node that does not depend on its role. Nothing is open yet."""

    config: NodeConfig
    identity: NodeIdentity
    geometry: ModelGeometry
    metrics: Metrics
    seldom: Seldom
    """What keeps lines of the log few that strangers, or many rooms, can cause."""
    recent: Recent
    events: EventStream
    layout: NodeLayout
    book: PageBook
    prefixes: PrefixCache | None
    """The pages of the book that stay; None: none do."""
    backups: Backups | None
    """What moves those pages down to host memory; None: nothing does."""
    stored: StoredPrefixes | None
    """What moves them to a store below host memory and back; None: nothing does."""
    memory: NodeMemory
    worker_host: WorkerHost
    engine_socket: EngineSocket
    engines: Engines

    @classmethod
    def build(cls, config: NodeConfig, role: Role) -> NodeParts:
        """Decide everything that can be decided without opening anything. Raises ConfigError, InvalidInputError."""
        geometry = load_geometry(config.model)
        layout = plan_memory(config, geometry)
        metrics = _metrics(config, role, geometry, layout)
        names, recent, events, seldom = PeerNames(), Recent(), EventStream(), Seldom(metrics.line_left_out)
        for reader in (names, MetricsReader(metrics, names), LogReader(names, seldom), recent):
            events.add_reader(reader.table)
        layers, book = {rank: part.layers for rank, part in layout.parts.items()}, layout.book()
        socket = EngineSocket(config.timeouts.engine_settle_s, events)
        worker_host = WorkerHost(config, layers, events, seldom)
        prefixes = _prefixes(config, geometry, layout, book)
        return cls(
            config=config,
            identity=NodeIdentity(role, config.instance, config.node, secrets.token_hex(8)),
            geometry=geometry,
            metrics=metrics,
            seldom=seldom,
            recent=recent,
            events=events,
            layout=layout,
            book=book,
            prefixes=prefixes,
            backups=_backups(config, prefixes, worker_host.workers, book, events),
            stored=_stored(config, prefixes, book, geometry),
            memory=NodeMemory(layout),
            worker_host=worker_host,
            engine_socket=socket,
            engines=Engines(socket.send, tuple(layers), events),
        )

    @property
    def workers(self) -> WorkerSet:
        """The rank workers, as everybody but their host sees them."""
        return self.worker_host.workers

    @property
    def room_parts(self) -> RoomParts:
        """The parts that rooms use."""
        return RoomParts(
            book=self.book,
            workers=self.workers,
            engines=self.engines,
            events=self.events,
            prefixes=self.prefixes,
            store=self.stored,
        )

    @property
    def adopted(self) -> bool:
        """Whether engines bring the device memory."""
        return self.config.pools.memory is MemoryOwner.ADOPTED

    @property
    def stage_boundaries(self) -> tuple[int, ...]:
        """The first layers of the instance's pipeline stages but the first."""
        sizes = self.config.parallelism
        return sizes.stage_boundaries or even_boundaries(self.geometry.layer_count, sizes.pp_size)

    def description(self) -> NodeDescription:
        """How this node introduces itself to peers."""
        return NodeDescription(
            **self.identity._asdict(),
            model_identity=self.config.tier.model,
            geometry=self.geometry,
            ranks=self.workers.packed(),
        )

    def kept_header(self) -> KeptHeader:
        """What the journal of this node's kept pools says of them. Only a node that says which model it holds keeps any."""
        model = self.config.tier.model
        assert model is not None, "prefixes stay only where it is known of which model they are"
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
        """What a rank worker is to serve, once the memory is there. `epoch`: of the endpoints that it is to give out."""
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
            twins=self.memory.twins,
            stage_tp_ranks=tuple(sorted(other.tp for other in self.layout.parts if other.pp == rank.pp)),
            copy_backend=self._copy_backend.value,
            transports=config.transports.model_dump_json(),
            transfer_timeout_s=config.timeouts.transfer_s,
            epoch=epoch,
        )

    def attached(self, call: int, ranks: tuple[Rank, ...]) -> Attached:
        """Answer an attach. Raises NotReadyError while the memory to be attached to is being made."""
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
            twins=self.memory.twins,
            copy_backend=self._copy_backend.value,
            features=FEATURES,
        )

    @property
    def _copy_backend(self) -> CopyBackend:
        tier, device = self.config.tier.host, self.config.pools.device_layout
        return CopyBackend.KERNEL if tier is None else copy_backend(tier.backend, host=tier.layout, device=device)

    @property
    def reports(self) -> Reports:
        """Who takes what rank workers of either role say."""
        return {} if self.backups is None else {PagesCopied: self.backups.copied}

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """A rank worker is gone, and its rooms know: of the device memory that it had made, if any, engines and prefixes let go.

        A prefix is held by all ranks of a node or not at all. What of it is in the host tier stays; in the host pool alone it is of
        no use.
        """
        if self.backups is not None:
            self.backups.gone(rank, reason)
        if rank in self.layout.orders:
            if self.prefixes is not None:
                self.prefixes.lose_device()
            self.engines.memory_lost(rank, f"rank worker {rank} is gone: {reason}")


def _prefixes(config: NodeConfig, geometry: ModelGeometry, layout: NodeLayout, book: PageBook) -> PrefixCache | None:
    """Make what keeps prefixes, when it is wanted and this node gives out all pages that a prefix takes.

    Engines that bring the memory have prefix caches of their own. Pages of `full` that hold anything but growing components would
    be written again.
    """
    spaces = tuple(space for space in GROWING_SPACES if space in layout.owned)
    in_full = {part.liveness for part in geometry.components if part.space is IndexSpace.FULL}
    if not (config.tier.enabled and spaces) or layout.adopted or in_full != {Liveness.GROWING}:
        return None
    twins = {HOST_COPIES[space]: layout.owned.get(HOST_COPIES[space], 0) for space in spaces if space in HOST_COPIES}
    index = PrefixIndex(
        spaces,
        min(layout.owned[space] + twins.get(HOST_COPIES.get(space, space), 0) for space in spaces),
        has_copies=any(twins.values()),
        retained_share=config.tier.retained_share,
    )
    return PrefixCache(book, index, restores=True)


def _backups(
    config: NodeConfig, prefixes: PrefixCache | None, workers: WorkerSet, book: PageBook, events: EventStream
) -> Backups | None:
    """Make what moves cached pages down to host memory, when there is some."""
    if prefixes is None or prefixes.copies is None or config.tier.host is None:
        return None
    settings = config.tier.host.backup
    limits = CopyLimits(copy_s=config.timeouts.copy_s, link_share=settings.link_share)
    return Backups(BackupController(prefixes, prefixes.copies, book, settings), workers, book, events, limits)


def _stored(
    config: NodeConfig, prefixes: PrefixCache | None, book: PageBook, geometry: ModelGeometry
) -> StoredPrefixes | None:
    """Make what moves host pages to a store and back, when there is one."""
    if prefixes is None or prefixes.copies is None or config.tier.store is None:
        return None
    return StoredPrefixes(prefixes, prefixes.copies, book, config.tier, geometry)


def _metrics(config: NodeConfig, role: Role, geometry: ModelGeometry, layout: NodeLayout) -> Metrics:
    """Metrics with every series that the configuration and the model lead to."""
    values: dict[str, Sequence[str]] = {
        "component": [component.kind.value for component in geometry.components],
        "direction": [SENT if role is Role.PREFILL else RECEIVED],
        "transport": [name.value for name in config.transports.order],
        "space": [space.value for space in (*layout.owned, *layout.adopted)],
        "phase": list(PHASES[role]),
    }
    metrics = Metrics(role=role.value, values=values)
    metrics.built(role.value, f"{config.instance}/{config.node}", geometry.name, fingerprint(geometry))
    return metrics
