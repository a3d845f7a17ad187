"""Conversion of any nn.Module between MHA, GQA and MQA, at modules whose projections are declared
or have usual names.

A module that reads its number of key-value heads gets smaller projections. Any other one, such as
`nn.MultiheadAttention`, keeps the shapes that its forward expects: a parametrization stores the
rows of each shared head once and repeats them when the weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import SpecError, suggest
from ..inspect.ablation import ablate
from ..inspect.adapters.declarations import AttentionSite, copy_declared, declare, get_declaration
from ..inspect.adapters.output_path import edits_at_function
from ..inspect.attention_sites import find_attention
from ..inspect.model_inputs import ModelInputs, prepare_inputs
from ..inspect.site import Site
from .conversion import ATTENTION_KINDS, AttentionConversion, Pool, ToMHA
from .head_grouping import HeadGroups, group_adjacent_heads
from .module_pruning import (
    TOLERANCE,
    HeadCut,
    check_unshared,
    largest_difference,
    list_projections,
    read_size_attributes,
    run_and_record,
)


class SharedHeads(nn.Module):
    """Parametrization of a projection: blocks of rows in the same group are stored once, as the
    mean of the group.

    >>> linear = nn.Linear(3, 4)
    >>> _ = parametrize.register_parametrization(linear, "weight", SharedHeads((0, 0, 1, 1)))
    >>> (
    ...     linear.weight.shape,
    ...     [parameter.shape for name, parameter in linear.named_parameters() if "weight" in name],
    ... )
    (torch.Size([4, 3]), [torch.Size([2, 3])])
    """

    stored_block: Tensor

    def __init__(self, stored_block: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("stored_block", torch.tensor(list(stored_block)), persistent=False)

    def forward(self, stored: Tensor) -> Tensor:
        """All rows, from those that are stored."""
        num_stored = int(self.stored_block.max()) + 1
        return (
            stored.unflatten(0, (num_stored, -1)).index_select(0, self.stored_block).flatten(0, 1)
        )

    def right_inverse(self, rows: Tensor) -> Tensor:
        """The means that are stored for these rows."""
        blocks = self.stored_block.tolist()
        groups = [
            [n for n, stored in enumerate(blocks) if stored == group]
            for group in range(max(blocks) + 1)
        ]
        return average_blocks(rows, len(blocks), groups)


@dataclass(frozen=True, eq=False)
class ModuleConversion:
    """The converted copy of a model, the averaged key-value heads by site, the number of parameters
    removed (negative: added), and the largest difference on the example from the model with full
    projections and equal heads.
    """

    after: nn.Module
    groups: Mapping[str, HeadGroups]
    removed_params: int
    difference: float


class KVGroups(NamedTuple):
    """One attention module: its projections, and for each key-value head after the conversion those
    it averages.
    """

    site: AttentionSite
    groups: HeadGroups

    def rows(self) -> dict[str, tuple[int, list[tuple[int, ...]]]]:
        """For each projection that changes, its number of blocks of rows, and the blocks that each
        new one averages.
        """
        site, kv = self.site, self.site.num_kv_heads
        if not site.is_fused:
            return {name: (kv, list(self.groups)) for name in (site.k, site.v)}
        queries = [(head,) for head in range(site.heads)]
        if site.fused == "by projection":
            shared = [
                tuple(start + head for head in group) for start in (0, kv) for group in self.groups
            ]
            return {
                site.q: (
                    site.heads + 2 * kv,
                    queries + [tuple(site.heads + n for n in group) for group in shared],
                )
            }
        queries = [(3 * head,) for head in range(site.heads)]  # q, k and v of each head in turn
        shared = [
            tuple(3 * head + part for head in group) for part in (1, 2) for group in self.groups
        ]
        return {site.q: (3 * site.heads, queries + shared)}


def convert_module(
    model: nn.Module, conversion: AttentionConversion | int, example: Any, *, kind: str = "all"
) -> ModuleConversion:
    """Return a copy of any model whose attentions have `conversion` key-value heads, each the mean
    of neighbours.

    `conversion` is a number, `Pool(number)` or, for modules that read their number of key-value
    heads, `ToMHA()`. It applies to all sites, or to those of one `kind`, "self" or "cross". On
    `example`, an input of the model, the copy must equal the model with full projections whose
    heads are equal. `model` is not changed. A copy made of another model of the same class has the
    same parameters, so that it can load the state dict of the result.

    >>> attention = nn.TransformerEncoder(
    ...     nn.TransformerEncoderLayer(8, 4, 12, batch_first=True), 2
    ... ).eval()
    >>> done = convert_module(attention, 2, torch.randn(2, 5, 8))
    >>> done.removed_params, done.groups["model.0.attention"]
    (144, ((0, 1), (2, 3)))
    """
    strategy = _check_conversion(Pool(conversion) if isinstance(conversion, int) else conversion)
    if kind not in ATTENTION_KINDS:
        raise SpecError(f"unknown kind={kind!r}; {suggest(kind, ATTENTION_KINDS)}")
    if model.training:
        raise SpecError(
            "the model is in train mode, where outputs are random; call model.eval() first"
        )
    by_name = {site_module.site.name: site_module for site_module in find_attention(model)}
    names = [
        name
        for name, own in by_name.items()
        if kind == "all" or (own.site.kind == "cross") == (kind == "cross")
    ]
    if not names:
        kind_text = "attention" if kind == "all" else f"{kind}-attention"
        raise SpecError(
            f"{type(model).__name__} has no {kind_text} that headwise finds; hw.sites(model) "
            "lists it"
        )
    inputs, changes = prepare_inputs(model, example, 0), dict[str, KVGroups]()
    for name in names:
        site = by_name[name].site
        proposed = list(list_projections(model, site))
        check_unshared(model, by_name, name, proposed[0])
        projections = _find_projections(model, site, proposed, inputs)
        changes[site.path] = KVGroups(projections, _group_heads(name, projections, strategy))
    after, equal_heads = copy_declared(model), dict[str, Tensor]()
    for path, change in changes.items():
        if _reads_kv_heads(module := after.get_submodule(path), change.site):
            _resize(after, path, change)
        elif isinstance(strategy, ToMHA):
            raise SpecError(f"cannot convert {path} to MHA: {type(module).__name__} does not read "
                            "a number of "
                            "key-value heads; name it in AttentionSite(attributes={...: "
                            "'kv_heads'})")  # fmt: skip
        else:
            _share(after, path, change)
        if isinstance(strategy, Pool):
            equal_heads |= _equal_heads(model, path, change)
    groups = {name: changes[by_name[name].site.path].groups for name in names}
    removed = sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in after.parameters()
    )
    expected = run_and_record(model, inputs, list(changes), equal_heads)
    return ModuleConversion(
        after, groups, removed, _compare(after, expected, inputs, list(changes))
    )


def _check_conversion(conversion: AttentionConversion) -> Pool | ToMHA:
    """Return the conversion, or raise if it needs more of a layer than its projections."""
    plain = isinstance(conversion, Pool) and not conversion.needs_statistics
    if plain or isinstance(conversion, ToMHA):
        return cast("Pool | ToMHA", conversion)
    raise SpecError(
        f"{conversion!r} needs layers of headwise; of other modules, heads can be averaged with "
        "neighbours: give a "
        "number of key-value heads"
    )


def _group_heads(name: str, site: AttentionSite, conversion: Pool | ToMHA) -> HeadGroups:
    """For each key-value head after the conversion, the heads that it averages."""
    if isinstance(conversion, ToMHA):
        size = site.heads // site.num_kv_heads
        return tuple((head // size,) for head in range(site.heads))
    try:
        return group_adjacent_heads(site.num_kv_heads, conversion.kv)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None


# --- Projections, checked by behaviour ------------------------------------------------------------


def _find_projections(
    model: nn.Module, site: Site, proposed: Sequence[AttentionSite], inputs: ModelInputs
) -> AttentionSite:
    """Return the first proposed projections whose rows belong to heads as they say; raises if there
    are none.

    While the query heads of a key-value head are ablated, the outputs must not depend on their rows
    of q, k and v. If these are one projection, the outputs must be affine in the rows of v, which
    those of q and k would not be.
    """
    module = model.get_submodule(site.path)
    if isinstance(module, nn.MultiheadAttention) and module.bias_k is not None:
        raise SpecError(
            f"cannot convert {site.name}: its bias_kv differs between heads; build it without "
            "add_bias_kv"
        )
    if isinstance(module, nn.MultiheadAttention):
        return _multihead_projections(module)
    for projections in proposed:
        tensors = _scramble_first_group(model, site.path, projections)
        if (
            largest_difference(
                *(run_and_record(model, inputs, [site.path], new) for new in (tensors, {}))
            )
            <= TOLERANCE
        ):
            raise SpecError(f"cannot convert {site.name}: its output does not depend on "
                            f"{projections.q}, "
                            f"{projections.k} and {projections.v} on this example; give "
                            "another")  # fmt: skip
        first_group = range(site.heads // projections.num_kv_heads)
        # behind a norm over all heads, outputs would depend on the ablated group
        with edits_at_function(), ablate(model, [(site.name, head) for head in first_group]):
            ablated = [run_and_record(model, inputs, [site.path], new) for new in (tensors, {})]
        belong_to_heads = largest_difference(*ablated) <= TOLERANCE
        if belong_to_heads and (
            not projections.is_fused or _is_affine_in_values(model, site.path, projections, inputs)
        ):
            return projections
    raise SpecError(
        f"cannot convert {site.name}: rows of {proposed[0].q} do not belong to {site.heads} heads "
        "of q, k and v in "
        "order; declare its projections with hw.declare(module, hw.AttentionSite(...))"
    )


def _multihead_projections(module: nn.MultiheadAttention) -> AttentionSite:
    """The projections of torch's own module, by the names of its parameters."""
    fused = "in_proj_weight" if module.in_proj_weight is not None else ""
    q, k, v = (fused or f"{side}_proj_weight" for side in "qkv")
    return AttentionSite(q, k, v, "out_proj", heads=module.num_heads)


