"""The transport agents of one rank: built with all of the rank's memory registered, replaced, retired, closed.

An agent is replaced for one of two reasons: a transfer of it would not become quiet, or the node wants every endpoint of an earlier
epoch shut. Registering memory takes up to half a second a GiB, and an agent may take seconds to close, so both happen on threads of
their own. Meanwhile the present agents work on. The rank changes to the successors when all that the node has asked for are there.
Only its own thread touches an agent that is not in use yet, or no longer.

A successor that cannot be built is tried again every `RETRY_S`. Until then the agent that it is to replace works on, if the node
wants its endpoints shut. An agent with a transfer that was not quiet is retired all the same, since only its end proves anything:
peers are reached by the other transports of the rank, or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.process import Clock
from kvbridge.core.wire.messages import REASON_CHARS, TransportEndpoint
from kvbridge.core.wire.worker_messages import TransportsNotBuilt, WorkerProgress
from kvbridge.kernels.cuda import runtime
from kvbridge.transport.base import Transport
from kvbridge.transport.threads import apart
from kvbridge.worker.rank import NodeLink, RankIdentity, contained

log = structlog.get_logger(__name__)

PROGRESS_INTERVAL_S = 0.2
RETRY_S = 10.0
"""Time between two attempts to build a successor."""

TransportFactory = Callable[[str, int], Transport]
"""Builds one transport by its name, for an epoch; raises TransportError with cause and fix when it cannot run here."""

Background = Callable[[Callable[[], Any], str], "Future[Any]"]
"""Begins named work that blocks, where it holds nothing up."""


def in_background(work: Callable[[], Any], name: str) -> Future[Any]:
    """Do work on a thread of its own, or now when the process may have no more threads."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            outcome.set_exception(error)
        else:
            outcome.set_result(found)

    apart(run, name=name)
    return outcome


