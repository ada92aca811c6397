"""Penalties, min_p, min_tokens and logit_bias: formulas, whose row they land on (M5), and beside speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from typer.testing import CliRunner

import liteinfer
from liteinfer import LLM, SamplingParams, cli, lineage, request
from liteinfer.engines.continuous import ContinuousEngine, NoDrafter, Verdict
from liteinfer.fast.sampling import BatchSampler
from liteinfer.loading import LoadedModel
from liteinfer.logits_processors import OFF, LogitsProcessors, check, in_use, processed
from liteinfer.request import Request
from liteinfer.runner import StepOutput
from liteinfer.sampling import processed_probs, sample
from liteinfer.scheduler import Chunk
from tests.conftest import build, outputs
from tests.scripted import RandomRunner, drain, script_engine
from tests.test_speculative import DRAFTS, altered, make, over, workload

pytestmark = pytest.mark.ch10
INF = float("inf")
LOGITS = torch.tensor([2.0, 1.0, -1.0, 0.5], dtype=torch.float64)
ON: dict[str, Any] = {"min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.5, "presence_penalty": 0.5,
                      "frequency_penalty": -0.5, "logit_bias": {3: 1.0}}


def asking(prompt: Sequence[int] = (2,), said: Sequence[int] = (), **settings: Any) -> Request:
    """A request that has said so much already."""
    return Request("r", list(prompt), SamplingParams(**settings), list(said))


def close(got: torch.Tensor, want: Sequence[float] | torch.Tensor) -> None:
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=0, atol=1e-12)


# --- formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "said", "want"), [
    ({"repetition_penalty": 2.0}, [], [2, 1, -2, 0.5]),                       # the prompt counts, and so
    ({"repetition_penalty": 2.0}, [0, 0], [1, 1, -2, 0.5]),                   # does the output, but once
    ({"repetition_penalty": 0.5}, [1], [2, 2, -0.5, 0.5]),
    ({"presence_penalty": 0.25}, [0, 0, 3], [1.75, 1, -1, 0.25]),             # of the output only
    ({"frequency_penalty": 0.5}, [0, 0, 3], [1, 1, -1, 0]),
    ({"frequency_penalty": -2.0}, [2], [2, 1, 1, 0.5]),
    ({"presence_penalty": 0.5, "frequency_penalty": 1.0}, [], [2, 1, -1, 0.5]),
    ({"logit_bias": {1: -100.0, 3: 7.0}}, [], [2, -99, -1, 7.5]),
    ({"min_tokens": 2, "stop_token_ids": (0,)}, [1], [-INF, -INF, -1, 0.5]),  # 1 is the model's own end
    ({"min_tokens": 2, "stop_token_ids": (0,), "ignore_eos": True}, [1], [-INF, 1, -1, 0.5]),
    ({"min_tokens": 2, "stop_token_ids": (0,)}, [3, 3], [2, 1, -1, 0.5]),
    ({"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}, [0, 0], [-0.25, 1, -2, 0.5]),
    ({"logit_bias": {0: -3.0}, "repetition_penalty": 2.0}, [0], [-2, 1, -2, 0.5]),   # the bias comes first
])
def test_formulas_by_hand(settings: dict, said: list[int], want: list[float]) -> None:
    before = LOGITS.clone()
    close(processed(LOGITS, asking([2], said, **settings), eos_token_ids=(1,)), want)
    assert torch.equal(LOGITS, before), "the model's own are to be reported"


def test_min_p_by_hand() -> None:
    """0.5, 0.25, 0.15, 0.1: a quarter of the best is 0.125. At T = 2 the roots count: half of the best's is 0.354."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log()
    for settings, kept in (({"temperature": 1.0, "min_p": 0.25}, 3), ({"temperature": 2.0, "min_p": 0.6}, 2),
                           ({"temperature": 2.0, "min_p": 0.5}, 3), ({"temperature": 1.0, "min_p": 0.51}, 1),
                           ({"temperature": 1.0, "min_p": 1.0}, 1), ({"temperature": 0.0, "min_p": 0.01}, 1)):
        got = processed(logits, asking(**settings), ())
        assert got.isfinite().tolist() == [True] * kept + [False] * (4 - kept), settings
        close(got[:kept], logits[:kept])


