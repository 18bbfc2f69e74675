"""What makes two models the same, and how a difference is told."""

import pytest

from kvbridge.core.geometry.components import Component, ModelGeometry
from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.geometry.manifest import fingerprint, first_difference
from kvbridge.core.geometry.presets import PRESETS, preset

FLASH = preset("deepseek-v4-flash")


def changed(geometry, kind, **facts):
    """The geometry with facts of one component replaced, validated anew."""
    components = [
        Component.model_validate(part.model_dump() | (facts if part.kind is kind else {}))
        for part in geometry.components
    ]
    return ModelGeometry.model_validate(geometry.model_dump() | {"components": components})


def test_fingerprints_are_stable_across_runs_and_releases():
    """Written down on purpose: a change here makes running peers refuse each other, and so needs a new version."""
    assert {name: fingerprint(preset(name)) for name in PRESETS} == {
        "deepseek-v4-flash": "31ec6d6007ad99982a3d484f290b22b4",
        "deepseek-v4-pro": "f156d863f8d4d39d42622ed9ac892b69",
        "deepseek-v3.2": "76ddb685b5bf25bc29c9eba31d06b719",
        "tiny-v4": "db865455ff3d6e0502678fc36b24ef41",
        "tiny-gqa": "e05c47269450f4ae77606e8f99c134d2",
    }


def test_the_name_and_the_order_of_components_do_not_count():
    other = ModelGeometry(
        name="another name",
        layer_count=FLASH.layer_count,
        tokens_per_page=FLASH.tokens_per_page,
        components=tuple(reversed(FLASH.components)),
    )
    assert fingerprint(other) == fingerprint(FLASH)
    assert first_difference(FLASH, other) is None


@pytest.mark.parametrize(
    ("kind", "facts", "sentence"),
    [
        (Kind.SWA_KV, {"window": 127}, "components.swa_kv.window is 128 here and 127 on the peer"),
        (
            Kind.C4_KV,
            {"row_parts_bytes": (512, 16)},
            "components.c4_kv.row_parts_bytes is [576, 8] here and [512, 16] on the peer",
        ),
        (
            Kind.C4_KV,
            {"page_alignment_bytes": 512},
            "components.c4_kv.page_alignment_bytes is 576 here and 512 on the peer",
        ),
        (Kind.C4_KV, {"host_capable": False}, "components.c4_kv.host_capable is True here and False on the peer"),
    ],
)
def test_every_fact_counts_and_is_named(kind, facts, sentence):
    other = changed(FLASH, kind, **facts)
    assert fingerprint(other) != fingerprint(FLASH)
    assert first_difference(FLASH, other) == sentence


def test_a_component_of_one_side_only():
    fewer = FLASH.model_copy(update={"components": FLASH.components[1:]})
    assert first_difference(FLASH, fewer) == "components.c4_kv exists only here"
    assert first_difference(fewer, FLASH) == "components.c4_kv exists only on the peer"
