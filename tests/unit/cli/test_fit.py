"""`kvbridge fit`: figures of a configuration, reading of traces, and the simulated pool against least recently used pages."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvbridge.cli.fit import SimulatedCache, read_trace
from kvbridge.cli.main import app
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.models import preset
from kvbridge.doctor.findings import size
from kvbridge.tier.keys import PrefixIdentity, page_keys
from tests.helpers.traces import trace_line, write_trace

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
    aligned_bytes = 1000 * (998_208 - 786_240) + 64 * 1024
    assert cells(shown, "prefixes on the host") == ["1000", size(aligned_bytes)]
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
    lines = [trace_line(number, input_length=tokens, hash_ids=ids) for number, (tokens, ids) in enumerate(prompts)]
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


def test_wrong_sizes_and_a_trace_that_says_nothing_of_prefixes_are_refused(trace, tmp_path):
    told = {size: kept(trace, "--pool", size) for size in ("many", "10B", "1GiB,")}
    silent = kept(write(tmp_path / "t.jsonl", [(100, [])]))
    words = ("'many'", "one page has", "separated by commas", "no request has 'hash_ids'")
    for result, said in zip((*told.values(), silent), words, strict=True):
        assert (result.exit_code, said in result.stderr) == (2, True)


def refused(path, **wanted) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read_trace(path, **wanted)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_all_of_it_in_order_or_a_part_of_it(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", 5)
    requests = read_trace(path)
    assert [request.timestamp for request in requests] == [0, 50, 100, 150, 200]
    assert (requests[2].input_length, requests[2].output_length, requests[2].hash_ids) == (1000, 7, (0, 2))
    path.write_text(path.read_text() + "rubbish\n")
    assert len(read_trace(path, count=5)) == 5, "no more is looked at"
    assert "line 6" in refused(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1 << 40}, "input_length"),
        ({"output_length": "many"}, "unable to parse string as an integer, got 'many'"),
        ({"timestamp": 1e999}, "timestamp"),
        ({"timestamp": 49}, "timestamp 49 comes after 50"),
        ({"hash_ids": [1, -2]}, "hash_ids.1"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, changes, words):
    path = write_trace(tmp_path / "t.jsonl", 2)
    path.write_text(path.read_text() + json.dumps(trace_line(2, **changes)) + "\n")
    told = refused(path)
    assert "line 3" in told
    assert words in told


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    for content, words in (
        (b'{"timestamp": 1, "output_length": 3}\n', "line 1: has no 'input_length'"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"", "has 0 requests, 1 are asked for"),
    ):
        path.write_bytes(content)
        assert words in refused(path)
    assert "No such file" in refused(tmp_path / "none")
    short = write_trace(tmp_path / "short", 3)
    assert "has 3 requests, 4 are asked for" in refused(short, count=4)


IDENTITY = PrefixIdentity(model="m", revision="r", fingerprint="f", tokens_per_page=1)


def naive_hits(prompts, page_count: int) -> int:
    used: dict[bytes, float] = {}
    hits = 0
    for now, keys in prompts:
        listed = keys.to_list()
        hit = next((at for at, key in enumerate(listed) if key not in used), len(listed))
        hits += hit
        for at, key in enumerate(reversed(listed)):
            used[key] = now + at * 1e-6  # the end of a prompt goes before its beginning
        for key in sorted(used, key=used.__getitem__)[: max(0, len(used) - page_count)]:
            del used[key]
    return hits


def drawn_prompts():
    rng = np.random.default_rng(3)
    for number in range(400):
        shared, own = int(rng.integers(0, 12)), int(rng.integers(1, 20))
        tokens = [*([shared] * shared), *rng.integers(100, 104, own)]
        yield float(number), page_keys(IDENTITY, tokens)


def run_cache(prompts, page_count: int, host_pages: int = 0) -> SimulatedCache:
    cache = SimulatedCache(page_count, host_pages)
    for now, keys in prompts:
        cache.request(now, keys)
    return cache


@pytest.mark.parametrize("page_count", [40, 250, 5000])
def test_hits_are_no_fewer_than_those_of_least_recently_used_pages(page_count):
    prompts = list(drawn_prompts())
    found, expected = run_cache(prompts, page_count), naive_hits(prompts, page_count)
    assert found.hit_pages >= expected > 300
    if page_count == 5000:
        assert (found.hit_pages, found.too_long) == (expected, 0)


@pytest.mark.parametrize(("page_count", "host_pages"), [(30, 100), (40, 5000), (100, 100)])
def test_a_host_tier_finds_what_a_pool_of_its_size_would(page_count, host_pages):
    """Every page is copied down when it comes, so the host alone decides what is kept; the device, what need not come back."""
    prompts = list(drawn_prompts())
    found, alone = run_cache(prompts, page_count, host_pages), run_cache(prompts, host_pages)
    assert found.hit_pages == pytest.approx(alone.hit_pages, rel=0.02)
    assert 0 < found.host_hit_pages < found.hit_pages
    assert not found.too_long
    assert found.hit_pages > run_cache(prompts, page_count).hit_pages or page_count == host_pages
