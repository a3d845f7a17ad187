"""The computation of one head for one query in an open model, from the residual stream to the
residual stream.

The model runs once on the tokens; the attention layer then runs again on what it received, in plain
tensor operations and for the one query, and every part of it reports what it changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...attention.attention import Attention
from ...attention.attention_call import CallPlanner
from ...attention.interfaces import OutputStep, Part, QKTransform, ScoreStep
from ...attention.interfaces.core_types import Probe
from ...attention.masking.sequence_info import AttentionMask, SequenceInfo
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
    ['residual', 'norm', 'project', 'vectors', 'product', 'scale', 'mask', 'normalise', 'gather',
    'contribution',
     'residual_out']
    """
    layer, attention, role = _find_layer(model, place.site)
    combining = [step for _, step in attention.spec.parts_of(OutputStep) if step.combines_rows]
    if combining:
        reason = f"{combining[0]!r} makes one head of several rows of weights"
        raise ValueError(f"cannot compute the steps of {place.site}: {reason}")
    walk = _Walk(layer, attention, role, place)
    walk.run_model(lambda: model.hidden(x, source=source))
    walk.run_query()
    return walk.collect(key)


def _find_layer(model: nn.Module, site: str) -> tuple[TransformerLayer, Attention, str]:
    """The layer of a site, its attention, and the role of the attention in the layer."""
    for site_module in find_attention(model):
        if site_module.site.name != site:
            continue
        path, _, role = site_module.site.path.rpartition(".")
        layer = model.get_submodule(path)
        if not isinstance(layer, TransformerLayer) or not isinstance(site_module.module, Attention):
            break
        if role == "attention" and layer.kv_from_elsewhere:
            raise ValueError(
                f"cannot follow the steps of {site} from its input: {layer.kv_from_elsewhere}"
            )
        if layer.attentions.get(role) is site_module.module and layer.spec.form != "merged":
            return layer, site_module.module, role
    raise ValueError(
        f"{site} is no attention of a layer with a residual stream, so its steps cannot be followed"
    )


def _take(sequence: SequenceInfo, queries: list[int]) -> SequenceInfo:
    return SequenceInfo(sequence.position[:, queries], sequence.segment[:, queries], checked=True)


# --- The steps ------------------------------------------------------------------------------------

# The norm before an attention and the norm after it by placement, where they have other names than
# "{role}_norm" and none.
NORM_BEFORE = {"parallel": "norm", "post": "", "post_sublayer": ""}
NORM_AFTER = {"post": "{}_norm", "post_sublayer": "{}_norm", "sandwich": "{}_norm_after"}


