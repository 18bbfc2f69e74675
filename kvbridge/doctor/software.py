"""Versions of the transfer libraries, and known problems of these versions and of the variables that they read.

These problems were measured with mooncake-transfer-engine 0.3.13 and nixl 1.5 (UCX 1.23), or are in the trackers of the
libraries.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import dataclass

from pydantic import Field

from kvbridge.config.transports import MooncakeProtocol
from kvbridge.core.errors import WITH_LIBRARIES
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor.findings import Finding, Needs, breaks, fine, not_here, warning

VERBS_LIBRARY = "ibverbs"
PREFIXES = ("MC_", "UCX_", "NIXL_")


@dataclass(frozen=True)
class Library:
    """A library that a transport needs."""

    builds: tuple[str, ...]
    """Its distributions on PyPI."""
    oldest: tuple[int, ...]
    too_old: str
    """The problem of older versions."""
    exclusive: bool = False
    """Whether all builds own the same package, so that only one of them can be installed."""
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
        "two agents of an earlier version that start at once hang (0.10 with UCX 1.20), and its API differs",
    ),
}
PACKAGES = tuple(name for library in LIBRARIES.values() for name in library.builds)


class Software(FrozenModel):
    """Versions and settings of the transfer libraries."""

    packages: dict[str, str] = Field(default_factory=dict)
    """Installed builds of the transfer libraries with their versions."""
    libraries: tuple[str, ...] = ()
    """Needed system libraries that were found."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that the transfer libraries read."""


def read_software() -> Software:
    """Read the versions of the transfer libraries, and the variables that they read."""
    return Software(
        packages={name: version for name in PACKAGES if (version := _version(name))},
        libraries=tuple(name for name in (VERBS_LIBRARY,) if find_library(name)),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_library(transport: str, software: Software, needs: Needs) -> Iterator[Finding]:
    """Each configured transport has one build of its library, recent enough, with the system library that it links to."""
    library, packages = LIBRARIES[transport], software.packages
    found = [name for name in library.builds if name in packages]
    shown = ", ".join(f"{name} {packages[name]}" for name in found)
    if transport not in needs.transports:
        yield not_here(f"{transport} was not looked at", "no transport needs it")
    elif not found and needs.role:
        yield breaks(
            f"transports.order names {transport}, which is not installed",
            "rank workers start without it, and refuse peers with no other transport in common",
            f"{WITH_LIBRARIES}; or take {transport} out of transports.order",
        )
    elif not found:
        yield not_here(f"{transport} is not installed", "no configuration that needs it was given")
    elif len(found) > 1 and library.exclusive:
        yield breaks(
            f"several builds of {transport} are installed: {shown}",
            "they own the same package, so files of one overwrite those of the other, and which one loads is chance",
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


def check_environment(software: Software, needs: Needs, *, rdma: bool) -> Iterator[Finding]:
    """No variable of the transfer libraries does harm. `rdma`: there is a device."""
    found = [*_mooncake_traps(software.environment, needs), *_ucx_traps(software.environment, needs, rdma=rdma)]
    yield from found
    if not found:
        yield fine(f"variables of the transfer libraries: {', '.join(sorted(software.environment)) or 'none set'}")


def _mooncake_traps(environment: dict[str, str], needs: Needs) -> Iterator[Finding]:
    if "mooncake" not in needs.transports:
        return
    if environment.get("MC_TCP_PROTO") == "1":
        yield breaks(
            "MC_TCP_PROTO=1 is set",
            "Mooncake's older protocol does not acknowledge: a write is reported as done before it has arrived",
            "unset MC_TCP_PROTO",
        )
    forced = environment.get("MC_FORCE_TCP", "")
    if forced and needs.settings.mooncake.protocol is MooncakeProtocol.RDMA:
        yield breaks(
            f"MC_FORCE_TCP={forced} is set, and transports.mooncake.protocol is rdma",
            "Mooncake takes TCP in spite of the configuration",
            "unset MC_FORCE_TCP",
        )


def _ucx_traps(environment: dict[str, str], needs: Needs, *, rdma: bool) -> Iterator[Finding]:
    if "nixl" not in needs.transports:
        return
    modules = environment.get("UCX_MODULES")
    if modules is not None and "^" not in modules and not rdma and needs.settings.nixl.ucx_modules == "auto":
        yield warning(
            f"UCX_MODULES={modules} lets UCX load its InfiniBand module, and there is no such device",
            "its libraries can crash the interpreter at its exit (139), after all work is done",
            "unset UCX_MODULES, or export UCX_MODULES=^ib",
        )
    tls = needs.settings.nixl.ucx_tls or environment.get("UCX_TLS", "")
    if tls and set(tls.split(",")) <= {"posix", "sysv", "self"}:
        yield breaks(
            f"UCX may use nothing but {tls}",
            "NIXL then crashes (signal 11) instead of reporting that it has no way to a peer",
            "set transports.nixl.ucx_tls to tcp (or rc,tcp), or leave it empty and unset UCX_TLS",
        )


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as 0.3.13.post1 gives (0, 3, 13)."""
    found: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)
