"""Copies of a model with some attentions replaced, shrunk or removed, or with streaming heads; all
other weights are copied unchanged. Biases and query-key transforms can be folded into neighbouring
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..attention.attention import Attention
from ..attention.head_axis_ops import keep_heads
from ..attention.interfaces import Modifier, QKTransform
from ..attention.interfaces.core_types import PartParams, Phase
from ..attention.interfaces.part import field_defaults
from ..attention.masking.pattern_base import PerHead, head_pattern, select_heads
from ..attention.masking.patterns import Causal
from ..attention.spec.attention_spec import AttentionSpec
from ..hub.pretrained_models import copy_live_model
from ..kernels.devices import to_float64
from ..models import Transformer, build
from ..models.feed_forward import NormLayer
from ..models.model_spec import BlockSpec, ModelSpec, StackSpec, kv_owner
from ..models.model_spec.model import ATTENTION_SUBLAYERS, group_blocks
from ..observe.head_analysis.retrieval_heads import StreamingHeads, streaming_pattern
from ..util.errors import SpecError, suggest
from .pruning_plan import check_heads


class AttentionChange(NamedTuple):
    """Replacement of one attention: its new spec, and its weights by their names inside it, such as
    "project.q".

    With spec=None the attention is removed, and its output becomes the vector weights["constant"]
    at every token.
    """

    spec: AttentionSpec | None
    weights: Mapping[str, Tensor]


def to_native_model(model: nn.Module) -> Transformer:
    """Return a headwise model unchanged, and a transformers model as a converted copy."""
    return model if isinstance(model, Transformer) else copy_live_model(model)


def get_attention_parameters(net: Transformer, site: str) -> dict[str, Tensor]:
    """Return every parameter and constant of one attention by its name inside it, including those
    shared by layers.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> get_attention_parameters(net, "decoder.0.attention")["output.o_bias"].shape
    torch.Size([8])
    """
    attention = get_attention(net, site)
    return {name: _get_parameter(attention, name).detach() for name in attention.spec.params()}


def get_attention(net: Transformer, site: str) -> Attention:
    """Return the attention module with this site name."""
    names = [name for name, _ in net.spec.attention_specs()]
    if site not in names:
        raise SpecError(f"{net.spec.name} has no attention {site!r}; {suggest(site, names)}")
    stack, depth, role = site.split(".")
    return net.stacks[stack].blocks[int(depth)].attentions[role]


def _get_parameter(attention: Attention, name: str) -> Tensor:
    part, key = name.split(".")
    return attention.weights[part][key]


def replace_attentions(
    net: Transformer, changes: Mapping[str, AttentionChange], dtype: torch.dtype | None = None
) -> Transformer:
    """Return a new model with these attentions replaced; all other tensors are copies, with
    parameters in `dtype` if given.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> removed = replace_attentions(
    ...     net, {"decoder.1.attention": AttentionChange(None, {"constant": torch.ones(8)})}
    ... )
    >>> [block.constant_sublayers for block in removed.spec.stacks[0].layers]
    [(), ('attention',)]
    """
    _check_value_residuals(net, changes)
    resolved = {site: _resolve_constant(net, site, change) for site, change in changes.items()}
    spec = replace_specs(net.spec, {site: change.spec for site, change in resolved.items()})
    with torch.device("meta"):
        new = build(spec, dropout=net.dropout)
    new.load_state_dict(dict(_tensors(net, spec, resolved, dtype)), assign=True)
    new.usage = net.usage
    new.checkpointing = net.checkpointing
    for site, change in resolved.items():
        if change.spec is None:
            continue
        attention = get_attention(new, site)
        for name, expected in change.weights.items():
            actual = _get_parameter(attention, name)
            if not torch.equal(actual, expected.to(actual)):
                stack, depth, _ = site.split(".")
                owner = new.stacks[stack].blocks[int(depth)].kv_owner
                if owner:
                    raise SpecError(
                        f"{site} reads the keys and values of {owner}.attention, so both keep the "
                        "same key-value heads; name the heads with hw.surgery.DropHeads"
                    )
                raise SpecError(
                    f"{site}.{name} is shared with other layers; make the same change in all of "
                    "them"
                )
    return new.train(net.training)


def _check_value_residuals(net: Transformer, changes: Mapping[str, AttentionChange]) -> None:
    """Raise SpecError for changes after which a layer's values and those of the first layer, which
    are added head by head, are no longer of the same heads.
    """
    for stack in net.spec.stacks:
        added = [n for n, block in enumerate(stack.layers) if block.value_residual]
        sites = [f"{stack.name}.{n}.attention" for n in (0, *added) if added]
        of_sites = [_kept_value_heads(net, site, changes.get(site)) for site in sites]
        if any(None in heads or heads != of_sites[0] for heads in of_sites if heads):
            raise SpecError(
                f"values of {', '.join(sites)} are added head by head, so their key-value heads "
                "stay as they are, or the same ones go from all of these layers"
            )


def adds_first_values(model: ModelSpec, site: str) -> bool:
    """True if the values that an attention reads have those of the first layer in them."""
    name, depth, role = site.split(".")
    (layers,) = (stack.layers for stack in model.stacks if stack.name == name)
    return role == "attention" and bool(layers[kv_owner(layers, int(depth))].value_residual)


def _kept_value_heads(
    net: Transformer, site: str, change: AttentionChange | None
) -> list[int | None]:
    """Return the old number of each value head after a change, None for a head that was none
    before; nothing for a removed attention.
    """
    attention = get_attention(net, site)
    if change is None:
        return [*range(attention.spec.heads.num_value_heads)]
    if change.spec is None:
        return []
    old_GVE, new_GVE = (
        _values_by_head(weights, attention.spec.heads.vdim)
        for weights in (get_attention_parameters(net, site), change.weights)
    )
    return [
        next((n for n, old in enumerate(old_GVE) if torch.equal(old, new)), None) for new in new_GVE
    ]


def _values_by_head(weights: Mapping[str, Tensor], vdim: int) -> list[Tensor]:
    """Return W_V and b_V of each value head; one empty head if there is no W_V."""
    if "project.v" not in weights:
        return [torch.empty(0)]
    columns = [weights["project.v"]]
    if "project.v_bias" in weights:
        columns.append(weights["project.v_bias"][:, None])
    return [*torch.cat(list(map(to_float64, columns)), 1).unflatten(0, (-1, vdim))]


def _resolve_constant(net: Transformer, site: str, change: AttentionChange) -> AttentionChange:
    """For a removed attention, compute the vector its layer adds: the constant after the layer's
    scale and norm.
    """
    attention = get_attention(net, site)
    if change.spec is not None:
        return change
    stack, depth, role = site.split(".")
    layer = net.stacks[stack].blocks[int(depth)]
    if layer.spec.form == "merged":
        raise SpecError(
            f"cannot remove {site}: in a merged block it computes a running mean, which is no "
            "constant. Keep one of its heads"
        )
    constant = change.weights.get("constant", torch.zeros(attention.spec.model))
    added = constant.to(next(net.parameters())) * layer.scale
    norm_name = {"post_sublayer": f"{role}_norm", "sandwich": f"{role}_norm_after"}.get(
        layer.placement, ""
    )
    norm = layer._modules.get(norm_name)
    with torch.no_grad():
        added = added if norm is None else cast(NormLayer, norm)(added)
    return AttentionChange(None, {"constant": added})


def replace_specs(model: ModelSpec, specs: Mapping[str, AttentionSpec | None]) -> ModelSpec:
    """Return the model spec with these attention specs, by site; None is a removed attention, which
    becomes a constant.
    """
    stacks = list[StackSpec]()
    for stack in model.stacks:
        blocks = list[BlockSpec]()
        for depth, block in enumerate(stack.layers):
            own = {role: f"{stack.name}.{depth}.{role}" for role in ATTENTION_SUBLAYERS}
            changed = {role: specs[site] for role, site in own.items() if site in specs}
            constants = [
                role
                for role in own
                if role in block.constant_sublayers or changed.get(role, block) is None
            ]
            residual = "" if "attention" in constants else block.value_residual
            edited = replace(block, **changed, constant_sublayers=tuple(constants))
            blocks.append(replace(edited, value_residual=residual))
        stacks.append(replace(stack, runs=group_blocks(blocks)))
    return replace(model, stacks=tuple(stacks))


def _tensors(
    net: Transformer,
    spec: ModelSpec,
    changes: Mapping[str, AttentionChange],
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of every tensor of the new model; a shared one has the name of its first use.

    Buffers lose no precision by `dtype`.
    """
    old_tensors = net.state_dict()
    buffers = {name for name, _ in net.named_buffers()}
    for name in spec.shapes():
        site = ".".join(name.split(".")[:3])
        inner = ".".join(name.split(".")[3:])
        if site in changes:
            tensor = changes[site].weights[inner]
        elif name in old_tensors:
            tensor = old_tensors[name]
        else:
            tensor = _get_parameter(get_attention(net, site), inner)
        copy_dtype = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            is_buffer = name in buffers and site not in changes
            copy_dtype = torch.promote_types(tensor.dtype, dtype) if is_buffer else dtype
        yield name, tensor.detach().to(copy_dtype, copy=True).contiguous()


