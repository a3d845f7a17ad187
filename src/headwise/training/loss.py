"""The training loss: cross entropy of the labels plus weighted auxiliary losses; checks of batches and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import IGNORE_INDEX, Batch, Task
from ..data.tokenizer_calls import parse_tokenizer
from ..errors import SpecError
from ..interfaces.core_types import AuxLosses
from ..model_spec import ModelSpec, StackSpec


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum of -log p(label) over all labels but IGNORE_INDEX, in float32 at least.

    `logits` are [B, T, classes] or [B, classes], `labels` [B, T] or [B]. With label smoothing e, the target is 1 - e
    on the label plus e spread evenly over all classes (1512.00567).

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    >>> round(cross_entropy(logits, torch.tensor([2])).item(), 4)  # log 4
    1.3863
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.reshape(-1, logits.shape[-1]).to(dtype)
    return F.cross_entropy(
        flat, labels.reshape(-1), ignore_index=IGNORE_INDEX, label_smoothing=smoothing, reduction="sum"
    )


def count_labels(batch: Batch) -> int:
    """Number of labels in a batch, IGNORE_INDEX left out."""
    return int((batch.labels != IGNORE_INDEX).sum())


def compute_aux_loss(aux_losses: AuxLosses, weights: Sequence[tuple[str, float]]) -> Tensor | float:
    """Weighted sum of auxiliary losses, each summed over layers.

    >>> compute_aux_loss(
    ...     AuxLosses({("0", "balance"): torch.tensor(2.0), ("1", "balance"): torch.tensor(3.0)}), [("balance", 0.1)]
    ... )
    tensor(0.5000)
    """
    names = {name for _, name in aux_losses.terms}
    for name, _ in weights:
        if name not in names:
            hint = f"use one of {', '.join(sorted(names))}" if names else "this model has none, leave aux_losses= out"
            raise SpecError(f"no layer has the auxiliary loss {name!r} of aux_losses=; {hint}")
    return sum((weight * aux_losses.total(name) for name, weight in weights), 0.0)


def split_batch(batch: Batch, count: int) -> Iterator[Batch]:
    """Split the rows of a batch, in order, into at most `count` parts of equal size, the last possibly smaller."""
    if count == 1:
        yield batch
        return
    rows = len(batch.labels)
    size = -(-rows // count)
    for first in range(0, rows, size):
        yield batch.rows(slice(first, first + size))


def check_batch(batch: Batch, model_spec: ModelSpec, where: str) -> None:
    """Raise ValueError for ids, labels and inputs that would fail inside a kernel, and for batches without labels.

    The check is done on the CPU, before the batch is moved to another device.
    """
    if model_spec.heads:
        num_outputs = model_spec.heads[0].outputs
        _check_range(batch.labels[batch.labels != IGNORE_INDEX], num_outputs, f"{where} has the label")
    if not count_labels(batch):
        raise ValueError(f"{where} has no labels, all are {IGNORE_INDEX}; label at least one position")
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
        raise ValueError(f"{fact} {int(invalid[0])}, but the model has {count} of them; use 0..{count - 1}")


def check_model(model_spec: ModelSpec, task: Task, tokenizer: str | None = None) -> None:
    """Raise SpecError if the embedding or output sizes of a model do not fit a task.

    They must not be smaller than those of the task's default model. For a task with a tokenizer they must be equal,
    unless `tokenizer`, that of the model, is the same: many models have spare rows after their vocabulary.
    """
    default = task.model()
    if (model_spec.kind == "encoder-decoder") != (default.kind == "encoder-decoder"):
        raise SpecError(f"{model_spec.name} has kind {model_spec.kind!r}, but {task.name} needs {default.kind!r}")
    stacks = zip((model_spec.stacks[0], model_spec.stacks[-1]), (default.stacks[0], default.stacks[-1]), strict=True)
    sizes = [
        (_vocabulary_size(stack), _vocabulary_size(default_stack), f"the embedding of {stack.name}")
        for stack, default_stack in stacks
    ]
    if model_spec.heads and default.heads:
        head = model_spec.heads[0]
        sizes.append((head.outputs, default.heads[0].outputs, f"the output head {head.name}"))
    for size, required, what in sizes:
        if 0 < size < required:
            raise SpecError(f"{what} has {size} rows, but the task has {required} ids; use {required} rows")
        if 0 < required < size and task.tokenizer is not None and not has_same_vocabulary(task.tokenizer, tokenizer):
            raise SpecError(
                f"{what} has {size} rows, but the task's tokenizer has {required} tokens; use {required} rows"
            )


def has_same_vocabulary(document: str | None, other: str | None) -> bool:
    """Whether two tokenizer.json documents map the same tokens to the same ids."""
    if document is None or other is None:
        return False
    return parse_tokenizer(document).get_vocab() == parse_tokenizer(other).get_vocab()


def _vocabulary_size(stack: StackSpec) -> int:
    return stack.embedding.tokens if stack.embedding else 0
