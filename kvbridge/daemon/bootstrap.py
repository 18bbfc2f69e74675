"""The bootstrap daemon: the directory and the pairing behind one HTTP API.

An overview answers `/ready`, `/status` and `/metrics`, so that they never wait for a store that hangs. It is taken every
`OVERVIEW_S`, and less often for a large fleet.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from kvbridge import __version__
from kvbridge.api.client import DaemonClient
from kvbridge.api.directory import InstanceView
from kvbridge.api.endpoint_file import DaemonEndpoint, remove_endpoint, write_endpoint
from kvbridge.api.status import BootstrapStatus, LostNode, Readiness, StoreStatus
from kvbridge.bootstrap.directory import Directory, absences
from kvbridge.bootstrap.nodes import NodeKey
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.store import MemoryStore, PairingState, RoomTimes, Store
from kvbridge.config.loading import read_secret, read_token
from kvbridge.config.schema import BootstrapConfig, StoreKind
from kvbridge.core.errors import CHECKOUT, BridgeError, ConfigError, UnavailableError
from kvbridge.core.process import moment
from kvbridge.daemon.lifecycle import Daemon
from kvbridge.http.app import Document
from kvbridge.http.bootstrap_app import create_bootstrap_app
from kvbridge.pool.memory.leftovers import remove_leftovers
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.telemetry.facts import PairingEnded, PrefixGuessed
from kvbridge.telemetry.metrics import INSTANCES, PAIRING_DURATION, PAIRING_PREFIXES, PAIRINGS, READY, ROOMS
from kvbridge.telemetry.recent import Problems, Tally
from kvbridge.telemetry.registry import Metrics

log = structlog.get_logger(__name__)

OVERVIEW_S = 0.25
"""Shortest time between two overviews. Each also forgets expired entries."""
LOST_KEPT_S = 3600.0
MOST_LOST = 256
OVERVIEW_PAUSE = 24
"""Ratio of the pause after an overview to the overview: a thousand nodes take about 4 % of the time."""


@dataclass(frozen=True, slots=True)
class _Overview:
    """The store's content."""

    listing: tuple[InstanceView, ...] = ()
    rooms: dict[str, int] = field(default_factory=dict)
    problem: str = "the directory has not been read yet"
    """Why the store does not answer; the other fields are from its last answer."""


