"""What is decided before a replay runs: when requests are due, how large the pools are, whether they fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbridge.cli.local_cluster import plan_cluster
from kvbridge.core.errors import CapacityError, InvalidInputError
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.memory.memory_limits import MemoryLimit
from kvbridge.testbed.replay import plan as planning
from kvbridge.testbed.replay.options import ReplayOptions
from kvbridge.testbed.replay.plan import ReplayPlan
from tests.helpers.traces import trace_line
from tests.unit.testbed.replays import plan


@pytest.mark.parametrize(("speed", "due"), [(1.0, [0, 0.05, 0.1]), (10.0, [0, 0.005, 0.01]), (0.0, [0, 0, 0])])
def test_speed_scales_the_trace(tmp_path, speed, due):
    made = plan(tmp_path, 3, speed=speed)
    assert [made.due_s(index) for index in range(3)] == pytest.approx(due)


def test_a_replay_begins_with_its_first_request(tmp_path):
    made = plan(tmp_path, 5, start=3, speed=1.0)
    assert [made.due_s(index) for index in range(2)] == pytest.approx([0, 0.05])


def test_pools_hold_twice_what_can_be_in_flight(tmp_path):
    made = plan(tmp_path, 10, max_in_flight=2)
    longest = sorted(made.requests, key=lambda request: request.input_length)[-4:]
    needed = [pages_needed(made.geometry, tokens=request.input_length) for request in longest]
    assert made.prefill_pages()["full"] == sum(each[IndexSpace.FULL] for each in needed)
    grown = [pages_needed(made.geometry, tokens=request.input_length + request.output_length) for request in longest]
    assert made.decode_pages()["full"] == sum(each[IndexSpace.FULL] for each in grown)
    assert made.decode_pages()["request"] == made.prefill_pages()["request"] == 8


def test_pool_tokens_decide_what_grows_with_length(tmp_path):
    made = plan(tmp_path, 10, pool_tokens=2560)
    assert made.prefill_pages()["full"] == made.decode_pages()["full"] == made.decode_pages()["host"] == 10


def test_a_pool_that_is_too_small_for_a_request_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="--pool-tokens 2000: the longest request has 2061 tokens"):
        plan(tmp_path, 10, pool_tokens=2000)


def test_more_stages_than_layers_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="--decode-pp 7: tiny-v4 has only 6 layers"):
        plan(tmp_path, decode_pp=7)


def test_an_unknown_model_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(InvalidInputError, match="deepseek-v4-flash"):
        plan(tmp_path, model="gpt-9")


@pytest.mark.parametrize("model", ["tiny-v4", "tiny-gqa", "deepseek-v4-flash", "deepseek-v4-pro"])
def test_the_daemons_accept_what_is_planned(tmp_path, model):
    made = plan(tmp_path, 3, model=model, prefill_pp=2, decode_tp=2)
    cluster = plan_cluster(Path("/tmp/kvb"), made.cluster_spec("replay"))
    assert made.check_memory(cluster) > 0


def test_pools_that_do_not_fit_are_refused_before_they_are_made(tmp_path, monkeypatch):
    made = plan(tmp_path, 3)
    cluster = plan_cluster(Path("/tmp/kvb"), made.cluster_spec("replay"))
    limit = MemoryLimit("file system of /dev/shm", 1 << 20, "enlarge it")
    monkeypatch.setattr(planning, "tightest_limit", lambda directory: limit)
    with pytest.raises(CapacityError, match=r"/dev/shm has 0\.0 GB left: lower --max-in-flight .* or enlarge it"):
        made.check_memory(cluster)


def test_a_digest_is_passed_on(tmp_path):
    assert plan(tmp_path, digest="crc32c").cluster_spec("x").decode.more["integrity"] == {"digest": "crc32c"}
    assert "integrity" not in plan(tmp_path).cluster_spec("x").decode.more


def test_decode_holds_rooms_at_the_speed_of_the_trace(tmp_path):
    def hold_s(**options) -> float:
        made = plan(tmp_path, 3, decode_ms_per_token=20, **options)
        return made.job(plan_cluster(Path("/tmp/kvb"), made.cluster_spec("x"))).hold_s_per_token

    assert hold_s(speed=1.0) == hold_s(speed=0.0) == 0.02
    assert hold_s(speed=10.0) == pytest.approx(0.002)


def test_what_prompts_share_in_a_cache_that_forgets_nothing(tmp_path):
    """Blocks are of two pages; what one prompt shares with another ends with the last whole page of the shorter."""
    lines = [(1024, [1, 2]), (1024, [1, 3]), (700, [1, 3]), (2000, [1, 2, 4, 5]), (1024, []), (1024, [])]
    trace = tmp_path / "shared.jsonl"
    trace.write_text("".join(json.dumps(trace_line(input_length=each, hash_ids=ids)) + "\n" for each, ids in lines))
    shared = ReplayPlan.of(ReplayOptions(trace=trace, model="tiny-v4"))
    assert shared.endless_tokens == (0, 512, 512, 1024, 0, 0)
    without = ReplayPlan.of(ReplayOptions(trace=trace, model="tiny-v4", prefixes=False))
    assert set(without.endless_tokens) == {0}
    assert not any(without.keys(number) for number in range(1, 7))
