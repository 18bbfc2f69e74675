"""A vLLM instance and its requests as plain values: its configuration, and the form of `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import pydantic

from kvbridge.core.errors import ConfigError, InvalidInputError
from kvbridge.core.ids import ROOM_BITS, FrozenModel, NonNegative, Role, RoomId
from kvbridge.core.wire.engine_messages import PrefillNodes
from kvbridge.engine.kit.node import NodePlace, refuse
from kvbridge.engine.vllm import VLLM
from kvbridge.engine.vllm.groups import CacheGroups, read_groups

ALLOWED_PREFILL = "allowed_prefill"
"""Key of `kv_connector_extra_config`: endpoints of prefill nodes that requests may name."""
ROLES = {
    "kv_producer": (Role.PREFILL,),
    "kv_consumer": (Role.DECODE,),
    "kv_both": (Role.PREFILL, Role.DECODE),
}
PARAMS_KEY = "kvbridge"
"""Our section of `kv_transfer_params`. Other keys are vLLM's and its gateways'."""
DRAFTS_WITHOUT_CACHE = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods of speculative decoding that look drafts up in tokens."""
ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


@dataclass(frozen=True)
class Instance:
    """The configuration that all processes of a vLLM instance share, as far as it decides about transfers."""

    engine_id: str
    roles: tuple[Role, ...]
    tp_size: int
    pp_size: int
    groups: CacheGroups
    kv_heads: int
    """KV heads of the whole model."""
    latent: bool
    facts: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config`, without the connector's own keys."""
    allowed_prefill: frozenset[str] | None = None

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size

    def place(self, role: Role) -> NodePlace:
        """Return the place of the node of one role."""
        return NodePlace(VLLM, role, self.engine_id, self.extra)


def read_instance(vllm_config: Any, kv_cache_config: Any, *, version: str) -> Instance:
    """Read a VllmConfig and a KVCacheConfig. Raises UnsupportedError and ConfigError for settings that cannot be served."""
    transfer, parallel, model = vllm_config.kv_transfer_config, vllm_config.parallel_config, vllm_config.model_config
    groups = read_groups(kv_cache_config)
    _require_supported(parallel, vllm_config.speculative_config, groups)
    extra = dict(transfer.kv_connector_extra_config)
    return Instance(
        engine_id=transfer.engine_id,
        roles=ROLES[transfer.kv_role],
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        groups=groups,
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
            **groups.facts,
        },
        allowed_prefill=_allowed(extra.pop(ALLOWED_PREFILL, None)),
        extra=extra,
    )


def _require_supported(parallel: Any, speculative: Any, groups: CacheGroups) -> None:
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        refuse(
            "decode or prefill context parallelism spreads the tokens of a block over ranks: leave "
            "--decode-context-parallel-size and --prefill-context-parallel-size at 1"
        )
    if speculative is None:
        return
    if speculative.method not in DRAFTS_WITHOUT_CACHE:
        refuse(
            f"speculative decoding ({speculative.method}) keeps a second KV cache, which is written after the first token: "
            f"leave --speculative-config out, or use a method without one ({', '.join(sorted(DRAFTS_WITHOUT_CACHE))})"
        )
    if groups.has_states:
        refuse(
            f"speculative decoding ({speculative.method}) moves states of the model between blocks while drafts are checked: "
            "leave --speculative-config out"
        )


def _allowed(said: Any) -> frozenset[str] | None:
    if said is None:
        return None
    if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
        raise ConfigError(
            f"kv_connector_extra_config.{ALLOWED_PREFILL}: expected a list of endpoints, as tcp://10.0.0.1:7801"
        )
    return frozenset(said)


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that decide about its transfer."""

    id: str
    tokens: int
    """Tokens of the prompt whose KV cache is moved (`CacheGroups.tokens`)."""
    prompt_digest: bytes
    params: Mapping[str, Any] | None = None
    """`kv_transfer_params`, as the client or a gateway sent them."""

    def __post_init__(self) -> None:
        """Raises InvalidInputError for params of another kind: vLLM passes on whatever a client has sent."""
        if self.params is not None and not isinstance(self.params, Mapping):
            raise InvalidInputError(
                f"kv_transfer_params of request {self.id} are of type {type(self.params).__name__}, not an object: pass on what "
                "the prefill server answered as it is"
            )

    @property
    def is_for_another(self) -> bool:
        """Whether another engine will decode the request, so that its blocks are held."""
        return bool(self.params and self.params.get("do_remote_decode"))


class Source(FrozenModel):
    """The place of a prompt's KV cache."""

    room: RoomId
    prefill: PrefillNodes
    held: bool = False
    """Whether prefill has said that it holds the room, as it does in plain order: decode need not wait for the room then."""
    prompt_tokens: NonNegative = 0
    prompt_digest: Annotated[str, pydantic.Field(pattern="^([0-9a-f]{2}){0,32}$")] = ""
    """Tokens of the room, and the digest of its prompt in hexadecimal, in plain order. Decode needs both to say that nobody fetches
    the room; a request that fetches it states its own."""


class Pairing(pydantic.BaseModel):
    """The params of a request that decode has at the same time, as far as prefill reads them. Other keys are for others."""

    room: RoomId | None = None


def room_of(request: Request) -> int | None:
    """Return the room of a request that decode has at the same time; None in plain order.

    Raises InvalidInputError when the params cannot be read.
    """
    if not request.is_for_another or not request.params or request.params.get(PARAMS_KEY) is None:
        return None
    way_out = f"draw {ROOM_BITS} random bits for each request and send them to both as a decimal string"
    return _read(Pairing, request, "decode has it too", way_out).room


def source_of(request: Request) -> Source | None:
    """Return the source of the request's KV cache, if it names one. Raises InvalidInputError when the params cannot be read."""
    if not request.params or not request.params.get("do_remote_prefill"):
        return None
    return _read(Source, request, "its prefill is done elsewhere", "pass on what the prefill server answered as it is")


def _read(kind: type[ModelT], request: Request, what: str, way_out: str) -> ModelT:
    try:
        return kind.model_validate((request.params or {}).get(PARAMS_KEY))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (PARAMS_KEY, *first["loc"])))
        raise InvalidInputError(
            f"kv_transfer_params of request {request.id} say that {what}, and {place} is wrong: {first['msg']}; {way_out}"
        ) from error


def params_of(source: Source) -> dict[str, Any]:
    """Return the `kv_transfer_params` of prefill's answer, which decode must get unchanged.

    The room is a string, because gateways read numbers as doubles.
    """
    ours = source.model_dump(mode="json") | {"room": str(source.room)}
    return {"do_remote_prefill": True, "do_remote_decode": False, PARAMS_KEY: ours}
