"""The output of workers and of the libraries below them, as lines of the daemon's log."""

import asyncio
import json
import sys

from structlog.testing import capture_logs

from kvbridge.core.ids import Rank
from kvbridge.node.worker_process import OutputLines, Pipe
from kvbridge.telemetry.logs import Seldom

RANK = Rank(pp=0, tp=1)
GLOG = "E1122 10:11:12.131415  4711 transfer_metadata.cpp:12] "


COPY = "import os, sys; os.write({}, sys.stdin.buffer.read())"
RECORD = {"event": "transport_replaced", "level": "warning", "rank": "pp0.tp1", "transport": "nixl", "timestamp": "t"}


async def written(*parts, code: str = COPY.format(2), to_log=False, seldom=None):
    """Return the log lines of a real process that writes to standard error or to its log."""
    with capture_logs() as lines:
        logged = OutputLines(RANK, seldom or Seldom(lambda _event: None))
        with Pipe(logged.record) as records, Pipe(logged.text) as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", COPY.format(records.writing_end) if to_log else code),
                stdin=asyncio.subprocess.PIPE,
                stderr=errors.writing_end,
                pass_fds=(records.writing_end,),
            )
            records.started()
            errors.started()
            async with asyncio.timeout(30):
                await process.communicate(b"".join(parts))
        return lines


async def test_a_workers_own_lines_stay_what_they_are_and_a_library_cannot_write_such():
    text = json.dumps(RECORD)
    assert await written(text.encode() + b"\n", to_log=True) == [
        {"event": "transport_replaced", "log_level": "warning", "rank": "pp0.tp1", "transport": "nixl"}
    ]
    assert await written(text.encode() + b"\n") == [
        {"event": "library_output", "log_level": "warning", "rank": "pp0.tp1", "text": text}
    ]


async def test_what_libraries_write_has_a_level_and_an_owner():
    levels = {
        GLOG + "no route to host": "error",
        GLOG.replace("E", "W", 1) + "slow": "warning",
        GLOG.replace("E", "I", 1) + "listening": "info",
        GLOG + "Local segment descriptor not found": "debug",
        "WARNING: Logging before InitGoogleLogging() is written to STDERR": "debug",
        "[1763806272.131415] [host:4711 :0]  ucp_context.c:12  UCX  ERROR no such device": "error",
        "[1763806272.131415] [host:4711 :0]  parser.c:1  UCX  WARN  unused variable": "warning",
        "Fatal Python error: Segmentation fault": "warning",
    }
    assert await written("\n".join(levels).encode() + b"\n") == [
        {"event": "library_output", "log_level": level, "rank": "pp0.tp1", "text": text}
        for text, level in levels.items()
    ]


async def test_a_process_that_ends_badly_is_heard_to_the_end():
    code = "import faulthandler, os, signal; faulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)"
    assert any("Segmentation fault" in line["text"] for line in await written(code=code))
