"""At most as many rooms as the hot buffer has slots: what a decode node gives out, and what it answers when all are taken."""

from __future__ import annotations

import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.config.loading import load_config
from kvbridge.config.schema import DecodeConfig
from kvbridge.core.errors import ConfigError
from kvbridge.daemon.memory import plan_memory
from kvbridge.daemon.model import load_geometry
from tests.helpers.rooms import ADDRESS, PAGE, ReceiverBench


def owned(**changes):
    keys = {
        "instance": "d",
        "model.preset": "tiny-v4",
        "pools.device.full": 8,
        "pools.device.swa": 8,
        "pools.device.request": 4,
        "pools.host.pages": 8,
        "sparse.max_requests": 4,
    } | changes
    config = load_config(DecodeConfig, environment={}, overrides=[f"{key}={value}" for key, value in keys.items()])
    return plan_memory(config, load_geometry(config.model)).owned


def test_sizes_that_do_not_suit_the_model_are_refused_at_start():
    with pytest.raises(ConfigError, match=r"sparse: hot_rows \(sparse.hot_rows\) is 1000"):
        owned(**{"sparse.hot_rows": 1000})


def admit(bench: ReceiverBench, room: int):
    return bench.service.requests.admit(AdmissionRequest(room=room, prompt_tokens=PAGE, prefill=(ADDRESS,)))
