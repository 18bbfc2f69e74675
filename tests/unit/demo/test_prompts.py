"""The demo's prompts end at every edge; conversations continue what was said, and share a system prompt that ends inside a page."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.demo.prompts import LENGTHS, PAIRS, SPARSE_LENGTHS, SYSTEM_TOKENS, Request, conversations, single_prompts

PAGE, STEPS = 256, 20


def made(count: int = 4, turns: int = 10) -> tuple[Request, ...]:
    return conversations(count, turns, steps=STEPS, system_tokens=SYSTEM_TOKENS)


def test_single_prompts_lie_at_every_edge_and_differ_where_their_lengths_come_again():
    requests = single_prompts(30, sparse=False, most_tokens=1 << 20)
    assert {request.tokens % PAGE for request in requests} >= {0, 1, 2, 3, 4, 127, 128, 129, 130, 255}
    assert all(request.tokens == len(request.new) for request in requests)
    assert requests[24].tokens == requests[0].tokens
    assert requests[24].new != requests[0].new
    assert {tokens % 4 for tokens in SPARSE_LENGTHS} == {0, 1, 2, 3}


def test_a_short_model_gets_the_prompts_that_fit():
    assert {each.tokens for each in single_prompts(50, sparse=False, most_tokens=4)} == {1, 2, 3, 4} & set(LENGTHS)
    with pytest.raises(InvalidInputError, match="need prompts of up to 4099 tokens, the model takes 4098"):
        single_prompts(1, sparse=True, most_tokens=4098)


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


def test_turns_end_at_every_edge_and_some_answers_on_a_page():
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
    assert len({hit.tokens for hit in pairs}) == 1, "so that times can be compared"
    assert len({hit.new[:10] for hit in pairs}) == PAIRS, "one does not find what another has left"
