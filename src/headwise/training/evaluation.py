"""Evaluation of a model: metrics on held-out batches of a task."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..models import Transformer
from ..models.distributed.parallel_attention import use_whole_rows
from ..models.distributed.ranks import BatchShard, ProcessMesh
from ..models.distributed.sharded_model import BatchForward
from ..models.generation.decoding_state import greedy_decode
from ..report.data import Column, Table
from ..report.render import to_text
from ..util.errors import SpecError
from ..util.size_limits import check_whole_number
from .data import Batch, MetricSums, Task
from .data.task import pack_batch
from .recipe import Recipe
from .train_step import StepOptions, autocast, check_label_shape, count_labels, cross_entropy


class TaskEvaluator:
    """Evaluates models on the held-out splits of a task; each rank evaluates its shard of every
    batch.
    """

    def __init__(
        self, task: Task, recipe: Recipe, options: StepOptions, world: ProcessMesh
    ) -> None:
        self.task = task
        self.recipe = recipe
        self.options = options
        self.world = world
        self.device = world.device

    @property
    def final_split(self) -> str:
        """Split for the final evaluation: "test", or "valid" if the data has no test split."""
        try:
            self.task.batch(0, self.recipe.batch, "test")
        except SpecError:
            return "valid"
        return "test"

    def compute_metrics(self, forward: BatchForward, split: str) -> dict[str, float]:
        """Mean loss per label without label smoothing, and the metrics of the task."""
        return self._average_over_ranks(self._iter_metric_sums(forward, split))

    def score_generation(self, net: Transformer, split: str) -> dict[str, float]:
        """Metrics of generated answers; empty if the task does not use generation."""
        if not self.task.answers:
            return {}
        shards = (shard.batch for shard in self._iter_shards(split) if shard.rows)
        return self._average_over_ranks(
            self.task.score(self.generate_answers(net, batch), batch) for batch in shards
        )

    def generate_answers(self, net: Transformer, batch: Batch) -> list[list[int]]:
        """Greedily generated ids for each example, without the prompt."""
        prompt_ids, prompt_tokens = self.task.prompt(batch)
        batch = batch.to(self.device)
        memory = None
        if batch.source is not None:
            with torch.no_grad():
                memory = net.eval().encode(batch.source, sequence=batch.source_tokens)
        prompt = Batch(prompt_ids, prompt_ids, prompt_tokens).to(self.device)
        return greedy_decode(
            net,
            prompt.x,
            max_new_tokens=self.task.answers,
            sequence=prompt.tokens,
            end_id=self.task.end,
            encoder_output=memory,
        )

    def _average_over_ranks(self, sums: Iterable[MetricSums]) -> dict[str, float]:
        """Average each metric over all ranks; `sums` are this rank's sums."""
        return average_metrics(self.world.all_gather_objects(sum_metrics(sums)))

    def _iter_shards(self, split: str) -> Iterator[BatchShard]:
        available = self.task.batches(self.recipe.batch, split)
        count = self.recipe.evaluate_batches
        for index in range(count if available is None else min(count, available)):
            yield self.world.shard(self.task.batch(index, self.recipe.batch, split))

    def _iter_metric_sums(self, forward: BatchForward, split: str) -> Iterator[MetricSums]:
        forward.eval()
        for shard in self._iter_shards(split):
            batch = shard.batch.to(self.device)
            with torch.no_grad(), autocast(self.options, self.device), use_whole_rows(forward):
                logits = self._compute_logits(forward, shard.batch).float()
            sums = measure_batch(self.task, logits, batch)
            yield sums if shard.rows else {}

    def _compute_logits(self, forward: BatchForward, batch: Batch) -> Tensor:
        """Logits in the rows of the batch, also if the model computes them on packed rows."""
        if self.options.rows == "padded":
            return forward(batch.to(self.device))
        packed = pack_batch(batch)
        return packed.unpack(forward(packed.batch.to(self.device)))


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model on a task, and on the same task at other lengths."""

    metrics: Mapping[str, float]
    by_length: Mapping[int, Mapping[str, float]] = field(
        default_factory=dict[int, Mapping[str, float]]
    )

    def __str__(self) -> str:
        columns = {"the task": self.metrics}
        columns |= {f"length {length}": row for length, row in self.by_length.items()}
        names: dict[str, None] = {}
        for of_column in columns.values():
            names |= dict.fromkeys(of_column)
        rows: list[list[Any]] = []
        for name in names:
            row = [one.get(name) for one in columns.values()]
            rows.append([name, *row])
        headers = [Column(label, "{:.4f}".format) for label in columns]
        return to_text(Table("", ["metric", *headers], rows))


def evaluate(
    net: Transformer,
    task: Task,
    lengths: Sequence[int] = (),
    *,
    batch: int = 32,
    batches: int = 16,
    split: str = "test",
) -> Evaluation:
    """Evaluate a model on held-out examples: the loss per label and the metrics of the task.

    With `lengths`, the model is also evaluated on the task with each of these values of its option
    `length`, such as lengths that it was not trained on. The mode of the model (training or
    evaluation) is left as it is.

    >>> import headwise as hw
    >>> task = hw.data.make_task("group", length=12)
    >>> result = hw.evaluate(hw.Transformer(task.model()), task, lengths=(16, 32), batches=2)
    >>> list(result.by_length), result.metrics["accuracy"] < 1
    ([16, 32], True)
    """
    check_whole_number("batch", batch, 1)
    check_whole_number("batches", batches, 1)
    for length in lengths:
        check_whole_number("a length", length, 1)
    if lengths and "length" not in [option.name for option in fields(task)]:
        raise SpecError(
            f"the task {task.name!r} has no option length; evaluate it with other options instead, "
            f"such as {task!r}"
        )
    tasks = [task, *(replace(task, length=length) for length in lengths)]
    is_training = net.training
    try:
        sums = [sum_batch_metrics(net, one, (batch, batches), split) for one in tasks]
    finally:
        net.train(is_training)
    metrics = [average_metrics([one]) for one in sums]
    return Evaluation(metrics[0], dict(zip(lengths, metrics[1:], strict=True)))


def sum_batch_metrics(
    net: Transformer, task: Task, sizes: tuple[int, int], split: str
) -> MetricSums:
    """Sum and count every metric over batches of a split; `sizes` are examples per batch, and
    batches at most.
    """
    batch_size, max_batches = sizes
    forward = BatchForward(net).eval()
    available = task.batches(batch_size, split)
    device = next(net.parameters()).device
    sums: list[MetricSums] = []
    for index in range(max_batches if available is None else min(max_batches, available)):
        batch = task.batch(index, batch_size, split).to(device)
        with torch.no_grad():
            logits = forward(batch).float()
        sums.append(measure_batch(task, logits, batch))
    return sum_metrics(sums)


def measure_batch(task: Task, logits: Tensor, batch: Batch) -> MetricSums:
    """Sum and count the loss and the task's metrics."""
    check_label_shape(logits, batch.labels)
    loss = (float(cross_entropy(logits, batch.labels)), count_labels(batch))
    return {"loss": loss, **task.measure(logits, batch)}


