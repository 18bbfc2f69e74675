"""The parts of a node together: its pages for operators, how peers and engines can meet it, which prefixes it keeps."""

import pytest

from kvbridge.api.status import Readiness, RegistrationState
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import ConfigError, NotReadyError
from kvbridge.core.geometry.components import ComponentKind, Liveness
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.daemon import node as node_module
from kvbridge.daemon.announce import Announcer, is_significant
from kvbridge.daemon.bootstrap import BootstrapDaemon
from kvbridge.daemon.decode import decode_daemon
from kvbridge.daemon.links import control_modes
from kvbridge.daemon.node import NodeDaemon
from kvbridge.daemon.prefill import prefill_daemon
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.geometries import new_component
from tests.helpers.prefix_recount import check_cache
from tests.unit.bootstrap.fleet import node as fleet_node

NODE = {"instance": "i", "model": {"preset": "tiny-gqa"}, "pools": {"device": {"full": 8}}}


@pytest.fixture
def prefill() -> NodeDaemon:
    return prefill_daemon(PrefillConfig.model_validate(NODE))


async def test_bootstrap_is_not_ready_while_no_pair_can_be_made() -> None:
    daemon = BootstrapDaemon(BootstrapConfig())
    try:
        await daemon._look()
        nobody = daemon.readiness()
        assert (nobody.ready, len(nobody.reasons)) == (False, 2)
        assert nobody.reasons[0] == "no prefill instance is ready (0 known)"
        for role in Role:
            await daemon.directory.register(fleet_node(role.value, role))
        await daemon._look()
        assert daemon.readiness() == Readiness(ready=True)
    finally:
        await daemon.close()


def test_a_node_says_where_it_stands_with_the_directory(prefill: NodeDaemon) -> None:
    page = prefill.overview.status()
    assert (page.bootstrap.state, page.bootstrap.url) == (RegistrationState.NONE, "")
    assert not any("bootstrap" in reason for reason in page.ready.reasons)
    known = prefill_daemon(PrefillConfig.model_validate(NODE | {"bootstrap": {"url": "http://127.0.0.1:1"}}))
    known.overview.announcer = announced = Announcer(
        [], registration=known.overview.registration, load=known.overview.load, interval_s=1.0
    )
    page = known.overview.status()
    assert (page.bootstrap.state, page.bootstrap.problem) == ("unreachable", "not registered at bootstrap yet")
    assert "bootstrap does not know this node: not registered at bootstrap yet" in page.ready.reasons
    announced._registered = True
    assert known.overview.readiness().reasons[-1] == "bootstrap does not answer: not registered at bootstrap yet"


@pytest.mark.parametrize("readers", [0, 1])
def test_a_pool_full_of_cached_pages_is_shown_as_full_as_far_as_somebody_reads_them(prefill: NodeDaemon, readers: int):
    full, book, empty = IndexSpace.FULL, prefill.book, prefill.overview.load()
    cache, keys = PrefixCache(book, PrefixIndex((full,), 8)), Keys(bytes(range(128)))
    got = cache.admit(Owner(1, 1), keys, lambda _: {full: 8})
    cache.keep(Owner(1, 1), keys, 0, got.own)
    book.free(Owner(1, 1))
    if not readers:
        cache.let_go(Owner(1, 1))
    available = 0 if readers else 8
    page, load = prefill.overview.status(), prefill.overview.load()
    assert page.pools[full][PageState.CACHED] == 8
    assert page.available_pages == {full: available}
    assert (load.available_pages, load.total_pages) == ({"full": available}, {"full": 8})
    assert is_significant(empty, load) is bool(readers)
    metrics = b"".join(prefill.overview.render_metrics()[0]).decode()
    for line in (
        'kvbridge_pool_pages{space="full",state="free"} 0.0',
        'kvbridge_pool_pages{space="full",state="cached"} 8.0',
        f'kvbridge_pages_available{{space="full"}} {available}.0',
    ):
        assert line in metrics


def test_what_is_only_known_when_somebody_scrapes(prefill: NodeDaemon) -> None:
    pieces, _ = prefill.overview.render_metrics()
    shown = b"".join(pieces).decode()
    for line in (
        'kvbridge_pool_pages{space="full",state="free"} 8.0',
        'kvbridge_engines{state="attached"} 0.0',
        'kvbridge_workers{state="absent"} 1.0',
        'kvbridge_rooms{state="transferring"} 0.0',
        'kvbridge_directory_registration{state="none"} 1.0',
        "kvbridge_admission_waiting_requests 0.0",
        "kvbridge_ready 0.0",
    ):
        assert line in shown


