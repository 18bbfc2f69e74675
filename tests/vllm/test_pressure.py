"""Caches that are too small, and clients that leave: in each state of a request, and nothing is kept for them."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.vllm.fleet import DECODES, OFFER_S, Fleet
from tests.vllm.processes import send
from tests.vllm.prompts import fresh
from tests.vllm.servers import Server, together, under_way, wait_until
from tests.vllm.test_answers import assert_right, both_orders

PATIENCE_S = 2.0
"""Of a client that leaves."""


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    """Stop the processes that compute and move bytes; the node and the API go on."""
    stopped = server.engine()
    send(signal.SIGSTOP, stopped)
    try:
        yield
    finally:
        send(signal.SIGCONT, stopped)


def leave(server: Server, asked: list[int], transfer: dict | None = None, patience_s: float = PATIENCE_S) -> None:
    """Ask, and close the connection before there is an answer."""
    with pytest.raises(httpx.ReadTimeout):
        server.ask(asked, 400, transfer=transfer, timeout_s=patience_s)


@both_orders
@pytest.mark.parametrize("decode", DECODES)
def test_decode_preempts(fleet: Fleet, decode: str, order: str) -> None:
    pair, asked = fleet.pair(decode), [fresh(1400) for _ in range(4)]
    before = pair.decode.metric("vllm:num_preemptions_total")
    got = pair.ask_together(asked, 300, order=order)
    assert_right(fleet, asked, got)
    assert pair.decode.metric("vllm:num_preemptions_total") > before


@both_orders
def test_prefill_preempts(fleet: Fleet, order: str) -> None:
    pair = fleet.pair("mooncake")
    own, handed = [fresh(1400) for _ in range(4)], [fresh(1500) for _ in range(4)]
    before = pair.prefill.metric("vllm:num_preemptions_total")
    calls = [
        *((lambda one=one: pair.prefill.ask(one, 300)) for one in own),
        *((lambda one=one: pair.ask(one, order=order)) for one in handed),
    ]
    assert_right(fleet, [*own, *handed], together(calls))
    assert pair.prefill.metric("vllm:num_preemptions_total") > before


@pytest.mark.parametrize("decode", DECODES)
def test_a_client_leaves_while_its_request_is_queued(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(1500)
    with under_way([lambda: pair.decode.ask(fresh(1500), 500)] * 3) as others:
        wait_until(lambda: pair.decode.metric("vllm:num_requests_running") == 3, "decode is busy with three requests")
        leave(pair.decode, asked, pair.hand_over(asked), 1.0)
        assert not any(other.result().is_error for other in others)


@pytest.mark.parametrize("decode", DECODES)
def test_a_client_leaves_while_its_cache_is_loaded(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(1500)
    told = pair.hand_over(asked)
    with frozen(pair.prefill):
        leave(pair.decode, asked, told)


@pytest.mark.parametrize("decode", DECODES)
def test_a_client_leaves_while_its_answer_is_decoded(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(800)
    got = pair.decode.stream(asked, 1000, transfer=pair.hand_over(asked), leave_after=3)
    assert len(got.tokens) >= 3
    took_s = wait_until(lambda: not pair.prefill.used(), "prefill has its blocks back", OFFER_S)
    assert took_s < OFFER_S / 2


def test_nobody_comes_for_what_prefill_holds(fleet: Fleet) -> None:
    pair = fleet.pair("mooncake")
    for _ in range(3):
        pair.hand_over(fresh(1000))
    wait_until(lambda: not pair.prefill.used(), "prefill has given up what nobody wants", 4 * OFFER_S)


@pytest.mark.parametrize("decode", DECODES)
def test_what_decode_s_api_has_refused_is_not_held(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(1000)
    told = pair.hand_over(asked)
    assert pair.prefill.used()
    assert pair.decode.ask(asked, 100_000, transfer=told).status == 400
    wait_until(lambda: not pair.prefill.used(), "prefill has its blocks back", OFFER_S / 4)


@pytest.mark.parametrize("decode", DECODES)
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
    assert_right(fleet, [asked], [got])
    assert pair.decode.rooms_completed() > before
    assert took_s > OFFER_S, "it did not wait for long enough to prove anything"


@pytest.mark.parametrize(("side", "patience_s"), [("prefill", 0.3), ("decode", 0.3), ("both", 0.05)])
@pytest.mark.parametrize("decode", DECODES)
def test_a_client_leaves_a_pair(fleet: Fleet, decode: str, side: str, patience_s: float) -> None:
    """Paired order: the one that goes on has its own answer, or an error where decode's policy says so."""
    pair, asked = fleet.pair(decode), fresh(1500)
    to_prefill, to_decode = pair.draw_room()
    limits = {name: patience_s if side in {name, "both"} else 60.0 for name in ("prefill", "decode")}
    calls = [
        lambda: pair.prefill.ask(asked, 1, transfer=to_prefill, timeout_s=limits["prefill"]),
        lambda: pair.decode.ask(asked, transfer=to_decode, timeout_s=limits["decode"]),
    ]
    with under_way(calls) as results:
        for name, result in zip(limits, results, strict=True):
            if isinstance(result.exception(), httpx.ReadTimeout):
                assert limits[name] == patience_s, f"{name} hangs"
                continue
            got = result.result()
            if name == "decode" and not (got.is_error and decode == "nixl"):
                assert_right(fleet, [asked], [got])
