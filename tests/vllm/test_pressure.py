"""Caches that are too small, and clients that leave: in each state of a request, and nothing is kept for them."""

import math
import time

import httpx
import pytest

from tests.engines.fleet import DECODES
from tests.engines.processes import frozen
from tests.engines.prompts import fresh
from tests.engines.servers import together, under_way, wait_until
from tests.vllm.fleet import OFFER_S, Fleet
from tests.vllm.servers import Server
from tests.vllm.test_answers import both_orders

PREEMPTIONS = "vllm:num_preemptions_total"
each_decode = pytest.mark.parametrize("decode", DECODES)


def leave(server: Server, asked: list[int], transfer: dict, patience_s: float = 2.0) -> None:
    """Ask, and close the connection before there is an answer."""
    with pytest.raises(httpx.ReadTimeout):
        server.ask(asked, 400, transfer=transfer, timeout_s=patience_s)


@both_orders
@each_decode
def test_decode_preempts(fleet: Fleet, decode: str, order: str) -> None:
    pair, asked = fleet.pair(decode), [fresh(1400) for _ in range(4)]
    before = pair.decode.metric(PREEMPTIONS)
    fleet.assert_right(asked, pair.ask_together(asked, 300, order=order))
    assert pair.decode.metric(PREEMPTIONS) > before


@both_orders
def test_prefill_preempts(fleet: Fleet, order: str) -> None:
    pair = fleet.pair("mooncake")
    own, handed = [fresh(1400) for _ in range(4)], [fresh(1500) for _ in range(4)]
    before = pair.prefill.metric(PREEMPTIONS)
    calls = [
        *((lambda one=one: pair.prefill.ask(one, 300)) for one in own),
        *((lambda one=one: pair.ask(one, order=order)) for one in handed),
    ]
    fleet.assert_right([*own, *handed], together(calls))
    assert pair.prefill.metric(PREEMPTIONS) > before


@each_decode
def test_a_client_leaves_while_its_request_is_queued(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(1500)
    with under_way([lambda: pair.decode.ask(fresh(1500), 500)] * 3) as others:
        wait_until(lambda: pair.decode.metric("vllm:num_requests_running") == 3, "decode is busy with three requests")
        leave(pair.decode, asked, pair.hand_over(asked), 1.0)
        assert not any(other.result().is_error for other in others)


@each_decode
def test_a_client_leaves_while_its_cache_is_loaded(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(1500)
    told = pair.hand_over(asked)
    with frozen(pair.prefill.engine()):
        leave(pair.decode, asked, told)


@each_decode
def test_a_client_leaves_while_its_answer_is_decoded(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(800)
    got = pair.decode.stream(asked, 1000, transfer=pair.hand_over(asked), leave_after=3)
    assert len(got.tokens) >= 3
    wait_until(lambda: not pair.prefill.used(), "prefill has its blocks back", OFFER_S / 2)


def test_nobody_comes_for_what_prefill_holds(fleet: Fleet) -> None:
    pair = fleet.pair("mooncake")
    for _ in range(3):
        pair.hand_over(fresh(1000))
    wait_until(lambda: not pair.prefill.used(), "prefill has given up what nobody wants", 4 * OFFER_S)


@each_decode
def test_what_decode_s_api_has_refused_is_not_held(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(1000)
    told = pair.hand_over(asked)
    assert pair.prefill.used()
    assert pair.decode.ask(asked, 100_000, transfer=told).status == 400
    wait_until(lambda: not pair.prefill.used(), "prefill has its blocks back", OFFER_S / 4)


@each_decode
def test_decode_waits_longer_than_prefill_would_hold(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(1500)
    before = pair.decode.rooms_completed()
    # Three of these fill the cache, and requests are served in their order.
    rounds = math.ceil(1.5 * OFFER_S / pair.decode.ask(fresh(1500), 500).seconds)
    begun_s = time.monotonic()
    with under_way([lambda: pair.decode.ask(fresh(1500), 500)] * (3 * rounds)) as others:
        wait_until(lambda: pair.decode.metric("vllm:num_requests_waiting") >= 3 * (rounds - 1), "decode has a queue")
        got = pair.decode.ask(asked, transfer=pair.hand_over(asked))
        took_s = time.monotonic() - begun_s
        assert not any(other.result().is_error for other in others)
    fleet.assert_right([asked], [got])
    assert pair.decode.rooms_completed() > before
    assert took_s > OFFER_S, "it did not wait for long enough to prove anything"


@pytest.mark.parametrize(
    ("sides", "patience_s"), [(["prefill"], 0.3), (["decode"], 0.3), (["prefill", "decode"], 0.05)]
)
@each_decode
def test_a_client_leaves_a_pair(fleet: Fleet, decode: str, sides: list[str], patience_s: float) -> None:
    """Paired order: the one that goes on has its own answer, or an error where decode's policy says so."""
    pair, asked = fleet.pair(decode), fresh(1500)
    to_prefill, to_decode = pair.draw_room()
    limits = {name: patience_s if name in sides else 60.0 for name in ("prefill", "decode")}
    calls = [
        lambda: pair.prefill.ask(asked, 1, transfer=to_prefill, timeout_s=limits["prefill"]),
        lambda: pair.decode.ask(asked, transfer=to_decode, timeout_s=limits["decode"]),
    ]
    with under_way(calls) as results:
        for name, result in zip(limits, results, strict=True):
            if isinstance(result.exception(), httpx.ReadTimeout):
                assert name in sides, f"{name} hangs"
                continue
            got = result.result()
            if name == "decode" and not (got.is_error and decode == "nixl"):
                fleet.assert_right([asked], [got])
