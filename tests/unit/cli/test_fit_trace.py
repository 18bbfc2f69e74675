"""`kvbridge fit --trace`: figures that can be counted by hand, and what it says to wrong files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbridge.cli.fit_trace import TraceFit
from kvbridge.cli.main import app
from kvbridge.cli.trace import TraceRequest, prompt_tokens
from kvbridge.core.geometry.presets import preset

CONFIG = str(Path(__file__).parents[3] / "configs" / "decode.yaml")
PAGE = preset("tiny-v4").tokens_per_page
"""Half a block of a trace."""


def write(path: Path, prompts: list[tuple[int, list[int]]]) -> Path:
    lines = [
        {"timestamp": 1000 * number, "input_length": tokens, "output_length": 1, "hash_ids": ids}
        for number, (tokens, ids) in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(trace: Path, *arguments: str):
    options = ["fit", "--config", CONFIG, "--set", "model.preset=tiny-v4", "--trace", str(trace), *arguments]
    return CliRunner().invoke(app, options, env={"COLUMNS": "120"})


def report(trace: Path, *arguments: str) -> TraceFit:
    result = run(trace, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return TraceFit.model_validate_json(result.stdout)


@pytest.fixture
def trace(tmp_path) -> Path:
    """Four pages; the same again; one that shares a block, two pages, and has half a page more; the first again."""
    first = (4 * PAGE, [1, 2])
    return write(tmp_path / "small.jsonl", [first, first, (4 * PAGE + 100, [1, 3, 4]), first])


def test_hits_are_whole_pages_that_were_there(trace):
    found = report(trace, "--pool", "1GiB")
    (endless,) = [pool for pool in found.pools if pool.pool_bytes is None]
    assert (found.requests, found.prompt_tokens) == (4, 16 * PAGE + 100)
    assert endless.hit_tokens == (0 + 4 + 2 + 4) * PAGE
    assert endless.hit_rate == pytest.approx(10 * PAGE / (16 * PAGE + 100))
    assert {pool.hit_tokens for pool in found.pools} == {10 * PAGE}
    assert {pool.evicted_pages for pool in found.pools} == {0}


def test_a_pool_that_is_too_small_evicts(trace):
    page_bytes = report(trace).page_bytes
    lru, greedy, _ = report(trace, "--pool", str(4 * page_bytes)).pools
    # The third prompt takes the two pages of the first that it does not share, and the fourth takes them back.
    assert (lru.pages, lru.hit_tokens, lru.evicted_pages, lru.pages_in_a_run) == (4, 8 * PAGE, 4, 2.0)
    assert greedy.hit_tokens == 8 * PAGE
    three = report(trace, "--pool", str(3 * page_bytes)).pools[0]
    assert (three.too_long, three.hit_tokens) == (4, 0)
    assert "4 requests were left out" in run(trace, "--pool", str(3 * page_bytes)).output.replace("\n", " ")


def test_a_host_tier_keeps_what_the_pool_evicts(trace):
    page_bytes = report(trace).page_bytes
    lru = report(trace, "--pool", f"{4 * page_bytes} + {20 * page_bytes}").pools[0]
    assert lru.sizes == (4 * page_bytes, 20 * page_bytes)
    # The third prompt takes two pages of the first on the device, and the fourth has them back from the host.
    assert (lru.hit_tokens, lru.host_hit_tokens) == (10 * PAGE, 2 * PAGE)
    shown = run(trace, "--pool", f"{4 * page_bytes}+{20 * page_bytes}").output
    assert "KiB + " in shown or "MiB + " in shown
    assert "a host tier of B" in shown.replace("\n", " ")


def test_the_table_has_a_line_for_each_pool(trace):
    result = run(trace, "--pool", "64MiB,1MiB")
    assert result.exit_code == 0, result.output
    lines = [line.strip("│ ") for line in result.output.splitlines() if line.startswith("│")]
    assert [line.split("│")[0].strip() for line in lines] == ["1.0 MiB", "64.0 MiB", "endless"]
    assert "never full" in lines[-1]
    assert "small.jsonl: 4 requests" in result.output


def test_a_picture(trace, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(trace, "--pool", "1MiB,64MiB,1MiB+63MiB", "--plot", str(tmp_path / "fit.png")).exit_code == 0
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
    refused = run(trace, "--plot", str(tmp_path / "nowhere" / "fit.png"))
    assert refused.exit_code == 1
    assert "--plot" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--pool", "many"], "'many'"), (["--pool", "10B"], "one page has"), (["--pool", "1GiB,"], "separated by commas")],
)
def test_wrong_sizes_are_refused(trace, arguments, words):
    result = run(trace, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_trace_that_says_nothing_of_prefixes_is_refused(tmp_path):
    result = run(write(tmp_path / "t.jsonl", [(100, [])]))
    assert result.exit_code == 2
    assert "no request has 'hash_ids'" in result.stderr


def test_a_picture_of_nothing_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["fit", "--config", CONFIG, "--plot", str(tmp_path / "fit.png")])
    assert result.exit_code == 2
    assert "--trace" in result.stderr


def test_blocks_without_an_id_are_shared_with_nobody():
    request = TraceRequest(timestamp=0, input_length=1500, output_length=1, hash_ids=(2**62, 5))
    one, other = prompt_tokens(request, 1), prompt_tokens(request, 2)
    assert len(one) == 1500
    assert (one[:1024] == other[:1024]).all()
    assert (one[1024:] != other[1024:]).any()
    assert (one[:512].reshape(-1, 2) == [0, 2**30]).all()
