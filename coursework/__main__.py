"""`python -m coursework`: handout and grade, which `make handout` and `make grade` call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Hand out the exercises, and grade what comes back.")


@app.command()
def handout(target: Annotated[Path, typer.Argument(help="an empty or a new folder outside the course")]) -> None:
    """Write the course as students get it: solutions replaced by stubs."""
    from coursework.handout import hand_out

    for path in hand_out(target):
        typer.echo(path)


@app.command("grade")
def grade_(
    path: Annotated[Path, typer.Argument(help="a returned notebook, or a folder of them")],
    junit: Annotated[Path | None, typer.Option(help="write JUnit XML to this file")] = None,
    timeout: Annotated[int, typer.Option(min=1, help="seconds that one cell may take")] = 60,
) -> None:
    """Run every exercise and print one line for each, then a total. The exit code says only whether grading worked."""
    from coursework.grade import Grade, grade, returned
    from coursework.grade import junit as as_junit

    grades = list[Grade]()
    for notebook in returned(path):
        name = notebook.name if path.is_file() else str(notebook.relative_to(path))
        for result in grade(notebook, timeout, name):
            typer.echo(result.line())
            grades.append(result)
    passed = sum(result.verdict == "passed" for result in grades)
    typer.echo(f"{passed} of {len(grades)} exercises passed")
    if junit is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_text(as_junit(grades), encoding="utf-8")


@app.command("execute")
def execute_(
    paths: Annotated[list[Path] | None, typer.Argument(help="notebooks; all of the course's unless given")] = None,
) -> None:
    """Run notebooks from a restart and store their outputs, after a change to them or to what they show."""
    from coursework.cells import notebooks
    from coursework.execute import execute

    for path in paths or notebooks():
        execute(path)
        typer.echo(path)


def main() -> None:
    """Bad input is one line on stderr and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"coursework: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
