"""Bugs in blocks of a pattern that run in fused calls."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
BANDED = "test_banded.py::"
ONCE = BANDED + "test_pieces_read_every_allowed_pair_once_and_no_other"
RAGGED = BANDED + "test_ragged_rows_are_read_and_learn_as_the_definition_says"
GROW = BANDED + "test_work_and_memory_grow_with_the_length"
bug(
    "pieces-alike-by-size-alone",
    "backends/query_blocks.py",
    "        return len(self.queries), widths, rows\n",
    "        return len(self.queries), widths\n",
    f"{ONCE}[blocks(50)]",
)
bug(
    "pieces-of-one-residue",
    "backends/query_blocks.py",
    "for rest in sorted({place % count for place in asks.places[:count]}):",
    "for rest in sorted({place % count for place in asks.places[: count - 1]}):",
    f"{ONCE}[dilated(5, rate=3)]",
)
bug(
    "pieces-formed-end-a-block-late",
    "backends/query_blocks.py",
    "            at = first + count * rows\n",
    "            at = first + (count + 1) * rows\n",
    BANDED + "test_what_is_formed_is_the_sum_of_the_pieces[window(100)]",
)
bug(
    "folds-overlap-at-once",
    "backends/block_sparse.py",
    "each = width if apart else gap // step",
    "each = width if apart else 2 * (gap // step)",
    BANDED + "test_what_is_added_at_once_does_not_overlap[window(100)]",
)
bug(
    "folds-add-to-the-first-row",
    "backends/block_sparse.py",
    "                _add(into_BSGD[self.row], x_WGD, ranges)\n",
    "                _add(into_BSGD[0], x_WGD, ranges)\n",
    f"{RAGGED}[first(4) | window(37)]",
)
bug(
    "bands-rows-of-nothing-weigh-one",
    "backends/block_sparse.py",
    "sums = sums.masked_fill((mask == -torch.inf).all(-1), -torch.inf)",
    "sums = sums + 0",
    f"{RAGGED}[edges(((3, 200), (250, 1), (250, 299)))]",
)
bug(
    "bands-sinks-learn-upwards",
    "backends/block_sparse.py",
    "sunk = -(weight",
    "sunk = (weight",
    f"{RAGGED}[window(100)]",
)
bug(
    "rows-forget-the-segment",
    "backends/block_sparse.py",
    "if same == own",
    "if same >= 0 or own < 0",
    f"{RAGGED}[window(100)]",
)
bug(
    "rows-run-on-across-a-gap",
    "backends/block_sparse.py",
    "(position_BT.diff() != 1) | (segment_BT.diff() != 0)",
    "segment_BT.diff() != 0",
    f"{RAGGED}[window(100)]",
)
bug(
    "slices-make-a-whole-each",
    "backends/query_blocks.py",
    "if torch.is_grad_enabled() and x.requires_grad and not transformed():",
    "if torch.is_grad_enabled() and not x.requires_grad and not transformed():",
    BANDED + "test_biases_leave_gradients_that_grow_with_the_length[(Alibi(),)]",
)
bug(
    "bands-of-every-key",
    "backends/query_blocks.py",
    "ranges += [range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(some, other, strict=True)]",
    "ranges += [range(told[0].start, max(a.stop, b.stop)) for a, b in zip(some, other, strict=True)]",
    f"{GROW}[window(100)]",
)
bug(
    "bends-lost-in-a-compiler",
    "boxes.py",
    "{queries.start, queries.stop} | {at for at in crossings if at in queries}",
    "{queries.start, queries.stop}.union(at for at in crossings if at in queries)",
    BANDED + "test_patterns_are_one_graph[{'pattern': 'bigbird(300, block=16, random=2)', 'vdim': 5}]",
)
