"""Keeps a store process running for its node: started, told what to serve, killed when it must be, and started again.

Owns: the process, their connection, and the proof that the process has ended. Must not know: what orders are about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable

import structlog

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

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
STABLE_AFTER_S = 30.0
"""A process that was ready for so long is followed by the next one after the first pause."""
LAST_WORDS_S = 1.0
"""For what a process had said before it ended."""


class StoreProcess:
    """One process at a time. Used in one running loop."""

    def __init__(
        self,
        setup: StoreSetup,
        *,
        start_s: float,
        on_report: Callable[[StoreReport], None],
        on_gone: Callable[[str], None],
        log_level: str = "info",
        stderr: int | None = None,
    ) -> None:
        """`on_gone(reason)`: the process has ended, with all of its threads; called before the next one is started.

        `start_s`: for a process to be ready. `stderr`: descriptor for its log, by default this process's own. Raises
        InvalidInputError for a setup that no message holds.
        """
        self._setup = framed(NODE_TO_STORE.encode_body(setup))
        self._start_s = start_s
        self._on_report = on_report
        self._on_gone = on_gone
        self._log_level = log_level
        self._stderr = stderr
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pidfd: int | None = None
        self._reason = ""
        """Why the present process ends, as far as that is known."""
        self._closing = False
        self._ready_s = 0.0
        self.pid = 0
        """Of the process that runs, else 0."""
        self.capabilities: Capabilities | None = None
        """Of the store, while the process takes orders."""
        self.why_not = "the store process has not been started"
        """Why it takes none, else."""

    def start(self) -> None:
        """Start the process, and keep one running from now on."""
        self._task = asyncio.create_task(self._keep(), name="keep the store process")

    async def failed(self) -> None:
        """Raise when the process is not looked after any more, by a defect. Not to be called before `start`."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def send(self, order: StoreOrder) -> None:
        """Give the process something to do, while it has `capabilities`."""
        assert self._writer is not None
        self._writer.write(framed(NODE_TO_STORE.encode_body(order)))

    def kill(self, why: str) -> None:
        """End the process, however it hangs. Harmless when it has ended."""
        self._take_no_more(why)
        if self._pidfd is None:
            return
        if not self._reason:
            self._reason = why
            log.warning("store_process_killed", pid=self.pid, why=why)
        with contextlib.suppress(ProcessLookupError):
            # By descriptor: its number may be another process's by now.
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self, timeout_s: float) -> None:
        """End the process by ending the connection, or by force after `timeout_s`. Returns when it has ended."""
        self._closing = True
        self._take_no_more("the node ends")
        if self._task is None:
            return
        if self._pidfd is None:
            self._task.cancel()
        elif self._writer is not None:
            self._writer.close()
        await asyncio.wait([self._task], timeout=timeout_s)
        self.kill(f"it did not end within {timeout_s:g} s")
        await asyncio.gather(self._task, return_exceptions=True)

    def _take_no_more(self, why: str) -> None:
        self.capabilities, self.why_not = None, why

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while not self._closing:
            self._ready_s = loop.time()
            self._take_no_more("the store process is being started")
            reason = await self._run()
            self._take_no_more(f"the store process has ended: {reason}")
            if not self._closing:
                log.error("store_process_gone", reason=reason)
            self._on_gone(reason)
            if self._closing:
                return
            await asyncio.sleep(pause_s)
            lived_s = loop.time() - self._ready_s
            pause_s = FIRST_PAUSE_S if lived_s > STABLE_AFTER_S else min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _run(self) -> str:
        """Start a process and wait for its end. Returns why it ended, or did not even begin."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "kvbridge.tier.stores.process", "--log-level", self._log_level),
                    *("--connection", str(theirs.fileno()), "--parent", str(os.getpid())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is the node's
                    # It is told all that it is to know: no token travels further than it must.
                    env={name: value for name, value in os.environ.items() if not name.startswith("KVBRIDGE_")},
                )
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as error:  # descriptors, processes or memory are short, perhaps for a moment only
            ours.close()
            return f"it could not be started: {error}"
        self.pid, self._reason = process.pid, ""
        try:
            return await self._serve(process, ours)
        finally:
            os.close(self._pidfd)
            self._pidfd, self.pid = None, 0

    async def _serve(self, process: asyncio.subprocess.Process, ours: socket.socket) -> str:
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writer.write(self._setup)
        late = asyncio.get_running_loop().call_later(self._start_s, self._not_ready)
        reading = asyncio.create_task(self._read(reader))
        try:
            code = await process.wait()
            await asyncio.wait([reading], timeout=LAST_WORDS_S)
        finally:
            late.cancel()
            reading.cancel()
            self._writer.close()
            self._writer = None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how} ({self._reason})" if self._reason else how

    def _not_ready(self) -> None:
        if self.capabilities is None:
            self.kill(f"it was not ready after {self._start_s:g} s")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take what the process says until the connection ends, which ends the process."""
        try:
            while True:
                length = length_of(await reader.readexactly(LENGTH.size))
                match STORE_TO_NODE.decode_body(await reader.readexactly(length)):
                    case StoreReady() as ready:
                        self._ready_s = asyncio.get_running_loop().time()
                        if not self._reason and not self._closing:
                            self.capabilities, self.why_not = ready.capabilities, ""
                            log.info("store_process_ready", pid=self.pid, store=ready.capabilities.kind)
                    case StoreFailed() as failed:
                        self._reason = failed.message
                    case StoreReport() as report:
                        self._on_report(report)
        except (asyncio.IncompleteReadError, OSError):
            if not self._closing:
                self._reason = self._reason or "its connection ended"
                self.kill("the connection to the store process has ended")
        except FrameError as error:
            self.kill(f"it said what no store process says: {error}")
        except Exception:
            log.exception("store_report_failed", pid=self.pid)
            self.kill("what it said could not be dealt with")
