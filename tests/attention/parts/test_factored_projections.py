"""Projects whose keys and values are shared or factored, against renderings of their papers'
formulas, one token and head at a time, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.surgery.head_alignment import compute_kv_features
from support.layer_checks import decode_in_chunks

TOKENS, WIDTH, HEADS, DIM = 7, 24, 6, 8
State = Mapping[str, Tensor]


@dataclass
class Rendering:
    """Queries, keys and values of one token at a position, [heads, channels] each."""

    queries: Callable[[Tensor, int], Tensor]
    keys: Callable[[Tensor, int], Tensor]
    values: Callable[[Tensor, int], Tensor]
    scale: float


def turn(x: Tensor, position: int) -> Tensor:
    """Rotate channels c and c + half by position 10000^(-2c/n) (2104.09864)."""
    half = x.shape[-1] // 2
    angles = torch.tensor(
        [position * 10_000.0 ** (-2 * c / x.shape[-1]) for c in range(half)], dtype=x.dtype
    )
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([pairs.real, pairs.imag], -1)


def rms(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean x^2 + eps), times the gain."""
    return gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def composed(state: State) -> Rendering:
    """2601.19611: K_h = sum_c A[h, c] K_c, values likewise."""
    components = len(state["key_sum"][0])

    def sums(name: str, weights: str, z: Tensor, i: int) -> Tensor:
        parts = (state[name] @ z).view(components, -1)
        heads = []
        for h in range(HEADS):
            head = torch.stack([state[weights][h, c] * parts[c] for c in range(components)]).sum(0)
            heads.append(turn(head, i) if name == "k" else head)
        return torch.stack(heads)

    return Rendering(
        lambda x, i: turn((state["q"] @ x).view(HEADS, DIM), i),
        lambda z, i: sums("k", "key_sum", z, i),
        lambda z, i: sums("v", "value_sum", z, i),
        DIM**-0.5,
    )


def tensor_product(state: State) -> Rendering:
    """2501.06425, equations of Q, K, V: 1/R sum_r a_r b_r^T, with RoPE on the result."""

    def product(side: str, x: Tensor) -> Tensor:
        rank = len(state[f"{side}_heads"]) // HEADS
        a = (state[f"{side}_heads"] @ x).view(HEADS, rank)
        b = (state[f"{side}_vectors"] @ x).view(rank, -1)
        return torch.stack([torch.outer(a[:, r], b[r]) for r in range(rank)]).mean(0)

    return Rendering(
        lambda x, i: turn(product("q", x), i),
        lambda z, i: turn(product("k", z), i),
        lambda z, i: product("v", z),
        DIM**-0.5,
    )


