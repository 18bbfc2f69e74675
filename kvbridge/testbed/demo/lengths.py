"""Which prompt lengths the demo uses.

Owns: the list, and why each length is in it. Must not know: models, processes.

What can go wrong in moving a cache goes wrong at an edge: an incomplete block of 4 or of 128 tokens, a last page of 256
tokens with one, two or three of them, a prompt shorter than the window or as long as it. Sparse decode is about prompts that
are much longer than the hot buffer; there the edges are the newest row and the last page.
"""

from __future__ import annotations

from kvbridge.core.errors import InvalidInputError

DEFAULT_PROMPTS = 24

_LENGTHS = (
    *(259, 3, 128, 1024, 257, 1, 127, 2047),
    *(4, 129, 258, 511, 2, 255, 513, 66),
    *(4099, 256, 384, 1027, 7, 130, 3073, 1538),
)
"""So ordered that the first few are spread over all kinds of edges already."""
_STEP, _SPREAD = 509, 4500
"""A prime and the range of what follows the list: every remainder comes up."""

DEFAULT_SPARSE_PROMPTS = 4
_SPARSE_LENGTHS = (2049, 4099, 3070, 2560)
"""Every remainder by 4, so that a row is complete at once or after up to three more tokens; last pages of 0, 1 and 3 tokens."""
_SPARSE_LEAST = 2000


def sparse_prompt_lengths(count: int = DEFAULT_SPARSE_PROMPTS, *, most_tokens: int = 1 << 20) -> tuple[int, ...]:
    """Return `count` lengths for sparse decode, in tokens; a larger count repeats nothing of a smaller one.

    Raises InvalidInputError for a count below 1, or when a model has no room for such prompts.
    """
    if count < 1 or most_tokens < max(_SPARSE_LENGTHS):
        raise InvalidInputError(
            f"need at least one prompt of up to {max(_SPARSE_LENGTHS)} tokens for sparse decode, got {count} of {most_tokens}"
        )
    more = range(1, count - len(_SPARSE_LENGTHS) + 1)
    beyond = (_SPARSE_LEAST + number * _STEP % (max(_SPARSE_LENGTHS) - _SPARSE_LEAST) for number in more)
    return (*_SPARSE_LENGTHS[:count], *beyond)


def prompt_lengths(count: int = DEFAULT_PROMPTS, *, most_tokens: int = 1 << 20) -> tuple[int, ...]:
    """Return `count` lengths in tokens, none above `most_tokens`; a larger count repeats nothing of a smaller one.

    Raises InvalidInputError for a count below 1, or when so few tokens leave nothing.
    """
    if count < 1 or most_tokens < 1:
        raise InvalidInputError(f"need at least one prompt of at least one token, got {count} of {most_tokens}")
    chosen = [length for length in _LENGTHS if length <= most_tokens][:count]
    more = 0
    while len(chosen) < count:
        more += 1
        chosen.append(1 + (2 + more * _STEP) % min(_SPREAD, most_tokens))
    return tuple(chosen)
