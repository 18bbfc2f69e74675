"""An engine for load: takes rooms through their life and looks at the bytes of some of them.

`python -m tests.bench.load_engine prefill|decode RUNTIME_DIR SAMPLE_EVERY`. Prefill reads lines "room tokens admit" and answers
nothing but failures; decode reads nothing. Both print JSON lines: {"ready": true}, {"room": ..., "phases_s": ...}, {"room": ...,
"code": ..., "error": ...}. Rooms whose id is a multiple of SAMPLE_EVERY are filled and compared byte for byte (0: none).
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
from kvbridge.engine.adapters import synthetic
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine


def tell(fact: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def prefill(runtime_dir: Path, sample_every: int) -> None:
    with PrefillEngine.attach(runtime_dir) as engine:
        tell({"ready": True})
        for line in sys.stdin:
            room, tokens, admit = map(int, line.split())
            try:
                if admit:
                    engine.admit(room, prompt_tokens=tokens)
                tables = engine.begin(room, prompt_tokens=tokens).tables
                if sample_every and room % sample_every == 0:
                    section = Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)
                    for views in engine.views.values():
                        synthetic.fill(views, room=room, tables=tables, section=section)
                engine.publish(room, tokens)
                engine.finish(room)
            except BridgeError as error:
                tell({"room": room, "code": error.code, "error": str(error)})
            engine.events()


def decode(runtime_dir: Path, sample_every: int) -> None:
    with DecodeEngine.attach(runtime_dir) as engine:
        tell({"ready": True})
        while not select.select([0], [], [], 0)[0]:
            for event in engine.events(0.1):
                if event.kind == "committed":
                    serve(engine, event.room, sample_every)
                elif event.kind in {"aborted", "failed"}:
                    tell({"room": event.room, "code": event.code, "error": event.reason})


def serve(engine: DecodeEngine, room: int, sample_every: int) -> None:
    try:
        claimed = engine.claim(room)
        wrong: list[synthetic.Mismatch] = []
        sampled = bool(sample_every) and room % sample_every == 0
        if sampled:
            for views in engine.views.values():
                wrong += synthetic.compare(
                    views, room=room, tables=claimed.tables, tokens=claimed.prompt_tokens
                ).mismatches
        engine.release(room)
    except BridgeError as error:
        tell({"room": room, "code": error.code, "error": str(error)})
        return
    if wrong:
        tell({"room": room, "code": "wrong_bytes", "error": f"{len(wrong)} wrong rows: {wrong[0]}"})
    else:
        payload = sum(amount.bytes for amount in claimed.amounts.values())
        tell({"room": room, "phases_s": claimed.phases_s, "checked": sampled, "bytes": payload})


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"prefill": prefill, "decode": decode}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
