"""One optimisation step: its batch, which a thread prepares ahead, the loss, the gradients, AdamW,
and its FLOPs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.attention import Attention
from ..attention.interfaces.core_types import AuxLosses, Probe
from ..costs.components import list_components
from ..costs.roofline import ForwardCall
from ..kernels.devices import synchronize
from ..models import Transformer
from ..models.distributed.sharded_model import ShardedModel
from ..models.model_spec import ModelSpec, StackSpec, WeightSpec
from ..models.vocabulary import parse_tokenizer
from ..util.errors import SpecError
from .data import IGNORE_INDEX, Batch, Task
from .data.task import pack_batch
from .recipe import Recipe


class BatchPrefetcher:
    """The training batches of a task in order, prepared by one thread up to `ahead` batches before
    they are needed.

    A batch depends only on its number, so preparing it early changes nothing about it. An error in
    a batch is raised by the step that needs it. Batches from number `stop` on are not prepared.

    >>> from headwise.training.data import make_task
    >>> task = make_task("copy")
    >>> with BatchPrefetcher(task, 4, ahead=2, stop=3) as batches:
    ...     bool((batches.get(1).x == task.batch(1, 4).x).all())
    True
    """

    def __init__(self, task: Task, size: int, *, ahead: int, stop: int) -> None:
        self._task = task
        self._size = size
        self._ahead = ahead
        self._stop = stop
        self._threads: ThreadPoolExecutor | None = None
        if ahead:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="headwise-batches")
        self._pending: deque[tuple[int, Future[Batch]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
    """Sum -log p(label) over all labels but IGNORE_INDEX, in float32 at least.

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
    """Count labels in a batch, IGNORE_INDEX left out."""
    return int((batch.labels != IGNORE_INDEX).sum())


