"""The rules of sharing prefixes: models, namespaces, the tokens that may name them, retention."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field

from kvbridge.core.errors import ConfigError, NamespaceError
from kvbridge.core.ids import FrozenModel

NAMESPACE_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"
Namespace = Annotated[str, Field(pattern=NAMESPACE_PATTERN)]
"""The name of a group of callers that share prefixes; empty: the default namespace."""

_NAMED = re.compile(NAMESPACE_PATTERN, re.ASCII)
_GRANT = re.compile(r"(?P<token>.*\S)\s+namespaces=(?P<names>\S*)")
_ANY, _DEFAULT = "*", "-"
"""Written for any namespace, and for the default one; neither can be a name."""


class ModelIdentity(FrozenModel):
    """A model by its operator's word. Equal geometry and encoding, which are compared apart, do not mean equal weights."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    revision: Annotated[str, Field(min_length=1, max_length=200)]
    """A revision, or a digest of the weights."""

    def __str__(self) -> str:
        return f"'{self.name}' revision '{self.revision}'"


def identity_conflict(prefill: ModelIdentity | None, decode: ModelIdentity | None) -> str:
    """Return why a decode node must not take pages of a prefill node, or an empty text.

    A decode node that states a model keeps pages under that name, so every writer has to state the same model. A decode node
    without a model keeps nothing.
    """
    if decode is None or prefill == decode:
        return ""
    said = f"holds {prefill}" if prefill else "does not say which model it holds"
    return (
        f"the decode side holds {decode}, the prefill side {said}: give both the same tier.model_name and "
        "tier.model_revision, prefill first"
    )


RETENTION_PRIORITIES = 3
"""The highest priority of a retention."""


class Retention(FrozenModel):
    """The priority of a request's cached pages, and its length after the last use.

    Pages of a higher priority are evicted after those of a lower one. The priority falls in equal steps, to 0 when `for_s` is over.
    No priority keeps a page from a request that needs room.
    """

    priority: Annotated[int, Field(ge=0, le=RETENTION_PRIORITIES)]
    """0: as of other requests."""
    for_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
    """Seconds without a use by a request of this retention; at most a day."""


class Evicted(StrEnum):
    """The reasons why cached pages have gone."""

    SPACE = "space"
    """Requests needed the memory."""
    RETENTION_ENDED = "retention_ended"
    """Requests needed the memory of pages whose retention had ended."""
    RETAINED = "retained"
    """Requests needed the memory of retained pages: no others were left, or none lay as well."""
    OPERATOR = "operator"
    """`DELETE /v1/prefixes` dropped all pages."""
    INTEGRITY = "integrity"
    """The contents of the pages had changed, engines named different tokens for them, or they follow such pages."""
    MEMORY_LOST = "memory_lost"
    """The rank worker that had made the memory is gone."""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The namespaces that a caller may name."""

    names: frozenset[str] | None = frozenset({""})
    """None: any."""

    def __contains__(self, namespace: str) -> bool:
        return self.names is None or namespace in self.names

    def __str__(self) -> str:
        if self.names is None:
            return "any namespace"
        return ", ".join(f"'{name}'" if name else "the default one" for name in sorted(self.names)) or "none"

    def require(self, namespace: str, *, keyed: bool) -> None:
        """Raise NamespaceError unless a request may name a namespace. `keyed`: it has page keys; without any it shares nothing."""
        if namespace in self or not (namespace or keyed):
            return
        named = f"namespace '{namespace}'" if namespace else "the default namespace (page_hashes without a namespace)"
        raise NamespaceError(f"the token of this request may not name {named}: it may name {self}")


ANY_NAMESPACE = Namespaces(None)


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """A token of the HTTP API, and the namespaces that its bearer may name."""

    token: str
    namespaces: Namespaces = Namespaces()

    @classmethod
    def parse(cls, line: str, *, key: str) -> Self:
        """Read `TOKEN`, which may name the default namespace only, or `TOKEN namespaces=A,B`, which may name these only.

        `*` stands for any namespace, `-` for the default one. Raises ConfigError, which names `key` and never the token.
        """
        found = _GRANT.fullmatch(line)
        if line.startswith("namespaces="):
            raise ConfigError(f"{key}: a line begins with namespaces=, expected the token in front of it")
        if found is None:
            return cls(line)
        names = frozenset(filter(None, found["names"].split(",")))
        if _ANY in names:
            return cls(found["token"], ANY_NAMESPACE)
        for name in names - {_DEFAULT}:
            if not _NAMED.fullmatch(name):
                raise ConfigError(
                    f"{key}: namespaces={found['names'][:200]}: '{name[:80]}' is no namespace; it has letters, digits, '.', '_' "
                    "and '-', at most 64 of them, and begins with a letter or digit ('*': any; '-': the default one)"
                )
        return cls(found["token"], Namespaces(frozenset("" if name == _DEFAULT else name for name in names)))

    def __repr__(self) -> str:
        return f"TokenGrant(namespaces={self.namespaces})"
