"""Models with several kinds of cache: a prompt that was computed elsewhere has the tokens of an engine alone, at every length.

The engines are of one process each (`engine.py`). NixlConnector beside ours makes the table of docs/false-hand-offs.md.
"""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbridge.engine.vllm.groups import CacheGroup, GroupKind
from tests.engines.processes import end, frozen, send
from tests.engines.prompts import fresh, prompt
from tests.engines.servers import Setup, together, under_way, wait_until
from tests.engines.suite import running
from tests.integration.test_vllm_roles import rows_cross
from tests.vllm.engines import EnginePlan, Engines, model
from tests.vllm.servers import HERE, HOLD, kvbridge, nixl_plan

SOME = 24
"""Prompts under way at once."""
TOKENS = 4
CHUNK_TOKENS = 64


def around(*tokens: int) -> list[int]:
    """Return lengths of prompts: the smallest, and those around certain ones."""
    return sorted({*range(1, 7), *(one + more for one in tokens for more in range(-1, 3))})


LENGTHS = {
    # Windows of 48, blocks of 32; of 128 and 32; states in blocks of 128 and of 384, chunks of 64; latent vectors in blocks of 16.
    "gemma": [*range(1, 2 * 48 + 2 * 32 + 1)],
    "gpt-oss": [*range(1, 2 * 128 + 2 * 32 + 1)],
    "granite": around(CHUNK_TOKENS, 128, 192, 384, 592),
    "qwen": around(CHUNK_TOKENS, 128, 384, 448, 592),
    "deepseek": around(16, 32, CHUNK_TOKENS, 128, 200),
}
SETTINGS = {"gemma": {"block_size": 32}, "gpt-oss": {"block_size": 32}}
DTYPES = {"qwen": "bfloat16"}
STEPWISE = {"qwen", "deepseek"}
"""bfloat16 rounds otherwise in another batch. Latent attention on a processor has other kernels for one token than for several."""
LATENT_GAP_NATS = 0.05
"""Prefill computes the last token of a latent model's prompt together with others, for which a processor's kernels round otherwise:
by up to 0.01 nats. One other token in the prompt changes likelihoods by 0.3 nats, and the tokens."""
whole_prompts = pytest.mark.parametrize(
    "fleet", [kind for kind in LENGTHS if kind not in STEPWISE], indirect=True, scope="module"
)
BLOCKS = {"granite": 48, "qwen": 48}
"""Room for a prompt of 2,048 tokens in all groups; 160 for other kinds."""
OF_MANY, MANY = 900, 260
"""Tokens of prompts, of which four fit, and tokens asked for, of which four do not."""
RANKS = {f"gemma, ranks: {prefill} to {decode}": (prefill, decode) for prefill, decode in ((2, 1), (1, 2), (2, 2))}
DRAFTS = "gemma, decode drafts"
UNLIKE: dict[str, tuple[str, dict, dict]] = {
    **{name: ("gemma", *({"tensor_parallel_size": each} for each in sizes)) for name, sizes in RANKS.items()},
    DRAFTS: ("gemma", {}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "max_num_seqs": 16}),
}
"""Fleets that are more than two engines with a model of one kind: further settings of prefill, and of decode."""
SHORT = pytest.mark.vllm_short
SHORT_KINDS = [pytest.param(kind, marks=SHORT) if kind in {"gemma", "gpt-oss", "granite"} else kind for kind in LENGTHS]
ENDS_S = 60.0
"""For a load that cannot be finished to end."""


def plan(name: str, kind: str, transfer: Mapping | None = None, **settings: Any) -> EnginePlan:
    said = SETTINGS.get(kind, {}) | settings
    return EnginePlan(
        name, transfer, shape=kind, dtype=DTYPES.get(kind, "float32"), blocks=BLOCKS.get(kind, 160), settings=said
    )


@pytest.fixture(scope="module", params=LENGTHS)
def fleet(request: pytest.FixtureRequest, setup: Setup) -> Iterator[Engines]:
    kind, *further = UNLIKE.get(request.param, (request.param, {}, {}))
    model(setup, kind)
    transports = {"transports": {"order": ["mooncake"]}}
    chunks = {"max_num_batched_tokens": CHUNK_TOKENS, "max_num_seqs": SOME}
    plans = [  # also for decode: vLLM 0.32 has ended when it computed more of a prompt at once than a chunk of Mamba2
        plan("prefill", kind, kvbridge("producer", **transports), **chunks | further[0]),
        plan("decode", kind, kvbridge("consumer", policy="recompute", **transports), **chunks | further[1]),
    ]
    for engines in running(lambda: Engines(setup, plans), "vllm"):
        engines.kind, engines.stepwise = kind, kind in STEPWISE
        if kind == "deepseek":
            engines.RIGHT_GAP_NATS = engines.TIE_NATS = LATENT_GAP_NATS
        yield engines


