"""Commands of a page of docs, typed as a newcomer types them, and the router among them."""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx

from tests.docs.pages import blocks
from tests.engines import processes
from tests.engines.servers import ROOT, START_S, free_port, wait_until


def commands(page: str, start: str) -> list[list[str]]:
    """Return a page's commands that begin like this, as lists of words."""
    pages = blocks(ROOT / "docs" / page)
    lines = [line for block in pages for line in block.text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(start)]


def value(words: Sequence[str], option: str) -> str:
    return words[words.index(option) + 1]


@contextmanager
def router(words: Sequence[str], ports: Mapping[str, int]) -> Iterator[str]:
    """Run the page's router and yield its URL when it is ready. `ports`: what stands for the page's ports."""
    told = list(words[1:])
    for named, port in ports.items():
        told = [word.replace(f":{named}", f":{port}") for word in told]
    own = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbridge", *told, "--port", str(own)],
        preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - one system call
    )
    try:
        url = f"http://127.0.0.1:{own}"
        wait_until(lambda: _is_ready(url), "the router is ready", START_S)
        yield url
    finally:
        process.terminate()
        process.wait(30.0)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
