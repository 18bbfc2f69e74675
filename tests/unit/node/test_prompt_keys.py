"""Page keys of rooms and of the engines that work on them."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.config.admission import AdmissionConfig
from kvbridge.core.errors import ConflictError, InvalidInputError, KeyMismatchError, NamespaceError, RoomFailedError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.prefixes import Namespaces
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import Done, Failed
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.helpers.rooms import (
    ADDRESS,
    GEOMETRY,
    PAGE,
    PREFILL,
    R0,
    R1,
    ReceiverBench,
    SenderBench,
    full_amounts,
    pick,
)

PROMPT = 3 * PAGE + 5
"""Three whole pages."""
TOKENS = np.arange(5 * PAGE) + 1_000_000
IDENTITY = PrefixIdentity(
    model="m", revision="1", fingerprint=fingerprint(GEOMETRY), tokens_per_page=PAGE, namespace="acme"
)
KEYS = page_keys(IDENTITY, TOKENS[:PROMPT]).data


def other_from(page: int) -> bytes:
    """The keys of the prompt when one token of a page is another one."""
    tokens = TOKENS[:PROMPT].copy()
    tokens[page * PAGE + 7] += 1
    return page_keys(IDENTITY, tokens).data


def request(**fields) -> AdmissionRequest:
    return AdmissionRequest(**{"room": 1, "prompt_tokens": PROMPT, "page_hashes": KEYS, "namespace": "acme"} | fields)


def prefill(**fields) -> SenderBench:
    bench = SenderBench(**fields)
    bench.service.requests.admit(request())
    return bench


def decode(*engines: str, committed: bool = True, **fields) -> ReceiverBench:
    bench = ReceiverBench(**fields)
    bench.engines.names = {*engines} or {"engine"}
    bench.nodes.know()
    bench.service.requests.admit(request(prefill=(ADDRESS,), max_new_tokens=PAGE + PAGE - 5))
    if committed:
        done = Done(room=1, generation=1, writer=R0, amounts=full_amounts(PROMPT), phases_s={})
        bench.service.peers.hear(PREFILL, done)
    return bench


def begin(bench: SenderBench, page_hashes: bytes = b"", ranks=(R0,), engine: str = "engine", **fields):
    return bench.verbs.begin(engine, ranks, 1, prompt_tokens=PROMPT, tables=None, page_hashes=page_hashes, **fields)


def report(bench):
    return bench.service.book.report(1)


# ------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_another_number_of_keys_than_the_prompt_has_whole_pages_is_refused(count, shares_prefixes):
    bench = SenderBench(shares_prefixes=shares_prefixes)
    text = rf"page_hashes has {16 * count} bytes; {PROMPT} tokens are 3 whole pages of {PAGE}, .* 48 bytes"
    with pytest.raises(InvalidInputError, match=text):
        bench.service.requests.admit(request(page_hashes=bytes(16 * count)))
    assert len(bench.service.book) == 0
    assert bench.free == 16


@pytest.mark.asyncio
@pytest.mark.parametrize("wait_s", [0.0, 1.0])
async def test_a_namespace_that_may_not_be_named_is_a_counted_refusal(wait_s):
    bench = SenderBench()
    admission = AdmissionController(
        bench.service.requests, bench.book, limits=AdmissionConfig(), events=bench.events, clock=bench.clock
    )
    with pytest.raises(NamespaceError, match="'acme': it may name the default one"):
        await admission.admit(request(wait_s=wait_s), Namespaces())
    assert bench.events.refusals == {"namespace_forbidden": 1}
    assert bench.free == 16
    assert (await admission.admit(request(), Namespaces(frozenset({"acme"})))).room == 1


# ------------------------------------------------------------------------------------- begin


def test_an_engine_that_states_none_is_told_what_to_do_and_the_room_goes_on():
    bench = prefill()
    with pytest.raises(InvalidInputError, match=r"admitted with page keys.*engine\.page_keys"):
        begin(bench)
    with pytest.raises(InvalidInputError, match="page_hashes has 16 bytes"):
        begin(bench, KEYS[:16])
    assert report(bench).state is RoomState.ADMITTED
    assert begin(bench, KEYS).tables


@pytest.mark.parametrize("page", [0, 1, 2])
def test_other_tokens_fail_the_room_and_the_first_other_page_is_named(page):
    bench = prefill()
    with pytest.raises(
        KeyMismatchError, match=rf"prefill engine's tokens .*page {page} \(tokens {page * PAGE} to "
    ) as error:
        begin(bench, other_from(page))
    assert (report(bench).state, report(bench).reason_code) == (RoomState.FAILED, "key_mismatch")
    assert report(bench).reason in str(error.value)
    assert ("namespace" in str(error.value)) is (page == 0)
    assert not any(secret in str(error.value) for secret in ("1000", KEYS[:16].hex(), other_from(page)[:16].hex()))
    assert bench.free == 16


def test_engines_of_a_node_that_end_the_prompt_differently_fail_the_room():
    """No key names the tokens behind the last whole page, so they are compared with each other."""
    bench = prefill(ranks=(R0, R1))
    begin(bench, KEYS, end_key=b"a" * 16)
    with pytest.raises(KeyMismatchError, match=rf"\(tokens {3 * PAGE} to {PROMPT - 1}\)"):
        begin(bench, KEYS, (R1,), "other", end_key=b"b" * 16)
    assert report(bench).reason_code == "key_mismatch"


def test_nothing_stays_of_a_room_whose_engine_says_afterwards_that_it_has_another_prompt():
    bench = prefill()
    begin(bench, KEYS)
    bench.verbs.publish("engine", (R0,), 1, upto_token=PROMPT, layers=None)
    bench.verbs.finish("engine", (R0,), 1, metadata=b"")
    with pytest.raises(KeyMismatchError):
        begin(bench, other_from(1))
    assert (report(bench).state, bench.prefixes.known(Keys(KEYS).in_namespace(""))) == (RoomState.FAILED, 0)


# ------------------------------------------------------------------------------------- claim


def test_a_claim_states_its_keys():
    bench = decode()
    with pytest.raises(InvalidInputError, match="admitted with page keys"):
        bench.verbs.claim("engine", 1)
    assert report(bench).state is RoomState.COMMITTED
    assert bench.verbs.claim("engine", 1, KEYS).claimed_by == {"engine"}


def test_a_claim_with_other_tokens_fails_the_room_on_both_sides():
    bench = decode()
    with pytest.raises(KeyMismatchError, match=r"decode engine's tokens .*page 2"):
        bench.verbs.claim("engine", 1, other_from(2))
    assert (report(bench).state, report(bench).reason_code) == (RoomState.FAILED, "key_mismatch")
    assert bench.free == 16
    (told,) = pick(bench.nodes.messages, Failed)
    assert (told.code, told.message) == ("key_mismatch", report(bench).reason)
    with pytest.raises(RoomFailedError, match="page 2"):
        bench.verbs.claim("engine", 1, KEYS)


def test_a_room_that_another_engine_has_claimed_ends_when_that_one_releases_it():
    bench = decode("engine", "other")
    bench.verbs.claim("engine", 1, KEYS)
    with pytest.raises(KeyMismatchError):
        bench.verbs.claim("other", 1, other_from(0))
    assert (report(bench).state, bench.engines.kinds[-1]) == (RoomState.FAILED, "cancel")
    assert bench.free < 16
    assert pick(bench.nodes.messages, Failed)
    bench.verbs.release("engine", 1)
    assert bench.free == 16


# ------------------------------------------------------------------------------------- release

WHOLE = 5 * PAGE - 1
"""Tokens of the prompt and those fed after it: four whole pages, and one that lacks a row."""
ANSWER = page_keys(IDENTITY, TOKENS[:WHOLE])


def claimed(*engines: str):
    bench = decode(*engines)
    for engine in bench.engines.names:
        bench.verbs.claim(engine, 1, KEYS)
    return bench, bench.service.book.get(1)


def watched(bench, room):
    """The answer that there is when the pages are given back."""
    found = []
    give_back = type(bench.service.driver.rules.pages).give_back
    pages = bench.service.driver.rules.pages

    def noted(self, given):
        if self is pages and given is room:
            found.append(room.answer)
        give_back(self, given)

    return found, noted


@pytest.fixture
def answers(monkeypatch):
    """Return what stands as the answer of a room when its pages are given back."""

    def watch(bench, room):
        found, noted = watched(bench, room)
        monkeypatch.setattr(type(bench.service.driver.rules.pages), "give_back", noted)
        return found

    return watch


def test_all_engines_have_to_say_the_same(answers):
    said = {"valid_tokens": WHOLE, "page_hashes": ANSWER.data}
    less = {"valid_tokens": PROMPT, "page_hashes": KEYS}
    for one, two, refused, kept in (
        (said, said, False, True),
        (said, {}, False, False),
        (said, less, True, False),
        ({}, said, True, False),
    ):
        bench, room = claimed("a", "b")
        found = answers(bench, room)
        bench.verbs.release("a", 1, **one)
        if refused:
            with pytest.raises(ConflictError, match=r"engine a has released it with .* have to say the same"):
                bench.verbs.release("b", 1, **two)
        else:
            bench.verbs.release("b", 1, **two)
        assert [answer is not None for answer in found] == [kept]
        assert (report(bench).state, bench.free) == (RoomState.COMPLETED, 16)


@pytest.mark.parametrize(
    ("valid_tokens", "page_hashes", "error"),
    [
        (PROMPT - 1, KEYS, InvalidInputError),
        (WHOLE, KEYS, InvalidInputError),
        (WHOLE, b"123", InvalidInputError),
        (6 * PAGE, ANSWER.data + bytes(32), InvalidInputError),
        (WHOLE, other_from(0) + ANSWER.data[48:], KeyMismatchError),
    ],
)
def test_a_wrong_answer_is_not_kept_and_the_pages_come_back(answers, valid_tokens, page_hashes, error):
    bench, room = claimed()
    found = answers(bench, room)
    with pytest.raises(error):
        bench.verbs.release("engine", 1, valid_tokens=valid_tokens, page_hashes=page_hashes)
    assert found == [None]
    assert (report(bench).state, bench.free) == (RoomState.COMPLETED, 16)
