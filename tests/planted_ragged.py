"""Bugs in the kernel of single queries, in its backend and in caches of 8 bits."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
RAGGED = "test_ragged.py"
ENDS = f"{RAGGED}::test_blocks_and_pieces_end_where_they_should"
BESIDE = f"{RAGGED}::test_what_stands_beside_counts"
READS = f"{RAGGED}::test_it_reads_what_the_definition_reads"
bug(
    "ragged-a-piece-forgets-its-last-block",
    "kernels/paged_decode_kernel.py",
    "    while left > 0:\n        count = min(left, BLOCK)\n",
    "    while left > 1:\n        count = min(left, BLOCK)\n",
    f"{ENDS}[65]",
)
bug(
    "ragged-pieces-without-their-share",
    "kernels/paged_decode_kernel.py",
    "            share = number(f, math.exp(read_one(f, ends) - base))\n",
    "            share = number(f, 1.0)\n",
    f"{ENDS}[257]",
)
bug(
    "ragged-blocks-without-their-factor",
    "kernels/kv_block_attention.py",
    "        factor, sums = number(f, math.exp(old - base)), splat(number(f, 0.0))\n",
    "        factor, sums = number(f, 1.0), splat(number(f, 0.0))\n",
    f"{ENDS}[65]",
)
bug(
    "ragged-the-fourth-head-reads-as-the-third",
    "kernels/kv_block_attention.py",
    "    put_quarter(to + (heads - 1) * apart, found, 3)\n",
    "    put_quarter(to + (heads - 1) * apart, found, 2)\n",
    f"{READS}[64-64-5-1-dtype0]",
)
bug(
    "ragged-the-fourth-head-reads-no-values",
    "kernels/kv_block_attention.py",
    "    if heads > 3:\n",
    "    if heads > 4:\n",
    f"{READS}[64-64-8-2-dtype0]",
)
bug(
    "ragged-the-third-of-three-keys-is-none",
    "kernels/kv_block_attention.py",
    "rest(f, keys[2] + at, count if some > 2 else 0, desk)",
    "rest(f, keys[2] + at, count if some > 3 else 0, desk)",
    f"{READS}[16-80-8-2-dtype0]",
)
bug(
    "ragged-what-was-read-does-not-shrink",
    "kernels/kv_block_attention.py",
    "        if factor != number(f, 1.0):\n",
    "        if factor > number(f, 1.0):\n",
    f"{ENDS}[65]",
)
bug(
    "ragged-pieces-without-their-last-channel",
    "kernels/paged_decode_kernel.py",
    "    for d in range(left):\n",
    "    for d in range(left - 1):\n",
    f"{READS}[130-67-8-2-dtype0]",
)
bug(
    "ragged-a-sink-without-weight",
    "kernels/paged_decode_kernel.py",
    "        sums = number(f, math.exp(read_one(f, sink + b * h) - base)) if sink else number(f, 0.0)\n",
    "        sums = number(f, 0.0)\n",
    f"{BESIDE}[dtype1]",
)
bug(
    "ragged-no-ceiling",
    "kernels/paged_decode_kernel.py",
    "        if whole(told + At.CAP):\n            capped(f, told, desk, count)\n",
    "",
    f"{BESIDE}[dtype1]",
)
bug(
    "ragged-a-bias-one-key-late",
    "kernels/kv_block_attention.py",
    "        more = read_one(f, own + whole(desk + COLUMNS + 8 * i) * key)\n",
    "        more = read_one(f, own + (whole(desk + COLUMNS + 8 * i) - 1) * key)\n",
    f"{BESIDE}[dtype1]",
)
bug(
    "ragged-nan-is-nothing",
    "kernels/simd.py",
    "    return where_below(x, splat(_LEAST), splat(np.float32(0.0)), times(e, power(shifted)))\n",
    "    return larger(splat(np.float32(0.0)), times(e, power(shifted)))\n",
    f"{RAGGED}::test_large_scores_make_no_nan[1e4-dtype0]",
)
bug(
    "ragged-values-without-their-scale",
    "kernels/paged_decode_kernel.py",
    "        if v_scale:\n            scaled(f, told, v_scale, desk, count)\n",
    "",
    f"{RAGGED}::test_the_kernel_reads_8_bits_as_they_lie[causal]",
)
bug(
    "ragged-rows-that-ask-nothing-read-all",
    "cache/contiguous.py",
    "        held = torch.where(at.live.expand(self.batch, -1)[:, 0], self._filled, 0)\n",
    "        held = self._filled\n",
    f"{RAGGED}::test_a_cache_says_how_much_each_row_holds",
)
bug(
    "ragged-packed-documents-meet",
    "cache/contiguous.py",
    "        if not (self.single and self._reads_all):\n",
    "        if not self._reads_all:\n",
    f"{RAGGED}::test_packed_documents_do_not_meet_in_a_cache",
)
bug(
    "stored-8-bits-of-one-scale-too-many",
    "costs/__init__.py",
    "- 4 * math.prod(shape[:-1])",
    "- 4 * math.prod(shape)",
    f"{RAGGED}::test_a_cache_of_8_bits_is_near_and_as_large_as_counted[Direct0]",
)
bug(
    "stored-8-bits-cut-instead-of-rounded",
    "cache/int8_quantization.py",
    ".nan_to_num(0.0).round().clamp(",
    ".nan_to_num(0.0).trunc().clamp(",
    f"{RAGGED}::test_8_bits_are_off_by_half_a_step",
)
