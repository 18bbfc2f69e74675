"""A whole prefill engine: python prefill_engine.py RUNTIME_DIR ROOM PROMPT_TOKENS.

In place of a model it fills each row with the number of its layer. RUNTIME_DIR is the prefill node's (DIR/run/prefill, after
`kvbridge init DIR`), ROOM the `room` of a ticket that was asked for PROMPT_TOKENS tokens. It runs at the same time as
decode_engine.py or sparse_decode.py, with the same ROOM; the top of decode_engine.py has all steps.
"""

import sys

import torch

from kvbridge.engine import PrefillEngine, Section, section_rows

CHUNK_TOKENS = 512


def prefill(runtime_dir: str, room: int, prompt_tokens: int) -> None:
    with PrefillEngine.attach(runtime_dir) as bridge:
        tables = bridge.begin(room, prompt_tokens=prompt_tokens).tables  # which pages are this room's
        for start in range(0, prompt_tokens, CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, prompt_tokens)
            chunk = Section(prompt_tokens=prompt_tokens, start_token=start, stop_token=stop)
            for views in bridge.views.values():  # one for each rank: zero-copy
                for component in bridge.geometry.components:
                    rows = section_rows(component, chunk)  # rows that this chunk makes final
                    for layer in views.layers(component.kind):
                        width = views.home(component.kind, layer, tables=tables).row_bytes
                        computed = torch.full((rows.count, width), layer, dtype=torch.uint8)
                        views.write_rows(component.kind, layer, tables=tables, start_row=rows.start, rows=computed)
            bridge.publish(room, stop)  # sending overlaps the next chunk
        bridge.finish(room, metadata=b"first token: 42")  # travels with the last bytes


if __name__ == "__main__":
    prefill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
