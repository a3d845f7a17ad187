"""Packed texts: outputs and gradients equal those of each text alone, with few masked pairs
computed.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

import headwise as hw
from headwise.attention import backends
from headwise.attention.backends import varlen
from headwise.attention.backends.varlen import MAX_WASTED_PAIRS_RATIO, group_by_length, group_plan
from headwise.attention.masking.patterns import Full
from headwise.attention.masking.sequence_info import AttentionMask, SequenceInfo
from support import layer_cases as cases
from support.layer_cases import EXAMPLES, ONE_SEQUENCE, check_close
from support.layer_checks import layer_gradients

ROWS = [[3, 1, 4, 0, 2], [5], [7, 2, 1]]
SOURCES = [[2, 6, 0, 3, 1], [4, 3], [1, 1]]


def masked(tokens: SequenceInfo) -> SequenceInfo:
    """The same tokens, of whom nobody knows where texts begin."""
    return SequenceInfo(tokens.position, tokens.segment)


@pytest.fixture
def many_groups(monkeypatch):
    """Texts so small would all be one group, which is not what is to be tested."""
    monkeypatch.setattr(varlen, "FREE_PAIRS", 6)


@pytest.mark.parametrize("name", ONE_SEQUENCE)
def test_packed_texts_equal_texts_alone(name, many_groups):
    spec = EXAMPLES[name]
    layer = cases.layer(spec)
    sequence = SequenceInfo.packed(ROWS)
    x = torch.randn(3, sequence.count, spec.model, dtype=torch.float64, requires_grad=True)
    layer.backend_name = "dense"  # tests/contract/test_truth.py compares it with the reference
    expected = layer(x, sequence=masked(sequence))
    expected_gradients = layer_gradients(layer, expected, x)
    for backend in (*cases.supporting_backends(spec, grad_enabled=True), None):
        layer.backend_name = backend
        y = layer(x, sequence=sequence)
        check_close(y, expected)
        for parameter, grad in layer_gradients(layer, y, x).items():
            check_close(
                grad,
                expected_gradients[parameter],
                msg=lambda m, p=parameter, b=backend: f"{b}, {p}: {m}",
            )


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_text_reads_its_own_source(name, many_groups):
    try:
        spec = cases.as_cross_attention(EXAMPLES[name])
    except hw.SpecError as reason:
        pytest.skip(f"not defined for a source: {reason}")
    layer = cases.layer(spec)
    at, sequence = SequenceInfo.packed(ROWS), SequenceInfo.packed(SOURCES)
    x = torch.randn(3, at.count, spec.model, dtype=torch.float64, requires_grad=True)
    z = torch.randn(3, sequence.count, spec.source, dtype=torch.float64)
    layer.backend_name = "dense"
    expected = layer(
        x, sequence=masked(at), source=layer.project_source(z, sequence=masked(sequence))
    )
    expected_gradients = layer_gradients(layer, expected, x)
    for backend in (*cases.supporting_backends(spec, grad_enabled=True), None):
        layer.backend_name = backend
        y = layer(x, sequence=at, source=layer.project_source(z, sequence=sequence))
        check_close(y, expected)
        for parameter, grad in layer_gradients(layer, y, x).items():
            check_close(
                grad,
                expected_gradients[parameter],
                msg=lambda m, p=parameter, b=backend: f"{b}, {p}: {m}",
            )


LENGTHS = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), min_size=1, max_size=3)


@settings(deadline=None, max_examples=15)
@given(
    rows=LENGTHS,
    pattern=st.sampled_from(["causal", "full", "window(40)", "causal & dilated(9, rate=2)"]),
)
def test_texts_of_any_lengths_equal_texts_alone(rows, pattern):
    layer = hw.Attention(
        hw.design(model=6, heads=3, kv=1, dim=4, pattern=pattern, modifiers=(hw.parts.Rotary(),))
    ).double()
    sequence = SequenceInfo.packed(rows)
    x = torch.randn(len(rows), sequence.count, 6, dtype=torch.float64, requires_grad=True)
    y = layer(x, sequence=sequence)
    back = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, back) if sequence.count else (x,)
    for n, row in enumerate(rows):
        begin = 0
        for length in row:
            own = slice(begin, begin + length)
            alone = x[n : n + 1, own].detach().requires_grad_()
            if length:
                expected = layer(alone)
                check_close(y[n : n + 1, own], expected)
                check_close(
                    grad[n : n + 1, own],
                    torch.autograd.grad(expected, alone, back[n : n + 1, own])[0],
                )
            begin += length
        assert not y[n, begin:].any()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=40),
    spare=st.integers(0, 5000),
)
def test_few_masked_pairs_are_computed(sizes, spare):
    values, keys = [one for one, _ in sizes], [other for _, other in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "FREE_PAIRS", spare)
        groups = list(group_by_length(values, keys))
    assert sorted(n for group in groups for n in group) == [
        n for n, count in enumerate(values) if count
    ]
    for group in groups:
        formed = len(group) * max(values[n] for n in group) * max(1, *(keys[n] for n in group))
        read = sum(values[n] * keys[n] for n in group)
        assert formed - read <= max(spare, MAX_WASTED_PAIRS_RATIO * read) or len(group) == 1


def test_memory_grows_with_the_texts_and_not_with_the_row():
    def saved_bytes(count: int) -> int:
        layer = hw.Attention(
            hw.design(model=16, heads=4, pattern="causal", modifiers=(hw.parts.TalkingHeads(),))
        )
        sequence, stored = SequenceInfo.packed([[64] * count]), dict[int, int]()
        x = torch.randn(1, sequence.count, 16, requires_grad=True)

        def keep(tensor):
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = layer(x, sequence=sequence)
        assert y.requires_grad
        return sum(stored.values())

    assert saved_bytes(32) <= 2.1 * saved_bytes(16)


def test_texts_without_a_source_attend_to_nothing():
    layer = cases.layer(cases.as_cross_attention(cases.base()))
    probe = hw.Probe("heads")
    x, z = torch.randn(1, 5, 10).double(), torch.randn(1, 4, cases.WIDTH).double()
    y = layer(
        x,
        sequence=SequenceInfo.packed([[2, 3]]),
        source=layer.project_source(z, sequence=SequenceInfo.packed([[4]])),
        probe=probe,
    )
    assert y.isfinite().all()
    assert not probe.tensors["heads"][0, 2:].any()
    assert probe.tensors["heads"][0, :2].all()


def runs_apart(layer, x, **call) -> bool:
    """Whether a call forms groups of texts."""
    before = backends.PackedDispatch.attend
    called = []

    def attend(self, *args):
        called.append(self)
        return before(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends.PackedDispatch, "attend", attend)
        layer(x, **call)
    return bool(called)


def test_texts_run_separately_unless_a_probe_needs_the_whole_row():
    layer = cases.layer(cases.base(pattern="causal"))
    sequence = SequenceInfo.packed([[3, 4]])
    x = torch.randn(1, 7, 10, dtype=torch.float64)
    assert runs_apart(layer, x, sequence=sequence)
    assert runs_apart(layer, x, sequence=sequence.to("cpu"))
    assert runs_apart(layer, x, sequence=sequence, probe=hw.Probe("q", "heads"))
    assert not runs_apart(layer, x, sequence=masked(sequence))
    assert not runs_apart(layer, x, sequence=sequence, probe=hw.Probe("weights"))
    assert not runs_apart(
        layer, x, sequence=sequence, mask=torch.ones(1, 1, 7, 7, dtype=torch.bool)
    )
    assert not runs_apart(layer, x, sequence=sequence, cache=layer.cache(batch=1, capacity=9))
    # one row of tokens for two rows alike
    assert not runs_apart(layer, x.expand(2, -1, -1), sequence=sequence)


def test_a_source_that_is_not_packed_is_read_as_one():
    layer = cases.layer(cases.as_cross_attention(cases.base()))
    x, z = torch.randn(1, 5, 10).double(), torch.randn(1, 4, cases.WIDTH).double()
    sequence = SequenceInfo.packed([[2, 3]])
    check_close(
        layer(x, sequence=sequence, source=z), layer(x, sequence=masked(sequence), source=z)
    )


def test_a_plan_is_made_once_for_all_layers():
    sequence = SequenceInfo.packed([[3, 4]])
    layers = [
        cases.layer(cases.base(pattern=pattern)) for pattern in ("causal", "causal", "full", "full")
    ]
    for layer, backend in zip(layers, ("dense", "sdpa", "sdpa", None), strict=True):
        layer.backend_name = backend
        layer(torch.randn(1, 7, 10, dtype=torch.float64), sequence=sequence)
    assert [reads_future for _, reads_future, _ in sequence.backend_plans] == [True, False]
    assert all(other is None for other, _, _ in sequence.backend_plans)


def test_some_rows_and_another_device_keep_the_lengths():
    sequence = SequenceInfo.packed([[2, 1], [3], [1, 1]])
    assert sequence.rows(slice(1, 3)).lengths == ((3,), (1, 1))
    assert sequence.to("meta").lengths == sequence.lengths


@pytest.mark.compile
def test_compiled_rows_are_masked_and_the_same():
    layer = hw.Attention(hw.design(model=8, heads=2, pattern="causal")).double()
    sequence = SequenceInfo.packed([[3, 4]])
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="eager")
    check_close(run(x, sequence=sequence), layer(x, sequence=sequence))


def test_self_and_cross_attention_are_planned_separately():
    at, sequence = SequenceInfo.packed([[2, 3]]), SequenceInfo.packed([[4, 1]])
    group_plan(AttentionMask(at, at, Full()))
    assert group_plan(AttentionMask(at, sequence, Full())).keys.shapes == ((2, 4),)
