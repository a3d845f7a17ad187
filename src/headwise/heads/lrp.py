"""Relevance of heads for what a model of ours says likeliest, weights of attention taken as constants (1905.09418)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..blueprint import Experts
from ..hub.readable import Readable
from ..models import Transformer
from ..models.block import Call, Layer, Layers
from ..models.ends import Reading
from ..models.feeds import Feed, Normed
from ..models.transformer import placed
from ..module import Attention
from ..probe import Probe
from ..tokens import Tokens
from .methods import Clock, Method, Text
from .rating import Worths
from .relevance import Node, Tape

CLOSE = 1e-4  # of the largest number: what is followed must come out as the model has it


@dataclass(frozen=True)
class Relevance(Method):
    """The share of a site's relevance for the likeliest output that goes through each head (LRP, 1905.09418).

    It begins with 1 for each text, spread over its places, at the largest logit of each. Weights of attention, gates of
    feed-forwards and the deviations of norms (2202.07304) are constants; all else as `relevance` says.
    """

    name = "lrp"
    measures = "largest logit"
    notes = ("weights of attention, gates and deviations of norms are constants",)

    def refuses(self, model: nn.Module) -> str:
        if not isinstance(model, Transformer):
            return f"the layers of {type(model).__name__} are not known here; hw.load reads a folder as a model of ours"
        described = model.described
        if not described.heads or not described.heads[0].outputs:
            return f"{described.name} has no head whose largest output could be followed"
        for stack in described.stacks:
            for depth, block in enumerate(stack.layers):
                if isinstance(block.feed, Experts):
                    return f"{stack.name}.{depth} chooses among experts, which relevance is not handed through"
                if block.form == "merged":
                    return f"{stack.name}.{depth} merges two attentions, which relevance is not handed through"
        return ""

    def values(self, texts: Sequence[Text], check: Clock) -> Worths:
        way = texts[0].way
        assert isinstance(way.model, Transformer)
        with torch.inference_mode():
            through = Through(way.model, way.given)
            through.follow()
        found = {name: node.relevance.sum((0, 2)).cpu().numpy() for name, node in through.heads.items()}
        return {name: (told, np.full(len(told), told.sum())) for name, told in found.items()}


class Through:
    """A run of a model of ours that can be followed back: what every head says is a node of it."""

    def __init__(self, net: Transformer, given: Readable) -> None:
        self.net, self.tape, names = net, Tape(), given.names
        self.heads: dict[str, Node] = {}
        self.starts: dict[str, Node] = {}  # what enters each stack
        ways = [(names.get("source"), names.get("source_tokens")), (names["x"], names.get("tokens"))]
        states: Node | None = None
        told: Tokens | None = None
        for stack, (ids, tokens) in zip(net.stacks.values(), ways[-len(net.stacks) :], strict=True):
            x, types = stack.embed(ids)
            at = placed(x, tokens, None)
            states = self._stack(stack, stack.place(x, at, types), Call(at, None, None, told, {}), states)
            told = at
        assert states is not None
        assert told is not None
        self.out = self._read(states, told)
        _check("the model", self.out.value.amax(), self._own(names).amax())

    def follow(self) -> None:
        """Hand a relevance of 1, spread over the places that are asked, back from the largest logits."""
        self.tape.back(self.likeliest, torch.full_like(self.likeliest.value, 1 / len(self.likeliest.value)))

    def _own(self, names: Mapping[str, Any]) -> Tensor:
        return self.net(**names).double()

    def _stack(self, stack: Layers, x: Tensor, call: Call, states: Node | None) -> Node:
        h = self.starts[stack.described.name] = Node(x[0].double())
        for layer in stack.blocks:
            h = self._layer(layer, h, call, states)
        return h if stack.norm is None else self._normed(stack.norm, h)

    def _layer(self, layer: Layer, x: Node, call: Call, states: Node | None) -> Node:
        """As the layer does it, by where its norms stand."""
        place, tape = layer.placement, self.tape
        norms = {name: one for name, one in layer.named_children() if isinstance(one, Normed)}
        if place in ("parallel", "abreast"):
            inner = {name: "norm" if place == "parallel" else f"{name}_norm" for name in layer.sublayers}
            before = {name: self._normed(norms[norm], x) if norm in norms else x for name, norm in inner.items()}
            return tape.added(x, *(self._sub(layer, name, z, call, states) for name, z in before.items()))
        for name in layer.sublayers:
            moves = name not in layer.still
            before = self._normed(norms[f"{name}_norm"], x) if moves and place in ("pre", "sandwich") else x
            y = self._sub(layer, name, before, call, states)
            if moves and place in ("after", "sandwich"):
                y = self._normed(norms[f"{name}_norm{'_after' if place == 'sandwich' else ''}"], y)
            x = tape.added(x, y)
            x = self._normed(norms[f"{name}_norm"], x) if place == "post" else x
        return x

    def _sub(self, layer: Layer, name: str, x: Node, call: Call, states: Node | None) -> Node:
        if name in layer.still:
            return Node(layer.get_parameter(f"{name}.constant").detach().double().expand_as(x.value))
        if name == "feed":
            assert isinstance(layer.feed, Feed)
            y = self._feed(layer.feed, x)
        else:
            y = self._attended(layer, name, (x, states), call)
        return y if layer.scale == 1 else self.tape.passed(y, y.value * layer.scale)

    def _normed(self, norm: Normed, x: Node) -> Node:
        like = next(norm.parameters(), x.value)
        value = norm(x.value[None].to(like.dtype))[0].double()
        if norm.kind not in ("layer", "unbiased", "bare"):
            return self.tape.passed(x, value)
        deviation = (x.value.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        gain, wide = norm.maybe("weight"), x.value.shape[-1]
        centred = torch.eye(wide, dtype=torch.float64, device=x.value.device) - 1 / wide
        weight = centred if gain is None else gain.double()[:, None] * centred
        return self.tape.linear(self.tape.passed(x, x.value / deviation), weight, norm.maybe("bias"))

    def _feed(self, feed: Feed, x: Node) -> Node:
        like = feed.down
        assert isinstance(like, Tensor)
        given = x.value[None].to(like.dtype)
        inner = feed.join(lambda name: feed.linear(given, name))[0].double()
        up = self.tape.linear(x, _tensor(feed, "up"), feed.maybe("up_bias"))
        return self.tape.linear(self.tape.passed(up, inner), _tensor(feed, "down"), feed.maybe("down_bias"))

    def _attended(self, layer: Layer, name: str, nodes: tuple[Node, Node | None], call: Call) -> Node:
        attention, (x, states), site = layer.attentions[name], nodes, f"{layer.name}.{name}"
        told = x if name == "attention" or states is None else states
        like = next(attention.parameters())
        given, read = (one.value[None].to(like.dtype) for one in (x, told))
        source = None if told is x else attention.remember(read, tokens=call.told)
        probe = Probe("weights", "heads")
        o_BTOV = attention.heads(given, source=source, tokens=call.at, probe=probe)
        weight, bias, groups = _values(attention, site)
        v = self.tape.shaped(self.tape.linear(told, weight, bias), (len(told.value), groups, -1))
        core = attention.spec.core_of(attention.spec.form(one=False))
        z = self.tape.read(v, probe.seen["weights"][0], core.values)
        _check(site, z.value, o_BTOV[0].double())
        self.heads[site] = z
        weight, bias = _merge(attention, o_BTOV)
        flat = self.tape.shaped(z, (len(x.value), -1))
        return self.tape.linear(flat, weight, bias, attention.merge(o_BTOV)[0].double())

    def _read(self, h: Node, at: Tokens) -> Node:
        """The logits of the model's first head; `likeliest` is the largest of each place."""
        head = next(iter(self.net.head.values()))
        assert isinstance(head, Reading)
        told, tape = head.described, self.tape
        if told.at != "each":
            h = tape.shaped(tape.read(tape.shaped(h, (len(h.value), 1, -1)), _pooled(told.at, at), (0,)), (1, -1))
        if head.act is not None:
            y = tape.linear(h, _tensor(head, "transform"), head.maybe("transform_bias"))
            h = tape.passed(y, head.act(y.value))
            h = h if head.transform_norm is None else self._normed(head.transform_norm, h)
        h = h if told.scale == 1 else tape.passed(h, h.value * told.scale)
        weight = self._words(head).double()
        bias = head.maybe("bias")
        logits = h.value @ weight.T + (0 if bias is None else bias.double())
        top = logits.argmax(-1)
        self.likeliest = tape.picked(h, weight[top], None if bias is None else bias[top])
        return Node(logits if told.cap is None else told.cap * torch.tanh(logits / told.cap))

    def _words(self, head: Reading) -> Tensor:
        """The weight of a head, its own or the table of a stack."""
        if not head.described.table:
            return _tensor(head, "weight")
        embedding = self.net.stacks[head.described.table].embedding
        assert embedding is not None
        return embedding.table


