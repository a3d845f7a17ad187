"""What `headwise heads` tells besides the table, when asked: importance, redundancy, and a twin without training."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..screen import TERMINAL_WIDTH

if TYPE_CHECKING:
    from ...heads.rating import ImportanceResult
    from ...heads.redundancy import RedundancyResult
    from ...heads.scene import Example
    from ...heads.table import HeadTable


@dataclass
class ExtraAnalyses:
    """What was asked besides, as far as it was; `data` by the names of the options."""

    importance: ImportanceResult | None = None
    redundancy: RedundancyResult | None = None
    random_baseline: HeadTable | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"importance": self.importance, "redundancy": self.redundancy, "twin": self.random_baseline}
        return {name: one.data for name, one in told.items() if one is not None}


def add_extra_arguments(parser: argparse.ArgumentParser) -> None:
    """Let the verb be asked for it."""
    parser.add_argument("--importance", metavar="METHOD", help="how much heads matter: leave-one-out, michel, shapley")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of --importance, at most")
    parser.add_argument("--redundancy", action="store_true", help="how alike heads are, held to chance")
    parser.add_argument("--twin", action="store_true", help="the same of a model with fresh weights, beside it")


def run_extras(
    model: Any, table: HeadTable, examples: Sequence[Example], args: argparse.Namespace, measure: Callable[[Any], HeadTable]
) -> tuple[HeadTable, ExtraAnalyses]:
    """The table with what was asked in it, and the rest; `again` measures another model alike."""
    more = ExtraAnalyses()
    if args.importance is not None:
        table = _measure_importance(model, table, examples, args, more)
    other = None
    if args.twin:
        from ...heads.twins import make_random_baseline

        other = make_random_baseline(model, seed=args.seed)
        more.random_baseline = measure(other)
        more.lines.append(f"classes here: {_count_classes(table)}; of its twin with fresh weights: {_count_classes(more.random_baseline)}")
    if args.redundancy:
        from ...heads.redundancy import measure_redundancy

        more.redundancy = measure_redundancy(model, examples, name=table.model)
        more.lines.append(more.redundancy.sentence)
        if other is not None:
            more.lines.append(more.redundancy.compare_with(measure_redundancy(other, examples, name="its twin")))
    return table, more


def _measure_importance(model: Any, table: HeadTable, scenes: Sequence[Example], given: argparse.Namespace, more: ExtraAnalyses) -> HeadTable:
    from ...heads.rating import ImportanceOptions
    from ...heads.weighing import estimate_importance

    how = ImportanceOptions(max_seconds=given.budget, num_resamples=given.num_resamples, seed=given.seed)
    found = more.importance = estimate_importance(model, scenes, method=given.importance, options=how)
    by_head = {(one.site, one.head): one.measure for one in found.heads}
    heads = tuple(
        replace(one, measures={**one.measures, "importance": by_head[one.site, one.head]})
        if (one.site, one.head) in by_head else one
        for one in table.heads
    )  # fmt: skip
    first = ", ".join(f"{one.site} {one.head} ({one.value:.3g})" for one in found.by_importance[:5])
    more.lines.append(f"importance by {found.method}, of {found.objective}, {found.texts} texts: most of all {first}")
    return replace(table, heads=heads, notes=(*table.notes, *found.notes))


def _count_classes(table: HeadTable) -> str:
    from ...heads.inks import class_group

    met = Counter(group for one in table.heads for group in {class_group(named.name) for named in one.classes})
    return ", ".join(f"{count} {name}" for name, count in met.most_common()) or "none"


def format_extras(more: ExtraAnalyses) -> str:
    """A paragraph for each."""
    return "\n".join("\n" + textwrap.copy_from(line, TERMINAL_WIDTH) for line in more.lines)
