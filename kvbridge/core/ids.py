"""Identities as types: rooms, ranks, nodes, index spaces and their pages.

A page id has a meaning in one index space only. A `PageTable` carries its space, and `PageTable.require` takes the space of the
memory that a reader indexes with the ids.
"""

from __future__ import annotations

import ast
import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kvbridge.core.errors import InvalidInputError

ROOM_BITS = 53
MAX_ROOM = 2**ROOM_BITS - 1
"""The largest whole number that every reader of JSON keeps as it is: JavaScript and others count in doubles."""

RoomId = Annotated[int, Field(ge=0, le=MAX_ROOM)]
"""Names one request on both sides. The caller that admits the request chooses the number."""

Uint64 = Annotated[int, Field(ge=0, le=2**64 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**62)]
Positive = Annotated[int, Field(ge=1, le=2**62)]

PageIdArray = npt.NDArray[np.int32]
MOST_PAGES = 262_144
"""The most pages of one space that a message can name: those of a prompt of so many tokens where a page is one token."""


class Role(StrEnum):
    """The part of an instance in a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class IndexSpace(StrEnum):
    """The kinds of things that page ids count. Ids of two spaces are never interchangeable."""

    FULL = "full"
    """Pages that each cover `tokens_per_page` tokens of a request."""
    SWA = "swa"
    """Pages of the sliding-window pool. A request holds only those that its window touches."""
    REQUEST = "request"
    """Request slots; a request holds exactly one."""
    HOST = "host"
    """Pages of the node's host pool."""
    FULL_COPY = "full_twin"
    """Host copies of pages of `full`. They are a node's own, as those of `swa_twin`: peers never name them."""
    SWA_COPY = "swa_twin"
    """Host copies of pages of `swa` at the end of a prefix."""


class MemoryKind(StrEnum):
    """The kind of memory behind an address, as a network card sees it."""

    DRAM = "dram"
    VRAM = "vram"


class FrozenModel(BaseModel):
    """A pydantic model that is complete and valid once built, and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each field in a published schema by the docstring below it."""
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_docs(cls).items():
            if name in fields:
                fields[name].setdefault("description", text)
        return schema


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class and of its bases, each as one line. The first call reads the sources."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found |= _docs_of_module(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the fields of every class at the top of a module; empty when its source is not there."""
    found: dict[str, dict[str, str]] = {}
    with suppress(OSError):
        tree = ast.parse(inspect.getsource(sys.modules[name]) if name.startswith("kvbridge.") else "")
        for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for pair in pairwise(kind.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(field)), ast.Expr(ast.Constant(str(text))):
                        found.setdefault(kind.name, {})[field] = " ".join(text.split())
    return found


class Rank(FrozenModel):
    """A rank's place in its instance: pipeline stage and tensor-parallel index, both from 0."""

    pp: NonNegative
    tp: NonNegative

    def __str__(self) -> str:
        return f"pp{self.pp}.tp{self.tp}"


class NodeIdentity(NamedTuple):
    """One process of one node: its role, its instance, its name there, and the incarnation, drawn anew at each start."""

    role: Role
    instance: str
    node: str
    incarnation: str


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of one request in one index space, in the order of its tokens.

    `ids[i]` is the page that holds logical page `first_page + i`. Logical pages of `tokens_per_page` tokens count from the start of
    the request. `first_page` is 0 except in the window space, where leading pages have slid out. `ids` is int32, one-dimensional,
    and not written any more.
    """

    space: IndexSpace
    ids: PageIdArray
    first_page: int = 0

    def __post_init__(self) -> None:
        if self.ids.dtype != np.int32 or self.ids.ndim != 1:
            raise InvalidInputError(
                f"a page table holds a one-dimensional int32 array, got {self.ids.dtype} of shape {self.ids.shape}"
            )
        if self.first_page < 0:
            raise InvalidInputError(f"first_page must not be negative, got {self.first_page}")

    def require(self, space: IndexSpace) -> PageIdArray:
        """Return the ids for use in `space`. Raises InvalidInputError when the ids are of another space."""
        if space is not self.space:
            raise InvalidInputError(f"page ids of space '{self.space}' cannot index space '{space}'")
        return self.ids

    def __len__(self) -> int:
        return len(self.ids)


HOST_COPIES = {IndexSpace.FULL: IndexSpace.FULL_COPY, IndexSpace.SWA: IndexSpace.SWA_COPY}
"""The space of the host copies of each space that has host copies."""
REQUEST_SPACES = tuple(space for space in IndexSpace if space not in HOST_COPIES.values())
"""The spaces in which requests have pages, and which peers name."""

Pages = dict[IndexSpace, PageIdArray]
"""Page ids by index space, int32."""

PageMoves = dict[IndexSpace, tuple[PageIdArray, PageIdArray]]
"""Pages on the device and their host copies, by the space on the device: int32 arrays of equal length."""

Tables = dict[IndexSpace, PageTable]
"""All pages of one request on one node: at most one table for each space."""
