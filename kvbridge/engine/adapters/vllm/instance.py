"""A vLLM instance as plain values: what of its configuration decides how its KV cache is transferred, and what cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kvbridge.core.errors import ConfigError, UnsupportedError
from kvbridge.core.ids import Role

ALLOWED_PREFILL = "allowed_prefill"
"""Key of `kv_connector_extra_config`: endpoints of prefill nodes that requests may name."""
ROLES = {
    "kv_producer": (Role.PREFILL,),
    "kv_consumer": (Role.DECODE,),
    "kv_both": (Role.PREFILL, Role.DECODE),
}


@dataclass(frozen=True)
class Instance:
    """What all processes of one vLLM instance know of it."""

    engine_id: str
    roles: tuple[Role, ...]
    tp_size: int
    pp_size: int
    block_tokens: int
    kv_heads: int
    """Of the whole model."""
    latent: bool
    facts: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config`, without what is for the connector itself."""
    allowed_prefill: frozenset[str] | None = None

    @property
    def ranks(self) -> int:
        """Worker processes."""
        return self.tp_size * self.pp_size


def read_instance(vllm_config: Any, kv_cache_config: Any, *, version: str) -> Instance:
    """Read a VllmConfig and a KVCacheConfig. Raises UnsupportedError, ConfigError for settings that cannot be served."""
    transfer, parallel, model = vllm_config.kv_transfer_config, vllm_config.parallel_config, vllm_config.model_config
    groups = kv_cache_config.kv_cache_groups
    _require_supported(parallel, vllm_config.speculative_config, len(groups))
    extra = dict(transfer.kv_connector_extra_config)
    return Instance(
        engine_id=transfer.engine_id,
        roles=ROLES[transfer.kv_role],
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        block_tokens=groups[0].kv_cache_spec.block_size,
        kv_heads=model.get_total_num_kv_heads(),
        latent=bool(model.use_mla),
        facts={
            "engine": "vllm",
            "engine_version": version,
            "model": str(model.model),
            "revision": str(model.revision or "none"),
            "quantization": str(model.quantization or "none"),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        },
        allowed_prefill=_allowed(extra.pop(ALLOWED_PREFILL, None)),
        extra=extra,
    )


def _require_supported(parallel: Any, speculative: Any, groups: int) -> None:
    """Refuse what a transfer cannot serve, with the way out."""
    if not groups:
        refuse("the model has none")
    if groups > 1:
        refuse(
            f"the model has {groups} KV cache groups (window or state layers beside full attention): start vLLM with "
            "--disable-hybrid-kv-cache-manager, or serve it without prefill and decode apart"
        )
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        refuse(
            "decode or prefill context parallelism spreads the tokens of a block over ranks: leave "
            "--decode-context-parallel-size and --prefill-context-parallel-size at 1"
        )
    if speculative is not None:
        refuse(
            f"speculative decoding ({speculative.method}) keeps a second KV cache, which is written after the first token: "
            "leave --speculative-config out"
        )


def refuse(reason: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(f"kvbridge cannot transfer this KV cache: {reason}")


def _allowed(said: Any) -> frozenset[str] | None:
    if said is None:
        return None
    if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
        raise ConfigError(
            f"kv_connector_extra_config.{ALLOWED_PREFILL}: expected a list of endpoints, as tcp://10.0.0.1:7801"
        )
    return frozenset(said)
