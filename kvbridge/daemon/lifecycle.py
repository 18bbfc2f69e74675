"""The base of every daemon: its HTTP API, background tasks, secrets and traces, and its life from start to close."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import structlog

from kvbridge.api.client import DirectoryClient
from kvbridge.api.status import Readiness
from kvbridge.config.endpoints import DirectoryLinkConfig, HttpConfig, TracesConfig
from kvbridge.config.loading import read_grants, read_secrets, read_token
from kvbridge.core.errors import CHECKOUT, BridgeError, ConfigError
from kvbridge.core.process import moment
from kvbridge.core.session.tables import RoomState
from kvbridge.http.app import AppSettings
from kvbridge.http.server import Application, HttpServer
from kvbridge.telemetry.context import BeginTrace, begin_with, pass_on
from kvbridge.telemetry.facts import EventStream
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.record import NodeRecord
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.spans import SpanReader

if TYPE_CHECKING:
    from kvbridge.telemetry.tracing import SpanExport

log = structlog.get_logger(__name__)

EXPORT_S = 5.0
"""A batch of spans reaches the collector within this time, or is lost."""
LOOK_S = 1.0
"""Time between two checks of the secrets' files."""

SecretT = TypeVar("SecretT")


class FollowedSecret(Generic[SecretT]):
    """One secret in files: read at the start, and again when a file has changed."""

    def __init__(self, key: str, files: Iterable[Path | None], read: Callable[[], SecretT]) -> None:
        """`key` names the secret in logs. `read` must not change anything. Raises the errors of `read`."""
        self._key = key
        self._files = tuple(file for file in files if file is not None)
        self._read = read
        self._stamp = self._look()
        self.current = read()
        self.on_change: Callable[[SecretT], None] = lambda _: None
        """Called with each new secret."""

    def follow(self) -> None:
        """Read the secret again if its files have changed. An unreadable secret changes nothing."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            fresh = self._read()
        except BridgeError as error:
            log.error("secret_unreadable", key=self._key, effect="the former secret stays in force", reason=str(error))
            return
        if fresh != self.current:
            self.current = fresh
            self.on_change(fresh)
            log.info("secret_changed", key=self._key)

    def _look(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(_stamp, self._files))


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode


class Daemon:
    """An HTTP API, tasks in the background, and the parts of a subclass. Run it with `run_daemon`."""

    def __init__(self, metrics: Metrics, *, spans_s: float) -> None:
        """`spans_s`: time for sending the last spans."""
        self.metrics = metrics
        self.seldom = Seldom(metrics.line_left_out)
        """Limits log lines that strangers, or many rooms, can cause."""
        self._secrets: list[FollowedSecret[Any]] = []
        self.begin_trace: BeginTrace = pass_on
        """Makes the first span of a request."""
        self._spans_s = spans_s
        self._export: SpanExport | None = None
        self.started_at = moment()
        self._ready = False
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None
        self._broken = asyncio.Event()

    # ------------------------------------------------------------------ from start to end

    async def start(self) -> None:
        """Open the endpoints. Raises BridgeError; call `close` all the same."""

    async def failed(self) -> None:
        """Wait until a part has ended that the daemon cannot do without, and raise its error."""
        await self._broken.wait()
        assert self._error is not None
        raise self._error

    async def drain(self) -> None:
        """Admit nothing more, and let rooms and requests end within the daemon's own limits."""

    async def close(self) -> None:
        """Close everything, each user before its parts. Harmless when nothing is open. Raises errors after closing everything."""
        async with AsyncExitStack() as last_first:
            last_first.callback(self.seldom.tell, everything=True)
            last_first.push_async_callback(self._close_traces)
            self.close_parts(last_first)
            if self._http is not None:
                last_first.push_async_callback(self._http.stop)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()

    def close_parts(self, last_first: AsyncExitStack) -> None:
        """Push the closing calls of the parts behind the HTTP API: the last pushed is called first."""

    # ------------------------------------------------------------------ parts

    @property
    def url(self) -> str:
        """The bound address; empty before `open`."""
        return self._http.url if self._http else ""

    def open(self, http: HttpConfig, build: Callable[[AppSettings], Application], *, shutdown_s: float) -> None:
        """Build the application and serve it. Raises UnavailableError for a taken address or an unreadable secret.

        Requests in progress get `shutdown_s` to end, and the same once more after they are cut off.
        """
        key = "http.token_file"
        tokens = self.follow(key, (http.token_file,), lambda: read_grants(http, key=key))
        settings = AppSettings(http=http, grants=lambda: tokens.current, begin_trace=self.begin_trace)
        self._http = server = HttpServer(build(settings), http, self.seldom, shutdown_s=shutdown_s)
        if (tls := server.tls) is not None:
            pair = self.follow("http.tls_certificate_file", (tls.certificate, tls.key), tls.read)
            pair.on_change = lambda _: server.use_certificate()
        self.background(server.wait_ended(), "http")
        self.background(self._follow_all(), "secrets")

    def follow(self, key: str, files: Iterable[Path | None], read: Callable[[], SecretT]) -> FollowedSecret[SecretT]:
        """Read a secret, and follow its files from now on. Raises the errors of `read`."""
        secret = FollowedSecret(key, files, read)
        self._secrets.append(secret)
        return secret

    async def _follow_all(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for secret in self._secrets:
                secret.follow()

    def background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task until `close`. Its error ends the daemon."""
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._error = self._error or error
            self._broken.set()

    def tell(self, readiness: Readiness | None) -> None:
        """Log a change of readiness, and the number of lines and spans that were left out. Call this often.

        `readiness`: None while the daemon ends.
        """
        if readiness is not None and readiness.ready != self._ready:
            self._ready = readiness.ready
            if self._ready:
                log.info("daemon_ready")
            else:
                log.warning("daemon_not_ready", reasons=readiness.reasons)
        self.seldom.tell()
        if self._export is not None:
            self._export.look()

    def open_directory(self, link: DirectoryLinkConfig, *, timeout_s: float, key: str = "") -> list[DirectoryClient]:
        """Return clients of the directory's replicas with the configured token. `key` names `timeout_s` in errors."""
        name = "bootstrap.token_file"
        token = self.follow(name, (link.token_file,), lambda: read_token(link, key=name))
        clients = [
            DirectoryClient(url, token=token.current, timeout_s=timeout_s, timeout_key=key)
            for url in (link.url, *link.other_urls)
            if url
        ]

        def change(fresh: str) -> None:
            for client in clients:
                client.use_token(fresh)

        token.on_change = change
        return clients

    # ------------------------------------------------------------------ traces

    def open_traces(
        self,
        config: TracesConfig,
        names: Mapping[str, str],
        events: EventStream,
        parts: Mapping[RoomState, str] | None = None,
        rooms: NodeRecord | None = None,
    ) -> None:
        """Send spans of facts from now on, if the configuration names a collector.

        `names`: as for `SpanExport`; `parts`, `rooms`: as for `SpanReader`. Raises ConfigError without the extra.
        """
        if not config.endpoint:
            return
        try:
            from kvbridge.telemetry.tracing import SpanExport, parse_headers  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"telemetry.traces.endpoint is set, which needs the package {error.name}; {CHECKOUT.format('traces')}"
            ) from error
        file, key = config.headers_file, "telemetry.traces.headers_file"
        headers = self.follow(key, (file,), lambda: parse_headers(read_secrets(None, file, key=key), key=key))
        self._export = SpanExport(config.url, timeout_s=EXPORT_S, names=names, metrics=self.metrics)
        self._export.use_headers(headers.current)
        headers.on_change = self._export.use_headers
        self.begin_trace = begin_with(config.sampled_ratio)
        events.add_reader(SpanReader(self._export.record, parts, rooms).table)

    async def _close_traces(self) -> None:
        export, self._export = self._export, None
        if export is not None:
            await asyncio.to_thread(export.close, self._spans_s)


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
        # A daemon's parts stay until its end, and each pass of the cycle collector over them would stop the loop.
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


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first to end, cancel the others, and raise the error of any."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
