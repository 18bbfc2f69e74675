"""`make mutate`: make small edits of the package, and see which of them the fast tests notice.

    python -m tests.mutation --count 400 --seed 1        draw edits and write which died
    python -m tests.mutation --again results.json        make the edits of a list again; red when one lives that had died

Every edit is made in a forked process, in memory; no file is changed. The tests that run the edited line judge the edit, narrow
tests first. An edit dies when a test fails, when the import fails, or when the tests do not end. The tests that edits died of are
run without an edit afterwards, since a test that is red by itself says nothing.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation import coverage_map
from tests.mutation.edits import ROOT, Edit, all_edits
from tests.mutation.forked import LIMIT_S, preload, run_edited

OUTPUT = ROOT / "out" / "mutation"
MOST_TESTS = 60
"""Test functions that are run for one edit: behind so many, another one finds little."""
LEFT_OUT = {"demo", "__main__", "doctor", "cli"}
"""Packages whose tests start processes; the fast suites say little about them."""


@dataclass(frozen=True)
class Verdict:
    edit: Edit
    end: str
    """`died`, `lives` or `no test`."""
    by: str = ""
    """The first test that failed, or what else ended the edit."""
    seconds: float = 0.0


def drawn(count: int, seed: int, packages: Sequence[str] = ()) -> list[Edit]:
    """Draw edits: from each package in proportion to the square root of how many it has, so that small ones are seen, too."""
    by_package: dict[str, list[Edit]] = defaultdict(list)
    for edit in all_edits():
        if edit.package in packages or (not packages and edit.package not in LEFT_OUT):
            by_package[edit.package].append(edit)
    weights = {package: len(edits) ** 0.5 for package, edits in by_package.items()}
    chosen: list[Edit] = []
    for package, edits in sorted(by_package.items()):
        share = min(len(edits), round(count * weights[package] / sum(weights.values())))
        chosen += random.Random(f"{seed} {package}").sample(edits, share)
    return sorted(chosen)


@dataclass(frozen=True)
class Former:
    """How the edits of a former list ended, by name."""

    ends: Mapping[str, str]
    killers: Mapping[str, str]
    """The test function that an edit died of."""


NOTHING_FORMER = Former({}, {})


def again(path: Path, packages: Sequence[str]) -> tuple[list[Edit], Former]:
    """Return the edits of a former list that the code still has, all or those of some packages, and how each ended then."""
    rows = [
        row for row in json.loads(path.read_text())["edits"] if not packages or row["name"].split("/")[1] in packages
    ]
    former = Former(
        ends={row["name"]: row["end"] for row in rows},
        killers={row["name"]: row.get("by", "").partition("[")[0] for row in rows},
    )
    return [edit for edit in all_edits() if edit.name in former.ends], former


def judges_of(edit: Edit, covered: coverage_map.LinesToTests, breadth: Counter[str], former: Former) -> list[str]:
    """Return the tests that run the edited line: the one that has killed the edit before, then narrow ones, which say most."""
    tests, killer = covered.get(edit.file, {}).get(edit.line, []), former.killers.get(edit.name)
    return sorted(tests, key=lambda test: (test != killer, breadth[test], test))[:MOST_TESTS]


def _breadth(covered: coverage_map.LinesToTests) -> Counter[str]:
    """How many lines each test runs."""
    return Counter(test for lines in covered.values() for tests in lines.values() for test in tests)


def judge(edits: Sequence[Edit], covered: coverage_map.LinesToTests, workers: int, former: Former) -> list[Verdict]:
    """Make every edit, some at a time, and say how each one ended."""
    breadth = _breadth(covered)
    waiting, running, verdicts = list(reversed(edits)), {}, []
    while waiting or running:
        while waiting and len(running) < workers:
            edit = waiting.pop()
            tests = judges_of(edit, covered, breadth, former)
            if not tests:
                verdicts.append(Verdict(edit, "no test"))
                continue
            log = OUTPUT / "logs" / f"{len(verdicts) + len(running)}-{os.getpid()}.txt"
            running[run_edited(edit, tests, log)] = edit, log, time.monotonic()
        for pid, (edit, log, began_s) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - began_s
            if not ended and seconds < LIMIT_S:
                continue
            if not ended:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[pid]
            verdicts.append(_verdict(edit, log, status if ended else None, seconds))
            last = verdicts[-1]
            print(f"{len(verdicts)}/{len(edits)} {last.end:8} {seconds:5.1f} s  {edit.name}  {last.by}", flush=True)
        time.sleep(0.02)
    return sorted(verdicts, key=lambda verdict: verdict.edit)


def red_without_edit(verdicts: Sequence[Verdict], workers: int) -> list[str]:
    """Run the tests that edits died of, without an edit; return the files of those that fail all the same."""
    files: dict[str, set[str]] = defaultdict(set)
    for verdict in verdicts:
        if "::" in verdict.by:
            files[verdict.by.partition("::")[0]].add(verdict.by.partition("[")[0])
    waiting, running, red = sorted(files), {}, []
    while waiting or running:
        while waiting and len(running) < workers:
            file = waiting.pop()
            log = OUTPUT / "logs" / f"control-{len(waiting)}.txt"
            running[run_edited(None, sorted(files[file]), log)] = file, log
        pid, status = os.wait()
        file, log = running.pop(pid)
        if status:
            red.append(f"{file}: {log}")
    return red


def _verdict(edit: Edit, log: Path, status: int | None, seconds: float) -> Verdict:
    if status is None:
        return Verdict(edit, "died", "the tests did not end", seconds)
    if status == 0:
        log.unlink(missing_ok=True)
        return Verdict(edit, "lives", "", seconds)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    by = next((line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))), f"exit {status}")
    log.unlink(missing_ok=True)
    return Verdict(edit, "died", by, seconds)


def report(verdicts: Sequence[Verdict]) -> str:
    """Return the list as it is kept, in JSON: counts for each package, and one line an edit."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        counts[verdict.edit.package][verdict.end] += 1
    rows = [{"name": v.edit.name, "end": v.end} | ({"by": v.by} if v.by else {}) for v in verdicts]
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"counts": {json.dumps(counts, sort_keys=True)},\n"edits": [\n{lines}\n]}}\n'


