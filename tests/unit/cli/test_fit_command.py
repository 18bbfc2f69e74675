"""`kvbridge fit`: the figures of a configuration, and what it says to wrong ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbridge.cli.main import app
from kvbridge.core.geometry.models import preset
from kvbridge.doctor.findings import size

CONFIG = str(Path(__file__).parents[3] / "configs" / "decode.yaml")
PAGE = preset("tiny-v4").tokens_per_page
"""Half a block of a trace."""
FLASH = ["--set", "model.preset=deepseek-v4-flash"]
SPARSE = ["--set", "sparse.max_requests=64", "--set", "sparse.max_tokens=1048576"]


def run(*arguments: str):
    return CliRunner().invoke(app, ["fit", "--config", CONFIG, *arguments])


def cells(output: str, name: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.startswith(name))
    return re.split(r"\s{2,}", line.strip())[1:]


def test_memory_for_prefixes_on_the_host_is_counted():
    tier = ["model_name=m", "model_revision=r1", "enabled=true", "host.pages=1000"]
    settings = [word for each in tier for word in ("--set", f"tier.{each}")]
    assert "prefixes on the host" not in run(*FLASH, "--tokens", "256").output
    shown = run(*FLASH, *settings, "--tokens", "256").output
    assert cells(shown, "prefixes on the host") == ["1000", size(1000 * (998_208 - 786_240) + 64 * 1024)], (
        "and what aligns them"
    )
    assert cells(shown, "fit at once") == cells(run(*FLASH, "--tokens", "256").output, "fit at once")


def test_the_hot_buffer_limits_requests_too():
    smaller = ["--set", "pools.device.request=4", "--set", "sparse.max_requests=4", "--set", "sparse.max_tokens=300"]
    result = run(*smaller, "--tokens", "100,1000", "--new-tokens", "0")
    assert cells(result.output, "fit at once") == ["4", "0"]
    assert cells(result.output, "limited by")[1] == "sparse.max_tokens"


def test_memory_that_is_not_divided_yet():
    result = run(*FLASH, *SPARSE, "--tokens", "131072", "--device-memory", "60GiB", "--host-memory", "64GiB")
    assert cells(result.output, "would fit into 60.0 GiB and 64.0 GiB") == ["169"]
    assert result.output.count("host memory") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tokens", "12,x"], "--tokens: whole numbers"),
        (["--tokens", "0"], "at least one token"),
        (["--device-memory", "60GiB"], "two sizes such as 60GiB"),
        (["--set", "sparse.max_requests=3"], "gives out 64 request slots"),
        (["--set", "sparse.max_requests=64", "--set", "sparse.hot_rows=1000"], "not a multiple of the 64 rows"),
        (["--set", "pools.host.pages=x"], "pools.host.pages"),
    ],
)
def test_wrong_options_are_refused_in_words(arguments, text):
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def write(path: Path, prompts: list[tuple[int, list[int]]]) -> Path:
    lines = [
        {"timestamp": 1000 * number, "input_length": tokens, "output_length": 1, "hash_ids": ids}
        for number, (tokens, ids) in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def kept(trace: Path, *arguments: str):
    return run("--set", "model.preset=tiny-v4", "--trace", str(trace), *arguments)


@pytest.fixture
def trace(tmp_path) -> Path:
    """Four pages; the same again; one that shares a block, two pages, and has half a page more; the first again."""
    first = (4 * PAGE, [1, 2])
    return write(tmp_path / "small.jsonl", [first, first, (4 * PAGE + 100, [1, 3, 4]), first])


def test_hits_are_whole_pages_that_were_there_and_a_host_tier_keeps_what_the_pool_evicts(trace):
    """The third prompt takes the two pages of the first that it does not share, and the fourth takes them back."""
    page_bytes = int(re.search(r"tokens and ([\d,]+) bytes", kept(trace).output)[1].replace(",", ""))
    three, four, host = 3 * page_bytes, 4 * page_bytes, 20 * page_bytes
    shown = kept(trace, "--pool", f"{three},{four},{four} + {host}").output
    assert "small.jsonl: 4 requests" in shown
    tokens = 16 * PAGE + 100
    all_of_it, eight, two = (f"{pages * PAGE / tokens:.1%}" for pages in (10, 8, 2))
    assert cells(shown, size(three)) == ["3", "0.0%", "0.0%", "4"]
    assert cells(shown, f"{size(four)}  ") == ["4", eight, "0.0%", "0"]
    assert cells(shown, f"{size(four)} + {size(host)}") == ["4", all_of_it, two, "0"]
    assert cells(shown, "endless")[1:] == [all_of_it, "0.0%", "0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--pool", "many"], "'many'"), (["--pool", "10B"], "one page has"), (["--pool", "1GiB,"], "separated by commas")],
)
def test_wrong_sizes_are_refused(trace, arguments, words):
    result = kept(trace, *arguments)
    assert (result.exit_code, words in result.stderr) == (2, True)


def test_a_trace_that_says_nothing_of_prefixes_is_refused(tmp_path):
    result = kept(write(tmp_path / "t.jsonl", [(100, [])]))
    assert (result.exit_code, "no request has 'hash_ids'" in result.stderr) == (2, True)
