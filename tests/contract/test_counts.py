"""What is counted is what is made: parameters, products, pairs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import costs
from headwise.costs import part_checks
from support import layer_cases as cases
from support.layer_cases import EVERY, EVERY_CASE, ONE_SEQUENCE, WITHOUT_STATE
from support.layer_checks import check_comparisons, torch_flops


@pytest.mark.parametrize("name", EVERY_CASE)
def test_parameters_flops_and_cache_are_counted_as_made(name):
    try:
        check_comparisons(part_checks.compare_counts(EVERY[name]))
    except part_checks.NotApplicableError as reason:
        pytest.skip(f"all but the cache is equal: {reason}")


@pytest.mark.parametrize("name", EVERY_CASE)
def test_products_are_counted_as_torch_counts_them(name):
    spec = EVERY[name]
    x, z = cases.tensors(spec, torch.float32)
    keys = cases.TOKENS if z is None else cases.SOURCE
    work = hw.costs.CallSize(cases.BATCH, cases.TOKENS, keys, keys)
    built = {}
    for backend in {"dense", "sdpa", "linear"} & {
        *cases.supporting_backends(spec, dtype=torch.float32)
    }:
        layer = cases.layer(spec, torch.float32, backend)
        built[backend] = torch_flops(layer, x, source=z)
        expected = costs.executed_flops(spec, work, cases.core_flops(spec, backend, work))
        assert built[backend] == expected, backend
    assert built["dense"] == costs.counted_flops(spec, work)


NO_PART = ((),)
ON_SCORES = (
    (hw.parts.TalkingHeads(),),
    (hw.parts.DynamicComposition(static="full"),),
    (hw.parts.LearnedScores(9), hw.parts.TalkingHeads()),
    (hw.parts.Alibi(),),
)
FACTORISED = (hw.parts.LearnedScores(9, kind="factorised", rank=2),)
ON_WEIGHTS = (
    (hw.parts.TalkingHeads(on="weights", bias=True),),
    (hw.parts.DynamicComposition(on="weights", static="full"),),
    (hw.parts.WeightDropout(0.5), hw.parts.TalkingHeads(on="weights")),
)


@pytest.mark.parametrize(
    "project", [hw.parts.LinearProjection(), hw.parts.ValueProjection()], ids=repr
)
@pytest.mark.parametrize(
    "normaliser",
    [hw.parts.Softmax(), hw.parts.AverageNormaliser(), hw.parts.SinkSoftmax()],
    ids=repr,
)
def test_a_backward_pass_is_counted_as_torch_counts_it(project, normaliser):
    """Scores and weights may be constants, which need no gradient."""
    for before, after in product((*NO_PART, *ON_SCORES, FACTORISED), (*NO_PART, *ON_WEIGHTS)):
        sizes = {"model": 8, "heads": 2, "project": project, "normaliser": normaliser}
        spec = hw.design(**sizes, modifiers=(*before, *after), pattern="causal")
        layer, x = hw.Attention(spec, backend="dense"), torch.randn(2, 3, 8, requires_grad=True)
        y = layer(x)
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        (counted,) = hw.cost(spec, hw.Workload(batch=2, context=3))
        assert counted.counted_flops["backward"] == counter.get_total_flops(), spec.modifiers


@pytest.mark.parametrize("name", WITHOUT_STATE)  # whose updates torch's counter does not see
def test_a_step_is_counted_as_torch_counts_it(name):
    spec = cases.as_causal(EVERY[name])
    # Heads with patterns of their own read the keys of these alone; one call with a mask for each
    # reads all.
    layer = cases.layer(
        spec, torch.float32, "dense" if isinstance(spec.pattern, hw.patterns.PerHead) else None
    )
    x, _ = cases.tensors(spec, torch.float32)
    cache = layer.cache(batch=cases.BATCH, capacity=9)
    layer(x, cache=cache)
    built = torch_flops(layer, x[:, :1], cache=cache)
    cached = getattr(cache, "caches", [cache])[0].slots  # one call reads the tokens of the largest
    reads_all = spec.pattern.pairs(range(7, 8), range(8)) == min(8, cached)
    slots = min(8, cached) if reads_all else cached
    assert built == costs.counted_flops(spec, hw.costs.CallSize(cases.BATCH, 1, 1, slots))


@pytest.mark.parametrize("name", ONE_SEQUENCE)
def test_counted_pairs_equal_allowed_pairs(spec, x):
    attention_mask = hw.attention.AttentionMask(
        hw.SequenceInfo.from_batch(x), hw.SequenceInfo.from_batch(x), spec.pattern
    )
    work = costs.self_attention_work(spec, batch=cases.BATCH, queries=cases.TOKENS)
    allowed = attention_mask.allowed[0].expand(-1, cases.TOKENS, cases.TOKENS)
    by_head = work.head_pairs or (work.pairs,)
    assert list(by_head) == allowed.sum((1, 2)).tolist()
    assert work.pairs == int(allowed.any(0).sum())
    full = hw.costs.CallSize(cases.BATCH, cases.TOKENS, cases.TOKENS, cases.TOKENS)
    saved = costs.counted_flops(spec, full) - costs.required_flops(spec, work)
    assert saved == 0 if set(by_head) == {full.pairs} else saved > 0
