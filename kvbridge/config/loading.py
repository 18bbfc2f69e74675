"""From files, variables and flags to a valid configuration: flags over environment over file over defaults.

Every mistake is reported at once, each as `path: what is wrong, got value (from where it came)`.
"""

from __future__ import annotations

import difflib
import os
import re
import typing
from collections.abc import Container, Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from kvbridge.config.endpoints import TokenConfig
from kvbridge.core.errors import ConfigError, UnavailableError
from kvbridge.core.prefixes import TokenGrant
from kvbridge.processes import PROCESS_VARIABLES, SETTINGS_PREFIX

KeyPath = tuple[str, ...]

MISSING_KEY = "is required and has no default"
LONGEST_VALUE = 80
LONGEST_PLAIN = 24
_ADDRESSES = ("tcp://", "ipc://", "http://", "https://")
_SOUNDS_SECRET = re.compile(r"token|secret|key|passw|credential", re.IGNORECASE)
"""Keys whose value may be a secret, perhaps one in the wrong place: it is not shown."""
_COUNTS_TOKENS = re.compile(r"tokens(_per_\w+)?$", re.IGNORECASE)

_Sections = list[tuple[str, type[BaseModel] | None]]

RESERVED_VARIABLES = frozenset({"KVBRIDGE_CONFIG", "KVBRIDGE_SGLANG_CONFIG", *PROCESS_VARIABLES})
"""Variables with the prefix that are no settings: the command line and processes read them."""

