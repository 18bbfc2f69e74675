"""The transport within one host: copies from this process's memory into mappings of the peer's shared files.

Owns: what is registered here, the peers whose files are mapped. Must not know: rooms, pages.

Writing needs nothing of the peer: a frozen or dying one is written to like any other, since its files stay mapped
here. And since a transfer is a copy that this process makes, it stops between two slices and every failure is
quiet. Two things to know: a peer that shrinks a mapped file ends this process with the next copy into it (SIGBUS),
and a peer is refused as a whole when some of its memory is private, because a pair of ranks that could exchange
half its pages is of no use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from kvbridge.config.transports import LocalSettings
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import InvalidInputError, RegistrationError, TransportError
from kvbridge.core.ids import FrozenModel, MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.transport import extents
from kvbridge.transport.base import Capabilities, Endpoint, Memory, Peer, Transfer, Transport
from kvbridge.transport.endpoints import read_endpoint
from kvbridge.transport.local_copier import Copier, CopyTransfer
from kvbridge.transport.local_host import (
    FileIdentity,
    HostClaim,
    MappedFiles,
    Presence,
    Proof,
    SharedExtent,
    identify,
    require_same_host,
    writers_before,
)

NAME = "local"


class LocalEndpoint(FrozenModel):
    """What a peer needs to know, as JSON in `Endpoint.data`."""

    claim: HostClaim | None
    """None as long as no shared memory is registered."""
    files: tuple[FileIdentity, ...]
    extents: tuple[SharedExtent, ...]
    epoch: Annotated[int, Field(ge=0, lt=1 << 60)]
    private: tuple[Annotated[str, Field(max_length=200)], ...]
    """Labels of registered memory that is not shared."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalPeer(Peer):
    """A process of this host whose shared memory is mapped here."""

    transport_name: ClassVar[str] = NAME
    label: str
    memory: extents.Extents
    files: MappedFiles


