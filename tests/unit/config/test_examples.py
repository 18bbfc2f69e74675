"""The example files: each loads, and has exactly the keys of the schema, each under a comment."""

from __future__ import annotations

import jsonschema_rs
import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from kvbridge.cli.config import ROLES
from kvbridge.cli.main import app
from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.ids import IndexSpace
from kvbridge.daemon.memory import plan_memory
from kvbridge.daemon.model import load_geometry
from tests.helpers.example_configs import CONFIGS, example_configs

EXAMPLES = [("prefill.yaml", PrefillConfig), ("decode.yaml", DecodeConfig), ("bootstrap.yaml", BootstrapConfig)]


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


def test_the_examples_are_what_init_writes():
    """`python -m tests.helpers.example_configs` writes them again."""
    assert {name: (CONFIGS / name).read_text() for name, _ in EXAMPLES} == example_configs()


@pytest.mark.parametrize(("name", "kind"), EXAMPLES)
def test_the_example_loads(name, kind):
    load_config(kind, file=CONFIGS / name, environment={})


@pytest.mark.parametrize(("name", "kind"), EXAMPLES)
def test_the_example_has_exactly_the_keys_of_the_schema(name, kind):
    present = file_keys(yaml.safe_load((CONFIGS / name).read_text()))
    expected = schema_keys(kind)
    assert present - expected == set()
    assert expected - present == set()


@pytest.mark.parametrize(("name", "kind"), EXAMPLES)
def test_every_key_of_the_example_is_commented(name, kind):
    lines = (CONFIGS / name).read_text().splitlines()
    bare = [line for before, line in zip(["", *lines], lines, strict=False) if _is_key(line) and "#" not in before]
    assert bare == []


@pytest.mark.parametrize(("name", "kind"), EXAMPLES[:2])
def test_the_set_up_with_two_gpus_can_be_laid_out(name, kind):
    config = load_config(kind, file=CONFIGS / "two-gpus" / name, environment={})
    layout = plan_memory(config, load_geometry(config.model))
    assert [order.device for order in layout.orders.values()] == [0 if name == "prefill.yaml" else 1]
    assert layout.owned[IndexSpace.REQUEST] == 64


def _is_key(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(("#", "-"))


@pytest.mark.parametrize("role", ROLES)
def test_the_published_schema_is_that_of_the_program(role):
    told = CliRunner().invoke(app, ["config", "schema", "--role", role])
    command = f"kvbridge config schema --role {role} > configs/{role}.schema.json"
    assert told.output == (CONFIGS / f"{role}.schema.json").read_text(), f"make it again: {command}"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.parent.name + path.name)
def test_every_example_is_valid_by_the_schema_that_it_names(path):
    text = path.read_text()
    named = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    validator = jsonschema_rs.validator_for((path.parent / named).read_text())
    validator.validate(yaml.safe_load(text))
    wrong = yaml.safe_load(text) | {"http": {"port": "many"}}
    assert not validator.is_valid(wrong)


@pytest.mark.parametrize(("name", "kind"), EXAMPLES)
def test_every_key_is_described(name, kind):
    schema = kind.model_json_schema()
    described = {
        f"{name}.{key}": field
        for name, part in schema["$defs"].items()
        for key, field in part.get("properties", {}).items()
    }
    assert [key for key, field in described.items() if not field.get("description") and "$ref" not in field] == []
