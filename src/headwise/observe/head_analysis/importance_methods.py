"""Methods that estimate the importance of heads, each under the name of its paper, and partial
forward passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...models import Transformer
from ...models.block import LayerInputs, LayerStack
from ...models.transformer import resolve_sequence
from ..inspect.hooks import AttentionHook, SiteModule, hook_sites, run_observed, run_prepared
from ..inspect.model_inputs import ModelInputs
from .objectives import EvaluationInput, Objective
from .resampling import Array

# --- Forward passes with hooks --------------------------------------------------------------------

# Arguments of a headwise model with which a forward pass can restart midway.
STACK_ARGUMENTS = frozenset({"x", "sequence", "source", "source_sequence"})


class HeadAblationHook(AttentionHook):
    """Hook that sets the outputs of some heads to zero, and counts the heads of the site."""

    def __init__(self, *heads: int) -> None:
        self.ablated_heads = list(heads)
        self.num_heads = 0

    def on_head_outputs(self, outputs: Tensor) -> Tensor:
        """Head outputs [..., heads, channels] with the ablated heads set to zero."""
        self.num_heads = outputs.shape[-2]
        ablated = outputs.clone()
        ablated[..., self.ablated_heads, :] = 0
        return ablated


class HeadOutputCapture(AttentionHook):
    """Hook that keeps head outputs, for gradients with respect to them."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_head_outputs(self, outputs: Tensor) -> Tensor:
        """Keep the outputs; they become leaves of the graph if nothing before them requires
        gradients.
        """
        outputs = outputs if outputs.requires_grad else outputs.detach().requires_grad_()
        self.outputs.append(outputs)
        return outputs


