"""How a node ends when one of its parts does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvbridge.config.schema import PrefillConfig
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
