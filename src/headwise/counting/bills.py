"""What a layer costs, item by item: a name, the formula it was computed by, and the number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..layout import Layout
from ..seams import Modifier, Part
from ..spec import AttentionSpec
from ..terms import Core, Phase, Work
from .symbols import Symbol, formula, named
from .whole import Term


@dataclass(frozen=True)
class Bill:
    """Items and their sum."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        """The sum of all items."""
        return sum(term.value for term in self.terms)

    @staticmethod
    def of(items: Iterator[tuple[str, int]]) -> Bill:
        """From names and numbers that know their formulas; what costs nothing is left out."""
        return Bill(tuple(Term(name, formula(value), int(value)) for name, value in items if value))


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
    return Bill.of(_forward(*_spoken(spec, work)))


def backward(spec: AttentionSpec, work: Work) -> Bill:
    """FLOPs of the products behind gradients of the input and of every parameter.

    Each product of the forward pass has two, one for either factor, unless one of them is a constant.
    """
    return Bill.of(_backward(*_spoken(spec, work)))


def _spoken(spec: AttentionSpec, work: Work) -> tuple[AttentionSpec, Work]:
    spec = named(replace(spec, project=spec.form(work.queries == 1)))
    names = {"batch": "b", "queries": "s", "remembered": "r", "keys": "t", "pairs": "pairs"}
    return spec, Work(**{name: Symbol.of(getattr(work, name), letter) for name, letter in names.items()})


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


def _products(spec: AttentionSpec, work: Work) -> Iterator[tuple[str, int, bool]]:
    """Each product outside the core: its name, its FLOPs, and whether both its factors learn."""
    for name, part in spec.parts():
        sizes = _sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            yield f"{name}.{key}", 2 * param.layout.numel(sizes) * work.tokens(param.applied), param.learned
        fixed = part.fixed(spec, work)
        yield f"{name} (own products)", part.flops(spec, work) - fixed, True
        yield f"{name} (with constants)", fixed, False


def _core(spec: AttentionSpec, work: Work) -> Iterator[tuple[str, int]]:
    core: Core = spec.core_of(spec.project)
    heads, rows = Symbol.of(len(core.keys), "q"), Symbol.of(len(core.values), "voice")
    pairs = work.batch * work.pairs
    yield "core (scores)", 2 * pairs * heads * _named(core.width, "dim")
    yield "core (values)", 2 * pairs * rows * _named(core.vdim, "vdim")


def _named(size: int, name: str) -> int:
    return size if isinstance(size, Symbol) or not size else Symbol.of(size, name)


def _forward(spec: AttentionSpec, work: Work) -> Iterator[tuple[str, int]]:
    yield from ((name, flops) for name, flops, _ in _products(spec, work))
    yield from _core(spec, work)


def _backward(spec: AttentionSpec, work: Work) -> Iterator[tuple[str, int]]:
    yield from ((name, flops * (2 if learns else 1)) for name, flops, learns in _products(spec, work))
    (scores, asked), (values, read) = _core(spec, work)
    yield scores, 2 * asked
    yield values, read * (2 if asked or _weights_learn(spec) else 1)


def _weights_learn(spec: AttentionSpec) -> bool:
    """Whether something that is learned stands before the values are read, other than queries and keys."""
    inside = (Phase.SCORES, Phase.WEIGHTS)
    parts = [spec.normaliser, spec.similarity, *(m for _, m in spec.steps(Modifier) if m.phase in inside)]
    return any(param.learned for part in parts for param in part.params(spec).values())
