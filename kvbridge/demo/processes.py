"""The demo's processes with a model: how they start, are asked, answer and end. Answers are pickled, in the order of the questions.

The processes are forked from a server that has imported torch and transformers once. The command itself imports neither.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvbridge.cli.signals import interrupts_ignored
from kvbridge.core.errors import BridgeError, PeerError
from kvbridge.processes import how_it_ended

STOP_S = 3.0

_processes = multiprocessing.get_context("forkserver")


class Failed(str):
    """The last answer of a process that cannot go on: why."""

    __slots__ = ()


class EngineProcess:
    """One object in a process of its own."""

    def __init__(self, name: str, target: str, folder: Path, *arguments: object) -> None:
        """Make a `target` ("module:class") of the arguments; the first answer is its `loaded`. `name` is for messages."""
        self.name = name
        module, _, kind = target.partition(":")
        self._log = folder / f"{kind.lower()}-engine.log"
        self.pipe, theirs = _processes.Pipe()
        _processes.set_forkserver_preload([module])
        entry = (module, kind, arguments, theirs, self._log)
        self._process = _processes.Process(target=_serve, name=name, args=entry, daemon=True)
        with interrupts_ignored():  # which the process inherits
            self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: object) -> None:
        """Have a method called. Raises PeerError when the process has ended."""
        try:
            self.pipe.send((method, arguments))
        except OSError as error:
            raise self._end() from error

    def answer(self) -> Any:  # noqa: ANN401 - each method has its own
        """Return the next answer. Raises PeerError when the process has ended or failed."""
        try:
            found = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._end() from error
        if isinstance(found, Failed):
            raise PeerError(f"{self.name} failed: {found}")
        return found

    def check_running(self) -> None:
        """Raise PeerError when the process has ended."""
        if not self._process.is_alive():
            self.answer()
            raise self._end()

    def close(self, *, at_once: bool) -> None:
        """End the process, which detaches unless it is to end at once."""
        self.pipe.close()
        if not at_once:
            self._process.join(STOP_S)
        self._process.kill()
        self._process.join()

    def _end(self) -> PeerError:
        self._process.join(STOP_S)
        log = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:]) if self._log.exists() else ""
        found = f"its log ends:\n{log}" if log else "its log is empty"
        return PeerError(f"{self.name} ended ({how_it_ended(self._process.exitcode or 0)}); {found}")


def _serve(module: str, kind: str, arguments: tuple[object, ...], pipe: Connection, log_path: Path) -> None:
    """Run the process until the command closes the pipe or ends."""
    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.setsid()  # Ctrl-C and a terminal's end are the command's to hear
    try:
        with getattr(importlib.import_module(module), kind)(*arguments) as engine:
            pipe.send(engine.loaded)
            while True:
                method, given = pipe.recv()
                pipe.send(getattr(engine, method)(*given))
    except (EOFError, BrokenPipeError):
        return
    except (ImportError, BridgeError) as error:
        with contextlib.suppress(OSError):
            pipe.send(Failed(error))
        sys.exit(1)
