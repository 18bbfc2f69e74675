"""Engine and Room of both roles: attaching, views, page keys, events and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import structlog

from kvbridge.core.errors import BridgeError, DetachedError, InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import Region, fingerprint
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Role, Tables
from kvbridge.core.process import Closing
from kvbridge.core.wire.engine_messages import (
    AbortRoom,
    Accepted,
    Attached,
    Call,
    Detach,
    Loaded,
    Pages,
    Release,
    RoomEvent,
)
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.engine.link import AnswerT, EngineLink, RoomCall
from kvbridge.engine.memory import AdoptedWorker, EngineMemory, WorkerEnd, present_gpu_kept
from kvbridge.engine.streams import (
    LOOK_AGAIN_S,
    DeferredCalls,
    Load,
    LoadBacks,
    StreamChoice,
    StreamOrder,
    rank_copiers,
)
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.layout import Progress, ignore_progress
from kvbridge.telemetry.logs import leave_standard_output
from kvbridge.tier.keys import Keys, PrefixIdentity, TokenIds, page_keys

log = structlog.get_logger(__name__)

DEFAULT_CALL_TIMEOUT_S = 10.0
OwnPages = Sequence[int] | Mapping[IndexSpace, Sequence[int] | PageTable]
"""Block ids of an engine with adopted memory, in the order of the tokens; by index space if the model has several."""


class Engine(Closing):
    """One engine process at one node. Synchronous, for one thread; no call takes longer than its timeout."""

    role: ClassVar[Role]

    def __init__(
        self,
        link: EngineLink,
        answer: Attached,
        memory: EngineMemory,
        order: StreamOrder,
        *,
        workers: Sequence[AdoptedWorker] | None = None,
    ) -> None:
        """`workers`: those of adopted memory; None with pools of the node."""
        self._link = link
        self._answer = answer
        self._memory = memory
        self._order = order
        self._workers = workers
        self._deferred = DeferredCalls()
        self._closed = False
        self._loads = LoadBacks({}, order)
        try:
            if memory.twins:
                self._loads = LoadBacks(rank_copiers(memory.views, memory.twins, answer.copy_backend), order)
        except BaseException:
            self._leave(through=True)
            raise

    @classmethod
    def attach(
        cls,
        runtime_dir: Path | str,
        *,
        ranks: Iterable[Rank] = (),
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
        on_progress: Progress | None = ignore_progress,
        daemon_user: int | None = None,
    ) -> Self:
        """Attach to the daemon with this runtime directory, for `ranks` (default: every rank of the node).

        The daemon's pools are mapped into this process, and `views` shows them. `call_timeout_s` bounds every later call, too.
        `on_progress` is called during the page-locking of the node's host pool for this process's GPUs, which takes a while for a
        large pool. None leaves the pool pageable, and kernels cannot reach it then. `daemon_user`: number of the daemon's user, if
        it is another. This process must then be in the daemon's `runtime_group`, and trusts that user.

        Raises DeadlineError when no daemon answers, NotReadyError when the node's memory does not exist within `call_timeout_s`,
        InvalidInputError for ranks of other nodes or the wrong role, RegistrationError when the node's memory cannot be opened or
        page-locked, UnsupportedError when its GPU is of no use here.
        """
        link = EngineLink(runtime_dir, timeout_s=call_timeout_s, daemon_user=daemon_user)
        return cls._attach(link, tuple(ranks), {}, None, on_progress)

    @classmethod
    def adopt(
        cls,
        runtime_dir: Path | str,
        regions: Mapping[Rank, Sequence[Region]],
        *,
        ranks: Iterable[Rank] = (),
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
        on_progress: Progress | None = ignore_progress,
    ) -> Self:
        """Attach with this process's own tensors as the device pools of its ranks.

        `regions`: for each rank one `adopted_region` per component and layer, except those in the node's own host pool. Keep the
        tensors in place until `close` has returned: threads of this process move their bytes. Without regions, other processes
        bring the memory, and this process calls for `ranks` (default: every rank of the node). Raises the errors of `attach`, and
        InvalidInputError for regions that do not fit the model.

        Calls about a room, except `begin` and `claim`, do not wait for an answer: a refusal arrives as an event `refused`. A call
        raises NotReadyError when the node does not read, PeerError when the node is gone.
        """
        leave_standard_output()
        with ExitStack() as stack:
            workers = [AdoptedWorker(Path(runtime_dir), rank, ours) for rank, ours in regions.items()]
            for worker in workers:
                stack.callback(worker.close)
            link = EngineLink(runtime_dir, timeout_s=call_timeout_s)
            engine = cls._attach(link, tuple(regions) or tuple(ranks), regions, workers, on_progress)
            stack.pop_all()
        return engine

    @classmethod
    def _attach(
        cls,
        link: EngineLink,
        ranks: tuple[Rank, ...],
        adopted: Mapping[Rank, Sequence[Region]],
        workers: Sequence[AdoptedWorker] | None,
        on_progress: Progress | None,
    ) -> Self:
        leave_standard_output()
        with ExitStack() as stack:
            stack.callback(link.close)
            answer = link.attach(cls.role, ranks, brings_memory=bool(adopted))
            with present_gpu_kept():
                memory = EngineMemory(answer, adopted, link.daemon_user, on_progress)
            stack.pop_all()
        return cls(link, answer, memory, StreamOrder(memory.views), workers=workers)

    def worker_ends(self) -> list[WorkerEnd]:
        """Adopted pools: return the ends of this process's rank workers since the last call.

        An ended rank worker touches no page any more, even if the node lives. Its transfers fail, and it starts again by itself.
        """
        return [end for worker in self._workers or () for end in worker.ends()]

    @property
    def incarnation(self) -> str:
        """Incarnation of the node. Another incarnation does not know the rooms of this one."""
        return self._answer.incarnation

    @property
    def geometry(self) -> ModelGeometry:
        """The model that the node serves."""
        return self._answer.geometry

    def page_keys(self, tokens: TokenIds, *, adapter: str = "", namespace: str = "") -> Keys:
        """Return the page keys (`kvbridge.tier.keys`) of a request's tokens: a sequence or a one-dimensional array of ids.

        `adapter`: the model's adapter; `namespace`: the request's. Raises UnsupportedError when the node does not state its model
        (`tier.model_name`, `tier.model_revision`), InvalidInputError when `tokens` are no token ids.
        """
        model = self._answer.model_identity
        if model is None:
            raise UnsupportedError(
                f"instance {self._answer.instance} does not say which model it holds, so its pages have no keys: set "
                "tier.model_name and tier.model_revision in the configuration of its daemons"
            )
        identity = PrefixIdentity(
            model=model.name,
            revision=model.revision,
            fingerprint=fingerprint(self.geometry),
            tokens_per_page=self.geometry.tokens_per_page,
            adapter=adapter,
            namespace=namespace,
        )
        return page_keys(identity, tokens)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks that this process serves."""
        return self._answer.ranks

    @property
    def views(self) -> dict[Rank, PoolViews]:
        """Zero-copy views of each rank's pools, on decode with the node's host pool; valid until `close`."""
        return self._memory.views

    def layers(self, rank: Rank) -> tuple[int, ...]:
        """Global layer ids of a rank."""
        return self._answer.layers[str(rank)]

    def _own_tables(self, pages: OwnPages, first_page: int = 0, behind: Tables | None = None) -> Tables:
        """Return page ids as tables. Plain ids begin at logical page `first_page`, or after the pages of `behind`."""
        if not isinstance(pages, Mapping):
            spaces = {component.space for component in self.geometry.components}
            if len(spaces) > 1:
                raise InvalidInputError(
                    f"pages of '{self.geometry.name}' are in the spaces {', '.join(sorted(spaces))}: name them by space, as "
                    "pages={IndexSpace.FULL: [...], ...}"
                )
            pages = dict.fromkeys(spaces, pages)
        tables: Tables = {}
        for space, ids in pages.items():
            if not isinstance(ids, PageTable):
                before = (behind or {}).get(space)
                first = first_page if before is None else before.first_page + len(before)
                ids = PageTable(space, np.array(ids, dtype=np.int32), first)  # noqa: PLW2901
            tables[space] = ids
        return tables

    def _load_back(self, room: Room, pages: Pages, *, by_layer: bool) -> None:
        """Enqueue a room's copies from host memory, if any, and tell the node when the GPUs have done them.

        After a failure the room is given up and the error raised.
        """
        if not pages.load:
            return
        try:
            load = self._loads.start(room.id, pages, by_layer=by_layer)
            room._load_began(load)
        except BridgeError as error:
            why = f"pages of its prefix cannot be loaded from host memory: {error}"[:REASON_CHARS]
            self._let_go(AbortRoom(call=self._link.number(), room=room.id, reason=why, load_failed=True), None)
            raise

        def say() -> None:
            figures = {"bytes": load.bytes, "seconds": load.seconds()}
            said = Loaded(call=self._link.number(), room=pages.room, generation=pages.generation, **figures)
            self._link.call(said, Accepted)

        arrived = partial(self._order.passed, frozenset(load.points.values()))
        self._deferred.send_when(arrived, f"load of room {room.id}", say)

    def abort(self, room: int, reason: str, *, again: bool = False, stream: StreamChoice = None) -> None:
        """Give a room up by its id. Submit no more work that touches its pages. Harmless on a room that is over.

        `again`: on prefill, this engine computes the prompt once more and holds the room's next generation. Decode's room then
        fails with the code `withdrawn`, and decode may fetch the next generation.

        With pools on a GPU, this call or a later one, `events` included, tells the node after `stream` (default: the current one)
        has come to this point.
        """
        said = AbortRoom(call=self._link.number(), room=room, reason=reason[:REASON_CHARS], again=again)
        self._let_go(said, stream)

    def events(self, timeout_s: float = 0.0) -> list[RoomEvent]:
        """Return the events of rooms since the last call, waiting up to `timeout_s` for the first event.

        Every call sends the releases and aborts that waited for their GPU, so an idle engine has to call this now and then. Raises
        DetachedError, after the last event, when the device memory is gone.
        """
        return self._await_events(self._link.events, timeout_s)

    def _await_events(self, ask: Callable[[float], list[RoomEvent]], timeout_s: float) -> list[RoomEvent]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._deferred.send_due()
            left_s = max(0.0, deadline_s - time.monotonic())
            events = ask(min(left_s, LOOK_AGAIN_S) if self._deferred else left_s)
            if events:
                return events
            if self._link.lost:
                raise DetachedError(
                    f"the device memory of this engine is gone: {self._link.lost}; close it and attach again"
                )
            if time.monotonic() >= deadline_s:
                return []

    def close(self) -> None:
        """Leave the node. The engine's open rooms fail, and views must not be used any more. Harmless when closed.

        Only the current streams may still use the pools; this waits for them at most as long as for one call. Raises DeadlineError
        when the streams or a rank worker of this process do not end in time, UnclosedError when a rank worker has ended without
        closing its transports. This process has left all the same: the node uses its pages again when the process has ended, and
        adopted tensors must stay in place until then.
        """
        if self._closed:
            return
        self._closed = True
        through = False
        try:
            if self._order.devices:
                self._deferred.send_when(self._order.reached(None, self._loads.points()), "close", lambda: None)
            self._deferred.finish(self._link.timeout_s)
            through = True
        finally:
            self._leave(through=through)

    def _leave(self, *, through: bool) -> None:
        """Unmap the memory and leave the node. Unless no GPU uses the pools (`through`), the node waits for our process to end."""
        with present_gpu_kept(), ExitStack() as stack:  # runs from bottom to top
            stack.callback(self._link.close)
            if through:
                stack.push(self._detach)
            stack.callback(self._memory.close)
            stack.callback(self._order.close)
            for worker in self._workers or ():
                stack.callback(worker.close)
            stack.callback(self._loads.close)

    def _detach(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell the node that this process uses no page any more, unless closing has failed."""
        if kind is not None:
            return
        try:
            self._link.call(Detach(call=self._link.number()), Accepted)
        except BridgeError as failure:  # a node that is there waits for the end of this process
            log.warning("detach_failed", code=failure.code, reason=str(failure))

    def say(self, kind: type[RoomCall], room: int, **fields: Any) -> None:  # noqa: ANN401 - the message's own
        """Send a call about a room, after the due calls. Verbs of rooms and connectors (`engine.kit`) use this.

        Raises a refusal. With adopted pools this does not wait, and a refusal is an event.
        """
        self._deferred.send_due()
        self._say(kind(call=self._link.number(), room=room, **fields))

    def _call(self, message: Call, answer: type[AnswerT]) -> AnswerT:
        self._deferred.send_due()
        return self._link.call(message, answer)

    def _let_go(self, message: Release | AbortRoom, stream: StreamChoice) -> None:
        """Tell the node that pages are free, when this engine's GPU does not use them any more."""
        loaded = self._loads.points(message.room)
        self._loads.forget(message.room)
        if not self._order.devices:
            self._deferred.send_due()
            self._say(message)
            return
        what = f"{message.type} of room {message.room}"
        self._deferred.send_when(self._order.reached(stream, loaded), what, lambda: self._say(message))

    def _say(self, message: RoomCall) -> None:
        if self._workers is not None:
            self._link.post(message)
        else:
            self._link.call(message, Accepted)


@dataclass(eq=False)
class Room:
    """One request at one engine, from `begin`, `hold` or `claim` until the engine lets go of its pages."""

    engine: Engine = field(repr=False)
    id: int
    generation: int
    """Number of the attempt at the room, from 1."""
    prompt_tokens: int
    tables: Tables
    """Pages of the room, by index space."""
    host_tokens: int = 0
    """Tokens at the prefix's end in the node's host memory alone. Copies on a GPU stream of their own load them, and the current
    stream of each GPU waits for the copies; with `by_layer` the engine calls `wait_layer` instead. With pools in host memory the
    tokens are there already."""
    traceparent: str = ""
    """The room's span in W3C's form, the parent of the engine's own spans; empty without a trace."""

    def wait_layer(self, layer: int, *, stream: StreamChoice = None) -> None:
        """Let `stream` (default: the current one) wait for the load of a layer of the prefix; the host does not wait.

        For rooms begun or claimed `by_layer`. Call this before the layer reads or writes a page of the room.
        """
        self.engine._loads.wait_layer(self.id, layer, stream)

    def abort(self, reason: str, *, again: bool = False, stream: StreamChoice = None) -> None:
        """Give the room up, as `Engine.abort` does."""
        self.engine.abort(self.id, reason, again=again, stream=stream)

    def _load_began(self, load: Load) -> None:
        """A load is enqueued."""
