"""Backends that work in blocks are right where a block ends: one token less, just so, one more."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.attention.attention_call import PositionLimit
from headwise.attention.backends import (
    BACKENDS,
    CallSignature,
    bf16_matmul,
    block_sparse,
    dispatch,
    linear_attention,
    query_blocks,
)
from support import layer_cases as cases
from support.layer_cases import EXAMPLES, ONE_SEQUENCE, check_close
from support.layer_checks import decode_in_chunks, layer_gradients, saved_bytes, torch_flops

BLOCKED = {
    name: backend.boundary_lengths()
    for name, backend in BACKENDS.items()
    if hasattr(backend, "boundary_lengths")
}
BLOCK = 16  # queries or tokens of a block in these tests, where a backend has 128
BLOCK_LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
SMALL_BLOCKS = {
    "chunked": BLOCK_LENGTHS,
    "block_sparse": BLOCK_LENGTHS,
    "linear": BLOCK_LENGTHS,
    "bf16_matmul": (*BLOCK_LENGTHS, 4 * BLOCK + 1),
}
# examples whose blocks have their own size
FULL_SIZE = ("Softmax0", "PerHead1", "TalkingHeads0", "FeatureMap2")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16: the same boundaries in shorter sequences. Tiles of kernels are compiled and
    keep their size.
    """
    for module in (query_blocks, block_sparse, bf16_matmul, dispatch):
        monkeypatch.setattr(module, "QUERY_BLOCK_SIZE", BLOCK)
    monkeypatch.setattr(bf16_matmul, "MAX_SAVED_KEYS", 4 * BLOCK)
    monkeypatch.setattr(linear_attention, "CHUNK_SIZE", BLOCK)


