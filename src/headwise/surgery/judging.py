"""Many models that were made of one, each held to it over the same texts, of which the one before reads each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import SpecError
from ..heads.objectives import OutputDrift, Objective, EvaluationInput, choose_objective
from ..heads.scene import Example
from ..models import Transformer
from ..models.generating import answering
from ..tasks import Task
from .quality import TextCounts, QualityReport, MetricRow, QualityTally, check_min_count
from .sayings import compute_output
from .scores import DEFAULT_NUM_EXAMPLES, TranslationPair, compare_bleu_of_texts, can_compute_bleu, get_translation_pairs, compare_tallies, score_task, translate_sources


@dataclass(frozen=True, eq=False)
class ModelEvaluator:
    """A model before, what texts ask, what it says of them where drift is measured, and what was counted of it.

    >>> import headwise as hw, torch
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read(config), seed=0)
    >>> judge = ModelEvaluator.of(net, [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)])
    >>> judge.heard(net)[0].row("loss").change.value
    0.0
    """

    net: Transformer
    examples: Sequence[Example]
    objective: Objective
    questions: tuple[EvaluationInput, ...]
    baseline_outputs: tuple[Tensor | None, ...]
    baseline_tally: QualityTally
    task: Task | None = None
    pairs: Sequence[TranslationPair] = ()
    baseline_answers: Sequence[Any] = ()

    @staticmethod
    def of(net: Transformer, examples: Sequence[Example], objective: str | Objective | None = None) -> ModelEvaluator:
        """The model has read every text."""
        check_min_count(len(examples), "texts")
        chosen, why = choose_objective(net, objective, examples[0])
        before, drifts = QualityTally(chosen, [why] if why else []), isinstance(chosen, OutputDrift)
        questions = tuple(chosen.prepare_input(net, scene, number) for number, scene in enumerate(examples))
        said = list[Tensor | None]()
        with answering(net):
            for question in questions:
                own = compute_output(net, question.inputs)
                said.append(own if drifts else None)
                before.add(question, own, said[-1])
        return ModelEvaluator(net, examples, chosen, questions, tuple(said), before)

    def with_generation(self, task: Task | None = None) -> ModelEvaluator:
        """The same with free answers of the model before, to a task or as translations."""
        if task is None and not can_compute_bleu(self.net):
            fact = f"free answers of {self.net.described.name} have no score here"
            raise SpecError(f"{fact}; give a task, or a translator with pairs of texts and sacrebleu installed")
        asked = replace(self, task=task, pairs=() if task is not None else get_translation_pairs(self.net, self.examples))
        return replace(asked, baseline_answers=asked._generate_answers(self.net))

    def evaluate(self, after: Transformer) -> tuple[QualityReport, tuple[TextCounts, ...]]:
        """How well another model speaks beside the one before, and what was counted of it, text by text."""
        drifts = isinstance(self.objective, OutputDrift)
        now = QualityTally(self.objective, list(self.baseline_tally.notes), before=[] if drifts else self.baseline_tally.after)
        if after is self.net:
            now.after, now.num_unscored = self.baseline_tally.after, self.baseline_tally.num_unscored
            return now.report, tuple(now.after)
        with answering(after):
            for question, said in zip(self.questions, self.baseline_outputs, strict=True):
                now.add(question, compute_output(after, question.inputs), said)
        return now.report, tuple(now.after)

    def score_generation(self, after: Transformer) -> list[MetricRow]:
        """What free answers of another model are worth beside those of the one before: a task's score, or BLEU."""
        own = self.baseline_answers if after is self.net else self._generate_answers(after)
        if self.task is not None:
            return [row for row in compare_tallies(self.baseline_answers, own) if "/" not in row.name]
        return [compare_bleu_of_texts(self.baseline_answers, own, self.pairs)]

    def _generate_answers(self, net: Transformer) -> list[Any]:
        with answering(net):
            return translate_sources(net, self.pairs) if self.task is None else list(score_task(net, self.task, DEFAULT_NUM_EXAMPLES))
