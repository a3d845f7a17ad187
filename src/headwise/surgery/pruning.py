"""Heads are chosen and cut: one model in, a smaller one out, and what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import SpecError
from ..heads.scene import Scene
from ..models import Transformer
from .choices import Choice, Keep
from .constants import folded
from .plans import Head, Plan
from .rebuilding import ours
from .removing import removed


@dataclass(frozen=True, eq=False)
class Pruned:
    """A model before and after, what it keeps and why, and what the heads that went are taken to say from then on.

    `ready` is the model that was cut: the one before, unless choosing made it learn.
    """

    before: Transformer
    ready: Transformer
    after: Transformer
    plan: Plan
    said: Mapping[Head, Tensor]
    fold: str

    @property
    def data(self) -> dict[str, Any]:
        """What was done, as plain values."""
        return {"done": "prune", "fold": self.fold, **self.plan.data}


def prune(
    model: nn.Module,
    choice: Choice | float,
    scenes: Sequence[Scene] = (),
    *,
    fold: str = "none",
    tell: Callable[[str], Any] = lambda _: None,
) -> Pruned:
    """A model without the heads that a choice gives up; a number is the share that every layer keeps.

    `scenes` are the texts by which heads are judged, as `hw.Sources` reads them. fold="mean" leaves what the heads said
    on average over these texts, fold="bias" what their values' bias made them say. The model itself is left alone; one
    of transformers is copied as one of ours first.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}), seed=0)
    >>> done = prune(net, hw.surgery.Named((("decoder.0.attention", 3),)))
    >>> done.plan.sentence, hw.counting.params(net.described) - hw.counting.params(done.after.described)
    ('7 of 8 heads stay, without those that were named', 70)
    """
    model = ours(model)
    chosen = Keep(choice) if isinstance(choice, (int, float)) else choice
    if not isinstance(chosen, Choice):
        raise SpecError(f"choice={choice!r} chooses no heads; give a share such as 0.5, or hw.surgery.Named(...)")
    ready, plan = chosen.ready(model, scenes, tell)
    if not plan.gone:
        raise SpecError(f"no head would go: {plan.sentence}; choose fewer to keep")
    tell("cutting")
    left = folded(ready, plan, scenes, fold)
    return Pruned(model, ready, removed(ready, plan.changes, left.constants), plan, left.said, fold)
