"""Bytes a second between pools that have long been full of cached pages, against empty ones, in the same run.

Owns: the page lists of both and the comparison. Run as `python -m tests.bench.bench_used_pools [--trace FILE] [backend ...]`.

Two page books with their prefix caches, a prefill and a decode node's, are led through the requests of a trace (or of conversations
that are made up) until both have been full for `SETTLED` requests. The pages that the next requests get there are moved for real,
and the same requests again between pages as empty pools would give them; both ways take turns. Bytes of a page are those of one C4,
one indexer and one C128 layer of DeepSeek-V4-Flash: operations have the sizes of the whole model's, whose 61 layers would not fit.
`busy` is the ratio of bytes for each second of processor time that both ends had: on a machine that others use, too, it says more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.cli.trace import prompt_tokens, read_trace
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import Operations
from kvbridge.pool.accounts.book import PageBook
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.bench.bench_transport import LIBRARIES, SETTINGS, Bed, through_kvbridge
from tests.contract.harness import Backend, PeerProcess
from tests.helpers.connecting import connect
from tests.helpers.shared_buffer import SharedBuffer

FULL = IndexSpace.FULL
PAGE_TOKENS = 256
LAYER_BYTES = (37_440, 8_448, 1_728)
"""Of a page: C4 rows, indexer rows, C128 rows."""
PAGES = 17_210
"""Of each pool: 16 GiB of the whole model."""
SETTLED = 1000
MEASURED = 40
CHUNKS_TOKENS = (8192, 1 << 30)
"""What an engine publishes at a time; the second: all at once."""
IN_FLIGHT = {"prefill": 2, "decode": 8}
BUDGET = 0.8

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prompt:
    """One request."""

    keys: Keys
    tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Sent:
    """What of one request goes from pages of one pool to pages of the other, page by page."""

    source: Ids
    destination: Ids


class Node:
    """One node's pool as requests come and go."""

    def __init__(self, *, keeps_output: bool, in_flight: int) -> None:
        self.book = PageBook({FULL: PAGES})
        self.cache = PrefixCache(self.book, PrefixIndex([FULL], PAGES), clock=itertools.count(1.0).__next__)
        self._keeps_output, self._in_flight = keeps_output, in_flight
        self._open: deque[str] = deque()

    def serve(self, number: int, prompt: Prompt) -> tuple[int, npt.NDArray[np.int32]]:
        """Return how many pages of the prompt were there, and the ones of the others."""
        while len(self._open) >= self._in_flight:
            owner = self._open.popleft()
            self.cache.let_go(owner)
            self.book.free(owner)
        owner = f"room {number}"
        tokens = prompt.tokens + prompt.output_tokens * self._keeps_output
        admitted = self.cache.admit(owner, prompt.keys, lambda held: {FULL: -(-tokens // PAGE_TOKENS) - held})
        held, own = admitted.prefix_pages, admitted.own[FULL]
        self.cache.keep(owner, prompt.keys, held, {FULL: own[: len(prompt.keys) - held]})
        self._open.append(owner)
        return held, np.concatenate((admitted.prefix[FULL], own))[: -(-prompt.tokens // PAGE_TOKENS)]


def used_pools(prompts: Iterable[Prompt]) -> list[Sent]:
    """Lead both pools through the requests; return what the last `MEASURED` of them send."""
    nodes = {role: Node(keeps_output=role == "decode", in_flight=count) for role, count in IN_FLIGHT.items()}
    full_since, found = None, []
    for number, prompt in enumerate(prompts):
        if -(-(prompt.tokens + prompt.output_tokens) // PAGE_TOKENS) > PAGES // 4:
            continue
        (_, source), (held, destination) = (node.serve(number, prompt) for node in nodes.values())
        if full_since is None and all(node.cache.gone() for node in nodes.values()):
            full_since = number
        if full_since is not None and number >= full_since + SETTLED and len(destination) > held:
            found.append(Sent(source[held:].astype(np.int64), destination[held:].astype(np.int64)))
            if len(found) == MEASURED:
                return found
    raise ValueError(f"too few requests: pools of {PAGES} pages were full since request {full_since}")


def empty_pools(used: list[Sent]) -> list[Sent]:
    """The same requests with pages as empty pools give them, wherever those are."""
    rng = np.random.default_rng(11)
    found = []
    for sent in used:
        count = len(sent.source)
        first, second = rng.integers(0, PAGES - count, 2)
        found.append(Sent(np.arange(first, first + count), np.arange(second, second + count)))
    return found


def cuts(sent: Sent, chunk_tokens: int) -> Ids:
    """Where operations of a request begin, as places in its page lists."""
    together = (np.diff(sent.source) == 1) & (np.diff(sent.destination) == 1)
    together &= np.arange(1, len(sent.source)) % (chunk_tokens // PAGE_TOKENS) != 0
    return np.concatenate(([0], np.flatnonzero(~together) + 1))


def operations(sent: Sent, chunk_tokens: int, bases: tuple[int, int]) -> Operations:
    """What moves for one request, in all layers."""
    starts = cuts(sent, chunk_tokens)
    counts = np.diff(np.append(starts, len(sent.source)))
    offset, parts = 0, []
    for page_bytes in LAYER_BYTES:
        source, destination = (
            base + offset + ids[starts] * page_bytes
            for base, ids in zip(bases, (sent.source, sent.destination), strict=True)
        )
        parts.append((source, destination, counts * page_bytes))
        offset += PAGES * page_bytes
    return Operations(*(np.concatenate(column).astype(np.uint64) for column in zip(*parts, strict=True)))


def run(*, backends: tuple[str, ...] = tuple(LIBRARIES), turns: int = 9, trace: Path | None = None) -> dict[str, Any]:
    """Measure: {"turns", "requests", "trace", "budget", "cases": [{backend, chunk_tokens, pages_in_a_run, gb_s, ratio, ...}]}."""
    used = used_pools(_read(trace) if trace else conversations())
    pools = {"empty": empty_pools(used), "used": used}
    cases = []
    for name in backends:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-bench-") as directory:
            cases += _run_backend(name, Path(directory), pools, turns)
    return {
        "turns": turns,
        "requests": MEASURED,
        "settled": SETTLED,
        "pages": PAGES,
        "trace": trace.name if trace else "",
        "budget": BUDGET,
        "cases": cases,
    }


def _run_backend(name: str, directory: Path, pools: dict[str, list[Sent]], turns: int) -> list[dict[str, Any]]:
    backend = Backend(name, name, SETTINGS, LIBRARIES[name])
    total_bytes = PAGES * sum(LAYER_BYTES)
    source = SharedBuffer(directory / "source", total_bytes)
    with PeerProcess(backend, directory / "target", total_bytes) as target:
        endpoint = target.endpoint
        transport = backend.create()
        try:
            transport.register([source.memory()])
            bed = Bed(transport, connect(transport, endpoint), source, target)
            processes = (os.getpid(), target.pid)
            return [_run_case(bed, chunk, pools, turns, processes) for chunk in CHUNKS_TOKENS]
        finally:
            transport.close()


def _run_case(
    bed: Bed, chunk_tokens: int, pools: dict[str, list[Sent]], turns: int, processes: tuple[int, ...]
) -> dict[str, Any]:
    bases = (bed.source.address, bed.target.address)
    longest_tokens = bed.transport.max_operation_bytes // max(LAYER_BYTES) * PAGE_TOKENS  # as the planner cuts
    at_once = min(chunk_tokens, longest_tokens)
    moves = {name: [operations(sent, at_once, bases) for sent in lists] for name, lists in pools.items()}
    for each in itertools.chain(*moves.values()):
        _fill(bed, each)
    rates: dict[str, list[float]] = {name: [] for name in moves}
    busy: dict[str, list[float]] = {name: [] for name in moves}
    for turn in range(turns + 1):
        for name in sorted(moves, reverse=bool(turn % 2)):
            took_s = busy_s = 0.0
            for each in moves[name]:
                begun_s, busy_before_s = time.perf_counter(), _busy_s(processes)
                through_kvbridge(bed, each)
                took_s += time.perf_counter() - begun_s
                busy_s += _busy_s(processes) - busy_before_s
                _verify(bed, each)
            if turn:  # the first turn opens connections
                moved_gb = sum(each.total_bytes for each in moves[name]) / 1e9
                rates[name].append(moved_gb / took_s)
                busy[name].append(moved_gb / busy_s)
    ratios, busy_ratios = (
        [used / empty for used, empty in zip(each["used"], each["empty"], strict=True)] for each in (rates, busy)
    )
    pages = sum(len(sent.source) for sent in pools["used"])
    return {
        "backend": bed.transport.name,
        "chunk_tokens": chunk_tokens,
        "pages": pages,
        "pages_in_a_run": {
            name: pages / sum(len(cuts(sent, at_once)) for sent in lists) for name, lists in pools.items()
        },
        "gb_s": rates,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "gb_busy_s": busy,
        "busy_ratio": statistics.median(busy_ratios),
        "busy_ratios": busy_ratios,
    }


def _busy_s(processes: tuple[int, ...]) -> float:
    """Processor time that all threads of both ends have had."""
    found = 0
    for process in processes:
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += int((thread / "schedstat").read_text().split()[0])
    return found / 1e9


def _fill(bed: Bed, moved: Operations) -> None:
    """Give all pages that an operation reads or writes their bytes, so that they exist before anything is measured."""
    pattern = np.random.default_rng(0).integers(0, 256, int(moved.length.max()), dtype=np.uint8)
    for source, target, length in zip(*_places(bed, moved), moved.length.tolist(), strict=True):
        bed.source.bytes[source : source + length] = pattern[:length]
        bed.target.buffer.bytes[target : target + length] = ~pattern[:length]


def _verify(bed: Bed, moved: Operations) -> None:
    """Look at the ends of each operation, and spoil them for the next turn."""
    source, target = _places(bed, moved)
    for within in (0, moved.length.astype(np.int64) - 1):
        same = bed.source.bytes[source + within] == bed.target.buffer.bytes[target + within]
        assert same.all(), f"{bed.transport.name} did not deliver the bytes"
        bed.target.buffer.bytes[target + within] = ~bed.source.bytes[source + within]


def _places(bed: Bed, moved: Operations) -> tuple[Ids, Ids]:
    """Where operations read and write, from the beginning of both buffers."""
    source, target = moved.source - np.uint64(bed.source.address), moved.destination - np.uint64(bed.target.address)
    return source.astype(np.int64), target.astype(np.int64)


# ------------------------------------------------------------------------------------------- requests


def conversations() -> Iterator[Prompt]:
    """Without end: eighty conversations at a time, in no order; a turn adds some thousand tokens."""
    rng = np.random.default_rng(3)
    identity = PrefixIdentity(model="m", revision="r", fingerprint="f", tokens_per_page=PAGE_TOKENS)
    talks: list[list[int]] = []
    for number in itertools.count(1):
        if len(talks) < 80:
            talks.append([number] * int(rng.integers(2, 12)))
        talk = talks[int(rng.integers(len(talks)))]
        talk += [number] * int(rng.geometric(1 / 30))
        tokens = len(talk) * 512 + int(rng.integers(512))
        pages = np.repeat(np.array(talk, dtype=np.uint32), 512)
        yield Prompt(page_keys(identity, pages), tokens, int(rng.integers(16, 800)))
        if rng.random() < 0.4:
            talks.remove(talk)


def _read(path: Path) -> Iterator[Prompt]:
    identity = PrefixIdentity(model="m", revision="r", fingerprint="f", tokens_per_page=PAGE_TOKENS)
    for number, request in enumerate(read_trace(path)):
        keys = page_keys(identity, prompt_tokens(request, number))
        yield Prompt(keys, request.input_length, request.output_length)


def table(found: dict[str, Any]) -> str:
    """The result as plain text."""
    heading = f"{'backend':9} {'published':>10} {'pages in a run':>15} {'GB/s empty':>11} {'used':>6} {'ratio':>6} {'busy':>6}"
    lines = [f"{heading} (budget {BUDGET})"]
    for case in found["cases"]:
        runs = case["pages_in_a_run"]
        rates = {name: statistics.median(each) for name, each in case["gb_s"].items()}
        lines.append(
            f"{case['backend']:9} {_chunk(case['chunk_tokens']):>10} {runs['empty']:6.1f} -> {runs['used']:5.1f} "
            f"{rates['empty']:11.2f} {rates['used']:6.2f} {case['ratio']:6.2f} {case['busy_ratio']:6.2f}"
        )
    return "\n".join(lines)


def _chunk(tokens: int) -> str:
    return str(tokens) if tokens < CHUNKS_TOKENS[-1] else "at once"


def main() -> None:
    """Print a table, or with --json the whole result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="*", choices=[[], *LIBRARIES], default=[])
    parser.add_argument("--trace", type=Path, help="requests, as `kvbridge replay` takes them; made up without it")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = run(backends=tuple(given.backends) or tuple(LIBRARIES), turns=given.turns, trace=given.trace)
    print(json.dumps(found, indent=1) if given.json else table(found))


if __name__ == "__main__":
    main()
