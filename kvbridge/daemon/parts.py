"""The parts of a node that do not depend on its role, made in one order before anything is opened."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from kvbridge.config.pools import MemoryOwner
from kvbridge.config.tier import CopyBackend
from kvbridge.core.errors import ConfigError, NotReadyError
from kvbridge.core.geometry.components import Liveness
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.pages import GROWING_SPACES
from kvbridge.core.ids import HOST_COPIES, IndexSpace, NodeIdentity, Rank, Role
from kvbridge.core.wire.engine_messages import Attached
from kvbridge.core.wire.messages import FEATURES, NodeDescription
from kvbridge.core.wire.worker_messages import PagesCopied, WorkerSetup
from kvbridge.daemon.kept_pools import KEPT_SPACES, KeptHeader
from kvbridge.daemon.layout import NodeConfig, load_geometry, plan_memory
from kvbridge.daemon.memory import NodeMemory
from kvbridge.node.backups import Backups
from kvbridge.node.engines import Engines
from kvbridge.node.stored_prefixes import StoredPrefixes
from kvbridge.node.workers import Reports, WorkerSet
from kvbridge.pool.memory.layout import even_boundaries
from kvbridge.telemetry.facts import EventStream
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import PHASES, RECEIVED, SENT
from kvbridge.telemetry.record import NodeRecord
from kvbridge.telemetry.registry import Metrics
from kvbridge.tier.copies import copy_backend
from kvbridge.tier.host_copies import BackupController
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.prefix_cache import PrefixCache


class NodeParts:
    """The parts of one node. Nothing is open yet."""

    def __init__(self, config: NodeConfig, role: Role) -> None:
        """Raises ConfigError, InvalidInputError."""
        self.config = config
        self.identity = NodeIdentity(role, config.instance, config.node, secrets.token_hex(8))
        self.geometry = load_geometry(config.model)
        self.layout = plan_memory(config, self.geometry)
        self.memory = NodeMemory(self.layout)
        self.book = self.layout.book()
        self.metrics = self._metrics()
        self.seldom = Seldom(self.metrics.line_left_out)
        """Limits log lines that strangers, or many rooms, can cause."""
        self.events = EventStream()
        self.record = NodeRecord(self.events, self.metrics, self.seldom)
        layers = {rank: part.layers for rank, part in self.layout.parts.items()}
        self.workers = WorkerSet(config, layers, self.events, self.seldom)
        self.engines = Engines(tuple(layers), self.events, settle_s=config.timeouts.engine_settle_s)
        self.prefixes = self._prefixes()
        """Keeps pages of the book as prefixes; None when none are kept."""
        if self.prefixes is None and config.tier.events is not None:
            raise ConfigError(
                "tier.events: this node keeps no prefixes of its own to tell of, because its engines bring their memory or its "
                "model has no pages that can be shared; have the engines publish their KV events, or set tier.events to null"
            )
        self.backups: Backups | None = None
        """Copies those pages to host memory; None without a host tier."""
        self.stored: StoredPrefixes | None = None
        """Copies host pages to a store below host memory and back; None without a store."""
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

    def _metrics(self) -> Metrics:
        """Return metrics with every series that the configuration and the model can cause."""
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
        """Return the prefix cache, if one is wanted and this node gives out all pages that a prefix takes.

        Engines that bring their memory have prefix caches of their own. A page of `full` that holds anything but growing components
        would be written again, so it cannot be cached.
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
        """Return the description by which this node introduces itself to peers."""
        return NodeDescription(
            **self.identity._asdict(),
            model_identity=self.config.tier.model,
            geometry=self.geometry,
            ranks=self.workers.packed(),
        )

    def kept_header(self) -> KeptHeader:
        """Return the header of the journal of kept pools. Only a node that states its model keeps any."""
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
        """Return the setup of a rank worker, once the memory is there. `epoch`: the epoch of the endpoints that it gives out."""
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
        """Handlers of the reports that rank workers of either role send."""
        return {} if self.backups is None else {PagesCopied: self.backups.copied}

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """Have engines and prefixes release the device memory that a rank worker had made, if any. Its rooms know that it is gone.

        Copies in the host tier are kept. Pages that exist only in the host pool are dropped, because a prefix is useless unless all
        ranks hold it.
        """
        if self.backups is not None:
            self.backups.gone(rank, reason)
        if rank in self.layout.orders:
            if self.prefixes is not None:
                self.prefixes.lose_device()
            self.engines.memory_lost(rank, f"rank worker {rank} is gone: {reason}")
