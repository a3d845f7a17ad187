"""Heads with several pseudo queries and keys, and heads with several branches, against renderings
of their papers' formulas in float64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise import parts
from headwise.surgery.head_grouping import permute_heads
from support.layer_checks import decode_in_chunks

TOKENS, WIDTH, HEADS, DIM, VDIM = 6, 20, 4, 8, 5


def turn(x: Tensor, position: int) -> Tensor:
    """Rotate channels c and c + half by position 10000^(-2c/n) (2104.09864)."""
    half = x.shape[-1] // 2
    rates = [position * 10_000.0 ** (-2 * c / x.shape[-1]) for c in range(half)]
    angles = torch.tensor(rates, dtype=x.dtype)
    pairs = torch.complex(x[..., :half], x[..., half:])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def random_layer(spec: hw.AttentionSpec, backend: str | None = None) -> hw.Attention:
    """A layer whose weights are all random, also those that start as ones or as one head."""
    torch.manual_seed(7)
    layer = hw.Attention(spec, backend=backend).double()
    for weight in layer.parameters():
        weight.data = torch.randn_like(weight) * 0.4
    return layer


def interleave(x: Tensor, state: Mapping[str, Tensor], side: str, pseudo: int) -> list[Tensor]:
    """The sequences of all heads: token n is at places n P to n P + P - 1 (2602.21371)."""
    sums = state[f"{ {'q': 'query', 'k': 'key', 'v': 'value'}[side] }_sum"]
    sums = sums.view(HEADS, pseudo, HEADS)
    by_head = (x @ state[side].T).view(len(x), HEADS, -1)
    sequences = []
    for h in range(HEADS):
        places = []
        for n in range(len(x)):
            for p in range(pseudo):
                terms = [sums[h, p, g] * by_head[n, g] for g in range(HEADS)]
                place = torch.stack(terms).sum(0)
                places.append(place if side == "v" else turn(place, n * pseudo + p))
        sequences.append(torch.stack(places))
    return sequences


def interleaved_heads(
    layer: hw.Attention, x: Tensor, pseudo: int, kind: str, *, ordered: bool
) -> Tensor:
    """Attention over the interleaved sequences, and their collapse, by the paper's definition."""
    params = dict(layer.named_parameters())
    state = {name.removeprefix("project."): weight for name, weight in params.items()}
    sequences = {side: interleave(x, state, side, pseudo) for side in "qkv"}
    places = torch.arange(len(x) * pseudo)
    allowed = (
        places[:, None] >= places if ordered else places[:, None] // pseudo >= places // pseudo
    )
    outputs = []
    for h in range(HEADS):
        scores = sequences["q"][h] @ sequences["k"][h].T * DIM**-0.5
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        outputs.append((weights @ sequences["v"][h]).view(len(x), pseudo, -1))
    collapse = params["head_collapse.sum"]
    heads = []
    for h in range(HEADS):
        if kind == "head":
            terms = [collapse[h, p] * outputs[h][:, p] for p in range(pseudo)]
        else:
            weights = collapse[h].view(HEADS, pseudo)
            pairs = [(g, p) for g in range(HEADS) for p in range(pseudo)]
            terms = [weights[g, p] * outputs[g][:, p] for g, p in pairs]
        heads.append(torch.stack(terms).sum(0))
    return torch.cat(heads, -1) @ params["output.o"].T


def design_interleaved(pseudo: int, kind: str = "head", *, ordered: bool = True) -> Any:
    order = (parts.PseudoOrder(),) if ordered else ()
    steps = (parts.PseudoRotary(), *order, parts.HeadCollapse(pseudo=pseudo, kind=kind))
    sizes: dict[str, Any] = {"model": WIDTH, "heads": HEADS, "dim": DIM, "vdim": VDIM}
    return hw.design(preset="iha", **sizes, modifiers=steps)


