"""A peer of the local transport: its memory within reach, for as long as anything is written there.

Owns: the steps by which a peer is locked, believed, mapped and opened. Must not know: transfers, our own memory.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import ClassVar

from kvbridge.core.clock import Clock
from kvbridge.core.errors import TransportError
from kvbridge.transport import extents
from kvbridge.transport.base import Peer, Steps
from kvbridge.transport.local.access import apart
from kvbridge.transport.local.allocations import OpenedAllocations
from kvbridge.transport.local.files import MappedFiles
from kvbridge.transport.local.host import Presence, require_same_host
from kvbridge.transport.local.memory import ReachableExtents
from kvbridge.transport.local.own import LocalEndpoint


class PeerMemory:
    """Everything that a peer shares, reachable here until the last reference goes."""

    def __init__(self, content: LocalEndpoint, *, device: int | None) -> None:
        """`device` is ours that will write to the peer's device memory; None for the one that holds it.

        Raises TransportError, with the reason, when the peer is not to be believed or some of it is out of reach.
        """
        claim = content.claim
        if claim is None:
            raise TransportError(
                "the peer has registered no shared memory, so the local transport cannot reach any of it"
            )
        self.label = f"process {claim.pid}"
        lock_file = content.files[0] if content.files else content.lock_file
        presence = Presence(claim, lock_file, content.epoch) if lock_file is not None else None
        require_same_host(claim)
        if content.private:
            raise TransportError(
                f"{self.label} has registered memory that is not shared ({', '.join(sorted(set(content.private)))}), "
                "which the local transport cannot write; use another transport for this pair"
            )
        self.files = MappedFiles(claim, content.files, content.extents, presence=presence)
        opened = OpenedAllocations(
            self.label, content.allocations, content.device_extents, device=device, presence=presence
        )
        if content.allocations:
            weakref.finalize(self, apart, opened.close, name="kvbridge-close-memory").atexit = False
        self.reachable = ReachableExtents((*self.files.reachable, *opened.reachable))
        pairs = [(extent.address, extent.length_bytes) for extent in (*self.files.reachable, *opened.reachable)]
        self.extents = extents.Extents(self.label, pairs)

    def register(self, device: int, *, until_s: float, clock: Clock) -> Steps[None]:
        """Have the peer's host memory registered with CUDA, and wait until then for it.

        Raises TransportError when it has failed by then, so that another transport can be tried.
        """
        for access in dict.fromkeys(
            extent.access(device) for extent in self.files.reachable if extent.access is not None
        ):
            while not access.wait(0.0) and clock() < until_s:
                yield
            if access.error:
                raise TransportError(
                    f"the host memory of {self.label} cannot be written by cuda:{device}: {access.error}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class LocalPeer(Peer):
    """A process of this host whose memory is within reach here. Its transport holds that memory, so this handle keeps nothing."""

    transport_name: ClassVar[str] = "local"
    label: str
