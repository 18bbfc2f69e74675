"""How far a call travels within a daemon: `python -m tests.hops` counts one publication, and one plain admission on either side.

A prefill and a decode daemon run in this process, with their rank workers beside it, and an engine is attached to prefill. Calls of
Python functions of `kvbridge` count; lambdas and comprehensions belong to the function around them. A publication counts from the
bytes that its connection has read. An admission counts without HTTP; decode's ends with its offer. `-v` lists the calls.
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control import local
from kvbridge.core.session.tables import RoomState
from kvbridge.daemon.decode import decode_daemon
from kvbridge.daemon.prefill import prefill_daemon
from kvbridge.engine import PrefillEngine

PACKAGE = str(Path(local.__file__).parents[1])
TOKENS, LIMIT_S = 256, 60
NODE = {"instance": "i", "model": {"preset": "tiny-gqa"}, "http": {"port": 0}}
PREFILL = {"pools": {"device": {"full": 64}}, "control": {"bind": "tcp://127.0.0.1:0"}}
DECODE = {"pools": {"device": {"full": 64}, "host": {"components": []}}}


class Hops:
    """The calls under one call, in order: each frame's file and function."""

    def __init__(self) -> None:
        self.frames: dict[FrameType, str] = {}

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.frames.setdefault(frame, f"{code.co_filename[len(PACKAGE) + 1 :]} {code.co_qualname}")

    def of(self, call: Callable[..., Any], *args: Any) -> None:
        """Call, and keep the frames."""
        sys.setprofile(self._profile)
        try:
            with suppress(StopIteration):  # a coroutine that has not waited
                call(*args)
        finally:
            sys.setprofile(None)

    def show(self, what: str, *, each: bool) -> None:
        """Print how many calls, files and classes there were, and the calls if wanted."""
        classes = {name.rpartition(".")[0] for name in self.frames.values() if "." in name.split()[1]}
        files = {name.split()[0] for name in self.frames.values()}
        counts = f"{what}: {len(self.frames)} calls, {len(files)} files, {len(classes)} classes"
        print(counts, *(self.frames.values() if each else ()), sep="\n  ")


def publish(runtime_dir: Path, room: int, hops: Hops) -> None:
    """Publish all tokens of a room, and count in the daemon; runs on a thread."""
    heard = local._Connection.data_received

    def counted(connection: local._Connection, data: bytes) -> None:
        local._Connection.data_received = heard
        hops.of(heard, connection, data)

    with PrefillEngine.attach(runtime_dir) as engine:
        begun = engine.begin(room, prompt_tokens=TOKENS)
        local._Connection.data_received = counted
        begun.publish(TOKENS)
        begun.finish()


async def count(folder: Path, *, each: bool) -> None:
    """Run both daemons, and print the three counts."""
    prefill = prefill_daemon(PrefillConfig.model_validate(NODE | PREFILL | {"runtime_dir": folder / "p"}))
    decode = decode_daemon(DecodeConfig.model_validate(NODE | DECODE | {"runtime_dir": folder / "d"}))
    try:
        for daemon in (prefill, decode):
            await daemon.start()
            while not daemon.overview.readiness().ready:  # noqa: ASYNC110 - a tool
                await asyncio.sleep(0.05)
        for room in (1, 2):  # the first one makes the nodes known to each other
            admissions = {"admission on prefill": Hops(), "admission on decode": Hops()}
            places = ((), (prefill.overview.control,))
            for daemon, place, hops in zip((prefill, decode), places, admissions.values(), strict=True):
                request = AdmissionRequest(room=room, prompt_tokens=TOKENS, prefill=place)
                hops.of(daemon.admission.admit(request).send, None)
            await prefill.rooms.book.wait(room, LIMIT_S, frozenset({RoomState.OFFERED}))
        publication = Hops()
        await asyncio.to_thread(publish, folder / "p", 2, publication)
        for what, hops in ({"publication": publication} | admissions).items():
            hops.show(f"one {what}", each=each)
    finally:
        await decode.close()
        await prefill.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(asyncio.wait_for(count(Path(name), each="-v" in sys.argv), LIMIT_S))
