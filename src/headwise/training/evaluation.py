"""What a model knows of examples it was not trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..data import Batch, MetricSums, Task
from ..data.translation import pack_batch
from ..distributed.parallel_attention import use_whole_rows
from ..distributed.ranks import BatchShard, ProcessMesh
from ..distributed.sharded_model import BatchForward
from ..errors import SpecError
from ..generation.greedy_decoding import greedy_decode
from ..models import Transformer
from .loss import count_labels, cross_entropy
from .recipe import Recipe
from .train_step import StepOptions, autocast, check_label_shape


class TaskEvaluator:
    """Measures models on held-out batches of a task."""

    def __init__(self, task: Task, recipe: Recipe, choice: StepOptions, world: ProcessMesh) -> None:
        self.task, self.recipe, self.choice, self.world, self.device = task, recipe, choice, world, world.device

    @property
    def final_split(self) -> str:
        """The split that a finished model is judged by: "test", or "valid" of data that has no more."""
        try:
            self.task.batch(0, self.recipe.batch, "test")
        except SpecError:
            return "valid"
        return "test"

    def compute_metrics(self, path: BatchForward, split: str) -> dict[str, float]:
        """The loss a label, without smoothing, and what the task measures of the same logits."""
        return self._averages(self._iter_tallies(path, split))

    def score_generation(self, net: Transformer, split: str) -> dict[str, float]:
        """What the task says of free answers; nothing when it asks for none."""
        if not self.task.answers:
            return {}
        shares = (own.batch for own in self._iter_shares(split) if own.rows)
        return self._averages(self.task.score(self.generate_answers(net, batch), batch) for batch in shares)

    def generate_answers(self, net: Transformer, batch: Batch) -> list[list[int]]:
        """The new ids that a model writes, for each example."""
        prompt, tokens = self.task.prompt(batch)
        here = batch.to(self.device)
        with torch.no_grad():
            memory = None if here.source is None else net.eval().encode(here.source, sequence=here.source_tokens)
        given = Batch(prompt, prompt, tokens).to(self.device)
        count, end = self.task.answers, self.task.end
        return greedy_decode(
            net, given.x, max_new_tokens=count, sequence=given.tokens, end_id=end, encoder_output=memory
        )

    def _averages(self, own: Iterable[MetricSums]) -> dict[str, float]:
        """Over what all ranks measured, each its share."""
        return average_tallies(self.world.every(sum_tallies(own)))

    def _iter_shares(self, split: str) -> Iterator[BatchShard]:
        whole = self.task.batches(self.recipe.batch, split)
        count = self.recipe.evaluate_batches
        for index in range(count if whole is None else min(count, whole)):
            yield self.world.share(self.task.batch(index, self.recipe.batch, split))

    def _iter_tallies(self, path: BatchForward, split: str) -> Iterator[MetricSums]:
        path.eval()
        for own in self._iter_shares(split):
            here = own.batch.to(self.device)
            with torch.no_grad(), autocast(self.choice, self.device), use_whole_rows(path):
                logits = self._compute_logits(path, own.batch).float()
            check_label_shape(logits, here.labels)
            loss = {"loss": (float(cross_entropy(logits, here.labels)), count_labels(here))}
            yield loss | dict(self.task.measure(logits, here)) if own.rows else {}

    def _compute_logits(self, path: BatchForward, batch: Batch) -> Tensor:
        """What a model says of a batch, in its rows, however these are laid out on the way."""
        if self.choice.rows == "padded":
            return path(batch.to(self.device))
        row = pack_batch(batch)
        return row.unpack(path(row.batch.to(self.device)))


def sum_tallies(tallies: Iterable[MetricSums]) -> dict[str, tuple[float, int]]:
    """One tally of several.

    >>> sum_tallies([{"accuracy": (3.0, 4)}, {"accuracy": (1.0, 1)}])
    {'accuracy': (4.0, 5)}
    """
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for tally in tallies:
        for name, (total, count) in tally.items():
            found[name] = found[name][0] + total, found[name][1] + count
    return dict(found)


def average_tallies(tallies: Iterable[MetricSums]) -> dict[str, float]:
    """Sums over counts, over all tallies; what was never counted is left out.

    >>> average_tallies([{"accuracy": (3.0, 4)}, {"accuracy": (1.0, 1), "never": (0.0, 0)}])
    {'accuracy': 0.8}
    """
    return {name: total / count for name, (total, count) in sum_tallies(tallies).items() if count}
