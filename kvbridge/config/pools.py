"""Settings of the model, its ranks and the memory that holds its cache."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import ByteSize, Field, model_validator

from kvbridge.core.geometry.components import ComponentKind, Encoding
from kvbridge.core.geometry.models import PRESETS
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank

Device = Annotated[str, Field(pattern=r"^(cpu|cuda:\d{1,2})$")]


class ModelConfig(FrozenModel):
    """The model whose cache is moved; exactly one of `preset`, `hf_config` and `geometry`."""

    preset: str = ""
    """Name of a built-in geometry, as `deepseek-v4-flash`."""
    hf_config: Path | None = None
    """Path of a Hugging Face `config.json`."""
    geometry: Path | None = None
    """Path of a geometry as JSON, which an engine that brings its own tensors writes."""
    encoding: Encoding | None = None
    """Encoding of the numbers in rows; only with `hf_config`; null: the file's."""
    tokens_per_page: Positive | None = None
    """Tokens that a page covers; only with `hf_config`; null: the usual number of the family."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = [name for name in ("preset", "hf_config", "geometry") if getattr(self, name)]
        if len(named) != 1:
            raise ValueError("set exactly one of preset, hf_config and geometry")
        if self.preset and self.preset not in PRESETS:
            raise ValueError(f"preset '{self.preset}' does not exist; there are {', '.join(PRESETS)}")
        if self.hf_config is None and (self.encoding is not None or self.tokens_per_page is not None):
            raise ValueError(f"a {named[0]} has its own encoding and tokens_per_page: leave both null")
        return self


class RankPlacement(FrozenModel):
    """One rank of the instance that lives on this node, and its device."""

    pp: NonNegative
    """Pipeline stage, from 0."""
    tp: NonNegative
    """Tensor-parallel index, from 0."""
    device: Device = "cpu"
    """Device of its memory: `cpu`, or `cuda:N`."""

    @property
    def rank(self) -> Rank:
        """The rank's place in the instance."""
        return Rank(pp=self.pp, tp=self.tp)

    @property
    def cuda_ordinal(self) -> int | None:
        """Number of the GPU, None for the CPU."""
        return None if self.device == "cpu" else int(self.device.removeprefix("cuda:"))


class DeviceKind(StrEnum):
    """Device of ranks without an explicit placement."""

    CPU = "cpu"
    CUDA = "cuda"


class ParallelismConfig(FrozenModel):
    """How the model is split over ranks, and which ranks live here."""

    pp_size: Annotated[int, Field(ge=1, le=256)] = 1
    """Pipeline stages of the instance."""
    tp_size: Annotated[int, Field(ge=1, le=256)] = 1
    """Tensor-parallel ranks of each stage."""
    stage_boundaries: tuple[Positive, ...] = ()
    """First layer of each pipeline stage but the first; empty: layers split evenly, earlier stages take the rest."""
    device: DeviceKind = DeviceKind.CPU
    """`cpu` or `cuda`, for an empty `ranks`: `cuda` gives rank number i of the node the device cuda:i."""
    ranks: tuple[RankPlacement, ...] = ()
    """Ranks on this node, each as {pp: 0, tp: 0, device: cpu} or cuda:N; empty: every rank of the instance."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stage_boundaries:
            if len(self.stage_boundaries) != self.pp_size - 1:
                raise ValueError(
                    f"stage_boundaries needs {self.pp_size - 1} entries (pp_size - 1), got {len(self.stage_boundaries)}"
                )
            if list(self.stage_boundaries) != sorted(set(self.stage_boundaries)):
                raise ValueError(f"stage_boundaries must ascend, got {list(self.stage_boundaries)}")
        names = [(placement.pp, placement.tp) for placement in self.ranks]
        for pp, tp in names:
            if pp >= self.pp_size or tp >= self.tp_size:
                raise ValueError(f"ranks: pp{pp}.tp{tp} does not exist in {self.pp_size} stages x {self.tp_size}")
            if names.count((pp, tp)) > 1:
                raise ValueError(f"ranks: pp{pp}.tp{tp} is listed twice")
        return self

    def placements(self) -> tuple[RankPlacement, ...]:
        """Return the ranks on this node with their devices, the empty default filled in, ordered by (pp, tp)."""
        if self.ranks:
            return tuple(sorted(self.ranks, key=lambda placement: (placement.pp, placement.tp)))
        places = [(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]
        return tuple(
            RankPlacement(pp=pp, tp=tp, device="cpu" if self.device is DeviceKind.CPU else f"cuda:{number}")
            for number, (pp, tp) in enumerate(places)
        )


class MemoryOwner(StrEnum):
    """Owner of the device pools."""

    OWNED = "owned"
    ADOPTED = "adopted"


class DevicePages(FrozenModel):
    """Pages of one rank's device pools, for each index space. All 0 when the memory is adopted."""

    full: NonNegative = 0
    """Pages of `tokens_per_page` tokens."""
    swa: NonNegative = 0
    """Pages of the window pool; 0 for a model without windows."""
    request: NonNegative = 0
    """Request slots: requests that can hold per-request state at once."""


