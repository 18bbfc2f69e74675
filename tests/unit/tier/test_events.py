"""KV events: the bytes of the format, what a stay is told as, and the sockets."""

import asyncio
from pathlib import Path

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from kvbridge.config.tier import KvEventSettings
from kvbridge.control.kv_events import END, KvEvents
from kvbridge.core.ids import IndexSpace
from kvbridge.tier.events import CLEARED, CacheFeed, encode_batch
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from tests.helpers.kv_subscriber import Subscriber, hashes

FULL, SWA = IndexSpace.FULL, IndexSpace.SWA
KEYS = Keys(bytes(range(48)))
BATCH = bytes.fromhex(
    "92" "cb3ff8000000000000" "93"  # [1.5, [AllBlocksCleared, BlockStored, BlockRemoved]]
    "81" "a474797065" "b0416c6c426c6f636b73436c6561726564"
    "8a" "a474797065" "ab426c6f636b53746f726564"
    "ac626c6f636b5f686173686573" "92cf08090a0b0c0d0e0fcf18191a1b1c1d1e1f"
    "b1706172656e745f626c6f636b5f68617368" "c0"
    "a9746f6b656e5f696473" "90"
    "aa626c6f636b5f73697a65" "40"
    "a76c6f72615f6964" "c0"
    "a66d656469756d" "a3475055"
    "a96c6f72615f6e616d65" "c0"
    "a967726f75705f696478" "00"
    "b26b765f63616368655f737065635f6b696e64" "ae66756c6c5f617474656e74696f6e"
    "84" "a474797065" "ac426c6f636b52656d6f766564"
    "ac626c6f636b5f686173686573" "91cf18191a1b1c1d1e1f"
    "a66d656469756d" "a3475055"
    "a967726f75705f696478" "00"
)  # fmt: skip


class Cache:
    def __init__(self) -> None:
        self.index = PrefixIndex([FULL], 16)
        self.feed = CacheFeed(self.index, 64)
        self.page = 0

    def add(self, keys: Keys) -> None:
        count = len(keys) - len(self.index.match(keys))
        pages = {FULL: np.arange(self.page, self.page + count, dtype=np.int32)}
        self.page += count
        self.index.insert(keys, len(keys) - count, pages, now=float(self.page))


def test_a_batch_has_these_bytes():
    cache = Cache()
    cache.add(KEYS[:2])
    stored = cache.feed.changes()
    cache.index.evict({FULL: 1})
    assert encode_batch(1.5, [CLEARED, *stored, *cache.feed.changes()]) == BATCH


def test_a_branch_continues_its_parent_and_a_checkpoint_is_told_apart():
    cache = Cache()
    cache.add(KEYS)
    other = Keys(KEYS[:1].data + bytes(range(100, 132)))
    cache.add(other)
    path = cache.index.match(KEYS)
    cache.index.device.set_checkpoint(int(path[-1]), np.array([3], dtype=np.int32))
    events = cache.feed.changes()
    assert [event["group_idx"] for event in events] == [0, 0, 1]
    whole, branch, checkpoint = events
    assert whole["parent_block_hash"] is None
    assert len(whole["block_hashes"]) == 3
    assert (branch["parent_block_hash"], len(branch["block_hashes"])) == (hashes(KEYS)[0], 2)
    assert (checkpoint["block_hashes"], checkpoint["parent_block_hash"]) == (hashes(KEYS)[2:], hashes(KEYS)[1])
    assert (checkpoint["kv_cache_spec_kind"], checkpoint["kv_cache_spec_sliding_window"]) == ("sliding_window", 64)
    cache.index.drop()
    assert cache.feed.changes() == [CLEARED]
    assert cache.feed.changes() == []


def test_a_checkpoint_goes_before_its_page_and_lost_memory_leaves_host_copies():
    index = PrefixIndex([FULL], 16, has_copies=True)
    feed, router = CacheFeed(index, 64), Subscriber()
    pages = np.arange(3, dtype=np.int32)
    index.insert(KEYS, 0, {FULL: pages}, now=1.0)
    path = index.match(KEYS)
    index.add_copies(path, 0, {IndexSpace.FULL_COPY: pages})
    index.device.set_checkpoint(int(path[0]), pages[:1])
    index.pin(path)
    router.apply(feed.changes())
    everything = {(medium, 0, each) for medium in ("GPU", "CPU") for each in hashes(KEYS)}
    assert router.known == everything | {("GPU", 1, hashes(KEYS)[0])}
    index.device.take_checkpoints(1, index.retentions)
    router.apply(feed.changes())
    assert router.known == everything
    index.lose_device()  # a reader still has the device pages
    router.apply(feed.changes())
    assert router.known == {("CPU", 0, each) for each in hashes(KEYS)}


async def test_a_subscriber_that_has_missed_batches_is_told_them_or_everything(tmp_path: Path):
    cache = Cache()
    endpoints = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    publisher = KvEvents(KvEventSettings(**endpoints, topic="kv@here", replay_batches=2), cache.feed)
    context = zmq.asyncio.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        subscriber.connect(endpoints["endpoint"])

        async def ask(number: int) -> list[tuple[int, bytes]]:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(endpoints["replay_endpoint"])
            await dealer.send_multipart([b"", number.to_bytes(8, "big")])
            told = []
            while (frames := await asyncio.wait_for(dealer.recv_multipart(), 20))[-2] != END:
                told.append((int.from_bytes(frames[2], "big"), frames[3]))
                assert frames[1] == b"kv@here"
            dealer.close()
            return told

        assert [number for number, _ in await ask(0)] == [0]
        for count in (1, 2, 3):
            cache.add(KEYS[:count])
            publisher.tick()
        assert [number for number, _ in await ask(3)] == [3]
        assert [number for number, _ in await ask(4)] == []
        for unknown in (0, 9):
            ((number, batch),) = await ask(unknown)
            late = Subscriber()
            late.apply(msgpack.unpackb(batch)[1])
            assert number == 3
            assert late.known == {("GPU", 0, each) for each in hashes(KEYS)}
        while not await subscriber.poll(50):  # the subscription arrives at some time
            cache.index.drop()
            publisher.tick()
            cache.add(KEYS)
            publisher.tick()
        topic, number, batch = await asyncio.wait_for(subscriber.recv_multipart(), 20)
        even = int.from_bytes(number, "big") % 2 == 0
        assert (topic, msgpack.unpackb(batch)[1][0]["type"]) == (b"kv@here", CLEARED["type"] if even else "BlockStored")
    finally:
        context.destroy(linger=0)
        publisher.close()
