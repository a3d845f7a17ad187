"""Bugs in what serving costs: allocators, steps, capacity, verdicts, and the machine at hand."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
ALLOCATORS, SERVING, HERE = "test_allocators.py", "test_serving.py", "test_here.py"
bug(
    "serving-pages-of-a-window-lie-straight",
    "costs/kv_cache_memory.py",
    "_up(last - 1, self.page) + 1)",
    "_up(last, self.page))",
    f"{ALLOCATORS}::test_pages_are_those_that_hold_something",
)
bug(
    "serving-a-beginning-is-shared-in-part-pages",
    "costs/kv_cache_memory.py",
    "pages = min(prefix, length) // self.page",
    "pages = _up(min(prefix, length), self.page)",
    f"{ALLOCATORS}::test_only_whole_pages_of_a_beginning_are_shared",
)
bug(
    "serving-a-forgotten-beginning-is-still-shared",
    "costs/kv_cache_memory.py",
    "max(kept, max(length - last, 0) // self.page)",
    "kept",
    f"{ALLOCATORS}::test_a_common_beginning_is_kept_once",
)
bug(
    "serving-unified-pages-forget",
    "costs/kv_cache_memory.py",
    '"unified": Manner(forgets=False, shares=True)',
    '"unified": Manner(forgets=True, shares=True)',
    f"{ALLOCATORS}::test_gemma_3_1b_at_32768",
    f"{ALLOCATORS}::test_pages_are_those_that_hold_something",
)
bug(
    "serving-a-state-of-bytes",
    "costs/kv_cache_memory.py",
    "max(STORED[dtype], STATE)",
    "STORED[dtype]",
    f"{ALLOCATORS}::test_a_state_keeps_float32_whatever_the_cache",
)
bug(
    "serving-one-scale-for-all-heads",
    "costs/roofline.py",
    "SCALE * math.prod(shape[:-1])",
    "SCALE",
    f"{ALLOCATORS}::test_int8_has_a_scale_for_each_head",
    f"{SERVING}::test_int8_weights_and_cache_are_read_as_bytes",
)
bug(
    "serving-critical-without-the-two",
    "costs/roofline.py",
    "STORED[weights or dtype] / 2",
    "STORED[weights or dtype]",
    f"{SERVING}::test_weights_alone_wait_for_compute_from",
)
bug(
    "serving-every-token-has-logits",
    "costs/serving_cost.py",
    'met = answers if each.name == "head" else tokens',
    "met = tokens",
    f"{SERVING}::test_a_prompt_is_answered_once",
)
bug(
    "serving-chunks-forget-what-came-before",
    "costs/serving_cost.py",
    "self.mixed(beside, min(chunk, prompt - past), past)",
    "self.mixed(beside, min(chunk, prompt - past))",
    f"{SERVING}::test_the_first_token_waits_for_every_chunk",
)
bug(
    "serving-a-prompts-end-takes-the-place-of-rows",
    "costs/serving_cost.py",
    "{prompt: requests.get(prompt, 0) + 1}",
    "{prompt: 1}",
    f"{SERVING}::test_a_prompt_that_ends_in_one_token_joins_the_decoding",
)
bug(
    "serving-cross-attention-projects-its-source-at-every-step",
    "costs/serving_cost.py",
    "Work(1, request.tokens, 0, request.source, pairs)",
    "Work(1, request.tokens, request.source, request.source, pairs)",
    f"{SERVING}::test_a_step_is_what_a_price_says[bart]",
)
bug(
    "serving-experts-are-all-read",
    "costs/kv_cache_memory.py",
    "min(self.count, tokens * self.active)",
    "self.count",
    f"{SERVING}::test_experts_are_read_once_and_asked_for_every_token",
    f"{SERVING}::test_a_step_is_what_a_price_says[deepseek]",
)
bug(
    "serving-the-first-that-does-not-fit",
    "costs/serving_capacity.py",
    "LARGEST if over is None else over - 1",
    "LARGEST if over is None else over",
    f"{SERVING}::test_llama_3_8b_on_24_gb_by_hand",
)
bug(
    "serving-remedies-unpriced",
    "costs/serving_capacity.py",
    "for remedy in tried if remedy.demand.fits)",
    "for remedy in tried)",
    f"{SERVING}::test_what_is_not_enough_is_not_named",
)
bug(
    "serving-a-window-in-every-layer",
    "costs/serving_capacity.py",
    "if spec.pattern == Causal() and not spec.stateful else spec",
    "if not spec.stateful else spec",
    f"{SERVING}::test_a_window_remedy_leaves_narrower_windows",
)
bug(
    "serving-any-machine-will-do",
    "costs/roofline.py",
    "found.machine == machine and",
    "True and",
    f"{HERE}::test_what_is_damaged_or_of_another_machine_is_measured_anew[machine]",
)
bug(
    "serving-no-home-no-machine",
    "costs/roofline.py",
    "except (OSError, RuntimeError) as error:",
    "except ZeroDivisionError as error:",
    f"{HERE}::test_without_a_home_it_is_measured_and_said_so[file]",
)
bug(
    "serving-times-what-is-larger",
    "costs/serving_cost.py",
    "if box.flops != core.flops(box.rows * keys):",
    "if not box.flops:",
    f"{HERE}::test_boxes_are_measured_here",
)
