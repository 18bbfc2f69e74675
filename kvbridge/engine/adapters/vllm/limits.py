"""Which settings of vLLM a transfer cannot serve, and what to do instead. Asked once, when vLLM starts.

Owns: these words. Must not know: vLLM's configuration classes (plain values come in).
"""

from __future__ import annotations

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import FrozenModel


class Settings(FrozenModel):
    """What of vLLM's settings decides whether its KV cache can be transferred."""

    kv_cache_groups: int = 1
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    speculative_method: str = ""
    block_sizes: tuple[int, ...] = ()
    """Of the KV cache groups, in tokens."""
    is_open: bool = False
    """Whether anything that it listens on can be reached from another host."""
    has_keys: bool = False
    insecure: bool = False
    """Whether whoever started it has said that no keys are wanted."""


def require_supported(settings: Settings) -> None:
    """Raise UnsupportedError with what is not supported and the way out."""
    reasons = {
        f"the model has {settings.kv_cache_groups} KV cache groups (window or state layers beside full attention): start vLLM with "
        "--disable-hybrid-kv-cache-manager, or serve it without prefill and decode apart": settings.kv_cache_groups > 1,
        "decode or prefill context parallelism spreads the tokens of a block over ranks: leave --decode-context-parallel-size and "
        "--prefill-context-parallel-size at 1": max(settings.decode_context_parallel, settings.prefill_context_parallel)
        > 1,
        f"speculative decoding ({settings.speculative_method}) keeps a second KV cache, which is written after the first token: "
        "leave --speculative-config out": bool(settings.speculative_method),
        f"the KV cache has blocks of several sizes ({', '.join(map(str, settings.block_sizes))} tokens): set one --block-size": len(
            set(settings.block_sizes)
        )
        > 1,
        "it can be reached from other hosts and has no keys, so that anybody there could read and write KV caches: give it keys "
        "(kv_connector_extra_config: control.curve), keep it on this host, or set insecure to true": settings.is_open
        and not settings.has_keys
        and not settings.insecure,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(f"kvbridge cannot transfer this KV cache: {reason}")
