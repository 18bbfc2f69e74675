from __future__ import annotations

import pytest

from kvbridge.transport.local import device_copier as local_device_copier
from kvbridge.transport.local import host as local_host


@pytest.fixture(autouse=True)
def _nothing_of_an_earlier_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates, and transfers that a device never finished, live as long as their process: each test plays one of its own."""
    monkeypatch.setattr(local_host, "_gates", {})
    monkeypatch.setattr(local_device_copier, "_abandoned", [])
