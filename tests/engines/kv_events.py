"""KV events of real nodes, read by an engine's own decoder. As a program, in the engine's environment: a subscriber of theirs."""

import importlib
import json
import os
import re
import subprocess
import sys
from typing import Any

from tests.engines.servers import ROOT, Setup
from tests.helpers.cluster import DaemonProcess

HEAR_S = 300.0
"""For the subscriber to load its engine, and for events to reach it."""


def check(setup: Setup, module: str, *, checkpoints: bool) -> None:
    """Have the decoder of `module` follow a pair of nodes through requests, evictions and a drop of everything."""
    from tests.helpers.conversation import PAGE, Conversation
    from tests.helpers.host_tiers import drop, forget, host_tiers, on_host
    from tests.helpers.kv_subscriber import Subscriber, hashes

    events = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "checkpoints": checkpoints}
    with host_tiers(tier={"events": events}) as live:
        command = [str(setup.python), "-m", "tests.engines.kv_events", module, *map(_endpoints, live.nodes)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as child:
            try:
                assert child.stdout.readline() == "listening\n"
                talk = Conversation(live, 1)
                talk.cross(3 * PAGE)
                on_host(*live.nodes)
                forget(live)
                drop(*live.nodes)
                talk.cross(3 * PAGE)
                on_host(*live.nodes)
                told = json.loads(child.communicate("over\n", timeout=HEAR_S)[0])
            finally:
                child.kill()
        names = hashes(talk.keys(3 * PAGE).in_namespace(""))
        for batches, groups in zip(told, ({0, 1} if checkpoints else {0}, {0}), strict=True):
            router = Subscriber()
            for batch in batches:
                router.apply(batch)
            assert {("GPU", 0, name) for name in names} | {("CPU", 0, name) for name in names} <= router.known
            found = [event for batch in batches for event in batch]
            assert {event["type"] for event in found} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
            assert {event["block_size"] for event in found if event["type"] == "BlockStored"} == {PAGE}
            assert {event.get("group_idx", 0) for event in found} == groups
            assert {event["medium"] for event in found if event["type"] == "BlockRemoved"} == {"GPU"}


def _endpoints(node: DaemonProcess) -> str:
    (line,) = (line for line in node.log_path.read_text().splitlines() if "kv_events_listen" in line)
    return ",".join(re.findall(r"tcp://[0-9.:]+", line))


def _subscribe(module: str, *nodes: str) -> None:
    """Print all that the engine's decoder makes of each node's batches: those before the first one heard are asked for."""
    import msgspec
    import zmq

    decoder = msgspec.msgpack.Decoder(importlib.import_module(module).KVEventBatch)
    context = zmq.Context()
    sockets = []
    for node in nodes:
        events, replay = node.split(",")
        subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(events)
        asker.connect(replay)
        sockets.append((subscriber, asker))
    print("listening", flush=True)
    sys.stdin.readline()
    print(json.dumps([_all(*pair, decoder) for pair in sockets]), flush=True)
    context.destroy(linger=0)


def _all(subscriber: Any, asker: Any, decoder: Any) -> list[list[dict[str, Any]]]:
    import msgspec

    heard: dict[int, bytes] = {}
    while subscriber.poll(1_000):
        _, number, batch = subscriber.recv_multipart()
        heard[int.from_bytes(number, "big")] = batch
    assert heard, "the subscriber has heard nothing"
    asker.send_multipart([b"", (0).to_bytes(8, "big")])
    replayed = {}
    while (frames := asker.recv_multipart())[-1]:
        replayed[int.from_bytes(frames[2], "big")] = frames[3]
    assert list(replayed) == list(range(len(replayed)))
    assert heard.items() <= replayed.items()
    return [msgspec.to_builtins(decoder.decode(batch))[1] for batch in replayed.values()]


if __name__ == "__main__":
    _subscribe(*sys.argv[1:])