def tied(state: State) -> Rendering:
    """2505.21487, grouped tied attention: half of a key is half of the value, the other half is
    rotary and the same in all groups.
    """
    groups = len(state["kv"]) // DIM
    half = DIM // 2

    def state_of(z: Tensor) -> Tensor:
        return (state["kv"] @ z).view(groups, DIM).repeat_interleave(HEADS // groups, 0)

    def queries(x: Tensor, i: int) -> Tensor:
        q = (state["q"] @ x).view(HEADS, DIM)
        return torch.cat([q[:, :half], turn(q[:, half:], i)], -1)

    def keys(z: Tensor, i: int) -> Tensor:
        rotary = turn(state["rotary"] @ z, i)
        return torch.stack([torch.cat([head[:half], rotary]) for head in state_of(z)])

    return Rendering(queries, keys, lambda z, i: state_of(z), DIM**-0.5)


def grouped_latent(state: State) -> Rendering:
    """2505.21487, grouped latent attention: MLA's formulas (2405.04434) with one latent a group."""
    rope = len(state["rotary_down"])
    groups, rank = state["kv_norm"].shape
    up = {side: state[f"{side}_up"].view(HEADS, -1, rank) for side in "kv"}

    def expand(side: str, z: Tensor) -> Tensor:
        latents = rms((state["kv_down"] @ z).view(groups, rank), state["kv_norm"])
        return torch.stack([up[side][h] @ latents[h * groups // HEADS] for h in range(HEADS)])

    def queries(x: Tensor, i: int) -> Tensor:
        low = rms(state["q_down"] @ x, state["q_norm"])
        q = (state["q_up"] @ low).view(HEADS, DIM + rope)
        return torch.cat([q[:, :DIM], turn(q[:, DIM:], i)], -1)

    def keys(z: Tensor, i: int) -> Tensor:
        rotary = turn(state["rotary_down"] @ z, i)
        return torch.stack([torch.cat([head, rotary]) for head in expand("k", z)])

    return Rendering(queries, keys, lambda z, i: expand("v", z), (DIM + rope) ** -0.5)


def factored_queries(state: State) -> Rendering:
    """2412.19255: one key and one value, queries through a shared space with a norm."""

    def queries(x: Tensor, i: int) -> Tensor:
        low = rms(state["q_down"] @ x, state["q_norm"])
        return turn((state["q_up"] @ low).view(HEADS, DIM), i)

    return Rendering(
        queries,
        lambda z, i: turn(state["k"] @ z, i).expand(HEADS, -1),
        lambda z, i: (state["v"] @ z).expand(HEADS, -1),
        DIM**-0.5,
    )


PROJECTS: dict[str, tuple[Callable[[State], Rendering], hw.AttentionSpec]] = {}


def _add(render: Callable[[State], Rendering], **options: Any) -> None:
    sizes: dict[str, Any] = {"model": WIDTH, "heads": HEADS, "dim": DIM, "pattern": "causal"}
    spec = hw.design(**sizes, modifiers=(hw.parts.Rotary(),), **options)
    PROJECTS[f"{render.__name__}-{len(PROJECTS)}"] = (render, spec)


_add(composed, project=hw.parts.ComposedHeads())
_add(composed, project=hw.parts.ComposedHeads(components=2), vdim=5)
_add(tensor_product, project=hw.parts.TensorProduct(rank=2, query_rank=3), vdim=5)
_add(tied, project=hw.parts.TiedProjection(), kv=3)
_add(grouped_latent, project=hw.parts.GroupedLatent(rank=5, rope=4, query_rank=9), kv=2, vdim=5)
_add(factored_queries, project=hw.parts.FactoredQueries(rank=9), kv=1)


def make_layer(spec: hw.AttentionSpec) -> hw.Attention:
    """A layer with random weights, also those that start as ones or as one component."""
    torch.manual_seed(5)
    layer = hw.Attention(spec).double()
    for weight in layer.parameters():
        weight.data = torch.randn_like(weight) * 0.4
    return layer


def render_output(layer: hw.Attention, render: Callable[[State], Rendering], x: Tensor) -> Tensor:
    """softmax(q.k scale) v of every head and token, one at a time, and the merge's product."""
    params = dict(layer.named_parameters())
    state = {name.removeprefix("project."): params[name] for name in params}
    one = render(state)
    keys = [one.keys(z, j) for j, z in enumerate(x)]
    values = [one.values(z, j) for j, z in enumerate(x)]
    rows = []
    for i, token in enumerate(x):
        queries = one.queries(token, i)
        heads = []
        for h in range(HEADS):
            scores = torch.stack([queries[h] @ keys[j][h] * one.scale for j in range(i + 1)])
            weights = scores.softmax(0)
            heads.append(torch.stack([weights[j] * values[j][h] for j in range(i + 1)]).sum(0))
        rows.append(params["output.o"] @ torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("name", PROJECTS)
def test_a_layer_computes_the_formula_of_its_paper(name: str):
    render, spec = PROJECTS[name]
    layer = make_layer(spec)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    expected = render_output(layer, render, x)
    found = layer(x[None])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * expected.abs().max().item())
    target = torch.randn_like(expected)
    weights = list(layer.parameters())
    gradients = (torch.autograd.grad((y * target).sum(), weights) for y in (found, expected))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-10 * other.abs().max().item())


@pytest.mark.parametrize("name", PROJECTS)
def test_decoding_with_a_cache_gives_the_same(name: str):
    layer = make_layer(PROJECTS[name][1]).eval()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
        cache = layer.cache(batch=2, capacity=TOKENS, kind="smallest")
        stepwise = decode_in_chunks(layer, x, (3, *[1] * (TOKENS - 3)), cache)
    torch.testing.assert_close(stepwise, whole, rtol=0, atol=1e-11 * whole.abs().max().item())


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        (PROJECTS["composed-0"][1], HEADS * DIM * 2),
        (PROJECTS["composed-1"][1], 2 * (DIM + 5)),
        (PROJECTS["tensor_product-2"][1], 2 * 2 * HEADS + 2 * (DIM + 5)),
        (PROJECTS["tied-3"][1], 3 * DIM + DIM // 2),
        (PROJECTS["grouped_latent-4"][1], 2 * 5 + 4),
        (PROJECTS["factored_queries-5"][1], 2 * DIM),
    ],
)
def test_what_a_token_keeps_is_what_the_paper_counts(spec: hw.AttentionSpec, numbers: int):
    assert hw.costs.cached_numbers_per_token(spec) == numbers


def test_published_sizes():
    """Numbers of a token that the papers print."""
    gla = hw.design(model=4096, heads=32, kv=2, dim=128, project=hw.parts.GroupedLatent(rank=256))
    assert hw.costs.cached_numbers_per_token(gla) == 4.5 * 128  # d_c = 4 d_h and a rotary half
    mfa = hw.design(
        model=2048, heads=64, kv=1, dim=256, project=hw.parts.FactoredQueries(rank=2048)
    )
    assert hw.costs.cached_numbers_per_token(mfa) == 2 * 256


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"project": hw.parts.ComposedHeads(), "kv": 2}, "one key-value head per query head"),
        ({"project": hw.parts.TensorProduct(rank=0)}, "rank=0) must be at least 1"),
        ({"project": hw.parts.TiedProjection(rope=9)}, "use rope of 1 to 8"),
        ({"project": hw.parts.TiedProjection(rope=2), "vdim": 5}, "use rope of 3 to 8"),
        ({"project": hw.parts.GroupedLatent(bias="kv")}, "bias='kv') is unknown"),
        ({"project": hw.parts.FactoredQueries(norm="layer")}, "norm='layer') is unknown"),
        (
            {"project": hw.parts.TensorProduct(), "modifiers": (hw.parts.QKNorm(),)},
            "only a slice of the queries and keys of TensorProduct",
        ),
    ],
)
def test_what_is_not_defined_is_refused(options: dict[str, Any], reason: str):
    with pytest.raises(hw.SpecError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        hw.design(model=WIDTH, heads=HEADS, **{"dim": DIM, **options})


def test_composed_heads_start_as_groups():
    """With two components, the first layer equals grouped heads with two key-value heads."""
    torch.manual_seed(0)
    spec = hw.design(model=WIDTH, heads=HEADS, dim=DIM, project=hw.parts.ComposedHeads(2))
    layer = hw.Attention(spec).double()
    grouped = hw.Attention(hw.design(model=WIDTH, heads=HEADS, dim=DIM, kv=2)).double()
    grouped.load_state_dict({n: w for n, w in layer.state_dict().items() if "sum" not in n})
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x), grouped(x))
    assert math.isclose(hw.costs.cached_numbers_per_token(spec), 2 * 2 * DIM)


