"""Bugs in keys that rows share and that are read once for all of them."""

from __future__ import annotations

from planting import bug

# For tests/planted.py; `bug` as there.
PREFIXES, SERVING = "test_prefixes.py", "test_serving.py"
BESIDE = f"{PREFIXES}::test_what_stands_beside_is_each_rows_own"
TREE = f"{PREFIXES}::test_who_shares_more_stands_nearer"
ENDS = f"{PREFIXES}::test_a_row_that_ends_within_a_block_reads_it_alone"
bug(
    "prefixes-nothing-is-known",
    "kernels/split_kv_schedule.py",
    "            return True\n        n = (n + 1) & last\n",
    "            return False\n        n = (n + 1) & last\n",
    TREE,
)
bug(
    "prefixes-rows-stand-before-who-shares-as-much",
    "kernels/split_kv_schedule.py",
    "while at < row and whole(table + 24 * at + 8) >= common:",
    "while at < row and whole(table + 24 * at + 8) > common:",
    TREE,
)
bug(
    "prefixes-what-is-common-is-a-span-longer",
    "kernels/split_kv_schedule.py",
    "common = held if index < spans else common",
    "common = held if index <= spans else common",
    f"{PREFIXES}::test_rows_that_part_twice_in_a_piece_keep_what_they_read",
)
bug(
    "prefixes-pages-are-told-by-their-number-alone",
    "kernels/split_kv_schedule.py",
    "        and whole(a + 24 * n + 8) == whole(b + 24 * n + 8)\n",
    "",
    f"{PREFIXES}::test_the_same_page_cut_otherwise_is_not_the_same",
)
bug(
    "prefixes-blocks-are-shared-that-end-otherwise",
    "kernels/split_kv_schedule.py",
    " and end == min(begin + BLOCK, whole(entry - 8))",
    "",
    ENDS,
)
bug(
    "prefixes-pieces-are-shared-that-end-otherwise",
    "kernels/split_kv_schedule.py",
    "if min(begin + PIECE, whole(table + 24 * other + 16)) != end or whole",
    "if whole",
    f"{PREFIXES}::test_a_row_that_goes_on_reads_what_is_behind",
)
bug(
    "prefixes-blocks-begin-where-their-piece-does",
    "kernels/split_kv_schedule.py",
    "start(told, row, number), begin - PIECE * number)",
    "start(told, row, number), 0)",
    f"{BESIDE}[kind1]",
)
bug(
    "prefixes-who-reads-together-reads-alone-too",
    "kernels/split_kv_schedule.py",
    "put(whole(told + At.STARTS) + 24 * (first + number) + 16, 1)",
    "put(whole(told + At.STARTS) + 24 * (first + number) + 16, 0)",
    TREE,
)
bug(
    "prefixes-teams-without-end",
    "kernels/split_kv_schedule.py",
    "return rows if rows <= most else min(most, (rows + 1) // 2)",
    "return rows",
    f"{PREFIXES}::test_many_rows_read_in_teams",
)
bug(
    "prefixes-all-ask-as-the-first",
    "kernels/paged_decode_kernel.py",
    "to, own = (g * rows + m) * each, whole(told + At.Q) + (row * heads",
    "to, own = (g * rows + m) * each, whole(told + At.Q) + (whole(order) * heads",
    f"{BESIDE}[kind1]",
)
bug(
    "prefixes-what-was-read-of-a-piece-is-forgotten",
    "kernels/paged_decode_kernel.py",
    "            if not whole(this + 48):\n",
    "            if False:\n",
    f"{PREFIXES}::test_rows_that_part_twice_in_a_piece_keep_what_they_read",
)
bug(
    "prefixes-all-lean-as-the-first",
    "kernels/paged_decode_kernel.py",
    "row, head = whole(order + 24 * (h // each % at[1])),",
    "row, head = whole(order),",
    f"{BESIDE}[kind1]",
)
bug(
    "prefixes-heads-lean-as-their-neighbours",
    "kernels/paged_decode_kernel.py",
    "h // each // at[1] * each + h % each",
    "h % each",
    f"{BESIDE}[kind1]",
)
bug(
    "prefixes-no-ceiling-together",
    "kernels/paged_decode_kernel.py",
    "        if whole(told + At.CAP):\n            capped(f, own, desk, count)\n",
    "",
    f"{BESIDE}[kind1]",
)
bug(
    "prefixes-values-together-without-their-scale",
    "kernels/paged_decode_kernel.py",
    "        if v_scale:\n            scaled(f, own, v_scale, desk, count)\n",
    "",
    f"{BESIDE}[kind3]",
)
bug(
    "prefixes-only-the-first-is-given-what-was-read",
    "kernels/paged_decode_kernel.py",
    "first = whole(whole(told + At.ROWS) + 24 * whole(order + 24 * m)) + whole(this + 40)",
    "first = whole(whole(told + At.ROWS) + 24 * whole(order)) + whole(this + 40)",
    f"{BESIDE}[kind1]",
)
bug(
    "prefixes-a-beginning-costs-each-row",
    "costs/serving_cost.py",
    "        return sum(each[request] * times for request, times in requests.items()) - max(each.values(), default=0)",
    "        return 0 * sum(each.values())",
    f"{SERVING}::test_a_beginning_that_rows_share_is_read_once",
)
bug(
    "prefixes-a-beginning-costs-nothing",
    "costs/serving_cost.py",
    " - max(each.values(), default=0)",
    "",
    f"{SERVING}::test_of_a_shared_beginning_only_what_windows_reach_is_read",
)
