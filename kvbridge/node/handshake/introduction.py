"""What nodes say of themselves in a handshake, and what is checked of it.

Owns: both. Must not know: who is connected, on which thread the check runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError
from kvbridge.core.geometry.checks import check_manifest
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import first_difference
from kvbridge.core.prefixes import identity_conflict
from kvbridge.core.wire.messages import NodeDescription, Welcome
from kvbridge.core.wire.packed_ranks import unpack_rank


@dataclass(frozen=True)
class Self:
    """How this prefill node introduces itself, and what it serves."""

    welcome: Welcome
    geometry: ModelGeometry


def check_introduction(node: NodeDescription, myself: Self, require_wanted: Callable[[], None]) -> None:
    """Check all that a decode node says of its memory, in time bounded by its length; called off the loop.

    `require_wanted()` raises when the outcome does not matter any more. Raises FingerprintMismatchError, which names the first
    difference, and what `unpack_rank` and `check_manifest` raise.
    """
    require_wanted()
    difference = first_difference(myself.geometry, node.geometry)
    if difference:
        raise FingerprintMismatchError(
            f"prefill instance {myself.welcome.instance} and decode instance {node.instance} hold different models: {difference}"
        )
    if conflict := identity_conflict(myself.welcome.model_identity, node.model_identity):
        raise FingerprintMismatchError(
            f"prefill instance {myself.welcome.instance} and decode instance {node.instance} hold different models: {conflict}"
        )
    if not node.ranks:
        raise InvalidInputError(f"decode node {node.instance}/{node.node} has no rank that is ready")
    for packed in node.ranks:
        require_wanted()
        check_manifest(unpack_rank(packed).manifest, myself.geometry)
