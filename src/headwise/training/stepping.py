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
from ..tasks.packing import packed
from ..terms import Ledger
from .choosing import Choice
from .loss import asked, cross_entropy, parts_of, weighed
from .recipe import Recipe


class Stepper:
    """Gradients of a model by a recipe, computed as a choice says."""

    def __init__(self, holding: Holding, recipe: Recipe, choice: Choice) -> None:
        self.holding, self.recipe, self.choice = holding, recipe, choice
        self.net, self.world, self.device = holding.net, holding.world, holding.world.device
        if choice.compile == "on":
            holding.path.hidden = torch.compile(self.net.hidden)
        self._terms: dict[tuple[str, str], Tensor] = {}
        if recipe.terms:
            names = [name for name, _ in self.net.described.specs()]
            self.net.probes = {name: Probe(ledger=Ledger(self._terms, name)) for name in names}

    def gradients(self, batch: Batch) -> Tensor:
        """Set the gradients of the mean loss over all places of the batch that ask; the loss, terms included.

        Every rank takes its share of each part, and counts what is asked of all.
        """
        total, rows = asked(batch), len(batch.labels)
        shares = [self.holding.share(part) for part in parts_of(batch, self.recipe.accumulate)]
        losses: list[Tensor] = []
        with attending(self.net, self.choice.attention):
            for n, own in enumerate(shares, 1):
                loss = self.loss(own.batch) / total + self._added() * (own.rows / rows)
                if n == len(shares):
                    self.holding.arm()
                loss.backward()
                losses.append(loss.detach())
        self.holding.finish()
        return self.world.sum(torch.stack(losses).sum())

    def loss(self, part: Batch) -> Tensor:
        """The summed cross entropy of a part."""
        part = packed(part).batch if self.choice.rows == "packed" else part
        index, labels = self._asking(part)
        self._terms.clear()
        with autocast(self.choice, self.device):
            logits = self.holding.path(part.to(self.device), None if index is None else index.to(self.device))
        check_fits(logits, labels)
        return cross_entropy(logits, labels.to(self.device), self.recipe.smoothing)

    def _added(self) -> Tensor | float:
        ledger = Ledger(self._terms)
        return weighed(ledger, self.recipe.terms) if self.recipe.terms else 0.0

    def _asking(self, part: Batch) -> tuple[Tensor | None, Tensor]:
        """Which states the head reads, so that it need not read all of them; None for all."""
        heads = self.net.described.heads
        if part.labels.dim() != 2 or not heads or heads[0].at != "each":
            return None, part.labels
        labels = part.labels.flatten()
        index = (labels != IGNORED).nonzero()[:, 0]
        return (None, part.labels) if len(index) == len(labels) else (index, labels[index][None])


@contextmanager
def attending(net: Transformer, how: str) -> Iterator[None]:
    """With "plain", every attention of a model runs its operations one by one; with "fused", as it chooses itself."""
    layers = [module for module in net.modules() if isinstance(module, Attention)] if how == "plain" else []
    before = [layer.only for layer in layers]
    for layer in layers:
        layer.only = "dense"
    try:
        yield
    finally:
        for layer, only in zip(layers, before, strict=True):
            layer.only = only


def autocast(choice: Choice, device: torch.device) -> AbstractContextManager[Any]:
    """Where products are computed in the chosen precision."""
    return nullcontext() if choice.dtype is None else torch.autocast(device.type, choice.dtype)


def check_fits(logits: Tensor, labels: Tensor) -> None:
    """Refuse labels that are not one for each thing that was said."""
    if logits.shape[:-1] != labels.shape:
        said, wanted = list(logits.shape[:-1]), list(labels.shape)
        raise ValueError(f"labels are {wanted}, but the model speaks for {said}; label what its first head reads")
