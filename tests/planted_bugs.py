"""Planted bugs: each, applied to a copy of the package, must be caught by the named test, by an assertion."""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    file: str    # below liteinfer/
    old: str     # stands exactly once in the file
    new: str
    test: str    # the test that must fail, and passes without the bug


BUGS = [
    Bug("request.py", "token_id in eos_token_ids and not self.params.ignore_eos", "token_id in eos_token_ids",
        "tests/test_request.py::test_stop_reasons"),
    Bug("sampling.py", "before = probs.cumsum(0) - probs", "before = probs.cumsum(0)",
        "tests/test_sampling.py::test_top_k_and_top_p_by_hand"),
    Bug("sampling.py", ", generator=request.generator)", ")",
        "tests/test_sampling.py::test_m2_seeded_tokens_depend_on_nothing_but_the_request"),
    Bug("engines/base.py", "self.running = None\n        self.release()", "self.running = None",
        "tests/test_ladder.py::test_tier_a_tokens_are_identical[llama-liteinfer-eager]"),
    Bug("engines/dynamic_cache.py", "kv_bytes_copied += held", "kv_bytes_copied += kv_bytes(self.cache)",
        "tests/test_engine_contract.py::test_counters_are_what_the_chapters_predict"),
    Bug("engines/no_cache.py", "tokens_computed += ids.numel()", "tokens_computed += 1",
        "tests/test_engine_contract.py::test_counters_are_what_the_chapters_predict"),
    Bug("model/layout.py", "torch.arange(c, c + q)", "torch.arange(0, q)",
        "tests/test_cache_cases.py::test_c2_chunks_see_their_history[llama-contiguous-chunks0]"),
    Bug("cache/contiguous.py", ".tril(total - new)", ".tril(0)",
        "tests/test_cache_cases.py::test_c2_chunks_see_their_history[llama-contiguous-chunks0]"),
    Bug("cache/contiguous.py", "self.lengths[seq] = n", "pass",
        "tests/test_cache_cases.py::test_c4_what_was_cropped_is_gone[llama-contiguous]"),
    Bug("cache/contiguous.py", "keys, values = self.keys[layer, seq], self.values[layer, seq]",
        "keys, values = self.keys[layer, 0], self.values[layer, 0]",
        "tests/test_cache_cases.py::test_sequences_of_one_step_do_not_see_each_other"),
    Bug("model/rope.py", "torch.cat((-second, first), dim=-1)", "torch.cat((second, -first), dim=-1)",
        "tests/test_model.py::test_rotation_by_hand"),
    Bug("model/rope.py", "if config.rope_scaling is None:", "if True:",
        "tests/test_model.py::test_llama3_scaling_by_hand"),
    Bug("model/llama.py", 'weights.get(f"{prefix}{name}.bias")', "None",
        "tests/test_model.py::test_logits_equal_transformers[dtype1-plain-None-False-qwen2]"),
    Bug("model/llama.py", "F.silu(gate) * up", "gate * up",
        "tests/test_model.py::test_logits_equal_transformers[dtype1-plain-None-False-llama]"),
    Bug("model/linear.py", "return lambda x: F.linear(x, fused, bias)", "return lambda x: F.linear(x, fused)",
        "tests/test_model.py::test_packed_layers_compute_what_plain_ones_do[dtype1-True-3]"),
]
