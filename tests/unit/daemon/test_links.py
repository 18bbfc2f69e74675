"""How many prefill addresses a decode node connects to."""

from __future__ import annotations

import pytest

from kvbridge.config.schema import DecodeConfig
from kvbridge.control.link import PeerSettings
from kvbridge.control.peers import PeerIdentity
from kvbridge.core.errors import CapacityError
from kvbridge.daemon import decode
from kvbridge.service.ports import PeerAddress


def address(number: int) -> PeerAddress:
    return PeerAddress(endpoint=f"tcp://127.0.0.1:{number}")


@pytest.mark.asyncio
async def test_links_are_bounded_and_one_that_is_given_up_makes_room(monkeypatch):
    monkeypatch.setattr(decode, "MOST_LINKS", 2)
    config = DecodeConfig.model_validate(
        {
            "instance": "d",
            "model": {"preset": "tiny-v4"},
            "pools": {"device": {"full": 4, "swa": 4, "request": 1}, "host": {"pages": 4}},
            "runtime_dir": "/tmp/kvbridge-test-links",  # short, as a path of sockets has to be; nothing is made there
        }
    )
    node = decode.DecodeNode(config)
    node.open_peers(PeerIdentity(node.incarnation), PeerSettings())
    try:
        for number in (1, 2):
            assert node._prefill.met(address(number)) is None
        with pytest.raises(CapacityError, match="2 links to prefill addresses"):
            node._prefill.met(address(3))
        node._lose(address(1), "silent")
        assert node._prefill.met(address(3)) is None
    finally:
        await node.close_peers(0.01)
