"""The commented files that `kvbridge init --complete` writes, and the schema that `kvbridge config schema` prints."""

import json
import re

import jsonschema_rs
import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from kvbridge.cli.config import ROLES
from kvbridge.cli.main import app
from kvbridge.config.loading import load_config
from kvbridge.core.ids import IndexSpace
from kvbridge.daemon.layout import load_geometry, plan_memory
from tests.helpers.example_configs import CONFIGS, example_configs

EXAMPLES = ("prefill", "decode", "bootstrap")


def schema_keys(kind: type[BaseModel], above: str = "") -> set[str]:
    keys = set()
    for name, field in kind.model_fields.items():
        keys.add(above + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= schema_keys(field.annotation, f"{above}{name}.")
    return keys


def file_keys(values: dict, above: str = "") -> set[str]:
    keys = set()
    for name, value in values.items():
        keys.add(above + name)
        if isinstance(value, dict):
            keys |= file_keys(value, f"{above}{name}.")
    return keys


def test_the_documentation_shows_what_init_writes():
    """`python -m tests.helpers.example_configs` writes the files again."""
    assert {f"{name}.yaml": (CONFIGS / f"{name}.yaml").read_text() for name in EXAMPLES} == example_configs()


@pytest.mark.parametrize("role", EXAMPLES)
def test_a_complete_file_loads_and_has_every_key_under_a_comment(role):
    load_config(ROLES[role], file=CONFIGS / f"{role}.yaml", environment={})
    lines = example_configs()[f"{role}.yaml"].splitlines()
    assert file_keys(yaml.safe_load("\n".join(lines))) == schema_keys(ROLES[role])
    keys = re.compile(r" *[a-z_]+:")
    bare = [line for before, line in zip(["", *lines], lines, strict=False) if keys.match(line) and "#" not in before]
    assert bare == []


@pytest.mark.parametrize("role", EXAMPLES[:2])
def test_the_set_up_with_two_gpus_can_be_laid_out(role):
    config = load_config(ROLES[role], file=CONFIGS / "two-gpus" / f"{role}.yaml", environment={})
    layout = plan_memory(config, load_geometry(config.model))
    assert [order.device for order in layout.orders.values()] == [0 if role == "prefill" else 1]
    assert layout.owned[IndexSpace.REQUEST] == 64


@pytest.mark.parametrize("role", ROLES)
def test_the_schema_describes_every_key_and_is_what_files_are_valid_by(role):
    schema = json.loads(CliRunner().invoke(app, ["config", "schema", "--role", role]).output)
    parts = {name: part.get("properties", {}) for name, part in schema["$defs"].items()}
    fields = {f"{name}.{key}": field for name, part in parts.items() for key, field in part.items()}
    assert [key for key, field in fields.items() if not field.get("description") and "$ref" not in field] == []
    validator = jsonschema_rs.validator_for(json.dumps(schema))
    for path in CONFIGS.rglob(f"{role}.yaml"):
        values = yaml.safe_load(path.read_text())
        validator.validate(values)
        assert not validator.is_valid(values | {"http": {"port": "many"}})