# --- Streaming heads (DuoAttention, 2410.10819) ---


def use_streaming_heads(
    model: nn.Module,
    heads: StreamingHeads | Path | str,
    *,
    sparsity: float = 0.5,
    threshold: float | None = None,
) -> Transformer:
    """Return a copy of a decoder in which streaming heads attend to first and latest tokens alone,
    and so does its KV cache.

    `heads` are scores or their folder. The share `sparsity` of key-value heads with the lowest
    scores streams, or with `threshold` all heads below it.

    >>> import headwise as hw, numpy as np
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> scores = StreamingHeads(np.array([[0.1, 0.7]]), sinks=2, window=3)
    >>> [(_, spec)] = use_streaming_heads(net, scores).spec.attention_specs()
    >>> spec.pattern.text
    'perhead((window(3) | first(2), causal()), (0, 1))'
    """
    net = to_native_model(model)
    heads = heads if isinstance(heads, StreamingHeads) else StreamingHeads.read(heads)
    is_streaming = heads.select(sparsity=sparsity, threshold=threshold)
    specs = dict(net.spec.attention_specs())
    sizes = [spec.heads.kv for spec in specs.values()]
    if heads.counts != sizes:
        fact = f"the scores are for layers of {heads.counts} key-value heads"
        raise SpecError(f"{fact}, and {net.spec.name} has {sizes}; measure this model")
    streaming = streaming_pattern(heads.sinks, heads.window)
    changes: dict[str, AttentionChange] = {}
    for layer, (site, spec) in enumerate(specs.items()):
        patterns = [head_pattern(spec.pattern, head) for head in range(spec.heads.q)]
        for head, kv in enumerate(spec.heads.kv_head_of_query):
            if is_streaming[layer, kv]:
                is_causal = patterns[head] == Causal()
                patterns[head] = streaming if is_causal else patterns[head] & streaming
        pattern = select_heads(PerHead.from_heads(patterns), range(spec.heads.q))
        weights = get_attention_parameters(net, site)
        changes[site] = AttentionChange(replace(spec, pattern=pattern), weights)
    return replace_attentions(net, changes)


