"""Heads are chosen and cut: one model in, a smaller one out, and what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import SpecError
from ..heads.scene import Example
from ..models import Transformer
from .choices import HeadSelection, KeepTop
from .constants import compute_head_constants
from .plans import HeadId, PruningPlan
from .rebuilding import to_native_model
from .removing import remove_heads


@dataclass(frozen=True, eq=False)
class PruningResult:
    """A model before and after, what it keeps and why, and what the heads that went are taken to say from then on.

    `ready` is the model that was cut: the one before, unless choosing made it learn.
    """

    before: Transformer
    removal_source: Transformer
    after: Transformer
    plan: PruningPlan
    head_constants: Mapping[HeadId, Tensor]
    fold: str

    @property
    def data(self) -> dict[str, Any]:
        """What was done, as plain values."""
        return {"done": "prune", "fold": self.fold, **self.plan.data}


def prune(
    model: nn.Module,
    selection: HeadSelection | float,
    examples: Sequence[Example] = (),
    *,
    fold: str = "none",
    log: Callable[[str], Any] = lambda _: None,
) -> PruningResult:
    """A model without the heads that a choice gives up; a number is the share that every layer keeps.

    `scenes` are the texts by which heads are judged, as `hw.Sources` reads them. fold="mean" leaves what the heads said
    on average over these texts, fold="bias" what their values' bias made them say. The model itself is left alone; one
    of transformers is copied as one of ours first.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}), seed=0)
    >>> done = prune(net, hw.surgery.Named((("decoder.0.attention", 3),)))
    >>> done.plan.sentence, hw.select_counted.params(net.described) - hw.select_counted.params(done.after.described)
    ('7 of 8 heads stay, without those that were named', 70)
    """
    model = to_native_model(model)
    chosen = KeepTop(selection) if isinstance(selection, (int, float)) else selection
    if not isinstance(chosen, HeadSelection):
        raise SpecError(f"choice={selection!r} chooses no heads; give a share such as 0.5, or hw.surgery.Named(...)")
    ready, plan = chosen.prepare(model, examples, log)
    if not plan.removed_heads:
        raise SpecError(f"no head would go: {plan.summary}; choose fewer to keep")
    log("cutting")
    left = compute_head_constants(ready, plan, examples, fold)
    return PruningResult(model, ready, remove_heads(ready, plan.changed_sites, left.site_constants), plan, left.head_outputs, fold)
