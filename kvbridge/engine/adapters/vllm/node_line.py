"""The node as the scheduler's half of the connector speaks to it: which incarnation there is, and what it has yet to be told.

Owns: both. Must not know: requests, sockets.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import structlog

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, InvalidInputError, NotReadyError
from kvbridge.engine.adapters.vllm.requests import RoomCalls

log = structlog.get_logger(__name__)

MOST_WITHDRAWALS = 4_096
"""What is kept for a node that is being started again; prefill holds what is forgotten for its `timeouts.offer_s`."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A room that prefill holds for us, and nobody comes for: as `RoomCalls.fetch` names it."""

    prompt_tokens: int
    prompt_digest: bytes
    prefill: tuple[PeerAddress, ...]
    generation: int = 1

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of that call."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_digest": self.prompt_digest,
            "prefill": self.prefill,
            "generation": self.generation,
        }


@dataclass(slots=True)
class NodeLine:
    """For the scheduler's thread only."""

    calls: RoomCalls
    incarnation: str = ""
    """Empty while there is none."""
    unsent: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """Rooms that are to be given up, why, and whether they are held again: the node did not read."""
    withdrawals: OrderedDict[int, Withdrawal] = field(default_factory=OrderedDict)
    """Rooms that no incarnation of the node was told of."""

    @property
    def owes(self) -> bool:
        """Whether there is something to tell, and somebody to tell it to."""
        return bool(self.unsent or (self.incarnation and self.withdrawals))

    def require(self) -> None:
        """Raise NotReadyError while there is nobody to ask."""
        if not self.incarnation:
            raise NotReadyError("there is no node process to ask; it is started again")

    def give_up(self, room: int, reason: str, *, again: bool = False) -> None:
        """Tell the node, now or at a later step; a node that is gone has told the other side by that."""
        if not self.incarnation:
            return
        self.unsent.pop(room, None)
        try:
            self.calls.abort(room, reason, again=again)
        except InvalidInputError as error:  # it is no better at a later step
            log.error("not_given_up", room=room, code=error.code, reason=str(error))
        except BridgeError:
            self.unsent[room] = reason, again

    def withdraw(self, room: int, said: Withdrawal) -> None:
        """Have prefill told that nobody comes for a room, now or when there is a node: it ends a room for whoever has come."""
        self.withdrawals[room] = said
        if len(self.withdrawals) > MOST_WITHDRAWALS:
            self.withdrawals.popitem(last=False)
        self.send_again()

    def send_again(self) -> None:
        """Try what was not sent."""
        for room, (reason, again) in list(self.unsent.items()):
            self.give_up(room, reason, again=again)
        for room, said in list(self.withdrawals.items()) if self.incarnation else ():
            try:
                self.calls.fetch(room, **said.named)
            except InvalidInputError as error:  # it is no better at a later step
                log.error("not_withdrawn", room=room, code=error.code, reason=str(error))
                del self.withdrawals[room]
                continue
            except BridgeError:
                return
            del self.withdrawals[room]
            self.give_up(room, "decode does not come for it")

    def lost(self) -> None:
        """It is gone, and with it its rooms."""
        self.incarnation = ""
        self.unsent.clear()
