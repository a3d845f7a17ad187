"""Layer-wise relevance propagation: what every number had a share in, from an output back, nothing added or lost.

The relevance of an output is divided among inputs by what each contributes to it, positive and negative contributions
apart, alpha and beta of it; a bias is shared alike by all inputs. What an operation hands back is brought to the sum of
what it was handed (1905.09418; Bach et al. 2015 for the rule).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..inspect.model_inputs import ModelInputs
from ..interfaces.probe import Probe
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ExpertsSpec
from ..models import Transformer
from ..models.block import LayerInputs, LayerStack, TransformerLayer
from ..models.embeddings_heads import OutputHead
from ..models.feed_forward import FeedForward, NormLayer
from ..models.transformer import resolve_sequence
from ..nn.attention import Attention
from .importance_methods import CheckTime, ImportanceInput, ImportanceMethod, ImportanceSums

ALPHA = BETA = 0.5
STABILISER = 1e-5
MAX_CELLS = 2**22  # contributions that are looked at together
BackwardRule = Callable[[Tensor], list[Tensor]]


@dataclass(eq=False)
class RelevanceNode:
    """Numbers [tokens, ...] on the way, and the relevance that has come back to them."""

    value: Tensor
    received: Tensor | None = field(default=None)

    def add_relevance(self, relevance: Tensor) -> None:
        """More of it."""
        self.received = relevance if self.received is None else self.received + relevance

    @property
    def relevance(self) -> Tensor:
        """All of it; none where nothing came."""
        return torch.zeros_like(self.value) if self.received is None else self.received


def alpha_beta_shares(relevance: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """What one contribution of 1 gets back of a relevance, if positive and if negative, of the sums of either sign."""
    return ALPHA * relevance / (positive + STABILISER), BETA * relevance / (negative - STABILISER)


class RelevanceTape:
    """Operations in their order, each of which knows how to hand relevance back."""

    def __init__(self) -> None:
        self.steps: list[tuple[RelevanceNode, Sequence[RelevanceNode], BackwardRule]] = []

    def _record(self, value: Tensor, inputs: Sequence[RelevanceNode], back: BackwardRule) -> RelevanceNode:
        out = RelevanceNode(value)
        self.steps.append((out, inputs, back))
        return out

    def linear(
        self, x: RelevanceNode, weight: Tensor, bias: Tensor | None, value: Tensor | None = None
    ) -> RelevanceNode:
        """W x + b of [tokens, in], by weight [out, in]."""
        weight = weight.double()
        constant = weight.new_zeros(len(weight)) if bias is None else bias.double()
        y = x.value @ weight.T + constant if value is None else value

        def back(relevance: Tensor) -> list[Tensor]:
            step = max(1, MAX_CELLS // weight.numel())
            bands = zip(x.value.split(step), relevance.split(step), strict=True)
            return [torch.cat([_linear_backward(own, weight, constant, told) for own, told in bands])]

        return self._record(y, [x], back)

    def elementwise_linear(self, x: RelevanceNode, weight: Tensor, bias: Tensor | None) -> RelevanceNode:
        """One output of each token: w_t x_t + b_t, by weight [tokens, in]."""
        weight = weight.double()
        constant = 0 if bias is None else bias.double()[:, None] / weight.shape[1]
        contributed = weight * x.value + constant
        return self._record(contributed.sum(1), [x], lambda told: [_divide_relevance(contributed, told[:, None])])

    def sum_terms(self, *terms: RelevanceNode) -> RelevanceNode:
        """Terms of one shape, added up."""
        stacked = torch.stack([one.value for one in terms], -1)
        return self._record(
            stacked.sum(-1), terms, lambda told: list(_divide_relevance(stacked, told[..., None]).unbind(-1))
        )

    def identity(self, x: RelevanceNode, value: Tensor) -> RelevanceNode:
        """Each number changed by itself: it alone contributed, so relevance goes back as it is."""
        return self._record(value, [x], lambda told: [told])

    def attention_read(self, v: RelevanceNode, w_HTS: Tensor, kv_head_of_query: Sequence[int]) -> RelevanceNode:
        """[T, H, V]: what each row of constant weights reads of values [S, G, V]; row h reads values reads[h]."""
        w_HTS, v_HSV = w_HTS.double(), v.value[:, list(kv_head_of_query)].transpose(0, 1)

        def back(relevance: Tensor) -> list[Tensor]:
            parts = _attention_read_backward(w_HTS, v_HSV, relevance.transpose(0, 1)).transpose(0, 1)
            index = torch.tensor(list(kv_head_of_query), device=v.value.device)
            return [torch.zeros_like(v.value).index_add_(1, index, parts)]

        return self._record((w_HTS @ v_HSV).transpose(0, 1), [v], back)

    def reshape(self, x: RelevanceNode, shape: Sequence[int]) -> RelevanceNode:
        """The same numbers side by side in another way."""
        return self._record(x.value.reshape(*shape), [x], lambda told: [told.reshape(x.value.shape)])

    def backward(self, out: RelevanceNode, relevance: Tensor) -> None:
        """Hand the relevance of an output back to everything that had a share in it."""
        out.add_relevance(relevance)
        for node, inputs, rule in reversed(self.steps):
            if node.received is None:
                continue
            found, total = rule(node.received), node.received.sum()
            came = torch.stack([one.sum() for one in found]).sum()
            if came == 0 and total != 0:
                raise ValueError("relevance has nowhere to go: an operation on the way had inputs of zeros alone")
            for one, told in zip(inputs, found, strict=True):
                one.add_relevance(told * (total / came) if total != 0 else torch.zeros_like(told))


def _divide_relevance(contributed: Tensor, relevance: Tensor) -> Tensor:
    """Relevance divided along the last axis by contributions."""
    positive, negative = contributed.clamp(min=0), contributed.clamp(max=0)
    gain, loss = alpha_beta_shares(relevance, positive.sum(-1, keepdim=True), negative.sum(-1, keepdim=True))
    return positive * gain + negative * loss


def _linear_backward(x: Tensor, weight: Tensor, bias: Tensor, relevance: Tensor) -> Tensor:
    """Of a few tokens: every contribution [tokens, out, in] is written out, for a bias takes part in its sign."""
    contributed = weight * x[:, None] + (bias / weight.shape[1])[:, None]
    return _divide_relevance(contributed, relevance[..., None]).sum(1)


def _attention_read_backward(w: Tensor, v: Tensor, relevance: Tensor) -> Tensor:
    """Of contributions w_ts v_s: those of either sign are sums of two products."""
    more, less, up, down = w.clamp(min=0), w.clamp(max=0), v.clamp(min=0), v.clamp(max=0)
    gain, loss = alpha_beta_shares(relevance, more @ up + less @ down, more @ down + less @ up)
    return up * (more.mT @ gain + less.mT @ loss) + down * (less.mT @ gain + more.mT @ loss)


# --- Relevance of heads for what a model of ours says likeliest, weights of attention taken as constants ---

TOLERANCE = 1e-4  # of the largest number: what is followed must come out as the model has it


@dataclass(frozen=True)
class LayerwiseRelevance(ImportanceMethod):
    """The share of a site's relevance for the likeliest output that goes through each head (LRP, 1905.09418).

    It begins with 1 for each text, spread over its places, at the largest logit of each. Weights of attention, gates of
    feed-forwards and the deviations of norms (2202.07304) are constants; all else as `relevance` says.
    """

    name = "lrp"
    measured_quantity = "largest logit"
    notes = ("weights of attention, gates and deviations of norms are constants",)

    def unsupported_reason(self, model: nn.Module) -> str:
        if not isinstance(model, Transformer):
            return f"the layers of {type(model).__name__} are not known here; hw.load reads a folder as a model of ours"
        described = model.spec
        if not described.heads or not described.heads[0].outputs:
            return f"{described.name} has no head whose largest output could be followed"
        for stack in described.stacks:
            for depth, block in enumerate(stack.layers):
                if isinstance(block.feed, ExpertsSpec):
                    return f"{stack.name}.{depth} chooses among experts, which relevance is not handed through"
                if block.form == "merged":
                    return f"{stack.name}.{depth} merges two attentions, which relevance is not handed through"
        return ""

    def estimate(self, texts: Sequence[ImportanceInput], check_time: CheckTime) -> ImportanceSums:
        way = texts[0].run
        assert isinstance(way.model, Transformer)
        with torch.inference_mode():
            through = RelevanceForward(way.model, way.inputs)
            through.propagate()
        found = {name: node.relevance.sum((0, 2)).cpu().numpy() for name, node in through.head_outputs.items()}
        return {name: (told, np.full(len(told), told.sum())) for name, told in found.items()}


class RelevanceForward:
    """A run of a model of ours that can be followed back: what every head says is a node of it."""

    def __init__(self, model: Transformer, inputs: ModelInputs) -> None:
        self.net, self.tape, names = model, RelevanceTape(), inputs.kwargs
        self.head_outputs: dict[str, RelevanceNode] = {}
        self.stack_inputs: dict[str, RelevanceNode] = {}  # what enters each stack
        ways = [(names.get("source"), names.get("source_sequence")), (names["x"], names.get("sequence"))]
        states: RelevanceNode | None = None
        told: SequenceInfo | None = None
        for stack, (ids, tokens) in zip(model.stacks.values(), ways[-len(model.stacks) :], strict=True):
            x, types = stack.embed(ids)
            at = resolve_sequence(x, tokens, None)
            states = self._run_stack(stack, stack.place(x, at, types), LayerInputs(at, None, None, told, {}), states)
            told = at
        assert states is not None
        assert told is not None
        self.out = self._run_output_head(states, told)
        _check_same_output("the model", self.out.value.amax(), self._embed_inputs(names).amax())

    def propagate(self) -> None:
        """Hand a relevance of 1, spread over the places that are asked, back from the largest logits."""
        self.tape.backward(self.top_logits, torch.full_like(self.top_logits.value, 1 / len(self.top_logits.value)))

    def _embed_inputs(self, names: Mapping[str, Any]) -> Tensor:
        return self.net(**names).double()

    def _run_stack(
        self, stack: LayerStack, x: Tensor, call: LayerInputs, states: RelevanceNode | None
    ) -> RelevanceNode:
        h = self.stack_inputs[stack.spec.name] = RelevanceNode(x[0].double())
        for layer in stack.blocks:
            h = self._run_layer(layer, h, call, states)
        return h if stack.norm is None else self._run_norm(stack.norm, h)

    def _run_layer(
        self, layer: TransformerLayer, x: RelevanceNode, call: LayerInputs, states: RelevanceNode | None
    ) -> RelevanceNode:
        """As the layer does it, by where its norms stand."""
        place, tape = layer.placement, self.tape
        norms = {name: one for name, one in layer.named_children() if isinstance(one, NormLayer)}
        if place in ("parallel", "abreast"):
            inner = {name: "norm" if place == "parallel" else f"{name}_norm" for name in layer.sublayers}
            before = {name: self._run_norm(norms[norm], x) if norm in norms else x for name, norm in inner.items()}
            return tape.sum_terms(x, *(self._run_sublayer(layer, name, z, call, states) for name, z in before.items()))
        for name in layer.sublayers:
            moves = name not in layer.still
            before = self._run_norm(norms[f"{name}_norm"], x) if moves and place in ("pre", "sandwich") else x
            y = self._run_sublayer(layer, name, before, call, states)
            if moves and place in ("after", "sandwich"):
                y = self._run_norm(norms[f"{name}_norm{'_after' if place == 'sandwich' else ''}"], y)
            x = tape.sum_terms(x, y)
            x = self._run_norm(norms[f"{name}_norm"], x) if place == "post" else x
        return x

    def _run_sublayer(
        self, layer: TransformerLayer, name: str, x: RelevanceNode, call: LayerInputs, states: RelevanceNode | None
    ) -> RelevanceNode:
        if name in layer.still:
            return RelevanceNode(layer.get_parameter(f"{name}.constant").detach().double().expand_as(x.value))
        if name == "feed":
            assert isinstance(layer.feed, FeedForward)
            y = self._run_feed_forward(layer.feed, x)
        else:
            y = self._run_attention(layer, name, (x, states), call)
        return y if layer.scale == 1 else self.tape.identity(y, y.value * layer.scale)

    def _run_norm(self, norm: NormLayer, x: RelevanceNode) -> RelevanceNode:
        like = next(norm.parameters(), x.value)
        value = norm(x.value[None].to(like.dtype))[0].double()
        if norm.kind not in ("layer", "unbiased", "bare"):
            return self.tape.identity(x, value)
        deviation = (x.value.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        gain, wide = norm.get_weight("weight"), x.value.shape[-1]
        centred = torch.eye(wide, dtype=torch.float64, device=x.value.device) - 1 / wide
        weight = centred if gain is None else gain.double()[:, None] * centred
        return self.tape.linear(self.tape.identity(x, x.value / deviation), weight, norm.get_weight("bias"))

    def _run_feed_forward(self, feed: FeedForward, x: RelevanceNode) -> RelevanceNode:
        like = feed.down
        assert isinstance(like, Tensor)
        given = x.value[None].to(like.dtype)
        inner = feed.join(lambda name: feed.linear(given, name))[0].double()
        up = self.tape.linear(x, _get_tensor(feed, "up"), feed.get_weight("up_bias"))
        return self.tape.linear(self.tape.identity(up, inner), _get_tensor(feed, "down"), feed.get_weight("down_bias"))

    def _run_attention(
        self, layer: TransformerLayer, name: str, nodes: tuple[RelevanceNode, RelevanceNode | None], call: LayerInputs
    ) -> RelevanceNode:
        attention, (x, states), site = layer.attentions[name], nodes, f"{layer.name}.{name}"
        told = x if name == "attention" or states is None else states
        like = next(attention.parameters())
        given, read = (one.value[None].to(like.dtype) for one in (x, told))
        source = None if told is x else attention.project_source(read, sequence=call.told)
        probe = Probe("weights", "heads")
        o_BTOV = attention.head_outputs(given, source=source, sequence=call.at, probe=probe)
        weight, bias, groups = _probe_value_map(attention, site)
        v = self.tape.reshape(self.tape.linear(told, weight, bias), (len(told.value), groups, -1))
        core = attention.spec.core_of(attention.spec.projection_form(one=False))
        z = self.tape.attention_read(v, probe.tensors["weights"][0], core.value_head_of_row)
        _check_same_output(site, z.value, o_BTOV[0].double())
        self.head_outputs[site] = z
        weight, bias = _probe_output_map(attention, o_BTOV)
        flat = self.tape.reshape(z, (len(x.value), -1))
        return self.tape.linear(flat, weight, bias, attention.merge_heads(o_BTOV)[0].double())

    def _run_output_head(self, h: RelevanceNode, at: SequenceInfo) -> RelevanceNode:
        """The logits of the model's first head; `likeliest` is the largest of each place."""
        head = next(iter(self.net.head.values()))
        assert isinstance(head, OutputHead)
        told, tape = head.spec, self.tape
        if told.at != "each":
            h = tape.reshape(
                tape.attention_read(tape.reshape(h, (len(h.value), 1, -1)), _pooling_weights(told.at, at), (0,)),
                (1, -1),
            )
        if head.activation is not None:
            y = tape.linear(h, _get_tensor(head, "transform"), head.get_weight("transform_bias"))
            h = tape.identity(y, head.activation(y.value))
            h = h if head.transform_norm is None else self._run_norm(head.transform_norm, h)
        h = h if told.scale == 1 else tape.identity(h, h.value * told.scale)
        weight = self._output_weight(head).double()
        bias = head.get_weight("bias")
        logits = h.value @ weight.T + (0 if bias is None else bias.double())
        top = logits.argmax(-1)
        self.top_logits = tape.elementwise_linear(h, weight[top], None if bias is None else bias[top])
        return RelevanceNode(logits if told.cap is None else told.cap * torch.tanh(logits / told.cap))

    def _output_weight(self, head: OutputHead) -> Tensor:
        """The weight of a head, its own or the table of a stack."""
        if not head.spec.table:
            return _get_tensor(head, "weight")
        embedding = self.net.stacks[head.spec.table].embedding
        assert embedding is not None
        return embedding.table


