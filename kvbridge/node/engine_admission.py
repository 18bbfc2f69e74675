"""Rooms that engines admit themselves: one message says what a router and several calls say of other rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, ConflictError, code_of
from kvbridge.core.wire.engine_messages import Admit, Begin, Call, Fetch, Finish, Hold, Provide, Publish
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.room import AdmittingEngine
from kvbridge.node.rooms import Rooms
from kvbridge.node.sender.rooms import SenderRooms

CLIENT = "engine"
"""Of these rooms, in reports and for the limits of clients."""


@dataclass(frozen=True, slots=True)
class EngineAdmission:
    """Called from the event loop's thread only."""

    rooms: Rooms[Any]
    admission: AdmissionController

    def admit(self, _: AttachedEngine, message: Admit) -> None:
        """Admit a room as a router does."""
        asked = message.model_dump(exclude={"call", "type"})
        self.admission.admit_now(AdmissionRequest(**asked, client=CLIENT))

    def hold(self, engine: AttachedEngine, message: Hold) -> None:
        """Admit a room for what the engine computes, and take what it says of it. Raises as each call does."""
        room, tokens = message.room, message.prompt_tokens
        calls: list[Call] = []
        if message.tables is not None:
            pages = {"tables": message.tables, "computed_tokens": message.computed_tokens}
            calls.append(Begin(call=message.call, room=room, prompt_tokens=tokens, **pages))
        if message.published_tokens:
            calls.append(Publish(call=message.call, room=room, upto_token=message.published_tokens))
        if message.published_tokens == tokens:
            calls.append(Finish(call=message.call, room=room, metadata=message.metadata))
        try:
            self._carry_out(engine, message, calls)
        except Exception as error:
            if isinstance(self.rooms, SenderRooms):
                known = error if isinstance(error, BridgeError) else BridgeError(str(error) or type(error).__name__)
                self.rooms.peers.not_admitted(room, message.generation, known)
            raise

    def fetch(self, engine: AttachedEngine, message: Fetch) -> None:
        """Admit a room that prefill nodes hold for the engine, and take its pages if it has any. Raises as each call does."""
        calls: list[Call] = []
        if message.tables is not None:
            pages = {"tables": message.tables, "prefix_tokens": message.prefix_tokens}
            calls.append(Provide(call=message.call, room=message.room, **pages))
        self._carry_out(engine, message, calls, message.prefill, held=message.held)

    def _carry_out(
        self,
        engine: AttachedEngine,
        message: Hold | Fetch,
        calls: list[Call],
        prefill: tuple[PeerAddress, ...] = (),
        *,
        held: bool = False,
    ) -> None:
        if not self.rooms.requests.pages.settings.adopted:
            raise ConflictError(
                "this node owns its pools, so the pages of a room are its own to give: rooms are admitted over HTTP, or by `admit`"
            )
        request = AdmissionRequest(
            room=message.room,
            generation=message.generation,
            prompt_tokens=message.prompt_tokens,
            prefill=prefill,
            client=CLIENT,
        )
        self.admission.admit_now(request, engine=AdmittingEngine(engine.name, message.prompt_digest, held))
        try:
            for call in calls:
                self.rooms.calls[type(call)](engine, call)
        except Exception as error:
            room = self.rooms.book.find(message.room, message.generation)
            if room is not None:
                self.rooms.driver.fail(room, code_of(error), str(error) or type(error).__name__)
            raise
