"""A forked process in which one module of the package is edited, and the tests that it runs.

Owns: the import hook and the process. Must not know: which edits are drawn.

The parent has imported the libraries and nothing of the package, so a child starts in no time and imports the package by itself.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

from tests.mutation.edits import PACKAGE, ROOT, Edit, edited

LIMIT_S = 90.0
"""For the tests of one edit; what takes longer waits for something that does not come."""
LIBRARIES = """
asyncio fastapi httpx hypothesis hypothesis.stateful msgpack multiprocessing numpy prometheus_client psutil
pydantic pytest_asyncio pytest_randomly pytest_timeout structlog torch typer uvicorn xdist yaml zmq zmq.asyncio
"""


def preload() -> None:
    """Import the libraries that tests need; one that is not installed is left out."""
    for name in LIBRARIES.split():
        with suppress(ImportError):
            importlib.import_module(name)
    assert PACKAGE not in sys.modules


def run_edited(edit: Edit | None, tests: Sequence[str], log: Path) -> int:
    """Fork a process that runs tests on the package, edited or (None) as it is, in a process group of its own; returns its pid.

    The exit code is 0 when all tests pass. `log` holds what the tests print.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["HYPOTHESIS_PROFILE"] = "default"
        if edit is not None:
            _install(edit)
        # Plugins have been imported before pytest starts, which their assertions do not mind.
        quiet = "-p no:randomly -p no:cacheprovider --tb=no -W ignore::pytest.PytestAssertRewriteWarning"
        code = pytest.main(["-x", "-q", *quiet.split(), *tests])
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the edit did not pass
        os.write(2, f"ERROR {type(error).__name__} {error}\n".encode())
        code = 1
    os._exit(int(code))


def _install(edit: Edit) -> None:
    """Have the module of an edit loaded with the edit made."""
    path, code = str(ROOT / edit.file), edited(edit)
    plain = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        return code if loader.path == path else plain(loader, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
