"""Calls of every registered operation of the kernels with operands that do not fit, run as a script
in its own process.

    python -m kernels.bad_operands [--skip N]   prints the name of each call before it, and what it raised after it

An operand that reaches a kernel unchecked may end the process, so the caller of the script reads
how far it came.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import (
    PagedDecodeOptions,
    attend_paged,
    flash_attention,
    head_mixing,
    multiply_small_batch,
    row_normalisers,
)

# importing them registers operations
REGISTERED_BY = (flash_attention, head_mixing, row_normalisers)
OPS = torch.ops.headwise
FAR = 2**40  # an index far outside


class Call(NamedTuple):
    """One operation and operands that fit it."""

    run: Callable[..., Any]  # takes the tensors by name
    tensors: dict[str, Tensor]
    free_axes: tuple[str, ...] = ()  # "name.axis": axes whose size may change, or "name.dtype", ...
    tables: tuple[str, ...] = ()  # tensors of indices


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _ints(*rows: Any) -> Tensor:
    return torch.tensor(rows)


def _head_mixing() -> Iterator[Call]:
    factors = {
        "qs": _random(2, 3, 2, 4),
        "qt": _random(2, 3, 2, 5),
        "qg": _random(2, 3, 5),
        "ks": _random(2, 3, 4, 17),
        "kt": _random(2, 3, 5, 17),
        "kg": _random(2, 1, 5, 17),
    }
    tensors = {"a": _random(2, 4, 3, 17), "head_of_output": _ints(0, 1, 2, 3, 1)} | factors
    tables = ("head_of_output",)
    yield Call(
        lambda a, head_of_output, **f: OPS.head_mixing(a, head_of_output, 4, [*f.values()]),
        tensors,
        (),
        tables,
    )
    yield Call(
        lambda grad, a, head_of_output, **f: OPS.head_mixing_backward(
            grad, a, head_of_output, 4, [*f.values()]
        ),
        {"grad": _random(2, 5, 3, 17)} | tensors,
        (),
        tables,
    )


def _row_normalisers() -> Iterator[Call]:
    s, allowed, v = _random(2, 3, 4, 17), torch.rand(2, 1, 4, 17) > 0.4, _random(2, 2, 17, 13)
    alpha = torch.full((3,), 1.5)
    _, state = OPS.masked_entmax(s, allowed, alpha, v, [0, 1, 1])
    yield Call(
        lambda s, allowed: OPS.masked_softmax(s, allowed), {"s": s, "allowed": allowed}, ("s.1",)
    )
    tensors = {"s": s, "allowed": allowed, "alpha": alpha}
    yield Call(lambda s, allowed, alpha: OPS.masked_entmax(s, allowed, alpha, None, []), tensors)
    yield Call(
        lambda s, allowed, alpha, v, heads: OPS.masked_entmax(s, allowed, alpha, v, heads.tolist()),
        tensors | {"v": v, "heads": _ints(0, 1, 1)},
        ("v.3", "v.1", "heads.dtype"),
        ("heads",),
    )
    yield Call(
        lambda grad, s, allowed, alpha, state, v, heads: OPS.masked_entmax_backward(
            grad, [s, allowed, alpha, state, v], heads.tolist()
        ),
        {"grad": _random(2, 3, 4, 13)}
        | tensors
        | {"state": state, "v": v, "heads": _ints(0, 1, 1)},
        ("v.1", "heads.dtype", "s.zeros", "alpha.zeros"),
        ("heads",),
    )


def _flash_attention() -> Iterator[Call]:
    q, k, v = _random(2, 5, 4, 9), _random(2, 7, 2, 9), _random(2, 7, 2, 13)
    ends = torch.stack([torch.zeros(2, 5).long(), torch.full((2, 5), 7)], -1)
    qkv, saved = {"q": q, "k": k, "v": v}, {"o": _random(2, 5, 4, 13), "lse": _random(2, 5, 4)}
    grad = {"grad": _random(2, 5, 4, 13)}
    yield Call(
        lambda q, k, v: OPS.flash_attention(q, k, v, None, 2, [], 0.4, None), qkv, ("q.1", "v.3")
    )
    yield Call(
        lambda q, k, v, ends: OPS.flash_attention(q, k, v, ends, None, [], 0.4, None),
        qkv | {"ends": ends},
        ("v.3",),
        ("ends",),
    )
    yield Call(
        lambda grad, q, k, v, o, lse, ends: OPS.flash_attention_backward(
            grad, [q, k, v, o, lse], ends, None, [], 0.4, None
        ),
        grad | qkv | saved | {"ends": ends},
        (),
        ("ends",),
    )
    rows = {"rows": _ints(0, 4, 8, 12), "ranges": ends[:1].clone()}
    forward = _ints([0, 0, 2, 0, 7, 0], [0, 2, 2, 0, 7, 0])
    backward = _ints(*[[n, n, 1, 0, 7, 0] for n in range(4)])
    tables = ("rows", "ranges", "items")
    yield Call(
        lambda q, k, v, rows, ranges, items: OPS.flash_attention(
            q, k, v, ranges, None, [rows, items, backward], 0.5, 1
        ),
        qkv | rows | {"items": forward},
        ("v.3", "ranges.0", "items.0"),
        tables,
    )

    def run_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **tables: Tensor
    ) -> Any:
        rows, ranges, items = tables.values()
        return OPS.flash_attention_backward(
            grad, [q, k, v, o, lse], ranges, None, [rows, forward, items], 0.5, 1
        )

    items = {"items": backward}
    yield Call(run_backward, grad | qkv | saved | rows | items, ("ranges.0",), tables)


def _paged_decode() -> Iterator[Call]:
    tensors = {"q": _random(3, 4, 16), "k": _random(5, 2, 4, 16), "v": _random(5, 2, 4, 7)}
    spans = {"spans": _ints([[0, 0, 4], [1, 0, 2]], [[2, 0, 3], [0, 0, 1]], [[3, 1, 3], [4, 2, 4]])}
    more = {"bias": _random(3, 4, 8), "sink": _random(4)}
    empty = torch.empty(0)
    yield Call(
        lambda q, k, v, spans, bias, sink: OPS.paged_decode(
            q, k, v, spans, [bias, sink, empty, empty], 0.5, 0.0
        ),
        tensors | spans | more,
        ("v.3", "q.dtype", "bias.dtype", "sink.dtype"),
        ("spans",),
    )
    pages = {name: (40 * t).to(torch.int8) for name, t in list(tensors.items())[1:]}
    scales = {"k_scale": torch.rand(5, 2, 4), "v_scale": torch.rand(5, 2, 4)}
    yield Call(
        lambda q, k, v, spans, k_scale, v_scale: OPS.paged_decode(
            q, k, v, spans, [empty, empty, k_scale, v_scale], 0.5, 0.0
        ),
        {"q": tensors["q"]} | pages | spans | scales,
        ("v.3", "q.dtype", "spans.1"),
        ("spans",),
    )

    def decode(
        q: Tensor, k: Tensor, v: Tensor, spans: Tensor, bias: Tensor, sink: Tensor
    ) -> Tensor:
        return attend_paged(
            q, k, v, spans, scale=0.5, options=PagedDecodeOptions(bias=bias, sink=sink)
        )[0]

    yield Call(
        decode, tensors | spans | more, ("v.3", "q.dtype", "bias.dtype", "sink.dtype"), ("spans",)
    )


def _small_batch() -> Iterator[Call]:
    tensors = {"x": _random(2, 32), "w": _random(5, 32), "u": _random(3, 32)}
    free = ("x.0", "w.0", "u.0")
    yield Call(lambda x, w, u: OPS.small_batch_matmul(x, [w, u]), tensors, free)
    yield Call(lambda x, w, u: multiply_small_batch(x, [w, u]), tensors, free)


GROUPS: list[Callable[[], Iterator[Call]]] = [
    _head_mixing,
    _row_normalisers,
    _flash_attention,
    _paged_decode,
    _small_batch,
]

# --- Operands that do not fit ---------------------------------------------------------------------


def change_axis(tensor: Tensor, axis: int) -> Tensor:
    """Return a tensor with one element less along an axis, or one more along an
    axis of one or two.
    """
    size = tensor.shape[axis]
    if size > 2:
        return tensor.narrow(axis, 0, size - 1).contiguous()
    return torch.cat([tensor, torch.zeros_like(tensor.narrow(axis, 0, 1))], axis)


def release_memory(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage has no memory."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def shorten_memory(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage ends before its last element."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(copy.untyped_storage().nbytes() - copy.itemsize)
    return copy


OTHER_DTYPES = {
    torch.float32: torch.float16,
    torch.int64: torch.int32,
    torch.bool: torch.uint8,
    torch.int8: torch.uint8,
}


def make_bad_operands(call: Call, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the operands that do not fit in the place of one that does, each with what is wrong."""
    tensor = call.tensors[name]
    for axis in range(tensor.dim()):
        if f"{name}.{axis}" not in call.free_axes:
            yield f"axis {axis}", change_axis(tensor, axis)
    if f"{name}.rank" not in call.free_axes:
        yield "one axis less", tensor[0]
        yield "one axis more", tensor[None]
    if f"{name}.dtype" not in call.free_axes:
        yield "dtype", tensor.to(OTHER_DTYPES.get(tensor.dtype, torch.float32))
        yield "complex", tensor.to(torch.complex64)
    yield "sparse", tensor.to_sparse()
    if name != "heads":  # a list of numbers to the operation
        yield "no memory", release_memory(tensor)
        yield "short memory", shorten_memory(tensor)
    if name in call.tables:
        for number in (-1, 997, FAR, -FAR):
            for index in range(tensor.shape[-1]):
                if name == "items" and index == 5 and "grad" not in call.tensors:
                    continue  # the part of the keys, which the forward pass does not read
                bad = tensor.clone()
                bad[..., -1 if tensor.dim() == 1 else index] = number
                if not is_empty_span(name, bad):
                    yield f"{number} in place {index}", bad


