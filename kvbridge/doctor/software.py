"""Versions of the transfer libraries, and what is known to go wrong with them.

What is said of the libraries was measured with mooncake-transfer-engine 0.3.13 and nixl 1.5 (UCX 1.23), or is in their trackers.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import dataclass

from pydantic import Field

from kvbridge.core.ids import FrozenModel
from kvbridge.doctor.findings import Finding, breaks, fine, not_here
from kvbridge.doctor.needs import Needs

VERBS_LIBRARY = "ibverbs"


@dataclass(frozen=True)
class Library:
    """A library that a transport needs."""

    builds: tuple[str, ...]
    """Its distributions."""
    oldest: tuple[int, ...]
    too_old: str
    """What goes wrong with older ones."""
    exclusive: bool = False
    """Whether all builds own the same package, so that one of them can be installed."""
    links: str = ""
    """A system library without which it does not load."""


LIBRARIES = {
    "mooncake": Library(
        ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"),
        (0, 3, 13),
        "without its progress timeout, transfers to a frozen peer end after 30 s only, and a failed one may still write",
        exclusive=True,
        links=VERBS_LIBRARY,
    ),
    "nixl": Library(
        ("nixl-cu12", "nixl-cu13"),
        (1, 5),
        "of earlier ones it is known that two agents which start at once hang (0.10 with UCX 1.20), and its API differs",
    ),
}
PACKAGES = tuple(name for library in LIBRARIES.values() for name in library.builds)


class Software(FrozenModel):
    """Versions of what kvbridge runs on."""

    packages: dict[str, str] = Field(default_factory=dict)
    """Installed builds of the transfer libraries with their versions."""
    libraries: tuple[str, ...] = ()
    """System libraries that were found, of those that are needed."""


def read_software() -> Software:
    """Look at the versions of the transfer libraries."""
    return Software(
        packages={name: version for name in PACKAGES if (version := _version(name))},
        libraries=tuple(name for name in (VERBS_LIBRARY,) if find_library(name)),
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_library(transport: str, software: Software, needs: Needs) -> Iterator[Finding]:
    """A transport that is to be used has one build of its library, recent enough, with what that is linked against."""
    library, packages = LIBRARIES[transport], software.packages
    found = [name for name in library.builds if name in packages]
    shown = ", ".join(f"{name} {packages[name]}" for name in found)
    if transport not in needs.transports:
        yield not_here(f"{transport} was not looked at", "no transport needs it")
    elif not found and needs.role:
        yield breaks(
            f"transports.order names {transport}, and it is not installed",
            "rank workers start without it: peers that have nothing else in common are refused",
            f"pip install 'kvbridge[cpu]' (with CUDA: 'kvbridge[cuda]'), or take {transport} out of transports.order",
        )
    elif not found:
        yield not_here(f"{transport} is not installed", "no configuration was given that needs it")
    elif len(found) > 1 and library.exclusive:
        yield breaks(
            f"several builds of {transport} are installed: {shown}",
            "they own the same package, so files of one lie over those of the other: what loads is chance",
            f"pip uninstall -y {' '.join(found)} && pip install {found[0]}",
        )
    elif numbers(packages[found[0]]) < library.oldest:
        yield breaks(
            f"{shown} is older than {'.'.join(map(str, library.oldest))}",
            library.too_old,
            f"pip install --upgrade {' '.join(found)}",
        )
    elif library.links and library.links not in software.libraries:
        yield breaks(
            f"{shown} is linked against lib{library.links}, which is not installed",
            "loading it fails, also for TCP",
            "apt-get install -y libibverbs1 libnuma1 libcurl4 (rhel: dnf install libibverbs numactl-libs libcurl)",
        )
    else:
        yield fine(shown)


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as 0.3.13.post1 gives (0, 3, 13)."""
    found: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)
