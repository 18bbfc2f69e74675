"""`make test-operate`: alerts are quiet under load, and each of them fires in the fault that it is for.

First MINUTES of a replay under a Prometheus with the rules as they are; no alert may fire. Then every fault of `faults.py`
and `tier_faults.py` under a Prometheus whose rules are SPEED times as fast; each must set off its alerts in time, and no others. A
table of what was seen is printed and written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbridge.api.endpoint_file import ENDPOINT_FILE
from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.daemon.children import ChildProcess
from tests.helpers.cluster import eventually
from tests.helpers.progress import ShownProgress
from tests.operate.faults import Fault
from tests.operate.prometheus import prometheus
from tests.operate.rules import rules, seconds, write_faster
from tests.operate.tier_faults import FAULTS

SCRAPE_S = 15.0
"""What the rules are written for."""
SLACK_S = 20.0
"""Beside the times of the rules: for daemons to notice, on a machine that is busy."""
PAUSE_S = 0.2
SETTLE_S = 3.0
"""Before the fault, when nothing may fire."""
LOAD_START_S = 180.0
REQUESTS_A_SECOND = 2


def main() -> int:
    """Run the course; 0 when everything was as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.operate", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load; 0: none")
    parser.add_argument(
        "--speed", type=float, default=30.0, help="by which the times of rules are divided for the faults"
    )
    parser.add_argument(
        "--only", nargs="*", metavar="FAULT", help=f"these faults: {', '.join(each.name for each in FAULTS)}"
    )
    parser.add_argument("--output", type=Path, help="folder for the table")
    given = parser.parse_args()
    with ShownProgress(Console(stderr=True)) as progress:
        rows = [load(given.minutes, progress)] if given.minutes else []
        for each in FAULTS:
            if given.only is None or each.name in given.only:
                progress.stage(each.name)
                rows.append(strike(each, given.speed))
                print(line(rows[-1]), flush=True)
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "course.json").write_text(json.dumps(rows, indent=2) + "\n")
    wrong = [row["what"] for row in rows if row["wrong"]]
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} as they should be" + (f"; wrong: {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    fired = ", ".join(f"{name} after {after_s:.1f} s" for name, after_s in row["fired"].items()) or "no alert"
    return f"{'WRONG: ' + row['wrong'] if row['wrong'] else 'good'}: {row['what']}: {fired}"


def strike(fault: Fault, speed: float) -> dict[str, Any]:
    """Make a fault, and wait for its alerts."""
    row: dict[str, Any] = {"what": fault.name, "fired": {}, "summaries": {}, "wrong": ""}
    limit_s = 2 * slowest_s(fault.alerts) / speed + SLACK_S
    try:
        with tempfile.TemporaryDirectory(prefix="kvb-") as folder, fault.stage() as stage, ExitStack() as opened:
            stage.well()
            files, scrape_s = write_faster(Path(folder), speed), max(SCRAPE_S / speed, 0.25)
            server = opened.enter_context(prometheus(stage.daemons, scrape_s=scrape_s, rule_files=files))
            time.sleep(SETTLE_S)
            early = set(server.firing())
            stage.strike()
            struck_s = time.monotonic()
            while time.monotonic() - struck_s < limit_s and not fault.alerts <= row["fired"].keys():
                stage.again()
                for name, notes in server.firing().items():
                    row["fired"].setdefault(name, round(time.monotonic() - struck_s, 2))
                    row["summaries"].setdefault(name, notes["summary"])
                time.sleep(PAUSE_S)
            row["wrong"] = judged(fault, row["fired"].keys(), early, limit_s)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other faults are still to be made
        row["wrong"] = f"{type(error).__name__}: {error}"[:500]
    return row


def judged(fault: Fault, fired: Iterable[str], early: set[str], limit_s: float) -> str:
    """What is wrong, or nothing."""
    missing, foreign = fault.alerts - set(fired), set(fired) - fault.alerts - fault.besides
    said = [f"before the fault: {', '.join(sorted(early))}"] if early - fault.alerts else []
    said += [f"not within {limit_s:.0f} s: {', '.join(sorted(missing))}"] if missing else []
    said += [f"not for this fault: {', '.join(sorted(foreign))}"] if foreign else []
    return "; ".join(said)


def slowest_s(alerts: Iterable[str]) -> float:
    """The longest that one of these takes to fire: how long it must be true, and the widest range that rates are taken over."""
    wanted = set(alerts)
    return max(seconds(rule.get("for", "0s")) + 300.0 for rule in rules() if rule.get("alert") in wanted)


def load(minutes: float, progress: ShownProgress) -> dict[str, Any]:
    """Replay requests under Prometheus with the rules as they are."""
    count = int(minutes * 60 * REQUESTS_A_SECOND)
    row: dict[str, Any] = {"what": f"{minutes:g} minutes of load", "fired": {}, "summaries": {}, "wrong": ""}
    progress.stage(f"a replay under Prometheus: {row['what']}")
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        folder = Path(name)
        (folder / "trace.jsonl").write_text("".join(request(number) for number in range(count)))
        options = ["--trace", str(folder / "trace.jsonl"), "--model", "tiny-v4", "--transport", "local"]
        options += ["--report", str(folder / "report.json")]
        replay = ChildProcess("the replay", folder / "replay.log", ends_with_us=True)
        replay.launch(
            [sys.executable, "-m", "tests.bench.replay", *options],
            environment={"TMPDIR": name},
        )
        try:
            found = eventually("daemons of the replay", lambda: running(folder), LOAD_START_S)
            with prometheus(found, scrape_s=min(SCRAPE_S, minutes * 4)) as server:
                began_s, told_s = time.monotonic(), 0
                progress.bars({"seconds": round(minutes * 60)})
                while replay.running and time.monotonic() - began_s < minutes * 60:
                    progress.advance("seconds", -told_s + (told_s := round(time.monotonic() - began_s)))
                    for alert, notes in server.firing().items():
                        row["fired"].setdefault(alert, round(time.monotonic() - began_s, 1))
                        row["summaries"].setdefault(alert, notes["summary"])
                    time.sleep(1.0)
                row["rooms"] = server.query('sum(kvbridge_rooms_ended_total{state="completed"})')
            with suppress(subprocess.TimeoutExpired):
                assert replay.process is not None
                replay.process.wait(LOAD_START_S)
            report = folder / "report.json"
            row["report"] = json.loads(report.read_text()) if report.exists() else {}
            row["wrong"] = ", ".join(row["fired"])
            if replay.process is None or replay.process.returncode != 0:
                row["wrong"] += f"; the replay itself failed: {replay.log(5)}"
        finally:
            replay.stop()
    print(line(row), flush=True)
    return row


def request(number: int) -> str:
    """A line of the trace: lengths from a window to some thousand tokens."""
    lengths = (1, 257, 1000, 130, 2048, 64, 513, 3000)
    timestamp = 1000 * number / REQUESTS_A_SECOND
    return json.dumps({"timestamp": timestamp, "input_length": lengths[number % 8], "output_length": 8}) + "\n"


def running(folder: Path) -> list[DaemonProcess]:
    """The replay's three daemons, once they serve."""
    places = [path.parent.parent for path in folder.rglob(ENDPOINT_FILE)]
    return [DaemonProcess(place.name, place.name, place) for place in places] if len(places) == 3 else []


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