# --- Removal of heads, equal to zero ablation -----------------------------------------------------

NO_CONSTANTS: Mapping[str, Tensor] = {}


def remove_heads(
    net: Transformer,
    keep: Mapping[str, Sequence[int]],
    constants: Mapping[str, Tensor] = NO_CONSTANTS,
    dtype: torch.dtype | None = None,
) -> Transformer:
    """Return a new model that keeps only these heads at these sites; a site that keeps none outputs
    one vector.

    `constants` are vectors [model] added to the output of sites, such as the average output of the
    removed heads. `dtype` makes the change in another precision, if given.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> small, x = (
    ...     remove_heads(net, {"decoder.0.attention": (0, 2), "decoder.1.attention": ()}),
    ...     torch.tensor([[3, 1, 4]]),
    ... )
    >>> with hw.ablate(net, [(0, 1), (0, 3), (1, "all")]):
    ...     torch.allclose(net(x), small(x), atol=1e-6)
    True
    """
    for site in constants:
        if site not in keep:
            raise SpecError(
                f"cannot add a constant to {site}: keep does not list it. Add the heads that it "
                "keeps"
            )
    like = next(net.parameters())
    like = like if dtype is None else like.new_empty(0, dtype=dtype)
    changes = {
        site: _shrink_attention(net, site, heads, constants.get(site), like)
        for site, heads in keep.items()
    }
    all_sites = {site for site, _ in net.spec.attention_specs()}
    if changes.keys() >= all_sites and not any(keep.values()):
        raise SpecError(f"cannot remove all heads of {net.spec.name}. Keep at least one")
    return replace_attentions(net, changes, dtype)


