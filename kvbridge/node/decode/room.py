"""A room on a decode node, and the prefill nodes that write it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.ids import Rank
from kvbridge.core.plan.pairing import Share
from kvbridge.core.session.decode import DECODE_TABLE, DecodeSpeaker, DecodeState
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import Digests, Done, Drained, Failed, PathLost, Welcome
from kvbridge.core.wire.worker_messages import Digested, Verified
from kvbridge.node.decode.verification import Verification
from kvbridge.node.room import Room, StatedAnswer, named
from kvbridge.tier.keys import NO_KEYS


@dataclass(eq=False)
class WriterNode:
    """One prefill node of one room."""

    node: Welcome
    shares: dict[Rank, Share]
    """The rows that each of its ranks owes."""
    missing: set[Rank]
    """Ranks that have not reported Done."""
    drained: bool = False
    in_transit: bool = False
    """Bytes of the node may still arrive."""
    gone: str = ""
    """Why the node counts as gone: it sends no proof any more."""

    @property
    def quiet(self) -> bool:
        """Whether the node sends nothing any more: it said so, or has finished everything."""
        return self.drained or not self.missing

    @property
    def clean(self) -> bool:
        """Whether nothing of the node can arrive any more by its own account."""
        return self.quiet and not self.in_transit


FromPrefill = Digests | Done | PathLost | Failed | Drained
"""Messages of a prefill node about a room."""
ASKED = frozenset({DecodeState.INTENDED, DecodeState.OFFERED})
"""States in which prefill nodes have been asked for the room and have not sent it."""
BEFORE_COMMIT = ASKED | {DecodeState.AWAITING_PAGES, DecodeState.RESERVED, DecodeState.VERIFYING}
ARRIVED = frozenset({DecodeState.COMMITTED, DecodeState.CLAIMED})
_WAITS_FOR = {
    DecodeState.AWAITING_PAGES: "the decode engine to name its pages",
    DecodeState.INTENDED: "the decode engine to name its pages",
    DecodeState.VERIFYING: "the digests of what has arrived",
    DecodeState.COMMITTED: "a decode engine to claim it",
    DecodeState.ABORTING: "its writers to be shut out",
    DecodeState.FAILING: "its writers to be shut out",
}


_OTHER_WORDS = {
    DecodeState.AWAITING_PAGES: RoomState.ADMITTED,
    DecodeState.INTENDED: RoomState.ADMITTED,
    DecodeState.RESERVED: RoomState.ADMITTED,
    DecodeState.VERIFYING: RoomState.TRANSFERRING,
    DecodeState.FAILING: RoomState.FAILED,
    DecodeState.FAILING_CLAIMED: RoomState.FAILED,
    DecodeState.ABORTING_CLAIMED: RoomState.ABORTING,
}
_USER_STATE = {state: _OTHER_WORDS.get(state) or RoomState(state.value) for state in DecodeState}


@dataclass(eq=False)
class DecodeRoom(Room[DecodeState]):
    """A room on the decode side."""

    final_states = DECODE_TABLE.final
    addresses: tuple[PeerAddress, ...] = ()
    writers: dict[str, WriterNode] = field(default_factory=dict)
    """The writers by incarnation; empty before every node is known."""
    metadata: dict[str, bytes] = field(default_factory=dict)
    expected: dict[str, tuple[Rank, ...]] = field(default_factory=dict)
    """The engines attached at the first claim, and the ranks that each serves: every rank is to read the room."""
    claims: dict[str, tuple[Rank, ...]] = field(default_factory=dict)
    """The engines that have claimed the room, and the ranks that each serves; those of `users` have not released it."""
    answers: dict[str, StatedAnswer | None] = field(default_factory=dict)
    """Accepted statements of engines about the generated answer, at their release; None: no statement."""
    answered_by: set[Rank] = field(default_factory=set)
    """The ranks of engines with a statement: the answer's rows are in their memory."""
    shut: bool = False
    """Whether every endpoint is shut by which the writers could still reach the pages."""
    arrived: bool = False
    """Whether every writer has sent the rows that it owes."""
    shutting: set[str] = field(default_factory=set)
    """Transports that writers have lost midway, while bytes may still arrive by them."""
    verification: Verification | None = None
    """The digests of the room, from the offer on, where digests are wanted."""
    offered_s: float = 0.0
    committed_s: float = 0.0
    claimed_s: float = 0.0
    """The time of the first claim; 0 before."""
    reserved_tokens: int = 0
    is_same_prompt: bool = True
    """Whether the engines of all writers that are done have stated the prompt that the room's keys name; else nothing is cached."""
    end_keys: set[bytes] = field(default_factory=set)
    """The end keys that engines on both sides have stated; an empty one: an engine stated none."""

    @property
    def user_state(self) -> RoomState:
        if self.state is DecodeState.OFFERED and self.amounts:
            return RoomState.TRANSFERRING
        return _USER_STATE[self.state]

    @property
    def awaits_writers(self) -> bool:
        """Whether the room is being stopped and waits until no prefill node writes."""
        return self.state in {DecodeState.ABORTING, DecodeState.FAILING}

    @property
    def awaits_readers(self) -> bool:
        """Whether the room is being stopped and waits until no engine reads."""
        return self.state in {DecodeState.ABORTING_CLAIMED, DecodeState.FAILING_CLAIMED}

    @property
    def waits_for(self) -> str:
        match self.state:
            case DecodeState.OFFERED:
                return self._waits_for_bytes()
            case DecodeState.CLAIMED | DecodeState.ABORTING_CLAIMED | DecodeState.FAILING_CLAIMED:
                return f"engines {named(self.users or self.awaited)} to release it"
            case DecodeState.ABORTING | DecodeState.FAILING if self.active:
                nodes = named(writer.node.name for writer in self.active)
                return f"prefill nodes {nodes} to prove that they write nothing more"
            case DecodeState.RESERVED:
                return f"prefill nodes {named(self.peers)} to answer"
            case _:
                return _WAITS_FOR.get(self.state, "")

    def _waits_for_bytes(self) -> str:
        if self.arrived:
            lost = named(sorted(self.shutting))
            return f"the endpoints of {lost} to be shut, which a writer has lost: what it has sent again may still arrive there"
        missing = ((rank, writer) for writer in self.writers.values() for rank in writer.missing)
        ranks = named(f"{rank} of {writer.node.name}" for rank, writer in missing)
        return f"prefill ranks {ranks} to send everything"

    @property
    def awaited(self) -> set[str]:
        """Engines that are expected to claim the room: they serve a rank without a claim."""
        claimed = {rank for ranks in self.claims.values() for rank in ranks}
        return {engine for engine, ranks in self.expected.items() if not claimed.issuperset(ranks)}

    def lose(self, engine: str) -> bool:
        """Stop expecting an engine; return whether the room fails without it."""
        self.expected.pop(engine, None)
        return engine in self.users or (engine == self.admitted_by.name and self.state in BEFORE_COMMIT)

    @property
    def answer(self) -> StatedAnswer | None:
        """The statement that every engine which claimed the room has made; None while one is missing, or they differ."""
        said = set(self.answers.values())
        return said.pop() if len(said) == 1 and self.answers.keys() == self.claims.keys() else None

    @property
    def active(self) -> list[WriterNode]:
        """Prefill nodes that may still send, and can still prove that they do not."""
        return [writer for writer in self.writers.values() if not writer.quiet and not writer.gone]

    @property
    def clean(self) -> bool:
        """Whether nothing of any writer can arrive any more by its own account."""
        return all(writer.clean for writer in self.writers.values())

    @property
    def asked(self) -> dict[str, Any]:
        """The fields that an intent and an offer have in common."""
        prompt = {"prompt_tokens": self.prompt_tokens, "prompt_digest": self.admitted_by.prompt_digest}
        return {**self.about, **prompt, "held": self.admitted_by.held}

    @property
    def result(self) -> dict[str, Any]:
        """The fields of a committed room, for engines."""
        return {"metadata": self.metadata, "amounts": self.amounts, "phases_s": self.phases_s}

    def check_answer(self, said: StatedAnswer) -> None:
        """Raise InvalidInputError for more tokens than the pages hold, ConflictError unless all engines say the same."""
        if said.valid_tokens > self.reserved_tokens:
            raise InvalidInputError(
                f"valid_tokens is {said.valid_tokens}, but the pages of room {self.room} hold {self.reserved_tokens} tokens"
            )
        for other, heard in self.answers.items():
            if heard != said:
                raise ConflictError(
                    f"nothing of the answer of room {self.room} is kept: engine {other} has released it with valid_tokens="
                    f"{heard.valid_tokens if heard else 0}, this one with {said.valid_tokens}, or with other keys; all engines "
                    "of a node have to say the same"
                )

    def forget_details(self) -> None:
        """Keep the fields of a receipt."""
        self.tables, self.metadata, self.writers, self.verification = {}, {}, {}, None
        self.keys, self.answers, self.load, self.end_keys = NO_KEYS, {}, None, set()


def speaker_of(room: DecodeRoom | None, peer: str, message: FromPrefill | Digested | Verified) -> DecodeSpeaker | None:
    """Return the speaker of a message about a room.

    None stands for a node that does not write the room, a rank of another node, or digests that nobody asked for.
    """
    if isinstance(message, Digested | Verified):
        return DecodeSpeaker.OWN_RANK
    if room is None or room.over:
        return DecodeSpeaker.ANYBODY
    writer = room.writers.get(peer)
    if writer is None or (isinstance(message, Digests) and room.verification is None):
        return None
    owing = writer.missing
    if isinstance(message, Digests | Done | PathLost):
        if message.writer not in writer.node.ranks:
            return None
        owing = owing & {message.writer}
    if writer.drained:
        return DecodeSpeaker.HAS_DRAINED
    return DecodeSpeaker.WRITES if owing else DecodeSpeaker.IS_DONE
