"""The command that compares two result sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def add(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    a: Annotated[Path, typer.Argument(help="a result file, or a folder of them")],
    b: Annotated[Path, typer.Argument(help="what is compared with it; of two folders, the files of the same name")],
    noise: Annotated[float, typer.Option(help="how much worse B may be before it is a regression, as a share")] = 0.1,
) -> None:
    """Compare two result sets; exit code 1 if B is worse than A beyond the noise."""
    from benchmarks import compare_sets
    from benchmarks.table import print_table

    found, console = compare_sets.compare(a, b, noise), Console()
    for table in found.tables:
        print_table(table, console)
    typer.echo(found.summary)
    if found.regressions:
        raise typer.Exit(1)
