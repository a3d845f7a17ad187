"""Bugs in the kernel of entmax, and in values read by the few weights that are not zero."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
READ = "test_gather.py::test_what_is_read_and_every_gradient"
ANCHOR = "anchors/test_entmax.py"
STEPS = f"{ANCHOR}::test_the_steps_are_enough_for_any_row"
SPARSE, SIFTING = "kernels/row_normalisers.py", "kernels/row_normalisers.py"
bug(
    "sift-forgets-where-they-stood",
    SIFTING,
    "squeeze(x, splat(least), stood + 4 * c,",
    "squeeze(x, splat(least), stood,",
    READ,
)
bug(
    "sift-once-only",
    SPARSE,
    "        count = sift(form, (few, places), count, tau, (few, places))\n",
    "",
    "test_gather.py::test_values_of_keys_without_weight_are_not_read",
)
bug(
    "entmax-one-step-only",
    SIFTING,
    "        if tau == before:\n",
    "        if tau >= before:\n",
    f"{STEPS}[fused-1.5-torch.float64]",
)
bug(
    "entmax-steps-go-astray-beyond-two",
    SIFTING,
    " or (alpha > one + one and abs(tau - before) > half * last)",
    "",
    f"{ANCHOR}::test_above_two_the_root_is_found_too[fused]",
)
bug(
    "entmax-sums-drift",
    SIFTING,
    "SUMMED = 16 * WIDE",
    "SUMMED = 4096 * WIDE",
    f"{STEPS}[fused-1.01-torch.float32]",
    f"{STEPS}[fused-1.5-torch.float32]",
    f"{ANCHOR}::test_equal_scores_are_averaged[fused-2.0]",
)
bug(
    "entmax-alpha-of-another-head",
    SPARSE,
    "    return row // told(table, At.T) % told(table, At.H)\n",
    "    return row // told(table, At.T) % 1\n",
    READ,
)
bug(
    "entmax-gradient-without-the-mean",
    SPARSE,
    "minus(read(form, grads + size * c), splat(mean))",
    "read(form, grads + size * c)",
    f"{ANCHOR}::test_weights_and_gradients_are_the_packages[fused-1.5-1.0]",
)
bug(
    "entmax-gradient-in-alpha-turned",
    SPARSE,
    "- bent + mean * spreads",
    "+ bent + mean * spreads",
    f"{ANCHOR}::test_the_gradient_in_alpha_is_the_packages[fused]",
)
bug(
    "entmax-slope-is-the-weight",
    SIFTING,
    "where_below(zero, r, over(w, r), zero)",
    "w",
    f"{ANCHOR}::test_weights_and_gradients_are_the_packages[fused-1.25-1.0]",
)
bug(
    "gather-the-first-head-of-values",
    SPARSE,
    "+ whole(told(table, At.OF) + 8 * head_of(table, row))",
    "+ 0 * row",
    READ,
)
bug(
    "gather-without-the-last-channels",
    SPARSE,
    "for c in range(width // STRIP * STRIP, width, WIDE):",
    "for c in range(width // STRIP * STRIP, width - WIDE, WIDE):",
    READ,
)
bug(
    "gather-gradients-of-values-of-the-last-row",
    SPARSE,
    "put(d_values + at + c, fma(w, g, read(form, d_values + at + c)))",
    "put(d_values + at + c, times(w, g))",
    READ,
)
bug(
    "gather-no-gradient-beyond-the-first-row",
    "kernels/row_normalisers.py",
    "units = len(s) * held[0].shape[1] if held",
    "units = held[0].shape[1] if held",
    READ,
)
bug(
    "gather-past-what-is-added-to-values",
    "backends/core_interface.py",
    "part.phase is Phase.WEIGHTS or isinstance(part, ValueStep))",
    "part.phase is Phase.WEIGHTS)",
    "test_gather.py::test_why_says_where_values_are_gathered",
)
bug(
    "gather-in-bfloat16-whatever-alpha",
    "parts/entmax.py",
    "(dtype == torch.bfloat16 and few)",
    "dtype == torch.bfloat16",
    "test_gather.py::test_why_says_where_values_are_gathered",
)
