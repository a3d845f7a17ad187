"""A block of keys, read by one query of every head: its scores, and what is read of the values.

`f` is the form in which keys lie in memory. A desk is what a thread writes on: addresses of the block's keys, of their
values and of their scales, their columns; the same of the next block; scores [H, BLOCK], factors [H] and one vector.
Memory is kept busy throughout: while four keys are met, those a little further on are asked for, behind the last key of
a block its values, and behind the last value the keys of the next block.
"""

from __future__ import annotations

from numba import njit

from .lanes import WIDE, fma, splat, times, total, totals, wide
from .memory import lies, load, load_one, number, put, put_quarter, read, read_one, size, soon, whole
from .told import BLOCK, LINE, At

KEYS, VALUES, SCALES, COLUMNS, NEXT = (8 * BLOCK * n for n in range(5))
SCORES = 2 * NEXT
AHEAD = 12 * 2**10  # bytes between what is asked for and what is read: a memory's answer long
TOGETHER = 4  # keys, or values, that are read at once
inside = njit(forceinline=True)  # a call of their own costs what a seventh of four keys does


@njit
def rest(f, address, count, desk):
    """The last numbers of a row, that do not fill a vector."""
    put(desk, splat(number(f, 0.0)))
    for n in range(count):
        put(desk + size(f) * n, load_one(f, address + lies(f) * n))
    return read(f, desk)


@inside
def met(x, y, a):
    """Sums with four products more."""
    return fma(x[0], y, a[0]), fma(x[1], y, a[1]), fma(x[2], y, a[2]), fma(x[3], y, a[3])


@inside
def met_by_heads(f, x, q, apart, a):
    """Sums of four heads, the fourth so far from the first, with four products more of each."""
    first, second = met(x, read(f, q), a[0]), met(x, read(f, q + apart[0]), a[1])
    return first, second, met(x, read(f, q + 2 * apart[0]), a[2]), met(x, read(f, q + apart[1]), a[3])


@inside
def of_keys(f, keys, at):
    """Sixteen channels of four keys."""
    return load(f, keys[0] + at), load(f, keys[1] + at), load(f, keys[2] + at), load(f, keys[3] + at)


@njit
def some_of_keys(f, keys, at, bounds, desk):
    """As many channels of as many keys as there are, of sixteen and of four; the others are 0 and not read."""
    count, some = bounds
    a, b = rest(f, keys[0] + at, count, desk), rest(f, keys[1] + at, count if some > 1 else 0, desk)
    c, d = rest(f, keys[2] + at, count if some > 2 else 0, desk), rest(f, keys[3] + at, count if some > 3 else 0, desk)
    return a, b, c, d


@inside
def four_keys(keys, offset):
    """Where one head of four keys, or of their values, lies."""
    return whole(keys) + offset, whole(keys + 8) + offset, whole(keys + 16) + offset, whole(keys + 24) + offset


@inside
def heads_compared(f, q, keys, bounds, tail, to):
    """The products of four keys with the queries of four heads, or of three, of which the last is then met twice."""
    dim, some, heads = bounds
    nothing = splat(number(f, 0.0))
    none = (nothing, nothing, nothing, nothing)
    a = (none, none, none, none)
    full, apart, step = dim // WIDE * WIDE if some == TOGETHER else 0, size(f) * BLOCK, size(f) * wide(dim)
    steps = step, step * (heads - 1)
    for n in range(0, full, WIDE):
        x, own = of_keys(f, keys, lies(f) * n), q + size(f) * n
        a = met_by_heads(f, x, own, steps, a)
    for n in range(full, dim, WIDE):
        x, own = some_of_keys(f, keys, lies(f) * n, (min(dim - n, WIDE), some), tail), q + size(f) * n
        a = met_by_heads(f, x, own, steps, a)
    found = totals(a)
    put_quarter(to, found, 0)
    put_quarter(to + apart, found, 1)
    put_quarter(to + 2 * apart, found, 2)
    put_quarter(to + (heads - 1) * apart, found, 3)


