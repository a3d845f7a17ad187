"""Bugs in what is done to a few tokens between products, and in who is told of it."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FILE = "kernels/small_batch_ops.py"
TESTS = "test_few.py"
NORM = f"{TESTS}::test_a_norm_divides_by_the_root_of_the_mean_square"
TURN = f"{TESTS}::test_pairs_turn_by_their_angles"
GATE = f"{TESTS}::test_gates_open_as_they_are_defined"
OTHERS = f"{TESTS}::test_what_else_there_is_is_for_torch"
FOLLOWED = f"{TESTS}::test_who_follows_an_operation_is_told_of_it"
bug("few-norm-of-the-sum", FILE, "total(sums) / width + eps", "total(sums) + eps", NORM)
bug("few-norm-forgets-what-is-added", FILE, "plus(load(f, weight + c), more)", "load(f, weight + c)", NORM)
bug("few-turn-the-other-way", FILE, "minus(times(a, cos), times(b, sin))", "plus(times(a, cos), times(b, sin))", TURN)
bug("few-turn-all-rows-as-the-first", FILE, "if b == 0 or apart:", "if b == 0:", TURN)
bug(
    "few-turn-forgets-the-rest",
    FILE,
    "range(2 * half, lies(f) * width,",
    "range(2 * half, lies(f) * width - 1, 2 *",
    TURN,
)
bug("few-turn-does-not-grow", FILE, "math.sin(angle) * swell", "math.sin(angle)", TURN)
bug("few-gate-of-the-first-row", FILE, "up + m * told(table, 6)", "up", GATE)
bug(
    "few-gate-overflows",
    FILE,
    "larger(x, splat(number(f, -88.0)))",
    "x",
    f"{TESTS}::test_gates_are_open_closed_or_no_number[dtype0]",
)
bug("few-takes-broken-vectors", FILE, "x.shape[-1] % WIDE == 0", "x.shape[-1] % 8 == 0", f"{OTHERS}[width]")
bug("few-takes-many", FILE, "0 < x.numel() <= FEW", "0 < x.numel()", f"{OTHERS}[many]")
bug("few-takes-rows-turned", FILE, "        and x.stride(-1) == 1\n", "", f"{OTHERS}[turned]")
bug(
    "alone-beside-a-mode",
    "kernels/autograd_guards.py",
    "        or torch._C._len_torch_dispatch_stack()\n",
    "",
    FOLLOWED,
)
bug(
    "alone-beside-a-profiler",
    "kernels/autograd_guards.py",
    "        or _profiler_enabled()\n",
    "",
    FOLLOWED,
)
bug("alone-with-what-has-a-mind", "kernels/autograd_guards.py", "type(t) in OWN and t.is_cpu", "t.is_cpu", FOLLOWED)
