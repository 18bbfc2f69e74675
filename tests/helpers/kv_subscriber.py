"""A router that reads KV events: it knows what is cached where, and sees whether every event can be."""

from typing import Any

from kvbridge.tier.keys import Keys

PAGES, CHECKPOINTS = 0, 1


def hashes(keys: Keys) -> list[int]:
    """The hashes of names, as vLLM makes numbers of its own hashes."""
    return [int.from_bytes(key, "big") & (1 << 64) - 1 for key in keys.to_list()]


class Subscriber:
    def __init__(self) -> None:
        self.known: set[tuple[str, int, int]] = set()
        """Medium, group and hash."""

    def apply(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.known.clear()
                continue
            medium, group = event["medium"], event.get("group_idx", 0)
            those = {(medium, group, found) for found in event["block_hashes"]}
            assert len(those) == len(event["block_hashes"]) > 0
            if event["type"] == "BlockRemoved":
                assert those <= self.known
                self.known -= those
            else:
                assert not those & self.known
                parent = event["parent_block_hash"]
                assert parent is None or (medium, PAGES, parent) in self.known, "a page comes before its parent"
                self.known |= those
