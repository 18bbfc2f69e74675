"""The rooms of one scheduler process of SGLang, and what it may say of each: the states of SGLang's `KVPoll`.

SGLang's scheduler calls all methods on its main thread, thousands of times a minute. No method waits or raises.
The first rank of each pipeline stage *leads*: it gives the node the orders for the ranks of its stage. The other ranks hear the
node's events, and say `SUCCESS` until an event says otherwise: SGLang takes the lowest state of all ranks of a stage.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import ROOM_BITS, IndexSpace, PageTable, Tables
from kvbridge.core.wire.engine_messages import AbortRoom, Fetch, Finish, Hold, Provide, Publish, RoomEvent
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.kit.transfers import LAST_EVENTS, prompt_digest

LOOK_S = 0.0002
"""SGLang asks for each request in each of its turns; the node is looked at once in so long."""
NODE_ENDED = "the kvbridge node beside this server has ended"
ATTEMPT = "kvbridge_attempt"
"""Key in `custom_params` of the request that asks prefill to compute a prompt again."""
ROOM_MASK = (1 << ROOM_BITS) - 1


class Poll(IntEnum):
    """The numbers of SGLang's `KVPoll`."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCESS = 4


def room_of(bootstrap_room: int, attempt: int) -> int:
    """Return our room for one of SGLang's, any number of a client: a hash. The prompt's digest contains the whole number.

    Each attempt at a room is another room of ours, so that late events of an earlier attempt are told apart.
    """
    hashed = hashlib.blake2b(f"{bootstrap_room} {attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") & ROOM_MASK


@dataclass(frozen=True, slots=True)
class Prompt:
    """The parts of a request that decide about its transfer."""

    tokens: int
    digest: bytes
    attempt: int = 1
    """Rises when decode gives up the KV cache of the request, and asks prefill to compute it again."""


def prompt_of(request: Any, bootstrap_room: int) -> Prompt:
    """Return the prompt of one of SGLang's requests (`Req`), with the answer as far as decode has to have it again.

    Raises UnsupportedError for a retracted request with images: SGLang asks prefill to compute its tokens without them.
    """
    tokens, attempt = request.origin_input_ids, 1
    if getattr(request, "pd_rebootstrap_in_progress", False):
        if getattr(request, "multimodal_inputs", None) is not None:
            raise UnsupportedError("a retracted request with images or sound cannot be computed again: ask once more")
        tokens, attempt = [*tokens, *request.output_ids], 1 + request.retraction_count
    elif type(told := (request.sampling_params.custom_params or {}).get(ATTEMPT)) is int:
        attempt = told
    salt = f"{bootstrap_room}|{request.extra_key or ''}"
    digest = prompt_digest(np.asarray(tokens, dtype=np.int64), adapter=str(request.lora_id or ""), salt=salt)
    return Prompt(len(tokens), digest, attempt)


@dataclass(slots=True)
class Room:
    """One attempt at a room."""

    id: int
    prompt: Prompt
    rooms: Rooms
    told: bool = False
    """Whether the node knows of the room."""
    state: Poll = Poll.BOOTSTRAPPING
    reason: str = ""
    """Why it failed."""
    event: RoomEvent | None = None
    """Its last event, or the node's refusal: no rank reads or writes a page of it any more."""
    owed: deque[Callable[[], bool]] = field(default_factory=deque)
    """Orders that wait for the node, in their order."""
    given_up: bool = False

    @property
    def is_over(self) -> bool:
        return self.state in {Poll.FAILED, Poll.SUCCESS}

    @property
    def poll(self) -> int:
        """The rank's answer to SGLang."""
        return int(self.state if self.rooms.leads or self.state is Poll.FAILED else Poll.SUCCESS)

    @property
    def may_be_written(self) -> bool:
        """Whether a transport of any rank may still write to its pages of SGLang, as far as this rank can know."""
        return False

    def _begin(self, kind: Any, **fields: Any) -> None:
        fields |= {"generation": 1, "prompt_tokens": self.prompt.tokens, "prompt_digest": self.prompt.digest}
        self.state = Poll.WAITING
        if self.rooms.begin(self):
            self.rooms.order(self, lambda: self.rooms.say(self, kind, **fields))

    def fail(self, reason: str) -> None:
        if not self.is_over:
            self.state, self.reason = Poll.FAILED, reason

    def stop(self, reason: str) -> None:
        """Give the room up. A room with pages fails at its last event: nobody writes to its pages any more then."""
        self.rooms.give_up(self, reason)
        if not self.may_be_written:
            self.fail(reason)

    def heard(self, event: RoomEvent) -> None:
        if event.kind not in LAST_EVENTS | {"refused"}:
            return
        self.event = self.event or event
        if self.is_over:
            return
        if event.kind in {"committed", "completed"}:
            self.succeed(event)
        elif event.kind == "refused":
            if not event.generation:  # of a later order; nothing is left of a refused Hold or Fetch
                self.rooms.give_up(self, event.reason)
            self.fail(event.reason)
        else:
            self.fail(f"{event.code}: {event.reason}")

    def succeed(self, event: RoomEvent) -> None:  # noqa: ARG002 - decode reads the metadata from it
        self.state = Poll.SUCCESS

    def lose(self, node: str) -> None:  # noqa: ARG002 - decode waits for the end of its writers
        """The node is gone. Late readers of pages do no harm: the room never commits."""
        if self.told:
            self.fail(NODE_ENDED)


