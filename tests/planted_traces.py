"""Bugs of traces and of what is kept of a run."""

from __future__ import annotations

from planting import bug

TRACES, CAPTURE, COMMAND = "test_traces.py", "test_capture.py", "test_trace_command.py"

bug(
    "trace-band-reversed",
    "traces/packed_masks.py",
    "np.concatenate([a[:, :, ::-1, 0], a[:, :, 0, 1:]], -1)",
    "np.concatenate([a[:, :, :, 0], a[:, :, 0, 1:]], -1)",
    f"{TRACES}::test_a_grid_adds_what_it_was_made_of",
)
bug(
    "trace-cap-after-the-mask",
    "traces/attention_record.py",
    "        for number in call.grids:\n            s += grids[number].rows(row, head, start, stop)\n",
    "        for number in call.grids:\n            s += np.maximum(grids[number].rows(row, head, start, stop), -9)\n",
    f"{TRACES}::test_rows_by_hand",
)
bug(
    "trace-sink-not-counted",
    "traces/attention_record.py",
    "        total = total + np.exp(sink - top)",
    "        total = total + 0 * np.exp(sink - top)",
    f"{TRACES}::test_rows_by_hand",
)
bug(
    "trace-mean-pooled",
    "traces/attention_trace.py",
    "across = np.maximum.reduceat(band, columns, axis=1)",
    "across = np.minimum.reduceat(band, columns, axis=1)",
    f"{TRACES}::test_a_cell_of_a_picture_is_the_largest_weight_in_it",
)
bug(
    "trace-checksum-of-the-document-alone",
    "traces/trace_file.py",
    "        if array.nbytes:\n            found.update(np",
    "        if not array.nbytes:\n            found.update(np",
    f"{TRACES}::test_a_changed_byte_is_told",
)
bug(
    "trace-strings-act",
    "traces/attention_trace.py",
    'return "".join(char if char.isprintable() else',
    'return "".join(char if char else',
    f"{TRACES}::test_no_string_acts_on_a_terminal",
)
bug(
    "capture-view-of-a-cache",
    "inspect/trace_capture.py",
    'tensor.detach().to("cpu", kind, copy=True)',
    'tensor.detach().to("cpu", kind)',
    f"{CAPTURE}::test_steps_of_ours_through_every_cache",
)
bug(
    "capture-keys-kept-at-every-step",
    "inspect/trace_capture.py",
    "        for fresh in (0, queries):",
    "        for fresh in (0,):",
    f"{CAPTURE}::test_what_a_cache_holds_is_kept_once",
)
bug(
    "capture-neighbours-read-one-head",
    "inspect/hooks.py",
    "return head * groups // heads if self.reads is None",
    "return head % groups if self.reads is None",
    f"{CAPTURE}::test_rows_are_the_models_own",
)
bug(
    "capture-ring-as-it-lies",
    "inspect/trace_capture.py",
    "    order, stands = _order(told.stands)\n    if torch.equal(order",
    "    order, stands = _order(told.stands)\n    if True or torch.equal(order",
    f"{CAPTURE}::test_steps_of_ours_through_every_cache",
)
bug(
    "capture-causal-as-full",
    "inspect/trace_capture.py",
    "        causal = told.causal and queries > 1",
    "        causal = False",
    f"{CAPTURE}::test_rows_are_the_models_own",
)
bug(
    "capture-in-train-mode",
    "inspect/trace_capture.py",
    "    if model.training:",
    "    if model.training is None:",
    f"{CAPTURE}::test_what_cannot_be_traced",
)
bug(
    "capture-budget-not-counted",
    "inspect/trace_capture.py",
    "        self.nbytes += count\n",
    "        self.nbytes = count\n",
    f"{CAPTURE}::test_a_budget_that_the_run_passes",
)
bug(
    "capture-estimate-of-one-text",
    "inspect/trace_capture.py",
    "total += size.batch * how.width * _numbers",
    "total += how.width * _numbers",
    f"{CAPTURE}::test_the_estimate_is_enough_and_not_far_off",
)
bug(
    "trace-padding-as-tokens",
    "inspect/model_inputs.py",
    'names = {"x": ids} | ({} if tokens is None else {"tokens": tokens})',
    'names = {"x": ids}',
    f"{COMMAND}::test_lines_of_a_file[ours]",
)
