"""Requests as the two halves of the connector know them, what the halves tell each other, and the form of `kv_transfer_params`.

vLLM builds a connector twice: in its scheduler's process, which sees requests, and in each worker's, which may report that a
transfer is over. vLLM pickles what goes from one to the other, at each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pydantic

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import ROOM_BITS, FrozenModel, IndexSpace, NonNegative, PageTable, RoomId, Tables
from kvbridge.core.wire.engine_messages import PrefillNodes, RoomEvent

LAST_EVENTS = frozenset({"committed", "completed", "aborted", "failed"})
"""Kinds of events after which nobody reads or writes a page of a room's generation any more."""
PARAMS_KEY = "kvbridge"
"""Of what is ours in `kv_transfer_params`; the other keys are vLLM's and its gateways'."""
DIGEST_BYTES = 16
_DOMAIN = b"kvbridge.prompt.1"
ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


def prompt_digest(
    tokens: Sequence[int] | npt.NDArray[np.int64], *, adapter: str = "", inputs: Sequence[str] = (), salt: str = ""
) -> bytes:
    """Return 16 bytes that two prompts share only if one may be answered from the KV cache of the other.

    `tokens`: ids of the whole prompt. `adapter`: the LoRA adapter; `inputs`: the hashes of multimodal inputs, in the prompt's
    order; `salt`: of the request's cache, as vLLM's `cache_salt`.
    """
    digest = hashlib.blake2b(_DOMAIN + len(inputs).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    for part in (adapter.encode(), salt.encode(), *(text.encode() for text in inputs)):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(np.asarray(tokens, dtype="<i8").tobytes())
    return digest.digest()


def room_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Return the tokens of a room for a prompt: blocks are moved whole, since what is inside one is its engine's affair."""
    return -(-prompt_tokens // block_tokens) * block_tokens


def full_tables(blocks: Sequence[int], first: int) -> Tables:
    """Return a prompt's blocks from the `first` on as the node is told of them."""
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(blocks, dtype=np.int32), first)}


@dataclass(frozen=True, slots=True)
class Request:
    """What of a request decides about its transfer."""

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
    way_out = f"draw {ROOM_BITS} random bits for each request and send them to both as a decimal string"
    return _read(Pairing, request, "decode has it too", way_out).room


def source_of(request: Request) -> Source | None:
    """Return where the request's KV cache is, if it says so. Raises InvalidInputError when what it says cannot be read."""
    if not request.params or not request.params.get("do_remote_prefill"):
        return None
    return _read(Source, request, "its prefill is done elsewhere", "pass on what the prefill server answered as it is")


def _read(kind: type[ModelT], request: Request, what: str, way_out: str) -> ModelT:
    try:
        return kind.model_validate((request.params or {}).get(PARAMS_KEY))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (PARAMS_KEY, *first["loc"])))
        raise InvalidInputError(
            f"kv_transfer_params of request {request.id} say that {what}, and {place} is wrong: {first['msg']}; {way_out}"
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
    """From the scheduler's half of one role to the workers', at each step."""

    begun: tuple[Load | Held, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    """Rooms that the node would not have, and why: nobody knows their pages. Only whoever sent the message hears of it."""
    closed: tuple[str, ...] = ()
    """Incarnations of our node of which no rank moves a byte any more."""
    ended: tuple[RoomEvent, ...] = ()
    """Last events of rooms: worker 0 mostly knows, but it may have attached later than the scheduler's process."""
