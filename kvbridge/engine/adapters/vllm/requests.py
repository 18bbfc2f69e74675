"""What the two halves of the connector know of a request, and say to each other and to the other engine.

Owns: these records, and the form of `kv_transfer_params`. Must not know: vLLM's classes, who decides what.

vLLM builds a connector twice: in its scheduler's process, which sees requests, and in each worker's, which may report that a
transfer is over. Only what is here goes from one to the other. All of it is pickled by vLLM at each step, so it is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import numpy as np
import pydantic

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import ROOM_BITS, FrozenModel, IndexSpace, NonNegative, PageTable, RoomId, Tables
from kvbridge.core.wire.engine_messages import PrefillNodes

LAST_EVENTS = frozenset({"committed", "completed", "aborted", "failed"})
"""Kinds of events after which nobody reads or writes a page of a room's generation any more."""
PARAMS_KEY = "kvbridge"
"""Of what is ours in `kv_transfer_params`; the other keys are vLLM's and its gateways'."""


@dataclass(frozen=True, slots=True)
class Request:
    """What of a request decides about its transfer. `prompt_digest`: of `prompts.prompt_digest`."""

    id: str
    prompt_tokens: int
    prompt_digest: bytes
    params: Mapping[str, Any] | None = None
    """`kv_transfer_params`, as the client or a gateway sent it."""

    def __post_init__(self) -> None:
        """Raises InvalidInputError for params of another kind: vLLM passes on whatever a client has sent."""
        if self.params is not None and not isinstance(self.params, Mapping):
            raise InvalidInputError(
                f"kv_transfer_params of request {self.id} are of type {type(self.params).__name__}, not an object: pass on what "
                "the prefill server answered as it is"
            )

    @property
    def is_for_another(self) -> bool:
        """Whether another engine will decode it, so that its blocks are to be held."""
        return bool(self.params and self.params.get("do_remote_decode"))


class Source(FrozenModel):
    """Where the KV cache of a prompt is held."""

    room: RoomId
    prefill: PrefillNodes
    held: bool = False
    """Prefill says so, which it does in plain order: it need not be waited for."""
    prompt_tokens: NonNegative = 0
    prompt_digest: Annotated[str, pydantic.Field(pattern="^([0-9a-f]{2}){0,32}$")] = ""
    """What the room is of, in plain order: its tokens, and the digest in hexadecimal. To say that nobody comes for the room takes
    both. Whoever comes says what the request itself is of."""


class Pairing(pydantic.BaseModel):
    """What prefill needs of the params of a request that decode has at the same time; further keys are others' affair."""

    room: RoomId | None = None


def room_of(request: Request) -> int | None:
    """Return the room of a request to prefill that decode has at the same time; None in plain order.

    Raises InvalidInputError when what it says cannot be read.
    """
    if not request.is_for_another or not request.params or request.params.get(PARAMS_KEY) is None:
        return None
    try:
        return Pairing.model_validate(request.params[PARAMS_KEY]).room
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise InvalidInputError(
            f"kv_transfer_params of request {request.id} say that decode has it too, and "
            f"{'.'.join(map(str, (PARAMS_KEY, *first['loc'])))} is wrong: {first['msg']}; draw {ROOM_BITS} random bits for each "
            "request and send them to both as a decimal string"
        ) from error


def source_of(request: Request) -> Source | None:
    """Return where the request's KV cache is, if it says so. Raises InvalidInputError when what it says cannot be read."""
    if not request.params or not request.params.get("do_remote_prefill"):
        return None
    try:
        return Source.model_validate(request.params.get(PARAMS_KEY))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (PARAMS_KEY, *first["loc"])))
        raise InvalidInputError(
            f"kv_transfer_params of request {request.id} say that its prefill is done elsewhere, and {place} is wrong: "
            f"{first['msg']}; pass on what the prefill server answered as it is"
        ) from error


def params_of(source: Source) -> dict[str, Any]:
    """Return the `kv_transfer_params` of prefill's answer, which decode is to be given as they are.

    The room is a string: gateways read numbers as doubles.
    """
    ours = source.model_dump(mode="json") | {"room": str(source.room)}
    return {"do_remote_prefill": True, "do_remote_decode": False, PARAMS_KEY: ours}


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of a request that are to be filled by a room."""

    request: str
    room: int
    blocks: tuple[int, ...]
    """All that may be written."""
    node: str
    """The incarnation of our node that was told."""
    generation: int = 1
    """Of the room; prefill begins a new one when it has to compute the prompt again."""


@dataclass(frozen=True, slots=True)
class Held:
    """A finished request whose blocks a room may read."""

    request: str
    room: int
    node: str
    generation: int = 1


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """From the scheduler's half to the workers', at each step."""

    loads: tuple[Load, ...] = ()
    helds: tuple[Held, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    """Rooms that the node would not have, and why: nobody knows their pages. Only whoever sent the message hears of it."""
    closed: tuple[str, ...] = ()
    """Incarnations of our node of which no rank moves a byte any more."""


@dataclass(frozen=True, slots=True)
class Results:
    """What a worker reports at the end of a step: requests by id, each once."""

    sent: frozenset[str] = field(default_factory=frozenset)
    received: frozenset[str] = field(default_factory=frozenset)


class RoomCalls(Protocol):
    """What is said to the node: `PrefillEngine.hold`, `publish` and `finish`, `DecodeEngine.fetch` and `provide`, and `abort`.

    Nothing is waited for. Each raises a BridgeError, and nothing else, when the message was not sent: InvalidInputError when it can
    never be sent.
    """

    def hold(  # noqa: PLR0913 - each is something else that an engine may say of a room
        self,
        room: int,
        *,
        prompt_tokens: int,
        prompt_digest: bytes,
        tables: Tables,
        computed_tokens: int,
        published_tokens: int,
        generation: int = 1,
    ) -> None:
        """Hold the pages of a prompt, those that are computed."""

    def publish(self, room: int, upto_token: int, *, tables: Tables) -> None:
        """Name further pages, and say that so many tokens are final."""

    def finish(self, room: int) -> None:
        """Say that everything is published."""

    def fetch(  # noqa: PLR0913 - each is something else that an engine may say of a room
        self,
        room: int,
        *,
        prompt_tokens: int,
        prefill: tuple[PeerAddress, ...],
        prompt_digest: bytes,
        generation: int = 1,
        held: bool = False,
        tables: Tables | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        """Say that we will come for a room, or name our pages for it at once."""

    def provide(self, room: int, tables: Tables, *, prefix_tokens: int) -> None:
        """Name the pages behind the prefix that is there."""

    def abort(self, room: int, reason: str, *, again: bool = False) -> None:
        """Give a room up; harmless when it is over. `again`: prefill holds its next generation."""


class BlockPins(Protocol):
    """vLLM's references to its blocks, by which we keep some from being given to another request whoever frees them."""

    def pin(self, blocks: Sequence[int]) -> None:
        """Add one reference to each (`BlockPool.touch`)."""

    def unpin(self, blocks: Sequence[int]) -> None:
        """Take it back (`BlockPool.free_blocks`); those that nobody else has are free with it, the first ones last."""


def full_tables(blocks: Sequence[int], first: int) -> Tables:
    """Return a prompt's blocks from the `first` on as the node is told of them."""
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(blocks, dtype=np.int32), first)}