def sum_metrics(parts: Iterable[MetricSums]) -> dict[str, tuple[float, int]]:
    """Add the (sum, count) of each metric over several parts of the data.

    >>> sum_metrics([{"accuracy": (3.0, 4)}, {"accuracy": (1.0, 1)}])
    {'accuracy': (4.0, 5)}
    """
    sums: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            old_total, old_count = sums.get(name, (0.0, 0))
            sums[name] = (old_total + total, old_count + count)
    return sums


def average_metrics(parts: Iterable[MetricSums]) -> dict[str, float]:
    """Average each metric over several parts of the data; metrics with a count of 0 are left out.

    >>> average_metrics([{"accuracy": (3.0, 4)}, {"accuracy": (1.0, 1), "never": (0.0, 0)}])
    {'accuracy': 0.8}
    """
    sums = {name: sum_ for name, sum_ in sum_metrics(parts).items() if sum_[1]}
    return {name: sums[name][0] / sums[name][1] for name in order_slices(list(sums))}


def order_slices(names: Sequence[str]) -> list[str]:
    """Order names of metrics, each followed by its slices, by number: batches may have them in any
    order.

    >>> order_slices(["loss", "accuracy", "accuracy@length=12", "accuracy@length=8", "bleu"])
    ['loss', 'accuracy', 'accuracy@length=8', 'accuracy@length=12', 'bleu']
    """
    metrics = list(dict.fromkeys(name.partition("@")[0] for name in names))

    def place(name: str) -> tuple[int, str, int]:
        metric, _, label = name.partition("@")
        numbered = re.fullmatch(r"(\D*)(\d+)", label)
        return (
            metrics.index(metric),
            numbered[1] if numbered else "",
            int(numbered[2]) if numbered else 0,
        )

    return sorted(names, key=place)