class RankTransports:
    """All agents of one rank."""

    def __init__(
        self,
        identity: RankIdentity,
        create: TransportFactory,
        link: NodeLink,
        *,
        clock: Clock,
        background: Background = in_background,
    ) -> None:
        self._identity = identity
        self._create = create
        self._link = link
        self._clock = clock
        self._background = background
        self._built: dict[str, Transport] = {}
        self._epochs: dict[str, int] = {}
        """The epoch of each agent's endpoint."""
        self.epoch = identity.epoch
        """The epoch up to which every successor that the node has asked for is there."""
        self.asked_epoch = identity.epoch
        """The last epoch that the node has asked for."""
        self._wanted: dict[str, int] = {}
        """Successors to build, each with its epoch."""
        self._not_quiet: set[Transport] = set()
        """Agents to replace because a transfer of theirs was not quiet."""
        self._job: Future[dict[str, Transport]] | None = None
        self._building: dict[str, int] = {}
        """The part of `_wanted` that the job builds."""
        self._not_before_s = 0.0
        self.retired: list[Transport] = []
        """Replaced agents, the oldest first, until they are closed."""
        self._held: set[Transport] = set()
        """Retired agents whose endpoints still have to work, until the node has them revoked."""
        self._released_epoch = 0
        self._closing: dict[Transport, Future[None]] = {}
        self._half_built: list[Transport] = []
        """Agents that failed while they were built, and that would not close."""
        self._ending = threading.Event()
        self.replaced: list[Transport] = []
        """Agents that were replaced since the last `tend` of the rank's peers; the reader clears the list."""

    def __getitem__(self, name: str) -> Transport:
        transport = self._built.get(name)
        if transport is None:
            raise TransportError(f"{name} is not there at present: it failed, and its successor cannot be built yet")
        return transport

    def build(self, name: str) -> None:
        """Make the first agent of a name now, and report the progress. Raises TransportError, RegistrationError."""
        self._built[name] = self._make(name, self.epoch, first=True)
        self._epochs[name] = self.epoch

    def current(self, transport: Transport) -> bool:
        """Whether an agent has not been replaced."""
        return self._built.get(transport.name) is transport

    def replace(self, old: Transport) -> None:
        """Put a new agent in the place of one that would not become quiet, once it is there."""
        if self.current(old) and old not in self._not_quiet:
            log.warning("transport_not_quiet", rank=str(self._identity.rank), transport=old.name)
            self._not_quiet.add(old)
            self._wanted[old.name] = max(self._wanted.get(old.name, 0), self.asked_epoch)

    def renew(self, epoch: int, names: Collection[str] = ()) -> None:
        """Replace every agent, or those of `names`, once new ones are there that give out endpoints of `epoch`."""
        self.asked_epoch = epoch
        self._wanted |= {name: epoch for name in self._identity.transports if not names or name in names}

    def tend(self) -> bool:
        """Begin to build what is wanted, and change to successors. Return whether endpoints or epoch have changed."""
        self._begin_job()
        changed = self._take_up()
        if self.epoch < self.asked_epoch and self.asked_epoch not in self._wanted.values():
            self.epoch = self.asked_epoch
            changed = True
        return changed

    def release(self, before_epoch: int) -> None:
        """Note that endpoints of epochs before this one need not work any more."""
        self._released_epoch = before_epoch
        self._held.clear()

    def leaving(self) -> list[Transport]:
        """Return replaced agents that can be closed as soon as their transfers have ended."""
        return [each for each in self.retired if each not in self._held and each not in self._closing]

    def close_retired(self, transport: Transport) -> None:
        """Begin to close a replaced agent, which nobody may use any more; `closed` says when it has ended."""
        self._closing[transport] = self._background(partial(self._close, transport), f"close {transport.name}")

    def closed(self) -> list[Transport]:
        """Return replaced agents that were closed since the last call, and so move no byte. Raises what kept one from closing."""
        ended = [transport for transport, outcome in self._closing.items() if outcome.done()]
        for transport in ended:
            self._closing[transport].result()
            del self._closing[transport]
            self.retired.remove(transport)
        return ended

    def revoked(self, before_epoch: int, names: Collection[str] = ()) -> bool:
        """Whether nobody can write by an endpoint of an earlier epoch, of all transports or of those in `names`.

        Replaced agents count until they are closed.
        """
        concerned = names or self._identity.transports
        return not any(transport.name in concerned for transport in self.retired) and all(
            transport.revoked(before_epoch) for name, transport in self._built.items() if name in concerned
        )

    def endpoints(self) -> tuple[TransportEndpoint, ...]:
        """Return the endpoints by which peers reach each agent."""
        there = [name for name in self._identity.transports if name in self._built]
        return tuple(
            TransportEndpoint(transport=name, data=self._built[name].endpoint().data, epoch=self._epochs[name])
            for name in there
        )

    def begin_close(self) -> None:
        """Begin to tear every agent down, and end what is being built."""
        self._ending.set()
        for transport in reversed(dict.fromkeys((*self._built.values(), *self.retired))):
            if transport not in self._closing:
                self.close_retired(transport)
        self._built.clear()
        self.retired.clear()

    def closing(self) -> bool:
        """Return whether an agent is not closed yet, after `begin_close`."""
        if self._job is not None and self._job.done():
            job, self._job = self._job, None
            with suppress(Exception):  # it was to end: what it could not build is of no interest any more
                for transport in job.result().values():
                    self.close_retired(transport)
        return self._job is not None or not all(outcome.done() for outcome in self._closing.values())

    def end_close(self) -> None:
        """Raise what kept an agent from closing; otherwise nothing of this rank moves a byte any more."""
        closing, self._closing = self._closing, {}  # nothing keeps what the agents had mapped
        for outcome in closing.values():
            outcome.result()
        for transport in self._half_built:
            self._close(transport)

    def _close(self, transport: Transport) -> None:
        self._use_device()
        transport.close()

    # ------------------------------------------------------------------ successors

    def _begin_job(self) -> None:
        if self._job is not None or not self._wanted or self._clock() < self._not_before_s:
            return
        self._building = dict(self._wanted)
        log.info("transports_being_built", rank=str(self._identity.rank), transports=list(self._building))
        self._job = self._background(partial(self._make_all, self._building), "build transports")

    def _make_all(self, wanted: dict[str, int]) -> dict[str, Transport]:
        """Build all of them, or none."""
        made: dict[str, Transport] = {}
        try:
            with contained("building a transport", rank=str(self._identity.rank)):
                for name, epoch in wanted.items():
                    made[name] = self._make(name, epoch)
        except BaseException:
            for transport in made.values():
                self._discard(transport)
            raise
        return made

    def _make(self, name: str, epoch: int, *, first: bool = False) -> Transport:
        """Build an agent and register all memory with it; one that fails is closed."""
        self._use_device()
        transport = self._create(name, epoch)
        try:
            self._register(transport, tells=first)
        except BaseException:
            self._discard(transport)
            raise
        return transport

    def _register(self, transport: Transport, *, tells: bool) -> None:
        pieces = self._identity.memory
        total_bytes = sum(piece.length_bytes for piece in pieces)
        done_bytes = 0
        reported_s = self._clock()
        for piece in pieces:
            if self._ending.is_set():
                raise TransportError("the rank worker ends")
            transport.register([piece])
            done_bytes += piece.length_bytes
            if tells and (self._clock() - reported_s >= PROGRESS_INTERVAL_S or done_bytes == total_bytes):
                reported_s = self._clock()
                progress = WorkerProgress(rank=self._identity.rank, done_bytes=done_bytes, total_bytes=total_bytes)
                self._link.send(progress)

    def _discard(self, transport: Transport) -> None:
        """Close an agent that nobody uses. If it does not close, `end_close` tries again, and fails with it."""
        try:
            transport.close()
        except Exception:
            log.exception("transport_not_closed", rank=str(self._identity.rank), transport=transport.name)
            self._half_built.append(transport)

    def _use_device(self) -> None:
        """Make the rank's GPU this thread's current one: libraries look for its context where they are called."""
        device = next((piece.device for piece in self._identity.memory if piece.kind is MemoryKind.VRAM), None)
        if device is not None and not runtime.reason_without_device():
            runtime.use(device)

    def _take_up(self) -> bool:
        """Change to the successors that are there, or tell the node why they are not. Return whether any has changed."""
        if self._job is None or not self._job.done():
            return False
        job, self._job = self._job, None
        building, self._building = self._building, {}
        error = job.exception()
        if error is not None:
            self._put_off(tuple(building), error)
            return False
        for name, transport in job.result().items():
            self._retire(name, hold=building[name] > max(self._epochs[name], self._released_epoch))
            self._built[name], self._epochs[name] = transport, building[name]
            if self._wanted[name] == building[name]:
                del self._wanted[name]
        return True

    def _put_off(self, names: tuple[str, ...], error: BaseException) -> None:
        if not isinstance(error, BridgeError):
            raise error
        self._not_before_s = self._clock() + RETRY_S
        rank, code, reason = self._identity.rank, error.code, str(error)
        log.error(
            "transports_not_built", rank=str(rank), transports=list(names), code=code, reason=reason, again_s=RETRY_S
        )
        self._link.send(TransportsNotBuilt(rank=rank, transports=names, error_code=code, error=reason[:REASON_CHARS]))
        for name in names:
            if self._built.get(name) in self._not_quiet:
                self._retire(name)

    def _retire(self, name: str, *, hold: bool = False) -> None:
        """Take an agent out of use. `hold`: peers may still write by its endpoint, until the endpoint is revoked."""
        old = self._built.pop(name, None)
        if old is not None:
            if hold:
                self._held.add(old)
            self._not_quiet.discard(old)
            self.retired.append(old)
            self.replaced.append(old)
