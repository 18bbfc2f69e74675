"""At most as many rooms as the hot buffer has slots: what a decode node gives out, and what it answers when all are taken."""

from __future__ import annotations

import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.config.loading import load_config
from kvbridge.config.schema import DecodeConfig
from kvbridge.core.errors import CapacityError, ConfigError
from kvbridge.core.ids import IndexSpace
from kvbridge.core.session.receiver import ReceiverState
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


def test_request_slots_of_the_model_are_slots_of_the_hot_buffer():
    assert owned()[IndexSpace.REQUEST] == 4
    assert owned(**{"sparse.max_requests": 9})[IndexSpace.REQUEST] == 4


def test_a_model_without_request_slots_gets_them_for_the_hot_buffer():
    latents = {"model.preset": "deepseek-v3.2", "pools.host.components": "[mla_kv]", "sparse.top_k": 2048}
    assert owned(**latents)[IndexSpace.REQUEST] == 4
    assert IndexSpace.REQUEST not in owned(**latents | {"sparse.max_requests": 4, "sparse": "null"})


def test_sizes_that_do_not_suit_the_model_are_refused_at_start():
    with pytest.raises(ConfigError, match=r"sparse: hot_rows \(sparse.hot_rows\) is 1000"):
        owned(**{"sparse.hot_rows": 1000})


def admit(bench: ReceiverBench, room: int):
    return bench.service.requests.admit(AdmissionRequest(room=room, prompt_tokens=PAGE, prefill=(ADDRESS,)))


def test_a_room_takes_a_slot_and_gives_it_back_with_its_pages():
    bench = ReceiverBench(request_slots=2)
    bench.nodes.know()
    for room in (1, 2):
        admit(bench, room)
    slots = {int(bench.service.book.get(room).tables[IndexSpace.REQUEST].ids[0]) for room in (1, 2)}
    assert slots == {0, 1}
    before = bench.book.counts()
    with pytest.raises(CapacityError, match="space 'request' lacks 1 pages") as refused:
        admit(bench, 3)
    assert refused.value.lacking == {IndexSpace.REQUEST: 1}
    assert bench.book.counts() == before, "nothing of it was kept"
    bench.service.driver.stop(bench.service.book.get(1), "by its client")
    assert bench.service.book.get(1).state is not ReceiverState.OFFERED
    bench.book.check_integrity()


def test_without_a_hot_buffer_nothing_is_asked_of_the_request_space():
    bench = ReceiverBench()
    assert bench.service.requests.demand(AdmissionRequest(room=1, prompt_tokens=PAGE, prefill=(ADDRESS,))) == {
        IndexSpace.FULL: 1
    }
