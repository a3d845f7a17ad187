"""On a device that is not the CPU, layers compute what they compute on the CPU: outputs, gradients,
and decode steps with every kind of cache. The layers ran on the CPU before they are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.backends import (
    BACKENDS,
    CallSignature,
    split_by_pattern,
    unsupported_reasons,
)
from headwise.attention.cache import PagePool
from headwise.costs.part_checks import COMPILED_BACKENDS
from support import layer_cases as cases
from support.layer_cases import BATCH, EXAMPLES, WITHOUT_STATE, check_close
from support.layer_checks import decode_in_chunks, layer_gradients
from support.pretended_device import pretended_device

DEVICES = ["pretend", pytest.param("cuda", marks=pytest.mark.gpu)]
SHORT = {name for name in EXAMPLES if name.endswith("0")}  # of each part; `make slow` takes all
Results = dict[str, Tensor]


@contextmanager
def open_device(kind: str) -> Iterator[torch.device]:
    """Context in which a device of this kind exists; yields it."""
    if kind == "pretend":
        with pretended_device() as device:
            yield device
    else:
        yield torch.device(kind)


def check_device(kind: str, layer: hw.Attention, run: Callable[[torch.device], Results]) -> None:
    """Run on the CPU, move the layer, and assert that it gives the same numbers on the device."""
    expected = run(torch.device("cpu"))
    with open_device(kind) as device:
        layer.to(device)
        results = run(device)
        assert {result.device.type for result in results.values()} == {device.type}
        for name, result in results.items():
            check_close(result.detach().cpu(), expected[name], rtol=1e-9, atol=1e-9)


def backends_on(spec: hw.AttentionSpec, device: torch.device) -> list[str]:
    """Backends that run this spec on a device."""
    call = CallSignature(spec, spec.core, device.type, torch.float64)
    return [
        name
        for name in BACKENDS
        if name not in COMPILED_BACKENDS
        and not any(unsupported_reasons(name, part) for part in split_by_pattern(call, name))
    ]


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_outputs_and_gradients_are_those_of_the_cpu(name: str, kind: str):
    spec = EXAMPLES[name]
    layer = cases.layer(spec)
    inputs = cases.tensors(spec)

    def run(device: torch.device) -> Results:
        x, source = (None if tensor is None else tensor.to(device) for tensor in inputs)
        assert x is not None
        sequence = cases.sequence_infos(x)["packed"]
        with torch.no_grad():
            y = layer(x, source=source, sequence=sequence)
            results = {"whole": layer(x, source=source), "packed": y}
            for layer.backend_name in backends_on(spec, device) if name in SHORT else ():
                results["packed"] = layer(x, source=source, sequence=sequence)
                check_close(results["packed"], y, rtol=1e-9, atol=1e-9)
        layer.backend_name = None
        x.requires_grad_()
        y = layer(x, source=source, sequence=sequence)
        return results | layer_gradients(layer, y, x)

    check_device(kind, layer, run)


def paged(layer: hw.Attention) -> hw.KVCache:
    weight = layer.first_parameter
    pool = PagePool([layer.spec], pages=8 * BATCH, page=2, dtype=weight.dtype, device=weight.device)
    rows = [pool.block_tables.new_sequence() for _ in range(BATCH)]
    return pool.caches(pool.batch_of(rows))[0]


CACHES: dict[str, Callable[[hw.Attention], hw.KVCache]] = {
    "equal rows": lambda layer: layer.cache(batch=BATCH, capacity=9),
    "own": lambda layer: layer.cache(batch=BATCH, capacity=9),
    "ring": lambda layer: layer.cache(batch=BATCH, capacity=9),
    "int8": lambda layer: layer.cache(batch=BATCH, capacity=9, storage_format="int8"),
    "paged": paged,
}
DECODED = [pytest.param(name, "own") for name in EXAMPLES]
for cache in ("equal rows", "ring", "int8", "paged"):
    for name in EXAMPLES if cache == "equal rows" else WITHOUT_STATE:
        marks = () if name in SHORT else pytest.mark.slow
        DECODED.append(pytest.param(name, cache, marks=marks))


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(("name", "cache_kind"), DECODED)
def test_decode_steps_are_those_of_the_cpu(name: str, cache_kind: str, kind: str):
    is_ring = cache_kind == "ring"
    spec = cases.with_ring_cache(EXAMPLES[name]) if is_ring else cases.as_causal(EXAMPLES[name])
    layer = cases.layer(spec)
    inputs, _ = cases.tensors(spec)

    @torch.no_grad()
    def run(device: torch.device) -> Results:
        x = inputs.to(device)
        cache = CACHES[cache_kind](layer)
        lengths = None if cache_kind == "equal rows" else [4, 1, 2]
        sequence = hw.SequenceInfo.from_batch(x[:, :4], lengths=lengths)
        results = {"prompts": layer(x[:, :4], cache=cache, sequence=sequence)}
        results["steps"] = decode_in_chunks(layer, x[:, 4:], (1, 2), cache)
        cache.select_rows(torch.tensor([2, 0, 0], device=device))
        results["selected rows"] = layer(x[:, :1], cache=cache)
        return results

    check_device(kind, layer, run)
