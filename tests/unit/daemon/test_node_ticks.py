"""A node's ticks after a time in which its process was stopped."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvbridge.config.schema import PrefillConfig
from kvbridge.daemon import node as node_module
from kvbridge.daemon.node import TICK_S
from kvbridge.daemon.prefill import prefill_daemon
from tests.helpers.manual_clock import ManualClock

STOPPED_S = 30.5


@pytest.mark.asyncio
async def test_heartbeats_that_were_missed_are_not_caught_up(monkeypatch):
    """A burst of them would tell peers nothing, and each looks at all links."""
    clock, beats = ManualClock(), []
    config = {"instance": "i", "model": {"preset": "tiny-gqa"}, "pools": {"device": {"full": 8}}}
    daemon = prefill_daemon(PrefillConfig.model_validate(config | {"timeouts": {"control_heartbeat_s": 1.0}}))
    monkeypatch.setattr(daemon.peers, "watch", lambda: beats.append(clock()))
    begun_s, times = clock(), iter([1.0, STOPPED_S, *(STOPPED_S + tick * TICK_S for tick in range(1, 31))])

    async def sleep(_seconds: float) -> None:
        try:
            clock.advance(begun_s + next(times) - clock())
        except StopIteration:
            raise asyncio.CancelledError from None

    monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(node_module, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        await daemon._ticks()
    assert [round(beat - begun_s, 2) for beat in beats] == [1.0, 30.5, 31.5], "once, and then as ever"
