"""Settings of what is checked about the bytes that have arrived. Owns: that section. Must not know: who checks."""

from __future__ import annotations

from kvbridge.core.ids import FrozenModel
from kvbridge.core.plan.digests import DigestKind


class IntegrityConfig(FrozenModel):
    """Whether a request's bytes are compared with those that were sent, before it can be claimed."""

    digest: DigestKind = DigestKind.NONE
    """`crc32c`: both sides compute a checksum of every page, and a room with a page that differs fails; `none`: rows are
    counted, their bytes are trusted."""
