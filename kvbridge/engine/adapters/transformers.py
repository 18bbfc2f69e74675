"""Hugging Face's own DeepSeek-V4, small and with random weights, as an engine that runs on a CPU or a GPU.

The same numbers come out of two processes when these are the same in both: config, seed, dtype, device, thread count,
the library versions, and the chunks that the prompt was cut into (a matrix product of other shape rounds differently).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from kvbridge.core.errors import InvalidInputError

BYTE_VOCABULARY = 256
"""Prompts are tokenised by bytes: a token is a byte of UTF-8."""
DEFAULT_INITIALIZER_RANGE = 0.08
"""Wide enough for generated text to vary; with the library's 0.02 a random model repeats one token."""

_FORWARD = inspect.signature(DeepseekV4ForCausalLM.forward)
CACHE_ARGUMENT = "cache" if "cache" in _FORWARD.parameters else "past_key_values"
"""The name of the cache among the arguments of a model and of its layers; transformers 5.24 has renamed it."""

OnChunk = Callable[[DynamicCache, int], None]
"""Called with the cache and the tokens computed so far, after each chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """A computed prompt: its cache, and the fp32 logits [vocabulary] of its last position."""

    cache: DynamicCache
    logits: torch.Tensor

    @property
    def first_token(self) -> int:
        """The token that greedy decoding begins with."""
        return int(self.logits.argmax())


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """What greedy decoding gave: the tokens that it fed and, for each, the fp32 logits [steps, vocabulary] after it."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


def load_model(
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    threads: int | None = 1,
    device: torch.device | None = None,
) -> Any:  # noqa: ANN401 - transformers is untyped
    """Return a DeepseekV4ForCausalLM with random weights that depend on `config`, `seed` and `dtype` only.

    They are made on the CPU, wherever the model then lives: `device`, by default the CPU. It is in evaluation mode,
    without gradients, with eager attention and experts. `threads` sets torch's thread count for this whole process (None
    leaves it): the logits depend on it.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    facts = {"initializer_range": DEFAULT_INITIALIZER_RANGE, **config}
    facts.pop("model_type", None)
    model_config = DeepseekV4Config(**facts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = AutoModelForCausalLM.from_config
        model = build(model_config, attn_implementation="eager", experts_implementation="eager", dtype=dtype)
        _fill_what_checkpoints_bring(model, experts=model_config.n_routed_experts)
    return model.to(device or "cpu").eval().requires_grad_(requires_grad=False)


def weights_digest(model: torch.nn.Module) -> str:
    """Return 32 hexadecimal digits over all weights: two processes compare them before they compare logits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def prefill_chunks(
    model: Any,  # noqa: ANN401 - transformers is untyped
    token_ids: Sequence[int],
    *,
    chunk_tokens: int,
    on_chunk: OnChunk | None = None,
    cache: DynamicCache | None = None,
    cuts: Collection[int] = (),
) -> Prefill:
    """Compute a prompt, cut at every multiple of `chunk_tokens` and at `cuts`, counted from its first token.

    `cache` holds how much of it has been computed already, and is gone on with. Since the cuts do not depend on where that ends,
    the result is that of computing everything, bit by bit, if it ends at one of them. Raises InvalidInputError when nothing is left
    to compute: the logits of the last token are in no cache.
    """
    held = DynamicCache(config=model.config) if cache is None else cache
    start, stop = held.get_seq_length(), len(token_ids)
    if not start < stop or chunk_tokens < 1:
        raise InvalidInputError(
            f"need a prompt longer than the {start} tokens that are computed and chunk_tokens >= 1, got {stop} tokens and "
            f"{chunk_tokens}"
        )
    logits = torch.empty(0)
    for end in sorted({*range(0, stop, chunk_tokens), *cuts, stop}):
        if start < end <= stop:
            logits = _forward(model, held, token_ids[start:end])
            start = end
            if on_chunk is not None:
                on_chunk(held, end)
    return Prefill(cache=held, logits=logits)


def decode_step(model: Any, cache: DynamicCache, *, token: int) -> torch.Tensor:  # noqa: ANN401
    """Feed one token; return the fp32 logits [vocabulary] of the next. The cache grows by one token."""
    return _forward(model, cache, [token])


def generate(model: Any, cache: DynamicCache, *, first_token: int, steps: int) -> Generated:  # noqa: ANN401
    """Decode greedily: feed `first_token` and then, `steps - 1` times, the most likely token."""
    token = first_token
    tokens, logits = [], []
    for _ in range(steps):
        tokens.append(token)
        logits.append(decode_step(model, cache, token=token))
        token = int(logits[-1].argmax())
    return Generated(tokens=tuple(tokens), logits=torch.stack(logits))


@torch.no_grad()
def _forward(model: Any, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:  # noqa: ANN401
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    output = model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


@torch.no_grad()
def _fill_what_checkpoints_bring(model: torch.nn.Module, *, experts: int) -> None:
    """Give numbers to what the library initialises with zeros, so that a mistake in moving it would show."""
    for name, parameter in model.named_parameters():
        if name.endswith((".position_bias", ".sinks")):
            parameter.normal_(std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(".tid2eid"):
            vocabulary, chosen = buffer.shape
            # Distinct experts for each token, spread over all of them.
            buffer.copy_((torch.arange(vocabulary)[:, None] * 5 + torch.arange(chosen)) % experts)
