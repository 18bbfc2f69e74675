"""What digests cost: checksums a second on one core, and bytes a second through two daemons with digests and without.

Run as `python -m tests.bench.bench_digest`; `run` gives the same as JSON-able data.

The first part computes the digests of a request over scattered pages as a rank worker does, against the bare `crc32c` library
over as many bytes in one piece and against a copy of them, all in turns. The second sends the same request through two
clusters that differ in `integrity.digest` only, room by room in turns, so the machine's moods meet both; the request is published
before decode admits it, and the time is decode's own from its offer to its commit. Both daemons share this machine's cores.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
from crc32c import crc32c

from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import UNSHARED, held_groups
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.worker.digests import DigestWork
from tests.helpers.cluster import Cluster, cluster
from tests.helpers.manifests import Instance

MODEL = "deepseek-v4-flash"
TOKENS = (256, 8_192, 32_768)
END_TO_END_TOKENS = (256, 8_192)
TRANSPORTS = ("local", "mooncake")
TURNS = 7
CLAIM_S = 30.0


def run(*, turns: int = TURNS, transports: tuple[str, ...] = TRANSPORTS) -> dict[str, Any]:
    """Measure and return {"turns", "model", "compute": [...], "end_to_end": [...]}; rates in GB/s, times in ms."""
    return {
        "turns": turns,
        "model": MODEL,
        "compute": [_compute(tokens, turns) for tokens in TOKENS],
        "end_to_end": [case for transport in transports for case in _end_to_end(transport, turns)],
    }


# ------------------------------------------------------------------------------------------- one core


def _compute(tokens: int, turns: int) -> dict[str, Any]:
    geometry = preset(MODEL)
    pages = -(-tokens // geometry.tokens_per_page)
    counts = {IndexSpace.FULL: pages, IndexSpace.SWA: 4, IndexSpace.REQUEST: 1}
    largest = max(Instance(geometry, counts, base=0).manifests()[0].regions, key=lambda one: one.extent_addresses[-1])
    size = largest.extent_addresses[-1] + largest.page_count * largest.page_stride_bytes
    random = np.random.default_rng(3)
    memory = random.integers(0, 256, size, dtype=np.uint8)
    [manifest] = Instance(geometry, counts, base=memory.ctypes.data).manifests()
    groups = held_groups(geometry, manifest, host_share=UNSHARED)
    first = (tokens - 128) // geometry.tokens_per_page
    tables = {
        space: PageTable(space, random.permutation(count).astype(np.int32), first if space is IndexSpace.SWA else 0)
        for space, count in counts.items()
    }
    section = Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)
    live_bytes = sum(
        part.live_rows(tokens).count * part.row_bytes * part.lanes * len(part.layers) for part in geometry.components
    )
    stretch, copy = memory[:live_bytes], np.empty(live_bytes, dtype=np.uint8)

    def digests() -> None:
        work = DigestWork(geometry, groups, section, tables, tables)
        while not work.step():
            pass

    ways = {"digest": digests, "crc32c": lambda: crc32c(stretch), "copy": lambda: np.copyto(copy, stretch)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            begun_s = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begun_s)
    ratios = [bare / ours for bare, ours in zip(seconds["crc32c"], seconds["digest"], strict=True)]
    return {
        "tokens": tokens,
        "bytes": live_bytes,
        "digest_ms": statistics.median(seconds["digest"]) * 1e3,
        "gb_s": {name: live_bytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()},
        "of_crc32c": statistics.median(ratios),
    }


# ------------------------------------------------------------------------------------------- two daemons


class _Side:
    """A cluster with or without digests, and its engines."""

    def __init__(self, transport: str, digest: str, stack: ExitStack) -> None:
        pages = {"full": -(-max(END_TO_END_TOKENS) // 256) + 2, "swa": 8, "request": 2}
        self._cluster: Cluster = stack.enter_context(
            cluster(
                {"preset": MODEL},
                transport=transport,
                pages=pages,
                host_pages=pages["full"],
                decode={"integrity": {"digest": digest}},
            )
        )
        self._prefill = stack.enter_context(PrefillEngine.attach(self._cluster.prefill.runtime_dir))
        self._decode = stack.enter_context(DecodeEngine.attach(self._cluster.decode.runtime_dir))
        self._client = stack.enter_context(httpx.Client(timeout=CLAIM_S))

    def cross(self, room: int, tokens: int) -> dict[str, float]:
        """Take a room across; returns decode's phases in seconds, and `bytes`."""
        self._prefill.admit(room, prompt_tokens=tokens)
        self._prefill.begin(room, prompt_tokens=tokens)
        self._prefill.publish(room, tokens)
        self._prefill.finish(room)
        control = self._cluster.prefill.endpoint().control
        assert control is not None
        body = {"room": room, "prompt_tokens": tokens, "prefill": [control.model_dump()]}
        self._client.post(f"{self._cluster.decode.url}/v1/requests", json=body).raise_for_status()
        claimed = self._decode.wait_claim(room, timeout_s=CLAIM_S)
        self._decode.release(room)
        return claimed.phases_s | {"bytes": sum(amount.bytes for amount in claimed.amounts.values())}