def _scramble_first_group(model: nn.Module, path: str, site: AttentionSite) -> dict[str, Tensor]:
    """The parameters of q, k and v with other numbers in the rows of the first key-value head and
    its query heads.
    """
    cut = HeadCut(
        site,
        tuple(range(site.heads // site.num_kv_heads, site.heads)),
        tuple(range(1, site.num_kv_heads)),
    )
    scrambled: dict[str, Tensor] = {}
    for name, kept_blocks in cut.rows.items():
        rows = sorted(set(range(cut.num_blocks[name])) - set(kept_blocks))
        for parameter_name in _row_tensors(model, path, name):
            tensor = model.get_parameter(parameter_name).detach().clone()
            parts = tensor.unflatten(0, (cut.num_blocks[name], -1))
            parts[rows] = 1 - 3 * parts[rows].flip(-1)
            scrambled[parameter_name] = tensor
    return scrambled


def _is_affine_in_values(
    model: nn.Module, path: str, site: AttentionSite, inputs: ModelInputs
) -> bool:
    """Whether the outputs of a module with one projection of q, k and v change in equal steps with
    its rows of v.
    """
    _, groups = KVGroups(site, tuple((head,) for head in range(site.num_kv_heads))).rows()[site.q]
    num_blocks, value_rows = len(groups), [block for (block,) in groups[-site.num_kv_heads :]]
    outputs = []
    for factor in (0, 1, 2):
        scaled: dict[str, Tensor] = {}
        for name in _row_tensors(model, path, site.q):
            scaled[name] = model.get_parameter(name).detach().clone()
            scaled[name].unflatten(0, (num_blocks, -1))[value_rows] *= factor
        outputs.append(run_and_record(model, inputs, [path], scaled)[0])
    none, once, twice = outputs
    return largest_difference([twice - once], [once - none]) <= TOLERANCE


def _row_tensors(model: nn.Module, path: str, projection: str) -> list[str]:
    """Names of the parameters of a model whose rows are those of one projection of the module at
    `path`.
    """
    prefix = f"{path}." if path else ""
    if isinstance(module := model.get_submodule(path), nn.MultiheadAttention):
        bias = (
            ["in_proj_bias"]
            if projection == "in_proj_weight" and module.in_proj_bias is not None
            else []
        )
        return [prefix + name for name in (projection, *bias)]
    linear = module.get_submodule(projection)
    return [f"{prefix}{projection}.{name}" for name, _ in linear.named_parameters(recurse=False)]


# --- Weights with fewer key-value heads -----------------------------------------------------------


def _share(model: nn.Module, path: str, change: KVGroups) -> None:
    """Store one block of rows for each group of heads of a module whose forward needs all rows."""
    for name, (num_blocks, groups) in change.rows().items():
        for parameter_name in _row_tensors(model, path, name):
            owner, _, tensor_name = parameter_name.rpartition(".")
            module, needs_grad = (
                model.get_submodule(owner),
                model.get_parameter(parameter_name).requires_grad,
            )
            parametrize.register_parametrization(
                module, tensor_name, SharedHeads(_invert(groups, num_blocks))
            )
            cast(Any, module).parametrizations[tensor_name].original.requires_grad_(needs_grad)


def _equal_heads(model: nn.Module, path: str, change: KVGroups) -> dict[str, Tensor]:
    """The parameters of k and v in their full shape, with the mean of its group in the rows of each
    head.
    """
    averaged: dict[str, Tensor] = {}
    for name, (num_blocks, groups) in change.rows().items():
        for parameter_name in _row_tensors(model, path, name):
            tensor = model.get_parameter(parameter_name).detach().clone()
            parts = tensor.unflatten(0, (num_blocks, -1))
            for group in groups:
                parts[list(group)] = parts[list(group)].mean(0)
            averaged[parameter_name] = tensor
    return averaged


def _reads_kv_heads(module: nn.Module, site: AttentionSite) -> bool:
    """Whether a module has an attribute that holds its number of key-value heads."""
    return (
        site.fused == "by projection" and "kv_heads" in read_size_attributes(module, site).values()
    )


def _resize(model: nn.Module, path: str, change: KVGroups) -> None:
    """Give a module that reads its number of key-value heads fewer or more of them, and declare it
    again.
    """
    module, site = model.get_submodule(path), change.site
    attributes, kv = read_size_attributes(module, site), len(change.groups)
    for name, (num_blocks, groups) in change.rows().items():
        linear = cast(nn.Linear, module.get_submodule(name))
        for tensor_name, tensor in list(linear.named_parameters(recurse=False)):
            averaged = average_blocks(tensor.detach(), num_blocks, groups)
            setattr(linear, tensor_name, nn.Parameter(averaged, requires_grad=tensor.requires_grad))
        linear.out_features = linear.weight.shape[0]
    for name, size in attributes.items():
        if size in ("k", "v", "kv_heads"):
            setattr(module, name, getattr(module, name) // site.num_kv_heads * kv)
    if get_declaration(module) is not None:
        declare(module, replace(site, kv_heads=kv))


def average_blocks(rows: Tensor, num_blocks: int, groups: Sequence[Sequence[int]]) -> Tensor:
    """The mean of each group of blocks of rows."""
    parts = rows.unflatten(0, (num_blocks, -1))
    return torch.stack([parts[list(group)].mean(0) for group in groups]).flatten(0, 1)


def _invert(groups: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
    """The group of each block."""
    return [
        next(n for n, group in enumerate(groups) if block in group) for block in range(num_blocks)
    ]


def _compare(
    after: nn.Module, expected: Sequence[Tensor], inputs: ModelInputs, paths: Sequence[str]
) -> float:
    """Relative difference of the converted model from the one with full projections; raises if it
    is large.
    """
    kind = type(after).__name__
    try:
        actual = run_and_record(after, inputs, paths)
    except Exception as error:  # the model may raise anything
        message = " ".join(str(error).split())[:200]
        raise SpecError(
            f"the converted {kind} cannot run: {message}; name the sizes that its forward reads in "
            "AttentionSite(attributes=...)"
        ) from error
    difference = largest_difference(actual, expected)
    if not difference <= TOLERANCE:
        raise SpecError(
            f"the converted {kind} differs by {difference:.2g} of the largest output from the one "
            "with equal heads; "
            "declare its projections with hw.AttentionSite"
        )
    return difference
