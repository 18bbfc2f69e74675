"""The paths by which one rank writes to a peer node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.wire.messages import TransportEndpoint
from kvbridge.transport.base import Peer, Transport


@dataclass(eq=False)
class Target:
    """One path to one rank of a connected peer."""

    pairing: Pairing
    transport: Transport
    peer: Peer
    endpoint: TransportEndpoint
    manifest: RankManifest
    lost: bool = False
    """A transfer has failed by it, and it is used only as long as there is no other."""
    told: dict[tuple[int, int], bool] = field(default_factory=dict)
    """The rooms (with their generation) of which the node knows that they have left it, and whether something was in transit."""


@dataclass(eq=False)
class ConnectedPeer:
    """One peer node, by its incarnation."""

    name: str
    ranks: tuple[bytes, ...]
    """Packed, to see later which of them have changed."""
    paths: dict[int, list[Target]] = field(default_factory=dict)
    """By the ordinal of the rank in `ranks`; those of a rank in order of preference, at least one."""
    wanted: dict[tuple[int, str], float] = field(default_factory=dict)
    """Further paths, by ordinal and transport, and from when on each is to be connected.

    0 for a path that was never there: it is tried once. One that was lost is tried until it is there.
    """

    @property
    def targets(self) -> tuple[Target, ...]:
        """The paths that are used, one to each rank, in the order of `ranks`."""
        return tuple(self.target(ordinal) for ordinal in sorted(self.paths))

    def target(self, ordinal: int) -> Target:
        """The path to one rank that is used."""
        paths = self.paths[ordinal]
        return next((target for target in paths if not target.lost), paths[0])

    @property
    def transports(self) -> tuple[str, ...]:
        """By what each of its ranks is reached."""
        return tuple(target.transport.name for target in self.targets)

    @property
    def standby(self) -> tuple[str, ...]:
        """Transports by which every rank could be reached instead."""
        others = [
            {target.transport.name for target in paths if target is not self.target(ordinal) and not target.lost}
            for ordinal, paths in self.paths.items()
        ]
        return tuple(sorted(set.intersection(*others))) if others else ()

    def all_paths(self) -> Iterator[Target]:
        """Every path to every rank."""
        for paths in self.paths.values():
            yield from paths