class _Walk:
    """Runs the model, then the layer for one query, and collects the steps of one head in order.

    `norms` are inputs and outputs of the layer's norms, `probed` the tensors at probe points, and
    `changes` what each part changed, by (name, side): the tensors before and after.
    """

    attention_input: Tensor
    output: Tensor
    sequence: SequenceInfo
    source_sequence: SequenceInfo
    probed: Mapping[str, Tensor]

    def __init__(
        self, layer: TransformerLayer, attention: Attention, role: str, place: HeadPlace
    ) -> None:
        self.layer = layer
        self.attention = attention
        self.role = role
        self.place = place
        self.spec = attention.spec
        self.circuits = AttentionCircuits(place.site, attention, ())
        self.norms: dict[str, tuple[Tensor, Tensor]] = {}
        self.changes: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self.missing: dict[str, str] = {}
        self.steps: list[HeadStep] = []

    def run_model(self, run: Callable[[], object]) -> None:
        """Run the model and keep what the layer receives and computes. Other threads may run the
        model meanwhile.
        """
        layer = self.layer
        norms = {name: one for name, one in layer.named_children() if isinstance(one, NormLayer)}
        modules = [layer, self.attention, *norms.values()]
        with torch.inference_mode(), record_modules(modules) as calls:
            run()
        if not calls[self.attention]:
            raise ValueError(f"{layer.name}.{self.role} did not run on this text")
        call = calls[self.attention][-1]
        inputs: LayerInputs = calls[layer][-1].args[1]
        source = inputs.source
        source_sequence = inputs.source_sequence
        if self.role == "attention":  # the tokens themselves are the source
            source = call.args[0]
            source_sequence = inputs.sequence
        if not isinstance(source, Tensor) or source_sequence is None:
            raise ValueError(
                f"the source of {layer.name}.{self.role} was projected before, so its states are "
                "unknown"
            )
        for name in [name for name, norm in norms.items() if calls[norm]]:
            of_norm = calls[norms[name]][-1]
            self.norms[name] = (of_norm.args[0], of_norm.output)
        self.attention_input = call.args[0]
        self.output = call.output
        self.source = source
        self.sequence = inputs.sequence
        self.source_sequence = source_sequence

    def run_query(self) -> None:
        """Run the attention again for one query, which attends to all tokens that it attended to in
        the model.
        """
        query = self.place.query
        count = self.attention_input.shape[1]
        if not 0 <= query < count:
            raise ValueError(f"there is no query {query}; give one in 0..{count - 1}")
        # A single query may run in another form (latent attention), so a second one goes along.
        queries = [query] if count == 1 else [query, query - 1 if query else 1]

        def observe(name: str, side: str, before: Tensor, after: Tensor) -> None:
            self.changes[name, side] = (before, after)

        observed = self.attention.observed(observe)
        probe = Probe(*PROBED)
        if self.spec.source is None:  # the tokens themselves are the source
            observed.spec = replace(self.spec, source=self.spec.model)
            observed.planner = CallPlanner(observed.spec)
        with torch.inference_mode():
            source = observed.project_source(self.source, sequence=self.source_sequence)
            sequence = _take(self.sequence, queries)
            x = self.attention_input[:, queries]
            y = observed(x, source=source, sequence=sequence, probe=probe)
        expected = self.output[0, query].float()
        error = float((y[0, 0].float() - expected).abs().max())
        if not error <= TOLERANCE * max(float(expected.abs().max()), 1e-6):
            raise ValueError(
                f"the steps lead to another output than the model's (by {error:.2g}), so they are "
                "not shown"
            )
        self.probed = probe.tensors
        num_heads = len(self.spec.score_head_of_output)
        if not 0 <= self.place.head < num_heads:
            raise ValueError(
                f"{self.place.site} has no head {self.place.head}; give one in 0..{num_heads - 1}"
            )

    def add(
        self,
        name: str,
        formula: str,
        arrays: Mapping[str, Tensor | Array],
        facts: Mapping[str, float] = MappingProxyType({}),
        part: object = "",
    ) -> None:
        """Add a step; its tensors become arrays."""
        plain = {
            key: as_array(one) if isinstance(one, Tensor) else one for key, one in arrays.items()
        }
        self.steps.append(HeadStep(name, formula, plain, dict(facts), str(part and repr(part))))

    def collect(self, key: int | None) -> HeadSteps:
        """All steps."""
        self.core = self.spec.core_of(self.spec.projection_form(one=False))
        self.score_head = self.spec.score_head_of_output[self.place.head]
        # the head's place in scores and weights
        self.core_head = self.spec.core_score_heads.index(self.score_head)
        self.key_head = self.core.key_head_of_query[self.core_head]
        self.value_head = self.core.value_head_of_row[self.place.head]
        self.weights = as_array(self.probed["weights"][0, self.place.head, 0])
        queries = _take(self.sequence, [self.place.query])
        pattern = self.spec.pattern
        mask = AttentionMask(queries, self.source_sequence, pattern, None).allowed[0, :, 0]
        mask = mask[self.score_head if len(mask) > 1 else 0].expand(len(self.weights))
        allowed = np.asarray(mask.cpu().numpy(), bool)
        self.shown = choose_keys(self.weights, allowed, key)
        name = NORM_BEFORE.get(self.layer.placement, f"{self.role}_norm")
        x = self.norms[name][0] if name in self.norms else self.attention_input
        self.x = as_array(x[0, self.place.query])
        self.add("residual", "x, the residual stream of this token", {"out": self.x})
        self._add_norm("norm", name)
        self._add_projections()
        self._add_scores()
        self.steps.append(mask_step(allowed))
        self._add_weights()
        self._add_outputs()
        positions = np.arange(len(self.weights), dtype=np.int32)
        steps = tuple(self.steps)
        return HeadSteps(self.place, "model", steps, positions, self.shown, self.missing)

    def _add_norm(self, step: str, name: str) -> None:
        """The norm of this name, if the layer has run it."""
        if name not in self.norms:
            return
        norm = self.layer.get_submodule(name)
        assert isinstance(norm, NormLayer)
        x, n = (as_array(tensor[0, self.place.query]) for tensor in self.norms[name])
        values = x.astype(np.float64)
        facts = {"eps": float(norm.eps)}
        arrays = {"in": x, "out": n}
        for key in ("weight", "bias"):
            tensor = norm.get_weight(key)
            if tensor is not None:
                is_offset = norm.kind == "rms_unit_offset" and key == "weight"
                arrays[key] = as_array(tensor) + np.float32(is_offset)
        if norm.kind in ("rms", "rms_unit_offset"):
            facts["rms"] = float(np.sqrt(np.mean(values**2) + norm.eps))
            formula = "n = x / rms(x) · w"
        else:
            facts |= {"mean": float(values.mean()), "std": float(np.sqrt(values.var() + norm.eps))}
            formula = "n = (x - mean(x)) / std(x)" + (" · w" if "weight" in arrays else "")
            formula += " + b" if "bias" in arrays else ""
        self.steps.append(HeadStep(step, formula, arrays, facts, f"{norm.kind} norm"))

    def _add_projections(self) -> None:
        """The projection, each transform of queries and keys, and the vectors that are compared."""
        project = self.spec.project
        first = dict(self.probed)  # before any transform
        for (_, side), (before, _) in reversed(self.changes.items()):
            if side in "qkv":
                first[side] = before
        raw = self._vectors(first)
        if "q" in raw and "k" in raw:
            try:  # the largest products in each channel of the query, if the projection is a matrix
                matrix = as_array(self.circuits.qk_circuit(self.score_head).left)
                x = as_array(self.attention_input[0, self.place.query])
                raw |= largest_terms(x, matrix, NUM_TERMS)
            except (SpecError, ValueError):
                pass
            self.add("project", "q = n W_Q, k = n W_K, v = n W_V", raw, part=project)
            for name, part in self.spec.parts_of(QKTransform):
                pairs = {side: pair for (of, side), pair in self.changes.items() if of == name}
                before = self._vectors({side: pair[0] for side, pair in pairs.items()})
                after = self._vectors({side: pair[1] for side, pair in pairs.items()})
                arrays: dict[str, Any] = {}
                for side in [side for side in before if side in after]:
                    arrays |= {f"{side}_in": before[side], side: after[side]}
                weights = {key: self.attention.weights[name][key] for key in part.params(self.spec)}
                planes = part.symmetry(self.spec, "k", weights).planes
                if planes:
                    arrays["planes"] = np.array(planes, np.int32)
                formula = ROTATION if planes else describe_part(part)
                self.add("transform", formula, arrays, part=part)
        else:
            reason = "transforms parts of its vectors before it joins them"
            self.missing["project"] = f"{project!r} {reason}"
        self.add("vectors", "q and k as attention compares them", self._vectors(self.probed))

    def _vectors(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Vectors of this head, q [K], k and v [shown keys, K]; without tensors of another layout
        than what attention compares.
        """
        vectors: dict[str, Any] = {}
        for side in "qkv":
            tensor = tensors.get(side)
            if tensor is None or tensor.shape != self.probed[side].shape:
                continue
            if side == "q":
                vectors[side] = as_array(tensor[0, 0, self.score_head])
            else:
                group = self.key_head if side == "k" else self.value_head
                vectors[side] = as_array(tensor[0, :, group])[self.shown]
        return vectors

    def _changes_of(self, *sides: str) -> list[tuple[str, Tensor, Tensor]]:
        """Tensors that parts changed on these sides, in order: name, before, after."""
        return [(name, *pair) for (name, side), pair in self.changes.items() if side in sides]

    def _add_changes(self, step: str, changes: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        """The parts that change scores or weights of this head."""
        for name, *pair in changes:
            part = dict(self.spec.parts())[name]
            before, after = (as_array(tensor[0, self.core_head, 0]) for tensor in pair)
            arrays = {"in": before, "out": after}
            if isinstance(part, ScoreStep) and part.additive:
                arrays["added"] = after - before
            numbers = vars(part).items()
            facts = {key: float(one) for key, one in numbers if isinstance(one, (int, float))}
            self.add(step, describe_part(part), arrays, facts, part)

    def _add_scores(self) -> None:
        """The similarity, and every part that changes scores."""
        similarity = self.spec.similarity
        changes = self._changes_of("scores")
        first = changes[0][1] if changes else self.probed["scores"]
        scores = as_array(first[0, self.core_head, 0])
        scale = similarity.score_scale(self.core)
        q = self.probed["q"][0, 0, self.score_head]
        k = self.probed["k"][0, :, self.key_head]
        products = scores * np.nan
        if q.shape[-1] == k.shape[-1]:
            products = as_array(k.double() @ q.double())
        tolerance = 1e-3 * float(np.abs(scores).max(initial=0))
        out = {"out": scores}
        if np.allclose(products * scale, scores, rtol=1e-3, atol=tolerance):
            self.add("product", "pⱼ = q · kⱼ", {"out": products})
            self.add("scale", "sⱼ = scale · pⱼ", out, {"scale": scale}, similarity)
        else:
            self.add("product", describe_part(similarity), out, {"scale": scale}, similarity)
        self._add_changes("score_step", changes)

    def _add_weights(self) -> None:
        """The normaliser, and every part that changes weights."""
        normaliser = self.spec.normaliser
        changes = self._changes_of("weights")
        first = changes[0][1] if changes else self.probed["weights"]
        weights = as_array(first[0, self.core_head if changes else self.place.head, 0])
        numbers = self.attention.weights["normaliser"].head(self.score_head).items()
        facts = {name: float(one.detach()) for name, one in numbers if one.numel() == 1}
        is_softmax = normaliser.shift_invariant and normaliser.always_sums_to_one()
        if is_softmax or "sink" in facts:
            self.steps.append(softmax_step(weights, facts.get("sink"), repr(normaliser)))
        else:
            facts["sum"] = float(weights.sum(dtype=np.float64))
            self.add("normalise", describe_part(normaliser), {"out": weights}, facts, normaliser)
        self._add_changes("weight_step", changes)

    def _add_outputs(self) -> None:
        """The weighted sum, parts that change the head's output, its slice of W_O, and the residual
        stream.
        """
        head = self.place.head
        changes = self._changes_of("outputs", "gates")
        z = as_array((changes[0][1] if changes else self.probed["heads"])[0, 0, head])
        values = as_array(self.probed["v"][0, :, self.value_head])
        if values.shape[-1] == z.shape[-1]:
            self.steps.append(gather_step(self.weights, values, self.shown, z))
        else:
            self.missing["gather"] = (
                f"{self.spec.project!r} expands the values after they are summed"
            )
        for name, before, after in changes:
            part = dict(self.spec.parts())[name]
            arrays = {"in": before[0, 0, head], "out": after[0, 0, head]}
            self.add("output_step", describe_part(part), arrays, part=part)
        heads = self.probed["heads"]
        matrix = as_array(self.circuits.output_map(head))
        contribution = contribution_step(as_array(heads[0, 0, head]), matrix, NUM_TERMS)
        self.steps.append(contribution)
        with torch.inference_mode():
            bias = as_array(self.attention.merge_heads(torch.zeros_like(heads))[0, 0])
        self._add_residual(contribution.arrays["out"], bias)

    def _add_residual(self, added: Array, bias: Array) -> None:
        """The sum of all heads and the bias, the norm after it if there is one, and the new
        residual stream.
        """
        y = as_array(self.output[0, self.place.query])
        others = as_float32(y.astype(np.float64) - added - bias)
        scale = float(self.layer.scale)
        arrays = {"in": self.x, "own": added, "others": others, "bias": bias}
        facts = {"scale": scale}
        norm = NORM_AFTER.get(self.layer.placement, "").format(self.role)
        if norm in self.norms and self.layer.placement != "post":
            self.add("sum", "y = c + other heads + b_O", {**arrays, "out": y}, facts)
            self._add_norm("norm_after", norm)
            normed = as_array(self.norms[norm][1][0, self.place.query])
            arrays = {"in": self.x, "added": normed, "out": self.x + normed}
            self.add("residual_out", "x ← x + n", arrays)
            return
        times = "" if scale == 1 else f"{scale:g} · "
        out = as_float32(self.x + np.float32(scale) * y)
        formula = f"x ← x + {times}(c + other heads + b_O)"
        self.add("residual_out", formula, {**arrays, "out": out}, facts)
        self._add_norm("norm_after", norm)


def as_array(tensor: Tensor) -> Array:
    """The tensor as an array of float32."""
    return as_float32(tensor.detach().float().cpu().numpy())


def describe_part(part: Part) -> str:
    """The rule of a part: the first sentence of its documentation.

    >>> from headwise.attention.parts.dot_product import Softcap
    >>> describe_part(Softcap(5.0))
    's -> limit tanh(s / limit): limits scores smoothly to (-limit, limit)'
    """
    text = " ".join(inspect.cleandoc(type(part).__doc__ or repr(part)).split("\n\n")[0].split())
    sentence = text.split(". ")[0].removesuffix(".")
    head, _, paper = sentence.rpartition(" (")
    is_cited = head and paper.endswith(")") and any(sign.isdigit() for sign in paper)
    return head if is_cited else sentence