class Rooms:
    """The rooms of one rank."""

    def __init__(self, attachment: NodeAttachment, *, leads: bool, holds_back: bool = False) -> None:
        """`holds_back`: SGLang keeps the pages of a failed room until `may_be_written` says no."""
        self.attachment = attachment
        self.leads, self.holds_back = leads, holds_back
        self._of: dict[int, Room] = {}
        self.ending: set[int] = set()
        """Rooms that were given up: transfers may read their pages, which SGLang has freed, until their last event."""
        self._to_stop: deque[tuple[Room, str]] = deque()
        self._known = attachment.node
        self._next_look_s = 0.0

    def begin(self, room: Room) -> bool:
        """Take a room. Returns False, and fails the room, when another request has it."""
        if room.id in self._of:
            room.fail(
                "another request of this server has this bootstrap_room: a router draws one at random for each request"
            )
            return False
        self._of[room.id] = room
        return True

    def forget(self, room: Room) -> None:
        if self._of.get(room.id) is room:
            del self._of[room.id]

    def look(self) -> None:
        """Take the node's events, and send what waits for the node."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        while self._to_stop:
            stopped, reason = self._to_stop.popleft()
            stopped.stop(reason)
        for event in self.attachment.events():
            if event.kind in LAST_EVENTS or event.kind == "refused":
                self.ending.discard(event.room)
            room = self._of.get(event.room)
            if room is not None:
                room.heard(event)
        if self.attachment.node != self._known:
            lost, self._known = self._known, self.attachment.node
            self.ending.clear()
            for room in self._of.values() if lost else ():
                room.lose(lost)
        for room in [room for room in self._of.values() if room.owed and self._known]:
            self._pay(room)

    def order(self, room: Room, order: Callable[[], bool]) -> None:
        """Carry out an order of a room now, or as soon as there is a node, behind the room's earlier orders."""
        if self.leads and not room.is_over:
            room.owed.append(order)
            self._pay(room)

    def _pay(self, room: Room) -> None:
        while room.owed and not room.is_over and room.owed[0]():
            room.owed.popleft()

    def say(self, room: Room, kind: Any, **fields: Any) -> bool:
        """Tell the node; False while there is none."""
        if not self.attachment.say(kind, room.id, **fields):
            return False
        room.told = True
        return True

    def give_up(self, room: Room, reason: str) -> None:
        """Tell the node that nobody wants the room any more."""
        room.owed.clear()
        if room.told and not (room.given_up or room.is_over):
            room.given_up = True
            self.ending.add(room.id)
            self.attachment.say(AbortRoom, room.id, reason=reason[:REASON_CHARS])

    def stop_soon(self, room: Room, reason: str) -> None:
        """Stop a room at the next look; for other threads."""
        self._to_stop.append((room, reason))

    def give_up_all(self, reason: str) -> None:
        """Fail and forget all rooms. Orders of later rooms wait until this process is attached again.

        SGLang releases its memory, and has forgotten its requests. The rank worker of this process has been closed.
        """
        for room in list(self._of.values()):
            room.fail(reason)
            self.forget(room)
        self.attachment.leave()


