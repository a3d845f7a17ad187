"""A model with other attentions in it, everything else as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..blueprint import Block, Model
from ..blueprint.stack import ATTENTIONS, runs_of
from ..errors import SpecError, nearest
from ..hub.living import copied
from ..models import Transformer, build
from ..models.feeds import Normed
from ..module import Attention
from ..spec import AttentionSpec


class Changed(NamedTuple):
    """What becomes of one attention: its spec, and its weights by the names they have inside it, "project.q".

    Without a spec the attention goes, and what is left of it is the vector that it says at every token, "constant".
    """

    spec: AttentionSpec | None
    weights: Mapping[str, Tensor]


def ours(model: nn.Module) -> Transformer:
    """A model of ours as it is, one of transformers as a copy that is."""
    return model if isinstance(model, Transformer) else copied(model)


def weights_of(net: Transformer, site: str) -> dict[str, Tensor]:
    """Every tensor that one attention reads, by its name inside it; what layers hold in common is read by each.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> weights_of(net, "decoder.0.attention")["output.o_bias"].shape
    torch.Size([8])
    """
    attention = attention_of(net, site)
    return {name: _held(attention, name).detach() for name in attention.spec.params()}


def attention_of(net: Transformer, site: str) -> Attention:
    """The attention of this name."""
    known = [name for name, _ in net.described.specs()]
    if site not in known:
        raise SpecError(f"{net.described.name} has no attention {site!r}; {nearest(site, known)}")
    stack, depth, role = site.split(".")
    return net.stacks[stack].blocks[int(depth)].attentions[role]


def _held(attention: Attention, name: str) -> Tensor:
    part, key = name.split(".")
    return attention.weights[part][key]


def rebuilt(net: Transformer, changes: Mapping[str, Changed]) -> Transformer:
    """A new model in which these attentions are others, and all other tensors are copies of what they were.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}), seed=0
    ... )
    >>> gone = rebuilt(net, {"decoder.1.attention": Changed(None, {"constant": torch.ones(8)})})
    >>> [block.still for block in gone.described.stacks[0].layers]
    [(), ('attention',)]
    """
    whole = {site: _settled(net, site, change) for site, change in changes.items()}
    described = _described(net.described, whole)
    with torch.device("meta"):
        made = build(described, dropout=net.dropout)
    made.load_state_dict(dict(_tensors(net, described, whole)), assign=True)
    made.usage, made.checkpointing = net.usage, net.checkpointing
    _check_shared(made, whole)
    return made.train(net.training)


def _settled(net: Transformer, site: str, change: Changed) -> Changed:
    """The same; of an attention that goes, the vector is what its layer then adds, through scale and norm behind it."""
    attention = attention_of(net, site)
    if change.spec is not None:
        return change
    stack, depth, role = site.split(".")
    layer = net.stacks[stack].blocks[int(depth)]
    if layer.described.form == "merged":
        raise SpecError(f"{site} carries the mean of a merged block, which no vector is; keep one of its heads")
    added = change.weights.get("constant", torch.zeros(attention.spec.model)).to(next(net.parameters())) * layer.scale
    behind = layer._modules.get({"after": f"{role}_norm", "sandwich": f"{role}_norm_after"}.get(layer.placement, ""))
    with torch.no_grad():
        return Changed(None, {"constant": added if behind is None else cast(Normed, behind)(added)})


def _described(model: Model, changes: Mapping[str, Changed]) -> Model:
    stacks = []
    for stack in model.stacks:
        blocks = list(stack.layers)
        for depth, block in enumerate(blocks):
            own = {role: changes[site] for role in ATTENTIONS if (site := f"{stack.name}.{depth}.{role}") in changes}
            blocks[depth] = _block(block, own)
        stacks.append(replace(stack, runs=runs_of(blocks)))
    return replace(model, stacks=tuple(stacks))


def _block(block: Block, changes: Mapping[str, Changed]) -> Block:
    if not changes:
        return block
    gone = [role for role, change in changes.items() if change.spec is None]
    still = tuple(role for role in ATTENTIONS if role in block.still or role in gone)
    specs = {role: changes[role].spec if role in changes else getattr(block, role) for role in ATTENTIONS}
    return replace(block, **specs, still=still)


def _tensors(net: Transformer, described: Model, changes: Mapping[str, Changed]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the new model, in memory of its own; a shared one is named where it now first stands."""
    held = net.state_dict()
    for name in described.shapes():
        site, inner = ".".join(name.split(".")[:3]), ".".join(name.split(".")[3:])
        if site in changes:
            tensor = changes[site].weights[inner]
        else:
            tensor = held[name] if name in held else _held(attention_of(net, site), inner)
        yield name, tensor.detach().clone().contiguous()


def _check_shared(made: Transformer, changes: Mapping[str, Changed]) -> None:
    """Refuse a change of a tensor that other layers read as it was."""
    for site, change in changes.items():
        if change.spec is None:
            continue
        attention = attention_of(made, site)
        for name, wanted in change.weights.items():
            if not torch.equal(_held(attention, name), wanted.to(_held(attention, name))):
                raise SpecError(f"{site}.{name} is held in common with other layers; change it in all of them alike")
