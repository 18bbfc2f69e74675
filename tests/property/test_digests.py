"""Digests of random requests, models, parallelisms and layouts: both sides find the same, and every flipped bit is named."""

from collections.abc import Sequence

import numpy as np
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings, strategies as st

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import RankManifest, Region
from kvbridge.core.plan.digests import DigestKey, DigestSums, Mismatch, digest_pieces, followed_by, sent_groups
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import LayerGroup, Pairing, Stripe, destination_regions, held_groups
from tests.property.test_plan_copies import Naive, Node, Scenario, begin_of, contents, fill, request_tables, scenarios

LIMITS = settings(suppress_health_check=list(HealthCheck))


def raw(data: bytes) -> int:
    return crc32c(data, 0xFFFFFFFF) ^ 0xFFFFFFFF


class Request:
    """One request on both nodes; the destination holds what a right transfer leaves there."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.geometry = scenario.source.geometry
        self.rng = np.random.default_rng(scenario.seed)
        content = contents(scenario, self.rng)
        sides = (scenario.source, scenario.destination)
        self.source, self.destination = (
            Node(instance, request_tables(scenario, instance, run_pages, self.rng), self.rng)
            for instance, run_pages in zip(sides, scenario.run_pages, strict=True)
        )
        fill(self.source, scenario, content)
        self.naive = Naive(self.destination, scenario, content)
        for key, block in self.naive.blocks.items():
            block[:] = self.naive.expected[key]

    def room_sums(self, allowed: frozenset[DigestKey] | None = None) -> DigestSums:
        prompt, prefix = self.scenario.prompt, self.scenario.prefix
        whole = Section(prompt_tokens=prompt, prefix_tokens=prefix, start_token=0, stop_token=prompt)
        return DigestSums(self.geometry, whole, allowed=allowed)

    def sent(self) -> DigestSums:
        """The digests that all source ranks report together, section by section."""
        readers = self.destination.manifests
        allowed = frozenset(key for key, _ in regions_of(readers[0], everywhere=readers))
        together = self.room_sums(allowed)
        for writer in self.source.manifests:
            pairings = [
                Pairing.create(
                    self.geometry, writer, reader, destination_ordinal=ordinal, destination_count=len(readers)
                )
                for ordinal, reader in enumerate(readers)
            ]
            of_writer = self.room_sums()
            for section in self.scenario.sections(self.rng):
                sums = DigestSums(self.geometry, section)
                groups = sent_groups(pairings, section.layers)
                self.compute(sums, groups, section, self.source, self.destination)
                for part in sums.parts():
                    of_writer.merge(part)
            for part in of_writer.parts():
                together.merge(part)
        return together

    def found(self) -> list[tuple[RankManifest, DigestSums]]:
        """The digests that each destination rank finds in its memory; of the host pool each looks at its share."""
        readers = self.destination.manifests
        section = Section(
            prompt_tokens=self.scenario.prompt,
            prefix_tokens=self.scenario.prefix,
            start_token=0,
            stop_token=self.scenario.prompt,
        )
        answers = []
        for ordinal, reader in enumerate(readers):
            sums = self.room_sums()
            groups = held_groups(self.geometry, reader, host_share=Stripe(ordinal, len(readers)))
            self.compute(sums, groups, section, self.destination, self.destination)
            answers.append((reader, sums))
        return answers

    @staticmethod
    def compute(sums: DigestSums, groups: Sequence[LayerGroup], section: Section, side: Node, other: Node) -> None:
        for pieces in digest_pieces(groups, section, side.tables, other.tables):
            values = []
            for address, length in zip(pieces.address.tolist(), pieces.length.tolist(), strict=True):
                name, offset = side.find(address, length)
                values.append(raw(side.blocks[name][offset : offset + length].tobytes()))
            checksums = followed_by(np.array(values, dtype=np.uint32), pieces.behind)
            sums.add(pieces.key, pieces.layer, pieces.page, checksums)

    @property
    def in_host_pool(self) -> frozenset[ComponentKind]:
        """Components of which all destination ranks together have one copy."""
        return frozenset() if self.scenario.destination.own_host else self.scenario.destination.host

    def mismatches(self) -> set[tuple[str, Mismatch]]:
        """Everything that differs, with where it lies."""
        expected = self.sent()
        host, in_pool = self.room_sums(), self.in_host_pool
        differ = set()
        for reader, sums in self.found():
            for part in sums.parts():
                host.merge(entry for entry in part if entry.component in in_pool)
            for key, layers in regions_of(reader):
                if key.component not in in_pool:
                    differ |= {(str(reader.rank), wrong) for wrong in expected.mismatches(sums, key, layers)}
        for key, layers in regions_of(self.destination.manifests[0]):
            if key.component in in_pool:
                differ |= {("host", wrong) for wrong in expected.mismatches(host, key, layers)}
        return differ


def regions_of(manifest, *, everywhere=()):
    """The keys of what a rank (or any of several) keeps, with the layers."""
    layers: dict[DigestKey, list[int]] = {}
    for one in everywhere or (manifest,):
        for (kind, layer), region in destination_regions(one).items():
            layers.setdefault(DigestKey(kind, region.lane_start, region.lane_stop), []).append(layer)
    yield from layers.items()


@LIMITS
@given(scenarios())
def test_a_digest_is_the_checksum_of_the_page_with_only_its_live_rows(scenario):
    request = Request(scenario)
    expected = request.sent()
    for region, block in request.destination.copies:
        component = request.geometry.component(region.component)
        key = DigestKey(region.component, region.lane_start, region.lane_stop)
        blank = request.room_sums()
        pages = {page.page: page.expected for page in expected.mismatches(blank, key, [region.layer])}
        live = np.where(request.naive.live[id(block)], block, 0).astype(np.uint8)
        table = request.destination.tables[region.space]
        for entry, page in enumerate(table.ids.tolist()):
            start = begin_of(region, page)
            image = live[start : start + region.lanes * component.lane_block_bytes].tobytes()
            assert pages.get(table.first_page + entry, 0) == raw(image)


@LIMITS
@given(scenarios(), st.data())
def test_both_sides_find_the_same_but_for_a_flipped_bit_of_a_live_byte_which_is_named(scenario, data):
    request = Request(scenario)
    assert request.mismatches() == set(), "however the request was cut"
    which = data.draw(st.integers(0, len(request.destination.copies) - 1))
    region, block = request.destination.copies[which]
    component = request.geometry.component(region.component)
    owner, logical, offset = pick_byte(request, region, block, data)
    before = block.copy()
    block[offset] ^= 1 << data.draw(st.integers(0, 7))
    differ = request.mismatches()
    block[:] = before
    if not request.naive.live[id(block)][offset]:
        assert differ == set()
        return
    [(where, wrong)] = differ
    key = DigestKey(component.kind, region.lane_start, region.lane_stop)
    assert (where, wrong.key, wrong.layer, wrong.page) == (owner, key, region.layer, logical)


def pick_byte(request: Request, region: Region, block: np.ndarray, data) -> tuple[str, int, int]:
    """A byte of a page of the request in this region: who has it, the logical page, and where it lies in the block."""
    table = request.destination.tables[region.space]
    live = request.naive.live[id(block)]
    entry = data.draw(st.integers(0, len(table) - 1))
    start = begin_of(region, int(table.ids[entry]))
    inside = np.flatnonzero(live[start : start + region.page_bytes])
    if len(inside) and data.draw(st.integers(0, 9)):
        offset = start + int(inside[data.draw(st.integers(0, len(inside) - 1))])
    else:
        offset = start + data.draw(st.integers(0, region.page_bytes - 1))
    if region.component in request.in_host_pool:
        return "host", table.first_page + entry, offset
    blocks = [
        reader
        for ordinal, reader in enumerate(request.destination.manifests)
        if request.destination.blocks[1 + ordinal] is block
    ]
    return str(blocks[0].rank), table.first_page + entry, offset
