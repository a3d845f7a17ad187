"""What a part of one's own is told when it is written wrongly."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.attention.interfaces import AxisLayout, Param, ScoreStep
from headwise.attention.interfaces.part import part
from headwise.attention.parts.initialisers import zeros_init
from support.own_parts import forget_parts


def define(**methods) -> type:
    """A score step with these methods, as a part of another package."""
    return part(type("Wrong", (ScoreStep,), {"__module__": "mine", "__doc__": "Wrong."} | methods))


def score(self, s, position, factors, p):
    return s


def with_params(params) -> type:
    return define(score=score, params=lambda self, spec: params)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"score": score, "param": lambda self, spec: {}}, "Wrong.param; did you mean 'params'"),
        ({"score": lambda self, s, p: s}, "takes self, s, p; it is called with self, s, position"),
    ],
)
def test_methods_that_are_almost_those_of_the_interface_are_refused(methods, words: str):
    with forget_parts(), pytest.raises(hw.SpecError, match=words):
        define(**methods)


def test_methods_that_can_be_called_as_the_interface_says_are_kept():
    class Named:
        pass

    def flexible(self, s, *rest):
        return s

    with forget_parts():
        mixed = part(type("Mixed", (Named, ScoreStep), {"__module__": "mine", "score": flexible}))
        assert mixed.score is flexible


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([1], r"returns \[1\]; give a dictionary"),
        ({"t": Param("q", zeros_init)}, "declares 't' by a str; give Param.AxisLayout.parse"),
        ({"t": torch.nn.Parameter(torch.zeros(6))}, "declares 't' by a Parameter; give Param"),
        (
            {"t": Param(AxisLayout.parse("q"), lambda shape: torch.ones(1))},
            r"initialiser of 't' returned the shape \(1,\), but its layout has \(6,\)",
        ),
    ],
)
def test_parameters_that_are_not_declared_by_axes_are_refused(params, words: str):
    with forget_parts(), pytest.raises(hw.SpecError, match=words):
        hw.Attention(hw.design(model=12, heads=6, modifiers=(with_params(params)(),)))


def test_a_parameter_that_is_not_declared_is_named():
    def read(self, s, position, factors, p):
        return s * p["temp"]

    with forget_parts():
        declared = {"t": Param(AxisLayout.parse("q"), zeros_init)}
        wrong = define(score=read, params=lambda self, spec: declared)
        layer = hw.Attention(hw.design(model=12, heads=6, modifiers=(wrong(),)))
        with pytest.raises(KeyError, match="temp"):
            layer(torch.zeros(1, 3, 12))


def test_examples_without_the_part_are_refused():
    def examples(cls, base):
        yield base()

    with forget_parts():
        wrong = define(score=score, examples=classmethod(examples))
        with pytest.raises(hw.SpecError, match="example 0 of Wrong does not contain it"):
            hw.check_part(wrong())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Alibi", "parts"),
        ("Window", "patterns"),
        ("count_parameters", "costs"),
        ("redraw_features", "attention"),
        ("greedy_decode", "generation"),
    ],
)
def test_a_name_of_a_room_is_found_from_the_top(name: str, place: str):
    with pytest.raises(AttributeError, match=f"did you mean headwise.{place}.{name}"):
        getattr(hw, name)