@inside
def head_compared(f, q, keys, bounds, tail, to):
    """The products of four keys with the query of one head."""
    dim, some, _ = bounds
    nothing = splat(number(f, 0.0))
    a, full = (nothing, nothing, nothing, nothing), dim // WIDE * WIDE if some == TOGETHER else 0
    for n in range(0, full, WIDE):
        a = met(of_keys(f, keys, lies(f) * n), read(f, q + size(f) * n), a)
    for n in range(full, dim, WIDE):
        x = some_of_keys(f, keys, lies(f) * n, (min(dim - n, WIDE), some), tail)
        a = met(x, read(f, q + size(f) * n), a)
    put(to, total(a[0]))
    put(to + size(f), total(a[1]))
    put(to + 2 * size(f), total(a[2]))
    put(to + 3 * size(f), total(a[3]))


@njit
def abreast(left):
    """How many heads are read beside each other, of those that are left: four or three; two take longer so."""
    return min(left, 4) if left > 2 else 1


@inside
def group_compared(f, q, keys, bounds, tail, to):
    """The products of four keys with the queries of all heads that share them."""
    dim, some, each = bounds
    h, apart, step = 0, size(f) * BLOCK, size(f) * wide(dim)
    while h < each:
        heads = abreast(each - h)
        if heads > 1:
            heads_compared(f, q + step * h, keys, (dim, some, heads), tail, to + apart * h)
        else:
            head_compared(f, q + step * h, keys, (dim, some, heads), tail, to + apart * h)
        h += heads


