"""A thread on which a node checks what its peers say of themselves, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Inspector:
    """Called from the event loop's thread only. The thread is started with the first check."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inspector")

    def run(self, work: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        """Call `work` on the thread and then `ended` on the loop, with what it has raised."""

        def done(future: asyncio.Future[None]) -> None:
            if not future.cancelled():  # as at the end of this node
                ended(future.exception())

        asyncio.get_running_loop().run_in_executor(self._executor, work).add_done_callback(done)

    async def close(self) -> None:
        """Wait for the check at hand and forget the others."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
