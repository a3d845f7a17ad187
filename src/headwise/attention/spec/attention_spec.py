"""`AttentionSpec`: the complete description of an attention layer. Layers, costs and surgery are
derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, ClassVar, TypeVar, cast

from ...util.errors import SpecError, suggest
from ...util.size_limits import MAX_WIDTH, check_size, parse_json, parse_toml
from ..interfaces import (
    Gate,
    JointStep,
    Merge,
    Mix,
    Modifier,
    Normaliser,
    OutputStep,
    Part,
    Project,
    RecurrentPart,
    RowStep,
    ScoreStep,
    Similarity,
)
from ..interfaces.core_types import AxisLayout, CoreShape, Param, Phase
from ..interfaces.part import find_class
from ..masking import patterns
from ..masking.patterns import Causal, Full, Pattern, PerHead, head_pattern
from .heads import HEAD_MAPS, Heads
from .serialization import check_list, check_table, refuse_type, to_toml

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
    """Frozen description of an attention layer, independent of how it is executed.

    Specs can be compared, printed, and written as text (`headwise.to_toml`). `model` is the model
    width. `source` is the width of the sequence that cross-attention attends to; giving it states
    that the positions of both sequences are comparable, because position-dependent parts then use
    their difference.
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
    _parts: ClassVar[tuple[tuple[str, Part], ...]] = ()
    # These are set for each spec without conflicts.
    _score_head_of_output: ClassVar[tuple[int, ...] | None] = None
    _core_score_heads: ClassVar[tuple[int, ...] | None] = None
    _core_pattern: ClassVar[Pattern | None] = None

    def __post_init__(self) -> None:
        for name in ("model", "source"):
            size = getattr(self, name)
            if not (
                (isinstance(size, int) and not isinstance(size, bool) and size > 0)
                or (name == "source" and size is None)
            ):
                raise SpecError(f"{name}={size!r} is not a width; give an integer of at least 1")
            check_size(name, size or 1, MAX_WIDTH)
        for name, kind in {"heads": Heads, **SLOTS}.items():
            _check_type(name, getattr(self, name), kind)
        if not isinstance(cast(object, self.modifiers), (tuple, list)):
            raise SpecError(
                f"modifiers={self.modifiers!r} is not a tuple; write "
                f"modifiers=({self.modifiers!r},) with the comma"
            )
        for modifier in self.modifiers:
            _check_type("modifiers", modifier, Modifier)
        by_phase = tuple(sorted(self.modifiers, key=lambda modifier: modifier.phase))
        object.__setattr__(self, "modifiers", by_phase)
        object.__setattr__(self, "_parts", tuple(self._named_parts()))
        reasons = list(self._conflicts())
        if reasons:
            raise SpecError("; ".join(dict.fromkeys(reasons)))
        for _, part in self._parts:
            if not type(part).__module__.startswith("headwise."):
                _check_params(part, part.params(self))
        # Found once and kept, because compiled graphs read them and cannot trace the search.
        object.__setattr__(self, "_score_head_of_output", self.score_head_of_output)
        core = self._find_core_score_heads()
        object.__setattr__(self, "_core_score_heads", core)
        object.__setattr__(self, "_core_pattern", self._select_core_pattern(core))

    def _conflicts(self) -> Iterator[str]:
        combining = [step for _, step in self.parts_of(OutputStep) if step.combines_rows]
        if len(combining) > 1:
            yield (
                f"{' and '.join(map(repr, combining))} each combine rows into output heads; "
                "keep only one of them"
            )
            return
        reasons = [*combining[0].conflicts(self)] if combining else []
        if reasons:
            # the number of rows, which the other checks need, is only defined without conflicts
            yield from reasons
            return
        rows = self.num_heads_after(Phase.WEIGHTS)
        if rows != self.heads.rows:
            yield (
                f"there are {rows} rows of attention weights, but heads has {self.heads.rows}; "
                f"use values= for {rows}"
            )
            return
        mixes = [type(mix).__name__ for _, mix in self.parts_of(Mix) if mix.phase is Phase.WEIGHTS]
        if len(mixes) > 1:
            yield (
                f"{' and '.join(mixes)} both mix attention weights into output heads; keep only "
                "one of them"
            )
        if mixes and self.score_head_of_row != self.score_head_of_output:
            yield (
                f"{mixes[0]} computes output heads, but an output step combines rows into "
                "output heads; keep only one"
            )
        if isinstance(self.pattern, PerHead):
            listed = len(self.pattern.pattern_of_head)
            masked = self.num_heads_after(Phase.SCORES)
            if listed != masked:
                yield (
                    f"pattern_of_head lists {listed} heads, but {masked} heads are masked; give "
                    "one pattern for each"
                )
        yield from self.project.grouping_conflicts(self.heads)
        for _, part in self.parts():
            yield from part.field_conflicts(self)
            yield from part.conflicts(self)

    def parts(self) -> tuple[tuple[str, Part], ...]:
        """Every part with the prefix of its parameter names: "project", "output" (the merge),
        "alibi", "alibi_2".
        """
        return self._parts

    def _named_parts(self) -> Iterator[tuple[str, Part]]:
        yield "project", self.project
        yield "similarity", self.similarity
        yield "normaliser", self.normaliser
        yield "output", self.merge
        counts: dict[str, int] = {}
        for modifier in self.modifiers:
            name = to_snake_case(type(modifier).__name__)
            counts[name] = counts.get(name, 0) + 1
            yield (name if counts[name] == 1 else f"{name}_{counts[name]}"), modifier

    def params(self) -> dict[str, Param]:
        """The declaration of every parameter by its full name, such as "project.q"."""
        params: dict[str, Param] = {}
        for name, part in self.parts():
            params |= {f"{name}.{key}": param for key, param in part.params(self).items()}
        return params

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its full name."""
        common = self.sizes
        shapes: dict[str, tuple[int, ...]] = {}
        for name, part in self.parts():
            sizes = common | dict(part.sizes(self))
            for key, param in part.params(self).items():
                shapes[f"{name}.{key}"] = param.layout.shape(sizes)
        return shapes

    def list_kv_only_params(self) -> list[tuple[str, str]]:
        """The parameters that only make the kv entries of new tokens: names of parts and, within
        them, of parameters.
        """
        return [
            (name, key)
            for name, part in self.parts()
            for key, param in part.params(self).items()
            if param.applied == "source" or key in part.kv_only_params
        ]

    def kv_entry_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors cached for one token, by name: "k", "v",
        "dynamic_composition.gate".
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, part in self.parts():
            prefix = "" if part is self.project else f"{name}."
            for key, layout in part.kv_entry_layouts(self).items():
                shapes[prefix + key] = layout.unmerged_shape(self.sizes_of(part))
        return shapes

    def parts_of(self, kind: type[P]) -> list[tuple[str, P]]:
        """The parts that implement one interface, with their names, in order."""
        return [(name, part) for name, part in self._parts if isinstance(part, kind)]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes that all parts may use in their layouts."""
        heads = self.heads
        sizes = {"model": self.model, "source": self.source or self.model}
        sizes |= {
            "q": heads.q,
            "kv": heads.kv,
            "v": heads.num_value_heads,
            "dim": heads.dim,
            "vdim": heads.vdim,
        }
        return sizes | {"out": len(self.score_head_of_output), "row": len(self.score_head_of_row)}

    def sizes_of(self, part: Part) -> dict[str, int]:
        """The sizes of all axes that a part may use in its layouts: from the spec and the part."""
        return self.sizes | dict(part.sizes(self))

    def num_heads_after(self, until: Phase) -> int:
        """The number of heads after all mixes up to and including this phase."""
        count = self.heads.q
        for _, mix in self.parts_of(Mix):
            count = mix.num_outputs(count) if mix.phase <= until else count
        return count

    @property
    def score_head_of_output(self) -> tuple[int, ...]:
        """The score head that each output head comes from."""
        if self._score_head_of_output is not None:
            return self._score_head_of_output
        return self.heads.score_head_of_output or self.default_score_heads(self.heads.rows)

    @property
    def value_head_of_row(self) -> tuple[int, ...]:
        """The value head of each row of weights in `score_head_of_row`."""
        return tuple(self.heads.value_head_of_row[row] for row in self.score_head_of_row)

    @property
    def kv_head_of_output(self) -> tuple[int, ...]:
        """The value head that each output head's row of weights uses; equal
        numbers form a group.
        """
        return tuple(self.heads.value_head_of_row[row] for row in self.score_head_of_output)

    def default_score_heads(self, rows: int) -> tuple[int, ...]:
        """The score head that each output head comes from, for `rows` rows of weights and no pruned
        heads.
        """
        score_heads = tuple(range(rows))
        for _, step in self.parts_of(OutputStep):
            score_heads = tuple(
                score_heads[row] for row in step.own_row_of_output(len(score_heads))
            )
        return score_heads

    @property
    def score_head_of_row(self) -> tuple[int, ...]:
        """The score head of each row of attention weights that is multiplied with values, in the
        order of the rows.
        """
        score_heads = self.score_head_of_output
        for _, step in reversed(self.parts_of(OutputStep)):
            score_heads = step.required_rows(score_heads, self.heads.rows)
        return score_heads

    @property
    def core_score_heads(self) -> tuple[int, ...]:
        """The score heads that the attention core computes, in order.

        All score heads, unless pruning left some that only a gate needs: it sees queries but no
        scores (`MixtureOfHeads` with router="norm"). If a part is a `JointStep`, if a part
        multiplies the layer's input with weights of each head to get scores (`LearnedScores` with
        kind="dense"), or if some key or value head belongs to such heads alone, the core computes
        all.
        """
        if self._core_score_heads is None:
            return self._find_core_score_heads()
        return self._core_score_heads

    @property
    def computes_heads_together(self) -> bool:
        """True if scores or weights of one head depend on those of others, or of other keys, so
        that the core computes all heads in one call.
        """
        return bool(self.parts_of(JointStep)) or self.normaliser.heads_of_row(self, 0) != (0,)

    def _find_core_score_heads(self) -> tuple[int, ...]:
        heads = self.heads
        every = tuple(range(self.heads.q))
        if heads.rows != heads.q or self.computes_heads_together or self._makes_scores_from_input:
            return every
        core = tuple(sorted(self._required_heads(self.score_head_of_row, self._parts_of_scores)))
        kv = {heads.kv_head_of_query[head] for head in core}
        values = {heads.value_head_of_row[head] for head in core}
        return core if len(kv) == heads.kv and len(values) == heads.num_value_heads else every

    @property
    def core_pattern(self) -> Pattern:
        """The pattern of the heads that the core masks: of `core_score_heads` in order, or of those
        mixed from them.
        """
        pattern = self._core_pattern
        return self._select_core_pattern(self.core_score_heads) if pattern is None else pattern

    def _select_core_pattern(self, core: tuple[int, ...]) -> Pattern:
        if not isinstance(self.pattern, PerHead) or len(core) == self.heads.q:
            return self.pattern
        # A cache keeps the tokens of all heads, so the mask stays one per head if the core has one
        # pattern.
        return PerHead.from_heads(head_pattern(self.pattern, head) for head in core)

    @property
    def core_rows(self) -> tuple[int, ...]:
        """The weight rows of the core: one per score head, or the rows that these are mixed to."""
        if self.heads.rows == self.heads.q:
            return self.core_score_heads
        return tuple(range(self.heads.rows))

    @property
    def _makes_scores_from_input(self) -> bool:
        params = chain.from_iterable(
            step.params(self).values() for _, step in self.parts_of(ScoreStep)
        )
        return any(param.applied for param in params)

    @property
    def num_core_heads(self) -> int:
        """The number of `core_score_heads`."""
        count = len(self.core_score_heads)
        # q, because it may carry its name in a formula
        return self.heads.q if count == self.heads.q else count

    def projection_form(self, one: bool) -> Project:
        """The project, or with `one` its equivalent form for a single query, if it has one."""
        return (
            self.project.equivalent_forms(self).get("step", self.project) if one else self.project
        )

    @property
    def recurrent_part(self) -> tuple[str, RecurrentPart] | None:
        """The name and part with a state that can replace the cache of past tokens, or None."""
        recurrent = [
            (name, part) for name, part in self.parts_of(RecurrentPart) if part.state_layouts(self)
        ]
        return recurrent[0] if recurrent else None

    @property
    def is_recurrent(self) -> bool:
        """True if decoding uses a recurrent state: a part has one, and every query attends to all
        past tokens.
        """
        return self.recurrent_part is not None and self.pattern == Causal()

    @property
    def depends_on_key_order(self) -> bool:
        """True if the output depends on the order in which a cache returns the keys."""
        return self.normaliser.ordered or bool(self.parts_of(RowStep))

    @property
    def positional(self) -> bool:
        """True if the output depends on token positions."""
        return self.pattern != Full() or any(part.positional for _, part in self.parts())

    def required_score_heads(self, out: int) -> frozenset[int]:
        """All score heads that this output head depends on, which pruning must keep."""
        return self._required_heads(self._rows_of_output(out), [part for _, part in self.parts()])

    def compared_score_heads(self, out: int) -> frozenset[int]:
        """The score heads that this output head reads; a gate may need the queries of others."""
        return self._required_heads(self._rows_of_output(out), self._parts_of_scores)

    @property
    def _parts_of_scores(self) -> list[Part]:
        return [part for _, part in self.parts() if not isinstance(part, Gate)]

    def _rows_of_output(self, out: int) -> tuple[int, ...]:
        rows = (self.score_head_of_output[out],)
        for _, step in reversed(self.parts_of(OutputStep)):
            rows = step.required_rows(rows, self.heads.rows)
        return rows

    def _required_heads(self, rows: tuple[int, ...], parts: Sequence[Part]) -> frozenset[int]:
        heads = frozenset[int]()
        needed = frozenset(rows)
        # repeated because each part may add heads that another part's requirements depend on
        while heads != needed:
            heads = needed
            for part in reversed(parts):
                needed = part.required_score_heads(self, needed)
        return heads

    def shift_sensitivity(self) -> Iterator[str]:
        """Reasons why adding a constant to all scores of a row changes the output; empty if it does
        not.
        """
        if not self.normaliser.shift_invariant:
            yield (
                f"{type(self.normaliser).__name__} is not invariant to a constant added to all "
                "scores of a row"
            )
        for name, modifier in self.parts_of(Modifier):
            nonlinear = isinstance(modifier, (RowStep, ScoreStep)) and not modifier.additive
            mixes = (
                isinstance(modifier, Mix)
                and modifier.phase is Phase.SCORES
                and not modifier.position_independent
            )
            if nonlinear or mixes:
                yield f"{name} turns a constant added to all scores of a row into different amounts"

    @property
    def core(self) -> CoreShape:
        """The shapes and the scale of the attention core."""
        return self.core_of(self.project)

    def core_of(self, form: Project) -> CoreShape:
        """The shapes and the scale of the attention core for one form of the project."""
        core = form.core(self)
        keys = core.key_head_of_query
        if len(self.core_score_heads) != len(keys):
            keys = tuple(keys[head] for head in self.core_score_heads)
        score_dim = self.similarity.feature_dim(core)
        return replace(core, key_head_of_query=keys, score_dim=score_dim)

    def with_heads(self, **changes: Any) -> AttentionSpec:
        """A copy with other heads, such as ``spec.with_heads(kv=2)``.

        A change of q or kv resets `kv_head_of_query`, `value_heads` and `score_head_of_output` to
        even groups, and to what the parts need, unless they are given too.
        """
        field_names = {f.name for f in fields(Heads)}
        unknown = sorted(set(changes) - field_names)
        if unknown:
            raise SpecError(f"heads have no {unknown[0]!r}; {suggest(unknown[0], field_names)}")
        resets: dict[str, Any] = dict.fromkeys(HEAD_MAPS, ()) if {"q", "kv"} & set(changes) else {}
        if "dim" in changes and self.heads.vdim == self.heads.dim:
            resets["vdim"] = 0
        heads = replace(self.heads, **(resets | changes))
        for part in (one for _, one in self.parts() if resets):
            heads = part.widen_heads(heads)
        return replace(self, heads=replace(heads, **changes))

    def at_depth(self, layer: int, layers: int) -> AttentionSpec:
        """A copy for one layer of a stack: depth schedules of parts become values, and heads get
        matching widths.
        """
        if type(layer) is not int or type(layers) is not int or not 0 <= layer < layers:
            raise SpecError(
                f"there is no layer {layer!r} of {layers!r}; give integers with 0 <= layer < layers"
            )
        parts = {
            slot: getattr(self, slot).at_depth(layer, layers) for slot in SLOTS if slot != "pattern"
        }
        modifiers = tuple(m.at_depth(layer, layers) for m in self.modifiers)
        heads = self.heads
        for part in (*parts.values(), *modifiers):
            heads = part.widen_heads(heads)
        return replace(self, heads=heads, **parts, modifiers=modifiers)

    def __repr__(self) -> str:
        values = [(f.name, getattr(self, f.name)) for f in fields(self)]
        args = [f"{name}={value!r}" for name, value in values if value not in ((), None)]
        return f"AttentionSpec({', '.join(args)})"

    def __str__(self) -> str:
        return to_toml(self)


