"""What a kernel is told: an array of int64, and where in it each number lies."""

from __future__ import annotations

from enum import IntEnum, auto

from numba import extending

from .lanes import SIMD_WIDTH, round_up_to_simd

KV_BLOCK_SIZE, KV_SPLIT_SIZE = 64, 256  # keys that are read at once; keys that one thread takes on at a time
CACHE_LINE_BYTES = 64  # bytes that memory brings at once
PLAN_ENTRY_FIELDS = 7  # numbers of what is read at once
MAX_ROWS_TOGETHER = 8  # rows that read keys together at most


class PagedDecodeArgs(IntEnum):
    """The place of each number, as bytes from the start. Addresses and strides count bytes; 0 where there is none.

    A key lies at `K + number of its page x K_PAGE + head x K_HEAD + slot x K_SLOT`, its value and their scales
    likewise; what is added to its score at `BIAS + row x BIAS_ROW + head x BIAS_HEAD + column x BIAS_KEY`.
    """

    def _generate_next_value_(name, start, count, last_values):
        return 8 * count

    NEXT_WORK_ITEM = auto()  # counters: the next job, the next thread
    NEXT_THREAD = auto()
    NUM_WORK_ITEMS = auto()  # threads, then jobs
    MAX_SPLITS = auto()  # pieces there may be, then rows that read together
    Q = auto()  # [B, H, dim wide], scaled
    K = auto()
    V = auto()
    SPANS = auto()  # [B, N, 3]: page, first slot, end
    BIAS = auto()
    SINK = auto()  # [H]
    K_SCALE = auto()
    V_SCALE = auto()
    SOFTCAP = auto()  # a number: scores saturate there
    OUT = auto()  # [B, H, V]
    LSE = auto()  # [B, H]
    PLAN = auto()  # what is read at once, as `planning` notes it, at most 4 for each piece
    WORK_ITEMS = auto()  # [jobs + 1]: which of these is the first of a job
    SPLIT_STARTS = auto()  # [pieces, 3]: span, slot in it, whether a row before this one reads it too
    ROW_SPLITS = auto()  # [B, 3]: first piece, pieces, pieces done
    ROW_ORDER = auto()  # [B, 3]: row, keys that it has in common with the one before it, keys
    PAGE_HASH_TABLE = auto()  # a row for each page that a row begins with, or -1
    PARTIAL_OUTPUTS = auto()  # [pieces, H, vdim wide + 2]: what each piece reads, its top and its total
    SCRATCH = auto()  # where threads write, and how many bytes each has there
    SCRATCH_BYTES = auto()
    BATCH = auto()
    HEADS = auto()
    GROUPS = auto()
    DIM = auto()
    VDIM = auto()
    SPAN_COUNT = auto()
    PAGE_SIZE = auto()
    K_PAGE_STRIDE = auto()
    K_HEAD_STRIDE = auto()
    K_SLOT_STRIDE = auto()
    V_PAGE_STRIDE = auto()
    V_HEAD_STRIDE = auto()
    V_SLOT_STRIDE = auto()
    BIAS_ROW_STRIDE = auto()
    BIAS_HEAD_STRIDE = auto()
    BIAS_KEY_STRIDE = auto()
    SCALE_PAGE_STRIDE = auto()
    SCALE_HEAD_STRIDE = auto()
    SCALE_SLOT_STRIDE = auto()


def decode_scratch_bytes(heads: int, itemsize: int, rows: int = 1, qv_width: int = 0) -> int:
    """Bytes that a thread writes on: addresses for two blocks, scores and factors by head, one vector.

    Where rows read together, also their queries and what they read, `widths` for a head, and what they are told.
    """
    lists, own = 2 * 4 * 8 * KV_BLOCK_SIZE, 8 * (len(PagedDecodeArgs) + 1) if rows > 1 else 0
    heads *= rows
    numbers = heads * KV_BLOCK_SIZE + round_up_to_simd(heads) + SIMD_WIDTH + (heads * qv_width if rows > 1 else 0)
    return (lists + numbers * itemsize + own + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES


def num_kv_splits(keys: int) -> int:
    """Into how many pieces so many keys of a row are cut; none are one empty piece."""
    return max(1, -(-keys // KV_SPLIT_SIZE))


def plan_size(batch: int, max_splits: int) -> int:
    """How many numbers note what is planned of so many rows and pieces, at most."""
    return (4 * PLAN_ENTRY_FIELDS + 4) * max_splits + 1 + 6 * batch + hash_table_size(batch)


@extending.register_jitable
def hash_table_size(batch: int) -> int:
    """The places of a list in which so many rows are looked up by a number, twice as many at least: a power of two."""
    count = 1
    while count < 2 * batch:
        count *= 2
    return count
