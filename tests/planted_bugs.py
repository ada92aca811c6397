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
    Bug("model/layout.py", "for p in range(c, c + q)", "for p in range(q)",
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
    # chapter 4: pages
    Bug("cache/block_pool.py", "            if not self.ref_counts[block]:\n                self.free_list",
        "            if True:\n                self.free_list",
        "tests/test_block_pool.py::test_a_shared_block_is_free_when_its_last_holder_lets_go"),
    Bug("cache/paged.py", "table[t // block_size] * block_size + t % block_size\n            for",
        "table[max(0, t - 1) // block_size] * block_size + t % block_size\n            for",
        "tests/test_paged_cache.py::test_gathered_keys_and_values_are_bitwise_those_of_the_contiguous_cache[4]"),
    Bug("cache/paged.py", "in zip(layout.block_tables,", "in zip(layout.block_tables.flip(0),",
        "tests/test_paged_cache.py::test_p2_sequences_of_one_step_write_to_different_slots"),
    Bug("cache/paged.py", ".flatten(0, 1)[:length]", ".flatten(0, 1)",
        "tests/test_cache_cases.py::test_c2_chunks_see_their_history[llama-paged-4-chunks0]"),
    Bug("cache/pool_size.py", "per_token = 2 * config", "per_token = config",
        "tests/test_paged_cache.py::test_p4_or_a_share_of_memory_if_that_is_less"),
    Bug("engines/paged.py", "request.params.max_tokens - 1)", "request.params.max_tokens)",
        "tests/test_paged_cache.py::test_a_request_that_the_pool_can_never_hold_is_refused_with_both_sizes[paged]"),
    Bug("kernels/paged_attention.py", "there = (token < end)[:, None] & (d < HEAD_SIZE)[None, :]",
        "there = (token >= 0)[:, None] & (d < HEAD_SIZE)[None, :]",
        "tests/test_paged_attention.py::test_g2_nothing_is_read_but_the_sequence_itself[17-float64]"),
    Bug("kernels/paged_attention.py", "kv_head * GROUP + row % GROUP", "row % GROUP * tl.num_programs(1) + kv_head",
        "tests/test_paged_attention.py::test_query_heads_to_a_kv_head[3-float64]"),
    Bug("kernels/paged_attention.py", "sees = held - new + query + 1", "sees = query + 1",
        "tests/test_paged_attention.py::test_a_mixed_step_over_many_tiles[float64]"),
    # chapter 5: static batches
    Bug("engines/static_batch.py",
        "mask = [[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences]",
        "mask = [[int(token != 0) for token in row] for row in ids]",
        "tests/test_ladder.py::test_tier_a_tokens_are_identical[llama-liteinfer-eager-b4]"),
    Bug("engines/static_batch.py", "(mask.cumsum(dim=1) - 1).clamp(min=0)",
        "torch.arange(mask.shape[1]).expand_as(mask)",
        "tests/test_static_batch.py::test_b1_padding_of_any_amount_changes_nothing[5]"),
    Bug("engines/static_batch.py", "<= self.cache.pool.num_blocks", "<= 10**9",
        "tests/test_static_batch.py::test_a_batch_is_no_larger_than_the_pool_surely_holds"),
    # chapter 6: continuous batching
    Bug("scheduler.py", "self.waiting.appendleft(request)", "self.waiting.append(request)",
        "tests/test_scheduler.py::test_the_youngest_is_preempted_and_comes_back_first"),
    Bug("scheduler.py", "request.num_computed_tokens = 0\n        self.waiting.appendleft",
        "self.waiting.appendleft", "tests/test_scheduler.py::test_s4_nothing_is_lost_or_doubled_by_a_preemption"),
    Bug("scheduler.py", "self._chunk(request, budget - others,", "self._chunk(request, budget,",
        "tests/test_scheduler.py::test_s12_also_when_the_long_prompt_came_first"),
    Bug("scheduler.py", "if own == missing else 0)", "if own else 0)",
        "tests/test_scheduler.py::test_s3_the_middle_of_a_prompt_is_not_sampled[greedy]"),
    Bug("kv_manager.py", "        except OutOfBlocks:\n            return False",
        "        except OutOfBlocks:\n            pass",
        "tests/test_scheduler.py::test_s7_two_half_prefilled_prompts_that_need_each_others_blocks"),
    Bug("runner.py", "rows += range(end - chunk.num_logits, end)", "rows += range(end - 1, end)",
        "tests/test_continuous.py::test_logits_only_where_a_token_is_wanted"),
    Bug("engines/continuous.py", "if chunk.request in self.scheduler.running]", "if True]",
        "tests/test_continuous.py::test_s9_an_abort_between_schedule_and_update_publishes_nothing"),
    Bug("engines/continuous.py", "refused = len(chunk.draft) - (len(event.token_ids) - 1)", "refused = 0",
        "tests/test_continuous.py::test_drafted_tokens_are_fed_checked_and_taken_back[ample-2]"),
]
