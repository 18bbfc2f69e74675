"""The command `kvbridge` and its subcommands."""

from __future__ import annotations

import typer

from kvbridge import __version__
from kvbridge.cli import config, daemons, fit, keys
from kvbridge.cli.demo import command as demo
from kvbridge.cli.replay import command as replay

app = typer.Typer(
    name="kvbridge",
    help="Moves a request's KV cache from the machine that computed its prompt to the machine that generates its answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(daemons.prefill)
app.command()(daemons.decode)
app.command()(daemons.bootstrap)
app.command()(fit.fit)
app.command()(demo.demo)
app.command()(replay.replay)
app.add_typer(config.app)
app.add_typer(keys.app)


@app.command()
def version() -> None:
    """Print the release."""
    typer.echo(__version__)


def main() -> None:
    """Entry point."""
    app()
