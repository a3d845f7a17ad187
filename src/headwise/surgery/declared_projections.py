"""Rows of heads in projections declared with `hw.AttentionSite` or with conventional names, for
modules whose attention calls cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product

from torch import Tensor, nn

from ..observe.inspect.ablation import ablate
from ..observe.inspect.adapters.declarations import AttentionSite, get_declaration, propose_sites
from ..observe.inspect.adapters.output_path import edits_at_function
from ..observe.inspect.model_inputs import ModelInputs
from ..observe.inspect.site import Site
from ..util.errors import SpecError
from .head_entries import KeyValueRows
from .model_outputs import NO_TENSORS, TOLERANCE, largest_difference, run_and_record


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


def get_projections(module: nn.Module) -> AttentionSite | None:
    """Return the declared projections of a module, if any."""
    declaration = get_declaration(module)
    return None if declaration is None else declaration.projections


def list_projections(model: nn.Module, site: Site) -> list[AttentionSite]:
    """Return the declared projections of a site, or those that its names and sizes allow; raises if
    there are none.
    """
    module = model.get_submodule(site.path)
    if isinstance(module, nn.MultiheadAttention):
        return [AttentionSite("q_proj", "k_proj", "v_proj", "out_proj", heads=module.num_heads)]
    declared = get_projections(module)
    proposed = [declared] if declared else propose_sites(module, site.heads, site.kv or site.heads)
    proposed = list(proposed)
    if not proposed:
        raise SpecError(
            f"cannot change {site.name}: its projections are not declared; call "
            "hw.declare(module, hw.AttentionSite(q=..., k=..., v=..., out=..., heads=...))"
        )
    return proposed


def declared_rows(
    model: nn.Module, path: str, projections: AttentionSite
) -> dict[str, KeyValueRows]:
    """Return the rows of declared projections that belong to key-value heads."""
    rows = dict[str, KeyValueRows]()
    blocks = list_blocks(projections, projections.heads, projections.num_kv_heads)
    for projection, sides in blocks.items():
        labels = [-1 if side == "q" else head for side, head in sides]
        for name in _row_tensors(model, path, projection):
            width = len(model.get_parameter(name)) // len(labels)
            if max(labels) >= 0:
                repeated = chain.from_iterable([label] * width for label in labels)
                rows[name] = KeyValueRows(0, list(repeated))
    return rows


def find_projections(
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
