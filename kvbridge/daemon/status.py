"""Views of a node for operators, Prometheus and the directory. Everything here only reads."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvbridge import __version__
from kvbridge.api.directory import Load, NodeRegistration
from kvbridge.api.rooms import RoomTimeline, TimelineEntry
from kvbridge.api.status import (
    BootstrapLinkStatus,
    DecodeNodeStatus,
    HostTierStatus,
    KeptPoolsStatus,
    ModelStatus,
    NodeStatus,
    PrefixStatus,
    Readiness,
    RegistrationState,
)
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import UnknownRoomError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import REQUEST_SPACES
from kvbridge.core.plan.operations import Amount
from kvbridge.core.process import moment
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import FEATURES, REASON_CHARS
from kvbridge.daemon.announce import Announcer
from kvbridge.daemon.links import control_modes
from kvbridge.http.app import Document
from kvbridge.telemetry import metrics as m
from kvbridge.telemetry.facts import RoomEntered, RoomFact
from kvbridge.telemetry.registry import Metrics

if TYPE_CHECKING:
    from kvbridge.daemon.node import NodeDaemon

SHOWN_LINKS = 64
"""Number of instances whose sent bytes are in a registration: those with most."""
_NOT_SHOWN = {field.name for field in fields(RoomFact)} | {"state", "trace", "under_way_ago_s", "age_s"}
"""Fields of facts that are not among the details of a timeline's entry."""
ROOMS_OF_STATE = 25
"""Rooms of each state on the status page, which counts all."""