def _end_to_end(transport: str, turns: int) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        sides = {digest: _Side(transport, digest, stack) for digest in ("none", "crc32c")}
        cases = []
        for tokens in END_TO_END_TOKENS:
            taken: dict[str, list[dict[str, float]]] = {digest: [] for digest in sides}
            for turn in range(turns + 1):
                for digest, side in sides.items():
                    phases = side.cross(tokens * 1_000 + turn, tokens)
                    if turn:  # the first one warms up
                        taken[digest].append(phases)
            cases.append(_case(transport, tokens, taken))
    return cases


def _case(transport: str, tokens: int, taken: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    commits_s = {digest: [phases["offer_to_commit"] for phases in rooms] for digest, rooms in taken.items()}
    ratios = [plain / checked for plain, checked in zip(commits_s["none"], commits_s["crc32c"], strict=True)]
    moved = taken["none"][0]["bytes"]
    return {
        "transport": transport,
        "tokens": tokens,
        "bytes": moved,
        "commit_ms": {digest: statistics.median(seconds) * 1e3 for digest, seconds in commits_s.items()},
        "gb_s": {digest: moved / statistics.median(seconds) / 1e9 for digest, seconds in commits_s.items()},
        "of_none": statistics.median(ratios),
        "digest_ms": statistics.median(phases["digest"] for phases in taken["crc32c"]) * 1e3,
        "verify_ms": statistics.median(phases["verify"] for phases in taken["crc32c"]) * 1e3,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures of `run` for a reader."""
    lines = [f"{'tokens':>7} {'MB':>7} {'digest ms':>9} {'digest GB/s':>11} {'crc32c GB/s':>11} {'copy GB/s':>9} ratio"]
    lines += [
        f"{case['tokens']:>7} {case['bytes'] / 1e6:>7.1f} {case['digest_ms']:>9.2f} {case['gb_s']['digest']:>11.2f} "
        f"{case['gb_s']['crc32c']:>11.2f} {case['gb_s']['copy']:>9.2f} {case['of_crc32c']:.2f}"
        for case in figures["compute"]
    ]
    head = f"{'transport':<10} {'tokens':>7} {'MB':>7} {'none ms':>8} {'crc32c ms':>9} {'none GB/s':>9} {'crc32c GB/s':>11} "
    lines += ["", f"{head}{'ratio':>5} {'digest ms':>9} {'verify ms':>9}"]
    lines += [
        f"{case['transport']:<10} {case['tokens']:>7} {case['bytes'] / 1e6:>7.1f} {case['commit_ms']['none']:>8.2f} "
        f"{case['commit_ms']['crc32c']:>9.2f} {case['gb_s']['none']:>9.2f} {case['gb_s']['crc32c']:>11.2f} "
        f"{case['of_none']:>5.2f} {case['digest_ms']:>9.2f} {case['verify_ms']:>9.2f}"
        for case in figures["end_to_end"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run()))
