"""The demo's conversations continue what was said, end at every edge, and share a system prompt that ends inside a page."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.testbed.demo.conversations import PAIRS, SYSTEM_TOKENS, Request, conversations
from kvbridge.testbed.demo.options import DemoOptions, RowEncoding
from kvbridge.testbed.demo.plan import DemoPlan

PAGE, STEPS = 256, 20


def made(count: int = 4, turns: int = 10) -> tuple[Request, ...]:
    return conversations(count, turns, steps=STEPS, system_tokens=SYSTEM_TOKENS)


def test_a_prompt_is_all_before_and_something_new():
    requests = made()
    by_number = {request.number: request for request in requests}
    assert list(by_number) == list(range(1, 47))
    for request in requests:
        before = by_number[request.previous].tokens + STEPS if request.previous else 0
        assert request.tokens == before + len(request.new) > before
        assert request.after < request.number
        if request.previous:
            former = by_number[request.previous]
            assert (former.conversation, former.turn) == (request.conversation, request.turn - 1)
            assert request.after == request.previous


def test_prompts_end_at_every_edge_and_some_answers_on_a_page():
    requests = made()
    assert {request.tokens % PAGE for request in requests} >= {0, 1, 2, 3, 4, 127, 128, 129, 255}
    assert any((request.tokens + STEPS) % PAGE == 0 for request in requests)


def test_every_other_conversation_begins_with_the_same_system_prompt():
    first = made(turns=1)[:4]
    begun = [request.new[:SYSTEM_TOKENS] for request in first]
    assert begun[0] == begun[2]
    assert len({tuple(text[:PAGE]) for text in begun}) == 3
    assert SYSTEM_TOKENS % PAGE, "the known prefix ends inside a page of those who share it"
    assert [request.after for request in first] == [0, 0, 1, 0], "who shares comes when it is known"


def test_the_last_are_one_turn_with_and_without_reuse_in_turns():
    requests = made(turns=3)
    others, pairs = requests[: -2 * PAIRS], requests[-2 * PAIRS :]
    assert all(request.page_keys and not request.by_itself for request in others)
    for hit, cold in zip(pairs[::2], pairs[1::2], strict=True):
        assert hit.by_itself
        assert cold.by_itself
        assert (hit.page_keys, cold.page_keys) == (True, False)
        assert (hit.turn, hit.tokens, hit.new, hit.previous) == (cold.turn, cold.tokens, cold.new, cold.previous)
        assert hit.turn == 4
    assert len({hit.tokens for hit in pairs}) == 1, "so that times can be compared"
    assert len({hit.new[:10] for hit in pairs}) == PAIRS, "one does not find what another has left"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"turns": 2, "chunk_tokens": 384}, "--chunk-tokens 384: with --turns it has to divide a page of 256 tokens"),
        ({"turns": 2, "encoding": RowEncoding.FP8_V4}, "--turns with fp8_v4 rows"),
        ({"keep_answers": True}, "--keep-answers is about later turns"),
        ({"host_tier": True}, "--host-tier is about prefixes that stay"),
    ],
)
def test_what_contradicts_itself_is_refused(options, said):
    with pytest.raises(InvalidInputError, match=said):
        DemoPlan.of(DemoOptions(**options))


def test_pages_of_all_conversations_have_room_to_stay(tmp_path):
    plan = DemoPlan.of(DemoOptions(turns=5, keep_answers=True))
    spec = plan.cluster_spec("demo", tmp_path / "model.json")
    last = {request.conversation: request.tokens for request in plan.requests}
    for node in (spec.prefill, spec.decode):
        assert node.pools["device"]["full"] > sum(tokens // PAGE for tokens in last.values())
        assert node.more["tier"]["enabled"]
        assert node.more["tier"]["model_name"] == plan.identity.model
    assert spec.decode.more["tier"]["generated"]
    assert spec.prefill.pools["device"]["swa"] > len(plan.requests), "checkpoints"
    assert "tier" not in DemoPlan.of(DemoOptions()).cluster_spec("demo", tmp_path).prefill.more


@pytest.mark.parametrize("sparse", [False, True])
def test_with_a_host_tier_the_devices_have_room_for_one_request_and_the_host_for_all(tmp_path, sparse):
    plan = DemoPlan.of(DemoOptions(turns=3, host_tier=True, sparse=sparse))
    spec = plan.cluster_spec("demo", tmp_path / "model.json")
    longest, all_pages = max(plan.lengths), sum(-(-tokens // PAGE) for tokens in plan.lengths)
    for node, never_free in ((spec.prefill, plan.prefill_only_tokens // PAGE), (spec.decode, 0)):
        device, host = node.pools["device"]["full"] - never_free, node.more["tier"]["host"]
        assert longest // PAGE < device < all_pages / 2
        assert host["pages"] >= all_pages
        assert bool(host["checkpoint_pages"]) == (node is spec.prefill), "windows and states are kept there alone"
    assert spec.decode.pools["host"]["pages"] >= all_pages, "what is on the host has its C4 rows in the host pool"
    assert plan.reserved_steps == plan.options.step_count, "no more pages can be had later"
