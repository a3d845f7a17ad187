"""How well a model speaks with ever fewer heads: quality against heads left, in several orders, part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import SpecError, nearest
from ..heads.alignment import Alignment
from ..heads.classes import classified
from ..heads.inks import group_of
from ..heads.measuring import More, measure
from ..heads.scene import Scene
from ..heads.syntax import Syntax
from ..models import Transformer
from ..tasks import Task
from .choices import worth_most
from .judging import Judge
from .orders import Ordering, check_order, ordered, usual
from .plans import Head, Kept, Unit, counts, units
from .quality import Between, Counts, Row, check_count
from .removing import removed
from .worths import RANDOM, Worths

ALL = "all"
POINTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
Tell = Callable[[str], object]


@dataclass(frozen=True)
class Sweep:
    """Which heads are taken away, in which orders, how many, and what is asked of what is left.

    `points` are the shares of heads that stay. `parts` are "encoder", "decoder" (what a stack attends to in itself) and
    "cross", each with the others whole, or "all"; where none is named, all of them. Orders are as `orders.ORDERS` has
    them, the first is ours; chance is drawn `seeds` times. Models of the orders in `answered` also answer freely, to a
    `task` where one is given. `least` heads stay in every attention. A loss may grow by less than `allowed`.
    """

    ordering: Ordering = field(default_factory=Ordering)
    orders: tuple[str, ...] = ()
    points: tuple[float, ...] = POINTS
    parts: tuple[str, ...] = ()
    seeds: int = 5
    answered: tuple[str, ...] = ()
    unit: str = "auto"
    least: int = 0
    allowed: float = 0.1
    task: Task | None = None

    def __post_init__(self) -> None:
        for order in (*self.orders, *self.answered):
            check_order(order, self.ordering)
        if wrong := [one for one in self.points if not 0 < one <= 1]:
            raise SpecError(f"{wrong[0]!r} is no share of heads that stay; give more than 0 and at most 1")
        for name, least in (("seeds", 1), ("least", 0)):
            if type(said := getattr(self, name)) is not int or said < least:
                raise SpecError(f"{name}={said!r} cannot be meant; give {least} or more")
        if not self.points:
            raise SpecError("no point was given; give shares of heads that stay, such as 0.5")
        if not self.allowed > 0:
            raise SpecError(f"allowed={self.allowed!r} allows nothing; give by how much a loss may grow, such as 0.1")


def changed(row: Row) -> Between:
    """How a row differs from the whole model's; a drift is a difference itself."""
    return row.after if row.change is None else row.change


