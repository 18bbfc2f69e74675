"""Whether what all writers report is all that a request needs: what a commit is decided by.

Owns: the expected amounts, the sentence about the first difference. Must not know: how work was shared, who reported.

Rows are counted, not bytes or operations: those depend on how a request was cut into chunks, rows do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import Amount, Amounts
from kvbridge.core.plan.pairing import destination_regions


def expected_amounts(
    geometry: ModelGeometry, destinations: Sequence[RankManifest], *, prompt_tokens: int, prefix_tokens: int
) -> dict[ComponentKind, int]:
    """Return the lane rows that all writers together must report, for every component that the destinations hold.

    `destinations` are the manifests of all ranks of one node. Each rank's device copy counts; the host pool is one
    copy, however many ranks list it. Raises InvalidInputError unless 0 <= prefix_tokens <= prompt_tokens.
    """
    lanes: dict[ComponentKind, int] = {}
    in_host: set[tuple[ComponentKind, int]] = set()
    for manifest in destinations:
        for place, region in destination_regions(manifest).items():
            if region.space is IndexSpace.HOST:
                if place in in_host:
                    continue
                in_host.add(place)
            lanes[region.component] = lanes.get(region.component, 0) + region.lanes
    return {
        component.kind: component.live_rows(prompt_tokens, prefix_tokens).count * lanes[component.kind]
        for component in geometry.components
        if component.kind in lanes
    }


def shortfall(expected: Mapping[ComponentKind, int], reported: Amounts) -> str | None:
    """Return a clause that names the first component of which not exactly the expected rows were reported, or None."""
    for kind in ComponentKind:
        due, got = expected.get(kind, 0), reported.get(kind, Amount()).lane_rows
        if got < due:
            return f"{kind}: {got} of {due} rows were reported as written, {due - got} are missing"
        if got > due:
            return f"{kind}: {got} rows were reported as written where {due} were due, {got - due} too many"
    return None
