"""One cluster serves a file of tests of the life of daemons; each test leaves it whole."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers.cluster import DaemonProcess
from tests.helpers.live_rooms import (
    LiveCluster,
    live_cluster,
)
from tests.integration.life.daemons import EXPIRE_S, TIMEOUTS, restarting_later


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    # Names that no other run on this machine has.
    mine = {"timeouts": TIMEOUTS}
    prefill, decode = (mine | {"instance": f"{role}-{os.getpid()}"} for role in ("prefill", "decode"))
    directory = {"directory": {"expire_after_s": EXPIRE_S}}
    with live_cluster(prefill=prefill, decode=decode, bootstrap=directory, change=restarting_later) as running:
        yield running
        running.no_traceback()


@pytest.fixture(autouse=True)
def _whole_again(live: LiveCluster) -> Iterator[None]:
    """Whatever a test has ended is started again."""
    yield
    live.detach()
    for each in live.cluster.all():
        if each.process is not None and each.process.poll() is not None:
            each.start()
    live.cluster.wait_ready()


@pytest.fixture(params=["prefill", "decode"])
def daemon(live: LiveCluster, request: pytest.FixtureRequest) -> DaemonProcess:
    return getattr(live, request.param)
