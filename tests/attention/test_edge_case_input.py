"""Unusual but legal input: NaN, rows without allowed keys, and empty tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from support.spec_strategies import base, slot_values

NAN = float("nan")
X = torch.zeros(3, 7, 10, dtype=torch.float64)


def layer(backend: str | None = None, **options: object) -> hw.Attention:
    return hw.Attention(base(**options), backend=backend).double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


PATTERNS = ("full()", "causal()", "window(2)", "first(2)")
TOKENS = {
    "whole": lambda x: hw.SequenceInfo.contiguous(0, 7, "cpu"),
    "packed": lambda x: hw.SequenceInfo.from_batch(
        x, segments=torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 3)
    ),
    "padded": lambda x: hw.SequenceInfo.from_batch(x, lengths=[7, 5, 3]),
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["dense", "sdpa"])
def test_a_nan_is_never_hidden(backend: str, pattern: str, tokens: str):
    """Who may read it shows it, and so does whoever asks with it; other rows never do.

    Between the two (the same row, but no right to read) 0 times NaN is NaN, and no backend replaces
    it.
    """
    used, x = layer(backend, pattern=pattern, kv=2), numbers(3, 7, 10)
    at = TOKENS[tokens](x)
    x[1, 1] = NAN
    y, attention_mask = used(x, sequence=at), hw.attention.AttentionMask(at, at, used.spec.pattern)
    reads = attention_mask.allowed.expand(3, -1, -1, -1)[1, 0, :, 1]
    assert reads.any()
    assert y[1][reads].isnan().all()
    assert y[1, 1].isnan().all()
    assert torch.isfinite(y[[0, 2]]).all()


def test_a_nan_that_a_ring_has_forgotten_is_gone():
    used, x = layer(pattern="window(3)"), numbers(1, 13, 10)
    x[0, 4] = NAN
    cache = used.cache(batch=1, capacity=31)
    y = torch.cat([used(one, cache=cache) for one in x.split(1, 1)], 1)
    assert y.isnan().all(-1)[0].nonzero().flatten().tolist() == [4, 5, 6]


EVERYWHERE = [("dense", normaliser) for normaliser in slot_values("normaliser")]
EVERYWHERE += [("sdpa", hw.parts.Softmax()), ("sdpa", hw.parts.SinkSoftmax())]


@pytest.mark.parametrize("mask", [False, True], ids=["padding", "mask"])
@pytest.mark.parametrize(("backend", "normaliser"), EVERYWHERE, ids=str)
def test_a_query_without_allowed_keys_gives_zero(backend: str, normaliser: object, mask: bool):
    """Then y is the bias of the output; every normaliser, fused or not, and no
    gradient is a NaN.
    """
    if mask and backend != "dense":
        with pytest.raises(
            hw.NoBackend, match=r"does not support a mask given by the caller; dense does"
        ):
            layer(backend, kv=2)(X[:2, :1], mask=torch.ones(2, 1, 1, 1, dtype=torch.bool))
        return
    similarity = (
        hw.parts.FeatureMap()
        if isinstance(normaliser, hw.parts.SumNormaliser)
        else hw.parts.DotProduct()
    )
    heads: dict[str, Any] = {"bias": "qkvo", "kv": 2}
    if isinstance(normaliser, hw.parts.JointSoftmax):
        pseudo = (hw.parts.HeadCollapse(),)
        heads = {"bias": "o", "project": hw.parts.PseudoHeads(), "modifiers": pseudo}
    used = layer(backend, normaliser=normaliser, similarity=similarity, **heads)
    z = numbers(2, 7, 10)
    x = z
    hidden = None
    if mask:
        hidden = torch.tensor([True, False])[:, None, None, None].expand(2, 1, x.shape[1], 7)
    sequence = used.project_source(
        z, sequence=None if mask else hw.SequenceInfo.from_batch(z, lengths=[7, 0])
    )
    with torch.no_grad():
        used.output["o_bias"].normal_()
    y, o = used(x, source=sequence, mask=hidden), used.head_outputs(x, source=sequence, mask=hidden)
    assert (o[1] == 0).all()
    assert (o[0].abs() > 0).any()
    torch.testing.assert_close(y[1], used.output["o_bias"].expand_as(y[1]), rtol=0, atol=1e-12)
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in used.parameters() if p.grad is not None)


@pytest.mark.parametrize("backend", ["dense", None])
@pytest.mark.parametrize("shape", [(0, 7), (2, 0), (2, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("keys", [11, 1, 0])
def test_empty_inputs_are_legal(keys: int, shape: tuple[int, int], backend: str | None):
    """No row, no query, one token, no key: the same shapes as ever, and zero where nothing could be
    read.
    """
    used = layer(backend, kv=2, vdim=5, source=13)
    y = used.head_outputs(numbers(*shape, 10), source=numbers(shape[0], keys, 13))
    assert y.shape == (*shape, 6, 5)
    assert keys or (y == 0).all()
    own = layer(backend, kv=2, pattern="causal()")
    cache = own.cache(batch=shape[0], capacity=9)
    assert (
        own(numbers(*shape, 10)).shape
        == own(numbers(*shape, 10), cache=cache).shape
        == (*shape, 10)
    )


STATED = {
    "similarity": hw.parts.FeatureMap(),
    "normaliser": hw.parts.SumNormaliser(),
    "pattern": "causal()",
}
SPEAKING = {"all": (1, 4, 5, 0, 2, 3), "one twice": (0, 1, 2, 2, 4, 5), "two": (5, 1)}


def speaking(plain: hw.Attention, value: tuple[int, ...], backend: str | None) -> hw.Attention:
    """The layer of whose heads only these speak, in this order."""
    spec = replace(plain.spec, heads=replace(plain.spec.heads, score_head_of_output=value))
    chosen = hw.Attention(spec, backend=backend).double()
    weights = {name: plain.state_dict().get(name) for name in chosen.state_dict()}
    out = weights["output.o"].view(10, 6, -1)[:, list(value)].flatten(1)
    chosen.load_state_dict(weights | {"output.o": out})
    return chosen


@pytest.mark.parametrize(("backend", "kv", "count"), [("dense", 1, 7), (None, 2, 7), (None, 6, 1)])
@pytest.mark.parametrize("who", SPEAKING)
def test_output_heads_may_have_any_order(backend: str | None, who: str, kv: int, count: int):
    plain, x, z = layer("dense", kv=kv), numbers(3, count, 10), numbers(3, 11, 10)
    chosen = speaking(plain, SPEAKING[who], backend)
    expected = plain.head_outputs(x, source=z)[:, :, list(SPEAKING[who])]
    torch.testing.assert_close(chosen.head_outputs(x, source=z), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("who", SPEAKING)
def test_output_heads_with_a_state_may_have_any_order(who: str):
    chosen, x = speaking(layer(kv=2, **STATED), SPEAKING[who], None), numbers(2, 7, 10)
    cache = chosen.cache(batch=2, capacity=9)
    result = torch.cat([chosen(x[:, :4], cache=cache), chosen(x[:, 4:], cache=cache)], 1)
    torch.testing.assert_close(result, chosen(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"pattern": "window(3)"}, {"pattern": "dilated(3, 2)"}], ids=["window", "dilated"]
)
def test_every_causal_spec_can_be_decoded(options: dict[str, object]):
    """A similarity that has a state, in a layer that cannot use one, keeps its tokens instead."""
    used, x = layer(**(STATED | options)), numbers(2, 7, 10)
    cache = used.cache(batch=2, capacity=9)
    torch.testing.assert_close(used(x, cache=cache), used(x), rtol=0, atol=1e-12)


def at(position: list[int], segment: list[int]) -> hw.SequenceInfo:
    return hw.SequenceInfo(torch.tensor([position]), torch.tensor([segment]))


def test_a_later_document_may_not_be_forgotten():
    """Segments only go forward, in every row."""
    used, x = layer(pattern="causal()"), numbers(1, 3, 10)
    cache = used.cache(batch=1, capacity=9)
    used(x, cache=cache, sequence=at([0, 1, 0], [0, 0, 1]))
    with pytest.raises(
        ValueError, match=r"went back to an earlier position or segment; .*goes forward"
    ):
        used(x[:, :1], cache=cache, sequence=at([2], [0]))


def test_a_recurrent_state_cannot_separate_documents():
    used, x = layer(**STATED), numbers(1, 3, 10)
    with pytest.raises(ValueError, match=r"cannot separate segments; give each .*cache of its own"):
        used(x, cache=used.cache(batch=1, capacity=9), sequence=at([0, 1, 0], [0, 0, 1]))


def test_a_later_prefix_must_come_at_once_too():
    """The first keys of a second document are read by queries that were there before them."""
    used, x = layer(pattern="prefix(3)"), numbers(1, 9, 10)
    cache, whole_row = (
        used.cache(batch=1, capacity=9),
        at([0, 1, 2, 3, 0, 1, 2, 3, 4], [0] * 4 + [1] * 5),
    )
    cut = hw.SequenceInfo(whole_row.position[:, :6], whole_row.segment[:, :6])
    with pytest.raises(ValueError, match="first 3 tokens"):
        used(x[:, :6], cache=cache, sequence=cut)


def test_a_start_claimed_by_the_caller_is_ignored():
    """`start` is what the library knows; handed in from outside it says nothing, and a list will do
    for a tensor.
    """
    claimed = hw.SequenceInfo(
        torch.arange(3)[None] + 5, torch.zeros(1, 3, dtype=torch.int64), start=0
    )
    assert claimed.start is None
    x = numbers(2, 7, 10)
    assert torch.equal(
        hw.SequenceInfo.from_batch(x, segments=[[0] * 7] * 2).position, torch.arange(7).expand(2, 7)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_positions_of_small_types_are_positions(dtype: torch.dtype):
    """A window reaches back by subtraction, which small unsigned numbers cannot take."""
    for options in (
        {"pattern": "window(3)"},
        {"pattern": "causal()", "modifiers": (hw.parts.Shaw(reach=2), hw.parts.Alibi())},
    ):
        used, x = layer(**options), numbers(2, 7, 10)
        small = hw.SequenceInfo(torch.arange(7, dtype=dtype)[None], torch.zeros(1, 7, dtype=dtype))
        torch.testing.assert_close(used(x, sequence=small), used(x), rtol=0, atol=1e-12)
        cache = used.cache(batch=2, capacity=9)
        packed = hw.SequenceInfo.from_batch(x, segments=torch.zeros(2, 7, dtype=torch.int32))
        torch.testing.assert_close(
            used(x, sequence=packed, cache=cache), used(x), rtol=0, atol=1e-12
        )


def test_segments_may_be_any_numbers():
    far = torch.tensor([[0, 2**61, 2**62]])
    assert hw.SequenceInfo(torch.tensor([[5, 5, 2**32 - 1]]), far).count == 3
    used, x = layer(pattern="causal()"), numbers(1, 3, 10)
    cache = used.cache(batch=1, capacity=9)
    used(x, sequence=hw.SequenceInfo(torch.zeros(1, 3, dtype=torch.int64), far), cache=cache)
    with pytest.raises(ValueError, match="went back"):
        used(x[:, :1], sequence=at([0], [7]), cache=cache)


def test_a_state_keeps_sums_that_its_inputs_could_not():
    spec = hw.design(
        model=16,
        heads=2,
        pattern="causal",
        similarity=hw.parts.FeatureMap(),
        normaliser=hw.parts.SumNormaliser(),
    )
    used = hw.Attention(spec).to(torch.bfloat16).eval()
    x = torch.randn(1, 300, 16).to(torch.bfloat16)
    cache = used.cache(batch=1, capacity=1)
    with torch.no_grad():
        steps = torch.cat([used(x[:, t : t + 1], cache=cache) for t in range(300)], 1)
        truth = hw.Attention(spec).double()
        truth.load_state_dict({name: weight.double() for name, weight in used.state_dict().items()})
        truth = truth(x.double())
    error, usual = ((y.double() - truth)[:, -50:].abs().mean() for y in (steps, used(x)))
    assert error <= 2 * usual


@pytest.mark.parametrize("kind", ["plain", "ring"])
def test_caches_work_under_autocast(kind: str):
    used = hw.Attention(base(pattern="causal()" if kind == "plain" else "window(3)"))
    x = torch.randn(2, 7, 10)
    cache = used.cache(batch=2, capacity=9)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = used(x)
        first = used(
            x[:, :3], cache=cache, sequence=hw.SequenceInfo.from_batch(x[:, :3], lengths=[3, 3])
        )
        rest = [used(x[:, 3:5], cache=cache), *(used(x[:, t : t + 1], cache=cache) for t in (5, 6))]
    torch.testing.assert_close(torch.cat([first, *rest], 1), whole, rtol=0.05, atol=0.05)


def test_only_distances_matter_however_far_out():
    """In float32 too: an angle is worked out in float64 before it is rounded."""
    used = hw.Attention(base(pattern="causal()", modifiers=(hw.parts.Rotary(),)))
    x, place = torch.randn(1, 7, 10), torch.arange(7)[None]
    far = hw.SequenceInfo(place + 2**24, torch.zeros_like(place))
    torch.testing.assert_close(used(x, sequence=far), used(x), rtol=1e-4, atol=1e-5)
