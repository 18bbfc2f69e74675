"""SGLang on a GPU, unattended: `python -m tests.sglang.gpu --output out/sglang-gpu`, by the Python that has SGLang.

One server alone, one prefill server and decode servers over `local` (CUDA IPC) share one GPU. Each case says in
`sglang-gpu.json` whether it is right. Exit code 0: all are. `--processor` tries the cases themselves without a GPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.engines.processes import send
from tests.engines.prompts import fresh
from tests.engines.servers import Setup, together, under_way, wait_until
from tests.sglang.fleet import Fleet
from tests.sglang.servers import CHUNK_TOKENS, PAGE_TOKENS, PROCESSOR, Device, Plan, Server

CUDA = Device(
    (
        *("--attention-backend", "triton", "--dtype", "bfloat16", "--mem-fraction-static", "0.3"),
        *("--cuda-graph-max-bs-decode", "16"),
    ),
    # Of deterministic inference: otherwise SGLang never begins a prompt that is longer than a chunk.
    variables={"SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": str(CHUNK_TOKENS)},
)
"""Several servers share the GPU, and the suite's pools are small. The overlap schedule is on, as by default."""
DETERMINISTIC = "--enable-deterministic-inference"
"""SGLang's kernels that give a prompt the same bits in every batch. With others bfloat16 decides some tokens differently."""
LENGTHS = (1, PAGE_TOKENS, PAGE_TOKENS + 1, 37, CHUNK_TOKENS, CHUNK_TOKENS + 1, 1500, 3600)
"""Tokens: around a page and around what prefill computes at a time."""
KILLED_S = 5.0
"""For decode's client to have an answer."""
LIBRARIES = ("sglang", "torch", "triton", "transformers")
TIMED = {64: 12, 1000: 12, 3600: 12}
"""How often a prompt of so many tokens is timed."""


Case = Callable[[Fleet], dict[str, Any]]


def one_at_a_time(fleet: Fleet) -> dict[str, Any]:
    pair = fleet.pair("decode")
    before = pair.decode.rooms_completed()
    for tokens in LENGTHS:
        asked = fresh(tokens)
        fleet.assert_right([asked], [pair.ask(asked)])
    assert pair.decode.rooms_completed() - before == len(LENGTHS)
    return {"prompts_tokens": LENGTHS}


def alone_at_once(fleet: Fleet) -> dict[str, Any]:
    """Count the answers of the server alone that differ when it is asked for eight at once: the work of its kernels."""
    asked = [fresh(60 + 110 * number) for number in range(8)]
    for one in asked:
        fleet.expected(one)
    single = fleet.servers["single"]
    single.forget()
    got = together([lambda one=one: single.ask(one) for one in asked])
    differ = [one.tokens != fleet.expected(prompt).tokens for one, prompt in zip(got, asked, strict=True)]
    return {"prompts": len(asked), "differ": sum(differ)}


def eight_at_once(fleet: Fleet) -> dict[str, Any]:
    pair, waves = fleet.pair("decode"), 3
    for wave in range(waves):
        asked = [fresh(60 + 110 * number + 7 * wave) for number in range(8)]
        fleet.assert_right(asked, pair.ask_together(asked))
    return {"prompts": 8 * waves}


def prefixes_that_prefill_has(fleet: Fleet) -> dict[str, Any]:
    """The cached pages are sent before the forward pass, behind the passes that wrote them."""
    pair, system = fleet.pair("decode"), fresh(30 * PAGE_TOKENS)
    asked = [[*system, *fresh(40 + 50 * number)] for number in range(6)]
    for _ in range(2):
        fleet.assert_right(asked, pair.ask_together(asked))
    told = pair.ask_both(asked[0])[0].transfer or {}
    assert told["cached_tokens"] >= len(system), told
    return {"cached_tokens": told["cached_tokens"], "of": len(asked[0])}


def prefixes_that_both_have(fleet: Fleet) -> dict[str, Any]:
    pair, system = fleet.pair("caching"), fresh(30 * PAGE_TOKENS)
    received_bytes = []
    for number in range(6):
        before, asked = _received_bytes(pair.decode), [*system, *fresh(40 + 50 * number)]
        fleet.assert_right([asked], [pair.ask(asked)])
        received_bytes.append(_received_bytes(pair.decode) - before)
    assert received_bytes[1] < received_bytes[0], received_bytes
    return {"received_bytes": received_bytes}


def _received_bytes(server: Server) -> int:
    return sum(int(peer["received_bytes"]) for peer in server.node_status()["traffic"].values())


