"""Bugs in kernels that mix heads and normalise rows, and in blocks that are run once more."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FUSED = "test_fused.py"
BLOCK = f"{FUSED}::test_a_block_is_mixed_as_the_formula_says"
ADDED = f"{FUSED}::test_gradients_of_keys_read_by_several_blocks_are_added_up"
ROWS = f"{FUSED}::test_rows_are_softmax_over_what_is_allowed"
bug(
    "mixed-without-the-gate-of-keys",
    "kernels/head_mixing.py",
    "            factor = plus(factor, read(form, of_gate + step * o))\n        put(",
    "            factor = plus(factor, splat(memory.number(form, 0)))\n        put(",
    BLOCK,
)
bug(
    "mixed-over-all-groups",
    "kernels/head_mixing.py",
    "return first, last, first, told(table, At.OUT) if each == told(table, At.H) else last",
    "return first, last, 0, told(table, At.OUT)",
    BLOCK,
)
bug(
    "mixed-tiles-share-a-sum",
    "kernels/head_mixing.py",
    "summed(form, table, (b * tiles + tile) * T + t, sums)",
    "summed(form, table, b * tiles * T + t, sums)",
    BLOCK,
)
bug(
    "mixed-gradients-of-keys-of-the-last-query",
    "kernels/head_mixing.py",
    "    clear(form, d_keys, TILE * factors)\n    for t in range(told(table, At.T)):\n",
    "    for t in range(told(table, At.T)):\n        clear(form, d_keys, TILE * factors)\n",
    BLOCK,
)
bug(
    "mixed-gradient-of-ranks-twice",
    "kernels/head_mixing.py",
    "            add(form, of_target + size * WIDE * o, read(form, g + step * o), a)\n",
    "            add(form, of_target + size * WIDE * o, read(form, g + step * o), back)\n",
    BLOCK,
)
bug(
    "padded-in-the-order-of-strides",
    "kernels/head_mixing.py",
    "(F.pad(t, (0, lacking)) if lacking else t).contiguous()",
    "F.pad(t, (0, lacking)) if lacking else t.contiguous()",
    BLOCK,
)
bug(
    "rows-see-the-mask-of-the-first",
    "kernels/row_normalisers.py",
    "told | {At.ALLOWED_QUERY: keys * (seen.shape[2] > 1)",
    "told | {At.ALLOWED_QUERY: 0",
    f"{ROWS}[16-torch.float64]",
)
bug(
    "rows-end-with-the-last-vector",
    "kernels/row_normalisers.py",
    "            if seen == 0 or marked(seen + c):\n",
    "            if seen == 0 or marked(seen + end):\n",
    f"{ROWS}[17-torch.float64]",
    f"{ROWS}[15-torch.float64]",
)
bug(
    "rows-without-keys-are-divided",
    "kernels/row_normalisers.py",
    "    if top == memory.number(form, -math.inf):\n",
    "    if top == memory.number(form, math.inf):\n",
    f"{ROWS}[16-torch.float64]",
)
bug(
    "again-only-the-first-range-of-keys",
    "backends/chunked_attention.py",
    "            done += len(r)\n",
    "",
    f"{ADDED}[window(40) | first(3)]",
)
bug(
    "again-the-last-block-alone",
    "backends/chunked_attention.py",
    "total[:, r.start : r.stop] += grad",
    "total[:, r.start : r.stop] = grad",
    f"{ADDED}[window(40) | first(3)]",
)
bug(
    "again-parameters-of-the-last-block",
    "backends/chunked_attention.py",
    "grad if before is None else before.add_(grad)",
    "grad",
    f"{ADDED}[window(40) | first(3)]",
)
bug(
    "again-other-numbers-are-drawn",
    "backends/chunked_attention.py",
    "        torch.set_rng_state(drawn[0])\n",
    "",
    f"{FUSED}::test_what_is_dropped_is_dropped_again",
)
bug(
    "again-in-full-precision",
    "backends/chunked_attention.py",
    "torch.autocast(device, dtype, enabled=on)",
    "torch.autocast(device, dtype, enabled=False)",
    f"{FUSED}::test_what_was_cast_is_cast_again",
)