def to_snake_case(name: str) -> str:
    """A class name in snake case, such as ``qk_norm`` for ``QKNorm``.

    >>> to_snake_case("QKNorm"), to_snake_case("T5Bias"), to_snake_case("HeadGate")
    ('qk_norm', 't5_bias', 'head_gate')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        if isinstance(value, type):
            raise SpecError(f"{name}: {value.__name__} is a class; write {value.__name__}()")
        actual = f"{value!r} is of type {type(value).__name__}"
        raise SpecError(f"{name}: {actual}, not {kind.__name__}; hw.parts.REGISTRY lists all parts")


def _check_params(part: Part, params: Any) -> None:
    example = 'Param(AxisLayout.parse("q"), zeros_init), with your axes and initialiser'
    if not isinstance(params, Mapping):
        raise SpecError(
            f"{type(part).__name__}.params() returns {params!r}; give a dictionary of names to "
            f"{example}"
        )
    for name, param in cast("Mapping[str, Any]", params).items():
        layout = param.layout if isinstance(param, Param) else param
        if not isinstance(layout, AxisLayout):
            raise SpecError(
                f"{type(part).__name__}.params() declares {name!r} by a {type(layout).__name__}; "
                f"give {example}"
            )


def from_dict(data: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a dictionary; `defaults` supplies fields that it lacks."""
    field_names = [f.name for f in fields(AttentionSpec)]
    _check_keys("a spec", data, field_names)
    values = dict(defaults or {}) | {name: _slot_value(name, value) for name, value in data.items()}
    missing = [name for name in ("model", "heads", *SLOTS) if name not in values]
    if missing:
        raise SpecError(f"the spec lacks {', '.join(missing)}; add {missing[0]} = ...")
    return AttentionSpec(**values)


