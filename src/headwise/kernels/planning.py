"""Which keys are read at once, and by which rows together.

Keys of a row are cut into pieces of `PIECE`. Rows whose tables begin alike hold the same keys there, and what is known
to be the same is read once for all of them (Hydragen, 2402.05099; ChunkAttention, 2402.15220). For that rows are put in
an order in which whoever shares more stands nearer, as in a tree of beginnings: then those that read one block of keys
together are neighbours, whatever they share with others besides. Where a row's pieces and blocks end does not depend on
who else reads them, and so neither does what it reads.
"""

from __future__ import annotations

from numba import extending, njit

from .blocks import COLUMNS, KEYS, NEXT, SCALES, VALUES
from .memory import put, whole
from .told import BLOCK, NOTED, PIECE, TEAM, At, names

ENTRY = 8 * NOTED  # bytes: place in the order, rows, span, slot, keys, number of the piece, whether it begins it


@njit
def alike(told, row, other, n):
    """With how many spans the tables of two rows begin alike; so many are known to be."""
    count = whole(told + At.SPAN_COUNT)
    a, b = whole(told + At.SPANS) + 24 * row * count, whole(told + At.SPANS) + 24 * other * count
    while (
        n < count
        and whole(a + 24 * n) == whole(b + 24 * n)
        and whole(a + 24 * n + 8) == whole(b + 24 * n + 8)
        and whole(a + 24 * n + 16) == whole(b + 24 * n + 16)
    ):
        n += 1
    return n


@njit
def known(told, row):
    """Whether a row before this one begins with the same page; if none does, that this one does is noted."""
    table, last, step = whole(told + At.NAMES), names(whole(told + At.BATCH)) - 1, 24 * whole(told + At.SPAN_COUNT)
    page = whole(whole(told + At.SPANS) + step * row)
    n = page & last
    while whole(table + 8 * n) >= 0:
        if whole(whole(told + At.SPANS) + step * whole(table + 8 * n)) == page:
            return True
        n = (n + 1) & last
    put(table + 8 * n, row)
    return False


@njit
def order(told):
    """Put each row behind one that it shares most spans with, and note how many those are."""
    table = whole(told + At.ORDER)
    for n in range(names(whole(told + At.BATCH))):
        put(whole(told + At.NAMES) + 8 * n, -1)
    for row in range(whole(told + At.BATCH)):
        at, common = row, 0
        if whole(told + At.SPAN_COUNT) and known(told, row):
            at, common = 1, alike(told, row, whole(table), 0)
        while at < row and whole(table + 24 * at + 8) >= common:
            if whole(table + 24 * at + 8) == common:
                common = alike(told, row, whole(table + 24 * at), common)
            at += 1
        for n in range(row, at, -1):
            put(table + 24 * n, whole(table + 24 * n - 24))
            put(table + 24 * n + 8, whole(table + 24 * n - 16))
        put(table + 24 * at, row)
        put(table + 24 * at + 8, common)