def test_min_p_counts_after_the_penalties() -> None:
    """Token 0 falls from 2 to -2, so token 1 is the best: 0.5 is near enough to it, -1 and -2 are not."""
    got = processed(LOGITS, asking([3], [0, 0], frequency_penalty=2.0, temperature=1.0, min_p=0.5), ())
    close(got, [-INF, 1, -INF, 0.5])


def test_as_transformers_does_it() -> None:
    rng = torch.Generator().manual_seed(3)
    for n in range(25):
        logits = 3 * torch.randn(50, generator=rng, dtype=torch.float64)
        prompt, said = (torch.randint(50, (k,), generator=rng).tolist() for k in (12, n))
        ids, scores = torch.tensor([prompt + said]), logits[None]
        r, t, p = 0.5 + 0.1 * n, 0.2 + 0.1 * n, 0.04 * n + 0.01

        def ours(eos: tuple[int, ...] = (), *, of: torch.Tensor = logits, ids: tuple = (prompt, said),
                 **settings: Any) -> torch.Tensor:
            return processed(of, asking(*ids, **settings), eos)[None]

        close(ours(repetition_penalty=r), RepetitionPenaltyLogitsProcessor(r)(ids, scores))
        close(ours(temperature=t, min_p=p) / t, MinPLogitsWarper(p)(ids, scores / t))
        close(ours((4, 9), min_tokens=10), MinNewTokensLengthLogitsProcessor(12, 10, [4, 9])(ids, scores))
        biases = {5: 1.5, 7: -3.0}
        close(ours(logit_bias=biases), SequenceBiasLogitsProcessor([[[i], b] for i, b in biases.items()])(ids, scores))


def test_draws_with_min_p_follow_the_renormalised_distribution() -> None:
    """Through verify, beside a request whose logits stay as they are."""
    logits, n = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0, 2.5, -2.0, 0.5]), 5000
    each, other = asking(temperature=0.7, min_p=0.2, seed=1), asking(temperature=0.7, seed=2)
    sampler = LogitsProcessors(script_engine(), NoDrafter(script_engine()))
    chunks = [Chunk(r, 0, 1, num_logits=1) for r in (other, each)]
    output = StepOutput(torch.stack([logits, logits]), torch.empty(0))
    drawn = torch.tensor([sampler.verify(chunks, output) for _ in range(n)])[..., 0]   # [n, 2]
    for column, p in ((1, (logits / 0.7).double().softmax(0)), (0, processed_probs(logits, other.params))):
        kept = p >= (0.2 * p.max() if column else 0)
        counts, probs = torch.bincount(drawn[:, column], minlength=8), p * kept / p[kept].sum()
        assert counts[~kept].sum() == 0 and int(kept.sum()) == (3 if column else 8)
        assert chisquare(counts[kept].numpy(), (probs[kept] * n).numpy()).pvalue > 1e-4


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "words"), [
    ({"min_p": 1.5}, "min_p must be a number from 0 to 1, got 1.5"), ({"min_p": -0.1}, "got -0.1"),
    ({"min_p": float("nan")}, "min_p must .* got nan"), ({"min_p": True}, "min_p must .* got True"),
    ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"), ({"min_tokens": 1.0}, r"got 1\.0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 is over max_tokens 8"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, got 0"),
    ({"repetition_penalty": INF}, "repetition_penalty .* got inf"), ({"repetition_penalty": "2"}, "got '2'"),
    ({"repetition_penalty": 10**400}, "repetition_penalty must be a number above 0, got 1000"),
    ({"presence_penalty": 2.1}, "presence_penalty must be a number from -2 to 2, got 2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty must be a number from -2 to 2, got -2.1"),
    ({"frequency_penalty": None}, "frequency_penalty .* got None"),
    ({"logit_bias": [1]}, r"logit_bias must be a mapping, got \[1\]"),
    ({"logit_bias": {"5": 1}}, "logit_bias must have token ids .* got '5': 1"),
    ({"logit_bias": {-1: 1}}, "got -1: 1"), ({"logit_bias": {True: 1}}, "got True: 1"),
    ({"logit_bias": {5: 101}}, "biases from -100 to 100, got 5: 101"), ({"logit_bias": {5: None}}, "got 5: None"),
    ({"max_tokens": 0}, "max_tokens must")])
def test_settings_out_of_range_are_refused_by_name(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**settings)


