"""Attention written in many ways is found by a run, or listed with the reason why it is not."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from observe.inspect.attention_forms import (
    DIM,
    FORMS,
    HEADS,
    WIDE,
    Layer,
    SummedHeads,
    build,
    exp_and_sum,
    expected_weights,
    scores,
)
from observe.inspect.module_state import read_state
from support.site_recording import record_sites

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")


PATTERNS = {"causal flex": "causal()", "causal on three axes": "set by each call"}


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_every_form_is_found_and_observed_and_ablated(name: str):
    model, x = build(name)
    whole, before = model(x), read_state(model)
    found = hw.sites(model, x)
    pattern = PATTERNS.get(name, "full()")
    assert [(site.path, site.q, site.kv, site.dim, site.pattern) for site in found] == [
        (path, HEADS, HEADS, DIM, pattern) for path in "01"
    ]
    with record_sites(model) as recorders:
        assert torch.allclose(model(x), whole, atol=1e-6)
    (call,) = recorders["model.0.attention"].seen
    expected = expected_weights(name, model[0], x)
    assert torch.allclose(call.all_weights().double(), expected, atol=1e-5)
    assert expected.std() > 0.05
    other = copy.deepcopy(model)
    other[1].two.weight[:, DIM : 2 * DIM] = 0
    batches = (
        (x,) if "flex" in name else (x, x[:1], torch.cat([x, x]))
    )  # flex_attention compiles for each size
    for rows in batches:
        with hw.ablate(model, [(1, 1)]):
            ablated = model(rows)
        assert torch.allclose(ablated, other(rows), atol=1e-5)
        assert not torch.allclose(ablated, model(rows), atol=1e-2)
    assert torch.allclose(model(x), whole, atol=1e-6)
    assert read_state(model) == before


@torch.no_grad()
def test_heads_of_modules_that_are_not_concatenated_are_sites_of_one_head():
    torch.manual_seed(0)
    model, x = SummedHeads().eval(), torch.randn(4, 7, WIDE)
    found = hw.sites(model, x)
    assert [(site.path, site.heads, site.dim) for site in found] == [
        (f"heads.{n}", 1, DIM) for n in range(HEADS)
    ]
    other = copy.deepcopy(model)
    other.outs[2].weight[:] = 0
    with hw.ablate(model, [(found[2].name, 0)]):
        assert torch.allclose(model(x), other(x), atol=1e-6)


@torch.no_grad()
def test_the_order_of_batch_and_heads_needs_an_example_of_two_rows():
    for name in ("batch and heads", "fused on three axes"):
        model, x = build(name)
        (first, _) = hw.sites(model, x[:1])
        assert "give an example with two rows or more" in first.ablate.reason
        with (
            pytest.raises(ValueError, match=r"cannot be ablated.*two rows or more"),
            hw.ablate(model, [(0, 0)]),
        ):
            pass
        assert hw.sites(model, x)[0].ablate.possible


def mixed_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights [B, T, H, S]: heads behind the queries."""
    weights = scores(q, k).transpose(1, 2).softmax(-1)
    return torch.einsum("bths,bhsd->bthd", weights, v)


def five_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads in groups on an axis of their own."""
    weights = scores(q[:, :, None], k[:, :, None]).softmax(-1)
    return (weights @ v[:, :, None])[:, :, 0].transpose(1, 2)


def unused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that are changed before they are applied."""
    return ((scores(q, k).softmax(-1) - 0.1) @ v).transpose(1, 2)


