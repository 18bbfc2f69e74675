"""What this process may do, and the software that it runs on."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import sys
from ctypes.util import find_library
from pathlib import Path

from kvbridge.control.runtime_directory import require_private_directory
from kvbridge.core.errors import ConfigError
from kvbridge.doctor.checks.software import MOONCAKE_BUILDS, NIXL_BUILDS, VERBS_LIBRARY
from kvbridge.doctor.facts import Directory, KeyFact, Process, Software
from kvbridge.doctor.host.memory import CAP_SYS_PTRACE, ROOT, has_capability, limit_of, read_number

PACKAGES = (*MOONCAKE_BUILDS, "nixl", *NIXL_BUILDS, "torch", "pyzmq", "cuda-core", "cuda-bindings")
PREFIXES = ("MC_", "UCX_", "NIXL_")


def read_process(runtime_directory: Path | None, keys: tuple[KeyFact, ...], root: Path = ROOT) -> Process:
    """Look at limits and rights. `keys` have been looked at by the caller."""
    return Process(
        open_files=limit_of(resource.RLIMIT_NOFILE),
        ptrace_scope=read_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        may_trace_any=has_capability(CAP_SYS_PTRACE, root),
        runtime=None if runtime_directory is None else _directory(runtime_directory),
        keys=keys,
    )


def _directory(path: Path) -> Directory:
    try:
        return Directory(path=str(path), exists=require_private_directory(path))
    except ConfigError as error:
        return Directory(path=str(path), problem=str(error))


def read_software() -> Software:
    """Look at versions and at the variables that the transfer libraries read."""
    return Software(
        python=sys.version_info[:3],
        packages={name: version for name in PACKAGES if (version := _version(name))},
        libraries=tuple(name for name in (VERBS_LIBRARY,) if find_library(name)),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