@pytest.mark.parametrize("fleet", SHORT_KINDS, indirect=True, scope="module")
def test_every_length_in_plain_order(fleet: Engines) -> None:
    completed = fleet.servers["decode"].rooms_completed()
    for start in range(0, len(LENGTHS[fleet.kind]), SOME):
        asked = [fresh(tokens) for tokens in LENGTHS[fleet.kind][start : start + SOME]]
        fleet.expect(asked, TOKENS)
        fleet.assert_right(asked, fleet.plain(asked, TOKENS))
    moved = [tokens for tokens in LENGTHS[fleet.kind] if tokens > 1 or fleet.kind == "deepseek"]
    assert fleet.servers["decode"].rooms_completed() - completed == len(moved)


@pytest.mark.parametrize("fleet", [*LENGTHS, *RANKS], indirect=True, scope="module")
def test_lengths_in_paired_order_and_behind_what_decode_has(fleet: Engines) -> None:
    """Prompts begin as one that decode has, and three each begin alike on prefill."""
    shared = prompt(400, f"shared by {fleet.kind}")
    for order in ("plain", "paired"):
        asked = [[*shared[:tokens], *fresh(more)] for tokens in (64, 128, 200, 256, 400) for more in (1, 31, 70)]
        fleet.expect(asked, TOKENS)
        fleet.servers["decode"].ask(shared, 1)
        fleet.assert_right(asked, fleet.paired(asked, TOKENS, order=order))
    fleet.servers["decode"].forget()


@whole_prompts
def test_prefill_and_decode_preempt(fleet: Engines) -> None:
    own, handed = ([fresh(OF_MANY) for _ in range(4)] for _ in range(2))
    fleet.expect([*own, *handed], MANY)
    pair = fleet.pair("decode")
    for order in ("plain", "paired"):
        before = {name: server.says()["preempted"] for name, server in fleet.servers.items()}
        calls = [
            *((lambda one=one: pair.prefill.ask(one, MANY)) for one in own),
            *((lambda one=one: pair.decode.ask(one, MANY)) for one in own),
            *((lambda one=one, order=order: pair.ask(one, MANY, order=order)) for one in handed),
        ]
        fleet.assert_right([*own, *own, *handed], together(calls))
        for name, server in fleet.servers.items():
            assert server.says()["preempted"] > before[name], f"{name} has preempted nobody"
            server.forget()


def test_clients_that_leave_and_prompts_that_nobody_asks_decode_for(fleet: Engines) -> None:
    pair = fleet.pair("decode")
    for seconds in (0.0, 0.05, 0.3):
        to_prefill, to_decode = pair.draw_room()
        asked = fresh(500)
        got = together(
            [
                lambda: pair.prefill.ask(asked, 1, transfer=to_prefill, leave_after_s=seconds),  # noqa: B023
                lambda: pair.decode.ask(asked, 200, transfer=to_decode, leave_after_s=seconds),  # noqa: B023
            ]
        )
        assert all(not one.is_error or one.reason == "abort" for one in got)


@whole_prompts
def test_a_load_that_fails_is_computed_by_decode_and_its_engine_goes_on(fleet: Engines) -> None:
    """vLLM's engine ends when a failed load of several groups is reported by its blocks."""
    pair, asked = fleet.pair("decode"), fresh(300)
    fleet.expect([asked], TOKENS)
    told = pair.hand_over(asked)
    wrong = told | {"kvbridge": told["kvbridge"] | {"room": "4503599627370496"}}
    fleet.assert_right([asked], [pair.decode.ask(asked, TOKENS, transfer=wrong)])
    fleet.assert_right([asked], [pair.decode.ask(asked, TOKENS, transfer=told)])


@pytest.mark.parametrize("fleet", [DRAFTS], indirect=True, scope="module")
def test_decode_drafts_tokens_that_it_finds_in_the_prompt(fleet: Engines) -> None:
    asked = [fresh(20) * times for times in range(2, 12)]
    fleet.expect(asked, 40)
    pair = fleet.pair("decode")
    for order in ("plain", "paired"):
        before = pair.decode.says()["drafted"]
        fleet.assert_right(asked, pair.ask_together(asked, 40, order=order))
        assert pair.decode.says()["drafted"] > before
        pair.decode.forget()


@whole_prompts
def test_prompts_with_logprobs_of_their_own_are_computed_whole(fleet: Engines) -> None:
    pair, asked = fleet.pair("decode"), fresh(150)
    fleet.expect([asked], TOKENS)
    held = pair.prefill.ask(asked, 1, transfer=HOLD, further={"prompt_logprobs": 1})
    got = pair.decode.ask(asked, TOKENS, transfer=held.transfer, further={"prompt_logprobs": 1})
    fleet.assert_right([asked], [got])


