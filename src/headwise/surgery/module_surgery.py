"""Pruning and conversion of heads in any nn.Module with projections that are declared with
`hw.AttentionSite` or have conventional names.

Every projection is a row of blocks, one per head; a changed module keeps some blocks or the means
of groups of them. An example compares the copy with the original: with ablated heads after pruning,
with equal heads in each group after conversion. A module that does not read its number of key-value
heads, such as `nn.MultiheadAttention`, keeps its shapes when converted: a parametrization stores
each shared block once and repeats it when the weight is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from ..observe.inspect.ablation import HeadRef, ablate, group_by_site
from ..observe.inspect.adapters.declarations import (
    AttentionSite,
    copy_declared,
    declare,
    get_declaration,
    propose_sites,
)
from ..observe.inspect.adapters.output_path import edits_at_function
from ..observe.inspect.adapters.output_projection import NUM_HEADS_NAMES, NUM_KV_HEADS_NAMES
from ..observe.inspect.attention_sites import find_attention
from ..observe.inspect.model_inputs import ModelInputs, prepare_inputs
from ..observe.inspect.site import Site
from ..util.errors import SpecError
from .conversion import AttentionConversion, Pool, ToMHA, read_conversion, select_sites
from .head_grouping import HeadGroups, group_adjacent_heads
from .pruning_plan import HeadId
from .split_multihead import split_multihead

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


# --- Blocks of rows -------------------------------------------------------------------------------


def list_blocks(site: AttentionSite, q: int, kv: int) -> dict[str, list[tuple[str, int]]]:
    """Return side and head of each block of rows of each projection, for these numbers of heads.

    >>> list_blocks(AttentionSite("qkv", "qkv", "qkv", "out", heads=2), 2, 1)
    {'qkv': [('q', 0), ('q', 1), ('k', 0), ('v', 0)]}
    """
    counts = {"q": q, "k": kv, "v": kv}
    sides = [list(product((side,), range(count))) for side, count in counts.items()]
    if not site.is_fused:
        return dict(zip((site.q, site.k, site.v), sides, strict=True))
    if site.fused == "by head" and q == kv:
        sides = list(map(list, zip(*sides, strict=True)))
    return {site.q: list(chain.from_iterable(sides))}


@dataclass(frozen=True)
class HeadChange:
    """The heads of a module after a change: each new query and key-value head is the mean of a
    group of old ones.

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
        counts = Counter(head * site.num_kv_heads // site.heads for head in heads_left)
        if len(set(counts.values())) > 1:
            shared = ", ".join(map(str, counts.values()))
            raise SpecError(
                f"cannot prune {name}: its key-value heads would be shared by {shared} query heads;"
                " keep the same number in each group, or remove whole groups"
            )
        return HeadChange(site, tuple((h,) for h in heads_left), tuple((h,) for h in counts))

    def rows(self) -> dict[str, tuple[int, HeadGroups]]:
        """For each projection, its number of blocks of rows, and the blocks that each new one
        averages.
        """
        groups = {"q": self.q, "k": self.kv, "v": self.kv}
        new = list_blocks(self.site, len(self.q), len(self.kv))
        rows = dict[str, tuple[int, HeadGroups]]()
        for name, blocks in list_blocks(self.site, self.site.heads, self.site.num_kv_heads).items():
            averaged = list[tuple[int, ...]]()
            for side, head in new[name]:
                averaged.append(tuple(blocks.index((side, old)) for old in groups[side][head]))
            rows[name] = (len(blocks), tuple(averaged))
        return rows


def average_blocks(tensor: Tensor, axis: int, num_blocks: int, groups: HeadGroups) -> Tensor:
    """Return the mean of each group of equal blocks along an axis."""
    blocks = tensor.detach().unflatten(axis, (num_blocks, -1)).movedim(axis, 0)
    means = [blocks[list(group)].mean(0) if len(group) > 1 else blocks[group] for group in groups]
    return torch.stack(means, axis).flatten(axis, axis + 1)


# --- Verbs ----------------------------------------------------------------------------------------


def prune_module(model: nn.Module, heads: Iterable[HeadRef], example: Any) -> ModuleChange:
    """Return a copy of any model without these heads, at sites with declared or conventionally
    named projections.

    A head is (layer, head) or (site name, head), as for `hw.ablate`. The copy must equal the
    ablated model on `example`, an input of the model. Raises if it does not, for example because
    `AttentionSite(per_head=...)` misses a parameter with heads. `model` is not changed, and the
    copy is declared as well.

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
    pairs = chain.from_iterable(product((name,), sorted(removed[name])) for name in removed)
    names = tuple(pairs)
    choices = {name: list_projections(model, sites, name) for name in removed}
    inputs = prepare_inputs(model, example, 0)
    paths = sorted(sites[name].path for name in removed)
    with ablate(model, names):
        expected = run_and_record(model, inputs, paths)
    errors = list[SpecError]()
    for number in range(max(map(len, choices.values()))):
        after = copy_declared(model)
        try:
            for name, dropped in removed.items():
                projections = choices[name][min(number, len(choices[name]) - 1)]
                change = HeadChange.without(projections, name, dropped)
                _resize(split_multihead(after, sites[name].path), change)
            difference = _compare(
                after, expected, inputs, paths, "pruned", "ablated one", PRUNING_REMEDY
            )
        except SpecError as error:
            errors.append(error)
            continue
        return ModuleChange(after, _count_removed(model, after), difference, names)
    raise errors[0]


PRUNING_REMEDY = (
    "name the sizes that its forward reads in AttentionSite(attributes=...), and other "
    "parameters with heads in per_head=..."
)
CONVERSION_REMEDY = (
    "name the sizes that its forward reads in AttentionSite(attributes=...), or declare its "
    "projections with hw.AttentionSite"
)


def convert_module(
    model: nn.Module, conversion: AttentionConversion | int, example: Any, *, kind: str = "all"
) -> ModuleChange:
    """Return a copy of any model with `conversion` key-value heads per attention, each the mean of
    neighbours.

    `conversion` is a number, `Pool(number)` or, for modules that read their number of key-value
    heads, `ToMHA()`. It applies to all sites, or to one `kind`, "self" or "cross". On `example`, an
    input of the model, the copy must equal the model with full projections and equal heads per
    group. `model` is not changed. A copy made of another model of the same class has the same
    parameters, so that it can load the state dict of the result.

    >>> attention = nn.TransformerEncoder(
    ...     nn.TransformerEncoderLayer(8, 4, 12, batch_first=True), 2
    ... ).eval()
    >>> done = convert_module(attention, 2, torch.randn(2, 5, 8))
    >>> done.removed_params, done.groups["model.0.attention"]
    (144, ((0, 1), (2, 3)))
    """
    strategy = read_conversion(conversion)
    is_pool = isinstance(strategy, Pool) and not strategy.needs_statistics
    if not is_pool and not isinstance(strategy, ToMHA):
        raise SpecError(
            f"{strategy!r} needs layers of headwise; of other modules, heads can be averaged with "
            "neighbours: give a number of key-value heads"
        )
    sites = _find_sites(model)
    chosen = select_sites(type(model).__name__, sites, kind)
    inputs = prepare_inputs(model, example, 0)
    after = copy_declared(model)
    equal_heads = dict[str, Tensor]()
    groups = dict[str, HeadGroups]()
    for name in chosen:
        site = sites[name]
        projections = _find_projections(model, site, list_projections(model, sites, name), inputs)
        kv = projections.num_kv_heads
        heads = range(projections.heads)
        try:
            groups[name] = (
                group_adjacent_heads(kv, strategy.kv)
                if isinstance(strategy, Pool)
                else tuple((head * kv // len(heads),) for head in heads)
            )
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None
        change = HeadChange(projections, tuple((head,) for head in heads), groups[name])
        shared = _shared_tensors(model, site.path, change)
        if isinstance(strategy, Pool):
            for tensor_name, sharing in shared.items():
                rows = model.get_parameter(tensor_name).detach()
                equal_heads[tensor_name] = sharing(sharing.right_inverse(rows))
        module = after.get_submodule(site.path)
        reads_count = "kv_heads" in _size_attributes(module, projections).values()
        if reads_count and projections.fused == "by projection":
            _resize(module, change)
        elif isinstance(strategy, ToMHA):
            raise SpecError(
                f"cannot convert {site.path} to MHA: {type(module).__name__} does not read a number"
                " of key-value heads; name it in AttentionSite(attributes={...: 'kv_heads'})"
            )
        else:  # its forward needs all rows
            for tensor_name, sharing in shared.items():
                owner, _, leaf = tensor_name.rpartition(".")
                linear: Any = after.get_submodule(owner)
                needs_grad = after.get_parameter(tensor_name).requires_grad
                parametrize.register_parametrization(linear, leaf, sharing)
                linear.parametrizations[leaf].original.requires_grad_(needs_grad)
    paths = [sites[name].path for name in chosen]
    expected = run_and_record(model, inputs, paths, equal_heads)
    difference = _compare(
        after, expected, inputs, paths, "converted", "one with equal heads", CONVERSION_REMEDY
    )
    return ModuleChange(after, _count_removed(model, after), difference, groups=groups)


def _find_sites(model: nn.Module) -> dict[str, Site]:
    if model.training:
        raise SpecError(
            "the model is in train mode, where outputs are random; call model.eval() first"
        )
    return {site_module.site.name: site_module.site for site_module in find_attention(model)}


def _count_removed(before: nn.Module, after: nn.Module) -> int:
    return sum(p.numel() for p in before.parameters()) - sum(p.numel() for p in after.parameters())


# --- Projections ----------------------------------------------------------------------------------


def list_projections(model: nn.Module, sites: Mapping[str, Site], name: str) -> list[AttentionSite]:
    """Return the declared projections of a site, or those that its names and sizes allow.

    Raises if there are none, if weights are used twice, or if the module runs at several depths.
    """
    site = sites[name]
    module = model.get_submodule(site.path)
    for path, child in module.named_modules():
        if parametrize.is_parametrized(child):
            raise SpecError(
                f"cannot change {name}: weights of {path or 'it'} are computed from others "
                "(parametrization), as after hw.convert_module; change the original model"
            )
    declaration = get_declaration(module)
    if isinstance(module, nn.MultiheadAttention):
        proposed = [AttentionSite("q_proj", "k_proj", "v_proj", "out_proj", heads=module.num_heads)]
        owners = [module]
    else:
        if declaration is not None and declaration.projections is not None:
            if not site.prune.possible:
                raise SpecError(f"cannot change {name}: {site.prune.reason}")
            proposed = [declaration.projections]
        else:
            proposed = list(propose_sites(module, site.heads, site.kv or site.heads))
        if not proposed:
            raise SpecError(
                f"cannot change {name}: its projections are not declared; call "
                "hw.declare(module, hw.AttentionSite(q=..., k=..., v=..., out=..., heads=...))"
            )
        first = proposed[0]
        owners = [module.get_submodule(one) for one in {first.q, first.k, first.v, first.out}]
    tensors = set(map(id, nn.ModuleList(owners).parameters()))
    prefix = f"{site.path}." if site.path else ""
    own_paths = set[int]()
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in tensors:
            if id(parameter) in own_paths or not path.startswith(prefix):
                raise SpecError(
                    f"cannot change {name}: {path} has the same weights; untie them first"
                )
            own_paths.add(id(parameter))
    if site.same_as is not None or any(other.same_as == name for other in sites.values()):
        raise SpecError(f"cannot change {name}: its module runs at several depths; copy it first")
    return proposed


def _find_projections(
    model: nn.Module, site: Site, proposed: Sequence[AttentionSite], inputs: ModelInputs
) -> AttentionSite:
    """Return the first proposed projections with the claimed row-to-head layout. Raises if there
    are none.

    While the query heads of a key-value head are ablated, the outputs must not depend on their rows
    of q, k and v. If these are one projection, the outputs must be affine in the rows of v; they
    are not affine in the rows of q and k.
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

    def run(tensors: Mapping[str, Tensor] = NO_TENSORS) -> list[Tensor]:
        return run_and_record(model, inputs, [site.path], tensors)

    def edit_rows(
        is_chosen: Callable[[str, int], bool], edit: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Parameters of q, k and v with edited rows of the chosen sides and heads."""
        edited = dict[str, Tensor]()
        all_blocks = list_blocks(projections, projections.heads, projections.num_kv_heads)
        for projection, blocks in all_blocks.items():
            rows = [number for number, block in enumerate(blocks) if is_chosen(*block)]
            for name in _row_tensors(model, site.path, projection):
                edited[name] = model.get_parameter(name).detach().clone()
                parts = edited[name].unflatten(0, (len(blocks), -1))
                parts[rows] = edit(parts[rows])
        return edited

    for projections in proposed:
        group = {"q": site.heads // projections.num_kv_heads, "k": 1, "v": 1}
        scrambled = edit_rows(
            lambda side, head, group=group: head < group[side], lambda rows: 1 - 3 * rows.flip(-1)
        )
        if largest_difference(run(scrambled), run()) <= TOLERANCE:
            names = f"{projections.q}, {projections.k} and {projections.v}"
            raise SpecError(
                f"cannot convert {site.name}: its output does not depend on {names} on this "
                "example; give another"
            )
        # behind a norm over all heads, outputs would depend on the ablated group
        first_heads = [(site.name, head) for head in range(group["q"])]
        with edits_at_function(), ablate(model, first_heads):
            belong_to_heads = largest_difference(run(scrambled), run()) <= TOLERANCE
        if belong_to_heads and projections.is_fused:
            none, once, twice = (
                run(
                    edit_rows(
                        lambda side, _: side == "v", lambda rows, factor=factor: rows * factor
                    )
                )[0]
                for factor in (0, 1, 2)
            )
            belong_to_heads = largest_difference([twice - once], [once - none]) <= TOLERANCE
        if belong_to_heads:
            return projections
    raise SpecError(
        f"cannot convert {site.name}: rows of {proposed[0].q} do not belong to {site.heads} heads "
        "of q, k and v in order; declare its projections with "
        "hw.declare(module, hw.AttentionSite(...))"
    )


def _row_tensors(model: nn.Module, path: str, projection: str) -> list[str]:
    """Return the names of the model parameters that hold the rows of one projection of the module
    at `path`.
    """
    module = model.get_submodule(path)
    if isinstance(module, nn.MultiheadAttention):
        has_bias = projection == "in_proj_weight" and module.in_proj_bias is not None
        names = [projection, *(["in_proj_bias"] if has_bias else [])]
    else:
        linear = module.get_submodule(projection)
        names = [f"{projection}.{name}" for name, _ in linear.named_parameters(recurse=False)]
    return [f"{path}.{name}" if path else name for name in names]


# --- Weights with other heads ---------------------------------------------------------------------


def _resize(module: nn.Module, change: HeadChange) -> None:
    """Give a module the parameters and sizes of its new heads, and declare it again."""
    site = change.site
    heads = len(change.q)
    kv_heads = len(change.kv)
    for name, (num_blocks, groups) in change.rows().items():
        linear = cast(nn.Linear, module.get_submodule(name))
        for tensor_name, _ in list(linear.named_parameters(recurse=False)):
            _regroup(linear, tensor_name, 0, num_blocks, groups)
        linear.out_features = linear.weight.shape[0]
    out = cast(nn.Linear, module.get_submodule(site.out))
    width = out.in_features // site.heads
    axis_of_heads = {f"{site.out}.weight": 1, **site.per_head} if heads < site.heads else {}
    for name, axis in axis_of_heads.items():
        owner, _, tensor_name = name.rpartition(".")
        _regroup(module.get_submodule(owner), tensor_name, axis, site.heads, change.q)
    out.in_features = out.weight.shape[1]
    query_rows = 0 if site.is_fused else len(module.get_submodule(site.q).get_parameter("weight"))
    query_width = query_rows // heads or width
    counts = {"heads": heads, "kv_heads": kv_heads, "q": heads * query_width}
    counts |= {"k": kv_heads * query_width, "v": kv_heads * width, "out": heads * width}
    for name, size in _size_attributes(module, site).items():
        setattr(module, name, counts[size])
    declare(module, replace(site, heads=heads, kv_heads=kv_heads))


def _regroup(owner: nn.Module, name: str, axis: int, num_blocks: int, groups: HeadGroups) -> None:
    """Replace the blocks of a parameter or buffer along an axis by the means of groups of them."""
    tensor: Tensor = getattr(owner, name)
    smaller = average_blocks(tensor, axis, num_blocks, groups)
    if isinstance(tensor, nn.Parameter):
        smaller = nn.Parameter(smaller, requires_grad=tensor.requires_grad)
    setattr(owner, name, smaller)


def _size_attributes(module: nn.Module, site: AttentionSite) -> dict[str, str]:
    """Return the attributes that hold sizes: those that are declared, and the numbers of heads by
    their usual names.
    """
    sizes = dict.fromkeys(NUM_KV_HEADS_NAMES, "kv_heads")
    sizes |= dict.fromkeys(NUM_HEADS_NAMES, "heads")
    counts = {"kv_heads": site.num_kv_heads, "heads": site.heads}
    attributes = {
        name: size for name, size in sizes.items() if getattr(module, name, None) == counts[size]
    }
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
        return average_blocks(rows, 0, len(stored), tuple(map(tuple, groups)))


def _shared_tensors(model: nn.Module, path: str, change: HeadChange) -> dict[str, SharedHeads]:
    """Return the parameters that a conversion changes, with the parametrization that stores one
    block of rows for each group of heads.
    """
    shared = dict[str, SharedHeads]()
    for projection, (num_blocks, groups) in change.rows().items():
        stored_block = [0] * num_blocks
        for number, group in enumerate(groups):
            for block in group:
                stored_block[block] = number
        if stored_block != list(range(num_blocks)):
            for name in _row_tensors(model, path, projection):
                device = model.get_parameter(name).device
                shared[name] = SharedHeads(stored_block).to(device)
    return shared


# --- Outputs of two models compared ---------------------------------------------------------------


def run_and_record(
    model: nn.Module,
    inputs: ModelInputs,
    paths: Sequence[str],
    tensors: Mapping[str, Tensor] = NO_TENSORS,
) -> list[Tensor]:
    """Return the outputs of the modules at `paths` in call order, then the model outputs.

    Model outputs alone prove nothing if they do not depend on the modules, as with a zero last
    layer. `tensors` replace parameters during the run.
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
            differences.append(((tensor - other).abs().max() / scale).cpu().double())
    return float(torch.stack(differences).max())  # NaN if any is


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (Mapping, tuple, list)):
        return []
    return list(chain.from_iterable(map(_tensors, values)))


def _compare(
    after: nn.Module,
    expected: Sequence[Tensor],
    inputs: ModelInputs,
    paths: Sequence[str],
    change: str,
    other: str,
    remedy: str,
) -> float:
    """Return the relative difference of the changed model from the expected outputs; raises if it
    is large.
    """
    name = f"{change} {type(after).__name__}"
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
