"""The components that a model keeps for each request.

Every component numbers its *rows* along the request. Row `r` of a growing component covers tokens `[r * tokens_per_row, (r + 1) *
tokens_per_row)`; row `r` of a window or a ring is token position `r`. A request of L tokens has one live interval of rows,
`live_rows(L)`. Every row has one place: logical page `r // rows_per_logical_page`, slot `r % slots_per_page`. A ring has fewer
slots than rows in a logical page.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import REQUEST_SPACES, FrozenModel, IndexSpace, NonNegative, Positive


class ComponentKind(StrEnum):
    """The kinds of per-layer state. The list is closed: an unknown kind is refused."""

    C4_KV = "c4_kv"
    C4_INDEXER = "c4_indexer"
    C128_KV = "c128_kv"
    SWA_KV = "swa_kv"
    C4_STATE = "c4_state"
    C4_INDEXER_STATE = "c4_indexer_state"
    C128_STATE = "c128_state"
    MLA_KV = "mla_kv"
    MHA_KV = "mha_kv"
    DSA_INDEXER = "dsa_indexer"


class Encoding(StrEnum):
    """The storage of a row's numbers. Part of the fingerprint: two encodings never meet."""

    FP8_V4 = "fp8_v4"
    """DeepSeek-V4 row: 448 e4m3 + 64 bf16 (rope) values; its 7 ue8m0 scales and one pad byte are stored apart."""
    FP8_INDEXER = "fp8_indexer"
    """Indexer key: e4m3 values, then one fp32 scale for each 128 of them."""
    BF16 = "bf16"
    FP32 = "fp32"
    NATIVE = "native"
    """The model's own dtype, whose width is in the row bytes."""


class Liveness(StrEnum):
    """The rows of a request of L tokens that decode can ever read."""

    GROWING = "growing"
    """One row for each `tokens_per_row` complete tokens: rows [0, L // tokens_per_row)."""
    WINDOW = "window"
    """One row a token, the last `window` of them: rows [max(0, L - window), L)."""
    TAIL = "tail"
    """One row a token: the incomplete block of `block` tokens, and `overlap` complete blocks before it: rows [max(0, (L // block -
    overlap) * block), L)."""
    WHOLE = "whole"
    """One row that summarises everything: row [0, 1)."""


class RowInterval(FrozenModel):
    """Rows [start, stop) of one component."""

    start: NonNegative
    stop: NonNegative

    @property
    def count(self) -> int:
        """Number of rows."""
        return max(0, self.stop - self.start)


