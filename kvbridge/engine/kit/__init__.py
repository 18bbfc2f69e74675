"""Parts of a connector for an engine that brings its memory, whatever the engine: its node, attachment, tensors and reports."""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """The engine, in the words of its users: for messages, and for the names of directories."""

    name: str
    slug: str
    settings: str
    """The user's settings for kvbridge."""
    id_option: str
    """Sets the id of an engine."""
    block_option: str
    """Sets the tokens of a block."""
    layout_option: str
    """Puts the heads outermost in a block."""
