"""Heads with different patterns: each group of heads with one pattern runs, costs and decodes as a
layer of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.attention import backends, head_axis_ops, reference
from headwise.attention.backends import CallSignature, HeadGroupDispatch
from headwise.attention.cache import HeadGroupCache, make_cache
from headwise.costs import part_checks
from headwise.costs.components import AttentionComponent
from headwise.costs.cost_estimate import estimate_cost
from headwise.costs.flops import patterns_of_kv_heads
from headwise.costs.roofline import ExecutionTarget, ForwardCall
from headwise.surgery.head_grouping import permute_heads
from support import layer_cases as cases
from support.layer_cases import base, check_close
from support.layer_checks import check_comparisons, layer_gradients, torch_flops

STREAMING = hw.patterns.Window(3) | hw.patterns.First(1)
PATTERN = hw.patterns.PerHead((hw.patterns.Causal(), STREAMING), (0, 1, 1, 0, 1, 0))
# What may stand around patterns per head, and the backends that a call without a name runs on.
SPECS = {
    "in order": base(
        pattern=hw.patterns.PerHead((hw.patterns.Causal(), STREAMING), (0, 0, 0, 1, 1, 1)), kv=2
    ),
    "within a group of query heads": base(
        pattern=PATTERN, kv=2, modifiers=(hw.parts.Rotary(base=30.0),)
    ),
    "slopes, sinks and a cap": base(
        pattern=PATTERN,
        normaliser=hw.parts.SinkSoftmax(),
        modifiers=(hw.parts.Alibi(), hw.parts.Softcap(2.0)),
    ),
    "relative keys and values": base(
        pattern=PATTERN, modifiers=(hw.parts.Shaw(reach=2), hw.parts.ShawValues(reach=3))
    ),
    "a table of distances": base(
        pattern=PATTERN, vdim=5, modifiers=(hw.parts.T5Bias(buckets=8, reach=9),)
    ),
    "learned alphas": base(pattern=PATTERN, normaliser=hw.parts.Entmax(kind="learned")),
    "scores of the input": base(
        pattern=PATTERN, modifiers=(hw.parts.LearnedScores(length=9, kind="dense"),)
    ),
    "pairs of heads with different patterns": base(
        heads=3,
        pattern=hw.patterns.PerHead((hw.patterns.Causal(), STREAMING), (0, 1, 1, 1, 1, 0)),
        modifiers=(hw.parts.Differential(),),
    ),
    "norms over heads": base(
        pattern=PATTERN,
        modifiers=(hw.parts.QKNorm(scope="full"), hw.parts.HeadNorm(), hw.parts.OutputGate()),
    ),
    "latent keys": base(
        pattern=PATTERN,
        project=hw.parts.MLAProjection(rank=7, rope=2),
        modifiers=(hw.parts.Rotary(),),
    ),
    "shared queries and keys": base(pattern=PATTERN, project=hw.parts.Collaborative(width=9)),
    "values in groups of their own": base(pattern=PATTERN, kv=3).with_heads(
        value_heads=(0, 0, 1, 1, 1, 0)
    ),
    "routed heads": base(pattern=PATTERN, modifiers=(hw.parts.MixtureOfHeads(2, 2),)),
    "heads routed by norms": base(
        pattern=PATTERN, modifiers=(hw.parts.MixtureOfHeads(2, 2, router="norm"),)
    ),
    "features": base(
        pattern=PATTERN, similarity=hw.parts.FeatureMap(), normaliser=hw.parts.SumNormaliser()
    ),
    "mixed scores": base(pattern=PATTERN, modifiers=(hw.parts.TalkingHeads(bias=True),)),
    "mixed to other numbers of heads": base(
        pattern=hw.patterns.PerHead(
            (hw.patterns.Causal(), hw.patterns.Window(3), hw.patterns.First(2)),
            (0, 1, 1, 2, 0, 0, 2),
        ),
        vdim=9,
        modifiers=(
            hw.parts.TalkingHeads(heads=7),
            hw.parts.TalkingHeads(on="weights", heads=5, bias=True),
        ),
    ),
    "mixed weights": base(pattern=PATTERN, modifiers=(hw.parts.DynamicComposition(on="weights"),)),
}
MIXED = ("mixed scores", "mixed to other numbers of heads", "mixed weights")


@pytest.mark.parametrize("name", SPECS)
def test_heads_attend_to_their_own_keys(name):
    """On all backends without gradients, on the usual one with them; decoding and pruning too."""
    for check in (
        part_checks.compare_outputs,
        part_checks.compare_decoding,
        part_checks.compare_pruning,
    ):
        check_comparisons(check(SPECS[name]))
    layer = cases.layer(SPECS[name])
    x, _ = cases.tensors(layer.spec)
    sequence = cases.sequence_infos(x)["packed"]
    x.requires_grad_()
    expected = reference.reference_attention(layer, x, tokens=sequence)
    y = layer(x, sequence=sequence)
    check_close(y, expected)
    theirs = layer_gradients(layer, expected, x)
    for parameter, gradient in layer_gradients(layer, y, x).items():
        check_close(gradient, theirs[parameter], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", SPECS)
def test_each_pattern_is_one_call_unless_heads_are_mixed(name):
    layer = cases.layer(SPECS[name])
    dispatch = backends.plan_dispatch(CallSignature(layer.spec, layer.spec.core))
    assert isinstance(dispatch, HeadGroupDispatch) == (name not in MIXED)
    for named in ("dense", "chunked"):
        assert not isinstance(
            backends.plan_dispatch(CallSignature(layer.spec, layer.spec.core), named),
            HeadGroupDispatch,
        )
    seen = CallSignature(layer.spec, layer.spec.core, probed_tensors=frozenset({"weights"}))
    assert backends.plan_dispatch(seen).backend_names == ("dense",)


def test_packed_sequences_run_apart_in_each_group():
    layer = cases.layer(SPECS["within a group of query heads"])
    lengths = [[3, 4], [7], [1, 2, 2]]
    x = torch.randn(3, 7, 10, dtype=torch.float64)
    packed = hw.SequenceInfo.packed(lengths)
    expected = reference.reference_attention(layer, x, tokens=packed)
    check_close(layer(x, sequence=packed), expected)


def test_probed_weights_and_scores_have_all_heads():
    layer, probe = cases.layer(SPECS["in order"]), hw.Probe("weights", "scores", "lse")
    x, _ = cases.tensors(layer.spec)
    y = layer(x, probe=probe)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    for head in range(6):
        allowed = (hw.patterns.Causal() if head < 3 else STREAMING).allows(i, j)
        assert (probe.tensors["weights"][:, head][:, ~allowed] == 0).all()
        assert (probe.tensors["weights"][:, head][:, allowed] > 0).all()
    assert probe.tensors["scores"].shape == probe.tensors["weights"].shape == (3, 6, 7, 7)
    check_close(layer(x), y)


def test_a_mask_of_the_caller_and_the_patterns_both_hide():
    layer, probe = cases.layer(SPECS["within a group of query heads"]), hw.Probe("weights")
    x, _ = cases.tensors(layer.spec)
    mask = torch.rand(3, 6, 7, 7) < 0.6
    y = layer(x, mask=mask, probe=probe)
    assert (probe.tensors["weights"][~mask] == 0).all()
    check_close(layer(x, mask=mask), y)


@pytest.mark.parametrize("tokens", ["many", "one", 5, 300, 5000])
@pytest.mark.parametrize("when", [[], ["grad"], ["training"]])
def test_a_group_runs_on_the_backend_of_a_layer_with_its_pattern(tokens, when):
    spec = hw.design(
        model=60,
        heads=6,
        kv=2,
        pattern=hw.patterns.PerHead(
            (hw.patterns.Causal(), STREAMING, hw.patterns.Dilated(5, rate=3)), (0, 0, 0, 1, 1, 2)
        ),
    )
    groups = hw.why(spec, tokens=tokens, when=when).call.groups
    assert [group.signature.score_heads for group in groups] == [(0, 1, 2), (3, 4), (5,)]
    for group in groups:
        heads = len(group.signature.score_heads)
        alone = hw.design(model=60, heads=heads, kv=1, dim=10, pattern=group.signature.pattern)
        expected = hw.why(alone, tokens=tokens, when=when).call
        assert (group.backend, group.length_ranges) == (expected.backend, expected.length_ranges)


def test_the_report_names_the_backend_of_each_group():
    spec = hw.design(
        model=64,
        heads=4,
        pattern=hw.patterns.PerHead((hw.patterns.Causal(), hw.patterns.Window(9)), (0, 1, 1, 1)),
    )
    report = hw.why(spec, tokens=4096)
    assert report.backend == "flash_cpu, block_sparse"
    assert "head 0 (causal()): flash_cpu; heads 1, 2, 3 (window(9)): block_sparse" in " ".join(
        str(report).split()
    )
    assert [group["pattern"] for group in report.data["groups"]] == ["causal()", "window(9)"]
    assert report.reasons_against["sdpa"] == ["runs heads with one pattern, and these have several"]
    assert hw.why(spec, want=["weights"]).backend == "dense"
    assert hw.why(spec, want=["weights"]).call.groups == ()


# --- Counts ---------------------------------------------------------------------------------------


def component(spec):
    return AttentionComponent("attention", spec)


def parts_of(spec):
    """Layers that have the heads of one pattern each."""
    for pattern, heads in spec.pattern.groups:
        kv = len({spec.heads.kv_head_of_query[head] for head in heads})
        yield hw.design(
            model=spec.model, heads=len(heads), kv=kv, dim=spec.heads.dim, pattern=pattern
        )


COUNTED = hw.design(
    model=24,
    heads=6,
    kv=3,
    dim=4,
    pattern=hw.patterns.PerHead(
        (hw.patterns.Causal(), hw.patterns.Window(40) | hw.patterns.First(3)), (0, 0, 1, 1, 1, 1)
    ),
)


def core(items):
    return sum(value for name, value in items if name.startswith("core"))


@pytest.mark.parametrize(
    "call", [ForwardCall(2, 300), ForwardCall(2, 7, past=290), ForwardCall(3, 5, 700, mode="steps")]
)
def test_executed_flops_are_the_sum_over_groups(call):
    on = ExecutionTarget()

    def executed(spec):
        outside = sum(
            p.flops
            for p in component(spec).required_products(call)
            if not p.name.startswith("core")
        )
        return component(spec).executed_flops(call, on) - outside

    def backward(spec):
        outside = sum(
            p.num_grad_factors * p.flops
            for p in component(spec).required_products(call)
            if not p.name.startswith("core")
        )
        return component(spec).executed_backward_flops(call, on) - outside

    assert executed(COUNTED) == sum(map(executed, parts_of(COUNTED)))
    if call.mode != "steps":
        assert backward(COUNTED) == sum(map(backward, parts_of(COUNTED)))


RINGS = hw.design(
    model=24,
    heads=6,
    kv=2,
    dim=4,
    pattern=hw.patterns.PerHead(
        (hw.patterns.Window(3), hw.patterns.Window(6) | hw.patterns.First(2)), (0, 0, 0, 1, 1, 1)
    ),
)


@pytest.mark.parametrize(
    ("spec", "count", "keys"), [(COUNTED, 120, 2 * 120 + 4 * 43), (RINGS, 41, 3 * 3 + 3 * 8)]
)
@torch.no_grad()
def test_a_decode_step_multiplies_the_keys_of_each_pattern_alone(spec, count, keys):
    layer, x = cases.layer(spec, torch.float64), torch.randn(2, count, 24, dtype=torch.float64)
    cache = layer.cache(batch=2, capacity=128)
    layer(x[:, :-1], cache=cache)
    step = torch_flops(layer, x[:, -1:], cache=cache)
    outside = costs.required_flops(spec, hw.costs.CallSize(2, 1, 1, count, 0))
    assert step - outside == 2 * 2 * (2 * 4) * keys
    call = ForwardCall(2, 1, count - 1, mode="steps")
    assert step == component(spec).executed_flops(call, ExecutionTarget())


def test_bytes_are_read_by_the_heads_that_need_them():
    """The first key-value head is read whole, the two others by heads with a window of 40 and 3
    sinks.
    """
    assert patterns_of_kv_heads(COUNTED) == (
        hw.patterns.Causal(),
        hw.patterns.Window(40) | hw.patterns.First(3),
        hw.patterns.Window(40) | hw.patterns.First(3),
    )
    assert component(COUNTED).key_reads(ForwardCall(1, 1, 999, mode="steps")) == (1000, 43, 43)
    assert component(COUNTED).key_reads(ForwardCall(1, 1000)) == (1000, 1000, 1000)
    estimate = estimate_cost(COUNTED, hw.Workload(context=1000))
    per_head, queries_and_outputs = 2 * 4 * 2, 2 * 6 * 4 * 2
    assert (
        estimate.operations["decode"][1].moved == per_head * (1000 + 43 + 43) + queries_and_outputs
    )
    shared = replace(
        COUNTED,
        pattern=hw.patterns.PerHead(
            (hw.patterns.Causal(), hw.patterns.Window(4)), (0, 1, 1, 1, 0, 1)
        ),
    )
    assert patterns_of_kv_heads(shared)[0] == hw.patterns.Causal() | hw.patterns.Window(4)


def test_a_cache_keeps_what_some_head_reads():
    assert COUNTED.pattern.retention == (0, None)
    windows = base(
        pattern=hw.patterns.PerHead(
            (hw.patterns.Window(4), hw.patterns.Window(6) | hw.patterns.First(2)),
            (0, 0, 0, 1, 1, 1),
        )
    )
    assert windows.pattern.retention == (2, 6)
    cache = cases.layer(windows).cache(batch=2, capacity=100)
    assert cache.nbytes == costs.cache_bytes(windows, batch=2, capacity=100, bytes_per_number=8)
    assert [own.slots for own in cache.caches] == [8, 4]
    shared = base(
        pattern=hw.patterns.PerHead(
            (hw.patterns.Window(4), hw.patterns.Window(6) | hw.patterns.First(2)),
            (0, 1, 1, 0, 0, 1),
        ),
        kv=3,
    )
    assert cases.layer(shared).cache(batch=2, capacity=100).slots == 8


def held_bytes(cache):
    """The bytes of all tensors that a cache holds keys and values in, each storage once."""
    storages = {}
    for own in cache.caches:
        for tensor in own.entry.values():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("store", [None, "int8"])
def test_streaming_heads_keep_sinks_and_recent_tokens(store):
    """DuoAttention: of 2 key-value heads with 64 channels, one keeps 4,096 tokens and the other 64
    + 256.
    """
    spec = hw.design(preset="streaming_retrieval")
    cache = make_cache(spec, batch=3, capacity=4096, storage_format=store)
    bytes_per_token = 2 * (64 * 4 if store is None else 64 + 4)
    assert cache.nbytes == held_bytes(cache) == 3 * (4096 + 64 + 256) * bytes_per_token
    assert costs.cache_bytes(spec, batch=3, capacity=4096, storage=store or "") == cache.nbytes
    every_token = hw.design(preset="streaming_retrieval", pattern="causal")
    assert (
        costs.cache_bytes(every_token, batch=3, capacity=4096, storage=store or "")
        == 3 * 2 * 4096 * bytes_per_token
    )


DIVIDED = {
    "all tokens and sinks": hw.patterns.PerHead(
        (STREAMING, hw.patterns.Causal()), (0, 0, 0, 1, 1, 1)
    ),
    "two rings": hw.patterns.PerHead(
        (hw.patterns.Window(3), hw.patterns.Window(6) | hw.patterns.First(2)), (0, 0, 0, 1, 1, 1)
    ),
    "three patterns": hw.patterns.PerHead(
        (hw.patterns.Window(2), hw.patterns.Window(5), hw.patterns.Causal()), (0, 1, 0, 2, 2, 2)
    ),
}


@pytest.mark.parametrize("name", DIVIDED)
@torch.no_grad()
def test_divided_caches_give_every_reader_the_same_outputs(name):
    """One call for each pattern, all heads in one call with probed weights, and probed keys."""
    layer = cases.layer(base(pattern=DIVIDED[name], kv=2, modifiers=(hw.parts.Rotary(base=30.0),)))
    x = torch.randn(3, 17, 10, dtype=torch.float64)
    whole, probe = layer(x), hw.Probe("weights")
    layer(x, probe=probe)
    kinds = {
        "plain": {},
        "probed": {"probe": hw.Probe("weights")},
        "keys": {"probe": hw.Probe("k", "v")},
    }
    for kind, options in kinds.items():
        cache = layer.cache(batch=3, capacity=17)
        assert isinstance(cache, HeadGroupCache)
        outputs = [
            layer(x[:, first : first + n], cache=cache, **options)
            for first, n in ((0, 5), (5, 1), (6, 4), (10, 1))
        ]
        check_close(torch.cat(outputs, 1), whole[:, :11])
        if kind == "probed":
            weights = probe.tensors["weights"][:, :, 10, :11]
            seen = options["probe"].tensors["weights"][:, :, 0]
            check_close(seen.sort(-1).values[..., -6:], weights.sort(-1).values[..., -6:])
        cache.select_rows(torch.tensor([2, 0]))
        check_close(layer(x[[2, 0], 11:12], cache=cache), whole[[2, 0], 11:12])


# --- Decoding -------------------------------------------------------------------------------------

CACHED = {
    "all tokens": PATTERN,
    "a ring": hw.patterns.PerHead(
        (hw.patterns.Window(2), hw.patterns.Window(4) | hw.patterns.First(1)), (0, 1, 1, 0, 1, 0)
    ),
    "a prefix": hw.patterns.PerHead(
        (hw.patterns.Causal(), hw.patterns.Prefix(3)), (0, 1, 1, 0, 1, 0)
    ),
    "gaps": hw.patterns.PerHead(
        (hw.patterns.Dilated(3, rate=2), hw.patterns.Causal()), (0, 1, 1, 0, 1, 0)
    ),
    **DIVIDED,
}


@pytest.mark.parametrize("store", [None, "int8"])
@pytest.mark.parametrize("name", CACHED)
def test_tokens_decode_one_by_one_as_in_one_pass(name, store):
    # whose int8 caches a backend may read in place
    dtype = torch.float64 if store is None else torch.float32
    layer = cases.layer(
        base(pattern=CACHED[name], kv=2, modifiers=(hw.parts.Alibi(),) if store is None else ()),
        dtype,
    )
    x = torch.randn(3, 17, 10, dtype=torch.float64).to(dtype)
    expected = layer(x)
    with torch.no_grad():
        for chunks in [(17,), (3, *(1,) * 14), (5, 1, 1, 9, 1)]:
            cache = layer.cache(batch=3, capacity=20, storage_format=store)
            ours = part_checks.decode_in_chunks(layer, x, chunks, cache)
            if store is None:
                check_close(ours, expected)
            else:
                assert (ours - expected).abs().max() < 0.05 * expected.abs().max()


@torch.no_grad()
def test_a_kernel_for_int8_caches_gets_dequantised_heads():
    layer = cases.layer(
        base(
            pattern=hw.patterns.PerHead((hw.patterns.Causal(), STREAMING), (0, 0, 0, 1, 1, 1)), kv=2
        ),
        torch.float32,
    )
    x = torch.randn(3, 17, 10)
    expected = layer(x)[:, -1:]
    cache = layer.cache(batch=3, capacity=20, storage_format="int8")
    layer(x[:, :-1], cache=cache)
    layer.backend_name = "ragged"
    assert (layer(x[:, -1:], cache=cache) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("pattern", [PATTERN, *DIVIDED.values()])
def test_rows_of_different_lengths_decode_on(pattern):
    layer = cases.layer(base(pattern=pattern, kv=2))
    x = torch.randn(3, 9, 10, dtype=torch.float64)
    lengths = [4, 2, 3]
    with torch.no_grad():
        cache = layer.cache(batch=3, capacity=12)
        first = hw.SequenceInfo.from_batch(x[:, :4], lengths=lengths)
        layer(x[:, :4], cache=cache, sequence=first)
        ours = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in (4, 5)], 1)
        for row, length in enumerate(lengths):
            alone = torch.cat([x[row : row + 1, :length], x[row : row + 1, 4:6]], 1)
            check_close(ours[row], layer(alone)[0, length:])


# --- Selection of heads ---------------------------------------------------------------------------


def test_pruned_and_permuted_heads_keep_their_patterns():
    spec = base(
        pattern=hw.patterns.PerHead(
            (hw.patterns.Causal(), STREAMING, hw.patterns.Window(2)), (0, 1, 2, 0, 1, 2)
        )
    )
    weights = cases.layer(spec).state_dict()
    assert head_axis_ops.keep_heads(spec, weights, [1, 2, 4])[0].pattern == hw.patterns.PerHead(
        (STREAMING, hw.patterns.Window(2)), (0, 1, 0)
    )
    assert head_axis_ops.keep_heads(spec, weights, [1, 4])[0].pattern == STREAMING
    order = (3, 0, 5, 1, 2, 4)
    permuted, moved = permute_heads(spec, weights, order)
    assert permuted.pattern.pattern_of_head == (0, 0, 1, 2, 1, 2)
    layer = cases.load_layer(permuted, moved)
    original = cases.load_layer(spec, weights)
    x, _ = cases.tensors(spec)
    check_close(layer(x), original(x))
