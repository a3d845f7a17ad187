"""Specs as text: TOML, JSON, a dictionary and repr all round-trip."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

import headwise as hw
from headwise.attention.spec import attention_spec, serialization
from support.spec_strategies import (
    REPR_NAMES,
    base,
    examples,
    heads,
    modifier_lists,
    patterns,
    specs,
)

EXAMPLES = examples()
SMALL = "model = 10\nheads = {q = 6, dim = 4}\n"


def check_comes_back(spec: hw.AttentionSpec) -> None:
    """Every written form of a spec reads as that spec, and a second writing is the same text; TOML
    and JSON are two spellings of one dictionary, made of plain values only.
    """
    result, toml, text = serialization.to_dict(spec), hw.to_toml(spec), hw.to_json(spec)
    assert attention_spec.from_dict(result) == hw.from_toml(toml) == hw.from_json(text) == spec
    assert tomllib.loads(toml) == json.loads(text) == result
    assert hw.to_toml(hw.from_toml(toml)) == toml
    evaluated = eval(repr(spec), REPR_NAMES)
    assert (evaluated, hash(evaluated)) == (spec, hash(spec))


@pytest.mark.parametrize("spec", [spec for _, spec in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_every_example_comes_back(spec: hw.AttentionSpec):
    check_comes_back(spec)


@pytest.mark.lengthy
@given(specs())
def test_every_legal_spec_comes_back(spec: hw.AttentionSpec):
    """And is buildable: every slot has a part, every parameter a shape."""
    check_comes_back(spec)
    assert all(isinstance(getattr(spec, slot), kind) for slot, kind in attention_spec.SLOTS.items())
    assert all(size > 0 for shape in spec.shapes().values() for size in shape)


@given(heads())
def test_heads_come_back(heads: hw.Heads):
    assert eval(repr(heads), REPR_NAMES) == heads
    spec = replace(base(), heads=heads)
    assert hw.from_toml(hw.to_toml(spec)).heads == heads


@given(patterns())
def test_patterns_come_back(pattern: hw.patterns.Pattern):
    assert eval(repr(pattern), REPR_NAMES) == pattern
    assert hw.patterns.parse_pattern(pattern.text) == pattern


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(modifier_lists())
def test_modifiers_are_sorted_by_phase_and_stay(modifiers: tuple[hw.interfaces.Modifier, ...]):
    spec = base(modifiers=modifiers)
    phases = [modifier.phase for modifier in spec.modifiers]
    assert phases == sorted(phases)
    assert spec == base(modifiers=spec.modifiers)
    assert hw.from_toml(hw.to_toml(spec)).modifiers == spec.modifiers


def test_two_spellings_of_one_list_are_one_spec():
    a, b = hw.parts.Alibi(), hw.parts.HeadGate()
    assert base(modifiers=(b, a)) == base(modifiers=[a, b])
    assert base(modifiers=(hw.parts.QKNorm(), hw.parts.Rotary())) != base(
        modifiers=(hw.parts.Rotary(), hw.parts.QKNorm())
    )


# --- repr in a fresh interpreter ------------------------------------------------------------------

FRESH = """
import os
import sys
import torch
import headwise

