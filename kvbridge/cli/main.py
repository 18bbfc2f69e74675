"""The command `kvbridge` and its subcommands."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvbridge import __version__
from kvbridge.cli.signals import EXIT_INTERRUPTED, interrupts_raise
from kvbridge.core.process import UNUSED_BY_DAEMONS, importing

COMMANDS = {
    "init": "Write configurations for bootstrap, a prefill and a decode node that run together as they are.",
    "up": "Run the whole cluster of a directory that `kvbridge init` wrote, in the foreground.",
    "wait": "Wait until daemons are ready: all that are named, or the cluster of a directory.",
    "status": "Show whether daemons are ready, and what keeps them busy or from it.",
    "rooms": "List the rooms of nodes, the oldest first: what each one waits for, and who has to act.",
    "room": "Show one room as each node sees it: its report, and its events in their order.",
    "prefill": "Run a prefill daemon: it holds the pages that an engine computes, and sends them to decode nodes.",
    "decode": "Run a decode daemon: it holds the pages that prefill nodes write, and an engine claims them.",
    "bootstrap": "Run bootstrap: the directory of instances, and the pairing of requests.",
    "router": "Run a router: OpenAI's completions and chat in front of prefill and decode servers.",
    "fit": "Print the cost of requests of some lengths on a decode node, and how many of each fit at once.",
    "demo": "Prefill in one process, decode in another, and compare every logit.",
    "doctor": "Look for problems of this host and its peers before they break a daemon.",
    "bench-peer": "Measure how many bytes a second go from this host to another one, by each transport.",
    "clean": "Remove the files of killed daemons and rank workers from shared memory.",
    "config": "Look at a daemon's configuration.",
    "keys": "Make and check keys and tokens.",
}
"""The first line of each command's help."""
DAEMONS = "cli.daemons"
MODULES = {
    **dict.fromkeys(("prefill", "decode", "bootstrap", "router"), DAEMONS),
    **dict.fromkeys(("status", "rooms", "room"), "cli.look"),
    "wait": "cli.up",
    "clean": "cli.doctor",
    "demo": "demo.run",
}
"""The module of each command that is not in a module of its own name."""


class Commands(TyperGroup):
    """Lists every command, and imports one when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own types
        """See TyperGroup."""
        name, listed, rest = super().resolve_command(ctx, args)
        with importing(*(UNUSED_BY_DAEMONS if MODULES.get(name or "") == DAEMONS else ())):
            command = load_command(name) if name in COMMANDS else listed
        interrupts_raise()
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """See TyperGroup."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("kvbridge: interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, invoke_without_command=True, pretty_exceptions_enable=False)


def load_command(name: str) -> Any:  # noqa: ANN401 - typer's own types
    """Import a command of `COMMANDS`."""
    own = name.replace("-", "_")
    module = import_module(f"kvbridge.{MODULES.get(name, f'cli.{own}')}")
    if (found := getattr(module, "app", None)) is None:
        found = typer.Typer(add_completion=False)
        found.command(name)(getattr(module, own))
    return typer.main.get_command(found)


def _listed() -> None:
    """Stand in for a command that is not imported yet."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_listed)


@app.callback()
def root(show_version: Annotated[bool, typer.Option("--version", help="Print the release.")] = False) -> None:
    """Moves a request's KV cache from the machine that computed its prompt to the machine that generates its answer."""
    if show_version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def version() -> None:
    """Print the release."""
    typer.echo(__version__)


def main() -> None:
    """Run the command that the arguments name."""
    app()