def from_json(text: str, defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a JSON document."""
    data = parse_json("the text", text, "write the spec as headwise.to_json does")
    return from_dict(check_table("a spec", data), defaults)


def from_toml(text: str, defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a TOML document."""
    return from_dict(parse_toml("the text", text, "write the spec as print(spec) does"), defaults)


def _slot_value(name: str, value: Any) -> Any:
    if name == "pattern":
        if isinstance(value, str):
            return patterns.parse_pattern(value)
        refuse_type(name, value, "text such as 'causal()'")
    if name == "heads":
        table = check_table(name, value)
        _check_keys("heads", table, [f.name for f in fields(Heads)])
        missing = [name for name in ("q", "dim") if name not in table]
        if missing:
            raise SpecError(f"heads lack {missing[0]}; add {missing[0]} = ...")
        head_maps: dict[str, Any] = {
            name: tuple(check_list(f"heads.{name}", table[name]))
            for name in HEAD_MAPS
            if name in table
        }
        values: dict[str, Any] = {"kv": table["q"]} | table | head_maps
        return Heads(**values)
    if name in SLOTS:
        return _registered_object(name, value)
    if name == "modifiers":
        return tuple(
            _registered_object(f"modifiers[{n}]", item)
            for n, item in enumerate(check_list(name, value))
        )
    return value


def _registered_object(where: str, value: Any) -> Any:
    table = check_table(where, {"part": value} if isinstance(value, str) else value)
    name = table.pop("part", None)
    if not isinstance(name, str):
        refuse_type(f"{where}.part", name, "the name of a part")
    cls = find_class(name)
    _check_keys(name, table, [f.name for f in fields(cls)])
    options = {key: _field_value(f"{where}.{key}", option) for key, option in table.items()}
    try:
        return cls(**options)
    except TypeError as error:
        raise SpecError(
            f"{where}: cannot build {name} from {options}: {error}; see its docstring"
        ) from None


def _field_value(where: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return _registered_object(where, value)
    if isinstance(value, (list, tuple)):
        return tuple(_field_value(where, item) for item in check_list(where, value))
    return value


def _check_keys(where: str, table: Mapping[str, Any], names: list[str]) -> None:
    for name in table:
        if name not in names:
            raise SpecError(f"{where} has no {name!r}; {suggest(name, names)}")
