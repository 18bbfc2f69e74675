"""What this process may do: open files, its runtime directory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from kvbridge.control.runtime_directory import require_private_directory
from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import FrozenModel
from kvbridge.daemon.descriptors import SHARE
from kvbridge.doctor.findings import Finding, breaks, fine, not_here, warning
from kvbridge.doctor.memory import Limit, read_limit
from kvbridge.doctor.needs import Needs

LEAST_FILES = 1024


class Directory(FrozenModel):
    """A directory or what lies in its place."""

    path: str
    problem: str = ""
    """Why it could not be used."""
    exists: bool = True


class Process(FrozenModel):
    """What this process may do."""

    open_files: Limit = Limit()
    runtime: Directory | None = None


def read_process(runtime_directory: Path | None) -> Process:
    """Look at limits and rights."""
    runtime = None
    if runtime_directory is not None:
        path = str(runtime_directory)
        try:
            runtime = Directory(path=path, exists=require_private_directory(runtime_directory))
        except ConfigError as error:
            runtime = Directory(path=path, problem=str(error))
    return Process(open_files=read_limit(resource.RLIMIT_NOFILE), runtime=runtime)


def check_open_files(process: Process, needs: Needs) -> Iterator[Finding]:
    """Connections are file descriptors; a daemon raises the soft limit to the hard one and serves what that affords."""
    hard = process.open_files.hard
    wanted = max([needs.idle_connections, *(port.connections for port in needs.ports)], default=0) * SHARE
    raise_it = (
        "raise the hard limit: systemd LimitNOFILE=1048576; docker --ulimit nofile=1048576; /etc/security/limits.conf"
    )
    if hard is None or hard >= max(wanted, LEAST_FILES):
        yield fine(
            f"{'any number of' if hard is None else hard} files may be open" + (f", {wanted} are enough" * bool(wanted))
        )
    elif hard < LEAST_FILES:
        yield breaks(
            f"only {hard} files may be open (ulimit -Hn)",
            "daemon, rank workers and transports take some hundreds before the first peer connects",
            raise_it,
        )
    else:
        yield warning(
            f"{hard} files may be open (ulimit -Hn), the configured connections want {wanted}",
            f"each endpoint gets a quarter ({hard // SHARE}); callers beyond that are hung up on",
            f"{raise_it}; or lower http.max_connections and control.max_connections",
        )


def check_runtime_directory(process: Process, needs: Needs) -> Iterator[Finding]:
    """Whoever can enter the runtime directory is believed, so it must be this user's alone."""
    found = process.runtime
    if found is None:
        yield not_here("no runtime directory", "bootstrap has none" if needs.role else "no configuration was given")
    elif found.problem:
        yield breaks(
            found.problem,
            "engines and rank workers trust whoever serves the sockets in it, so a daemon does not start in one that others can "
            "enter",
            f"chown $(id -u) {found.path} && chmod 700 {found.path}, or set runtime_dir",
        )
    else:
        yield fine(f"{found.path} {'is private' if found.exists else 'will be made'}")