PACKAGES = headwise, headwise.parts, headwise.patterns
for options in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        spec = eval(f"headwise.design({options})")
        names = {name: getattr(package, name) for package in PACKAGES for name in dir(package)}
        assert eval(repr(spec), names) == spec, repr(spec)
        print("same", options, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
FRESHLY = (
    "model=10, heads=6, dim=4",
    "model=10, heads=6, dim=4, kv=3, pattern='window(5) | first(2)', bias='qo'",
    "preset='mla'",
    "preset='gqa', pattern='global((0, 3)) & causal'",
)


@pytest.mark.slow
def test_a_repr_can_be_evaluated_at_once():
    """Nothing but `import headwise` and one design has happened in that fork of an interpreter."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", FRESH, *FRESHLY], capture_output=True, text=True
    )
    assert ran.stdout.splitlines() == [f"same {options}" for options in FRESHLY], ran.stderr


# --- what is printed ------------------------------------------------------------------------------


def test_printed_specs_are_toml():
    spec = base(
        kv=3,
        pattern="window(5) | first(2)",
        modifiers=(
            hw.parts.Rotary(scaling=hw.parts.PositionInterpolation(4.0)),
            hw.parts.HeadGate(),
        ),
    )
    table = tomllib.loads(str(spec))
    assert table == {
        "model": 10,
        "pattern": "window(5) | first(2)",
        "heads": {"q": 6, "kv": 3, "dim": 4},
        "project": {"part": "LinearProjection"},
        "similarity": {"part": "DotProduct"},
        "normaliser": {"part": "Softmax"},
        "merge": {"part": "ConcatMerge"},
        "modifiers": [
            {"part": "Rotary", "scaling": {"part": "PositionInterpolation", "factor": 4.0}},
            {"part": "HeadGate"},
        ],
    }


def test_defaults_may_be_omitted():
    assert hw.from_toml(SMALL) == base()
    assert hw.from_json('{"model": 10, "heads": {"q": 6, "dim": 4}}') == base()
    assert hw.from_toml(SMALL + 'normaliser = "Sigmoid"') == base(normaliser=hw.parts.Sigmoid())
    assert hw.from_toml(SMALL + 'modifiers = ["Alibi"]') == base(modifiers=(hw.parts.Alibi(),))


def test_without_defaults_every_slot_is_required():
    options = {"model": 10, "heads": {"q": 6, "dim": 4}}
    with pytest.raises(
        hw.SpecError, match="the spec lacks project, similarity, pattern, normaliser, merge"
    ):
        attention_spec.from_dict(options)


def test_values_that_look_alike_stay_apart():
    """Text keeps float from int, and what differs only in a default is left out."""
    spec = base(
        modifiers=(
            hw.parts.Rotary(base=50.0, dims=2),
            hw.parts.Softcap(0.1 + 0.2),
            hw.parts.WeightDropout(1e-05),
        )
    )
    back = hw.from_toml(hw.to_toml(spec))
    assert back == spec
    assert [type(getattr(back.modifiers[0], name)) for name in ("base", "dims")] == [float, int]
    assert "pairs" not in hw.to_toml(spec)


# --- presets and with_heads -----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(hw.PRESETS))
def test_presets_come_back_and_can_be_changed(name: str):
    spec = hw.design(preset=name)
    check_comes_back(spec)
    pattern = hw.patterns.Causal() if name in ("selective", "mta") else hw.patterns.Window(3)
    changed = hw.design(preset=name, model=56, heads=14, pattern=pattern.text)
    outputs = 4 * 14 if name == "switchhead" else 14  # four experts of each head
    assert (changed.model, len(changed.score_head_of_output)) == (56, outputs)
    assert changed.pattern == pattern
    assert type(changed.project) is type(spec.project)
    with pytest.raises(hw.SpecError, match="model"):
        hw.design(preset=name, modell=28)


@pytest.mark.parametrize(
    ("preset", "kv", "modifiers", "pattern"),
    [
        ("mha", 8, (), "full()"),
        ("gqa", 2, (hw.parts.Rotary(),), "causal()"),
        ("mqa", 1, (hw.parts.Rotary(),), "causal()"),
        ("mla", 16, (hw.parts.Rotary(pairs="interleaved"),), "causal()"),
    ],
)
def test_presets_have_the_sizes_of_their_names(
    preset: str, kv: int, modifiers: tuple[object, ...], pattern: str
):
    spec = hw.design(preset=preset)
    assert (spec.heads.kv, spec.modifiers, spec.pattern.text) == (kv, modifiers, pattern)


def test_with_heads_keeps_the_rest_and_reads_evenly_again():
    uneven = replace(
        base(),
        heads=hw.Heads(
            q=6, kv=3, dim=4, kv_head_of_query=(0, 0, 0, 1, 2, 2), score_head_of_output=(5, 1)
        ),
    )
    even = uneven.with_heads(kv=2)
    assert even.heads == hw.Heads.grouped(q=6, kv=2, dim=4)
    assert replace(even, heads=uneven.heads) == uneven
    assert uneven.with_heads(dim=7).heads.kv_head_of_query == uneven.heads.kv_head_of_query
    assert uneven.with_heads(kv=2, kv_head_of_query=(0, 1, 1, 1, 1, 1)).heads.kv_head_of_query == (
        0,
        1,
        1,
        1,
        1,
        1,
    )


def test_with_heads_keeps_values_as_wide_as_keys_only_where_they_were():
    assert base().with_heads(dim=7).heads.vdim == 7
    assert base(vdim=5).with_heads(dim=7).heads.vdim == 5
    assert base().with_heads(dim=7, vdim=3).heads.vdim == 3
