"""Calls that count, compare or measure costs and are refused: each error names its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.costs.complexity import (
    ComplexityTable,
    LayerSizes,
    measure_layer_reach,  # noqa: F401 - a line of the table uses it
)
from support.refusals import check_refused, refused_calls

LAYER = hw.design(model=8, heads=2)
MHA = hw.design(model=512, heads=8, pattern="causal")
GQA = hw.design(model=512, heads=8, kv=2, pattern="causal")
LOAD = hw.Workload(batch=3, context=700)


def match(spec: Any, **options: Any) -> object:
    return hw.match_size(spec, **({"like": MHA, "workload": LOAD} | options))


def complexity(**options: Any) -> object:
    return ComplexityTable.from_sizes(
        LayerSizes(**({"tokens": 5, "model": 8, "heads": 2} | options))
    )


def quantised(**config: Any) -> object:
    return hw.families.read_model_spec({"model_type": "llama", "quantization_config": config})


@pytest.mark.parametrize(
    ("does", "words"), refused_calls(Path(__file__).with_name("refused_calls.txt"))
)
def test_a_refused_call_names_its_reason(does: str, words: str):
    check_refused(does, words, hw.SpecError, globals())
