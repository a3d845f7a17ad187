"""Bugs in plain heads that are read in tiles."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
KERNEL, BACKEND = "kernels/flash_attention.py", "backends/flash_cpu.py"
TESTS = "test_tiled.py"
ENDS = f"{TESTS}::test_units_end_where_they_should"
bug(
    "tiled-causal-reads-one-key-more",
    KERNEL,
    "(keys if ahead is None else ahead) + 1, keys)",
    "(keys if ahead is None else ahead) + 2, keys)",
    f"{ENDS}[65-0]",
)
bug(
    "tiled-units-forget-their-last-row",
    KERNEL,
    "np.minimum(rows - first, ROWS)[:, None]",
    "np.minimum(rows - first, ROWS - 1)[:, None]",
    f"{ENDS}[65-0]",
)
bug(
    "tiled-first-unit-begins",
    KERNEL,
    "first = np.arange(0, rows, ROWS)[::-1]",
    "first = np.arange(0, rows, ROWS)",
    f"{TESTS}::test_units_with_most_keys_begin",
)
bug(
    "tiled-heads-of-a-key-stand-apart",
    KERNEL,
    "reshape(batch, queries, kept, size.each).swapaxes(1, 2)",
    "reshape(batch, queries, size.each, kept).swapaxes(1, 3)",
    f"{ENDS}[65-0]",
)
bug(
    "tiled-parts-write-each-others-keys",
    KERNEL,
    "size.keys * part // parts // 4 * 4",
    "size.keys * part // parts",
    f"{TESTS}::test_parts_of_keys_are_added_up[2]",
)
bug(
    "tiled-parts-are-not-cleared",
    KERNEL,
    "plan.parts == 1 else q.new_zeros",
    "plan.parts == 1 else (lambda *size: q.new_full(size, 3.0))",
    f"{TESTS}::test_parts_of_keys_are_added_up[2]",
)
bug(
    "tiled-plans-know-no-scale",
    KERNEL,
    "k.stride(), v.stride(), kinds, ahead, scale",
    "k.stride(), v.stride(), kinds, ahead",
    f"{TESTS}::test_a_plan_is_of_one_kind_of_call",
)
bug(
    "tiled-plans-know-no-strides",
    KERNEL,
    "k.stride(), v.stride(), kinds, ahead, scale",
    "kinds, ahead, scale",
    f"{TESTS}::test_a_plan_is_of_one_kind_of_call",
)
bug(
    "tiled-plans-are-kept-for-ever",
    KERNEL,
    "            if len(_PLANS) >= HELD:\n                _PLANS.clear()\n",
    "",
    f"{TESTS}::test_plans_are_few",
)
bug(
    "tiled-forgets-the-callers-ends",
    KERNEL,
    "known[At.ENDS], known[At.END_ROWS] = ends.data_ptr(), len(ends)",
    "known[At.END_ROWS] = len(ends)",
    f"{TESTS}::test_padding_and_documents[causal()-right]",
)
bug(
    "tiled-ends-stay-in-the-plan",
    KERNEL,
    "    known = known[:]\n    if ends",
    "    if ends",
    f"{TESTS}::test_a_plan_is_of_one_kind_of_call",
)
bug(
    "tiled-counts-the-square",
    KERNEL,
    "keys = _last_tokens(inner, each) + inner * (ahead + 1)",
    "keys = inner * size.keys",
    f"{TESTS}::test_pairs_are_counted_without_counting[3]",
)
bug(
    "tiled-counts-periods-as-one",
    KERNEL,
    "every + sum(first[:rest]) + rest * rise * times",
    "every + sum(first[:rest])",
    f"{TESTS}::test_pairs_are_counted_without_counting[3]",
)
bug(
    "tiled-follows-gradients-twice",
    KERNEL,
    "        check_once(PLAIN)\n        *given, ends",
    "        *given, ends",
    f"{TESTS}::test_a_gradient_of_a_gradient_is_refused",
)
bug(
    "tiled-forgets-what-is-cached",
    BACKEND,
    "return True, None, reading.ahead",
    "return True, None, 0",
    f"{TESTS}::test_a_long_prompt_behind_what_is_cached",
)
bug(
    "tiled-what-was-read-is-half-its-gradient",
    "kernels/flash_attention_kernel.py",
    "    for c in range(count // WIDE * WIDE, count):\n        every +=",
    "    for c in range(count // WIDE * WIDE, count - 1):\n        every +=",
    f"{ENDS}[65-0]",
)
