"""Literal tables: who is struck, how, in which state of a room, and how the room must end.

One strike meets a room in every state at once. An outcome names the end of the room on the prefill and on the decode side:

    C  completed: its bytes were checked and it was released     A  aborted, as it was before the strike
    L  failed, `peer_failed`: somebody was lost                   W  failed, `worker_gone`
    w  aborted, `worker_gone`: by the decode side, whose worker it was
    T  failed, `transport_failed`: the library noticed first       a  failed, `aborted`: the prefill side gave it up
    -  not known there: never admitted, or forgotten with the process that died

Several letters on one side are several ways in which a race may go.
"""

from enum import StrEnum


class State(StrEnum):
    ADMITTED = "admitted"
    """On prefill only."""
    OFFERED = "offered"
    """Decode's pages are leased, no engine has begun."""
    BEGUN = "begun"
    PARTIAL = "partial"
    """Half of it has been published and sent."""
    MOVING = "moving"
    """Half of it has been published and is with the rank worker, which is held up."""
    DRAINING = "draining"
    """Cancelled while the rank worker is held up: nothing proves yet that it is quiet."""
    COMMITTED = "committed"
    CLAIMED = "claimed"
    CANCELLED = "cancelled"
    """Cancelled while the decode engine reads it."""
    COMPLETED = "completed"


class Victim(StrEnum):
    PREFILL = "prefill daemon"
    PREFILL_WORKER = "prefill rank worker"
    PREFILL_ENGINE = "prefill engine"
    DECODE = "decode daemon"
    DECODE_WORKER = "decode rank worker"
    DECODE_ENGINE = "decode engine"
    BOOTSTRAP = "bootstrap"


class Fault(StrEnum):
    KILL = "kill -9"
    FREEZE = "short freeze"
    """SIGSTOP and SIGCONT within every limit of silence."""
    LONG_FREEZE = "long freeze"
    """SIGSTOP until everybody has given it up who ever will, then SIGCONT."""


BEGUN_HERE = frozenset({State.BEGUN, State.PARTIAL, State.MOVING, State.DRAINING})
"""A prefill engine has begun these and not finished them."""

ENDS = {
    "C": ("completed", ""),
    "A": ("aborted", "aborted"),
    "L": ("failed", "peer_failed"),
    "W": ("failed", "worker_gone"),
    "w": ("aborted", "worker_gone"),
    "T": ("failed", "transport_failed"),
    "a": ("failed", "aborted"),
    "-": ("", ""),
}

_UNHARMED = "C/C C/C C/C C/C C/C A/A C/C C/C C/A C/C"
_PREFILL_WORKER_DIES = "W/- W/W W/W W/W W/W A/A C/C C/C C/A C/C"
_DECODE_WORKER_DIES = "C/C w/W w/W w/W w/W A/A C/C C/C C/A C/C"
_PARTED = "C/C L/L L/L L/L L/L A/A C/C C/C C/A C/C"

_OUTCOMES = {(victim, fault): _UNHARMED for victim in Victim for fault in Fault} | {
    # in the order of State:               adm off beg par mov dra com cla can com
    (Victim.PREFILL, Fault.KILL): "-/- -/L -/L -/L -/L -/A -/C -/C -/A -/C",
    (Victim.PREFILL, Fault.LONG_FREEZE): _PARTED,
    (Victim.PREFILL_WORKER, Fault.KILL): _PREFILL_WORKER_DIES,
    (Victim.PREFILL_WORKER, Fault.LONG_FREEZE): _PREFILL_WORKER_DIES,
    (Victim.PREFILL_ENGINE, Fault.KILL): "C/C C/C L/L L/L L/L A/A C/C C/C C/A C/C",
    (Victim.DECODE, Fault.KILL): "C/C L/- L/- L/- L/- A/- C/- C/- C/- C/-",
    (Victim.DECODE, Fault.LONG_FREEZE): _PARTED,
    (Victim.DECODE_WORKER, Fault.KILL): _DECODE_WORKER_DIES,
    (Victim.DECODE_WORKER, Fault.LONG_FREEZE): _DECODE_WORKER_DIES,
    (Victim.DECODE_ENGINE, Fault.KILL): "C/C C/C C/C C/C C/C A/A C/C C/L C/A C/C",
}

