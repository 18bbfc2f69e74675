"""In whose name the holder of a key may speak."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import UnauthorizedError
from kvbridge.node.handshake.introduction import ClaimedName, check_name

OLD, NEW = "old key", "new key"
KNOWN = [ClaimedName("decode-0", "node-0", OLD)]
ANY, DECODE_0, DECODE_1 = frozenset(), frozenset({"decode-0"}), frozenset({"decode-1"})


@pytest.mark.parametrize(
    ("key", "bound_to", "node", "refused"),
    [
        (OLD, ANY, "node-0", ""),
        (OLD, DECODE_0, "node-0", ""),
        (NEW, ANY, "node-1", ""),
        (NEW, DECODE_0, "node-0", ""),
        (NEW, ANY, "node-0", "known here under another key"),
        (OLD, DECODE_1, "node-0", "speaks for instance decode-1, not for decode-0"),
        (NEW, DECODE_1, "node-1", "speaks for instance decode-1, not for decode-0"),
    ],
)
def test_a_name_belongs_to_its_key(key, bound_to, node, refused):
    claim = ClaimedName("decode-0", node, key)
    if not refused:
        check_name(claim, bound_to=bound_to, present=KNOWN)
        return
    with pytest.raises(UnauthorizedError, match=refused):
        check_name(claim, bound_to=bound_to, present=KNOWN)
