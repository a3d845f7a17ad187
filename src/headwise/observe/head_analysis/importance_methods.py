"""Methods that estimate the importance of heads, each under the name of its paper, and partial
forward passes.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...models import Transformer
from ...models.block import TransformerLayer
from ..inspect.hooks import (
    AttentionHook,
    ForwardOverride,
    Function,
    OutputHook,
    SiteModule,
    hook_sites,
    override_forwards,
    run_observed,
)
from ..inspect.model_inputs import ModelInputs, map_tensors, run_prepared
from .objectives import EvaluationInput, Objective, get_output_tensor
from .resampling import Array

# --- Forward passes with hooks --------------------------------------------------------------------

ROUNDING_STEPS = 8  # differences of so many steps of floating-point numbers are rounding
MAX_BATCH_BYTES = 2**28  # largest size of the outputs of a batch of ablations


class HeadAblationHook(AttentionHook):
    """Hook that sets the outputs of some heads to zero, in each row of a batch those of its own
    list, and counts the heads of the site.
    """

    def __init__(self, heads_by_row: Sequence[Sequence[int]] = ((),)) -> None:
        self.num_rows = len(heads_by_row)
        self.rows: list[int] = []
        self.heads: list[int] = []
        for row, heads in enumerate(heads_by_row):
            self.rows += [row] * len(heads)
            self.heads += heads
        self.num_heads = 0

    def on_head_outputs(self, outputs: Tensor) -> Tensor:
        """Head outputs [..., heads, channels] with the ablated heads set to zero."""
        self.num_heads = outputs.shape[-2]
        # a text may be several rows of the attention, such as windows of an image
        ablated = outputs.clone().unflatten(0, (self.num_rows, -1))
        ablated[self.rows, ..., self.heads, :] = 0
        return ablated.flatten(0, 1)


class RepeatedForward:
    """Runs a model on one text again and again, with different hooks at its attention sites.

    The outputs of its blocks are kept, so that a later run can begin at the first block with a
    hook. A block is a numbered module that holds a site, or a numbered module beside it.
    """

    def __init__(self, model: nn.Module, sites: Sequence[SiteModule], inputs: ModelInputs) -> None:
        self.model: Any = model
        self.sites = sites
        self.inputs = inputs
        self._head_counters = {module.site.name: HeadAblationHook() for module in sites}
        self._block_of_site: dict[str, nn.Module] = {}
        self._blocks: dict[nn.Module, None] = {}
        for module in sites:
            path = BLOCK_PATH.match(module.site.path)
            if path is not None:
                self._block_of_site[module.site.name] = model.get_submodule(path[0])
                parent = model.get_submodule(path[1] or "")
                siblings = [each for name, each in parent.named_children() if name.isdigit()]
                self._blocks |= dict.fromkeys(siblings)
        self._block_outputs: list[tuple[nn.Module, Any]] = []  # in the order of the first run

    @cached_property
    def baseline_outputs(self) -> Any:
        """Outputs of the unedited model."""

        def record(module: nn.Module, run: Function, args: Any, kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            self._block_outputs.append((module, output))
            return output

        with override_forwards([ForwardOverride(block, record) for block in self._blocks]):
            return run_observed(self.model, self.inputs, self.sites, self._head_counters)

    @property
    def head_counts(self) -> dict[str, int]:
        """Number of heads of each site that the text reaches."""
        _ = self.baseline_outputs
        counts = {name: counter.num_heads for name, counter in self._head_counters.items()}
        return {name: count for name, count in counts.items() if count}

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """Outputs of the model with these hooks, by site name; a headwise model begins at the first
        hooked layer.
        """
        if isinstance(self.model, Transformer):
            return self.run_rows(hooks, 1)
        return run_observed(self.model, self.inputs, self.sites, hooks)

    def run_rows(self, hooks: Mapping[str, AttentionHook], num_rows: int) -> Any:
        """Outputs of the model with these hooks for a batch of equal rows, computed from the first
        hooked block on.
        """
        _ = self.baseline_outputs  # fills the outputs of blocks

        def repeat(tensor: Tensor) -> Tensor:
            is_one_row = tensor.dim() and len(tensor) == 1
            return tensor.expand(num_rows, *tensor.shape[1:]) if is_one_row else tensor

        def replay(module: nn.Module, run: Function, args: Any, kwargs: Any, output: Any) -> Any:
            return map_tensors(repeat, output)

        order: list[nn.Module | None] = [block for block, _ in self._block_outputs]
        hooked = [self._block_of_site.get(name) for name in hooks]
        has_known_blocks = all(order.count(block) == 1 for block in hooked) and not any(
            isinstance(block, TransformerLayer) and block.has_edges for block in order
        )
        first = min(map(order.index, hooked), default=0) if has_known_blocks else 0
        inputs = self.inputs.repeat(num_rows)
        overrides = [
            ForwardOverride(block, replay, (output,))
            for block, output in self._block_outputs[:first]
        ]
        with override_forwards(overrides):
            return run_observed(self.model, inputs, self.sites, hooks)

    def run_ablations(self, hooks: Mapping[str, AttentionHook], num_rows: int) -> Any:
        """Outputs of `max_rows` ablations at most."""
        if self.row_problem:
            return run_observed(self.model, self.inputs, self.sites, hooks)
        return self.run_rows(hooks, num_rows)

    @cached_property
    def max_rows(self) -> int:
        """Number of ablations that may run as rows of one batch; 1 if there is a `row_problem`."""
        sizes: list[int] = []
        map_tensors(lambda tensor: sizes.append(tensor.nbytes), self.baseline_outputs)
        return 1 if self.row_problem else max(1, MAX_BATCH_BYTES // max(1, *sizes))

    @cached_property
    def row_problem(self) -> str:
        """Why ablations cannot be rows of one batch that begins midway; empty if they can.

        The first and the last site are compared with a run of one row: the first shows if rows
        change each other in any layer, the last if outputs of blocks can be replayed.
        """
        for site in dict.fromkeys([*list(self.head_counts)[:1], *list(self.head_counts)[-1:]]):
            try:
                rows = self.run_rows({site: HeadAblationHook([[], [0]])}, 2)
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                return f"a batch of ablations fails ({' '.join(str(error).split())[:120]})"
            single = {site: HeadAblationHook([[0]])}
            alone = run_observed(self.model, self.inputs, self.sites, single)
            for row, expected in enumerate((self.baseline_outputs, alone)):
                if not _is_close(select_row(rows, row, 2), expected):
                    return "its layers mix the rows of a batch"
        return ""


BLOCK_PATH = re.compile(r"(?:(.*?)\.)?\d+(?=\.|$)")


def select_row(outputs: Any, row: int, num_rows: int) -> Any:
    """Outputs of one row of a batch, as a batch of one row."""

    def select(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() and len(tensor) == num_rows
        return tensor[row : row + 1] if has_rows else tensor

    return map_tensors(select, outputs)


def _is_close(outputs: Any, expected: Any) -> bool:
    actual = get_output_tensor(outputs)
    target = get_output_tensor(expected)
    if actual.shape != target.shape:
        return False
    largest = target.abs().max() * torch.finfo(target.dtype).eps ** 0.5
    return bool((actual - target).abs().max() <= largest)


# --- Methods --------------------------------------------------------------------------------------

# site name -> sums [heads] and the counts to divide them by [heads]
ImportanceSums = dict[str, tuple[Array, Array]]


class OutOfTimeError(Exception):
    """The time limit was reached within a text; `sums` has the sites that were finished."""

    def __init__(self, sums: ImportanceSums | None = None) -> None:
        super().__init__()
        self.sums = sums or {}


class ImportanceInput(NamedTuple):
    """One text as a method sees it: its index, repeatable forward pass, targets and objective, and
    when the time of `time.monotonic` is over.
    """

    index: int
    run: RepeatedForward
    evaluation: EvaluationInput
    objective: Objective
    deadline: float = math.inf

    def value(self, outputs: object) -> Tensor:
        """The objective of a model's outputs."""
        baseline = None if self.objective.has_gradient else self.run.baseline_outputs
        return self.objective.value(outputs, baseline, self.evaluation)

    def values_without(self, ablations: Sequence[Mapping[str, Sequence[int]]]) -> Tensor:
        """The objective of the unedited model, and while each of these sets of heads is ablated; a
        set maps site names to head indices. As many sets as fit are rows of one batch.
        """
        values = [self.value(self.run.baseline_outputs)]
        size = self.run.max_rows
        for start in range(0, len(ablations), size):
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            batch = ablations[start : start + size]
            sites = dict.fromkeys(chain.from_iterable(batch))
            hooks = {
                site: HeadAblationHook([ablation.get(site, ()) for ablation in batch])
                for site in sites
            }
            outputs = self.run.run_ablations(hooks, len(batch))
            rows = [select_row(outputs, row, len(batch)) for row in range(len(batch))]
            values += [self.value(row) for row in rows]
        return torch.stack(values)


