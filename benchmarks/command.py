"""What the commands share: the application, its usual options, and what comes before and after a measurement."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from liteinfer.lineage import Row
    from liteinfer.loading import LoadedModel

ROOT = Path(__file__).resolve().parent.parent
LOCAL = ROOT / "benchmarks" / "results" / "local"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Measure the ladder, and show what was measured.")

Model = Annotated[str, typer.Option(help="a name, a folder or a hub id")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda")]
Out = Annotated[Path, typer.Option(help="the result file")]


def numbers(setting: str, text: str) -> list[int]:
    """The numbers in "1,2,4", sorted, each once. Raises ValueError for anything else."""
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise ValueError(f"{setting} must be whole numbers separated by commas, got {text!r}") from None


def counts(setting: str, text: str) -> int | dict[int, int]:
    """ "8" is a number, "1=2,32=64" are numbers by width. Raises ValueError for anything else, and below 1.

    >>> counts("prompts", "1=2,32=64")
    {1: 2, 32: 64}
    """
    pairs = [pair.split("=") for pair in text.split(",")]
    try:
        if len(pairs) == len(pairs[0]) == 1:
            return int(text)
        found = {int(width): int(count) for width, count in pairs}
    except ValueError:
        raise ValueError(f"{setting} must be a number, or numbers by width as in 1=2,32=64, got {text!r}") from None
    if len(found) < len(pairs) or min(*found, *found.values()) < 1:
        raise ValueError(f"{setting} must name each width once, and widths and numbers of at least 1, got {text!r}")
    return found


def load(name: str, dtype: str | None, device: str | None) -> LoadedModel:
    """Load, after saying why a GPU that is there is not used."""
    from liteinfer.loading import cuda_hint, load_model

    if device is None and (hint := cuda_hint()):
        typer.echo(hint, err=True)
    return load_model(name, dtype=dtype, device=device)


def say_what_is_not_built(model: LoadedModel, rows: Iterable[Row]) -> None:
    """A line for each of these rows that would use our compiled operators on a CPU and has to do without."""
    from liteinfer.cli import kernels_hint

    if model.device.type == "cpu":
        for hint in filter(None, dict.fromkeys(map(kernels_hint, rows))):
            typer.echo(hint, err=True)


def limits(model: LoadedModel) -> dict[str, Any]:
    """What the machine is and allows, measured in some seconds and said in one line."""
    from benchmarks import machine

    facts = machine.facts(model.device) | machine.limits(model.device, model.dtype)
    typer.echo(f"{facts['name']}, {facts['threads']} threads: reads {facts['bandwidth_gb_s']:.1f} GB/s "
               f"({facts['bandwidth_path']}), computes {facts['peak_gflop_s']:,.0f} GFLOP/s")
    return facts


def conclude(result: dict[str, Any], path: Path) -> None:
    """Show the tables of what was written; exit with 130 after Ctrl-C, with 1 if nothing was measured."""
    from benchmarks import report

    if result.get("rows") != []:   # else what was there before is still there
        report.print_tables([report.load(path)], Console())
        typer.echo(f"written: {shown(path)}")
    if result.get("interrupted"):
        raise typer.Exit(130)
    if result.get("rows") == []:
        raise typer.Exit(1)


def writable(path: Path) -> Path:
    """The path, if a file can be written there. Found out before minutes of measuring, not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "is a folder")
        with path.open("a", encoding="utf-8"):
            pass
        if path.stat().st_size == 0:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def shown(path: Path) -> str:
    """Relative to where the reader stands, if it is below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
