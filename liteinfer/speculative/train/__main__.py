"""python -m liteinfer.speculative.train: a draft head for a target, from the target's own words."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from liteinfer.loading import load_model
from liteinfer.speculative.train.fit import Settings
from liteinfer.speculative.train.plan import Plan
from liteinfer.speculative.train.prompts import own
from liteinfer.speculative.train.run import Run


class Bar:
    """A `Show` on a console."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(TextColumn("{task.description} {task.completed:,.0f}/{task.total:,.0f}"), BarColumn(),
                                 TimeRemainingColumn(), console=console)
        self.task = self.progress.add_task("", total=1, visible=False)

    def stage(self, name: str, total: float) -> None:
        self.progress.reset(self.task, description=name, total=total, visible=True)

    def at(self, done: float) -> None:
        self.progress.update(self.task, completed=done)

    def say(self, line: str) -> None:
        self.progress.console.print(line, highlight=False)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="the folder of the head; a run that was cut short goes on there")],
    model: Annotated[str, typer.Option(help="the target: a name, a folder or a hub id")] = "smollm2-135m",
    minutes: Annotated[float | None, typer.Option(help="for all of it, instead of tokens and steps")] = None,
    tokens: Annotated[int, typer.Option(help="of the target's answers to train on")] = Plan.tokens,
    steps: Annotated[int, typer.Option(help="of training")] = Plan.steps,
    prompts: Annotated[Path | None, typer.Option(help="your own prompts, one a line, besides the templates'")] = None,
    layers: Annotated[int, typer.Option(help="of the head")] = Settings.layers,
    intermediate_size: Annotated[int | None, typer.Option(help="of the head; by default the target's")] = None,
    vocab_size: Annotated[int, typer.Option(help="tokens that the head may guess")] = Settings.vocab_size,
    ahead: Annotated[int, typer.Option(help="tokens that it is run on its own output in training")] = Settings.ahead,
    learning_rate: Annotated[float, typer.Option(help="the highest")] = Settings.learning_rate,
    seed: Annotated[int, typer.Option(help="of prompts, drawn answers, first weights and order")] = 0,
) -> None:
    """Write data with the target, train a draft head on it, and tell how much of its drafts stands."""
    settings = Settings(layers, intermediate_size, vocab_size, ahead, learning_rate=learning_rate)
    plan = Plan(tokens, steps, minutes, seed, settings)
    mine = own(prompts) if prompts else []
    bar = Bar(Console())
    with bar.progress:
        Run(load_model(model), out, plan, bar, mine)()
    typer.echo(f"{out}: use it as draft {out}, or ngram+{out}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one line on stderr and exit code 2."""
    try:
        app(args=arguments)
    except (ValueError, OSError) as error:
        print(f"liteinfer.speculative.train: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
