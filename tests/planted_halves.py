"""Bugs in whole products of matrices, and in who is told to run them."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
HALVES = "test_halves.py"
ROWS = f"{HALVES}::test_any_rows_give_what_plain_operations_give"
ANYWHERE = f"{HALVES}::test_queries_may_stand_anywhere_beside_their_keys"
FILE = "backends/bf16_matmul.py"
bug("halves-a-query-sees-the-next-key", FILE, ".triu_(seen)", ".triu_(seen + 1)", ROWS)
bug(
    "halves-a-block-reads-one-key-less",
    FILE,
    "seen + rows.stop - start - 1, 0",
    "seen + rows.stop - start - 2, 0",
    ROWS,
)
bug("halves-nobody-is-blind-before-all-keys", FILE, "None if seen > 0 else", "None if seen > -9 else", ANYWHERE)
bug("halves-blind-rows-of-padding-read", FILE, "blind if bool(blind.any()) else None", "None", ROWS)
bug(
    "halves-gradients-of-keys-without-the-scale",
    FILE,
    "_product(d.transpose(1, 2), asks, plan.scale)",
    "_product(d.transpose(1, 2), asks, 1.0)",
    ROWS,
)
bug("halves-gradients-of-the-last-block-alone", FILE, "self.all[:, keys] += more", "self.all[:, keys] = more", ROWS)
bug(
    "halves-sums-are-rounded-with-each-block",
    FILE,
    "exact = torch.promote_types(like.dtype, torch.float32)",
    "exact = like.dtype",
    f"{HALVES}::test_sums_over_many_blocks_are_not_rounded_with_each",
)
bug("halves-a-sum-alone-though-keys-are-left", FILE, " and plan.cuts[0].keys.stop == like.shape[1]", "", ANYWHERE)
bug("halves-keeps-every-weight", FILE, "return keys <= KEPT", "return True",
    f"{HALVES}::test_weights_of_long_texts_are_not_kept")  # fmt: skip
bug("halves-second-derivatives-are-dropped", FILE, "        check_once(PLAIN)\n", "",
    f"{HALVES}::test_a_second_derivative_is_refused")  # fmt: skip
bug("halves-what-is-transformed-is-not-seen", FILE, " or transformed():", ":",
    f"{HALVES}::test_what_is_transformed_is_plain")  # fmt: skip
bug(
    "halves-lead-in-every-precision",
    FILE,
    'job.device == "cpu" and job.dtype == torch.bfloat16 and',
    'job.device == "cpu" and',
    f"{HALVES}::test_numbers_of_16_bits_are_read_in_whole_products",
)
bug(
    "halves-a-job-is-told-the-numbers-of-x",
    "inputs.py",
    "return torch.get_autocast_dtype(x.device.type) if x.dtype != torch.float64 and _autocasts(x) else x.dtype",
    "return x.dtype",
    f"{HALVES}::test_numbers_of_16_bits_are_read_in_whole_products",
)
bug(
    "halves-autocast-takes-double-precision",
    "inputs.py",
    "if x.dtype != torch.float64 and _autocasts(x)",
    "if _autocasts(x)",
    f"{HALVES}::test_autocast_leaves_double_precision_alone",
)
bug(
    "halves-packed-texts-leave-their-kernel",
    "backends/varlen.py",
    "backend in (sdpa, halves, tiled, banded)",
    "backend in (sdpa, tiled, banded)",
    f"{HALVES}::test_packed_texts_stay_with_their_kernel",
)
bug(
    "halves-are-billed-as-the-fused-call",
    "costs/activations.py",
    'load.device == "cpu" and load.dtype == "bf16" and',
    'load.device == "cpu" and load.dtype == "none" and',
    f"{HALVES}::test_what_is_kept_is_billed",
)
bug("halves-kept-weights-are-billed-again", "backends/__init__.py", "backend is halves and halves.keeps(work.keys)",
    "backend is halves and work.keys < 0", f"{HALVES}::test_what_is_kept_is_not_formed_again")  # fmt: skip
