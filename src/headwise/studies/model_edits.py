"""Edits of a trained model, after which it is tested again: heads ablated or pruned, key-value
heads shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..data import Task
from ..distributed import join_process_group
from ..errors import SpecError, pluralise, suggest
from ..head_analysis.annotated_examples import examples_from_task
from ..inspect.ablation import ABLATION_MODES, ablate
from ..models import Transformer
from ..surgery.conversion import ALIGN_SIDES, Pool, convert
from ..surgery.head_selection import (
    RANKING_METHODS,
    HeadRanking,
    HeadSelection,
    KeepTop,
    score_heads,
)
from ..surgery.l0_gates import GateTrainingOptions, KeepOpenGates
from ..surgery.pruning import prune
from ..traces.record_types import Record
from ..training.evaluation import sum_batch_metrics
from ..training.loggers import JsonlLogger
from ..training.loop import run_training
from ..training.recipe import Recipe, from_dict as change_recipe
from ..training.run_setup import TrainingSetup

CHANGES = ("ablate", "prune", "convert")
GATES = "gates"  # trained L0 gates instead of a ranking
TEST_BATCHES = 4


@dataclass(frozen=True)
class ModelEdit:
    """One edit of every trained model of a study, as the table [edits.NAME] of its file states it.

    - `change`: "ablate" replaces the outputs of a `share` of all heads, or of `count` heads, as
      `mode` says; "prune"
      removes that share, and "convert" shares keys and values so that `kv` key-value heads are left
      in each layer;
    - `ranking`: which heads are changed, the least important ones by a method of `HeadRanking`, or
      by "gates", which
      are trained for `gate_steps` (1905.09418);
    - `align`: how heads are rotated before their mean is taken, as in `Pool`;
    - `texts`: texts of the task on which heads are judged or compared;
    - `steps`: training steps after the edit, with the recipe of the cell.
    """

    change: str = ""
    share: float = 0.0
    count: int = 0
    kv: int = 0
    mode: str = "zero"
    ranking: str = "random"
    gate_steps: int = 100
    align: str = "none"
    texts: int = 32
    steps: int = 0

    @staticmethod
    def parse(name: str, values: Mapping[str, Any]) -> ModelEdit:
        """Read the table of an edit; raises SpecError for unknown fields and values."""
        record = Record(f"edits.{name}", values, "correct the file")
        record.check_fields(one.name for one in fields(ModelEdit))
        readers = {str: record.read_text, float: record.read_number, int: record.read_int}
        edit_fields = [one for one in fields(ModelEdit) if one.name in values]
        edit = ModelEdit(**{one.name: readers[type(one.default)](one.name) for one in edit_fields})
        edit.check(name)
        return edit

    def check(self, name: str) -> None:
        """Raise SpecError if a value is impossible."""
        choices = {
            "change": CHANGES,
            "mode": ABLATION_MODES,
            "ranking": (*RANKING_METHODS, GATES),
            "align": tuple(ALIGN_SIDES),
        }
        for key, allowed in choices.items():
            value = getattr(self, key)
            if value not in allowed:
                raise SpecError(
                    f"edits.{name}.{key} = {value!r} is unknown; {suggest(value, allowed)}"
                )
        if self.change == "convert" and self.kv < 1:
            raise SpecError(f"edits.{name} leaves {self.kv} key-value heads; give kv = 1 or more")
        if self.count and (self.change != "ablate" or self.share):
            raise SpecError(
                f'edits.{name}.count is for change = "ablate" without a share; leave one of them '
                "out"
            )
        if self.change != "convert" and not self.count and not 0 < self.share < 1:
            raise SpecError(
                f"edits.{name}.share = {self.share:g} must be between 0 and 1; give share = 0.5"
            )
        if self.change == "ablate" and (self.steps or self.ranking == GATES):
            raise SpecError(
                f'edits.{name} trains heads that it ablates; give change = "prune", or leave '
                "steps out"
            )
        if self.texts < 2 or self.steps < 0 or self.gate_steps < 1:
            raise SpecError(
                f"edits.{name} needs texts >= 2, steps >= 0 and gate_steps >= 1; correct the file"
            )

    def check_model(self, net: Transformer) -> None:
        """Raise SpecError if the heads of a model cannot share keys and values as the edit says."""
        if self.change == "convert":
            convert(net, Pool(self.kv), kind="self")


def describe_edits(edits: Mapping[str, ModelEdit]) -> str:
    """One sentence for each edit, about the heads that it changes and the training after it.

    >>> describe_edits({"half": ModelEdit("prune", share=0.5, ranking="michel", steps=100)})
    'half: 50 % of the heads pruned, the least important by michel, then 100 training steps.'
    """
    sentences: list[str] = []
    for name, edit in edits.items():
        chosen = f"the least important by {edit.ranking}"
        if edit.ranking == "random":
            chosen = "chosen at random"
        amount = f"{100 * edit.share:.0f} % of the heads"
        if edit.count:
            amount = f"{edit.count} of all heads"
        text = f"{amount} pruned, {chosen}"
        if edit.change == "ablate":
            text = f"{amount} replaced ({edit.mode}), {chosen}"
        elif edit.change == "convert":
            heads = pluralise(edit.kv, "key-value head")
            text = f"{heads} in each layer, means of neighbours (aligned: {edit.align})"
        if edit.steps:
            text += f", then {pluralise(edit.steps, 'training step')}"
        sentences.append(f"{name}: {text}.")
    return " ".join(sentences)


def evaluate_edit(
    net: Transformer, task: Task, recipe: Recipe, edit: ModelEdit, folder: Path
) -> dict[str, Any]:
    """Edit a copy of a trained model and test it: metrics, parameters, and training steps after the
    edit.
    """
    examples = examples_from_task(net, task, edit.texts).examples
    edited = net
    context = nullcontext()
    if edit.change == "ablate":
        scores = score_heads(net, examples, HeadRanking(edit.ranking, seed=recipe.seed)).scores
        count = edit.count or round(edit.share * len(scores))
        heads = sorted(scores, key=lambda head: scores[head])[:count]
        context = ablate(net, heads, edit.mode, seed=recipe.seed)
    elif edit.change == "prune":
        edited = prune(net, _selection(edit, recipe), examples).after
    else:
        pool = Pool(edit.kv, align=edit.align, seed=recipe.seed)
        edited = convert(net, pool, examples, kind="self").after
    if edit.steps:
        edited = _retrain(edited, task, recipe, edit.steps, folder)
    with context:
        sums = sum_batch_metrics(edited.eval(), task, (recipe.batch, TEST_BATCHES), "test")
    return {
        "metrics": {name: total / count for name, (total, count) in sums.items() if count},
        "parameters": sum(one.numel() for one in edited.parameters()),
    }


def _selection(edit: ModelEdit, recipe: Recipe) -> HeadSelection:
    if edit.ranking == GATES:
        return KeepOpenGates(
            GateTrainingOptions(
                heads=1 - edit.share, steps=edit.gate_steps, batch=recipe.batch, seed=recipe.seed
            )
        )
    return KeepTop(1 - edit.share, HeadRanking(edit.ranking, seed=recipe.seed), scope="model")


def _retrain(net: Transformer, task: Task, recipe: Recipe, steps: int, folder: Path) -> Transformer:
    changes = {"steps": steps, "evaluate_every": steps, "checkpoint_every": steps}
    with join_process_group() as launch:
        setup = TrainingSetup.of(task, net, change_recipe(changes, recipe), folder, launch)
        return run_training(setup, "allowed", [JsonlLogger()]).net
