"""Rooms whose prompts begin with pages that both nodes have, with real daemons: what keys cost, and what a hit is worth.

- *Rooms a second*: hardly any payload, keys and index on, against the same with `tier.enabled` off. Either way a room sends the
  rows of 64 tokens, which its engine fills; with keys its prompt has two pages in front of them that are cached on both sides.
- *A long prompt, mostly held*: DeepSeek-V4-Flash, 131,072 tokens of which 122,880 are cached on both sides, against a prompt of
  8,192 tokens of which nothing is. Both send 8,192 tokens, published before decode offers; the time is from offer to commit.

The two sides of a comparison take turns, and the ratio is that of their medians. Run as `python -m tests.bench.bench_shared_rooms`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.plan.operations import Section
from kvbridge.tier.keys import NO_KEYS, Keys, PrefixIdentity, page_keys
from tests.bench.bench_load import Tally, closed_loop
from tests.bench.load import Shape, load
from tests.bench.shared_prompts import SHARED_TOKENS, prompt
from tests.helpers import synthetic
from tests.helpers.cluster import cluster
from tests.helpers.live_rooms import LiveCluster, http

SMALL, LARGE, REVISION = "tiny-gqa", "deepseek-v4-flash", "1"
OWN_TOKENS = 64
"""Of a prompt of `shared_prompts`: what is behind its two whole pages."""
CONCURRENCY, SECONDS, TURNS = 16, 4.0, 5
PAGES = 512
LONG_TOKENS, HELD_TOKENS, SHORT_TOKENS = 131_072, 122_880, 8_192
REQUESTS = 9
BUDGET_RATE, BUDGET_LATENCY = 0.95, 1.2


def tier(model: str, *, enabled: bool) -> dict[str, Any]:
    """A node's configuration."""
    return {"tier": {"enabled": enabled, "model_name": model, "model_revision": REVISION}}


def run(*, seconds: float = SECONDS, turns: int = TURNS, requests: int = REQUESTS) -> dict[str, Any]:
    """Measure both; JSON-able."""
    return {"rooms": asyncio.run(rates(seconds, turns)), "long_prompt": long_prompt(requests)}


# ------------------------------------------------------------------------------------------- rooms a second


async def rates(seconds: float, turns: int) -> dict[str, Any]:
    """Return rooms a second, and processor seconds of both daemons for a room, with and without keys."""
    geometry = preset(SMALL)
    page = geometry.tokens_per_page
    identity = PrefixIdentity(model=SMALL, revision=REVISION, fingerprint=fingerprint(geometry), tokens_per_page=page)
    shapes = {
        False: Shape(OWN_TOKENS, keys=lambda _: NO_KEYS),
        True: Shape(SHARED_TOKENS, keys=lambda room: page_keys(identity, prompt(room, SHARED_TOKENS)), all_shared=True),
    }
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(turns):
        for on, shape in shapes.items():
            found[on].append(await _rate(shape, seconds, on=on))
    rooms_s = {on: statistics.median(turn["rooms_s"] for turn in each) for on, each in found.items()}
    cpu_ms = {on: statistics.median(turn["cpu_ms"] for turn in each) for on, each in found.items()}
    return {
        "off": {"rooms_s": rooms_s[False], "daemons_cpu_ms": cpu_ms[False]},
        "on": {"rooms_s": rooms_s[True], "daemons_cpu_ms": cpu_ms[True]},
        "held_tokens": min(turn["held_tokens"] for turn in found[True]),
        "rate_ratio": rooms_s[True] / rooms_s[False],
        "cpu_ratio": cpu_ms[False] / cpu_ms[True],
        "turns": found,
        "budget": BUDGET_RATE,
    }


async def _rate(shape: Shape, seconds: float, *, on: bool) -> dict[str, Any]:
    pools = {"full": PAGES, "swa": 1, "request": 1}
    node = tier(SMALL, enabled=on)
    host = {"pools": {"device": pools, "host": {"components": []}}}
    numbers = itertools.count(1)
    with cluster({"preset": SMALL}, pages=pools, prefill=node, decode=node | host) as running:
        async with load(running, shape) as generator:
            await closed_loop(generator, "daemons", 4, 1.0, numbers)  # the prefixes come, and code that runs first
            tally = Tally()
            summary = await closed_loop(generator, "daemons", CONCURRENCY, seconds, numbers, tally)
    if summary["lost"] or not tally.lives:
        raise RuntimeError(f"rooms were lost: {summary['lost']}")
    nodes = sum(share for name, share in summary["cpu"].items() if name in {"prefill node", "decode node"})
    return {
        "rooms_s": summary["rooms_s"],
        "cpu_ms": 1e3 * nodes / summary["rooms_s"],
        "held_tokens": min(life.held_tokens for life in tally.lives),
    }


# ------------------------------------------------------------------------------------------- a long prompt


