"""The backends with settings fit for tests, and a handle on a peer process. Every wait has a limit."""

import base64
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import pytest

from kvbridge import processes
from kvbridge.config.transports import LocalSettings, MooncakeSettings, NixlSettings, TransportSettings
from kvbridge.core.errors import TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.transport import create_transport
from kvbridge.transport.base import Endpoint, Peer, Transfer, TransferState, TransferStatus, Transport
from tests.helpers.faulty_transport import FaultySettings, FaultyTransport
from tests.helpers.shared_buffer import DeviceBuffer, SharedBuffer

Buffer = SharedBuffer | DeviceBuffer
TestT = TypeVar("TestT", bound=Callable[..., None])

ROOT = Path(__file__).resolve().parents[2]
PEER_START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 30.0
POLL_PAUSE_S = 0.0002
LONGEST_POLL_S = 0.05

MOONCAKE = MooncakeSettings(
    transfer_timeout_s=5, progress_timeout_s=1, quiet_timeout_s=6.0, connect_timeout_s=3, window_operations=8
)
NIXL = NixlSettings(ucx_tls="tcp", ucx_net_devices="lo", connect_timeout_s=3.0, quiet_timeout_s=1.0)


@dataclass(frozen=True)
class Backend:
    label: str
    name: str
    settings: TransportSettings
    """Short timeouts, and a quiet timeout that is long enough for a frozen peer's operations to end."""
    module: str
    """The library behind it, empty for none; of several, separated by "|", the first that is installed."""
    outlives_peer: bool = False
    """Whether a write can succeed although the peer's process is dead or stopped, since its memory is reached directly."""
    source: MemoryKind = MemoryKind.DRAM
    destination: MemoryKind = MemoryKind.DRAM
    faults: FaultySettings | None = None
    """Put into the transports of this process, not into the peer's."""

    @property
    def needs_device(self) -> bool:
        """Whether it moves device memory."""
        return MemoryKind.VRAM in {self.source, self.destination}

    def source_buffer(self, path: Path, length_bytes: int) -> Buffer:
        """Memory of this process to write from: `path`, or of device 0."""
        if self.source is MemoryKind.VRAM:
            return DeviceBuffer(0, length_bytes)
        return SharedBuffer(path, length_bytes)

    def create(self) -> Transport:
        return self._create(self.settings)

    def impatient(self) -> Transport:
        """The same with a quiet timeout so short that a frozen peer's operations outlast it."""
        names = ("mooncake", "nixl", "local")
        short = {name: getattr(self.settings, name).model_copy(update={"quiet_timeout_s": 0.1}) for name in names}
        return self._create(self.settings.model_copy(update=short))

    def _create(self, settings: TransportSettings) -> Transport:
        created = create_transport(self.name, settings)
        return FaultyTransport(created, self.faults) if self.faults else created


BACKENDS = {
    backend.label: backend
    for backend in (
        Backend("mooncake", "mooncake", TransportSettings(mooncake=MOONCAKE), "mooncake.engine"),
        Backend("nixl", "nixl", TransportSettings(nixl=NIXL), "nixl_cu12|nixl_cu13"),
        Backend("local", "local", TransportSettings(local=LocalSettings()), "", outlives_peer=True),
        Backend(
            "faulty",
            "mooncake",
            TransportSettings(mooncake=MOONCAKE),
            "mooncake.engine",
            faults=FaultySettings(reorder=True, seed=7, delay_s=0.002),
        ),
    )
}

DRAM, VRAM = MemoryKind.DRAM, MemoryKind.VRAM
SMALL_SLICES = LocalSettings(device_slice_bytes=1 << 20, registration_wait_s=10.0)
"""An abort meets a transfer of which the device has only a part."""
DEVICE_BACKENDS = {
    f"{name} {source}-{destination}": replace(
        BACKENDS[name],
        label=f"{name} {source}-{destination}",
        settings=TransportSettings(nixl=NIXL, local=SMALL_SLICES),
        source=source,
        destination=destination,
    )
    for name, source, destination in (
        ("local", VRAM, DRAM),
        ("local", VRAM, VRAM),
        ("local", DRAM, VRAM),
        ("nixl", VRAM, DRAM),
        ("nixl", VRAM, VRAM),
    )
}
"""The same with device memory, for a machine with a GPU. Mooncake refuses it on TCP."""


def any_memory(test: TestT) -> TestT:
    """Mark a test that runs with every kind of memory; the others run with host memory only."""
    test.device_backends = tuple(DEVICE_BACKENDS)  # type: ignore[attr-defined]
    return test


def any_local_memory(test: TestT) -> TestT:
    """Mark a test that runs with every kind of memory of the local transport: it tests our own code only."""
    local = (label for label, backend in DEVICE_BACKENDS.items() if backend.name == "local")
    test.device_backends = tuple(local)  # type: ignore[attr-defined]
    return test


def require_library(backend: Backend) -> None:
    """A missing library fails the test, unless KVBRIDGE_ALLOW_MISSING_TRANSPORTS=1 asks for a skip."""
    if not backend.module:
        return
    names = backend.module.split("|")
    chosen = next((name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None), names[0])
    if os.environ.get("KVBRIDGE_ALLOW_MISSING_TRANSPORTS") == "1":
        pytest.importorskip(chosen)
    else:
        importlib.import_module(chosen)


