"""`relaxpack replay`: run the pass of a reproducer that a failed build wrote."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Run the failing pass of a crash report again.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def replay(file: Path) -> None:
    """Run the pass of the reproducer FILE on the module it failed on. Exits with 4 where it fails again."""
    from relaxpack.compile.reproducer import replay as run

    click.echo(run(file))
