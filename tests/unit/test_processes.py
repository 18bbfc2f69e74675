"""Child processes get no foreign modules, no settings and no secrets, and their ends have words."""

import ast
import signal
from pathlib import Path

import pytest

import kvbridge
from kvbridge.config.loading import RESERVED_VARIABLES
from kvbridge.processes import child_environment, how_it_ended, module_command

PACKAGE = Path(kvbridge.__file__).parent
HELPER = PACKAGE / "processes.py"


def interpreters_named(source: ast.AST) -> set[int]:
    """Return the lines that name `sys.executable` or a flag of it, but for text that people are shown."""
    shown = {id(part) for node in ast.walk(source) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    return {
        node.lineno
        for node in ast.walk(source)
        if id(node) not in shown
        and (
            (isinstance(node, ast.Attribute) and node.attr == "executable")
            or (isinstance(node, ast.Constant) and node.value in {"-m", "-c"})
        )
    }


@pytest.mark.slow
def test_every_child_interpreter_is_started_by_the_one_helper() -> None:
    """A command that is put together elsewhere would lack `-P`, and run modules of the working directory."""
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if path != HELPER
        for line in interpreters_named(ast.parse(path.read_text()))
    }
    assert found == set()


def test_a_child_gets_neither_foreign_modules_nor_settings_nor_secrets() -> None:
    """Variables that every process reads itself reach it: rank workers compile kernels into the cache that an operator names."""
    assert module_command("kvbridge", "version")[1:] == ["-P", "-m", "kvbridge", "version"]
    cache = {"KVBRIDGE_KERNEL_CACHE": "/var/cache/kernels"}
    given = {"PATH": "/bin", "KVBRIDGE_HTTP__TOKEN": "secret", "KVBRIDGE_CONFIG": "x.yaml"} | cache
    assert child_environment(given) == {"PATH": "/bin"} | cache
    assert cache.keys() <= RESERVED_VARIABLES


@pytest.mark.slow
def test_every_variable_that_the_code_reads_is_known_to_be_none_of_a_configuration() -> None:
    """A variable that the configuration refuses cannot be used, whatever the documentation says of it."""
    read = {
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("KVBRIDGE_")
        and node.value.removeprefix("KVBRIDGE_").replace("_", "").isalpha()
    }
    assert read == RESERVED_VARIABLES


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"),
        (-signal.SIGKILL, "killed by SIGKILL"),
        (-(signal.SIGRTMIN + 5), f"killed by signal {signal.SIGRTMIN + 5}"),
    ],
)
def test_every_end_has_words(code: int, words: str) -> None:
    """Signals without a name must not end the loop that starts a process again."""
    assert how_it_ended(code) == words
