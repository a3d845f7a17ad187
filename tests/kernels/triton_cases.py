"""Calls of the Triton kernels: random inputs of every option, small and odd in size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.kernels import head_mixing_triton, open_query_attention, row_normaliser_triton
from headwise.kernels.head_statistics import (
    ScoreInputs,
    TokenInputs,
    head_statistics,
    uniform_statistics,
)
from headwise.kernels.triton_support import IS_INTERPRETED, triton

DEVICE = "cpu" if IS_INTERPRETED or not torch.cuda.is_available() else "cuda"
# marks of tests that run kernels
NEEDS_TRITON = (
    pytest.mark.skipif(triton is None, reason="Triton is not installed; run make triton"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not IS_INTERPRETED,
        reason="Triton is not interpreted and there is no GPU; run make triton",
    ),
)
HEADS = 2
KV_HEADS = (1, 0)
OPTIONS = ("causal", "full", "holes", "heads", "bias", "softcap", "sinks", "cross")


def random_tokens(num_queries: int, num_keys: int, is_self: bool) -> TokenInputs:
    """Tokens of few ids, some of them sinks, separators, punctuation or rare."""
    ids = torch.randint(0, 9, (num_keys,))
    is_sink = torch.rand(num_keys) < 0.1
    is_sink[0] = True
    is_separator = is_sink & (torch.rand(num_keys) < 0.5)
    flags = [is_sink, is_separator, ids == 3, (ids == 4) & ~is_sink]
    query_ids = ids if is_self else torch.randint(0, 9, (num_queries,))
    sampled = torch.linspace(0, num_queries - 1, min(num_queries, 64)).round().long()
    return TokenInputs(query_ids, ids, *flags, sampled)


def random_call(
    option: str, dtype: torch.dtype = torch.float32, count: int = 70, dim: int = 24
) -> tuple[ScoreInputs, TokenInputs]:
    """A call of one option."""
    num_queries = count // 2 if option == "cross" else count
    q = torch.randn(num_queries, HEADS, dim)
    k = torch.randn(count, 2, dim)
    k[count // 2] = k[count // 3]  # equal keys share the largest weight of some rows
    k[0] *= 2
    scores = ScoreInputs(
        q.to(dtype).to(DEVICE),
        k.to(dtype).to(DEVICE),
        KV_HEADS,
        2 * dim**-0.5,
        is_causal=option in ("causal", "bias", "sinks"),
    )
    changed: dict[str, Any] = {}
    if option == "softcap":
        changed["softcap"] = 3.0
    if option == "sinks":
        changed["sinks_H"] = torch.randn(HEADS)
    if option == "bias":
        far = torch.arange(count) - torch.arange(count)[:, None]
        changed["bias_HTS"] = -far.abs() * torch.rand(HEADS, 1, 1)
        changed["bias_HTS"][:, :, 7] = -torch.inf
    if option in ("holes", "heads"):
        heads = HEADS if option == "heads" else 1
        mask = torch.rand(heads, num_queries, count) < 0.6
        mask[:, 5] = False
        changed["mask_HTS"] = mask
    changed = {
        name: one.to(DEVICE) if isinstance(one, Tensor) else one for name, one in changed.items()
    }
    tokens = random_tokens(num_queries, count, is_self=option != "cross")
    if DEVICE != "cpu":
        moved = [one.to(DEVICE) for one in tokens]
        ids = moved[1] if tokens[0] is tokens[1] else moved[0]
        tokens = TokenInputs(ids, *moved[1:])
    return scores._replace(**changed), tokens


class MixedHeads:
    """Random heads and factors of queries and keys, in float64 on the CPU.

    `ranks` are those of queries and keys; `own` is the head of each output.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        ranks: tuple[int, int],
        groups: int = 1,
        own: Sequence[int] | None = None,
    ) -> None:
        batch, heads, queries, keys = shape
        self.own = torch.tensor(range(heads) if own is None else own)
        self.heads_per_group = heads // groups
        outputs = len(self.own)
        q_rank, k_rank = ranks
        shapes = [
            shape,
            (batch, queries, q_rank, heads),
            (batch, queries, q_rank, outputs),
            (batch, queries, outputs),
            (batch, k_rank, heads, keys),
            (batch, k_rank, outputs, keys),
            (batch, int(k_rank > 0), outputs, keys),
        ]
        self.tensors = [torch.randn(*one, dtype=torch.float64) for one in shapes]
        self.grad = torch.randn(batch, outputs, queries, keys, dtype=torch.float64)

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, int, list[Tensor]]:
        """Arguments of the kernels."""
        a, *factors = (one.to(DEVICE, dtype) for one in self.tensors)
        return a, self.own.to(DEVICE), self.heads_per_group, factors

    def backward(self, dtype: torch.dtype) -> list[Tensor]:
        """Gradients of the heads and of the six factors by the kernel."""
        grad = self.grad.to(DEVICE, dtype)
        return head_mixing_triton.mix_heads_backward(grad, *self.arguments(dtype))


