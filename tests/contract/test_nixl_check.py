"""Metadata of a nixl peer that was made to break the library: refused, and nobody suffers."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crc32c import crc32c

from kvbridge.core.errors import TransportError
from kvbridge.transport.base import Endpoint, TransferState
from kvbridge.transport.nixl.agent import NixlEndpoint
from kvbridge.transport.nixl.check import PeerCheck
from kvbridge.transport.nixl.transport import NixlTransport
from tests.contract.harness import BACKENDS, ROOT, Pair, PeerProcess
from tests.helpers.shared_buffer import connect

LEFT_OUT = tuple(label for label in BACKENDS if label != "nixl")
POOL_BYTES = 1 << 20
MUTATIONS, SEED = 25, 2
LIMIT_S = 240.0


def process_apart(pair: Pair) -> PeerCheck:
    assert isinstance(pair.transport, NixlTransport)
    return pair.transport._check


def with_address_version(endpoint: Endpoint, version: int) -> Endpoint:
    """The same peer, whose UCX address says that it has another form: the library ends its process over it."""
    content = NixlEndpoint.model_validate_json(endpoint.data)
    metadata = bytearray(content.metadata)
    place = metadata.index(b"|c") + 2 + 8
    metadata[place] = metadata[place] & 0xF0 | version
    changed = content.model_copy(update={"metadata": bytes(metadata), "checksum": crc32c(metadata)})
    return Endpoint(transport="nixl", data=changed.model_dump_json().encode())


def test_a_description_that_ends_a_process_is_refused_with_its_last_words(pair: Pair) -> None:
    for version in (11, 13):
        with pytest.raises(TransportError, match=r"was ended by it \(.*addr version"):
            connect(pair.transport, with_address_version(pair.process.endpoint, version))
        assert pair.move(pair.blocks(4_096, 8)).state is TransferState.DONE


def test_a_worker_survives_descriptions_made_to_break_it() -> None:
    """In a process of its own, which some of these mutations would end (`python -m tests.fuzz.nixl_metadata --unchecked`)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.nixl_metadata", "--mutations", str(MUTATIONS), "--seed", str(SEED)],
        cwd=ROOT,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2_000:]
    counts = json.loads(done.stdout.splitlines()[-1])  # UCX writes there, too
    assert counts.pop("mutations") == sum(counts.values()) == MUTATIONS
    assert counts.get("ended the process apart", 0) > 0, "none of them would have broken anything"


def test_another_release_and_damaged_metadata_are_refused_before_anybody_reads_them(pair: Pair) -> None:
    content = NixlEndpoint.model_validate_json(pair.process.endpoint.data)
    for changes, words in (
        ({"release": "0.1"}, "runs NIXL 0.1, this process .*; both sides must run the same NIXL release"),
        ({"metadata": content.metadata[:-1]}, "was damaged on the way"),
    ):
        changed = content.model_copy(update=changes)
        with pytest.raises(TransportError, match=words):
            connect(pair.transport, Endpoint(transport="nixl", data=changed.model_dump_json().encode()))


def test_the_process_that_others_are_forked_from_is_started_again(pair: Pair, shm: Path) -> None:
    with PeerProcess(BACKENDS["nixl"], shm / "other", POOL_BYTES) as other:
        endpoint = other.endpoint
        parent = process_apart(pair)
        former = parent._process
        former.kill()
        former.wait()
        pair.transport.disconnect(connect(pair.transport, endpoint))
        assert parent._process is not former


def test_it_ends_with_its_worker() -> None:
    code = (
        "import os, sys\n"
        "from kvbridge.config.transports import NixlSettings\n"
        "from kvbridge.transport.nixl.check import PeerCheck\n"
        "check = PeerCheck(NixlSettings(ucx_tls='tcp', ucx_net_devices='lo'))\n"
        "print(check._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    worker.kill()
    worker.communicate()
    ends_at_s = time.monotonic() + 20.0
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < ends_at_s
        time.sleep(0.02)
