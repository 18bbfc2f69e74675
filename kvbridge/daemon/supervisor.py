"""Keeps the rank workers' processes running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import structlog

from kvbridge.core.children import EndCause, child_environment, end_cause, how_it_ended, module_command
from kvbridge.core.ids import Rank
from kvbridge.daemon.worker_output import WorkerOutput
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
STABLE_AFTER_S = 30.0
"""A worker that lived so long is started again without a pause of its predecessors' making."""


class Supervisor:
    """One process for each rank of a node; started again, after a growing pause, whenever one ends."""

    def __init__(
        self,
        ranks: Iterable[Rank],
        *,
        socket: Path,
        options: Mapping[str, str],
        on_gone: Callable[[Rank, str, EndCause], None],
        seldom: Seldom,
    ) -> None:
        """`options`: of the command line of each worker. `seldom`: for the lines of the libraries below them.

        `on_gone(rank, reason, cause)` is called from the event loop when a worker's process has ended.
        """
        self._ranks = tuple(ranks)
        self._arguments = (
            *("--socket", str(socket), "--parent", str(os.getpid())),
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        )
        self._on_gone = on_gone
        self._seldom = seldom
        self._processes: dict[Rank, asyncio.subprocess.Process] = {}
        self._killed: dict[int, str] = {}
        """Why, by process id."""
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        """Start a process for each rank."""
        self._tasks = [asyncio.create_task(self._keep(rank), name=f"supervise {rank}") for rank in self._ranks]

    async def failed(self) -> None:
        """Raise when a rank's process is not looked after any more, by a defect. Not to be called before `start`."""
        ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            if not task.cancelled():
                task.result()

    async def _keep(self, rank: Rank) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            started_s = loop.time()
            reason, cause = await self._run(rank)
            if self._stopping:
                return
            self._on_gone(rank, reason, cause)
            pause_s = FIRST_PAUSE_S if loop.time() - started_s > STABLE_AFTER_S else min(LONGEST_PAUSE_S, pause_s * 2)
            await asyncio.sleep(pause_s)

    async def _run(self, rank: Rank) -> tuple[str, EndCause]:
        """Start a process and wait for its end. Returns why it ended, or did not even begin, in words and as what is counted."""
        try:
            with WorkerOutput(rank, self._seldom) as output:
                process = await asyncio.create_subprocess_exec(
                    *module_command("kvbridge.worker.process", "--pp", str(rank.pp), "--tp", str(rank.tp)),
                    *(*self._arguments, "--log-descriptor", str(output.log_end)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=output.errors_end,
                    pass_fds=(output.log_end,),
                    start_new_session=True,  # Ctrl-C is the node's, also before the worker can say that it ignores it
                    env=child_environment(os.environ),
                )
                output.started()
                self._processes[rank] = process
                code = await process.wait()
        except OSError as error:  # descriptors, processes or memory are short, perhaps for a moment only
            log.error("worker_start_failed", rank=str(rank), reason=str(error))
            return f"start failed: {error}", EndCause.START_FAILED
        reason = _reason(code, self._killed.pop(process.pid, ""))
        if not self._stopping:
            log.error("worker_gone", rank=str(rank), pid=process.pid, reason=reason)
        return reason, end_cause(code)

    def kill(self, rank: Rank, why: str) -> None:
        """End a worker that does not answer; it is started again."""
        process = self._processes.get(rank)
        if process is None or process.returncode is not None or process.pid in self._killed:
            return
        log.error("worker_killed", rank=str(rank), pid=process.pid, why=why)
        self._killed[process.pid] = why
        # Not through `process`, which would look for the exit code itself and so take it from whoever waits for it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> None:
        """Wait until every worker has ended (they were told to), and kill those that have not after `timeout_s`."""
        self._stopping = True
        running = [process for process in self._processes.values() if process.returncode is None]
        waits = [asyncio.create_task(process.wait()) for process in running]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for process in running:
                if process.returncode is None:
                    log.warning(
                        "worker_killed", pid=process.pid, why="it did not end in time (timeouts.shutdown_close_s)"
                    )
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
            if late:
                await asyncio.wait(late, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _reason(code: int, why: str) -> str:
    return f"{how_it_ended(code)} ({why})" if why else how_it_ended(code)
