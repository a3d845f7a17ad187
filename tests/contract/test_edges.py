"""Backends that work in blocks are right where a block ends: one token less, just so, one more."""

from __future__ import annotations

import pytest
import torch
from test_counts import torch_counts
from test_truth import gradients

import cases
import headwise as hw
from cases import EXAMPLES, check_close
from headwise import counting
from headwise.backends import BACKENDS, Job

BLOCKED = {name: backend.edges() for name, backend in BACKENDS.items() if hasattr(backend, "edges")}


def filled(x):
    """Whole rows; and two packed documents before padding, so that no block is alike."""
    yield hw.Tokens.of(x)
    segments = torch.zeros(x.shape[:2], dtype=torch.int64)
    segments[0, x.shape[1] // 3 :] = 1
    segments[1, -5:] = -1
    yield hw.Tokens.of(x, segments=segments)


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("name", EXAMPLES)
def test_blocks_end_where_they_should(name, backend):
    spec = EXAMPLES[name]
    if backend not in cases.takers(spec, grad=True):
        pytest.skip(f"{backend} refuses it")
    layer = cases.layer(spec)
    for count in BLOCKED[backend]:
        x = torch.randn(2, count, spec.model, dtype=torch.float64, requires_grad=True)
        z = None if spec.source is None else torch.randn(2, count + 2, spec.source, dtype=torch.float64)
        for tokens in filled(x):
            layer.only = "dense"
            y = layer(x, source=z, tokens=tokens)
            expected = gradients(layer, y, x)
            layer.only = backend
            ours = layer(x, source=z, tokens=tokens)
            check_close(ours, y)
            for parameter, grad in gradients(layer, ours, x).items():
                check_close(grad, expected[parameter], rtol=1e-8, atol=1e-9, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("backend", BLOCKED)
@pytest.mark.parametrize("name", EXAMPLES)
def test_blocks_are_counted_as_torch_counts_them(name, backend):
    spec = EXAMPLES[name]
    if backend not in cases.takers(spec, dtype=torch.float32) or spec.source is not None:
        pytest.skip(f"{backend} refuses it" if spec.source is None else "counted with one block in test_counts.py")
    layer = cases.layer(spec, torch.float32, backend)
    for count in BLOCKED[backend]:
        x = torch.randn(2, count, spec.model)
        work = counting.work_of(spec, batch=2, queries=count)
        spent = BACKENDS[backend].spent(Job(spec, spec.core), work)
        assert torch_counts(layer, x) == counting.spent(spec, work, spent), count
