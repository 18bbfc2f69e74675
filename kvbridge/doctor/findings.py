"""What a check finds, and in which words it is told.

Owns: `Finding`, its levels, numbers in readable units. Must not know: what is looked at.
"""

from __future__ import annotations

from enum import StrEnum

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
    """Why it matters."""
    cure: str = ""
    """What to do about it: a command wherever one does it."""


def fine(what: str, *, subject: str = "") -> Finding:
    """A thing that is as it should be."""
    return Finding(level=Level.FINE, what=what, subject=subject)


def not_here(what: str, why: str, *, subject: str = "") -> Finding:
    """A thing that is not here; `why` says why that is all right."""
    return Finding(level=Level.NOT_HERE, what=what, why=why, subject=subject)


def breaks(what: str, why: str, cure: str, *, subject: str = "") -> Finding:
    """A thing that will break."""
    return Finding(level=Level.BREAKS, what=what, why=why, cure=cure, subject=subject)


def warning(what: str, why: str, cure: str, *, subject: str = "") -> Finding:
    """A thing that costs something, or will break when something else happens."""
    return Finding(level=Level.WARNING, what=what, why=why, cure=cure, subject=subject)


def size(value_bytes: int) -> str:
    """Return a number of bytes in the largest unit that leaves a digit before the point."""
    return ByteSize(value_bytes).human_readable(separator=" ")


def mebibytes(value_bytes: int) -> str:
    """Return a number of bytes as mount(8) and Docker take it, rounded up."""
    return f"{-(-value_bytes // (1 << 20))}m"


def rate(bytes_per_s: float) -> str:
    """Return a rate in decimal units, as networks have them."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"
