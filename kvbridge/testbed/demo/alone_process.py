"""The model alone: prefill and decode in one process, without kvbridge. What the demo's requests are compared with.

Owns: that process. Must not know: daemons, rooms, pages. It steps back (nice) for what is being timed.
"""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from typing import Any

import torch

from kvbridge.core.geometry.components import Encoding
from kvbridge.engine.adapters.deepseek_v4 import reencoded
from kvbridge.engine.adapters.sparse_deepseek_v4 import reencoding_cache
from kvbridge.engine.adapters.transformers import divergence, follow, generate
from kvbridge.testbed.demo.job import Decoded, DemoChannel, Job, Prompt, Stepped
from kvbridge.testbed.demo.model import DemoModel, load_and_report, save_logits
from kvbridge.testbed.demo.reference import SelectedAttention
from kvbridge.testbed.demo.watch import CacheWatch

NICENESS = 10


def serve(job: Job, channel: DemoChannel) -> None:
    """Compute every prompt and generate, then wait for the end."""
    os.nice(NICENESS)
    loaded = load_and_report(job, channel)
    for prompt in job.prompts:
        channel.report(_compute(job, channel, loaded, prompt))
    while channel.next_order() is not None:
        pass


def _compute(job: Job, channel: DemoChannel, loaded: DemoModel, prompt: Prompt) -> Decoded:
    """Compute one request; a quantised cache is encoded and decoded once, as pages do it, and compared with itself."""
    result = loaded.prefill(job, prompt, on_chunk=lambda _cache, _tokens: None, report=channel.report)
    as_it_is = job.encoding is Encoding.NATIVE and job.sparse is None
    cache = result.cache if as_it_is else _as_kept(job, loaded, result.cache)
    attention = SelectedAttention(loaded.model)
    with closing(CacheWatch(loaded.model)) as watch, attention if job.sparse else nullcontext():
        ours = generate(loaded.model, cache, first_token=result.first_token, steps=job.steps)
    watch.take().write(job.trace_file("alone", prompt.number))
    save_logits(job.logits_file("alone", prompt.number), torch.cat([result.logits[None], ours.logits]))
    channel.report(Stepped(steps=job.steps))
    if as_it_is:
        return Decoded(number=prompt.number, tokens=ours.tokens)
    apart = divergence(follow(loaded.model, result.cache, tokens=ours.tokens), ours)
    return Decoded(
        number=prompt.number,
        tokens=ours.tokens,
        mean_kl=apart.mean_kl,
        top1_agreement=apart.top1_agreement,
        share_of_rounding=attention.share_of_rounding if job.sparse else None,
    )


def _as_kept(job: Job, loaded: DemoModel, cache: Any) -> Any:  # noqa: ANN401 - transformers is untyped
    """Return the cache as decode gets it out of rows. Sparse decode makes rows of its own new entries, too."""
    codec = loaded.codec()
    into = reencoding_cache(loaded.model.config, codec) if job.sparse else None
    return reencoded(codec, cache, into=into)
