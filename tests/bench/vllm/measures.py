"""What is measured of vLLM with kvbridge beside vLLM with NixlConnector: one function for each part.

Owns: what is asked in which order. Must not know: how figures are shown. Connectors take turns within each repetition.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from kvbridge.engine.adapters.vllm.requests import PARAMS_KEY
from tests.bench.vllm.hooks import percentile, summary
from tests.bench.vllm.pairs import CONNECTORS, Measured, Pairs, first_token_s, forget, token_times
from tests.vllm.processes import end, send
from tests.vllm.prompts import fresh
from tests.vllm.servers import HOLD, Pair, Server, together, wait_until

LENGTHS_TOKENS = (512, 1_500)
"""33 and 100 MB of the fat model: whole blocks of 8 MB."""
AT_ONCE = (1, 4)
IDLE_LOOK_S = 10.0
SCATTERED_REQUESTS = 560
"""More than a cache has blocks."""
HELD_ROOMS = 16
HOOK_REQUESTS = 200
"""So many that the 99th percentile is not simply the worst."""
POLICY_LIMIT_S = 40.0
"""NixlConnector does not notice a frozen prefill at all: so long is looked."""


def _turns(turn: int) -> tuple[str, ...]:
    return CONNECTORS if turn % 2 else CONNECTORS[::-1]


def _ms(values: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 3) for value in values]


# ------------------------------------------------------------------ transfers


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
                forget(measured.pair.prefill)
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
        for name in _turns(turn):
            measured = pairs.by_name[name]
            forget(measured.pair.decode)
            told = [measured.hand_over(one) for one in prompts]
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
        "first_token_ms": {name: _ms(values) for name, values in first.items()},
        "spans": spans,
    }


def read_transfers(pairs: Pairs, cases: list[dict[str, Any]]) -> None:
    """Put the loads into the cases, when the servers have ended."""
    for case in cases:
        spans = case.pop("spans")
        case["load_ms"] = {
            name: _ms([row.seconds for span in spans[name] for row in decode_rows(pairs, name, span, "load")])
            for name in CONNECTORS
        }


def decode_rows(pairs: Pairs, name: str, span: tuple[float, float], what: str) -> list[Any]:
    """Return rows of a connector's decode server."""
    return pairs.by_name[name].hooks["decode"].between(*span, what)


def scatter(server: Server) -> None:
    """Have a server's free blocks in a drawn order: many requests of one block each end in another order than they came."""
    draw = random.Random(7)
    lengths = [draw.randrange(1, 8) for _ in range(SCATTERED_REQUESTS)]
    with ThreadPoolExecutor(48) as pool:
        list(pool.map(lambda tokens: server.ask(fresh(8), tokens), lengths))


# ------------------------------------------------------------------ paired order


def overlapped(pairs: Pairs, turns: int) -> dict[str, Any]:
    """From prefill's answer to decode's first token at 100 MB, kvbridge in paired order, and the first token of the whole."""
    after: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    whole: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    for turn in range(turns + 1):
        for name in _turns(turn):
            handed_s, first_s = (_paired if name == "kvbridge" else _plain)(pairs.by_name[name], fresh(1_500))
            if turn:  # the first request of a length is slower on either side
                after[name].append(first_s - handed_s)
                whole[name].append(first_s)
    return {
        "tokens": 1_500,
        "turns": turns,
        "after_prefill_ms": {name: _ms(values) for name, values in after.items()},
        "first_token_ms": {name: _ms(values) for name, values in whole.items()},
    }


def _plain(measured: Measured, prompt: list[int]) -> tuple[float, float]:
    begun_s = time.monotonic()
    told = measured.hand_over(prompt)
    handed_s = time.monotonic() - begun_s
    return handed_s, handed_s + first_token_s(measured.pair.decode, prompt, told)


def _paired(measured: Measured, prompt: list[int]) -> tuple[float, float]:
    if not measured.addresses:
        measured.hand_over(fresh(200))
    to_prefill, to_decode = measured.paired()
    begun_s = time.monotonic()

    def prefill() -> float:
        answer = measured.pair.prefill.ask(prompt, 1, transfer=to_prefill)
        assert not answer.is_error, answer
        return time.monotonic() - begun_s

    handed_s, first_s = together([prefill, lambda: first_token_s(measured.pair.decode, prompt, to_decode)])
    return handed_s, first_s


# ------------------------------------------------------------------ what others feel