_DOTTED_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*")
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class _Layers:
    """Values of all sources, and the origin of each value. A later source is stronger."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[KeyPath, str] = {}
        self.mistakes: list[str] = []

    def add(self, value: object, origin: str, at: KeyPath = ()) -> None:
        """Add a value, or the leaves of a mapping, at a key."""
        if isinstance(value, Mapping) and value:
            for key, below in value.items():
                self.add(below, origin, (*at, str(key)))
            return
        inner = self.values
        for key in at[:-1]:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        # An empty mapping adds nothing to one that is there.
        if at and not (isinstance(value, dict) and isinstance(inner.get(at[-1]), dict)):
            inner[at[-1]], self.origins[at] = value, origin

    def add_environment(self, environment: Mapping[str, str], known: Container[str]) -> None:
        """Add the variables with our prefix. `known`: the sections at the top."""
        for name in sorted(environment):
            if not name.upper().startswith(SETTINGS_PREFIX) or name.upper() in RESERVED_VARIABLES:
                continue
            path, text = tuple(name.upper().removeprefix(SETTINGS_PREFIX).lower().split("__")), environment[name]
            origin = f"environment {name}{'' if path[0] in known else _variable_hint(name.upper(), path)}"
            if text == "null" or text.startswith(("[", "{")):
                try:
                    self.add(yaml.safe_load(text), origin, path)
                except yaml.YAMLError as error:
                    self.mistakes.append(f"environment {name}: not a valid list or mapping: {_yaml_problem(error)}")
            else:
                self.add(text, origin, path)

    def add_overrides(self, overrides: Iterable[str]) -> None:
        """Add values of `--set`."""
        for override in overrides:
            key, equals, text = override.partition("=")
            if not equals or not all(key.split(".")):
                shown = override if _DOTTED_KEY.fullmatch(override) else "(not shown)"
                self.mistakes.append(f"flag --set {shown}: expected KEY=VALUE with a dotted key, as http.port=0")
                continue
            try:
                self.add(yaml.safe_load(text) if text else "", f"flag --set {key}", tuple(key.split(".")))
            except yaml.YAMLError as error:
                self.mistakes.append(f"flag --set {key}: the value is not valid YAML: {_yaml_problem(error)}")

    def build(self, kind: type[ConfigT]) -> ConfigT:
        """Return the configuration. Raises ConfigError with every mistake."""
        found, config = self.mistakes, None
        try:
            config = kind.model_validate(self.values)
        except ValidationError as error:
            found = [*describe(error, kind, self.origins), *found]
        if config is None or found:
            raise ConfigError("the configuration is wrong:\n" + "\n".join(f"  {mistake}" for mistake in found))
        return config


def load_config(
    kind: type[ConfigT],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    roles: Mapping[str, type[BaseModel]] | None = None,
) -> ConfigT:
    """Return a valid configuration, or raise one ConfigError that lists every mistake.

    From weak to strong: defaults, `file` (YAML), `environment` (default: this process's; `KVBRIDGE_HTTP__PORT` sets http.port),
    `overrides` (`http.port=0`, with a value in YAML), `flags` (dotted key to value; None: not given). Mappings merge, lists
    replace one another. `roles` are the schemas, `kind` among them, that the file may have been written for.
    """
    layers, document = _Layers(), dict[str, Any]()
    if file is not None:
        document, lines = read_document(file)
        layers.add(document, str(file))
        for path in layers.origins.keys() & lines.keys():
            layers.origins[path] = f"{file} line {lines[path]}"
    layers.add_environment(os.environ if environment is None else environment, kind.model_fields)
    layers.add_overrides(overrides)
    for key, value in (flags or {}).items():
        if value is not None:
            layers.add(value, f"flag for {key}", tuple(key.split(".")))
    try:
        return layers.build(kind)
    except ConfigError as error:
        names = fitting_roles(document, roles or {})
        if not document or not names or _is_valid(kind, document):
            raise
        hint = f"{file}: as it stands, this is a valid {' or '.join(names)} configuration"
        raise ConfigError(f"{error}\n  {hint}") from None


def merge_config(
    kind: type[ConfigT], sources: Iterable[tuple[str, Mapping[str, Any]]]
) -> tuple[ConfigT, dict[str, Any]]:
    """Return a valid configuration from a program's own values, and the merged values.

    `sources` have a name for messages and their values, from weak to strong. They merge as in `load_config`, and mistakes are
    raised as there.
    """
    layers = _Layers()
    for origin, values in sources:
        layers.add(values, origin)
    return layers.build(kind), layers.values


def read_document(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return a YAML mapping, and the line (from 1) on which each key stands.

    Raises ConfigError for a file that is missing, is no mapping or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}, {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected a mapping of keys at the top, got something else")
        lines: dict[KeyPath, int] = {}
        _collect_lines(root, (), lines, path)
        return loader.construct_document(root), lines
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid YAML: {_yaml_problem(error)}") from None
    finally:
        loader.dispose()


def _collect_lines(node: yaml.MappingNode, above: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    for key, value in node.value:
        here = (*above, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"{path} line {line}: {'.'.join(here)} is set twice, first on line {lines[here]}")
        lines[here] = line
        if isinstance(value, yaml.MappingNode):
            _collect_lines(value, here, lines, path)


def _yaml_problem(error: Exception) -> str:
    """Return the text of a YAML error without the text around the mistake, which may be a secret."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{getattr(error, 'problem', None) or 'a value cannot be read'}"


def fitting_roles(document: Mapping[str, Any], roles: Mapping[str, type[BaseModel]]) -> list[str]:
    """Return the roles for which a file's keys are a valid configuration."""
    return [name for name, schema in roles.items() if _is_valid(schema, document)]


def _is_valid(kind: type[BaseModel], values: Mapping[str, Any]) -> bool:
    try:
        kind.model_validate(values)
    except ValidationError:
        return False
    return True


def _variable_hint(name: str, path: KeyPath) -> str:
    if _SERVICE_LINK.search(name):
        return "; Kubernetes makes such variables for services: set enableServiceLinks: false on the pod"
    if len(path) == 1 and "_" in path[0]:
        return f"; two underscores lead into a section: {SETTINGS_PREFIX}HTTP__PORT is http.port"
    return ""


def describe(error: ValidationError, kind: type[BaseModel], origins: Mapping[KeyPath, str]) -> list[str]:
    """Return one line for each mistake that pydantic found in data whose leaves came from `origins`."""
    lines: list[str] = []
    for found in error.errors(include_url=False):
        sections = _sections(kind, found["loc"])
        path = tuple(key for key, _ in sections)
        name = ".".join(path)
        if found["type"] == "extra_forbidden":
            lines.append(f"{name}: {_unknown_key(sections)}{_origin(path, origins)}")
        elif found["type"] == "union_tag_invalid":
            expected = found["ctx"]["expected_tags"].replace("'", "")
            lines.append(f"{name}.kind: one of {expected}{_origin((*path, 'kind'), origins)}")
        elif found["type"] == "missing":
            lines.append(f"{name}: {MISSING_KEY}")
        elif found["type"] == "default_factory_not_called":
            continue  # a default that follows from other keys, of which one is wrong
        else:
            is_url = found["type"] == "string_pattern_mismatch" and "https?://" in found["ctx"]["pattern"]
            said = "expected http://HOST:PORT or https://HOST:PORT" if is_url else found["msg"]
            for text in said.removeprefix("Value error, ").split("\n"):
                what = f"{name}: {text}" if name else text
                is_bare = found["type"] == "string_type" and isinstance(found["input"], (int, float, date))
                hint = "; put it in quotes" if is_bare else ""
                lines.append(f"{what}{_value(found['input'], sections)}{hint}{_origin(path, origins)}")
    return lines


def _sections(kind: type[BaseModel], place: tuple[str | int, ...]) -> _Sections:
    """Return each key of a place with its section; None below a value that is no section.

    For a section of several kinds pydantic adds the kind behind the key; a file has no such key.
    """
    found: _Sections = []
    choices: list[type[BaseModel]] = [kind]
    for part in place:
        kinds = {model.model_fields["kind"].default: model for model in choices} if len(choices) > 1 else {}
        if part in kinds:
            choices = [kinds[part]]
            continue
        section = choices[0] if choices else None
        found.append((str(part), section))
        if isinstance(part, str):  # a number stands for one of several sections of a kind
            field = section.model_fields.get(part) if section is not None else None
            choices = [] if field is None else list(_models(field.annotation))
    return found


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _unknown_key(sections: _Sections) -> str:
    """Return that the last key does not exist, and the key that may have been meant."""
    *above, (key, section) = sections
    close = difflib.get_close_matches(key, section.model_fields if section is not None else (), n=1)
    where = f"'{'.'.join(name for name, _ in above)}' has" if above else "there is"
    return f"unknown key, {where} no '{key}'" + (f"; did you mean '{close[0]}'?" if close else "")


def _value(value: object, sections: _Sections) -> str:
    """Return a value for a message. A mapping can hold a secret and is not shown."""
    if isinstance(value, (BaseModel, Mapping)) or not sections:
        return ""
    if _is_secret(sections) or not _is_plain(value):
        return ", got a value that is not shown"
    text = repr(value)
    return f", got {text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + '...'}"


def _is_plain(value: object) -> bool:
    """Whether a value is certainly no token or key under the wrong name: these are long, and may begin like a path."""
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, str) or len(value) < LONGEST_PLAIN or value.startswith(_ADDRESSES)


