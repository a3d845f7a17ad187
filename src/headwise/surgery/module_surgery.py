"""Pruning and conversion of heads in any nn.Module whose projections are declared with
`hw.AttentionSite` or have usual names.

Every projection is a row of blocks, one per head; a changed module keeps some blocks or the means
of groups of them. The copy is compared on an example with the original: with the ablated one after
pruning, with one whose grouped heads are equal after conversion. A module that does not read its
number of key-value heads, such as `nn.MultiheadAttention`, keeps its shapes when converted: a
parametrization stores each shared block once and repeats it when the weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from ..errors import SpecError, suggest
from ..inspect.ablation import HeadRef, ablate, group_by_site
from ..inspect.adapters.declarations import (
    AttentionSite,
    copy_declared,
    declare,
    get_declaration,
    get_output_width,
    propose_sites,
)
from ..inspect.adapters.output_path import edits_at_function
from ..inspect.adapters.output_projection import NUM_HEADS_NAMES, NUM_KV_HEADS_NAMES
from ..inspect.attention_sites import find_attention
from ..inspect.model_inputs import ModelInputs, prepare_inputs
from ..inspect.site import Site
from .conversion import ATTENTION_KINDS, AttentionConversion, Pool, ToMHA
from .head_grouping import HeadGroups, group_adjacent_heads
from .pruning_plan import HeadId

TOLERANCE = 1e-4  # largest difference of outputs that must be equal, relative to the largest
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class ModuleChange:
    """The changed copy of a model, and the largest difference on the example from what it must
    equal, relative to the largest output.

    `removed_params` is negative if parameters were added. `removed_heads` lists pruned heads,
    `groups` the averaged key-value heads by site.
    """

    after: nn.Module
    removed_params: int
    difference: float
    removed_heads: tuple[HeadId, ...] = ()
    groups: Mapping[str, HeadGroups] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadChange:
    """The heads of a declared module after a change: each new query and key-value head is the mean
    of a group of old ones.

    >>> site = AttentionSite("qkv", "qkv", "qkv", "out", heads=3)
    >>> HeadChange.without(site, "layer 0", {1}).rows()
    {'qkv': (9, ((0,), (2,), (3,), (5,), (6,), (8,)))}
    """

    site: AttentionSite
    q: HeadGroups
    kv: HeadGroups

    @staticmethod
    def without(site: AttentionSite, name: str, removed: Iterable[int]) -> HeadChange:
        """The change that removes these query heads, and the key-value heads that no other uses."""
        dropped = set(removed)
        heads_left = [head for head in range(site.heads) if head not in dropped]
        if not heads_left:
            raise SpecError(f"cannot remove all {site.heads} heads of {name}; keep at least one")
        group = site.heads // site.num_kv_heads
        users = [head // group for head in heads_left]
        counts = {head: users.count(head) for head in users}
        if len(set(counts.values())) > 1:
            shared = ", ".join(map(str, counts.values()))
            raise SpecError(
                f"cannot prune {name}: its key-value heads would be shared by {shared} query heads;"
                " keep the same number in each group, or remove whole groups"
            )
        return HeadChange(site, tuple((h,) for h in heads_left), tuple((h,) for h in counts))

    @property
    def heads_left(self) -> list[int]:
        """The query heads that stay."""
        return [head for (head,) in self.q]

    def rows(self) -> dict[str, tuple[int, HeadGroups]]:
        """For each projection, its number of blocks of rows, and the blocks that each new one
        averages.
        """
        site = self.site
        kv = self.site.num_kv_heads
        if not site.is_fused:
            return {site.q: (site.heads, self.q), site.k: (kv, self.kv), site.v: (kv, self.kv)}
        if site.fused == "by head":
            parts = [
                _shift(groups, part, 3) for part, groups in enumerate((self.q, self.kv, self.kv))
            ]
            by_head = len(self.q) == len(self.kv)
            order = zip(*parts, strict=True) if by_head else parts
            return {site.q: (3 * site.heads, tuple(block for part in order for block in part))}
        starts = {0: self.q, site.heads: self.kv, site.heads + kv: self.kv}
        blocks = [block for start, groups in starts.items() for block in _shift(groups, start)]
        return {site.q: (site.heads + 2 * kv, tuple(blocks))}


def _shift(groups: HeadGroups, start: int, stride: int = 1) -> list[tuple[int, ...]]:
    """Groups of blocks, from groups of heads whose first block is `start`."""
    return [tuple(start + stride * head for head in group) for group in groups]


def average_blocks(rows: Tensor, num_blocks: int, groups: HeadGroups) -> Tensor:
    """The mean of each group of blocks of rows."""
    parts = rows.unflatten(0, (num_blocks, -1))
    return torch.stack([parts[list(group)].mean(0) for group in groups]).flatten(0, 1)


# --- Verbs ----------------------------------------------------------------------------------------


def prune_module(model: nn.Module, heads: Iterable[HeadRef], example: Any) -> ModuleChange:
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
    sites = _find_sites(model)
    removed = group_by_site(model, find_attention(model), heads)
    if not removed:
        raise SpecError("no head would be removed; name heads as (layer, head)")
    names = tuple((name, head) for name, dropped in removed.items() for head in sorted(dropped))
    choices = {name: list(list_projections(model, sites[name])) for name in removed}
    for name, proposed in choices.items():
        check_unshared(model, sites, name, proposed[0])
    inputs = prepare_inputs(model, example, 0)
    paths = sorted(sites[name].path for name in removed)
    with ablate(model, names):
        expected = run_and_record(model, inputs, paths)
    remedy = (
        "name the sizes that its forward reads in AttentionSite(attributes=...), and other "
        "parameters with heads in per_head=..."
    )
    first_error: SpecError | None = None
    for number in range(max(map(len, choices.values()))):
        try:
            after = copy_declared(model)
            for name, dropped in removed.items():
                projections = choices[name][min(number, len(choices[name]) - 1)]
                change = HeadChange.without(projections, name, dropped)
                _resize(split_multihead(after, sites[name].path), change)
            difference = _compare(
                after,
                expected,
                inputs,
                paths,
                f"pruned {type(model).__name__}",
                "ablated one",
                remedy,
            )
            return ModuleChange(after, _count_removed(model, after), difference, names)
        except SpecError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def convert_module(
    model: nn.Module, conversion: AttentionConversion | int, example: Any, *, kind: str = "all"
) -> ModuleChange:
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
    strategy = Pool(conversion) if isinstance(conversion, int) else conversion
    is_pool = isinstance(strategy, Pool) and not strategy.needs_statistics
    if not is_pool and not isinstance(strategy, ToMHA):
        raise SpecError(
            f"{strategy!r} needs layers of headwise; of other modules, heads can be averaged with "
            "neighbours: give a number of key-value heads"
        )
    if kind not in ATTENTION_KINDS:
        raise SpecError(f"unknown kind={kind!r}; {suggest(kind, ATTENTION_KINDS)}")
    sites = _find_sites(model)
    chosen = {
        name: site
        for name, site in sites.items()
        if kind == "all" or (site.kind == "cross") == (kind == "cross")
    }
    if not chosen:
        what = "attention" if kind == "all" else f"{kind}-attention"
        raise SpecError(
            f"{type(model).__name__} has no {what} that headwise finds; hw.sites(model) lists it"
        )
    inputs = prepare_inputs(model, example, 0)
    after = copy_declared(model)
    equal_heads = dict[str, Tensor]()
    groups = dict[str, HeadGroups]()
    for name, site in chosen.items():
        proposed = list(list_projections(model, site))
        check_unshared(model, sites, name, proposed[0])
        projections = _find_projections(model, site, proposed, inputs)
        kv = projections.num_kv_heads
        heads = projections.heads
        try:
            groups[name] = (
                group_adjacent_heads(kv, strategy.kv)
                if isinstance(strategy, Pool)
                else tuple((head * kv // heads,) for head in range(heads))
            )
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None
        change = HeadChange(projections, tuple((head,) for head in range(heads)), groups[name])
        module = after.get_submodule(site.path)
        if "kv_heads" in _size_attributes(module, projections).values() and (
            projections.fused == "by projection"
        ):
            _resize(module, change)
        elif isinstance(strategy, ToMHA):
            raise SpecError(
                f"cannot convert {site.path} to MHA: {type(module).__name__} does not read a number"
                " of key-value heads; name it in AttentionSite(attributes={...: 'kv_heads'})"
            )
        else:
            _share_rows(after, site.path, change)
        if isinstance(strategy, Pool):
            equal_heads |= _equal_heads(model, site.path, change)
    paths = [site.path for site in chosen.values()]
    expected = run_and_record(model, inputs, paths, equal_heads)
    remedies = (
        "one with equal heads",
        "name the sizes that its forward reads in AttentionSite(attributes=...), or declare its "
        "projections with hw.AttentionSite",
    )
    difference = _compare(
        after, expected, inputs, paths, f"converted {type(model).__name__}", *remedies
    )
    return ModuleChange(after, _count_removed(model, after), difference, groups=groups)


def _find_sites(model: nn.Module) -> dict[str, Site]:
    if model.training:
        raise SpecError(
            "the model is in train mode, where outputs are random; call model.eval() first"
        )
    return {site_module.site.name: site_module.site for site_module in find_attention(model)}


def _count_removed(before: nn.Module, after: nn.Module) -> int:
    counts = [sum(p.numel() for p in model.parameters()) for model in (before, after)]
    return counts[0] - counts[1]


# --- Projections ----------------------------------------------------------------------------------


def list_projections(model: nn.Module, site: Site) -> Iterator[AttentionSite]:
    """The declared projections of a site, or those that its names and sizes allow; raises if there
    are none.
    """
    module = model.get_submodule(site.path)
    for path, child in module.named_modules():
        if parametrize.is_parametrized(child):
            raise SpecError(
                f"cannot change {site.name}: weights of {path or 'it'} are computed from others "
                "(parametrization), as after hw.convert_module; change the original model"
            )
    if isinstance(module, nn.MultiheadAttention):
        yield AttentionSite("q_proj", "k_proj", "v_proj", "out_proj", heads=module.num_heads)
        return
    declaration = get_declaration(module)
    if declaration is not None and declaration.projections is not None:
        if not site.prune.possible:
            raise SpecError(f"cannot change {site.name}: {site.prune.reason}")
        yield declaration.projections
        return
    proposed = list(propose_sites(module, site.heads, site.kv or site.heads))
    if not proposed:
        raise SpecError(
            f"cannot change {site.name}: its projections are not declared; call "
            "hw.declare(module, hw.AttentionSite(q=..., k=..., v=..., out=..., heads=...))"
        )
    yield from proposed


def check_unshared(
    model: nn.Module, sites: Mapping[str, Site], name: str, projections: AttentionSite
) -> None:
    """Raise if weights of a site are used twice, or if its module runs at several depths."""
    site = sites[name]
    module = model.get_submodule(site.path)
    children = {projections.q, projections.k, projections.v, projections.out}
    is_multihead = isinstance(module, nn.MultiheadAttention)
    owners = [module] if is_multihead else [module.get_submodule(child) for child in children]
    tensors = {id(parameter) for owner in owners for parameter in owner.parameters()}
    prefix = f"{site.path}." if site.path else ""
    own_paths = set[int]()
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in tensors:
            continue
        if id(parameter) in own_paths or not path.startswith(prefix):
            raise SpecError(f"cannot change {name}: {path} has the same weights; untie them first")
        own_paths.add(id(parameter))
    if site.same_as is not None or any(other.same_as == name for other in sites.values()):
        raise SpecError(f"cannot change {name}: its module runs at several depths; copy it first")


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
    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is not None:
            raise SpecError(
                f"cannot convert {site.name}: its bias_kv differs between heads; build it without "
                "add_bias_kv"
            )
        fused = "in_proj_weight" if module.in_proj_weight is not None else ""
        q, k, v = (fused or f"{side}_proj_weight" for side in "qkv")
        return AttentionSite(q, k, v, "out_proj", heads=module.num_heads)
    for projections in proposed:
        tensors = _scramble_first_group(model, site.path, projections)
        changed = [run_and_record(model, inputs, [site.path], new) for new in (tensors, NO_TENSORS)]
        if largest_difference(*changed) <= TOLERANCE:
            names = f"{projections.q}, {projections.k} and {projections.v}"
            raise SpecError(
                f"cannot convert {site.name}: its output does not depend on {names} on this "
                "example; give another"
            )
        first_group = range(site.heads // projections.num_kv_heads)
        # behind a norm over all heads, outputs would depend on the ablated group
        with edits_at_function(), ablate(model, [(site.name, head) for head in first_group]):
            ablated = [
                run_and_record(model, inputs, [site.path], new) for new in (tensors, NO_TENSORS)
            ]
        belong_to_heads = largest_difference(*ablated) <= TOLERANCE
        if belong_to_heads and (
            not projections.is_fused or _is_affine_in_values(model, site.path, projections, inputs)
        ):
            return projections
    raise SpecError(
        f"cannot convert {site.name}: rows of {proposed[0].q} do not belong to {site.heads} heads "
        "of q, k and v in order; declare its projections with "
        "hw.declare(module, hw.AttentionSite(...))"
    )


def _scramble_first_group(model: nn.Module, path: str, site: AttentionSite) -> dict[str, Tensor]:
    """The parameters of q, k and v with other numbers in the rows of the first key-value head and
    its query heads.
    """
    queries = tuple((head,) for head in range(site.heads // site.num_kv_heads))
    scrambled: dict[str, Tensor] = {}
    for name, (num_blocks, blocks) in HeadChange(site, queries, ((0,),)).rows().items():
        rows = sorted(row for (row,) in blocks)
        for parameter_name in _row_tensors(model, path, name):
            tensor = model.get_parameter(parameter_name).detach().clone()
            parts = tensor.unflatten(0, (num_blocks, -1))
            parts[rows] = 1 - 3 * parts[rows].flip(-1)
            scrambled[parameter_name] = tensor
    return scrambled


def _is_affine_in_values(
    model: nn.Module, path: str, site: AttentionSite, inputs: ModelInputs
) -> bool:
    """True if the outputs of a module with one projection of q, k and v change in equal steps with
    its rows of v.
    """
    all_heads = tuple((head,) for head in range(site.heads))
    kv_heads = all_heads[: site.num_kv_heads]
    if site.fused == "by head":
        num_blocks = 3 * site.heads
        rows = [3 * head + 2 for head in range(site.heads)]
    else:
        num_blocks, blocks = HeadChange(site, all_heads, kv_heads).rows()[site.q]
        rows = [row for (row,) in blocks[-site.num_kv_heads :]]
    outputs = list[Tensor]()
    for factor in (0, 1, 2):
        scaled: dict[str, Tensor] = {}
        for name in _row_tensors(model, path, site.q):
            scaled[name] = model.get_parameter(name).detach().clone()
            scaled[name].unflatten(0, (num_blocks, -1))[rows] *= factor
        outputs.append(run_and_record(model, inputs, [path], scaled)[0])
    none, once, twice = outputs
    return largest_difference([twice - once], [once - none]) <= TOLERANCE


def _row_tensors(model: nn.Module, path: str, projection: str) -> list[str]:
    """Names of the parameters of a model whose rows are those of one projection of the module at
    `path`.
    """
    prefix = f"{path}." if path else ""
    module = model.get_submodule(path)
    if isinstance(module, nn.MultiheadAttention):
        has_bias = projection == "in_proj_weight" and module.in_proj_bias is not None
        return [prefix + name for name in (projection, *(["in_proj_bias"] if has_bias else []))]
    linear = module.get_submodule(projection)
    return [f"{prefix}{projection}.{name}" for name, _ in linear.named_parameters(recurse=False)]


# --- Weights with other heads ---------------------------------------------------------------------


def _resize(module: nn.Module, change: HeadChange) -> None:
    """Give a module the parameters and sizes of its new heads, and declare it again."""
    site = change.site
    heads_left = change.heads_left
    for name, (num_blocks, groups) in change.rows().items():
        linear = cast(nn.Linear, module.get_submodule(name))
        for tensor_name, tensor in list(linear.named_parameters(recurse=False)):
            averaged = average_blocks(tensor.detach(), num_blocks, groups)
            setattr(linear, tensor_name, nn.Parameter(averaged, requires_grad=tensor.requires_grad))
        linear.out_features = linear.weight.shape[0]
    out = cast(nn.Linear, module.get_submodule(site.out))
    width = out.in_features // site.heads
    axis_of_heads = (
        {f"{site.out}.weight": 1, **site.per_head} if len(heads_left) < site.heads else {}
    )
    for name, axis in axis_of_heads.items():
        owner, _, tensor_name = name.rpartition(".")
        _keep_blocks(module.get_submodule(owner), tensor_name, axis, site.heads, heads_left)
    out.in_features = out.weight.shape[1]
    heads = len(heads_left)
    kv_heads = len(change.kv)
    query_rows = 0 if site.is_fused else get_output_width(module.get_submodule(site.q))
    query_width = query_rows // heads or width
    counts = {"heads": heads, "kv_heads": kv_heads, "q": heads * query_width}
    counts |= {"k": kv_heads * query_width, "v": kv_heads * width, "out": heads * width}
    for name, size in _size_attributes(module, site).items():
        setattr(module, name, counts[size])
    declare(module, replace(site, heads=heads, kv_heads=kv_heads))


def _keep_blocks(
    owner: nn.Module, name: str, axis: int, num_blocks: int, block_numbers: Sequence[int]
) -> None:
    """Keep some of `num_blocks` equal blocks of a parameter or buffer along an axis."""
    tensor: Tensor = getattr(owner, name)
    index = torch.tensor(list(block_numbers), device=tensor.device)
    blocks = tensor.detach().unflatten(axis, (num_blocks, -1)).index_select(axis, index)
    smaller = blocks.flatten(axis, axis + 1).clone()
    if isinstance(tensor, nn.Parameter):
        smaller = nn.Parameter(smaller, requires_grad=tensor.requires_grad)
    setattr(owner, name, smaller)


def _size_attributes(module: nn.Module, site: AttentionSite) -> dict[str, str]:
    """Attributes that hold sizes: those that are declared, and the numbers of heads by their usual
    names.
    """
    attributes = dict[str, str]()
    for size, names, count in (
        ("kv_heads", NUM_KV_HEADS_NAMES, site.num_kv_heads),
        ("heads", NUM_HEADS_NAMES, site.heads),
    ):
        attributes |= {name: size for name in names if getattr(module, name, None) == count}
    return attributes | dict(site.attributes)


class SharedHeads(nn.Module):
    """Parametrization of a projection: blocks of rows in the same group are stored once, as the
    mean of the group.

    >>> linear = nn.Linear(3, 4)
    >>> _ = parametrize.register_parametrization(linear, "weight", SharedHeads((0, 0, 1, 1)))
    >>> linear.weight.shape, linear.parametrizations.weight.original.shape
    (torch.Size([4, 3]), torch.Size([2, 3]))
    """

    stored_block: Tensor

    def __init__(self, stored_block: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("stored_block", torch.tensor(list(stored_block)), persistent=False)

    def forward(self, stored: Tensor) -> Tensor:
        """All rows, from those that are stored."""
        blocks = stored.unflatten(0, (int(self.stored_block.max()) + 1, -1))
        return blocks.index_select(0, self.stored_block).flatten(0, 1)

    def right_inverse(self, rows: Tensor) -> Tensor:
        """The means that are stored for these rows."""
        stored = self.stored_block
        groups = [(stored == n).nonzero().flatten().tolist() for n in range(int(stored.max()) + 1)]
        return average_blocks(rows, len(stored), tuple(map(tuple, groups)))


def _share_rows(model: nn.Module, path: str, change: HeadChange) -> None:
    """Store one block of rows for each group of heads of a module whose forward needs all rows."""
    for name, (num_blocks, groups) in change.rows().items():
        stored_block = [0] * num_blocks
        for number, group in enumerate(groups):
            for block in group:
                stored_block[block] = number
        if stored_block == list(range(num_blocks)):
            continue
        for parameter_name in _row_tensors(model, path, name):
            owner, _, tensor_name = parameter_name.rpartition(".")
            module: Any = model.get_submodule(owner)
            needs_grad = model.get_parameter(parameter_name).requires_grad
            parametrize.register_parametrization(module, tensor_name, SharedHeads(stored_block))
            module.parametrizations[tensor_name].original.requires_grad_(needs_grad)


def _equal_heads(model: nn.Module, path: str, change: HeadChange) -> dict[str, Tensor]:
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


# --- Outputs of two models compared ---------------------------------------------------------------


def run_and_record(
    model: nn.Module,
    inputs: ModelInputs,
    paths: Sequence[str],
    tensors: Mapping[str, Tensor] = NO_TENSORS,
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
    differences = [torch.zeros((), dtype=torch.float64)]
    for tensor, other in zip(actual, expected, strict=True):
        if other.is_floating_point() and other.numel():
            scale = other.abs().max().clamp_min(1e-30)
            differences.append(((tensor - other).abs().max() / scale).double().cpu())
    return float(torch.stack(differences).max())  # NaN if any is


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (Mapping, tuple, list)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _compare(
    after: nn.Module,
    expected: Sequence[Tensor],
    inputs: ModelInputs,
    paths: Sequence[str],
    name: str,
    other: str,
    remedy: str,
) -> float:
    """Relative difference of the changed model from the expected outputs; raises if it is large."""
    try:
        actual = run_and_record(after, inputs, paths)
    except Exception as error:  # the model may raise anything
        message = " ".join(str(error).split())[:200]
        raise SpecError(f"the {name} cannot run: {message}; {remedy}") from error
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        raise SpecError(f"the outputs of the {name} have other shapes; {remedy}")
    difference = largest_difference(actual, expected)
    if not difference <= TOLERANCE:
        raise SpecError(
            f"the {name} differs from the {other} by {difference:.2g} of the largest output; "
            f"{remedy}"
        )
    return difference


# --- nn.MultiheadAttention ------------------------------------------------------------------------

CALL = signature(nn.MultiheadAttention.forward)


class SplitMultiheadAttention(nn.Module):
    """Multi-head attention that is called like nn.MultiheadAttention, with one nn.Linear for each
    of q, k, v and out.

    It takes the place of an nn.MultiheadAttention, also inside nn.Transformer, when heads are
    removed.

    >>> attention = nn.MultiheadAttention(6, 3, batch_first=True).eval()
    >>> split, x = SplitMultiheadAttention(attention), torch.randn(2, 5, 6)
    >>> bool(torch.allclose(split(x, x, x)[0], attention(x, x, x)[0], atol=1e-6))
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
        self.embed_dim = original.embed_dim
        self.num_heads = original.num_heads
        self.batch_first = original.batch_first
        self.dropout = original.dropout
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
        is_batched = options["query"].dim() == 3
        if options["is_causal"] and options["attn_mask"] is None:
            raise ValueError("is_causal=True needs attn_mask; give the causal mask")
        q = self._project(self.q_proj, options["query"])
        k = self._project(self.k_proj, options["key"])
        v = self._project(self.v_proj, options["value"])
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = self._bias(scores, options["attn_mask"], options["key_padding_mask"], is_batched)
        weights = (scores + bias).softmax(-1)
        heads = F.dropout(weights, self.dropout, self.training) @ v
        y = self.out_proj(heads.transpose(1, 2).flatten(2))
        if not is_batched:
            y = y[0]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        if not options["need_weights"]:
            return y, None
        weights = weights.mean(1) if options["average_attn_weights"] else weights
        return y, weights if is_batched else weights[0]

    def _project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """[B, heads, T, dim] of a projected input."""
        y = linear(x)
        if x.dim() == 2:
            y = y[None]
        elif not self.batch_first:
            y = y.transpose(0, 1)
        return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _bias(
        self, scores: Tensor, attn_mask: Tensor | None, padding: Tensor | None, is_batched: bool
    ) -> Tensor:
        """Both masks as one tensor to add to the scores; True in a boolean mask forbids a pair."""
        bias = scores.new_zeros(())
        if attn_mask is not None:
            mask = _to_bias(attn_mask, scores)
            if mask.dim() == 3:  # one for each row and head
                if mask.shape[0] != scores.shape[0] * self.num_heads:
                    raise ValueError(
                        f"attn_mask has {mask.shape[0]} masks for {scores.shape[0]} rows of "
                        f"{self.num_heads} heads; give one for each row and head that is left"
                    )
                mask = mask.unflatten(0, (scores.shape[0], self.num_heads))
            bias = bias + mask
        if padding is not None:
            mask = _to_bias(padding, scores)
            bias = bias + (mask[:, None, None] if is_batched else mask)
        return bias


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
