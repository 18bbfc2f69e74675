"""Hugging Face's own DeepSeek-V4, small and with random weights, as an engine that runs on a CPU or a GPU.

Two processes compute the same bits when both have the same config, seed, dtype, device, thread count and library versions, and
cut the prompt into the same chunks (a matrix product of another shape rounds differently).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from kvbridge.core.errors import InvalidInputError

INITIALIZER_RANGE = 0.08
"""Wide enough for generated text to vary; with the library's 0.02 a random model repeats one token."""
CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(DeepseekV4ForCausalLM.forward).parameters else "past_key_values"
)
"""The name of the cache among the arguments of a model and of its layers; transformers 5.24 has renamed it."""

Model = Any
"""A DeepseekV4ForCausalLM: transformers is untyped."""


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
    """The tokens that greedy decoding fed, and the fp32 logits [steps, vocabulary] after each of them."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


def load_model(
    config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Model:
    """Return a model whose random weights depend on `config`, `seed` and `dtype` only, made on the CPU.

    The model lives on `device` (by default the CPU), without gradients, with eager attention and experts. The whole process then
    computes on one thread, since the logits depend on the thread count.
    """
    torch.set_num_threads(1)
    facts = {"initializer_range": INITIALIZER_RANGE, **config}
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
    model: Model,
    token_ids: Sequence[int],
    *,
    chunk_tokens: int,
    on_chunk: Callable[[DynamicCache, int], None] = lambda _cache, _tokens: None,
    cache: DynamicCache | None = None,
) -> Prefill:
    """Compute a prompt in chunks that end at multiples of `chunk_tokens`, and call `on_chunk` with the tokens computed so far.

    `cache` may hold a prefix; computation continues from its end. If the prefix ends at a multiple of `chunk_tokens`, the result
    has the bits of a computation from the start. Raises InvalidInputError when no token is left to compute: the logits of the
    last token are in no cache.
    """
    held = DynamicCache(config=model.config) if cache is None else cache
    start, stop = held.get_seq_length(), len(token_ids)
    if not start < stop or chunk_tokens < 1:
        raise InvalidInputError(
            f"need a prompt longer than the {start} tokens that are computed and chunk_tokens >= 1, got {stop} tokens and "
            f"{chunk_tokens}"
        )
    logits = torch.empty(0)
    while start < stop:
        end = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
        logits = _forward(model, held, token_ids[start:end])
        on_chunk(held, end)
        start = end
    return Prefill(held, logits)


def decode_step(model: Model, cache: DynamicCache, *, token: int) -> torch.Tensor:
    """Feed one token; return the fp32 logits [vocabulary] of the next. The cache grows by one token."""
    return _forward(model, cache, [token])


def generate(model: Model, cache: DynamicCache, *, first_token: int, steps: int) -> Generated:
    """Decode greedily: feed `first_token` and then, `steps - 1` times, the most likely token."""
    tokens, logits = [first_token], [decode_step(model, cache, token=first_token)]
    while len(tokens) < steps:
        tokens.append(int(logits[-1].argmax()))
        logits.append(decode_step(model, cache, token=tokens[-1]))
    return Generated(tuple(tokens), torch.stack(logits))


@torch.no_grad()
def _forward(model: Model, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    output = model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


@torch.no_grad()
def _fill_what_checkpoints_bring(model: torch.nn.Module, *, experts: int) -> None:
    """Give numbers to what the library initialises with zeros, so that a mistake in moving them would show."""
    for name, parameter in model.named_parameters():
        if name.endswith((".position_bias", ".sinks")):
            parameter.normal_(std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(".tid2eid"):
            vocabulary, chosen = buffer.shape
            # Distinct experts for each token, spread over all of them.
            buffer.copy_((torch.arange(vocabulary)[:, None] * 5 + torch.arange(chosen)) % experts)