@njit
def cut(told, at, n):
    """Note where each piece of the row at a place of the order begins, from number n on, how many of its keys are those
    of the row before it, and how many it has; the number behind its pieces, of which one without keys has one."""
    entry, starts, held, common = whole(told + At.ORDER) + 24 * at, whole(told + At.STARTS), 0, 0
    count, spans = whole(told + At.SPAN_COUNT), whole(entry + 8)
    span = whole(told + At.SPANS) + 24 * whole(entry) * count
    put(starts + 24 * n + 16, 0)
    for index in range(count):
        slot, end = whole(span + 24 * index + 8), whole(span + 24 * index + 16)
        while slot < end:
            if held % PIECE == 0:
                this = starts + 24 * (n + held // PIECE)
                put(this, index)
                put(this + 8, slot)
                put(this + 16, 0)
            step = min(end - slot, PIECE - held % PIECE)
            slot, held = slot + step, held + step
        common = held if index < spans else common
    put(entry + 8, common)
    put(entry + 16, held)
    return n + max(1, (held + PIECE - 1) // PIECE)


@njit
def meets(told, at, begin):
    """Whether the row at a place of the order reads the block behind so many keys as the one before it does."""
    entry = whole(told + At.ORDER) + 24 * at
    end = min(begin + BLOCK, whole(entry + 16))
    return begin < end <= whole(entry + 8) and end == min(begin + BLOCK, whole(entry - 8))


@njit
def note(told, entry, who, where, piece):
    """Note what is read at once: by whom, from where on how many keys, and of which piece; the place behind it."""
    (at, rows), (n, slot, count), (number, begins) = who, where, piece
    this = whole(told + At.PLAN) + ENTRY * entry
    put(this, at)
    put(this + 8, rows)
    put(this + 16, n)
    put(this + 24, slot)
    put(this + 32, count)
    put(this + 40, number)
    put(this + 48, begins)
    return entry + 1


@njit
def whole_piece(told, at, rows, begin):
    """Whether so many rows read all of a piece that begins behind so many keys together."""
    table = whole(told + At.ORDER)
    end = min(begin + PIECE, whole(table + 24 * at + 16))
    for other in range(at + 1, at + rows):
        if min(begin + PIECE, whole(table + 24 * other + 16)) != end or whole(table + 24 * other + 8) < end:
            return False
    return True


@njit
def further(told, row, place, count):
    """The span and slot of a row's key so many behind the one at a place."""
    (n, slot), spans = place, whole(told + At.SPANS) + 24 * row * whole(told + At.SPAN_COUNT)
    while count > 0:
        step = max(0, min(count, whole(spans + 24 * n + 16) - slot))
        slot, count = slot + step, count - step
        if count > 0:
            n += 1
            slot = whole(spans + 24 * n + 8)
    return n, slot


@njit
def start(told, row, number):
    """The span and slot at which a piece of a row begins."""
    this = whole(told + At.STARTS) + 24 * (whole(whole(told + At.ROWS) + 24 * row) + number)
    return whole(this), whole(this + 8)


@njit
def divided(told, entry, at, rows, number):
    """Note the blocks of a piece, each by those who read it together."""
    table = whole(told + At.ORDER)
    for begin in range(PIECE * number, PIECE * (number + 1), BLOCK):
        first = 0
        while first < rows:
            this, some, held = at + first, 1, whole(table + 24 * (at + first) + 16)
            while first + some < rows and meets(told, this + some, begin):
                some += 1
            if begin < held:
                row = whole(table + 24 * this)
                n, slot = further(told, row, start(told, row, number), begin - PIECE * number)
                where = n, slot, min(BLOCK, held - begin)
                entry = note(told, entry, (this, some), where, (number, 1 if begin == PIECE * number else 0))
            first += some
    return entry


@njit
def largest_team(told, pieces):
    """How many rows read together at most: fewer where threads would else have nothing to do. That changes no bit."""
    threads = whole(told + At.COUNT)
    return TEAM if threads == 1 else max(1, min(TEAM, pieces // (2 * threads)))


@njit
def together(told, at, begin, most):
    """How many rows, from one on, read the block behind so many keys together: at most so many, and about as many in
    the last teams."""
    rows, batch = 1, whole(told + At.BATCH)
    while rows < 2 * most and at + rows < batch and meets(told, at + rows, begin):
        rows += 1
    return rows if rows <= most else min(most, (rows + 1) // 2)


@njit
def team(told, entry, at, number, most):
    """Note what is read of a piece by a row and by those behind it that begin it together; the place behind it."""
    table, rows = whole(told + At.ORDER), together(told, at, PIECE * number, most)
    for other in range(at + 1, at + rows):
        first = whole(whole(told + At.ROWS) + 24 * whole(table + 24 * other))
        put(whole(told + At.STARTS) + 24 * (first + number) + 16, 1)
    if not whole_piece(told, at, rows, PIECE * number):
        entry = divided(told, entry, at, rows, number)
    else:
        n, slot = start(told, whole(table + 24 * at), number)
        count = min(PIECE, whole(table + 24 * at + 16) - PIECE * number)
        entry = note(told, entry, (at, rows), (n, slot, count), (number, 1))
    put(told + At.MOST, max(whole(told + At.MOST), rows))
    return entry


@njit
def spread(told):
    """Where each table of notes begins, the first of which is told, for so many pieces at most as are told."""
    most, batch, begin = whole(told + At.MOST), whole(told + At.BATCH), whole(told + At.PLAN)
    put(told + At.JOBS, begin + ENTRY * 4 * most)
    put(told + At.STARTS, whole(told + At.JOBS) + 8 * (most + 1))
    put(told + At.ROWS, whole(told + At.STARTS) + 24 * most)
    put(told + At.ORDER, whole(told + At.ROWS) + 24 * batch)
    put(told + At.NAMES, whole(told + At.ORDER) + 24 * batch)
    put(told + At.MOST, 1)


@extending.register_jitable
def plan(told):
    """Cut the keys of every row into pieces, and make jobs of them: what one thread reads at a time."""
    spread(told)
    table, n, entry, job = whole(told + At.ORDER), 0, 0, 0
    order(told)
    for at in range(whole(told + At.BATCH)):
        this, end = whole(told + At.ROWS) + 24 * whole(table + 24 * at), cut(told, at, n)
        put(this, n)
        put(this + 8, end - n)
        put(this + 16, 0)
        n = end
    most = largest_team(told, n)
    for at in range(whole(told + At.BATCH)):
        this = whole(told + At.ROWS) + 24 * whole(table + 24 * at)
        for number in range(whole(this + 8)):
            if not whole(whole(told + At.STARTS) + 24 * (whole(this) + number) + 16):
                put(whole(told + At.JOBS) + 8 * job, entry)
                entry, job = team(told, entry, at, number, most), job + 1
    put(whole(told + At.JOBS) + 8 * job, entry)
    put(told + At.COUNT, job)


@njit
def lay(told, row, n, slot, desk, count):
    """The addresses of so many keys of a row from one slot on, of their values and scales, and their columns."""
    spans, page = whole(told + At.SPANS) + 24 * row * whole(told + At.SPAN_COUNT), whole(told + At.PAGE)
    k, v = whole(told + At.K), whole(told + At.V)
    k_page, v_page, s_page = whole(told + At.K_PAGE), whole(told + At.V_PAGE), whole(told + At.SCALE_PAGE)
    k_slot, v_slot, s_slot = whole(told + At.K_SLOT), whole(told + At.V_SLOT), whole(told + At.SCALE_SLOT)
    for i in range(count):
        while slot >= whole(spans + 24 * n + 16):
            n += 1
            slot = whole(spans + 24 * n + 8)
        held, to = whole(spans + 24 * n), desk + 8 * i
        put(to + KEYS, k + held * k_page + slot * k_slot)
        put(to + VALUES, v + held * v_page + slot * v_slot)
        put(to + SCALES, held * s_page + slot * s_slot)
        put(to + COLUMNS, n * page + slot)
        slot += 1
    return n, slot


@njit
def ready(told, entry, desk):
    """Lay out the first block of what is read next, where there is more, as that which comes next; how many keys it
    has."""
    if entry < 0:
        return 0
    this = whole(told + At.PLAN) + ENTRY * entry
    row, count = whole(whole(told + At.ORDER) + 24 * whole(this)), min(whole(this + 32), BLOCK)
    lay(told, row, whole(this + 16), whole(this + 24), desk + NEXT, count)
    return count