def test_what_is_in_use() -> None:
    assert list(OFF) == list(ON) and in_use(SamplingParams()) == in_use(request.SamplingParams()) == ()
    assert liteinfer.SamplingParams is SamplingParams and issubclass(SamplingParams, request.SamplingParams)
    for name, value in ON.items():
        params = SamplingParams(**{name: value})
        assert in_use(params) == (name,) and in_use(replace(params, **{name: OFF[name]})) == ()
    assert in_use(SamplingParams(**ON)) == tuple(OFF)
    given = {3: 1.0}
    params = SamplingParams(logit_bias=given)
    given[4] = 1.0
    assert params.logit_bias == {3: 1.0} and hash(params) == hash(SamplingParams(logit_bias={3: 1}))


# --- whose row --------------------------------------------------------------------------------------------------------


def three() -> dict[str, Request]:
    """M5: a plain one, one with a penalty that finishes early, and one with a seed."""
    params = {"plain": SamplingParams(max_tokens=24), "penalised": SamplingParams(max_tokens=7, repetition_penalty=2.0),
              "seeded": SamplingParams(max_tokens=16, temperature=0.8, seed=42, min_p=0.05, presence_penalty=1.0)}
    prompts = {"plain": [7, 8, 9, 7, 8], "penalised": list(range(40)), "seeded": [3] * 9}
    return {name: Request(name, prompts[name], p) for name, p in params.items()}


def maker(drafts: str, model: LoadedModel) -> Any:
    return {"none": NoDrafter, "batch": BatchSampler}.get(drafts) or make(drafts, model)


def engine_of(drafts: str, model: LoadedModel, **settings: Any) -> Any:
    return build("continuous", model, drafter=LogitsProcessors.over(maker(drafts, model)), **settings)


def told(engine: ContinuousEngine, requests: Sequence[Request]) -> dict[str, list[int]]:
    for each in requests:
        engine.add(each)
    assert not [event.error for event in drain(engine) if event.error]
    return {each.request_id: each.output_token_ids for each in requests}


def alone(model: LoadedModel, each: Request) -> list[int]:
    """What a request says by itself: rung 1's pass over all its tokens for each, and the formulas."""
    nocache: Any = build("nocache", model)
    with torch.inference_mode():
        while each.append(sample(processed(nocache.next_logits(each), each, ()), each), ()) is None:
            pass
    return each.output_token_ids


SITUATIONS: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 4}, "chunked": {"max_num_seqs": 4, "max_prefill_chunk": 7, "max_num_batched_tokens": 16},
    "tight": {"max_num_seqs": 4, "block_size": 4, "num_blocks": 16, "watermark": 0.0}}


@pytest.fixture(scope="module")
def each_alone(tiny_llama: LoadedModel) -> dict[str, list[int]]:
    return {name: alone(tiny_llama, each) for name, each in three().items()}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("drafts", ["none", "batch", "copy", "head"])
def test_m5_each_has_its_own_in_all_six_orders(drafts: str, situation: str, tiny_llama: LoadedModel,
                                               each_alone: dict[str, list[int]]) -> None:
    preempted = 0
    for order in permutations(three()):
        requests, engine = three(), engine_of(drafts, tiny_llama, **SITUATIONS[situation])
        assert told(engine, [requests[name] for name in order]) == each_alone, order
        preempted += engine.counters.preemptions
        neighbour = requests["plain"].num_drafted_tokens
        assert engine.counters.drafted_tokens == neighbour, "who has penalties is not speculated"
        assert (neighbour > 0) == (drafts in DRAFTS), "and the neighbour still is"
    assert (preempted > 0) == (situation == "tight")


def test_the_settings_of_m5_change_what_is_said(tiny_llama: LoadedModel, each_alone: dict[str, list[int]]) -> None:
    for name, each in three().items():
        off = replace(each.params, **OFF)
        assert (alone(tiny_llama, Request(name, each.prompt_token_ids, off)) != each_alone[name]) == (name != "plain")


