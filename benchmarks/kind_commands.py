"""The commands that measure something else than whole rows: memory, widths, a prefix cache, drafts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import command
from benchmarks.command import Device, Dtype, Model, Out


def add(app: typer.Typer) -> None:
    for each in (memory, widths, radix, sharing, overhead, speculative, heads, profile, pieces, shapes):
        app.command()(each)


def memory(
    osl: Annotated[int | None, typer.Option(help="output tokens of your own streams, a line more")] = None,
    isl: Annotated[int, typer.Option(help="input tokens of each stream")] = 1,
    budget_gib: Annotated[float, typer.Option(help="GiB that all streams together may take")] = 1.0,
    block_size: Annotated[int, typer.Option(help="tokens per block, a power of two")] = 16,
    out: Out = command.LOCAL / "memory.json",
    model: Model = "smollm2-135m",
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Count what keys and values take: contiguous slots against blocks."""
    from benchmarks import machine
    from benchmarks.memory import Memory, measure
    from benchmarks.result_file import save
    from benchmarks.workloads import find_shape

    path, loaded = command.writable(out), command.load(model, dtype, device)
    caches = Memory(loaded.config, loaded.dtype, loaded.device, isl, block_size, int(budget_gib * 2**30))
    result = measure(loaded, machine.facts(loaded.device), find_shape("ragged"), caches, [] if osl is None else [osl])
    save(result, path)
    command.conclude(result, path)