def _shrink_attention(
    net: Transformer, site: str, heads: Sequence[int], constant: Tensor | None, like: Tensor
) -> AttentionChange:
    spec = get_attention(net, site).spec
    weights = get_attention_parameters(net, site)
    check_heads(site, heads, len(spec.score_head_of_output))
    stack, depth, _ = site.split(".")
    if net.stacks[stack].blocks[int(depth)].spec.form == "merged":
        raise SpecError(
            f"cannot remove heads of {site}: a merged block uses the same heads for "
            "cross-attention and for its running mean. Remove heads of other layers"
        )
    if heads:
        spec, weights = keep_heads(spec, weights, heads)
        if constant is None:
            return AttentionChange(spec, weights)
        if "bias" not in field_defaults(type(spec.merge)):
            raise SpecError(
                f"{type(spec.merge).__name__} has no bias to add a constant to; use fold='none'"
            )
    bias = output_without_heads(spec, weights, like)
    if constant is not None:  # rounded once
        exact = to_float64(bias)
        bias = (exact + constant.to(exact)).to(bias)
    if not heads:
        return AttentionChange(None, {"constant": bias})
    biased = replace(spec, merge=replace(spec.merge, bias="o"))
    return AttentionChange(biased, {**weights, "output.o_bias": bias})


def output_without_heads(
    spec: AttentionSpec, weights: Mapping[str, Tensor], like: Tensor
) -> Tensor:
    """Return the output of a layer with all heads ablated to zero, [model]: its output bias, or
    zeros.
    """
    zeros_BTOV = like.new_zeros(1, 1, len(spec.score_head_of_output), spec.heads.vdim)
    return merge_heads(spec, weights, zeros_BTOV)


def merge_heads(spec: AttentionSpec, weights: Mapping[str, Tensor], outputs_BTOV: Tensor) -> Tensor:
    """Apply the output projection to these head outputs of one token; return a vector [model]."""
    own = weights_of_part(weights, "output")
    for name, weight in own.items():
        own[name] = weight.to(outputs_BTOV) if weight.is_floating_point() else weight
    with torch.no_grad():
        return spec.merge.merge(outputs_BTOV, cast(PartParams, own))[0, 0]


