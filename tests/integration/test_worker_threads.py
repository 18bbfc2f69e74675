"""A rank worker on a thread of an engine's process: the process lives on, so nothing of the worker may."""

import gc
from pathlib import Path

import pytest

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace
from tests.helpers.rank_harness import Case, Setting, crossing
from tests.helpers.rank_pools import Form, Ranks

SETTING = Setting(
    preset("tiny-v4"),
    Ranks(),
    Ranks(),
    Form({IndexSpace.FULL: 8, IndexSpace.SWA: 4, IndexSpace.REQUEST: 3}),
    Form(
        {IndexSpace.FULL: 9, IndexSpace.SWA: 4, IndexSpace.REQUEST: 3, IndexSpace.HOST: 48},
        host=frozenset({ComponentKind.C4_KV}),
    ),
    "local",
)


@pytest.fixture
def no_collector():
    """Whatever is in a reference cycle stays, as it does for minutes in a process that is at work."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mapped_below(folder: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if str(folder) in line}


def test_what_a_worker_has_mapped_of_its_peers_goes_with_it(destination_process, tmp_path, no_collector):
    """A mapping that stayed would stay page-locked, and its lock would say for ever that somebody may still write."""
    before = mapped_below(tmp_path)
    with crossing(SETTING, destination_process, tmp_path) as link:
        link.deliver(Case(300))
        assert mapped_below(tmp_path) > before
    assert mapped_below(tmp_path) == before
