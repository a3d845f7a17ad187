"""Calls of every kernel at odd sizes, run as a script in a process of its own, where memory errors
show: every tensor ends right before a page that cannot be read or written, then begins right behind
one, so an access outside ends the process.

`--plant NAME...` runs wrong calls from `PLANTED` instead, each in a fork, and prints how each ends.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels import (
    PagedDecodeOptions,
    attend_paged,
    head_mixing,
    linear,
    multiply_small_batch,
    row_normalisers,
)
from headwise.kernels.flash_attention import attend_key_ranges
from headwise.kernels.launch import matrix_table

# --- Guard pages ----------------------------------------------------------------------------------

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
SCRATCH_ALIGNMENT = 64


def allocate_guarded(size: int, alignment: int, at_end: bool) -> int:
    """Return the address of `size` bytes between two pages without access, next to the second or to
    the first.
    """
    page = mmap.PAGESIZE
    body = -(-size // page) * page
    begin = LIBC.mmap(
        None,
        body + 2 * page,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        -1,
        0,
    )
    assert begin not in (None, 2**64 - 1), "mmap failed"
    for guard in (begin, begin + page + body):
        assert LIBC.mprotect(guard, page, 0) == 0, "mprotect failed"  # 0 is PROT_NONE
    return begin + page + ((body - size) // alignment * alignment if at_end else 0)


class GuardedMemory:
    """Copies of tensors in guarded memory; while it is entered, torch allocates there too."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.replaced: list[tuple[Any, str, Any]] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the tensor, contiguous, in guarded memory."""
        dense = PLAIN_CONTIGUOUS(tensor)
        size = dense.numel() * dense.itemsize
        if not size:
            return dense
        alignment = SCRATCH_ALIGNMENT if dense.dtype == torch.uint8 else dense.itemsize
        address = allocate_guarded(size, alignment, self.at_end)
        memory = (ctypes.c_char * size).from_address(address)
        guarded = torch.frombuffer(memory, dtype=dense.dtype).view(dense.shape)
        return guarded.copy_(dense)

    def __enter__(self) -> GuardedMemory:
        creators = [
            *((torch, name) for name in ("empty", "empty_like", "zeros_like", "arange", "tensor")),
            *((Tensor, name) for name in ("new_empty", "new_zeros", "contiguous")),
            (F, "pad"),
        ]
        for owner, name in creators:
            plain = getattr(owner, name)
            self.replaced.append((owner, name, plain))
            setattr(owner, name, self.guarding(plain))
        return self

    def __exit__(self, *error: Any) -> None:
        for owner, name, plain in self.replaced:
            setattr(owner, name, plain)

    def guarding(self, create: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that returns what `create` returns, in guarded memory."""
        return lambda *args, **kwargs: self.copy(create(*args, **kwargs))


PLAIN_CONTIGUOUS = Tensor.contiguous
Place = Callable[[Tensor], Tensor]


# --- Calls ----------------------------------------------------------------------------------------


def sample(place: Place, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers in a place."""
    return place(torch.randn(*shape, dtype=torch.float64).to(dtype))


def call_small_batch_ops(place: Place, dtype: torch.dtype) -> None:
    """Products of a few tokens."""
    for tokens, width, rows in ((1, 16, (1,)), (2, 80, (5, 3)), (5, 112, (33, 130))):
        matrices = [sample(place, n, width, dtype=dtype) for n in rows]
        multiply_small_batch(sample(place, tokens, width, dtype=dtype), matrices)


ROW_SIZES = ((1, 1, 1, 1, 1), (2, 3, 4, 17, 13), (1, 2, 3, 48, 64), (1, 2, 5, 331, 80))


def call_row_normalisers(place: Place, dtype: torch.dtype) -> None:
    """Softmax and entmax, forward and backward."""
    call_softmax(place, dtype)
    for batch, heads, queries, keys, width in ROW_SIZES:
        for scores, mask in sample_scores(place, dtype, batch, heads, queries, keys):
            value_heads = [h % 2 for h in range(heads)]
            for alpha in (1.3, 1.5, 2.5):
                alphas = place(torch.full((heads,), alpha, dtype=dtype))
                w, state = row_normalisers.masked_entmax(scores, mask, alphas, None, [])
                row_normalisers.masked_entmax_backward(w, [scores, mask, alphas, state], [])
                v = sample(place, batch, 2, keys, width, dtype=dtype)
                o, state = row_normalisers.masked_entmax(scores, mask, alphas, v, value_heads)
                row_normalisers.masked_entmax_backward(
                    o, [scores, mask, alphas, state, v], value_heads
                )


def call_softmax(place: Place, dtype: torch.dtype) -> None:
    """Softmax."""
    for batch, heads, queries, keys, _ in ROW_SIZES:
        for scores, mask in sample_scores(place, dtype, batch, heads, queries, keys):
            row_normalisers.masked_softmax(scores, mask)


def sample_scores(place: Place, dtype: torch.dtype, *shape: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scores [B, H, T, S] with all keys allowed, then with some."""
    batch, _, queries, keys = shape
    s = 3 * sample(lambda t: t, *shape, dtype=dtype)
    for allowed in (torch.ones(1, 1, 1, keys) > 0, torch.rand(batch, 1, queries, keys) > 0.4):
        yield place(s), place(allowed)


def call_head_mixing(place: Place, dtype: torch.dtype) -> None:
    """Dynamically composed heads, forward and backward."""
    for batch, heads, queries, keys, q_ranks, k_ranks in (
        (1, 2, 1, 1, 1, 1),
        (2, 4, 3, 17, 2, 1),
        (1, 4, 2, 130, 0, 2),
    ):
        for group, extra in ((heads, 1), (2, 0)):
            outputs = heads + extra * (group == heads)
            head_of_output = place(torch.arange(outputs) % heads)
            shapes = (
                (batch, queries, q_ranks, heads),
                (batch, queries, q_ranks, outputs),
                (batch, queries, outputs),
                (batch, k_ranks, heads, keys),
                (batch, k_ranks, outputs, keys),
                (batch, min(k_ranks, 1), outputs, keys),
            )
            factors = [sample(place, *shape, dtype=dtype) for shape in shapes]
            a = sample(place, batch, heads, queries, keys, dtype=dtype)
            mixed = head_mixing.mix_heads_by_factors(a, head_of_output, group, factors)
            head_mixing.mix_heads_by_factors_backward(mixed, a, head_of_output, group, factors)


def call_flash_attention(place: Place, dtype: torch.dtype) -> None:
    """All queries by key ranges or causally, and some queries only; forward and backward."""
    ops = torch.ops.headwise
    for batch, queries, heads, keys, groups, dim, vdim in (
        (1, 1, 1, 1, 1, 1, 1),
        (2, 5, 4, 7, 2, 5, 19),
        (1, 67, 3, 131, 1, 33, 16),
    ):
        q = sample(place, batch, queries, heads, dim, dtype=dtype)
        k, v = (sample(place, batch, keys, groups, n, dtype=dtype) for n in (dim, vdim))
        first = torch.randint(0, keys, (batch, queries))
        end = (first + torch.randint(0, keys + 1, (batch, queries))).clamp(max=keys)
        for ranges, ahead in (
            (None, None),
            (None, keys - queries),
            (place(torch.stack([first, end], -1)), None),
        ):
            attend_key_ranges(q, k, v, ranges, ahead, 0.4)
            options = ranges, ahead, [], 0.4, None
            o, lse = ops.flash_attention(q, k, v, *options)
            ops.flash_attention_backward(o, [q, k, v, o, lse], *options)
    rows = torch.tensor([0, 2, 3, 7])  # four of the five queries with two heads each
    items = torch.tensor([[0, 0, 4, 0, 5, 0]])
    tables = [place(t) for t in (rows, items, items)]
    ends = place(torch.tensor([[[0, 3], [1, 4], [0, 0], [2, 5], [0, 5]]]))
    q, k, v = (sample(place, 1, n, heads, 9, dtype=dtype) for n, heads in ((5, 2), (5, 1), (5, 1)))
    o, lse = ops.flash_attention(q, k, v, ends, None, tables, 0.5, 1)
    ops.flash_attention_backward(o, [q, k, v, o, lse], ends, None, tables, 0.5, 1)


def call_paged_decode(place: Place, dtype: torch.dtype) -> None:
    """Rows with and without shared prefixes, bias, sink, softcap and int8 scales."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    for batch, heads, groups, dim, vdim, slots, spans in (
        (1, 1, 1, 16, 16, 4, 1),
        (3, 6, 2, 24, 7, 5, 3),
        (8, 10, 2, 16, 20, 16, 20),
    ):
        pages = batch * spans + 1
        k, v = (
            place((40 * torch.randn(pages, groups, slots, n)).clamp(-127, 127).to(dtype))
            for n in (dim, vdim)
        )
        table = torch.stack(
            [
                torch.arange(pages - 1),
                torch.zeros(pages - 1).long(),
                torch.full((pages - 1,), slots),
            ],
            -1,
        )
        own = table.view(batch, spans, 3).clone()
        own[:, -1, 2] = torch.randint(0, slots + 1, (batch,))
        shared = own.clone()
        shared[1:, : spans // 2 + 1] = shared[:1, : spans // 2 + 1]
        q = sample(place, batch, heads, dim, dtype=exact if dtype == torch.int8 else dtype)
        scales = {name: place(torch.rand(pages, groups, slots)) for name in ("k_scale", "v_scale")}
        options: dict[str, Any] = scales if dtype == torch.int8 else {}
        bias, sink = (
            sample(place, batch, heads, spans * slots, dtype=exact),
            sample(place, heads, dtype=exact),
        )
        for spans_BN3 in (own, shared):
            for more in ({}, {"bias": bias, "sink": sink, "softcap": 3.0}):
                attend_paged(
                    q,
                    k,
                    v,
                    place(spans_BN3),
                    scale=0.3,
                    options=PagedDecodeOptions(**options, **more),
                )
        if dtype != torch.int8:
            attend_paged(q, k[:batch], v[:batch], None, scale=0.3)


FLOATS = (torch.float64, torch.float32)
CALLS: list[tuple[Callable[[Place, torch.dtype], None], tuple[torch.dtype, ...]]] = [
    (call_small_batch_ops, (torch.float32, torch.bfloat16)),
    (call_row_normalisers, FLOATS),
    (call_head_mixing, FLOATS),
    (call_flash_attention, FLOATS),
    (call_paged_decode, (*FLOATS, torch.bfloat16, torch.int8)),
]


# --- Wrong calls, which the checks must catch -----------------------------------------------------


def multiply_tokens(num_tokens: int, x: Tensor, y: Tensor) -> None:
    """Multiply a number of tokens with a row of ones, whatever the shapes of `x` and `y` are."""
    matrix = torch.ones(1, 16)
    args = linear.GemvArgs.make(
        num_items=1,
        scratch=torch.empty(20 * 16 * 4, dtype=torch.uint8),
        scratch_bytes=20 * 16 * 4,
        rows_per_block=4,
        x=x,
        y=y,
        num_tokens=num_tokens,
        width=16,
        num_rows=1,
        matrices=matrix_table([matrix]),
    )
    args.tensors += [matrix]
    linear.GEMV_KERNELS.run_kernel("gemv", x.dtype, args, 1)


def read_behind_end(place: Place) -> None:
    """Multiply three tokens of two."""
    multiply_tokens(3, place(torch.randn(2, 16)), torch.empty(16, 1))


def write_behind_end(place: Place) -> None:
    """Write 17 products to a tensor of 16."""
    multiply_tokens(17, torch.randn(17, 16), place(torch.empty(16, 1)))


PLANTED = {function.__name__: function for function in (read_behind_end, write_behind_end)}


def check_with_guard_pages(call: Callable[[Place, torch.dtype], None], dtype: torch.dtype) -> None:
    """Run a call with every tensor in front of a guard page, then with every tensor behind one."""
    for at_end in (True, False):
        torch.manual_seed(0)
        with GuardedMemory(at_end) as memory:
            call(memory.copy, dtype)


def report_planted(name: str) -> None:
    """Run a wrong call in a fork of this process, and print its error or the
    signal that ends it.
    """
    child = os.fork()
    if child == 0:
        try:
            check_with_guard_pages(lambda place, _: PLANTED[name](place), torch.float32)
            print(f"{name} ended", flush=True)
        finally:
            os._exit(0)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print(f"{name} ended with {status}", flush=True)


def main() -> None:
    """Run all calls, or planted ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", choices=PLANTED, nargs="+")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if options.plant:
        for name in options.plant:
            report_planted(name)
        return
    for call, dtypes in CALLS:
        for dtype in dtypes:
            check_with_guard_pages(call, dtype)
    print("no access outside")


if __name__ == "__main__":
    main()
