"""The model of the demo, the same in each of its processes."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any, Self

import torch

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.huggingface import geometry_from_config
from kvbridge.demo.messages import Job, Loaded
from kvbridge.demo.processes import Channel
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec
from kvbridge.engine.adapters.transformers import BYTE_VOCABULARY, load_model, weights_digest

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
    def load(cls, job: Job, channel: Channel) -> Self:
        """Load and report it. Raises InvalidInputError or UnsupportedError for what the demo cannot run."""
        name = job.model.get("dtype") or job.model.get("torch_dtype") or "float32"
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise InvalidInputError(f"{job.model_name}: dtype '{name}' is not one of {', '.join(_DTYPES)}")
        if int(job.model.get("vocab_size", BYTE_VOCABULARY)) < BYTE_VOCABULARY:
            raise InvalidInputError(
                f"{job.model_name}: vocab_size must be at least {BYTE_VOCABULARY}: tokens are bytes"
            )
        geometry = geometry_from_config(
            job.model, encoding=job.encoding, native_dtype_bytes=dtype.itemsize, name=job.model_name
        )
        device = torch.device(job.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(
                f"--device cuda: torch {torch.__version__} cannot use a GPU here; install a build of torch with CUDA, or leave "
                "--device out"
            )
        model = load_model(job.model, dtype=dtype, device=device)
        weights = weights_digest(model)
        versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
        channel.report(Loaded(weights, versions))
        return cls(model, dtype, device, geometry, weights)

    def codec(self, geometry: ModelGeometry | None = None) -> CacheCodec:
        """Return the codec for the geometry that a daemon serves, or for this model's own."""
        return CacheCodec(geometry or self.geometry, self.model.config, dtype=self.dtype, device=self.device)
