"""Weighted sums of values by sparse weights, against the full product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import headwise as hw
from headwise.kernels import row_normalisers
from support.layer_cases import base, check_close

OF = [1, 0, 1, 1]  # the value head that each of four heads reads


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def formula(s: Tensor, recorded: Tensor, alpha: Tensor, v: Tensor) -> Tensor:
    """All weights, by the plain form of the same part with an alpha for each head, times all
    values.
    """
    weights = [plain(s[:, h : h + 1], recorded, alpha[h]) for h in range(s.shape[1])]
    return torch.cat(weights, 1) @ v[:, OF[: s.shape[1]]]


def plain(s: Tensor, recorded: Tensor, alpha: Tensor) -> Tensor:
    """w = [(alpha - 1) s - tau]_+ ^ (1 / (alpha - 1)): tau by halving, and one Newton step for its
    gradient.
    """
    x = ((alpha - 1) * s).masked_fill(~recorded, -torch.inf)
    power, top = 1 / (alpha - 1), x.detach().amax(-1, keepdim=True)
    with torch.no_grad():
        low = (top - 1).nan_to_num(neginf=0.0)
        for n in range(1, 60):
            total = (x - low - 0.5**n).clamp(min=0).pow(power).sum(-1, keepdim=True)
            low = torch.where(total >= 1, low + 0.5**n, low)
    live = x > low
    r = torch.where(live, x - low, 1.0)
    over = torch.where(live, r**power, 0.0).sum(-1, keepdim=True) - 1
    fall = (power * torch.where(live, r ** (power - 1), 0.0)).sum(-1, keepdim=True)
    r = torch.where(live, r - over / fall.clamp(min=1e-9), 1.0)
    return torch.where(live & (r > 0), r**power, 0.0)


SIZES = st.fixed_dictionaries(
    {
        "b": st.integers(1, 2),
        "h": st.integers(1, 4),
        "t": st.integers(0, 11),
        "s": st.integers(0, 70),
        "v": st.sampled_from([1, 5, 16, 63, 64, 65, 131]),
    }
)


@given(
    SIZES,
    st.lists(st.sampled_from([1.05, 1.3, 1.5, 1.9, 2.0]), min_size=4, max_size=4),
    st.integers(0, 2),
)
def test_outputs_and_all_gradients(sizes, alphas, spread):
    b, h, t, keys, wide = (sizes[letter] for letter in "bhtsv")
    s, v = (
        (numbers(b, h, t, keys) * 3.0**spread).requires_grad_(),
        numbers(b, 2, keys, wide).requires_grad_(),
    )
    alpha = torch.tensor(alphas[:h], dtype=torch.float64).requires_grad_()
    sample = torch.rand(b, 1, t, keys) < 0.7
    ours, theirs = (
        row_normalisers.masked_entmax(s, sample, alpha, v, OF[:h])[0],
        formula(s, sample, alpha, v) if t * keys else None,
    )
    if theirs is None:
        assert torch.equal(ours, torch.zeros(b, h, t, wide, dtype=torch.float64))
        return
    check_close(ours, theirs, rtol=1e-8, atol=1e-9)
    grad = numbers(b, t, h, wide).transpose(1, 2)
    mine, expected = (torch.autograd.grad(built, (s, v, alpha), grad) for built in (ours, theirs))
    for one, other, size in zip(mine, expected, (1, 1, 1e3), strict=True):
        check_close(one, other, rtol=1e-6, atol=1e-8 * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 3.0])
def test_outputs_equal_the_product_of_weights_and_values(alpha, dtype):
    s, v = (numbers(2, 4, 9, 67) * 2).to(dtype), numbers(2, 2, 67, 21).to(dtype)
    sample = torch.rand(2, 1, 9, 67) < 0.8
    sample[1, :, 3] = False
    alphas = s.new_full((4,), alpha)
    w = row_normalisers.masked_entmax(s, sample, alphas, None, [])[0]
    ours = row_normalisers.masked_entmax(s, sample, alphas, v, OF)[0]
    check_close(ours, w @ v[:, OF], rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)
    assert (ours[1, :, 3] == 0).all()


def test_values_of_keys_without_weight_are_not_read():
    s, v = torch.tensor([[[[4.0, 2.4, 3.9, -5.0]]]], requires_grad=True), torch.ones(1, 1, 4, 3)
    v[0, 0, 1::2] = torch.nan
    v.requires_grad_()
    o = row_normalisers.masked_entmax(
        s, torch.ones(1, 1, 1, 4, dtype=torch.bool), torch.tensor([1.5]), v, [0]
    )[0]
    check_close(o, torch.ones(1, 1, 1, 3))
    of_scores, of_values = torch.autograd.grad(o.sum(), (s, v))
    assert of_scores.isfinite().all()
    assert (of_values[0, 0, 1::2] == 0).all()
    assert (of_values[0, 0, ::2] > 0).all()


@pytest.mark.parametrize("keys", [1, 16, 21])
def test_nan_reaches_every_output_that_depends_on_it(keys):
    s, v = numbers(1, 2, 3, keys), numbers(1, 2, keys, 5).requires_grad_()
    s[0, 0, 1, -1] = torch.nan
    s.requires_grad_()
    o = row_normalisers.masked_entmax(
        s, torch.ones(1, 1, 1, keys, dtype=torch.bool), s.new_full((2,), 1.5), v, [0, 1]
    )[0]
    assert o[0, 0, 1].isnan().all()
    assert o.isnan().sum() == 5
    of_scores, of_values = torch.autograd.grad(o.sum(), (s, v))
    assert of_scores[0, 0, 1].isnan().all()
    assert of_scores.isnan().sum() == keys
    assert of_values[0, 0].isnan().all()
    assert of_values[0, 1].isfinite().all()


def test_threads_change_no_number():
    s, v, sample = numbers(2, 4, 50, 130), numbers(2, 2, 130, 20), torch.rand(2, 1, 50, 130) < 0.7
    s, v, alpha = (
        s.requires_grad_(),
        v.requires_grad_(),
        s.new_tensor([1.2, 1.5, 1.8, 2.0]).requires_grad_(),
    )
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        o, values = row_normalisers.masked_entmax(s, sample, alpha, v, OF)
        found.append([o, values, *torch.autograd.grad(o.sin().sum(), (s, v, alpha))])
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("alpha", [1.1, 1.25, 1.5, 1.75, 2.0])
def test_single_numbers_are_as_good_as_plain_ones(alpha):
    layer = hw.Attention(base(normaliser=hw.Entmax(alpha=alpha), pattern="causal"))
    exact, x = hw.Attention(layer.spec).double(), torch.randn(2, 259, 10)
    exact.load_state_dict(layer.state_dict())
    exact.backend_name = "dense"
    truth = exact(x.double())

    def error(backend: str) -> float:
        layer.backend_name = backend
        return (layer(x).double() - truth).abs().max().item()

    assert error("chunked") <= 2 * error("dense")


def test_bfloat16_is_as_good_as_plain():
    layer = hw.Attention(base(normaliser=hw.Entmax(), pattern="causal")).bfloat16()
    exact, x = hw.Attention(layer.spec).double(), torch.randn(2, 259, 10).bfloat16()
    exact.load_state_dict(layer.state_dict())
    exact.backend_name = "dense"
    truth = exact(x.double())
    found = {}
    for layer.backend_name in ("chunked", "dense"):
        outputs = layer(x)
        assert outputs.dtype == torch.bfloat16
        found[layer.backend_name] = (outputs.double() - truth).abs().max()
    assert found["chunked"] <= 2 * found["dense"]


def test_saved_bytes_grow_linearly_with_length():
    """Scores and weights of a block alone are held, and of them nothing when the next begins."""
    peaks = []
    for count in (512, 1024):
        layer = hw.Attention(
            base(normaliser=hw.Entmax(kind="learned"), pattern="causal"), backend="chunked"
        )
        recorded: list[int] = []

        def keep(tensor: Tensor, tensors: list[int] = recorded) -> Tensor:
            tensors.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(torch.randn(1, count, 10, requires_grad=True)).sum().backward()
        peaks.append(max(recorded))
    assert peaks[1] <= 2 * peaks[0]


GATHERS = "does not read the values of keys with zero weight"


@pytest.mark.parametrize(
    ("words", "dtype", "value"),
    [
        ({}, "float32", [GATHERS]),
        ({}, "bf16", [GATHERS]),
        ({"normaliser": hw.Entmax(alpha=1.25)}, "bf16", []),
        ({"normaliser": hw.Entmax(kind="learned")}, "float32", [GATHERS]),
        ({"normaliser": hw.Entmax(kind="learned")}, "bf16", []),
        ({"modifiers": (hw.TalkingHeads(),)}, "float32", [GATHERS]),
        ({"modifiers": (hw.TalkingHeads(on="weights"),)}, "float32", []),
        ({"modifiers": (hw.WeightDropout(0.1),)}, "float32", []),
        ({"modifiers": (hw.ShawValues(3),)}, "float32", []),
        ({"modifiers": (hw.Alibi(),)}, "float32", [GATHERS]),
        ({"normaliser": hw.Softmax(), "modifiers": (hw.TalkingHeads(),)}, "float32", []),
    ],
    ids=str,
)
def test_why_reports_the_gathered_values(words, dtype, value):
    reasons = hw.why(base(**{"normaliser": hw.Entmax(), **words}), dtype=dtype)
    assert reasons.call.notes["chunked"] == value
    assert reasons.call.notes["dense"] == []
    assert (GATHERS in " ".join(str(reasons).split())) == bool(value)
    assert (
        next(row["notes"] for row in reasons.data["backends"] if row["name"] == "chunked") == value
    )