def test_twins_are_on_the_page_and_nobody_else_hears_of_them_or_waits_for_them() -> None:
    tier = {"enabled": True, "model_name": "m", "model_revision": "1", "host": {"pages": 4}}
    node = prefill_daemon(PrefillConfig.model_validate(NODE | {"tier": tier, "admission": {"unready_after_s": 0.1}}))
    told = node.overview.load()
    node.book.reserve(Owner(1, 1), {IndexSpace.FULL_COPY: 4})
    page, load = node.overview.status(), node.overview.load()
    assert page.pools[IndexSpace.FULL_COPY][PageState.HELD] == 4
    assert page.available_pages == {IndexSpace.FULL: 8, IndexSpace.FULL_COPY: 0}
    assert page.memory_bytes == node.layout.total_bytes
    assert (load.available_pages, load.total_pages) == (told.available_pages, {"full": 8})
    assert not is_significant(told, load)
    node.admission.tick()
    assert node.admission.starved_s == 0
    metrics = b"".join(node.overview.render_metrics()[0]).decode()
    assert 'kvbridge_pool_pages{space="full_twin",state="held"} 4.0' in metrics


ADOPTED = {"memory": "adopted", "host": {"pages": 8}}
V4 = {"preset": "tiny-v4"}


@pytest.mark.parametrize(
    ("keys", "insecure", "listening", "expected"),
    [
        (False, False, "tcp://127.0.0.1:7", "local"),
        (False, True, "tcp://10.0.0.1:7", "plain"),
        (True, False, "tcp://10.0.0.1:7", "curve"),
        (False, True, "", "local plain"),
        (True, True, "", "curve local plain"),
    ],
)
def test_how_a_node_can_be_met(keys, insecure, listening, expected):
    curve = {"curve": {"secret_key_file": "/nowhere"}} if keys else {}
    config = DecodeConfig(instance="i", model=V4, pools=ADOPTED, control=curve, insecure=insecure)
    address = PeerAddress(endpoint=listening, public_key="k" * 40 * keys) if listening else None
    assert " ".join(control_modes(config, address)) == expected


def test_an_engine_cannot_attach_to_memory_that_is_not_there_yet():
    """An engine with memory of its own waits for the host pool, too."""
    rank = (Rank(pp=0, tp=0),)
    owned = PrefillConfig(instance="i", model={"preset": "tiny-gqa"}, pools={"device": {"full": 8}})
    for node in (prefill_daemon(owned), decode_daemon(DecodeConfig(instance="i", model=V4, pools=ADOPTED))):
        with pytest.raises(NotReadyError, match="memory is being created"):
            node.attached(1, rank)
    prefill = prefill_daemon(PrefillConfig(instance="i", model=V4, pools={"memory": "adopted"}))
    assert prefill.attached(1, rank).host == ()


FULL, HOST = IndexSpace.FULL, IndexSpace.HOST
TIER = {"enabled": True, "model_name": "tiny", "model_revision": "1"}


def test_a_model_with_a_state_that_has_no_checkpoint_keeps_prefixes_on_decode_alone(monkeypatch):
    model = preset("tiny-gqa")
    kind, ring = ComponentKind.C128_STATE, {"slots": 1, "rows": 1 << 32}
    state = new_component(kind, (0,), IndexSpace.REQUEST, Liveness.WHOLE, (64,), **ring)
    stateful = model.model_copy(update={"components": (*model.components, state)})
    monkeypatch.setattr(node_module, "load_geometry", lambda _: stateful)
    fields = {"instance": "i", "model": {"preset": "tiny-gqa"}, "tier": TIER}
    fields |= {"pools": {"device": {"full": 8, "request": 2}}}
    with pytest.raises(ConfigError, match=r"tier.enabled: .*c128_state.*decode nodes keep prefixes of this model"):
        prefill_daemon(PrefillConfig.model_validate(fields))
    decode_daemon(DecodeConfig.model_validate(fields | {"pools": fields["pools"] | {"host": {"components": []}}}))


def test_the_end_of_a_worker_takes_all_that_is_on_the_device_alone_when_it_had_made_device_memory():
    ranks = [{"pp": 0, "tp": 0, "device": "cpu"}, {"pp": 0, "tp": 1, "device": "cuda:3"}]
    fields = {
        "instance": "d",
        "model": {"preset": "tiny-v4"},
        "parallelism": {"tp_size": 2, "ranks": ranks},
        "pools": {"device": {"full": 8, "swa": 4, "request": 2}, "host": {"pages": 4}},
        "tier": TIER | {"host": {"pages": 4}},
    }
    node = NodeDaemon(DecodeConfig.model_validate(fields), Role.DECODE)
    cache, owner, keys = node.prefixes, Owner(1, 1), Keys.of([b"0" * 16, b"1" * 16, b"2" * 16])
    own = cache.admit(owner, keys, lambda _: {FULL: 3, HOST: 3}).own
    cache.keep(owner, keys, 0, own)
    cache.let_go(owner)
    node.book.free(owner)
    cache.copies.end_backup(cache.copies.start_backup(Owner(NO_ROOM, 1), keys, at_most=2), done=True)
    node.worker_gone(Rank(pp=0, tp=0), "its memory is the node's")
    assert cache.residency()[:3] == (1, 2, 0)
    node.worker_gone(Rank(pp=0, tp=1), "its memory was its own")
    assert cache.residency()[:3] == (0, 0, 2)
    assert [node.book.counts()[space][PageState.CACHED] for space in (FULL, HOST, IndexSpace.FULL_COPY)] == [0, 2, 2]
    check_cache(cache)