class PeerProcess:
    """A process that owns a registered buffer; see tests/helpers/transport_peer.py. A context manager: leaving kills it."""

    def __init__(
        self, backend: Backend, path: Path, length_bytes: int, *, extents: list[tuple[int, int]] | None = None
    ):
        self._on_device = backend.destination is MemoryKind.VRAM
        self._length_bytes = length_bytes
        self._buffer: Buffer | None = None if self._on_device else SharedBuffer(path, length_bytes)
        self._log = path.with_suffix(".log").open("w+")
        arguments = {
            "name": backend.name,
            "settings": backend.settings.model_dump(mode="json"),
            "path": str(path),
            "length_bytes": length_bytes,
            "extents": extents,
            "memory": backend.destination.value,
            "device": runtime.device_count() - 1 if self._on_device else 0,  # not our device, if there is another one
        }
        self._process = processes.Popen(  # tests fork it (`tests.helpers.zygote`)
            [sys.executable, "-m", "tests.helpers.transport_peer", json.dumps(arguments)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._received = b""
        self.address = 0
        self._endpoint: Endpoint | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._buffer is not None:
            self._buffer.close()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    @property
    def buffer(self) -> Buffer:
        """The peer's memory, seen from here. `address` of it is *ours*; the peer's is `self.address`."""
        if self._buffer is None:
            _ = self.endpoint
            self._buffer = DeviceBuffer(0, self._length_bytes, opened=self._opening)
        return self._buffer

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def endpoint(self) -> Endpoint:
        """The peer's report at its start. The first use waits for it, and fills in `address`."""
        if self._endpoint is None:
            first = self._answer(PEER_START_LIMIT_S)
            self.address = first["address"]
            self._opening = first.get("opening")
            self._endpoint = Endpoint(transport=first["transport"], data=base64.b64decode(first["data"]))
        return self._endpoint

    def current_endpoint(self) -> Endpoint:
        """Ask for the endpoint as it is now, after `register`."""
        answer = self.ask("endpoint")
        return Endpoint(transport=answer["transport"], data=base64.b64decode(answer["data"]))

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give one command and return the answer; an error answered by the peer fails the test."""
        _ = self.endpoint
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer(ANSWER_LIMIT_S)
        assert "error" not in answer, answer
        return answer

    def stop(self) -> None:
        """Freeze it; returns when it is frozen."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it and wait until it is gone."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(ANSWER_LIMIT_S)

    def ended_by_itself(self, limit_s: float = 1.0) -> str:
        """Return its last output when it ends within `limit_s`, else nothing."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
            self._log.seek(0)
            return self._log.read()[-4000:] or "nothing"
        return ""

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ends_at = time.monotonic() + limit_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, ends_at - time.monotonic()))
            chunk = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                why = "ended" if ready else f"said nothing for {limit_s} s"
                self._log.seek(0)
                pytest.fail(f"peer process {self.pid} {why}; its stderr:\n{self._log.read()[-4000:]}")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


def wait(transfer: Transfer, limit_s: float = 20.0) -> TransferStatus:
    """Poll until terminal, sleeping a little between polls as the rank worker does."""
    return wait_all([transfer], limit_s)[0]


def times_given_up() -> int:
    """How often this thread has given up the processor by itself, which a thread that waits does."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def wait_all(transfers: list[Transfer], limit_s: float = 20.0) -> list[TransferStatus]:
    """Poll all of them until each is terminal; no poll may block (two may be delayed by the machine)."""
    ends_at = time.monotonic() + limit_s
    slow_polls_s = []
    while True:
        states = []
        for transfer in transfers:
            begun_s, before = time.monotonic(), times_given_up()
            states.append(transfer.poll())
            took_s = time.monotonic() - begun_s
            if took_s > LONGEST_POLL_S and times_given_up() > before:
                slow_polls_s.append(took_s)
        if all(status.state.terminal for status in states):
            assert len(slow_polls_s) <= 2, f"polls blocked for {slow_polls_s} s"
            return states
        assert time.monotonic() < ends_at, f"not terminal after {limit_s} s: {states}; slow polls: {slow_polls_s}"
        time.sleep(POLL_PAUSE_S)


@dataclass
class Pair:
    """A transport, its registered source buffer, a peer process and the connection to it."""

    transport: Transport
    source: Buffer
    process: PeerProcess
    peer: Peer

    def reset(self, seed: int = 1) -> None:
        """Fill the source with random non-zero bytes and the destination with zeros."""
        self.source.write(np.random.default_rng(seed).integers(1, 256, self.source.length_bytes, dtype=np.uint8))
        self.process.buffer.fill(0)

    def operations(self, copies: list[tuple[int, int, int]]) -> Operations:
        source, destination, length = np.array(copies, dtype=np.uint64).reshape(-1, 3).T.copy()
        return Operations(
            source + np.uint64(self.source.address), destination + np.uint64(self.process.address), length
        )

    def blocks(self, size_bytes: int, count: int, first: int = 0) -> Operations:
        """`count` operations of equal size, each to the same offset that it comes from."""
        return self.operations([(at * size_bytes, at * size_bytes, size_bytes) for at in range(first, first + count)])

    def move(self, operations: Operations, deadline_s: float = 10.0) -> TransferStatus:
        """Submit and wait. An error raised by `submit` itself is a failure that never started, hence quiet."""
        try:
            transfer = self.transport.submit(self.peer, operations, deadline_s=deadline_s)
        except TransportError as error:
            return TransferStatus(TransferState.FAILED_QUIET, str(error))
        return wait(transfer, deadline_s + 10.0)
