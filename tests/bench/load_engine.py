"""An engine for load: takes rooms through their life and looks at the bytes of some of them.

`python -m tests.bench.load_engine prefill|decode RUNTIME_DIR SAMPLE_EVERY SHARED`. Prefill reads lines "room tokens admit" and
answers nothing but failures; decode reads nothing. Both print JSON lines: {"ready": true}, {"room": ..., "phases_s": ...},
{"room": ..., "code": ..., "error": ...}. Rooms whose id is a multiple of SAMPLE_EVERY are filled and compared byte for byte (0:
none). SHARED (0 or 1): rooms have the prompts of `shared_prompts`, and their page keys. Then all are filled, from where the node
says.
"""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path
from typing import Any

import torch

from kvbridge.core.errors import BridgeError
from kvbridge.core.plan.operations import Section
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.base import Engine
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from kvbridge.tier.keys import NO_KEYS, Keys
from tests.bench.shared_prompts import SHARED_TOKENS, prompt
from tests.helpers import synthetic


def tell(fact: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def keys_of(engine: Engine, room: int, tokens: int, *, shared: bool) -> Keys:
    return engine.page_keys(prompt(room, tokens)) if shared else NO_KEYS


def prefill(runtime_dir: Path, sample_every: int, *, shared: bool) -> None:
    with PrefillEngine.attach(runtime_dir) as engine:
        tell({"ready": True})
        for line in sys.stdin:
            room, tokens, admit = map(int, line.split())
            keys = keys_of(engine, room, tokens, shared=shared)
            try:
                if admit:
                    engine.admit(room, prompt_tokens=tokens, page_hashes=keys)
                begun = engine.begin(room, prompt_tokens=tokens, page_hashes=keys)
                if shared or (sample_every and room % sample_every == 0):
                    fill(engine, begun, keys)
                engine.publish(room, tokens)
                engine.finish(room, checkpoints=tuple(begun.checkpoints) if shared else ())
            except BridgeError as error:
                tell({"room": room, "code": error.code, "error": str(error)})
            engine.events()


def fill(engine: PrefillEngine, begun: PrefillRoom, keys: Keys) -> None:
    tokens = begun.prompt_tokens
    whole = Section(prompt_tokens=tokens, start_token=begun.computed_tokens, stop_token=tokens)
    parts = [
        (tables, Section(prompt_tokens=at, start_token=at, stop_token=at)) for at, tables in begun.checkpoints.items()
    ]
    for tables, section in [*parts, (begun.tables, whole)]:
        for views in engine.views.values():
            synthetic.fill(views, room=begun.room, tables=tables, section=section, keys=keys)


def decode(runtime_dir: Path, sample_every: int, *, shared: bool) -> None:
    with DecodeEngine.attach(runtime_dir) as engine:
        tell({"ready": True})
        while not select.select([0], [], [], 0)[0]:
            for event in engine.events(0.1):
                if event.kind == "committed":
                    serve(engine, event, sample_every, shared=shared)
                elif event.kind in {"aborted", "failed"}:
                    tell({"room": event.room, "code": event.code, "error": event.reason})


def serve(engine: DecodeEngine, event: RoomEvent, sample_every: int, *, shared: bool) -> None:
    room = event.room
    try:
        keys = keys_of(engine, room, SHARED_TOKENS, shared=shared)
        claimed = engine.claim(room, page_hashes=keys)
        wrong: list[synthetic.Mismatch] = []
        sampled = bool(sample_every) and room % sample_every == 0
        if sampled:
            for views in engine.views.values():
                wrong += synthetic.compare(
                    views, room=room, tables=claimed.tables, tokens=claimed.prompt_tokens, keys=keys
                ).mismatches
        engine.release(room)
    except BridgeError as error:
        tell({"room": room, "code": error.code, "error": str(error)})
        return
    if wrong:
        tell({"room": room, "code": "wrong_bytes", "error": f"{len(wrong)} wrong rows: {wrong[0]}"})
    else:
        payload = sum(amount.bytes for amount in claimed.amounts.values())
        tell(
            {
                "room": room,
                "phases_s": claimed.phases_s,
                "checked": sampled,
                "bytes": payload,
                "held": claimed.prefix_tokens,
            }
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"prefill": prefill, "decode": decode}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), shared=sys.argv[4] == "1")
