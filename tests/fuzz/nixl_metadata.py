"""Mutated NIXL descriptions against a real rank worker's transport: `python -m tests.fuzz.nixl_metadata --mutations 1000`.

The process meets mutated peers while it writes to a good one; its death is the finding. `--unchecked` leaves the check out.
"""

import argparse
import collections
import json
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from crc32c import crc32c

from kvbridge.core.errors import BridgeError
from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import Endpoint, Peer, TransferState, Transport
from kvbridge.transport.nixl.agent import NixlEndpoint
from kvbridge.transport.nixl.check import PeerCheck
from kvbridge.transport.threads import Call
from tests.contract.harness import BACKENDS, Pair, PeerProcess, wait
from tests.helpers.shared_buffer import connect

POOL_BYTES = 1 << 20
AT_ONCE = 4
ADDRESS_TAG = b"|c"
"""Before the length and the bytes of the peer's UCX address."""
NUMBERS = (b"\xff" * 8, bytes(8), *((1 << bit).to_bytes(8, "little") for bit in (6, 16, 31, 62)))


def mutated(content: NixlEndpoint, rng: random.Random) -> NixlEndpoint:
    """A description with some bytes changed: anywhere, or in the UCX address alone so that the rest is in order."""
    metadata, name = content.metadata, f"kvbridge-{uuid.UUID(int=rng.getrandbits(128)).hex}"
    if rng.random() < 0.5:
        start = metadata.index(ADDRESS_TAG) + len(ADDRESS_TAG) + 8
        length = int.from_bytes(metadata[start - 8 : start], "little")
        address = _changed(metadata[start : start + length], rng)
        metadata = metadata[: start - 8] + len(address).to_bytes(8, "little") + address + metadata[start + length :]
    else:
        metadata = _changed(metadata, rng)
    metadata = metadata.replace(content.agent.encode(), name.encode())  # so that no two are the same peer
    return content.model_copy(update={"agent": name, "metadata": metadata, "checksum": crc32c(metadata)})


def _changed(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = (
            0 if rng.random() < 0.2 else rng.randrange(len(changed) + 1)
        )  # what comes first decides how the rest is read
        match rng.randrange(5):
            case 0:
                changed[place : place + 1] = rng.randbytes(1)
            case 1:
                changed[place : place + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in changed[place : place + 1])
            case 2:
                del changed[place : place + rng.randrange(1, 9)]
            case 3:
                changed[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                changed[place : place + 8] = rng.choice(NUMBERS)
    return bytes(changed)


def outcomes(
    transport: Transport, contents: Iterator[NixlEndpoint], at_once: int
) -> Iterator[tuple[NixlEndpoint, Peer | str]]:
    """Connect to each, some at a time, and say what became of it: a peer, or the reason of the refusal."""
    under_way: list[tuple[NixlEndpoint, Call[Peer]]] = []
    left = True
    while left or under_way:
        while left and len(under_way) < at_once:
            content = next(contents, None)
            left = content is not None
            if content is not None:
                endpoint = Endpoint(transport="nixl", data=content.model_dump_json().encode())
                under_way.append((content, transport.connect(endpoint)))
        for item in list(under_way):
            content, connection = item
            found: Peer | str | None
            try:
                found = connection.poll()
            except BridgeError as error:
                found = str(error)
            if found is not None:
                under_way.remove(item)
                yield content, found
        time.sleep(0.001)


def kind_of(reason: str) -> str:
    """The refusals that matter, apart."""
    kinds = {
        "was ended by it": "ended the process apart",
        "did not answer": "no answer",
        "could not be checked": "hung the process apart",
    }
    return next((kind for words, kind in kinds.items() if words in reason), "refused by the library")


def main() -> None:
    """Meet the mutated peers; prints how many came to what end, as JSON, if it lives."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.nixl_metadata", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--mutations", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unchecked", action="store_true", help="load them without a check")
    given = parser.parse_args()
    if given.unchecked:
        PeerCheck.check = lambda *_, **__: iter(())  # type: ignore[assignment, method-assign]
    rng, backend = random.Random(given.seed), BACKENDS["nixl"]
    counts: collections.Counter[str] = collections.Counter()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-fuzz-") as path,
        PeerProcess(backend, Path(path) / "good", POOL_BYTES) as good,
        PeerProcess(backend, Path(path) / "bad", POOL_BYTES) as bad,
    ):
        transport = backend.create()
        source = backend.source_buffer(Path(path) / "source", POOL_BYTES)
        transport.register([source.memory()])
        pair = Pair(transport, source, good, connect(transport, good.endpoint))
        content = NixlEndpoint.model_validate_json(bad.endpoint.data)
        to_bad = Operations(*(np.array([number], dtype=np.uint64) for number in (source.address, bad.address, 4_096)))
        contents = (mutated(content, rng) for _ in range(given.mutations))
        for _, found in outcomes(transport, contents, AT_ONCE if not given.unchecked else 1):
            if isinstance(found, str):
                counts[kind_of(found)] += 1
            else:
                state = wait(transport.submit(found, to_bad, deadline_s=2.0)).state
                counts[f"connected, written to: {state.value}"] += 1
                transport.disconnect(found)
            assert pair.move(pair.blocks(4_096, 8)).state is TransferState.DONE
        transport.close()
    print(json.dumps({"mutations": given.mutations, **counts}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
