"""Bugs in steps of whole models: thin products, and one query of transformers' models in bfloat16."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
PRODUCTS = "test_products.py"
SUM = f"{PRODUCTS}::test_every_number_is_the_sum_of_its_products"
OTHERS = f"{PRODUCTS}::test_everything_else_is_for_torch"
LOW = "test_registered_low.py"
bug(
    "thin-forgets-the-end-of-a-row",
    "kernels/small_batch_ops.py",
    "if width % STEP:\n        part =",
    "if width % STEP and width < STEP:\n        part =",
    f"{SUM}[48-dtype0]",
)
bug(
    "thin-reads-one-row-twice",
    "kernels/small_batch_ops.py",
    "even = evens(f, w[0]), evens(f, w[1])",
    "even = evens(f, w[0]), evens(f, w[0])",
    f"{SUM}[784-dtype0]",
)
bug(
    "thin-reads-the-first-tokens-again",
    "kernels/small_batch_ops.py",
    "on(neighbours(m, tokens, 2 * LINE), desk)",
    "on(neighbours(0, tokens, 2 * LINE), desk)",
    f"{SUM}[32-dtype1]",
)
bug(
    "thin-leaves-out-the-last-row-of-a-block",
    "kernels/small_batch_ops.py",
    "min(each, rows - first)",
    "min(each, rows - first) - 1",
    f"{SUM}[16-dtype0]",
)
bug(
    "thin-writes-where-the-matrix-before-wrote",
    "kernels/small_batch_ops.py",
    "lies(f) * (before + first)",
    "lies(f) * first",
    f"{SUM}[16-dtype0]",
)
bug(
    "thin-end-of-a-row-meets-the-beginning-of-a-token",
    "kernels/small_batch_ops.py",
    "tail = lies(f) * width, 2 * LINE * tokens, desk + 4 * (width // STEP * STEP) * tokens",
    "tail = lies(f) * width, 2 * LINE * tokens, desk",
    f"{SUM}[784-dtype1]",
)
bug(
    "thin-starts-from-one",
    "kernels/small_batch_ops.py",
    "zero = splat(number(f, 0.0))",
    "zero = splat(number(f, 1.0))",
    f"{SUM}[16-dtype0]",
)
bug(
    "thin-lays-tokens-one-after-the-other",
    "kernels/small_batch_ops.py",
    "to += 2 * LINE * tokens",
    "to += 2 * LINE",
    f"{PRODUCTS}::test_a_token_does_not_see_those_beside_it_nor_the_threads[dtype0]",
)
bug(
    "thin-forgets-the-fourth-row",
    "kernels/small_batch_ops.py",
    "apart * min(first + 3, last)",
    "apart * min(first + 2, last)",
    f"{PRODUCTS}::test_nothing_is_written_beside_the_result",
)
bug(
    "thin-takes-even-numbers-for-odd-ones",
    "kernels/simd.py",
    "told = builder.and_(found, upper) if odd else",
    "told = builder.and_(found, upper) if odd > 1 else",
    f"{PRODUCTS}::test_bits_of_every_place_are_read",
)
bug(
    "thin-cuts-what-it-writes",
    "kernels/simd.py",
    "above = builder.lshr(builder.add(bits, half), all_of(INT, 16))",
    "above = builder.lshr(bits, all_of(INT, 16))",
    f"{PRODUCTS}::test_what_is_written_is_rounded_as_torch_rounds",
)
bug(
    "thin-writes-a-number-for-nan",
    "kernels/simd.py",
    "all_of(INT, 0x7FC0), above)",
    "all_of(INT, 0x7F80), above)",
    f"{PRODUCTS}::test_what_is_written_is_rounded_as_torch_rounds",
)
bug(
    "feed-takes-up-for-its-gate",
    "models/feed_forward.py",
    "dict(zip(self._both, told",
    "dict(zip(self._both[::-1], told",
    f"{PRODUCTS}::test_a_gated_feed_meets_its_input_once",
)
bug(
    "thin-gradient-of-the-first-matrix-for-all",
    "kernels/small_batch_ops.py",
    "return dy @ torch.cat(matrices), [part.T @ x for part in parts]",
    "return dy @ torch.cat(matrices), [parts[0].T @ x for part in parts]",
    f"{PRODUCTS}::test_gradients_are_those_of_the_product",
)
bug(
    "thin-counts-one-matrix",
    "kernels/small_batch_ops.py",
    "2 * x[0] * x[1] * sum(matrix[0] for matrix in matrices)",
    "2 * x[0] * x[1] * matrices[0][0]",
    f"{PRODUCTS}::test_torch_is_told_of_its_shape_and_flops",
)
bug(
    "thin-takes-turned-matrices",
    "products.py",
    "w.dtype == x.dtype and w.is_contiguous()",
    "w.dtype == x.dtype",
    f"{OTHERS}[turned]",
)
bug(
    "thin-takes-another-type-of-matrix",
    "products.py",
    "type(w) in PLAIN and w.dtype == x.dtype and",
    "type(w) in PLAIN and",
    f"{OTHERS}[mixed]",
)
bug(
    "thin-under-gradients",
    "products.py",
    "if torch.is_grad_enabled() or sum(",
    "if sum(",
    f"{PRODUCTS}::test_gradients_and_autocast_are_for_torch",
)
bug(
    "thin-takes-many-tokens",
    "products.py",
    "0 < x.numel() <= FEW * width",
    "0 < x.numel()",
    f"{OTHERS}[tokens]",
)
bug(
    "products-forget-the-bias",
    "products.py",
    "if bias is None and is_thin(",
    "if is_thin(",
    f"{PRODUCTS}::test_a_bias_is_added_and_views_are_those_of_each_matrix",
)
bug(
    "registered-low-without-its-bias",
    "hub/transformers_backend.py",
    "Beside() if bias is None else Beside(bias[:, :, 0])",
    "Beside()",
    f"{LOW}::test_one_query_reads_what_it_reads_in_double[7-by head]",
)
bug(
    "registered-low-misses-the-newest-key",
    "kernels/paged_decode.py",
    "for number in (row, 0, slots)",
    "for number in (row, 0, slots - 1)",
    f"{LOW}::test_one_query_reads_what_it_reads_in_double[7-all]",
)
bug(
    "registered-low-rows-read-the-first-page",
    "kernels/paged_decode.py",
    "for number in (row, 0, slots)",
    "for number in (0, 0, slots)",
    f"{LOW}::test_one_query_reads_what_it_reads_in_double[130-all]",
)
bug(
    "registered-low-keeps-scores-for-gradients",
    "hub/transformers_backend.py",
    "q.dtype == torch.bfloat16 and not torch.is_grad_enabled() and",
    "q.dtype == torch.bfloat16 and",
    f"{LOW}::test_no_key_is_repeated_and_no_fused_call_is_made",
)
bug(
    "course-says-that-rows-of-several-lengths-are-compiled",
    "generation/decoding_state.py",
    "self.choice = told if alike or not told.compiled else RAGGED",
    "self.choice = told",
    "test_compiled_steps.py::test_rows_of_several_lengths_say_why_they_are_not_compiled",
)
bug(
    "asked-tells-nobody-of-its-choice",
    "generation/generate.py",
    "        self.tell(course.choice)\n",
    "",
    "test_compiled_steps.py::test_whoever_asks_hears_of_every_choice",
)
bug(
    "run-gives-no-reason-to-compile",
    "cli/run/texts.py",
    "tell = unheard if given.compile is None else reasons.tell",
    "tell = unheard",
    "test_run_cli.py::test_it_says_why_steps_are_compiled_or_not",
)
bug(
    "run-gives-its-reason-for-every-batch",
    "cli/run/texts.py",
    "if choice.reason not in self.told:",
    "if choice.reason:",
    "test_run_cli.py::test_it_says_why_steps_are_compiled_or_not",
)
bug(
    "requests-are-not-told-that-nothing-is-compiled",
    "cli/run/requests.py",
    "        Reasons().tell(TOGETHER)\n",
    "        pass\n",
    "test_run_cli.py::test_requests_of_several_lengths_are_not_compiled",
)
