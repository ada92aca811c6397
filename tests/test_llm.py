"""`LLM` and the command line: text in, text out, and one line for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from liteinfer import LLM, SamplingParams, cli
from liteinfer.loading import LoadedModel
from liteinfer.request import Request
from tests.conftest import replace_pass, rows

PROMPT = "Water boils at"


def test_generate_keeps_the_order_and_takes_text_or_ids(smol: LoadedModel) -> None:
    llm = LLM(smol)
    params = SamplingParams(max_tokens=6)
    ids = smol.encode(PROMPT)
    assert llm.generate([], params) == []
    by_text, by_ids, longer = llm.generate([PROMPT, ids, PROMPT], [params, params, SamplingParams(max_tokens=8)])
    assert by_text.token_ids == by_ids.token_ids == longer.token_ids[:6]
    assert by_text.prompt_token_ids == ids
    assert by_text.text == smol.decode(by_text.token_ids) and by_text.text.strip()
    assert (by_text.finish_reason, len(longer.token_ids)) == ("length", 8)
    assert llm.generate(ids, params)[0].token_ids == by_ids.token_ids
    with pytest.raises(ValueError, match="2 prompts but 1 params"):
        llm.generate([PROMPT, PROMPT], [params])


@pytest.mark.parametrize("row", rows())
def test_one_bad_prompt_stops_all_before_any_work(row: str, tiny_llama: LoadedModel) -> None:
    llm = LLM(tiny_llama, row=row)
    with pytest.raises(ValueError, match="token id 99"):
        llm.generate([[1, 2], [99]])
    assert llm.engine.counters.forward_passes == 0
    assert not llm.engine.has_unfinished()
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_a_request_that_fails_says_so_and_the_others_go_on(tiny_llama: LoadedModel) -> None:
    llm = LLM(tiny_llama)

    def nan_for_the_first(healthy: Callable[[], Tensor], requests: list[Request]) -> Tensor:
        return healthy() * torch.tensor([[float("nan") if r.request_id == "0" else 1.0] for r in requests])

    replace_pass(llm.engine, nan_for_the_first)
    failed, fine = llm.generate([[1, 2], [1, 2]], SamplingParams(max_tokens=3))
    assert failed.finish_reason == "error" and failed.error == "FloatingPointError: 64 of 64 logits are NaN"
    assert fine.finish_reason == "length" and len(fine.token_ids) == 3 and fine.error is None


def test_an_interrupted_call_leaves_nothing_behind(tiny_llama: LoadedModel) -> None:
    llm = LLM(tiny_llama)
    expected = llm.generate([[4, 5]], SamplingParams(max_tokens=5))[0].token_ids
    interrupt = True

    def interrupted(healthy: Callable[[], Tensor], _: object) -> Tensor:
        if interrupt:
            raise KeyboardInterrupt
        return healthy()

    replace_pass(llm.engine, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]])
    interrupt = False
    assert not llm.engine.has_unfinished()
    assert llm.generate([[4, 5]], SamplingParams(max_tokens=5))[0].token_ids == expected


@pytest.mark.parametrize(("prompts", "named"), [
    ([1.5], "1.5"), ([1, None], "None"), (5, "int"), ({1: 2}, "dict"), ([[1], 2], "2"), (["x", None], "None"),
])
def test_what_is_no_prompt_is_named(prompts: object, named: str, smol: LoadedModel) -> None:
    with pytest.raises(ValueError, match=named):
        LLM(smol).generate(prompts)


def test_unknown_row_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="unknown row 'turbo'"):
        LLM("/no/such/folder", row="turbo")


def test_command_line_json(smol: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liteinfer.llm.load_model", lambda *args, **settings: smol)
    result = CliRunner().invoke(cli.app, ["generate", PROMPT, "--row", "eager", "--max-tokens", "5", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["text"] == LLM(smol, row="nocache").generate(PROMPT, SamplingParams(max_tokens=5))[0].text
    assert len(printed["token_ids"]) == 5 and printed["finish_reason"] == "length"
    plain = CliRunner().invoke(cli.app, ["generate", PROMPT, "--max-tokens", "5"])
    assert plain.stdout == printed["text"] + "\n"


@pytest.mark.parametrize(("arguments", "words"), [
    (["generate", ""], "prompt is empty"),
    (["generate", "x", "--max-tokens", "0"], "max_tokens must be an integer of at least 1, got 0"),
    (["generate", "x", "--max-tokens", "-3"], "got -3"),
    (["generate", "x", "--temperature", "-1"], "temperature must be a number of at least 0, got -1.0"),
    (["generate", "x", "--row", "turbo"], "unknown row 'turbo'"),
    (["generate", "x", "--max-tokens", "9000"], "9001 is over max_model_len 8192"),
    (["generate", "word " * 9000], "over max_model_len 8192"),
    (["generate", "x", "--model", "./no-such-folder"], "no-such-folder"),
    (["generate", "x", "--dtype", "float31"], "float31"),
])
def test_command_line_errors_are_one_line_and_exit_code_2(
        arguments: list[str], words: str, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["liteinfer", *arguments])
    with pytest.raises(SystemExit) as exit_code:
        cli.main()
    printed = capsys.readouterr()
    assert exit_code.value.code == 2
    assert words in printed.err
    assert printed.err.strip().count("\n") == 0 and "Traceback" not in printed.err
    assert printed.out == ""
