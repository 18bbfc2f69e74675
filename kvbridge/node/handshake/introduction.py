"""What nodes say of themselves when they meet: what is said, what is checked of it, what is kept.

Owns: these three. Must not know: who is connected, on which thread the check runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError
from kvbridge.core.geometry.checks import check_manifest
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import first_difference
from kvbridge.core.wire.messages import NodeDescription
from kvbridge.core.wire.packed_ranks import unpack_rank


@dataclass(frozen=True)
class Self:
    """How this node names itself, and what it serves."""

    instance: str
    node: str
    incarnation: str
    pp_size: int
    tp_size: int
    stage_boundaries: tuple[int, ...]
    """The first layers of its instance's stages but the first."""
    geometry: ModelGeometry


@dataclass(frozen=True)
class Introduced:
    """What is kept of how a peer has described itself."""

    instance: str
    node: str
    ranks: tuple[bytes, ...]
    """Packed, as workers get them."""

    @classmethod
    def of(cls, node: NodeDescription) -> Introduced:
        """Take what is kept."""
        return cls(node.instance, node.node, node.ranks)


def check_introduction(node: NodeDescription, myself: Self, require_wanted: Callable[[], None]) -> None:
    """Check all that a decode node says of its memory, in time bounded by its length; called off the loop.

    `require_wanted()` raises when the outcome does not matter any more. Raises FingerprintMismatchError, which names the first
    difference, and what `unpack_rank` and `check_manifest` raise.
    """
    require_wanted()
    difference = first_difference(myself.geometry, node.geometry)
    if difference:
        raise FingerprintMismatchError(
            f"prefill instance {myself.instance} and decode instance {node.instance} hold different models: {difference}"
        )
    if not node.ranks:
        raise InvalidInputError(f"decode node {node.instance}/{node.node} has no rank that is ready")
    for packed in node.ranks:
        require_wanted()
        check_manifest(unpack_rank(packed).manifest, myself.geometry)
