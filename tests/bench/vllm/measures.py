"""The parts of the comparison of vLLM with kvbridge and with NixlConnector; connectors take turns within each repetition."""

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvbridge.engine.vllm.requests import PARAMS_KEY
from tests.bench.engines import LOOK_S, cores, in_turn, milliseconds
from tests.bench.vllm.pairs import CONNECTORS, Measured, Pairs, summary
from tests.engines.prompts import fresh
from tests.engines.servers import together, wait_until
from tests.vllm.servers import Server

LENGTHS_TOKENS = (512, 1_500)
"""33 and 100 MB of the fat model: whole blocks of 8 MB."""
AT_ONCE = (1, 4)
SCATTERED_REQUESTS = 560
"""More than a cache has blocks."""
HELD_ROOMS = 16
HOOK_REQUESTS = 200
"""Enough that the 99th percentile is not simply the worst request."""


def first_token_s(server: Server, prompt: Sequence[int], transfer: dict[str, Any]) -> float:
    answer = server.stream(prompt, 1, transfer=transfer)
    assert not answer.is_error, answer
    return answer.first_token_s


def transfers(pairs: Pairs, turns: int) -> list[dict[str, Any]]:
    """Loads of 33 and 100 MB: from the allocation of decode's blocks to the worker's report, and decode's first token."""
    prompts = {tokens: [fresh(tokens) for _ in range(max(AT_ONCE))] for tokens in LENGTHS_TOKENS}
    for measured in pairs.by_name.values():
        for one in [prompt for few in prompts.values() for prompt in few]:
            measured.pair.ask(one, 1)  # both sides know each other, and prefill has it in its cache
    cases = []
    for order in ("in order", "scattered"):
        if order == "scattered":
            for measured in pairs.by_name.values():
                together([lambda server=server: scatter(server) for server in measured.servers])
            for measured in pairs.by_name.values():
                measured.pair.prefill.forget()
                for one in [prompt for few in prompts.values() for prompt in few]:
                    measured.pair.prefill.ask(one, 1)
        cases += [
            _transfer_case(pairs, prompts[tokens][:at_once], order, turns)
            for tokens in LENGTHS_TOKENS
            for at_once in AT_ONCE
        ]
    return cases


def _transfer_case(pairs: Pairs, prompts: list[list[int]], order: str, turns: int) -> dict[str, Any]:
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in CONNECTORS}
    first: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    for turn in range(turns):
        for name in in_turn(CONNECTORS, turn):
            measured = pairs.by_name[name]
            measured.pair.decode.forget()
            told = [measured.pair.hand_over(one) for one in prompts]
            begun_s = time.monotonic()
            calls = [
                lambda decode=measured.pair.decode, one=one, params=params: first_token_s(decode, one, params)
                for one, params in zip(prompts, told, strict=True)
            ]
            first[name] += together(calls)
            spans[name].append((begun_s, time.monotonic()))
    return {
        "tokens": len(prompts[0]),
        "at_once": len(prompts),
        "order": order,
        "turns": turns,
        "first_token_ms": {name: milliseconds(values) for name, values in first.items()},
        "spans": spans,
    }


def read_loads(pairs: Pairs, found: dict[str, Any]) -> None:
    spans = found.pop("spans")
    found["load_ms"] = {
        name: milliseconds(
            [row.seconds for span in spans[name] for row in pairs.by_name[name].hooks["decode"].loads(*span)]
        )
        for name in CONNECTORS
    }


def scatter(server: Server) -> None:
    """Have a server's free blocks in a drawn order: many requests of one block each end in another order than they came."""
    draw = random.Random(7)
    lengths = [draw.randrange(1, 8) for _ in range(SCATTERED_REQUESTS)]
    with ThreadPoolExecutor(48) as pool:
        list(pool.map(lambda tokens: server.ask(fresh(8), tokens), lengths))


def overlapped(pairs: Pairs, turns: int) -> dict[str, Any]:
    """From prefill's answer to decode's first token at 100 MB, kvbridge in paired order, and the first token of the whole."""
    after: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    whole: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    for turn in range(turns + 1):
        for name in in_turn(CONNECTORS, turn):
            handed_s, first_s = (_paired if name == "kvbridge" else _plain)(pairs.by_name[name], fresh(1_500))
            if turn:  # the first request of a length is slower on either side
                after[name].append(first_s - handed_s)
                whole[name].append(first_s)
    return {
        "tokens": 1_500,
        "turns": turns,
        "after_prefill_ms": {name: milliseconds(values) for name, values in after.items()},
        "first_token_ms": {name: milliseconds(values) for name, values in whole.items()},
    }