def low_rank_branches(layer: hw.Attention, x: Tensor, branches: int) -> Tensor:
    """The branches of 2603.02188: plain attention over each latent of a head, and their sum over
    sqrt(branches). With two branches, half of the heads use latents 0 and 2, the others 1 and 3.
    """
    params = dict(layer.named_parameters())
    state = {name.removeprefix("project."): weight for name, weight in params.items()}
    latents, rank = state["kv_norm"].shape
    rope = len(state["rotary_down"])

    def norm(y: Tensor, gain: Tensor) -> Tensor:
        return gain * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    c = norm((x @ state["kv_down"].T).view(len(x), latents, rank), state["kv_norm"])
    low = norm(x @ state["q_down"].T, state["q_norm"])
    queries = (low @ state["q_up"].T).view(len(x), HEADS, DIM + rope)
    rotary = torch.stack([turn(state["rotary_down"] @ z, n) for n, z in enumerate(x)])
    up = {side: state[f"{side}_up"].view(HEADS, branches, -1, rank) for side in "kv"}
    causal = torch.ones(len(x), len(x)).tril().bool()
    heads = []
    for h in range(HEADS):
        turned = torch.stack([turn(q[DIM:], n) for n, q in enumerate(queries[:, h])])
        query = torch.cat([queries[:, h, :DIM], turned], -1)
        total = torch.zeros((), dtype=x.dtype)
        for b in range(branches):
            of_branch = latents // branches
            latent = c[:, b * of_branch + h * of_branch // HEADS]
            key = torch.cat([latent @ up["k"][h, b].T, rotary], -1)
            scores = (query @ key.T) * (DIM + rope) ** -0.5
            weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
            total = total + weights @ (latent @ up["v"][h, b].T)
        heads.append(total / branches**0.5)
    return torch.cat(heads, -1) @ params["output.o"].T


def design_branches(branches: int) -> Any:
    project = parts.GroupedLatent(rank=3, rope=4, query_rank=9, branches=branches)
    steps = (parts.Rotary(), parts.SumRows(rows=branches))
    sizes: dict[str, Any] = {"model": WIDTH, "heads": HEADS, "dim": DIM, "vdim": VDIM}
    return hw.design(preset="mlra", **sizes, kv=4 // branches, project=project, modifiers=steps)


CASES: dict[str, tuple[Any, Any]] = {
    "head": (
        design_interleaved(2),
        lambda layer, x: interleaved_heads(layer, x, 2, "head", ordered=True),
    ),
    "three": (
        design_interleaved(3),
        lambda layer, x: interleaved_heads(layer, x, 3, "head", ordered=True),
    ),
    "global": (
        design_interleaved(2, "global"),
        lambda layer, x: interleaved_heads(layer, x, 2, "global", ordered=True),
    ),
    "unordered": (
        design_interleaved(2, ordered=False),
        lambda layer, x: interleaved_heads(layer, x, 2, "head", ordered=False),
    ),
    "two branches": (design_branches(2), lambda layer, x: low_rank_branches(layer, x, 2)),
    "four branches": (design_branches(4), lambda layer, x: low_rank_branches(layer, x, 4)),
}


@pytest.mark.parametrize("backend", ["dense", "chunked"])
@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_the_formula_of_its_paper(name: str, backend: str):
    spec, render = CASES[name]
    layer = random_layer(spec, backend)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    expected = render(layer, x)
    output = layer(x[None])[0]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-11 * expected.abs().max().item())
    target = torch.randn_like(expected)
    weights = list(layer.parameters())
    gradients = (torch.autograd.grad((y * target).sum(), weights) for y in (output, expected))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-10 * other.abs().max().item())


@pytest.mark.parametrize("name", CASES)
def test_decoding_with_a_cache_gives_the_same(name: str):
    layer = random_layer(CASES[name][0]).eval()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
        cache = layer.cache(batch=2, capacity=TOKENS, kind="smallest")
        stepwise = decode_in_chunks(layer, x, (3, *[1] * (TOKENS - 3)), cache)
    torch.testing.assert_close(stepwise, whole, rtol=0, atol=1e-11 * whole.abs().max().item())


@pytest.mark.parametrize("kind", ["head", "global"])
def test_pseudo_heads_that_equal_their_head_are_plain_attention(kind: str):
    """P equal pseudo heads share the weight of a key, and their mean is the head's output."""
    torch.manual_seed(3)
    joint: Any = {"project": parts.PseudoHeads(), "normaliser": parts.JointSoftmax()}
    spec = hw.design(
        model=WIDTH, heads=HEADS, **joint, modifiers=(parts.HeadCollapse(pseudo=3, kind=kind),)
    )
    layer = hw.Attention(spec).double()
    own = torch.eye(HEADS, dtype=torch.float64).repeat_interleave(3, 0)
    for side in ("query_sum", "key_sum", "value_sum"):
        layer.weights["project"][side].data.copy_(own)
    plain = hw.Attention(hw.design(model=WIDTH, heads=HEADS)).double()
    plain.load_state_dict({n: w for n, w in layer.state_dict().items() if "sum" not in n})
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x))