def _is_secret(sections: _Sections) -> bool:
    if any(_SOUNDS_SECRET.search(key) and not _COUNTS_TOKENS.search(key) for key, _ in sections):
        return True
    fields = [section.model_fields.get(key) for key, section in sections if section is not None]
    types = (field.annotation for field in fields if field is not None)
    return any(SecretStr in (annotation, *typing.get_args(annotation)) for annotation in types)


def _origin(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """Name the source of the key, or of the list that holds it, or of all keys of the section."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f" (from {origins[path[:length]]})"
    below = sorted({origin for key, origin in origins.items() if path and key[: len(path)] == path})
    return f" (from {', '.join(below)})" if below else ""


def render_config(config: BaseModel) -> str:
    """Return the whole configuration as YAML, in the order of the schema, secrets blanked."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def read_secret(secret: SecretStr | None, file: Path | None, *, key: str) -> str:
    """Return a secret given directly or as the first line of a file; empty when neither is set.

    `key` is the dotted key of the file, for the ConfigError of a file that cannot be read or is empty.
    """
    return next(iter(read_secrets(secret, file, key=key)), "")


def read_token(section: TokenConfig, *, key: str) -> str:
    """Return the token to show to others, as `read_secret` does, without the namespaces behind it."""
    grants = read_grants(section, key=key)
    return grants[0].token if grants else ""


def read_grants(section: TokenConfig, *, key: str) -> tuple[TokenGrant, ...]:
    """Return the tokens of a section with the namespaces that each may name. Raises ConfigError."""
    return tuple(TokenGrant.parse(line, key=key) for line in read_secrets(section.token, section.token_file, key=key))


def read_secrets(secret: SecretStr | None, file: Path | None, *, key: str) -> tuple[str, ...]:
    """Return all lines of a file but comments (`#`), or the secret given directly; otherwise as `read_secret`.

    A caller shows the first secret, and a daemon accepts any of them, so that a secret can be changed without a pause.
    """
    if secret is not None:
        return (secret.get_secret_value().strip(),)
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        # A name without a directory may be the secret itself, put where its file belongs.
        shown = file if len(file.parts) > 1 else "the file named there (not shown: it has no directory)"
        raise UnavailableError(f"{key}: cannot read {shown}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {file} is not UTF-8 text") from None
    if not lines or not lines[0].strip() or lines[0].startswith("#"):
        raise UnavailableError(f"{key}: the first line of {file} is empty or a comment, expected the secret")
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