class Component(FrozenModel):
    """One kind of per-layer state: its layers, the form of its pages, its live rows.

    A lane is a KV head of a head-sharded component; replicated components have one lane. A page of a rank with `n` lanes is `n`
    lane blocks one after another, padded to a multiple of `page_alignment_bytes`. A lane block is, for each entry `b` of
    `row_parts_bytes`, `slots_per_page` rows of `b` bytes: DeepSeek-V4 rows (576, 8) are stored as all values and then all scales.
    """

    kind: ComponentKind
    layers: tuple[NonNegative, ...] = Field(min_length=1)
    """Global layer ids, ascending."""
    space: IndexSpace
    """The index space of its pages on the device; on the host it is always `host`."""
    encoding: Encoding
    liveness: Liveness
    row_parts_bytes: tuple[Positive, ...] = Field(min_length=1)
    slots_per_page: Positive
    """Rows that a page stores."""
    rows_per_logical_page: Positive
    """Row numbers that a logical page spans; more than `slots_per_page` for a ring, which overwrites itself."""
    tokens_per_row: Positive = 1
    window: NonNegative = 0
    block: Positive = 1
    overlap: NonNegative = 0
    lanes: Positive = 1
    page_alignment_bytes: Positive = 1
    host_capable: bool = False
    """Whether decode may keep it in the host pool."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        growing = self.liveness is Liveness.GROWING
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"{self.kind}: layers must be ascending and distinct, got {self.layers}")
        if self.space not in REQUEST_SPACES or self.space is IndexSpace.HOST:
            raise ValueError(
                f"{self.kind}: `space` names the device index space; 'host' is where it may reside instead"
            )
        if self.rows_per_logical_page % self.slots_per_page and self.liveness is not Liveness.WHOLE:
            raise ValueError(
                f"{self.kind}: a logical page of {self.rows_per_logical_page} rows is not a whole number of rings "
                f"of {self.slots_per_page} slots"
            )
        if self.is_ring and self.most_live_rows > self.slots_per_page:
            raise ValueError(
                f"{self.kind}: up to {self.most_live_rows} rows live at once, but a page stores {self.slots_per_page}"
            )
        if growing and self.is_ring:
            raise ValueError(f"{self.kind}: a growing component keeps every row, so its pages cannot be rings")
        if growing and self.space is IndexSpace.SWA:
            raise ValueError(f"{self.kind}: a growing component cannot live in window pages, which are used again")
        if not growing and self.tokens_per_row != 1:
            raise ValueError(f"{self.kind}: only growing components have rows of several tokens")
        if self.liveness is Liveness.WINDOW and self.window == 0:
            raise ValueError(f"{self.kind}: a window of 0 rows keeps nothing")
        if self.host_capable and not growing:
            raise ValueError(f"{self.kind}: only growing components can live in the host pool")
        return self

    @property
    def is_ring(self) -> bool:
        """Whether a page stores fewer rows than its logical page spans."""
        return self.rows_per_logical_page > self.slots_per_page

    @property
    def most_live_rows(self) -> int:
        """The largest live interval of a window, tail or whole component (growing ones have no limit: 0)."""
        tail = self.block * (self.overlap + 1) - 1
        sizes = {Liveness.GROWING: 0, Liveness.WINDOW: self.window, Liveness.TAIL: tail, Liveness.WHOLE: 1}
        return sizes[self.liveness]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one lane, all parts together."""
        return sum(self.row_parts_bytes)

    @property
    def lane_block_bytes(self) -> int:
        """Bytes of one lane's rows in a page, without padding."""
        return self.slots_per_page * self.row_bytes

    def page_bytes(self, lanes: int | None = None) -> int:
        """Bytes of a page on a rank that holds `lanes` of the component's lanes (default: all of them)."""
        held = self.lanes if lanes is None else lanes
        unpadded = held * self.lane_block_bytes
        return -(-unpadded // self.page_alignment_bytes) * self.page_alignment_bytes

    def part_offset(self, part: int) -> int:
        """Where the rows of part `part` begin inside a lane block, in bytes."""
        return self.slots_per_page * sum(self.row_parts_bytes[:part])

    def live_rows(self, tokens: int, prefix_tokens: int = 0) -> RowInterval:
        """Return the rows that decode needs. The `prefix_tokens` that it holds already shorten growing components only."""
        if tokens < 0 or prefix_tokens < 0 or prefix_tokens > tokens:
            raise InvalidInputError(f"need 0 <= prefix_tokens <= tokens, got prefix {prefix_tokens} of {tokens} tokens")
        match self.liveness:
            case Liveness.GROWING:
                return RowInterval(start=prefix_tokens // self.tokens_per_row, stop=tokens // self.tokens_per_row)
            case Liveness.WINDOW:
                return RowInterval(start=max(0, tokens - self.window), stop=tokens)
            case Liveness.TAIL:
                first = max(0, (tokens // self.block - self.overlap) * self.block)
                return RowInterval(start=first, stop=tokens)
            case Liveness.WHOLE:
                return RowInterval(start=0, stop=1 if tokens else 0)

    def sent_bytes(self, rows: RowInterval) -> int:
        """Return the bytes sent for these rows of one layer, all lanes; whole pages have their padding unless lanes differ."""
        each = self.slots_per_page
        whole = 0 if self.is_ring else max(0, rows.stop // each - -(-rows.start // each))
        return whole * self.page_bytes() + (rows.count - whole * each) * self.row_bytes * self.lanes

    def published_rows(self, tokens: int, *, prompt_tokens: int, prefix_tokens: int = 0) -> RowInterval:
        """Return the rows that may be sent once the first `tokens` of `prompt_tokens` have been computed.

        Growing rows are final at once. Windows, tails and whole rows change until the last token, and go out with it.
        """
        if tokens < prompt_tokens and self.liveness is not Liveness.GROWING:
            return RowInterval(start=0, stop=0)
        return self.live_rows(tokens, min(prefix_tokens, tokens))


Fact = Annotated[str, Field(min_length=1, max_length=200)]


class ModelGeometry(FrozenModel):
    """All components of one model: two instances must agree on them, and the fingerprint names them."""

    name: str = Field(min_length=1, max_length=200)
    layer_count: Positive
    tokens_per_page: Positive = 256
    """Tokens that a logical page covers, in every space."""
    components: tuple[Component, ...] = Field(min_length=1)
    facts: dict[Fact, Fact] = Field(default_factory=dict, max_length=64)
    """Other facts on which the meaning of a page's bytes depends, by name: attention backend, dtype, weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = [component.kind for component in self.components]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"each component kind may appear once, got {kinds}")
        for component in self.components:
            if component.layers[-1] >= self.layer_count:
                raise ValueError(
                    f"{component.kind}: layer {component.layers[-1]} does not exist in a model of "
                    f"{self.layer_count} layers"
                )
            if component.space is not IndexSpace.REQUEST:
                covered = component.rows_per_logical_page * component.tokens_per_row
                if covered != self.tokens_per_page:
                    raise ValueError(
                        f"{component.kind}: a logical page covers {covered} tokens, the model's pages cover "
                        f"{self.tokens_per_page}"
                    )
        return self

    def component(self, kind: ComponentKind) -> Component:
        """Return the component of that kind. Raises InvalidInputError when the model has none."""
        found = next((component for component in self.components if component.kind is kind), None)
        if found is None:
            raise InvalidInputError(f"model '{self.name}' has no component '{kind}'")
        return found
