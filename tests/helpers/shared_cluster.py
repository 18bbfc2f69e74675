"""The one cluster on which all tests of endpoints (HTTP, control, engines) are run, one after another, in any order.

Small pools, so that they can be filled, and times that are short enough to be waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.live_rooms import LiveCluster, live_cluster

FULL_PAGES, WINDOW_PAGES, REQUEST_PAGES, HOST_PAGES = 64, 24, 8, 12
EARLY_OFFER_S = 6.0
"""Rooms that are on decode alone end after this: long enough for what tests do with them on a busy machine."""
MEET_S = 5.0
DELIVERY_S = 8.0


@contextmanager
def shared_cluster() -> Iterator[LiveCluster]:
    """A running cluster; afterwards nothing may have escaped to a daemon's loop."""
    delivery = {"control_resend_s": 0.2, "control_delivery_s": DELIVERY_S}
    with live_cluster(
        prefill={"timeouts": {"early_offer_s": EARLY_OFFER_S, **delivery}},
        decode={"timeouts": {"handshake_s": MEET_S, **delivery}},
        pages={"full": FULL_PAGES, "swa": WINDOW_PAGES, "request": REQUEST_PAGES},
        host_pages=HOST_PAGES,
    ) as running:
        running.serves()  # the two nodes have met, whichever test is the first
        running.detach()
        yield running
        running.no_traceback()