# --- around another drafter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["none", "batch", *DRAFTS])
def test_where_nothing_is_in_use_nothing_changes(drafts: str, tiny_llama: LoadedModel) -> None:
    """The same tokens, drafts and passes as without it; and the inner drafter gets the runner's output itself."""
    prompts, params = workload(tiny_llama)
    bare = build("continuous", tiny_llama, max_num_seqs=8, drafter=maker(drafts, tiny_llama))
    want = outputs(bare, prompts, params)
    wrapped = engine_of(drafts, tiny_llama, max_num_seqs=8)
    ran, seen, run_chunks, verify = list[int](), list[int](), wrapped.runner.run, wrapped.drafter.inner.verify

    def running(chunks: tuple[Chunk, ...]) -> StepOutput:
        output = run_chunks(chunks)
        ran.append(id(output.logits))
        return output

    def verifying(chunks: Sequence[Chunk], output: StepOutput) -> list[Verdict]:
        assert id(output.logits) == ran[-1], "a copy"
        seen.append(len(chunks))
        return verify(chunks, output)

    wrapped.runner.run, wrapped.drafter.inner.verify = running, verifying
    assert outputs(wrapped, prompts, params) == want and seen
    assert wrapped.counters == bare.counters and (wrapped.counters.drafted_tokens > 0) == (drafts in DRAFTS)
    if drafts in DRAFTS:
        over(wrapped.drafter.inner)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_every_setting_beside_speculation(drafts: str, tiny_llama: LoadedModel) -> None:
    """Requests with one setting each say what they say where nobody is speculated; their neighbours draft on."""
    def requests() -> list[Request]:
        plain = [Request(f"plain {i}", [5, 6, 5, 6, 5, 6 + i], SamplingParams(max_tokens=30)) for i in range(2)]
        return [plain[0], *(Request(name, [9, 8, 9, 8, 9], SamplingParams(max_tokens=14, temperature=0.7, seed=5,
                                                                         **{name: value}))
                            for name, value in ON.items()), plain[1]]

    want = told(engine_of("none", tiny_llama), requests())
    spoken, engine = requests(), engine_of(drafts, tiny_llama)
    assert told(engine, spoken) == want
    for each in spoken:
        assert (each.num_drafted_tokens > 0) == each.request_id.startswith("plain"), each.request_id
    over(engine.drafter.inner)


def test_log_probabilities_are_the_models_own(tiny_llama: LoadedModel) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    llm = LLM(tiny_llama, row="radix")
    biased, = llm.generate([[1, 2, 3]], SamplingParams(logit_bias={11: 100.0}, **asked))
    assert biased.token_ids == [11] * 8
    again, = llm.generate([[1, 2, 3]], SamplingParams(**asked))
    first, plain = biased.logprobs[0], again.logprobs[0]
    assert first.top == plain.top and first.logprob < plain.logprob < 0


def test_min_tokens_holds_back_the_models_own_end_and_stop_tokens(tiny_llama: LoadedModel) -> None:
    prompts = [[i, 5, 6] for i in range(20)]
    all_said = outputs(build("nocache", tiny_llama), prompts, SamplingParams(max_tokens=12))
    prompt, said = next((p, said) for p, said in zip(prompts, all_said, strict=True) if len({*said[:5]}) == 5)
    eos, stop = said[2], said[4]
    llm = LLM(altered(tiny_llama, eos_token_ids=(eos,)), row="radix")

    def ended(**settings: Any) -> tuple[list[int], str | None]:
        done, = llm.generate([prompt], SamplingParams(max_tokens=12, **settings))
        return done.token_ids, done.finish_reason

    assert ended() == (said[:3], "stop") == ended(min_tokens=2), "the end does not count"
    later, _ = ended(min_tokens=3)
    assert later[:2] == said[:2] and eos not in later[:3] and len(later) > 3
    assert ended(ignore_eos=True, stop_token_ids=(stop,)) == (said[:5], "stop")
    assert ended(ignore_eos=True, stop_token_ids=(stop,), min_tokens=4) == (said[:5], "stop"), "no end to it"
    later, _ = ended(ignore_eos=True, stop_token_ids=(stop,), min_tokens=5)
    assert later[:4] == said[:4] and stop not in later[:5] and len(later) > 5


def test_bfloat16_logits_are_changed_in_float32() -> None:
    """1 - 0.002 is no number of bfloat16. The neighbour's logits are the same numbers as before."""
    logits = torch.tensor([[1.0, 0.99609375, 0.0], [0.1, 0.7, 0.3]], dtype=torch.bfloat16)
    seen: list[torch.Tensor] = []

    class Sees(NoDrafter):
        def verify(self, chunks: Sequence[Chunk], output: StepOutput) -> list[Verdict]:
            seen.append(output.logits)
            return super().verify(chunks, output)

    engine = script_engine(drafter=LogitsProcessors.over(Sees))
    chunks = [Chunk(r, 0, 1, num_logits=1) for r in (asking([2], [0], presence_penalty=0.002), asking())]
    before = logits.clone()
    assert engine.drafter.verify(chunks, StepOutput(logits, torch.empty(0))) == [[0], [1]]
    assert seen[0].dtype == torch.float32 and torch.equal(seen[0][1], before[1].float())
    assert seen[0][0, 0] == torch.tensor(1.0) - 0.002 and torch.equal(logits, before)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [NoDrafter, BatchSampler, partial(make, "ngram")])