class NodeOverview:
    """A node's documents (`NodePort`). The daemon sets three attributes while it opens."""

    def __init__(self, node: NodeDaemon) -> None:
        self._node = node
        self._rooms = node.rooms.book
        self._admission = node.admission
        self.metrics: Metrics = node.metrics
        self.http_url = ""
        """URL of the HTTP API."""
        self.control: PeerAddress | None = None
        """Address for peers, if this node listens."""
        self.announcer: Announcer | None = None
        """Its entry in the directory, if any."""

    def obstacles(self) -> list[str]:
        """Return why no room at all can be admitted, whatever pages are free. Bootstrap does not ask such a node."""
        candidates = [self._node.memory.problem, self._node.workers.missing(), self._admission.closed]
        if self._node.config.admission.needs_engine:
            served = {rank for engine in self._node.engines.status() if not engine.gone for rank in engine.ranks}
            lacking = ", ".join(str(rank) for rank in self._node.layout.parts if str(rank) not in served)
            candidates.append(f"no engine is attached to {lacking} (admission.needs_engine)" if lacking else "")
        return [reason for reason in candidates if reason]

    def readiness(self) -> Readiness:
        """Return whether new rooms can be admitted, and every reason why not.

        A node that bootstrap has known stays ready while bootstrap is away; the reasons name the absence.
        """
        announcer = self.announcer
        reasons = [*self.obstacles(), self._admission.problem(), announcer.obstacle if announcer else ""]
        ready = not any(reasons)
        if announcer is not None and not announcer.obstacle and announcer.problem:
            reasons.append(f"bootstrap does not answer: {announcer.problem}")
        return Readiness(ready=ready, reasons=tuple(filter(None, reasons)))

    def _directory(self) -> BootstrapLinkStatus:
        announcer, url = self.announcer, self._node.config.bootstrap.url
        if announcer is None:
            state = RegistrationState.UNREACHABLE if url else RegistrationState.NONE
            return BootstrapLinkStatus(state=state, url=url, problem="HTTP is not open yet" if url else "")
        return BootstrapLinkStatus(state=announcer.state, url=url, problem=announcer.problem)

    def status(self) -> NodeStatus:
        """Return the status document."""
        node, kept = self._node, self._node.memory.restored
        return NodeStatus(
            **node.identity._asdict(),
            version=__version__,
            at=moment(),
            started_at=node.started_at,
            model=ModelStatus(
                name=node.geometry.name,
                fingerprint=fingerprint(node.geometry),
                tokens_per_page=node.geometry.tokens_per_page,
                identity=node.config.tier.model,
            ),
            memory_bytes=node.layout.total_bytes,
            ready=self.readiness(),
            bootstrap=self._directory(),
            control=self.control.endpoint if self.control else "",
            ranks=node.workers.status(),
            engines=node.engines.status(),
            peers=self._node.peers.status(),
            rooms=self._rooms.states(),
            admission=self._admission.status(),
            pools=node.book.counts(),
            available_pages=node.book.available_pages(),
            prefixes=self._prefixes(),
            host_tier=self._host_tier(),
            kept_pools=None if kept is None else KeptPoolsStatus.model_validate(kept, from_attributes=True),
            store=None if node.stored is None else node.stored.status(),
            quarantine={reason: tuple(map(str, owners)) for reason, owners in node.book.quarantine_reasons().items()},
            problems=node.record.problems.lately(),
            traffic=node.record.traffic,
            fence=self._node.peers.fence(),
        )

    def _prefixes(self) -> PrefixStatus | None:
        prefixes = self._node.prefixes
        if prefixes is None:
            return None
        device = prefixes.index.device
        return PrefixStatus(
            read_pages=device.pinned,
            unread_pages=len(device) - device.pinned,
            readers=prefixes.readers,
            evicted_pages=dict(+prefixes.index.evicted),
            **{f"{kind}_tokens": self._node.record.matched[kind] for kind in ("hit", "miss", "host")},
            checkpoints=device.checkpoint_count,
            retained_pages=dict(prefixes.retained().most_common(8)),
            retention_refused=prefixes.retention_refused,
        )

    def _host_tier(self) -> HostTierStatus | None:
        prefixes, backups, copies = self._node.prefixes, self._node.backups, self._node.record.copies
        if prefixes is None or backups is None:
            return None
        where, copied, loaded = prefixes.residency(), copies["backup"], copies["load_back"]
        return HostTierStatus(
            device_pages=where.device,
            both_pages=where.both,
            host_pages=where.host,
            waiting_prompts=backups.controller.waiting,
            in_flight_pages=backups.pages_in_flight,
            backed_up_pages=copied.pages,
            backed_up_bytes=copied.bytes,
            failed_orders=copied.failed,
            last_failure=copied.last_failure,
            longest_order_s=round(copied.longest_s, 4),
            refused_prompts=backups.controller.refused,
            loaded_back_pages=loaded.pages,
            failed_loads=loaded.failed,
            last_failed_load=loaded.last_failure,
            evicted_read_back_pages=where.evicted.read_back,
            evicted_unused_pages=where.evicted.unused,
        )

    def render_metrics(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Set the gauges from the status document. Return the metrics page in pieces, in an accepted form, and its content type."""
        status, metrics, stored = self.status(), self.metrics, self._node.stored

        def by_word(metric: m.MetricSpec, found: Mapping[Any, float]) -> None:
            metrics.replace(metric, {(str(word),): value for word, value in found.items()})

        by_word(m.ROOMS, {state.value: status.rooms.get(state.value, 0) for state in RoomState})
        by_word(m.QUARANTINED, self._rooms.quarantined())
        by_word(m.ENGINES, self._node.engines.states())
        by_word(m.WORKERS, Counter(rank.state for rank in status.ranks))
        by_word(m.DIRECTORY_REGISTRATION, {status.bootstrap.state: 1})
        if status.fence is not None:
            metrics.assign(m.EPOCH, status.fence.epoch)
        metrics.assign(m.WAITING, status.admission.waiting)
        metrics.assign(m.STARVED, status.at - (status.admission.starved_since or status.at))
        metrics.assign(m.READY, status.ready.ready)
        pages = {(space.value, state.value): count for space, of in status.pools.items() for state, count in of.items()}
        metrics.replace(m.POOL, pages)
        by_word(m.AVAILABLE, status.available_pages)
        if status.prefixes is not None:
            by_word(m.PREFIX_EVICTED, status.prefixes.evicted_pages)
        if (tier := status.host_tier) is not None:
            by_word(m.TIER_PAGES, {"device": tier.device_pages, "both": tier.both_pages, "host": tier.host_pages})
        if (store := status.store) is not None and stored is not None and stored.client is not None:
            by_word(m.STORE_STATE, {store.state: 1})
            objects = {(verb, outcome): n for verb, of in store.objects.items() for outcome, n in of.items()}
            metrics.replace(m.STORE_OBJECTS, objects)
            by_word(m.STORE_BYTES, stored.client.moved_bytes)
            by_word(m.STORE_PREFETCHES, store.prefetches)
        return metrics.render(accept)

    def page(self) -> Document:
        """Return the document of the status page: the status, and some rooms of each state."""
        now_s, recent = time.monotonic(), self._node.record
        rooms = [
            {
                "room": room,
                "generation": generation,
                "state": kept.entered.state,
                "admitted_at": moment(now_s - kept.admitted_s),
                "entered_at": moment(now_s - kept.entered_s),
                "peer": kept.peer,
                "reason": kept.entered.reason,
                "waits_for": "" if kept.entered.state.final else self._waits_for(room, generation),
            }
            for (room, generation), kept in recent.shown(ROOMS_OF_STATE)
        ]
        sums = {"ended": recent.ended, "ended_lately": recent.ended_lately.lately(), "moved_bytes": recent.moved_bytes}
        return {"status": self.status(), "rooms": rooms, **sums}

    def _waits_for(self, room: int, generation: int) -> str:
        try:
            report = self._rooms.report(room)
        except UnknownRoomError:
            return ""
        return report.waits_for if report.generation == generation else ""

    def timeline(self, room: int, generation: int | None) -> RoomTimeline:
        """Return the timeline of a room, by default of the newest attempt. Raises UnknownRoomError."""
        found = self._node.record.of(room, generation)
        if found is None:
            which = f"room {room}" if generation is None else f"room {room} in generation {generation}"
            raise UnknownRoomError(f"{which} has no timeline here: it was never admitted, or ended and was forgotten")
        generation, kept = found
        return RoomTimeline(
            room=room,
            generation=generation,
            age_s=time.monotonic() - kept.admitted_s,
            entries=tuple(_entry(at_s - kept.admitted_s, fact) for at_s, fact in kept.facts),
        )

    # ------------------------------------------------------------------ the directory

    def registration(self) -> NodeRegistration:
        """Return the node's entry in the directory, once HTTP is open."""
        node, config, reasons = self._node, self._node.config, self.obstacles()
        return NodeRegistration(
            **node.identity._asdict(),
            http_url=config.http.advertised(self.http_url),
            engine_url=config.engine_url,
            control=self.control,
            meets_by=control_modes(config, self.control),
            pp_size=config.parallelism.pp_size,
            tp_size=config.parallelism.tp_size,
            stage_boundaries=node.stage_boundaries,
            ranks=tuple(node.workers.layers),
            fingerprint=fingerprint(node.geometry),
            model_identity=config.tier.model,
            geometry=node.geometry,
            host=tuple(sorted(node.layout.host_kinds)),
            features=FEATURES,
            ready=not reasons,
            reasons=tuple(reason[:REASON_CHARS] for reason in reasons),
            load=self.load().model_copy(update={"sent_bytes": self._sent_bytes()}),
        )

    def _sent_bytes(self) -> dict[str, int]:
        """Return the bytes sent to each instance. They are no part of `load`, which is called many times a second."""
        traffic, found = self._node.record.traffic, Counter[str]()
        for peer in self._node.peers.status():
            if isinstance(peer, DecodeNodeStatus) and peer.incarnation in traffic:
                found[peer.instance] += traffic[peer.incarnation].sent_bytes
        return dict(found.most_common(SHOWN_LINKS))

    def load(self) -> Load:
        """Return the number of rooms and the pages."""
        book, prefixes = self._node.book, self._node.prefixes
        available, counts = book.available_pages(), book.counts()
        return Load(
            rooms=len(self._rooms.open),
            prefixes_kept_s=None if prefixes is None else round(prefixes.kept_s(), 3),
            available_pages={space.value: available[space] for space in available if space in REQUEST_SPACES},
            total_pages={space.value: sum(counts[space].values()) for space in counts if space in REQUEST_SPACES},
        )


def _entry(after_s: float, fact: RoomFact) -> TimelineEntry:
    state = fact.state if isinstance(fact, RoomEntered) else None
    details = {
        name.removesuffix("_s"): _text(value)
        for name in (field.name for field in fields(fact))
        if name not in _NOT_SHOWN and (value := getattr(fact, name)) not in ("", {}, (), 0)
    }
    if fact.peer:
        details["peer"] = fact.peer
    what = state.value if state else re.sub(r"(?<!^)(?=[A-Z])", " ", type(fact).__name__).lower()
    return TimelineEntry(after_s=after_s, what=what, state=state, details=details)


def _text(value: Any) -> str:  # noqa: ANN401 - whatever a fact has
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}".replace("_", " ") for key, each in value.items())
    if isinstance(value, Amount):
        return f"{value.bytes:,} bytes"
    if isinstance(value, float):
        return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.2f} ms"
    return str(value)
