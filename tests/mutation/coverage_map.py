"""Which fast tests run which lines of the package.

Owns: one run of the fast suites with a measured context for each test. Must not know: edits.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

from tests.mutation.edits import PACKAGE, ROOT

_BY_PACKAGE = sorted((ROOT / "tests" / "integration").glob("[a-z]*/"))
SUITES = ("tests/unit", "tests/property", *(str(folder.relative_to(ROOT)) for folder in _BY_PACKAGE))
LinesToTests = dict[str, dict[int, list[str]]]
"""By file and line: test functions, as pytest names them, without parameters."""


class _Contexts:
    """Tells the measurement which test runs."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._measured.switch_context(item.nodeid.partition("[")[0])
        result = yield
        self._measured.switch_context("")
        return result


def measure(output: Path, suites: tuple[str, ...] = SUITES) -> int:
    """Run the fast suites, write which tests run which lines, and return pytest's exit code."""
    measured = coverage.Coverage(data_file=None, source_pkgs=[PACKAGE], config_file=False)
    measured.start()
    code = pytest.main([*suites, "-q", "-p", "no:randomly", "-p", "no:cacheprovider"], plugins=[_Contexts(measured)])
    measured.stop()
    data = measured.get_data()
    found: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        lines = {at: tests for at, names in data.contexts_by_lineno(file).items() if (tests := [*filter(None, names)])}
        found[str(Path(file).relative_to(ROOT))] = lines
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found))
    return int(code)


def read(path: Path) -> LinesToTests:
    found: LinesToTests = defaultdict(dict)
    for file, lines in json.loads(path.read_text()).items():
        found[file] = {int(line): tests for line, tests in lines.items()}
    return found


if __name__ == "__main__":
    sys.exit(measure(Path(sys.argv[1]), tuple(sys.argv[2:]) or SUITES))