def drop_rounding(differences: Tensor, baseline: Tensor) -> Array:
    """Set differences of the objective to 0 that are rounding: a head without effect has none in
    any batch.
    """
    rounding = ROUNDING_STEPS * torch.finfo(baseline.dtype).eps * baseline.abs().clamp(min=1)
    return differences.where(differences.abs() > rounding, 0).cpu().double().numpy()


@dataclass(frozen=True)
class ImportanceMethod:
    """A method: a function from `batch_size` texts to sums for the heads of every site, and counts
    to divide by.

    - `needs_gradient`: whether it needs gradients of the objective.
    - `is_tested`: whether its values can have either sign, so that a t test of 0 makes sense.
    - `measured_quantity`: what it measures if it does not use an objective.
    - `note`: added to the notes of every result.
    - `num_forwards`: number of forward passes for a text, from the number of heads; None for few.
    - `unsupported_reason`: why the method cannot be used on a model; empty if it can.
    """

    name: str
    estimate: Callable[..., ImportanceSums]
    needs_gradient: bool = False
    is_tested: bool = False
    measured_quantity: str = ""
    note: str = ""
    batch_size: int = 1
    num_forwards: Callable[[int], int] | None = None
    unsupported_reason: Callable[[nn.Module], str] = lambda _: ""


