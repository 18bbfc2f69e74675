"""Engines of a random load, each in a process of its own: they serve many rooms, and compare every byte that they are given.

The bytes are the synthetic adapter's: rows follow from the page key of their tokens, so a row of another prompt, branch or tenant
differs. An engine always writes and expects what its own tokens demand, whatever keys it states.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kvbridge.core.errors import BridgeError, ConflictError, DeadlineError, DetachedError, PeerError
from kvbridge.core.ids import Role, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.engine import DecodeEngine, DecodeRoom, PrefillEngine
from kvbridge.tier.keys import NO_KEYS, Keys
from tests.faults.load_prompts import TokenSequence
from tests.helpers import synthetic
from tests.helpers.obedient_engines import write_answer

CALL_S = 10.0
"""Longest call of an engine."""
CLAIM_S = 30.0
"""A decode engine gives a room up that is not committed after so long."""
LOOK_S = 0.25
"""A decode engine asks so often for a room whose events it may have missed."""
IDLE_S = 0.01
CHUNK_TOKENS = (64, 256, 512)

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.faults.load_engines"])


@dataclass(frozen=True)
class Order:
    """One room that an engine serves."""

    room: int
    prompt: TokenSequence
    """The tokens that the engine has."""
    states: TokenSequence | None
    """The tokens whose keys the engine states: those of `prompt`, or a lie. None: no keys."""
    aborts: bool = False
    """The engine gives the room up half-way."""
    hold_s: float = 0.0
    """Decode: how long the engine reads the room before it looks at all bytes again."""
    answer_tokens: int = 0
    """Decode: so many tokens follow the prompt, and their whole pages stay."""
    compares: bool = True
    """Decode: whether the caller had both ends compute the same prompt."""


@dataclass
class Outcome:
    """What became of an order."""

    room: int
    role: Role
    code: str = ""
    """Of the error that ended it; empty when the engine is through with the room."""
    looks: int = 0
    compared_bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    """Each row that was not what the engine's tokens demand."""
    shared_tokens: int = 0
    """How many tokens the engine found computed before (prefill), or held (decode)."""


class LoadEngine:
    """One engine process and its pipe. Orders go in, outcomes come out, in any order."""

    def __init__(self, role: Role, runtime_dir: str, seed: int) -> None:
        self.role = role
        self._pipe, theirs = _processes.Pipe()
        process = _processes.Process(target=_serve, args=(role, runtime_dir, theirs, seed), daemon=True)
        process.start()
        theirs.close()
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the process is there."""
        return self._process.is_alive()

    def order(self, order: Order) -> None:
        """Hand an order over. An engine that has ended takes none: the caller's limit ends the room."""
        with suppress(OSError):
            self._pipe.send(order)

    def outcomes(self) -> Iterator[Outcome]:
        """All outcomes that have come."""
        with suppress(EOFError, OSError):
            while self._pipe.poll():
                found: Any = self._pipe.recv()
                yield found

    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


def _serve(role: Role, runtime_dir: str, pipe: Connection, seed: int) -> None:
    """Attach and serve, again and again, until the pipe ends."""
    while True:
        try:
            kind = PrefillEngine if role is Role.PREFILL else DecodeEngine
            with kind.attach(runtime_dir, call_timeout_s=CALL_S) as engine:
                server = _Prefill(engine, pipe, seed) if isinstance(engine, PrefillEngine) else _Decode(engine, pipe)
                try:
                    server.serve()
                finally:
                    server.let_go()
        except BridgeError:
            _refuse_all(role, pipe)
            time.sleep(LOOK_S)  # the daemon is down, and comes back
        except (EOFError, OSError):
            return


def _refuse_all(role: Role, pipe: Connection) -> None:
    while pipe.poll():
        pipe.send(Outcome(pipe.recv().room, role, code="detached"))


class _Comparer:
    """Looks at bytes for one outcome."""

    def __init__(self, engine: PrefillEngine | DecodeEngine, outcome: Outcome, keys: Keys) -> None:
        self._engine, self._outcome, self._keys = engine, outcome, keys

    def look(self, tables: Tables, tokens: int) -> None:
        for view in self._engine.views.values():
            found = synthetic.compare(view, room=self._outcome.room, tables=tables, tokens=tokens, keys=self._keys)
            self._outcome.looks += 1
            self._outcome.compared_bytes += found.checked_bytes
            self._outcome.wrong += map(str, found.mismatches)


