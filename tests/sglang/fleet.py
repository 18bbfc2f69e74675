"""SGLang's servers, and the pair of two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tests.engines import fleet
from tests.engines.prompts import fresh
from tests.engines.servers import Setup, wait_until
from tests.sglang.servers import Pair, Plan, Server

PLANS: tuple[Callable[[], Plan], ...] = (
    lambda: Plan("single"),
    lambda: Plan("prefill", "prefill", settings={"transports": {"order": ["mooncake", "nixl"]}}),
    lambda: Plan("mooncake", "decode", settings={"transports": {"order": ["mooncake"]}}),
    lambda: Plan("nixl", "decode", settings={"transports": {"order": ["nixl"]}}),
)


class Fleet(fleet.Fleet):
    """SGLang's servers."""

    start, of = Server, Pair

    def wait_hand_over(self, decode: str) -> None:
        """Wait until prefill and decode serve each other, after one of them was started again."""
        pair, asked = self.pair(decode), fresh(200)
        wait_until(lambda: not self.wrong(asked, pair.ask(asked)), f"{decode} gets what prefill computes", 90.0)


def own_fleet(setup: Setup, name: str, plans: Sequence[Plan]) -> Iterator[Fleet]:
    """Have servers of other plans run as long as the caller's fixture, beside those that the suite shares."""
    directory = setup.directory / name
    directory.mkdir(exist_ok=True)
    fleet = Fleet(Setup(setup.python, directory), plans)
    try:
        yield fleet
    finally:
        fleet.end()
