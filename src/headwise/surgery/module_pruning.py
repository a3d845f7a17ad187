"""Pruning of heads in any nn.Module whose projections are declared with `hw.AttentionSite`.

The rows of q, k and v and the columns of the output projection that belong to removed heads are cut
out of a copy of the model, which is then compared with the ablated original on an example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from ..errors import SpecError
from ..inspect.ablation import HeadRef, ablate, group_by_site
from ..inspect.adapters.declarations import (
    AttentionSite,
    copy_declared,
    declare,
    get_declaration,
    get_output_width,
    propose_sites,
)
from ..inspect.adapters.output_projection import NUM_HEADS_NAMES, NUM_KV_HEADS_NAMES
from ..inspect.attention_sites import find_attention
from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import ModelInputs, prepare_inputs
from ..inspect.site import Site
from .pruning_plan import HeadId

CALL = signature(nn.MultiheadAttention.forward)


class SplitMultiheadAttention(nn.Module):
    """Multi-head attention that is called like nn.MultiheadAttention, with one nn.Linear for each
    of q, k, v and out.

    It takes the place of an nn.MultiheadAttention, also inside nn.Transformer, when heads are
    removed.

    >>> attention = nn.MultiheadAttention(6, 3, batch_first=True).eval()
    >>> x = torch.randn(2, 5, 6)
    >>> bool(
    ...     torch.allclose(
    ...         SplitMultiheadAttention(attention)(x, x, x)[0], attention(x, x, x)[0], atol=1e-6
    ...     )
    ... )
    True
    """

    # nn.TransformerEncoderLayer reads these before its fused kernel; a layer without them takes its
    # usual steps.
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        if original.bias_k is not None or original.add_zero_attn:
            raise SpecError(
                "cannot prune nn.MultiheadAttention with bias_kv or add_zero_attn; build it "
                "without them"
            )
        self.embed_dim, self.num_heads = original.embed_dim, original.num_heads
        self.batch_first, self.dropout = original.batch_first, original.dropout
        weights = (
            original.in_proj_weight.chunk(3)
            if original.in_proj_weight is not None
            else (original.q_proj_weight, original.k_proj_weight, original.v_proj_weight)
        )
        biases = (None,) * 3 if original.in_proj_bias is None else original.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(_make_linear, weights, biases)
        self.out_proj = _make_linear(original.out_proj.weight, original.out_proj.bias)
        self.train(original.training)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Outputs and weights for the arguments of nn.MultiheadAttention; `is_causal` needs an
        `attn_mask`.
        """
        call = CALL.bind(self, *args, **kwargs)
        call.apply_defaults()
        options = call.arguments
        query, attn_mask, is_batched = (
            options["query"],
            options["attn_mask"],
            options["query"].dim() == 3,
        )
        if options["is_causal"] and attn_mask is None:
            raise ValueError("is_causal=True needs attn_mask; give the causal mask")
        q, k, v = (
            self._split(one, is_batched)
            for one in self._project(query, options["key"], options["value"])
        )
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = self._bias(scores, attn_mask, options["key_padding_mask"], is_batched)
        weights = (scores + bias).softmax(-1)
        heads = F.dropout(weights, self.dropout, self.training) @ v
        y = self.out_proj(heads.transpose(1, 2).flatten(2))
        y = y if self.batch_first and is_batched else y.transpose(0, 1) if is_batched else y[0]
        if not options["need_weights"]:
            return y, None
        weights = weights.mean(1) if options["average_attn_weights"] else weights
        return y, weights if is_batched else weights[0]

    def _project(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(linear(x) for linear, x in zip(projections, inputs, strict=True))

    def _split(self, y: Tensor, is_batched: bool) -> Tensor:
        """[B, heads, T, dim] of a projected input."""
        y = y[None] if not is_batched else y if self.batch_first else y.transpose(0, 1)
        return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _bias(
        self, scores: Tensor, attn_mask: Tensor | None, padding: Tensor | None, is_batched: bool
    ) -> Tensor:
        """Both masks as one tensor to add to the scores; True in a boolean mask forbids a pair."""
        bias = scores.new_zeros(())
        if attn_mask is not None:
            mask = _to_bias(attn_mask, scores)
            if mask.dim() == 3:  # one for each row and head
                mask = self._masks_by_head(mask, scores)
            bias = bias + mask
        if padding is not None:
            mask = _to_bias(padding, scores)
            bias = bias + (mask[:, None, None] if is_batched else mask)
        return bias

    def _masks_by_head(self, mask: Tensor, scores: Tensor) -> Tensor:
        if mask.shape[0] != scores.shape[0] * self.num_heads:
            raise ValueError(
                f"attn_mask has {mask.shape[0]} masks for {scores.shape[0]} rows of "
                f"{self.num_heads} heads; give one "
                "for each row and head that is left"
            )
        return mask.unflatten(0, (scores.shape[0], self.num_heads))


def _to_bias(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))