class BootstrapDaemon(Daemon):
    """One bootstrap."""

    def __init__(self, config: BootstrapConfig, *, endpoint_dir: Path | None = None) -> None:
        """`endpoint_dir`: directory of the endpoint file, for tools that let the system choose the port."""
        super().__init__(Metrics(role="bootstrap"), spans_s=config.timeouts.shutdown_s / 5)
        self.metrics.built("bootstrap", "bootstrap")
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self._endpoint_dir = endpoint_dir
        timeouts, daemons, key = config.timeouts, config.daemons, "daemons.token_file"
        token = self.follow(key, (daemons.token_file,), lambda: read_token(daemons, key=key))
        self._daemons = DaemonClient(token=token.current, timeout_s=timeouts.reserve_s)
        token.on_change = self._daemons.use_token
        self._store = self._open_store()
        self.directory = Directory(self._store, self._daemons)
        self.pairing = PairingService(
            self.directory, self._store, self._daemons, config=config.pairing, timeouts=timeouts
        )
        self.pairing.events.add_reader({PairingEnded: self._paired, PrefixGuessed: self._guessed})
        self._overview = _Overview()
        self._problems, self._requests = Problems(), Tally()
        self._lost: dict[NodeKey, LostNode] = {}
        """Nodes that have left, the first to leave first."""

    async def start(self) -> None:
        """Open the endpoint, also while the store does not answer: `/ready` gives the reason."""
        await self._look()
        names = {"role": "bootstrap", "incarnation": self.incarnation}
        self.open_traces(self.config.telemetry.traces, names, self.pairing.events)
        build = partial(create_bootstrap_app, self.directory, self.pairing, self)
        self.open(self.config.http, build, shutdown_s=self.config.timeouts.shutdown_s / 2)
        self.background(self._sweep(), "sweep")
        if self._endpoint_dir is not None:
            try:
                self._endpoint_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UnavailableError(
                    f"--endpoint-dir {self._endpoint_dir} cannot be made: {error.strerror}"
                ) from error
            endpoint = DaemonEndpoint(
                role="bootstrap", incarnation=self.incarnation, pid=os.getpid(), http_url=self.url
            )
            write_endpoint(self._endpoint_dir, endpoint)
        await asyncio.to_thread(remove_leftovers, (DEFAULT_DIRECTORY,))
        log.info("daemon_listens", http=self.url, store=repr(self._store))

    def _open_store(self) -> Store:
        """Return the store that the configuration names. Raises ConfigError when this process cannot use the store."""
        config, directory, timeouts = self.config, self.config.directory, self.config.timeouts
        rooms = RoomTimes(
            # The sum of everything that a pairing may wait for: an older claim belongs to no pairing.
            claim_s=2 * timeouts.pair_s + config.pairing.max_wait_s + timeouts.reserve_s + 2 * timeouts.store_s,
            keep_s=timeouts.room_keep_s,
            max_rooms=config.pairing.max_rooms,
        )
        if directory.store is StoreKind.MEMORY or directory.redis_url is None:
            return MemoryStore(expire_after_s=directory.expire_after_s, rooms=rooms)
        try:
            from kvbridge.bootstrap.redis_store import RedisStore, redis_client  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"directory.store is redis, which needs the package {error.name}; {CHECKOUT.format('redis')}"
            ) from error
        key, file = "directory.redis_password_file", directory.redis_password_file
        password = self.follow(key, (file,), lambda: read_secret(None, file, key=key))
        url = directory.redis_url.get_secret_value().strip()
        return RedisStore(
            redis_client(url, lambda: password.current, timeout_s=timeouts.store_s),
            namespace=directory.namespace,
            timeout_s=timeouts.store_s,
            expire_after_s=directory.expire_after_s,
            rooms=rooms,
            metrics=self.metrics,
        )

    def close_parts(self, last_first: AsyncExitStack) -> None:
        if self._endpoint_dir is not None:
            last_first.callback(remove_endpoint, self._endpoint_dir, self.incarnation)
        last_first.push_async_callback(self._store.close)
        last_first.push_async_callback(self._daemons.close)

    async def _sweep(self) -> None:
        took_s = 0.0
        while True:
            await asyncio.sleep(max(OVERVIEW_S, OVERVIEW_PAUSE * took_s))
            begun_s = time.thread_time()
            await self._look()
            took_s = time.thread_time() - begun_s
            self.tell(self.readiness())

    async def _look(self) -> None:
        """Forget expired entries and take the overview."""
        before = self._overview
        try:
            expired = await self.directory.expire()
            listing = await self.directory.listing()
            counts = await self._store.room_counts()
        except BridgeError as error:
            self._overview = _Overview(before.listing, before.rooms, str(error))
            if not before.problem:
                log.error("store_away", code=error.code, reason=str(error))
            return
        self._overview = _Overview(listing, {state.value: count for state, count in counts.items()}, "")
        self._miss(before.listing, listing, expired)
        if before.problem:
            log.info("store_answers", store=repr(self._store), instances=len(listing))

    def _miss(self, before: Iterable[InstanceView], now: Iterable[InstanceView], expired: Collection[NodeKey]) -> None:
        """Note nodes that left between two listings. Another replica may have removed a silent node."""
        limit_s = self.config.directory.expire_after_s
        present = {(one.instance, node.node) for one in now for node in one.nodes}
        for one in before:
            for node in one.nodes:
                key, name = (one.instance, node.node), f"{one.instance}/{node.node}"
                if key in present:
                    continue
                if is_lost := key in expired or node.silent_s > limit_s / 2:
                    reason = f"it was silent for {limit_s:g} s (directory.expire_after_s)"
                    self._problems.add("node lost", name, reason)
                reason = reason if is_lost else "it has taken itself off, as a node does that is shut down"
                self._lost[key] = LostNode(
                    role=one.role,
                    instance=one.instance,
                    node=node.node,
                    http_url=node.http_url,
                    at=moment(),
                    reason=reason,
                )
        oldest, kept = moment() - LOST_KEPT_S, list(self._lost.items())[-MOST_LOST:]
        self._lost = {key: lost for key, lost in kept if key not in present and lost.at > oldest}

    def readiness(self) -> Readiness:
        """Return ready while the overview has a ready node of each role. Nodes can register in any case."""
        overview = self._overview
        reasons = (overview.problem,) if overview.problem else absences(overview.listing)
        return Readiness(ready=not reasons, reasons=reasons)

    def status(self) -> BootstrapStatus:
        """Return the status page's document."""
        overview = self._overview
        return BootstrapStatus(
            incarnation=self.incarnation,
            version=__version__,
            at=moment(),
            started_at=self.started_at,
            ready=self.readiness(),
            store=StoreStatus(kind=self.config.directory.store.value, problem=overview.problem),
            instances=overview.listing,
            rooms=overview.rooms,
            requests=self._requests.lately(),
            problems=self._problems.lately(),
            lost=tuple(self._lost.values()),
        )

    def render_metrics(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Set the gauges. Return the metrics page in pieces, in an accepted form, and its content type."""
        rooms, listing = self._overview.rooms, self._overview.listing
        self.metrics.replace(ROOMS, {(state.value,): rooms.get(state.value, 0) for state in PairingState})
        states = Counter((one.role.value, _state_of(one)) for one in listing)
        self.metrics.replace(INSTANCES, states)
        self.metrics.assign(READY, self.readiness().ready)
        return self.metrics.render(accept)

    def page(self) -> Document:
        """Return the document of the status page."""
        return {"status": self.status()}

    def _paired(self, _now_s: float, fact: PairingEnded) -> None:
        self.metrics.count(PAIRINGS, fact.outcome)
        self._requests.add(fact.outcome)
        if fact.reason:
            self._problems.add(f"request refused: {fact.outcome}", "", re.sub(r"^room \d+: ", "", fact.reason))
        self.metrics.observe(PAIRING_DURATION, fact.seconds, fact.outcome)

    def _guessed(self, _now_s: float, fact: PrefixGuessed) -> None:
        self.metrics.count(PAIRING_PREFIXES, fact.role, fact.guess)


def _state_of(instance: InstanceView) -> str:
    if not instance.complete:
        return "incomplete"
    return "ready" if instance.ready else "not_ready"
