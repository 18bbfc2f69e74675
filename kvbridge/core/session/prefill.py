"""A room on a prefill node, from its admission until the last byte has arrived or the last rank worker is quiet.

A failure or an abort never frees pages by itself: ABORTING and FAILING wait for DRAINED, which the service raises once every rank
worker has proved that nothing of the room is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.plan.operations import Section
from kvbridge.core.session.tables import Hearing, Meaning, Table


class PrefillState(StrEnum):
    """The state of a room on the prefill side."""

    ADMITTED = "admitted"
    """Source pages are reserved; no decode node has named a destination."""
    AWAITED = "awaited"
    """As before, and a decode node will come: the room is held until that node comes, gives up or ends."""
    SENDING = "sending"
    """The destination is known; published tokens are sent."""
    ABORTING = "aborting"
    """The room was stopped; it waits until nothing is in flight."""
    FAILING = "failing"
    """The room cannot complete; it waits until nothing is in flight."""
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


class PrefillEvent(StrEnum):
    """An event of a room on the prefill side."""

    INTENT = "intent"
    """A decode node will come for the room."""
    OFFER = "offer"
    ALL_SENT = "all_sent"
    ABORT = "abort"
    """The peer, the engine or a caller of the HTTP API stops the room."""
    FAULT = "fault"
    """A transfer failed, a worker died, the peer vanished, a deadline passed."""
    DRAINED = "drained"


class PrefillAction(StrEnum):
    """An action of the service."""

    OPEN_ROOM = "open_room"
    """Tell the workers both ends of the room and send all published tokens."""
    CLOSE_ROOM = "close_room"
    """Tell the workers to stop and to answer when they are quiet. Once all was sent, tell them to forget the room."""
    TELL_FAILED = "tell_failed"
    """Tell the peer that the room will not be completed, and why."""
    TELL_DRAINED = "tell_drained"
    """Tell the peer that nothing is written to its pages any more."""
    TELL_ENGINE = "tell_engine"
    """Tell the engine how the room ended."""
    FREE_SOURCE = "free_source"
    """Give the source pages back once no engine writes them, and keep the receipt for a while."""


_S, _E, _A = PrefillState, PrefillEvent, PrefillAction
_ENDED = (_A.TELL_DRAINED, _A.FREE_SOURCE, _A.TELL_ENGINE)

PREFILL_TABLE: Table[PrefillState, PrefillEvent, PrefillAction] = Table(
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


class PrefillSpeaker(StrEnum):
    """The speaker of a message about a room on the prefill side."""

    OFFERER = "offerer"
    """The decode node whose offer was taken."""
    INTENDER = "intender"
    """The decode node whose intent was taken, and no offer."""
    OTHER_NODE = "other_node"
    """A decode node that has nothing of the room."""
    OPEN_RANK = "open_rank"
    """A rank worker that has the room, and has not ended the order that it speaks of."""
    CLOSED_RANK = "closed_rank"
    """A rank worker that has let the room go or ended the order, or never had the room."""


class PrefillMessage(StrEnum):
    """The messages about a room to the prefill side; each is the `type` of a message."""

    INTEND = "intend"
    OFFER = "offer"
    ABORT = "abort"
    FAILED = "failed"
    DIGESTED = "digested"
    SENT = "sent"
    REROUTED = "rerouted"
    ROOM_CLOSED = "room_closed"


_W, _M = PrefillSpeaker, PrefillMessage
_TAKE, _PROOF, _TURN_AWAY, _LATE = Meaning.TAKE, Meaning.PROOF, Meaning.TURN_AWAY, Meaning.LATE
# The speaker has nothing of the room. Its Abort is answered with the truth: no rank here writes to its pages.
_OTHERS_HEARS = {_M.INTEND: _TURN_AWAY, _M.OFFER: _TURN_AWAY, _M.ABORT: _PROOF}
# A retried offer, or another one: neither ends the work for the first offer, nor may the answer look like proof.
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

PREFILL_HEARS: Hearing[PrefillState, PrefillSpeaker] = Hearing(
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


class RankProgress:
    """The published tokens and the tokens in orders to the worker, for each layer of a rank of a room."""

    def __init__(self, layers: Iterable[int], *, prompt_tokens: int, computed_tokens: int = 0) -> None:
        """The node holds the first `computed_tokens` tokens, which are published from the beginning."""
        self.layers = tuple(layers)
        self.prompt_tokens = prompt_tokens
        self._published = dict.fromkeys(self.layers, computed_tokens)
        self._ordered = dict.fromkeys(self.layers, 0)

    @property
    def published_tokens(self) -> int:
        """Tokens that every layer of the rank has published."""
        return min(self._published.values(), default=self.prompt_tokens)

    @property
    def complete(self) -> bool:
        """Whether the whole prompt is published on every layer."""
        return self.published_tokens == self.prompt_tokens

    def publish(self, upto_token: int, held: tuple[int, ...]) -> None:
        """Record that the first `upto_token` tokens are final in memory, for the layers that `check` has returned."""
        for layer in held:
            self._published[layer] = upto_token

    def check(self, upto_token: int, layers: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return those of some layers (None: of all) that the rank holds, for `publish`.

        Raises InvalidInputError past the prompt, ConflictError backwards.
        """
        held = self.layers if layers is None else tuple(layer for layer in layers if layer in self._published)
        if upto_token > self.prompt_tokens:
            raise InvalidInputError(f"publish({upto_token}) is past the {self.prompt_tokens} tokens that were reserved")
        behind = [layer for layer in held if upto_token < self._published[layer]]
        if behind:
            raise ConflictError(
                f"publish({upto_token}) goes backwards: layer {behind[0]} has already published "
                f"{self._published[behind[0]]} tokens (those that `begin` has answered as computed among them)"
            )
        return held

    def next_sections(self, prefix_tokens: int) -> list[Section]:
        """Return the published tokens that no call has returned: a section for each group of layers that are equally far.

        Decode holds the first `prefix_tokens` tokens. A section within this prefix has nothing to send, so it waits for the next
        tokens, or for the end of the prompt.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for layer in self.layers:
            start, stop = self._ordered[layer], self._published[layer]
            if stop > start and (stop > prefix_tokens or stop == self.prompt_tokens):
                groups.setdefault((start, stop), []).append(layer)
                self._ordered[layer] = stop
        return [
            Section(
                prompt_tokens=self.prompt_tokens,
                prefix_tokens=prefix_tokens,
                start_token=start,
                stop_token=stop,
                layers=None if len(group) == len(self.layers) else tuple(group),
            )
            for (start, stop), group in groups.items()
        ]
