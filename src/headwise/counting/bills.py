"""What a layer costs, item by item: a name, the formula it was computed by, and the number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..layout import Layout
from ..seams import Modifier, Part
from ..spec import AttentionSpec
from ..terms import Core, Phase, Work
from .symbols import Symbol, formula, inside, named


class Term(NamedTuple):
    """One line of a sum: what it is, how it is worked out, and what it comes to."""

    name: str
    formula: str
    value: int


class Product(NamedTuple):
    """A matrix product: its name, its FLOPs, and how many of its two factors have a gradient."""

    name: str
    flops: int
    factors: int = 2


@dataclass(frozen=True)
class Bill:
    """Items and their sum."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        """The sum of all items."""
        return sum(term.value for term in self.terms)

    @staticmethod
    def of(items: Iterable[tuple[str, int]]) -> Bill:
        """From names and numbers that know their formulas; what costs nothing is left out."""
        return Bill.repeated((name, value, 1) for name, value in items)

    @staticmethod
    def repeated(items: Iterable[tuple[str, int, int]]) -> Bill:
        """From names, numbers, and how often each is there; what is equal becomes one item.

        >>> Bill.repeated([("up", 6, 2), ("up", 6, 3), ("up", 7, 1)]).terms
        (Term(name='up', formula='5 · 6', value=30), Term(name='up', formula='7', value=7))
        """
        times: Counter[tuple[str, str, str, int]] = Counter()
        for name, value, often in items:
            if value and often:
                times[name, formula(value), inside(value), int(value)] += often
        lines = ((name, said if n == 1 else f"{n} · {held}", n * v) for (name, said, held, v), n in times.items())
        return Bill(tuple(Term(*line) for line in lines))

    def __add__(self, other: Bill) -> Bill:
        return Bill(self.terms + other.terms)


def parameters(spec: AttentionSpec) -> Bill:
    """Learned numbers, tensor by tensor.

    >>> import headwise as hw
    >>> [term.formula for term in parameters(hw.design(model=512, heads=8)).terms]
    ['q dim model', 'kv dim model', 'kv vdim model', 'model out vdim']
    """
    return Bill.of(_parameters(named(spec)))


def remembered(spec: AttentionSpec) -> Bill:
    """Numbers kept of one token; of a state, all of it."""
    return Bill.of(_remembered(named(spec)))


def forward(spec: AttentionSpec, work: Work) -> Bill:
    """FLOPs of the products that the spec asks for, over the pairs its pattern allows."""
    return Bill.of((one.name, one.flops) for one in products(running(spec, work), work))


def backward(spec: AttentionSpec, work: Work) -> Bill:
    """FLOPs of the products behind gradients of the input and of every parameter.

    Each product of the forward pass has two, one for either factor, unless one of them is a constant.
    """
    return Bill.of((one.name, one.factors * one.flops) for one in products(running(spec, work), work))


def running(spec: AttentionSpec, work: Work) -> AttentionSpec:
    """The spec in the form in which this call runs."""
    return replace(spec, project=spec.form(work.queries == 1))


def products(spec: AttentionSpec, work: Work) -> Iterator[Product]:
    """Every product of a call of this spec as it stands; of the core those of the pairs that `work` says."""
    spec, work = named(spec), _lettered(work)
    for name, part in spec.parts():
        sizes = _sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            flops = 2 * param.layout.numel(sizes) * work.tokens(param.applied)
            yield Product(f"{name}.{key}", flops, 2 if param.learned else 1)
        fixed = part.fixed(spec, work)
        yield Product(f"{name} (own products)", part.flops(spec, work) - fixed)
        yield Product(f"{name} (with constants)", fixed, 1)
    yield from _core(spec, work)


def _lettered(work: Work) -> Work:
    """The sizes of a call under their letters, but for those that have a name already."""
    names = {"batch": "b", "queries": "s", "remembered": "r", "keys": "t", "pairs": "pairs"}
    sizes = {name: (getattr(work, name), letter) for name, letter in names.items()}
    return Work(**{n: size if isinstance(size, Symbol) else Symbol.of(size, a) for n, (size, a) in sizes.items()})


def _sizes(spec: AttentionSpec, sizes: dict[str, int]) -> dict[str, int]:
    """Sizes that were counted, and so came without a name, under the axis they belong to."""
    return {axis: size if isinstance(size, Symbol) else Symbol.of(size, axis) for axis, size in sizes.items()}


def _parameters(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part in spec.parts():
        sizes = _sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            if param.learned:
                yield f"{name}.{key}", param.layout.numel(sizes)


def _remembered(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part, held in _held(spec):
        sizes = _sizes(spec, spec.sizes_of(part))
        for key, layout in held.items():
            yield f"{name}.{key}", layout.numel(sizes)


def _held(spec: AttentionSpec) -> Iterator[tuple[str, Part, Mapping[str, Layout]]]:
    if spec.folder is not None and spec.stateful:
        name, part = spec.folder
        yield name, part, part.state(spec)
        return
    yield from ((name, part, part.entry(spec)) for name, part in spec.parts())


def _core(spec: AttentionSpec, work: Work) -> Iterator[Product]:
    core: Core = spec.core_of(spec.project)
    heads, rows = Symbol.of(len(core.keys), "q"), Symbol.of(len(core.values), "voice")
    pairs = work.batch * work.pairs
    scores = 2 * pairs * heads * _named(core.width, "dim")
    yield Product("core (scores)", scores)
    yield Product("core (values)", 2 * pairs * rows * _named(core.vdim, "vdim"), reading_factors(spec, core))


def _named(size: int, name: str) -> int:
    return size if isinstance(size, Symbol) or not size else Symbol.of(size, name)


def reading_factors(spec: AttentionSpec, core: Core) -> int:
    """How many factors of the reading of values have a gradient: 1 where no weight depends on what is learned."""
    inner = (Phase.SCORES, Phase.WEIGHTS)
    parts = [spec.normaliser, spec.similarity, *(m for _, m in spec.steps(Modifier) if m.phase in inner)]
    return 2 if core.width or any(param.learned for part in parts for param in part.params(spec).values()) else 1
