"""A random load for seconds, as `make test-load` runs it for half an hour; and the proof that the load finds wrong bytes."""

import pytest

from tests.faults.load_cluster import FORGED, Chaos
from tests.faults.random_load import random_load

SECONDS = 20.0

pytestmark = pytest.mark.timeout(400)  # what a strike has taken down comes back before the next one


@pytest.mark.parametrize("transport", ["local", "mooncake"])
def test_no_byte_is_wrong_and_every_page_comes_back(transport: str) -> None:
    seed = 20261124
    with random_load(transport, seed) as load:
        found = load.run(SECONDS, clients=4, rest_every_s=SECONDS, chaos=Chaos(load, seed))
    assert not found["violations"], found
    assert found["looks"], found


def test_the_load_finds_wrong_bytes() -> None:
    """The engine of prefill writes another prompt than the one whose keys it states: the next reader sees that."""
    with random_load("local", 1) as load:
        load.lies, load.lie_share = (FORGED,), 1.0
        found = load.run(60.0, clients=2, rest_every_s=60.0, chaos=None)
    assert any("wrong bytes" in violation for violation in found["violations"]), found
