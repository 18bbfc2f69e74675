"""What workers and the libraries below them write, as lines of the daemon's log."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from structlog.testing import capture_logs

from kvbridge.core.ids import Rank
from kvbridge.daemon import worker_output
from kvbridge.daemon.worker_output import LINES, LONGEST_LINE_BYTES, WorkerOutput, level_of

pytestmark = pytest.mark.asyncio

RANK = Rank(pp=0, tp=1)
GLOG = "E1122 10:11:12.131415  4711 transfer_metadata.cpp:12] "


async def written(*parts: bytes, code: str = "import sys; sys.stderr.buffer.write(sys.stdin.buffer.read())") -> list:
    """The lines that come of what a real process writes."""
    with capture_logs() as lines:
        with WorkerOutput(RANK) as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stderr=output.writing_end
            )
            output.started()
            async with asyncio.timeout(30):
                await process.communicate(b"".join(parts))
        return lines


async def test_a_workers_own_lines_stay_what_they_are():
    line = {"event": "transport_replaced", "level": "warning", "rank": "pp0.tp1", "transport": "nixl", "timestamp": "t"}
    assert await written(json.dumps(line).encode() + b"\n") == [
        {"event": "transport_replaced", "log_level": "warning", "rank": "pp0.tp1", "transport": "nixl"}
    ]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (GLOG + "no route to host", "error"),
        (GLOG.replace("E", "W", 1) + "slow", "warning"),
        (GLOG.replace("E", "I", 1) + "listening", "info"),
        (GLOG + "Local segment descriptor not found", "debug"),
        ("WARNING: Logging before InitGoogleLogging() is written to STDERR", "debug"),
        ("[1763806272.131415] [host:4711 :0]  ucp_context.c:12  UCX  ERROR no such device", "error"),
        ("[1763806272.131415] [host:4711 :0]  parser.c:1  UCX  WARN  unused variable", "warning"),
        ("Fatal Python error: Segmentation fault", "warning"),
        ('{"event": half a line', "warning"),
        ('{"no": "event"}', "warning"),
    ],
)
async def test_what_libraries_write_has_a_level_and_an_owner(text, level):
    assert await written(text.encode() + b"\n") == [
        {"event": "library_output", "log_level": level, "rank": "pp0.tp1", "text": text}
    ]


async def test_last_words_without_an_end_and_lines_without_an_end_are_seen():
    last, endless = b"terminate called after throwing", b"x" * (3 * LONGEST_LINE_BYTES)
    assert [line["text"] for line in await written(last)] == [last.decode()]
    shown = [line["text"] for line in await written(endless)]
    assert shown
    assert set("".join(shown)) == {"x"}


async def test_a_process_that_ends_badly_is_heard_to_the_end():
    code = "import faulthandler, os, signal; faulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)"
    assert any("Segmentation fault" in line["text"] for line in await written(code=code))


async def test_a_library_that_repeats_itself_does_not_fill_the_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_output, "EVERY_S", 60.0)  # longer than a busy machine takes to read them
    lines = await written(b"again\n" * 500)
    assert len(lines) == LINES + 1
    assert (lines[-1]["event"], lines[-1]["lines"]) == ("lines_left_out", 500 - LINES)


async def test_a_line_that_says_nothing_of_its_level_is_a_warning():
    assert level_of("something") == 30
