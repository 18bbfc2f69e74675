"""The demo's pools fit its requests and leave holes that its long prompts cannot avoid."""

from __future__ import annotations

import pytest

from kvbridge.cli.demo.plan import DemoOptions, DemoPlan
from kvbridge.core.geometry.components import Encoding
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import IndexSpace


def plan(**more) -> DemoPlan:
    facts = {
        "transport": "mooncake",
        "prefill_pp": 2,
        "hf_config": None,
        "encoding": Encoding.NATIVE,
        "prompts": 24,
        "steps": 16,
        "chunk_tokens": 512,
        "patience_s": 120.0,
        "keep_logs": None,
    }
    return DemoPlan.of(DemoOptions(**facts | more))


@pytest.mark.parametrize("prompts", [1, 2, 6, 24, 60])
def test_pools_hold_what_is_there_at_once(prompts, tmp_path):
    made = plan(prompts=prompts)
    spec = made.cluster_spec("demo", tmp_path / "model.json")
    largest = sorted(made.lengths)[-made.options.in_flight :]
    for node, extra in ((spec.prefill, (made.prefill_only_tokens,)), (spec.decode, ())):
        steps = made.options.steps if node is spec.decode else 0
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
    spec = plan(transport="nixl").cluster_spec("demo", tmp_path / "model.json")
    assert spec.transport == "nixl"


def test_every_process_computes_the_same_job(tmp_path):
    job = plan(prompts=3).job(tmp_path / "m.json", tmp_path / "p", tmp_path / "d", logits_dir=tmp_path)
    assert [prompt.tokens for prompt in job.prompts] == list(plan(prompts=3).lengths)
    assert type(job).model_validate_json(job.model_dump_json()) == job
