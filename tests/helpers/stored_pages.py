"""A small host pool whose pages are put into stores and taken back, and keys for them that no other test has."""

import ctypes
import secrets
from pathlib import Path

import numpy as np

from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.models import preset
from kvbridge.pool.memory.layout import Chunking, HostLayout, host_placement
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from kvbridge.tier.stores.objects import ObjectForm, StoredObject

PAGES = 16
HALF = PAGES // 2
"""The first half of the pages is put, the second taken back into."""


class StoredPages:
    """Pages of the C4 cache of a tiny DeepSeek-V4 in shared memory, in two layouts: `forms` 0 and 1 hold the same content."""

    def __init__(self, directory: Path) -> None:
        geometry = preset("tiny-v4")
        kinds = [component.kind for component in geometry.components if component.host_capable]
        self.pools = [
            MemoryPool.in_files(
                host_placement(
                    geometry, kinds, page_count=PAGES, layout=layout, chunking=Chunking(extent_bytes=extent_bytes)
                ),
                directory,
                f"pool-{number}",
            )
            for number, (layout, extent_bytes) in enumerate(
                ((HostLayout.LAYER_FIRST, 1 << 30), (HostLayout.PAGE_FIRST, 40_000))
            )
        ]
        self.forms: list[tuple[Region, ...]] = [pool.regions for pool in self.pools]
        self.shared = [pool.shared_regions() for pool in self.pools]
        self.places = [ObjectForm(regions) for regions in self.forms]
        self.form = self.places[0]
        self._random = np.random.default_rng(secrets.randbits(64))

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def read(self, page: int, form: int = 0) -> bytes:
        addresses = self.places[form].addresses(np.array([page], dtype=np.int32).reshape(1, -1))[0].tolist()
        return b"".join(map(ctypes.string_at, addresses, self.places[form].lengths))

    def write(self, page: int, data: bytes, form: int = 0) -> None:
        at = 0
        addresses = self.places[form].addresses(np.array([page], dtype=np.int32).reshape(1, -1))[0].tolist()
        for address, length in zip(addresses, self.places[form].lengths, strict=True):
            ctypes.memmove(address, data[at : at + length], length)
            at += length

    def fill(self) -> None:
        """Random bytes in the first half of each pool, the same in both; zeros in the second."""
        for page in range(PAGES):
            data = self._random.bytes(self.form.payload_bytes) if page < HALF else bytes(self.form.payload_bytes)
            for form in range(len(self.forms)):
                self.write(page, data, form)


def stored_object(name: str, *buffers: ctypes.Array[ctypes.c_char]) -> StoredObject:
    """An object whose bytes lie in buffers, which the caller keeps."""
    stretches = [(ctypes.addressof(buffer), len(buffer)) for buffer in buffers]
    return StoredObject(name, np.array(stretches, dtype=np.uint64))


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32).reshape(-1, 1)


def new_keys(count: int, **identity: str) -> Keys:
    names = {"model": "tiny", "revision": secrets.token_hex(8), "fingerprint": "f"} | identity
    return page_keys(PrefixIdentity(tokens_per_page=1, **names), np.arange(count))
