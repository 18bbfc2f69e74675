"""A whole decode engine: python decode_engine.py RUNTIME_DIR ROOM.

In place of a model it reads one layer and prints what is in it. It needs nothing but an installed kvbridge:

1. `kvbridge init DIR --one-host`, then `kvbridge up DIR`: three daemons, whose runtime directories are DIR/run/prefill and
   DIR/run/decode (`runtime_dir` of their configurations).
2. curl -s -X POST http://127.0.0.1:7900/v1/requests -H 'content-type: application/json' \
       -d '{"prompt_tokens": 1000, "max_new_tokens": 64}'
   The answer is a ticket; its `room` is ROOM.
3. Both engines at once, before the ticket ends (`timeouts.ticket_s`, 60 s): this one waits until every row is there.
   python decode_engine.py DIR/run/decode ROOM &
   python prefill_engine.py DIR/run/prefill ROOM 1000
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
