"""Which regions of two ranks meet, and what is refused when they do."""

from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.ids import IndexSpace as Space
from kvbridge.core.plan.pairing import Pairing
from tests.helpers.geometries import flash, gqa
from tests.helpers.manifests import Instance

PAGES = {Space.FULL: 16, Space.SWA: 4, Space.REQUEST: 2, Space.HOST: 16}


def create(source, destination, **changes) -> Pairing:
    where = {"destination_ordinal": 0, "destination_count": 1} | changes
    return Pairing.create(flash(), source, destination, **where)


def test_layers_of_different_forms_are_groups_of_their_own():
    source, destination = (Instance(gqa(), PAGES, base=base).manifests()[0] for base in (1 << 40, 1 << 50))
    odd = source.regions[1].model_copy(update={"page_stride_bytes": source.regions[1].page_stride_bytes * 2})
    source = source.model_copy(update={"regions": (source.regions[0], odd, source.regions[2])})
    pairing = Pairing.create(gqa(), source, destination, destination_ordinal=0, destination_count=1)
    assert [group.layers for group in pairing.groups] == [(0, 2), (1,)]


def test_the_host_copy_is_the_destination_where_both_are_listed():
    host = Instance(flash(), PAGES, base=1 << 50).with_host(Kind.C4_KV).manifests()[0]
    device = Instance(flash(), PAGES, base=1 << 52).manifests()[0]
    both = host.model_copy(update={"regions": (*device.regions, *[r for r in host.regions if r.space is Space.HOST])})
    pairing = create(Instance(flash(), PAGES).manifests()[0], both)
    spaces = {group.component.kind: group.destination.form.space for group in pairing.groups}
    assert (spaces[Kind.C4_KV], spaces[Kind.C4_INDEXER]) == (Space.HOST, Space.FULL)
