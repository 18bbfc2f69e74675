"""What nodes say of themselves in a handshake, and what is checked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError, UnauthorizedError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import check_manifest, first_difference
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


@dataclass(frozen=True, slots=True)
class ClaimedName:
    """A node's name, and the public key that it was proved with (empty without keys)."""

    instance: str
    node: str
    key: str

    @property
    def node_name(self) -> tuple[str, str]:
        """Instance and node."""
        return self.instance, self.node

    def __str__(self) -> str:
        return f"{self.instance}/{self.node}"


def check_name(claim: ClaimedName, *, bound_to: frozenset[str], present: Iterable[ClaimedName]) -> None:
    """Raise UnauthorizedError unless the holder of a key may use a name.

    `bound_to`: the instances that the key is bound to; empty: any. `present`: the names in use by other incarnations. A new
    incarnation of a node ends its old one with all its rooms, so it must be proved by the same key, or by one that is bound to
    the instance expressly.
    """
    if bound_to and claim.instance not in bound_to:
        raise UnauthorizedError(
            f"the key {claim.key} speaks for instance {', '.join(sorted(bound_to))}, not for {claim.instance}: correct "
            "`instance` there, or the key's entry in control.curve.allowed_keys_file here"
        )
    for other in present:
        if other.node_name == claim.node_name and other.key != claim.key and not bound_to:
            raise UnauthorizedError(
                f"node {claim} is known here under another key than {claim.key}: two nodes use "
                "one name, or its key was changed; then bind the new key to the instance in "
                "control.curve.allowed_keys_file here, or wait until the old incarnation is lost (timeouts.peer_silence_s)"
            )
