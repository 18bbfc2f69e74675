"""Fixtures of the tests of endpoints: fake peers, and the question that ends every test."""

from collections.abc import Iterator

import pytest

from kvbridge.core.wire.messages import Hello, NodeDescription, Welcome
from tests.helpers.live_rooms import LiveCluster, http
from tests.helpers.raw_peers import RawDecode, raw_prefill
from tests.integration.endpoints.rooms import offered_to


@pytest.fixture(scope="module")
def real(endpoints: LiveCluster) -> NodeDescription:
    """The decode node as it introduces itself."""
    with raw_prefill() as peer:
        room = offered_to(endpoints, peer)
        node = peer.take(Hello).node
        assert http("DELETE", endpoints.decode, f"/v1/requests/{room}").status_code == 200
    return node


@pytest.fixture(autouse=True)
def serves_afterwards(live: LiveCluster) -> Iterator[None]:
    """Every test ends with the same question: is everybody ready, is every page free, and does the next good room cross?"""
    yield
    live.serves()


@pytest.fixture
def raw(live: LiveCluster) -> Iterator[RawDecode]:
    """A fake decode node that has connected and said nothing."""
    with RawDecode(live.control) as peer:
        yield peer


@pytest.fixture
def met(raw: RawDecode, real: NodeDescription) -> RawDecode:
    """A fake decode node that was welcomed."""
    raw.send(raw.introduction(real))
    raw.recipient = raw.take(Welcome).incarnation
    return raw
