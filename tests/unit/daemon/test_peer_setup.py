"""How a node can be met, and what its engines cannot attach to yet."""

from __future__ import annotations

import pytest

from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import NotReadyError
from kvbridge.core.ids import Rank
from kvbridge.daemon.decode import decode_daemon
from kvbridge.daemon.links import control_modes
from kvbridge.daemon.prefill import prefill_daemon

ADOPTED = {"memory": "adopted", "host": {"pages": 8}}
V4 = {"preset": "tiny-v4"}


@pytest.mark.parametrize(
    ("keys", "insecure", "listening", "expected"),
    [
        (False, False, "tcp://127.0.0.1:7", "local"),
        (False, True, "tcp://10.0.0.1:7", "plain"),
        (True, False, "tcp://10.0.0.1:7", "curve"),
        (False, True, "", "local plain"),
        (True, True, "", "curve local plain"),
    ],
)
def test_how_a_node_can_be_met(keys, insecure, listening, expected):
    curve = {"curve": {"secret_key_file": "/nowhere"}} if keys else {}
    config = DecodeConfig(instance="i", model=V4, pools=ADOPTED, control=curve, insecure=insecure)
    address = PeerAddress(endpoint=listening, public_key="k" * 40 * keys) if listening else None
    assert " ".join(control_modes(config, address)) == expected


def test_an_engine_cannot_attach_to_memory_that_is_not_there_yet():
    """One with memory of its own waits for the host pool, too."""
    rank = (Rank(pp=0, tp=0),)
    owned = PrefillConfig(instance="i", model={"preset": "tiny-gqa"}, pools={"device": {"full": 8}})
    for node in (prefill_daemon(owned), decode_daemon(DecodeConfig(instance="i", model=V4, pools=ADOPTED))):
        with pytest.raises(NotReadyError, match="memory is being created"):
            node.parts.attached(1, rank)
    prefill = prefill_daemon(PrefillConfig(instance="i", model=V4, pools={"memory": "adopted"}))
    assert prefill.parts.attached(1, rank).host == ()
