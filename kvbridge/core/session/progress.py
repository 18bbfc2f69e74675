"""The progress of one prefill rank with one room: which tokens are published, which may be sent next."""

from __future__ import annotations

from collections.abc import Iterable

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.plan.operations import Section


class RankProgress:
    """Tokens published and tokens handed to the worker, for each layer of a rank. Owned by its room."""

    def __init__(self, layers: Iterable[int], *, prompt_tokens: int, computed_tokens: int = 0) -> None:
        """The first `computed_tokens` tokens are held by the node, and published from the beginning."""
        self.layers = tuple(layers)
        self.prompt_tokens = prompt_tokens
        self._published = dict.fromkeys(self.layers, computed_tokens)
        self._ordered = dict.fromkeys(self.layers, 0)

    @property
    def published_tokens(self) -> int:
        """Tokens that every layer of the rank has published."""
        return min(self._published.values(), default=self.prompt_tokens)

    @property
    def complete(self) -> bool:
        """Whether the whole prompt is published on every layer."""
        return self.published_tokens == self.prompt_tokens

    def held(self, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return those of some layers that the rank holds; None stays all of them."""
        return None if layers is None else tuple(layer for layer in layers if layer in self._published)

    def publish(self, upto_token: int, layers: tuple[int, ...] | None = None) -> None:
        """Record that the first `upto_token` tokens are final in memory, for some layers or for all. `check` was called before."""
        for layer in self.layers if layers is None else layers:
            self._published[layer] = upto_token

    def check(self, upto_token: int, layers: tuple[int, ...] | None = None) -> None:
        """Raise InvalidInputError past the prompt or for a layer of another rank, ConflictError backwards."""
        chosen = self.layers if layers is None else layers
        unknown = [layer for layer in chosen if layer not in self._published]
        if unknown:
            raise InvalidInputError(
                f"publish names layers {unknown}, which this rank does not hold (it holds {self.layers})"
            )
        if upto_token > self.prompt_tokens:
            raise InvalidInputError(f"publish({upto_token}) is past the {self.prompt_tokens} tokens that were reserved")
        behind = [layer for layer in chosen if upto_token < self._published[layer]]
        if behind:
            raise ConflictError(
                f"publish({upto_token}) goes backwards: layer {behind[0]} has already published "
                f"{self._published[behind[0]]} tokens (those that `begin` has answered as computed among them)"
            )

    def next_sections(self, prefix_tokens: int) -> list[Section]:
        """Return the published tokens that were not returned before: one section for each group of equally far layers.

        Decode holds the first `prefix_tokens` tokens. A section within them has nothing to send, so it waits for the next tokens,
        or for the end of the prompt.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for layer in self.layers:
            start, stop = self._ordered[layer], self._published[layer]
            if stop > start and (stop > prefix_tokens or stop == self.prompt_tokens):
                groups.setdefault((start, stop), []).append(layer)
                self._ordered[layer] = stop
        return [
            Section(
                prompt_tokens=self.prompt_tokens,
                prefix_tokens=prefix_tokens,
                start_token=start,
                stop_token=stop,
                layers=None if len(group) == len(self.layers) else tuple(group),
            )
            for (start, stop), group in groups.items()
        ]
