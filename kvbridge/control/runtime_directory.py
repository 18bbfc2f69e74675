"""The directory of a daemon's sockets: only its user may enter it, and one process serves a socket in it.

Owns: those two rules. Must not know: who talks.
"""

from __future__ import annotations

import os
import socket as unix
import stat
from pathlib import Path

from kvbridge.core.errors import ConfigError, ConflictError

_PROBE_S = 1.0


def prepare_runtime_directory(path: Path) -> Path:
    """Make `path` (mode 0700) if needed and return it. Raises ConfigError when others own it or can enter it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"runtime directory {path} cannot be made: {error.strerror}") from error
    require_private_directory(path)
    return path


def require_private_directory(path: Path) -> bool:
    """Return whether `path` is there; what lies in it is believed.

    Raises ConfigError unless it is a directory of this user that nobody else can enter.
    """
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"runtime directory {path} cannot be looked at: {error.strerror}") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise ConfigError(f"runtime directory {path} is not a directory of this user; choose another")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(f"runtime directory {path} can be entered by others; run: chmod 700 {path}")
    return True


def require_unserved(path: Path) -> None:
    """Raise ConflictError when a process serves this Unix socket: ZeroMQ would silently take it over."""
    if not path.exists():
        return
    with unix.socket(unix.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConflictError(f"another process serves {path}; stop it, or configure another runtime directory")
