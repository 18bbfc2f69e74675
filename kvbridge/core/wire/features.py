"""Features: how two releases of kvbridge agree on what they both can do.

Each side says what it has and what it requires of the other, in the first message of a conversation. Both sides decide, since an
older release does not know what a later one requires of it. A feature that is agreed is one that both have. Names on the wire are
texts, because a later release has others.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvbridge.core.errors import FeatureError
from kvbridge.core.ids import FrozenModel

_Names = Annotated[tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], ...], Field(max_length=64)]


class Features(FrozenModel):
    """What one side of a conversation says."""

    has: _Names = ()
    requires: _Names = ()
    """What the other side must have."""


FEATURES = Features()
"""What this release has and requires, in every conversation: nothing that another release could lack."""


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
