"""The demo's pools fit its requests and leave holes that its long prompts cannot avoid."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from kvbridge.config.timeouts import DaemonTimeouts
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import IndexSpace
from kvbridge.testbed.demo.options import DemoOptions, Device
from kvbridge.testbed.demo.plan import IN_FLIGHT, DemoPlan
from kvbridge.testbed.options import Transport


def plan(**more) -> DemoPlan:
    return DemoPlan.of(DemoOptions(**more))


@pytest.mark.parametrize("prompts", [1, 2, 6, 24, 60])
def test_pools_hold_what_is_there_at_once(prompts, tmp_path):
    made = plan(prompts=prompts)
    spec = made.cluster_spec("demo", tmp_path / "model.json")
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
    full = sum(-(-tokens // made.geometry.tokens_per_page) for tokens in made.hole_tokens)
    largest = sum(-(-tokens // made.geometry.tokens_per_page) for tokens in sorted(made.lengths)[-5:])
    assert full >= largest


def test_stages_may_be_uneven():
    assert plan(prefill_pp=3).stages == ((0, 1, 2), (3, 4), (5, 6))


def test_only_the_chosen_transport_may_be_used(tmp_path):
    spec = plan(transport=Transport.NIXL).cluster_spec("demo", tmp_path / "model.json")
    assert spec.transport == "nixl"


@pytest.mark.parametrize("limit", ["begin_s", "offer_s", "room_s", "claim_s"])
def test_no_daemon_gives_up_a_room_that_the_demo_holds(limit, tmp_path):
    """Some are held to its end, which on a busy machine is a quarter of an hour away; the first is begun by no engine."""
    spec = plan().cluster_spec("demo", tmp_path / "model.json")
    assert all(node.more["timeouts"][limit] >= 3600 for node in (spec.prefill, spec.decode))
    assert limit in DaemonTimeouts.model_fields


def test_every_process_computes_the_same_job(tmp_path):
    job = plan(prompts=3).job(tmp_path / "m.json", tmp_path / "p", tmp_path / "d", logits_dir=tmp_path)
    assert job.requests == len(plan(prompts=3).lengths) == 3
    assert type(job).model_validate_json(job.model_dump_json()) == job


def test_a_whole_cache_is_decoded_without_a_hot_buffer():
    made = plan()
    assert made.sparse is made.hot_buffer() is None
    assert made.reserved_steps == made.options.step_count == 16


@pytest.mark.parametrize("prompts", [1, 4, 9])
def test_sparse_decode_is_made_for_its_requests(prompts, tmp_path):
    made = plan(sparse=True, prompts=prompts, steps=320)
    job = made.job(tmp_path / "m.json", tmp_path / "p", tmp_path / "d", logits_dir=tmp_path)
    assert job.sparse is made.sparse
    assert job.sparse.max_requests == IN_FLIGHT
    assert job.sparse.hot_rows < min(made.lengths) // 4
    assert job.sparse.max_tokens == max(made.lengths) + 320
    assert made.reserved_steps < 320, "requests grow"
    assert type(job).model_validate_json(job.model_dump_json()) == job


def test_the_hot_buffer_is_described_as_it_is_made():
    held = plan(sparse=True, prompts=1, steps=320, hot_rows=192).hot_buffer()
    assert (held.hot_rows, held.ring_rows, held.top_k, held.layers, held.row_bytes) == (192, 128, 64, 3, 2048)
    assert held.request_bytes > (192 + 128) * 3 * 2048


def test_on_a_gpu_everything_is_on_one_device(tmp_path):
    made = plan(device=Device.CUDA)
    spec = made.cluster_spec("demo", tmp_path / "model.json")
    assert spec.transport == "local"
    ranks = [rank["device"] for node in (spec.prefill, spec.decode) for rank in node.more["parallelism"]["ranks"]]
    assert ranks == ["cuda:0"] * 3
    assert made.job(tmp_path, tmp_path, tmp_path, logits_dir=tmp_path).device == "cuda:0"
    assert "parallelism" not in plan().cluster_spec("demo", tmp_path / "model.json").prefill.more


@pytest.mark.parametrize(
    ("changed", "more", "said"),
    [
        ({"dtype": "bfloat16"}, {}, "the model computes in bfloat16"),
        ({"index_topk": 200}, {"hot_rows": 192}, "--hot-rows 192: need a multiple of 64 of at least 256"),
        ({"max_position_embeddings": 4096}, {}, "up to 4099 tokens"),
        ({"layer_types": ["heavily_compressed_attention"] * 7}, {}, "no compressed_sparse_attention layer"),
    ],
)
def test_a_model_that_cannot_be_decoded_sparsely_is_refused(tmp_path, changed, more, said):
    facts = json.loads(resources.files("kvbridge").joinpath("engine/adapters/tiny_deepseek_v4.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(facts | changed))
    with pytest.raises(InvalidInputError, match=said):
        plan(sparse=True, hf_config=file, **more)
