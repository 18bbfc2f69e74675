"""The model alone: prefill and decode in one process, without kvbridge. What the demo's requests are compared with.

Owns: that process. Must not know: daemons, rooms, pages. It steps back (nice) for what is being timed.
"""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from typing import Any

import torch

from kvbridge.core.geometry.components import Encoding
from kvbridge.engine.adapters.deepseek_v4 import reencoded, replace_entries
from kvbridge.engine.adapters.sparse_deepseek_v4 import reencoding_cache
from kvbridge.engine.adapters.transformers import divergence, follow, generate
from kvbridge.testbed.demo.job import Compute, Decoded, DemoChannel, Job, Stepped
from kvbridge.testbed.demo.model import DemoModel, load_and_report, save_logits
from kvbridge.testbed.demo.reference import SelectedAttention
from kvbridge.testbed.demo.watch import CacheWatch

NICENESS = 10


def serve(job: Job, channel: DemoChannel) -> None:
    """Compute every prompt that is ordered and generate, until there are no more orders."""
    os.nice(NICENESS)
    alone = _Alone(job, channel, load_and_report(job, channel))
    while isinstance(order := channel.next_order(), Compute):
        channel.report(alone.compute(order))


class _Alone:
    """The model, and what is left of the requests before."""

    def __init__(self, job: Job, channel: DemoChannel, loaded: DemoModel) -> None:
        self._job = job
        self._channel = channel
        self._loaded = loaded
        self._after: dict[int, Any] = {}
        """The cache of each request after its answer."""

    def compute(self, order: Compute) -> Decoded:
        """Compute one request; a cache that loses something as rows is encoded and decoded once, and compared with itself."""
        job, loaded = self._job, self._loaded
        result = loaded.prefill(job, order.prompt, on_chunk=lambda _cache, _tokens: None, report=self._channel.report)
        as_it_is = job.encoding is Encoding.NATIVE and job.sparse is None and not order.kept_tokens
        cache = result.cache if as_it_is else self._as_kept(result.cache, order)
        attention = SelectedAttention(loaded.model)
        with closing(CacheWatch(loaded.model)) as watch, attention if job.sparse else nullcontext():
            ours = generate(loaded.model, cache, first_token=result.first_token, steps=job.steps)
        self._after[order.number] = cache
        watch.take().write(job.trace_file("alone", order.number))
        save_logits(job.logits_file("alone", order.number), torch.cat([result.logits[None], ours.logits]))
        self._channel.report(Stepped(steps=job.steps))
        if as_it_is:
            return Decoded(number=order.number, tokens=ours.tokens)
        apart = divergence(follow(loaded.model, result.cache, tokens=ours.tokens), ours)
        return Decoded(
            number=order.number,
            tokens=ours.tokens,
            mean_kl=apart.mean_kl,
            top1_agreement=apart.top1_agreement,
            share_of_rounding=attention.share_of_rounding if job.sparse else None,
        )

    def _as_kept(self, cache: Any, order: Compute) -> Any:  # noqa: ANN401 - transformers is untyped
        """Return the cache as decode gets it out of rows: sparse decode's, and with the entries that it had kept."""
        codec = self._loaded.codec()
        into = reencoding_cache(self._loaded.model.config, codec) if self._job.sparse else None
        kept = reencoded(codec, cache, into=into)
        if order.kept_tokens:
            replace_entries(codec, kept, self._after[order.previous], tokens=order.kept_tokens)
        return kept
