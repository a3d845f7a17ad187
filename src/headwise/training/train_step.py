"""One optimisation step: its batch, which a thread prepares ahead, the loss, and the gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import IGNORE_INDEX, Batch, Task
from ..data.task import pack_batch
from ..data.tokenizer_calls import parse_tokenizer
from ..distributed.sharded_model import ShardedModel
from ..errors import SpecError
from ..interfaces.core_types import AuxLosses, Probe
from ..model_spec import ModelSpec, StackSpec
from ..models import Transformer
from ..nn.attention import Attention
from .recipe import Recipe


class BatchPrefetcher:
    """The training batches of a task in order, prepared by one thread up to `ahead` batches before
    they are needed.

    A batch depends only on its number, so preparing it early changes nothing about it. An error in
    a batch is raised by the step that needs it. Batches from number `stop` on are not prepared.

    >>> from headwise.data import make_task
    >>> task = make_task("copy")
    >>> with BatchPrefetcher(task, 4, ahead=2, stop=3) as batches:
    ...     bool((batches.get(1).x == task.batch(1, 4).x).all())
    True
    """

    def __init__(self, task: Task, size: int, *, ahead: int, stop: int) -> None:
        self._task, self._size, self._ahead, self._stop = task, size, ahead, stop
        self._threads = (
            ThreadPoolExecutor(1, thread_name_prefix="headwise-batches") if ahead else None
        )
        self._pending: deque[tuple[int, Future[Batch]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drop the batches that are not needed; waits for the one that is being prepared."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def get(self, index: int) -> Batch:
        """Return the batch of this number, and have the next ones prepared."""
        if self._threads is None:
            return self._task.batch(index, self._size, "train")
        while self._pending and self._pending[0][0] != index:
            self._pending.popleft()[1].cancel()
        first = self._pending[-1][0] + 1 if self._pending else index
        for number in range(first, max(index + 1, min(index + 1 + self._ahead, self._stop))):
            self._pending.append(
                (number, self._threads.submit(self._task.batch, number, self._size, "train"))
            )
        return self._pending.popleft()[1].result()


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum of -log p(label) over all labels but IGNORE_INDEX, in float32 at least.

    `logits` are [B, T, classes] or [B, classes], `labels` [B, T] or [B]. With label smoothing e,
    the target is 1 - e on the label plus e spread evenly over all classes (1512.00567).

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    >>> round(cross_entropy(logits, torch.tensor([2])).item(), 4)  # log 4
    1.3863
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.reshape(-1, logits.shape[-1]).to(dtype)
    return F.cross_entropy(
        flat,
        labels.reshape(-1),
        ignore_index=IGNORE_INDEX,
        label_smoothing=smoothing,
        reduction="sum",
    )


def count_labels(batch: Batch) -> int:
    """Number of labels in a batch, IGNORE_INDEX left out."""
    return int((batch.labels != IGNORE_INDEX).sum())


def compute_aux_loss(aux_losses: AuxLosses, weights: Sequence[tuple[str, float]]) -> Tensor | float:
    """Weighted sum of auxiliary losses, each summed over layers.

    >>> compute_aux_loss(
    ...     AuxLosses({("0", "balance"): torch.tensor(2.0), ("1", "balance"): torch.tensor(3.0)}),
    ...     [("balance", 0.1)],
    ... )
    tensor(0.5000)
    """
    names = {name for _, name in aux_losses.terms}
    for name, _ in weights:
        if name not in names:
            hint = (
                f"use one of {', '.join(sorted(names))}"
                if names
                else "this model has none, leave aux_losses= out"
            )
            raise SpecError(f"no layer has the auxiliary loss {name!r} of aux_losses=; {hint}")
    return sum((weight * aux_losses.total(name) for name, weight in weights), 0.0)


def split_batch(batch: Batch, count: int) -> Iterator[Batch]:
    """Split the rows of a batch, in order, into at most `count` parts of equal size, the last
    possibly smaller.
    """
    if count == 1:
        yield batch
        return
    rows = len(batch.labels)
    size = -(-rows // count)
    for first in range(0, rows, size):
        yield batch.rows(slice(first, first + size))


def check_batch(batch: Batch, model_spec: ModelSpec, where: str) -> None:
    """Raise ValueError for ids, labels and inputs that would fail inside a kernel, and for batches
    without labels.

    The check is done on the CPU, before the batch is moved to another device.
    """
    if model_spec.heads:
        num_outputs = model_spec.heads[0].outputs
        _check_range(
            batch.labels[batch.labels != IGNORE_INDEX], num_outputs, f"{where} has the label"
        )
    if not count_labels(batch):
        raise ValueError(
            f"{where} has no labels, all are {IGNORE_INDEX}; label at least one position"
        )
    for x, stack in ((batch.x, model_spec.stacks[-1]), (batch.source, model_spec.stacks[0])):
        if x is None:
            continue
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError(f"{where} holds NaN or inf; remove them from the data")
        if stack.embedding and stack.embedding.tokens and not x.is_floating_point():
            _check_range(x, stack.embedding.tokens, f"{where} has the input id")


def _check_range(ids: Tensor, count: int, fact: str) -> None:
    invalid = ids[(ids < 0) | (ids >= count)]
    if len(invalid):
        raise ValueError(
            f"{fact} {int(invalid[0])}, but the model has {count} of them; use 0..{count - 1}"
        )


def check_model(model_spec: ModelSpec, task: Task, tokenizer: str | None = None) -> None:
    """Raise SpecError if the embedding or output sizes of a model do not fit a task.

    They must not be smaller than those of the task's default model. For a task with a tokenizer
    they must be equal, unless `tokenizer`, that of the model, is the same: many models have spare
    rows after their vocabulary.
    """
    default = task.model()
    if (model_spec.kind == "encoder-decoder") != (default.kind == "encoder-decoder"):
        raise SpecError(
            f"{model_spec.name} has kind {model_spec.kind!r}, but {task.name} needs "
            f"{default.kind!r}"
        )
    stacks = zip(
        (model_spec.stacks[0], model_spec.stacks[-1]),
        (default.stacks[0], default.stacks[-1]),
        strict=True,
    )
    sizes = [
        (_vocabulary_size(stack), _vocabulary_size(default_stack), f"the embedding of {stack.name}")
        for stack, default_stack in stacks
    ]
    if model_spec.heads and default.heads:
        head = model_spec.heads[0]
        sizes.append((head.outputs, default.heads[0].outputs, f"the output head {head.name}"))
    for size, required, what in sizes:
        if 0 < size < required:
            raise SpecError(
                f"{what} has {size} rows, but the task has {required} ids; use {required} rows"
            )
        if (
            0 < required < size
            and task.tokenizer is not None
            and not has_same_vocabulary(task.tokenizer, tokenizer)
        ):
            raise SpecError(
                f"{what} has {size} rows, but the task's tokenizer has {required} tokens; use "
                f"{required} rows"
            )


def has_same_vocabulary(document: str | None, other: str | None) -> bool:
    """Whether two tokenizer.json documents map the same tokens to the same ids."""
    if document is None or other is None:
        return False
    return parse_tokenizer(document).get_vocab() == parse_tokenizer(other).get_vocab()


def _vocabulary_size(stack: StackSpec) -> int:
    return stack.embedding.tokens if stack.embedding else 0


# --- Gradients ------------------------------------------------------------------------------------

COMPILE_SECONDS = (
    30.0  # time to compile forward and backward pass for one batch shape on a few CPU cores
)
COMPILE_GAIN = 0.3  # share of the step time that compilation saves in good cases
MIN_GAIN = 0.05  # smaller gains, as a share of the step time, are treated as noise
TRIAL_SECONDS = 1.2  # time limit per option, so that all trials together take about five seconds


@dataclass(frozen=True)
class StepOptions:
    """How a training step is computed, and the reasons for these choices.

    `precision` is "fp32" or "bf16", `compile` "on" or "off". attention="fused" lets each layer
    choose a backend; "plain" runs the operations one by one, which is often faster for short rows
    in bf16. `rows` are "padded", or "packed" with all texts of a batch in one row.
    """

    precision: str
    compile: str
    reasons: tuple[str, ...] = ()
    attention: str = "fused"
    rows: str = "padded"

    @property
    def dtype(self) -> torch.dtype | None:
        """Data type for autocast; None for no autocast."""
        return torch.bfloat16 if self.precision == "bf16" else None


def choose_fastest(seconds: Mapping[tuple[str, str], float]) -> tuple[tuple[str, str], str]:
    """The (precision, attention) with the fewest seconds per step, and the reason; differences
    below 5 % are ignored.

    >>> choose_fastest({("fp32", "fused"): 0.2, ("bf16", "fused"): 0.1})
    (('bf16', 'fused'), 'bf16: 0.1000 s per step, fp32 0.2000')
    >>> choose_fastest({("fp32", "fused"): 0.2, ("fp32", "plain"): 0.199})
    (('fp32', 'fused'), 'fp32: 0.2000 s per step, fp32 with plain attention 0.1990')
    """
    best = next(iter(seconds))
    for option, option_seconds in seconds.items():
        if option_seconds < seconds[best] * (1 - MIN_GAIN):
            best = option
    others = [
        f"{_describe_option(option)} {option_seconds:.4f}"
        for option, option_seconds in seconds.items()
        if option != best
    ]
    return best, ", ".join([f"{_describe_option(best)}: {seconds[best]:.4f} s per step", *others])


def _describe_option(option: tuple[str, str]) -> str:
    precision, attention = option
    return precision if attention == "fused" else f"{precision} with plain attention"


def choose_row_layout(
    padded: StepOptions,
    seconds: float,
    packed_seconds: Mapping[StepOptions, float],
    fill_ratio: float,
) -> tuple[StepOptions, float]:
    """The fastest packed options if they gain enough, otherwise `padded`; and the seconds per step.

    >>> packed = StepOptions("fp32", "off", rows="packed")
    >>> choose_row_layout(StepOptions("fp32", "off"), 0.2, {packed: 0.1}, 0.5)[0].reasons
    ('packed rows: 0.1000 s per step, padded 0.2000 s, 50 % of the rows are padding',)
    """
    if not packed_seconds:
        return replace(
            padded, reasons=(*padded.reasons, "padded rows: a step with packed rows fails")
        ), seconds
    best = min(packed_seconds, key=lambda options: packed_seconds[options])
    best_seconds, padding = packed_seconds[best], f"{1 - fill_ratio:.0%}".replace("%", " %")
    if best_seconds < seconds * (1 - MIN_GAIN):
        reason = (
            f"packed rows: {best_seconds:.4f} s per step, padded {seconds:.4f} s, {padding} "
            "of the rows are padding"
        )
        return replace(best, reasons=(*padded.reasons, reason)), best_seconds
    reason = (
        f"padded rows: {seconds:.4f} s per step, packed {best_seconds:.4f} s, {padding} of "
        "the rows are padding"
    )
    return replace(padded, reasons=(*padded.reasons, reason)), seconds


def decide_compile_trial(seconds: float, steps: int, num_shapes: int = 1) -> tuple[bool, str]:
    """Whether compilation is worth a trial, and the reason: its possible gain must be twice the
    time it takes.

    The time is counted once per batch shape, because each shape is compiled again until a dynamic
    graph is made.

    >>> decide_compile_trial(0.1, steps=600)
    (False, 'not compiled: 600 steps of 0.1000 s could gain about 18 s, compiling takes about 30 s')
    >>> (
    ...     decide_compile_trial(0.1, steps=3000)[0],
    ...     decide_compile_trial(0.1, steps=3000, num_shapes=3)[0],
    ... )
    (True, False)
    """
    gain, cost = seconds * steps * COMPILE_GAIN, COMPILE_SECONDS * num_shapes
    is_worth = gain > 2 * cost
    estimate = (
        f"{steps} steps of {seconds:.4f} s could gain about {gain:.0f} s, compiling takes "
        f"about {cost:.0f} s"
    )
    return is_worth, f"{'worth trying' if is_worth else 'not compiled'}: {estimate}"


def decide_compile(seconds: float, compiled: float, steps: int) -> tuple[str, str]:
    """Whether to use the compiled model, and the reason; the time to compile is already spent and
    does not count.

    >>> decide_compile(0.2, 0.1, steps=50)
    ('on', 'compiled: 0.1000 s per step instead of 0.2000 s, saves 5 s over 50 steps')
    """
    if compiled < seconds * (1 - MIN_GAIN):
        gain = f"saves {(seconds - compiled) * steps:.0f} s over {steps} steps"
        return "on", f"compiled: {compiled:.4f} s per step instead of {seconds:.4f} s, {gain}"
    return "off", f"not compiled: {compiled:.4f} s per step compiled, {seconds:.4f} s without"


# --- One step -------------------------------------------------------------------------------------


class TrainStep:
    """Computes loss and gradients of a batch, with the hyperparameters of a recipe and the given
    step options.
    """

    def __init__(self, sharded_model: ShardedModel, recipe: Recipe, options: StepOptions) -> None:
        self.sharded_model, self.recipe, self.options = sharded_model, recipe, options
        self.net, self.world, self.device = (
            sharded_model.net,
            sharded_model.world,
            sharded_model.world.device,
        )
        if options.compile == "on":
            sharded_model.forward.hidden = torch.compile(self.net.hidden)
        self._terms: dict[tuple[str, str], Tensor] = {}
        if recipe.aux_losses:
            names = [name for name, _ in self.net.spec.attention_specs()]
            self.net.probes = {
                name: Probe(aux_losses=AuxLosses(self._terms, name)) for name in names
            }

    def compute_gradients(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the mean loss over all labels of the batch; returns the loss
        with its terms.

        Every rank computes its share of each part; the mean is over the labels of all ranks.
        """
        total, rows = count_labels(batch), len(batch.labels)
        shards = [
            self.sharded_model.shard(part) for part in split_batch(batch, self.recipe.accumulate)
        ]
        losses: list[Tensor] = []
        with attention_mode(self.net, self.options.attention):
            for n, shard in enumerate(shards, 1):
                loss = self.compute_loss(shard.batch) / total + self._aux_loss() * (
                    shard.rows / rows
                )
                if n == len(shards):
                    self.sharded_model.begin_final_backward()
                loss.backward()
                losses.append(loss.detach())
        self.sharded_model.finish()
        return self.world.sum(torch.stack(losses).sum())

    def compute_loss(self, part: Batch) -> Tensor:
        """Sum of the cross entropy over the labels of a part of a batch."""
        part = pack_batch(part).batch if self.options.rows == "packed" else part
        index, labels = self._scored_positions(part)
        self._terms.clear()
        with autocast(self.options, self.device):
            logits = self.sharded_model.forward(
                part.to(self.device), None if index is None else index.to(self.device)
            )
        check_label_shape(logits, labels)
        return cross_entropy(logits, labels.to(self.device), self.recipe.label_smoothing)

    def _aux_loss(self) -> Tensor | float:
        aux_losses = AuxLosses(self._terms)
        return (
            compute_aux_loss(aux_losses, self.recipe.aux_losses) if self.recipe.aux_losses else 0.0
        )

    def _scored_positions(self, part: Batch) -> tuple[Tensor | None, Tensor]:
        """Flat indices of the labelled positions (None for all), and their labels; the output head
        skips the others.
        """
        heads = self.net.spec.heads
        if part.labels.dim() != 2 or not heads or heads[0].at != "each":
            return None, part.labels
        labels = part.labels.flatten()
        index = (labels != IGNORE_INDEX).nonzero()[:, 0]
        return (None, part.labels) if len(index) == len(labels) else (index, labels[index][None])


@contextmanager
def attention_mode(net: Transformer, mode: str) -> Iterator[None]:
    """Context in which mode="plain" runs every attention with the "dense" backend; "fused" changes
    nothing.
    """
    layers = (
        [module for module in net.modules() if isinstance(module, Attention)]
        if mode == "plain"
        else []
    )
    backend_names = [layer.backend_name for layer in layers]
    for layer in layers:
        layer.backend_name = "dense"
    try:
        yield
    finally:
        for layer, backend_name in zip(layers, backend_names, strict=True):
            layer.backend_name = backend_name


def autocast(options: StepOptions, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast context for the chosen precision."""
    return nullcontext() if options.dtype is None else torch.autocast(device.type, options.dtype)


def check_label_shape(logits: Tensor, labels: Tensor) -> None:
    """Raise ValueError unless there is one label per logits vector."""
    if logits.shape[:-1] != labels.shape:
        logits_shape, labels_shape = list(logits.shape[:-1]), list(labels.shape)
        raise ValueError(
            f"labels have the shape {labels_shape}, but the first output head has logits for "
            f"{logits_shape}; "
            "give one label for each"
        )