def _plain(measured: Measured, prompt: list[int]) -> tuple[float, float]:
    begun_s = time.monotonic()
    told = measured.pair.hand_over(prompt)
    handed_s = time.monotonic() - begun_s
    return handed_s, handed_s + first_token_s(measured.pair.decode, prompt, told)


def _paired(measured: Measured, prompt: list[int]) -> tuple[float, float]:
    to_prefill, to_decode = measured.pair.draw_room()
    begun_s = time.monotonic()

    def prefill() -> float:
        answer = measured.pair.prefill.ask(prompt, 1, transfer=to_prefill)
        assert not answer.is_error, answer
        return time.monotonic() - begun_s

    decode = measured.pair.decode
    handed_s, first_s = together([prefill, lambda: first_token_s(decode, prompt, to_decode)])
    return handed_s, first_s


def hooks(pairs: Pairs, _turns: int) -> dict[str, list[tuple[float, float]]]:
    """Steps without work, and requests that are alone: when they were. Read when the servers have ended."""
    spans: dict[str, Any] = {}
    for name, measured in pairs.by_name.items():
        begun_s = time.monotonic()
        measured.pair.decode.ask(fresh(40), 300)
        measured.pair.prefill.ask(fresh(40), 300)
        idle = begun_s, time.monotonic()
        requests = []
        for _ in range(HOOK_REQUESTS):
            begun_s = time.monotonic()
            measured.pair.ask(fresh(512), 4)
            wait_until(lambda measured=measured: not measured.pair.prefill.used(), "prefill is free again")
            requests.append((begun_s, time.monotonic()))
        spans[name] = {"idle": idle, "requests": requests}
    return spans


def read_hooks(pairs: Pairs, spans: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, measured in pairs.by_name.items():
        for side, times in measured.hooks.items():
            steps = times.steps_ms(*spans[name]["idle"])
            usual_s = statistics.median(steps) / 1e3
            requests = times.requests_ms(spans[name]["requests"], usual_s)
            found.setdefault(name, {})[side] = {"step_ms": summary(steps), "request_ms": summary(requests)}
    return found


def idle(pairs: Pairs, turns: int) -> dict[str, Any]:
    """Cores that a pair takes with its children, with nothing held and with 16 prompts held."""
    found: dict[str, Any] = {name: {} for name in CONNECTORS}
    for name, measured in pairs.by_name.items():
        found[name]["nothing"] = cores(measured.servers)
        told = [(prompt, measured.pair.hand_over(prompt)) for prompt in (fresh(200) for _ in range(HELD_ROOMS))]
        found[name]["held"] = cores(measured.servers)
        for prompt, params in told:
            measured.pair.decode.ask(prompt, 1, transfer=params)
    return {"held": HELD_ROOMS, "seconds": LOOK_S, "cores": found}


def short(pairs: Pairs, turns: int) -> dict[str, Any]:
    """Decode's first token at 1 MB, plain order, and the phases of kvbridge's rooms as its nodes saw them."""
    for measured in pairs.by_name.values():
        for _ in range(3):
            measured.pair.ask(fresh(512), 1)
    first: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in CONNECTORS}
    rooms: list[int] = []
    for turn in range(3 * turns):
        for name in in_turn(CONNECTORS, turn):
            prompt = fresh(512)
            told = pairs.by_name[name].pair.hand_over(prompt)
            if PARAMS_KEY in told:
                rooms.append(int(told[PARAMS_KEY]["room"]))
            begun_s = time.monotonic()
            first[name].append(first_token_s(pairs.by_name[name].pair.decode, prompt, told))
            spans[name].append((begun_s, time.monotonic()))
    return {
        "tokens": 512,
        "first_token_ms": {name: milliseconds(values) for name, values in first.items()},
        "phases_ms": {
            role: _phases_ms(server, rooms)
            for role, server in zip(("prefill", "decode"), pairs.by_name["kvbridge"].servers, strict=True)
        },
        "spans": spans,
    }


def _phases_ms(server: Server, rooms: Sequence[int]) -> dict[str, float]:
    """Medians over rooms, as the node beside a server has them."""
    found = [server.room(room)["phases_s"] for room in rooms]
    return {name: round(1e3 * statistics.median(one[name] for one in found if name in one), 3) for name in found[0]}
