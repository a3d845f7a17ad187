"""What a layer costs, item by item: a name, the formula it was computed by, and the number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..layout import AxisLayout
from ..seams import Modifier, Part
from ..spec import AttentionSpec
from ..terms import CoreShape, Phase, CallSize
from .symbols import SymbolicInt, formula, formula_as_factor, name_sizes


class CostTerm(NamedTuple):
    """One line of a sum: what it is, how it is worked out, and what it comes to."""

    name: str
    formula: str
    value: int


class MatrixProduct(NamedTuple):
    """A matrix product: its name, its FLOPs, and how many of its two factors have a gradient."""

    name: str
    flops: int
    num_grad_factors: int = 2


@dataclass(frozen=True)
class CostBreakdown:
    """Items and their sum."""

    terms: tuple[CostTerm, ...]

    @property
    def total(self) -> int:
        """The sum of all items."""
        return sum(term.value for term in self.terms)

    @staticmethod
    def from_items(items: Iterable[tuple[str, int]]) -> CostBreakdown:
        """From names and numbers that know their formulas; what costs nothing is left out."""
        return CostBreakdown.from_repeated_items((name, value, 1) for name, value in items)

    @staticmethod
    def from_repeated_items(items: Iterable[tuple[str, int, int]]) -> CostBreakdown:
        """From names, numbers, and how often each is there; what is equal becomes one item.

        >>> CostBreakdown.repeated([("up", 6, 2), ("up", 6, 3), ("up", 7, 1)]).terms
        (Term(name='up', formula='5 · 6', value=30), Term(name='up', formula='7', value=7))
        """
        times: Counter[tuple[str, str, str, int]] = Counter()
        for name, value, often in items:
            if value and often:
                times[name, formula(value), formula_as_factor(value), int(value)] += often
        lines = ((name, said if n == 1 else f"{n} · {held}", n * v) for (name, said, held, v), n in times.items())
        return CostBreakdown(tuple(CostTerm(*line) for line in lines))

    def __add__(self, other: CostBreakdown) -> CostBreakdown:
        return CostBreakdown(self.terms + other.terms)


def attention_parameters(spec: AttentionSpec) -> CostBreakdown:
    """Learned numbers, tensor by tensor.

    >>> import headwise as hw
    >>> [term.formula for term in attention_parameters(hw.design(model=512, heads=8)).terms]
    ['q dim model', 'kv dim model', 'kv vdim model', 'model out vdim']
    """
    return CostBreakdown.from_items(_parameter_items(name_sizes(spec)))


def cached_numbers(spec: AttentionSpec) -> CostBreakdown:
    """Numbers kept of one token; of a state, all of it."""
    return CostBreakdown.from_items(_cached_items(name_sizes(spec)))


def forward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """FLOPs of the products that the spec asks for, over the pairs its pattern allows."""
    return CostBreakdown.from_items((one.name, one.flops) for one in list_products(spec_as_executed(spec, work), work))


def backward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """FLOPs of the products behind gradients of the input and of every parameter.

    Each product of the forward pass has two, one for either factor, unless one of them is a constant.
    """
    return CostBreakdown.from_items((one.name, one.num_grad_factors * one.flops) for one in list_products(spec_as_executed(spec, work), work))


def spec_as_executed(spec: AttentionSpec, work: CallSize) -> AttentionSpec:
    """The spec in the form in which this call runs."""
    return replace(spec, project=spec.projection_form(work.queries == 1))


def list_products(spec: AttentionSpec, work: CallSize) -> Iterator[MatrixProduct]:
    """Every product of a call of this spec as it stands; of the core those of the pairs that `work` says."""
    spec, work = name_sizes(spec), _symbolic_sizes(work)
    for name, part in spec.parts():
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            flops = 2 * param.layout.numel(sizes) * work.tokens(param.applied)
            yield MatrixProduct(f"{name}.{key}", flops, 2 if param.trainable else 1)
        fixed = part.constant_flops(spec, work)
        yield MatrixProduct(f"{name} (own products)", part.flops(spec, work) - fixed)
        yield MatrixProduct(f"{name} (with constants)", fixed, 1)
    yield from _core_products(spec, work)


def _symbolic_sizes(work: CallSize) -> CallSize:
    """The sizes of a call under their letters, but for those that have a name already."""
    names = {"batch": "b", "queries": "s", "remembered": "r", "keys": "t", "pairs": "pairs"}
    sizes = {name: (getattr(work, name), letter) for name, letter in names.items()}
    return CallSize(**{n: size if isinstance(size, SymbolicInt) else SymbolicInt.of(size, a) for n, (size, a) in sizes.items()})


def _name_axis_sizes(spec: AttentionSpec, sizes: dict[str, int]) -> dict[str, int]:
    """Sizes that were counted, and so came without a name, under the axis they belong to."""
    return {axis: size if isinstance(size, SymbolicInt) else SymbolicInt.of(size, axis) for axis, size in sizes.items()}


def _parameter_items(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part in spec.parts():
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            if param.trainable:
                yield f"{name}.{key}", param.layout.numel(sizes)


def _cached_items(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part, held in _state_items(spec):
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, layout in held.items():
            yield f"{name}.{key}", layout.numel(sizes)


def _state_items(spec: AttentionSpec) -> Iterator[tuple[str, Part, Mapping[str, AxisLayout]]]:
    if spec.recurrent_part is not None and spec.is_recurrent:
        name, part = spec.recurrent_part
        yield name, part, part.state_layouts(spec)
        return
    yield from ((name, part, part.kv_entry_layouts(spec)) for name, part in spec.parts())


def _core_products(spec: AttentionSpec, work: CallSize) -> Iterator[MatrixProduct]:
    core: CoreShape = spec.core_of(spec.project)
    heads, rows = SymbolicInt.of(len(core.keys), "q"), SymbolicInt.of(len(core.value_head_of_row), "voice")
    pairs = work.batch * work.pairs
    scores = 2 * pairs * heads * _symbol_of_size(core.score_dim, "dim")
    yield MatrixProduct("core (scores)", scores)
    yield MatrixProduct("core (values)", 2 * pairs * rows * _symbol_of_size(core.vdim, "vdim"), value_grad_factors(spec, core))


def _symbol_of_size(size: int, name: str) -> int:
    return size if isinstance(size, SymbolicInt) or not size else SymbolicInt.of(size, name)


def value_grad_factors(spec: AttentionSpec, core: CoreShape) -> int:
    """How many factors of the reading of values have a gradient: 1 where no weight depends on what is learned."""
    inner = (Phase.SCORES, Phase.WEIGHTS)
    parts = [spec.normaliser, spec.similarity, *(m for _, m in spec.parts_of(Modifier) if m.phase in inner)]
    return 2 if core.score_dim or any(param.learned for part in parts for param in part.params(spec).values()) else 1
