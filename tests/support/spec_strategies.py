"""Hypothesis strategies for specs: all registered parts, in combinations that the library accepts.

`specs()` starts from an example of a part and changes it step by step. A change that conflicts is
skipped, so that no example is rejected and a failing spec shrinks to a bare example.
`modifier_lists()` grows a list in this manner on a given spec. Neither names a part: a new part is
included as soon as it has examples.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

import headwise as hw

REPR_NAMES = {  # what the repr of a spec calls
    "AttentionSpec": hw.AttentionSpec,
    "Heads": hw.Heads,
    **{name: getattr(hw.patterns, name) for name in hw.patterns.__all__},
    **hw.parts.REGISTRY,
}
BASE = {"model": 10, "heads": 6, "dim": 4}  # what an example does not say; no two sizes are equal


def base(**sizes: Any) -> hw.AttentionSpec:
    """The small spec from which examples are made."""
    return hw.design(**(BASE | sizes))


@functools.cache  # building all of them takes longer than any check of one
def examples() -> list[tuple[str, hw.AttentionSpec]]:
    """Every example of every registered part, named after the part."""
    named = []
    for name, part in hw.parts.REGISTRY.items():
        if issubclass(part, hw.interfaces.Part):
            named += [(f"{name}-{n}", spec) for n, spec in enumerate(part.examples(base))]
    return named


@functools.cache
def slot_values(slot: str) -> list[Any]:
    """All values that the examples have in one slot, or in the list of modifiers; each once,
    simplest first.
    """
    examples_ = [base()] + [spec for _, spec in examples()]
    values = [
        value
        for spec in examples_
        for value in (spec.modifiers if slot == "modifiers" else [getattr(spec, slot)])
    ]
    return list(dict.fromkeys(values))


def change_if_legal(spec: hw.AttentionSpec, **changes: Any) -> hw.AttentionSpec:
    """The changed spec, or the spec itself if the change conflicts."""
    try:
        return replace(spec, **changes)
    except hw.SpecError:
        return spec


# --- patterns -------------------------------------------------------------------------------------


def simple_patterns(*, forward: bool = False) -> st.SearchStrategy[hw.patterns.Pattern]:
    """Patterns that are not unions or intersections; with `forward` only those that read no future
    token.
    """
    sizes = st.integers(1, 7)
    back = [
        st.just(hw.patterns.Causal()),
        sizes.map(hw.patterns.Window),
        st.builds(hw.patterns.Dilated, keys=st.integers(1, 4), rate=st.integers(1, 3)),
        sizes.map(hw.patterns.First),
    ]
    ahead = [
        st.just(hw.patterns.Full()),
        sizes.flatmap(
            lambda keys: st.builds(
                hw.patterns.Window, keys=st.just(keys), after=st.integers(0, keys - 1)
            )
        ),
        sizes.map(hw.patterns.Prefix),
        st.sets(st.integers(0, 6), min_size=1, max_size=3).map(
            lambda found: hw.patterns.Global(tuple(sorted(found)))
        ),
        sizes.map(hw.patterns.Blocks),
        st.builds(
            hw.patterns.BigBird,
            length=st.just(12),
            block=st.just(2),
            random=st.integers(0, 1),
            seed=st.integers(0, 3),
        ),
        st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5).map(
            lambda found: hw.patterns.Edges(tuple(sorted(found)))
        ),
    ]
    return st.one_of(*back) if forward else st.one_of(*back, *ahead)


def patterns(*, forward: bool = False) -> st.SearchStrategy[hw.patterns.Pattern]:
    """Patterns, and unions and intersections of up to three of them."""
    joins = lambda inner: st.tuples(inner, inner, st.booleans()).map(  # noqa: E731 - hypothesis wants a function
        lambda pair: pair[0] & pair[1] if pair[2] else pair[0] | pair[1]
    )
    return st.recursive(simple_patterns(forward=forward), joins, max_leaves=3)


# --- heads ----------------------------------------------------------------------------------------


@st.composite
def heads(draw: st.DrawFn) -> hw.Heads:
    """Multi-head, grouped, multi-query, unevenly grouped and pruned heads, and values narrower or
    wider than keys.
    """
    q, dim = draw(st.integers(1, 6)), draw(st.sampled_from((4, 2, 6)))
    kv = draw(st.integers(1, q))
    vdim = draw(st.sampled_from((0, 5, 3)))
    even = q % kv == 0 and draw(st.booleans())
    result = draw(st.just(()) | st.lists(st.integers(0, q - 1), min_size=1, unique=True).map(tuple))
    return hw.Heads(
        q=q,
        kv=kv,
        dim=dim,
        vdim=vdim,
        kv_head_of_query=() if even else draw(head_groupings(q, kv)),
        score_head_of_output=result,
    )


@st.composite
def head_groupings(draw: st.DrawFn, q: int, kv: int) -> tuple[int, ...]:
    """The kv head of each of `q` query heads; every kv head is used."""
    rest = draw(st.lists(st.integers(0, kv - 1), min_size=q - kv, max_size=q - kv))
    return tuple(draw(st.permutations([*range(kv), *rest])))


# --- specs ----------------------------------------------------------------------------------------


@st.composite
def modifier_lists(
    draw: st.DrawFn, spec: hw.AttentionSpec | None = None, *, most: int = 3
) -> tuple[Any, ...]:
    """Up to `most` modifiers, each legal after those before it on this spec (default: the base)."""
    spec = replace(base() if spec is None else spec, modifiers=())
    for modifier in draw(st.lists(st.sampled_from(slot_values("modifiers")), max_size=most)):
        spec = change_if_legal(spec, modifiers=(*spec.modifiers, modifier))
    return spec.modifiers


@st.composite
def specs(draw: st.DrawFn, *, forward: bool = False, most: int = 3) -> hw.AttentionSpec:
    """Any layer: an example with changed heads, slots, pattern and source, and up to `most` more
    modifiers.

    With `forward`, only patterns that can be decoded token by token.
    """
    spec = draw(st.sampled_from([one for _, one in examples()]))
    if forward and spec.pattern.tokens_before_decode != 0:
        spec = replace(spec, pattern=hw.patterns.Causal())
    changes: list[tuple[str, st.SearchStrategy[Any]]] = [
        ("heads", heads()),
        ("model", st.sampled_from((10, 14))),
        ("source", st.sampled_from((None, 13))),
        ("pattern", patterns(forward=forward)),
        *(
            (slot, st.sampled_from(slot_values(slot)))
            for slot in ("project", "similarity", "normaliser", "merge")
        ),
    ]
    for name, values in changes:
        if draw(st.booleans()):
            spec = change_if_legal(spec, **{name: draw(values)})
    for modifier in draw(st.lists(st.sampled_from(slot_values("modifiers")), max_size=most)):
        spec = change_if_legal(spec, modifiers=(*spec.modifiers, modifier))
    if draw(st.booleans()):
        masked = spec.num_heads_after(hw.interfaces.core_types.Phase.SCORES)
        by_head = draw(st.lists(patterns(forward=forward), min_size=masked, max_size=masked))
        spec = change_if_legal(spec, pattern=hw.patterns.PerHead.from_heads(by_head))
    return spec
