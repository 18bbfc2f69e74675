"""`kvbridge fit`: the figures of a configuration, and what it says to wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbridge.cli.fit import FitReport, readable
from kvbridge.cli.main import app

CONFIG = str(Path(__file__).parents[3] / "configs" / "decode.yaml")
FLASH = ["--set", "model.preset=deepseek-v4-flash"]
SPARSE = ["--set", "sparse.max_requests=64", "--set", "sparse.max_tokens=1048576"]


def run(*arguments: str, width: int = 200):
    return CliRunner().invoke(app, ["fit", "--config", CONFIG, *arguments], env={"COLUMNS": str(width)})


def cells(output: str, name: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.strip("│ ").startswith(name))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_it_prints_what_requests_cost_and_how_many_fit():
    result = run(*FLASH, *SPARSE, "--tokens", "8192,131072", "--new-tokens", "0")
    assert result.exit_code == 0
    assert cells(result.output, "c4_indexer") == ["5.4 MiB", "86.6 MiB"]
    assert cells(result.output, "c4_kv on the host") == ["24.0 MiB", "383.9 MiB"]
    assert cells(result.output, "hot buffer  ") == ["60.4 MiB", "60.4 MiB"]
    assert cells(result.output, "hot rows") == ["", "3.0 GiB"]
    assert cells(result.output, "fit at once") == ["32", "2"]
    assert cells(result.output, "limited by") == ["pages of 'full'", "pages of 'full'"]


def test_without_a_hot_buffer_none_is_shown():
    result = run("--tokens", "256")
    assert result.exit_code == 0
    assert "hot buffer" not in result.output
    assert cells(result.output, "fit at once") == ["64"]
    assert cells(result.output, "limited by") == ["pages of 'request'"]


def test_memory_for_prefixes_on_the_host_is_counted():
    tier = ["model_name=m", "model_revision=r1", "enabled=true", "host.pages=1000"]
    settings = [word for each in tier for word in ("--set", f"tier.{each}")]
    assert "prefixes on the host" not in run(*FLASH, "--tokens", "256").output
    shown, report = run(*FLASH, *settings, "--tokens", "256"), run(*FLASH, *settings, "--tokens", "256", "--json")
    found = FitReport.model_validate_json(report.output)
    assert 0 <= found.twin_bytes - 1000 * (998_208 - 786_240) < 64 * 4096
    assert cells(shown.output, "prefixes on the host") == ["1000", readable(found.twin_bytes)]
    assert cells(shown.output, "fit at once") == cells(run(*FLASH, "--tokens", "256").output, "fit at once")


def test_the_hot_buffer_limits_requests_too():
    smaller = ["--set", "pools.device.request=4", "--set", "sparse.max_requests=4", "--set", "sparse.max_tokens=300"]
    result = run(*smaller, "--tokens", "100,1000", "--new-tokens", "0")
    assert cells(result.output, "fit at once") == ["4", "0"]
    assert cells(result.output, "limited by")[1] == "sparse.max_tokens"


def test_json_says_what_the_tables_say():
    arguments = (
        *FLASH,
        *SPARSE,
        "--tokens",
        "8192,131072",
        "--new-tokens",
        "0",
        "--device-memory",
        "60GiB",
        "--host-memory",
        "64GiB",
    )
    found = FitReport.model_validate_json(run(*arguments, "--json").output)
    shown = run(*arguments).output
    assert [str(each.fits.requests) for each in found.lengths] == cells(shown, "fit at once") == ["32", "2"]
    assert [readable(each.host_bytes) for each in found.lengths] == cells(shown, "c4_kv on the host")
    assert [readable(each.device_bytes) for each in found.lengths] == cells(shown, "on the device")
    assert [str(each.would_fit.requests) for each in found.lengths] == cells(shown, "would fit into 60.0 GiB")
    assert cells(shown, "hot buffer of rank") == ["64", readable(found.hot_buffer_bytes)]


def test_json_of_memory_that_is_not_named_says_nothing_of_it():
    (only,) = FitReport.model_validate_json(run("--tokens", "256", "--json").output).lengths
    assert (only.would_fit, only.cost.sparse, only.fits.requests) == (None, None, 64)


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


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (1 << 60, "1.0 EiB")],
)
def test_sizes_are_readable(size, text):
    assert readable(size) == text