def main() -> int:
    """Judge edits and write the list; 1 when an edit lives that had died."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--package", action="append", default=[], help="edits of these packages only")
    parser.add_argument("--again", type=Path, help="a list of a former run")
    parser.add_argument("--coverage", type=Path, default=OUTPUT / "coverage.json", help="measured when it is not there")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=OUTPUT / "edits.json")
    given = parser.parse_args()
    OUTPUT.joinpath("logs").mkdir(parents=True, exist_ok=True)
    if not given.coverage.exists():
        subprocess.run([sys.executable, "-m", "tests.mutation.coverage_map", str(given.coverage)], check=False)
    edits, former = (
        again(given.again, given.package)
        if given.again
        else (drawn(given.count, given.seed, given.package), NOTHING_FORMER)
    )
    preload()
    covered = coverage_map.read(given.coverage)
    verdicts = judge(edits, covered, given.workers, former)
    given.output.write_text(report(verdicts))
    if red := red_without_edit(verdicts, given.workers):
        print("\n".join(["these tests are red without an edit, too, so the list says nothing:", *red]))
        return 2
    ends = Counter(verdict.end for verdict in verdicts)
    print(f"{len(verdicts)} edits: {dict(ends)}; the list is in {given.output}")
    died = {name for name, end in former.ends.items() if end == "died"}
    lost = [verdict.edit.name for verdict in verdicts if verdict.edit.name in died and verdict.end != "died"]
    for name in lost:
        print(f"had died and lives: {name}")
    for name in sorted(former.ends.keys() - {verdict.edit.name for verdict in verdicts}):
        print(f"the code has no such place any more: {name} ({former.ends[name]})")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
