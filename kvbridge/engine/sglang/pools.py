"""SGLang's KV pools as components and regions: what each registered buffer holds, of which layer, at which address.

SGLang registers a list of addresses: first all keys, then all values. The heads of a token lie together in a page.
A key and a value of a layer have the same form, so they are the two layers `2 * layer` and `2 * layer + 1` of one component.

DeepSeek-V4's buffers are ordered by kind: `get_contiguous_buf_infos` lists the C4 rows, their indexer keys and the C128 rows,
`get_state_buf_infos` the windows, the C4 states and the indexer's states, `get_request_state_buf_infos` the C128 states. The
model's configuration describes the same components. The geometry comes from the configuration, and the sizes are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.models import geometry_from_config
from kvbridge.core.ids import MOST_PAGES, FrozenModel, IndexSpace, MemoryKind, NonNegative, Positive, Rank
from kvbridge.engine.kit.node import refuse
from kvbridge.engine.kit.tensors import InstanceCache

SHARDED = frozenset({ComponentKind.MHA_KV, ComponentKind.SWA_KV})
"""Kinds of which each rank has its heads, unless the model has one head; of the others every rank has the same bytes."""
C4_RATIO, C128_RATIO = 4, 128
Entry = tuple[int, int, int]
"""SGLang's address of a buffer, its bytes, and the bytes of a page."""


class Buffer(FrozenModel):
    """One registered buffer."""

    kind: ComponentKind
    layer: NonNegative
    address: NonNegative
    page_bytes: Positive
    page_count: Positive
    in_host: bool = False
    """In pinned host memory: the pool of HiSparse's coordinator, or that of a server that receives on the host."""


@dataclass(frozen=True)
class RankPools:
    """All buffers of one rank."""

    page_tokens: int
    buffers: tuple[Buffer, ...]
    device: str
    """`cpu`, or `cuda:N`."""
    window: int = 0
    """Tokens of a sliding window; 0 without one."""
    config: Mapping[str, Any] | None = None
    """The model's `config.json`, where the geometry comes from it: DeepSeek-V4."""

    def layers(self, kind: ComponentKind) -> tuple[int, ...]:
        """Return the layers of a kind that this rank has, ascending."""
        return tuple(sorted(buffer.layer for buffer in self.buffers if buffer.kind is kind))

    @property
    def kinds(self) -> tuple[ComponentKind, ...]:
        return tuple(dict.fromkeys(buffer.kind for buffer in self.buffers))

    def page_bytes(self, kind: ComponentKind) -> int:
        """Return the bytes of a page of one kind. Raises UnsupportedError when layers differ in it."""
        found = sorted({buffer.page_bytes for buffer in self.buffers if buffer.kind is kind})
        if len(found) != 1:
            refuse(f"layers of {kind} have pages of {found} bytes, and one component has pages of one size")
        return found[0]


def read_pools(args: Any, pool: Any, *, window: int, config: Mapping[str, Any], hisparse: bool = False) -> RankPools:
    """Read SGLang's KVArgs and the pool that they describe.

    `window`: tokens of the model's sliding window. `config`: the model's configuration. `hisparse`: the C4 rows are in the host
    pool of HiSparse's coordinator. Raises UnsupportedError for a pool that is not served yet.
    """
    device = str(pool.device)
    return RankPools(
        page_tokens=args.page_size,
        buffers=tuple(_buffers(args, pool, hisparse=hisparse)),
        device=f"cuda:{args.gpu_id}" if device.startswith("cuda") else "cpu",
        window=window if "swa" in _states(args) else 0,
        config=config if _is_v4(pool) else None,
    )


