"""From the `model` section of a configuration to its geometry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvbridge.config.pools import ModelConfig
from kvbridge.core.errors import ConfigError, UnavailableError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.models import geometry_from_config, preset

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def load_geometry(config: ModelConfig) -> ModelGeometry:
    """Return the model's geometry. Raises ConfigError for an unreadable file, InvalidInputError for what it says."""
    if config.geometry is not None:
        return _read_geometry(config.geometry)
    if config.hf_config is None:
        return preset(config.preset)
    facts = read_hf_config(config.hf_config)
    extra: dict[str, int] = {} if config.tokens_per_page is None else {"tokens_per_page": config.tokens_per_page}
    return geometry_from_config(
        facts,
        encoding=config.encoding,
        native_dtype_bytes=native_dtype_bytes(facts),
        name=config.hf_config.stem,
        **extra,
    )


def _read_geometry(path: Path) -> ModelGeometry:
    try:
        return ModelGeometry.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UnavailableError(f"model.geometry: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"model.geometry: {path} does not hold a geometry{f' ({where})' if where else ''}: {first['msg']}; have the engine "
            "write it again"
        ) from None


def read_hf_config(path: Path) -> dict[str, Any]:
    """Read a Hugging Face `config.json`. Raises ConfigError."""
    try:
        facts = json.loads(path.read_text())
    except OSError as error:
        raise UnavailableError(f"model.hf_config: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model.hf_config: {path} is not JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ConfigError(f"model.hf_config: {path} does not hold a JSON object")
    return facts


def native_dtype_bytes(facts: dict[str, Any]) -> int:
    """Return the width of the model's own numbers: key `dtype` (or `torch_dtype`), 4 when there is none."""
    name = facts.get("dtype") or facts.get("torch_dtype") or "float32"
    if name not in _DTYPE_BYTES:
        raise ConfigError(f"model.hf_config: dtype '{name}' is not one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]
