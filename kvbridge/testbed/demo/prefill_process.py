"""The prefill engine of the demo: computes prompts chunk by chunk into the pages of a prefill daemon.

Owns: one engine process that serves every pipeline stage of its node. Must not know: where the pages go.
"""

from __future__ import annotations

import time
from typing import Any

from kvbridge.engine import PrefillEngine
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, Placement, PrefillPacker
from kvbridge.testbed.demo.job import Began, DemoChannel, FirstToken, Job, Serve, page_ids
from kvbridge.testbed.demo.model import DemoModel, load_and_report, save_logits
from kvbridge.testbed.engines.messages import Attached, Finished, RoomEnded


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
    prompt = job.prompts[order.number - 1]
    begun_s = time.monotonic()
    begun = engine.begin(order.room, prompt_tokens=prompt.tokens)
    channel.report(Began(number=prompt.number, pages=page_ids(begun.tables)))
    packers = [
        PrefillPacker(codec, Placement(views, begun.tables), prompt_tokens=prompt.tokens)
        for views in engine.views.values()
    ]

    def publish(cache: Any, tokens: int) -> None:  # noqa: ANN401 - transformers is untyped
        for packer in packers:
            packer.advance(cache)
        engine.publish(order.room, tokens)

    result = loaded.prefill(job, prompt, on_chunk=publish, report=channel.report)
    save_logits(job.logits_file("prefill", prompt.number), result.logits[None])
    metadata = FirstToken(number=prompt.number, first_token=result.first_token, weights=loaded.weights)
    channel.report(Finished(number=prompt.number, begun_s=begun_s, finished_s=time.monotonic()))
    engine.finish(order.room, metadata=metadata.model_dump_json().encode())
