"""What all backends do in the same way: take memory in, read endpoints, know their peers, check what is submitted."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from kvbridge.core.errors import ConfigError, InvalidInputError, RegistrationError, TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport import extents
from kvbridge.transport.base import Connection, Endpoint, Peer, Transfer, Transport
from kvbridge.transport.calls import Call

log = structlog.get_logger(__name__)


PeerT = TypeVar("PeerT", bound="KnownPeer")
ContentT = TypeVar("ContentT", bound=BaseModel)


class KnownPeer(Protocol):
    """What a backend knows of a connected peer."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    @property
    def extents(self) -> extents.Extents:
        """Its memory, as announced."""


class Backend(Transport, Generic[PeerT]):
    """An agent with its memory and its peers. Each peer has a handle, which is all that the caller holds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._memory = extents.Extents("this process")
        self._peers: dict[Peer, PeerT] = {}
        self._transfers: weakref.WeakKeyDictionary[Transfer, Peer] = weakref.WeakKeyDictionary()
        """Those that somebody still holds."""

    def register(self, memory: Sequence[Extent]) -> None:
        self._require_open()
        for part in memory:
            reason = self._out_of_reach(part)
            if reason:
                raise RegistrationError(f"cannot register {part.label or 'memory'} at {part.address:#x}: {reason}")
        joined = self._memory.joined(memory)
        self._register(memory)
        self._memory = joined

    def connect(self, endpoint: Endpoint) -> Connection:
        return _Connecting(self, endpoint)

    def take(self, known: PeerT) -> Peer:
        """Return the handle of a peer that has been connected."""
        self._require_open()
        peer = Peer(known.label)
        self._peers[peer] = known
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Transfers that are still active are aborted; their owner keeps polling them."""
        self._known(peer)
        for transfer, to in list(self._transfers.items()):
            if to is peer:
                transfer.abort("the peer was disconnected")
        del self._peers[peer]

    @abstractmethod
    def _require_open(self) -> None:
        """Raise TransportError after `close`."""

    @abstractmethod
    def _out_of_reach(self, part: Extent) -> str:
        """Why some memory cannot be registered, empty when it can."""

    @abstractmethod
    def _register(self, memory: Sequence[Extent]) -> None:
        """Register memory that overlaps none: all of it, or raise a TransportError."""

    @abstractmethod
    def begin_connect(self, endpoint: Endpoint) -> Call[PeerT]:
        """Read an endpoint and return the call that connects it. Raises TransportError, InvalidInputError."""

    def _checked(self, peer: Peer, operations: Operations) -> PeerT:
        """Return what is known of a peer to which operations are to go. Raises InvalidInputError, TransportError."""
        self._require_open()
        known = self._known(peer)
        self._memory.require(operations.source, operations.length)
        known.extents.require(operations.destination, operations.length)
        longest = int(operations.length.max(initial=0))
        if longest > self.max_operation_bytes:
            raise InvalidInputError(
                f"an operation of {longest} bytes is longer than max_operation_bytes ({self.max_operation_bytes}); cut it first"
            )
        return known

    def _known(self, peer: Peer) -> PeerT:
        known = self._peers.get(peer)
        if known is None:
            raise InvalidInputError(f"{peer!r} is not connected to this {self.name} transport; connect it first")
        return known


class _Connecting(Connection):
    """A call of a backend that connects a peer; it begins with the first poll."""

    def __init__(self, backend: Backend[PeerT], endpoint: Endpoint) -> None:
        self._begin = partial(backend.begin_connect, endpoint)
        self._take: Callable[[Any], Peer] = backend.take
        self._call: Call[Any] | None = None

    def poll(self) -> Peer | None:
        if self._call is None:
            self._call = self._begin()
        return self._take(self._call.result()) if self._call.done() else None

    def cancel(self) -> None:
        if self._call is not None:
            self._call.give_up()


def labels(memory: Sequence[Extent]) -> str:
    """What some memory is called, for messages."""
    return ", ".join(sorted({part.label or "unnamed" for part in memory}))


def read_endpoint(endpoint: Endpoint, transport: str, content: type[ContentT]) -> ContentT:
    """Return what a peer says of itself. Raises TransportError when it is not of `transport`, or unreadable."""
    if endpoint.transport != transport:
        raise TransportError(f"an endpoint of transport '{endpoint.transport}' was given to {transport}")
    try:
        return content.model_validate_json(endpoint.data, extra="ignore")
    except ValidationError as error:
        raise TransportError(
            f"a peer's {transport} endpoint cannot be read: {error.error_count()} errors, the first: "
            f"{error.errors()[0]['msg']}; both sides must run the same release"
        ) from error


def set_environment(read: dict[str, str], wanted: Mapping[str, str], *, library: str, settings: str) -> None:
    """Set what a library is about to read, once a process, and note it in `read`. `settings`: those it is made from.

    Raises ConfigError when the library was loaded with something else.
    """
    if not read:
        for name, value in wanted.items():
            if os.environ.get(name, value) != value:
                log.warning("environment_replaced", name=name, was=os.environ[name], now=value, settings=settings)
        os.environ.update(wanted)
        read.update(wanted)
    elif read != wanted:
        changed = sorted(name for name in wanted.keys() | read.keys() if wanted.get(name) != read.get(name))
        raise ConfigError(
            f"{library} reads {', '.join(changed)} once a process and was loaded with other values; give every transport of a "
            f"process that uses it the same {settings}"
        )