class RepeatedForward:
    """Runs a model on one text again and again, with different hooks at its attention sites."""

    is_partial = False

    def __init__(self, model: nn.Module, sites: Sequence[SiteModule], inputs: ModelInputs) -> None:
        self.model: Any = model
        self.sites = sites
        self.inputs = inputs
        self._head_counters = {module.site.name: HeadAblationHook() for module in sites}

    @cached_property
    def baseline_outputs(self) -> Any:
        """Outputs of the unedited model."""
        return self._run_baseline(self._head_counters)

    @property
    def head_counts(self) -> dict[str, int]:
        """Number of heads of each site that the text reaches."""
        _ = self.baseline_outputs
        counts = {name: counter.num_heads for name, counter in self._head_counters.items()}
        return {name: count for name, count in counts.items() if count}

    def _run_baseline(self, hooks: Mapping[str, AttentionHook]) -> Any:
        return self.run_with_hooks(hooks)

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """Outputs of the model with these hooks, by site name."""
        return run_observed(self.model, self.inputs, self.sites, hooks)

    def run_with_gradients(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """Outputs of the model with these hooks, with the graph for gradients."""
        with hook_sites(self.model, self.sites, hooks), torch.enable_grad():
            return run_prepared(self.model, self.inputs)


class PartialForward(RepeatedForward):
    """Repeated forward passes of a headwise model that keep the input of every layer and restart at
    the first edited one.
    """

    is_partial = True

    def _run_baseline(self, hooks: Mapping[str, AttentionHook]) -> Tensor:
        self._stacks: list[LayerStack] = list(self.model.stacks.values())
        self.layer_inputs: list[list[Tensor]] = []  # of each stack
        self._calls: list[list[LayerInputs]] = []
        h: Tensor | None = None
        sequence = None
        inputs = stack_inputs(self.inputs.kwargs)[-len(self._stacks) :]
        with hook_sites(self.model, self.sites, hooks), torch.inference_mode():
            for stack, (ids, tokens) in zip(self._stacks, inputs, strict=True):
                x, types = stack.embed(ids)
                source_sequence = sequence
                sequence = resolve_sequence(x, tokens, None)
                call = LayerInputs(sequence, None, None, source_sequence, self.model.probes)
                self._calls.append(_layer_calls(stack, call, h))
                self.layer_inputs.append([])
                h = stack.place(x, sequence, types)
                h = _run_layers(stack, self._calls[-1], h, self.layer_inputs[-1])
            return self._apply_head(h)

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Tensor:
        """Outputs of the model with these hooks, computed from the first hooked layer on."""
        _ = self.baseline_outputs  # fills the inputs of layers
        sites = {module.site.name: module.site for module in self.sites}
        names = [stack.spec.name for stack in self._stacks]
        first, layer = min((names.index(sites[name].stack), sites[name].layer) for name in hooks)
        with hook_sites(self.model, self.sites, hooks), torch.inference_mode():
            start = self.layer_inputs[first][layer]
            h = _run_layers(self._stacks[first], self._calls[first][layer:], start)
            for number in range(first + 1, len(self._stacks)):  # it reads the new outputs
                stack = self._stacks[number]
                calls = _layer_calls(stack, self._calls[number][0], h)
                h = _run_layers(stack, calls, self.layer_inputs[number][0])
            return self._apply_head(h)

    def _apply_head(self, h: Tensor | None) -> Tensor:
        return self.model.apply_head(h, sequence=self.inputs.kwargs.get("sequence"))


def _run_layers(
    stack: LayerStack, calls: Sequence[LayerInputs], h: Tensor, outputs: list[Tensor] | None = None
) -> Tensor:
    """Run the last layers of a stack, and its norm; `kept` receives the input of each layer."""
    for layer, call in zip(stack.blocks[stack.depth - len(calls) :], calls, strict=True):
        if outputs is not None:
            outputs.append(h)
        h = layer(h, call)
    return h if stack.norm is None else stack.norm(h)


def _layer_calls(stack: LayerStack, call: LayerInputs, states: Tensor | None) -> list[LayerInputs]:
    """Return the inputs of each layer except the hidden states.

    Keys and values of another stack's states are projected once.
    """
    sequence = call.source_sequence
    if states is None or sequence is None:
        return [call] * stack.depth
    return [call._replace(source=one.project_source(states, sequence)) for one in stack.blocks]


def stack_inputs(kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Ids and sequence information of the source stack and of the text stack."""
    source = (kwargs.get("source"), kwargs.get("source_sequence"))
    return [source, (kwargs["x"], kwargs.get("sequence"))]


def make_forward(
    model: nn.Module, sites: Sequence[SiteModule], inputs: ModelInputs
) -> RepeatedForward:
    """Return a forward pass that can be repeated: restarted midway for a headwise model, else run
    in full.
    """
    is_native = isinstance(model, Transformer) and not inputs.args
    can_restart = is_native and inputs.kwargs.keys() <= STACK_ARGUMENTS
    return (PartialForward if can_restart else RepeatedForward)(model, sites, inputs)


# --- Methods --------------------------------------------------------------------------------------

# site name -> sums [heads] and the counts to divide them by [heads]
ImportanceSums = dict[str, tuple[Array, Array]]


class ImportanceInput(NamedTuple):
    """One text as a method sees it: its index, repeatable forward pass, targets and objective."""

    index: int
    run: RepeatedForward
    evaluation: EvaluationInput
    objective: Objective

    def value(self, outputs: object) -> Tensor:
        """The objective of a model's outputs."""
        baseline = None if self.objective.has_gradient else self.run.baseline_outputs
        return self.objective.value(outputs, baseline, self.evaluation)

    def value_without(self, ablated_heads: Mapping[str, Sequence[int]]) -> float:
        """The objective while these heads are ablated; `ablated_heads` maps site names to head
        indices.
        """
        hooks = {site: HeadAblationHook(*heads) for site, heads in ablated_heads.items()}
        return float(self.value(self.run.run_with_hooks(hooks)))


@dataclass(frozen=True)
class ImportanceMethod:
    """A method: a function from `batch_size` texts to sums for the heads of every site, and counts
    to divide by.

    - `needs_gradient`: whether it needs gradients of the objective.
    - `is_tested`: whether its values can have either sign, so that a t test of 0 makes sense.
    - `measured_quantity`: what it measures if it does not use an objective.
    - `note`: added to the notes of every result.
    - `unsupported_reason`: why the method cannot be used on a model; empty if it can.
    """

    name: str
    estimate: Callable[..., ImportanceSums]
    needs_gradient: bool = False
    is_tested: bool = False
    measured_quantity: str = ""
    note: str = ""
    batch_size: int = 1
    unsupported_reason: Callable[[nn.Module], str] = lambda _: ""


def leave_one_out(text: ImportanceInput) -> ImportanceSums:
    """Increase of the objective when a single head is ablated; positive if the head helps
    (1905.10650).
    """
    baseline = float(text.value(text.run.baseline_outputs))
    sums: ImportanceSums = {}
    for site, count in text.run.head_counts.items():
        values = [text.value_without({site: [head]}) for head in range(count)]
        sums[site] = (np.array(values) - baseline, np.ones(count))
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
    baseline = float(text.value(text.run.baseline_outputs))
    for _ in range(num_permutations):
        ablated: dict[str, list[int]] = {}
        before = baseline
        for n in generator.permutation(len(heads)):
            site, head = heads[n]
            ablated.setdefault(site, []).append(head)
            after = text.value_without(ablated)
            sums[site][0][head] += (after - before) / num_permutations
            before = after
    return sums


def shapley_method(num_permutations: int = 1, seed: int = 0) -> ImportanceMethod:
    """Return the method of `shapley_value` with these options."""
    estimate = partial(shapley_value, num_permutations=num_permutations, seed=seed)
    return ImportanceMethod("shapley", estimate, is_tested=True)


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
    captures = {module.site.name: HeadOutputCapture() for module in text.run.sites}
    outputs: list[Tensor] = []
    with torch.enable_grad():
        value = text.value(text.run.run_with_gradients(captures))
        for capture in captures.values():
            outputs += capture.outputs
        grads = iter(torch.autograd.grad(value, outputs, materialize_grads=True))
    gradients: dict[str, Array] = {}
    for name, capture in captures.items():
        products = [(z * next(grads)).sum(-1).flatten(0, -2) for z in capture.outputs]
        if products:
            gradients[name] = torch.cat(products).detach().cpu().double().numpy()
    return gradients