STRIKES: dict[str, Callable[[Engines], None]] = {
    "prefill is killed": lambda fleet: end(fleet.servers["prefill"].tree()),
    "prefill stays frozen": lambda _: None,
    "prefill's node is killed": lambda fleet: send(signal.SIGKILL, [fleet.servers["prefill"].node()]),
    "decode's node is killed": lambda fleet: send(signal.SIGKILL, [fleet.servers["decode"].node()]),
    "decode is killed": lambda fleet: end(fleet.servers["decode"].tree()),
}


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("fleet", [pytest.param("gemma", marks=SHORT), "granite"], indirect=True, scope="module")
def test_something_strikes_in_the_middle_of_a_load(fleet: Engines, strike: str) -> None:
    pair, asked = fleet.pair("decode"), fresh(300)
    fleet.expect([asked], TOKENS)
    told = pair.hand_over(asked)
    with frozen(pair.prefill.engine()), under_way([lambda: pair.decode.ask(asked, TOKENS, transfer=told)]) as [got]:
        wait_until(pair.decode.used, "decode waits for what prefill holds")
        STRIKES[strike](fleet)
        if strike == "decode is killed":
            assert got.exception(ENDS_S)
        else:
            fleet.assert_right([asked], [got.result(ENDS_S)])
    for name, server in fleet.servers.items():
        if not server.is_healthy():
            fleet.restart(name)
    fleet.wait_hand_over("decode")


WINDOW, BLOCK = 128, 32
AROUND = range(WINDOW + BLOCK - 3, WINDOW + 4 * BLOCK + 2)


@pytest.fixture
def both(setup: Setup) -> Iterator[Engines]:
    model(setup, "gpt-oss")
    transports = {"transports": {"order": ["mooncake"]}}
    nixls = [nixl_plan(f"nixl-{name}", role) for name, role in (("prefill", "producer"), ("decode", "consumer"))]
    plans = [
        plan("prefill", "gpt-oss", kvbridge("producer", **transports)),
        plan("decode", "gpt-oss", kvbridge("consumer", **transports)),
        *(replace(plan(one.name, "gpt-oss", one.transfer), environment=one.environment) for one in nixls),
    ]
    yield from running(lambda: Engines(setup, plans), "vllm")


def test_windows_beside_nixl_connector(both: Engines, setup: Setup, say: list[str]) -> None:
    asked = [fresh(tokens) for tokens in AROUND]
    rows: dict[str, list[str]] = {}
    for start in range(0, len(asked), SOME):
        some = asked[start : start + SOME]
        both.expect(some, 16)
        for name, prefill, decode in (
            ("kvbridge", "prefill", "decode"),
            ("NixlConnector", "nixl-prefill", "nixl-decode"),
        ):
            got = both.plain(some, 16, decode=decode, prefill=prefill)
            rows.setdefault(name, []).extend(both.wrong(*one) for one in zip(some, got, strict=True))
    table = page(rows)
    (setup.directory / "windows.md").write_text(table)
    say += table.splitlines()
    assert not any(rows["kvbridge"]), rows["kvbridge"]


def page(rows: dict[str, list[str]]) -> str:
    """Return the table of docs/false-hand-offs.md."""
    lines = ["| connector | prompts | wrong answers | at these lengths |", "| --- | --- | --- | --- |"]
    for name, found in rows.items():
        wrong = [tokens for tokens, what in zip(AROUND, found, strict=True) if what]
        lines.append(f"| {name} | {len(found)} | {len(wrong)} | {', '.join(map(str, wrong)) or 'none'} |")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def planned(setup: Setup) -> dict:
    """Also compares our order of blocks with vLLM's managers; see `planned.py`."""
    command = [setup.python, HERE / "planned.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


ROWS = {"Flash": 1_002_240, "Pro": 1_435_968}


@pytest.mark.parametrize("name", ["Flash", "Pro", "ring"])
def test_every_byte_of_deepseek_v4_s_rows_crosses_and_no_other_changes(planned: dict, name: str, say: list[str]):
    said = planned["places"][name]
    groups = [CacheGroup(GroupKind(kind), block, reach) for kind, block, reach in said["groups"]]
    assert said["row"] == ROWS.get(name, said["row"])

    def caches_of(pool: torch.Tensor) -> dict[str, torch.Tensor]:
        """All caches as vLLM's workers get them: over each other in the rows of one pool."""
        found = {}
        for cache in said["caches"]:
            states, size = cache["states"], cache["used"] // cache["states"]
            strides = (pool.stride(0), cache["used"], size, 1)
            found[cache["name"]] = pool.as_strided((pool.shape[0], 1, states, size), strides, cache["offset"])
        return found

    used = max(cache["offset"] + cache["used"] for cache in said["caches"])
    counts = rows_cross(groups, caches_of, (said["row"], used, said["blocks"]), [1, 255, 500, 2048])
    say.append(f"{name}: {counts} rows of {said['row']} bytes for 1, 255, 500 and 2,048 tokens")