def test_a_request_without_a_token_left_fails_alone(inner: Any, tiny_llama: LoadedModel) -> None:
    inner = inner(tiny_llama) if isinstance(inner, partial) else inner
    engine = script_engine(RandomRunner, drafter=LogitsProcessors.over(inner))
    every = tuple(range(64))
    requests = [Request("good", [1, 2], SamplingParams(max_tokens=9, min_p=0.5)),
                Request("none left", [1, 2], SamplingParams(min_tokens=1, stop_token_ids=every)),
                Request("unchecked", [1, 2], SamplingParams(logit_bias={64: 1.0}))]
    want = told(script_engine(RandomRunner), [Request("good", [1, 2], SamplingParams(max_tokens=9))])
    for each in requests:
        engine.add(each)
    errors = {event.request_id: event.error for event in drain(engine) if event.error}
    assert set(errors) == {"none left", "unchecked"}
    assert errors["none left"] == "ValueError: min_tokens 1: every token left would be an end"
    assert requests[0].output_token_ids == want["good"]


@pytest.mark.parametrize("row", [row.name for row in lineage.LADDER if row.needs is None])
def test_every_row_honours_the_settings_or_refuses_them(row: str, tiny_llama: LoadedModel) -> None:
    llm, continuous = LLM(tiny_llama, row=row), "continuous" in lineage.find(row).engine
    assert isinstance(getattr(llm.engine, "drafter", None), LogitsProcessors) == continuous
    assert not isinstance(getattr(build(row, tiny_llama), "drafter", None), LogitsProcessors), "as it is measured"
    llm.generate([[1, 2]], SamplingParams(max_tokens=2))
    passes = llm.engine.counters.forward_passes
    for name, value in ON.items():
        params = SamplingParams(max_tokens=2, **{name: value})
        if continuous:
            assert len(llm.generate([[1, 2]], params)[0].token_ids) == 2
            continue
        with pytest.raises(ValueError, match=f"^{name} .* needs a row that runs continuously, .* and {row} does not"):
            llm.generate([[1, 2], [3, 4]], [SamplingParams(max_tokens=2), params])
        assert llm.engine.counters.forward_passes == passes and not llm.engine.has_unfinished()


def test_a_biased_token_beyond_the_vocabulary_is_refused_before_any_work(tiny_llama: LoadedModel) -> None:
    """H4."""
    llm = LLM(tiny_llama)
    want = llm.generate([[1, 2]], SamplingParams(max_tokens=4))[0].token_ids
    passes = llm.engine.counters.forward_passes
    with pytest.raises(ValueError, match=r"^logit_bias must have token ids from 0 to 63 \(vocab_size 64\), got 999999"):
        llm.generate([[1, 2], [1, 2]], [SamplingParams(), SamplingParams(logit_bias={3: 1, 999999: 1})])
    assert llm.engine.counters.forward_passes == passes and not llm.engine.has_unfinished()
    check(llm.engine, llm.row.name, SamplingParams(logit_bias={63: 1.0}))
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=4))[0].token_ids == want


def test_the_command_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SamplingParams] = []

    class Stub:
        def generate(self, prompt: str, params: SamplingParams) -> list[liteinfer.Completion]:
            asked.append(params)
            return [liteinfer.Completion("0", [1], text="said")]

    monkeypatch.setattr(cli, "_llm", lambda *_, **__: Stub())
    command = ["generate", "x", "--min-p", "0.1", "--min-tokens", "3", "--repetition-penalty", "1.2",
               "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"]
    assert CliRunner().invoke(cli.app, command).stdout == "said\n"
    assert asked == [SamplingParams(min_p=0.1, min_tokens=3, repetition_penalty=1.2, presence_penalty=0.5,
                                    frequency_penalty=-0.5)]
    refused = CliRunner().invoke(cli.app, ["generate", "x", "--min-p", "2"])
    assert str(refused.exception) == "min_p must be a number from 0 to 1, got 2.0"
