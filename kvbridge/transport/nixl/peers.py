"""The first contact with a nixl peer: what the peer says of itself, and how an agent takes that in."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Self

import numpy as np
from crc32c import crc32c
from pydantic import ConfigDict, Field

from kvbridge.core.errors import TransportError
from kvbridge.core.ids import FrozenModel, MemoryKind, NonNegative, Positive
from kvbridge.transport.nixl.agent import NixlAgent
from kvbridge.transport.windowed import Progress

ASK_EVERY_S = 0.0005


class NixlExtent(FrozenModel):
    """One registration, as a peer needs to know it."""

    address: Positive
    length_bytes: Positive
    kind: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0


class NixlEndpoint(FrozenModel):
    """What a peer needs to know, as JSON in `Endpoint.data`."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    agent: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
    metadata: bytes
    """What the library itself wants to be told; read by the library only."""
    release: Annotated[str, Field(max_length=100)]
    """Of the library that wrote the metadata."""
    checksum: NonNegative
    """CRC-32C of the metadata."""
    extents: tuple[NixlExtent, ...]

    @classmethod
    def of(cls, agent: NixlAgent, extents: Iterable[NixlExtent]) -> Self:
        """Return what an agent says of itself."""
        metadata = agent.metadata()
        return cls(
            agent=agent.name,
            metadata=metadata,
            release=agent.library_release,
            checksum=crc32c(metadata),
            extents=tuple(extents),
        )

    def require_readable(self, release: str) -> None:
        """Raise TransportError unless the metadata is whole and of the library's own release."""
        if self.release != release:
            raise TransportError(
                f"peer {self.agent} runs NIXL {self.release}, this process {release}; both sides must run the same NIXL release"
            )
        if crc32c(self.metadata) != self.checksum:
            raise TransportError(f"what peer {self.agent} says of itself was damaged on the way; connect to it again")


class ProbeTarget:
    """A registered byte, into which a byte of a peer's memory is read."""

    def __init__(self, agent: NixlAgent) -> None:
        self._byte = np.zeros(1, dtype=np.uint8)
        self.row = np.array([[self._byte.ctypes.data, 1, 0]], dtype=np.uint64)
        agent.register(MemoryKind.DRAM, self.row)


def introduce(agent: NixlAgent, content: NixlEndpoint, target: ProbeTarget, *, timeout_s: float) -> None:
    """Have an agent take a peer's metadata in and read a byte of its memory, which opens the connection (1 to 20 ms).

    A read that does not end stays behind; all it can ever touch is the byte of `target`. Blocks; raises TransportError.
    """
    name = agent.load_peer(content.metadata)
    if name != content.agent:
        raise TransportError(f"a peer calls itself {content.agent}, and its metadata names {name}; it was refused")
    ordered = sorted(content.extents, key=lambda extent: extent.kind is not MemoryKind.DRAM)  # host memory, if any
    for extent in ordered[:1]:
        remote = np.array([[extent.address, 1, extent.device]], dtype=np.uint64)
        request = agent.post_read(name, (MemoryKind.DRAM, target.row), (extent.kind, remote))
        ends_at_s = time.monotonic() + timeout_s
        while (answer := agent.check(request)).progress is Progress.PENDING:
            if time.monotonic() >= ends_at_s:
                agent.release(request)
                raise TransportError(
                    f"peer {name} did not answer within transports.nixl.connect_timeout_s ({timeout_s:g} s); it hangs, or its UCX "
                    "ports are closed from here"
                )
            time.sleep(ASK_EVERY_S)
        if answer.progress is not Progress.DONE:
            raise TransportError(f"peer {name} cannot be reached: {answer.reason}")
