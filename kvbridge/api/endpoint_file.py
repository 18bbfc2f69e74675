"""The file that tells other processes of a host where a daemon listens."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import FrozenModel, Role

ENDPOINT_FILE = "daemon.json"


class DaemonEndpoint(FrozenModel):
    """The file's content, written when the endpoints are open."""

    role: Role | str
    instance: str = ""
    node: str = ""
    incarnation: str
    pid: int
    http_url: str
    control: PeerAddress | None = None


def write_endpoint(runtime_dir: Path, endpoint: DaemonEndpoint) -> None:
    """Write the endpoint file, whole or not at all."""
    path = runtime_dir / ENDPOINT_FILE
    draft = path.with_suffix(f".{endpoint.incarnation}")
    draft.write_text(endpoint.model_dump_json(indent=2) + "\n")
    draft.rename(path)


def remove_endpoint(runtime_dir: Path, incarnation: str) -> None:
    """Remove the endpoint file if it is this incarnation's."""
    path = runtime_dir / ENDPOINT_FILE
    with contextlib.suppress(OSError, ValueError):
        if DaemonEndpoint.model_validate_json(path.read_text()).incarnation == incarnation:
            path.unlink()


def read_endpoint(runtime_dir: Path) -> DaemonEndpoint | None:
    """Return the file's content; None without a whole file. Raises ConfigError for a file of another user."""
    try:
        with (runtime_dir / ENDPOINT_FILE).open("rb") as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read()
    except OSError:
        return None
    if owner != os.geteuid():
        raise ConfigError(f"{file.name} was written by user {owner}, not by user {os.geteuid()} of this process")
    try:
        return DaemonEndpoint.model_validate_json(content)
    except ValueError:
        return None