class LocalTransport(Transport):
    """Copies made by one thread of this process, which starts with the first connection."""

    name: ClassVar[str] = NAME

    def __init__(self, settings: LocalSettings, *, epoch: int = 0, clock: Clock = monotonic) -> None:
        """`epoch`: that of the endpoints which this transport gives out."""
        self._settings = settings
        self._epoch = epoch
        self._clock = clock
        self._memory = extents.Extents("this process")
        self._registered: dict[int, tuple[Memory, FileIdentity | None]] = {}
        self._peers: set[LocalPeer] = set()
        self._proof: Proof | None = None
        self._copier = Copier(slice_bytes=settings.slice_bytes)

    def __repr__(self) -> str:
        return f"<LocalTransport {os.getpid()}: {self._memory}, {len(self._peers)} peers, {self._copier!r}>"

    @property
    def capabilities(self) -> Capabilities:
        """Host memory of one host only."""
        return Capabilities(
            memory_kinds=frozenset({MemoryKind.DRAM}),
            max_operation_bytes=self._settings.slice_bytes,
            same_host_only=True,
        )

    def register(self, memory: Sequence[Memory]) -> None:
        """See `Transport.register`. Memory without a shared file can be a source only."""
        self._copier.require_open()
        for part in memory:
            if part.kind is not MemoryKind.DRAM:
                raise RegistrationError(
                    f"cannot register {part.label or 'memory'} at {part.address:#x}: the local transport "
                    "reaches host memory only, "
                    f"not '{part.kind}'"
                )
        found = {part.address: (part, identify(part)) for part in memory}
        self._memory.add(extents.of(memory))
        self._registered |= found

    def unregister(self, memory: Sequence[Memory]) -> None:
        """See `Transport.unregister`. Peers that have it mapped keep their mapping until they disconnect."""
        self._memory.remove(extents.of(memory))
        for part in memory:
            del self._registered[part.address]

    def endpoint(self) -> Endpoint:
        """See `Transport.endpoint`. The first call with shared memory registered writes the proof beside it."""
        self._copier.require_open()
        files: dict[FileIdentity, int] = {}
        shared: list[SharedExtent] = []
        private: list[str] = []
        for part, identity in self._registered.values():
            if identity is None or part.shared is None:
                private.append((part.label or "unnamed")[:200])
                continue
            shared.append(
                SharedExtent(
                    address=part.address,
                    length_bytes=part.length_bytes,
                    file=files.setdefault(identity, len(files)),
                    offset_bytes=part.shared.offset_bytes,
                )
            )
        content = LocalEndpoint(
            claim=self._claim(files),
            files=tuple(files),
            extents=tuple(shared),
            epoch=self._epoch,
            private=tuple(private),
        )
        return Endpoint(transport=NAME, data=content.model_dump_json().encode())

    def connect(self, endpoint: Endpoint) -> LocalPeer:
        """See `Transport.connect`. Refused as well when some of the peer's memory is not shared."""
        self._copier.require_open()
        content = read_endpoint(endpoint, NAME, LocalEndpoint)
        if content.claim is None:
            raise TransportError(
                "the peer has registered no shared memory, so the local transport cannot reach any of it"
            )
        presence = Presence(content.claim, content.files[0], content.epoch) if content.files else None
        require_same_host(content.claim)
        label = f"process {content.claim.pid}"
        if content.private:
            raise TransportError(
                f"{label} has registered memory that is not shared ({', '.join(sorted(set(content.private)))}), "
                "which the local "
                "transport cannot write; use another transport for this pair"
            )
        files = MappedFiles(content.claim, content.files, content.extents, presence=presence)
        pairs = [(extent.address, extent.length_bytes) for extent in content.extents]
        peer = LocalPeer(label, extents.Extents(label, pairs), files)
        self._peers.add(peer)
        for address, length_bytes in files.resident:
            self._copier.populate(address, length_bytes, files)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """See `Transport.disconnect`; transfers that are active after all are aborted; poll them to their end."""
        known = self._known(peer)
        self._copier.abort_to(known.files, "the peer was disconnected")
        self._peers.discard(known)

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        """See `Transport.submit`; a destination outside of the peer's announced memory is refused the same way."""
        self._copier.require_open()
        known = self._known(peer)
        self._memory.require(operations.source, operations.length)
        known.memory.require(operations.destination, operations.length)
        if len(operations) and int(operations.length.max()) > self._settings.slice_bytes:
            raise InvalidInputError(
                f"an operation of {int(operations.length.max())} bytes is longer than max_operation_bytes "
                f"({self._settings.slice_bytes}); cut it first"
            )
        here = Operations(operations.source, known.files.here(operations.destination), operations.length)
        transfer = CopyTransfer(
            here, peer=known.label, deadline_s=deadline_s, keep_alive=known.files, clock=self._clock
        )
        self._copier.add(transfer)
        return transfer

    def close(self) -> None:
        """See `Transport.close`; waits for the slice that is being copied. Harmless when closed already."""
        self._copier.close(timeout_s=self._settings.close_timeout_s)
        self._peers.clear()
        if self._proof is not None:
            self._proof.close()
            self._proof = None

    def revoked(self, before_epoch: int) -> bool:
        """See `Transport.revoked`. Writers hold mappings of their own, so they have to let go of them or to end."""
        paths = {identity.path for _, identity in self._registered.values() if identity is not None}
        return not writers_before(sorted(paths), before_epoch)

    def _claim(self, files: dict[FileIdentity, int]) -> HostClaim | None:
        if self._proof is None and files:
            self._proof = Proof(Path(next(iter(files)).path).parent)
        return self._proof.claim if self._proof else None

    def _known(self, peer: Peer) -> LocalPeer:
        if not isinstance(peer, LocalPeer) or peer not in self._peers:
            raise InvalidInputError(f"{peer!r} is not connected to this local transport; connect it first")
        return peer
