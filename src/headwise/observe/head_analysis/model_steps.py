"""The computation of one head for one query in an open model, from the residual stream to the
residual stream.

The model runs once on the tokens; the attention layer then runs again on what it received, in plain
tensor operations and for the one query, and every part of it reports what it changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...attention.attention import Attention
from ...attention.attention_call import CallPlanner
from ...attention.interfaces import OutputStep, Part, QKTransform, ScoreStep
from ...attention.interfaces.core_types import Probe
from ...attention.masking.sequence_info import AttentionMask, SequenceInfo
from ...attention.spec.attention_spec import AttentionSpec
from ...models import Transformer
from ...models.block import LayerInputs, TransformerLayer
from ...models.feed_forward import NormLayer
from ...util.errors import SpecError
from ..inspect.attention_sites import find_attention
from ..inspect.hooks import record_modules
from ..traces.attention_record import Array
from ..traces.head_steps import (
    HeadPlace,
    HeadStep,
    HeadSteps,
    as_float32,
    choose_keys,
    contribution_step,
    gather_step,
    largest_terms,
    mask_step,
    softmax_step,
)
from .head_circuits import AttentionCircuits

NUM_TERMS = 4  # largest products of a sum that are part of a step
TOLERANCE = 2e-3  # relative to the largest number, for half precision
ROTATION = "(a, b) ← (a cos θ - b sin θ, a sin θ + b cos θ) in each plane"
PROBED = ("q", "k", "v", "scores", "weights", "heads")


def model_steps(
    model: Transformer,
    x: Tensor,
    place: HeadPlace,
    *,
    source: Tensor | None = None,
    key: int | None = None,
) -> HeadSteps:
    """All steps of one head for one query; `x` and `source` are the inputs of the model, one row of
    each.

    The vectors of `key` are among those that are shown.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     ),
    ...     seed=0,
    ... ).eval()
    >>> steps = model_steps(
    ...     net, torch.tensor([[3, 1, 4]]), HeadPlace("decoder.0.attention", 1, 2)
    ... ).steps
    >>> [step.name for step in steps]  # doctest: +NORMALIZE_WHITESPACE
    ['residual', 'norm', 'project', 'vectors', 'product', 'scale', 'mask', 'normalise', 'gather', 'contribution',
     'residual_out']
    """
    layer, attention, role = _find_layer(model, place.site)
    reason = why_not(attention.spec)
    if reason:
        raise ValueError(f"cannot compute the steps of {place.site}: {reason}")
    call = _run_model(lambda: model.hidden(x, source=source), layer, role)
    own = _run_query(attention, call, place.query)
    return _Walk(layer, attention, role, place, call, own).collect(key)


def why_not(spec: AttentionSpec) -> str:
    """Why the steps of this layer's heads cannot be separated; empty if they can."""
    combining = [step for _, step in spec.parts_of(OutputStep) if step.combines_rows]
    return f"{combining[0]!r} makes one head of several rows of weights" if combining else ""


# --- Run the model, and the layer for one query ---------------------------------------------------


class _LayerCall(NamedTuple):
    """Inputs and outputs of a layer in a run of the model: tensors of the first row, and its
    positions.
    """

    attention_input: Tensor
    output: Tensor
    sequence: SequenceInfo
    source: Tensor
    source_sequence: SequenceInfo
    norms: Mapping[str, tuple[Tensor, Tensor]]


class _QueryCall(NamedTuple):
    """The tensors of one query: those at probe points, and what each part changed by (name, side),
    before and after.
    """

    probed: Mapping[str, Tensor]
    changes: Mapping[tuple[str, str], tuple[Tensor, Tensor]]


def _find_layer(model: nn.Module, site: str) -> tuple[TransformerLayer, Attention, str]:
    """The layer of a site, its attention, and the role of the attention in the layer."""
    for site_module in find_attention(model):
        if site_module.site.name != site:
            continue
        path, _, role = site_module.site.path.rpartition(".")
        layer = model.get_submodule(path)
        if not isinstance(layer, TransformerLayer) or not isinstance(site_module.module, Attention):
            break
        if layer.attentions.get(role) is not site_module.module or layer.spec.form == "merged":
            break
        return layer, site_module.module, role
    raise ValueError(
        f"{site} is no attention of a layer with a residual stream, so its steps cannot be followed"
    )


