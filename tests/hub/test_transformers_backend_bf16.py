"""transformers' models on headwise in bfloat16, one token at a time, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.hub import transformers_backend

LOWEST = torch.finfo(torch.bfloat16).min
ROWS, HEADS, GROUPS, DIM = 3, 6, 2, 16


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def truth(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """What each head reads, in float64, its keys repeated."""
    each = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(each, 1) for t in (k, v))
    s = q.double() @ k.transpose(2, 3) * scale
    s = s if added is None else s + added.double()
    return (s.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("shown", ["all", "padded", "by head", "nothing"])
@pytest.mark.parametrize("keys", [1, 7, 130])
def test_one_query_reads_what_it_reads_in_double(keys, shown):
    q, k, v = drawn(0, ROWS, HEADS, 1, DIM), drawn(1, ROWS, GROUPS, keys, DIM), drawn(2, ROWS, GROUPS, keys, DIM)
    added = None
    if shown == "padded":
        added = torch.zeros(ROWS, 1, 1, keys, dtype=torch.bfloat16)
        added[1, ..., : keys // 2] = LOWEST
    elif shown == "by head":
        added = drawn(3, 1, HEADS, 1, keys)
    elif shown == "nothing":
        added = torch.full((ROWS, 1, 1, keys), LOWEST)
    with torch.no_grad():
        o, w = transformers_backend.attention_forward(nn.Module(), q, k, v, added, scaling=0.3)
        expected = truth(q, k, v, added if shown != "nothing" else added * 0, 0.3)
        each = HEADS // GROUPS
        theirs = F.scaled_dot_product_attention(
            q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), added, scale=0.3
        ).transpose(1, 2)
    assert w is None
    assert o.shape == (ROWS, 1, HEADS, DIM)
    off = float((o.double() - expected).abs().max())
    assert off <= 2 * float((theirs.double() - expected).abs().max()) + 2**-8


def test_large_scores_leave_numbers():
    q, k, v = drawn(0, ROWS, HEADS, 1, DIM) * 100, drawn(1, ROWS, GROUPS, 9, DIM) * 100, drawn(2, ROWS, GROUPS, 9, DIM)
    with torch.no_grad():
        o, _ = transformers_backend.attention_forward(nn.Module(), q, k, v, None, scaling=1.0)
    assert o.isfinite().all()
    assert (o.abs() <= v.abs().max()).all()


def test_no_key_is_repeated_and_no_fused_call_is_made(monkeypatch):
    """The fused call reads bfloat16 slowly where rows are few; with gradients it is made, for it keeps no scores."""
    calls: list[tuple[int, ...]] = []
    original = F.scaled_dot_product_attention

    def noting(q: Tensor, *rest, **how) -> Tensor:
        calls.append(tuple(q.shape))
        return original(q, *rest, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    q, k, v = drawn(0, ROWS, HEADS, 1, DIM), drawn(1, ROWS, GROUPS, 9, DIM), drawn(2, ROWS, GROUPS, 9, DIM)
    with torch.no_grad():
        transformers_backend.attention_forward(nn.Module(), q, k, v)
        transformers_backend.attention_forward(nn.Module(), q.float(), k.float(), v.float())
    transformers_backend.attention_forward(nn.Module(), q, k, v)
    assert calls == [(ROWS, GROUPS, HEADS // GROUPS, DIM)] * 2
