"""Answers that making the package smaller must not change: layers, presets, commands, the page."""

from __future__ import annotations

import pytest
import torch

from . import collect

ROUNDING = {"rtol": 1e-11, "atol": 1e-12}  # another processor may sum in another order


@pytest.mark.parametrize("backend", ["dense", None])
def test_layers_give_the_recorded_outputs_and_gradients(backend: str | None):
    expected, found = collect.read_tensors(), dict(collect.layer_tensors(backend))
    assert set(found) == set(expected)
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], **ROUNDING, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("section", collect.SECTIONS)
def test_answers_are_those_recorded(section: str):
    found = list(collect.differences(collect.SECTIONS[section](), collect.read_answers()[section]))
    assert not found, "\n".join([f"{len(found)} differences", *found[:40]])