def leave_one_out(text: ImportanceInput) -> ImportanceSums:
    """Increase of the objective when a single head is ablated; positive if the head helps
    (1905.10650).
    """
    sums: ImportanceSums = {}
    for site, count in text.run.head_counts.items():
        try:
            values = text.values_without([{site: [head]} for head in range(count)])
        except OutOfTimeError:
            raise OutOfTimeError(sums) from None
        sums[site] = (drop_rounding(values[1:] - values[0], values[0]), np.ones(count))
    return sums


def shapley_value(
    text: ImportanceInput, num_permutations: int = 1, seed: int = 0
) -> ImportanceSums:
    """Shapley value (2210.05709): mean contribution of a head to the active heads, over random
    orders of ablation.

    It needs no gradients, and it credits heads that stand in for each other, which leave-one-out
    does not. Each text samples `num_permutations` separate orders. The values of all heads sum
    exactly to the increase of the objective when all heads are ablated.
    """
    heads: list[tuple[str, int]] = []
    sums: ImportanceSums = {}
    for site, count in text.run.head_counts.items():
        heads += [(site, head) for head in range(count)]
        sums[site] = (np.zeros(count), np.ones(count))
    generator = np.random.default_rng((seed, text.index))
    for _ in range(num_permutations):
        order = [heads[n] for n in generator.permutation(len(heads))]
        ablations: list[dict[str, list[int]]] = []  # each with one head more than the one before
        for site, head in order:
            last = ablations[-1] if ablations else {}
            ablations.append({**last, site: [*last.get(site, []), head]})
        values = text.values_without(ablations)
        steps = drop_rounding(values.diff(), values[0])
        for (site, head), step in zip(order, steps, strict=True):
            sums[site][0][head] += step / num_permutations
    return sums