_BY_A_LIBRARY: dict[tuple[Victim, Fault], str] = {
    # What is under way when the receiving process ends: a connection tells the sender as well, perhaps first.
    (Victim.DECODE, Fault.KILL): "TL/-",
    (Victim.DECODE_WORKER, Fault.KILL): "Tw/TW",
    (Victim.DECODE_WORKER, Fault.LONG_FREEZE): "Tw/TW",
}


_ON_GPUS: dict[tuple[Victim, Fault], str] = {
    # Device memory dies with the worker that made it, and with it what had arrived.
    (Victim.DECODE_WORKER, Fault.KILL): "C/C w/W w/W w/W w/W A/A C/W C/W C/A C/C",
    (Victim.DECODE_WORKER, Fault.LONG_FREEZE): "C/C w/W w/W w/W w/W A/A C/W C/W C/A C/C",
}


def outcomes(transport: str, victim: Victim, fault: Fault, *, gpus: bool = False) -> dict[State, str]:
    """Return how the room must end, by its state at the strike. `gpus`: pools lie in device memory."""
    ends = _OUTCOMES | (_ON_GPUS if gpus else {})
    found = dict(zip(State, ends[victim, fault].split(), strict=True))
    if transport != "local" and (victim, fault) in _BY_A_LIBRARY:
        found[State.MOVING] = _BY_A_LIBRARY[victim, fault]
    return found


STRIKES = tuple(_OUTCOMES)
ON_GPUS = tuple(
    (victim, fault)
    for victim in (Victim.PREFILL_ENGINE, Victim.DECODE_ENGINE, Victim.PREFILL_WORKER, Victim.DECODE_WORKER)
    for fault in Fault
)
LOST = frozenset("LWwT")
"""Ends that a strike brings about."""

SHORT = ((Victim.PREFILL, Fault.KILL), (Victim.DECODE, Fault.KILL), (Victim.PREFILL_WORKER, Fault.KILL))
SHORT_SHARING = ((Victim.PREFILL_WORKER, Fault.KILL), (Victim.DECODE_ENGINE, Fault.KILL))

HEARTBEAT_S = 0.25
PEER_SILENCE_S = 6.0
WORKER_SILENCE_S = 6.0
FREEZE_S = 1.0
"""A short freeze: several heartbeats, and far from every limit of silence."""
LONG_FREEZE_S = 1.2 * max(PEER_SILENCE_S, WORKER_SILENCE_S)
"""How long those are frozen whom nobody ever gives up."""
SLACK_S = 3.0
"""A machine of two cores with other work takes so long to do what takes no time. Silence alone is noticed later."""
GPU_SLACK_S = 2.0
"""And so much longer where a process that is killed has a GPU to be taken from it, and engines have to let go first."""

NOTICED_WITHIN_S: dict[tuple[Victim, Fault], float] = {
    # From the strike until rooms in flight have failed on both sides. A connection that is gone is given two heartbeats.
    (Victim.PREFILL, Fault.KILL): 2 * HEARTBEAT_S + SLACK_S,
    (Victim.DECODE, Fault.KILL): 2 * HEARTBEAT_S + SLACK_S,
    (Victim.PREFILL_WORKER, Fault.KILL): SLACK_S,
    (Victim.DECODE_WORKER, Fault.KILL): SLACK_S,
    (Victim.PREFILL_ENGINE, Fault.KILL): SLACK_S,
    (Victim.DECODE_ENGINE, Fault.KILL): SLACK_S,
    (Victim.PREFILL, Fault.LONG_FREEZE): PEER_SILENCE_S + HEARTBEAT_S + SLACK_S,
    (Victim.DECODE, Fault.LONG_FREEZE): PEER_SILENCE_S + HEARTBEAT_S + SLACK_S,
    # The last sign of life of a worker may be a second old already; it is killed, which takes no time.
    (Victim.PREFILL_WORKER, Fault.LONG_FREEZE): WORKER_SILENCE_S + HEARTBEAT_S + SLACK_S,
    (Victim.DECODE_WORKER, Fault.LONG_FREEZE): WORKER_SILENCE_S + HEARTBEAT_S + SLACK_S,
}


def noticed_within_s(victim: Victim, fault: Fault, *, gpus: bool = False) -> float | None:
    limit_s = NOTICED_WITHIN_S.get((victim, fault))
    return limit_s + GPU_SLACK_S if gpus and limit_s is not None else limit_s
