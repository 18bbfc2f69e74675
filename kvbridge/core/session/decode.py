"""A room on a decode node, from its reservation until its pages are given back.

An offered page is *leased* until there is proof that no writer touches it any more: Done of every writer, or Drained of every
prefill node, or the end of its incarnation, which the service raises as DRAINED too. Nothing else leads out of ABORTING and
FAILING, no timer either. Pages of a claimed room go back when every engine that claimed the room has let it go or is dead.
"""

from __future__ import annotations

from enum import StrEnum

from kvbridge.core.session.tables import Hearing, Meaning, Table


class DecodeState(StrEnum):
    """The state of a room on the decode side."""

    AWAITING_PAGES = "awaiting_pages"
    """Adopted pools: the engine has been asked to name device pages."""
    INTENDED = "intended"
    """Every prefill node holds the room for this node; the engine has not named its pages yet."""
    RESERVED = "reserved"
    """All pages are there; the room waits until every prefill node is known."""
    OFFERED = "offered"
    """The prefill nodes may write."""
    VERIFYING = "verifying"
    """Every writer is done; the ranks of this node compute digests of their memory."""
    ABORTING = "aborting"
    """The room was stopped; it waits until no prefill node writes."""
    FAILING = "failing"
    """The room cannot complete; it waits until no prefill node writes."""
    COMMITTED = "committed"
    """Every row has arrived; an engine can claim the room."""
    CLAIMED = "claimed"
    """Engines read it."""
    ABORTING_CLAIMED = "aborting_claimed"
    """The room was stopped; it waits until no engine reads it any more."""
    FAILING_CLAIMED = "failing_claimed"
    """An engine that had claimed the room died; it waits until the others do not read it any more."""
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


class DecodeEvent(StrEnum):
    """An event of a room on the decode side."""

    PAGES = "pages"
    """The engine named its pages."""
    WRITERS_KNOWN = "writers_known"
    """Every prefill node is known and ready to write."""
    ALL_DONE = "all_done"
    """Every writer reported Done with the rows that it owes."""
    ARRIVED = "arrived"
    """As ALL_DONE, for a room whose digests have to be compared before the room can be read."""
    VERIFIED = "verified"
    """Every digest equals the writers'."""
    ABORT = "abort"
    FAULT = "fault"
    """A writer failed, a sum or a digest is wrong, a deadline passed, a worker or a peer died."""
    OTHER_PROMPT = "other_prompt"
    """The engine that claims the room has other tokens than the room's page keys name."""
    DRAINED = "drained"
    """Every prefill node proved that it does not write."""
    CLAIM = "claim"
    HANDED_OVER = "handed_over"
    """No page of the room is this node's: the event `committed` gives it to the engine."""
    RELEASE = "release"
    """No engine reads the pages any more: each has released them or is dead."""


class DecodeAction(StrEnum):
    """An action of the service."""

    INTEND = "intend"
    """Tell every prefill node that this node will come for the room."""
    OFFER = "offer"
    """Lease the pages and offer them to every prefill node."""
    TELL_ABORT = "tell_abort"
    """Ask every prefill node to stop and to prove it. A node without our offer stops holding the room."""
    WITHDRAW = "withdraw"
    """Tell every prefill node that may hold the room, as soon as the node is known, that this node does not come for it."""
    VERIFY = "verify"
    """Have the ranks of this node compute the digests."""
    REJECT = "reject"
    """Tell every prefill node why the room failed although everything was sent."""
    HOLD = "hold"
    """The lease has ended by proof: the pages belong to the room alone."""
    KEEP_PROMPT = "keep_prompt"
    """The whole pages of the prompt are final: put them in the cache."""
    DROP_PROMPT = "drop_prompt"
    """Take the room's pages out of the cache, from the first page for which its engines name different tokens."""
    KEEP_ANSWER = "keep_answer"
    """No engine writes the answer any more: cache its whole pages, if all engines name the same tokens."""
    FREE = "free"
    """Give the pages back and keep the receipt for a while."""
    TELL_ENGINE = "tell_engine"
    """Tell the engines that the room can be claimed, is to be released soon, or is over."""


