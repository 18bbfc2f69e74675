"""A whole decode engine: python examples/decode_engine.py RUNTIME_DIR ROOM.

RUNTIME_DIR is the decode node's (`runtime_dir` of its configuration), ROOM the `room` of a ticket. In place of a model it reads
one layer and prints what is in it.
"""

import sys

from kvbridge.engine import DecodeEngine


def decode(runtime_dir: str, room: int) -> None:
    with DecodeEngine.attach(runtime_dir) as bridge:
        claimed = bridge.wait_claim(room, timeout_s=60)  # all of it, or an error with the reason
        component = bridge.geometry.components[0]
        rows = component.live_rows(claimed.prompt_tokens)
        views = bridge.views[bridge.ranks[0]]
        layer = views.layers(component.kind)[0]
        read = views.read_rows(component.kind, layer, tables=claimed.tables, start_row=rows.start, stop_row=rows.stop)
        print(component.kind, "layer", layer, tuple(read.shape), set(read.unique().tolist()), claimed.metadata)
        bridge.release(room)


if __name__ == "__main__":
    decode(sys.argv[1], int(sys.argv[2]))