def shapley_method(num_permutations: int = 1, seed: int = 0) -> ImportanceMethod:
    """Return the method of `shapley_value` with these options."""
    estimate = partial(shapley_value, num_permutations=num_permutations, seed=seed)
    return ImportanceMethod(
        "shapley",
        estimate,
        is_tested=True,
        num_forwards=lambda num_heads: num_heads * num_permutations,
    )


# Gradient times activation z_h . dL/dz_h, the derivative of the loss by a mask on head h
# (1905.10650). Three codes take the absolute value at three points, and rank heads differently.


def michel(text: ImportanceInput) -> ImportanceSums:
    """|z_h . dL/dz_h| of each text, as the paper defines it (1905.10650)."""
    gradients = compute_mask_gradients(text)
    return {site: (np.abs(g_TH.sum(0)), np.ones(g_TH.shape[1])) for site, g_TH in gradients.items()}


def michel_code(text: ImportanceInput) -> ImportanceSums:
    """|z_h . dL/dz_h| of each token, averaged over tokens, as in the authors' code."""
    sums: ImportanceSums = {}
    for site, g_TH in compute_mask_gradients(text).items():
        sums[site] = (np.abs(g_TH).sum(0), np.full(g_TH.shape[1], len(g_TH)))
    return sums


def michel_bertology(*texts: ImportanceInput) -> ImportanceSums:
    """|z_h . dL/dz_h| of each batch with one mean loss, over the number of tokens, as in the script
    of transformers for BERT.
    """
    num_targets = sum(text.evaluation.num_targets for text in texts)
    totals: dict[str, Array] = {}
    num_tokens: Counter[str] = Counter()
    for text in texts:
        share = text.evaluation.num_targets / num_targets
        for site, g_TH in compute_mask_gradients(text).items():
            totals[site] = totals.get(site, np.zeros(g_TH.shape[1])) + g_TH.sum(0) * share
            num_tokens[site] += len(g_TH)
    return {
        site: (np.abs(total), np.full(len(total), num_tokens[site]))
        for site, total in totals.items()
    }


def taylor(text: ImportanceInput) -> ImportanceSums:
    """-z_h . dL/dz_h, the first-order estimate of leave-one-out."""
    gradients = compute_mask_gradients(text)
    return {site: (-g_TH.sum(0), np.ones(g_TH.shape[1])) for site, g_TH in gradients.items()}


def compute_mask_gradients(text: ImportanceInput) -> dict[str, Array]:
    """z_h . dL/dz_h at each token, [tokens, heads], by site that the text reaches."""
    run = text.run
    captured: dict[str, list[Tensor]] = {module.site.name: [] for module in run.sites}

    def capture(name: str, z: Tensor) -> Tensor:
        """Keep head outputs; they become leaves of the graph if nothing before them requires
        gradients.
        """
        captured[name].append(z if z.requires_grad else z.detach().requires_grad_())
        return captured[name][-1]

    hooks = {name: OutputHook(partial(capture, name)) for name in captured}
    with torch.enable_grad():
        with hook_sites(run.model, run.sites, hooks):
            result = run_prepared(run.model, run.inputs)
        outputs = list(chain.from_iterable(captured.values()))
        grads = iter(torch.autograd.grad(text.value(result), outputs, materialize_grads=True))
    gradients: dict[str, Array] = {}
    for name, of_site in captured.items():
        products = [(z * next(grads)).sum(-1).flatten(0, -2) for z in of_site]
        if products:
            gradients[name] = torch.cat(products).detach().cpu().double().numpy()
    return gradients