def _make_linear(weight: Any, bias: Any) -> nn.Linear:
    """An nn.Linear with copies of these parameters."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    return linear


def split_multihead(model: nn.Module, path: str) -> nn.Module:
    """Replace the nn.MultiheadAttention at a path of a model, and return the new module; other
    modules stay.
    """
    module = model.get_submodule(path)
    if not isinstance(module, nn.MultiheadAttention):
        return module
    if not path:
        raise SpecError(
            "cannot prune nn.MultiheadAttention in place; put it into an nn.Sequential, or "
            "another module"
        )
    parent, _, name = path.rpartition(".")
    new = SplitMultiheadAttention(module)
    setattr(model.get_submodule(parent), name, new)
    for other in model.modules():
        if isinstance(other, nn.TransformerEncoder) and new in other.modules():
            other.use_nested_tensor = False  # only torch's fused layers take nested tensors
    return new


TOLERANCE = 1e-4  # largest difference from the ablated model, relative to the largest output


@dataclass(frozen=True, eq=False)
class ModulePruning:
    """The pruned copy of a model, its removed heads, the number of removed parameters, and the
    largest difference from the ablated model on the example, relative to its largest output.
    """

    after: nn.Module
    removed_heads: tuple[HeadId, ...]
    removed_params: int
    difference: float


class HeadCut(NamedTuple):
    """Which query heads and key-value heads of a declared module are kept."""

    site: AttentionSite
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]

    @staticmethod
    def without(site: AttentionSite, name: str, removed: Iterable[int]) -> HeadCut:
        """Remove query heads; a key-value head goes with the last query head that uses it."""
        group_size, dropped = site.heads // site.num_kv_heads, set(removed)
        heads = tuple(head for head in range(site.heads) if head not in dropped)
        counts = {
            kv: sum(head // group_size == kv for head in heads) for kv in range(site.num_kv_heads)
        }
        kv_heads = tuple(kv for kv, count in counts.items() if count)
        if not heads:
            raise SpecError(f"cannot remove all {site.heads} heads of {name}; keep at least one")
        if len({counts[kv] for kv in kv_heads}) > 1:
            sizes = ", ".join(str(counts[kv]) for kv in kv_heads)
            raise SpecError(
                f"cannot prune {name}: its key-value heads would be shared by {sizes} query "
                "heads; keep the same "
                "number of query heads in each group, or remove whole groups"
            )
        return HeadCut(site, heads, kv_heads)

    @property
    def rows(self) -> dict[str, list[int]]:
        """The blocks of rows to keep in each projection of q, k and v; all blocks have the width of
        one head.
        """
        site, kv = self.site, self.site.num_kv_heads
        if not site.is_fused:
            return {
                site.q: list(self.heads),
                site.k: list(self.kv_heads),
                site.v: list(self.kv_heads),
            }
        if site.fused == "by head":
            return {site.q: [3 * head + part for head in self.heads for part in range(3)]}
        starts, kept_heads = (
            (0, site.heads, site.heads + kv),
            (self.heads, self.kv_heads, self.kv_heads),
        )
        return {
            site.q: [
                start + n
                for start, numbers in zip(starts, kept_heads, strict=True)
                for n in numbers
            ]
        }

    @property
    def num_blocks(self) -> dict[str, int]:
        """The number of blocks of rows of each projection before pruning."""
        site, kv = self.site, self.site.num_kv_heads
        return (
            {site.q: site.heads + 2 * kv}
            if site.is_fused
            else {site.q: site.heads, site.k: kv, site.v: kv}
        )


def prune_module(model: nn.Module, heads: Iterable[HeadRef], example: Any) -> ModulePruning:
    """Return a copy of any model without these heads, at sites whose projections are declared or
    have usual names.

    A head is (layer, head) or (site name, head), as for `hw.ablate`. `example` is an input of the
    model, on which the copy must equal the ablated model; it is an error if it does not, for
    example because another parameter has heads that `AttentionSite(per_head=...)` does not name.
    `model` is not changed, and the copy is declared as well.

    >>> import headwise as hw
    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix, self.last, self.num_heads = nn.Linear(6, 18), nn.Linear(6, 6), 3
    ...
    ...     def forward(self, x):
    ...         q, k, v = self.mix(x).unflatten(-1, (3, self.num_heads, 2)).permute(2, 0, 3, 1, 4)
    ...         z = nn.functional.scaled_dot_product_attention(q, k, v)
    ...         return self.last(z.transpose(1, 2).flatten(2))
    >>> net = nn.Sequential(Mine()).eval()
    >>> hw.declare(net[0], hw.AttentionSite(q="mix", k="mix", v="mix", out="last", heads=3))
    >>> done = prune_module(net, [(0, 1)], torch.randn(2, 5, 6))
    >>> done.removed_params, done.after[0].num_heads
    (54, 2)
    """
    if model.training:
        raise SpecError(
            "the model is in train mode, where outputs are random; call model.eval() first"
        )
    site_modules = find_attention(model)
    removed = group_by_site(model, site_modules, heads)
    if not removed:
        raise SpecError("no head would be removed; name heads as (layer, head)")
    by_name = {site_module.site.name: site_module for site_module in site_modules}
    choices = {name: list(list_projections(model, by_name[name].site)) for name in removed}
    names = tuple((name, head) for name, dropped in removed.items() for head in sorted(dropped))
    first_error: SpecError | None = None
    for number in range(max(map(len, choices.values()))):
        sites = {name: own[min(number, len(own) - 1)] for name, own in choices.items()}
        try:
            cuts = {
                by_name[name].site.path: _make_cut(
                    model, by_name, name, (sites[name], removed[name])
                )
                for name in removed
            }
            after, removed_params = _cut_copy(model, cuts)
            return ModulePruning(
                after, names, removed_params, _compare_with_ablated(model, after, names, example)
            )
        except SpecError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def list_projections(model: nn.Module, site: Site) -> Iterator[AttentionSite]:
    """The declared projections of a site, or those that its names and sizes allow; raises if there
    are none.
    """
    module = model.get_submodule(site.path)
    if computed := [
        path for path, child in module.named_modules() if parametrize.is_parametrized(child)
    ]:
        raise SpecError(
            f"cannot change {site.name}: weights of {computed[0] or 'it'} are computed from "
            "others (parametrization), "
            "as after hw.convert_module; change the original model"
        )
    if isinstance(module, nn.MultiheadAttention):
        yield AttentionSite("q_proj", "k_proj", "v_proj", "out_proj", heads=module.num_heads)
        return
    declaration = get_declaration(module)
    declared = declaration.projections if declaration is not None else None
    proposed = (
        [declared]
        if declared is not None
        else list(propose_sites(module, site.heads, site.kv or site.heads))
    )
    if not proposed:
        raise SpecError(
            f"cannot change {site.name}: its projections are not declared; call "
            "hw.declare(module, hw.AttentionSite(q=..., k=..., v=..., out=..., heads=...))"
        )
    if declared is not None and not site.prune.possible:
        raise SpecError(f"cannot change {site.name}: {site.prune.reason}")
    yield from proposed


def _cut_copy(model: nn.Module, cuts: Mapping[str, HeadCut]) -> tuple[nn.Module, int]:
    """A copy of a model with these cuts, and the number of parameters removed."""
    after, removed_params = copy_declared(model), 0
    for path, cut in cuts.items():
        module = split_multihead(after, path)
        before = sum(parameter.numel() for parameter in module.parameters())
        counted = count_removed_params(module, cut)
        _cut_module(module, cut)
        if before - sum(parameter.numel() for parameter in module.parameters()) != counted:
            raise SpecError(
                f"cannot prune {path}: its projections are also used elsewhere in it; untie them "
                "first"
            )
        removed_params += counted
    return after, removed_params


def _make_cut(
    model: nn.Module,
    by_name: Mapping[str, SiteModule],
    name: str,
    change: tuple[AttentionSite, Iterable[int]],
) -> HeadCut:
    """The cut of one site by its projections and removed heads; raises if other modules share its
    weights.
    """
    projections, removed = change
    check_unshared(model, by_name, name, projections)
    return HeadCut.without(projections, name, removed)


def check_unshared(
    model: nn.Module, by_name: Mapping[str, SiteModule], name: str, projections: AttentionSite
) -> None:
    """Raise if other modules share the weights of a site, or if its module runs
    at several depths.
    """
    site = by_name[name].site
    module = model.get_submodule(site.path)
    names = (projections.q, projections.k, projections.v, projections.out)
    is_multihead = isinstance(module, nn.MultiheadAttention)
    owners = [module] if is_multihead else [module.get_submodule(child) for child in names]
    tensors = {id(parameter) for owner in owners for parameter in owner.parameters()}
    used = [
        path
        for path, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in tensors
    ]
    if shared := [
        path for path in used if not path.startswith(f"{site.path}." if site.path else "")
    ]:
        raise SpecError(f"cannot change {name}: {shared[0]} has the same weights; untie them first")
    if site.same_as is not None or any(other.site.same_as == name for other in by_name.values()):
        raise SpecError(f"cannot change {name}: its module runs at several depths; copy it first")


def count_removed_params(module: nn.Module, cut: HeadCut) -> int:
    """Number of parameters that a cut removes, from the shapes of the projections."""
    count = 0
    for name, rows in cut.rows.items():
        linear, blocks = module.get_submodule(name), cut.num_blocks[name]
        assert isinstance(linear, nn.Linear)
        width = linear.out_features // blocks
        count += (blocks - len(rows)) * width * (linear.in_features + (linear.bias is not None))
    out = module.get_submodule(cut.site.out)
    assert isinstance(out, nn.Linear)
    removed_share = cut.site.heads - len(cut.heads)
    count += removed_share * (out.in_features // cut.site.heads) * out.out_features
    parameters = dict(module.named_parameters())
    per_head = [parameters[name].numel() for name in cut.site.per_head if name in parameters]
    return count + sum(numel // cut.site.heads * removed_share for numel in per_head)


def _cut_module(module: nn.Module, cut: HeadCut) -> None:
    """Cut the parameters of removed heads out of a module, set its sizes, and declare it again."""
    site = cut.site
    for name, rows in cut.rows.items():
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        for tensor_name in ("weight", "bias") if linear.bias is not None else ("weight",):
            _cut_tensor(linear, tensor_name, 0, (cut.num_blocks[name], rows))
        linear.out_features = linear.weight.shape[0]
    out = module.get_submodule(site.out)
    assert isinstance(out, nn.Linear)
    width = out.in_features // site.heads
    _cut_tensor(out, "weight", 1, (site.heads, cut.heads))
    out.in_features = out.weight.shape[1]
    for name, axis in site.per_head.items():
        owner, _, tensor_name = name.rpartition(".")
        _cut_tensor(module.get_submodule(owner), tensor_name, axis, (site.heads, cut.heads))
    query_width = (
        width if site.is_fused else get_output_width(module.get_submodule(site.q)) // len(cut.heads)
    )
    heads, kv_heads = len(cut.heads), len(cut.kv_heads)
    counts = {
        "heads": heads,
        "kv_heads": kv_heads,
        "q": heads * query_width,
        "k": kv_heads * query_width,
    }
    counts |= {"v": kv_heads * width, "out": heads * width}
    for name, size in read_size_attributes(module, site).items():
        setattr(module, name, counts[size])
    declare(module, replace(site, heads=heads, kv_heads=kv_heads))


def read_size_attributes(module: nn.Module, site: AttentionSite) -> dict[str, str]:
    """Attributes that hold sizes: those that are declared, and the numbers of heads by their usual
    names.
    """
    usual = {
        "kv_heads": (NUM_KV_HEADS_NAMES, site.num_kv_heads),
        "heads": (NUM_HEADS_NAMES, site.heads),
    }
    usual_attributes = {
        name: size
        for size, (names, count) in usual.items()
        for name in names
        if getattr(module, name, None) == count
    }
    return usual_attributes | dict(site.attributes)


def _cut_tensor(owner: nn.Module, name: str, axis: int, blocks: tuple[int, Sequence[int]]) -> None:
    """Keep some of `blocks` equal blocks of a parameter or buffer along an axis."""
    tensor: Tensor = getattr(owner, name)
    count, rows = blocks
    index = torch.tensor(list(rows), device=tensor.device)
    with torch.no_grad():
        smaller = (
            tensor.detach()
            .unflatten(axis, (count, -1))
            .index_select(axis, index)
            .flatten(axis, axis + 1)
            .clone()
        )
    is_parameter = isinstance(tensor, nn.Parameter)
    setattr(
        owner,
        name,
        nn.Parameter(smaller, requires_grad=tensor.requires_grad) if is_parameter else smaller,
    )


def _compare_with_ablated(
    model: nn.Module, after: nn.Module, heads: Sequence[HeadId], example: Any
) -> float:
    """Relative difference of the pruned from the ablated model on an example; raises if it is
    large.
    """
    inputs = prepare_inputs(model, example, 0)
    by_name = {
        site_module.site.name: site_module.site.path for site_module in find_attention(model)
    }
    paths = sorted({by_name[name] for name, _ in heads})
    with ablate(model, heads):
        expected = run_and_record(model, inputs, paths)
    remedy = (
        "name the sizes that its forward reads in AttentionSite(attributes=...), and other "
        "parameters with heads in "
        "per_head=..."
    )
    try:
        actual = run_and_record(after, inputs, paths)
    except Exception as error:  # the model may raise anything
        message = " ".join(str(error).split())[:200]
        raise SpecError(
            f"the pruned {type(model).__name__} cannot run: {message}; {remedy}"
        ) from error
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        raise SpecError(
            f"the outputs of the pruned {type(model).__name__} have other shapes; {remedy}"
        )
    difference = largest_difference(actual, expected)
    if not difference <= TOLERANCE:
        raise SpecError(
            f"the pruned {type(model).__name__} differs from the ablated one by {difference:.2g} "
            "of the largest "
            f"output; {remedy}"
        )
    return difference


# --- Outputs of two models compared ---------------------------------------------------------------


def run_and_record(
    model: nn.Module,
    inputs: ModelInputs,
    paths: Sequence[str],
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Tensor]:
    """The outputs of a model, and before them those of its modules at `paths`, in the order of
    their calls.

    The outputs alone would prove nothing if they do not depend on the modules, as with a last layer
    of zeros. `tensors` take the place of parameters during the run.
    """
    recorded: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        # Weights of heads, which nn.MultiheadAttention returns after the output, are not compared.
        recorded.extend(_tensors(output)[:1])

    handles = [model.get_submodule(path).register_forward_hook(record) for path in paths]
    try:
        with torch.no_grad():
            outputs = functional_call(model, dict(tensors), inputs.args, dict(inputs.kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return [*recorded, *_tensors(outputs)]


def largest_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of two lists of tensors, relative to the largest value of each."""
    return max(
        (
            float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
            for one, other in zip(actual, expected, strict=True)
            if other.is_floating_point() and other.numel()
        ),
        default=0.0,
    )


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output]
    values = (
        output.values()
        if isinstance(output, Mapping)
        else output
        if isinstance(output, (tuple, list))
        else ()
    )
    return [tensor for value in values for tensor in _tensors(value)]
