"""The plans of all pairs of ranks together copy each live byte once, as a naive copy of rows says.

The model here knows one thing: where a row of a component lies in a page (the two sentences of `Component`). It fills
source memory row by row, writes down what destination memory must hold row by row, and executes the planned operations
on real arrays. It shares no arithmetic with the planner.

Rows that a writer has not published yet are garbage in its memory when an operation reads them. Where dead bytes may be sent along,
they are those of the request's own pages, and no garbage comes to rest where the request has a live row.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.plan.operations import Amounts, Section, add_amounts
from kvbridge.core.plan.pairing import Demand, Pairing, shortfall
from kvbridge.core.plan.planner import Plan, plan
from tests.helpers.manifests import AddressSpace, Instance, Layout, moved
from tests.helpers.rooms import all_rows, lane_rows

Kind, Space = ComponentKind, IndexSpace

RANK_SHIFT = 32
"""Every block of memory of a rank begins at a multiple of 2**32 in the addresses of its process."""


@st.composite
def components(draw, kind: ComponentKind, layer_count: int, tokens_per_page: int) -> Component:
    page = tokens_per_page
    layers = draw(st.sets(st.integers(0, layer_count - 1), min_size=1))
    shape = {"space": Space.FULL, "liveness": Liveness.GROWING, "slots_per_page": page, "rows_per_logical_page": page}
    match kind:
        case Kind.C4_KV | Kind.C4_INDEXER:
            shape |= {"tokens_per_row": 2, "slots_per_page": page // 2, "rows_per_logical_page": page // 2}
        case Kind.C128_KV:
            shape |= {"tokens_per_row": page, "slots_per_page": 1, "rows_per_logical_page": 1}
        case Kind.SWA_KV:
            shape |= {"space": Space.SWA, "liveness": Liveness.WINDOW, "window": draw(st.integers(1, 2 * page + 1))}
        case Kind.C4_STATE:
            shape |= {"space": Space.SWA, "liveness": Liveness.TAIL, "block": 2, "overlap": 1, "slots_per_page": 4}
        case Kind.C128_STATE:
            block = draw(st.sampled_from([3, 5]))
            shape |= {"space": Space.REQUEST, "liveness": Liveness.TAIL, "block": block, "slots_per_page": block}
            shape |= {"rows_per_logical_page": block * 2**20}
        case Kind.DSA_INDEXER:
            shape |= {"space": Space.REQUEST, "liveness": Liveness.WHOLE, "slots_per_page": draw(st.integers(1, 2))}
            shape |= {"rows_per_logical_page": 1}
    return Component(
        kind=kind,
        layers=tuple(sorted(layers)),
        encoding=Encoding.NATIVE,
        row_parts_bytes=tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))),
        lanes=draw(st.sampled_from([1, 1, 2, 4])),
        page_alignment_bytes=draw(st.sampled_from([1, 7, 16])),
        host_capable=shape["liveness"] is Liveness.GROWING,
        **shape,
    )


@st.composite
def geometries(draw) -> ModelGeometry:
    layer_count, page = draw(st.integers(1, 5)), draw(st.sampled_from([4, 8]))
    drawn = st.sampled_from([kind for kind in Kind if kind not in {Kind.C4_INDEXER_STATE, Kind.MLA_KV}])
    kinds = draw(st.lists(drawn, min_size=2, max_size=5, unique=True))
    return ModelGeometry(
        name="random",
        layer_count=layer_count,
        tokens_per_page=page,
        components=tuple(draw(components(kind, layer_count, page)) for kind in kinds),
    )


FORMS = {
    "plain": Layout(),
    "page_first": Layout(page_first=True),
    "padded": Layout(stride_extra_bytes=5),
    "page_first_padded": Layout(page_first=True, stride_extra_bytes=5),
    "page_first_apart": Layout(page_first=True, layer_gap_bytes=3),
}
SIMILAR_FORMS = [("plain", "plain"), ("page_first", "page_first"), ("page_first", "page_first_apart")]


@st.composite
def layout_pairs(draw) -> tuple[Layout, Layout]:
    """Layouts of a component on both sides: half of them such that neighbours could be joined."""
    names = (
        draw(st.sampled_from(SIMILAR_FORMS))
        if draw(st.booleans())
        else draw(st.tuples(*[st.sampled_from([*FORMS])] * 2))
    )
    if draw(st.booleans()):
        names = names[::-1]
    return tuple(
        replace(
            FORMS[name], pages_per_extent=draw(st.sampled_from([None, 5, 7])), gap_bytes=draw(st.sampled_from([0, 3]))
        )
        for name in names
    )


@st.composite
def instances(draw, geometry, page_counts, layouts, together, *, host):
    pp_size = draw(st.integers(1, min(4, geometry.layer_count)))
    tp_size = draw(st.sampled_from([1, 2, 4] if pp_size <= 2 else [1, 2]))
    inner = st.integers(1, geometry.layer_count - 1) if pp_size > 1 else st.nothing()
    edges = draw(st.sets(inner, min_size=pp_size - 1, max_size=pp_size - 1))
    capable = [component.kind for component in geometry.components if component.host_capable]
    return Instance(
        geometry,
        page_counts,
        pp_size=pp_size,
        tp_size=tp_size,
        boundaries=tuple(sorted(edges)),
        host=frozenset(draw(st.sets(st.sampled_from(capable)))) if host and capable else frozenset(),
        own_host=host and draw(st.booleans()),
        layouts=layouts,
        together=together,
    )


def page_ids(rng: np.random.Generator, run_pages: int, count: int, page_count: int) -> np.ndarray:
    """Ids without repetition, in runs of `run_pages` that may end anywhere."""
    starts = np.arange(rng.integers(0, page_count - count + 1) % run_pages, page_count, run_pages)
    runs = [np.arange(start, min(start + run_pages, page_count)) for start in rng.permutation(starts)]
    ids = np.concatenate([*runs, np.arange(starts[0])])
    return ids[:count].astype(np.int32)


@st.composite
def scenarios(draw) -> "Scenario":
    geometry = draw(geometries())
    page = geometry.tokens_per_page
    prompt = draw(st.integers(0, 9)) * page + draw(st.integers(1, page))
    pages = prompt // page + 2
    counts = [
        {space: pages + draw(st.integers(3, 8)) for space in (Space.FULL, Space.SWA, Space.HOST)} | {Space.REQUEST: 3}
        for _ in range(2)
    ]
    layouts = {component.kind: draw(layout_pairs()) for component in geometry.components}
    joint = st.sampled_from([frozenset(), frozenset(Space)])
    together = [draw(joint)] * 2 if draw(st.booleans()) else [draw(joint), draw(joint)]
    source, destination = (
        draw(
            instances(
                geometry,
                counts[side],
                {kind: both[side] for kind, both in layouts.items()},
                together[side],
                host=side == 1,
            )
        )
        for side in range(2)
    )
    # Drawn by numpy, since hypothesis prefers to repeat itself and these matter most when they differ.
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng([seed, prompt])
    return Scenario(
        source=source,
        destination=destination,
        prompt=prompt,
        prefix=int(rng.integers(0, prompt // page + 1)) * page if rng.integers(0, 2) else 0,
        cuts=set(rng.integers(0, prompt + 1, rng.integers(0, 4)).tolist()),
        early_layers=tuple(np.flatnonzero(rng.integers(0, 3, geometry.layer_count) == 0).tolist()),
        run_pages=rng.choice([1, 2, 4, 100], size=2, p=[0.1, 0.2, 0.4, 0.3]).tolist(),
        max_operation_bytes=int(rng.choice([1 << 30, 37], p=[0.8, 0.2])),
        operation_cost_bytes=int(rng.choice([0, 6, 1 << 20], p=[0.5, 0.2, 0.3])),
        seed=seed,
    )


@dataclass
class Scenario:
    source: Instance
    destination: Instance
    prompt: int
    prefix: int
    cuts: set[int]
    """Tokens where chunks end. Every source rank uses those that it draws from them: ranks publish independently."""
    early_layers: tuple[int, ...]
    """Layers whose sections are published by themselves, before the others of the same chunk."""
    run_pages: list[int]
    """Pages that follow each other in the tables of the source and of the destination."""
    max_operation_bytes: int
    operation_cost_bytes: int
    seed: int

    def sections(self, rng: np.random.Generator) -> list[Section]:
        """The sections of one source rank, which cover the prompt."""
        cuts = sorted({0, self.prompt} | {cut for cut in self.cuts if rng.integers(0, 3)})
        groups: list[tuple[int, ...] | None] = [None]
        if self.early_layers:
            everything = range(self.source.geometry.layer_count)
            groups = [self.early_layers, tuple(layer for layer in everything if layer not in self.early_layers)]
        return [
            Section(
                prompt_tokens=self.prompt, prefix_tokens=self.prefix, start_token=start, stop_token=stop, layers=layers
            )
            for start, stop in pairwise(cuts)
            for layers in groups
        ]


def begin_of(region: Region, page: int) -> int:
    """The address of a page, by a formula of the tests' own."""
    extent, place = divmod(page, region.pages_per_extent)
    return region.extent_addresses[extent] + place * region.page_stride_bytes


