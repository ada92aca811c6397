"""`python -m benchmarks`: measure the ladder, and show what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from benchmarks import command, compare_command, kind_commands
from benchmarks.command import Device, Dtype, Model, app
from liteinfer import lineage

if TYPE_CHECKING:
    from benchmarks.run import Entry
    from benchmarks.workloads import Shape
    from liteinfer.loading import LoadedModel


@app.command()
def run(
    rows: Annotated[str, typer.Option(help="names, separated by commas; the ladder's rows unless given")] = "",
    references: Annotated[bool, typer.Option("--references", help="vLLM (make references) and transformers "
                                             "besides")] = False,
    shape: Annotated[str, typer.Option(help="the workload (python -m benchmarks list)")] = "quick",
    rounds: Annotated[int, typer.Option(help="rounds; the rows take turns in each")] = 1,
    out: Annotated[Path | None, typer.Option(help="the result file; benchmarks/results/local/SHAPE.json, "
                                              "with a rate SHAPE-rateR.json")] = None,
    isl: Annotated[int | None, typer.Option(help="input tokens per prompt, instead of the shape's")] = None,
    osl: Annotated[int | None, typer.Option(help="output tokens per prompt, instead of the shape's")] = None,
    prompts: Annotated[str | None, typer.Option(help="prompts of each pass, instead of the shape's; by width of the "
                                                "throughput pass as in 1=2,32=64, and the least for latency")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second of the throughput pass, which then arrive "
                                               "by themselves, instead of all at once")] = None,
    width: Annotated[int | None, typer.Option(help="only this width, of the rows that have it")] = None,
    draft: Annotated[str | None, typer.Option(help="the draft of liteinfer-speculative, if not the one that comes "
                                              "with the model: a name, a folder or a hub id")] = None,
    model: Model = "smollm2-135m",
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Run rows in turn and write one result file."""
    from benchmarks.drafts import check_named
    from benchmarks.run import NEEDS_DRAFT, runnable
    from benchmarks.workloads import find_shape

    asked = None if prompts is None else command.counts("prompts", prompts)
    workload = find_shape(shape).override(isl, osl, asked if isinstance(asked, int) else None, rate)
    if isinstance(asked, dict):
        workload = replace(workload, latency_prompts=min(asked.values()), throughput_prompts=asked)
    chosen = entries(rows, width, references)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    check_named(draft, [entry.row.name for entry in chosen if entry.row.needs == NEEDS_DRAFT])
    runnable(chosen, draft)   # or there is nothing to load a model for
    path = command.writable(out or command.LOCAL / f"{shape}{f'-rate{rate:g}' if rate else ''}.json")
    result = measure(command.load(model, dtype, device), chosen, workload, rounds, path, draft)
    command.conclude(result, path)


kind_commands.add(app)
compare_command.add(app)


@app.command("report")
def show(
    files: Annotated[list[Path], typer.Argument(help="result files; rows of several are compared")],
    markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown")] = False,
) -> None:
    """Print the tables of result files."""
    from benchmarks import report

    results = [report.load(file) for file in files]
    if markdown:
        typer.echo(report.markdown(results), nl=False)
    else:
        report.print_tables(results, Console())


@app.command("list")
def list_() -> None:
    """List the rows and the shapes."""
    from rich.table import Table

    from benchmarks.workloads import SHAPES

    rows = Table(title="rows", title_justify="left", box=None)
    for heading in ("row", "ch", "width", "what it is", "improves on"):
        rows.add_column(heading, no_wrap=heading == "row")
    for row in (*lineage.LADDER, *lineage.REFERENCES):
        what = row.what + (f" ({reason})" if (reason := lineage.missing(row)) else "")
        rows.add_row(row.name, str(row.chapter or "-"), ", ".join(map(str, row.widths)), what,
                     (row.improves_on or "-").removeprefix("liteinfer-"))
    shapes = Table(title="shapes", title_justify="left", box=None)
    for heading in ("shape", "ISL", "OSL", "latency prompts", "throughput prompts"):
        shapes.add_column(heading)
    for shape in SHAPES.values():
        by_width = ", ".join(f"{count} at width {width}" for width, count in shape.throughput_prompts.items())
        shapes.add_row(shape.name, str(shape.isl), str(shape.osl), str(shape.latency_prompts), by_width)
    console = Console()
    console.print(rows)
    console.print(shapes)


@app.command()
def store(
    source: Annotated[Path, typer.Argument(help="a result file")],
    target: Annotated[Path, typer.Argument(help="the copy")],
) -> None:
    """Copy a result without its raw timestamps, to be committed."""
    from benchmarks.result_file import load, save, without_raw

    load(source)   # refuses what is no result
    save(without_raw(json.loads(source.read_text(encoding="utf-8"))), command.writable(target))


@app.command()
def render(
    check: Annotated[bool, typer.Option("--check", help="change nothing; fail if a page is stale")] = False,
) -> None:
    """Write stored results into README and chapters, between their markers."""
    from benchmarks.render import render as render_pages

    stale = render_pages(command.ROOT, check)
    for place in stale:
        typer.echo(f"stale: {place}" if check else f"written: {place}")
    if check and stale:
        raise typer.Exit(1)


def entries(names: str, width: int | None = None, references: bool = False) -> list[Entry]:
    """The chosen rows in ladder order, once per width, then the references that are named, or all if asked for.

    Raises:
        ValueError: a name that no row has, or a width that none of the chosen rows has.
    """
    from benchmarks.run import Entry

    rows = (*lineage.LADDER, *lineage.REFERENCES)
    chosen = [lineage.find(name.strip(), rows) for name in names.split(",")] if names.strip() else [*lineage.LADDER]
    chosen += lineage.REFERENCES if references else ()
    found = [Entry(row, w) for row in rows if row in chosen for w in row.widths if width in (None, w)]
    if not found:
        raise ValueError(f"width {width}: none of the chosen rows has it; "
                         f"they have {', '.join(f'{row.name} {list(row.widths)}' for row in chosen)}")
    return found


def measure(model: LoadedModel, chosen: Sequence[Entry], shape: Shape, rounds: int, path: Path,
            draft: str | None = None) -> dict[str, Any]:
    """Say what the machine allows, then run. Progress goes to stderr."""
    from statistics import mean

    from benchmarks import ceilings
    from benchmarks.progress import Show
    from benchmarks.references.bench import WithReferences
    from benchmarks.run import PASSES, runnable

    facts = command.limits(model)
    command.say_what_is_not_built(model, [entry.row for entry in chosen])
    sizes = ceilings.Sizes.of(model.config, model.dtype)
    lengths = [shape.output_length(i) for i in range(shape.latency_prompts)]
    for line in ceilings.forecast(sizes, facts, shape.isl, mean(lengths)):
        typer.echo(line)
    tokens = {"latency": sum(lengths)}
    stages = []
    for entry in runnable(chosen, draft):
        tokens["throughput"] = sum(map(shape.output_length, range(shape.prompts_at(entry.width))))
        stages += [((entry.row.name, entry.width, what), tokens[what]) for what in PASSES]
    with Show(Console(stderr=True), stages, rounds) as watch:
        return WithReferences(model, chosen, shape, rounds, facts, watch, path, draft=draft,
                              logs=path.parent / "logs").run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one line on stderr and exit code 2."""
    try:
        app(args=arguments)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