_S, _E, _A = DecodeState, DecodeEvent, DecodeAction
_ENDED = (_A.FREE, _A.TELL_ENGINE)

DECODE_TABLE: Table[DecodeState, DecodeEvent, DecodeAction] = Table(
    {
        _S.AWAITING_PAGES: {
            _E.PAGES: (_S.RESERVED, ()),
            _E.WRITERS_KNOWN: (_S.INTENDED, (_A.INTEND,)),
            _E.ABORT: (_S.ABORTED, (_A.WITHDRAW, *_ENDED)),
            _E.FAULT: (_S.FAILED, (_A.WITHDRAW, *_ENDED)),
        },
        # No prefill node knows a page of the room, so none writes, and nothing has to be proved.
        _S.INTENDED: {
            _E.PAGES: (_S.OFFERED, (_A.OFFER,)),
            _E.ABORT: (_S.ABORTED, (_A.TELL_ABORT, *_ENDED)),
            _E.FAULT: (_S.FAILED, (_A.TELL_ABORT, *_ENDED)),
        },
        _S.RESERVED: {
            _E.WRITERS_KNOWN: (_S.OFFERED, (_A.OFFER,)),
            _E.ABORT: (_S.ABORTED, (_A.WITHDRAW, *_ENDED)),
            _E.FAULT: (_S.FAILED, (_A.WITHDRAW, *_ENDED)),
        },
        _S.OFFERED: {
            _E.ALL_DONE: (_S.COMMITTED, (_A.HOLD, _A.KEEP_PROMPT, _A.TELL_ENGINE)),
            _E.ARRIVED: (_S.VERIFYING, (_A.HOLD, _A.VERIFY)),
            _E.ABORT: (_S.ABORTING, (_A.TELL_ABORT,)),
            _E.FAULT: (_S.FAILING, (_A.TELL_ABORT,)),
        },
        _S.VERIFYING: {
            _E.VERIFIED: (_S.COMMITTED, (_A.KEEP_PROMPT, _A.TELL_ENGINE)),
            _E.ABORT: (_S.ABORTED, _ENDED),
            _E.FAULT: (_S.FAILED, (_A.REJECT, *_ENDED)),
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
        _S.COMMITTED: {
            _E.CLAIM: (_S.CLAIMED, ()),
            _E.HANDED_OVER: (_S.COMPLETED, (_A.FREE,)),
            _E.ABORT: (_S.ABORTED, _ENDED),
            _E.FAULT: (_S.FAILED, _ENDED),
            _E.OTHER_PROMPT: (_S.FAILED, (_A.DROP_PROMPT, _A.REJECT, *_ENDED)),
        },
        _S.CLAIMED: {
            _E.CLAIM: (_S.CLAIMED, ()),
            _E.RELEASE: (_S.COMPLETED, (_A.KEEP_ANSWER, *_ENDED)),
            _E.ABORT: (_S.ABORTING_CLAIMED, (_A.TELL_ENGINE,)),
            _E.FAULT: (_S.FAILING_CLAIMED, (_A.TELL_ENGINE,)),
            _E.OTHER_PROMPT: (_S.FAILING_CLAIMED, (_A.DROP_PROMPT, _A.REJECT, _A.TELL_ENGINE)),
        },
        _S.ABORTING_CLAIMED: {
            _E.RELEASE: (_S.ABORTED, _ENDED),
            _E.ABORT: (_S.ABORTING_CLAIMED, ()),
            _E.FAULT: (_S.ABORTING_CLAIMED, ()),
        },
        _S.FAILING_CLAIMED: {
            _E.RELEASE: (_S.FAILED, _ENDED),
            _E.ABORT: (_S.FAILING_CLAIMED, ()),
            _E.FAULT: (_S.FAILING_CLAIMED, ()),
        },
        _S.COMPLETED: {_E.ABORT: (_S.COMPLETED, ()), _E.FAULT: (_S.COMPLETED, ())},
        _S.ABORTED: {_E.ABORT: (_S.ABORTED, ()), _E.FAULT: (_S.ABORTED, ())},
        _S.FAILED: {_E.ABORT: (_S.FAILED, ()), _E.FAULT: (_S.FAILED, ())},
    },
    start=_S.AWAITING_PAGES,
    final=frozenset({_S.COMPLETED, _S.ABORTED, _S.FAILED}),
)


class DecodeSpeaker(StrEnum):
    """The speaker of a message about a room on the decode side."""

    WRITES = "writes"
    """A rank that writes the room and has not reported Done, or a node with such a rank."""
    IS_DONE = "is_done"
    """A rank that has reported Done, or a node all of whose ranks have."""
    HAS_DRAINED = "has_drained"
    """A node that has proved that it writes nothing any more, or a rank of that node."""
    OWN_RANK = "own_rank"
    """A rank worker of this node."""
    ANYBODY = "anybody"
    """Any node: the writers of an ended room are forgotten."""


class DecodeMessage(StrEnum):
    """The messages about a room to the decode side; each is the `type` of a message."""

    DIGESTS = "digests"
    DONE = "done"
    PATH_LOST = "path_lost"
    FAILED = "failed"
    DRAINED = "drained"
    DIGESTED = "digested"
    VERIFIED = "verified"


_W, _M = DecodeSpeaker, DecodeMessage
_TAKE, _PROOF, _LATE = Meaning.TAKE, Meaning.PROOF, Meaning.LATE
_STOPPED_HEARS = {
    _W.WRITES: {_M.DONE: _PROOF, _M.PATH_LOST: _PROOF, _M.DRAINED: _PROOF, _M.DIGESTS: _LATE, _M.FAILED: _LATE},
    _W.IS_DONE: {_M.DRAINED: _PROOF, _M.DONE: _LATE, _M.DIGESTS: _LATE},
    # A node that gave the room up also refuses the offer that was on its way: it says Failed and Drained twice.
    _W.HAS_DRAINED: {_M.DRAINED: _PROOF, _M.FAILED: _LATE},
}
_ARRIVED_HEARS = {
    # Drained: the room was cancelled on prefill after everything was sent.
    _W.IS_DONE: {_M.DRAINED: _LATE, _M.DONE: _LATE, _M.DIGESTS: _LATE},
    _W.HAS_DRAINED: {_M.DRAINED: _LATE},
}
_OVER_HEARS = {
    _W.ANYBODY: {_M.FAILED: _LATE, _M.DRAINED: _LATE},
    _W.OWN_RANK: {_M.DIGESTED: _LATE, _M.VERIFIED: _LATE},
}

DECODE_HEARS: Hearing[DecodeState, DecodeSpeaker] = Hearing(
    {
        _S.AWAITING_PAGES: {},
        # No node knows a page of the room, so none can have written one. A node can only say that it does not hold the room.
        _S.INTENDED: {_W.WRITES: {_M.FAILED: _TAKE}},
        _S.RESERVED: {},
        _S.OFFERED: {
            _W.WRITES: {
                _M.DIGESTS: _TAKE,
                _M.DONE: _TAKE,
                _M.PATH_LOST: _TAKE,
                _M.FAILED: _TAKE,
                _M.DRAINED: _TAKE,
            },
            _W.IS_DONE: {_M.DRAINED: _PROOF, _M.DONE: _LATE, _M.DIGESTS: _LATE},
            _W.HAS_DRAINED: {_M.DRAINED: _PROOF},
        },
        _S.VERIFYING: {**_ARRIVED_HEARS, _W.OWN_RANK: {_M.DIGESTED: _TAKE, _M.VERIFIED: _TAKE}},
        _S.ABORTING: _STOPPED_HEARS,
        _S.FAILING: _STOPPED_HEARS,
        _S.COMMITTED: _ARRIVED_HEARS,
        _S.CLAIMED: _ARRIVED_HEARS,
        _S.ABORTING_CLAIMED: _ARRIVED_HEARS,
        _S.FAILING_CLAIMED: _ARRIVED_HEARS,
        _S.COMPLETED: _OVER_HEARS,
        _S.ABORTED: _OVER_HEARS,
        _S.FAILED: _OVER_HEARS,
    },
    unknown=_OVER_HEARS,
)
