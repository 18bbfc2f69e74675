"""Clusters that serve one test after another, since they take seconds to build: a new one after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

from tests.faults.fault_cluster import FaultCluster

ClusterT = TypeVar("ClusterT", bound=FaultCluster)


class ClusterCache(Generic[ClusterT]):
    """One stage at a time, by the key that it was built with."""

    def __init__(self, build: Callable[[str], AbstractContextManager[ClusterT]]) -> None:
        self._build = build
        self._key = ""
        self._stage: ClusterT | None = None
        self._context: AbstractContextManager[ClusterT] | None = None

    @contextmanager
    def on(self, key: str) -> Iterator[ClusterT]:
        """The stage for one test; whoever fails on it is the last."""
        if self._stage is None or key != self._key:
            self.clear()
            self._context = self._build(key)
            self._key, self._stage = key, self._context.__enter__()
        try:
            yield self._stage
        except BaseException:
            print(self._stage.describe())
            self.clear()
            raise

    def clear(self) -> None:
        """Take the stage down, if one stands."""
        context, self._context, self._stage = self._context, None, None
        if context is not None:
            context.__exit__(None, None, None)
