"""How a transition table is read.

The tables themselves are in `sender` and `receiver`; everything that affects a room's state is a row there. A machine
returns *actions*, which are names: the service that owns the room carries them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvbridge.core.errors import ConflictError, IntegrityError

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)
ActionT = TypeVar("ActionT", bound=StrEnum)

Transition = tuple[StateT, tuple[ActionT, ...]]


@dataclass(frozen=True, slots=True)
class Table(Generic[StateT, EventT, ActionT]):
    """A transition table: for each state, what each event leads to. What is missing is not allowed."""

    rows: Mapping[StateT, Mapping[EventT, Transition[StateT, ActionT]]]
    start: StateT
    final: frozenset[StateT]

    def step(self, state: StateT, event: EventT) -> Transition[StateT, ActionT]:
        """Return the next state and the actions. Raises ConflictError when the table does not list the event here."""
        try:
            return self.rows[state][event]
        except KeyError:
            raise ConflictError(f"'{event}' is not possible in state '{state}'") from None

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every state is listed, reachable and leads to a final one, which stays."""
        kinds = type(self.start)
        missing = [state for state in kinds if state not in self.rows]
        if missing:
            raise IntegrityError(f"states without a row: {missing}")
        follows = {state: {target for target, _ in events.values()} for state, events in self.rows.items()}
        reached = _closure(self.start, follows)
        lost = [state for state in kinds if state not in reached]
        if lost:
            raise IntegrityError(f"states that nothing leads to: {lost}")
        stuck = [state for state in kinds if not _closure(state, follows) & self.final]
        if stuck:
            raise IntegrityError(f"states that never end: {stuck}")
        left = [state for state in self.final if follows[state] - {state}]
        if left:
            raise IntegrityError(f"final states that something leads out of: {left}")


def _closure(state: StateT, follows: Mapping[StateT, set[StateT]]) -> set[StateT]:
    seen = {state}
    queue = [state]
    while queue:
        for target in follows[queue.pop()]:
            if target not in seen:
                seen.add(target)
                queue.append(target)
    return seen
