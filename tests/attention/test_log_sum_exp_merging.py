"""Outputs over slices of the keys, merged by log-sum-exp, equal the output over all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw

BATCH, TOKENS, SOURCE, WIDTH = 2, 7, 17, 13
SPLITS = [(8, 9), (5, 1, 11), (17, 0), (3, 7, 7)]
SPECS = {
    "plain": {},
    "grouped": {"kv": 2, "vdim": 5},
    "one key head": {"kv": 1},
    "alibi": {"modifiers": (hw.parts.Alibi(),), "kv": 3},
    "rotary, window both ways": {
        "modifiers": (hw.parts.Rotary(),),
        "pattern": "window(9, after=4)",
    },
    "shaw": {"modifiers": (hw.parts.Shaw(reach=3),)},
    "softcap after t5": {"modifiers": (hw.parts.T5Bias(buckets=8, reach=9), hw.parts.Softcap(1.5))},
    "talking scores": {"modifiers": (hw.parts.TalkingHeads(),)},
    "values of places": {"modifiers": (hw.parts.ShawValues(reach=3),)},
    "gates": {"modifiers": (hw.parts.HeadGate(), hw.parts.OutputGate())},
    "latent": {
        "project": hw.parts.MLAProjection(rank=8, rope=2),
        "modifiers": (hw.parts.Rotary(),),
    },
    "causal": {"pattern": "causal()"},
    "sinks": {"pattern": "window(3) | first(2)", "kv": 2},
}


def built(**options: object) -> hw.Attention:
    layer = hw.Attention(
        hw.design(**({"model": 10, "heads": 6, "dim": 4, "source": WIDTH} | options))
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def read(layer: hw.Attention, x: Tensor, keep: object, **call: object) -> tuple[Tensor, Tensor]:
    """o_BTOV and the log-sum-exp of its scores, l_BTO."""
    probe = hw.Probe("lse", "heads")
    layer.head_outputs(x, source=keep, probe=probe, **call)
    return probe.tensors["heads"], probe.tensors["lse"].transpose(1, 2)


def merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """sum over parts of o exp(l), over the sum of exp(l); where no part read anything, nothing."""
    top = torch.stack([lse for _, lse in parts]).amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.stack([(lse - top).exp() for _, lse in parts]).sum(0)
    above = torch.stack([o * (lse - top).exp()[..., None] for o, lse in parts]).sum(0)
    return above / total.masked_fill(total == 0, 1.0)[..., None]


def in_parts(
    layer: hw.Attention, x: Tensor, z: Tensor, at: hw.SequenceInfo, sizes: tuple[int, ...]
) -> list[object]:
    """The memory cut into slices, each remembered on its own with the positions it has in the
    whole.
    """
    first, slices = 0, []
    for size in sizes:
        last = first + size
        position, segment = at.position[:, first:last], at.segment[:, first:last]
        slices.append(
            layer.project_source(z[:, first:last], sequence=hw.SequenceInfo(position, segment))
        )
        first = last
    return slices


def check_merges(
    layer: hw.Attention, sizes: tuple[int, ...], at: hw.SequenceInfo, **call: object
) -> list[Tensor]:
    """One pass over the whole memory equals the merge of passes over its slices; gives the slices'
    lse.
    """
    x, z = numbers(BATCH, TOKENS, 10), numbers(BATCH, SOURCE, WIDTH)
    whole, lse = read(layer, x, layer.project_source(z, sequence=at), **call)
    parts = [read(layer, x, keep, **call) for keep in in_parts(layer, x, z, at, sizes)]
    torch.testing.assert_close(merged(parts), whole, rtol=0, atol=1e-11)
    together = torch.stack([part for _, part in parts]).logsumexp(0)
    torch.testing.assert_close(together, lse, rtol=0, atol=1e-11)
    assert torch.isfinite(whole).all()
    return [part for _, part in parts]


@pytest.mark.parametrize(
    ("name", "sizes"), [(name, SPLITS[n % 4]) for n, name in enumerate(SPECS)], ids=str
)
def test_slices_merge(name: str, sizes: tuple[int, ...]):
    check_merges(built(**SPECS[name]), sizes, hw.SequenceInfo.contiguous(0, SOURCE, "cpu"))


def test_slices_of_the_sequence_itself_merge():
    """Self-attention's own keys, handed over in parts."""
    layer = built(source=10, pattern="causal()", modifiers=(hw.parts.Alibi(),), kv=2)
    x = numbers(BATCH, TOKENS, 10)
    parts = [
        read(layer, x, keep)
        for keep in in_parts(layer, x, x, hw.SequenceInfo.contiguous(0, TOKENS, "cpu"), (3, 2, 2))
    ]
    torch.testing.assert_close(merged(parts), layer.head_outputs(x), rtol=0, atol=1e-11)


def test_a_slice_without_allowed_keys():
    """Under a causal pattern the early queries see none of the last slice: lse minus infinity,
    weight zero.
    """
    lse = check_merges(
        built(pattern="causal()"), (5, 12), hw.SequenceInfo.contiguous(0, SOURCE, "cpu")
    )
    assert (lse[1][:, :5] == -torch.inf).all()
    assert torch.isfinite(lse[1][:, 5:]).all()
    assert torch.isfinite(lse[0]).all()


def test_a_query_without_allowed_keys_in_any_slice():
    """Padding asks no one: minus infinity in every slice, zero in the merge."""
    layer, x = built(kv=2), numbers(BATCH, TOKENS, 10)
    z, at = numbers(BATCH, SOURCE, WIDTH), hw.SequenceInfo.contiguous(0, SOURCE, "cpu")
    queries = hw.SequenceInfo.from_batch(x, lengths=[TOKENS, 4])
    parts = [read(layer, x, keep, sequence=queries) for keep in in_parts(layer, x, z, at, (8, 9))]
    assert all((lse[1, 4:] == -torch.inf).all() for _, lse in parts)
    assert (merged(parts)[1, 4:] == 0).all()
    torch.testing.assert_close(
        merged(parts),
        read(layer, x, layer.project_source(z), sequence=queries)[0],
        rtol=0,
        atol=1e-11,
    )


def test_slices_with_padding_merge():
    """A slice may be all padding for one row and whole for another."""
    z = numbers(BATCH, SOURCE, WIDTH)
    lse = check_merges(built(vdim=5), (6, 11), hw.SequenceInfo.from_batch(z, lengths=[SOURCE, 5]))
    assert (lse[1][1] == -torch.inf).all()
    assert torch.isfinite(lse[1][0]).all()


def test_the_log_sum_exp_is_that_of_the_scores_read():
    layer, x = built(source=10, pattern="window(3)", kv=3), numbers(BATCH, TOKENS, 10)
    probe = hw.Probe("scores", "lse")
    layer(x, probe=probe)
    for t in range(TOKENS):
        read_here = probe.tensors["scores"][:, :, t, max(0, t - 2) : t + 1]
        torch.testing.assert_close(
            probe.tensors["lse"][:, :, t], read_here.exp().sum(-1).log(), rtol=0, atol=1e-12
        )