def times(fleet: Fleet) -> dict[str, Any]:
    """Milliseconds to a whole answer of one token: alone, and computed elsewhere. Medians, one request at a time."""
    pair, alone = fleet.pair("decode"), fleet.servers["single"]

    def milliseconds(ask: Callable[[list[int]], Any], tokens: int, number: int) -> float:
        return round(1e3 * median(ask(fresh(tokens)).seconds for _ in range(number)), 1)

    return {
        str(tokens): {
            "alone_ms": milliseconds(lambda asked: alone.ask(asked, 1), tokens, number),
            "decode_ms": milliseconds(lambda asked: pair.ask(asked, 1), tokens, number),
        }
        for tokens, number in TIMED.items()
    }


def prefill_is_killed(fleet: Fleet) -> dict[str, Any]:
    pair, prefill, asked = fleet.pair("decode"), fleet.servers["prefill"], fresh(1200)
    scheduler, told = prefill.scheduler(), pair.room()
    prefill.tree()
    calls = [lambda one=one: one.ask(asked, told=told, timeout_s=60.0) for one in (prefill, pair.decode)]
    send(signal.SIGSTOP, [scheduler])
    with under_way(calls) as results:
        try:
            wait_until(lambda: sum(pair.decode.node_status()["rooms"].values()), "decode's room")
            struck_s = time.monotonic()
            send(signal.SIGKILL, [scheduler])
            answer = results[1].result(60.0)
            took_s = time.monotonic() - struck_s
        finally:
            send(signal.SIGCONT, [scheduler])
        results[0].exception(60.0)
    assert answer.is_error, answer
    assert took_s < KILLED_S, f"decode's client had its answer after {took_s:.1f} s"
    fleet.restart("prefill")
    fleet.wait_hand_over("decode")
    return {"decode_answers_s": round(took_s, 2), "reason": answer.reason[:300]}


CASES: tuple[Case, ...] = (
    one_at_a_time,
    alone_at_once,
    eight_at_once,
    prefixes_that_prefill_has,
    prefixes_that_both_have,
    times,
    prefill_is_killed,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sglang.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/sglang-gpu"))
    parser.add_argument("--processor", action="store_true", help="compute on the processor, in float32")
    parser.add_argument("--shape", default="fat", choices=("fat", "tiny", "latent"), help="of the model")
    parser.add_argument("--default-kernels", action="store_true", help="without deterministic inference")
    parser.add_argument("--only", action="append", choices=[case.__name__ for case in CASES])
    given = parser.parse_args()
    output = given.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    device, shape = PROCESSOR if given.processor else CUDA, given.shape
    extra = () if given.processor or given.default_kernels else (DETERMINISTIC,)
    # An engine's own memory is reached over CUDA IPC, and on a processor only through a network.
    settings = {"transports": {"order": ["mooncake" if given.processor else "local"]}}
    plans = [
        Plan(name, mode, settings=settings, device=device, shape=shape, arguments=(*extra, *more))
        for name, mode, *more in (
            ("single", ""),
            ("prefill", "prefill"),
            ("decode", "decode"),
            ("caching", "decode", "--disaggregation-decode-enable-radix-cache"),
        )
    ]
    told: dict[str, Any] = {
        "environment": {
            "device": "processor" if given.processor else torch.cuda.get_device_name(0),
            "python": sys.version.split()[0],
            "libraries": {name: version(name) for name in LIBRARIES},
        },
        "model": shape,
        "flags": (*device.flags, *extra),
        "cases": {},
    }
    fleet = None
    try:
        begun_s = time.monotonic()
        fleet = Fleet(Setup(Path(sys.executable), output), plans)
        told["servers_answer_s"] = round(time.monotonic() - begun_s, 1)
        for case in CASES:
            if not given.only or case.__name__ in given.only:
                told["cases"][case.__name__] = _tried(case, fleet)
        told["largest_gap_nats"], told["ties"] = fleet.largest_gap, fleet.ties
    except Exception:  # noqa: BLE001 - it is told, and the servers are ended
        told["not_started"] = traceback.format_exc()[-6000:]
    finally:
        (output / "sglang-gpu.json").write_text(json.dumps(told, indent=1))
        if fleet is not None:
            fleet.end()
    print(json.dumps(told, indent=1))
    return 0 if told["cases"] and all(one["is_right"] for one in told["cases"].values()) else 1


def _tried(case: Case, fleet: Fleet) -> dict[str, Any]:
    begun_s = time.monotonic()
    try:
        figures = case(fleet)
        missing = fleet.missing()
        assert not missing, "\n".join(missing)
        found: dict[str, Any] = {"is_right": True, **figures}
    except Exception:  # noqa: BLE001 - the next case is tried
        found = {"is_right": False, "why": traceback.format_exc()[-3000:]}
    found["seconds"] = round(time.monotonic() - begun_s, 1)
    print(case.__name__, found, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
