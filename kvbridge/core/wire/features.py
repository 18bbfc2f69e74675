"""Features: how two releases of kvbridge agree on what they both can do.

Each side says what it has and what it requires of the other, in the first message of a conversation. Both sides decide, since an
older release does not know what a later one requires of it. A feature that is agreed is one that both have.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvbridge.core.errors import FeatureError
from kvbridge.core.ids import FrozenModel

MAX_FEATURES = 64

FeatureName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
FeatureNames = Annotated[tuple[FeatureName, ...], Field(max_length=MAX_FEATURES)]


class Feature(StrEnum):
    """The features of this release. Names on the wire are texts: a later release has others."""

    LOAD_BACK = "load_back"
    """Of an engine: it copies what a room shares out of host memory into the room's pages (`Pages.load`)."""


class Features(FrozenModel):
    """What one side of a conversation says; an older release says nothing, and has none."""

    has: FeatureNames = ()
    requires: FeatureNames = ()
    """What the other side must have."""


PEER_FEATURES = Features()
ENGINE_FEATURES = Features(has=(Feature.LOAD_BACK,))
DIRECTORY_FEATURES = Features()
"""What this release has and requires in each conversation."""


def agree(ours: Features, theirs: Features, *, us: str, them: str) -> tuple[str, ...]:
    """Return the features that both sides have. `us` and `them` name the sides, for people.

    Raises FeatureError, which names what is lacking and which side to upgrade.
    """
    for requiring, wanted, lacking, there in ((us, ours, them, theirs), (them, theirs, us, ours)):
        missing = sorted({*wanted.requires} - {*there.has})
        if missing:
            named = f"feature{'s' * (len(missing) > 1)} {', '.join(map(repr, missing[:8]))}"
            raise FeatureError(
                f"{requiring} requires {named}, which {lacking} does not have: upgrade {lacking}, or change what is required "
                f"in the configuration of {requiring}"
            )
    return tuple(sorted({*ours.has} & {*theirs.has}))