def _run_model(run: Callable[[], object], layer: TransformerLayer, role: str) -> _LayerCall:
    """Run the model and keep what one layer receives and computes. Other threads may run the model
    meanwhile.
    """
    attention = layer.attentions[role]
    norms = {name: child for name, child in layer.named_children() if isinstance(child, NormLayer)}
    with torch.inference_mode(), record_modules([layer, attention, *norms.values()]) as calls:
        run()
    if not calls[attention]:
        raise ValueError(f"{layer.name}.{role} did not run on this text")
    call = calls[attention][-1]
    layer_inputs: LayerInputs = calls[layer][-1].args[1]
    source = layer_inputs.source
    source_sequence = layer_inputs.source_sequence
    if role == "attention":  # the tokens themselves are the source
        source = call.args[0]
        source_sequence = layer_inputs.sequence
    if not isinstance(source, Tensor) or source_sequence is None:
        raise ValueError(
            f"the source of {layer.name}.{role} was projected before, so its states are unknown"
        )
    norm_calls = {
        name: (calls[norm][-1].args[0], calls[norm][-1].output)
        for name, norm in norms.items()
        if calls[norm]
    }
    return _LayerCall(
        call.args[0], call.output, layer_inputs.sequence, source, source_sequence, norm_calls
    )


def _run_query(attention: Attention, call: _LayerCall, query: int) -> _QueryCall:
    """Run an attention layer again for one query, which attends to all tokens that it attended to
    in the model.
    """
    changes: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def observe(name: str, side: str, before: Tensor, after: Tensor) -> None:
        changes[name, side] = (before, after)

    x = call.attention_input
    count = x.shape[1]
    if not 0 <= query < count:
        raise ValueError(f"there is no query {query}; give one in 0..{count - 1}")
    # A single query may run in another form (latent attention), so a second one goes along.
    queries = [query] if count == 1 else [query, query - 1 if query else 1]
    observed = attention.observed(observe)
    probe = Probe(*PROBED)
    if observed.spec.source is None:  # the tokens themselves are the source
        observed.spec = replace(observed.spec, source=observed.spec.model)
        observed.planner = CallPlanner(observed.spec)
    with torch.inference_mode():
        source = observed.project_source(call.source, sequence=call.source_sequence)
        y = observed(
            x[:, queries], source=source, sequence=_take(call.sequence, queries), probe=probe
        )
    _check_equal(y[0, 0], call.output[0, query])
    return _QueryCall(probe.tensors, changes)


def _take(sequence: SequenceInfo, queries: list[int]) -> SequenceInfo:
    return SequenceInfo(sequence.position[:, queries], sequence.segment[:, queries], checked=True)


def _check_equal(actual: Tensor, expected: Tensor) -> None:
    """Refuse steps that do not lead to the output of the model."""
    actual = actual.float()
    expected = expected.float()
    error = float((actual - expected).abs().max())
    if not error <= TOLERANCE * max(float(expected.abs().max()), 1e-6):
        raise ValueError(
            f"the steps lead to another output than the model's (by {error:.2g}), so they are not "
            "shown"
        )


# --- The steps ------------------------------------------------------------------------------------