def neighbours(pairs: Pairs, turns: int) -> dict[str, Any]:
    """Tokens of a stream on decode while 100 MB arrive, and a prefill while 100 MB leave."""
    gaps: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    quiet: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    next_prefill: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    alone: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    prompt = fresh(1_500)
    for turn in range(turns):
        for name in _turns(turn):
            measured = pairs.by_name[name]
            during, before = _gaps(measured, prompt)
            gaps[name] += during
            quiet[name] += before
            alone[name].append(_prefill_s(measured.pair.prefill))
            forget(measured.pair.decode)
            told = measured.hand_over(prompt)
            with ThreadPoolExecutor(1) as pool:
                load = pool.submit(first_token_s, measured.pair.decode, prompt, told)
                next_prefill[name].append(_prefill_s(measured.pair.prefill))
                load.result()
    return {
        "turns": turns,
        "token_ms": {name: summary(_ms(values)) for name, values in gaps.items()},
        "quiet_token_ms": {name: summary(_ms(values)) for name, values in quiet.items()},
        "prefill_ms": {name: _ms(values) for name, values in next_prefill.items()},
        "prefill_alone_ms": {name: _ms(values) for name, values in alone.items()},
    }


def _prefill_s(server: Server) -> float:
    prompt = fresh(512)
    begun_s = time.monotonic()
    assert not server.ask(prompt, 1).is_error
    return time.monotonic() - begun_s


def _gaps(measured: Measured, prompt: list[int]) -> tuple[list[float], list[float]]:
    """Return gaps between tokens while a prompt is loaded three times, and before."""
    times: list[float] = []
    enough = threading.Event()

    def stream() -> None:
        for at_s in token_times(measured.pair.decode, fresh(40), 400):
            times.append(at_s)
            if len(times) > 60:
                enough.set()

    spans = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream)
        assert enough.wait(60.0)
        for _ in range(3):
            told = measured.hand_over(prompt)  # of prefill's cache
            begun_s = time.monotonic()
            first_token_s(measured.pair.decode, [*prompt[:-1], prompt[-1]], told)
            spans.append((begun_s, time.monotonic()))
            if running.done():
                break
            # What was loaded is in decode's cache now: another beginning makes another prompt of it.
            prompt = [3 + (prompt[0] + 1) % 500, *prompt[1:]]
        running.result()
    pairs_of = list(itertools.pairwise(times))
    during = [b - a for a, b in pairs_of if any(begun < b and a < ended for begun, ended in spans)]
    return during, [b - a for a, b in pairs_of[5:50]]


# ------------------------------------------------------------------ hooks, idle processors


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
    """Return what the hooks took, by connector and side."""
    found: dict[str, Any] = {}
    for name, measured in pairs.by_name.items():
        for side, times in measured.hooks.items():
            steps = times.steps_ms(*spans[name]["idle"])
            usual_s = percentile(steps, 0.5) / 1e3
            requests = times.requests_ms(spans[name]["requests"], usual_s)
            found.setdefault(name, {})[side] = {"step_ms": summary(steps), "request_ms": summary(requests)}
    return found


def idle(pairs: Pairs, turns: int) -> dict[str, Any]:
    """Cores that a pair takes with its children, with nothing held and with 16 prompts held."""
    found: dict[str, Any] = {name: {} for name in CONNECTORS}
    for name, measured in pairs.by_name.items():
        found[name]["nothing"] = _cores(measured)
        told = [(prompt, measured.hand_over(prompt)) for prompt in (fresh(200) for _ in range(HELD_ROOMS))]
        found[name]["held"] = _cores(measured)
        for prompt, params in told:
            measured.pair.decode.ask(prompt, 1, transfer=params)
    return {"held": HELD_ROOMS, "seconds": IDLE_LOOK_S, "cores": found}


def _cores(measured: Measured) -> float:
    processes = [one for server in measured.servers for one in server.tree()]
    before_s, begun_s = _busy_s(processes), time.monotonic()
    time.sleep(IDLE_LOOK_S)
    return round((_busy_s(processes) - before_s) / (time.monotonic() - begun_s), 4)


def _busy_s(processes: list[psutil.Process]) -> float:
    times = [one.cpu_times() for one in processes]
    return sum(each.user + each.system for each in times)


# ------------------------------------------------------------------ first token at 1 MB


