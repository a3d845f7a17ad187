"""Methods that estimate the importance of heads, each under the name of its paper, and partial
forward passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import suggest
from ..inspect.hooks import AttentionHook, ModelRun, ObservedCall, SiteModule, hook_sites
from ..inspect.model_inputs import ModelInputs
from ..models import Transformer
from ..models.block import LayerInputs, LayerStack
from ..models.transformer import resolve_sequence
from .attention_sinks import stack_texts
from .head_table import HeadImportance
from .objectives import EvaluationInput, Objective
from .resampling import CORRECTION_METHODS, Array, Jackknife, correct_p_values

# Arguments of a headwise model with which a forward pass can restart midway.
STACK_ARGUMENTS = frozenset({"x", "sequence", "source", "source_sequence"})


class HeadAblationHook:
    """Hook that sets the outputs of some heads to zero, and counts the heads of the site."""

    needs_call = False

    def __init__(self, *heads: int) -> None:
        self.ablated_heads = list(heads)
        self.num_heads = 0

    def on_call(self, call: ObservedCall) -> None:
        """Do nothing: weights are not needed."""

    def on_head_outputs(self, outputs: Tensor) -> Tensor:
        """Head outputs [..., heads, channels] with the ablated heads set to zero."""
        self.num_heads = outputs.shape[-2]
        ablated = outputs.clone()
        ablated[..., self.ablated_heads, :] = 0
        return ablated


class HeadOutputCapture:
    """Hook that keeps head outputs, for gradients with respect to them."""

    needs_call = False

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_call(self, call: ObservedCall) -> None:
        """Do nothing: weights are not needed."""

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
        self.model = model
        self.sites = sites
        self.inputs = inputs
        self._head_counters = {module.site.name: HeadAblationHook() for module in sites}
        self._baseline: list[Any] = []

    @property
    def baseline_outputs(self) -> Any:
        """Outputs of the unedited model, computed on first access."""
        if not self._baseline:
            self._baseline.append(self._run_baseline(self._head_counters))
        return self._baseline[0]

    @property
    def head_counts(self) -> dict[str, int]:
        """Number of heads of each site that the text reaches."""
        _ = self.baseline_outputs
        return {
            name: counter.num_heads
            for name, counter in self._head_counters.items()
            if counter.num_heads
        }

    def _run_baseline(self, hooks: Mapping[str, AttentionHook]) -> Any:
        return self.run_with_hooks(hooks)

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """Outputs of the model with these hooks, by site name."""
        return ModelRun(self.model, self.inputs).run_with_hooks(self.sites, hooks)

    def run_with_gradients(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """Outputs of the model with these hooks, with the graph for gradients."""
        with hook_sites(self.model, self.sites, hooks), torch.enable_grad():
            return ModelRun(self.model, self.inputs).run()


class PartialForward(RepeatedForward):
    """Repeated forward passes of a headwise model that keep the input of every layer and restart at
    the first edited one.
    """

    is_partial = True

    def __init__(
        self, model: Transformer, sites: Sequence[SiteModule], inputs: ModelInputs
    ) -> None:
        self.model_network, self.stacks = model, list(model.stacks.values())
        super().__init__(model, sites, inputs)

    def _run_baseline(self, hooks: Mapping[str, AttentionHook]) -> Tensor:
        self.layer_inputs: dict[str, list[Tensor]] = {stack.spec.name: [] for stack in self.stacks}
        self.calls: dict[str, list[LayerInputs]] = {}
        with hook_sites(self.model, self.sites, hooks), torch.inference_mode():
            return self._run_from_start(self.stacks)

    def _run_from_start(self, stacks: Sequence[LayerStack]) -> Tensor:
        h: Tensor | None = None
        source_sequence = None
        stack_inputs = _stack_inputs(self.inputs.kwargs)[-len(stacks) :]
        for stack, (ids, tokens) in zip(stacks, stack_inputs, strict=True):
            name = stack.spec.name
            (x, types) = stack.embed(ids)
            sequence = resolve_sequence(x, tokens, None)
            call = LayerInputs(sequence, None, None, source_sequence, self.model_network.probes)
            self.calls[name] = _layer_calls(stack, call, h)
            embedded = stack.place(x, sequence, types)
            h = _run_layers(stack, self.calls[name], embedded, self.layer_inputs[name].append)
            source_sequence = sequence
        assert h is not None
        return self._apply_head(h)

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Tensor:
        """Outputs of the model with these hooks, computed from the first hooked layer on."""
        sites = {module.site.name: module.site for module in self.sites}
        stack_names = [stack.spec.name for stack in self.stacks]
        _ = self.baseline_outputs  # fills `calls` and `layer_inputs`
        first_stack, first_layer = min(
            (stack_names.index(sites[name].stack), sites[name].layer) for name in hooks
        )
        with hook_sites(self.model, self.sites, hooks), torch.inference_mode():
            return self._run_from_layer(self.stacks[first_stack:], first_layer)

    def _run_from_layer(self, stacks: Sequence[LayerStack], first_layer: int) -> Tensor:
        """Run from a layer of the first of these stacks on; a following stack reads its new
        outputs.
        """
        name = stacks[0].spec.name
        h = _run_layers(
            stacks[0], self.calls[name], self.layer_inputs[name][first_layer], start=first_layer
        )
        for stack in stacks[1:]:
            name = stack.spec.name
            h = _run_layers(
                stack, _layer_calls(stack, self.calls[name][0], h), self.layer_inputs[name][0]
            )
        return self._apply_head(h)

    def _apply_head(self, h: Tensor) -> Tensor:
        return self.model_network.apply_head(h, sequence=self.inputs.kwargs.get("sequence"))


def _run_layers(
    stack: LayerStack,
    calls: Sequence[LayerInputs],
    h: Tensor,
    keep: Callable[[Tensor], object] = id,
    start: int = 0,
) -> Tensor:
    """Run the layers of a stack from `start` on, and its norm; `keep` receives the input of each
    layer.
    """
    for layer, call in zip(stack.blocks[start:], calls[start:], strict=True):
        keep(h)
        h = layer(h, call)
    return h if stack.norm is None else stack.norm(h)


def _layer_calls(stack: LayerStack, call: LayerInputs, states: Tensor | None) -> list[LayerInputs]:
    """Inputs of each layer beside the hidden states; keys and values of another stack's states are
    projected once.
    """
    if states is None:
        return [call] * stack.depth
    assert call.source_sequence is not None
    return [
        call._replace(source=layer.project_source(states, call.source_sequence))
        for layer in stack.blocks
    ]


def _stack_inputs(kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Ids and sequence information of the source stack and of the text stack."""
    return [
        (kwargs.get("source"), kwargs.get("source_sequence")),
        (kwargs["x"], kwargs.get("sequence")),
    ]