@njit
def lead(told, each):
    """How many keys before it is read each is asked for: so many that `AHEAD` bytes lie between, a block at most."""
    held = TOGETHER * whole(told + At.GROUPS) * each * (whole(told + At.DIM) + whole(told + At.VDIM)) // 2
    return min(TOGETHER * ((AHEAD + held - 1) // held), BLOCK)


@njit
def coming(i, here, there):
    """Which keys to ask for while four are read: their list, how many there are, what a head of them holds and how far
    it is to the next head, and whether all of that lies in one piece."""
    list_, count, held, apart, groups = here
    if i >= count:
        i -= (count + TOGETHER - 1) // TOGETHER * TOGETHER
        list_, count, held, apart, groups = there
    list_, some = list_ + 8 * i, min(TOGETHER, count - i)
    joined = some > 0 and apart == held and whole(list_ + 8 * (some - 1)) - whole(list_) == (some - 1) * groups * held
    return list_, some, held, apart, joined


@inside
def asked(g, groups, keys):
    """Ask for what one head is asked of: its part of some keys in the order in which they lie, or its own numbers."""
    list_, some, held, apart, joined = keys
    if joined:
        begin, end = whole(list_) + g * TOGETHER * held, whole(list_) + some * groups * held
        for line in range(begin, min(begin + TOGETHER * held, end), 4 * LINE):
            soon(line)
            soon(line + LINE)
            soon(line + 2 * LINE)
            soon(line + 3 * LINE)
    else:
        for n in range(some):
            begin = whole(list_ + 8 * n) + g * apart
            for line in range(begin, begin + held, LINE):
                soon(line)


@njit
def compare(f, told, q, desk, count):
    """The scores of a block, four keys at a time as they lie in memory; those that follow are asked for on the way."""
    heads, groups, dim = whole(told + At.HEADS), whole(told + At.GROUPS), whole(told + At.DIM)
    each, apart, step, k_head = heads // groups, size(f) * BLOCK, size(f) * wide(dim), whole(told + At.K_HEAD)
    tail, before = desk + SCORES + size(f) * (heads * BLOCK + wide(heads)), lead(told, lies(f))
    here = desk + KEYS, count, lies(f) * dim, k_head, groups
    there = desk + VALUES, count, lies(f) * whole(told + At.VDIM), whole(told + At.V_HEAD), groups
    for i in range(0, count, TOGETHER):
        scores, some = desk + SCORES + size(f) * i, min(TOGETHER, count - i)
        after = coming(i + before, here, there)
        for g in range(groups):
            asked(g, groups, after)
            keys, h = four_keys(desk + KEYS + 8 * i, g * k_head), g * each
            group_compared(f, q + step * h, keys, (dim, some, each), tail, scores + apart * h)


@inside
def shares(f, scores):
    """What four keys have of one head, each sixteen times."""
    a, b = splat(read_one(f, scores)), splat(read_one(f, scores + size(f)))
    return a, b, splat(read_one(f, scores + 2 * size(f))), splat(read_one(f, scores + 3 * size(f)))


@inside
def sum_of(x, p, a):
    """A sum with four products more."""
    return fma(x[3], p[3], fma(x[2], p[2], fma(x[1], p[1], fma(x[0], p[0], a))))


@inside
def more(f, to, x, p):
    """What was read before, with what is read of four values."""
    put(to, sum_of(x, p, read(f, to)))


@inside
def more_by_heads(f, to, apart, x, p):
    """The same of three heads, and of a fourth where there is one."""
    step, heads = apart
    more(f, to, x, p[0])
    more(f, to + step, x, p[1])
    more(f, to + 2 * step, x, p[2])
    if heads > 3:
        more(f, to + 3 * step, x, p[3])


@inside
def heads_read(f, scores, keys, bounds, tail, place):
    """What four heads, or three, read of four values."""
    (dim, some, heads), (to, step) = bounds, place
    apart, full = size(f) * BLOCK, dim // WIDE * WIDE if some == TOGETHER else 0
    p0, p1 = shares(f, scores), shares(f, scores + apart)
    p, step = (p0, p1, shares(f, scores + 2 * apart), shares(f, scores + (heads - 1) * apart)), (step, heads)
    for n in range(0, full, WIDE):
        x, own = of_keys(f, keys, lies(f) * n), to + size(f) * n
        more_by_heads(f, own, step, x, p)
    for n in range(full, dim, WIDE):
        x, own = some_of_keys(f, keys, lies(f) * n, (min(dim - n, WIDE), some), tail), to + size(f) * n
        more_by_heads(f, own, step, x, p)


@inside
def head_read(f, scores, keys, bounds, tail, to):
    """What one head reads of four values."""
    dim, some, _ = bounds
    p, full = shares(f, scores), dim // WIDE * WIDE if some == TOGETHER else 0
    for n in range(0, full, WIDE):
        more(f, to + size(f) * n, of_keys(f, keys, lies(f) * n), p)
    for n in range(full, dim, WIDE):
        x = some_of_keys(f, keys, lies(f) * n, (min(dim - n, WIDE), some), tail)
        more(f, to + size(f) * n, x, p)


@inside
def group_read(f, scores, keys, bounds, tail, place):
    """What all heads that share them read of four values."""
    (dim, some, each), (to, step) = bounds, place
    h, apart = 0, size(f) * BLOCK
    while h < each:
        heads = abreast(each - h)
        if heads > 1:
            heads_read(f, scores + apart * h, keys, (dim, some, heads), tail, (to + step * h, step))
        else:
            head_read(f, scores + apart * h, keys, (dim, some, heads), tail, to + step * h)
        h += heads


@njit
def shrink(f, told, factors, part):
    """What was read before, where a larger score than all before is found since."""
    vdim = whole(told + At.VDIM)
    for h in range(whole(told + At.HEADS)):
        factor, to = read_one(f, factors + size(f) * h), part + size(f) * (wide(vdim) + 2) * h
        if factor != number(f, 1.0):
            for n in range(0, vdim, WIDE):
                put(to + size(f) * n, times(read(f, to + size(f) * n), splat(factor)))


@njit
def gather(f, told, desk, part, count, following):
    """What every head reads of the values of a block, added to what it has read before; of those keys that follow as
    much is asked for on the way."""
    heads, groups, dim = whole(told + At.HEADS), whole(told + At.GROUPS), whole(told + At.VDIM)
    each, apart, step, v_head = heads // groups, size(f) * BLOCK, size(f) * (wide(dim) + 2), whole(told + At.V_HEAD)
    factors, before = desk + SCORES + size(f) * heads * BLOCK, lead(told, lies(f))
    here, tail = (desk + VALUES, count, lies(f) * dim, v_head, groups), factors + size(f) * wide(heads)
    there = desk + NEXT + KEYS, following, lies(f) * whole(told + At.DIM), whole(told + At.K_HEAD), groups
    shrink(f, told, factors, part)
    for i in range(0, count, TOGETHER):
        scores, some = desk + SCORES + size(f) * i, min(TOGETHER, count - i)
        after = coming(i + before, here, there)
        for g in range(groups):
            asked(g, groups, after)
            keys, h = four_keys(desk + VALUES + 8 * i, g * v_head), g * each
            group_read(f, scores + apart * h, keys, (dim, some, each), tail, (part + step * h, step))
