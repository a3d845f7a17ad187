"""Heads in equal groups of those that are most alike."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import SpecError

Groups = tuple[tuple[int, ...], ...]

FEW = 20_000  # ways to group that are all tried


def alike(likeness: Tensor, into: int, *, seed: int = 0, starts: int = 200) -> Groups:
    """Equal groups with the largest likeness summed over the pairs inside them (2412.20677).

    Where there are few ways, the best of all; where there are many, the best that swaps of two heads lead to from
    neighbours, and from as many drawn `starts`. The paper calls this annealing; its code too takes no step back.

    >>> near = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
    >>> alike(near, 2)
    ((0, 2), (1, 3))
    """
    score = _checked(likeness)
    neighbours = evenly(len(score), into)
    if ways(len(score), into) <= FEW:
        return max(_every(tuple(range(len(score))), len(score) // into), key=lambda way: within(score, way))
    return climbed(score, into, seed=seed, starts=starts, first=neighbours)


def climbed(likeness: Tensor, into: int, *, seed: int, starts: int, first: Groups | None = None) -> Groups:
    """The best groups that swaps lead to, each the best there is, from `first` and from drawn starts."""
    score = _checked(likeness)
    drawn = torch.Generator().manual_seed(seed)
    begin = [evenly(len(score), into) if first is None else first]
    orders = [torch.randperm(len(score), generator=drawn).tolist() for _ in range(starts)]
    size = len(score) // into
    begin += [tuple(tuple(order[n : n + size]) for n in range(0, len(order), size)) for order in orders]
    return max((_climb(score, groups) for groups in begin), key=lambda groups: within(score, groups))


def evenly(heads: int, into: int) -> Groups:
    """Equal groups of neighbours, as mean-pooling takes them (2305.13245).

    >>> evenly(6, 2)
    ((0, 1, 2), (3, 4, 5))
    """
    if type(into) is not int or into < 1 or heads % into:
        sizes = [n for n in range(1, heads + 1) if heads % n == 0]
        raise SpecError(f"{heads} key-value heads do not make {into!r} equal groups; use one of {sizes}")
    size = heads // into
    return tuple(tuple(range(n, n + size)) for n in range(0, heads, size))


def within(likeness: Tensor, groups: Groups) -> float:
    """The likeness summed over the pairs inside groups."""
    return math.fsum(likeness[a, b].item() for group in groups for a in group for b in group if a < b)


def ways(heads: int, into: int) -> int:
    """How many ways there are to make so many equal groups.

    >>> ways(4, 2), ways(8, 4)
    (3, 105)
    """
    return math.factorial(heads) // (math.factorial(heads // into) ** into * math.factorial(into))


def _checked(likeness: Tensor) -> Tensor:
    score = likeness.detach().double()
    if score.dim() != 2 or score.shape[0] != score.shape[1] or not score.isfinite().all():
        raise ValueError(
            f"likeness of shape {list(score.shape)} is no number for each pair of heads; give [heads, heads]"
        )
    return (score + score.T) / 2


def _every(heads: tuple[int, ...], size: int) -> Iterator[Groups]:
    """All ways to group, each once: whoever comes first chooses fellows."""
    if not heads:
        yield ()
        return
    first, rest = heads[0], heads[1:]
    for fellows in torch.combinations(torch.tensor(rest, dtype=torch.int64), size - 1).tolist() if size > 1 else [[]]:
        others = tuple(head for head in rest if head not in fellows)
        for groups in _every(others, size):
            yield ((first, *fellows), *groups)


def _climb(score: Tensor, groups: Groups) -> Groups:
    """The groups after swaps of two heads, the best first, until none gains."""
    heads = len(score)
    alone = score.clone().fill_diagonal_(0)
    place = torch.empty(heads, dtype=torch.int64)
    for number, group in enumerate(groups):
        place[list(group)] = number
    while True:
        member = torch.nn.functional.one_hot(place, len(groups)).double()
        to = (alone @ member)[:, place]  # [head, other]: how alike the head is to the group of the other
        own = to.diagonal()
        gain = to + to.T - own[:, None] - own - 2 * alone
        gain[place[:, None] == place] = 0
        most = int(gain.argmax())
        a, b = divmod(most, heads)
        if gain[a, b] <= 1e-12 * score.abs().max():
            return _sorted(place, len(groups))
        place[[a, b]] = place[[b, a]]


def _sorted(place: Tensor, into: int) -> Groups:
    return tuple(sorted(tuple((place == number).nonzero().flatten().tolist()) for number in range(into)))