def compute_aux_loss(aux_losses: AuxLosses, weights: Sequence[tuple[str, float]]) -> Tensor | float:
    """Weighted sum of auxiliary losses, each summed over layers.

    >>> compute_aux_loss(
    ...     AuxLosses({("0", "balance"): torch.tensor(2.0), ("1", "balance"): torch.tensor(3.0)}),
    ...     [("balance", 0.1)],
    ... )
    tensor(0.5000)
    """
    names = sorted({name for _, name in aux_losses.terms})
    for name, _ in weights:
        if name not in names:
            hint = "this model has none, leave aux_losses= out"
            if names:
                hint = f"use one of {', '.join(names)}"
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

    They must not be smaller than in the task's default model. For a task with a tokenizer they must
    be equal, unless `tokenizer`, the model's, is the same: many models have spare rows after their
    vocabulary.
    """
    default = task.model()
    kinds = (model_spec.kind, default.kind)
    if kinds.count("encoder-decoder") == 1:
        raise SpecError(
            f"{model_spec.name} has kind {model_spec.kind!r}, but {task.name} needs "
            f"{default.kind!r}"
        )
    sizes: list[tuple[str, int, int]] = []
    for n in (0, -1):
        stack = model_spec.stacks[n]
        required = _vocabulary_size(default.stacks[n])
        sizes.append((f"the embedding of {stack.name}", _vocabulary_size(stack), required))
    if model_spec.heads and default.heads:
        head = model_spec.heads[0]
        required = default.heads[0].outputs
        sizes.append((f"the output head {head.name}", head.outputs, required))
    for what, size, required in sizes:
        if 0 < size < required:
            raise SpecError(
                f"{what} has {size} rows, but the task has {required} ids; use {required} rows"
            )
        is_text = task.tokenizer is not None
        if 0 < required < size and is_text and not has_same_vocabulary(task.tokenizer, tokenizer):
            raise SpecError(
                f"{what} has {size} rows, but the task's tokenizer has {required} tokens; use "
                f"{required} rows"
            )


def has_same_vocabulary(document: str | None, other: str | None) -> bool:
    """True if two tokenizer.json documents map the same tokens to the same ids."""
    if document is None or other is None:
        return False
    return parse_tokenizer(document).get_vocab() == parse_tokenizer(other).get_vocab()


def _vocabulary_size(stack: StackSpec) -> int:
    return stack.embedding.tokens if stack.embedding else 0


# --- Gradients ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepOptions:
    """How a training step is computed.

    `precision` is "fp32" or "bf16", `compile` "on" or "off". attention="fused" lets each layer
    choose a backend; "plain" runs the operations one by one, which is often faster for short rows
    in bf16. `rows` are "padded", or "packed" with all texts of a batch in one row.
    """

    precision: str
    compile: str
    attention: str = "fused"
    rows: str = "padded"

    @property
    def dtype(self) -> torch.dtype | None:
        """Data type for autocast; None for no autocast."""
        return torch.bfloat16 if self.precision == "bf16" else None


# --- One step -------------------------------------------------------------------------------------


class TrainStep:
    """Computes loss and gradients of a batch, with the hyperparameters of a recipe and the given
    step options.
    """

    def __init__(self, sharded_model: ShardedModel, recipe: Recipe, options: StepOptions) -> None:
        self.sharded_model = sharded_model
        self.recipe = recipe
        self.options = options
        self.net = sharded_model.net
        self.world = sharded_model.world
        self.device = self.world.device
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
        total = count_labels(batch)
        parts = split_batch(batch, self.recipe.accumulate)
        shards = [self.sharded_model.shard(part) for part in parts]
        losses: list[Tensor] = []
        with attention_mode(self.net, self.options.attention):
            for n, shard in enumerate(shards, 1):
                share = shard.rows / len(batch.labels)
                loss = self.compute_loss(shard.batch) / total
                if self.recipe.aux_losses:
                    terms = compute_aux_loss(AuxLosses(self._terms), self.recipe.aux_losses)
                    loss = loss + terms * share
                if n == len(shards):
                    self.sharded_model.begin_final_backward()
                loss.backward()
                losses.append(loss.detach())
        self.sharded_model.finish()
        return self.world.sum(torch.stack(losses).sum())

    def compute_loss(self, part: Batch) -> Tensor:
        """Sum the cross entropy over the labels of a part of a batch."""
        part = pack_batch(part).batch if self.options.rows == "packed" else part
        index, labels = self._scored_positions(part)
        self._terms.clear()
        with autocast(self.options, self.device):
            logits = self.sharded_model.forward(
                part.to(self.device), None if index is None else index.to(self.device)
            )
        check_label_shape(logits, labels)
        return cross_entropy(logits, labels.to(self.device), self.recipe.label_smoothing)

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
    layers: list[Attention] = []
    if mode == "plain":
        layers = [module for module in net.modules() if isinstance(module, Attention)]
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
        raise ValueError(
            f"labels have the shape {list(labels.shape)}, but the first output head has logits for "
            f"{list(logits.shape[:-1])}; give one label for each"
        )


# --- Parameter groups -----------------------------------------------------------------------------


ParameterGroups = dict[str, dict[str, nn.Parameter]]
# Suffixes of weights that are vectors, one per head, although they have two axes.
VECTOR_NAMES = ("bias", "scale")


def has_weight_decay(weight: WeightSpec, rule: str) -> bool:
    """True if weight decay applies to a weight: a matrix that is not a bias, a scale, or part of a
    norm.

    The expert axis does not count, so one vector per expert is not a matrix. rule="non-embeddings"
    also excludes token and position embeddings.

    >>> from headwise.models.model_spec import FeedForwardSpec
    >>> {
    ...     w.name: has_weight_decay(w, "matrices")
    ...     for w in FeedForwardSpec(7, bias="ud").weights(5, num_experts=3)
    ... }
    {'up': True, 'up_bias': False, 'down': True, 'down_bias': False}
    """
    dimensions = len(weight.shape) - ("expert" in weight.layout.axes)
    if dimensions < 2 or weight.role == "norm" or weight.name.endswith(VECTOR_NAMES):
        return False
    return rule == "matrices" or weight.role != "embedding"


def group_parameters(
    parameters: Mapping[str, nn.Parameter], model_spec: ModelSpec, rule: str
) -> ParameterGroups:
    """Parameters by group; a group is named after role and weight decay, such as "feed, decayed" or
    "norm, kept".
    """
    weights = model_spec.params()
    groups = ParameterGroups()
    for name, parameter in parameters.items():
        weight = weights[name]
        kind = "decayed" if has_weight_decay(weight, rule) else "kept"
        groups.setdefault(f"{weight.role}, {kind}", {})[name] = parameter
    return groups


def get_parameter_name(key: str) -> str:
    """Return the name of the parameter that an optimiser state tensor belongs to.

    >>> get_parameter_name("exp_avg decoder.norm.weight")
    'decoder.norm.weight'
    """
    return key.partition(" ")[2]


# --- AdamW ----------------------------------------------------------------------------------------


class AdamWOptimiser:
    """AdamW (1711.05101): w <- w - lr (weight_decay w + m^ / (sqrt(v^) + eps)), with running means
    m of g and v of g^2. Its state tensors have the names of the parameters.
    """

    def __init__(self, groups: ParameterGroups, recipe: Recipe) -> None:
        self._names = list(chain(*groups.values()))
        param_groups: list[dict[str, Any]] = []
        for name, group in groups.items():
            decay = recipe.weight_decay * ("decayed" in name)
            param_groups.append({"params": list(group.values()), "weight_decay": decay})
        first, second = recipe.betas
        self._optimiser = torch.optim.AdamW(
            param_groups, lr=recipe.lr, betas=(first, second), eps=recipe.eps, fused=True
        )

    def step(self, lr: float) -> None:
        """Take one step with this learning rate and clear the gradients."""
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        self._optimiser.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._optimiser.zero_grad(set_to_none=True)

    @property
    def state_tensors(self) -> dict[str, Tensor]:
        """State tensors by name, such as "exp_avg decoder.norm.weight"; empty before the first
        step.
        """
        states: dict[int, dict[str, Tensor | None]] = self._optimiser.state_dict()["state"]
        named: dict[str, Tensor] = {}
        for n, state in states.items():
            for kind, value in state.items():
                if value is not None:
                    named[f"{kind} {self._names[n]}"] = value
        return named

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load state tensors with the names of `state_tensors`."""
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(" ")
            states.setdefault(self._names.index(name), {})[kind] = value
        groups = self._optimiser.state_dict()["param_groups"]
        self._optimiser.load_state_dict({"state": states, "param_groups": groups})


