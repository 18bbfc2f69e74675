"""Pools of the demo hold what is there at once, and scatter it; a model that cannot be run is refused."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from kvbridge.config.timeouts import DaemonTimeouts
from kvbridge.core.errors import ConfigError, InvalidInputError
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import IndexSpace
from kvbridge.demo.options import DemoOptions, Device, RowEncoding
from kvbridge.demo.plan import IN_FLIGHT, DemoPlan

PAGE = 256


def plan(**more) -> DemoPlan:
    return DemoPlan.of(DemoOptions(**more))


@pytest.mark.parametrize("prompts", [1, 6, 24])
def test_pools_hold_what_is_there_at_once(prompts, tmp_path):
    made = plan(prompts=prompts)
    spec = made.cluster_spec(tmp_path)
    largest = sorted(made.lengths)[-IN_FLIGHT:]
    for node, extra in ((spec.prefill, (made.prefill_only_tokens,)), (spec.decode, ())):
        steps = made.options.step_count if node is spec.decode else 0
        for rooms in (made.hole_tokens, (*made.hole_tokens[1::2], *largest)):
            for space in (IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST):
                needed = sum(
                    pages_needed(
                        made.geometry, tokens=tokens + (steps if tokens in largest else 0), prompt_tokens=tokens
                    )[space]
                    for tokens in (*rooms, *extra)
                )
                assert needed <= node.pools["device"][space.value] + len(rooms) * (space is IndexSpace.FULL)


def test_long_prompts_are_longer_than_any_hole():
    made = plan()
    assert max(made.hole_tokens) < max(made.lengths) <= 2 * max(made.hole_tokens)


def test_no_daemon_gives_up_a_room_that_the_demo_holds(tmp_path):
    """Some are held to its end, which on a busy machine is a quarter of an hour away; the first is begun by no engine."""
    spec = plan().cluster_spec(tmp_path)
    for limit in ("begin_s", "offer_s", "room_s", "claim_s"):
        assert all(node.more["timeouts"][limit] >= 3600 for node in (spec.prefill, spec.decode))
        assert limit in DaemonTimeouts.model_fields


@pytest.mark.parametrize("prompts", [1, 9])
def test_sparse_decode_is_made_for_its_requests(prompts, tmp_path):
    made = plan(sparse=True, prompts=prompts, steps=320)
    settings = made.job(tmp_path, tmp_path).sparse
    assert settings.max_requests == IN_FLIGHT
    assert settings.hot_rows == settings.top_k == 64, "so rows give way in nearly every step"
    assert settings.max_tokens == max(made.lengths) + 320
    assert made.reserved_steps < 320, "requests grow"
    assert plan(sparse=True).reserved_steps < plan(sparse=True).options.step_count, "also when nothing was chosen"
    assert plan().sparse is None


def test_on_a_gpu_everything_is_on_one_device(tmp_path):
    made = plan(device=Device.CUDA)
    spec = made.cluster_spec(tmp_path)
    assert spec.transport == "local"
    ranks = [rank["device"] for node in (spec.prefill, spec.decode) for rank in node.more["parallelism"]["ranks"]]
    assert ranks == ["cuda:0"] * 3
    assert made.job(tmp_path, tmp_path).device == "cuda:0"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "bfloat16"}, "the model computes in bfloat16"),
        ({"max_position_embeddings": 4096}, "up to 4099 tokens"),
        ({"layer_types": ["heavily_compressed_attention"] * 7}, "no compressed_sparse_attention layer"),
    ],
)
def test_a_model_that_cannot_be_decoded_sparsely_is_refused(tmp_path, changed, said):
    facts = json.loads(resources.files("kvbridge").joinpath("engine/adapters/tiny_deepseek_v4.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(facts | changed))
    with pytest.raises(InvalidInputError, match=said):
        plan(sparse=True, hf_config=file)


def test_a_model_of_another_family_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="the demo runs model_type 'deepseek_v4', got 'llama'"):
        plan(hf_config=file)
    with pytest.raises(ConfigError, match="--hf-config"):
        plan(hf_config=tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"turns": 2, "encoding": RowEncoding.FP8_V4}, "--turns with fp8_v4 rows"),
        ({"keep_answers": True}, "--keep-answers is about later turns"),
        ({"host_tier": True}, "--host-tier is about prefixes that stay"),
        ({"prefill_pp": 8}, "--prefill-pp 8: tiny_deepseek_v4 has only 7 layers"),
    ],
)
def test_what_contradicts_itself_is_refused(options, said):
    with pytest.raises(InvalidInputError, match=said):
        plan(**options)


def test_pages_of_all_conversations_have_room_to_stay(tmp_path):
    made = plan(turns=5, keep_answers=True)
    spec = made.cluster_spec(tmp_path)
    last = {request.conversation: request.tokens for request in made.requests}
    for node in (spec.prefill, spec.decode):
        assert node.pools["device"]["full"] > sum(tokens // PAGE for tokens in last.values())
        assert node.more["tier"]["model_name"] == made.identity.model
    assert spec.decode.more["tier"]["generated"]
    assert spec.prefill.pools["device"]["swa"] > len(made.requests), "checkpoints"
    assert "tier" not in plan().cluster_spec(tmp_path).prefill.more


@pytest.mark.parametrize("sparse", [False, True])
def test_with_a_host_tier_the_devices_have_room_for_one_request_and_the_host_for_all(tmp_path, sparse):
    made = plan(turns=3, host_tier=True, sparse=sparse)
    spec = made.cluster_spec(tmp_path)
    longest, all_pages = max(made.lengths), sum(-(-tokens // PAGE) for tokens in made.lengths)
    for node, never_free in ((spec.prefill, made.prefill_only_tokens // PAGE), (spec.decode, 0)):
        device, host = node.pools["device"]["full"] - never_free, node.more["tier"]["host"]
        assert longest // PAGE < device < all_pages / 2
        assert host["pages"] >= all_pages
        assert bool(host["checkpoint_pages"]) == (node is spec.prefill), "windows and states are kept there alone"
    assert spec.decode.pools["host"]["pages"] >= all_pages, "what is on the host has its C4 rows in the host pool"
    assert made.reserved_steps == made.options.step_count, "no more pages can be had later"
