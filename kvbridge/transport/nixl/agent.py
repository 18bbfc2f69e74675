"""The seam to the NIXL library: one agent, in our words and with our errors.

The binding module is used, not the Python wrapper over it: the wrapper fixes the progress thread's delay at 0,
which keeps a core busy for each agent, and offers pickle for descriptors, which must never meet bytes from a peer.
Measured (1.5.1): import 0.15 s, agent 0.4 s and four threads, 0.02 of a core when idle.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.config.transports import NixlSettings
from kvbridge.core.errors import TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.cuda import has_accelerator, runtime
from kvbridge.transport.backend import set_environment
from kvbridge.transport.windowed import DONE, PENDING, Check, Progress

PACKAGES = ("nixl_cu12", "nixl_cu13")
BACKEND = "UCX"
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
CUDA_13_DRIVER = 580
INFINIBAND_DEVICES = Path("/sys/class/infiniband")
CUDA_TRANSPORTS = ("cuda_copy", "cuda_ipc")

Descriptors = npt.NDArray[np.uint64]
"""One row (address, bytes, device) for each stretch of memory, C-contiguous."""

Native = Any
"""An object of the library, which ships no types."""

Side = tuple[MemoryKind, Descriptors]
"""One side of a transfer, all of one kind of memory."""

_process_settings: dict[str, str] = {}
"""The environment that the library was loaded with; it reads it once."""


class NixlAgent:
    """One NIXL agent with one UCX backend. Its name is unique over all processes and times: a restart is a new peer.

    Destroying it is what ends all its transfers, so nobody else keeps a reference to the library's object.
    Errors: TransportError for everything that the library raises, and for every call after `destroy`.
    """

    def __init__(self, settings: NixlSettings) -> None:
        self.name = f"kvbridge-{uuid.uuid4().hex}"
        self._library = load_library(settings)
        self.library_release = release_of(self._library)
        self._errors = _errors(self._library)
        self.device: int | None = None
        """Of the device memory that was last used; its context is current when a peer's metadata is read."""
        self._segments = {
            MemoryKind.DRAM: self._library.DRAM_SEG,
            MemoryKind.VRAM: self._library.VRAM_SEG,
        }
        with self._translated("start an agent over UCX (check ucx_tls, ucx_net_devices and ucx_modules)"):
            agent = self._library.nixlAgent(self.name, self._config(settings))
            self._backend = agent.createBackend(BACKEND, {})
            reachable = agent.getBackendParams(self._backend)[1]
        self._agent: Native = agent
        self.memory_kinds = frozenset(
            kind
            for kind, segment in self._segments.items()
            if segment.name in reachable and (kind is not MemoryKind.VRAM or has_accelerator())
        )

    def __repr__(self) -> str:
        return f"<NixlAgent {self.name}: {'destroyed' if self._agent is None else 'alive'}>"

    def destroy(self) -> None:
        """Drop the library's agent. Afterwards nothing of it moves a byte. Harmless when dropped already."""
        self._agent = None

    def require_alive(self) -> None:
        """Raise TransportError after `destroy`."""
        self._alive()

    def register(self, kind: MemoryKind, rows: Descriptors) -> None:
        """Make memory usable by transfers, on this side and for peers that load the metadata from now on."""
        self._enter_device(kind, rows)
        with self._translated(f"register {int(rows[:, 1].sum())} bytes of {kind}"):
            self._alive().registerMem(self._library.nixlRegDList(self._segments[kind], rows), [self._backend])

    def deregister(self, kind: MemoryKind, rows: Descriptors) -> None:
        """Forget memory. Peers that hold older metadata can still write there."""
        with self._translated(f"deregister {int(rows[:, 1].sum())} bytes of {kind}"):
            self._alive().deregisterMem(self._library.nixlRegDList(self._segments[kind], rows), [self._backend])

    def metadata(self) -> bytes:
        """What a peer has to load before it can write to the memory registered so far: 45 bytes a registration."""
        with self._translated("describe itself"):
            return bytes(self._alive().getLocalMD())

    def load_peer(self, metadata: bytes) -> str:
        """Take in a peer's metadata and return the name that it carries."""
        if self.device is not None:
            runtime.use(self.device)  # keys of device memory are unpacked in the current context
        with self._translated("read a peer's metadata"):
            name = self._alive().loadRemoteMD(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def forget_peer(self, name: str) -> None:
        """Disconnect from a peer. Harmless after `destroy`, and when the library has dropped it, as it does when a peer dies."""
        if self._agent is None:
            return
        with self._translated(f"forget peer {name}"), contextlib.suppress(self._library.nixlNotFoundError):
            self._alive().invalidateRemoteMD(name)

    def post_write(self, peer: str, local: Side, remote: Side) -> int:
        """Start to write `local` to `remote`, row by row, and return the request's handle.

        Raises TransportError when nothing of it was started or the connection is gone, and `UnclearPostError` when
        part of it may be under way.
        """
        return self._post(self._library.NIXL_WRITE, peer, local, remote)

    def post_read(self, peer: str, local: Side, remote: Side) -> int:
        """Start to read `remote` into `local`; otherwise as `post_write`."""
        return self._post(self._library.NIXL_READ, peer, local, remote)

    def _post(self, verb: object, peer: str, local: Side, remote: Side) -> int:
        agent = self._alive()
        self._enter_device(*local)
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

    def check(self, request: int) -> Check:
        """Ask after a posted request; a terminal one is released and must not be asked after again.

        A lost connection ends all its operations. Of any other failure the library does not say whether the
        request's other operations have ended, so it counts as in flight.
        """
        agent = self._alive()
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
        """Forget a request, which does not stop it. One that the library will not release dies with the agent."""
        if self._agent is not None:
            with contextlib.suppress(*self._errors):
                self._agent.releaseXferReq(request)

    def _enter_device(self, kind: MemoryKind, rows: Descriptors) -> None:
        """Make the device of some memory the current one of this thread: UCX looks for a context where it copies."""
        if kind is MemoryKind.VRAM:
            self.device = int(rows[0, 2])
            with self._translated(f"use cuda:{self.device}"):
                runtime.use(self.device)

    def _list(self, side: Side) -> Native:
        kind, rows = side
        return self._library.nixlXferDList(self._segments[kind], rows)

    def _config(self, settings: NixlSettings) -> Native:
        config = self._library.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = self._library.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = settings.progress_delay_us
        config.captureTelemetry = False
        return config

    def _alive(self) -> Native:
        if self._agent is None:
            raise TransportError("this nixl transport has been closed; create another one")
        return self._agent

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
    """What UCX is to read from its environment. A variable that is set wins over a default, not over a setting."""
    wanted = {"UCX_TLS": _transports(settings.ucx_tls), "UCX_NET_DEVICES": settings.ucx_net_devices}
    defaults = {"UCX_LOG_LEVEL": settings.log_level}
    if settings.ucx_modules != "auto":
        wanted["UCX_MODULES"] = settings.ucx_modules
    elif not (INFINIBAND_DEVICES.is_dir() and any(INFINIBAND_DEVICES.iterdir())):
        defaults["UCX_MODULES"] = "^ib"
    kept = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return kept | {name: value for name, value in wanted.items() if value}


def load_library(settings: NixlSettings) -> ModuleType:
    """Import the binding module with the right environment. Raises TransportError, ConfigError."""
    wanted = environment(settings)
    settings_read = "ucx_tls, ucx_net_devices, ucx_modules and log_level"
    set_environment(_process_settings, wanted, library="UCX", settings=settings_read)
    package = _package()
    try:
        return importlib.import_module(f"{package}._bindings")
    except ImportError as error:
        raise TransportError(
            f"the nixl library ({package}) cannot be loaded: {error}; install the build for this host's CUDA release"
        ) from error


def release_of(library: ModuleType) -> str:
    """Return the release of a binding module: the version of the distribution that it came with; empty when that is unknown."""
    try:
        return importlib.metadata.version(library.__name__.partition(".")[0].replace("_", "-"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _transports(asked: str) -> str:
    """What UCX is to use, with those for device memory where there is a GPU: without them it takes that for host memory."""
    names = asked.split(",")
    if not asked or asked.startswith("^") or "all" in names or not has_accelerator():
        return asked
    return ",".join([*names, *(name for name in CUDA_TRANSPORTS if name not in names and "cuda" not in names)])


def _package() -> str:
    """The installed build. Of two: that of CUDA 13 where the driver is new enough for it, else the one that suits any driver."""
    found = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    if not found:
        raise TransportError("no nixl library is installed; install kvbridge[cpu] (nixl-cu12) or kvbridge[cuda] (nixl)")
    if len(found) == 1:
        return found[0]
    return PACKAGES[1] if has_accelerator() and _driver_release() >= CUDA_13_DRIVER else PACKAGES[0]


def _driver_release() -> int:
    """The first part of the NVIDIA driver's version, 0 when it cannot be told."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+)\.\d", DRIVER_VERSION.read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


def _errors(library: ModuleType) -> tuple[type[Exception], ...]:
    """The library's exceptions, which share no base of their own, and what its binding raises of itself."""
    own = [found for name, found in vars(library).items() if name.startswith("nixl") and name.endswith("Error")]
    return (*own, RuntimeError, ValueError)
