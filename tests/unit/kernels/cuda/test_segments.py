"""How stretches are cut for a kernel."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.kernels.cuda.staging import Segments


@given(st.lists(st.tuples(st.integers(4096, 1 << 47), st.integers(1, 100_000)), min_size=1, max_size=30))
def test_segments_begin_at_cache_lines_and_cover_every_byte(stretches):
    addresses = np.array([address for address, _ in stretches], dtype=np.uint64)
    lengths = np.array([length for _, length in stretches], dtype=np.int64)
    segments = Segments.of(addresses, lengths, 4096)
    ends = [*segments.first.tolist()[1:], segments.count]
    for (address, length), first, end in zip(stretches, segments.first.tolist(), ends, strict=True):
        begin = address // 128 * 128
        assert begin + (end - first) * 4096 >= address + length > begin + (end - first - 1) * 4096
