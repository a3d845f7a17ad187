"""What `headwise heads` tells besides the table, when asked: importance, redundancy, and a twin without training."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..screen import WIDTH

if TYPE_CHECKING:
    from ...heads.rating import Importance
    from ...heads.redundancy import Redundancy
    from ...heads.scene import Scene
    from ...heads.table import Table


@dataclass
class More:
    """What was asked besides, as far as it was; `data` by the names of the options."""

    weighed: Importance | None = None
    alike: Redundancy | None = None
    twin: Table | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"importance": self.weighed, "redundancy": self.alike, "twin": self.twin}
        return {name: one.data for name, one in told.items() if one is not None}


def take_more(parser: argparse.ArgumentParser) -> None:
    """Let the verb be asked for it."""
    parser.add_argument("--importance", metavar="METHOD", help="how much heads matter: leave-one-out, michel, shapley")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of --importance, at most")
    parser.add_argument("--redundancy", action="store_true", help="how alike heads are, held to chance")
    parser.add_argument("--twin", action="store_true", help="the same of a model with fresh weights, beside it")


def asked(
    model: Any, table: Table, scenes: Sequence[Scene], given: argparse.Namespace, again: Callable[[Any], Table]
) -> tuple[Table, More]:
    """The table with what was asked in it, and the rest; `again` measures another model alike."""
    more = More()
    if given.importance is not None:
        table = _weighed(model, table, scenes, given, more)
    other = None
    if given.twin:
        from ...heads.twins import twin

        other = twin(model, seed=given.seed)
        more.twin = again(other)
        more.lines.append(f"classes here: {_classes(table)}; of its twin with fresh weights: {_classes(more.twin)}")
    if given.redundancy:
        from ...heads.redundancy import redundancy

        more.alike = redundancy(model, scenes, name=table.model)
        more.lines.append(more.alike.sentence)
        if other is not None:
            more.lines.append(more.alike.beside(redundancy(other, scenes, name="its twin")))
    return table, more


def _weighed(model: Any, table: Table, scenes: Sequence[Scene], given: argparse.Namespace, more: More) -> Table:
    from ...heads.rating import How
    from ...heads.weighing import importance

    how = How(budget=given.budget, resamples=given.resamples, seed=given.seed)
    found = more.weighed = importance(model, scenes, method=given.importance, how=how)
    by_head = {(one.site, one.head): one.measure for one in found.heads}
    heads = tuple(
        replace(one, measures={**one.measures, "importance": by_head[one.site, one.head]})
        if (one.site, one.head) in by_head else one
        for one in table.heads
    )  # fmt: skip
    first = ", ".join(f"{one.site} {one.head} ({one.value:.3g})" for one in found.ranked[:5])
    more.lines.append(f"importance by {found.method}, of {found.objective}, {found.texts} texts: most of all {first}")
    return replace(table, heads=heads, notes=(*table.notes, *found.notes))


def _classes(table: Table) -> str:
    from ...heads.inks import group_of

    met = Counter(group for one in table.heads for group in {group_of(named.name) for named in one.classes})
    return ", ".join(f"{count} {name}" for name, count in met.most_common()) or "none"


def told(more: More) -> str:
    """A paragraph for each."""
    return "\n".join("\n" + textwrap.fill(line, WIDTH) for line in more.lines)
