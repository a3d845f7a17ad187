"""Parameters, FLOPs and cache entries of a layer or model as sums of terms: a name, a formula and a
number each.

In formulas, the sizes of a call are letters: B rows (the batch), T queries, which are the tokens
that pass through a matrix, S keys that a row attends to, `new` tokens with projected keys and
values, and `pairs` of a query and a key that the pattern allows in one row. The sizes of a spec
have the names of its axes, as `headwise spec` prints them: `q`, `kv` and `v` heads, `out` output
heads, `row` rows of weights, `dim` and `vdim` channels, `model` and `source` widths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Self, TypeVar

import torch

from ..attention.interfaces import Mix, Modifier, Part
from ..attention.interfaces.core_types import AxisLayout, CallSize, CoreShape, Phase
from ..attention.masking.patterns import Pattern, PerHead, head_pattern
from ..attention.spec.attention_spec import SLOTS, AttentionSpec

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CostTerm(NamedTuple):
    """One term of a sum: its name, its formula, and its value."""

    name: str
    formula: str
    value: int


class MatrixProduct(NamedTuple):
    """A matrix product: its name, its FLOPs, and how many of its two factors need a gradient."""

    name: str
    flops: int
    num_grad_factors: int = 2


@dataclass(frozen=True)
class CostBreakdown:
    """Cost terms and their sum."""

    terms: tuple[CostTerm, ...]

    @property
    def total(self) -> int:
        """The sum of all terms."""
        return sum(term.value for term in self.terms)

    @staticmethod
    def from_items(items: Iterable[tuple[str, int]]) -> CostBreakdown:
        """Build from (name, value) pairs; a `SymbolicInt` also gives its formula, and zeros are
        dropped.
        """
        return CostBreakdown.from_repeated_items((name, value, 1) for name, value in items)

    @staticmethod
    def from_repeated_items(items: Iterable[tuple[str, int, int]]) -> CostBreakdown:
        """Build from (name, value, count) triples; equal names, formulas and values become one
        term.

        >>> CostBreakdown.from_repeated_items([("up", 6, 2), ("up", 6, 3), ("up", 7, 1)]).terms
        (CostTerm(name='up', formula='5 · 6', value=30), CostTerm(name='up', formula='7', value=7))
        """
        counts: Counter[tuple[str, str, str, int]] = Counter()
        for name, value, count in items:
            if value and count:
                counts[name, formula(value), formula_as_factor(value), int(value)] += count
        terms: list[CostTerm] = []
        for (name, text, factor_text, value), count in counts.items():
            terms.append(
                CostTerm(name, text if count == 1 else f"{count} · {factor_text}", count * value)
            )
        return CostBreakdown(tuple(terms))

    @staticmethod
    def from_sums(items: Iterable[tuple[str, int]]) -> CostBreakdown:
        """Build from (name, value) pairs; values of equal names are summed, and zeros are dropped.

        >>> CostBreakdown.from_sums([("mask", 6), ("input", 0), ("mask", 7)]).terms
        (CostTerm(name='mask', formula='13', value=13),)
        """
        totals: Counter[str] = Counter()
        for name, value in items:
            totals[name] += value
        return CostBreakdown.from_items(totals.items())


def attention_parameters(spec: AttentionSpec) -> CostBreakdown:
    """Trainable parameters of an attention layer, one term per tensor.

    >>> import headwise as hw
    >>> [term.formula for term in attention_parameters(hw.design(model=512, heads=8)).terms]
    ['q dim model', 'kv dim model', 'kv vdim model', 'model out vdim']
    """
    return CostBreakdown.from_items(_parameter_items(name_sizes(spec)))


def cached_numbers(spec: AttentionSpec) -> CostBreakdown:
    """Values that the cache stores per token; for a recurrent spec, the values
    of its whole state.
    """
    return CostBreakdown.from_items(_cached_items(name_sizes(spec)))


def forward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """Required FLOPs of the forward pass: the matrix products of the spec, over the pairs that its
    pattern allows.
    """
    products = list_products(spec_as_executed(spec, work), work)
    return CostBreakdown.from_items((product.name, product.flops) for product in products)


def backward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """Required FLOPs of the backward pass: the products that give gradients of the input and of
    every parameter.

    Each product of the forward pass has two, one for each factor, unless one of the factors is a
    constant.
    """
    products = list_products(spec_as_executed(spec, work), work)
    return CostBreakdown.from_items(
        (product.name, product.num_grad_factors * product.flops) for product in products
    )


def spec_as_executed(spec: AttentionSpec, work: CallSize) -> AttentionSpec:
    """Return the spec with its projections in the form that this call runs (MLA, for one, has
    another form for one query).
    """
    return replace(spec, project=spec.projection_form(work.queries == 1))


def list_products(spec: AttentionSpec, work: CallSize) -> Iterator[MatrixProduct]:
    """Yield every matrix product of a call with the projections as given; the core covers
    `work.pairs` pairs.
    """
    spec = name_sizes(spec)
    letters = {"batch": "B", "queries": "T", "new_tokens": "new", "keys": "S", "pairs": "pairs"}
    symbols = {name: name_size(getattr(work, name), letter) for name, letter in letters.items()}
    work = replace(work, **symbols)
    core = spec.core_of(spec.project)
    parts_with_constant_input, _ = _find_constant_weights(spec, core)
    for name, part in spec.parts():
        sizes = _name_axis_sizes(spec.sizes_of(part))
        for key, param in part.params(spec).items():
            flops = 2 * param.layout.numel(sizes) * work.tokens(param.applied)
            yield MatrixProduct(f"{name}.{key}", flops, 2 if param.trainable else 1)
        constant_flops = part.constant_flops(spec, work)
        if isinstance(part, Mix) and part in parts_with_constant_input:
            constant_flops += part.mixed_flops(spec, work)
        yield MatrixProduct(f"{name} (own products)", part.flops(spec, work) - constant_flops)
        yield MatrixProduct(f"{name} (with constants)", constant_flops, 1)
    yield from _core_products(spec, core, work)


def _name_axis_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: name_size(size, axis) for axis, size in sizes.items()}


def _parameter_items(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part in spec.parts():
        sizes = _name_axis_sizes(spec.sizes_of(part))
        for key, param in part.params(spec).items():
            if param.trainable:
                yield f"{name}.{key}", param.layout.numel(sizes)


def _cached_items(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    if spec.recurrent_part is not None and spec.is_recurrent:
        name, recurrent = spec.recurrent_part
        cached: list[tuple[str, Part, Mapping[str, AxisLayout]]] = [
            (name, recurrent, recurrent.state_layouts(spec))
        ]
    else:
        cached = [(name, part, part.kv_entry_layouts(spec)) for name, part in spec.parts()]
    for name, part, layouts in cached:
        sizes = _name_axis_sizes(spec.sizes_of(part))
        for key, layout in layouts.items():
            yield f"{name}.{key}", layout.numel(sizes)


def _core_products(spec: AttentionSpec, core: CoreShape, work: CallSize) -> Iterator[MatrixProduct]:
    if work.head_pairs:
        counts = pairs_over_heads(spec, work)
        scores = SymbolicInt.with_formula(counts[0], "head_pairs")
        values = SymbolicInt.with_formula(counts[1], "head_pairs")
    else:
        letter = "q" if spec.num_core_heads == spec.heads.q else "row"
        scores = work.pairs * SymbolicInt.with_formula(spec.num_core_heads, letter)
        values = work.pairs * SymbolicInt.with_formula(len(core.value_head_of_row), "row")
    dim = name_size(core.score_dim, "dim") if core.score_dim else 0
    vdim = name_size(core.vdim, "vdim")
    yield MatrixProduct("core (scores)", 2 * work.batch * scores * dim)
    num_grad_factors = value_grad_factors(spec, core)
    yield MatrixProduct("core (values)", 2 * work.batch * values * vdim, num_grad_factors)


def value_grad_factors(spec: AttentionSpec, core: CoreShape) -> int:
    """Count the factors of the product "weights @ values" that need a gradient.

    It is 1 if the attention weights depend on no parameter and no score, and 2 otherwise.
    """
    return 1 if _find_constant_weights(spec, core)[1] else 2


def _find_constant_weights(spec: AttentionSpec, core: CoreShape) -> tuple[list[Part], bool]:
    """Return the parts that change scores or weights which need no gradient, and True if the final
    weights need none.

    Without queries and keys, scores and weights are constants up to the first part with a trainable
    parameter.
    """
    modifiers = spec.parts_of(Modifier)
    on_scores = [part for _, part in modifiers if part.phase is Phase.SCORES]
    on_weights = [part for _, part in modifiers if part.phase is Phase.WEIGHTS]
    constant: list[Part] = []
    is_constant = not core.score_dim
    for part in (spec.similarity, *on_scores, spec.normaliser, *on_weights):
        if is_constant:
            constant.append(part)
        is_constant = is_constant and not any(
            param.trainable for param in part.params(spec).values()
        )
    return constant, is_constant


# --- Heads with different patterns ---------------------------------------------------------------


def patterns_of_kv_heads(spec: AttentionSpec) -> tuple[Pattern, ...]:
    """For each key-value head, the union of the patterns of its query heads; one pattern if all
    heads read alike.

    >>> import headwise as hw
    >>> pattern = "perhead((causal(), window(4), window(8)), (0, 1, 1, 2))"
    >>> patterns_of_kv_heads(hw.design(model=8, heads=4, kv=2, pattern=pattern))
    (Causal() | Window(keys=4), Window(keys=4) | Window(keys=8))
    """
    heads = spec.heads
    caches_heads = spec.project.caches_keys_and_values and not heads.value_heads
    if not isinstance(spec.pattern, PerHead) or spec.computes_heads_together or not caches_heads:
        return (spec.pattern,)
    by_kv: list[list[Pattern]] = [[] for _ in range(heads.kv)]
    for head in spec.core_score_heads:
        by_kv[heads.kv_head_of_query[head]].append(head_pattern(spec.pattern, head))
    return tuple(reduce(or_, dict.fromkeys(patterns)) for patterns in by_kv)


def pairs_over_heads(spec: AttentionSpec, work: CallSize) -> tuple[int, int]:
    """Return the (query, key) pairs of one row of the batch, summed over score heads and over rows
    of weights.

    If heads have different patterns, a mix needs the pairs that some head allows.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, pattern="perhead((causal(), window(1)), (0, 1))")
    >>> pairs_over_heads(spec, hw.costs.self_attention_work(spec, batch=1, queries=4))
    (14, 14)
    """
    rows = spec.score_head_of_row
    heads = spec.core_score_heads
    if not work.head_pairs:
        return work.pairs * len(heads), work.pairs * len(rows)
    mixed = {mix.phase for _, mix in spec.parts_of(Mix)}
    own = heads if mixed else [head for head in heads if head in rows]
    scores = (
        work.pairs * len(heads)
        if Phase.SCORES in mixed
        else sum(work.head_pairs[head] for head in own)
    )
    values = (
        work.pairs * len(rows)
        if Phase.WEIGHTS in mixed
        else sum(work.head_pairs[head] for head in rows)
    )
    return scores, values


P = TypeVar("P", bound=Part)


class SymbolicInt(int):
    """An int with the formula it was computed by: products, sums and powers of names.

    >>> q, dim = SymbolicInt.with_formula(8, "q"), SymbolicInt.with_formula(64, "dim")
    >>> cost = 2 * q * dim * (dim + 1)
    >>> cost, cost.formula
    (66560, '2 q dim (dim + 1)')
    """

    factor: int
    text: str
    loose: bool  # a sum, which needs brackets inside a product

    @classmethod
    def with_formula(cls, value: int, text: str, factor: int = 1, *, loose: str = "") -> Self:
        """Create a number with the formula `factor` times `text`; `loose` is not empty if `text` is
        a sum.
        """
        number = super().__new__(cls, value)
        number.factor = factor
        number.text = text
        number.loose = bool(loose)
        return number

    @property
    def formula(self) -> str:
        """The formula, with its factor."""
        return self.text if self.factor == 1 else f"{self.factor} {self.name_as_factor}"

    @property
    def name_as_factor(self) -> str:
        """The text of the formula, without its factor, in brackets if it is a sum."""
        return f"({self.text})" if self.loose else self.text

    @property
    def formula_as_factor(self) -> str:
        """The formula, in brackets if it is a sum."""
        return f"({self.formula})" if self.loose else self.formula

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return other * int(
                self
            )  # a float, or a tuple that is repeated: the result is not an integer
        if not isinstance(other, SymbolicInt):
            return SymbolicInt.with_formula(
                int(self) * other, self.text, self.factor * other, loose="sum" if self.loose else ""
            )
        text = f"{self.name_as_factor} {other.name_as_factor}"
        return SymbolicInt.with_formula(int(self) * int(other), text, self.factor * other.factor)

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __add__(self, other: int) -> int:
        if isinstance(other, SymbolicInt) and other.text == self.text:
            return SymbolicInt.with_formula(
                int(self) + int(other),
                self.text,
                self.factor + other.factor,
                loose="sum" * self.loose,
            )
        return self._sum(other, "+") if other else self

    def __radd__(self, other: int) -> int:
        return (
            SymbolicInt.with_formula(int(self) + other, f"{other} + {self.formula}", loose="sum")
            if other
            else self
        )

    def __sub__(self, other: int) -> int:
        return self._sum(other, "-") if other else self

    def __pow__(self, power: Any, mod: Any = None) -> Any:
        if isinstance(power, int) and power > 0 and mod is None:
            return SymbolicInt.with_formula(
                int(self) ** power, f"{self.name_as_factor}^{power}", self.factor**power
            )
        return int(self) ** power

    def __floordiv__(self, other: int) -> int:
        divisor = other.name_as_factor if isinstance(other, SymbolicInt) else str(other)
        return SymbolicInt.with_formula(
            int(self) // int(other), f"floor({self.formula_as_factor} / {divisor})"
        )

    def _sum(self, other: int, sign: str) -> int:
        text = formula_as_factor(other) if sign == "-" else formula(other)
        value = int(self) + int(other) if sign == "+" else int(self) - int(other)
        return SymbolicInt.with_formula(value, f"{self.formula} {sign} {text}", loose="sum")


def formula(value: int) -> str:
    """Return the formula of a symbolic number, or the digits of a plain one."""
    return value.formula if isinstance(value, SymbolicInt) else f"{value}"


def formula_as_factor(value: int) -> str:
    """Return the formula of a symbolic number, in brackets if it is a sum, or the digits of a plain
    one.
    """
    return value.formula_as_factor if isinstance(value, SymbolicInt) else f"{value}"


def name_size(size: int, name: str) -> SymbolicInt:
    """Return the size as a symbolic integer with this name, unless it has a formula already."""
    return size if isinstance(size, SymbolicInt) else SymbolicInt.with_formula(size, name)


def name_sizes(spec: AttentionSpec) -> AttentionSpec:
    """Replace the sizes of a spec by symbolic integers, so that numbers computed from it carry
    their formulas.

    >>> import headwise as hw
    >>> spec = name_sizes(hw.design(model=8, heads=2))
    >>> (spec.model * spec.heads.q).formula, spec == hw.design(model=8, heads=2)
    ('model q', True)
    """
    heads = spec.heads
    sizes = {
        name: SymbolicInt.with_formula(getattr(heads, name), name)
        for name in ("q", "kv", "dim", "vdim")
    }
    slots = {
        slot: _name_part_sizes(getattr(spec, slot), slot) for slot in SLOTS if slot != "pattern"
    }
    source = None if spec.source is None else SymbolicInt.with_formula(spec.source, "source")
    return replace(
        spec,
        model=SymbolicInt.with_formula(spec.model, "model"),
        source=source,
        heads=replace(heads, **sizes),
        modifiers=tuple(
            _name_part_sizes(modifier, name) for name, modifier in spec.parts_of(Modifier)
        ),
        **slots,
    )


def _name_part_sizes(part: P, owner: str) -> P:
    """Replace the integers above 1 of a part by symbolic ones: dynamic_composition.rank,
    project.overlap.
    """
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    sizes = {
        name: SymbolicInt.with_formula(size, f"{owner}.{name}")
        for name, size in values.items()
        if type(size) is int and size > 1
    }
    return replace(part, **sizes)