def make_forward(
    model: nn.Module, sites: Sequence[SiteModule], inputs: ModelInputs
) -> RepeatedForward:
    """Return a forward pass that can be repeated: restarted midway for a headwise model, else run
    in full.
    """
    if (
        isinstance(model, Transformer)
        and not inputs.args
        and inputs.kwargs.keys() <= STACK_ARGUMENTS
    ):
        return PartialForward(model, sites, inputs)
    return RepeatedForward(model, sites, inputs)


NORMALISATIONS = ("", "layer")
MIN_NORM = 1e-20  # prevents division by zero, with the value of the code of 1905.10650
ImportanceSums = Mapping[
    str, tuple[Array, Array]
]  # site name -> sums [heads] and the counts to divide them by [heads]


@dataclass(frozen=True)
class ImportanceOptions:
    """Options of `estimate_importance` that do not depend on the method.

    - `max_seconds`: time limit; the example that is running when it is reached is dropped.
    - `num_examples`: size of a random sample of the examples; None uses all.
    - `normalisation`: "layer" divides the scores of a site by their l2 norm (1905.10650).
    - `correction`: of p-values for testing all heads: "holm", "bonferroni" or "none".
    - `seed`: of random samples.

    >>> ImportanceOptions(correction="hol")
    Traceback (most recent call last):
    ValueError: unknown correction='hol'; did you mean 'holm'?
    """

    max_seconds: float | None = None
    num_examples: int | None = None
    normalisation: str = ""
    correction: str = "holm"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("normalisation", NORMALISATIONS),
            ("correction", CORRECTION_METHODS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                choices = [choice for choice in allowed if choice]
                raise ValueError(f"unknown {name}={value!r}; {suggest(str(value), choices)}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(
                f"max_seconds must be positive, got {self.max_seconds!r}; leave it out for no limit"
            )
        if self.num_examples is not None and (
            type(self.num_examples) is not int or self.num_examples < 2
        ):
            raise ValueError(f"num_examples must be an integer >= 2, got {self.num_examples!r}")


def rate_heads(
    located_sites: Sequence[SiteModule],
    units: Sequence[ImportanceSums],
    options: ImportanceOptions,
    is_tested: bool,
) -> tuple[HeadImportance, ...]:
    """Turn the sums of all units (texts or batches) into the importance of every head, with
    intervals and p-values.

    With `is_tested`, a t test asks whether the importance is 0; else p-values are NaN. Sites that
    some unit does not reach are left out.
    """
    modules = [one for one in located_sites if all(one.site.name in unit for unit in units)]
    means: list[Jackknife] = []
    p_values: list[Array] = [np.empty(0)]
    for module in modules:
        mean = Jackknife.of_ratio(*stack_texts([unit[module.site.name] for unit in units]))
        means.append(mean)
        p_values.append(mean.p_values() if is_tested else np.full_like(mean.value, math.nan))
    p = np.concatenate(p_values)
    tests = zip(p.tolist(), correct_p_values(p, options.correction).tolist(), strict=True)
    heads: list[HeadImportance] = []
    for module, mean in zip(modules, means, strict=True):
        site = module.site
        score = mean.map(partial(_normalise_scores, options=options))
        group = max(1, len(score.value) // max(1, site.kv))
        columns = (score.value.tolist(), *(end.tolist() for end in score.interval()))
        for head, (value, low, high) in enumerate(zip(*columns, strict=True)):
            place = (site.name, site.stack, site.kind, site.layer, head, head // group)
            heads.append(HeadImportance(*place, value, low, high, *next(tests)))
    return tuple(heads)


def _normalise_scores(scores: Array, options: ImportanceOptions) -> Array:
    if options.normalisation != "layer":
        return scores
    return scores / (np.linalg.norm(scores, axis=-1, keepdims=True) + MIN_NORM)


CheckTime = Callable[[], None]


class TimeLimitReached(Exception):
    """The time limit of an estimate is used up."""


def make_time_check(
    max_seconds: float | None, now: Callable[[], float] = time.monotonic
) -> CheckTime:
    """Return a function that raises TimeLimitReached once `max_seconds` have passed; methods call
    it between runs.
    """
    start = now()

    def check() -> None:
        if max_seconds is not None and now() - start > max_seconds:
            raise TimeLimitReached

    return check


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


Estimate = Callable[[Sequence[ImportanceInput], CheckTime], ImportanceSums]


@dataclass(frozen=True)
class ImportanceMethod:
    """A method: a function from texts to sums for the heads of every site, and counts to divide by.

    - `needs_gradient`: whether it needs gradients of the objective.
    - `is_tested`: whether its values can have either sign, so that a t test of 0 makes sense.
    - `measured_quantity`: what it measures if it does not use an objective.
    - `note`: added to the notes of every result.
    - `batch_size`: texts per call of `estimate`.
    - `unsupported_reason`: why the method cannot be used on a model; empty if it can.
    """

    name: str
    estimate: Estimate
    needs_gradient: bool = False
    is_tested: bool = False
    measured_quantity: str = ""
    note: str = ""
    batch_size: int = 1
    unsupported_reason: Callable[[nn.Module], str] = lambda _: ""


def leave_one_out(texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
    """Increase of the objective when a single head is ablated; positive if the head helps
    (1905.10650).
    """
    text = texts[0]
    baseline = float(text.value(text.run.baseline_outputs))
    changes: dict[str, list[float]] = {}
    for site, count in text.run.head_counts.items():
        for head in range(count):
            check_time()
            changes.setdefault(site, []).append(text.value_without({site: [head]}) - baseline)
    return {site: _as_single_mean(np.array(values)) for site, values in changes.items()}


def shapley_value(
    texts: Sequence[ImportanceInput],
    check_time: CheckTime,
    num_permutations: int = 1,
    seed: int = 0,
) -> ImportanceSums:
    """Shapley value (2210.05709): mean contribution of a head to the active heads, over random
    orders of ablation.

    It needs no gradients, and it credits heads that stand in for each other, which leave-one-out
    does not. Each text samples `num_permutations` orders of its own. The values of all heads sum
    exactly to the increase of the objective when all heads are ablated.
    """
    text = texts[0]
    heads: list[tuple[str, int]] = []
    for site, count in text.run.head_counts.items():
        heads += [(site, head) for head in range(count)]
    values = {site: np.zeros(count) for site, count in text.run.head_counts.items()}
    generator = np.random.default_rng((seed, text.index))
    baseline = float(text.value(text.run.baseline_outputs))
    for _ in range(num_permutations):
        ablated: dict[str, list[int]] = {}
        before = baseline
        for n in generator.permutation(len(heads)):
            check_time()
            site, head = heads[n]
            ablated.setdefault(site, []).append(head)
            after = text.value_without(ablated)
            values[site][head] += (after - before) / num_permutations
            before = after
    return {site: _as_single_mean(sums) for site, sums in values.items()}


# Gradient times activation z_h . dL/dz_h, the derivative of the loss by a mask on head h
# (1905.10650), in four forms; and the first-order estimate of leave-one-out (1611.06440).


def michel(texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
    """Absolute value of gradient times activation, summed over a text, averaged over texts."""
    gradients = compute_activation_gradients(texts[0])
    return {site: _as_single_mean(np.abs(one.sum(0))) for site, (one, _) in gradients.items()}


def michel_code(
    texts: Sequence[ImportanceInput], check_time: CheckTime, last_over_texts: bool = False
) -> ImportanceSums:
    """Absolute values of single tokens, averaged over tokens, as in the authors' code.

    With `last_over_texts`, as in their code for BERT, the last layer is averaged over texts.
    """
    gradients = compute_activation_gradients(texts[0])
    last = list(gradients)[-1] if last_over_texts else ""
    sums: dict[str, tuple[Array, Array]] = {}
    for site, (per_token, _) in gradients.items():
        count = 1 if site == last else len(per_token)
        sums[site] = (np.abs(per_token).sum(0), np.full(per_token.shape[1], count))
    return sums


def michel_batch(texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
    """Absolute value of the sum over a batch with one mean loss, over the number of tokens, as in
    the script of transformers for BERT.
    """
    num_targets = sum(text.evaluation.num_targets for text in texts)
    sums: dict[str, Array] = {}
    tokens: dict[str, int] = {}
    for text in texts:
        check_time()
        share = text.evaluation.num_targets / num_targets
        for site, (per_token, _) in compute_activation_gradients(text).items():
            sums[site] = sums.get(site, 0) + per_token.sum(0) * share
            tokens[site] = tokens.get(site, 0) + len(per_token)
    return {
        site: (np.abs(values), np.full(len(values), float(tokens[site])))
        for site, values in sums.items()
    }


def taylor(texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
    """First-order estimate of leave-one-out, -z_h . dL/dz_h summed over a text."""
    gradients = compute_activation_gradients(texts[0])
    return {site: _as_single_mean(-one.sum(0)) for site, (one, _) in gradients.items()}


def taylor_size(texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
    """Absolute value of the mean of z_h . dL/dz_h over tokens and channels (1611.06440)."""
    gradients = compute_activation_gradients(texts[0])
    return {
        site: _as_single_mean(np.abs(per_token.mean(0)) / head_dim)
        for site, (per_token, head_dim) in gradients.items()
    }


def shapley_method(num_permutations: int = 1, seed: int = 0) -> ImportanceMethod:
    """Return the method of `shapley_value` with these options."""
    estimate = partial(shapley_value, num_permutations=num_permutations, seed=seed)
    return ImportanceMethod("shapley", estimate, is_tested=True)


def michel_batch_method(batch_size: int = 8) -> ImportanceMethod:
    """Return the method of `michel_batch` with this number of texts in a batch."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is too small; give 1 or more")
    gradient: dict[str, Any] = {"needs_gradient": True, "batch_size": batch_size}
    return ImportanceMethod("michel-bertology", michel_batch, **gradient)


def compute_activation_gradients(text: ImportanceInput) -> dict[str, tuple[Array, int]]:
    """Return z_h . dL/dz_h at each token, [tokens, heads], and the width of a head, by site that the
    text reaches.
    """
    captures = {module.site.name: HeadOutputCapture() for module in text.run.sites}
    with torch.enable_grad():
        value = text.value(text.run.run_with_gradients(captures))
        outputs = [z for capture in captures.values() for z in capture.outputs]
        grads = iter(torch.autograd.grad(value, outputs, materialize_grads=True))
    sums: dict[str, tuple[Array, int]] = {}
    for name, capture in captures.items():
        products = [(z * next(grads)).sum(-1).flatten(0, -2) for z in capture.outputs]
        if products:
            per_token = torch.cat(products).detach().double().cpu().numpy()
            sums[name] = (per_token, capture.outputs[0].shape[-1])
    return sums


def _as_single_mean(sums: Array) -> tuple[Array, Array]:
    return sums, np.ones(len(sums))
