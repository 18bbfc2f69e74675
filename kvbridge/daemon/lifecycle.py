"""A daemon's life, the same for every role: start, serve until a signal, drain with a limit, close; readiness and traces."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from kvbridge.api.status import Readiness
from kvbridge.config.endpoints import TracesConfig
from kvbridge.config.loading import read_secrets
from kvbridge.core.errors import ConfigError
from kvbridge.core.session.tables import RoomState
from kvbridge.daemon.secret_files import SecretFiles
from kvbridge.telemetry.context import BeginTrace, begin_with, pass_on
from kvbridge.telemetry.recent import Recent
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.spans import SpanReader
from kvbridge.telemetry.stream import EventStream

if TYPE_CHECKING:
    from kvbridge.telemetry.tracing import SpanExport

log = structlog.get_logger(__name__)

HEADERS_KEY = "telemetry.traces.headers_file"
EXPORT_S = 5.0
"""A batch of spans reaches the collector within this, or is lost."""


class Daemon(Protocol):
    """A daemon that `run_daemon` drives."""

    async def start(self) -> None:
        """Open the endpoints. Raises BridgeError when it cannot; `close` is called all the same."""

    async def failed(self) -> None:
        """Return, or raise, when the daemon cannot go on; otherwise never."""

    async def drain(self) -> None:
        """Admit nothing more and let rooms end; bounded by the daemon's own limits."""

    async def close(self) -> None:
        """Close everything that `start` has opened. Harmless when nothing was."""


class ToldReadiness:
    """Logs when a daemon becomes ready, and when it is not ready any more, with the reasons."""

    def __init__(self) -> None:
        self._ready = False

    def look(self, readiness: Readiness) -> None:
        """Log a change. To be called often."""
        told, self._ready = self._ready, readiness.ready
        if self._ready and not told:
            log.info("daemon_ready")
        elif told and not self._ready:
            log.warning("daemon_not_ready", reasons=readiness.reasons)


class Traces:
    """The spans of one daemon. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self.begin: BeginTrace = pass_on
        """Makes a request's first span here."""
        self._export: SpanExport | None = None

    def open(
        self,
        config: TracesConfig,
        *,
        names: Mapping[str, str],
        metrics: Metrics,
        secrets: SecretFiles,
    ) -> None:
        """Prepare to send spans, if the configuration names a collector. Raises ConfigError when the extra is not installed."""
        if not config.endpoint:
            return
        try:
            from kvbridge.telemetry.tracing import SpanExport, parse_headers  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"telemetry.traces.endpoint is set, which needs the package {error.name}: install kvbridge[traces]"
            ) from error
        file = config.headers_file
        headers = secrets.add(
            HEADERS_KEY, (file,), lambda: parse_headers(read_secrets(None, file, key=HEADERS_KEY), key=HEADERS_KEY)
        )
        self._export = SpanExport(config.url, timeout_s=EXPORT_S, names=names, metrics=metrics)
        self._export.use_headers(headers.current)
        headers.on_change = self._export.use_headers
        self.begin = begin_with(config.sampled_ratio)

    def read(
        self, events: EventStream, parts: Mapping[RoomState, str] | None = None, recent: Recent | None = None
    ) -> None:
        """Make spans of facts from now on; `parts` and `recent`: of the role's rooms."""
        if self._export is not None:
            events.add_reader(SpanReader(self._export.record, parts, recent).table)

    def look(self) -> None:
        """Count spans, and log now and then how many were lost."""
        if self._export is not None:
            self._export.look()

    async def close(self, timeout_s: float) -> None:
        """Send waiting spans for at most `timeout_s`. Harmless when closed."""
        export, self._export = self._export, None
        if export is not None:
            await asyncio.to_thread(export.close, timeout_s)


async def first_ended(endpoint: Coroutine[Any, Any, None], tasks: Iterable[asyncio.Task[None]]) -> None:
    """Return, or raise, as the first of an endpoint and a daemon's tasks that ends."""
    serving = asyncio.ensure_future(endpoint)
    try:
        ended, _ = await asyncio.wait({serving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        serving.cancel()


async def run_daemon(daemon: Daemon) -> None:
    """Run a daemon until SIGTERM, SIGINT or SIGHUP; a second signal skips the rest of the drain."""
    loop = asyncio.get_running_loop()
    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
        ending.append(signal.SIGHUP)
    stop, force = asyncio.Event(), asyncio.Event()
    begun_s = time.monotonic()

    def on_signal(number: signal.Signals) -> None:
        log.info(
            "signal", signal=number.name, effect="closing now" if stop.is_set() else "draining; again to close now"
        )
        (force if stop.is_set() else stop).set()

    for number in ending:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await _first(daemon.start(), stop.wait())
        # A daemon's parts stay for ever: each pass of the cycle collector over them would stop the loop.
        gc.collect()
        gc.freeze()
        if not stop.is_set():
            await _first(stop.wait(), daemon.failed())
        await _first(daemon.drain(), force.wait())
    finally:
        try:
            await daemon.close()
        finally:
            log.info("daemon_stopped", uptime_s=round(time.monotonic() - begun_s, 1))
            for number in ending:
                loop.remove_signal_handler(number)


async def _first(*waits: object) -> None:
    """Wait for the first to end, cancel the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
