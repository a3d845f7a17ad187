"""A layer is six choices and a list. Everything else is a reading of this."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ..errors import SpecError, suggest
from ..interfaces import (
    Merge,
    Mix,
    Modifier,
    Normaliser,
    OutputStep,
    Part,
    Project,
    RecurrentPart,
    ScoreStep,
    Similarity,
)
from ..interfaces.core_types import CoreShape, Param, Phase
from ..masking.patterns import Causal, Full, Pattern
from .heads import Heads

P = TypeVar("P", bound=Part)
SLOTS: dict[str, type] = {
    "project": Project,
    "similarity": Similarity,
    "pattern": Pattern,
    "normaliser": Normaliser,
    "merge": Merge,
}


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What an attention layer is, never how it runs: frozen, comparable, printable, and plain text if you like.

    `source` is the width of what cross-attention reads; giving it says that the positions of both sequences
    are meant to be comparable.
    """

    model: int
    heads: Heads
    project: Project
    similarity: Similarity
    pattern: Pattern
    normaliser: Normaliser
    merge: Merge
    modifiers: tuple[Modifier, ...] = ()
    source: int | None = None

    def __post_init__(self) -> None:
        for name in ("model", "source"):
            size = getattr(self, name)
            if not (
                (isinstance(size, int) and not isinstance(size, bool) and size > 0)
                or (name == "source" and size is None)
            ):
                raise SpecError(f"{name}={size!r} is not a width; give a whole number of at least 1")
        for name, kind in {"heads": Heads, **SLOTS}.items():
            _must_be(name, getattr(self, name), kind)
        if not isinstance(self.modifiers, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance] - users err
            raise SpecError(
                f"modifiers={self.modifiers!r} is no list; write modifiers=({self.modifiers!r},) with the comma"
            )
        for modifier in self.modifiers:
            _must_be("modifiers", modifier, Modifier)
        by_phase = tuple(sorted(self.modifiers, key=lambda modifier: modifier.phase))
        object.__setattr__(self, "modifiers", by_phase)
        reasons = list(self._conflicts())
        if reasons:
            raise SpecError("; ".join(dict.fromkeys(reasons)))

    def _conflicts(self) -> Iterator[str]:
        joins = [step for _, step in self.parts_of(OutputStep) if step.combines_rows]
        if len(joins) > 1:
            yield f"{' and '.join(map(repr, joins))} each join rows into output heads; only one part can do that"
            return
        if first := [reason for join in joins for reason in join.conflicts(self)]:
            yield from first  # until they hold nobody can ask which rows there are
            return
        if (rows := self.num_heads_after(Phase.WEIGHTS)) != self.heads.rows:
            told = f"heads say what {self.heads.rows} read; use values= for {rows}"
            yield f"{rows} rows of weights read values, but {told}"
            return
        mixes = [type(mix).__name__ for _, mix in self.parts_of(Mix) if mix.phase is Phase.WEIGHTS]
        if len(mixes) > 1:
            yield f"{' and '.join(mixes)} both turn weights into output heads; only one part can mix them"
        if mixes and self.score_head_of_row != self.score_head_of_output:
            yield f"{mixes[0]} gives output heads, but an output step wants to join their rows itself"
        for _, part in self.parts():
            yield from part.conflicts(self)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Every part with the name its parameters go by: "project", "output" (the merge), "alibi", "alibi_2"."""
        yield "project", self.project
        yield "similarity", self.similarity
        yield "normaliser", self.normaliser
        yield "output", self.merge  # "merge" is what the layer does
        seen: dict[str, int] = {}
        for modifier in self.modifiers:
            name = to_snake_case(type(modifier).__name__)
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}_{seen[name]}"), modifier

    def params(self) -> dict[str, Param]:
        """Every parameter by its full name, "project.q"."""
        return {f"{name}.{key}": param for name, part in self.parts() for key, param in part.params(self).items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its full name."""
        return {
            f"{name}.{key}": param.layout.shape(self.sizes_of(part))
            for name, part in self.parts()
            for key, param in part.params(self).items()
        }

    def kv_entry_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of what is remembered of one token, by name: "k", "v", "dynamic.gate"."""
        return {
            key if part is self.project else f"{name}.{key}": layout.unmerged_shape(self.sizes_of(part))
            for name, part in self.parts()
            for key, layout in part.kv_entry_layouts(self).items()
        }

    def parts_of(self, kind: type[P]) -> list[tuple[str, P]]:
        """The parts that fill one seam, with their names, in order."""
        return [(name, part) for name, part in self.parts() if isinstance(part, kind)]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes that every part knows."""
        heads = self.heads
        sizes = {"model": self.model, "source": self.source or self.model}
        sizes |= {"q": heads.q, "kv": heads.kv, "v": heads.num_value_heads, "dim": heads.dim, "vdim": heads.vdim}
        return sizes | {"out": len(self.score_head_of_output), "voice": len(self.score_head_of_row)}

    def sizes_of(self, part: Part) -> dict[str, int]:
        """The sizes of every axis that this part's layouts may name: the spec's and its own."""
        return self.sizes | dict(part.sizes(self))

    def num_heads_after(self, until: Phase) -> int:
        """How many heads there are behind the mixings up to this phase."""
        count = self.heads.q
        for _, mix in self.parts_of(Mix):
            count = mix.num_outputs(count) if mix.phase <= until else count
        return count

    @property
    def score_head_of_output(self) -> tuple[int, ...]:
        """The own score head of each output head."""
        return self.heads.speaks or self.default_score_heads(self.heads.rows)

    @property
    def kv_head_of_output(self) -> tuple[int, ...]:
        """The key-value head of each output head's own row: those of one number are a group."""
        return tuple(self.heads.value_head_of_row[row] for row in self.score_head_of_output)

    def default_score_heads(self, rows: int) -> tuple[int, ...]:
        """The own score head of each output head when none of so many rows has been cut."""
        speaks = tuple(range(rows))
        for _, step in self.parts_of(OutputStep):
            speaks = tuple(speaks[row] for row in step.own_row_of_output(len(speaks)))
        return speaks

    @property
    def score_head_of_row(self) -> tuple[int, ...]:
        """The own score head of each row of weights that reads values, in the order of the rows."""
        voices = self.score_head_of_output
        for _, step in reversed(self.parts_of(OutputStep)):
            voices = step.required_rows(voices)
        return voices

    def projection_form(self, one: bool) -> Project:
        """The project, or its rewrite for a single query."""
        return self.project.equivalent_forms(self).get("step", self.project) if one else self.project

    @property
    def recurrent_part(self) -> tuple[str, RecurrentPart] | None:
        """The part whose sums can stand for all past tokens, with its name; None when each must be kept."""
        found = [(name, part) for name, part in self.parts_of(RecurrentPart) if part.state_layouts(self)]
        return found[0] if found else None

    @property
    def is_recurrent(self) -> bool:
        """Whether all past tokens are one state: some part has one, and every query reads all of the past."""
        return self.recurrent_part is not None and self.pattern == Causal()

    @property
    def positional(self) -> bool:
        """Whether it matters where tokens stand."""
        return self.pattern != Full() or any(part.positional for _, part in self.parts())

    def required_score_heads(self, out: int) -> frozenset[int]:
        """Every score head that this output head needs: what cutting must keep."""
        speaks = (self.score_head_of_output[out],)
        for _, step in reversed(self.parts_of(OutputStep)):
            speaks = step.required_rows(speaks)
        heads, needed = frozenset[int](), frozenset(speaks)
        while heads != needed:  # what a late part needs may be half of what an early one takes as a whole
            heads = needed
            for _, part in reversed(list(self.parts())):
                needed = part.required_score_heads(self, needed)
        return heads

    def shift_sensitivity(self) -> Iterator[str]:
        """Why a number added to all scores of a row would change what is read; nothing when it would not."""
        if not self.normaliser.shift_invariant:
            yield f"{type(self.normaliser).__name__} sees what is added to a whole row"
        for name, modifier in self.parts_of(Modifier):
            bends = isinstance(modifier, ScoreStep) and not modifier.additive
            mixes = isinstance(modifier, Mix) and modifier.phase is Phase.SCORES and not modifier.position_independent
            if bends or mixes:
                yield f"{name} makes of one number many"

    @property
    def core(self) -> CoreShape:
        """Shapes and scale of the attention core."""
        return self.core_of(self.project)

    def core_of(self, form: Project) -> CoreShape:
        """The core when the project runs in this form, with the width of what the similarity compares."""
        core = form.core(self)
        return CoreShape(
            core.key_head_of_query,
            core.value_head_of_row,
            core.dim,
            core.vdim,
            core.scale,
            self.similarity.feature_dim(core),
        )

    def with_heads(self, **changes: Any) -> AttentionSpec:
        """The same layer with other heads; who reads whom is made even again unless said.

        A change of q or kv that keeps even groups needs nothing else: ``spec.with_heads(kv=2)``.
        """
        known = {f.name for f in fields(Heads)}
        if wrong := sorted(set(changes) - known):
            raise SpecError(f"heads have no {wrong[0]!r}; {suggest(wrong[0], known)}")
        fresh: dict[str, Any] = {"reads": (), "values": (), "speaks": ()} if {"q", "kv"} & set(changes) else {}
        if "dim" in changes and self.heads.vdim == self.heads.dim:
            fresh["vdim"] = 0
        return replace(self, heads=replace(self.heads, **(fresh | changes)))

    def at_depth(self, layer: int, layers: int) -> AttentionSpec:
        """The same layer at one depth of a stack: parts with a schedule get their numbers, and heads the widths."""
        if type(layer) is not int or type(layers) is not int or not 0 <= layer < layers:
            raise SpecError(f"there is no layer {layer!r} of {layers!r}; give whole numbers, 0 <= layer < layers")
        moved = {slot: getattr(self, slot).at_depth(layer, layers) for slot in SLOTS if slot != "pattern"}
        modifiers, heads = tuple(m.at_depth(layer, layers) for m in self.modifiers), self.heads
        for part in (*moved.values(), *modifiers):
            heads = part.widen_heads(heads)
        return replace(self, heads=heads, **moved, modifiers=modifiers)

    def __repr__(self) -> str:
        shown = [(f.name, getattr(self, f.name)) for f in fields(self)]
        kept = [f"{name}={value!r}" for name, value in shown if value not in ((), None)]
        return f"AttentionSpec({', '.join(kept)})"

    def __str__(self) -> str:
        from .serialization import to_toml

        return to_toml(self)


def to_snake_case(name: str) -> str:
    """A class name as words: ``QKNorm`` -> ``qk_norm``.

    >>> to_snake_case("QKNorm"), to_snake_case("T5Bias"), to_snake_case("HeadGate")
    ('qk_norm', 't5_bias', 'head_gate')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _must_be(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        said = f"{value!r} is of type {type(value).__name__}"
        raise SpecError(f"{name}: {said}, not {kind.__name__}; headwise.REGISTRY lists what fits")
