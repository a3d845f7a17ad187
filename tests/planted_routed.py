"""Bugs in queries packed by who speaks."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
FILE, PACKS = "backends/routed_heads.py", "backends/routed_heads.py"
TESTS = "test_routed_backend.py"
OPEN = f"{TESTS}::test_open_heads_read_as_if_all_were_asked"
READ = "test_read_lines.py"
WHY = "test_why.py"
bug(
    "routed-fillers-weigh-backwards",
    FILE,
    "return o_BGRV, lse_BGR.masked_fill_(~self.pack.live_BGR, torch.inf)",
    "return o_BGRV, lse_BGR",
    f"{OPEN}[chunks-causal()-6-uneven]",
)
bug(
    "routed-merged-the-other-way-round",
    FILE,
    "torch.lerp(before, o, torch.sigmoid(apart)[..., None])",
    "torch.lerp(o, before, torch.sigmoid(apart)[..., None])",
    f"{OPEN}[chunks-causal()-6-even]",
)
bug(
    "routed-first-of-a-chunk-reads-nothing-of-its-own",
    PACKS,
    "own = min(first + self.ahead, self.keys - 1)",
    "own = min(first + self.ahead + 1, self.keys - 1)",
    f"{OPEN}[chunks-causal()-6-even]",
)
bug(
    "routed-rows-barred-too-few",
    PACKS,
    "torch.searchsorted(pack.place_BGR, asked - 1).amax((0, 1))",
    "torch.searchsorted(pack.place_BGR, asked - 1).amin((0, 1))",
    f"{OPEN}[chunks-causal()-6-even]",
)
bug(
    "routed-rows-left-out-backwards",
    PACKS,
    "torch.searchsorted(pack.place_BGR, asked).amin((0, 1))",
    "torch.searchsorted(pack.place_BGR, asked).amax((0, 1))",
    f"{OPEN}[chunks-causal()-6-even]",
)
bug(
    "routed-heads-of-a-group-are-its-first",
    PACKS,
    "head = torch.tensor(group, device=x.device)[g] * each + x % each",
    "head = torch.tensor(group, device=x.device)[g] * each",
    f"{OPEN}[chunks-full()-2-even]",
)
bug(
    "routed-last-of-a-chunk-is-in-the-next",
    PACKS,
    "rows + rank - 1 - chunk * own // count",
    "rows + rank - chunk * own // count",
    f"{OPEN}[chunks-causal()-2-even]",
    f"{TESTS}::test_any_length_and_load",
)
bug(
    "routed-forgets-what-is-cached",
    PACKS,
    "return self._triangle(place_BGR + self.ahead + 1 - keys.start",
    "return self._triangle(place_BGR + 1 - keys.start",
    f"{OPEN}[chunks-causal()-6-even]",
)
bug(
    "routed-reads-neighbours-of-its-heads",
    FILE,
    "return x_BGSK[:, regular.start : regular.stop : step]",
    "return x_BGSK[:, regular.start : regular.start + len(heads)]",
    f"{TESTS}::test_any_length_and_load",
)
bug(
    "routed-rows-of-a-batch-are-one",
    PACKS,
    "device=place_BGR.device) % allowed_BTS.shape[0]",
    "device=place_BGR.device) * 0",
    f"{TESTS}::test_padding_and_packed_documents[chunks-left-causal()]",
)
bug(
    "routed-whole-whatever-tokens-say",
    PACKS,
    "whole = plain and each == 1 and",
    "whole = each == 1 and",
    f"{TESTS}::test_padding_and_packed_documents[chunks-right-causal()]",
)
bug(
    "routed-gates-of-other-texts",
    "backends/varlen.py",
    "[gate[n] for gate in opened]",
    "[gate[0] for gate in opened]",
    f"{TESTS}::test_packed_texts_take_their_gates_with_them[()]",
)
bug(
    "routed-deaf-where-gradients-pass",
    "parts/mixture_of_heads.py",
    'return self.router != "norm"',
    "return True",
    f"{TESTS}::test_it_takes_what_it_can",
)
bug(
    "routed-shuts-by-any-gate",
    FILE,
    "gate.shares(job.spec) if gate.seals() or not job.grad else None",
    "gate.shares(job.spec)",
    f"{TESTS}::test_it_takes_what_it_can",
)
bug(
    "routed-in-a-graph",
    FILE,
    "    if job.compiled:\n",
    "    if job.compiled and job.grad:\n",
    f"{TESTS}::test_what_it_cannot_is_refused",
)
bug(
    "routed-spends-half-a-chunk-less",
    FILE,
    "Fraction(work.queries * (count + 1), 2)",
    "Fraction(work.queries * count, 2)",
    f"{TESTS}::test_it_spends_what_torch_counts[chunks-512-causal()]",
)
bug(
    "routed-mixes-precisions",
    FILE,
    "    if torch.is_autocast_enabled(q.device.type):\n",
    "    if torch.is_autocast_enabled(q.device.type) and not job.grad:\n",
    f"{TESTS}::test_under_autocast",
)
bug(
    "read-lines-a-unit-forgets-its-last-rows",
    "backends/routed_heads.py",
    "(counts[whose] - ROWS * number).clamp(max=ROWS)",
    "(counts[whose] - ROWS * number).clamp(max=ROWS - 1)",
    f"{READ}::test_units_and_blocks_of_keys_end_where_they_should[64-64]",
)
bug(
    "read-lines-parts-write-each-others-keys",
    "backends/routed_heads.py",
    "keys * part // parts // 4 * 4",
    "keys * part // parts",
    f"{READ}::test_parts_of_keys_are_added_up[2]",
)
bug(
    "read-lines-shortest-first",
    "backends/routed_heads.py",
    "torch.argsort(high - low, descending=True)",
    "torch.argsort(high - low)",
    f"{READ}::test_those_with_most_keys_begin",
)
bug(
    "read-lines-ends-of-the-first-row",
    "kernels/flash_attention_kernel.py",
    "tokens = told(table, At.T) * told(table, At.END_ROWS)",
    "tokens = told(table, At.T)",
    f"{READ}::test_any_width[3-16]",
)
bug(
    "read-lines-nobody-barred-behind",
    "kernels/flash_attention_kernel.py",
    "        if start < inner or start + count > outer:\n",
    "        if start < inner:\n",
    f"{READ}::test_any_width[3-16]",
)
bug(
    "read-lines-first-keys-for-all",
    "kernels/flash_attention_kernel.py",
    "            put(here, where_below(key, first, lowest, below))\n",
    "            put(here, below)\n",
    f"{READ}::test_any_width[3-16]",
)
bug(
    "read-lines-what-was-read-does-not-shrink",
    "kernels/flash_attention_kernel.py",
    "        scaled(f, sums, vdim, desk + 4 * step)\n",
    "",
    f"{READ}::test_units_and_blocks_of_keys_end_where_they_should[131-64]",
)
bug(
    "read-lines-nothing-is-no-number",
    "kernels/flash_attention_kernel.py",
    "base = where_below(lowest, top, top, zero)",
    "base = top",
    f"{READ}::test_any_width[3-16]",
)
bug(
    "read-lines-gradients-without-their-total",
    "kernels/flash_attention_kernel.py",
    "minus(read(f, grads + here), total)",
    "read(f, grads + here)",
    f"{READ}::test_any_width[3-16]",
)
bug(
    "read-lines-keys-of-queries-without-scale",
    "kernels/flash_attention_kernel.py",
    "        put(q_rows + n, times(read(f, q_rows + n), read(f, desk + 4 * step)))\n",
    "        put(q_rows + n, read(f, q_rows + n))\n",
    f"{READ}::test_any_width[3-16]",
)
bug(
    "read-lines-only-the-first-part",
    "kernels/flash_attention.py",
    "d_q.sum(0) if len(d_q) > 1 else d_q[0]",
    "d_q[0]",
    f"{READ}::test_parts_of_keys_are_added_up[7]",
)
bug(
    "read-lines-gaps-are-read",
    PACKS,
    " if bool((last - first == count).all()) else None",
    "",
    f"{TESTS}::test_documents_that_are_torn_apart",
)
bug(
    "lengths-bind-those-asked-for-by-name",
    "backends/__init__.py",
    "    if only:\n        job = replace(job, keys=None)\n",
    "",
    f"{WHY}::test_who_is_told_a_length_and_asked_for_by_name_runs",
)
bug(
    "lengths-without-what-is-cached",
    "module.py",
    "self.peers.spans + (0 if cache is None else cache.used)",
    "self.peers.spans",
    f"{WHY}::test_what_lies_in_a_cache_and_in_a_source_counts",
)
bug(
    "lengths-of-rows-of-texts",
    "module.py",
    "packed.longest(told) if apart else told.count",
    "told.count",
    f"{WHY}::test_of_packed_texts_the_longest_counts",
)
bug(
    "lengths-one-too-late",
    "backends/__init__.py",
    "for least in LENGTHS if least <= keys",
    "for least in LENGTHS if least < keys",
    f"{WHY}::test_a_backend_leaves_calls_to_others_that_it_was_measured_to_be_slower_for[banded]",
)
bug(
    "lengths-where-nobody-measured",
    "backends/core_interface.py",
    'self.keys >= least or self.device != "cpu" or self.stated',
    "self.keys >= least or self.stated",
    f"{WHY}::test_a_length_that_is_told_is_said",
)
bug(
    "lengths-unknown-to-what-is-spent",
    "costs/flops.py",
    "return job if job.one else replace(job, keys=work.keys)",
    "return job",
    f"{WHY}::test_what_is_spent_is_of_the_backend_that_runs[300]",
)
