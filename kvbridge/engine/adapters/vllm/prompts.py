"""What a room is of: one short digest of all that decides a prompt's KV cache, and how many tokens a room of whole blocks has.

Owns: the form of both. Must not know: vLLM's requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16
_DOMAIN = b"kvbridge.prompt.1"


def prompt_digest(
    tokens: Sequence[int] | npt.NDArray[np.int64], *, adapter: str = "", inputs: Sequence[str] = (), salt: str = ""
) -> bytes:
    """Return 16 bytes that two prompts share only if one may be answered from the KV cache of the other.

    `tokens`: ids of the whole prompt. `adapter`: the LoRA adapter; `inputs`: the hashes of multimodal inputs, in the prompt's
    order; `salt`: of the request's cache, as vLLM's `cache_salt`.
    """
    digest = hashlib.blake2b(_DOMAIN + len(inputs).to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    for part in (adapter.encode(), salt.encode(), *(text.encode() for text in inputs)):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(np.asarray(tokens, dtype="<i8").tobytes())
    return digest.digest()


def room_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Return the tokens of a room for a prompt: blocks are moved whole, since what is inside one is its engine's affair."""
    return -(-prompt_tokens // block_tokens) * block_tokens