def require_nameable(pools: RankPools, context_tokens: int) -> None:
    """Raise UnsupportedError when a prompt may have more pages than a message names. `context_tokens`: of the longest prompt."""
    most_pages = min(-(-context_tokens // pools.page_tokens), max(buffer.page_count for buffer in pools.buffers))
    if most_pages > MOST_PAGES:
        refuse(
            f"a prompt of {context_tokens} tokens may have {most_pages} pages of {pools.page_tokens}, and one transfer has at most "
            f"{MOST_PAGES}: set --page-size to {-(-context_tokens // MOST_PAGES)} or more, or lower --context-length"
        )


def _is_v4(pool: Any) -> bool:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool  # noqa: PLC0415 - only under SGLang

    return isinstance(pool, DeepSeekV4TokenToKVPool)


def _states(args: Any) -> tuple[str, ...]:
    return tuple(state.value for state in args.state_types)


def _buffers(args: Any, pool: Any, *, hisparse: bool) -> Iterator[Buffer]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: PLC0415 - only under SGLang
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: PLC0415

    if getattr(args, "num_draft_entries", 0):
        refuse("speculative decoding keeps a second KV cache: leave --speculative-algorithm out")
    kv = list(zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True))
    states = _states(args)
    if getattr(args, "host_kv_data_ptrs", None) is not None:
        if states:
            refuse(
                "sliding windows are not received on the host: leave --disaggregation-decode-host-receive-threshold at 1"
            )
        host = zip(args.host_kv_data_ptrs, args.host_kv_data_lens, args.host_kv_item_lens, strict=True)
        yield from _by_layer(ComponentKind.MHA_KV, _own_layers(pool), list(host), in_host=True)
        return
    if _is_v4(pool):
        yield from _v4_buffers(args, pool, kv, hisparse=hisparse)
        return
    if hisparse:
        refuse(f"HiSparse over SGLang's pool {type(pool).__name__} is not served yet: leave --enable-hisparse out")
    match pool:
        case MHATokenToKVPool() if not states:
            yield from _by_layer(ComponentKind.MHA_KV, _own_layers(pool), kv)
        case MLATokenToKVPool() if not states:
            yield from _by_layer(ComponentKind.MLA_KV, _own_layers(pool), kv, parts=1)
        case SWAKVPool() if states == ("swa",) and isinstance(pool.full_kv_pool, MHATokenToKVPool):
            window = list(zip(args.state_data_ptrs[0], args.state_data_lens[0], args.state_item_lens[0], strict=True))
            full, windowed = (
                [layer for layer, (_, is_window) in pool.layers_mapping.items() if is_window is wanted]
                for wanted in (False, True)
            )
            yield from _by_layer(ComponentKind.MHA_KV, full, kv)
            yield from _by_layer(ComponentKind.SWA_KV, windowed, window)
        case _:
            with_states = f" with the states {', '.join(states)}" if states else ""
            refuse(f"SGLang's pool {type(pool).__name__}{with_states} is not served yet")


def _v4_buffers(args: Any, pool: Any, kv: Sequence[Entry], *, hisparse: bool) -> Iterator[Buffer]:
    stage, ratios = range(pool._stage_start, pool._stage_end), pool.compression_ratios
    require_paged_v4(pool)
    c4, c128 = ([layer for layer in stage if ratios[layer] == ratio] for ratio in (C4_RATIO, C128_RATIO))
    states = zip(args.state_types, args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    kinds: dict[str, tuple[tuple[ComponentKind, Sequence[int]], ...]] = {
        "": ((ComponentKind.C4_KV, c4), (ComponentKind.C4_INDEXER, c4), (ComponentKind.C128_KV, c128)),
        "swa": ((ComponentKind.SWA_KV, stage), (ComponentKind.C4_STATE, c4), (ComponentKind.C4_INDEXER_STATE, c4)),
        "c128_state": ((ComponentKind.C128_STATE, c128),),
    }
    for name, entries in [("", kv), *((state.value, list(zip(*told, strict=True))) for state, *told in states)]:
        if name == "swa" and name not in kinds:  # windows of NextN layers, in the pages of the model's own windows
            kinds[name] = ((ComponentKind.SWA_KV, range(len(ratios), len(ratios) + len(entries))),)
        if name not in kinds:
            refuse(f"DeepSeek-V4's pool has the state {name}, which is not served yet")
        expected = [(kind, layer) for kind, layers in kinds.pop(name) for layer in layers]
        if len(entries) != len(expected):
            refuse(f"DeepSeek-V4's pool registers {len(entries)} buffers of {name or 'KV'} for {len(expected)} layers")
        for (kind, layer), entry in zip(expected, entries, strict=True):
            yield _buffer(kind, layer, entry, in_host=hisparse and kind is ComponentKind.C4_KV)


def require_paged_v4(pool: Any) -> None:
    """Refuse the forms of DeepSeek-V4's pool whose bytes mean something else than the same page sizes would say."""
    unified = pool._unified_kv or getattr(pool, "uniform_fp8", False) or pool.swa_kv_pool is None
    by_slot = unified or getattr(pool, "swa_req_ring_size", None) is not None
    forms = {
        "has another layout than paged fp8 with the ratios 4 and 128": unified
        or {*pool.compression_ratios} - {0, C4_RATIO, C128_RATIO},
        "keeps windows by request and not in pages": by_slot,
        "has window pages in four parts: set SGLANG_OPT_SM120_DIRECT_SWA_KV=0": not by_slot
        and pool.swa_kv_pool.page_size != pool.swa_page_size,
        "sums C128 states up: set SGLANG_OPT_USE_ONLINE_COMPRESS=0": any(
            one is not None and getattr(one, "online", False) for one in pool.compress_state_pools
        ),
    }
    for form, is_so in forms.items():
        if is_so:
            refuse(f"DeepSeek-V4's pool {form}; that is not served yet")


def _own_layers(pool: Any) -> range:
    return range(pool.start_layer, pool.start_layer + pool.layer_num)


def _by_layer(
    kind: ComponentKind, layers: Sequence[int], entries: Sequence[Entry], *, parts: int = 2, in_host: bool = False
) -> Iterator[Buffer]:
    """Yield the first parts of all layers, then the second ones. `parts`: 2 for keys and values, 1 for latent vectors."""
    if len(entries) != parts * len(layers):
        refuse(f"{kind}: {len(entries)} buffers for {len(layers)} layers, where each has {parts}")
    for number, entry in enumerate(entries):
        part, at = divmod(number, len(layers))
        yield _buffer(kind, parts * layers[at] + part, entry, in_host=in_host)


def _buffer(kind: ComponentKind, layer: int, entry: Entry, *, in_host: bool = False) -> Buffer:
    address, total_bytes, page_bytes = entry
    place = {"address": address, "page_bytes": page_bytes, "page_count": total_bytes // page_bytes}
    return Buffer(kind=kind, layer=layer, in_host=in_host, **place)


# ---------------------------------------------------------------------------------------------- the instance


def instance_geometry(
    ranks: Mapping[Rank, RankPools], *, name: str, tp_size: int, facts: Mapping[str, str]
) -> InstanceCache:
    """Return the geometry of an instance from the pools of all its ranks.

    Raises UnsupportedError when the ranks of a stage are not alike, or when stages are not in the order of their layers.
    """
    first = ranks[Rank(pp=0, tp=0)]
    stages: dict[int, RankPools] = {}
    for rank, pools in sorted(ranks.items(), key=lambda item: (item[0].pp, item[0].tp)):
        known = stages.setdefault(rank.pp, pools)
        if [(one.kind, one.layer, one.page_bytes) for one in pools.buffers] != [
            (one.kind, one.layer, one.page_bytes) for one in known.buffers
        ]:
            refuse(f"rank {rank} has other buffers than the first rank of its pipeline stage")
    components = (
        tuple(_v4_components(list(stages.values())))
        if first.config is not None
        else tuple(
            _component(kind, tuple(layer for stage in stages.values() for layer in stage.layers(kind)), first, tp_size)
            for kind in first.kinds
        )
    )
    if first.config is None and SHARDED.intersection(first.kinds):
        # A rank's heads lie together in a page, so another split has other pages.
        facts = {**facts, "attention_heads": f"split over {tp_size} ranks (--tp-size)"}
    starts = [min(buffer.layer for buffer in stage.buffers) for stage in stages.values()]
    if starts != sorted(starts):
        raise UnsupportedError(f"the pipeline stages begin with the layers {starts}, which are not in order")
    return InstanceCache(
        ModelGeometry(
            name=name,
            layer_count=1 + max(layer for component in components for layer in component.layers),
            tokens_per_page=first.page_tokens,
            components=components,
            facts=dict(facts),
        ),
        stage_boundaries=tuple(starts[1:]),
        in_host=frozenset(buffer.kind for stage in stages.values() for buffer in stage.buffers if buffer.in_host),
    )


def _v4_components(stages: Sequence[RankPools]) -> Iterator[Component]:
    """Yield the components of DeepSeek-V4's production form. Raises UnsupportedError when SGLang's pages have other sizes."""
    first = stages[0]
    assert first.config is not None
    form = geometry_from_config(first.config, encoding=Encoding.FP8_V4, tokens_per_page=first.page_tokens)
    for component in form.components:
        kind, dim = component.kind, component.row_parts_bytes[0]
        theirs = next(stage.page_bytes(kind) for stage in stages if kind in stage.kinds)
        update: dict[str, Any] = {"layers": tuple(layer for stage in stages for layer in stage.layers(kind))}
        fp4 = (dim // 2, dim // 32)
        if kind in {ComponentKind.C4_STATE, ComponentKind.C4_INDEXER_STATE}:  # rings are longer with speculation
            update["slots_per_page"] = theirs // component.row_bytes
        elif kind is ComponentKind.C4_INDEXER and theirs == component.slots_per_page * sum(fp4):
            update |= {"row_parts_bytes": fp4, "encoding": Encoding.NATIVE}
        made = Component.model_validate({**component.model_dump(), **update})
        if made.page_bytes() != theirs:
            refuse(
                f"{kind}: SGLang's pages have {theirs} bytes, those of the model's published form {made.page_bytes()}"
            )
        yield made


def _component(kind: ComponentKind, layers: tuple[int, ...], pools: RankPools, tp_size: int) -> Component:
    row_bytes, rest = divmod(pools.page_bytes(kind), pools.page_tokens)
    if rest:
        refuse(f"{kind}: a page of {pools.page_bytes(kind)} bytes is not {pools.page_tokens} rows")
    grows = Component(
        kind=kind,
        layers=tuple(sorted(layers)),
        space=IndexSpace.FULL,
        encoding=Encoding.NATIVE,
        liveness=Liveness.GROWING,
        row_parts_bytes=(row_bytes,),
        slots_per_page=pools.page_tokens,
        rows_per_logical_page=pools.page_tokens,
        lanes=tp_size if kind in SHARDED else 1,
        host_capable=kind is ComponentKind.MHA_KV,
    )
    if kind is not ComponentKind.SWA_KV:
        return grows
    window = {"space": IndexSpace.SWA, "liveness": Liveness.WINDOW, "window": pools.window}
    return Component.model_validate({**grows.model_dump(), **window})


def rank_regions(geometry: ModelGeometry, pools: RankPools, rank: Rank) -> list[Region]:
    """Describe the buffers of one rank. A space has the pages that all of its buffers have: SGLang pads some more than others."""
    spaces = {one: IndexSpace.HOST if one.in_host else geometry.component(one.kind).space for one in pools.buffers}
    counts: dict[IndexSpace, int] = {}
    for buffer, space in spaces.items():
        counts[space] = min(counts.get(space, buffer.page_count), buffer.page_count)
    regions = []
    for buffer, space in spaces.items():
        in_vram = pools.device.startswith("cuda") and not buffer.in_host
        lane = rank.tp if geometry.component(buffer.kind).lanes > 1 else 0
        regions.append(
            Region(
                component=buffer.kind,
                layer=buffer.layer,
                space=space,
                memory=MemoryKind.VRAM if in_vram else MemoryKind.DRAM,
                device=int(pools.device.partition(":")[2] or 0) if in_vram else 0,
                extent_addresses=(buffer.address,),
                pages_per_extent=counts[space],
                page_count=counts[space],
                page_bytes=buffer.page_bytes,
                page_stride_bytes=buffer.page_bytes,
                lane_start=lane,
                lane_stop=lane + 1,
            )
        )
    return regions