@dataclass(frozen=True)
class MetadataRows:
    """SGLang's MetadataBuffers (first token, log-probabilities, hidden states), whose rows travel as bytes of a room.

    For each field, the address of its first row and the bytes of a row. Prefill sends the widths, too: a server with other widths
    would read the fields at wrong places.
    """

    addresses: Sequence[int]
    row_bytes: Sequence[int]

    @property
    def _head(self) -> bytes:
        return np.array([len(self.row_bytes), *self.row_bytes], dtype="<u4").tobytes()

    def read(self, row: int) -> bytes:
        """Return a row: the number of fields and their widths as 32-bit integers, then the fields."""
        fields = (
            ctypes.string_at(at + row * width, width) for at, width in zip(self.addresses, self.row_bytes, strict=True)
        )
        return self._head + b"".join(fields)

    def write(self, row: int, data: bytes) -> None:
        """Write what `read` returned on the other side. Raises UnsupportedError when that side has other fields."""
        head = self._head
        if len(data) != len(head) + sum(self.row_bytes) or not data.startswith(head):
            raise UnsupportedError(
                f"prefill's metadata of a request are {len(data)} bytes with other fields than decode's {list(self.row_bytes)}: "
                "start both servers with the same model, --speculative-algorithm and SGLANG_ENABLE_DISAGG_SAMPLING_MASK"
            )
        place = len(head)
        for address, width in zip(self.addresses, self.row_bytes, strict=True):
            ctypes.memmove(address + row * width, data[place : place + width], width)
            place += width


@dataclass(slots=True)
class SentRoom(Room):
    """A prompt that this server computes for another one."""

    published: int = 0
    """Tokens."""
    pages: int = 0
    """Pages of `full` named so far."""

    def hold(self) -> None:
        """Have decode find the room from now on."""
        self._begin(Hold, tables={})

    def publish(
        self,
        tokens: int,
        tables: Tables,
        metadata: bytes | None = None,
        *,
        is_final: Callable[[], bool] = lambda: True,
    ) -> None:
        """The next tokens are final in these pages once `is_final` says so. `metadata`: they are the last ones."""
        if self.is_over:
            return
        self.state = Poll.TRANSFERRING
        self.published += tokens
        upto = self.published
        # The node refuses a page that a former room may still read.
        self.rooms.order(
            self,
            lambda: (
                not self.rooms.ending and is_final() and self.rooms.say(self, Publish, upto_token=upto, tables=tables)
            ),
        )
        if metadata is not None:
            self.rooms.order(self, lambda: self.rooms.say(self, Finish, metadata=metadata))

    def next_table(self, ids: npt.NDArray[np.int32]) -> PageTable:
        """Return further pages of `full`, behind those that were named before."""
        first, self.pages = self.pages, self.pages + len(ids)
        return PageTable(IndexSpace.FULL, np.ascontiguousarray(ids, dtype=np.int32), first)


@dataclass(slots=True)
class FetchedRoom(Room):
    """A prompt that another server computes for this one."""

    accept: Callable[[RoomEvent], None] = lambda _: None
    """Takes the metadata of a committed room, into this rank's own row."""
    named: bool = False
    """Whether pages of SGLang were named to the node."""
    lost: str = ""
    """The incarnation of the node that knew of the room, and is gone."""

    @property
    def poll(self) -> int:
        """The rank's answer to SGLang.

        SGLang gives pages to no room before every rank can hear how it ends: a rank that misses the last event never gets its row.
        """
        if self.state is Poll.FAILED and self.may_be_written and not self.rooms.holds_back:
            return int(Poll.TRANSFERRING)
        hears = self.told if self.rooms.leads else self.state is not Poll.BOOTSTRAPPING and self.rooms.attachment.node
        return super(FetchedRoom, self).poll if hears or self.is_over else int(Poll.BOOTSTRAPPING)

    @property
    def may_be_written(self) -> bool:
        """As `Room.may_be_written`.

        A process attaches to another incarnation of the node when all ranks serve that incarnation. A rank serves none before it
        has closed the transports of the one before.
        """
        if not self.named or self.event is not None or (self.rooms.leads and not self.told):
            return False
        return not self.lost or self.rooms.attachment.node in {"", self.lost}

    def fetch(self, prefill: Sequence[PeerAddress]) -> None:
        """Tell prefill that this server comes for the room: prefill waits without a limit."""
        self._begin(Fetch, prefill=tuple(prefill))

    def provide(self, tables: Tables, prefix_tokens: int) -> None:
        """Name the pages that are to be filled."""
        if self.is_over:
            return
        self.state = Poll.TRANSFERRING
        self.named = True
        self.rooms.order(self, lambda: self.rooms.say(self, Provide, tables=tables, prefix_tokens=prefix_tokens))

    def lose(self, node: str) -> None:
        """The node is gone. `may_be_written` says when its pages can be used again."""
        if self.told or (self.named and not self.rooms.leads):
            self.lost = node
            self.fail(NODE_ENDED)

    def succeed(self, event: RoomEvent) -> None:
        try:
            self.accept(event)
        except Exception as error:  # noqa: BLE001 - the scheduler must go on, and the client hears the reason
            self.fail(str(error) or type(error).__name__)
        else:
            self.state = Poll.SUCCESS