class Node:
    """The memory of all ranks of one node, their manifests, and one page table for each space."""

    def __init__(self, instance: Instance, tables: dict[IndexSpace, PageTable], rng: np.random.Generator) -> None:
        self.tables = tables
        self.blocks: dict[int, np.ndarray] = {}
        self.extents: dict[int, list[tuple[int, int]]] = {}
        self.manifests = []
        self.copies: list[tuple[Region, np.ndarray]] = []
        """Every region of which there is one, once, with the block that its addresses (modulo 2**32) count in."""
        host_space = AddressSpace(next=64)
        host_regions = instance.host_regions(host_space)
        host = rng.integers(0, 256, host_space.next + 64, dtype=np.uint8)
        self.copies += [(region, host) for region in host_regions]
        for ordinal, rank in enumerate(instance.ranks):
            space = AddressSpace(next=64)
            regions = instance.device_regions(rank, space)
            device = rng.integers(0, 256, space.next + 64, dtype=np.uint8)
            self.copies += [(region, device) for region in regions]
            names = (1 + ordinal, 1_001 + ordinal)
            for name, block, extents in zip(names, (device, host), (space.extents, host_space.extents), strict=True):
                self.blocks[name], self.extents[name] = block, extents
            listed = [
                moved(region, name << RANK_SHIFT)
                for name, some in zip(names, (regions, host_regions), strict=True)
                for region in some
            ]
            self.manifests.append(instance.manifest(rank, listed))

    def find(self, address: int, length: int) -> tuple[int, int]:
        """Return block and offset of a stretch of memory, which must lie inside one extent."""
        name, offset = address >> RANK_SHIFT, address % (1 << RANK_SHIFT)
        assert any(start <= offset and offset + length <= start + size for start, size in self.extents[name])
        return name, offset

    def row_places(self, component: Component, region: Region, lane: int, row: int):
        """Where each part of a row lies: (offset in the block, offset in the row, bytes), or nothing."""
        table = self.tables[region.space]
        entry = row // component.rows_per_logical_page - table.first_page
        if not 0 <= entry < len(table):
            return
        start = begin_of(region, int(table.ids[entry]))
        start += (lane - region.lane_start) * component.slots_per_page * sum(component.row_parts_bytes)
        done = 0
        for part_bytes in component.row_parts_bytes:
            yield start + row % component.slots_per_page * part_bytes, done, part_bytes
            start += component.slots_per_page * part_bytes
            done += part_bytes


