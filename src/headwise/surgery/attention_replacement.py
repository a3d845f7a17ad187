"""A model with other attentions in it, everything else as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..errors import SpecError, suggest
from ..hub.model_import import copy_live_model
from ..interfaces.registry import field_defaults
from ..model_spec import BlockSpec, ModelSpec
from ..model_spec.model import ATTENTION_SUBLAYERS, group_blocks
from ..models import Transformer, build
from ..models.feed_forward import NormLayer
from ..nn.attention import Attention
from ..nn.head_axis_ops import keep_heads
from ..spec.attention_spec import AttentionSpec
from .pruning_plan import check_heads


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
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> get_attention_parameters(net, "decoder.0.attention")["output.o_bias"].shape
    torch.Size([8])
    """
    attention = get_attention(net, site)
    return {name: _get_parameter(attention, name).detach() for name in attention.spec.params()}


def get_attention(net: Transformer, site: str) -> Attention:
    """The attention of this name."""
    known = [name for name, _ in net.spec.attention_specs()]
    if site not in known:
        raise SpecError(f"{net.spec.name} has no attention {site!r}; {suggest(site, known)}")
    stack, depth, role = site.split(".")
    return net.stacks[stack].blocks[int(depth)].attentions[role]


def _get_parameter(attention: Attention, name: str) -> Tensor:
    part, key = name.split(".")
    return attention.weights[part][key]


def replace_attentions(net: Transformer, changes: Mapping[str, AttentionChange]) -> Transformer:
    """A new model in which these attentions are others, and all other tensors are copies of what they were.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> gone = replace_attentions(net, {"decoder.1.attention": AttentionChange(None, {"constant": torch.ones(8)})})
    >>> [block.still for block in gone.spec.stacks[0].layers]
    [(), ('attention',)]
    """
    whole = {site: _resolve_constant(net, site, change) for site, change in changes.items()}
    described = _replace_specs(net.spec, whole)
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
    if layer.spec.form == "merged":
        raise SpecError(f"{site} carries the mean of a merged block, which no vector is; keep one of its heads")
    added = change.weights.get("constant", torch.zeros(attention.spec.model)).to(next(net.parameters())) * layer.scale
    behind = layer._modules.get({"after": f"{role}_norm", "sandwich": f"{role}_norm_after"}.get(layer.placement, ""))
    with torch.no_grad():
        return AttentionChange(None, {"constant": added if behind is None else cast(NormLayer, behind)(added)})


def _replace_specs(model: ModelSpec, changes: Mapping[str, AttentionChange]) -> ModelSpec:
    stacks = []
    for stack in model.stacks:
        blocks = list(stack.layers)
        for depth, block in enumerate(blocks):
            own = {
                role: changes[site]
                for role in ATTENTION_SUBLAYERS
                if (site := f"{stack.name}.{depth}.{role}") in changes
            }
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


def _tensors(
    net: Transformer, described: ModelSpec, changes: Mapping[str, AttentionChange]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the new model, in memory of its own; a shared one is named where it now first stands."""
    held = net.state_dict()
    for name in described.shapes():
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


# --- Heads taken out of a model, which then says what it said with them silent -------------------------

NO_CONSTANTS: Mapping[str, Tensor] = {}


def remove_heads(
    net: Transformer, keep: Mapping[str, Sequence[int]], constants: Mapping[str, Tensor] = NO_CONSTANTS
) -> Transformer:
    """A new model with only these heads at these sites; a site that keeps none says one vector from then on.

    `constants` are vectors [model] that sites add from then on, such as what the removed heads said on average.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> small, x = (
    ...     remove_heads(net, {"decoder.0.attention": (0, 2), "decoder.1.attention": ()}),
    ...     torch.tensor([[3, 1, 4]]),
    ... )
    >>> with hw.ablate(net, [(0, 1), (0, 3), (1, "all")]):
    ...     torch.allclose(net(x), small(x), atol=1e-6)
    True
    """
    if wrong := [site for site in constants if site not in keep]:
        raise SpecError(f"{wrong[0]} keeps all of its heads, and no vector stands for any; say which it keeps")
    changes = {site: _shrink_attention(net, site, heads, constants.get(site)) for site, heads in keep.items()}
    if changes.keys() >= {site for site, _ in net.spec.attention_specs()} and not any(keep.values()):
        raise SpecError(f"no head would be left in {net.spec.name}; keep at least one")
    return replace_attentions(net, changes)


def _shrink_attention(net: Transformer, site: str, heads: Sequence[int], constant: Tensor | None) -> AttentionChange:
    spec, weights = get_attention(net, site).spec, get_attention_parameters(net, site)
    check_heads(site, heads, len(spec.score_head_of_output))
    _check_removable(net, site)
    if not heads:
        said = output_without_heads(spec, weights, next(net.parameters()))
        return AttentionChange(None, {"constant": said if constant is None else said + constant.to(said)})
    smaller, left = keep_heads(spec, weights, heads)
    return (
        AttentionChange(smaller, left)
        if constant is None
        else add_constant(smaller, left, constant.to(next(net.parameters())))
    )


def _check_removable(net: Transformer, site: str) -> None:
    stack, depth, _ = site.split(".")
    if net.stacks[stack].blocks[int(depth)].spec.form == "merged":
        raise SpecError(
            f"{site} reads its source and a mean of the past through the same heads; to cut one would cut both"
        )


def output_without_heads(spec: AttentionSpec, weights: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """What a layer says when all of its heads are silent, [model]: the bias of its merge, or nothing."""
    own = {name.removeprefix("output."): tensor for name, tensor in weights.items() if name.startswith("output.")}
    silent_BTOV = like.new_zeros(1, 1, len(spec.score_head_of_output), spec.heads.vdim)
    with torch.no_grad():
        return spec.merge.merge(silent_BTOV, own)[0, 0]  # pyright: ignore[reportArgumentType] - by name alone


def add_constant(spec: AttentionSpec, weights: Mapping[str, Tensor], constant: Tensor) -> AttentionChange:
    """The same layer, which adds a vector to whatever it says: to the bias of its merge, made where there is none."""
    if "bias" not in field_defaults(type(spec.merge)):
        raise SpecError(f"{type(spec.merge).__name__} has no bias that could say it; fold nothing in")
    said = output_without_heads(spec, weights, constant)
    biased = replace(spec, merge=replace(spec.merge, bias="o"))
    return AttentionChange(biased, {**weights, "output.o_bias": said + constant})
