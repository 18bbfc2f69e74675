"""Engines in processes of their own, to be killed: they take a room to a certain point, say so and wait.

They use the link alone, without views of the memory: what is in the pages does not matter to those who are to die.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ATTACH = """
import sys, os
from pathlib import Path
from kvbridge.core.wire.engine_messages import *
from kvbridge.core.ids import Role
from kvbridge.engine.link import EngineLink
folder, role, room, tokens = sys.argv[1], Role(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
link = EngineLink(Path(folder), name=f"engine-{os.getpid()}", timeout_s=20)
link.call(Attach(call=link.number(), role=role), Attached)
"""
_PREFILL = """
link.call(Begin(call=link.number(), room=room, prompt_tokens=tokens), Pages)
link.call(Publish(call=link.number(), room=room, upto_token=tokens // 2), Accepted)
"""
_DECODE = """
link.call(Claim(call=link.number(), room=room), Pages)
"""
_WAIT = """
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def doomed_engine(runtime_dir: Path, role: str, room: int, tokens: int) -> Iterator[subprocess.Popen[str]]:
    """An engine that has half published a room (prefill) or has claimed it (decode). Killed afterwards if it still lives."""
    script = _ATTACH + (_PREFILL if role == "prefill" else _DECODE) + _WAIT
    command = [sys.executable, "-c", script, str(runtime_dir), role, str(room), str(tokens)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"  # or end of file, when it has failed
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)
