"""The sockets of KV events: a PUB that tells events, and a ROUTER that repeats events for a subscriber that has missed some.

Three frames are one message, as from vLLM and SGLang: topic, sequence number (8 bytes, big-endian), `KVEventBatch`. A subscriber
asks by a REQ or DEALER for all messages from a number on. They come, and then number -1. For a first number that is not kept any
more, or not given yet, one message comes instead: everything that is cached, under the last number.
"""

from __future__ import annotations

import time
from collections import deque

import structlog
import zmq

from kvbridge.config.tier import KvEventSettings
from kvbridge.control.sockets import LoopSocket, Parts, SocketContext, bind
from kvbridge.tier.events import CLEARED, CacheFeed, Event, encode_batch

log = structlog.get_logger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
_MOST_ASKED_BYTES = 64


class KvEvents:
    """Publishes the changes of one cache. Built, used and closed in one running loop."""

    def __init__(self, settings: KvEventSettings, feed: CacheFeed) -> None:
        """Listen. Raises as `bind_error` says."""
        self._feed, self._topic = feed, settings.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.replay_batches)
        self._next = 0
        self._context = SocketContext()
        try:
            events, replay = self._context.open(zmq.PUB), self._context.open(zmq.ROUTER)
            replay.setsockopt(zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)
            listening = {"events": bind(events, settings.endpoint)}
            if settings.replay_endpoint:
                listening["replay"] = bind(replay, settings.replay_endpoint)
            self._events, self._replay = LoopSocket(events, lambda _: None), LoopSocket(replay, self._on_asked)
        except BaseException:
            self._context.close()
            raise
        log.info("kv_events_listen", topic=settings.topic, **listening)
        self._publish([CLEARED])  # whoever knew the node before forgets what it held

    def tick(self) -> None:
        """Publish the changes since the last call, if there are any."""
        if changes := self._feed.changes():
            self._publish(changes)

    def close(self) -> None:
        """Close the sockets; harmless when closed."""
        self._events.close()
        self._replay.close()
        self._context.close()

    def _publish(self, events: list[Event]) -> None:
        number, batch = self._next.to_bytes(8, "big"), encode_batch(time.time(), events)
        self._next += 1
        self._kept.append((number, batch))
        self._events.send((self._topic, number, batch))

    def _on_asked(self, parts: Parts) -> None:
        route, *_, asked = (part.bytes for part in parts)
        if len(parts) != 3 or len(asked) != 8:
            log.warning("kv_replay_refused", reason=f"{len(parts)} frames, expected a REQ's number of 8 bytes")
            return
        start = int.from_bytes(asked, "big")
        if self._next - len(self._kept) <= start <= self._next:
            told = list(self._kept)[start - self._next + len(self._kept) :]
        else:
            self.tick()
            told = [((self._next - 1).to_bytes(8, "big"), encode_batch(time.time(), self._feed.snapshot()))]
        for number, batch in told:
            self._replay.send((route, b"", self._topic, number, batch))
        self._replay.send((route, b"", b"", END, b""))
