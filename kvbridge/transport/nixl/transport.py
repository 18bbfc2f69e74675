"""The transport over NIXL and UCX: RDMA in production, TCP on a laptop and in CI.

The library does the following, and does not do other things (1.5.1, measured); with the consequences for this module:

- It checks a destination against the metadata that was loaded, on this side only: a peer that has deregistered memory is written to
  all the same, and one that has unmapped it crashes on TCP. The caller keeps memory mapped while a manifest names it.
- It never gives up: a write to a frozen peer stays in progress for ever, and neither releasing the request nor forgetting the peer
  nor deregistering the memory stops it. Therefore a deadline fails the transfer, `quiet_timeout_s` later it ends not quiet, and
  only `close` (which destroys the agent, in milliseconds) ends it.
- Posting blocks: 4 us an operation and up to 0.3 ms a MiB on TCP, since the first bytes are sent right there; one request over a
  whole plan took up to 2 s. Therefore a thread of this module posts and asks, in requests of up to 16 MiB with 64 MiB in flight,
  which is about as fast as one request over everything; smaller ones are not (1 MiB with 8 MiB in flight: 0.7 of it). See
  `windowed`.
- Metadata of another incarnation under a known name is refused and then drops the known one; names are drawn anew for each agent.
- A peer's death surfaces at once: at the next post or check, which raises.
- Without a word in `ucx_tls`, two processes of one host talk by CMA: no network, `post` does the whole copy, and a frozen peer is
  written to without noticing.
- Device memory needs UCX's `cuda_copy` and `cuda_ipc`, which are added to `ucx_tls` where there is a GPU. Without them UCX takes a
  device address for host memory. Each call is made with the memory's device as the thread's current one. The library's own progress
  thread has none, and with `cuda_copy` it has been seen to crash in production (NIXL issue 2102, open at the time of writing): on
  one host prefer `local`, which is also faster by far (VRAM to another process's DRAM: 0.5 GB/s here).
- One request has one kind of memory on each side, so a batch becomes a request for each pair of kinds. Registrations and
  descriptors carry the device.
- It does not survive metadata that was made to break it, so a process apart reads it first (`nixl.check`). A read from a peer that
  does not answer stays behind, with a descriptor, until the agent's end.
- Nobody is authenticated: whoever has the metadata and reaches the port can read and write registered memory. Fence it by the
  network.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from kvbridge.config.transports import NixlSettings
from kvbridge.core.errors import InvalidInputError, RegistrationError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Backend, Endpoint, Extents, Peer, Stretch, Transfer, labels, read_endpoint
from kvbridge.transport.nixl.agent import (
    Descriptors,
    NixlAgent,
    NixlEndpoint,
    NixlExtent,
    Side,
    UnclearPostError,
)
from kvbridge.transport.nixl.check import CHECKS, PeerCheck
from kvbridge.transport.threads import Call, Pump
from kvbridge.transport.windowed import (
    DONE,
    PENDING,
    Check,
    Progress,
    Submitter,
    Window,
    WindowedTransfer,
    WindowLimits,
)

NAME = "nixl"
KINDS = tuple(MemoryKind)


@dataclass(slots=True, eq=False)
class NixlPeer:
    """A remote agent whose metadata is loaded and which has answered."""

    agent: str
    label: str
    extents: Extents
    window: Window


@dataclass(slots=True, eq=False)
class _Batch:
    """The requests of one batch that have not ended: one for each pair of memory kinds among its operations."""

    requests: list[int]
    failure: str = ""
    """The first failure; the batch has ended once `requests` is empty."""
    unclear: bool = False
    """A further request may be under way that cannot be asked after, so the batch never ends."""


class _Writes(Submitter[_Batch]):
    def __init__(self, agent: NixlAgent, peer: NixlPeer, own: Extents, operations: Operations) -> None:
        self._agent = agent
        self._peer = peer
        self._own = own
        self._operations = operations

    def start(self, first: int, stop: int) -> _Batch:
        part = self._operations[first:stop]
        sources, targets = self._own.place(part.source), self._peer.extents.place(part.destination)
        local = np.stack((part.source, part.length, (sources // len(KINDS)).astype(np.uint64)), axis=1)
        remote = np.stack((part.destination, part.length, (targets // len(KINDS)).astype(np.uint64)), axis=1)
        requests: list[int] = []
        pairs = sources % len(KINDS) * len(KINDS) + targets % len(KINDS)
        found = np.unique(pairs).tolist()
        for pair in found:
            source, target = divmod(pair, len(KINDS))
            rows = pairs == pair if len(found) > 1 else slice(None)
            sides: tuple[Side, Side] = ((KINDS[source], local[rows]), (KINDS[target], remote[rows]))
            try:
                requests.append(self._agent.post(self._peer.agent, *sides))
            except UnclearPostError as error:
                return _Batch(requests, str(error), unclear=True)
            except TransportError as error:
                if not requests:
                    raise
                return _Batch(requests, str(error))
        return _Batch(requests)

    def check(self, handle: _Batch) -> Check:
        for request in list(handle.requests):
            progress, reason = self._agent.check(request)
            if progress in {Progress.DONE, Progress.FAILED}:
                handle.requests.remove(request)
            if progress in {Progress.FAILED, Progress.STALLED}:
                handle.failure = handle.failure or reason
        if handle.unclear or (handle.failure and handle.requests):
            return Check(Progress.STALLED, handle.failure)
        if handle.failure:
            return Check(Progress.FAILED, handle.failure)
        return PENDING if handle.requests else DONE


class NixlTransport(Backend[NixlPeer]):
    """One agent. The module's docstring says what the library cannot be trusted with."""

    name: ClassVar[str] = NAME

    def __init__(self, settings: NixlSettings, *, clock: Clock = monotonic) -> None:
        super().__init__(clock, max_operation_bytes=settings.max_operation_bytes)
        self._settings = settings
        self._limits = WindowLimits(
            settings.window_operations,
            settings.window_bytes,
            settings.quiet_timeout_s,
            settings.batch_operations,
            settings.batch_bytes,
        )
        self._uses: Counter[str] = Counter()
        """Attempts to connect, and peers, by agent: the library may know these agents."""
        self._lock = threading.Lock()
        self._pump = Pump(NAME)
        self._agent = NixlAgent(settings)
        self._check = CHECKS.hold(settings, lambda: PeerCheck(settings))
        self._closed = False

    def _require_open(self) -> None:
        self._agent.alive()

    def _place(self, part: Extent) -> int:
        return _place(part.kind, part.device)

    def _out_of_reach(self, part: Extent) -> str:
        if part.kind in self._agent.memory_kinds:
            return ""
        return f"UCX does not reach '{part.kind}' memory here; install the nixl build for this host's CUDA release"

    def _register(self, memory: Sequence[Extent]) -> None:
        with contextlib.ExitStack() as undo:
            try:
                for kind, rows in _rows(memory):
                    self._agent.register(kind, rows)
                    undo.callback(self._agent.deregister, kind, rows)
            except TransportError as error:
                raise RegistrationError(
                    f"{error} ({labels(memory)}); with InfiniBand raise the locked-memory limit (ulimit -l unlimited)"
                ) from error
            undo.pop_all()

    def endpoint(self) -> Endpoint:
        announced = []
        for address, length_bytes, place, _ in self._memory.stretches:
            device, kind = divmod(place, len(KINDS))
            announced.append(NixlExtent(address=address, length_bytes=length_bytes, kind=KINDS[kind], device=device))
        content = self._agent.describe(announced)
        return Endpoint(transport=NAME, data=content.model_dump_json().encode())

    def connect(self, endpoint: Endpoint) -> Call[Peer]:
        content = read_endpoint(endpoint, NAME, NixlEndpoint)
        name = content.agent
        if name == self._agent.name:
            raise InvalidInputError("this is the transport's own endpoint; it cannot write to itself")
        self._require_open()
        self._agent.require_readable(content)
        limit_s = self._settings.check_timeout_s
        return Call(
            functools.partial(self._connected, content),
            name=f"connect nixl peer {name}",
            timeout_s=limit_s + self._settings.connect_timeout_s,
            late=f"peer {name} could not be checked within transports.nixl.check_timeout_s ({limit_s:g} s): the peer hangs, or "
            "this host is overloaded",
            clock=self._clock,
            then=self._take,
            given_up=lambda peer: None if peer is None else self._forget_unused(peer.agent),
        )

    def _connected(self, content: NixlEndpoint) -> NixlPeer:
        name = content.agent
        self._check.check(content, self._agent.device)  # a process apart reads the metadata first
        with self._lock:
            self._uses[name] += 1
        try:
            self._agent.introduce(content, timeout_s=self._settings.connect_timeout_s)
            label = f"peer {name}"
            stretches = [
                Stretch(each.address, each.length_bytes, _place(each.kind, each.device)) for each in content.extents
            ]
            return NixlPeer(name, label, Extents(label, stretches), Window(self._limits))
        except BaseException:
            self._forget_unused(name)
            raise

    def _take(self, known: NixlPeer) -> Peer:
        """Keep the window of a peer that has registered more memory and was connected again."""
        others = [peer.window for peer in self._peers.values() if peer.agent == known.agent]
        return super()._take(replace(known, window=others[0]) if others else known)

    def disconnect(self, peer: Peer) -> None:
        known = self._known(peer)
        super().disconnect(peer)
        self._forget_unused(known.agent)

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        known = self._checked(peer, operations)
        writes = _Writes(self._agent, known, self._memory, operations)
        transfer = WindowedTransfer(
            operations, writes, known.window, peer=known.label, deadline_s=deadline_s, clock=self._clock
        )
        self._transfers[transfer] = peer
        self._pump.add(transfer)
        return transfer

    def close(self) -> None:
        """Takes milliseconds. Harmless when closed already."""
        left = self._pump.close(timeout_s=self._settings.close_timeout_s)
        self._agent.destroy()
        for transfer in left:
            transfer.cut_off("the transport was closed")
        self._peers.clear()
        if not self._closed:
            self._closed = True
            CHECKS.let_go(self._settings, PeerCheck.close)

    def _forget_unused(self, agent: str) -> None:
        """End one use of an agent; the library forgets it after the last one."""
        with self._lock:
            self._uses[agent] -= 1
            if not self._uses[agent]:
                del self._uses[agent]
                self._agent.forget_peer(agent)


def _place(kind: MemoryKind, device: int) -> int:
    """`Stretch.place`: the kind of memory (an index into `KINDS`) and the device in one number."""
    return device * len(KINDS) + KINDS.index(kind)


def _rows(memory: Sequence[Extent]) -> list[tuple[MemoryKind, Descriptors]]:
    """Return registrations, one list for each kind."""
    found = []
    for kind in KINDS:
        rows = [(part.address, part.length_bytes, part.device) for part in memory if part.kind is kind]
        if rows:
            found.append((kind, np.array(rows, dtype=np.uint64)))
    return found
