import pytest

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import RankManifest, check_manifest, fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.tiers import copied_components
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.pool.memory import layout

FLASH = preset("deepseek-v4-flash")
GQA = preset("tiny-gqa")
COUNTS = {IndexSpace.FULL: 100, IndexSpace.SWA: 10, IndexSpace.REQUEST: 3}
C4 = ComponentKind.C4_KV


def part(geometry=FLASH, pp=0, tp=0, *, pp_size=1, tp_size=1, boundaries=None):
    return layout.RankPart.of(geometry, Rank(pp=pp, tp=tp), pp_size=pp_size, tp_size=tp_size, boundaries=boundaries)


@pytest.mark.parametrize(
    ("layers", "pp_size", "pp", "boundaries"),
    [
        (10, 3, 3, None),
        (10, 0, 0, None),
        (2, 3, 0, None),
        (10, 3, 0, (2,)),
        (10, 3, 0, (9, 2)),
        (10, 3, 0, (0, 5)),
        (10, 2, 0, (10,)),
    ],
)
def test_impossible_stages_are_refused(layers, pp_size, pp, boundaries):
    with pytest.raises(InvalidInputError):
        layout.stage_layers(layers, pp_size, pp, boundaries)


@pytest.mark.parametrize("pages", [1, 3])
def test_neighbours_are_registered_together_also_where_an_extent_holds_one_page(pages):
    counts = COUNTS | {IndexSpace.FULL: pages}
    chunking = layout.Chunking(extent_bytes=16 << 20)
    placement = layout.device_placement(FLASH, part(), page_counts=counts, page_first=True, chunking=chunking)
    regions = placement.regions_at([1 << 40] * len(placement.mappings))
    extents = layout.registered_extents(regions)
    for region in regions:
        last = region.extents()[-1][0]
        home = next(each for each in extents if each.address <= last < each.address + each.length_bytes)
        alike = [each for each in regions if each.page_stride_bytes == region.page_stride_bytes]
        begins = [each.extents()[-1][0] for each in alike]
        assert home.address <= min(begins), f"{region.label}: its page of all layers is one piece"
        assert max(begins) + alike[-1].page_bytes <= home.address + home.length_bytes


def test_no_manifest_ever_names_host_copies():
    counts = {IndexSpace.FULL_COPY: 30, IndexSpace.SWA_COPY: 4}
    placement = layout.copy_placement(
        FLASH, [part()], copied_components(FLASH, (), checkpoints=True), page_counts=counts
    )
    regions, rank = placement.regions_at([1 << 40]), Rank(pp=0, tp=0)
    manifest = RankManifest(fingerprint=fingerprint(FLASH), rank=rank, pp_size=1, tp_size=1, regions=regions)
    with pytest.raises(InvalidInputError, match=r"c4_kv layer 2 \(host copy\): its page ids count space 'full_twin'"):
        check_manifest(manifest, FLASH)


def test_what_cannot_live_on_the_host_is_refused():
    with pytest.raises(InvalidInputError, match="cannot live in the host pool"):
        layout.host_placement(FLASH, {ComponentKind.SWA_KV}, page_count=5)
    with pytest.raises(InvalidInputError, match="no layer of this node"):
        layout.host_placement(FLASH, {C4}, page_count=5, layers={0})
    for kinds, count in (((), 5), ({C4}, 0)):
        with pytest.raises(InvalidInputError, match="needs a component and a page"):
            layout.host_placement(FLASH, kinds, page_count=count)
    split = GQA.model_copy(update={"components": (GQA.components[0].model_copy(update={"host_capable": True}),)})
    with pytest.raises(UnsupportedError, match="split by heads"):
        layout.host_placement(split, {ComponentKind.MHA_KV}, page_count=5)
