"""The `liteinfer` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from liteinfer import lineage

if TYPE_CHECKING:
    from liteinfer.llm import LLM

Draft = Annotated[str | None, typer.Option(help="who guesses tokens: ngram, draft-head, early-exit:N, a model, or A+B: "
                                                 "B where A has nothing to say")]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="A small LLM inference engine, rung by rung.")


@app.callback()
def commands() -> None:
    """A small LLM inference engine, rung by rung."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue")],
    model: Annotated[str, typer.Option(help="a name, a folder or a hub id")] = "smollm2-135m",
    row: Annotated[str, typer.Option(help="the rung to run on (python -m benchmarks list)")] = lineage.DEFAULT,
    max_tokens: Annotated[int, typer.Option(help="the most tokens to generate")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample among the k best; 0 turns it off")] = 0,
    top_p: Annotated[float, typer.Option(help="sample among the fewest tokens reaching this probability")] = 1.0,
    min_p: Annotated[float, typer.Option(help="sample among tokens that reach this share of the best one's "
                                              "probability")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="make sampling repeatable")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="above 1, tokens of prompt and output become less likely; "
                                                           "1 turns it off")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="from the logit of each token of the output")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="the same, for each time that it is there")] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="no end of sequence before so many tokens")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on past the model's end of sequence")] = False,
    draft: Draft = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="the most tokens of a draft")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the completion as JSON")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="tell on stderr what the engine holds and did")] = False,
) -> None:
    """Continue a prompt."""
    from liteinfer.logits_processors import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                            ignore_eos=ignore_eos, min_p=min_p, min_tokens=min_tokens,
                            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
                            frequency_penalty=frequency_penalty)
    llm = _llm(model, row, dtype, device, stats, draft, num_speculative_tokens)
    completion = llm.generate(prompt, params)[0]
    if completion.error:
        raise ValueError(completion.error)
    typer.echo(json.dumps(asdict(completion), ensure_ascii=False) if as_json else completion.text)
    if stats:
        counted = ((name, n) for name, n in asdict(llm.engine.counters).items() if n)
        typer.echo(", ".join(f"{name} {n:,}" for name, n in counted), err=True)


@app.command()
def chat(
    model: Annotated[str, typer.Option(help="a name, a folder or a hub id")] = "smollm2-135m",
    row: Annotated[str, typer.Option(help="the rung to run on (python -m benchmarks list)")] = lineage.DEFAULT,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    max_tokens: Annotated[int, typer.Option(help="the most tokens of one answer")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample among the k best; 0 turns it off")] = 0,
    top_p: Annotated[float, typer.Option(help="sample among the fewest tokens reaching this probability")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="make sampling repeatable")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="show the KV pool, and times after each answer")] = False,
    draft: Draft = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="the most tokens of a draft")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda")] = None,
) -> None:
    """Talk with the model. /reset forgets, /stats shows times, /exit ends; Ctrl-C stops an answer."""
    from liteinfer.request import SamplingParams
    from liteinfer.terminal import Conversation

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    Conversation(_llm(model, row, dtype, device, stats, draft, num_speculative_tokens), params, system, stats).loop()


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="a name, a folder or a hub id")] = "smollm2-135m",
    row: Annotated[str, typer.Option(help="the rung to run on (python -m benchmarks list)")] = lineage.DEFAULT,
    host: Annotated[str, typer.Option(help="where to listen; 0.0.0.0 is open to the network")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="LITEINFER_API_KEY", show_envvar=True,
                                                help="what clients must send")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="what clients call the model; its own name if not "
                                                               "given")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="requests that run at a time; the row's width if not "
                                                          "given")] = None,
    max_num_waiting: Annotated[int, typer.Option(help="requests that may wait; a further one is answered 429")] = 256,
    max_model_len: Annotated[int | None, typer.Option(help="the most tokens of a request, prompt and output")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="of the KV pool; as memory allows if not given")] = None,
    max_body_bytes: Annotated[int, typer.Option(help="a longer body is answered 413")] = 2**21,
    drain_seconds: Annotated[float, typer.Option(help="what requests in flight have to end in when told to "
                                                      "stop")] = 30.0,
    live: Annotated[bool, typer.Option("--live/--no-live", help="GET /live/state: the engine at work, as JSON")] = True,
    draft: Draft = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="the most tokens of a draft")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda")] = None,
) -> None:
    """Serve the model over OpenAI's HTTP API."""
    from liteinfer.server.app import build_app
    from liteinfer.server.serve import Server, bind, greeting
    from liteinfer.server.service import Service

    listener = bind(host, port)     # a port that is taken is said before anything is loaded
    settings = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "num_blocks": num_blocks}
    llm = _llm(model, row, dtype, device, False, draft, num_speculative_tokens,
               **{name: value for name, value in settings.items() if value is not None})
    service = Service(llm.model, llm.engine, llm.row.name, served_model_name, max_num_waiting)
    web = build_app(service, api_key=api_key, max_body_bytes=max_body_bytes, live=live)
    Server(web, service.engine, drain_seconds, lambda: typer.echo(greeting(service, listener))).run([listener])


def _llm(model: str, row: str, dtype: str | None, device: str | None, stats: bool, draft: str | None,
         num_speculative_tokens: int | None, **settings: int) -> LLM:
    """Load, after saying why a GPU that is there is not used. With `stats`, say how large the KV pool is, and why."""
    from liteinfer.llm import LLM
    from liteinfer.loading import cuda_hint

    if device is None and (hint := cuda_hint()):
        typer.echo(hint, err=True)
    llm = LLM(model, row=row, dtype=dtype, device=device, draft=draft, num_speculative_tokens=num_speculative_tokens,
              **settings)
    if llm.model.device.type == "cpu" and (hint := kernels_hint(llm.row)):
        typer.echo(hint, err=True)
    if stats and hasattr(llm.engine, "pool_size"):
        typer.echo(llm.engine.pool_size, err=True)
    return llm


def kernels_hint(row: lineage.Row) -> str | None:
    """One line if the row would use our compiled operators on a CPU and they are not there; None if all is well."""
    from liteinfer.kernels.build import NotBuilt, library

    if not any(part.startswith("liteinfer.fast.") for part in row.parts.values()):
        return None
    try:
        library()
    except NotBuilt as error:
        return f"{row.name} runs without its compiled operators, at about half the speed: {error}"
    return None


def main() -> None:
    """Run the command; bad input is one line on stderr and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"liteinfer: {error}", file=sys.stderr)
        raise SystemExit(2) from None
