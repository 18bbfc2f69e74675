"""A whole prefill engine: python prefill_engine.py RUNTIME_DIR ROOM PROMPT_TOKENS.

In place of a model it fills each row with the number of its layer. RUNTIME_DIR is the prefill node's (DIR/run/prefill, after
`kvbridge init DIR`), ROOM the `room` of a ticket for PROMPT_TOKENS tokens. Run it at the same time as decode_engine.py or
sparse_decode.py, with the same ROOM; the top of decode_engine.py lists all steps.
"""

import sys

import torch

from kvbridge.engine import PrefillEngine

CHUNK_TOKENS = 512


def prefill(runtime_dir: str, room_id: int, prompt_tokens: int) -> None:
    with PrefillEngine.attach(runtime_dir) as bridge:
        room = bridge.begin(room_id, prompt_tokens=prompt_tokens)
        for start in range(0, prompt_tokens, CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, prompt_tokens)
            for part in room.final_parts(upto=stop):  # the rows of a layer that this chunk makes final
                part.write(torch.full(part.shape, part.layer, dtype=torch.uint8))
            room.publish(stop)  # sending overlaps the next chunk
        room.finish(metadata=b"first token: 42")  # travels with the last bytes


if __name__ == "__main__":
    prefill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