def widths(
    rows: Annotated[str, typer.Option(help="names, separated by commas; rows that run in batches")]
    = "paged-b32,native-eager-b4",
    widths: Annotated[str, typer.Option(help="numbers of sequences, separated by commas")] = "1,2,4,8,16,32",
    rounds: Annotated[int, typer.Option(help="rounds; rows and widths take turns in each")] = 3,
    isl: Annotated[int, typer.Option(help="input tokens per prompt")] = 128,
    osl: Annotated[int, typer.Option(help="output tokens per prompt")] = 16,
    out: Out = command.LOCAL / "widths.json",
    model: Model = "smollm2-135m",
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Measure a decode step with 1 to 32 sequences in it."""
    from benchmarks.progress import Show
    from benchmarks.widths import PASS, Curve, batched, shape_of, turning_point

    chosen, counts = batched(rows), command.numbers("widths", widths)
    shape = shape_of(isl, osl, counts)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    path, loaded = command.writable(out), command.load(model, dtype, device)
    facts = command.limits(loaded)
    turning = turning_point(loaded, shape, facts)
    typer.echo("ceiling of a step: " + ("bound by reading at any width" if turning is None else
                                        f"bound by reading up to {turning:,.1f} sequences, by computing beyond"))
    stages = [((row.name, width, PASS), width * osl) for row in chosen for width in counts]
    with Show(Console(stderr=True), stages, rounds) as watch:
        result = Curve(loaded, chosen, counts, shape, rounds, facts, watch, path).run()
    command.conclude(result, path)


def radix(
    prefixes: Annotated[str, typer.Option(help="tokens of the shared prefixes, separated by commas")]
    = "256,512,1024,2048",
    question: Annotated[int, typer.Option(help="tokens of the question after the prefix")] = 8,
    rounds: Annotated[int, typer.Option(help="rounds; the prefixes take turns in each")] = 3,
    rows: Annotated[str, typer.Option(help="names, separated by commas; rows with a prefix cache")] = "radix",
    out: Out = command.LOCAL / "radix.json",
    model: Model = "smollm2-135m", dtype: Dtype = None, device: Device = None,
) -> None:
    """Measure the time to first token with a prefix in the cache, and without."""
    from benchmarks import machine
    from benchmarks.progress import Show
    from benchmarks.radix import PASS, Prefixes, caching, check_lengths, title

    chosen, lengths = caching(rows), command.numbers("prefixes", prefixes)
    check_lengths(lengths, question, rounds)
    path, loaded = command.writable(out), command.load(model, dtype, device)
    stages = [((title(row, length), 1, PASS), length) for row in chosen for length in lengths]
    with Show(Console(stderr=True), stages, rounds) as watch:
        result = Prefixes(loaded, chosen, lengths, question, rounds, machine.facts(loaded.device), watch, path).run()
    command.conclude(result, path)


def sharing(
    rounds: Annotated[int, typer.Option(help="rounds; workloads and rows take turns in each")] = 3,
    rows: Annotated[str, typer.Option(help="names, separated by commas; the first is compared with")]
    = "continuous,radix",
    out: Out = command.LOCAL / "sharing.json",
    model: Model = "smollm2-135m", dtype: Dtype = None, device: Device = None,
) -> None:
    """Measure what a prefix cache finds in conversations, in few-shot prompts, and in prompts with nothing to share."""
    from benchmarks import machine
    from benchmarks.progress import Show
    from benchmarks.scenarios import scenarios
    from benchmarks.sharing import PASS, Sharing, scheduling, title

    chosen = scheduling(rows)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    path, loaded = command.writable(out), command.load(model, dtype, device)
    works = scenarios(loaded)
    stages = [((title(row, work), 1, PASS), sum(work.lengths)) for work in works for row in chosen]
    with Show(Console(stderr=True), stages, rounds) as watch:
        result = Sharing(loaded, chosen, works, rounds, machine.facts(loaded.device), watch, path).run()
    command.conclude(result, path)


def overhead(
    sequences: Annotated[int, typer.Option(help="that decode together")] = 32,
    isl: Annotated[int, typer.Option(help="input tokens of the shortest prompt")] = 128,
    osl: Annotated[int, typer.Option(help="output tokens per prompt")] = 48,
    rounds: Annotated[int, typer.Option(help="rounds; the rows take turns in each")] = 5,
    rows: Annotated[str, typer.Option(help="names, separated by commas; the first is compared with")]
    = "continuous,radix",
    out: Out = command.LOCAL / "overhead.json",
    model: Model = "smollm2-135m", dtype: Dtype = None, device: Device = None,
) -> None:
    """Measure what Python costs in a decode step, with a runner that does no arithmetic."""
    from benchmarks import machine
    from benchmarks.overhead import PASS, Overhead, check_sizes
    from benchmarks.progress import Show
    from benchmarks.sharing import scheduling

    chosen = scheduling(rows)
    check_sizes(sequences, isl, osl, rounds)
    path, loaded = command.writable(out), command.load(model, dtype, device)
    stages = [((row.name, 1, PASS), sequences * osl) for row in chosen]
    with Show(Console(stderr=True), stages, rounds) as watch:
        result = Overhead(loaded, chosen, sequences, isl, osl, rounds, machine.facts(loaded.device), watch, path).run()
    command.conclude(result, path)


def speculative(
    drafts: Annotated[str, typer.Option(help="who guesses: NAME@K with up to K tokens, NAME being ngram, draft-head, "
                                             "early-exit:N (the model's first N layers), a draft model, or two as A+B; "
                                             "+pause behind it ends a request's drafts when they do not pay")]
    = "ngram@4,ngram@2,ngram@2+pause,early-exit:15@4",
    pause_cost: Annotated[float, typer.Option(help="what a drafted token is taken to cost, drafting and checking, as a "
                                                   "share of a step without drafts: +pause ends drafts of which a "
                                                   "smaller share is accepted")] = 0.1,
    kinds: Annotated[str, typer.Option(help="of prompts, separated by commas")] = "code,json,conversation",
    widths: Annotated[str, typer.Option(help="requests in flight, separated by commas; 1 must be among them")] = "1,32",
    max_tokens: Annotated[int, typer.Option(help="of every output, which may end before")] = 128,
    limit: Annotated[int | None, typer.Option(help="only the first prompts of each kind, for a quick look")] = None,
    rounds: Annotated[int, typer.Option(help="rounds; the drafts take turns in each")] = 1,
    out: Out = command.LOCAL / "speculative.json",
    model: Model = "smollm2-135m", dtype: Dtype = None, device: Device = None,
) -> None:
    """Measure what guessing tokens ahead gains and costs, on three kinds of prompts."""
    from benchmarks import chats, machine
    from benchmarks.drafts import variants
    from benchmarks.progress import Show
    from benchmarks.speculative import Speculative, check_sizes, stages

    chosen, counts = variants(drafts, pause_cost), command.numbers("widths", widths)
    check_sizes(counts, max_tokens, rounds)
    messages = chats.chosen(kinds, limit)
    path, loaded = command.writable(out), command.load(model, dtype, device)
    prompts = chats.encode(loaded, messages)
    with Show(Console(stderr=True), stages(prompts, chosen, counts, max_tokens), rounds) as watch:
        result = Speculative(loaded, chosen, prompts, counts, max_tokens, rounds, machine.facts(loaded.device), watch,
                             path).run()
    command.conclude(result, path)


def heads(
    folders: Annotated[list[Path], typer.Argument(help="of heads, made by python -m liteinfer.speculative.train")],
    rounds: Annotated[int, typer.Option(help="rounds; the heads take turns in each")] = 3,
    out: Out = command.LOCAL / "heads.json",
    model: Model = "smollm2-135m", dtype: Dtype = None, device: Device = None,
) -> None:
    """Measure what a guess of these draft heads costs, beside how often it is right."""
    from benchmarks import machine
    from benchmarks.heads import PASS, Heads
    from benchmarks.progress import Show

    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    path, loaded = command.writable(out), command.load(model, dtype, device)
    with Show(Console(stderr=True), [((folder.resolve().name, 1, PASS), 1) for folder in folders], rounds) as watch:
        result = Heads(loaded, folders, rounds, machine.facts(loaded.device), watch, path).run()
    command.conclude(result, path)


def profile(
    rows: Annotated[str, typer.Option(help="names, separated by commas; rows that run continuously")]
    = "continuous,fast",
    widths: Annotated[str, typer.Option(help="numbers of sequences, separated by commas")] = "1,4,32",
    rounds: Annotated[int, typer.Option(help="rounds; rows and widths take turns in each")] = 3,
    isl: Annotated[int, typer.Option(help="input tokens per prompt")] = 128,
    osl: Annotated[int, typer.Option(help="output tokens per prompt")] = 32,
    out: Out = command.LOCAL / "profile.json",
    model: Model = "smollm2-135m", dtype: Dtype = None, device: Device = None,
) -> None:
    """Measure where the time of a decode step goes, on a CPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")   # the profiler would tell when it starts and stops

    from benchmarks.profile import PASS, Profile, check_lengths, continuous
    from benchmarks.progress import Show

    chosen, counts = continuous(rows), command.numbers("widths", widths)
    check_lengths(counts, isl, osl, rounds)
    path, loaded = command.writable(out), command.load(model, dtype, device)
    if loaded.device.type != "cpu":
        raise ValueError(f"profile splits a step on a CPU, where an operation runs when it is called; device is "
                         f"{loaded.device}")
    command.say_what_is_not_built(loaded, chosen)
    facts = command.limits(loaded)
    stages = [((row.name, width, PASS), 2 * width * osl) for row in chosen for width in counts]
    with Show(Console(stderr=True), stages, rounds) as watch:
        result = Profile(loaded, chosen, counts, isl, osl, rounds, facts, watch, path).run()
    command.conclude(result, path)


def pieces(
    widths: Annotated[str, typer.Option(help="numbers of sequences, separated by commas")] = "1,4,32",
    rounds: Annotated[int, typer.Option(help="rounds; variants and widths take turns in each")] = 3,
    isl: Annotated[int, typer.Option(help="input tokens per prompt")] = 128,
    osl: Annotated[int, typer.Option(help="output tokens per prompt")] = 32,
    out: Out = command.LOCAL / "pieces.json",
    model: Model = "smollm2-135m", dtype: Dtype = None, device: Device = None,
) -> None:
    """Measure what each piece of liteinfer-fast brings."""
    from benchmarks import machine
    from benchmarks.pieces import PASS, Pieces, title, variants
    from benchmarks.progress import Show
    from benchmarks.widths import shape_of
    from liteinfer import lineage

    counts = command.numbers("widths", widths)
    shape_of(isl, osl, counts)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    path, loaded = command.writable(out), command.load(model, dtype, device)
    command.say_what_is_not_built(loaded, [lineage.find("fast")])
    stages = [((title(each), width, PASS), width * osl) for each in variants() for width in counts]
    with Show(Console(stderr=True), stages, rounds) as watch:
        result = Pieces(loaded, lineage.find("fast"), counts, isl, osl, rounds, machine.facts(loaded.device), watch,
                        path).run()
    command.conclude(result, path)


def shapes(
    rows: Annotated[str, typer.Option(help="names, separated by commas; rows that take one request at a time")]
    = "nocache,eager,native-eager,native-packed,paged,ngram,speculative",
    references: Annotated[bool, typer.Option("--references", help="vLLM (make references) and transformers "
                                             "besides")] = False,
    isl: Annotated[str, typer.Option(help="input tokens per prompt, separated by commas")] = "128,1024,4096",
    osl: Annotated[str, typer.Option(help="output tokens per prompt, separated by commas")] = "64,256",
    prompts: Annotated[int, typer.Option(help="of each shape")] = 1,
    rounds: Annotated[int, typer.Option(help="rounds; shapes and rows take turns in each")] = 1,
    out: Out = command.LOCAL / "shapes.json",
    model: Model = "smollm2-135m", dtype: Dtype = None, device: Device = None,
) -> None:
    """Measure one request at a time, from short prompts and answers to long ones."""
    from benchmarks import machine
    from benchmarks.progress import Show
    from benchmarks.shapes import PASS, Shapes, able, chosen, grid, title
    from liteinfer import lineage

    named = chosen(rows, references)
    lengths = grid(command.numbers("isl", isl), command.numbers("osl", osl), prompts)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    path, loaded = command.writable(out), command.load(model, dtype, device)
    command.say_what_is_not_built(loaded, named)
    stages = [((title(row, shape), 1, PASS), (shape.isl // 16 + shape.output[0]) * prompts)   # 16 prompt tokens: a step
              for shape in lengths for row in able(named, shape, lengths) if not lineage.missing(row)]
    with Show(Console(stderr=True), stages, rounds) as watch:
        result = Shapes(loaded, named, lengths, rounds, machine.facts(loaded.device), watch, path,
                        path.parent / "logs").run()
    command.conclude(result, path)
