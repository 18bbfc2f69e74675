"""Keeps the process that uses a store running, and says when one has ended."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import PIPE
from collections.abc import Callable

import structlog

from kvbridge.core.wire.codec import FrameError
from kvbridge.processes import ChildEnd, SupervisedChild
from kvbridge.tier.stores.base import Capabilities
from kvbridge.tier.stores.messages import (
    LENGTH,
    NODE_TO_STORE,
    STORE_TO_NODE,
    StoreFailed,
    StoreOrder,
    StoreReady,
    StoreReport,
    StoreSetup,
    framed,
    length_of,
)

log = structlog.get_logger(__name__)


class StoreProcess:
    """Keeps a process running: started, told what to serve, killed when it must be, started again. Used in one running loop."""

    def __init__(
        self,
        setup: StoreSetup,
        *,
        start_s: float,
        on_report: Callable[[StoreReport], None],
        on_gone: Callable[[str], None],
        log_level: str,
    ) -> None:
        """`on_gone(reason)`: the process has ended, with all of its threads; called before the next one is started.

        `start_s`: for a process to be ready. Raises InvalidInputError for a setup that no message holds.
        """
        self._setup = framed(NODE_TO_STORE.encode_body(setup))
        self._start_s = start_s
        self._on_report = on_report
        self._on_gone = on_gone
        self._log_level = log_level
        self._child = SupervisedChild("the store process", self._live, self._ended)
        self._closing = False
        self.capabilities: Capabilities | None = None
        """Those of the store, while the process takes orders."""
        self.why_not = "the store process has not been started"
        """Why it takes none, else."""

    def start(self) -> None:
        """Keep a process running from now on."""
        self._child.start()

    async def failed(self) -> None:
        """Raise when the process, once started, is not looked after any more, by a defect."""
        await self._child.failed()

    @property
    def pid(self) -> int:
        """Process id of the one that runs, else 0."""
        return self._child.pid

    def send(self, order: StoreOrder) -> None:
        """Give the process something to do, while it has `capabilities`."""
        process = self._child.process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(framed(NODE_TO_STORE.encode_body(order)))

    def kill(self, why: str) -> None:
        """End the process, however it hangs. Harmless when it has ended."""
        self._take_no_more(why)
        if self._child.kill(why):
            log.warning("store_process_killed", pid=self.pid, why=why)

    async def close(self, timeout_s: float) -> None:
        """End the process by ending its input, or by force after `timeout_s`. Returns when it has ended."""
        self._closing = True
        self._take_no_more("the node ends")
        process = self._child.process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        why = f"it did not end within {timeout_s:g} s"
        if await self._child.stop(timeout_s, why):
            log.warning("store_process_killed", why=why)

    def _take_no_more(self, why: str) -> None:
        self.capabilities, self.why_not = None, why

    def _ended(self, end: ChildEnd) -> None:
        reason = end.why or end.how
        self._take_no_more(f"the store process has ended: {reason}")
        self._on_gone(reason)
        if not self._closing:
            log.error("store_process_gone", reason=reason)

    async def _live(self) -> None:
        self._take_no_more("the store process is being started")
        arguments = ("--log-level", self._log_level, "--parent", str(os.getpid()))
        process = await self._child.launch("kvbridge.tier.stores.process", *arguments, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._setup)
        why = f"it was not ready after {self._start_s:g} s"
        self._late = asyncio.get_running_loop().call_later(self._start_s, self.kill, why)
        try:
            await self._read(process.stdout)
            self._take_no_more("its output has ended")
            if not self._closing:
                self._child.kill()
            await process.wait()
        finally:
            self._late.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take what the process says until its output ends, which ends the process."""
        try:
            while True:
                length = length_of(await reader.readexactly(LENGTH.size))
                match STORE_TO_NODE.decode_body(await reader.readexactly(length)):
                    case StoreReady() as ready:
                        self._late.cancel()
                        if not self._child.why and not self._closing:
                            self.capabilities, self.why_not = ready.capabilities, ""
                            log.info("store_process_ready", pid=self.pid, store=ready.capabilities.kind)
                    case StoreFailed() as failed:
                        self._child.why = f"it cannot serve: {failed.message}"
                    case StoreReport() as report:
                        self._on_report(report)
        except (asyncio.IncompleteReadError, OSError):
            return  # it ends, or has been told to
        except FrameError as error:
            self.kill(f"it said what no store process says: {error}")
