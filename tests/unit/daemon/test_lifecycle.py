"""How a daemon starts and ends, also when one of its parts does not."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from kvbridge.api.status import Readiness
from kvbridge.config.schema import PrefillConfig
from kvbridge.daemon.lifecycle import ToldReadiness, run_daemon
from kvbridge.daemon.prefill import prefill_daemon


class BrokenServer:
    """An HTTP server that ended by itself."""

    async def stop(self) -> None:
        raise RuntimeError("the server ended by itself")


def test_a_part_that_cannot_be_closed_does_not_keep_the_memory(tmp_path: Path) -> None:
    config = {"instance": "p", "model": {"preset": "tiny-v4"}, "pools": {"device": {"full": 8, "swa": 4, "request": 2}}}

    async def live() -> None:
        node = prefill_daemon(PrefillConfig.model_validate(config))
        node._http = BrokenServer()  # type: ignore[assignment]
        await node.parts.memory.create(tmp_path, "made", cancel_s=5)
        assert node.parts.memory.device
        waiting = node._background(asyncio.sleep(60), "waits")
        try:
            await node.close()
        finally:
            assert waiting.cancelled()

    with pytest.raises(RuntimeError, match="ended by itself"):
        asyncio.run(live())
    assert not list(tmp_path.iterdir())


class Observed:
    """A daemon that looks, once it has started, at what a full collection would go through, and ends."""

    def __init__(self) -> None:
        self.parts = [[] for _ in range(1000)]
        self.frozen = self.collected = 0

    async def start(self) -> None:
        pass

    async def failed(self) -> None:
        self.frozen, self.collected = gc.get_freeze_count(), len(gc.get_objects())

    async def drain(self) -> None:
        pass

    async def close(self) -> None:
        pass


def test_the_collector_leaves_alone_what_a_daemon_is_made_of() -> None:
    daemon = Observed()
    try:
        asyncio.run(run_daemon(daemon))
    finally:
        gc.unfreeze()
    assert daemon.frozen > 1000 > daemon.collected


def test_the_log_has_each_change_of_readiness_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = ToldReadiness()
    for reasons in ((), (), ("the pools are being made",), ("the pools are being made",), ()):
        told.look(Readiness(ready=not reasons, reasons=reasons))
    lines = "".join(capsys.readouterr()).splitlines()
    assert ["daemon_not_ready" in line for line in lines] == [False, True, False]
