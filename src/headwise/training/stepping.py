"""One step: gradients of a batch, in parts where memory is short, in the precision that was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..models import Transformer
from ..module import Attention
from ..probe import Probe
from ..spread.holding import Holding
from ..tasks import IGNORED, Batch
from ..tasks.packing import pack_batch
from ..terms import AuxLosses
from .choosing import StepOptions
from .loss import count_labels, cross_entropy, split_batch, compute_aux_loss
from .recipe import Recipe


class TrainStep:
    """Gradients of a model by a recipe, computed as a choice says."""

    def __init__(self, sharded_model: Holding, recipe: Recipe, options: StepOptions) -> None:
        self.sharded_model, self.recipe, self.options = sharded_model, recipe, options
        self.net, self.world, self.device = sharded_model.net, sharded_model.world, sharded_model.world.device
        if options.compile == "on":
            sharded_model.path.hidden = torch.compile(self.net.hidden)
        self._terms: dict[tuple[str, str], Tensor] = {}
        if recipe.terms:
            names = [name for name, _ in self.net.described.attention_specs()]
            self.net.probes = {name: Probe(aux_losses=AuxLosses(self._terms, name)) for name in names}

    def compute_gradients(self, batch: Batch) -> Tensor:
        """Set the gradients of the mean loss over all places of the batch that ask; the loss, terms included.

        Every rank takes its share of each part, and counts what is asked of all.
        """
        total, rows = count_labels(batch), len(batch.labels)
        shares = [self.sharded_model.share(part) for part in split_batch(batch, self.recipe.accumulate)]
        losses: list[Tensor] = []
        with attention_mode(self.net, self.options.attention):
            for n, own in enumerate(shares, 1):
                loss = self.compute_loss(own.batch) / total + self._aux_loss() * (own.rows / rows)
                if n == len(shares):
                    self.sharded_model.arm()
                loss.backward()
                losses.append(loss.detach())
        self.sharded_model.finish()
        return self.world.sum(torch.stack(losses).sum())

    def compute_loss(self, part: Batch) -> Tensor:
        """The summed cross entropy of a part."""
        part = pack_batch(part).batch if self.options.rows == "packed" else part
        index, labels = self._scored_positions(part)
        self._terms.clear()
        with autocast(self.options, self.device):
            logits = self.sharded_model.path(part.to(self.device), None if index is None else index.to(self.device))
        check_label_shape(logits, labels)
        return cross_entropy(logits, labels.to(self.device), self.recipe.smoothing)

    def _aux_loss(self) -> Tensor | float:
        ledger = AuxLosses(self._terms)
        return compute_aux_loss(ledger, self.recipe.terms) if self.recipe.terms else 0.0

    def _scored_positions(self, part: Batch) -> tuple[Tensor | None, Tensor]:
        """Which states the head reads, so that it need not read all of them; None for all."""
        heads = self.net.described.heads
        if part.labels.dim() != 2 or not heads or heads[0].at != "each":
            return None, part.labels
        labels = part.labels.flatten()
        index = (labels != IGNORED).nonzero()[:, 0]
        return (None, part.labels) if len(index) == len(labels) else (index, labels[index][None])


@contextmanager
def attention_mode(net: Transformer, mode: str) -> Iterator[None]:
    """With "plain", every attention of a model runs its operations one by one; with "fused", as it chooses itself."""
    layers = [module for module in net.modules() if isinstance(module, Attention)] if mode == "plain" else []
    before = [layer.backend_name for layer in layers]
    for layer in layers:
        layer.backend_name = "dense"
    try:
        yield
    finally:
        for layer, only in zip(layers, before, strict=True):
            layer.backend_name = only


def autocast(choice: StepOptions, device: torch.device) -> AbstractContextManager[Any]:
    """Where products are computed in the chosen precision."""
    return nullcontext() if choice.dtype is None else torch.autocast(device.type, choice.dtype)


def check_label_shape(logits: Tensor, labels: Tensor) -> None:
    """Refuse labels that are not one for each thing that was said."""
    if logits.shape[:-1] != labels.shape:
        said, wanted = list(logits.shape[:-1]), list(labels.shape)
        raise ValueError(f"labels are {wanted}, but the model speaks for {said}; label what its first head reads")
