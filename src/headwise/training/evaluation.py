"""Evaluation of a model: metrics on held-out batches of a task, and texts that it generates while
it is trained.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..data import Batch, MetricSums, Task
from ..data.task import pack_batch
from ..distributed.parallel_attention import use_whole_rows
from ..distributed.ranks import BatchShard, ProcessMesh
from ..distributed.sharded_model import BatchForward
from ..errors import SpecError
from ..generation import generate
from ..generation.decoding_strategies import greedy_decode
from ..model_spec import ModelSpec, ProcessorSpec
from ..models import Transformer
from .recipe import Recipe
from .train_step import StepOptions, autocast, check_label_shape, count_labels, cross_entropy


class TaskEvaluator:
    """Evaluates models on the held-out splits of a task; each rank evaluates its shard of every
    batch.
    """

    def __init__(
        self, task: Task, recipe: Recipe, options: StepOptions, world: ProcessMesh
    ) -> None:
        self.task, self.recipe, self.options, self.world, self.device = (
            task,
            recipe,
            options,
            world,
            world.device,
        )

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
        with torch.no_grad():
            memory = (
                None
                if batch.source is None
                else net.eval().encode(batch.source, sequence=batch.source_tokens)
            )
        prompt = Batch(prompt_ids, prompt_ids, prompt_tokens).to(self.device)
        max_new_tokens, end_id = self.task.answers, self.task.end
        return greedy_decode(
            net,
            prompt.x,
            max_new_tokens=max_new_tokens,
            sequence=prompt.tokens,
            end_id=end_id,
            encoder_output=memory,
        )

    def _average_over_ranks(self, sums: Iterable[MetricSums]) -> dict[str, float]:
        """The mean of each metric over all ranks; `sums` are those of this rank."""
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
            check_label_shape(logits, batch.labels)
            loss = {"loss": (float(cross_entropy(logits, batch.labels)), count_labels(batch))}
            yield loss | dict(self.task.measure(logits, batch)) if shard.rows else {}

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
        columns = {
            "the task": self.metrics,
            **{f"length {length}": row for length, row in self.by_length.items()},
        }
        names = list(dict.fromkeys(name for row in columns.values() for name in row))
        width = max([20, *map(len, names)])
        lines = ["".ljust(width) + "".join(label.rjust(14) for label in columns)]
        for name in names:
            cells = (f"{row[name]:.4f}" if name in row else "-" for row in columns.values())
            lines.append(name.ljust(width) + "".join(cell.rjust(14) for cell in cells))
        return "\n".join(lines)


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
    for name, size in (
        ("batch", batch),
        ("batches", batches),
        *(("a length", length) for length in lengths),
    ):
        if type(size) is not int or size < 1:
            raise SpecError(f"{name} must be a whole number of at least 1, got {size!r}")
    if lengths and "length" not in [option.name for option in fields(task)]:
        fact = f"the task {task.name!r} has no option length"
        raise SpecError(f"{fact}; evaluate it with other options instead, such as {task!r}")
    is_training = net.training
    try:
        by_length = {
            length: average_metrics(
                [sum_batch_metrics(net, replace(task, length=length), (batch, batches), split)]
            )
            for length in lengths
        }
        return Evaluation(
            average_metrics([sum_batch_metrics(net, task, (batch, batches), split)]), by_length
        )
    finally:
        net.train(is_training)


def sum_batch_metrics(
    net: Transformer, task: Task, sizes: tuple[int, int], split: str
) -> MetricSums:
    """Sum and count of every metric over batches of a split; `sizes` are examples per batch, and
    batches at most.
    """
    batch_size, max_batches = sizes
    forward, available = BatchForward(net).eval(), task.batches(batch_size, split)
    device = next(net.parameters()).device
    sums: list[MetricSums] = []
    for index in range(max_batches if available is None else min(max_batches, available)):
        batch = task.batch(index, batch_size, split).to(device)
        with torch.no_grad():
            logits = forward(batch).float()
        check_label_shape(logits, batch.labels)
        loss = {"loss": (float(cross_entropy(logits, batch.labels)), count_labels(batch))}
        sums.append(loss | dict(task.measure(logits, batch)))
    return sum_metrics(sums)


def sum_metrics(parts: Iterable[MetricSums]) -> dict[str, tuple[float, int]]:
    """Add the (sum, count) of each metric over several parts of the data.

    >>> sum_metrics([{"accuracy": (3.0, 4)}, {"accuracy": (1.0, 1)}])
    {'accuracy': (4.0, 5)}
    """
    sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for part in parts:
        for name, (total, count) in part.items():
            sums[name] = sums[name][0] + total, sums[name][1] + count
    return dict(sums)


def average_metrics(parts: Iterable[MetricSums]) -> dict[str, float]:
    """The mean of each metric over several parts of the data; metrics with a count of 0 are left
    out.

    >>> average_metrics([{"accuracy": (3.0, 4)}, {"accuracy": (1.0, 1), "never": (0.0, 0)}])
    {'accuracy': 0.8}
    """
    sums = sum_metrics(parts)
    return {
        name: sums[name][0] / sums[name][1] for name in order_slices(list(sums)) if sums[name][1]
    }


def order_slices(names: Sequence[str]) -> list[str]:
    """Names of metrics in their order, each followed by its slices, by number: batches may have
    them in any order.

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


# --- Texts that a model generates while it is trained ---------------------------------------------

SAMPLE_TEMPERATURE = 0.8


def check_samples(recipe: Recipe, model_spec: ModelSpec, usage: ProcessorSpec) -> None:
    """Raise SpecError if samples are asked for that this model cannot generate."""
    if bool(recipe.sample_every) != bool(recipe.sample_prompts):
        missing = "sample_prompts" if recipe.sample_every else "sample_every"
        raise SpecError(f"{missing} is missing; sample_every and sample_prompts belong together")
    if not recipe.sample_every:
        return
    if not usage.tokenizer or model_spec.kind not in ("decoder", "encoder-decoder"):
        kind = "has no tokenizer" if not usage.tokenizer else f"is of kind {model_spec.kind}"
        raise SpecError(
            f"sample_prompts need a model that generates text, but {model_spec.name} {kind}; "
            "leave them out"
        )


def sample_texts(net: Transformer, recipe: Recipe, step: int) -> Iterator[dict[str, Any]]:
    """Records of one sample for each prompt. Every step samples with the same random numbers, and
    none of torch's.
    """
    prompts = list(recipe.sample_prompts)
    options: dict[str, Any] = {"temperature": SAMPLE_TEMPERATURE, "seed": recipe.seed}
    texts = generate(net, prompts, max_new_tokens=recipe.sample_tokens, **options)
    for prompt, text in zip(prompts, texts, strict=True):
        yield {"event": "sample", "step": step, "prompt": prompt, "text": text}