def convert(spec: hw.AttentionSpec, components: int) -> tuple[hw.Attention, hw.Attention, Any]:
    """A layer of plain heads with random weights, and its conversion to composed heads."""
    layer = make_layer(spec).eval()
    done = hw.parts.convert_to_composed(spec, layer.state_dict(), components)
    other = hw.Attention(done.spec).double().eval()
    other.load_state_dict(done.weights)
    return layer, other, done


@pytest.mark.parametrize(("kv", "components"), [(6, 6), (3, 3), (2, 4), (1, 1)])
def test_as_many_components_as_key_value_heads_are_exact(kv: int, components: int):
    spec = hw.design(
        model=WIDTH,
        heads=HEADS,
        dim=DIM,
        vdim=5,
        kv=kv,
        bias="qkvo",
        pattern="causal",
        modifiers=(hw.parts.Rotary(),),
    )
    layer, other, done = convert(spec, components)
    assert done.key_error < 1e-12 > done.value_error
    assert hw.costs.cached_numbers_per_token(done.spec) == components * (DIM + 5)
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(other(x), layer(x), rtol=0, atol=1e-10)


def test_fewer_components_are_the_best_approximation():
    """The error is that of the truncated matrix, and less than that of means of groups."""
    spec = hw.design(model=WIDTH, heads=HEADS, dim=DIM, pattern="causal")
    layer, other, done = convert(spec, 2)
    state = other.state_dict()
    for side, error in (("k", done.key_error), ("v", done.value_error)):
        heads = layer.state_dict()[f"project.{side}"].view(HEADS, -1).numpy()
        sizes = np.linalg.svd(heads, compute_uv=False)
        assert error == pytest.approx((sum(sizes[2:] ** 2) / sum(sizes**2)) ** 0.5, rel=1e-10)
        sums = state[f"project.{'key' if side == 'k' else 'value'}_sum"].numpy()
        composed = sums @ state[f"project.{side}"].view(2, -1).numpy()
        assert np.linalg.norm(heads - composed) / np.linalg.norm(heads) == pytest.approx(error)
        means = heads.reshape(2, 3, -1).mean(1).repeat(3, 0)
        assert error < np.linalg.norm(heads - means) / np.linalg.norm(heads)


