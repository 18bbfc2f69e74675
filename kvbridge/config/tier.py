"""Settings of prefixes that stay: which model their pages belong to.

Owns: that section and the relations inside it. Must not know: keys, pages, who may name which namespace.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvbridge.core.ids import FrozenModel, NonNegative
from kvbridge.core.prefixes import ModelIdentity

Text = Annotated[str, Field(max_length=200)]


class TierConfig(FrozenModel):
    """Prefixes that stay. Page keys begin with the model: pages of two models, or of two revisions of one, are never mixed up."""

    enabled: bool = False
    """Whether requests may have page keys here. Needs `model_name` and `model_revision`."""
    model_name: Text = ""
    """Name of the model, the same on all nodes that hold it and in what computes page keys."""
    model_revision: Text = ""
    """Revision of the model, or a digest of its weights. A decode node that says one takes pages only from prefill nodes that say
    the same: set it on prefill nodes first."""

    policy: Literal["lru", "greedy_dual"] = "lru"
    """Which cached prefixes go first when pages are needed: of the fifth used longest ago those that lie side by side in memory, or
    (for pools that are small for their load) likewise by length, age and uses."""

    retained_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of all pages that can be cached which one namespace may have retained at once: its requests say with `retention` that
    their pages are to go after others. Beyond it they count as without. 0: `retention` is without effect here."""

    checkpoint_interval_tokens: NonNegative = 0
    """Prefill, models with windows: so often in a prompt its engine is asked to keep windows and states, from which others go on
    that have the same tokens so far, rounded down to whole pages. Each takes pages of `pools.device.swa`. 0: only at a prompt's end
    and where a second one has left what is known of it."""

    generated: bool = True
    """Decode: whether pages of answers stay too, as far as engines say with `release` what is in them. Their rows were computed one
    token at a time, so whoever goes on from them gets other roundings than one who computes the whole prompt; false: the prompt's
    pages only."""

    @property
    def model(self) -> ModelIdentity | None:
        """What the node says it holds; None: nothing."""
        if not self.model_name:
            return None
        return ModelIdentity(name=self.model_name, revision=self.model_revision)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.model_name) != bool(self.model_revision):
            raise ValueError("model_name and model_revision belong together: set both or neither")
        if self.enabled and not self.model_revision:
            raise ValueError(
                "enabled without model_name and model_revision: geometry does not tell weights apart, and pages of other weights "
                "under the same key would be wrong answers; set both"
            )
        return self
