"""Traces of a daemon, from its configuration to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbridge.config.endpoints import TracesConfig
from kvbridge.config.loading import read_secrets
from kvbridge.core.errors import ConfigError
from kvbridge.core.session.states import RoomState
from kvbridge.daemon.secret_files import SecretFiles
from kvbridge.telemetry.context import BeginTrace, begin_with, pass_on
from kvbridge.telemetry.recent import Recent
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.spans import SpanReader
from kvbridge.telemetry.stream import EventStream

if TYPE_CHECKING:
    from kvbridge.telemetry.tracing import SpanExport

KEY = "telemetry.traces.headers_file"
EXPORT_S = 5.0
"""A batch of spans is with the collector within this, or lost."""


class Traces:
    """The spans of one daemon. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self.begin: BeginTrace = pass_on
        """How a request's first span here is made."""
        self._export: SpanExport | None = None

    def open(
        self,
        config: TracesConfig,
        *,
        names: Mapping[str, str],
        metrics: Metrics,
        secrets: SecretFiles,
    ) -> None:
        """Get ready to send, if the configuration names a collector. Raises ConfigError when what that needs is not installed."""
        if not config.endpoint:
            return
        try:
            from kvbridge.telemetry.tracing import SpanExport, parse_headers  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"telemetry.traces.endpoint is set, which needs the package {error.name}: install kvbridge[traces]"
            ) from error
        file = config.headers_file
        headers = secrets.add(KEY, (file,), lambda: parse_headers(read_secrets(None, file, key=KEY), key=KEY))
        self._export = SpanExport(config.url, timeout_s=EXPORT_S, names=names, metrics=metrics)
        self._export.use_headers(headers.current)
        headers.on_change = self._export.use_headers
        self.begin = begin_with(config.sampled_ratio)

    def read(
        self, events: EventStream, parts: Mapping[RoomState, str] | None = None, recent: Recent | None = None
    ) -> None:
        """Make spans of what happens from now on; `parts`: those of the role's rooms."""
        if self._export is not None:
            events.add_reader(SpanReader(self._export.record, parts, recent).table)

    def look(self) -> None:
        """Count, and say now and then what was lost."""
        if self._export is not None:
            self._export.look()

    async def close(self, timeout_s: float) -> None:
        """Send what waits, for so long at most. Harmless when closed."""
        export, self._export = self._export, None
        if export is not None:
            await asyncio.to_thread(export.close, timeout_s)
