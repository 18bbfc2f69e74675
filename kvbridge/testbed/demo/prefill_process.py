"""The prefill engine of the demo: computes prompts chunk by chunk into the pages of a prefill daemon.

Owns: one engine process that serves every pipeline stage of its node. Must not know: where the pages go.
"""

from __future__ import annotations

import time
from typing import Any

from kvbridge.engine import PrefillEngine
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, Placement, PrefillPacker, unpack
from kvbridge.testbed.demo.job import Began, DemoChannel, FirstToken, Job, Serve, page_ids
from kvbridge.testbed.demo.model import DemoModel, load_and_report, save_logits
from kvbridge.testbed.engines.messages import Attached, Finished, RoomEnded
from kvbridge.tier.keys import NO_KEYS


def serve(job: Job, channel: DemoChannel) -> None:
    """Compute every request that is ordered, until there are no more orders."""
    loaded = load_and_report(job, channel)
    if channel.next_order() is None:
        return
    with PrefillEngine.attach(job.prefill_runtime_dir) as engine:
        codec = loaded.codec(engine.geometry)
        channel.report(Attached())
        while isinstance(order := channel.next_order(), Serve):
            _prefill(job, channel, loaded, engine=engine, codec=codec, order=order)
            for event in engine.events():
                if event.kind in {"aborted", "failed"}:
                    channel.report(RoomEnded.told(event, "prefill"))


def _prefill(
    job: Job, channel: DemoChannel, loaded: DemoModel, *, engine: PrefillEngine, codec: CacheCodec, order: Serve
) -> None:
    tokens = len(order.prompt)
    begun_s = time.monotonic()
    keys = engine.page_keys(order.prompt) if order.page_keys else NO_KEYS
    begun = engine.begin(order.room, prompt_tokens=tokens, page_hashes=keys)
    computed = begun.computed_tokens
    channel.report(
        Began(
            number=order.number,
            pages=page_ids(begun.tables),
            computed_tokens=computed,
            host_tokens=begun.host_tokens,
        )
    )
    packers = [
        PrefillPacker(
            codec,
            Placement(views, begun.tables),
            prompt_tokens=tokens,
            computed_tokens=computed,
            checkpoints=begun.checkpoints,
        )
        for views in engine.views.values()
    ]
    cache = None
    if computed:
        cache = unpack(codec, [Placement(views, begun.restore) for views in engine.views.values()], tokens=computed)

    def publish(held: Any, upto: int) -> None:  # noqa: ANN401 - transformers is untyped
        for packer in packers:
            packer.advance(held)
        engine.publish(order.room, upto)

    result = loaded.prefill(job, order.prompt, on_chunk=publish, report=channel.report, cache=cache)
    save_logits(job.logits_file("prefill", order.number), result.logits[None])
    metadata = FirstToken(number=order.number, first_token=result.first_token, weights=loaded.weights)
    channel.report(Finished(number=order.number, begun_s=begun_s, finished_s=time.monotonic()))
    engine.finish(order.room, metadata=metadata.model_dump_json().encode(), checkpoints=packers[0].checkpointed)