def contents(scenario: Scenario, rng: np.random.Generator) -> dict[tuple[ComponentKind, int], np.ndarray]:
    """The rows that the model computes: for each component and layer, bytes of shape (lanes, rows, row_bytes)."""
    return {
        (component.kind, layer): rng.integers(
            0, 256, (component.lanes, scenario.prompt, component.row_bytes), dtype=np.uint8
        )
        for component in scenario.source.geometry.components
        for layer in component.layers
    }


def every_row(component: Component, tokens: int) -> range:
    """All rows that prefill writes, in order; in a ring the later ones overwrite the earlier ones."""
    return range(1 if component.liveness is Liveness.WHOLE else tokens // component.tokens_per_row)


def fill(node: Node, scenario: Scenario, content) -> None:
    for region, block in node.copies:
        component = scenario.source.geometry.component(region.component)
        for lane in range(region.lane_start, region.lane_stop):
            for row in every_row(component, scenario.prompt):
                for place, done, size in node.row_places(component, region, lane, row):
                    block[place : place + size] = content[region.component, region.layer][lane, row, done : done + size]


def live_rows(component: Component, prompt: int, prefix: int) -> range:
    """The definition of liveness, once more."""
    match component.liveness:
        case Liveness.GROWING:
            return range(prefix // component.tokens_per_row, prompt // component.tokens_per_row)
        case Liveness.WINDOW:
            return range(max(0, prompt - component.window), prompt)
        case Liveness.TAIL:
            return range(max(0, prompt // component.block - component.overlap) * component.block, prompt)
        case Liveness.WHOLE:
            return range(1)


def request_tables(scenario: Scenario, instance: Instance, run_pages: int, rng: np.random.Generator):
    """One table a space; the window table begins no later than the first live row, and not always there."""
    geometry, page = instance.geometry, instance.geometry.tokens_per_page
    lived = [
        live_rows(component, scenario.prompt, 0).start
        for component in geometry.components
        if component.space is Space.SWA
    ]
    latest = min(lived, default=0) // page
    tables = {}
    for space, page_count in instance.page_counts.items():
        first = int(rng.integers(0, latest + 1)) if space is Space.SWA else 0
        count = 1 if space is Space.REQUEST else -(-scenario.prompt // page) - first
        tables[space] = PageTable(space, page_ids(rng, run_pages, count, page_count), first)
    return tables


def published(node: Node, writer: int, scenario: Scenario, sections: list[Section]) -> list[np.ndarray]:
    """For each section of a rank its memory when that is sent: all that it has not published by then is garbage."""
    truth = node.blocks[1 + writer]
    memory = np.random.default_rng([scenario.seed, writer]).integers(0, 256, len(truth), dtype=np.uint8)
    found = []
    for section in sections:
        memory = memory.copy()
        last = section.stop_token == scenario.prompt
        for region, block in node.copies:
            component = scenario.source.geometry.component(region.component)
            mine = block is truth and (section.layers is None or region.layer in section.layers)
            if not mine or not (last or component.liveness is Liveness.GROWING):
                continue
            rows = live_rows(component, scenario.prompt, scenario.prefix)
            stop = rows.stop if last else section.stop_token // component.tokens_per_row
            for row, lane in product(range(rows.start, stop), range(region.lane_start, region.lane_stop)):
                for place, _, size in node.row_places(component, region, lane, row):
                    memory[place : place + size] = truth[place : place + size]
        found.append(memory)
    return found


def execute(source: Node, destination: Node, operations, memory: np.ndarray, counts: dict[int, np.ndarray]) -> None:
    """Copy out of `memory`, which is the only block of the source that the operations read."""
    for source_address, destination_address, length in zip(
        operations.source.tolist(), operations.destination.tolist(), operations.length.tolist(), strict=True
    ):
        _, from_offset = source.find(source_address, length)
        to_name, to_offset = destination.find(destination_address, length)
        to_block = destination.blocks[to_name]
        to_block[to_offset : to_offset + length] = memory[from_offset : from_offset + length]
        counts[id(to_block)][to_offset : to_offset + length] += 1


class Naive:
    """A node's memory after the naive copy, and the bytes that it touches; by the identity of the block."""

    def __init__(self, node: Node, scenario: Scenario, content) -> None:
        self._node, self._scenario = node, scenario
        self.blocks = {id(block): block for block in node.blocks.values()}
        self.expected = {key: block.copy() for key, block in self.blocks.items()}
        none = [{key: np.zeros(len(block), dtype=bool) for key, block in self.blocks.items()} for _ in range(3)]
        self.live, self.padding, self.own = none  # `own`: the request's pages as wholes
        for region, block in node.copies:
            component = scenario.source.geometry.component(region.component)
            self._pad(component, region, self.padding[id(block)], self.own[id(block)])
            self._copy(component, region, id(block), content[region.component, region.layer])

    def _pad(self, component: Component, region: Region, padding: np.ndarray, own: np.ndarray) -> None:
        for page in self._node.tables[region.space].ids.tolist():
            start = begin_of(region, page)
            padding[start + region.lanes * component.lane_block_bytes : start + region.page_bytes] = True
            own[start : start + region.page_bytes] = True

    def _copy(self, component: Component, region: Region, key: int, content: np.ndarray) -> None:
        for lane in range(region.lane_start, region.lane_stop):
            for row in live_rows(component, self._scenario.prompt, self._scenario.prefix):
                places = list(self._node.row_places(component, region, lane, row))
                assert places, "the model's own tables cover every live row"
                for place, done, size in places:
                    self.expected[key][place : place + size] = content[lane, row, done : done + size]
                    self.live[key][place : place + size] = True

    def compare(self, counts: dict[int, np.ndarray]) -> None:
        """Compare memory after the plans, and how often each byte was written."""
        for key, block in self.blocks.items():
            live, padding, count = self.live[key], self.padding[key], counts[key]
            assert (count[live] == 1).all(), "a live byte was not written exactly once"
            assert (count[padding] <= 1).all(), "padding was written more than once"
            assert not count[~live & ~padding].any(), "a byte that is not the request's was written"
            assert ((block == self.expected[key]) | padding).all(), "memory differs from the naive copy"

    def compare_with_dead_bytes(self, early: dict[int, np.ndarray], counts: dict[int, np.ndarray]) -> None:
        """The same when dead bytes may be sent along: `early` counts what the sections but the last ones wrote."""
        for key, block in self.blocks.items():
            live, own, count = self.live[key], self.own[key], counts[key]
            assert (count[live] >= 1).all(), "a live byte was not written"
            assert (early[key][live] <= 1).all(), "a live byte was written more than once before the last section"
            assert not early[key][~live & ~self.padding[key]].any(), "dead bytes were sent before the last section"
            assert not count[~own].any(), "a byte that is not the request's was written"
            assert ((block == self.expected[key]) | (own & ~live)).all(), "memory differs from the naive copy"


def check_plan(planned: Plan, max_operation_bytes: int) -> None:
    lengths = planned.operations.length
    assert not len(lengths) or 0 < lengths.min() <= lengths.max() <= max_operation_bytes
    assert sum(amount.bytes for amount in planned.amounts.values()) == planned.operations.total_bytes
    assert sum(amount.operations for amount in planned.amounts.values()) == len(planned.operations)


@settings(suppress_health_check=list(HealthCheck))
@given(scenarios())
def test_all_plans_together_copy_every_live_byte_once(scenario: Scenario):
    rng = np.random.default_rng(scenario.seed)
    geometry = scenario.source.geometry
    content = contents(scenario, rng)
    source, destination = (
        Node(instance, request_tables(scenario, instance, run_pages, rng), rng)
        for instance, run_pages in zip((scenario.source, scenario.destination), scenario.run_pages, strict=True)
    )
    fill(source, scenario, content)
    naive = Naive(destination, scenario, content)
    early, counts = ({key: np.zeros(len(block), dtype=int) for key, block in naive.blocks.items()} for _ in range(2))
    demand = Demand(geometry, destination.manifests)
    shares = []
    together: Counter[ComponentKind] = Counter()
    for number, writer in enumerate(source.manifests):
        reported: Amounts = {}
        sections = scenario.sections(rng)
        memories = published(source, number, scenario, sections)
        for ordinal, reader in enumerate(destination.manifests):
            pairing = Pairing.create(
                geometry, writer, reader, destination_ordinal=ordinal, destination_count=len(destination.manifests)
            )
            for section, memory in zip(sections, memories, strict=True):
                planned = plan(
                    pairing,
                    section,
                    source.tables,
                    destination.tables,
                    max_operation_bytes=scenario.max_operation_bytes,
                    operation_cost_bytes=scenario.operation_cost_bytes,
                )
                check_plan(planned, scenario.max_operation_bytes)
                reported = add_amounts(reported, planned.amounts)
                execute(source, destination, planned.operations, memory, counts)
                if section.stop_token < scenario.prompt:
                    execute(source, destination, planned.operations, memory, early)
        stage = {region.layer for region in writer.regions}
        share = demand.share(writer.rank, tp_size=writer.tp_size, layers=stage)
        owed = share.rows(prompt_tokens=scenario.prompt, prefix_tokens=scenario.prefix)
        assert shortfall(owed, lane_rows(reported)) is None, "a writer's plans are its share, however they are cut"
        shares.append(share)
        together.update(owed)
    if scenario.operation_cost_bytes:
        naive.compare_with_dead_bytes(early, counts)
    else:
        naive.compare(counts)
    due = all_rows(geometry, demand, scenario.prompt, scenario.prefix)
    assert shortfall(due, together) is None, "the shares are all that is needed"
    assert demand.uncovered(shares) is None
    assert demand.uncovered(shares[1:]) is not None or not any(lanes for _, lanes, _ in shares[0].parts)
