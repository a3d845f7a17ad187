"""What a kernel is told: an array of int64, and where in it each number lies."""

from __future__ import annotations

from enum import IntEnum, auto

from numba import extending

from .lanes import WIDE, wide

BLOCK, PIECE = 64, 256  # keys that are read at once; keys that one thread takes on at a time
LINE = 64  # bytes that memory brings at once
NOTED = 7  # numbers of what is read at once
TEAM = 8  # rows that read keys together at most


class At(IntEnum):
    """The place of each number, as bytes from the start. Addresses and strides count bytes; 0 where there is none.

    A key lies at `K + number of its page x K_PAGE + head x K_HEAD + slot x K_SLOT`, its value and their scales
    likewise; what is added to its score at `BIAS + row x BIAS_ROW + head x BIAS_HEAD + column x BIAS_KEY`.
    """

    def _generate_next_value_(name, start, count, last_values):
        return 8 * count

    NEXT = auto()  # counters: the next job, the next thread
    THREAD = auto()
    COUNT = auto()  # threads, then jobs
    MOST = auto()  # pieces there may be, then rows that read together
    Q = auto()  # [B, H, dim wide], scaled
    K = auto()
    V = auto()
    SPANS = auto()  # [B, N, 3]: page, first slot, end
    BIAS = auto()
    SINK = auto()  # [H]
    K_SCALE = auto()
    V_SCALE = auto()
    CAP = auto()  # a number: scores saturate there
    OUT = auto()  # [B, H, V]
    LSE = auto()  # [B, H]
    PLAN = auto()  # what is read at once, as `planning` notes it, at most 4 for each piece
    JOBS = auto()  # [jobs + 1]: which of these is the first of a job
    STARTS = auto()  # [pieces, 3]: span, slot in it, whether a row before this one reads it too
    ROWS = auto()  # [B, 3]: first piece, pieces, pieces done
    ORDER = auto()  # [B, 3]: row, keys that it has in common with the one before it, keys
    NAMES = auto()  # a row for each page that a row begins with, or -1
    PARTS = auto()  # [pieces, H, vdim wide + 2]: what each piece reads, its top and its total
    DESK = auto()  # where threads write, and how many bytes each has there
    DESK_SIZE = auto()
    BATCH = auto()
    HEADS = auto()
    GROUPS = auto()
    DIM = auto()
    VDIM = auto()
    SPAN_COUNT = auto()
    PAGE = auto()
    K_PAGE = auto()
    K_HEAD = auto()
    K_SLOT = auto()
    V_PAGE = auto()
    V_HEAD = auto()
    V_SLOT = auto()
    BIAS_ROW = auto()
    BIAS_HEAD = auto()
    BIAS_KEY = auto()
    SCALE_PAGE = auto()
    SCALE_HEAD = auto()
    SCALE_SLOT = auto()


def desk(heads: int, size: int, rows: int = 1, widths: int = 0) -> int:
    """Bytes that a thread writes on: addresses for two blocks, scores and factors by head, one vector.

    Where rows read together, also their queries and what they read, `widths` for a head, and what they are told.
    """
    lists, own = 2 * 4 * 8 * BLOCK, 8 * (len(At) + 1) if rows > 1 else 0
    heads *= rows
    numbers = heads * BLOCK + wide(heads) + WIDE + (heads * widths if rows > 1 else 0)
    return (lists + numbers * size + own + LINE - 1) // LINE * LINE


def pieces(keys: int) -> int:
    """Into how many pieces so many keys of a row are cut; none are one empty piece."""
    return max(1, -(-keys // PIECE))


def noted(batch: int, most: int) -> int:
    """How many numbers note what is planned of so many rows and pieces, at most."""
    return (4 * NOTED + 4) * most + 1 + 6 * batch + names(batch)


@extending.register_jitable
def names(batch: int) -> int:
    """The places of a list in which so many rows are looked up by a number, twice as many at least: a power of two."""
    count = 1
    while count < 2 * batch:
        count *= 2
    return count
