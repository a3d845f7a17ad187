"""Declarations of attention modules: number of heads and output projection, or all projections.

The user declares a module with `declare`; `propose_sites` proposes declarations by the names that
libraries use.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

FUSED_LAYOUTS = ("by projection", "by head")
SIZES = ("heads", "kv_heads", "q", "k", "v", "out")


@dataclass(frozen=True)
class AttentionSite:
    """The projections of an attention module by the names of its children, which `hw.prune_module`
    needs.

    `q`, `k`, `v` and `out` are names of nn.Linear children. If q, k and v are one child, `fused` is
    the order of its rows: "by projection" (all heads of q, then of k, then of v) or "by head" (q, k
    and v of each head in turn). `heads` is the number of query heads; `kv_heads` is the number of
    key-value heads (default: `heads`).

    `attributes` maps attributes of the module that hold sizes to "heads", "kv_heads", or "q", "k",
    "v" or "out" for the channels of all heads there. Other parameters and buffers with heads need
    no declaration: their entries are found by gradients.
    """

    q: str
    k: str
    v: str
    out: str
    heads: int
    kv_heads: int | None = None
    fused: str = "by projection"
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def num_kv_heads(self) -> int:
        """Count heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def is_fused(self) -> bool:
        """True if one child projects q, k and v."""
        return self.q == self.k == self.v

    def check(self, module: nn.Module) -> None:
        """Raise unless the module has these projections, attributes, parameters and sizes."""
        kind = type(module).__name__
        children = dict(module.named_modules())
        for name in (self.q, self.k, self.v, self.out):
            if not isinstance(children.get(name), nn.Linear):
                raise ValueError(
                    f"{kind} has no projection {name!r}; name a child that is an nn.Linear"
                )
        kv = self.num_kv_heads
        if self.heads < 1 or kv < 1 or self.heads % kv:
            raise ValueError(
                f"heads={self.heads} and kv_heads={kv} make no equal groups; give a divisor of "
                "heads"
            )
        if len({self.q, self.k, self.v}) == 2 or self.fused not in FUSED_LAYOUTS:
            layouts = " or ".join(map(repr, FUSED_LAYOUTS))
            raise ValueError(
                f"q={self.q!r}, k={self.k!r}, v={self.v!r}, fused={self.fused!r} are neither "
                "three children nor one; "
                f"name three, or one with fused={layouts}"
            )
        self._check_widths(children)
        for name, size in self.attributes.items():
            if size not in SIZES or not isinstance(getattr(module, name, None), int):
                raise ValueError(
                    f"attribute {name!r} of {kind} is no {size!r}; map int attributes to "
                    f"{', '.join(SIZES)}"
                )

    def _check_widths(self, children: Mapping[str, nn.Module]) -> None:
        """Raise unless projection channels match the heads, and q and k have equal head widths."""
        rows = {
            name: len(children[name].get_parameter("weight")) for name in (self.q, self.k, self.v)
        }
        if self.is_fused:
            blocks = self.heads + 2 * self.num_kv_heads
            is_equal = get_input_width(children[self.out]) * blocks == rows[self.q] * self.heads
            if (
                rows[self.q] % blocks
                or not is_equal
                or (self.fused == "by head" and self.heads != self.num_kv_heads)
            ):
                raise ValueError(
                    f"{rows[self.q]} channels of {self.q} are not {blocks} heads of q, k and v "
                    "with the "
                    f"{get_input_width(children[self.out])} input channels of {self.out}; give "
                    "other heads"
                )
            return
        counts = {self.q: self.heads, self.k: self.num_kv_heads, self.v: self.num_kv_heads}
        widths = {name: rows[name] / count for name, count in counts.items()}
        out = get_input_width(children[self.out]) / self.heads
        if (
            widths[self.q] != widths[self.k]
            or widths[self.v] != out
            or not (widths[self.q] * out).is_integer()
        ):
            parts = ", ".join(f"{name} {rows[name]}" for name in rows)
            raise ValueError(
                f"channels {parts}, {self.out} {get_input_width(children[self.out])} are not "
                f"those of {self.heads} "
                f"heads and {self.num_kv_heads} key-value heads; give other heads"
            )


