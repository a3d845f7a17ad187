"""Layer-wise relevance propagation (LRP): how much each head contributes to an output, with the
total conserved.

The relevance of an output is divided among its inputs in proportion to their contributions.
Positive and negative contributions are divided separately and weighted by alpha and beta; a bias is
shared equally by all inputs. After each operation the relevance is rescaled to its sum before
(1905.09418; the rule is from Bach et al. 2015). Each operation is an autograd function with this
rule as its backward pass, so a gradient is a relevance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ...attention.interfaces.core_types import Probe
from ...attention.masking.sequence_info import SequenceInfo
from ...kernels.devices import has_dtype
from ...models import Transformer
from ...models.block import EarlierLayers, LayerInputs, TransformerLayer
from ...models.embeddings_heads import OutputHead
from ...models.feed_forward import FeedForward, NormLayer
from ...models.model_spec import ExpertsSpec
from ...models.transformer import resolve_sequence
from ..inspect.model_inputs import ModelInputs, get_device
from .importance_methods import ImportanceInput, ImportanceSums

# --- Operations that propagate relevance ----------------------------------------------------------

ALPHA = BETA = 0.5
STABILISER = 1e-5
MAX_CELLS = 2**22  # largest number of contributions computed at once
Rule = Callable[[Tensor], Sequence[Tensor]]  # relevance of the output -> relevance of each input


class _Operation(torch.autograd.Function):
    """Attach `rule` to a value computed from `inputs`; backward divides relevance by it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rule: Rule, *inputs: Tensor) -> Tensor:
        ctx.rule = rule
        return value.detach()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch documents it
        ctx: Any, relevance: Tensor
    ) -> Any:
        shares = ctx.rule(relevance)
        total = relevance.sum()
        propagated = torch.stack([share.sum() for share in shares]).sum()
        if total == 0:
            return None, None, *map(torch.zeros_like, shares)
        if propagated == 0:
            raise ValueError("cannot propagate relevance: all inputs of an operation are zero")
        return None, None, *(share * (total / propagated) for share in shares)


def _record(value: Tensor, rule: Rule, *inputs: Tensor) -> Tensor:
    with torch.enable_grad():
        return cast(Tensor, _Operation.apply(value, rule, *inputs))