class Point(NamedTuple):
    """What is left of a part, the share that was asked for, and how well the model speaks with it.

    `counts` are of each text, of which the rows are made.
    """

    share: float
    left: int
    keep: Kept
    rows: tuple[Row, ...]
    counts: tuple[Counts, ...]

    @property
    def change(self) -> Between:
        """How much the loss has grown since the whole model."""
        return changed(self.rows[0])

    def row(self, name: str) -> Row | None:
        """One of its rows, if there."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        keep = {site: list(heads) for site, heads in self.keep.items()}
        return {"share": self.share, "left": self.left, "keep": keep, "rows": [row.data for row in self.rows]}


class Line(NamedTuple):
    """One order of one part, from the whole model on; `seed` is the draw, where there are several."""

    part: str
    order: str
    seed: int
    points: tuple[Point, ...]

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"part": self.part, "order": self.order, "seed": self.seed}
        return told | {"points": [point.data for point in self.points]}


class Mark(NamedTuple):
    """A number at so many heads left, and a band around it."""

    left: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curves:
    """Lines of a model, over so many texts; `parts` says which attentions each part has, with their heads.

    `classes` names every head by the group of its first class, the surest; it is empty where heads cannot be named.
    """

    model: str
    objective: str
    texts: int
    places: int
    parts: Mapping[str, Mapping[str, int]]
    lines: tuple[Line, ...]
    classes: Mapping[Head, str]
    allowed: float
    notes: tuple[str, ...] = ()
    command: str = ""

    @property
    def orders(self) -> tuple[str, ...]:
        """The orders, the first of which is ours."""
        return tuple(dict.fromkeys(line.order for line in self.lines))

    @property
    def names(self) -> tuple[str, ...]:
        """The rows that are there, loss or drift first."""
        return tuple(dict.fromkeys(row.name for line in self.lines for point in line.points for row in point.rows))

    def own(self, part: str, order: str) -> tuple[Line, ...]:
        """The lines of an order of a part, one for each draw."""
        return tuple(line for line in self.lines if (line.part, line.order) == (part, order))

    def marks(self, part: str, order: str, name: str) -> list[Mark]:
        """How a row differs from the whole model's, text by text, against heads left: with its interval over texts; of
        several draws their mean, least and most.
        """
        found: dict[int, list[Between]] = {}
        for line in self.own(part, order):
            for point in line.points:
                if row := point.row(name):
                    found.setdefault(point.left, []).append(changed(row))
        return [Mark(left, *_banded(found[left])) for left in sorted(found, reverse=True)]

    def heads(self, part: str) -> int:
        """How many heads a part has."""
        return sum(self.parts[part].values())

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        classes: dict[str, dict[str, str]] = {}
        for (site, head), name in self.classes.items():
            classes.setdefault(site, {})[str(head)] = name
        return {
            "version": 1, "model": self.model, "objective": self.objective, "texts": self.texts, "places": self.places,
            "allowed": self.allowed, "parts": {name: dict(sites) for name, sites in self.parts.items()},
            "classes": classes, "lines": [line.data for line in self.lines], "notes": list(self.notes),
            "command": self.command,
        }  # fmt: skip


def _banded(found: Sequence[Between]) -> tuple[float, float, float]:
    if len(found) == 1:
        return found[0]
    values = [one.value for one in found]
    return float(np.mean(values)), min(values), max(values)


def swept(
    net: Transformer,
    choose_by: Sequence[Scene],
    prove_with: Sequence[Scene],
    how: Sweep = Sweep(),
    tell: Tell = lambda _: None,
) -> Curves:
    """Quality against heads left: orders are found once, by the first texts; what is left is judged by the others.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read(config), seed=0).eval()
    >>> texts = [Scene({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(4)]
    >>> found = swept(net, texts, texts, Sweep(orders=("random",), points=(0.5, 0.25), seeds=2))
    >>> [(line.part, line.seed, [point.left for point in line.points]) for line in found.lines]
    [('all', 0, [4, 2, 1]), ('all', 1, [4, 2, 1])]
    """
    check_count(len(choose_by), "texts to choose by")
    those = units(net.described, how.unit)
    parts, orders = _parts(net, how.parts), how.orders or usual(net, choose_by, how.ordering)
    judge = Judge.of(net, prove_with, how.ordering.objective)
    judge = judge.freely(how.task) if how.answered else judge
    lines, notes = list[Line](), dict[str, None]()
    for order in orders:
        for seed in range(how.seeds if order == RANDOM else 1):
            tell(f"{order}: weighing heads")
            ordering = replace(how.ordering, seed=how.ordering.seed + seed)
            found = ordered(net, choose_by, those, order, ordering, tell)
            notes |= {f"{order}: {note}": None for note in found.notes if note not in judge.before.notes}
            at = _At(net, judge, how, order, seed, tell)
            lines += [at.line(part, {site: those[site] for site in sites}, found) for part, sites in parts.items()]
    tell("naming heads")
    classes, more = _named(net, choose_by)
    return Curves(
        model=net.described.name, objective=judge.objective.name, texts=len(judge.before.after),
        places=sum(one.places for one in judge.before.after), parts=parts, lines=tuple(lines), classes=classes,
        allowed=how.allowed, notes=(*judge.before.notes, *notes, *more),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _At:
    """One order at work: models are cut, and what they say is heard."""

    net: Transformer
    judge: Judge
    how: Sweep
    order: str
    seed: int
    tell: Tell

    def line(self, part: str, own: Mapping[str, tuple[Unit, ...]], found: Worths) -> Line:
        """A part with ever fewer heads."""
        whole = {site: tuple(head for unit in units for head in unit.heads) for site, units in own.items()}
        heads, points = sum(map(len, whole.values())), [self._point(1.0, whole, self.net)]
        for share in sorted(self.how.points, reverse=True):
            most = worth_most(own, found, max(len(own[next(iter(own))][0].heads), round(share * heads)), self.how.least)
            keep = {site: tuple(sorted(h for one in most if one.site == site for h in one.heads)) for site in own}
            if sum(map(len, keep.values())) < points[-1].left:
                self.tell(f"{self.order} {self.seed}, {part}: {sum(map(len, keep.values()))} of {heads} heads left")
                fewer = {site: kept for site, kept in keep.items() if kept != whole[site]}
                points.append(self._point(share, keep, removed(self.net, fewer)))
        return Line(part, self.order, self.seed, tuple(points))

    def _point(self, share: float, keep: Kept, left: Transformer) -> Point:
        found, each = self.judge.heard(left)
        rows = [*found.rows, *(self.judge.answered(left) if self.order in self.how.answered else [])]
        return Point(share, sum(map(len, keep.values())), keep, tuple(rows), each)


def _parts(net: Transformer, wanted: Sequence[str]) -> dict[str, dict[str, int]]:
    """The attentions of each part, with how many heads they have: all of them, and each kind by itself."""
    there = counts(net.described)
    found: dict[str, dict[str, int]] = {}
    for site, heads in there.items():
        stack, _, kind = site.split(".")
        found.setdefault(stack if kind == "attention" else kind, {})[site] = heads
    found = {ALL: there} | (found if len(found) > 1 else {})
    if wrong := [one for one in wanted if one not in found]:
        raise SpecError(f"{net.described.name} has no part {wrong[0]!r}; {nearest(wrong[0], found)}")
    return {part: sites for part, sites in found.items() if not wanted or part in wanted}


def _named(net: Transformer, scenes: Sequence[Scene]) -> tuple[dict[Head, str], list[str]]:
    """Every head by the group of its first class; empty, and why, where texts do not say what heads read."""
    more = list[More]()
    if any(scene.arcs for scene in scenes):
        more.append(Syntax(stream=next(iter(scenes[0].streams))))
    if any(scene.links for scene in scenes):
        more.append(Alignment())
    if not all(scene.streams for scene in scenes):
        return {}, ["heads have no classes: it is not known which tokens they read"]
    table = classified(measure(net, scenes, more=more))
    said = "heads are counted by their first class, the surest"
    if not any(scene.arcs for scene in scenes):
        said += "; syntactic ones were not looked for, because the texts are not parsed"
    return {(one.site, one.head): group_of(one.classes[0].name) for one in table.heads}, [said, *table.notes]
