"""Bills: their sums are what is counted and made, and every formula says the number beside it."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import costs
from headwise.costs import flops
from headwise.costs.flops import SymbolicInt, formula, name_sizes
from support import layer_cases as cases
from support.layer_cases import EVERY, EVERY_CASE, EXAMPLES


def worth(text: str, sizes: dict[str, int]) -> float:
    """The value of a formula, names looked up, a space for a product."""
    text = re.sub(r"floor\(([^()]*(?:\([^()]*\)[^()]*)*)\)", r"FLOOR(\1)", text).replace("^", "**")
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", text)
    return eval(text, {"FLOOR": math.floor}, sizes)


def work_of(spec) -> hw.costs.CallSize:
    keys = cases.TOKENS if spec.source is None else cases.SOURCE
    return hw.costs.CallSize(cases.BATCH, cases.TOKENS, keys, keys)


@pytest.mark.parametrize("name", EVERY_CASE)
def test_bills_add_up(name):
    spec = EVERY[name]
    assert name_sizes(spec) == spec
    assert flops.attention_parameters(spec).total == costs.count_parameters(spec)
    assert flops.forward_flops(spec, work_of(spec)).total == costs.counted_flops(
        spec, work_of(spec)
    )
    if not spec.is_recurrent:
        assert flops.cached_numbers(spec).total == costs.cached_numbers_per_token(spec)
    else:
        assert 8 * flops.cached_numbers(spec).total == costs.cache_bytes(
            spec, batch=1, capacity=9, bytes_per_number=8
        )
    one = hw.costs.CallSize(2, 1, 1, 9)
    assert flops.forward_flops(spec, one).total == costs.required_flops(spec, one)


@pytest.mark.parametrize("name", EVERY_CASE)
def test_gradients_are_counted_as_torch_counts_them(name):
    spec = EVERY[name]
    layer = cases.layer(spec, torch.float32, "dense")
    x, z = cases.tensors(spec, torch.float32)
    for value in (x, z):
        if value is not None:
            value.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y = layer(x, source=z)
        total_flops = counter.get_total_flops()
        y.sum().backward()
    assert (
        counter.get_total_flops() - total_flops == flops.backward_flops(spec, work_of(spec)).total
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_formula_is_worth_its_number(name):
    spec, work = EXAMPLES[name], work_of(EXAMPLES[name])
    letters = {
        "B": work.batch,
        "T": work.queries,
        "new": work.new_tokens,
        "S": work.keys,
        "pairs": work.pairs,
    }
    parts = {"normaliser": spec.normaliser, "merge": spec.merge, **dict(spec.parts())}
    for bill in (
        flops.attention_parameters(spec),
        flops.forward_flops(spec, work),
        flops.cached_numbers(spec),
    ):
        for term in bill.terms:
            part = parts.get(re.split(r"[. ]", term.name)[0], spec.project)
            text = re.sub(
                r"(\w+)\.(\w+)", lambda value: str(getattr(parts[value[1]], value[2])), term.formula
            )
            assert worth(text, {**spec.sizes_of(part), **letters}) == term.value, term


def test_symbols_compute_like_numbers():
    q, dim = SymbolicInt.with_formula(6, "q"), SymbolicInt.with_formula(4, "dim")
    options = {
        "2 q dim": 2 * q * dim,
        "3 (q + dim) q": (q + dim) * 3 * q,
        "q dim - (q + 1)": q * dim - (q + 1),
        "q dim - 2 q": q * dim - 2 * q,
        "5 q": 2 * q + 3 * q,
        "1 + q": 1 + q,
        "4 q^2": (2 * q) ** 2,
        "floor((q + dim) / 3)": (q + dim) // 3,
        "12 q dim": 2 * (3 * q * 2) * dim,
    }
    for text, value in options.items():
        assert formula(value) == text
        assert value == worth(text, {"q": 6, "dim": 4})
    assert (0 + q, q + 0, q * 1, sum([q, dim])) == (6, 6, 6, 10)
    assert dim**-0.5 == 0.5
    assert (0,) * dim == (0, 0, 0, 0)
    assert formula(7) == "7"