class HostLayout(StrEnum):
    """How the pages of a pool in host memory follow one another."""

    LAYER_FIRST = "layer_first"
    """All pages of one layer of one component, then all of the next."""
    PAGE_FIRST = "page_first"
    """A page of all layers and components is one stretch of memory."""

    @classmethod
    def _missing_(cls, value: object) -> HostLayout | None:
        return cls.PAGE_FIRST if value == "page_first_direct" else None


class DeviceLayout(StrEnum):
    """How the pages of a device pool follow one another; as in `HostLayout`."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"


class HostPool(FrozenModel):
    """The node's host pool, in shared memory, or an engine's own host memory."""

    memory: MemoryOwner = MemoryOwner.OWNED
    """`owned`: the daemon allocates it; `adopted`: each rank's engine brings its own, and names page ids of the space `host`."""
    components: tuple[ComponentKind, ...] = (ComponentKind.C4_KV,)
    """Components that live in host memory on this node; empty: no host pool."""
    pages: NonNegative = 0
    """Size in pages; or give `size_bytes`."""
    size_bytes: ByteSize = ByteSize(0)
    """Size in bytes ("64GiB" is understood), rounded down to whole pages; or give `pages`."""
    layout: HostLayout = HostLayout.PAGE_FIRST
    """`layer_first`, or `page_first` (`page_first_direct` is the same here). Prefill nodes with the same layout of the component
    (`device_layout`) send its pages in few long operations."""
    directory: Path = Path("/dev/shm")  # noqa: S108 - the shared-memory file system, not a place for scratch files
    """Directory of the shared files: a tmpfs or hugetlbfs; another file system is refused."""
    extent_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = ByteSize(1 << 30)
    """Longest stretch that is registered with a network card at once."""
    mapping_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = ByteSize(64 << 30)
    """Longest shared file; a larger pool has several."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.components)) != len(self.components):
            raise ValueError("components lists one kind twice")
        if self.pages and self.size_bytes:
            raise ValueError("pages and size_bytes are both set: keep one")
        if self.memory is MemoryOwner.ADOPTED and (self.pages or self.size_bytes):
            raise ValueError("memory is adopted, so the engine's own pool decides: leave pages and size_bytes at 0")
        if self.memory is MemoryOwner.OWNED and self.components and not self.pages and not self.size_bytes:
            raise ValueError(
                f"{', '.join(self.components)} would live in a host pool without pages: "
                "set pages or size_bytes, or empty components"
            )
        if self.extent_bytes > self.mapping_bytes:
            raise ValueError("extent_bytes must not exceed mapping_bytes: an extent lies in one file")
        return self


class PrefillPools(FrozenModel):
    """Memory of a prefill node."""

    memory: MemoryOwner = MemoryOwner.OWNED
    """`owned`: the daemon allocates, engines attach; `adopted`: the engine brings its own tensors and page ids."""
    device: DevicePages = DevicePages()
    device_layout: DeviceLayout = DeviceLayout.PAGE_FIRST
    """Layout of owned memory. `page_first`: a page of all layers is one stretch of memory, and prefill sends it as one
    operation to a decode node with the same layout; engines see tensors with strides between pages. `layer_first`: for engines
    whose kernels want all pages of a layer side by side; then on both sides."""
    keep_s: Annotated[float, Field(ge=0, le=7 * 86_400, allow_inf_nan=False)] = 0.0
    """Seconds for which the pools in host memory outlive this daemon with their prefixes (`tier.host`), and keep their memory.
    A daemon of the same instance and node that starts in time takes them over, and is warm. Later, `kvbridge clean` and every
    daemon that starts remove them. 0: they end with the daemon."""

    @model_validator(mode="before")
    @classmethod
    def _leave_adopted(cls, given: object) -> object:
        # An engine's own tensors have its layout: without a setting, no layout is asked for.
        if isinstance(given, Mapping) and given.get("memory") == MemoryOwner.ADOPTED:
            return {"device_layout": DeviceLayout.LAYER_FIRST, **given}
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        asked = any((self.device.full, self.device.swa, self.device.request))
        if self.memory is MemoryOwner.OWNED and not self.device.full:
            raise ValueError("memory is owned but device.full is 0: say how many pages to allocate on each rank")
        if self.memory is MemoryOwner.ADOPTED and asked:
            raise ValueError("memory is adopted, so the engine's own pools decide: leave device.* at 0")
        if self.memory is MemoryOwner.ADOPTED and self.device_layout is not DeviceLayout.LAYER_FIRST:
            raise ValueError("memory is adopted, so the engine's own pools decide: leave device_layout at layer_first")
        return self


class DecodePools(PrefillPools):
    """Memory of a decode node."""

    host: HostPool = Field(default_factory=HostPool)

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if self.host.memory is MemoryOwner.ADOPTED and self.memory is not MemoryOwner.ADOPTED:
            raise ValueError("host.memory is adopted and memory is owned: engines bring host beside device memory")
        return self
