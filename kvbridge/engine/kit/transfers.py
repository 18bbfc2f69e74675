"""Transfers of an engine's requests: the scheduler's process names them to the workers, which report their ends.

An extra report crashes the engine; a missing one leaks its blocks. A transfer is a record from the step that names it until it is
reported, and no report comes from anything else.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog

from kvbridge.core.ids import Role
from kvbridge.core.session.tables import WITHDRAWN
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.memory import AdoptedWorker

log = structlog.get_logger(__name__)

LAST_EVENTS = frozenset({"committed", "completed", "aborted", "failed"})
"""Kinds of events after which nobody reads or writes a page of a room's generation any more."""
EARLY_EVENTS_KEPT = 4_096
"""Limit of kept events of rooms that no step has named yet. The next step names most of these rooms, but no rooms of requests that
end before they have blocks. A lost event costs nothing: the node refuses to fill blocks for a room that has ended."""
IDLE_LOOK_S = 0.1
"""How often a node is asked for events while nothing is under way."""
DIGEST_BYTES = 16


def prompt_digest(
    tokens: Sequence[int] | npt.NDArray[np.int64], *, adapter: str = "", inputs: Sequence[str] = (), salt: str = ""
) -> bytes:
    """Return 16 bytes that two prompts share only if the KV cache of one is right for the other.

    `tokens`: ids of the whole prompt. `adapter`: the LoRA adapter. `inputs`: hashes of multimodal inputs, in the prompt's order.
    `salt`: the salt of the request's cache.
    """
    digest = hashlib.blake2b(b"kvbridge.prompt.1" + len(inputs).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    for part in (adapter.encode(), salt.encode(), *(text.encode() for text in inputs)):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(np.asarray(tokens, dtype="<i8").tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A room that fills blocks of a request (a load), or that may read the blocks of a finished request."""

    request: str
    room: int
    node: str
    """Incarnation of our node that knows of it."""
    generation: int = 1
    """Attempt at the room. Prefill begins a new one when it computes the prompt again."""
    is_load: bool = False
    """Whether the room fills blocks of the request."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """News for the workers at a step, from the scheduler's process, for one role."""

    begun: tuple[Transfer, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    """Rooms that the node refused, and why: nobody knows their pages. Only the process that sent a message gets its refusal."""
    closed: tuple[str, ...] = ()
    """Incarnations of our node for which no rank moves a byte any more."""
    ended: tuple[RoomEvent, ...] = ()
    """Last events of rooms. Workers know most of them, but may have attached later than the scheduler's process."""


class ServedRole:
    """A rank's tensors, served to the node of one role, and the reports of their transfers. For the worker's thread only.

    A transfer is reported when nobody moves bytes of it any more: at the last event of its room, when the node refused it, or when
    every rank has closed the transports that the node had. A load fails as a whole, because nothing of a room can be read before
    all of it is there.
    """

    def __init__(
        self, role: Role, serve: Callable[[], AdoptedWorker], attachment: NodeAttachment | None = None
    ) -> None:
        """`serve` starts the rank worker. `attachment`: None where only steps bring events."""
        self.role = role
        self.closed: list[str] = []
        """Incarnations of the node for which this rank has closed its transports for good: news for the scheduler's process."""
        self._serve = serve
        self._worker: AdoptedWorker | None = serve()
        self._attachment = attachment
        self._served: set[str] = set()
        """Incarnations for which a rank worker has ended, and which may still live."""
        self._next_look_s = 0.0
        self._under_way: dict[int, Transfer] = {}
        self._over: list[tuple[Transfer, str]] = []
        """Transfers to be reported, each with the reason of its failure (empty: it succeeded)."""
        self._early: OrderedDict[tuple[int, int], RoomEvent] = OrderedDict()
        self._all_closed: set[str] = set()
        """Incarnations of the node for which no rank moves a byte any more."""

    @property
    def idle(self) -> bool:
        return not (self._under_way or self._over)

    def start(self, step: StepMetadata) -> None:
        """Take the news of the scheduler's process."""
        for transfer in step.begun:
            self._under_way[transfer.room] = transfer
            self._look_back(transfer)
        for room, reason in step.refused:
            self._end(room, reason or "refused")
        self._all_closed.update(step.closed)
        for transfer in list(self._under_way.values()):
            if transfer.node in self._all_closed:
                self._end(transfer.room, "the node process has ended")
        self.heard(step.ended)

    def heard(self, events: Iterable[RoomEvent]) -> None:
        """Take events of the node. Events of rooms that no step has named yet are kept."""
        for event in events:
            if event.kind not in LAST_EVENTS:
                continue
            transfer = self._under_way.get(event.room)
            if transfer is not None and transfer.generation == event.generation:
                self._ended(event)
                continue
            self._early[event.room, event.generation] = event
            if len(self._early) > EARLY_EVENTS_KEPT:
                self._early.popitem(last=False)

    def _look_back(self, transfer: Transfer) -> None:
        if (event := self._early.pop((transfer.room, transfer.generation), None)) is not None:
            self._ended(event)

    def _ended(self, event: RoomEvent) -> None:
        transfer = self._under_way[event.room]
        if event.code == WITHDRAWN and transfer.is_load:
            # The scheduler's process gets this event as well. It fetches the next generation, or says that it does not.
            following = self._under_way[event.room] = replace(transfer, generation=transfer.generation + 1)
            self._look_back(following)
            return
        well = event.kind in {"committed", "completed"}
        self._end(event.room, "" if well else f"{event.kind}: {event.reason}")

    def _end(self, room: int, reason: str) -> None:
        transfer = self._under_way.pop(room, None)
        if transfer is not None:
            self._over.append((transfer, reason))

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests since the last call that are sent, those whose load is over, and of the latter those that failed."""
        over, self._over = self._over, []
        for transfer, reason in over:
            if reason:
                what = "load_failed" if transfer.is_load else "hold_ended"
                log.warning(what, request=transfer.request, room=transfer.room, reason=reason)
        received = {transfer.request for transfer, _ in over if transfer.is_load}
        failed = {transfer.request for transfer, reason in over if transfer.is_load and reason}
        return {transfer.request for transfer, _ in over} - received, received, failed

    def look_at_step(self) -> None:
        """Take the node's events and the rank worker's ends. Seldom while nothing is under way."""
        now_s = time.monotonic()
        if now_s < self._next_look_s and self.idle:
            return
        self._next_look_s = now_s + IDLE_LOOK_S
        if self._attachment is not None:
            self.heard(self._attachment.events())
        if self._worker is None:
            return
        ends, serves = self._worker.ends(), self._worker.node
        # A living node is not listed as closed: it reports failures itself.
        self._served.update(end.node for end in ends if end.node)
        gone = {end.node for end in ends if end.node and end.node_gone}
        gone |= {node for node in self._served if serves and node != serves}
        self._served -= gone
        for node in sorted(gone):
            log.info("transports_closed", node_role=self.role.value, incarnation=node)
            self.closed.append(node)

    def unregister(self) -> None:
        """Let go of the tensors. Raises the errors of `AdoptedWorker.close`."""
        if self._worker is not None:
            node = self._worker.node
            self._worker.close()
            self._served.update({node} - {""})
            self._worker = None

    def restore(self) -> None:
        self._worker = self._worker or self._serve()

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.unregister)
            if self._attachment is not None:
                stack.callback(self._attachment.close)
