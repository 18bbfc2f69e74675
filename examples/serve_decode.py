"""A decode engine's serving loop, many rooms at once: python serve_decode.py RUNTIME_DIR COUNT.

It ends when COUNT rooms are over. In place of a model, each step reads one layer of every room; an answer has four tokens. Rooms
come by `events`: no other call waits, so one slow room holds up no other. prefill_engine.py sends the rooms, several at once.
"""

import sys

from kvbridge.engine import DecodeEngine, DecodeRoom

ANSWER_TOKENS = 4


def serve(runtime_dir: str, count: int) -> None:
    active: dict[int, DecodeRoom] = {}
    answers: dict[int, list[int]] = {}
    over = 0
    with DecodeEngine.attach(runtime_dir) as bridge:
        while over < count:
            for event in bridge.events(timeout_s=0.0 if active else 0.5):
                if event.kind == "committed":  # every row is here
                    active[event.room], answers[event.room] = bridge.claim(event.room), []
                elif event.kind in {"aborted", "failed"} and event.room not in active:  # it ended before it was claimed
                    print("no answer:", event.reason)
                    over += 1
                elif event.kind == "cancel" and event.room in active:
                    active.pop(event.room).release()
                    over += 1
            for number, room in list(active.items()):
                answers[number].append(decode_one_token(room))
                if len(answers[number]) == ANSWER_TOKENS:
                    print("answer:", answers.pop(number), room.metadata)
                    active.pop(number).release()
                    over += 1


def decode_one_token(room: DecodeRoom) -> int:
    part = next(iter(room.parts()))
    return int(part.read().flatten()[0])


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