def is_empty_span(name: str, spans: Tensor) -> bool:
    """Return whether a block table is valid, because its spans are empty."""
    return name == "spans" and bool((spans[..., 1] >= spans[..., 2]).all())


EQUAL_PROBLEMS = ("negative bit", "no numbers", "strides")


def make_equal_operands(call: Call, name: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield tensors in unusual memory, each with a plain tensor of the same numbers."""
    tensor = call.tensors[name]
    yield EQUAL_PROBLEMS[2], torch.stack([tensor, tensor.roll(1)], -1)[..., 0], tensor
    if tensor.dtype == torch.float32:
        yield EQUAL_PROBLEMS[0], torch._neg_view(-tensor), tensor
    if tensor.dtype == torch.float32 and f"{name}.zeros" not in call.free_axes:
        yield EQUAL_PROBLEMS[1], torch._efficientzerotensor(tensor.shape), torch.zeros_like(tensor)


def outcome_of(run: Callable[[], Any]) -> str:
    """Return what a call raised, or "accepted"."""
    try:
        run()
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "accepted"


def equality_of(call: Call, name: str, special: Tensor, plain: Tensor) -> str:
    """Return whether a call with a special tensor returns what it does with a plain one."""
    expected = call.run(**call.tensors | {name: plain})
    try:
        found = call.run(**call.tensors | {name: special})
    except ValueError as error:
        return f"ValueError: {error}"
    pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
    if all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        return "equal"
    return "different"


def make_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield all calls by name; each returns its outcome."""
    for group in GROUPS:
        for n, call in enumerate(group()):
            title = f"{group.__name__.strip('_')} {n}"
            yield (
                f"{title}: operands that fit",
                lambda call=call: outcome_of(lambda: call.run(**call.tensors)),
            )
            for name in call.tensors:
                for problem, bad in make_bad_operands(call, name):
                    operands = call.tensors | {name: bad}
                    yield (
                        f"{title}: {name}: {problem}",
                        lambda call=call, operands=operands: outcome_of(
                            lambda: call.run(**operands)
                        ),
                    )
                for problem, special, plain in make_equal_operands(call, name):
                    yield (
                        f"{title}: {name}: {problem}",
                        lambda call=call, name=name, special=special, plain=plain: equality_of(
                            call, name, special, plain
                        ),
                    )


def main() -> None:
    """Run the calls from number `--skip` on; print a line of JSON before and after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip", type=int, default=0)
    skip = parser.parse_args().skip
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    for n, (name, run) in enumerate(make_cases()):
        if n >= skip:
            print(json.dumps(name), flush=True)
            print(json.dumps(run()), flush=True)


if __name__ == "__main__":
    main()