@dataclass
class _Prompts:
    """Long prompts that share all but their end, and short ones that share nothing."""

    live: LiveCluster
    _numbers: itertools.count[int]

    def long(self) -> tuple[int, Keys]:
        tokens = np.arange(LONG_TOKENS, dtype=np.uint32)
        tokens[HELD_TOKENS:] += np.uint32(LONG_TOKENS * next(self._numbers))
        return LONG_TOKENS, self.live.sender.page_keys(tokens)

    def short(self) -> tuple[int, Keys]:
        return SHORT_TOKENS, NO_KEYS

    def seed(self) -> tuple[int, Keys]:
        """What the long ones begin with."""
        return HELD_TOKENS, self.live.sender.page_keys(np.arange(HELD_TOKENS, dtype=np.uint32))

    def cross(self, made: tuple[int, Keys], *, held: int) -> float:
        """Take a room through its life: milliseconds from offer to commit."""
        (tokens, keys), sender = made, self.live.sender
        room = next(self._numbers)
        hashes = {"page_hashes": base64.b64encode(keys.data).decode()} if keys else {}
        sender.admit(room, prompt_tokens=tokens, page_hashes=keys)
        begun = sender.begin(room, prompt_tokens=tokens, page_hashes=keys)
        section = Section(prompt_tokens=tokens, start_token=begun.computed_tokens, stop_token=tokens)
        for view in sender.views.values():
            synthetic.fill(view, room=room, tables=begun.tables, section=section, keys=keys)
        sender.publish(room, tokens)
        sender.finish(room, checkpoints=())
        body = {"room": room, "prompt_tokens": tokens, "prefill": [self.live.address], **hashes}
        http("POST", self.live.decode, "/v1/requests", json=body).raise_for_status()
        claimed = self.live.reader.wait_claim(room, 60.0, page_hashes=keys)
        self.live.reader.release(room)
        if (claimed.prefix_tokens, begun.computed_tokens) != (held, held):
            raise RuntimeError(
                f"held {claimed.prefix_tokens}, computed {begun.computed_tokens}, expected {held} of {tokens}"
            )
        return 1e3 * claimed.phases_s["offer_to_commit"]


def long_prompt(requests: int) -> dict[str, Any]:
    """Return milliseconds from offer to commit of both prompts: medians, least, and the ratio."""
    page = preset(LARGE).tokens_per_page
    pages = (LONG_TOKENS + 4 * SHORT_TOKENS) // page
    pools = {"full": pages, "swa": 16, "request": 4}
    node = tier(LARGE, enabled=True)
    with cluster({"preset": LARGE}, pages=pools, host_pages=pages, prefill=node, decode=node) as running:
        live = LiveCluster(running)
        try:
            prompts = _Prompts(live, itertools.count(1))
            prompts.cross(prompts.seed(), held=0)
            cases: dict[str, tuple[Callable[[], tuple[int, Keys]], int]] = {
                "short": (prompts.short, 0),
                "long": (prompts.long, HELD_TOKENS),
            }
            times: dict[str, list[float]] = {name: [] for name in cases}
            for turn in range(requests + 1):
                for name, (make, held) in cases.items():
                    took_ms = prompts.cross(make(), held=held)
                    if turn:  # the first of each is the first to do all that
                        times[name].append(took_ms)
        finally:
            live.detach()
    return {
        **{name: {"median_ms": statistics.median(each), "best_ms": min(each)} for name, each in times.items()},
        "ratio": statistics.median(times["long"]) / statistics.median(times["short"]),
        "tokens": {"long": LONG_TOKENS, "held": HELD_TOKENS, "short": SHORT_TOKENS},
        "budget": BUDGET_LATENCY,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures of `run` for a reader."""
    rooms, long = figures["rooms"], figures["long_prompt"]
    lines = [f"{'':<10} {'rooms/s':>8} {'daemons, ms of processor a room':>32}"]
    lines += [
        f"keys {name:<5} {rooms[name]['rooms_s']:>8.0f} {rooms[name]['daemons_cpu_ms']:>32.2f}"
        for name in ("off", "on")
    ]
    lines.append(
        f"on against off: {rooms['rate_ratio']:.2f} in rooms/s, {rooms['cpu_ratio']:.2f} in processor time "
        f"(budget {rooms['budget']}); {rooms['held_tokens']} tokens held"
    )
    lines += ["", f"{'offer to commit':<34} {'median ms':>10} {'best ms':>8}"]
    prompts = {"short": f"{SHORT_TOKENS:,} tokens, none held", "long": f"{LONG_TOKENS:,} tokens, {HELD_TOKENS:,} held"}
    for name, what in prompts.items():
        lines.append(f"{what:<34} {long[name]['median_ms']:>10.1f} {long[name]['best_ms']:>8.1f}")
    lines.append(f"ratio {long['ratio']:.2f} (budget {long['budget']})")
    return "\n".join(lines)


def main() -> None:
    """Print a table, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    figures = run()
    print(json.dumps(figures, indent=1) if parser.parse_args().json else table(figures))


if __name__ == "__main__":
    main()
