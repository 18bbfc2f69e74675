"""A room on a prefill node: from its admission until the last byte has arrived or the last writer is quiet.

How far each rank has published and sent is counted by the service, which raises ALL_SENT once every rank has sent everything. A
failure or an abort never frees pages by itself: ABORTING and FAILING wait for DRAINED, which the service raises once every rank
worker has proved that nothing of the room is in flight.
"""

from __future__ import annotations

from enum import StrEnum

from kvbridge.core.session.hearing import Hearing, Meaning
from kvbridge.core.session.machine import Table


class SenderState(StrEnum):
    """Where a room stands on the prefill side."""

    ADMITTED = "admitted"
    """Source pages are reserved; nobody has told us where to send."""
    AWAITED = "awaited"
    """The same, and a decode node has said that it will come: we hold it until it does, gives it up or has ended."""
    SENDING = "sending"
    """The destination is known; what is published is sent."""
    ABORTING = "aborting"
    """Somebody wants it stopped; waiting until nothing is in flight."""
    FAILING = "failing"
    """It cannot be completed; waiting until nothing is in flight."""
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


class SenderEvent(StrEnum):
    """What can happen to a room on the prefill side."""

    INTENT = "intent"
    """A decode node will come for the room."""
    OFFER = "offer"
    ALL_SENT = "all_sent"
    ABORT = "abort"
    """By the peer, the engine, or the HTTP API."""
    FAULT = "fault"
    """A transfer failed, a worker died, the peer vanished, a deadline passed."""
    DRAINED = "drained"


class SenderAction(StrEnum):
    """What the service then does."""

    OPEN_ROOM = "open_room"
    """Tell the workers both ends of the room and send what has been published so far."""
    CLOSE_ROOM = "close_room"
    """Tell the workers to stop, each of which answers when it is quiet; or, once all was sent, to forget the room."""
    TELL_FAILED = "tell_failed"
    """Tell the peer that the room will not be completed, and why."""
    TELL_DRAINED = "tell_drained"
    """Tell the peer that its pages are safe."""
    TELL_ENGINE = "tell_engine"
    """Tell the engine how the room ended."""
    FREE_SOURCE = "free_source"
    """Give the source pages back once no engine writes them, and keep the receipt for a while."""


_S, _E, _A = SenderState, SenderEvent, SenderAction
_ENDED = (_A.TELL_DRAINED, _A.FREE_SOURCE, _A.TELL_ENGINE)

SENDER_TABLE: Table[SenderState, SenderEvent, SenderAction] = Table(
    {
        _S.ADMITTED: {
            _E.INTENT: (_S.AWAITED, ()),
            _E.OFFER: (_S.SENDING, (_A.OPEN_ROOM,)),
            _E.ABORT: (_S.ABORTED, (_A.FREE_SOURCE, _A.TELL_ENGINE)),
            _E.FAULT: (_S.FAILED, (_A.FREE_SOURCE, _A.TELL_ENGINE)),
        },
        _S.AWAITED: {
            _E.OFFER: (_S.SENDING, (_A.OPEN_ROOM,)),
            _E.ABORT: (_S.ABORTED, (_A.TELL_FAILED, *_ENDED)),
            _E.FAULT: (_S.FAILED, (_A.TELL_FAILED, *_ENDED)),
        },
        _S.SENDING: {
            _E.ALL_SENT: (_S.COMPLETED, (_A.CLOSE_ROOM, _A.FREE_SOURCE, _A.TELL_ENGINE)),
            _E.ABORT: (_S.ABORTING, (_A.TELL_FAILED, _A.CLOSE_ROOM)),
            _E.FAULT: (_S.FAILING, (_A.TELL_FAILED, _A.CLOSE_ROOM)),
        },
        _S.ABORTING: {
            _E.DRAINED: (_S.ABORTED, _ENDED),
            _E.ABORT: (_S.ABORTING, ()),
            _E.FAULT: (_S.ABORTING, ()),
        },
        _S.FAILING: {
            _E.DRAINED: (_S.FAILED, _ENDED),
            _E.ABORT: (_S.FAILING, ()),
            _E.FAULT: (_S.FAILING, ()),
        },
        # An abort that crosses our last Done finds a room that is already quiet: the answer is the proof itself.
        _S.COMPLETED: {_E.ABORT: (_S.COMPLETED, (_A.TELL_DRAINED,)), _E.FAULT: (_S.COMPLETED, ())},
        _S.ABORTED: {_E.ABORT: (_S.ABORTED, (_A.TELL_DRAINED,)), _E.FAULT: (_S.ABORTED, ())},
        _S.FAILED: {_E.ABORT: (_S.FAILED, (_A.TELL_DRAINED,)), _E.FAULT: (_S.FAILED, ())},
    },
    start=_S.ADMITTED,
    final=frozenset({_S.COMPLETED, _S.ABORTED, _S.FAILED}),
)


