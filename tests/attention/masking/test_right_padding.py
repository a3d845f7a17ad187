"""Causal texts with padding behind them: each row equals the text alone, at lengths of several
blocks and chunks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.attention.backends import chunked_attention
from support.layer_cases import check_close

LENGTHS = (300, 129, 64, 1)
SPECS = {
    name: hw.design(preset=name, model=16, heads=4, pattern="causal")
    for name in ("mha", "gqa", "linear", "dcmha", "talking", "entmax", "moh", "forgetting")
}
SPECS["window"] = hw.design(model=16, heads=4, pattern="window(40) | first(2)")
SPECS["mixed window"] = hw.design(preset="talking", model=16, heads=4, pattern="window(40)")
SPECS["several patterns"] = hw.design(
    model=16, heads=4, pattern="perhead((causal(), window(40)), (0, 1, 1, 0))"
)
SPECS["later keys"] = hw.design(model=16, heads=4, pattern="full()")


def padded(x: Tensor) -> hw.SequenceInfo:
    return hw.SequenceInfo.from_batch(x, lengths=list(LENGTHS))


@pytest.mark.parametrize("name", SPECS)
def test_rows_equal_their_texts_alone(name: str):
    torch.manual_seed(0)
    layer = hw.Attention(SPECS[name]).double()
    x = torch.randn(len(LENGTHS), max(LENGTHS), 16, dtype=torch.float64, requires_grad=True)
    way = torch.randn_like(x)
    weights = [one for one in layer.parameters() if one.requires_grad]
    y = layer(x, sequence=padded(x))
    grads = torch.autograd.grad((y * way * padded(x).is_real[..., None]).sum(), [x, *weights])
    total = [torch.zeros_like(one) for one in weights]
    for row, length in enumerate(LENGTHS):
        text = x.detach()[row : row + 1, :length].requires_grad_()
        alone = layer(text)
        check_close(y[row, :length], alone[0], rtol=1e-10, atol=1e-11)
        own = torch.autograd.grad((alone * way[row, :length]).sum(), [text, *weights])
        check_close(grads[0][row, :length], own[0][0], rtol=1e-9, atol=1e-11)
        assert not grads[0][row, length:].any()
        total = [one + other for one, other in zip(total, own[1:], strict=True)]
    for one, other in zip(grads[1:], total, strict=True):
        check_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["mha", "gqa", "linear", "window"])
@pytest.mark.parametrize("value", [1e20, torch.inf, torch.nan])
def test_padding_reads_nothing_and_is_not_read(name: str, value: float):
    """Outputs are zero there, and what stands there changes no other output and no gradient."""
    torch.manual_seed(0)
    layer = hw.Attention(SPECS[name])
    x = torch.randn(len(LENGTHS), max(LENGTHS), 16)
    sequence = padded(x)
    results: list[list[Tensor]] = []
    for filling in (0.0, value):
        own = x.masked_fill(~sequence.is_real[..., None], filling).requires_grad_()
        y = layer(own, sequence=sequence)
        (y[sequence.is_real] ** 2).sum().backward()
        assert own.grad is not None
        results.append([y[sequence.is_real], own.grad[sequence.is_real]])
        assert not y[~sequence.is_real].any()
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)


def test_torch_gets_a_causal_flag_and_no_mask(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    attend = F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any) -> Tensor:
        seen.append((mask, options["is_causal"]))
        return attend(q, k, v, mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    x = torch.randn(len(LENGTHS), max(LENGTHS), 16)
    hw.Attention(SPECS["mha"], backend="sdpa")(x, sequence=padded(x))
    assert seen == [(None, True)]


def test_blocks_of_queries_read_no_keys_behind_them(monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []
    slice_inputs = chunked_attention.slice_inputs

    def record(inputs: Any, block: Any) -> Any:
        counts.append(sum(map(len, block.keys)))
        return slice_inputs(inputs, block)

    monkeypatch.setattr(chunked_attention, "slice_inputs", record)
    x = torch.randn(len(LENGTHS), max(LENGTHS), 16)
    with torch.no_grad():
        hw.Attention(SPECS["talking"], backend="chunked")(x, sequence=padded(x))
    assert counts == [128, 256, 300]
