"""The commands of all pages are typed: every block is run, or says in its source why not; what they show is what comes."""

import json
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, Block, blocks, follow, name, spans
from tests.helpers.example_configs import known_keys
from tests.helpers.matrices import kept

REASONS = {
    "it installs the package": "every other block is run with the package installed",
    "it is make's": "check and test are what CI runs; the demo is run in tests/integration/test_demo.py",
    "it takes minutes": "tests/integration/test_demo.py and test_replay.py run the demo and a replay",
    "it needs systemd": "the units are verified in tests/deploy/test_systemd.py",
    "it needs a trace": "small ones are read in tests/unit/cli/test_fit.py",
    "it needs an engine": "these calls are made in tests/integration/test_engine_rooms.py and test_prefixes.py",
    "it needs a container engine": "what images do is run in tests/deploy/test_images.py",
    "it needs a node that keeps prefixes": "they are dropped in tests/integration/test_prefixes.py",
    "it needs vLLM": "servers that behave as its do are behind the router in tests/integration/router/test_exchanges.py",
    "it needs SGLang": "real servers are started with these options in tests/sglang",
    "it needs Kubernetes": "the chart is rendered, checked and its programs are started in tests/operate",
}
"""Why a block may be not run, and what is tested in its place."""
ALONE = ("README.md", "docs/getting-started.md", "docs/demo.md")
"""Pages that begin from nothing. Readers of the others have a cluster that runs, all of them the same."""
LIMIT_S = 900.0
"""Long: other suites may have the processors."""


@cache
def run_blocks(page: Path) -> tuple[Block, ...]:
    """The blocks that are run, and the calls in its text, which are run after them."""
    calls = [span for span in spans(page) if span.startswith("curl ") and "TOKEN_FILE" not in span]
    asked = [Block(page, 0, "sh", "".join(f"{call}\n" for call in calls), "")] if calls else []
    return (*(block for block in blocks(page) if block.runs), *asked)


READINGS = {
    **{page: [page] for page in ALONE},
    "with a cluster": [name(page) for page in PAGES if name(page) not in ALONE and run_blocks(page)],
}


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as path:
        yield Path(path)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("reading", [kept(reading, "getting-started" in reading) for reading in READINGS])
def test_what_pages_tell_people_to_type_works_and_prints_what_they_show(reading: str, home: Path) -> None:
    pages = [ROOT / page for page in READINGS[reading]]
    printed = follow([run_blocks(page) for page in pages], home, cluster=reading not in ALONE, limit_s=LIMIT_S)
    wrong = [problem for page in pages for problem in differences(page, printed)]
    assert not wrong, "\n".join(wrong)


def differences(page: Path, printed: dict[Block, str]) -> list[str]:
    """Where a page shows other output than came. Numbers may differ."""
    before: Block | None = None
    found = []
    for block in blocks(page):
        if block.runs:
            before = block
        elif block.language in {"", "json"}:
            if before is None:
                found.append(f"{block.where}: output of which command?")
            elif not (same_shape if block.language else same_lines)(block.text, printed[before]):
                found.append(f"{block.where}: shown\n{block.text}but {before.where} printed\n{printed[before]}")
    return found


def same_lines(shown: str, printed: str) -> bool:
    """Every line that is shown is printed, in this order; `...` stands for any."""
    lines = iter(masked(line) for line in printed.splitlines())
    return all(masked(line) in lines for line in shown.splitlines() if line.strip() not in {"", "..."})


def masked(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", " ".join(line.split()))


def same_shape(shown: str, printed: str) -> bool:
    return shape(json.loads(shown)) == shape(json.loads(printed))


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def test_output_is_compared() -> None:
    assert same_lines("a 1\n...\nb  2.5\n", "x\na 7\nc\nb 3\n")
    assert not same_lines("b\na\n", "a\nb\n")
    assert same_shape('{"a": 1, "b": ["x"]}', '{"a": 2.5, "b": ["y", "z"]}')
    assert not same_shape('{"a": 1}', '{"a": 1, "b": null}')


def test_blocks_that_are_not_run_say_why() -> None:
    given = {block.reason for page in PAGES for block in blocks(page) if block.reason is not None}
    assert given == set(REASONS)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    for block in blocks(page):
        assert block.language in {"sh", "python", "yaml", "json", "text", ""}, block.where
        assert not block.mark or block.language in {"sh", "python", "yaml"}, block.where
        if block.language in {"json", ""} and not block.included:
            assert run_blocks(page), f"{block.where}: output of which command?"


def test_files_that_pages_show_are_run_or_read() -> None:
    commands = "".join(block.text for page in PAGES for block in run_blocks(page))
    for block in (block for page in PAGES for block in blocks(page) if block.included and block.language != "json"):
        shown = str(block.included.relative_to(ROOT))
        assert block.included.exists(), block.where
        assert f"python {shown} " in commands or f"--config {shown}" in commands, f"{block.where}: nobody runs {shown}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_targets_and_files_that_commands_name_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [*(block.text for block in blocks(page) if block.language == "sh"), *spans(page)]
    for command in commands:
        named = set(re.findall(r"^make ([a-z][\w-]*)", command, re.MULTILINE))
        assert named <= targets, f"{name(page)}: make {named - targets}"
        for path in re.findall(r"(?<![\w/.-])((?:deploy|docker|examples|configs|tests)/[\w./*-]+\w/?)", command):
            assert list(ROOT.glob(path)), f"{name(page)}: {path}"


def test_configurations_that_pages_show_have_keys_that_are_known() -> None:
    known = known_keys()
    ours = (block for page in PAGES for block in blocks(page) if not block.included and not block.mark)
    for block in (block for block in ours if block.language == "yaml"):
        assert keys(yaml.safe_load(block.text)) <= known, block.where


def keys(values: dict[str, Any], above: str = "") -> set[str]:
    below = (keys(value, f"{above}{key}.") for key, value in values.items() if isinstance(value, dict))
    return {f"{above}{key}" for key in values}.union(*below)
