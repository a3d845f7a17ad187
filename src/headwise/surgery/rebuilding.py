"""A model with other attentions in it, everything else as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..blueprint import BlockSpec, ModelSpec
from ..blueprint.stack import ATTENTION_SUBLAYERS, group_blocks
from ..errors import SpecError, suggest
from ..hub.living import copy_live_model
from ..models import Transformer, build
from ..models.feeds import Normed
from ..module import Attention
from ..spec import AttentionSpec


class AttentionChange(NamedTuple):
    """What becomes of one attention: its spec, and its weights by the names they have inside it, "project.q".

    Without a spec the attention goes, and what is left of it is the vector that it says at every token, "constant".
    """

    spec: AttentionSpec | None
    weights: Mapping[str, Tensor]


def to_native_model(model: nn.Module) -> Transformer:
    """A model of ours as it is, one of transformers as a copy that is."""
    return model if isinstance(model, Transformer) else copy_live_model(model)


def get_attention_parameters(net: Transformer, site: str) -> dict[str, Tensor]:
    """Every tensor that one attention reads, by its name inside it; what layers hold in common is read by each.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> get_attention_parameters(net, "decoder.0.attention")["output.o_bias"].shape
    torch.Size([8])
    """
    attention = get_attention(net, site)
    return {name: _get_parameter(attention, name).detach() for name in attention.spec.params()}


def get_attention(net: Transformer, site: str) -> Attention:
    """The attention of this name."""
    known = [name for name, _ in net.described.attention_specs()]
    if site not in known:
        raise SpecError(f"{net.described.name} has no attention {site!r}; {suggest(site, known)}")
    stack, depth, role = site.split(".")
    return net.stacks[stack].blocks[int(depth)].attentions[role]


def _get_parameter(attention: Attention, name: str) -> Tensor:
    part, key = name.split(".")
    return attention.weights[part][key]


def replace_attentions(net: Transformer, changes: Mapping[str, AttentionChange]) -> Transformer:
    """A new model in which these attentions are others, and all other tensors are copies of what they were.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}), seed=0
    ... )
    >>> gone = replace_attentions(net, {"decoder.1.attention": AttentionChange(None, {"constant": torch.ones(8)})})
    >>> [block.still for block in gone.described.stacks[0].layers]
    [(), ('attention',)]
    """
    whole = {site: _resolve_constant(net, site, change) for site, change in changes.items()}
    described = _replace_specs(net.described, whole)
    with torch.device("meta"):
        made = build(described, dropout=net.dropout)
    made.load_state_dict(dict(_tensors(net, described, whole)), assign=True)
    made.usage, made.checkpointing = net.usage, net.checkpointing
    _check_shared(made, whole)
    return made.train(net.training)


def _resolve_constant(net: Transformer, site: str, change: AttentionChange) -> AttentionChange:
    """The same; of an attention that goes, the vector is what its layer then adds, through scale and norm behind it."""
    attention = get_attention(net, site)
    if change.spec is not None:
        return change
    stack, depth, role = site.split(".")
    layer = net.stacks[stack].blocks[int(depth)]
    if layer.described.form == "merged":
        raise SpecError(f"{site} carries the mean of a merged block, which no vector is; keep one of its heads")
    added = change.weights.get("constant", torch.zeros(attention.spec.model)).to(next(net.parameters())) * layer.scale
    behind = layer._modules.get({"after": f"{role}_norm", "sandwich": f"{role}_norm_after"}.get(layer.placement, ""))
    with torch.no_grad():
        return AttentionChange(None, {"constant": added if behind is None else cast(Normed, behind)(added)})


def _replace_specs(model: ModelSpec, changes: Mapping[str, AttentionChange]) -> ModelSpec:
    stacks = []
    for stack in model.stacks:
        blocks = list(stack.layers)
        for depth, block in enumerate(blocks):
            own = {role: changes[site] for role in ATTENTION_SUBLAYERS if (site := f"{stack.name}.{depth}.{role}") in changes}
            blocks[depth] = _replace_block_specs(block, own)
        stacks.append(replace(stack, runs=group_blocks(blocks)))
    return replace(model, stacks=tuple(stacks))


def _replace_block_specs(block: BlockSpec, changes: Mapping[str, AttentionChange]) -> BlockSpec:
    if not changes:
        return block
    gone = [role for role, change in changes.items() if change.spec is None]
    still = tuple(role for role in ATTENTION_SUBLAYERS if role in block.still or role in gone)
    specs = {role: changes[role].spec if role in changes else getattr(block, role) for role in ATTENTION_SUBLAYERS}
    return replace(block, **specs, still=still)


def _tensors(net: Transformer, described: ModelSpec, changes: Mapping[str, AttentionChange]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the new model, in memory of its own; a shared one is named where it now first stands."""
    held = net.state_dict()
    for name in described.shapes_by_name():
        site, inner = ".".join(name.split(".")[:3]), ".".join(name.split(".")[3:])
        if site in changes:
            tensor = changes[site].weights[inner]
        else:
            tensor = held[name] if name in held else _get_parameter(get_attention(net, site), inner)
        yield name, tensor.detach().clone().contiguous()


def _check_shared(made: Transformer, changes: Mapping[str, AttentionChange]) -> None:
    """Refuse a change of a tensor that other layers read as it was."""
    for site, change in changes.items():
        if change.spec is None:
            continue
        attention = get_attention(made, site)
        for name, wanted in change.weights.items():
            if not torch.equal(_get_parameter(attention, name), wanted.to(_get_parameter(attention, name))):
                raise SpecError(f"{site}.{name} is held in common with other layers; change it in all of them alike")
