"""Decoding from a cache is one pass, whatever the chunks; and what is cached is what is counted."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.costs import part_checks
from support import layer_cases as cases
from support.layer_cases import EVERY, EVERY_CASE, EXAMPLES, WITHOUT_STATE, check_close
from support.layer_checks import check_comparisons, decode_in_chunks


@pytest.mark.parametrize("name", EVERY_CASE)
def test_cached_decode_is_one_pass(name):
    try:
        check_comparisons(part_checks.compare_decoding(EVERY[name]))
    except part_checks.NotApplicableError as reason:
        pytest.skip(f"not causal: {reason}")


@pytest.mark.parametrize("name", WITHOUT_STATE)  # which cannot forget
def test_a_ring_forgets_only_what_nobody_reads(name):
    spec = cases.with_ring_cache(EXAMPLES[name])
    layer = cases.layer(spec)
    x = torch.randn(cases.BATCH, 17, spec.model, dtype=torch.float64)
    expected = layer(x)
    for chunks in [(17,), (1,) * 17, (5, 1, 1, 9, 1), (1, 13, 3)]:
        cache = layer.cache(batch=cases.BATCH, capacity=100)
        check_close(decode_in_chunks(layer, x, chunks, cache), expected)
        assert cache.nbytes == costs.cache_bytes(
            spec, batch=cases.BATCH, capacity=100, bytes_per_number=8
        )


@pytest.mark.parametrize("name", EXAMPLES)
def test_ragged_rows_decode_on_from_where_each_ends(name):
    spec = cases.as_causal(EXAMPLES[name])
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    lengths = [4, 2, 3]
    for pad in ("right", "left"):
        cache = layer.cache(batch=cases.BATCH, capacity=9)
        first = torch.zeros(cases.BATCH, 4, spec.model, dtype=torch.float64)
        for row, length in enumerate(lengths):
            first[row, 4 - length if pad == "left" else 0 :][:length] = x[row, :length]
        layer(
            first, cache=cache, sequence=hw.SequenceInfo.from_batch(first, lengths=lengths, pad=pad)
        )
        next_two = torch.stack([x[row, length : length + 2] for row, length in enumerate(lengths)])
        ours = decode_in_chunks(layer, next_two, (1, 1), cache)
        for row, length in enumerate(lengths):
            check_close(ours[row], layer(x[row : row + 1, : length + 2])[0, length:])


@pytest.mark.parametrize("name", EXAMPLES)
def test_cached_numbers_equal_the_count(name):
    spec = cases.as_causal(EXAMPLES[name])
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    cache = layer.cache(batch=cases.BATCH, capacity=9)
    caches = getattr(cache, "caches", [cache])
    shapes = [set() for _ in caches]

    def watch(own, seen):
        append = own.append

        def watched(entry, at):
            result, where = append(entry, at)
            seen.add((where.position.shape, *(tensor.shape for tensor in result.values())))
            return result, where

        own.append = watched

    for own, seen in zip(caches, shapes, strict=True):
        watch(own, seen)
    for t in range(cases.TOKENS):
        layer(x[:, t : t + 1], cache=cache)
    assert [len(seen) for seen in shapes] == [1] * len(caches), (
        "a step of one token changed a shape"
    )
    assert cache.nbytes == costs.cache_bytes(
        spec, batch=cases.BATCH, capacity=9, bytes_per_number=8
    )
    stored = [*cache.state.values()] or [tensor for own in caches for tensor in own.entry.values()]
    assert cache.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in stored)


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_query_runs_in_every_backend_that_takes_it(name):
    spec = cases.as_causal(EXAMPLES[name])
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    expected = layer(x)[:, -1:]
    for backend in (
        [None] if spec.recurrent_part else cases.supporting_backends(spec, single_query=True)
    ):
        cache = layer.cache(batch=cases.BATCH, capacity=9)
        layer.backend_name = None
        layer(x[:, :-1], cache=cache)
        layer.backend_name = backend
        check_close(layer(x[:, -1:], cache=cache), expected)
