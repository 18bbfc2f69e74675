"""A node's geometry from a file that an engine has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.config.pools import ModelConfig
from kvbridge.core.errors import ConfigError
from kvbridge.daemon.model import load_geometry


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "does not hold a geometry: Invalid JSON.*write it again"),
        ('{"name": "x", "layer_count": 0}', r"does not hold a geometry \(layer_count\)"),
    ],
)
def test_what_is_no_geometry_is_refused_by_its_file(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "geometry.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^model.geometry: (?s:.*){complaint}"):
        load_geometry(ModelConfig(geometry=file))
