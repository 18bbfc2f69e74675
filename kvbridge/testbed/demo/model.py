"""The model of the demo, the same in each of its processes.

Owns: loading it, its chunks, its logits as files. Must not know: rooms, pages.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.huggingface import geometry_from_config
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec
from kvbridge.engine.adapters.transformers import (
    BYTE_VOCABULARY,
    OnChunk,
    Prefill,
    load_config,
    load_model,
    prefill_chunks,
    weights_digest,
)
from kvbridge.testbed.demo.job import DemoChannel, Job, Loaded, Text
from kvbridge.testbed.engines.messages import Computed

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class DemoModel:
    """A model with random weights, and what describes its cache."""

    model: Any
    dtype: torch.dtype
    device: torch.device
    geometry: ModelGeometry
    weights: str

    @classmethod
    def load(cls, job: Job) -> Self:
        """Load it. Raises InvalidInputError or UnsupportedError for a configuration that the demo cannot run."""
        facts = load_config(job.hf_config)
        name = facts.get("dtype") or facts.get("torch_dtype") or "float32"
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise InvalidInputError(f"{job.hf_config.name}: dtype '{name}' is not one of {', '.join(_DTYPES)}")
        if int(facts.get("vocab_size", BYTE_VOCABULARY)) < BYTE_VOCABULARY:
            raise InvalidInputError(
                f"{job.hf_config.name}: vocab_size must be at least {BYTE_VOCABULARY}: tokens are bytes"
            )
        geometry = geometry_from_config(
            facts, encoding=job.encoding, native_dtype_bytes=dtype.itemsize, name=job.hf_config.stem
        )
        device = torch.device(job.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(
                f"--device cuda: torch {torch.__version__} cannot use a GPU here; install a build of torch with CUDA, or leave "
                "--device out"
            )
        model = load_model(facts, dtype=dtype, device=device)
        return cls(model, dtype, device, geometry, weights_digest(model))

    def codec(self, geometry: ModelGeometry | None = None) -> CacheCodec:
        """Return the codec for the geometry that a daemon serves, or for this model's own."""
        return CacheCodec(geometry or self.geometry, self.model.config, dtype=self.dtype, device=self.device)

    def prefill(
        self,
        job: Job,
        prompt: Text,
        *,
        on_chunk: OnChunk,
        report: Callable[[Computed], None],
        cache: Any = None,  # noqa: ANN401 - transformers is untyped
    ) -> Prefill:
        """Compute a prompt in the job's chunks, or what of it is not in `cache` yet, and report each."""
        done = 0 if cache is None else cache.get_seq_length()

        def after(held: Any, tokens: int) -> None:  # noqa: ANN401 - transformers is untyped
            nonlocal done
            on_chunk(held, tokens)
            report(Computed(tokens=tokens - done))
            done = tokens

        return prefill_chunks(self.model, prompt, chunk_tokens=job.chunk_tokens, on_chunk=after, cache=cache)


def load_and_report(job: Job, channel: DemoChannel) -> DemoModel:
    """Load the model and report it."""
    loaded = DemoModel.load(job)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    channel.report(Loaded(weights=loaded.weights, versions=versions))
    return loaded


def save_logits(file: Path, logits: torch.Tensor) -> None:
    """Write logits [positions, vocabulary] as float32 .npy."""
    np.save(file, logits.float().cpu().numpy())
