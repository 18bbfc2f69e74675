"""The runner of the GPU benchmark: parts that fail or hang are ended and said."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from tests.bench.gpu import __main__ as bench
from tests.bench.gpu.parts import PARTS, Part


def _started(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def test_what_became_of_a_part() -> None:
    assert bench._wait(_started("pass"), 20.0) == ""
    assert bench._wait(_started("raise SystemExit(3)"), 20.0) == "exit code 3 (its last words are above)"


def test_a_part_that_hangs_is_ended() -> None:
    process = _started("import time; time.sleep(60)")
    assert bench._wait(process, 0.2) == "not done after 0 s"
    assert process.poll() is not None


def test_a_part_without_time_is_not_started(tmp_path) -> None:
    result = bench.run_part(Part("digest", "part_digest", 30.0, ""), tmp_path / "x.jsonl", True, 2.0)
    assert result["failed"] == "not run: the parts before it took all the time"


def test_every_part_has_its_module() -> None:
    for part in PARTS.values():
        assert importlib.util.find_spec(f"tests.bench.gpu.{part.module}") is not None
