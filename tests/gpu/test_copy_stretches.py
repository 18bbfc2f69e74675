"""The kernel that copies by address against the reference: any length, any alignment, both directions, many at once."""

import numpy as np
import pytest

from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.copies import StretchCopier, copy_operations
from tests.helpers.gpu import DEVICE, HOST, SMALL, Bytes, random_bytes

pytestmark = pytest.mark.gpu

WAYS = [(DEVICE, HOST), (HOST, DEVICE), (DEVICE, DEVICE)]


def scattered(lengths: np.ndarray, seed: int, alignment: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Offsets on both sides in different orders, a few bytes apart, and the bytes that either side needs."""
    rng, sides = np.random.default_rng(seed), []
    for _ in range(2):
        order = rng.permutation(len(lengths))
        gaps = rng.integers(1, 5, len(lengths)) * alignment
        taken = -(-lengths[order] // alignment) * alignment + gaps
        offsets = np.empty(len(lengths), dtype=np.uint64)
        offsets[order] = np.cumsum(taken) - taken + alignment
        sides.append(offsets)
    return sides[0], sides[1], int((-(-lengths // alignment) + 5).sum()) * alignment + alignment


def operations(offsets: tuple[np.ndarray, np.ndarray], lengths: np.ndarray, bases: list[int]) -> Operations:
    source, destination = (offset + np.uint64(base) for offset, base in zip(offsets, bases, strict=True))
    return Operations(source, destination, lengths.astype(np.uint64))


def lengths_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    if kind == "every":
        return np.arange(1, 300 if SMALL else 1500)
    if kind == "pages":
        return np.array([37_440] * 40 + [1_728] * 100 + [8, 576] * 50)
    return np.concatenate([rng.integers(1, 9, 20), rng.integers(1, 100_000, 20), [1 << 20, 3_000_001, 65_536, 4_096]])


@pytest.mark.parametrize(("kind", "alignment"), [("every", 1), ("pages", 8), ("pages", 16), ("mixed", 4)])
@pytest.mark.parametrize("way", WAYS, ids="_to_".join)
def test_copies_what_the_reference_copies(device: int, stream: int, way: tuple[str, str], kind: str, alignment: int):
    lengths = lengths_of(kind)
    source_at, destination_at, size = scattered(lengths, alignment, alignment)
    source, target = random_bytes(size, 1), random_bytes(size, 2)
    with Bytes(way[0], source, device) as here, Bytes(way[1], target, device) as there, StretchCopier(device) as copier:
        submitted = operations((source_at, destination_at), lengths, [here.address, there.address])
        copier.submit(submitted, stream=stream)
        found = there.read()
    plain = operations((source_at, destination_at), lengths, [source.ctypes.data, target.ctypes.data])
    copy_operations(plain.source, plain.destination, plain.length)
    assert np.array_equal(found, target)


def test_many_submissions_at_once_keep_their_own_arrays(device: int, stream: int):
    """Nothing waits between submissions, the arrays are dropped at once, and staging is used again afterwards."""
    rounds, pages, page_bytes = (2, 20, 8_448) if SMALL else (3, 400, 37_440)
    source = random_bytes(pages * page_bytes, 1)
    with (
        Bytes(DEVICE, source, device) as here,
        Bytes(HOST, np.zeros_like(source), device) as there,
        StretchCopier(device) as copier,
    ):
        for turn in range(rounds):
            rng = np.random.default_rng(turn)
            moved = rng.permutation(pages)
            there.write(np.zeros_like(source))
            for part in np.array_split(np.arange(pages), 16):
                copier.submit(
                    Operations(
                        (here.address + part * page_bytes).astype(np.uint64),
                        (there.address + moved[part] * page_bytes).astype(np.uint64),
                        np.full(len(part), page_bytes, dtype=np.uint64),
                    ),
                    stream=stream,
                )
            found = there.read().reshape(pages, page_bytes)
            assert np.array_equal(found[moved], source.reshape(pages, page_bytes))
