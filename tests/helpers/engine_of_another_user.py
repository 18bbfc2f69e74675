"""An engine process that is not the daemon's user: python -m tests.helpers.engine_of_another_user JOB.

JOB is a JSON document: `role`, `runtime_dir`, `daemon_user`, `room`, `tokens`, and on decode `hold`: after reading, wait to be
killed. Prefill fills each row with the number of its layer; decode looks whether that has come. Prints `done` or `held`.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from kvbridge.engine import DecodeEngine, PrefillEngine


def prefill(engine: PrefillEngine, room_id: int, tokens: int) -> None:
    room = engine.begin(room_id, prompt_tokens=tokens)
    for part in room.final_parts(upto=tokens):
        part.write(torch.full(part.shape, part.layer + 1, dtype=torch.uint8))
    room.publish(tokens)
    room.finish()


def decode(engine: DecodeEngine, room_id: int, *, hold: bool) -> None:
    with engine.claim(room_id, timeout_s=30) as room:
        seen = 0
        for part in room.parts():
            read = part.read()
            assert bool((read == part.layer + 1).all()), part
            seen += read.numel()
        assert seen
        if hold:
            print("held", flush=True)
            time.sleep(600)


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