@pytest.mark.parametrize(
    ("options", "components", "reason"),
    [
        ({}, 7, "components=7 is not within 1..6"),
        ({"project": hw.parts.TensorProduct()}, 2, "project TensorProduct; give one with"),
        ({"modifiers": (hw.parts.QKNorm(),)}, 2, "only a slice of the queries and keys"),
    ],
)
def test_a_layer_without_such_a_form_is_refused(options: Any, components: int, reason: str):
    spec = hw.design(model=WIDTH, heads=HEADS, dim=DIM, **options)
    with pytest.raises(hw.SpecError, match=reason):
        hw.parts.convert_to_composed(spec, make_layer(spec).state_dict(), components)


def test_more_components_than_columns_are_zero():
    spec = hw.design(model=2, heads=16, dim=2)
    done = hw.parts.convert_to_composed(spec, hw.Attention(spec).state_dict(), 12)
    assert done.key_error < 1e-12
    assert (done.weights["project.k"].view(12, 2, 2)[4:] == 0).all()


def test_weights_that_are_no_numbers_are_refused():
    spec = hw.design(model=8, heads=4)
    weights = hw.Attention(spec).state_dict()
    weights["project.v"][0, 0] = float("nan")
    with pytest.raises(hw.SpecError, match=r"project\.v has numbers that are not finite"):
        hw.parts.convert_to_composed(spec, weights, 2)


def test_grouped_latents_are_compared_as_latents():
    """Pooling compares what it pools: one latent for each key-value head, which no map of a head's
    values can be folded into.
    """
    spec = PROJECTS["grouped_latent-4"][1]
    layer = make_layer(spec)
    z = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    assert compute_kv_features(layer, z)["v"].shape == (2, TOKENS, 2, 5)
    assert spec.project.absorb_matrix(spec, layer.state_dict(), "v", torch.eye(5)) == {}