class _Prefill:
    """Serves one room after another."""

    def __init__(self, engine: PrefillEngine, pipe: Connection, seed: int) -> None:
        self._engine, self._pipe = engine, pipe
        self._random = random.Random(seed)

    def serve(self) -> None:
        while True:
            if not self._pipe.poll(IDLE_S):
                self._engine.events()
                continue
            order = self._pipe.recv()
            outcome = Outcome(order.room, Role.PREFILL)
            try:
                with _ended_by_errors(self._engine, outcome):
                    self._serve_room(order, outcome)
            finally:
                self._pipe.send(outcome)

    def _serve_room(self, order: Order, outcome: Outcome) -> None:
        engine, tokens = self._engine, order.prompt.tokens
        keys = _keys(engine, order.prompt) if order.states else NO_KEYS
        begun = engine.begin(order.room, prompt_tokens=tokens, page_hashes=_keys(engine, order.states))
        comparer = _Comparer(engine, outcome, keys)
        outcome.shared_tokens = start = begun.computed_tokens
        if start:
            comparer.look(begun.restore, start)
        while start < tokens:
            stop = min(tokens, start + self._random.choice(CHUNK_TOKENS))
            self._fill(order.room, begun.tables, tokens, start, stop, keys)
            engine.publish(order.room, stop)
            if order.aborts and stop >= tokens // 2:
                engine.abort(order.room, "the load gives the room up")
                return
            start = stop
        if begun.computed_tokens:
            comparer.look(begun.restore, begun.computed_tokens)
        for at, tables in begun.checkpoints.items():
            self._fill(order.room, tables, at, at, at, keys)
        engine.finish(order.room, metadata=b"first token", checkpoints=tuple(begun.checkpoints))

    def _fill(self, room: int, tables: Tables, tokens: int, start: int, stop: int, keys: Keys) -> None:
        section = Section(prompt_tokens=tokens, start_token=start, stop_token=stop)
        for view in self._engine.views.values():
            synthetic.fill(view, room=room, tables=tables, section=section, keys=keys)

    def let_go(self) -> None:
        """Every room is served in one go."""


@dataclass
class _Claimed:
    order: Order
    outcome: Outcome
    keys: Keys
    room: DecodeRoom
    due_s: float


class _Decode:
    """Serves many rooms at once."""

    def __init__(self, engine: DecodeEngine, pipe: Connection) -> None:
        self._engine, self._pipe = engine, pipe
        self._wanted: dict[int, tuple[Order, float]] = {}
        """Rooms that are not claimed yet, with the moment when the engine gives them up."""
        self._claimed: list[_Claimed] = []
        self._looked_s = 0.0

    def serve(self) -> None:
        while True:
            while self._pipe.poll():
                order = self._pipe.recv()
                self._wanted[order.room] = order, time.monotonic() + CLAIM_S
            ready = {event.room for event in self._engine.events(IDLE_S)}
            now_s = time.monotonic()
            if now_s > self._looked_s + LOOK_S:
                self._looked_s, ready = now_s, ready | set(self._wanted)
            for room in ready & set(self._wanted):
                self._claim(room)
            for claimed in [each for each in self._claimed if each.due_s <= now_s]:
                self._end(claimed)

    def _claim(self, room: int) -> None:
        order, give_up_s = self._wanted[room]
        outcome = Outcome(room, Role.DECODE)
        keys = _keys(self._engine, order.prompt) if order.states else NO_KEYS
        try:
            with _ended_by_errors(self._engine, outcome, but=ConflictError):
                found = self._engine.claim(room, page_hashes=_keys(self._engine, order.states))
                outcome.shared_tokens = found.prefix_tokens
                claimed = _Claimed(order, outcome, keys, found, time.monotonic() + order.hold_s)
                self._claimed.append(claimed)
                self._compare(claimed)
        except ConflictError:  # not committed yet
            if time.monotonic() < give_up_s:
                return
            outcome.code = DeadlineError.code
        del self._wanted[room]
        if outcome.code:
            self._pipe.send(outcome)

    def _compare(self, claimed: _Claimed) -> None:
        if claimed.order.compares:
            comparer = _Comparer(self._engine, claimed.outcome, claimed.keys)
            comparer.look(claimed.room.tables, claimed.order.prompt.tokens)

    def _end(self, claimed: _Claimed) -> None:
        """Look at all bytes again, write the answer, and let go."""
        self._claimed.remove(claimed)
        order, engine = claimed.order, self._engine
        try:
            with _ended_by_errors(engine, claimed.outcome):
                self._compare(claimed)
                if order.aborts:
                    engine.abort(order.room, "the load gives the room up")
                elif order.answer_tokens and order.states == order.prompt:
                    whole = order.prompt.longer(7, order.answer_tokens)
                    keys = _keys(engine, whole)
                    write_answer(engine, claimed.room.tables, keys, order.prompt.tokens)
                    engine.release(order.room, valid_tokens=whole.tokens, page_hashes=keys)
                else:
                    engine.release(order.room)
        finally:
            self._pipe.send(claimed.outcome)

    def let_go(self) -> None:
        """Give up every room: the device memory is gone, or the daemon."""
        for claimed in self._claimed:
            with suppress(BridgeError):
                self._engine.release(claimed.order.room)
            claimed.outcome.code = claimed.outcome.code or DetachedError.code
            self._pipe.send(claimed.outcome)
        for order, _ in self._wanted.values():
            self._pipe.send(Outcome(order.room, Role.DECODE, code=DetachedError.code))


def _keys(engine: PrefillEngine | DecodeEngine, prompt: TokenSequence | None) -> Keys:
    return NO_KEYS if prompt is None else engine.page_keys(prompt.ids(), namespace=prompt.namespace)


@contextmanager
def _ended_by_errors(
    engine: PrefillEngine | DecodeEngine, outcome: Outcome, *, but: type[BridgeError] | tuple[()] = ()
) -> Iterator[None]:
    """Note the error that ends a room, and let the room go. The loss of the daemon or its memory ends the attachment, too."""
    try:
        yield
    except but:
        raise
    except BridgeError as error:
        outcome.code = error.code
        if isinstance(error, DetachedError | PeerError):
            raise
        with suppress(BridgeError):
            engine.abort(outcome.room, f"ended by {error.code}")
