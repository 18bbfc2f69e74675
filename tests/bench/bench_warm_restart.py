"""A prefill daemon that is killed and started again: until its first prompt is found again, against a start with nothing.

Owns: one daemon with DeepSeek-V4-Flash pages on the host, how they come there, the kill and what follows. Run as
`python -m tests.bench.bench_warm_restart [--size-gib N] [--turns N] [--json FILE]`.

The pages come to the host as always: rooms are begun, published and given up, and what they leave is backed up. Then the daemon
gets SIGKILL and starts again at once. The time is from the kill until an engine, attached anew, has begun a prompt. Warm: one of
the first that came, which has to come from the host. Empty: with the kept files removed in between, so that pools are made anew.
Starting interpreters and importing is in both. Both take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvbridge.cli.local_cluster import DaemonProcess, daemon_config
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Role
from kvbridge.daemon.memory import file_prefix
from kvbridge.engine import PrefillEngine, PrefillRoom
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import status

MODEL = "deepseek-v4-flash"
PAGE = preset(MODEL).tokens_per_page
ROOM_PAGES = 32
SIZE_GIB = 8.0
TURNS = 3
BUDGET_S = 10.0
WAIT_S = 40.0


def configuration(folder: Path, size_gib: float, instance: str) -> dict[str, Any]:
    """One node with room on the device for three prompts, and on the host for the given size."""
    checkpoints = int(size_gib * 1024 / ROOM_PAGES) + 8
    host = {"size_bytes": int(size_gib * 2**30), "checkpoint_pages": checkpoints, "layout": "page_first"}
    return daemon_config(
        {"preset": MODEL},
        instance=instance,
        runtime_dir=folder / "run",
        transport="local",
        pools={"device": {"full": 3 * ROOM_PAGES, "swa": 12, "request": 4}, "keep_s": 600},
        tier={"enabled": True, "model_name": "bench", "model_revision": "1", "host": host},
    )


class Bench:
    """A daemon, its engine, and prompts that are known by their number."""

    def __init__(self, daemon: DaemonProcess, instance: str) -> None:
        self.daemon, self._instance = daemon, instance
        self.engine = self._attached()
        self._room = 0

    def _attached(self) -> PrefillEngine:
        self.daemon.wait_ready(WAIT_S)
        return PrefillEngine.attach(self.daemon.runtime_dir)

    def begin(self, number: int) -> tuple[int, PrefillRoom]:
        """Admit a prompt and begin it."""
        self._room += 1
        tokens = ROOM_PAGES * PAGE + 1
        keys = self.engine.page_keys(number * 1_000_000 + np.arange(tokens))
        self.engine.admit(self._room, prompt_tokens=tokens, page_hashes=keys)
        return self._room, self.engine.begin(self._room, prompt_tokens=tokens, page_hashes=keys)

    def leave(self, number: int) -> None:
        """Let a prompt come and go."""
        room, begun = self.begin(number)
        for stop in sorted({*begun.checkpoints, begun.prompt_tokens}):
            self.engine.publish(room, stop)
        self.engine.finish(room, checkpoints=list(begun.checkpoints))
        self.engine.abort(room, "its pages stay")

    def fill(self) -> int:
        """Let prompts come until the host is full; return how many there were."""
        for views in self.engine.views.values():
            for region in views.regions:
                for page_id in range(region.page_count):
                    page = views.page(region.component, region.layer, space=region.space, page_id=page_id)
                    page.view(torch.uint8).random_(0, 256)
        prompts = sum(status(self.daemon)["pools"]["full_twin"].values()) // ROOM_PAGES - 1  # none is evicted
        for number in range(prompts):
            self.leave(number)
            if number % 2:
                eventually("backed up", self._settled)
        eventually("in the journal", lambda: self.journal_bytes() >= prompts * ROOM_PAGES * 64)
        return prompts

    def _settled(self) -> int:
        found = status(self.daemon)["host_tier"]
        busy = found["waiting_prompts"] or found["in_flight_pages"] or found["device_pages"]
        return 0 if busy else int(found["both_pages"] + found["host_pages"])

    def files(self) -> list[Path]:
        """What is kept."""
        prefix = file_prefix(self._instance, f"{Role.PREFILL}-node-0")
        return list(DEFAULT_DIRECTORY.glob(f"{prefix}keep*"))

    def journal_bytes(self) -> int:
        """How long the journal is."""
        return sum(path.stat().st_size for path in self.files() if path.name.endswith(".journal"))

    def restart(self, *, warm: bool) -> tuple[float, int]:
        """Kill the daemon and start it; return seconds until a prompt is begun, and how many of its tokens came from the host."""
        begun_s = time.monotonic()
        self.daemon.kill()
        self.engine.close()
        if not warm:
            for path in self.files():
                path.unlink()
        self.daemon.start()
        self.engine = self._attached()
        while True:
            room, begun = self.begin(0)
            if begun.host_tokens or not warm:
                break
            self.engine.abort(room, "not there yet")
            if time.monotonic() - begun_s > WAIT_S:
                said = [line for line in self.daemon.log(100_000).splitlines() if '"room' not in line]
                raise AssertionError(f"no hit within {WAIT_S:g} s; the daemon's log ends:\n{chr(10).join(said[-20:])}")
            time.sleep(0.02)
        seconds = time.monotonic() - begun_s
        self.engine.abort(room, "measured")
        return seconds, begun.host_tokens


@contextmanager
def bench(size_gib: float) -> Iterator[Bench]:
    """A running daemon; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    instance = f"bench-warm-{os.getpid()}"
    daemon = DaemonProcess("prefill", "the prefill daemon", folder, configuration(folder, size_gib, instance))
    made = None
    try:
        daemon.start()
        made = Bench(daemon, instance)
        yield made
    finally:
        if made is not None:
            made.engine.close()
        daemon.stop()
        for path in made.files() if made is not None else ():
            path.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def run(size_gib: float = SIZE_GIB, turns: int = TURNS) -> dict[str, Any]:
    """Measure it. Takes the memory twice for a moment of each empty start's end."""
    found: dict[str, Any] = {"size_gib": size_gib, "warm_s": [], "empty_s": [], "restored_s": []}
    with bench(size_gib) as one:
        for turn in range(turns):
            found["prompts"] = one.fill()
            seconds, host_tokens = one.restart(warm=True)
            assert host_tokens == ROOM_PAGES * PAGE, host_tokens
            found["warm_s"].append(seconds)
            told = eventually("restored", lambda turn=turn: _restored(one.daemon, turn))
            found["restored_s"].append(told["seconds"])
            found["restored_pages"], found["lost"] = told["pages"], told["lost"]
            found["empty_s"].append(one.restart(warm=False)[0])
    warm, empty = statistics.median(found["warm_s"]), statistics.median(found["empty_s"])
    found |= {"added_s": warm - empty, "budget_s": BUDGET_S, "within_budget": warm - empty <= BUDGET_S}
    return found


def _restored(daemon: DaemonProcess, turn: int) -> dict[str, Any] | None:
    lines = [line for line in daemon.log(1_000_000).splitlines() if '"prefixes_restored"' in line]
    return json.loads(lines[turn]) if len(lines) > turn else None


def table(found: dict[str, Any]) -> str:
    """Return the figures for people."""
    warm, empty = statistics.median(found["warm_s"]), statistics.median(found["empty_s"])
    return (
        f"{found['size_gib']:g} GiB on the host, {found['restored_pages']} pages: kill -9 to the first prompt {warm:.2f} s warm, "
        f"{empty:.2f} s empty, {found['added_s']:+.2f} s (budget +{found['budget_s']:g} s); all compared after "
        f"{statistics.median(found['restored_s']):.2f} s, {found['lost']} lost"
    )


if __name__ == "__main__":
    from tests.bench.__main__ import environment  # it imports this module

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-gib", type=float, default=SIZE_GIB)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    given = parser.parse_args()
    measured = run(given.size_gib, given.turns)
    print(table(measured))
    if given.json:
        given.json.write_text(json.dumps({"environment": environment(), "warm_restart": measured}, indent=1) + "\n")
