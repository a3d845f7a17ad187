"""In which precision, how attended, whether compiled: measured on a run's first batches, decided by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..data import IGNORE_INDEX, Batch
from ..data.translation import pack_batch
from ..distributed.sharded_model import ShardedModel
from ..interfaces.core_types import AuxLosses
from ..interfaces.probe import Probe
from ..models import Transformer
from ..nn.attention import Attention
from .loss import compute_aux_loss, count_labels, cross_entropy, split_batch
from .recipe import Recipe

COMPILE_SECONDS = 30.0  # seconds that a first graph takes on few cores, backwards included
COMPILE_GAIN = 0.3  # the part of a step that compiling saves where it does well
MIN_GAIN = 0.05  # what is gained must be at least this part of a step, or it is noise
TRIAL_SECONDS = 1.2  # seconds that each way is tried for, so that all trials take about five


@dataclass(frozen=True)
class StepOptions:
    """A precision, "fp32" or "bf16"; compile, "on" or "off"; the reason for each; and how attention runs in training.

    "fused" leaves that to each layer, "plain" is one operation after the other: of short rows in bf16 often faster.
    `rows` are "padded", or "packed" with the texts of a batch one behind the other.
    """

    precision: str
    compile: str
    reasons: tuple[str, ...] = ()
    attention: str = "fused"
    rows: str = "padded"

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in; None for none."""
        return torch.bfloat16 if self.precision == "bf16" else None


def choose_fastest(seconds: Mapping[tuple[str, str], float]) -> tuple[tuple[str, str], str]:
    """The fastest of several ways (precision, attention) by their seconds a step, and why; of equals the first.

    >>> choose_fastest({("fp32", "fused"): 0.2, ("bf16", "fused"): 0.1})
    (('bf16', 'fused'), 'bf16: 0.1000 s a step, fp32 0.2000')
    >>> choose_fastest({("fp32", "fused"): 0.2, ("fp32", "plain"): 0.199})
    (('fp32', 'fused'), 'fp32: 0.2000 s a step, fp32 with plain attention 0.1990')
    """
    best = next(iter(seconds))
    for way, taken in seconds.items():
        if taken < seconds[best] * (1 - MIN_GAIN):
            best = way
    others = [f"{_describe_option(way)} {taken:.4f}" for way, taken in seconds.items() if way != best]
    return best, ", ".join([f"{_describe_option(best)}: {seconds[best]:.4f} s a step", *others])


def _describe_option(way: tuple[str, str]) -> str:
    precision, attention = way
    return precision if attention == "fused" else f"{precision} with plain attention"


def choose_row_layout(
    padded: StepOptions, seconds: float, packed_seconds: Mapping[StepOptions, float], fill_ratio: float
) -> tuple[StepOptions, float]:
    """Rows filled up, or the fastest of those packed, if that gains enough; the reason, and the seconds of a step.

    >>> packed = StepOptions("fp32", "off", rows="packed")
    >>> choose_row_layout(StepOptions("fp32", "off"), 0.2, {packed: 0.1}, 0.5)[0].reasons
    ('packed: 0.1000 s a step instead of 0.2000 s, for 50 % of the rows are padding',)
    """
    if not packed_seconds:
        return replace(padded, reasons=(*padded.reasons, "rows are filled up: a step of packed ones fails")), seconds
    best = min(packed_seconds, key=lambda way: packed_seconds[way])
    took, share = packed_seconds[best], f"{1 - fill_ratio:.0%}".replace("%", " %")
    if took < seconds * (1 - MIN_GAIN):
        told = f"packed: {took:.4f} s a step instead of {seconds:.4f} s, for {share} of the rows are padding"
        return replace(best, reasons=(*padded.reasons, told)), took
    told = f"rows are filled up: {seconds:.4f} s a step, packed {took:.4f} s, though {share} of them are padding"
    return replace(padded, reasons=(*padded.reasons, told)), seconds


def decide_compile_trial(seconds: float, steps: int, num_shapes: int = 1) -> tuple[bool, str]:
    """Whether compiling is worth a trial, and why: what it may gain is twice its time, for it may gain nothing.

    Batches of other shapes are compiled anew, until a graph that takes any is made.

    >>> decide_compile_trial(0.1, steps=600)
    (False, 'not compiled: 600 steps of 0.1000 s could gain about 18 s, compiling takes about 30 s')
    >>> decide_compile_trial(0.1, steps=3000)[0], decide_compile_trial(0.1, steps=3000, num_shapes=3)[0]
    (True, False)
    """
    gain, cost = seconds * steps * COMPILE_GAIN, COMPILE_SECONDS * num_shapes
    worth = gain > 2 * cost
    told = f"{steps} steps of {seconds:.4f} s could gain about {gain:.0f} s, compiling takes about {cost:.0f} s"
    return worth, f"{'worth trying' if worth else 'not compiled'}: {told}"


def decide_compile(seconds: float, compiled: float, steps: int) -> tuple[str, str]:
    """Whether to go on with what was compiled; the time it took is spent either way.

    >>> decide_compile(0.2, 0.1, steps=50)
    ('on', 'compiled: 0.1000 s a step instead of 0.2000 s, 5 s gained over 50 steps')
    """
    if compiled < seconds * (1 - MIN_GAIN):
        gained = f"{(seconds - compiled) * steps:.0f} s gained over {steps} steps"
        return "on", f"compiled: {compiled:.4f} s a step instead of {seconds:.4f} s, {gained}"
    return "off", f"not compiled: {compiled:.4f} s a step when it is, {seconds:.4f} s when not"


# --- One step ------------------------------------------------------------------------------------------


class TrainStep:
    """Gradients of a model by a recipe, computed as a choice says."""

    def __init__(self, sharded_model: ShardedModel, recipe: Recipe, options: StepOptions) -> None:
        self.sharded_model, self.recipe, self.options = sharded_model, recipe, options
        self.net, self.world, self.device = sharded_model.net, sharded_model.world, sharded_model.world.device
        if options.compile == "on":
            sharded_model.path.hidden = torch.compile(self.net.hidden)
        self._terms: dict[tuple[str, str], Tensor] = {}
        if recipe.terms:
            names = [name for name, _ in self.net.spec.attention_specs()]
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
                    self.sharded_model.begin_final_backward()
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
        heads = self.net.spec.heads
        if part.labels.dim() != 2 or not heads or heads[0].at != "each":
            return None, part.labels
        labels = part.labels.flatten()
        index = (labels != IGNORE_INDEX).nonzero()[:, 0]
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
