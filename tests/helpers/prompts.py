"""Prompts that begin alike: what routers and engines know of a room's tokens."""

from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys

TIER = {"tier": {"enabled": True, "model_name": "a model", "model_revision": "1"}}


class Keyed:
    namespace: str

    def tokens(self, count: int) -> npt.NDArray[np.uint32]:
        """Return the first `count` token ids, those of an answer included."""
        raise NotImplementedError

    def keys(self, model: str, count: int) -> Keys:
        """Return the page keys of its first `count` tokens on nodes that serve a preset."""
        geometry, tier = preset(model), TIER["tier"]
        identity = PrefixIdentity(
            model=str(tier["model_name"]),
            revision=str(tier["model_revision"]),
            fingerprint=fingerprint(geometry),
            tokens_per_page=geometry.tokens_per_page,
            namespace=self.namespace,
        )
        return page_keys(identity, self.tokens(count))

    def asked(self, model: str, count: int) -> dict[str, Any]:
        named = {"namespace": self.namespace} if self.namespace else {}
        return {"page_hashes": b64encode(self.keys(model, count).data).decode()} | named


@dataclass(frozen=True)
class Prompt(Keyed):
    """Tokens of which the first `shared_tokens` are those of every prompt with this `begin`."""

    begin: int
    own: int
    shared_tokens: int
    namespace: str = ""

    def tokens(self, count: int) -> npt.NDArray[np.uint32]:
        found = np.full(count, self.own, dtype=np.uint32)
        found[: self.shared_tokens] = self.begin
        return found
