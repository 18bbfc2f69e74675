"""The seam to the NIXL library: one agent, in our words and with our errors, and its first contact with a peer.

The binding module is used, not the Python wrapper over it: the wrapper fixes the progress thread's delay at 0, which keeps a core
busy for each agent, and offers pickle for descriptors, which must never meet bytes from a peer. Measured (1.5.1): import 0.15 s,
agent 0.4 s and four threads, 0.02 of a core when idle.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c
from pydantic import ConfigDict, Field

from kvbridge.config.transports import NixlSettings, TransportName
from kvbridge.core.errors import WITH_LIBRARIES, TransportError
from kvbridge.core.ids import FrozenModel, MemoryKind, NonNegative, Positive
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.runtime import has_accelerator
from kvbridge.transport import PACKAGES
from kvbridge.transport.base import set_environment
from kvbridge.transport.windowed import DONE, PENDING, Check, Progress

BACKEND = "UCX"
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
CUDA_13_DRIVER = 580
ASK_EVERY_S = 0.0005
INFINIBAND_DEVICES = Path("/sys/class/infiniband")
CUDA_TRANSPORTS = ("cuda_copy", "cuda_ipc")

Descriptors = npt.NDArray[np.uint64]
"""One row (address, bytes, device) for each stretch of memory, C-contiguous."""

Native = Any
"""An object of the library, which ships no types."""

Side = tuple[MemoryKind, Descriptors]
"""One side of a transfer, of one kind of memory."""

_process_settings: dict[str, str] = {}
"""The environment that the library was loaded with."""


class NixlExtent(FrozenModel):
    """One registration."""

    address: Positive
    length_bytes: Positive
    kind: MemoryKind = MemoryKind.DRAM
    device: Annotated[int, Field(ge=0, lt=1 << 31)] = 0


class NixlEndpoint(FrozenModel):
    """An agent's description of itself for peers, as JSON in `Endpoint.data`."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    agent: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
    metadata: bytes
    """Only the library reads it."""
    release: Annotated[str, Field(max_length=100)]
    """The release of the library that wrote the metadata."""
    checksum: NonNegative
    """CRC-32C of the metadata."""
    extents: tuple[NixlExtent, ...]