# --- FLOPs of a step ------------------------------------------------------------------------------

TRAINING_FLOP_FACTOR = (
    3  # the backward pass has two matrix products for each one of the forward pass
)


def count_step_flops(model_spec: ModelSpec, batch: Batch) -> int:
    """FLOPs that one training step on this batch requires; padding counts, recomputed activations
    do not.

    A matrix of n parameters applied to t tokens takes 6 n t FLOPs:

    >>> import torch
    >>> from headwise.models.model_spec import (
    ...     BlockSpec,
    ...     EmbeddingSpec,
    ...     FeedForwardSpec,
    ...     OutputHeadSpec,
    ...     StackSpec,
    ... )
    >>> stack = StackSpec.from_blocks(
    ...     "encoder", 3, [BlockSpec(feed=FeedForwardSpec(7))], embedding=EmbeddingSpec(tokens=11)
    ... )
    >>> batch = Batch(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64))
    >>> count_step_flops(
    ...     ModelSpec("model", "encoder", (stack,), (OutputHeadSpec("tokens", 11),)), batch
    ... ) == 6 * (2 * 3 * 7 + 3 * 11) * 10
    True
    """
    first = model_spec.stacks[0]
    last = model_spec.stacks[-1]
    source = 0
    if batch.source is not None and first is not last:
        source = count_stack_tokens(first, batch.source.shape)
    tokens = count_stack_tokens(last, batch.x.shape)
    call = ForwardCall(len(batch.labels), tokens, source=source)
    other_heads = {f"head.{head.name}" for head in model_spec.heads[1:]}
    forward = 0
    for component in list_components(model_spec):
        if component.name not in other_heads:
            products = component.required_products(call)
            forward += component.times * sum(int(product.flops) for product in products)
    return TRAINING_FLOP_FACTOR * forward


def count_stack_tokens(stack: StackSpec, shape: tuple[int, ...]) -> int:
    """Count tokens per row in a stack, for an input of this shape."""
    embedding = stack.embedding
    if embedding is None or not embedding.patches:
        return shape[1]
    patches = embedding.patches
    return embedding.first + shape[-2] // patches.patch_height * (shape[-1] // patches.patch_width)


def count_batch_tokens(model_spec: ModelSpec, batch: Batch) -> int:
    """Count tokens in the inputs of a model, padding left out."""
    rows = len(batch.labels)
    count = 0
    for stack, x, tokens in (
        (model_spec.stacks[-1], batch.x, batch.tokens),
        (model_spec.stacks[0], batch.source, batch.source_tokens),
    ):
        if x is not None and tokens is None:
            count += rows * count_stack_tokens(stack, x.shape)
        elif tokens is not None:
            count += int(tokens.is_real.sum()) * (rows if len(tokens.is_real) == 1 else 1)
    return count


PEAK_SECONDS = 0.1  # time of the products of one size
# By device, precision and number of threads.
_PEAK_FLOPS: dict[tuple[torch.device, torch.dtype, int], float] = {}


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of the fastest of several matrix products: the reference for the MFU of a
    training step.

    It is measured once per process. Other processes on the machine may still disturb it, so a run
    that reaches more raises its own reference.
    """
    key = (device, dtype, torch.get_num_threads())
    if key not in _PEAK_FLOPS:
        rates = list[float]()
        seconds = 0.0
        for size in (4096, 8192) if device.type == "cuda" else (384, 768, 1536):
            # Without drawing random numbers.
            left, right = torch.ones(2, size, size, device=device, dtype=dtype)
            torch.mm(left, right)
            end = time.perf_counter() + PEAK_SECONDS
            while (start := time.perf_counter()) < end:
                torch.mm(left, right)
                synchronize(device)
                seconds = time.perf_counter() - start
                rates.append(2 * size**3 / seconds)
            if seconds > PEAK_SECONDS:  # larger ones would take seconds
                break
        _PEAK_FLOPS[key] = max(rates)
    return _PEAK_FLOPS[key]
