"""Attention layers over a paged KV cache, and reference results of one pass and
of the definition.
"""

from __future__ import annotations

import torch

import headwise as hw
from headwise.attention.cache import PagePool
from headwise.kernels import PagedDecodeOptions

MODEL, LONGEST = 14, 300


MODIFIERS = {
    "alibi": (hw.parts.Alibi(),),
    "t5": (hw.parts.T5Bias(buckets=8, reach=90, looking="back"),),
}


SPECS = {
    "grouped": {"heads": 6, "kv": 2},
    "one key head": {"heads": 5, "kv": 1, "vdim": 7},
    "each its own": {"heads": 3, "modifiers": (hw.parts.Rotary(),), "dim": 4},
    "window": {"heads": 4, "kv": 2, "pattern": "window(11)"},
    "sinks": {"heads": 4, "kv": 2, "pattern": "window(9) | first(5)"},
    "gaps": {"heads": 4, "kv": 2, "pattern": "dilated(7, 3)"},
    "prefix": {"heads": 4, "kv": 2, "pattern": "prefix(3)"},
    "alibi": {"heads": 6, "kv": 3, "modifiers": MODIFIERS["alibi"]},
    "t5 in a window": {
        "heads": 4,
        "kv": 2,
        "modifiers": MODIFIERS["t5"],
        "pattern": "window(13) | first(2)",
    },
    "cap": {"heads": 4, "kv": 2, "modifiers": (hw.parts.Softcap(0.7), hw.parts.Alibi())},
    "sink": {"heads": 4, "kv": 2, "normaliser": hw.parts.SinkSoftmax()},
}


def build_layer(name: str, dtype: torch.dtype = torch.float64) -> hw.Attention:
    """A layer with widely spread scores, so that every key matters or none does."""
    sizes = {"model": MODEL, "pattern": "causal()", "dim": 5} | SPECS[name]
    torch.manual_seed(3)
    layer = hw.Attention(hw.design(**sizes))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.6)
    return layer.to(dtype).eval()


def make_pool(
    spec: hw.AttentionSpec, dtype: torch.dtype, page: int, pages: int, order: int
) -> PagePool:
    """A pool with its pages in random order; unwritten memory is NaN."""
    pool = PagePool([spec], pages=pages, page=page, dtype=dtype)
    # the last is read for what is not there, where pages are gathered
    pool.storage[:-1].fill_(torch.nan)
    pages_taken = [pool.block_tables.pages.allocate() for _ in range(pages)]
    for n in torch.randperm(pages, generator=torch.Generator().manual_seed(order)).tolist():
        pool.block_tables.pages.release(pages_taken[n])
    return pool


def decode_step(
    layer: hw.Attention, cache: hw.KVCache, x: torch.Tensor, backend: str | None = None, **more
) -> torch.Tensor:
    """One token of each row, by one backend."""
    layer.backend_name = backend
    with torch.no_grad():
        y = layer(x, cache=cache, **more)
    layer.backend_name = None
    return y


def prefilled_cache(
    layer: hw.Attention, pool: PagePool, x: torch.Tensor, lengths: list[int]
) -> hw.KVCache:
    """A cache after a prefill of rows of these lengths."""
    cache = pool.caches(pool.batch_of([pool.block_tables.new_sequence() for _ in lengths]))[0]
    if most := max(lengths):
        with torch.no_grad():
            layer(
                x[:, :most],
                cache=cache,
                sequence=hw.SequenceInfo.from_batch(x[:, :most], lengths=lengths),
            )
    return cache


def last_output_in_one_pass(layer: hw.Attention, x: torch.Tensor) -> torch.Tensor:
    """The output of the last token of one row, from a dense pass."""
    layer.backend_name = "dense"
    with torch.no_grad():
        y = layer(x[None])[0, -1:]
    layer.backend_name = None
    return y


def reference_decode(q_HK, keys, values, scale, options=PagedDecodeOptions()):  # noqa: B008 - it is a constant
    """o [H, V] and lse [H] of one row in float64, head by head, over its list of keys [n, G, K]."""
    outputs, heads_per_group = [], q_HK.shape[0] // keys.shape[1]
    for h, q in enumerate(q_HK.double()):
        s = (keys[:, h // heads_per_group].double() @ q) * scale
        if options.softcap:
            s = (s / options.softcap).tanh() * options.softcap
        if options.bias is not None:
            s = s + options.bias[0, h]
        rest = [options.sink[h].double()] if options.sink is not None else []
        top = max([*s.tolist(), *(r.item() for r in rest)], default=0.0)
        e = (s - top).exp()
        total = e.sum() + sum((r - top).exp() for r in rest)
        o = (e[:, None] * values[:, h // heads_per_group].double()).sum(0) / (
            total if total else 1.0
        )
        outputs.append((o, top + e.sum().log()))
    return torch.stack([o for o, _ in outputs]), torch.stack([lse for _, lse in outputs])