def weights_of_part(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the weights of one part, by the names it declared."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


class FoldedWeights(NamedTuple):
    """Spec and weights after folding; `reasons_kept` gives the reason for each bias or transform
    not folded.
    """

    spec: AttentionSpec
    weights: dict[str, Tensor]
    reasons_kept: dict[str, str]


def fold_bias(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> FoldedWeights:
    """Compute the same function with fewer biases: b_K is dropped and b_V W_O is added to b_O.

    A key bias adds one constant to all scores of a row, and softmax is invariant to that. A value
    bias passes unchanged through attention weights that sum to one. If either does not hold, the
    bias stays, with the reason. One difference remains: a query without any allowed key now gets
    b_V W_O, where it got zero.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, bias="qkv", modifiers=(hw.parts.Rotary(),))
    >>> folded = fold_bias(spec, hw.Attention(spec).state_dict())
    >>> folded.spec.project.bias, folded.spec.merge.bias, list(folded.reasons_kept)
    ('qk', 'o', ['k'])
    """
    biases = spec.project.constant_biases(spec, weights)
    reasons = {side: "; ".join(_reasons_bias_stays(spec, side)) for side in biases}
    reasons_kept = {side: reason for side, reason in reasons.items() if reason}
    folded = [side for side in biases if side not in reasons_kept]
    if not folded:
        return FoldedWeights(spec, dict(weights), reasons_kept)
    folded_names = [f"project.{side}_bias" for side in folded]
    remaining = {name: weights[name] for name in weights if name not in folded_names}
    smaller = replace(spec, project=spec.project.without_biases(frozenset(folded)))
    if "v" in folded:
        smaller = replace(smaller, merge=replace(spec.merge, bias="o"))
        # the projected value bias plus the old output bias
        old_bias = biases["v"].new_zeros(spec.model)
        own = {"output.o_bias": old_bias, **remaining}
        bias_OV = biases["v"][None, None]
        remaining["output.o_bias"] = merge_heads(replace(spec, merge=smaller.merge), own, bias_OV)
    return FoldedWeights(smaller, remaining, reasons_kept)


def _reasons_bias_stays(spec: AttentionSpec, side: str) -> Iterator[str]:
    """Yield the reasons why the key or value bias has an effect that no other
    weight can take over.
    """
    for name, transform in spec.parts_of(QKTransform):
        if side in transform.transformed_sides(spec):
            yield f"{name} transforms {side} after its bias"
    if side == "k":
        if not spec.similarity.linear:
            yield f"{type(spec.similarity).__name__} is not linear in the keys"
        yield from spec.shift_sensitivity()
        return
    if not spec.normaliser.always_sums_to_one():
        yield f"the weights of {type(spec.normaliser).__name__} do not always sum to one"
    elif spec.normaliser.proportional and spec.similarity.can_be_all_zero():
        yield f"all weights of {type(spec.similarity).__name__} may be zero"
    if "bias" not in field_defaults(type(spec.merge)):
        yield f"{type(spec.merge).__name__} has no bias to add it to"
    for name, modifier in spec.parts_of(Modifier):
        if modifier.phase in (Phase.WEIGHTS, Phase.OUTPUTS, Phase.GATES):
            yield f"{name} acts on the attention weights or outputs"


def fold_qk_transforms(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> FoldedWeights:
    """Compute the same function with fewer query-key transforms: constant matrices go into the
    projection before them.

    Each side ("q", "k", "v") of a transform is folded on its own. It stays, with the reason, if it
    is not one matrix for all tokens, or if a transform that stays comes before it. Keys of
    `reasons_kept` are "name.side", with the names of `spec`.

    >>> import headwise as hw
    >>> spec = hw.design(
    ...     model=8, heads=2, modifiers=(hw.parts.Rotary(), hw.parts.KnockingHeads(sides="qv"))
    ... )
    >>> folded = fold_qk_transforms(spec, hw.Attention(spec).state_dict())
    >>> folded.spec.modifiers[1], folded.reasons_kept["knocking_heads.q"]
    (KnockingHeads(sides='q'), 'rotary transforms q before it')
    """
    folded_weights = dict(weights)
    reasons_kept = dict[str, str]()
    folded_sides = dict[str, frozenset[str]]()
    for side in "qkv":
        blocked_by = ""
        for name, transform in spec.parts_of(QKTransform):
            if side not in transform.transformed_sides(spec):
                continue
            matrix = transform.as_matrix(side, weights_of_part(folded_weights, name))
            absorbed: Mapping[str, Tensor] = {}
            if matrix is None:
                reason = "it is not one matrix for every head and token"
            elif blocked_by:
                reason = f"{blocked_by} transforms {side} before it"
            else:
                kind = type(spec.project).__name__
                reason = f"{kind} cannot absorb a matrix into its projection of {side}"
                with torch.no_grad():
                    absorbed = spec.project.absorb_matrix(spec, folded_weights, side, matrix)
            if absorbed:
                folded_weights |= absorbed
                folded_sides[name] = folded_sides.get(name, frozenset()) | {side}
            else:
                reasons_kept[f"{name}.{side}"] = reason
                blocked_by = blocked_by or name
    # later parts may get a smaller number
    modifiers = dict[str, Modifier]()
    for name, modifier in spec.parts_of(Modifier):
        if name in folded_sides and isinstance(modifier, QKTransform):
            modifier = modifier.without_sides(folded_sides[name])
        if modifier is not None:
            modifiers[name] = modifier
    smaller = replace(spec, modifiers=tuple(modifiers.values()))
    old_names = [name for name, part in spec.parts() if not isinstance(part, Modifier)]
    weights_left = dict[str, Tensor]()
    for old_name, (name, part) in zip([*old_names, *modifiers], smaller.parts(), strict=True):
        for key in part.params(smaller):
            weights_left[f"{name}.{key}"] = folded_weights[f"{old_name}.{key}"]
    return FoldedWeights(smaller, weights_left, reasons_kept)
