"""`kvbridge clean`: what dead processes have left in this host's shared memory, shown and removed (`pool/memory/leftovers.py`)."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvbridge.cli.config import EXIT_FAILED, aligned
from kvbridge.doctor.findings import size
from kvbridge.pool.memory.leftovers import Leftover, Verdict, sweep
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    directories: Annotated[
        list[Path] | None,
        typer.Option(
            "--directory",
            metavar="DIR",
            help="Where to look: pools.host.directory, transports.local.proof_directory. May be repeated.",
            show_default=str(DEFAULT_DIRECTORY),
        ),
    ] = None,
) -> None:
    """Remove what killed daemons and rank workers have left in shared memory.

    Removes this user's files of kvbridge that no living process holds the lock
    of, whatever node they came from. Daemons do the same whenever they start.
    Pools that wait for the next daemon of their node (pools.keep_s) stay until
    their time is over.

    Exit codes: 0: nothing is left that nobody owns; 1: something could not be
    removed, or looked at.
    """
    try:
        found = sweep(directories or [DEFAULT_DIRECTORY], dry_run=dry_run)
    except OSError as error:
        typer.echo(f"kvbridge clean: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    if found:
        typer.echo(aligned(_rows(found, dry_run=dry_run)))
    removed = [each for each in found if each.verdict is Verdict.REMOVED]
    done = "would be removed" if dry_run else "removed"
    typer.echo(f"{len(removed)} of {len(found)} files {done}, {size(sum(each.size_bytes for each in removed))}")
    if any(each.verdict is Verdict.FAILED for each in found):
        raise typer.Exit(EXIT_FAILED)


def _rows(found: list[Leftover], *, dry_run: bool) -> Iterator[tuple[str, ...]]:
    yield "file", "what", "user", "process", "size", "verdict", "why"
    for each in found:
        verdict = "would remove" if dry_run and each.verdict is Verdict.REMOVED else each.verdict.value
        holder = "" if each.holder is None else str(each.holder)
        yield str(each.path), each.kind, _user(each.user_id), holder, size(each.size_bytes), verdict, each.why


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
