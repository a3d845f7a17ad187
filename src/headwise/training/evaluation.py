"""What a model knows of examples it was not trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from ..errors import SpecError
from ..models import Transformer, greedy
from ..tasks import Batch, Tally, Task
from .choosing import Choice
from .loss import asked, cross_entropy
from .recipe import Recipe
from .stepping import autocast, check_fits


class Examiner:
    """Measures models on held-out batches of a task."""

    def __init__(self, task: Task, recipe: Recipe, choice: Choice, device: torch.device) -> None:
        self.task, self.recipe, self.choice, self.device = task, recipe, choice, device

    @property
    def last(self) -> str:
        """The split that a finished model is judged by: "test", or "valid" of data that has no more."""
        try:
            self.task.batch(0, self.recipe.batch, "test")
        except SpecError:
            return "valid"
        return "test"

    def measures(self, net: Transformer, split: str) -> dict[str, float]:
        """The loss a label, without smoothing, and what the task measures of the same logits."""
        return averages(self._each(net, split))

    def scores(self, net: Transformer, split: str) -> dict[str, float]:
        """What the task says of free answers; nothing when it asks for none."""
        if not self.task.answers:
            return {}
        return averages(self.task.score(self.answers(net, batch), batch) for batch in self._batches(split))

    def answers(self, net: Transformer, batch: Batch) -> list[list[int]]:
        """The new ids that a model writes, for each example."""
        prompt, tokens = self.task.prompt(batch)
        here = batch.to(self.device)
        with torch.no_grad():
            memory = None if here.source is None else net.eval().encode(here.source, tokens=here.source_tokens)
        given = Batch(prompt, prompt, tokens).to(self.device)
        count, end = self.task.answers, self.task.end
        return greedy(net, given.x, count=count, tokens=given.tokens, end=end, memory=memory)

    def _batches(self, split: str) -> Iterator[Batch]:
        whole = self.task.batches(self.recipe.batch, split)
        count = self.recipe.evaluate_batches
        for index in range(count if whole is None else min(count, whole)):
            yield self.task.batch(index, self.recipe.batch, split)

    def _each(self, net: Transformer, split: str) -> Iterator[Tally]:
        net.eval()
        for batch in self._batches(split):
            here = batch.to(self.device)
            with torch.no_grad(), autocast(self.choice, self.device):
                logits = net(here.x, tokens=here.tokens, source=here.source, source_tokens=here.source_tokens).float()
            check_fits(logits, here.labels)
            loss = {"loss": (float(cross_entropy(logits, here.labels)), asked(batch))}
            yield loss | dict(self.task.measure(logits, here))


def averages(tallies: Iterable[Tally]) -> dict[str, float]:
    """Sums over counts, over all tallies; what was never counted is left out.

    >>> averages([{"accuracy": (3.0, 4)}, {"accuracy": (1.0, 1), "never": (0.0, 0)}])
    {'accuracy': 0.8}
    """
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for tally in tallies:
        for name, (total, count) in tally.items():
            sums[name] += total
            counts[name] += count
    return {name: sums[name] / counts[name] for name in sums if counts[name]}