def propagate(out: Tensor, relevance: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the relevance that each of `inputs` receives from the relevance of `out`."""
    return torch.autograd.grad(out, inputs, relevance, retain_graph=True, materialize_grads=True)


def _divide(contributions: Tensor, relevance: Tensor) -> Tensor:
    """Divide relevance along the last axis in proportion to contributions."""
    positive = contributions.clamp(min=0)
    negative = contributions.clamp(max=0)
    sums = (positive.sum(-1, keepdim=True), negative.sum(-1, keepdim=True))
    gain, loss = _unit_shares(relevance, *sums)
    return positive * gain + negative * loss


def _unit_shares(relevance: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance per unit of a positive and of a negative contribution, given the sums of both."""
    return ALPHA * relevance / (positive + STABILISER), BETA * relevance / (negative - STABILISER)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, value: Tensor | None = None
) -> Tensor:
    """W x + b for x [tokens, in] and weight [out, in], or [tokens, out, in] with a matrix for each
    token; `value` replaces the computed output if it is known.
    """
    weight = weight.double()
    constant = weight.new_zeros(weight.shape[:-1]) if bias is None else bias.double()
    if value is None:
        product = x @ weight.T if weight.dim() == 2 else (weight @ x[..., None])[..., 0]
        value = product + constant
    weights = weight.expand(len(x), *weight.shape[-2:])
    # The bias takes part in the sign of a contribution, so all of them are computed, in chunks.
    shared = (constant / weight.shape[-1])[..., None].expand(*weights.shape[:2], 1)

    def back(relevance: Tensor) -> list[Tensor]:
        parts: list[Tensor] = []
        step = max(1, MAX_CELLS // weights[0].numel())
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            contributions = weights[rows] * x[rows, None] + shared[rows]
            parts.append(_divide(contributions, relevance[rows, :, None]).sum(1))
        return [torch.cat(parts)]

    return _record(value, back, x)


def sum_terms(*terms: Tensor) -> Tensor:
    """Sum of terms of one shape."""
    stacked = torch.stack(terms, -1)
    return _record(stacked.sum(-1), lambda r: _divide(stacked, r[..., None]).unbind(-1), *terms)


def identity(x: Tensor, value: Tensor) -> Tensor:
    """An elementwise function of x with result `value`; relevance passes through unchanged."""
    return _record(value, lambda relevance: [relevance], x)


def reshape(x: Tensor, *shape: int) -> Tensor:
    """The value in another shape."""
    return _record(x.reshape(*shape), lambda relevance: [relevance.reshape(x.shape)], x)


def attention_read(v: Tensor, w_HTS: Tensor, value_heads: Sequence[int]) -> Tensor:
    """Head outputs [T, H, V]: constant weights times values [S, G, V]; head h uses the values of
    `value_heads[h]`.
    """
    w = w_HTS.double()
    index = torch.tensor(list(value_heads), device=v.device)
    v_HSV = v[:, index].transpose(0, 1)

    def back(relevance: Tensor) -> list[Tensor]:
        # Sums of the contributions w_ts v_s of either sign are two matrix products.
        w_pos = w.clamp(min=0)
        w_neg = w.clamp(max=0)
        v_pos = v_HSV.clamp(min=0)
        v_neg = v_HSV.clamp(max=0)
        sums = (w_pos @ v_pos + w_neg @ v_neg, w_pos @ v_neg + w_neg @ v_pos)
        gain, loss = _unit_shares(relevance.transpose(0, 1), *sums)
        parts = v_pos * (w_pos.mT @ gain + w_neg.mT @ loss)
        parts = parts + v_neg * (w_neg.mT @ gain + w_pos.mT @ loss)
        return [torch.zeros_like(v).index_add_(1, index, parts.transpose(0, 1))]

    return _record((w @ v_HSV).transpose(0, 1), back, v)


# --- Relevance of heads for the largest logit -----------------------------------------------------

TOLERANCE = 1e-4  # relative error allowed between recorded values and the model's
LRP_NOTE = "attention weights, gates and standard deviations of norms are treated as constants"


def why_no_relevance(model: Any) -> str:
    """Return why relevance cannot be propagated through a model; empty if it can."""
    if not isinstance(model, Transformer):
        name = type(model).__name__
        return f"it needs a headwise model, not {name}; load its folder with hw.load"
    spec = model.spec
    device = get_device(model)
    if not has_dtype(device, torch.float64):
        return f"it computes in float64, which {device} does not have; use the CPU"
    if not spec.heads or not spec.heads[0].outputs:
        return f"{spec.name} has no output head"
    for stack in spec.stacks:
        for layer, block in enumerate(stack.layers):
            feature = ""
            if isinstance(block.feed, ExpertsSpec):
                feature = "is a mixture of experts"
            elif block.mixer is not None:
                feature = f"has a {block.mixer.text}"
            elif block.form == "merged":
                feature = "merges two attentions"
            elif block.kv_layers_back or block.value_residual:
                feature = "reads keys or values of an earlier layer"
            if feature:
                return f"{stack.name}.{layer} {feature}, which it does not support"
    return ""


def relevance(text: ImportanceInput) -> ImportanceSums:
    """LRP (1905.09418): the share of a layer's relevance for the largest logits that passes through
    each head.

    The text starts with a relevance of 1, divided equally among the largest logits of its
    positions. Attention weights, gates of feed-forward layers and standard deviations of norms
    (2202.07304) are constants.
    """
    run = text.run
    assert isinstance(run.model, Transformer)
    outputs = RelevanceForward(run.model, run.inputs)
    sums: ImportanceSums = {}
    received = outputs.relevance_of(list(outputs.head_outputs.values()))
    for name, relevance_THV in zip(outputs.head_outputs, received, strict=True):
        values = relevance_THV.sum((0, 2)).cpu().numpy()
        sums[name] = (values, np.full(len(values), values.sum()))
    return sums


def stack_inputs(kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Ids and sequence information of the source stack and of the text stack."""
    source = (kwargs.get("source"), kwargs.get("source_sequence"))
    return [source, (kwargs["x"], kwargs.get("sequence"))]


class RelevanceForward:
    """Forward pass of a headwise model over one text, in operations that propagate relevance.

    `head_outputs` and `stack_inputs` are tensors by site and by stack, `top_logits` the largest
    logit of each position, `out` all logits.
    """

    def __init__(self, model: Transformer, inputs: ModelInputs) -> None:
        self.net = model
        self.head_outputs: dict[str, Tensor] = {}
        self.stack_inputs: dict[str, Tensor] = {}
        states: Tensor | None = None
        sequence: SequenceInfo | None = None
        with torch.no_grad():
            stacks = list(model.stacks.values())
            for stack, (ids, tokens) in zip(
                stacks, stack_inputs(inputs.kwargs)[-len(stacks) :], strict=True
            ):
                x, types = stack.embed(ids)
                source_sequence = sequence
                sequence = resolve_sequence(x, tokens, None)
                call = LayerInputs(sequence, None, None, source_sequence, {}, EarlierLayers())
                h = stack.place(x, sequence, types)[0].double().requires_grad_()
                self.stack_inputs[stack.spec.name] = h
                for layer in stack.blocks:
                    h = self._run_layer(layer, h, call, states)
                states = _run_norm(stack.norm, h)
            assert states is not None
            assert sequence is not None
            self.out = self._run_output_head(states, sequence)
            logits = self.net(**inputs.kwargs).double()
        _check_same_output("the model", self.out.amax(), logits.amax())

    def relevance_of(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what these values receive of a relevance of 1, which is divided equally among the
        largest logits of the positions.
        """
        share = torch.full_like(self.top_logits, 1 / len(self.top_logits))
        return propagate(self.top_logits, share, values)

    def _run_layer(
        self, layer: TransformerLayer, x: Tensor, call: LayerInputs, states: Tensor | None
    ) -> Tensor:
        """Run a layer with its norms where `placement` has them."""
        placement = layer.placement
        is_parallel = placement in ("parallel", "parallel_two_norms")
        norms: dict[str, Any] = dict(layer.named_children())
        terms = [x]
        for name in layer.sublayers:
            norm = norms.get("norm" if placement == "parallel" else f"{name}_norm")
            if name in layer.constant_sublayers:  # it is replaced by a constant
                y = layer.get_parameter(f"{name}.constant").detach().double().expand_as(x)
            else:
                z = x if placement in ("post_sublayer", "post") else _run_norm(norm, x)
                if name == "feed":
                    y = _run_feed_forward(layer.feed, z)
                else:
                    y = self._run_attention(layer, name, z, states, call)
                y = y if layer.scale == 1 else identity(y, y * layer.scale)
                if placement in ("post_sublayer", "sandwich"):
                    y = _run_norm(
                        norms[f"{name}_norm_after"] if placement == "sandwich" else norm, y
                    )
            if is_parallel:
                terms.append(y)
                continue
            x = sum_terms(x, y)
            x = _run_norm(norm, x) if placement == "post" else x
        return sum_terms(*terms) if is_parallel else x

    def _run_attention(
        self,
        layer: TransformerLayer,
        name: str,
        x: Tensor,
        states: Tensor | None,
        call: LayerInputs,
    ) -> Tensor:
        attention = layer.attentions[name]
        site = f"{layer.name}.{name}"
        is_cross = name != "attention" and states is not None
        kv_input = states if is_cross and states is not None else x
        dtype = next(attention.parameters()).dtype
        source = None
        if is_cross:
            source = attention.project_source(
                kv_input[None].to(dtype), sequence=call.source_sequence
            )
        probe = Probe("weights")
        o_BTOV = attention.head_outputs(
            x[None].to(dtype), source=source, sequence=call.sequence, probe=probe
        )

        def project(rows: Tensor) -> Tensor:
            entry = attention.project_source(rows[:, None]).entry
            if "v" in entry:
                return entry["v"][:, 0]
            fact = f"cannot propagate relevance through {site}: it does not cache values"
            raise ValueError(f"{fact}; use another method")

        # the map from a token to its values, for any projection
        weight, bias = _affine_map(project, kv_input.shape[-1], o_BTOV)
        v = reshape(linear(kv_input, weight, bias.flatten()), len(kv_input), *bias.shape)
        core = attention.spec.core_of(attention.spec.projection_form(one=False))
        z = attention_read(v, probe.tensors["weights"][0], core.value_head_of_row)
        _check_same_output(site, z, o_BTOV[0].double())
        self.head_outputs[site] = z
        heads, width = o_BTOV.shape[2:]
        weight, bias = _affine_map(
            lambda rows: attention.merge_heads(rows.view(-1, 1, heads, width))[:, 0],
            heads * width,
            o_BTOV,
        )
        y = attention.merge_heads(o_BTOV)[0].double()
        return linear(reshape(z, len(x), -1), weight, bias, y)

    def _run_output_head(self, h: Tensor, sequence: SequenceInfo) -> Tensor:
        """Logits of the model's first head; sets `top_logits`, the largest one of each position."""
        head = next(iter(self.net.head.values()))
        assert isinstance(head, OutputHead)
        spec = head.spec
        if spec.at != "each":
            # Weight of each token in the pooling of a head that has one output per text
            weights = sequence.is_real[0].double()
            if spec.at != "mean":
                place = weights.nonzero()[0 if spec.at == "first" else -1]
                weights = torch.zeros_like(weights).index_fill_(0, place, 1)
            weights = (weights / weights.sum())[None, None]
            h = reshape(attention_read(reshape(h, len(h), 1, -1), weights, (0,)), 1, -1)
        if head.activation is not None:
            transform: Any = head.transform
            y = linear(h, transform, head.get_weight("transform_bias"))
            h = _run_norm(head.transform_norm, identity(y, head.activation(y)))
        h = h if spec.scale == 1 else identity(h, h * spec.scale)
        # A head may share the embedding table of a stack.
        embedding = self.net.stacks[spec.table].embedding if spec.table else None
        weight: Any = head.weight if embedding is None else embedding.table
        weight = weight.double()
        bias = head.get_weight("bias")
        logits = h @ weight.T + (0 if bias is None else bias.double())
        top = logits.argmax(-1)
        top_logits = linear(h, weight[top, None], None if bias is None else bias[top, None])
        self.top_logits = reshape(top_logits, -1)
        return logits if spec.cap is None else spec.cap * torch.tanh(logits / spec.cap)


def _run_norm(norm: NormLayer | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    parameter = next(norm.parameters(), x)
    value = norm(x[None].to(parameter.dtype))[0].double()
    if norm.kind not in ("layer", "layer_no_bias", "layer_no_affine"):
        return identity(x, value)
    deviation = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    gain = norm.get_weight("weight")
    width = x.shape[-1]
    weight = torch.eye(width, dtype=torch.float64, device=x.device) - 1 / width  # centres x
    weight = weight if gain is None else gain.double()[:, None] * weight
    return linear(identity(x, x / deviation), weight, norm.get_weight("bias"))


def _run_feed_forward(feed: Any, x: Tensor) -> Tensor:
    assert isinstance(feed, FeedForward)
    weights: Any = feed
    inputs = x[None].to(weights.down.dtype)
    inner = feed.join(lambda name: feed.linear(inputs, name))[0].double()
    up = linear(x, weights.up, feed.get_weight("up_bias"))
    return linear(identity(up, inner), weights.down, feed.get_weight("down_bias"))


# --- Maps of an attention layer, measured ---------------------------------------------------------


def _affine_map(
    function: Callable[[Tensor], Tensor], width: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Weight [out, width] and bias of an affine function of rows, measured with one-hot inputs."""
    outputs = function(torch.cat([torch.zeros(1, width), torch.eye(width)]).to(like)).double()
    flat = outputs.flatten(1)
    return (flat[1:] - flat[0]).T, outputs[0]


def _check_same_output(name: str, recorded: Tensor, expected: Tensor) -> None:
    """Raise if the model's values differ from the recorded ones: it does more than is recorded."""
    error = float((recorded - expected).abs().max())
    if not error <= TOLERANCE * max(1.0, float(expected.abs().max())):
        fact = f"{name} is more than a weighted sum of values"
        raise ValueError(f"cannot propagate relevance: {fact}; use another method")
