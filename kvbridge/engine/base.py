"""What engines of both roles have in common: how they attach, what they see, how they leave.

Owns: one attachment. Must not know: the verbs of either role.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

from kvbridge.core.closing import Closing
from kvbridge.core.errors import BridgeError, DetachedError, UnsupportedError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import Region, fingerprint
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import AbortRoom, Accepted, Call, Loaded, Pages, Release, RoomEvent
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.engine.adopted import adopt
from kvbridge.engine.attachment import DEFAULT_CALL_TIMEOUT_S, Attachment, WorkerEnd, attach
from kvbridge.engine.link import AnswerT, EngineLink, RoomCall
from kvbridge.engine.load_back import Load, LoadBacks, rank_copiers
from kvbridge.engine.stream_order import LOOK_AGAIN_S, DeferredCalls, StreamChoice
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.extent import Progress, ignore_progress
from kvbridge.tier.keys import Keys, PrefixIdentity, TokenIds, page_keys


class Engine(Closing):
    """One engine process at one node. Synchronous, for one thread; no call takes longer than its timeout."""

    role: ClassVar[Role]

    def __init__(self, attachment: Attachment, *, close_timeout_s: float = DEFAULT_CALL_TIMEOUT_S) -> None:
        """Use `attach` or `adopt` instead."""
        self._attachment = attachment
        self._link = attachment.link
        self._order = attachment.order
        self._deferred = DeferredCalls()
        self._close_timeout_s = close_timeout_s
        self._closed = False
        try:
            self._loads = LoadBacks(rank_copiers(attachment), self._order)
        except BaseException:
            attachment.close(through=True)
            raise
        attachment.closers.append(self._loads.close)

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
        """Attach to the daemon whose runtime directory this is, for `ranks` (none named: every rank of the node).

        The daemon's pools are mapped into this process; `views` shows them. `on_progress` is called while the node's host pool is
        page-locked for this process's GPUs, which takes a while in a large pool; None leaves it pageable, so that kernels cannot
        reach it. `call_timeout_s` bounds every later call, too. `daemon_user` is the number of the user that the daemon runs as,
        where it is not this process's own, which must then be a member of the daemon's `runtime_group`: that user is believed.

        Raises DeadlineError when no daemon answers, NotReadyError when the node's memory is not there within `call_timeout_s`,
        InvalidInputError for ranks of other nodes or the wrong role, RegistrationError when its memory cannot be opened or
        page-locked, UnsupportedError when its GPU cannot be used here.
        """
        link = EngineLink(runtime_dir, timeout_s=call_timeout_s, daemon_user=daemon_user)
        attachment = attach(link, cls.role, ranks=ranks, on_progress=on_progress)
        return cls(attachment, close_timeout_s=call_timeout_s)

    @classmethod
    def adopt(
        cls,
        runtime_dir: Path | str,
        regions: Mapping[Rank, Sequence[Region]],
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
        on_progress: Progress | None = ignore_progress,
    ) -> Self:
        """Attach with this process's own tensors as the device pools, for each rank that it serves.

        `regions`: one for each component and layer of the rank that is not in the node's host pool, made by `adopted_region`.
        The tensors stay where they are until `close` has returned. Bytes are moved by threads of this process. Raises what
        `attach` does, and InvalidInputError for regions that do not fit the model.

        Of such an engine no call about a room waits for its answer, but for `begin` and `claim`: what the node refuses comes as an
        event `refused`. A call raises NotReadyError when the node does not read, PeerError when it is gone.
        """
        attachment = adopt(runtime_dir, cls.role, regions, call_timeout_s=call_timeout_s, on_progress=on_progress)
        return cls(attachment, close_timeout_s=call_timeout_s)

    def worker_ends(self) -> list[WorkerEnd]:
        """Adopted pools: return which rank workers of this process have ended since the last call.

        Nothing of such a worker reads or writes a page any more, whatever has become of the node. What was under way through it has
        failed, or will; it comes back by itself.
        """
        return [end for ended in self._attachment.worker_ends for end in ended()]

    @property
    def incarnation(self) -> str:
        """Of the node: what a later one knows of rooms has nothing to do with this one's."""
        return self._attachment.answer.incarnation

    @property
    def geometry(self) -> ModelGeometry:
        """The model that the node serves."""
        return self._attachment.answer.geometry

    def page_keys(self, tokens: TokenIds, *, adapter: str = "", namespace: str = "") -> Keys:
        """Return the page keys of a request's tokens, a sequence or a one-dimensional array of ids (`kvbridge.tier.keys`).

        `adapter`: which adapter of the model computes; `namespace`: that of the request. Raises UnsupportedError when the node does
        not say which model it holds (`tier.model_name`, `tier.model_revision`), InvalidInputError for what are no token ids.
        """
        model = self._attachment.answer.model_identity
        if model is None:
            raise UnsupportedError(
                f"instance {self._attachment.answer.instance} does not say which model it holds, so its pages have no keys: set "
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
        return self._attachment.answer.ranks

    @property
    def views(self) -> dict[Rank, PoolViews]:
        """Zero-copy views of each rank's pools (on decode with the node's host pool); valid until `close`."""
        return self._attachment.views

    def layers(self, rank: Rank) -> tuple[int, ...]:
        """Global layer ids of a rank."""
        return self._attachment.answer.layers[str(rank)]

    def wait_layer(self, room: int, layer: int, *, stream: StreamChoice = None) -> None:
        """Let `stream` (default: the current one) go on only when what the room loads of a layer is there; the host does not wait.

        For rooms that were begun or claimed `by_layer`: before the layer reads or writes a page of the room. Without effect in a
        room that loads nothing, and with pools in host memory.
        """
        self._loads.wait_layer(room, layer, stream)

    def _load_back(self, room: int, pages: Pages, *, by_layer: bool) -> None:
        """Enqueue what a begun or claimed room is to load, if anything; the node hears of it when the GPUs are through.

        The room is given up when that fails, and the error raised.
        """
        if not pages.load:
            return
        try:
            load = self._loads.start(room, pages, by_layer=by_layer)
            self._load_began(pages, load)
        except BridgeError as error:
            why = f"pages of its prefix cannot be loaded from host memory: {error}"
            why = why[:REASON_CHARS]
            self._let_go(AbortRoom(call=self._link.number(), room=room, reason=why, load_failed=True), None)
            raise
        arrived = partial(self._order.passed, frozenset(load.points.values()))
        self._deferred.send_when(arrived, f"load of room {room}", partial(self._say_loaded, pages, load))

    def _load_began(self, pages: Pages, load: Load) -> None:
        """A load is enqueued."""

    def _say_loaded(self, pages: Pages, load: Load) -> None:
        figures = {"bytes": load.bytes, "seconds": load.seconds()}
        said = Loaded(call=self._link.number(), room=pages.room, generation=pages.generation, **figures)
        self._link.call(said, Accepted)

    def abort(self, room: int, reason: str, *, again: bool = False, stream: StreamChoice = None) -> None:
        """Give a room up; this engine submits nothing more that touches its pages. Harmless on a room that is over.

        `again`: on prefill, it computes the prompt once more and holds the next generation of the room. Decode's room fails with
        the code `withdrawn` then, and decode may come for that.

        With pools on a GPU the node is told when `stream` (default: the current one) has come to this point: by this call, or
        by a later one of this object, `events` included.
        """
        said = AbortRoom(call=self._link.number(), room=room, reason=reason[:REASON_CHARS], again=again)
        self._let_go(said, stream)

    def events(self, timeout_s: float = 0.0) -> list[RoomEvent]:
        """Return what happened to rooms since the last call, waiting up to `timeout_s` for the first event.

        Calls that wait for a GPU (release, abort) are sent by this and every other call, so an engine that is otherwise
        idle calls this now and then. Raises DetachedError, once there are no events left, when the device memory is gone.
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
        """Leave the node. Rooms that this engine still works on fail; views must not be used any more.

        Nothing that uses the pools may be on its way on any stream but the current ones, which this waits for, at most
        as long as one call. Raises DeadlineError when they do not end in time, or when a rank worker of this process does not;
        UnclosedError when one has ended and not closed its transports. Then it has left all the same, and the node uses its pages
        again when this process has ended; adopted tensors must stay where they are until then. Harmless when closed.
        """
        if self._closed:
            return
        self._closed = True
        through = False
        try:
            if self._order.devices:
                self._deferred.send_when(self._order.reached(None, self._loads.points()), "close", lambda: None)
            self._deferred.finish(self._close_timeout_s)
            through = True
        finally:
            self._attachment.close(through=through)

    def _tell(self, message: RoomCall) -> None:
        """Send what is due, then this. With adopted pools nothing is waited for, and a refusal is an event; else it is raised."""
        self._deferred.send_due()
        self._say(message)

    def _call(self, message: Call, answer: type[AnswerT]) -> AnswerT:
        """Send what is due, then this. Raises the BridgeError that the node answers, or DeadlineError."""
        self._deferred.send_due()
        return self._link.call(message, answer)

    def _let_go(self, message: Release | AbortRoom, stream: StreamChoice) -> None:
        """Tell the node that pages can be used again, as soon as this engine's GPU does not use them any more."""
        loaded = self._loads.points(message.room)
        self._loads.forget(message.room)
        if not self._order.devices:
            self._tell(message)
            return
        what = f"{message.type} of room {message.room}"
        self._deferred.send_when(self._order.reached(stream, loaded), what, lambda: self._say(message))

    def _say(self, message: RoomCall) -> None:
        if self._attachment.posts:
            self._link.post(message)
        else:
            self._link.call(message, Accepted)
