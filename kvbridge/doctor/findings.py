"""What a check finds, and in which words."""

from __future__ import annotations

from enum import StrEnum
from functools import partial

from pydantic import ByteSize

from kvbridge.core.ids import FrozenModel


class Level(StrEnum):
    """How bad it is; the worst first."""

    BREAKS = "breaks"
    """A daemon will not start, or requests will fail."""
    WARNING = "warning"
    """It works, but slower than it could, or not when something else happens."""
    NOT_HERE = "not here"
    """There is nothing of the kind on this host, and nothing needs it."""
    FINE = "fine"


class Finding(FrozenModel):
    """One thing that was looked at. These are the names of the JSON output, and stable."""

    check: str = ""
    """`family.name`; filled in from the table of checks."""
    level: Level
    subject: str = ""
    """Which of several things of a kind: a device, a port, a peer."""
    what: str
    why: str = ""
    """Why it matters; of what is not here, why that is all right."""
    cure: str = ""
    """What to do about it: a command wherever one does it."""


def finding(level: Level, what: str, why: str = "", cure: str = "", *, subject: str = "") -> Finding:
    """Return a finding of a level."""
    return Finding(level=level, what=what, why=why, cure=cure, subject=subject)


fine = partial(finding, Level.FINE)
not_here = partial(finding, Level.NOT_HERE)
warning = partial(finding, Level.WARNING)
breaks = partial(finding, Level.BREAKS)


def size(value_bytes: int) -> str:
    """Return a number of bytes in the largest unit that leaves a digit before the point."""
    return ByteSize(value_bytes).human_readable(separator=" ")


def rate(bytes_per_s: float) -> str:
    """Return a rate in decimal units, as networks have them."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"
