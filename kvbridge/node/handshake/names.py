"""In whose name the holder of a key may speak.

Owns: the two rules about names: a key that is bound to instances speaks for these, and nobody takes a name over from
the holder of another key. Must not know: how a key was proved, what a node is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbridge.core.errors import UnauthorizedError


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