class NixlAgent:
    """One NIXL agent with one UCX backend. Its name is unique over all processes and times: a restart is a new peer.

    Only its destruction ends all its transfers, so nobody else keeps a reference to the library's object. Errors: TransportError
    for everything that the library raises, and for every call after `destroy`.
    """

    def __init__(self, settings: NixlSettings) -> None:
        self.name = f"kvbridge-{uuid.uuid4().hex}"
        self._library = load_library(settings)
        self._release = release_of(self._library)
        # The library's exceptions share no base of their own; the binding raises the other two of itself.
        own = (
            found for name, found in vars(self._library).items() if name.startswith("nixl") and name.endswith("Error")
        )
        self._errors: tuple[type[Exception], ...] = (*own, RuntimeError, ValueError)
        self.device: int | None = None
        """The device whose memory was used last; its context is current when a peer's metadata is read."""
        self._segments = {MemoryKind.DRAM: self._library.DRAM_SEG, MemoryKind.VRAM: self._library.VRAM_SEG}
        config = self._library.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = self._library.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = settings.progress_delay_us
        config.captureTelemetry = False
        with self._translated("start an agent over UCX (check ucx_tls, ucx_net_devices and ucx_modules)"):
            agent = self._library.nixlAgent(self.name, config)
            self._backend = agent.createBackend(BACKEND, {})
            reachable = agent.getBackendParams(self._backend)[1]
        self._agent: Native = agent
        self._probe = np.zeros(1, dtype=np.uint8)
        self._probe_row = np.array([[self._probe.ctypes.data, 1, 0]], dtype=np.uint64)
        self.register(MemoryKind.DRAM, self._probe_row)
        self.memory_kinds = frozenset(
            kind
            for kind, segment in self._segments.items()
            if segment.name in reachable and (kind is not MemoryKind.VRAM or has_accelerator())
        )

    def destroy(self) -> None:
        """Drop the library's agent, which moves no byte afterwards. Harmless when dropped already."""
        self._agent = None

    def alive(self) -> Native:
        """Return the library's agent. Raises TransportError after `destroy`."""
        if self._agent is None:
            raise TransportError("this nixl transport has been closed; create another one")
        return self._agent

    def register(self, kind: MemoryKind, rows: Descriptors) -> None:
        """Make memory usable by transfers of this agent, and of peers that load the metadata from now on."""
        self._enter_device(kind, rows)
        with self._translated(f"register {int(rows[:, 1].sum())} bytes of {kind}"):
            self.alive().registerMem(self._library.nixlRegDList(self._segments[kind], rows), [self._backend])

    def deregister(self, kind: MemoryKind, rows: Descriptors) -> None:
        """Forget memory. Peers that hold older metadata can still write there."""
        with self._translated(f"deregister {int(rows[:, 1].sum())} bytes of {kind}"):
            self.alive().deregisterMem(self._library.nixlRegDList(self._segments[kind], rows), [self._backend])

    def describe(self, extents: Iterable[NixlExtent]) -> NixlEndpoint:
        """Return the description that a peer loads before it can write to the memory registered so far."""
        with self._translated("describe itself"):
            metadata = bytes(self.alive().getLocalMD())  # 45 bytes a registration
        return NixlEndpoint(
            agent=self.name,
            metadata=metadata,
            release=self._release,
            checksum=crc32c(metadata),
            extents=tuple(extents),
        )

    def require_readable(self, content: NixlEndpoint) -> None:
        """Raise TransportError unless a peer's metadata is whole and of this library's own release."""
        if content.release != self._release:
            raise TransportError(
                f"peer {content.agent} runs NIXL {content.release}, this process {self._release}; both sides must run the same "
                "NIXL release"
            )
        if crc32c(content.metadata) != content.checksum:
            raise TransportError(
                f"the metadata of peer {content.agent} was damaged on the way; connect to the peer again"
            )

    def load_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata and return the name in it."""
        if self.device is not None:
            runtime.use(self.device)  # keys of device memory are unpacked in the current context
        with self._translated("read a peer's metadata"):
            name = self.alive().loadRemoteMD(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def forget_peer(self, name: str) -> None:
        """Disconnect from a peer. Harmless after `destroy`, and when the library has dropped the peer because it died."""
        if self._agent is None:
            return
        with self._translated(f"forget peer {name}"), contextlib.suppress(self._library.nixlNotFoundError):
            self.alive().invalidateRemoteMD(name)

    def post(self, peer: str, local: Side, remote: Side, *, read: bool = False) -> int:
        """Start to write `local` to `remote` (`read`: `remote` to `local`), row by row, and return the request's handle.

        Raises TransportError when nothing of it was started or the connection is gone, and `UnclearPostError` when part of it may
        be under way.
        """
        agent = self.alive()
        self._enter_device(*local)
        verb = self._library.NIXL_READ if read else self._library.NIXL_WRITE
        with self._translated(f"prepare {len(local[1])} operations to peer {peer}"):
            request: int = agent.createXferReq(verb, self._list(local), self._list(remote), peer, "", [self._backend])
        try:
            agent.postXferReq(request)
        except self._library.nixlRemoteDisconnectError as error:
            self.release(request)
            raise TransportError(f"nixl: the connection to peer {peer} is gone ({error}); {WHY_GONE}") from error
        except self._errors as error:
            raise UnclearPostError(f"nixl could not post {len(local[1])} operations to peer {peer}: {error}") from error
        return request

    def introduce(self, content: NixlEndpoint, *, timeout_s: float) -> None:
        """Load a peer's metadata and read a byte of the peer's memory, which opens the connection (1 to 20 ms).

        A read that does not end stays behind; it can only ever write this agent's one byte. Blocks; raises TransportError.
        """
        name = self.load_peer(content.metadata)
        if name != content.agent:
            raise TransportError(f"a peer calls itself {content.agent}, and its metadata names {name}; it was refused")
        ordered = sorted(content.extents, key=lambda extent: extent.kind is not MemoryKind.DRAM)  # host memory, if any
        for extent in ordered[:1]:
            remote = np.array([[extent.address, 1, extent.device]], dtype=np.uint64)
            request = self.post(name, (MemoryKind.DRAM, self._probe_row), (extent.kind, remote), read=True)
            ends_at_s = time.monotonic() + timeout_s
            while (answer := self.check(request)).progress is Progress.PENDING:
                if time.monotonic() >= ends_at_s:
                    self.release(request)
                    raise TransportError(
                        f"peer {name} did not answer within transports.nixl.connect_timeout_s ({timeout_s:g} s); it hangs, or "
                        "its UCX ports are closed from here"
                    )
                time.sleep(ASK_EVERY_S)
            if answer.progress is not Progress.DONE:
                raise TransportError(f"peer {name} cannot be reached: {answer.reason}")

    def check(self, request: int) -> Check:
        """Ask after a posted request; a terminal one is released, and must not be asked after again.

        A lost connection ends all its operations. After any other failure the library does not say whether the request's other
        operations have ended, so it counts as in flight.
        """
        agent = self.alive()
        try:
            answer = agent.getXferStatus(request)
        except self._library.nixlRemoteDisconnectError as error:
            self.release(request)
            return Check(Progress.FAILED, f"nixl lost the connection ({error}); {WHY_GONE}")
        except self._errors as error:
            return Check(Progress.STALLED, f"nixl reported {error} for a request that may not have ended")
        if answer == self._library.NIXL_IN_PROG:
            return PENDING
        if answer != self._library.NIXL_SUCCESS:
            return Check(Progress.STALLED, f"nixl answered {answer} for a request that may not have ended")
        self.release(request)
        return DONE

    def release(self, request: int) -> None:
        """Forget a request, which does not stop it. A request that the library will not release dies with the agent."""
        if self._agent is not None:
            with contextlib.suppress(*self._errors):
                self._agent.releaseXferReq(request)

    def _enter_device(self, kind: MemoryKind, rows: Descriptors) -> None:
        """Make the device of some memory the current one of this thread, because UCX looks for a context there."""
        if kind is MemoryKind.VRAM:
            self.device = int(rows[0, 2])
            with self._translated(f"use cuda:{self.device}"):
                runtime.use(self.device)

    def _list(self, side: Side) -> Native:
        return self._library.nixlXferDList(self._segments[side[0]], side[1])

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransportError(f"nixl could not {what}: {error}") from error


WHY_GONE = "the peer died, was restarted, or cannot be reached from here"


class UnclearPostError(TransportError):
    """A request failed while it was being posted, and part of it may be under way."""


def environment(settings: NixlSettings) -> dict[str, str]:
    """Return the environment for UCX. A variable that is set already wins over a default, not over a setting."""
    wanted = {"UCX_TLS": _transports(settings.ucx_tls), "UCX_NET_DEVICES": settings.ucx_net_devices}
    defaults = {"UCX_LOG_LEVEL": settings.log_level}
    if settings.ucx_modules != "auto":
        wanted["UCX_MODULES"] = settings.ucx_modules
    elif not (INFINIBAND_DEVICES.is_dir() and any(INFINIBAND_DEVICES.iterdir())):
        defaults["UCX_MODULES"] = "^ib"
    kept = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return kept | {name: value for name, value in wanted.items() if value}


def load_library(settings: NixlSettings) -> ModuleType:
    """Import the binding module with its environment set. Raises TransportError, ConfigError."""
    read = "ucx_tls, ucx_net_devices, ucx_modules and log_level"
    set_environment(_process_settings, environment(settings), library="UCX", settings=read)
    package = _package()
    try:
        return importlib.import_module(f"{package}._bindings")
    except ImportError as error:
        raise TransportError(
            f"the nixl library ({package}) cannot be loaded: {error}; install the build for this host's CUDA release"
        ) from error


def release_of(library: ModuleType) -> str:
    """Return the version of the distribution that a binding module came with; empty when that is unknown."""
    try:
        return importlib.metadata.version(library.__name__.partition(".")[0].replace("_", "-"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _transports(asked: str) -> str:
    """Add UCX's transports for device memory where there is a GPU: without them UCX takes device memory for host memory."""
    names = asked.split(",")
    if not asked or asked.startswith("^") or "all" in names or not has_accelerator():
        return asked
    return ",".join([*names, *(name for name in CUDA_TRANSPORTS if name not in names and "cuda" not in names)])


def _package() -> str:
    """Return the installed build; of two builds, that of CUDA 13 where the driver is new enough."""
    builds = PACKAGES[TransportName.NIXL]
    found = [name for name in builds if importlib.util.find_spec(name) is not None]
    if not found:
        raise TransportError(f"no nixl library is installed; {WITH_LIBRARIES}")
    if len(found) == 1:
        return found[0]
    release = 0
    with contextlib.suppress(OSError):
        told = re.search(r"Kernel Module.*?\s(\d+)\.\d", DRIVER_VERSION.read_text(encoding="utf-8"))
        release = int(told[1]) if told else 0
    return builds[1] if has_accelerator() and release >= CUDA_13_DRIVER else builds[0]
