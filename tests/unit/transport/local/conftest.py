from __future__ import annotations

import pytest

from kvbridge.transport.local import gpu as local_gpu
from kvbridge.transport.local import transport as local_transport
from kvbridge.transport.local.host import LockFiles


@pytest.fixture(autouse=True)
def _nothing_of_an_earlier_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """LockFiles, and transfers that a device never finished, live as long as their process: each test plays one of its own."""
    monkeypatch.setattr(local_transport, "PROCESS_LOCK_FILES", LockFiles())
    monkeypatch.setattr(local_gpu, "_abandoned", [])
