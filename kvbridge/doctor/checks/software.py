"""Versions, and what is known to go wrong with them.

What is said of the libraries was measured with mooncake-transfer-engine 0.3.13 and nixl 1.5 (UCX 1.23), or is in their trackers.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.config.transports import MooncakeProtocol
from kvbridge.doctor.facts import Host
from kvbridge.doctor.findings import Finding, breaks, fine, not_here, warning
from kvbridge.doctor.needs import Needs

OLDEST_PYTHON = (3, 11)
OLDEST_MOONCAKE = (0, 3, 13)
OLDEST_NIXL = (1, 5)
MOONCAKE_BUILDS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
)
NIXL_BUILDS = ("nixl-cu12", "nixl-cu13")
VERBS_LIBRARY = "ibverbs"


def python(host: Host, needs: Needs) -> Iterator[Finding]:
    """The interpreter, and what computes."""
    del needs
    version = ".".join(map(str, host.software.python))
    if host.software.python < OLDEST_PYTHON:
        yield breaks(
            f"Python {version}",
            "kvbridge needs 3.11 at least",
            "python3.12 -m venv .venv && .venv/bin/pip install kvbridge",
        )
        return
    torch = host.software.packages.get("torch", "")
    yield fine(f"Python {version}, torch {torch or 'not installed'}")
    if host.devices.accelerator and "+cpu" in torch:
        yield warning(
            f"torch {torch} is built for the CPU, and this host has a GPU",
            "daemons do without torch, but an engine in this environment cannot compute on the GPU",
            "pip install --force-reinstall torch (without the CPU index)",
        )


def mooncake(host: Host, needs: Needs) -> Iterator[Finding]:
    """One build of Mooncake, recent enough, with what it is linked against."""
    packages = host.software.packages
    if "mooncake" not in needs.transports:
        yield not_here("mooncake was not looked at", "no transport needs it")
        return
    found = [name for name in MOONCAKE_BUILDS if name in packages]
    if not found:
        if needs.role:
            yield breaks(
                "transports.order names mooncake, and it is not installed",
                "rank workers start without it: peers that have nothing else in common are refused",
                "pip install 'kvbridge[cpu]' (with CUDA: 'kvbridge[cuda]'), or take mooncake out of transports.order",
            )
        else:
            yield not_here("mooncake is not installed", "no configuration was given that needs it")
        return
    shown = ", ".join(f"{name} {packages[name]}" for name in found)
    if len(found) > 1:
        yield breaks(
            f"several builds of mooncake are installed: {shown}",
            "they own the same package, so files of one lie over those of the other: what loads is chance",
            f"pip uninstall -y {' '.join(found)} && pip install {found[0]}",
        )
    elif numbers(packages[found[0]]) < OLDEST_MOONCAKE:
        yield breaks(
            f"{shown} is older than 0.3.13",
            "without its progress timeout, transfers to a frozen peer end after 30 s only, and a failed one may still write",
            f"pip install --upgrade {found[0]}",
        )
    elif VERBS_LIBRARY not in host.software.libraries:
        yield breaks(
            f"{shown} is linked against libibverbs, which is not installed",
            "loading it fails, also for TCP",
            "apt-get install -y libibverbs1 libnuma1 libcurl4 (rhel: dnf install libibverbs numactl-libs libcurl)",
        )
    else:
        yield fine(shown)


def nixl(host: Host, needs: Needs) -> Iterator[Finding]:
    """A build of NIXL that is recent enough."""
    packages = host.software.packages
    if "nixl" not in needs.transports:
        yield not_here("nixl was not looked at", "no transport needs it")
        return
    found = [name for name in NIXL_BUILDS if name in packages]
    if not found:
        if needs.role:
            yield breaks(
                "transports.order names nixl, and it is not installed",
                "rank workers start without it: peers that have nothing else in common are refused",
                "pip install 'kvbridge[cpu]' (with CUDA: 'kvbridge[cuda]'), or take nixl out of transports.order",
            )
        else:
            yield not_here("nixl is not installed", "no configuration was given that needs it")
        return
    shown = ", ".join(f"{name} {packages[name]}" for name in found)
    if numbers(packages[found[0]]) < OLDEST_NIXL:
        yield breaks(
            f"{shown} is older than 1.5",
            "of earlier ones it is known that two agents which start at once hang (0.10 with UCX 1.20), and its API differs",
            f"pip install --upgrade {' '.join(found)}",
        )
    else:
        yield fine(shown)


def environment(host: Host, needs: Needs) -> Iterator[Finding]:
    """Variables that the transfer libraries read, and that do harm."""
    found = [
        finding for trap in (_legacy_tcp, _forced_tcp, _modules, _shared_memory_only) for finding in trap(host, needs)
    ]
    yield from found
    names = ", ".join(sorted(host.software.environment))
    if not found:
        yield fine(f"variables of the transfer libraries: {names or 'none set'}")


def _legacy_tcp(host: Host, needs: Needs) -> Iterator[Finding]:
    if "mooncake" in needs.transports and host.software.environment.get("MC_TCP_PROTO") == "1":
        yield breaks(
            "MC_TCP_PROTO=1 is set",
            "Mooncake's older protocol does not acknowledge: a write is reported as done before it has arrived",
            "unset MC_TCP_PROTO",
        )


def _forced_tcp(host: Host, needs: Needs) -> Iterator[Finding]:
    forced = host.software.environment.get("MC_FORCE_TCP", "")
    if forced and needs.rdma_required and needs.settings.mooncake.protocol is MooncakeProtocol.RDMA:
        yield breaks(
            f"MC_FORCE_TCP={forced} is set, and transports.mooncake.protocol is rdma",
            "Mooncake takes TCP in spite of the configuration",
            "unset MC_FORCE_TCP",
        )


def _modules(host: Host, needs: Needs) -> Iterator[Finding]:
    modules = host.software.environment.get("UCX_MODULES")
    lacking = modules is not None and "^" not in modules and not host.network.rdma
    if lacking and "nixl" in needs.transports and needs.settings.nixl.ucx_modules == "auto":
        yield warning(
            f"UCX_MODULES={modules} lets UCX load its InfiniBand module, and there is no such device",
            "its libraries can crash the interpreter when it exits (139), after all work is done",
            "unset UCX_MODULES, or export UCX_MODULES=^ib",
        )


def _shared_memory_only(host: Host, needs: Needs) -> Iterator[Finding]:
    tls = needs.settings.nixl.ucx_tls or host.software.environment.get("UCX_TLS", "")
    if "nixl" in needs.transports and tls and set(tls.split(",")) <= {"posix", "sysv", "self"}:
        yield breaks(
            f"UCX may use nothing but {tls}",
            "NIXL then crashes (signal 11) instead of saying that it has no way to a peer",
            "set transports.nixl.ucx_tls to tcp (or rc,tcp), or leave it empty and unset UCX_TLS",
        )


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, as 0.3.13.post1 gives (0, 3, 13)."""
    found: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)