class OwnConfig:
    """Config of one module whose heads differ from those of the model: that of the model, except
    for some values.

    >>> OwnConfig(nn.Linear(4, 4), {"in_features": 2}).out_features
    4
    """

    def __init__(self, config: object, own_values: Mapping[str, int]) -> None:
        vars(self).update(own_values, shared_config=config, own_values=dict(own_values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "shared_config" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["shared_config"], name)


def has_own_config(module: nn.Module) -> bool:
    """Return True if the module has an `OwnConfig`, of this class or of the loader script."""
    return "shared_config" in getattr(getattr(module, "config", None), "__dict__", {})


class AttentionDeclaration(NamedTuple):
    """Declare a custom attention module: number of heads and path of its output projection.

    Holds all projections if they were declared.
    """

    heads: int
    output_name: str
    projections: AttentionSite | None = None


_DECLARATIONS: WeakKeyDictionary[nn.Module, AttentionDeclaration] = WeakKeyDictionary()


def declare(
    module: nn.Module, projections: AttentionSite | None = None, *, heads: int = 0, output: str = ""
) -> None:
    """Declare a module as attention: by all its projections, or with `heads` heads and its output
    projection alone.

    >>> import headwise as hw
    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix, self.last = nn.Linear(6, 18), nn.Linear(6, 6)
    >>> net = nn.Sequential(Mine(), Mine())
    >>> hw.declare(net[0], heads=3, output="last")
    >>> hw.declare(net[1], hw.AttentionSite(q="mix", k="mix", v="mix", out="last", heads=2))
    >>> [(site.name, site.q, site.dim, site.prune.possible) for site in hw.sites(net)]
    [('model.0.attention', 3, 2, False), ('model.1.attention', 2, 3, True)]
    """
    if projections is not None:
        if heads or output:
            raise ValueError("heads= and output= are part of the AttentionSite; leave them out")
        projections.check(module)
        _DECLARATIONS[module] = AttentionDeclaration(
            projections.heads, projections.out, projections
        )
        return
    children = dict(module.named_modules())
    if output not in children or not get_input_width(children[output]):
        raise ValueError(
            f"{type(module).__name__} has no projection {output!r}; name a child that is an "
            "nn.Linear"
        )
    if not isinstance(heads, int) or heads < 1 or get_input_width(children[output]) % heads:
        width = get_input_width(children[output])
        raise ValueError(
            f"heads={heads!r} does not divide the {width} input channels of {output}; give a "
            "divisor"
        )
    _DECLARATIONS[module] = AttentionDeclaration(heads, output)


def get_declaration(module: nn.Module) -> AttentionDeclaration | None:
    """Return the declaration that `declare` stored for this module, if any."""
    return _DECLARATIONS.get(module)


def copy_declared(model: nn.Module) -> nn.Module:
    """Copy a model and re-register its attention declarations on the copy."""
    model_copy = copy.deepcopy(model)
    for module, copied in zip(model.modules(), model_copy.modules(), strict=True):
        declaration = get_declaration(module)
        if declaration is not None:
            _DECLARATIONS[copied] = declaration
    return model_copy


def get_input_width(module: nn.Module) -> int:
    """Return the number of input channels of a projection; 0 if it is not a projection."""
    in_features = getattr(module, "in_features", None)  # nn.Linear and its replacements
    if isinstance(in_features, int):
        return in_features
    inner = getattr(module, "base_layer", None)  # wrappers such as LoRA layers
    if isinstance(inner, nn.Module):
        return get_input_width(inner)
    weight = getattr(module, "weight", None)
    # transformers' Conv1D (GPT-2) stores the transposed weight
    is_transposed = type(module).__name__ == "Conv1D" and isinstance(weight, Tensor)
    return weight.shape[0] if is_transposed and isinstance(weight, Tensor) else 0


# --- Proposed declarations, by the names that libraries use ---------------------------------------

# Names of output projections, the most common first; "^" starts at the parent of the module.
OUTPUT_PROJECTION_NAMES = (
    "out_proj",
    "o_proj",
    "c_proj",
    "dense",
    "out_lin",
    "wo",
    "o",
    "proj",
    "to_out",
    "fc_out",
    "linear_out",
    "out",
    "to_out.0",
    "output",
    "^output.dense",
    "^attention_output.dense",
    "^output.out_proj",
    "^output",
)
FUSED_NAMES = ("qkv", "to_qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj")
SEPARATE_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
)
WIDTH_NAMES = ("attn_dim", "inner_dim", "all_head_size")  # attributes: channels of all heads


def propose_sites(module: nn.Module, heads: int, kv_heads: int) -> Iterator[AttentionSite]:
    """Yield declarations that fit the names and sizes of a module's children, likely ones first.

    Check a declaration by its outputs: the rows of a fused projection may be ordered by projection
    or by head.

    >>> layer = nn.ModuleDict({"qkv": nn.Linear(6, 18), "proj": nn.Linear(6, 6)})
    >>> [site.fused for site in propose_sites(layer, 3, 3)]
    ['by projection', 'by head']
    """
    names = [(name, name, name, layout) for name, layout in product(FUSED_NAMES, FUSED_LAYOUTS)]
    names += [(*three, FUSED_LAYOUTS[0]) for three in SEPARATE_NAMES]
    children = dict(module.named_modules())
    for (q, k, v, layout), out in product(names, OUTPUT_PROJECTION_NAMES):
        width = getattr(children.get(out), "in_features", None)
        same = [name for name in WIDTH_NAMES if width and getattr(module, name, None) == width]
        attributes = dict.fromkeys(same, "out")
        site = AttentionSite(q, k, v, out, heads, kv_heads, layout, attributes)
        try:
            site.check(module)
        except ValueError:
            continue
        yield site