def filled(x):
    """Whole rows; and two packed documents before padding, so that no block is alike."""
    yield hw.SequenceInfo.from_batch(x)
    segments = torch.zeros(x.shape[:2], dtype=torch.int64)
    segments[0, x.shape[1] // 3 :] = 1
    segments[1, -5:] = -1
    yield hw.SequenceInfo.from_batch(x, segments=segments)


def boundary_lengths(spec, backends, counts_by_backend):
    """The backends to run at each length, as far as the spec knows positions; skips a test that has
    none.
    """
    limit, backends_of = PositionLimit.from_spec(spec), defaultdict(list)
    for backend in backends:
        for count in counts_by_backend.get(backend, ()):
            if limit is None or count + 2 <= limit.max_positions:
                backends_of[count].append(backend)
    if not backends_of:
        pytest.skip("no backend that works in blocks supports it")
    return sorted(backends_of.items())


@pytest.mark.parametrize("name", EXAMPLES)
def test_blocks_end_where_they_should(name, small_blocks):
    check_blocks(EXAMPLES[name], BLOCKED | SMALL_BLOCKS)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_blocks_of_full_size_end_where_they_should(name):
    check_blocks(
        EXAMPLES[name],
        {backend: BLOCKED[backend] for backend in ("chunked", "block_sparse", "linear")},
    )


def check_blocks(spec, counts_by_backend):
    """Output and gradients of every backend are those of dense, at each length."""
    backends = cases.supporting_backends(spec, grad_enabled=True)
    layer = cases.layer(spec)
    for count, names in boundary_lengths(spec, backends, counts_by_backend):
        x = torch.randn(2, count, spec.model, dtype=torch.float64, requires_grad=True)
        z = None
        if spec.source is not None:
            z = torch.randn(2, count + 2, spec.source, dtype=torch.float64)
        for tokens in filled(x):
            layer.backend_name = "dense"
            y = layer(x, source=z, sequence=tokens)
            expected = layer_gradients(layer, y, x)
            for layer.backend_name in names:
                label = f"{layer.backend_name}, {count} tokens"
                ours = layer(x, source=z, sequence=tokens)
                check_close(ours, y, msg=lambda m, label=label: f"{label}: {m}")
                for parameter, grad in layer_gradients(layer, ours, x).items():
                    message = f"{label}: {parameter}"
                    check_close(
                        grad,
                        expected[parameter],
                        rtol=1e-8,
                        atol=1e-9,
                        msg=lambda m, message=message: f"{message}: {m}",
                    )


@pytest.mark.parametrize("name", ONE_SEQUENCE)  # others are counted in test_counts.py
def test_blocks_are_counted_as_torch_counts_them(name, small_blocks):
    spec = EXAMPLES[name]
    # What `routed` runs depends on the gates; test_routed_heads.py counts it where these are known.
    backends = [
        one for one in cases.supporting_backends(spec, dtype=torch.float32) if one != "routed"
    ]
    layer = cases.layer(spec, torch.float32)
    for count, names in boundary_lengths(spec, backends, BLOCKED | SMALL_BLOCKS):
        x = torch.randn(2, count, spec.model)
        for layer.backend_name in names:
            backend = layer.backend_name
            work, job = (
                costs.self_attention_work(spec, batch=2, queries=count),
                CallSignature(spec, spec.core),
            )
            if hasattr(BACKENDS[backend], "count_formed_pairs"):
                work = work.with_pairs(BACKENDS[backend].count_formed_pairs(job, work))
            executed = costs.executed_flops(spec, work, cases.core_flops(spec, backend, work))
            assert torch_flops(layer, x) == executed, (backend, count)


SPARSE = [
    "window(9, after=4) | global((0, 77))",
    "dilated(5, rate=3)",
    "bigbird(300, block=16, random=2)",
    "blocks(50)",
]
SPARSE += [
    "window(40) & dilated(9, rate=2)",
    "prefix(30)",
    "edges(((3, 200), (250, 1), (250, 299)))",
    "first(2)",
]


@pytest.mark.parametrize("pattern", SPARSE)
@pytest.mark.parametrize("backend", ["block_sparse", "chunked", "dense"])
def test_sparse_patterns_touch_what_they_read(backend, pattern):
    layer = cases.layer(cases.base(pattern=pattern), backend=backend)
    x = torch.randn(2, 300, 10, dtype=torch.float64)
    layer.backend_name = "sdpa"
    expected = layer(x)
    layer.backend_name = backend
    check_close(layer(x), expected)


def test_a_long_prompt_is_read_in_blocks_behind_what_is_cached():
    spec = cases.base(pattern="window(150) | first(3)", modifiers=(hw.parts.TalkingHeads(),))
    layer = cases.layer(spec)
    x = torch.randn(2, 420, 10, dtype=torch.float64)
    layer.backend_name = "dense"
    expected = layer(x)
    layer.backend_name = None
    for chunks in [(420,), (1, 300, 119), (140, 140, 140)]:
        cache = layer.cache(batch=2, capacity=500)
        check_close(decode_in_chunks(layer, x, chunks, cache), expected)


@pytest.mark.parametrize(
    "modifiers",
    [
        (hw.parts.DynamicComposition(), hw.parts.DynamicComposition(on="weights")),
        (hw.parts.TalkingHeads(),),
    ],
    ids=repr,
)
def test_mixing_heads_keeps_no_square(modifiers):
    spec = hw.design(model=16, heads=4, pattern="causal", modifiers=modifiers)
    grown = {}
    for backend in ("chunked", "dense"):
        layer = hw.Attention(spec, backend=backend)
        short, long = (saved_bytes(layer, count) for count in (512, 1024))
        grown[backend] = long / short
    assert grown["chunked"] <= 2 < 3 < grown["dense"], grown


@pytest.mark.compile
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("chunked", {"pattern": "causal", "modifiers": (hw.parts.TalkingHeads(),)}),
        ("block_sparse", {"pattern": "window(20) | first(3)"}),
        (
            "linear",
            {
                "pattern": "causal",
                "similarity": hw.parts.FeatureMap(),
                "normaliser": hw.parts.SumNormaliser(),
            },
        ),
    ],
    ids=["chunked", "block_sparse", "linear"],
)
def test_blocks_are_one_graph(backend, words):
    layer = hw.Attention(hw.design(model=16, heads=4, **words), backend=backend).double()
    x = torch.randn(1, 300, 16, dtype=torch.float64, requires_grad=True)
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend="eager")(x)
    check_close(y, layer(x))
    check_close(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(layer(x).sum(), x)[0])
