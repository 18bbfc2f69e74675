"""Engines in processes of their own that do what they are told, so that they can be killed and frozen.

Owns: one process for each engine, forked from a server that has imported everything (an engine is there in 0.1 s). The bytes are
the synthetic adapter's. Must not know: what becomes of a room; an error of the daemon is raised here as what it was.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvbridge.core.errors import BridgeError, errors_by_code
from kvbridge.core.ids import Role, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.engine.adapters import synthetic
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine

CALL_S = 20.0
"""Longest call of an engine; what it is told to do takes little longer."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.helpers.obedient_engines"])


class ObedientEngine:
    """One engine process, attached to a daemon. `close` ends it, however it is."""

    def __init__(self, role: Role, runtime_dir: Path) -> None:
        """Start and attach. Raises what attaching raises."""
        self.role = role
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_serve, args=(role, str(runtime_dir), theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._answer(2 * CALL_S)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, verb: str, *arguments: Any, timeout_s: float = CALL_S + 5) -> Any:
        """Carry one verb out and return what it returned. Raises the error that it raised there."""
        self._pipe.send((verb, arguments))
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise AssertionError(f"the {self.role} engine {self.pid} did not answer within {timeout_s} s")
        good, *found = self._pipe.recv()
        if good:
            return found[0]
        code, text = found
        kind = errors_by_code().get(code)
        if kind is None:
            raise AssertionError(f"in the {self.role} engine: {text}")
        raise kind(text)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.join(5)
        assert not self._process.is_alive()

    def close(self) -> None:
        """End the process without a word to the daemon, which sees its connection end."""
        self.kill()
        self._pipe.close()
        self._process.close()


def _serve(role: Role, runtime_dir: str, pipe: Connection) -> None:
    """The process: attach, then a command at a time until the pipe ends."""
    engine: _Prefill | _Decode | None = None
    while True:
        try:
            if engine is None:
                found: Any = None
                engine = _Prefill(runtime_dir) if role is Role.PREFILL else _Decode(runtime_dir)
            else:
                verb, arguments = pipe.recv()
                found = getattr(engine, verb)(*arguments)
        except (EOFError, OSError):
            return
        except BridgeError as error:
            pipe.send((False, error.code, str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
            pipe.send((False, "", f"{type(error).__name__}: {error}"))
        else:
            pipe.send((True, found))


class _Prefill:
    """What a prefill engine can be told."""

    def __init__(self, runtime_dir: str) -> None:
        self._engine = PrefillEngine.attach(runtime_dir)
        self._tables: dict[int, Tables] = {}

    def begin(self, room: int, tokens: int) -> None:
        self._tables[room] = self._engine.begin(room, prompt_tokens=tokens).tables

    def fill(self, room: int, tokens: int, start: int, stop: int) -> None:
        """Write rows of a begun room without telling anybody."""
        section = Section(prompt_tokens=tokens, start_token=start, stop_token=stop)
        for view in self._engine.views.values():
            synthetic.fill(view, room=room, tables=self._tables[room], section=section)

    def write(self, room: int, tokens: int, start: int, stop: int) -> None:
        """Fill rows and publish them."""
        self.fill(room, tokens, start, stop)
        self._engine.publish(room, stop)

    def publish(self, room: int, upto: int) -> None:
        """Say that what has been filled can be sent."""
        self._engine.publish(room, upto)

    def finish(self, room: int) -> None:
        self._engine.finish(room, metadata=b"first token")

    def abort(self, room: int) -> None:
        self._engine.abort(room, "told so")

    def events(self, timeout_s: float) -> list[tuple[int, str, str]]:
        return _events(self._engine.events, timeout_s)


class _Decode:
    """What a decode engine can be told."""

    def __init__(self, runtime_dir: str) -> None:
        self._engine = DecodeEngine.attach(runtime_dir)
        self._tables: dict[int, Tables] = {}

    def claim(self, room: int, tokens: int) -> None:
        """Claim a room once it is committed, and check every byte of it."""
        claimed = self._engine.wait_claim(room, CALL_S)
        assert set(claimed.metadata.values()) == {b"first token"}, claimed.metadata
        self._tables[room] = claimed.tables
        self.check(room, tokens)

    def check(self, room: int, tokens: int) -> None:
        """Check every byte of a claimed room (again)."""
        for view in self._engine.views.values():
            wrong = synthetic.compare(view, room=room, tables=self._tables[room], tokens=tokens).mismatches
            assert not wrong, f"room {room}: {wrong[0]}, and {len(wrong) - 1} more"

    def extend(self, room: int, tokens: int) -> None:
        self._tables[room] = self._engine.extend(room, tokens)

    def release(self, room: int) -> None:
        self._engine.release(room)

    def abort(self, room: int) -> None:
        self._engine.abort(room, "told so")

    def events(self, timeout_s: float) -> list[tuple[int, str, str]]:
        return _events(self._engine.events, timeout_s)


def _events(events: Callable[[float], list[Any]], timeout_s: float) -> list[tuple[int, str, str]]:
    return [(event.room, event.kind, event.code) for event in events(timeout_s)]