UNCLEAR = {
    "mixed axes": (mixed_axes, "by einsum 'bths,bhsd->bthd'"),
    "five axes": (five_axes, "have 5 axes"),
    "unused": (unused, "no values are multiplied"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_other_forms_are_listed_with_the_reason(name: str):
    mix, reason = UNCLEAR[name]
    model, x = nn.Sequential(Layer(mix), Layer(exp_and_sum)).eval(), torch.randn(4, 7, WIDE)
    before = read_state(model)
    found = hw.sites(model, x)
    assert [(site.path, site.observe.possible, site.ablate.possible) for site in found] == [
        ("0", False, False),
        ("1", True, True),
    ]
    assert reason in found[0].observe.reason
    assert reason in " ".join(str(found).split())
    with pytest.raises(ValueError, match="cannot be ablated"), hw.ablate(model, [(0, 0)]):
        pass
    assert read_state(model) == before


def compile_child(model: nn.Sequential) -> None:
    """The second layer wrapped by torch.compile."""
    model[1] = torch.compile(model[1], backend="eager")


def compile_in_place(model: nn.Sequential) -> None:
    """The second layer compiled as a method."""
    model[1].compile(backend="eager")


def compile_submodule(model: nn.Sequential) -> None:
    """A module inside the second layer."""
    model[1].one = torch.compile(model[1].one, backend="eager", fullgraph=True)


class CompiledLayer(Layer):
    """A layer whose forward is compiled by a decorator."""

    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def compile_by_decorator(model: nn.Sequential) -> None:
    """The second layer is of a class with a compiled forward."""
    compiled = CompiledLayer(exp_and_sum).eval()
    compiled.load_state_dict(model[1].state_dict())
    model[1] = compiled


PARTLY = {
    "child": (compile_child, "1._orig_mod", "1 (OptimizedModule) is compiled"),
    "in place": (compile_in_place, "1", "it is compiled"),
    "submodule": (compile_submodule, "1", "1.one (OptimizedModule) is compiled"),
    "decorator": (compile_by_decorator, "1", "it is compiled"),
}


@pytest.mark.parametrize("name", PARTLY)
@torch.no_grad()
def test_compiled_parts_are_listed_before_anything_runs(name: str):
    change, path, reason = PARTLY[name]
    model, x = build("exp and sum")
    plain, whole = copy.deepcopy(model), model(x)
    change(model)
    found = hw.sites(model, x)
    assert [(site.path, site.ablate.possible) for site in found] == [("0", True), (path, False)]
    assert reason in found[1].ablate.reason
    assert reason in found[1].observe.reason
    with (
        pytest.raises(ValueError, match=r"cannot be ablated.*compiled"),
        hw.ablate(model, [(1, 0)]),
    ):
        raise AssertionError("the context was entered")
    plain[0].two.weight[:, DIM : 2 * DIM] = 0
    with hw.ablate(model, [(0, 1)]):  # the other layer is not compiled
        assert torch.allclose(model(x), plain(x), atol=1e-5)
    assert torch.allclose(model(x), whole, atol=1e-6)


def test_a_model_that_is_compiled_as_a_whole_is_refused():
    model, x = build("exp and sum")
    with pytest.raises(ValueError, match="compiled"):
        hw.sites(torch.compile(model, backend="eager"), x)


@pytest.mark.slow
def test_a_module_with_flex_attention_is_found_before_torch_has_compiled_anything():
    code = """
import torch, headwise as hw
from torch.nn.attention.flex_attention import flex_attention

class Flex(torch.nn.Linear):
    def forward(self, x):
        q, k, v = super().forward(x).unflatten(-1, (3, 3, 4)).movedim(2, 0).transpose(2, 3)
        return flex_attention(q, k, v).transpose(1, 2).flatten(2)

print([site.heads for site in hw.sites(torch.nn.Sequential(Flex(12, 36)).eval(), torch.randn(2, 5, 12))])
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert ran.stdout == "[3]\n", ran.stderr[-2000:]


@torch.no_grad()
def test_traces_and_means_find_attention_in_their_inputs():
    model, x = build("batch and heads")
    with pytest.raises(
        ValueError, match=r"hw.sites\(model, example\) finds it in a run on an example"
    ):
        hw.head_means(model, iter([x]))
    assert len(hw.trace(model, x).layers) == 2
    other, x = build("batch and heads")
    assert len(hw.head_means(other, (x,))) == 2 * HEADS