class _Walk:
    """Collects the steps of one head in order."""

    def __init__(
        self,
        layer: TransformerLayer,
        attention: Attention,
        role: str,
        place: HeadPlace,
        call: _LayerCall,
        own: _QueryCall,
    ) -> None:
        self.layer = layer
        self.attention = attention
        self.role = role
        self.place = place
        self.call = call
        self.own = own
        spec = attention.spec
        self.spec, core = spec, spec.core_of(spec.projection_form(one=False))
        outputs = spec.score_head_of_output
        if not 0 <= place.head < len(outputs):
            raise ValueError(
                f"{place.site} has no head {place.head}; give one in 0..{len(outputs) - 1}"
            )
        self.score_head = outputs[place.head]
        self.core_head = spec.core_score_heads.index(
            self.score_head
        )  # the head's place in scores and weights
        self.key_head = core.key_head_of_query[self.core_head]
        self.value_head = core.value_head_of_row[place.head]
        self.weights = as_array(own.probed["weights"][0, place.head, 0])
        self.missing: dict[str, str] = {}

    def collect(self, key: int | None) -> HeadSteps:
        """All steps."""
        allowed = self._allowed()
        self.shown = choose_keys(self.weights, allowed, key)
        steps = [
            *self._input_steps(),
            *self._projections(),
            *self._scores(),
            mask_step(allowed),
            *self._weight_steps(),
            *self._output_steps(),
        ]
        positions = np.arange(len(self.weights), dtype=np.int32)
        return HeadSteps(self.place, "model", tuple(steps), positions, self.shown, self.missing)

    def _allowed(self) -> Array:
        """Which keys the query may attend to."""
        queries = _take(self.call.sequence, [self.place.query])
        allowed = AttentionMask(
            queries, self.call.source_sequence, self.spec.pattern, None
        ).allowed[0, :, 0]
        own = allowed[self.score_head if len(allowed) > 1 else 0]
        return np.asarray(own.expand(len(self.weights)).cpu().numpy(), bool)

    # --- before the scores ------------------------------------------------------------------------

    def _norm_before(self) -> str:
        """The name of the norm before the attention; empty if there is none."""
        name = {"parallel": "norm", "post": "", "after": ""}.get(
            self.layer.placement, f"{self.role}_norm"
        )
        return name if name in self.call.norms else ""

    def _input_steps(self) -> Iterator[HeadStep]:
        query = self.place.query
        name = self._norm_before()
        received = self.call.attention_input[0, query]
        x = self.call.norms[name][0][0, query] if name else received
        yield HeadStep("residual", "x, the residual stream of this token", {"out": as_array(x)})
        if name:
            yield self._norm_step("norm", name, query)

    def _norm_step(self, step: str, name: str, query: int) -> HeadStep:
        norm = self.layer.get_submodule(name)
        assert isinstance(norm, NormLayer)
        x, n = (tensor[0, query] for tensor in self.call.norms[name])
        values = as_array(x).astype(np.float64)
        facts = {"eps": float(norm.eps)}
        arrays = {"in": as_array(x), "out": as_array(n)}
        for key in ("weight", "bias"):
            tensor = norm.get_weight(key)
            if tensor is not None:
                arrays[key] = as_array(tensor) + np.float32(
                    norm.kind == "offset" and key == "weight"
                )
        if norm.kind in ("rms", "offset"):
            facts["rms"] = float(np.sqrt(np.mean(values**2) + norm.eps))
            formula = "n = x / rms(x) · w"
        else:
            facts |= {"mean": float(values.mean()), "std": float(np.sqrt(values.var() + norm.eps))}
            formula = "n = (x - mean(x)) / std(x)" + (" · w" if "weight" in arrays else "")
            formula += " + b" if "bias" in arrays else ""
        return HeadStep(step, formula, arrays, facts, f"{norm.kind} norm")

    def _projections(self) -> Iterator[HeadStep]:
        """The projection, each transform of queries and keys, and the vectors that are compared."""
        transforms = [(name, part) for name, part in self.spec.parts_of(QKTransform)]
        project = self.attention.spec.project
        raw = {side: self._vectors(self._first(side, transforms), side) for side in "qkv"}
        final = {side: self._vectors(self.own.probed[side], side) for side in "qkv"}
        if raw["q"] is None or raw["k"] is None:
            self.missing["project"] = (
                f"{project!r} transforms parts of its vectors before it joins them"
            )
        else:
            arrays = {side: vectors for side, vectors in raw.items() if vectors is not None}
            yield HeadStep(
                "project",
                "q = n W_Q, k = n W_K, v = n W_V",
                arrays | self._query_terms(),
                part=repr(project),
            )
            for name, part in transforms:
                yield self._transform_step(name, part)
        yield HeadStep(
            "vectors",
            "q and k as attention compares them",
            {side: vectors for side, vectors in final.items() if vectors is not None},
        )

    def _first(self, side: str, transforms: list[tuple[str, QKTransform]]) -> Tensor:
        """Queries, keys or values before any transform."""
        names = [name for name, _ in transforms if (name, side) in self.own.changes]
        return self.own.changes[names[0], side][0] if names else self.own.probed[side]

    def _vectors(self, tensor: Tensor, side: str) -> Array | None:
        """The vectors of this head, [K] of the query or [shown keys, K]; None for a tensor of
        another layout.
        """
        like = self.own.probed[side]
        if tensor.shape != like.shape:
            return None
        if side == "q":
            return as_array(tensor[0, 0, self.score_head])
        group = self.key_head if side == "k" else self.value_head
        return as_array(tensor[0, :, group])[self.shown]

    def _transform_step(self, name: str, part: QKTransform) -> HeadStep:
        arrays: dict[str, Array] = {}
        for side in "qkv":
            if (name, side) in self.own.changes:
                before, after = (
                    self._vectors(tensor, side) for tensor in self.own.changes[name, side]
                )
                if before is not None and after is not None:
                    arrays |= {f"{side}_in": before, side: after}
        weights = {key: self.attention.weights[name][key] for key in part.params(self.spec)}
        planes = part.symmetry(self.spec, "k", weights).planes
        if planes:
            arrays["planes"] = np.array(planes, np.int32)
        formula = ROTATION if planes else describe_part(part)
        return HeadStep("transform", formula, arrays, part=repr(part))

    def _query_terms(self) -> dict[str, Array]:
        """The largest products in each channel of the query, where the projection is one matrix."""
        circuits = AttentionCircuits(self.place.site, self.attention, ())
        try:
            matrix = as_array(circuits.qk_circuit(self.score_head).left)
        except (SpecError, ValueError):
            return {}
        return largest_terms(
            as_array(self.call.attention_input[0, self.place.query]), matrix, NUM_TERMS
        )

    # --- scores and weights -----------------------------------------------------------------------

    def _scores(self) -> Iterator[HeadStep]:
        """The similarity, and every part that changes scores."""
        similarity = self.spec.similarity
        changes = self._changes("scores")
        first = changes[0][1] if changes else self.own.probed["scores"]
        scores = as_array(first[0, self.core_head, 0])
        scale = similarity.score_scale(self.spec.core_of(self.spec.projection_form(one=False)))
        q = self.own.probed["q"][0, 0, self.score_head]
        k = self.own.probed["k"][0, :, self.key_head]
        products = (
            as_array(k.double() @ q.double()) if q.shape[-1] == k.shape[-1] else scores * np.nan
        )
        if np.allclose(
            products * scale, scores, rtol=1e-3, atol=1e-3 * float(np.abs(scores).max(initial=0))
        ):
            yield HeadStep("product", "pⱼ = q · kⱼ", {"out": products})
            yield HeadStep(
                "scale", "sⱼ = scale · pⱼ", {"out": scores}, {"scale": scale}, repr(similarity)
            )
        else:
            yield HeadStep(
                "product",
                describe_part(similarity),
                {"out": scores},
                {"scale": scale},
                repr(similarity),
            )
        yield from (self._change_step("score_step", *change) for change in changes)

    def _changes(self, side: str) -> list[tuple[str, Tensor, Tensor]]:
        """Tensors that parts changed on one side, in order: name, before, after."""
        return [(name, *pair) for (name, where), pair in self.own.changes.items() if where == side]

    def _change_step(self, step: str, name: str, before: Tensor, after: Tensor) -> HeadStep:
        """A part that changes scores or weights of this head."""
        part = dict(self.spec.parts())[name]
        old = as_array(before[0, self.core_head, 0])
        new = as_array(after[0, self.core_head, 0])
        arrays = {"in": old, "out": new}
        if isinstance(part, ScoreStep) and part.additive:
            arrays["added"] = new - old
        facts = {
            key: float(value)
            for key, value in vars(part).items()
            if isinstance(value, (int, float))
        }
        return HeadStep(step, describe_part(part), arrays, facts, repr(part))

    def _weight_steps(self) -> Iterator[HeadStep]:
        normaliser = self.spec.normaliser
        changes = self._changes("weights")
        first = changes[0][1] if changes else self.own.probed["weights"]
        weights = as_array(first[0, self.core_head if changes else self.place.head, 0])
        numbers = self.attention.weights["normaliser"].head(self.score_head)
        facts = {
            name: float(value.detach()) for name, value in numbers.items() if value.numel() == 1
        }
        is_softmax = normaliser.shift_invariant and normaliser.always_sums_to_one()
        if is_softmax or "sink" in facts:
            yield softmax_step(weights, facts.get("sink"), repr(normaliser))
        else:
            total = {"sum": float(weights.sum(dtype=np.float64))}
            yield HeadStep(
                "normalise",
                describe_part(normaliser),
                {"out": weights},
                facts | total,
                repr(normaliser),
            )
        yield from (self._change_step("weight_step", *change) for change in changes)

    # --- outputs ----------------------------------------------------------------------------------

    def _output_steps(self) -> Iterator[HeadStep]:
        """The weighted sum, parts that change the head's output, its slice of W_O, and the residual
        stream.
        """
        head = self.place.head
        changes = [
            (name, *pair)
            for (name, side), pair in self.own.changes.items()
            if side in ("outputs", "gates")
        ]
        z = as_array((changes[0][1] if changes else self.own.probed["heads"])[0, 0, head])
        values = as_array(self.own.probed["v"][0, :, self.value_head])
        if values.shape[-1] == z.shape[-1]:
            yield gather_step(self.weights, values, self.shown, z)
        else:
            self.missing["gather"] = (
                f"{self.spec.project!r} expands the values after they are summed"
            )
        for name, before, after in changes:
            part = dict(self.spec.parts())[name]
            arrays = {"in": as_array(before[0, 0, head]), "out": as_array(after[0, 0, head])}
            yield HeadStep("output_step", describe_part(part), arrays, part=repr(part))
        z = as_array(self.own.probed["heads"][0, 0, head])
        matrix = as_array(AttentionCircuits(self.place.site, self.attention, ()).output_map(head))
        contribution = contribution_step(z, matrix, NUM_TERMS)
        yield contribution
        yield from self._residual_steps(contribution.arrays["out"])

    def _residual_steps(self, own: Array) -> Iterator[HeadStep]:
        """The sum of all heads and the bias, the norm behind it if there is one, and the new
        residual stream.
        """
        layer = self.layer
        query = self.place.query
        placement = self.layer.placement
        heads = self.own.probed["heads"]
        with torch.inference_mode():
            bias = as_array(self.attention.merge_heads(torch.zeros_like(heads))[0, 0])
        y = as_array(self.call.output[0, query])
        others = as_float32(y.astype(np.float64) - own - bias)
        name = self._norm_before()
        x = as_array((self.call.norms[name][0] if name else self.call.attention_input)[0, query])
        scale = float(layer.scale)
        arrays = {"in": x, "own": own, "others": others, "bias": bias}
        facts = {"scale": scale}
        times = "" if scale == 1 else f"{scale:g} · "
        formula = f"x ← x + {times}(c + other heads + b_O)"
        after = {
            "post": f"{self.role}_norm",
            "after": f"{self.role}_norm",
            "sandwich": f"{self.role}_norm_after",
        }
        behind = after.get(placement, "")
        if placement in ("after", "sandwich") and behind in self.call.norms:
            yield HeadStep("sum", "y = c + other heads + b_O", {**arrays, "out": y}, facts)
            yield self._norm_step("norm_after", behind, query)
            normed = as_array(self.call.norms[behind][1][0, query])
            yield HeadStep(
                "residual_out", "x ← x + n", {"in": x, "added": normed, "out": x + normed}
            )
            return
        yield HeadStep(
            "residual_out", formula, {**arrays, "out": as_float32(x + np.float32(scale) * y)}, facts
        )
        if placement == "post" and behind in self.call.norms:
            yield self._norm_step("norm_after", behind, query)


def as_array(tensor: Tensor) -> Array:
    """The tensor as an array of float32."""
    return as_float32(tensor.detach().float().cpu().numpy())


def describe_part(part: Part) -> str:
    """The rule of a part: the first sentence of its documentation.

    >>> from headwise.attention.parts.softcap import Softcap
    >>> describe_part(Softcap(5.0))
    's -> limit tanh(s / limit): limits scores smoothly to (-limit, limit)'
    """
    text = " ".join(inspect.cleandoc(type(part).__doc__ or repr(part)).split("\n\n")[0].split())
    sentence = text.split(". ")[0].removesuffix(".")
    head, _, paper = sentence.rpartition(" (")
    return (
        head if head and any(sign.isdigit() for sign in paper) and paper.endswith(")") else sentence
    )
