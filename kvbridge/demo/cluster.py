"""The daemons of one demo, and how large their pools are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kvbridge.cli.local_cluster import ClusterSpec, NodeSpec
from kvbridge.config.pools import DeviceKind
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.pages import NO_HOST, most_window_pages, pages_needed
from kvbridge.core.ids import IndexSpace
from kvbridge.demo.options import IN_FLIGHT, DemoOptions

LONG_S = 3600.0
"""The demo holds rooms while it lasts: no limit may end one before."""
REVISION = "seed 0"
"""Of the random weights."""
CHECKPOINTS = 2
"""Of windows and states that a request may leave on prefill: at its last page's end, and where it left a known prefix."""


def prefill_only_tokens(options: DemoOptions) -> int:
    """Return the length of a room that takes as many pages of prefill as decode has."""
    return _decode_pages(options)[IndexSpace.FULL] * options.geometry.tokens_per_page


def cluster_spec(options: DemoOptions, name: str, model_file: Path) -> ClusterSpec:
    """Return the daemons of a demo of this name."""
    host, windows = _host_kinds(options), most_window_pages(options.geometry)
    prefill, decode = _pages(options, [prefill_only_tokens(options), *_at_once(options)]), _decode_pages(options)
    checkpoints = CHECKPOINTS * len(options.requests) * windows if options.turns else 0
    kept: Counter[IndexSpace] = Counter()
    if options.host_tier:  # host memory has room for all that is ever said, the device for the windows of one request
        kept = _pages(options, [each.tokens for each in options.requests], steps=options.step_count, host=host)
    prefill[IndexSpace.SWA] += (CHECKPOINTS + 1) * windows if options.host_tier else checkpoints
    # As many as full ones: bootstrap counts with that, since it does not know what lives on the host.
    host_pages = decode[IndexSpace.FULL] + kept[IndexSpace.HOST] if host else 0
    decode.pop(IndexSpace.HOST, None)
    pools = {"device": _named(decode), "host": {"components": sorted(host), "pages": host_pages}}
    below = {"pages": kept[IndexSpace.FULL], "checkpoint_pages": 0}
    return ClusterSpec(
        model={"hf_config": str(model_file), "encoding": options.encoding.value},
        transport=options.chosen_transport.value,
        prefill=NodeSpec(
            instance=f"{name}-prefill",
            pp=options.prefill_pp,
            pools={"device": _named(prefill)},
            more=_sections(options, options.prefill_pp, below | {"checkpoint_pages": checkpoints}),
        ),
        decode=NodeSpec(
            instance=f"{name}-decode",
            pools=pools,
            more=_sections(options, 1, below, generated=options.keep_answers),
        ),
        bootstrap={"timeouts": {"ticket_s": LONG_S, "room_keep_s": 2 * LONG_S}},
        ends_with_us=True,
    )


def _sections(options: DemoOptions, stages: int, below: dict[str, int], **tier: object) -> dict[str, Any]:
    """Return a node's sections but for pools: its time limits, what of prefixes stays, and where its ranks are on a GPU."""
    long = dict.fromkeys(("begin_s", "offer_s", "room_s", "claim_s"), LONG_S)
    sections: dict[str, Any] = {"timeouts": {**long, "shutdown_rooms_s": 3.0, "shutdown_close_s": 3.0}}
    if options.turns:
        tier |= {"enabled": True, "model_name": options.model_name, "model_revision": REVISION}
        sections["tier"] = tier | ({"host": below} if options.host_tier else {})
    if options.device is not DeviceKind.CPU:
        ranks = [{"pp": stage, "tp": 0, "device": options.torch_device} for stage in range(stages)]
        sections["parallelism"] = {"pp_size": stages, "tp_size": 1, "ranks": ranks}
    return sections


def _host_kinds(options: DemoOptions) -> frozenset[ComponentKind]:
    """The components in decode's host pool."""
    return frozenset({ComponentKind.C4_KV} & {component.kind for component in options.geometry.components})


def _at_once(options: DemoOptions) -> list[int]:
    """The longest prompts that can be in flight at once, and the last turn of every conversation, whose pages are to stay.

    With `--host-tier` one request fits, and nothing stays.
    """
    lengths = sorted(request.tokens for request in options.requests)
    last = {request.conversation: request.tokens for request in options.requests if request.conversation}
    return lengths[-1:] if options.host_tier else [*last.values(), *lengths[-IN_FLIGHT:]]


def _decode_pages(options: DemoOptions) -> Counter[IndexSpace]:
    return _pages(options, _at_once(options), steps=options.step_count, host=_host_kinds(options))


def _pages(
    options: DemoOptions, prompts: list[int], *, steps: int = 0, host: frozenset[ComponentKind] = NO_HOST
) -> Counter[IndexSpace]:
    """Return the pages of prompts of so many tokens and of `steps` more after each, all at once."""
    total: Counter[IndexSpace] = Counter()
    for tokens in prompts:
        total.update(pages_needed(options.geometry, tokens=tokens + steps, prompt_tokens=tokens, host=host))
    return total


def _named(pages: Counter[IndexSpace]) -> dict[str, int]:
    return {space.value: max(1, count) for space, count in pages.items()}