class SenderSpeaker(StrEnum):
    """The speaker of a message about a room on the prefill side."""

    OFFERER = "offerer"
    """The decode node whose offer was taken."""
    INTENDER = "intender"
    """The decode node whose intent was taken, and no offer."""
    OTHER_NODE = "other_node"
    """A decode node that has nothing of the room."""
    OPEN_RANK = "open_rank"
    """A rank worker that has the room; where it speaks of an order: of one that it has not ended."""
    CLOSED_RANK = "closed_rank"
    """A rank worker that had the room and has let it go, or ended that order; or that never had it."""


class SenderMessage(StrEnum):
    """The messages about a room to the prefill side; each is the `type` of a message."""

    INTEND = "intend"
    OFFER = "offer"
    ABORT = "abort"
    FAILED = "failed"
    DIGESTED = "digested"
    SENT = "sent"
    REROUTED = "rerouted"
    ROOM_CLOSED = "room_closed"


_W, _M = SenderSpeaker, SenderMessage
_TAKE, _PROOF, _TURN_AWAY, _LATE = Meaning.TAKE, Meaning.PROOF, Meaning.TURN_AWAY, Meaning.LATE
# Of a room that has nothing of a node's, its Abort is answered with the truth: we do not write to its pages.
_OTHERS_HEARS = {_M.INTEND: _TURN_AWAY, _M.OFFER: _TURN_AWAY, _M.ABORT: _PROOF}
# An offer that is sent again, or a second thought: neither ends what the first offer began, nor may the answer look like proof.
_OFFERED_HEARS = {_M.ABORT: _TAKE, _M.OFFER: _LATE, _M.INTEND: _LATE}
_RANK_LATE = {_M.DIGESTED: _LATE, _M.SENT: _LATE, _M.REROUTED: _LATE, _M.ROOM_CLOSED: _LATE}
_STOPPED_HEARS = {
    _W.OFFERER: _OFFERED_HEARS,
    _W.OTHER_NODE: _OTHERS_HEARS,
    _W.OPEN_RANK: {_M.SENT: _TAKE, _M.REROUTED: _PROOF, _M.ROOM_CLOSED: _PROOF, _M.DIGESTED: _LATE},
    _W.CLOSED_RANK: _RANK_LATE,
}
_OVER_HEARS = {
    _W.OFFERER: _OFFERED_HEARS,
    _W.INTENDER: {_M.ABORT: _TAKE, _M.INTEND: _LATE, _M.OFFER: _TURN_AWAY},
    _W.OTHER_NODE: _OTHERS_HEARS,
    _W.CLOSED_RANK: _RANK_LATE,
}

SENDER_HEARS: Hearing[SenderState, SenderSpeaker] = Hearing(
    {
        _S.ADMITTED: {_W.OTHER_NODE: {_M.INTEND: _TAKE, _M.OFFER: _TAKE, _M.ABORT: _PROOF}},
        _S.AWAITED: {
            _W.INTENDER: {_M.OFFER: _TAKE, _M.ABORT: _TAKE, _M.INTEND: _LATE},
            _W.OTHER_NODE: _OTHERS_HEARS,
        },
        _S.SENDING: {
            _W.OFFERER: _OFFERED_HEARS,
            _W.OTHER_NODE: _OTHERS_HEARS,
            _W.OPEN_RANK: {_M.DIGESTED: _TAKE, _M.SENT: _TAKE, _M.REROUTED: _TAKE},
            _W.CLOSED_RANK: {_M.DIGESTED: _LATE, _M.SENT: _LATE},
        },
        _S.ABORTING: _STOPPED_HEARS,
        _S.FAILING: _STOPPED_HEARS,
        _S.COMPLETED: {
            _W.OFFERER: {**_OFFERED_HEARS, _M.FAILED: _TAKE},
            _W.OTHER_NODE: _OTHERS_HEARS,
            _W.CLOSED_RANK: _RANK_LATE,
        },
        _S.ABORTED: _OVER_HEARS,
        _S.FAILED: _OVER_HEARS,
    },
    unknown={
        # An early offer waits for its room, and an Abort withdraws it.
        _W.OTHER_NODE: {_M.INTEND: _TAKE, _M.OFFER: _TAKE, _M.ABORT: _PROOF, _M.FAILED: _LATE},
        _W.CLOSED_RANK: _RANK_LATE,
    },
)
