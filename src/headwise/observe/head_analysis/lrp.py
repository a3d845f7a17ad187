"""Layer-wise relevance propagation (LRP): how much each head contributes to an output, with the
total conserved.

The relevance of an output is divided among its inputs in proportion to their contributions.
Positive and negative contributions are divided separately and weighted by alpha and beta; a bias is
shared equally by all inputs. After each operation the relevance is rescaled to its sum before
(1905.09418; the rule is from Bach et al. 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...attention.attention import Attention
from ...attention.interfaces.core_types import CoreShape, Probe
from ...attention.masking.sequence_info import SequenceInfo
from ...models import Transformer
from ...models.block import LayerInputs, LayerStack, TransformerLayer
from ...models.embeddings_heads import OutputHead
from ...models.feed_forward import FeedForward, NormLayer
from ...models.model_spec import ExpertsSpec
from ...models.transformer import resolve_sequence
from ...util.errors import suggest
from ..inspect.model_inputs import ModelInputs
from .importance_methods import CheckTime, ImportanceInput, ImportanceMethod, ImportanceSums
from .resampling import Array

# --- Operations that propagate relevance ----------------------------------------------------------

ALPHA = BETA = 0.5
STABILISER = 1e-5
MAX_CELLS = 2**22  # largest number of contributions computed at once
BackwardRule = Callable[[Tensor], list[Tensor]]


@dataclass(eq=False)
class RelevanceNode:
    """A value [tokens, ...] in the forward pass, and the relevance that it has received."""

    value: Tensor
    received: Tensor | None = field(default=None)

    def add_relevance(self, relevance: Tensor) -> None:
        """Add relevance from one of the operations that use this value."""
        self.received = relevance if self.received is None else self.received + relevance

    @property
    def relevance(self) -> Tensor:
        """Total relevance received, zeros if there was none."""
        return torch.zeros_like(self.value) if self.received is None else self.received


def alpha_beta_shares(
    relevance: Tensor, positive: Tensor, negative: Tensor
) -> tuple[Tensor, Tensor]:
    """Relevance per unit of a positive and of a negative contribution, given the sums of both."""
    return ALPHA * relevance / (positive + STABILISER), BETA * relevance / (negative - STABILISER)


class RelevanceTape:
    """Operations of a forward pass in order, each with its rule to propagate relevance to its
    inputs.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[RelevanceNode, Sequence[RelevanceNode], BackwardRule]] = []

    def _record(
        self, value: Tensor, inputs: Sequence[RelevanceNode], back: BackwardRule
    ) -> RelevanceNode:
        out = RelevanceNode(value)
        self.operations.append((out, inputs, back))
        return out

    def linear(
        self, x: RelevanceNode, weight: Tensor, bias: Tensor | None, value: Tensor | None = None
    ) -> RelevanceNode:
        """W x + b for x [tokens, in] and weight [out, in]; `value` replaces the computed output if
        it is known.
        """
        weight = weight.double()
        constant = weight.new_zeros(len(weight)) if bias is None else bias.double()
        y = x.value @ weight.T + constant if value is None else value

        def back(relevance: Tensor) -> list[Tensor]:
            step = max(1, MAX_CELLS // weight.numel())
            chunks = zip(x.value.split(step), relevance.split(step), strict=True)
            return [
                torch.cat(
                    [
                        _linear_backward(inputs, weight, constant, received)
                        for inputs, received in chunks
                    ]
                )
            ]

        return self._record(y, [x], back)

    def elementwise_linear(
        self, x: RelevanceNode, weight: Tensor, bias: Tensor | None
    ) -> RelevanceNode:
        """w_t . x_t + b_t with a weight of its own for each token, [tokens, in]: one output per
        token.
        """
        weight = weight.double()
        constant = 0 if bias is None else bias.double()[:, None] / weight.shape[1]
        contributions = weight * x.value + constant
        return self._record(
            contributions.sum(1),
            [x],
            lambda relevance: [_divide_relevance(contributions, relevance[:, None])],
        )

    def sum_terms(self, *terms: RelevanceNode) -> RelevanceNode:
        """Sum of terms of one shape."""
        stacked = torch.stack([term.value for term in terms], -1)
        return self._record(
            stacked.sum(-1),
            terms,
            lambda relevance: list(_divide_relevance(stacked, relevance[..., None]).unbind(-1)),
        )

    def identity(self, x: RelevanceNode, value: Tensor) -> RelevanceNode:
        """An elementwise function of x with result `value`; relevance passes through unchanged."""
        return self._record(value, [x], lambda relevance: [relevance])

    def attention_read(
        self, v: RelevanceNode, w_HTS: Tensor, kv_head_of_query: Sequence[int]
    ) -> RelevanceNode:
        """Head outputs [T, H, V]: constant weights times values [S, G, V]; head h uses the values
        of `kv_head_of_query[h]`.
        """
        w_HTS = w_HTS.double()
        v_HSV = v.value[:, list(kv_head_of_query)].transpose(0, 1)

        def back(relevance: Tensor) -> list[Tensor]:
            parts = _attention_read_backward(w_HTS, v_HSV, relevance.transpose(0, 1)).transpose(
                0, 1
            )
            index = torch.tensor(list(kv_head_of_query), device=v.value.device)
            return [torch.zeros_like(v.value).index_add_(1, index, parts)]

        return self._record((w_HTS @ v_HSV).transpose(0, 1), [v], back)

    def attention_core(self, qkv: CoreNodes, w_HTS: Tensor, core: CoreShape) -> RelevanceNode:
        """Head outputs [T, H, V] of softmax attention, whose contributions are x dz/dx for x in q,
        k and v.

        The weights follow from queries and keys, so that these receive relevance through the
        Jacobian of the softmax.
        """
        w_HTS = w_HTS.double()
        v_HSV = qkv.v.value[:, list(core.value_head_of_row)].transpose(0, 1)
        z_THV = (w_HTS @ v_HSV).transpose(0, 1)

        def back(relevance: Tensor) -> list[Tensor]:
            received = [torch.zeros_like(node.value) for node in qkv]
            for head, (group, row) in enumerate(
                zip(core.key_head_of_query, core.value_head_of_row, strict=True)
            ):
                inputs = HeadCore(
                    qkv.q.value[:, head],
                    qkv.k.value[:, group],
                    v_HSV[head],
                    w_HTS[head],
                    z_THV[:, head],
                    core.scale,
                )
                shares = _attention_core_backward(inputs, relevance[:, head])
                for tensor, index, share in zip(received, (head, group, row), shares, strict=True):
                    tensor[:, index] += share
            return received

        return self._record(z_THV, qkv, back)

    def token_linear(self, x: RelevanceNode, weight_TOI: Tensor, bias_TO: Tensor) -> RelevanceNode:
        """W_t x_t + b_t with a matrix of its own for each token, as of rotated queries."""

        def back(relevance: Tensor) -> list[Tensor]:
            tokens = zip(x.value, weight_TOI, bias_TO, relevance, strict=True)
            return [
                torch.stack(
                    [_linear_backward(one[None], w, b, r[None])[0] for one, w, b, r in tokens]
                )
            ]

        return self._record(torch.einsum("toi,ti->to", weight_TOI, x.value) + bias_TO, [x], back)

    def reshape(self, x: RelevanceNode, shape: Sequence[int]) -> RelevanceNode:
        """The value in another shape."""
        return self._record(
            x.value.reshape(*shape), [x], lambda relevance: [relevance.reshape(x.value.shape)]
        )

    def backward(self, out: RelevanceNode, relevance: Tensor) -> None:
        """Propagate the relevance of an output back to every value that contributed to it."""
        out.add_relevance(relevance)
        for node, inputs, rule in reversed(self.operations):
            if node.received is None:
                continue
            shares = rule(node.received)
            total = node.received.sum()
            propagated = torch.stack([share.sum() for share in shares]).sum()
            if propagated == 0 and total != 0:
                raise ValueError("cannot propagate relevance: all inputs of an operation are zero")
            for source, share in zip(inputs, shares, strict=True):
                source.add_relevance(
                    share * (total / propagated) if total != 0 else torch.zeros_like(share)
                )


def _divide_relevance(contributions: Tensor, relevance: Tensor) -> Tensor:
    """Divide relevance along the last axis in proportion to contributions."""
    positive = contributions.clamp(min=0)
    negative = contributions.clamp(max=0)
    gain, loss = alpha_beta_shares(
        relevance, positive.sum(-1, keepdim=True), negative.sum(-1, keepdim=True)
    )
    return positive * gain + negative * loss


def _linear_backward(x: Tensor, weight: Tensor, bias: Tensor, relevance: Tensor) -> Tensor:
    """Relevance of the inputs of a few tokens.

    Every contribution [tokens, out, in] is computed, because the bias takes part in its sign.
    """
    contributions = weight * x[:, None] + (bias / weight.shape[1])[:, None]
    return _divide_relevance(contributions, relevance[..., None]).sum(1)


class CoreNodes(NamedTuple):
    """Nodes of queries [T, H, K], keys [S, G, K] and values [S, G, V]."""

    q: RelevanceNode
    k: RelevanceNode
    v: RelevanceNode


class HeadCore(NamedTuple):
    """Queries, keys, values, weights, outputs and the scale of scores of one head."""

    q_TK: Tensor
    k_SK: Tensor
    v_SV: Tensor
    w_TS: Tensor
    z_TV: Tensor
    scale: float


def _attention_core_backward(core: HeadCore, relevance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Relevance of queries, keys and values of one head; relevance is [T, V].

    An output z_tc receives w_ts v_sc from a value, and from channel d of the query and of a key the
    product of b_sd = scale q_td k_sd and a_sc = w_ts (v_sc - z_tc), the derivative of z_tc with
    respect to a score.
    """
    queries, keys, values = (torch.zeros_like(tensor) for tensor in core[:3])
    for t, (q_K, w_S, z_V, r_V) in enumerate(
        zip(core.q_TK, core.w_TS, core.z_TV, relevance, strict=True)
    ):
        a_SV = w_S[:, None] * (core.v_SV - z_V)
        b_SK = core.scale * q_K * core.k_SK
        a_pos = a_SV.clamp(min=0)
        a_neg = a_SV.clamp(max=0)
        b_pos = b_SK.clamp(min=0)
        b_neg = b_SK.clamp(max=0)
        v_pos = w_S[:, None] * core.v_SV.clamp(min=0)
        v_neg = w_S[:, None] * core.v_SV.clamp(max=0)
        of_query = b_SK.T @ a_SV
        pos_S = b_pos.sum(1)
        neg_S = b_neg.sum(1)
        positive = v_pos.sum(0) + of_query.clamp(min=0).sum(0) + pos_S @ a_pos + neg_S @ a_neg
        negative = v_neg.sum(0) + of_query.clamp(max=0).sum(0) + pos_S @ a_neg + neg_S @ a_pos
        gain, loss = alpha_beta_shares(r_V, positive, negative)
        values += v_pos * gain + v_neg * loss
        queries[t] = of_query.clamp(min=0) @ gain + of_query.clamp(max=0) @ loss
        keys += (
            b_pos * (a_pos @ gain + a_neg @ loss)[:, None]
            + b_neg * (a_neg @ gain + a_pos @ loss)[:, None]
        )
    return queries, keys, values


def _attention_read_backward(w: Tensor, v: Tensor, relevance: Tensor) -> Tensor:
    """Relevance of the values; sums of the contributions w_ts v_s of either sign are two matrix
    products.
    """
    w_pos = w.clamp(min=0)
    w_neg = w.clamp(max=0)
    v_pos = v.clamp(min=0)
    v_neg = v.clamp(max=0)
    gain, loss = alpha_beta_shares(
        relevance, w_pos @ v_pos + w_neg @ v_neg, w_pos @ v_neg + w_neg @ v_pos
    )
    return v_pos * (w_pos.mT @ gain + w_neg.mT @ loss) + v_neg * (w_neg.mT @ gain + w_pos.mT @ loss)


# --- Relevance of heads for the largest logit -----------------------------------------------------

WEIGHT_RULES = ("constant", "jacobian")
TOLERANCE = 1e-4  # relative error allowed between recorded values and those of the model


def relevance_method(weights: str = "constant") -> ImportanceMethod:
    """Return LRP (1905.09418): the share of a layer's relevance for the largest logits that passes
    through each head.

    Each text starts with a relevance of 1, divided equally among the largest logits of its
    positions. Gates of feed-forward layers and standard deviations of norms (2202.07304) are
    constants. With `weights` "constant", so are attention weights; with "jacobian", relevance
    passes to queries and keys through the Jacobian of the softmax, as in the authors' code.
    """
    if weights not in WEIGHT_RULES:
        raise ValueError(f"unknown weights={weights!r}; {suggest(weights, WEIGHT_RULES)}")
    is_constant = weights == "constant"
    constants = "attention weights, gates" if is_constant else "gates"
    return ImportanceMethod(
        "lrp" if is_constant else f"lrp-{weights}",
        partial(relevance, weights=weights),
        measured_quantity="largest logit",
        note=f"{constants} and standard deviations of norms are treated as constants",
        unsupported_reason=why_no_relevance,
    )


def why_no_relevance(model: nn.Module) -> str:
    """Return why relevance cannot be propagated through a model; empty if it can."""
    if not isinstance(model, Transformer):
        name = type(model).__name__
        return f"it needs a headwise model, not {name}; load its folder with hw.load"
    spec = model.spec
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
            if feature:
                return f"{stack.name}.{layer} {feature}, which it does not support"
    return ""


def relevance(
    texts: Sequence[ImportanceInput], check_time: CheckTime, weights: str = "constant"
) -> ImportanceSums:
    """Return the relevance of the heads of each layer for one text, and its sum over them."""
    run = texts[0].run
    assert isinstance(run.model, Transformer)
    with torch.inference_mode():
        forward = RelevanceForward(run.model, run.inputs, weights)
        forward.propagate()
    sums: dict[str, tuple[Array, Array]] = {}
    for name, node in forward.head_outputs.items():
        values = node.relevance.sum((0, 2)).cpu().numpy()
        sums[name] = (values, np.full(len(values), values.sum()))
    return sums


class RelevanceForward:
    """Forward pass of a headwise model recorded on a `RelevanceTape`.

    `head_outputs` maps site names to nodes of head outputs; `top_logits` is the node of the largest
    logits.
    """

    def __init__(self, model: Transformer, inputs: ModelInputs, weights: str = "constant") -> None:
        self.net, self.tape, self.weights, kwargs = model, RelevanceTape(), weights, inputs.kwargs
        self.head_outputs: dict[str, RelevanceNode] = {}
        self.stack_inputs: dict[str, RelevanceNode] = {}  # hidden states that enter each stack
        inputs_of_stack = [
            (kwargs.get("source"), kwargs.get("source_sequence")),
            (kwargs["x"], kwargs.get("sequence")),
        ]
        states: RelevanceNode | None = None
        source_sequence: SequenceInfo | None = None
        for stack, (ids, tokens) in zip(
            model.stacks.values(), inputs_of_stack[-len(model.stacks) :], strict=True
        ):
            x, types = stack.embed(ids)
            sequence = resolve_sequence(x, tokens, None)
            call = LayerInputs(sequence, None, None, source_sequence, {})
            states = self._run_stack(stack, stack.place(x, sequence, types), call, states)
            source_sequence = sequence
        assert states is not None
        assert source_sequence is not None
        self.out = self._run_output_head(states, source_sequence)
        _check_same_output("the model", self.out.value.amax(), self.net(**kwargs).double().amax())

    def propagate(self) -> None:
        """Propagate a relevance of 1, divided equally among positions, back from the largest
        logits.
        """
        self.tape.backward(
            self.top_logits, torch.full_like(self.top_logits.value, 1 / len(self.top_logits.value))
        )

    def _run_stack(
        self, stack: LayerStack, x: Tensor, call: LayerInputs, states: RelevanceNode | None
    ) -> RelevanceNode:
        h = self.stack_inputs[stack.spec.name] = RelevanceNode(x[0].double())
        for layer in stack.blocks:
            h = self._run_layer(layer, h, call, states)
        return h if stack.norm is None else self._run_norm(stack.norm, h)

    def _run_layer(
        self,
        layer: TransformerLayer,
        x: RelevanceNode,
        call: LayerInputs,
        states: RelevanceNode | None,
    ) -> RelevanceNode:
        """Run a layer with its norms where `placement` has them."""
        placement = layer.placement
        tape = self.tape
        norms = {
            name: child for name, child in layer.named_children() if isinstance(child, NormLayer)
        }
        if placement in ("parallel", "abreast"):
            norm_names = {
                name: "norm" if placement == "parallel" else f"{name}_norm"
                for name in layer.sublayers
            }
            inputs = {
                name: self._run_norm(norms[norm], x) if norm in norms else x
                for name, norm in norm_names.items()
            }
            return tape.sum_terms(
                x, *(self._run_sublayer(layer, name, z, call, states) for name, z in inputs.items())
            )
        for name in layer.sublayers:
            is_computed = name not in layer.constant_sublayers  # else it is replaced by a constant
            normed = (
                self._run_norm(norms[f"{name}_norm"], x)
                if is_computed and placement in ("pre", "sandwich")
                else x
            )
            y = self._run_sublayer(layer, name, normed, call, states)
            if is_computed and placement in ("after", "sandwich"):
                y = self._run_norm(
                    norms[f"{name}_norm{'_after' if placement == 'sandwich' else ''}"], y
                )
            x = tape.sum_terms(x, y)
            x = self._run_norm(norms[f"{name}_norm"], x) if placement == "post" else x
        return x

    def _run_sublayer(
        self,
        layer: TransformerLayer,
        name: str,
        x: RelevanceNode,
        call: LayerInputs,
        states: RelevanceNode | None,
    ) -> RelevanceNode:
        if name in layer.constant_sublayers:
            return RelevanceNode(
                layer.get_parameter(f"{name}.constant").detach().double().expand_as(x.value)
            )
        if name == "feed":
            assert isinstance(layer.feed, FeedForward)
            y = self._run_feed_forward(layer.feed, x)
        else:
            y = self._run_attention(layer, name, (x, states), call)
        return y if layer.scale == 1 else self.tape.identity(y, y.value * layer.scale)

    def _run_norm(self, norm: NormLayer, x: RelevanceNode) -> RelevanceNode:
        parameter = next(norm.parameters(), x.value)
        value = norm(x.value[None].to(parameter.dtype))[0].double()
        if norm.kind not in ("layer", "unbiased", "bare"):
            return self.tape.identity(x, value)
        deviation = (x.value.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        gain = norm.get_weight("weight")
        width = x.value.shape[-1]
        centring = torch.eye(width, dtype=torch.float64, device=x.value.device) - 1 / width
        weight = centring if gain is None else gain.double()[:, None] * centring
        return self.tape.linear(
            self.tape.identity(x, x.value / deviation), weight, norm.get_weight("bias")
        )

    def _run_feed_forward(self, feed: FeedForward, x: RelevanceNode) -> RelevanceNode:
        down_weight = feed.down
        assert isinstance(down_weight, Tensor)
        inputs = x.value[None].to(down_weight.dtype)
        inner = feed.join(lambda name: feed.linear(inputs, name))[0].double()
        up = self.tape.linear(x, _get_tensor(feed, "up"), feed.get_weight("up_bias"))
        return self.tape.linear(
            self.tape.identity(up, inner), _get_tensor(feed, "down"), feed.get_weight("down_bias")
        )

    def _run_attention(
        self,
        layer: TransformerLayer,
        name: str,
        nodes: tuple[RelevanceNode, RelevanceNode | None],
        call: LayerInputs,
    ) -> RelevanceNode:
        attention = layer.attentions[name]
        (x, states) = nodes
        site = f"{layer.name}.{name}"
        kv_input = x if name == "attention" or states is None else states
        parameter = next(attention.parameters())
        x_BTM, kv_input_BSM = (node.value[None].to(parameter.dtype) for node in (x, kv_input))
        source = (
            None
            if kv_input is x
            else attention.project_source(kv_input_BSM, sequence=call.source_sequence)
        )
        probe = Probe("q", "k", "weights", "heads")
        o_BTOV = attention.head_outputs(x_BTM, source=source, sequence=call.sequence, probe=probe)
        weight, bias, groups = _probe_value_map(attention, site)
        v = self.tape.reshape(
            self.tape.linear(kv_input, weight, bias), (len(kv_input.value), groups, -1)
        )
        core = attention.spec.core_of(attention.spec.projection_form(one=False))
        w_HTS = probe.tensors["weights"][0]
        if self.weights == "constant":
            z = self.tape.attention_read(v, w_HTS, core.value_head_of_row)
        else:
            maps = _probe_qk_maps(
                attention, call, (len(x.value), len(kv_input.value)), kv_input is not x
            )
            q, k = (
                self._run_projection(node, one)
                for node, one in zip((x, kv_input), maps, strict=True)
            )
            _check_softmax(site, (q, k), probe.tensors, core)
            z = self.tape.attention_core(CoreNodes(q, k, v), w_HTS, core)
        _check_same_output(site, z.value, o_BTOV[0].double())
        self.head_outputs[site] = z
        weight, bias = _probe_output_map(attention, o_BTOV)
        flat = self.tape.reshape(z, (len(x.value), -1))
        return self.tape.linear(flat, weight, bias, attention.merge_heads(o_BTOV)[0].double())

    def _run_projection(self, x: RelevanceNode, token_map: TokenMap) -> RelevanceNode:
        """Queries or keys of a layer, [tokens, heads, channels]."""
        shape = token_map.bias_THK.shape
        flat = self.tape.token_linear(
            x, token_map.weight_THKI.flatten(1, 2), token_map.bias_THK.flatten(1)
        )
        return self.tape.reshape(flat, shape)

    def _run_output_head(self, h: RelevanceNode, sequence: SequenceInfo) -> RelevanceNode:
        """Logits of the model's first head; sets `top_logits`, the largest one of each position."""
        head = next(iter(self.net.head.values()))
        assert isinstance(head, OutputHead)
        spec = head.spec
        tape = self.tape
        if spec.at != "each":
            states = tape.reshape(h, (len(h.value), 1, -1))
            pooled = tape.attention_read(states, _pooling_weights(spec.at, sequence), (0,))
            h = tape.reshape(pooled, (1, -1))
        if head.activation is not None:
            y = tape.linear(h, _get_tensor(head, "transform"), head.get_weight("transform_bias"))
            h = tape.identity(y, head.activation(y.value))
            h = h if head.transform_norm is None else self._run_norm(head.transform_norm, h)
        h = h if spec.scale == 1 else tape.identity(h, h.value * spec.scale)
        weight = self._output_weight(head).double()
        bias = head.get_weight("bias")
        logits = h.value @ weight.T + (0 if bias is None else bias.double())
        top = logits.argmax(-1)
        self.top_logits = tape.elementwise_linear(
            h, weight[top], None if bias is None else bias[top]
        )
        return RelevanceNode(
            logits if spec.cap is None else spec.cap * torch.tanh(logits / spec.cap)
        )

    def _output_weight(self, head: OutputHead) -> Tensor:
        """Weight of an output head: its own, or the embedding table that it shares."""
        if not head.spec.table:
            return _get_tensor(head, "weight")
        embedding = self.net.stacks[head.spec.table].embedding
        assert embedding is not None
        return embedding.table


def _get_tensor(module: nn.Module, name: str) -> Tensor:
    tensor = getattr(module, name)
    assert isinstance(tensor, Tensor)
    return tensor


def _pooling_weights(pooling: str, sequence: SequenceInfo) -> Tensor:
    """Weight of each token in the pooling of a head that has one output per text, [1, 1, T]."""
    is_real = sequence.is_real[0].double()
    positions = is_real.nonzero().flatten()
    if pooling == "mean":
        return (is_real / is_real.sum())[None, None]
    weights = torch.zeros_like(is_real)
    weights[positions[0 if pooling == "first" else -1]] = 1
    return weights[None, None]


def _probe_value_map(attention: Attention, site: str) -> tuple[Tensor, Tensor, int]:
    """Affine map from a token to its values: weight, bias and number of KV heads.

    It is measured with one-hot inputs, so that it holds for any projection.
    """
    parameter = next(attention.parameters())
    width = attention.spec.source or attention.spec.model
    one_hot = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(parameter)[:, None]
    entry = attention.project_source(one_hot).entry
    if "v" not in entry:
        raise ValueError(
            f"cannot propagate relevance through {site}: it does not cache values; use another "
            "method"
        )
    values = entry["v"][:, 0]
    flat = values.flatten(1).double()
    return (flat[1:] - flat[0]).T, flat[0], values.shape[1]


class TokenMap(NamedTuple):
    """Affine map from each token to its queries or keys, which depends on its position."""

    weight_THKI: Tensor
    bias_THK: Tensor


def _probe_qk_maps(
    attention: Attention, call: LayerInputs, lengths: tuple[int, int], has_source: bool
) -> tuple[TokenMap, TokenMap]:
    """Affine maps from tokens to queries and to keys, measured with one-hot inputs at the positions
    of the text.
    """
    parameter = next(attention.parameters())
    spec = attention.spec
    widths = (spec.model, spec.source or spec.model)
    inputs = [
        torch.zeros(1, length, width).to(parameter)
        for length, width in zip(lengths, widths, strict=True)
    ]

    def project(x: Tensor, source: Tensor) -> Mapping[str, Tensor]:
        probe = Probe("q", "k")
        projected = (
            attention.project_source(source, sequence=call.source_sequence) if has_source else None
        )
        attention.head_outputs(x, source=projected, sequence=call.sequence, probe=probe)
        return {name: probe.tensors[name][0].double() for name in ("q", "k")}

    bias = project(*inputs)
    columns: dict[str, list[Tensor]] = {"q": [], "k": []}
    for channel in range(max(widths)):
        one_hot = [tensor.clone() for tensor in inputs]
        for tensor in one_hot:
            tensor[..., channel : channel + 1] = 1  # nothing if this side has fewer channels
        projected = project(*one_hot)
        for name, width in zip(columns, widths, strict=True):
            columns[name] += [projected[name] - bias[name]] if channel < width else []
    maps = {name: TokenMap(torch.stack(columns[name], -1), bias[name]) for name in columns}
    return maps["q"], maps["k"]


def _check_softmax(
    site: str,
    qk: tuple[RelevanceNode, RelevanceNode],
    probed: Mapping[str, Tensor],
    core: CoreShape,
) -> None:
    """Refuse a layer whose weights are not the softmax of scaled products of affine queries and
    keys.
    """
    for node, name in zip(qk, ("q", "k"), strict=True):
        _check_same_output(f"the projection of {site}", node.value, probed[name][0].double())
    w_HTS = probed["weights"][0].double()
    if (
        not len(w_HTS)
        == qk[0].value.shape[1]
        == len(core.key_head_of_query)
        == len(core.value_head_of_row)
    ):
        fact = f"{site} has {qk[0].value.shape[1]} query heads for {len(w_HTS)} rows of weights"
        raise ValueError(f"cannot propagate relevance through weights: {fact}; use lrp")
    k_SHK = qk[1].value[:, list(core.key_head_of_query)]
    scores = torch.einsum("thk,shk->hts", qk[0].value, k_SHK) * core.scale
    expected = scores.masked_fill(w_HTS == 0, -torch.inf).softmax(-1).nan_to_num(0.0)
    error = float((expected - w_HTS).abs().max())
    if not error <= TOLERANCE:
        fact = f"the weights of {site} are not the softmax of scaled products of queries and keys"
        raise ValueError(
            f"cannot propagate relevance through weights: {fact}; use lrp, which holds weights "
            "constant"
        )


def _probe_output_map(attention: Attention, o_BTOV: Tensor) -> tuple[Tensor, Tensor]:
    """Affine map from head outputs to the layer's output, measured with one-hot inputs: weight and
    bias.
    """
    heads, width = o_BTOV.shape[2:]
    one_hot = torch.cat([torch.zeros(1, heads * width), torch.eye(heads * width)]).to(o_BTOV)
    outputs = attention.merge_heads(one_hot.view(-1, 1, heads, width))[:, 0].double()
    return (outputs[1:] - outputs[0]).T, outputs[0]


def _check_same_output(name: str, recorded: Tensor, own: Tensor) -> None:
    """Refuse a model whose own values differ from the recorded ones: it does something that is not
    recorded.
    """
    error = float((recorded - own).abs().max())
    if not error <= TOLERANCE * max(1.0, float(own.abs().max())):
        fact = f"{name} is more than a weighted sum of values"
        raise ValueError(f"cannot propagate relevance: {fact}; use another method")
