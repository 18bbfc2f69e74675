"""What a scrape does to a decode daemon that has much to tell: 1,000 open rooms, and 200 prefill nodes over real connections.

The 200 are control sockets in a thread of this process that welcome the daemon, acknowledge and send heartbeats; each is offered
its share of the rooms, and never sends one. Beside them a real prefill daemon and two engines move rooms of their own through the
same decode daemon, a few at once. Turns with a scrape every half second and turns without alternate.

- `scrape_ms`: from request to last byte, as Prometheus sees it.
- `callback_ms`: the longest that one callback kept the daemon's event loop, in each turn: nothing else happens there meanwhile.
  Processor time, since the cores are shared with everything else here; and by the clock.
- `commit_ms`: from the offer to the commit of the rooms that passed.

Run as `python -m tests.bench.bench_scrape [--turns 4] [--seconds 5]`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.control.link import PeerCallbacks
from kvbridge.control.peers import PeerIdentity, PeerServer
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import Heartbeat, Hello, PeerMessage, Welcome
from tests.bench.bench_load import MODEL, Tally, closed_loop
from tests.bench.load import Load, Shape, load
from tests.bench.replay.run import percentile
from tests.helpers.cluster import Cluster, cluster
from tests.helpers.live_rooms import CALL_S, http, metric
from tests.helpers.mutated_daemon import mutated

ROOMS, PEERS, AT_ONCE = 1_000, 200, 4
SCRAPE_EVERY_S = 0.5
HEARTBEAT_S = 2.0
SETTLE_S = 60.0
BUDGET_MS = 50.0
ACCEPT = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3"}
LONG = {"begin_s": 3_600, "offer_s": 3_600, "room_s": 3_600}

CODE = """
import asyncio, time

told = open({path!r}, "w", buffering=1)

def measured(call):
    def timed(*given):
        began_s, used_s = time.monotonic(), time.thread_time()
        try:
            return call(*given)
        finally:
            took_s, used_s = time.monotonic() - began_s, time.thread_time() - used_s
            if took_s >= 0.001:
                print(began_s, 1e3 * took_s, 1e3 * used_s, file=told)
    return timed

