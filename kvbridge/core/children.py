"""Child processes: the command of one, its environment, and how one has ended.

Owns: these rules, for every part that starts processes. Must not know: who starts a process, what it does.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from enum import StrEnum

SETTINGS_PREFIX = "KVBRIDGE_"
"""Variables that begin so set keys of a configuration, but for those of `PROCESS_VARIABLES`."""
PROCESS_VARIABLES = frozenset({"KVBRIDGE_KERNEL_CACHE"})
"""Variables that every process reads by itself: no configuration has a key for them, and children get them."""


class EndCause(StrEnum):
    """Why a process is not there any more."""

    KILLED = "killed"
    EXITED = "exited"
    START_FAILED = "start_failed"
    """There was no process."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in an interpreter of its own.

    `-P`: without it, Python would import files of the working directory in place of installed modules, and so run them.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without settings of a configuration: a child is told all that it is to know, and no secret travels."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(SETTINGS_PREFIX) or name in PROCESS_VARIABLES
    }


def signal_name(number: int) -> str:
    """Return the name of a signal. Real-time signals have none: they are numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_cause(code: int) -> EndCause:
    """Return the cause that an exit code stands for; a negative one is the number of a signal."""
    return EndCause.KILLED if code < 0 else EndCause.EXITED


def how_it_ended(code: int) -> str:
    """Return an exit code in words."""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
