"""Tier B: rung 1's tokens on real prompts, stored with how near each choice was.

`python -m tests.tier_b` writes tests/data/tier_b.json again (a few minutes).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from liteinfer.engines.base import Engine, run
from liteinfer.loading import LoadedModel, load_model
from liteinfer.request import Request, SamplingParams
from tests.conftest import build, outputs

PROMPTS = Path(__file__).parents[1] / "benchmarks" / "data" / "everyday.json"
STORED = Path(__file__).parent / "data" / "tier_b.json"
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
NEAR_TIE = 1e-3       # a top-2 logit gap below this may fall either way in float32
ALLOWED = 1 / 20      # the share of prompts that may differ at all


def load() -> list[dict]:
    return json.loads(STORED.read_text())


def make(model: LoadedModel) -> list[dict]:
    """Rung 1 on every shipped prompt: tokens, and the top-2 logit gap at each."""
    items = []
    for prompt in json.loads(PROMPTS.read_text()):
        engine = build("nocache", model)
        gaps, logits = [], engine.next_logits

        def noting_gaps(request: Request, logits=logits, gaps=gaps) -> torch.Tensor:
            row = logits(request)
            best, second = row.topk(2).values.tolist()
            gaps.append(round(best - second, 6))
            return row

        engine.next_logits = noting_gaps
        request = Request("r", model.encode(prompt), GREEDY)
        list(run(engine, [request]))
        items.append({"prompt": prompt, "prompt_token_ids": request.prompt_token_ids,
                      "token_ids": request.output_token_ids, "gaps": gaps})
    return items


def generate(row: str, model: LoadedModel, reference: list[dict]) -> list[list[int]]:
    return outputs(build(row, model), [item["prompt_token_ids"] for item in reference], GREEDY)


@torch.inference_mode()
def teacher_forced(engine: Engine, prompt: list[int], tokens: list[int]) -> list[int]:
    """The token a native engine picks after the prompt and after each of `tokens` but the last."""
    ids = torch.tensor(prompt + tokens[:-1])
    layout = _layout(len(ids))
    engine.cache.begin(layout)
    logits = engine.llama(ids, layout.positions, engine.cache, torch.arange(len(prompt) - 1, len(ids)))
    engine.cache.free(0)
    return logits.argmax(dim=-1).tolist()


def check(reference: list[dict], got: list[list[int]]) -> int:
    """Assert tier B; return how many prompts differ. Tokens are compared up to the first difference."""
    differ = 0
    for item, tokens in zip(reference, got, strict=True):
        expected = item["token_ids"]
        assert len(tokens) == len(expected), f"{len(tokens)} of {len(expected)} tokens for {item['prompt']!r}"
        first = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b), None)
        if first is not None:
            differ += 1
            gap = item["gaps"][first]
            assert gap < NEAR_TIE, f"token {first} of {item['prompt']!r} differs, where the top-2 gap {gap} is no tie"
    assert differ <= ALLOWED * len(reference), f"{differ} of {len(reference)} prompts differ"
    return differ


def _layout(n: int):
    from liteinfer.model.layout import Layout

    return Layout.of([(0, 0, n)], torch.device("cpu"))


def write() -> None:
    rows = [json.dumps(item, ensure_ascii=False) for item in make(load_model("smollm2-135m", dtype="float32"))]
    STORED.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    write()
