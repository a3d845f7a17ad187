"""Many models that were made of one, each held to it over the same texts, of which the one before reads each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import SpecError
from ..heads.objectives import Drift, Objective, Question, objective_of
from ..heads.scene import Scene
from ..models import Transformer
from ..models.generating import answering
from ..tasks import Task
from .quality import Counts, Quality, Row, Tallied, check_count
from .sayings import output
from .scores import EXAMPLES, Pair, bleu_between, can_bleu, pairs_of, rows_between, scored, translated


@dataclass(frozen=True, eq=False)
class Judge:
    """A model before, what texts ask, what it says of them where drift is measured, and what was counted of it.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read(config), seed=0)
    >>> judge = Judge.of(net, [Scene({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)])
    >>> judge.heard(net)[0].row("loss").change.value
    0.0
    """

    net: Transformer
    scenes: Sequence[Scene]
    objective: Objective
    questions: tuple[Question, ...]
    said: tuple[Tensor | None, ...]
    before: Tallied
    task: Task | None = None
    pairs: Sequence[Pair] = ()
    answers: Sequence[Any] = ()

    @staticmethod
    def of(net: Transformer, scenes: Sequence[Scene], objective: str | Objective | None = None) -> Judge:
        """The model has read every text."""
        check_count(len(scenes), "texts")
        chosen, why = objective_of(net, objective, scenes[0])
        before, drifts = Tallied(chosen, [why] if why else []), isinstance(chosen, Drift)
        questions = tuple(chosen.question(net, scene, number) for number, scene in enumerate(scenes))
        said = list[Tensor | None]()
        with answering(net):
            for question in questions:
                own = output(net, question.given)
                said.append(own if drifts else None)
                before.count(question, own, said[-1])
        return Judge(net, scenes, chosen, questions, tuple(said), before)

    def freely(self, task: Task | None = None) -> Judge:
        """The same with free answers of the model before, to a task or as translations."""
        if task is None and not can_bleu(self.net):
            fact = f"free answers of {self.net.described.name} have no score here"
            raise SpecError(f"{fact}; give a task, or a translator with pairs of texts and sacrebleu installed")
        asked = replace(self, task=task, pairs=() if task is not None else pairs_of(self.net, self.scenes))
        return replace(asked, answers=asked._answers(self.net))

    def heard(self, after: Transformer) -> tuple[Quality, tuple[Counts, ...]]:
        """How well another model speaks beside the one before, and what was counted of it, text by text."""
        drifts = isinstance(self.objective, Drift)
        now = Tallied(self.objective, list(self.before.notes), before=[] if drifts else self.before.after)
        if after is self.net:
            now.after, now.silent = self.before.after, self.before.silent
            return now.quality, tuple(now.after)
        with answering(after):
            for question, said in zip(self.questions, self.said, strict=True):
                now.count(question, output(after, question.given), said)
        return now.quality, tuple(now.after)

    def answered(self, after: Transformer) -> list[Row]:
        """What free answers of another model are worth beside those of the one before: a task's score, or BLEU."""
        own = self.answers if after is self.net else self._answers(after)
        if self.task is not None:
            return [row for row in rows_between(self.answers, own) if "/" not in row.name]
        return [bleu_between(self.answers, own, self.pairs)]

    def _answers(self, net: Transformer) -> list[Any]:
        with answering(net):
            return translated(net, self.pairs) if self.task is None else list(scored(net, self.task, EXAMPLES))
