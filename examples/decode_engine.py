"""A whole decode engine: python decode_engine.py RUNTIME_DIR ROOM.

In place of a model it reads every layer, and prints the last one. It needs nothing but an installed kvbridge:

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


def decode(runtime_dir: str, room_id: int) -> None:
    with DecodeEngine.attach(runtime_dir) as bridge, bridge.claim(room_id, timeout_s=60) as room:
        for part in room.parts():  # all rows of the prompt are there
            rows = part.read()
        print(part.kind, "layer", part.layer, tuple(rows.shape), set(rows.unique().tolist()), room.metadata)


if __name__ == "__main__":
    decode(sys.argv[1], int(sys.argv[2]))