def _tensor(module: nn.Module, name: str) -> Tensor:
    found = getattr(module, name)
    assert isinstance(found, Tensor)
    return found


def _pooled(how: str, at: Tokens) -> Tensor:
    """How much of each token a head that reads a row as a whole takes, [1, 1, T]."""
    live = at.live[0].double()
    places = live.nonzero().flatten()
    if how == "mean":
        return (live / live.sum())[None, None]
    picked = torch.zeros_like(live)
    picked[places[0 if how == "first" else -1]] = 1
    return picked[None, None]


def _values(attention: Attention, site: str) -> tuple[Tensor, Tensor, int]:
    """The map from a token to what is remembered of its values, found by asking: one token for each channel."""
    like = next(attention.parameters())
    wide = attention.spec.source or attention.spec.model
    ask = torch.cat([torch.zeros(1, wide), torch.eye(wide)]).to(like)[:, None]
    entry = attention.remember(ask).entry
    if "v" not in entry:
        raise ValueError(f"relevance cannot be handed through {site}: it does not remember values; use another method")
    found = entry["v"][:, 0]
    flat = found.flatten(1).double()
    return (flat[1:] - flat[0]).T, flat[0], found.shape[1]


def _merge(attention: Attention, o_BTOV: Tensor) -> tuple[Tensor, Tensor]:
    """The map from what heads say to what the layer says, found in the same way."""
    heads, wide = o_BTOV.shape[2:]
    ask = torch.cat([torch.zeros(1, heads * wide), torch.eye(heads * wide)]).to(o_BTOV)
    found = attention.merge(ask.view(-1, 1, heads, wide))[:, 0].double()
    return (found[1:] - found[0]).T, found[0]


def _check(where: str, followed: Tensor, own: Tensor) -> None:
    """Refuse where what is followed is not what the model does: a part of it is more than is known here."""
    off = float((followed - own).abs().max())
    if not off <= CLOSE * max(1.0, float(own.abs().max())):
        fact = f"{where} does more than read values by weights, and what it does besides is not known"
        raise ValueError(f"relevance cannot be handed through: {fact}; use another method")
