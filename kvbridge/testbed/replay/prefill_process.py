"""The prefill engine of a replay: writes prompts chunk by chunk into the pages of a prefill daemon.

Owns: one engine process that serves every rank of its node. Must not know: where the pages go.
"""

from __future__ import annotations

import time

import torch

from kvbridge.core.errors import BridgeError
from kvbridge.core.plan.operations import Section
from kvbridge.engine import PrefillEngine
from kvbridge.engine.adapters import synthetic
from kvbridge.testbed.engines.messages import Attached, Computed, Finished, RoomEnded
from kvbridge.testbed.replay.job import Job, Note, ReplayChannel, Serve


def serve(job: Job, channel: ReplayChannel) -> None:
    """Serve the requests that are ordered, one after another, until there are no more orders."""
    torch.set_num_threads(1)  # the daemons need the other cores
    with PrefillEngine.attach(job.prefill_runtime_dir) as engine:
        channel.report(Attached())
        while (order := channel.next_order()) is not None:
            try:
                _prefill(job, channel, engine, order)
            except BridgeError as error:
                engine.abort(order.room, f"could not be written: {error}")
                channel.report(RoomEnded(room=order.room, reason=f"on prefill: {error}"))
            engine.events()  # what happened to rooms is told by decode; unread, it would fill the connection


def _prefill(job: Job, channel: ReplayChannel, engine: PrefillEngine, order: Serve) -> None:
    tokens = order.prompt_tokens
    begun_s = time.monotonic()
    begun = engine.begin(order.room, prompt_tokens=tokens)
    for start in range(0, tokens, job.chunk_tokens):
        stop = min(start + job.chunk_tokens, tokens)
        chunk = Section(prompt_tokens=tokens, prefix_tokens=0, start_token=start, stop_token=stop)
        for views in engine.views.values():
            synthetic.fill(views, room=order.room, tables=begun.tables, section=chunk)
        engine.publish(order.room, stop)
        channel.report(Computed(tokens=stop - start))
    note = Note(
        number=order.number,
        room=order.room,
        prompt_tokens=tokens,
        output_tokens=order.output_tokens,
        finished_s=time.monotonic(),
    )
    channel.report(Finished(number=order.number, begun_s=begun_s, finished_s=note.finished_s))
    engine.finish(order.room, metadata=note.model_dump_json().encode())
