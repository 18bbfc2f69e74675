"""Keeps the process that uses a store running, and says when one has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import structlog

from kvbridge.core.children import child_environment, how_it_ended, module_command
from kvbridge.core.wire.codec import FrameError
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

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
STABLE_AFTER_S = 30.0
"""A process that was ready for so long is followed by the next one after the first pause."""


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
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reason = ""
        """Why the present process ends, as far as that is known."""
        self._closing = False
        """Number of times that one was started, or could not be."""
        self.capabilities: Capabilities | None = None
        """Those of the store, while the process takes orders."""
        self.why_not = "the store process has not been started"
        """Why it takes none, else."""

    @property
    def pid(self) -> int:
        """Process id of the one that runs, else 0."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Keep a process running from now on."""
        self._task = asyncio.create_task(self._keep(), name="keep the store process")

    async def failed(self) -> None:
        """Raise when the process, once started, is not looked after any more, by a defect."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def send(self, order: StoreOrder) -> None:
        """Give the process something to do, while it has `capabilities`."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(framed(NODE_TO_STORE.encode_body(order)))

    def kill(self, why: str) -> None:
        """End the process, however it hangs. Harmless when it has ended."""
        self._take_no_more(why)
        if self._process is None:
            return
        if not self._reason:
            self._reason = why
            log.warning("store_process_killed", pid=self.pid, why=why)
        self._end()

    def _end(self) -> None:
        # Not through `_process`, which would look for the exit code itself and so take it from whoever waits for it.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self, timeout_s: float) -> None:
        """End the process by ending its input, or by force after `timeout_s`. Returns when it has ended."""
        self._closing = True
        self._take_no_more("the node ends")
        if self._task is None:
            return
        if self._process is None or self._process.stdin is None:
            self._task.cancel()
        else:
            self._process.stdin.close()
        await asyncio.wait([self._task], timeout=timeout_s)
        self.kill(f"it did not end within {timeout_s:g} s")
        await asyncio.gather(self._task, return_exceptions=True)

    def _take_no_more(self, why: str) -> None:
        self.capabilities, self.why_not = None, why

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while not self._closing:
            begun_s = loop.time()
            reason = await self._run()
            self._take_no_more(f"the store process has ended: {reason}")
            self._on_gone(reason)
            if not self._closing:
                log.error("store_process_gone", reason=reason)
                await asyncio.sleep(pause_s)
            pause_s = FIRST_PAUSE_S if loop.time() - begun_s > STABLE_AFTER_S else min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _run(self) -> str:
        """Start a process and wait for its end. Returns why it ended, or did not even begin."""
        self._take_no_more("the store process is being started")
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *module_command("kvbridge.tier.stores.process"),
                *("--log-level", self._log_level, "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the node's
                env=child_environment(os.environ),
            )
        except OSError as error:  # descriptors, processes or memory are short, perhaps for a moment only
            return f"it could not be started: {error}"
        assert process.stdin is not None
        assert process.stdout is not None
        self._reason = ""
        process.stdin.write(self._setup)
        why = f"it was not ready after {self._start_s:g} s"
        self._late = asyncio.get_running_loop().call_later(self._start_s, self.kill, why)
        try:
            await self._read(process.stdout)
            self._take_no_more("its output has ended")
            if not self._closing:
                self._end()
            code = await process.wait()
        finally:
            self._late.cancel()
            self._process = None
        return self._reason or how_it_ended(code)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take what the process says until its output ends, which ends the process."""
        try:
            while True:
                length = length_of(await reader.readexactly(LENGTH.size))
                match STORE_TO_NODE.decode_body(await reader.readexactly(length)):
                    case StoreReady() as ready:
                        self._late.cancel()
                        if not self._reason and not self._closing:
                            self.capabilities, self.why_not = ready.capabilities, ""
                            log.info("store_process_ready", pid=self.pid, store=ready.capabilities.kind)
                    case StoreFailed() as failed:
                        self._reason = f"it cannot serve: {failed.message}"
                    case StoreReport() as report:
                        self._on_report(report)
        except (asyncio.IncompleteReadError, OSError):
            return  # it ends, or has been told to
        except FrameError as error:
            self.kill(f"it said what no store process says: {error}")