def short(pairs: Pairs, turns: int) -> dict[str, Any]:
    """Decode's first token at 1 MB, plain order, and the phases of kvbridge's rooms as its nodes saw them."""
    for measured in pairs.by_name.values():
        for _ in range(3):
            measured.pair.ask(fresh(512), 1)
    first: dict[str, list[float]] = {name: [] for name in CONNECTORS}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in CONNECTORS}
    rooms: list[int] = []
    for turn in range(3 * turns):
        for name in _turns(turn):
            prompt = fresh(512)
            told = pairs.by_name[name].hand_over(prompt)
            if PARAMS_KEY in told:
                rooms.append(int(told[PARAMS_KEY]["room"]))
            begun_s = time.monotonic()
            first[name].append(first_token_s(pairs.by_name[name].pair.decode, prompt, told))
            spans[name].append((begun_s, time.monotonic()))
    return {
        "tokens": 512,
        "first_token_ms": {name: _ms(values) for name, values in first.items()},
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


def read_short(pairs: Pairs, found: dict[str, Any]) -> None:
    """Put in which part of it was the load, when the servers have ended."""
    spans = found.pop("spans")
    found["load_ms"] = {
        name: _ms([row.seconds for span in spans[name] for row in decode_rows(pairs, name, span, "load")])
        for name in CONNECTORS
    }


# ------------------------------------------------------------------ the end of things


def endings(pairs: Pairs, turns: int) -> dict[str, Any]:
    """Prefill's blocks after decode's client has left and after decode was killed; requests whose prefill was frozen or killed.

    None: not in POLICY_LIMIT_S.
    """
    found: dict[str, Any] = {"limit_s": POLICY_LIMIT_S}
    found["client_gone_s"], found["spans"] = {}, {}
    for name, measured in pairs.by_name.items():
        taken = [_client_leaves(measured) for _ in range(turns)]
        found["client_gone_s"][name] = [took_s for took_s, _ in taken]
        found["spans"][name] = [span for _, span in taken]
    found["frozen_s"] = {name: _without_prefill(measured, kill=False) for name, measured in pairs.by_name.items()}
    for measured in pairs.by_name.values():
        wait_until(lambda pair=measured.pair: _hands_over(pair), "prefill serves decode again")
    found["killed_s"] = {name: _without_prefill(measured, kill=True) for name, measured in pairs.by_name.items()}
    pairs.restart("prefill")
    found["decode_killed_s"] = {name: _decode_killed(measured) for name, measured in pairs.by_name.items()}
    return found


def read_endings(pairs: Pairs, found: dict[str, Any]) -> None:
    """Put in how long prefill's blocks were kept after decode's abort, when the servers have ended."""
    found["abort_s"] = {}
    for name, spans in found.pop("spans").items():
        hooks = pairs.by_name[name].hooks
        taken = []
        for span in spans:
            aborted, sent = hooks["decode"].between(*span, "aborted"), hooks["prefill"].between(*span, "sent")
            if aborted and sent:
                taken.append(round(sent[-1].at_s - aborted[0].at_s, 4))
        found["abort_s"][name] = taken


@contextmanager
def _waiting(measured: Measured) -> Iterator[Callable[[], None]]:
    """A request that waits at decode for blocks, while prefill holds its own; yields what has its client leave."""
    server = measured.pair.decode
    prompt = fresh(1_000)
    told = measured.hand_over(prompt)
    occupant = _asked(server, fresh(1_200), 700)
    wait_until(lambda: server.metric("vllm:num_requests_running") >= 1, "decode has little room left")
    waiting = _asked(server, prompt, 2, told)
    try:
        wait_until(lambda: server.metric("vllm:num_requests_waiting") >= 1, "a request waits at decode")
        assert measured.pair.prefill.used(), "prefill holds nothing"
        yield waiting.close
    finally:
        waiting.close()
        occupant.close()


def _asked(
    server: Server, prompt: list[int], tokens: int, transfer: dict[str, Any] | None = None
) -> http.client.HTTPConnection:
    """Ask for a stream, and read nothing of it."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=POLICY_LIMIT_S)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body | ({"kv_transfer_params": transfer} if transfer else {})),
        {"Content-Type": "application/json"},
    )
    return connection


def _client_leaves(measured: Measured) -> tuple[float | None, tuple[float, float]]:
    with _waiting(measured) as leave:
        begun_s = time.monotonic()
        leave()
        took_s = _until(lambda: not measured.pair.prefill.used(), POLICY_LIMIT_S)
        span = begun_s, time.monotonic()
    wait_until(lambda: not measured.pair.decode.used(), "decode is idle")
    return took_s, span


def _without_prefill(measured: Measured, *, kill: bool) -> float | None:
    """Seconds until a request has ended whose prefill is frozen, or killed, while it is loaded."""
    prompt = fresh(1_000)
    told = measured.hand_over(prompt)
    prefill = measured.pair.prefill
    stopped = prefill.engine()
    send(signal.SIGSTOP, stopped)
    try:
        begun_s = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(measured.pair.decode.ask, prompt, 2, transfer=told, timeout_s=POLICY_LIMIT_S)
            if kill:
                wait_until(lambda: measured.pair.decode.loads() or asked.done(), "decode waits for a transfer")
                begun_s = time.monotonic()
                end(prefill.tree())
            try:
                asked.result()
            except httpx.HTTPError:
                return None
            return round(time.monotonic() - begun_s, 3)
    finally:
        send(signal.SIGCONT, stopped)


def _hands_over(pair: Pair) -> bool:
    """Whether prefill holds what decode is to load: after it was frozen, its rank worker comes back."""
    return bool(pair.prefill.ask(fresh(200), 1, transfer=HOLD).transfer)


def _decode_killed(measured: Measured) -> float | None:
    measured.pair.ask(fresh(200), 1)
    with _waiting(measured):
        end(measured.pair.decode.tree())
        return _until(lambda: not measured.pair.prefill.used(), POLICY_LIMIT_S)


def _until(true: Callable[[], object], limit_s: float) -> float | None:
    begun_s = time.monotonic()
    while not true():
        if time.monotonic() - begun_s > limit_s:
            return None
        time.sleep(0.005)
    return round(time.monotonic() - begun_s, 3)
