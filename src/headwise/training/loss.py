"""What is made small: cross entropy where something is asked, and the terms that parts set in the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from ..data import IGNORE_INDEX, Batch, Task
from ..errors import SpecError
from ..interfaces.core_types import AuxLosses
from ..model_spec import ModelSpec, StackSpec


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum over places that ask of -log p(label), in float32 at least; [B, T, classes] or [B, classes].

    With smoothing e the target is 1 - e on the label and e spread over all classes (1512.00567).

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    >>> round(cross_entropy(logits, torch.tensor([2])).item(), 4)  # log 4
    1.3863
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.reshape(-1, logits.shape[-1]).to(exact)
    return F.cross_entropy(
        flat, labels.reshape(-1), ignore_index=IGNORE_INDEX, label_smoothing=smoothing, reduction="sum"
    )


def count_labels(batch: Batch) -> int:
    """How many labels a batch has."""
    return int((batch.labels != IGNORE_INDEX).sum())


def compute_aux_loss(aux_losses: AuxLosses, weights: Sequence[tuple[str, float]]) -> Tensor | float:
    """The terms of a ledger, each summed over layers and times its factor.

    >>> compute_aux_loss(
    ...     AuxLosses({("0", "balance"): torch.tensor(2.0), ("1", "balance"): torch.tensor(3.0)}), [("balance", 0.1)]
    ... )
    tensor(0.5000)
    """
    known = {name for _, name in aux_losses.terms}
    for name, _ in weights:
        if name not in known:
            there = f"the terms here are {', '.join(sorted(known))}" if known else "no part of this model sets one"
            raise SpecError(f"no layer sets the term {name!r}; {there}")
    return sum((factor * aux_losses.total(name) for name, factor in weights), 0.0)


def split_batch(batch: Batch, count: int) -> Iterator[Batch]:
    """The rows of a batch in `count` equal parts, in order; of what an epoch leaves over, in as many as it makes."""
    if count == 1:
        yield batch
        return
    rows = len(batch.labels)
    size = -(-rows // count)
    for first in range(0, rows, size):
        yield batch.rows(slice(first, first + size))


def check_batch(batch: Batch, model_spec: ModelSpec, where: str) -> None:
    """Refuse, while a batch is still in main memory, what would fail inside a kernel or teach nothing."""
    if model_spec.heads:
        known = model_spec.heads[0].outputs
        _check_range(batch.labels[batch.labels != IGNORE_INDEX], known, f"{where} asks for the label")
    if not count_labels(batch):
        raise ValueError(f"{where} asks nothing, every label is {IGNORE_INDEX}; label at least one place")
    for x, stack in ((batch.x, model_spec.stacks[-1]), (batch.source, model_spec.stacks[0])):
        if x is None:
            continue
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError(f"{where} holds numbers that are not finite; take them out of the data")
        if stack.embedding and stack.embedding.tokens and not x.is_floating_point():
            _check_range(x, stack.embedding.tokens, f"{where} holds the id")


def _check_range(ids: Tensor, known: int, fact: str) -> None:
    wrong = ids[(ids < 0) | (ids >= known)]
    if len(wrong):
        raise ValueError(f"{fact} {int(wrong[0])}, but the model has {known} of them; give 0..{known - 1}")


def check_model(model_spec: ModelSpec, task: Task, tokenizer: str | None = None) -> None:
    """Refuse tables that are smaller than those of the task's own model; of another size, where a tokenizer counts.

    A model that `brought` the same tokenizer may have more rows than that knows tokens: many are made so.
    """
    usual = task.model()
    pairs = zip((model_spec.stacks[0], model_spec.stacks[-1]), (usual.stacks[0], usual.stacks[-1]), strict=True)
    sizes = [(_vocabulary_size(own), _vocabulary_size(wanted), f"the table of {own.name}") for own, wanted in pairs]
    if model_spec.heads and usual.heads:
        sizes.append((model_spec.heads[0].outputs, usual.heads[0].outputs, f"the head {model_spec.heads[0].name}"))
    for own, wanted, what in sizes:
        if 0 < own < wanted:
            raise SpecError(f"{what} has {own} rows, the task tells {wanted} ids apart; give it {wanted}")
        if 0 < wanted < own and task.tokenizer is not None and not has_same_vocabulary(task.tokenizer, tokenizer):
            raise SpecError(f"{what} has {own} rows, the task's tokenizer {wanted} tokens; give it {wanted}")


def has_same_vocabulary(document: str | None, other: str | None) -> bool:
    """Whether two documents of tokenizers know the same tokens by the same ids."""
    if document is None or other is None:
        return False
    return Tokenizer.from_str(document).get_vocab() == Tokenizer.from_str(other).get_vocab()


def _vocabulary_size(stack: StackSpec) -> int:
    return stack.embedding.tokens if stack.embedding else 0
