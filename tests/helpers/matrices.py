"""Large matrices of parameters: which part of one `make test` runs, while `make test-all` runs the whole."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, values: Iterable[Any], *, first: int = 0) -> list[Any]:
    """Parameters of which `make test` runs every `count`-th, from `first` on."""
    return [kept(value, number % count == first % count) for number, value in enumerate(values)]


def kept(value: Any, always: bool) -> Any:
    """A parameter (or a tuple of several) that `make test-all` runs, and `make test` only if `always`."""
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=() if always else pytest.mark.thorough)
