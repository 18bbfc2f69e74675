"""An engine for load: takes rooms through their life and looks at the bytes of some of them.

`python -m tests.bench.load_engine prefill|decode RUNTIME_DIR FACTS`. Prefill reads lines "room tokens admit" and answers nothing
but failures; decode reads nothing. Both print JSON lines: {"ready": true}, {"room": ..., "phases_s": ...}, {"room": ..., "code":
..., "error": ...}.
"""

import json
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.cli.fit import prompt_tokens, read_trace
from kvbridge.core.errors import BridgeError
from kvbridge.core.plan.operations import Section
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.base import Engine
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from kvbridge.tier.keys import NO_KEYS, Keys
from tests.helpers import synthetic

NUMBER_BITS = 20
"""The last bits of a room's id are the number of its request, where rooms have prompts."""
SHARED = "shared"
SHARED_TOKENS = 2 * 256 + 64
"""Tokens of every shared prompt: two whole pages, and one that nobody shares."""
PREFIXES = 16
"""Different ones, which nine rooms of ten have in equal parts."""
Prompts = Callable[[int], npt.NDArray[np.uint32]]


@dataclass(frozen=True)
class Facts:
    sample_every: int = 0
    """Rooms whose id is a multiple are filled and compared byte for byte; 0: none."""
    prompts: str = ""
    """SHARED, a file with a trace, or nothing: then rooms have no page keys. With prompts all rooms are filled."""
    chunk_tokens: int = 1 << 30
    """How much prefill publishes at a time."""

    def prompts_by_number(self) -> Prompts | None:
        if not self.prompts or self.prompts == SHARED:
            return _shared_prompt if self.prompts else None
        requests = read_trace(Path(self.prompts))
        return lambda number: prompt_tokens(requests[number - 1], number)


def _shared_prompt(number: int) -> npt.NDArray[np.uint32]:
    """All of a prompt is a prefix of others', or nothing is."""
    group, tenth = divmod(number, 10)
    return np.full(SHARED_TOKENS, group % PREFIXES if tenth < 9 else PREFIXES + number, dtype=np.uint32)


def tell(**fact: Any) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def refused(room: int, error: BridgeError) -> None:
    tell(room=room, code=error.code, error=str(error))


class LoadEngine:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._prompts = facts.prompts_by_number()

    def keys(self, engine: Engine, room: int) -> Keys:
        number = room & ((1 << NUMBER_BITS) - 1)
        return engine.page_keys(self._prompts(number)) if self._prompts else NO_KEYS

    def sampled(self, room: int) -> bool:
        return bool(self._facts.sample_every) and room % self._facts.sample_every == 0

    def prefill(self, runtime_dir: Path) -> None:
        with PrefillEngine.attach(runtime_dir) as engine:
            tell(ready=True)
            for line in sys.stdin:
                room, tokens, admit = map(int, line.split())
                try:
                    self._compute(engine, room, tokens, admit=bool(admit))
                except BridgeError as error:
                    refused(room, error)
                engine.events()

    def _compute(self, engine: PrefillEngine, room: int, tokens: int, *, admit: bool) -> None:
        begun_s, keys = time.monotonic(), self.keys(engine, room)
        if admit:
            engine.admit(room, prompt_tokens=tokens, page_keys=keys)
        begun = engine.begin(room, prompt_tokens=tokens, page_keys=keys)
        if keys and self.sampled(room) and begun.held_by_prefill:
            found = {"tables": begun.restore, "tokens": begun.held_by_prefill, "keys": keys}
            require_right(engine, room, "held by prefill", **found)
        filled = bool(keys) or self.sampled(room)
        if filled:
            for at, tables in begun.checkpoints.items():
                self._fill(engine, begun, at, at, keys, tables=tables, prompt_tokens=at)
        step = self._facts.chunk_tokens
        for start in range(begun.held_by_prefill, tokens, step):
            stop = min(start + step, tokens)
            if filled:
                self._fill(engine, begun, start, stop, keys, tables=begun.tables, prompt_tokens=tokens)
            begun.publish(stop)
        told = {"prefill": begun.held_by_prefill, "prefill_host": begun.host_tokens}
        metadata = json.dumps(told | {"prefill_s": time.monotonic() - begun_s}).encode() if keys else b""
        begun.finish(metadata=metadata, checkpoints=tuple(begun.checkpoints) if keys else ())

    @staticmethod
    def _fill(engine: PrefillEngine, begun: PrefillRoom, start: int, stop: int, keys: Keys, **where: Any) -> None:
        section = Section(prompt_tokens=where["prompt_tokens"], start_token=start, stop_token=stop)
        for views in engine.views.values():
            synthetic.fill(views, room=begun.id, tables=where["tables"], section=section, keys=keys)

    def decode(self, runtime_dir: Path) -> None:
        with DecodeEngine.attach(runtime_dir) as engine:
            tell(ready=True)
            while not select.select([0], [], [], 0)[0]:
                for event in engine.events(0.1):
                    if event.kind == "committed":
                        try:
                            self._serve(engine, event)
                        except BridgeError as error:
                            refused(event.room, error)
                    elif event.kind in {"aborted", "failed"}:
                        tell(room=event.room, code=event.code, error=event.reason)

    def _serve(self, engine: DecodeEngine, event: RoomEvent) -> None:
        room, keys = event.room, self.keys(engine, event.room)
        claimed = engine.claim(room, page_keys=keys)
        checked = 0
        if self.sampled(room):
            found = {"tables": claimed.tables, "tokens": claimed.prompt_tokens, "keys": keys}
            checked = require_right(engine, room, "that came", **found)
        claimed.release()
        note = json.loads(next(iter(claimed.metadata.values()))) if keys else {}
        tell(
            room=room,
            phases_s=claimed.phases_s | ({"prefill": note.pop("prefill_s")} if note else {}),
            checked_bytes=checked,
            amounts={kind: [amount.bytes, amount.operations] for kind, amount in claimed.amounts.items()},
            held=note | {"decode": claimed.held_by_decode, "decode_host": claimed.host_tokens},
        )


class WrongBytesError(BridgeError, code="wrong_bytes"):
    """Bytes are not those that were written."""


def require_right(engine: Engine, room: int, what: str, **found: Any) -> int:
    """Compare all that a room's pages should hold; return how many bytes were looked at. Raises WrongBytesError."""
    checked = 0
    for views in engine.views.values():
        compared = synthetic.compare(views, room=room, **found)
        if compared.wrong_bytes:
            raise WrongBytesError(f"{compared.wrong_bytes} wrong bytes {what}: {compared.mismatches[0]}")
        checked += compared.checked_bytes
    return checked


if __name__ == "__main__":
    torch.set_num_threads(1)
    served = LoadEngine(Facts(**json.loads(sys.argv[3])))
    {"prefill": served.prefill, "decode": served.decode}[sys.argv[1]](Path(sys.argv[2]))
