"""An engine process that is not the daemon's user: python -m tests.helpers.engine_of_another_user JOB.

JOB is a JSON document: `role`, `runtime_dir`, `daemon_user`, `room`, `tokens`, and on decode `hold`: after reading, wait to be
killed. Prefill fills each row with the number of its layer; decode looks whether that has come. Prints `done` or `held`.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from kvbridge.engine import DecodeEngine, PrefillEngine, Section, section_rows


def prefill(engine: PrefillEngine, room: int, tokens: int) -> None:
    tables = engine.begin(room, prompt_tokens=tokens).tables
    whole = Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)
    for views in engine.views.values():
        for component in engine.geometry.components:
            rows = section_rows(component, whole)
            for layer in views.layers(component.kind):
                filled = torch.full((rows.count, component.row_bytes), layer + 1, dtype=torch.uint8)
                views.write_rows(component.kind, layer, tables=tables, start_row=rows.start, rows=filled)
    engine.publish(room, tokens)
    engine.finish(room, metadata=b"")


def decode(engine: DecodeEngine, room: int, *, hold: bool) -> None:
    claimed = engine.wait_claim(room, timeout_s=30)
    views, seen = engine.views[engine.ranks[0]], 0
    for component in engine.geometry.components:
        rows = component.live_rows(claimed.prompt_tokens)
        for layer in views.layers(component.kind):
            read = views.read_rows(
                component.kind, layer, tables=claimed.tables, start_row=rows.start, stop_row=rows.stop
            )
            assert bool((read == layer + 1).all()), (component.kind, layer)
            seen += read.numel()
    assert seen
    if hold:
        print("held", flush=True)
        time.sleep(600)
    engine.release(room)


def main(job: dict) -> None:
    kind = PrefillEngine if job["role"] == "prefill" else DecodeEngine
    with kind.attach(job["runtime_dir"], daemon_user=job["daemon_user"]) as engine:
        if job["role"] == "prefill":
            prefill(engine, job["room"], job["tokens"])
        else:
            decode(engine, job["room"], hold=job["hold"])
    print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