def _get_tensor(module: nn.Module, name: str) -> Tensor:
    found = getattr(module, name)
    assert isinstance(found, Tensor)
    return found


def _pooling_weights(how: str, at: SequenceInfo) -> Tensor:
    """How much of each token a head that reads a row as a whole takes, [1, 1, T]."""
    live = at.is_real[0].double()
    places = live.nonzero().flatten()
    if how == "mean":
        return (live / live.sum())[None, None]
    picked = torch.zeros_like(live)
    picked[places[0 if how == "first" else -1]] = 1
    return picked[None, None]


def _probe_value_map(attention: Attention, site: str) -> tuple[Tensor, Tensor, int]:
    """The map from a token to what is remembered of its values, found by asking: one token for each channel."""
    like = next(attention.parameters())
    wide = attention.spec.source or attention.spec.model
    ask = torch.cat([torch.zeros(1, wide), torch.eye(wide)]).to(like)[:, None]
    entry = attention.project_source(ask).entry
    if "v" not in entry:
        raise ValueError(f"relevance cannot be handed through {site}: it does not remember values; use another method")
    found = entry["v"][:, 0]
    flat = found.flatten(1).double()
    return (flat[1:] - flat[0]).T, flat[0], found.shape[1]


def _probe_output_map(attention: Attention, o_BTOV: Tensor) -> tuple[Tensor, Tensor]:
    """The map from what heads say to what the layer says, found in the same way."""
    heads, wide = o_BTOV.shape[2:]
    ask = torch.cat([torch.zeros(1, heads * wide), torch.eye(heads * wide)]).to(o_BTOV)
    found = attention.merge_heads(ask.view(-1, 1, heads, wide))[:, 0].double()
    return (found[1:] - found[0]).T, found[0]


def _check_same_output(where: str, followed: Tensor, own: Tensor) -> None:
    """Refuse where what is followed is not what the model does: a part of it is more than is known here."""
    off = float((followed - own).abs().max())
    if not off <= TOLERANCE * max(1.0, float(own.abs().max())):
        fact = f"{where} does more than read values by weights, and what it does besides is not known"
        raise ValueError(f"relevance cannot be handed through: {fact}; use another method")
