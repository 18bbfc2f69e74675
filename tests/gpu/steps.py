"""What `python -m tests.gpu` runs, and in which order.

Owns: the steps. Must not know: processes, reports, devices.

A step is one pytest process. Steps run side by side, the longest first; what looks at a whole device, or at how soon something
happens, is marked `alone` and runs after all others with nothing beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TOTAL_S = 570.0
"""All steps together: a limit. They are meant to take 400 s, the tests that run alone included."""
ALONE_S = 150.0
"""What is kept of that for the tests that run alone."""
DEADLINE_S = 300.0
"""For one step; three times what the longest takes."""
PARTS = ("tests", "contract", "memcheck", "racecheck")
"""The last two are tools of compute-sanitizer."""
SANITIZERS = ("memcheck", "racecheck")
KERNEL_TESTS = (
    "test_copy_stretches.py",
    "test_digest.py",
    "test_swap_in.py",
    "test_twin_copies.py",
)
CONTRACT_HALVES = ("nixl", "not nixl")
"""Expressions of pytest that divide each file of the contract: backends share nothing."""
TEST_PIECES = {"tests/gpu/test_turns.py": ("dense", "sparse")}
"""The same for other files that would take too long as one step."""
CORES_OF_A_STEP = 4
"""A step has a test's process, two daemons and their rank workers."""
MOST_AT_ONCE = 8
LONGEST_FIRST = (
    "turns",
    "strikes",
    "late_writers",
    "transport_failures",
    "sanitizer",
    "adopted",
    "transport_local",
    "cuda",
)
"""Files that take more than 25 s on one H200, by how their names begin; the others follow in any order."""


@dataclass(frozen=True)
class Step:
    """One process."""

    name: str
    part: str
    targets: tuple[str, ...]
    """What pytest is given: files or folders of the repository."""
    chosen: str = ""
    """Pytest's expression for the tests to run; empty for all."""
    alone: bool = False
    """Whether it runs the tests marked `alone`, or those that are not."""
    deadline_s: float = DEADLINE_S

    @property
    def tool(self) -> str:
        """The tool of compute-sanitizer that watches it; empty for none."""
        return self.part if self.part in SANITIZERS else ""


def all_steps(root: Path) -> list[Step]:
    """Every step, the longest first; the one that runs alone is the last."""
    kernels = tuple(f"tests/gpu/{name}" for name in KERNEL_TESTS)
    found = [
        step
        for file in _test_files(root, "tests/gpu")
        for step in _of_file("tests", file, TEST_PIECES.get(file, ("",)))
    ]
    found += [
        step for file in _test_files(root, "tests/contract") for step in _of_file("contract", file, CONTRACT_HALVES)
    ]
    found += [Step(tool, tool, kernels) for tool in SANITIZERS]
    found.sort(key=_place)
    return [*found, Step("tests/alone", "tests", ("tests/gpu",), alone=True, deadline_s=ALONE_S)]


def _place(step: Step) -> int:
    name = "sanitizer" if step.tool else step.name.partition("/")[2]
    return next((place for place, begin in enumerate(LONGEST_FIRST) if name.startswith(begin)), len(LONGEST_FIRST))


def _of_file(part: str, file: str, pieces: Iterable[str]) -> Iterable[Step]:
    """A step for each piece of a file, an expression of pytest; an empty one is the whole file."""
    for piece in pieces:
        name = "-".join([Path(file).stem.removeprefix("test_"), *piece.split()])
        yield Step(f"{part}/{name}", part, (file,), piece)


def _test_files(root: Path, folder: str) -> Iterable[str]:
    return sorted(path.relative_to(root).as_posix() for path in (root / folder).glob("test_*.py"))


def steps_at_once(cores: int) -> int:
    """How many steps run side by side."""
    return max(1, min(MOST_AT_ONCE, cores // CORES_OF_A_STEP))


def time_for(step: Step, passed_s: float) -> float:
    """How long a step may take that begins so long after the first one."""
    ends_s = TOTAL_S if step.alone else TOTAL_S - ALONE_S
    return min(step.deadline_s, ends_s - passed_s)


def devices_in_turn(devices: list[str], number: int) -> str:
    """What the step of a number sees as CUDA_VISIBLE_DEVICES: all devices, another one first each time."""
    first = number % max(1, len(devices))
    return ",".join(devices[first:] + devices[:first])