def launches() -> dict[str, Callable[[], object]]:
    """Calls whose kernels have every option between them, at usual sizes of a head."""
    torch.manual_seed(0)
    plain = random_call("causal", torch.bfloat16, count=256, dim=128)
    every, tokens = random_call("bias", count=256, dim=128)
    mask = random_call("holes", count=256)[0].mask_HTS
    sinks = torch.zeros(HEADS, device=DEVICE)
    every = every._replace(is_causal=False, mask_HTS=mask, sinks_H=sinks, softcap=3.0)
    return {
        "plain": partial(head_statistics, *plain),
        "every option": partial(head_statistics, every, tokens),
        "uniform": partial(uniform_statistics, every, tokens),
        **mixing_launches(),
        **open_query_launches(),
        **entmax_launches(),
    }


def mixing_launches() -> dict[str, Callable[[], object]]:
    """Calls of heads mixed by the ranks of DCMHA, and by the largest ranks."""
    found: dict[str, Callable[[], object]] = {}
    for rank, dtype in ((2, torch.bfloat16), (head_mixing_triton.MAX_RANK, torch.float32)):
        mixed = MixedHeads((1, 8, 32, 128), (rank, rank))
        found[f"mix, rank {rank}"] = partial(head_mixing_triton.mix_heads, *mixed.arguments(dtype))
        found[f"mix backward, rank {rank}"] = partial(mixed.backward, dtype)
    return found


class OpenQueries:
    """Random queries, keys and values in float64 on the CPU, and the queries that are open.

    `shape` is batch, queries, keys, heads and key heads; `dims` are the channels of keys and
    values.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        dims: tuple[int, int],
        share: float,
        ahead: int = 0,
    ) -> None:
        batch, queries, keys, heads, kv_heads = shape
        dim, vdim = dims
        shapes = [(queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, vdim)]
        self.tensors = [torch.randn(batch, *one, dtype=torch.float64) for one in shapes]
        self.grad = torch.randn(batch, queries, heads, vdim, dtype=torch.float64)
        self.opened = torch.rand(batch, queries, heads) < share
        self.ahead = ahead
        self.scale = dim**-0.5

    def run(self, dtype: torch.dtype) -> list[Tensor]:
        """The outputs by the kernel, and the gradients of queries, keys and values."""
        options = self.opened.to(DEVICE), self.ahead, self.scale
        tensors = [one.to(DEVICE, dtype) for one in self.tensors]
        out, lse = open_query_attention.attend(*tensors, *options)
        grad = self.grad.to(DEVICE, dtype)
        gradients = open_query_attention.attend_backward(grad, [*tensors, out, lse], *options)
        return [out, *gradients]


def open_query_launches() -> dict[str, Callable[[], object]]:
    """Calls at usual widths of a head, and at the largest."""
    shape = (1, 128, 128, 4, 2)
    widths = (torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)
    return {
        f"open queries, {dtype}, {dim}": partial(OpenQueries(shape, (dim, dim), 0.5).run, dtype)
        for dtype, dim in widths
    }


def random_rows(
    shape: tuple[int, int, int, int], alpha: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, allowed keys and the alpha of each head, on the CPU; one query has no key."""
    batch, _, queries, keys = shape
    allowed = torch.rand(batch, 1, queries, keys) < 0.7
    allowed[0, :, -1] = False
    return 3 * torch.randn(shape), allowed, torch.tensor(alpha)


def run_entmax(s: Tensor, allowed: Tensor, alpha: Tensor, grad: Tensor) -> list[Tensor]:
    """Weights by the kernel, and gradients of scores and alpha."""
    tensors = [one.to(DEVICE) for one in (s, allowed, alpha)]
    weights, row_state = row_normaliser_triton.entmax(*tensors)
    gradients = row_normaliser_triton.entmax_backward(grad.to(DEVICE), *tensors, row_state)
    return [one.cpu() for one in (weights, *gradients)]


def entmax_launches() -> dict[str, Callable[[], object]]:
    """Rows of one block, and of several."""
    found: dict[str, Callable[[], object]] = {}
    for keys in (200, 5000):
        rows = random_rows((1, 2, 3, keys), (1.5, 2.5))
        found[f"entmax, {keys} keys"] = partial(run_entmax, *rows, rows[0])
    return found