asyncio.events.Handle._run = measured(asyncio.events.Handle._run)
"""


class Peers:
    """Prefill nodes that welcome whoever says hello and then keep quiet. Everything happens in a thread and loop of their own."""

    def __init__(self, count: int) -> None:
        self.addresses: list[PeerAddress] = []
        self._opened = threading.Event()
        self._ended = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run(count)), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._opened.wait(SETTLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _run(self, count: int) -> None:
        with ExitStack() as stack:
            servers = [self._open(number) for number in range(count)]
            for server in servers:
                stack.callback(server.close)
            self.addresses = [PeerAddress(endpoint=server.endpoint) for server in servers]
            self._opened.set()
            while not self._ended.is_set():
                for server in servers:
                    for peer in server.peers:
                        server.send(peer, Heartbeat())
                await asyncio.wait({asyncio.create_task(self._ended.wait())}, timeout=HEARTBEAT_S)

    def _open(self, number: int) -> PeerServer:
        incarnation = f"{number + 1:016x}"
        welcome = Welcome(
            instance=f"silent-{number}",
            node="node-0",
            incarnation=incarnation,
            pp_size=1,
            tp_size=1,
            ranks=(Rank(pp=0, tp=0),),
        )

        def answer(peer: str, message: PeerMessage) -> None:
            if isinstance(message, Hello):
                server.send(peer, welcome)

        server = PeerServer(PeerIdentity(incarnation), PeerCallbacks(answer), "tcp://127.0.0.1:0")
        return server


def timed(daemon: DaemonProcess) -> DaemonProcess:
    """The same daemon, writing down how long its callbacks take; only decode is looked at."""
    return mutated(daemon, daemon_code=CODE.format(path=str(_times(daemon)))) if daemon.role == "decode" else daemon


def _times(daemon: DaemonProcess) -> Path:
    return daemon.folder / "times"


def run(*, turns: int = 4, seconds: float = 5.0) -> dict[str, Any]:
    """Measure: {"rooms", "peers", "page_bytes", "scrape_ms", "without": {...}, "with": {...}}."""
    pools = {"full": 2 * ROOMS, "swa": 1, "request": 1}
    host = {"pools": {"device": pools, "host": {"components": []}}, "timeouts": LONG}
    with (
        Peers(PEERS) as peers,
        cluster({"preset": MODEL}, pages=pools, decode=host, change=timed) as running,
        filled(running, peers),
    ):
        return asyncio.run(_measure(running, turns, seconds))


@contextmanager
def filled(running: Cluster, peers: Peers) -> Iterator[None]:
    """Open rooms on decode, each with one of the silent prefill nodes; and give them back."""
    for number, address in zip(range(1, ROOMS + 1), itertools.cycle(peers.addresses), strict=False):
        body = {"room": number, "prompt_tokens": 1, "prefill": [address.model_dump()]}
        http("POST", running.decode, "/v1/requests", json=body).raise_for_status()
    offered = 0.0
    until_s = time.monotonic() + SETTLE_S
    while offered < ROOMS and time.monotonic() < until_s:
        time.sleep(0.2)
        offered = metric(running.decode, "kvbridge_rooms", state="offered")
    connected = metric(running.decode, "kvbridge_peers", state="connected")
    assert (offered, connected) == (ROOMS, PEERS), f"{offered:g} rooms are offered to {connected:g} nodes"
    yield
    for number in range(1, ROOMS + 1):
        http("DELETE", running.decode, f"/v1/requests/{number}")


async def _measure(running: Cluster, turns: int, seconds: float) -> dict[str, Any]:
    numbers, found = itertools.count(1 << 20), dict[str, list[dict[str, Any]]]({"without": [], "with": []})
    scrapes: list[tuple[float, int]] = []
    async with load(running, Shape(1)) as generator:
        await closed_loop(generator, "bootstrap", AT_ONCE, 3.0, numbers)
        for turn in range(2 * turns):
            name = ("without", "with", "with", "without")[turn % 4]
            found[name].append(await _turn(generator, seconds, numbers, scrapes if name == "with" else None))
        rows = [line.split() for line in _times(running.decode).read_text().splitlines()]
    took = [seconds * 1e3 for seconds, _ in scrapes]
    told = [(float(began_s), float(took_ms), float(used_ms)) for began_s, took_ms, used_ms in rows]
    return {
        "rooms": ROOMS,
        "peers": PEERS,
        "page_bytes": scrapes[-1][1],
        "scrape_ms": _spread(took),
        **{name: _of_turns(cases, told) for name, cases in found.items()},
    }


async def _turn(
    generator: Load, seconds: float, numbers: itertools.count[int], scrapes: list[tuple[float, int]] | None
) -> dict[str, Any]:
    began_s, tally = time.monotonic(), Tally()

    async def scrape() -> None:
        while scrapes is not None:
            await asyncio.sleep(SCRAPE_EVERY_S)
            scrapes.append(await asyncio.to_thread(_scrape, generator.cluster.decode))

    beside = asyncio.create_task(scrape())
    case = await closed_loop(generator, "bootstrap", AT_ONCE, seconds, numbers, tally=tally)
    beside.cancel()
    await asyncio.wait({beside})
    commits = [life.all_phases_s["offer_to_commit"] * 1e3 for life in tally.lives]
    return {"began_s": began_s, "ended_s": time.monotonic(), "commits_ms": commits, "rooms_s": case["rooms_s"]}


def _scrape(daemon: DaemonProcess) -> tuple[float, int]:
    with httpx.Client(headers=ACCEPT, timeout=CALL_S, trust_env=False, verify=False) as client:
        client.get(f"{daemon.url}/health")  # Prometheus keeps its connections, too
        began_s = time.perf_counter()
        answer = client.get(f"{daemon.url}/metrics")
        answer.raise_for_status()
        return time.perf_counter() - began_s, len(answer.content)


def _of_turns(cases: list[dict[str, Any]], told: list[tuple[float, float, float]]) -> dict[str, Any]:
    longest, used = [], []
    for case in cases:
        mine = [row for row in told if case["began_s"] <= row[0] <= case["ended_s"]]
        longest.append(max((took_ms for _, took_ms, _ in mine), default=0.0))
        used.append(max((used_ms for _, _, used_ms in mine), default=0.0))
    return {
        "rooms_s": statistics.median(case["rooms_s"] for case in cases),
        "commit_ms": _spread([each for case in cases for each in case["commits_ms"]]),
        "callback_ms": {"processor": _spread(used), "clock": _spread(longest)},
    }


def _spread(figures: list[float]) -> dict[str, float]:
    ordered = sorted(figures)
    return {
        "count": len(ordered),
        "median": percentile(ordered, 50),
        "p99": percentile(ordered, 99),
        "most": ordered[-1],
    }


def table(found: dict[str, Any]) -> str:
    """The figures for a reader."""
    lines = [
        f"a decode daemon with {found['rooms']} rooms and {found['peers']} connected prefill nodes; ms: median / p99 / most",
        f"  scrape of {found['page_bytes']:,} bytes (budget {BUDGET_MS:.0f} ms): {_row(found['scrape_ms'])}",
    ]
    for name in ("without", "with"):
        case = found[name]
        lines.append(
            f"  {name} scrapes: {case['rooms_s']:.0f} rooms/s, commit {_row(case['commit_ms'])}; longest callback of a turn "
            f"{_row(case['callback_ms']['processor'])} processor time, {_row(case['callback_ms']['clock'])} by the clock"
        )
    return "\n".join(lines)


def _row(figures: dict[str, float]) -> str:
    return f"{figures['median']:.1f} / {figures['p99']:.1f} / {figures['most']:.1f} of {figures['count']}"


def main() -> None:
    """Print a table, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=4, help="with scrapes and without, each")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each turn")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    found = run(turns=given.turns, seconds=given.seconds)
    print(json.dumps(found, indent=1) if given.json else table(found))


if __name__ == "__main__":
    main()
