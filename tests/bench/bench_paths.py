"""A path that is lost in the middle of a request, against the same request undisturbed, through both daemons.

Owns: the course and the figures. Run as `python -m tests.bench --only paths`.

Each pair of transports has daemons of its own. Requests are sent whole, from pages in one run; the time is from the first publish to
the claim. While one is on its way, and an eighth of its operations have been confirmed, every connection of the prefill rank worker by the first
transport is ended by the kernel; the room goes on over the second, and is not read before decode has shut the lost endpoint. All of
it is compared, byte for byte, in every request that a path was lost under. Undisturbed ones go by the first transport, before.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.helpers.cluster import cluster, eventually
from tests.helpers.cut_paths import CutSettings, cut_worker
from tests.helpers.live_rooms import status
from tests.helpers.mutated_daemon import mutated
from tests.helpers.rank_harness import Case
from tests.helpers.whole_rooms import check_rows

TOKENS = 131_072
MODEL = {"preset": "deepseek-v4-flash"}
PAIRS = (("mooncake", "nixl"), ("nixl", "mooncake"))
ADDRESSES = {"mooncake": "127.0.0.2", "nixl": "127.0.0.1"}
LOST = 5
UNDISTURBED = 7
AGAIN_S = 0.5
"""After so long a lost path is tried again here."""
WAIT_S = 120.0
BUDGET_S = 1.0