def test_a_layer_starts_near_plain_attention():
    """With the noise that makes pseudo heads differ, and RoPE at places that are close."""
    torch.manual_seed(3)
    spec = hw.design(preset="iha", model=64, heads=HEADS)
    layer = hw.Attention(spec).double()
    plain = hw.Attention(hw.design(model=64, heads=HEADS, pattern="causal")).double()
    plain.load_state_dict({n: layer.state_dict()[n] for n in plain.state_dict()})
    x = torch.randn(1, TOKENS, 64, dtype=torch.float64)
    error = (layer(x) - plain(x)).norm() / plain(x).norm()
    assert 1e-4 < error < 0.5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"preset": "iha", "kv": 2}, "but kv=2; leave kv, and other parts"),
        ({"project": parts.PseudoHeads(), "kv": 2}, "PseudoHeads needs P key-value heads"),
        (
            {"normaliser": parts.JointSoftmax(), "kv": 2},
            "but kv=2 and q=6; use design(preset='iha'",
        ),
        ({"modifiers": (parts.PseudoRotary(),), "kv": 2}, "PseudoRotary needs P key-value heads"),
        ({"modifiers": (parts.HeadCollapse(kind="all"),)}, "kind='all') is unknown"),
        ({"preset": "iha", "source": 9}, "leave PseudoOrder out"),
        ({"preset": "iha", "normaliser": parts.Softmax()}, "use normaliser JointSoftmax()"),
        (
            {
                "preset": "iha",
                "modifiers": (parts.PseudoOrder(), parts.TalkingHeads(), parts.HeadCollapse()),
            },
            "TalkingHeads would mix scores of -inf; write it before PseudoOrder",
        ),
        (
            {
                "project": parts.GroupedLatent(rank=4, rope=2),
                "kv": 3,
                "modifiers": (parts.PseudoRotary(),),
            },
            "PseudoRotary needs queries and keys with heads.dim channels",
        ),
        (
            {"modifiers": (parts.HeadCollapse(pseudo=2), parts.HeadCollapse(pseudo=3))},
            "leave kv, and other parts that add score heads, out",
        ),
        (
            {"project": parts.GroupedLatent(rank=4, rope=2, branches=2), "kv": 2},
            "use modifier SumRows(rows=2)",
        ),
        (
            {
                "project": parts.GroupedLatent(rank=4, rope=2, branches=2),
                "kv": 2,
                "modifiers": (parts.TalkingHeads(), parts.SumRows()),
            },
            "leave TalkingHeads out",
        ),
    ],
)
def test_what_is_not_defined_is_refused(options: dict[str, Any], reason: str):
    with pytest.raises(hw.SpecError, match=re.escape(reason)):
        hw.design(**{"model": 24, "heads": 6, "dim": 4, **options})


@pytest.mark.parametrize("number", [0, -1, 2**40])
def test_groups_have_at_least_one_row(number: int):
    with pytest.raises(hw.SpecError, match=f"rows={number}.* is out of range"):
        parts.SumRows(rows=number)
    with pytest.raises(hw.SpecError, match=f"pseudo={number}.* is out of range"):
        parts.HeadCollapse(pseudo=number)


@pytest.mark.parametrize("number", [-1, 2**40])
def test_components_are_a_number_of_heads(number: int):
    with pytest.raises(hw.SpecError, match=f"components={number}.* is out of range"):
        parts.PseudoHeads(components=number)


def test_changed_numbers_of_heads_keep_the_branches_apart():
    spec = hw.design(preset="mlra", model=64, heads=8)
    smaller = spec.with_heads(q=8)
    assert smaller.heads.kv_head_of_query == (0, 2, 0, 2, 1, 3, 1, 3)
    assert smaller.heads == hw.design(preset="mlra", model=64, heads=4, dim=spec.heads.dim).heads
    with pytest.raises(hw.SpecError, match="adds up heads with the key-value heads"):
        replace(spec, heads=replace(spec.heads, kv_head_of_query=tuple(n // 4 for n in range(16))))


def test_reordering_keeps_the_branches_of_a_head_together():
    """In their order, or in that of the key-value heads of the first branch."""
    spec = hw.design(model=24, heads=4, kv=2, dim=4, modifiers=(parts.SumRows(),))
    layer = random_layer(spec)
    mixed, weights = permute_heads(spec, layer.state_dict(), (4, 5, 0, 1, 6, 7, 2, 3))
    sorted_spec, weights = permute_heads(mixed, weights)
    first_keys = sorted_spec.heads.kv_head_of_query[::2]
    assert list(first_keys) == sorted(first_keys)
    same = hw.Attention(sorted_spec).double()
    same.load_state_dict(weights)
    x = torch.randn(2, TOKENS, 24, dtype=torch.float64)
    torch.testing.assert_close(same(x), layer(x))


def test_the_log_sum_of_a_row_is_that_of_all_its_pseudo_keys():
    layer = random_layer(design_interleaved(2))
    probe = hw.Probe("scores", "weights", "lse")
    _ = layer(torch.randn(1, TOKENS, WIDTH, dtype=torch.float64), probe=probe)
    scores, weights, lse = (probe.tensors[name] for name in ("scores", "weights", "lse"))
    causal = torch.ones(TOKENS, TOKENS).tril().bool()
    expected = (scores - lse[..., None]).exp().masked_fill(~causal, 0.0)
    torch.testing.assert_close(weights, expected)
