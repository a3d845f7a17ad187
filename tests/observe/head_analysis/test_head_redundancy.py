"""Distances, similarity, clusters and maps of heads, against float64 definitions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import headwise as hw
from headwise.observe.head_analysis import head_redundancy as module, head_similarity as similarity
from headwise.observe.head_analysis.head_redundancy import (
    ComparableHeads,
    RedundancyOptions,
    RedundancyResult,
    measure_redundancy,
)
from headwise.observe.head_analysis.head_similarity import (
    HeadLocation,
    OutputReservoir,
    SampledRows,
    average_linkage,
    centred_kernel_alignment,
    cut_clusters,
    embed_in_plane,
    jensen_shannon_divergence,
)
from headwise.observe.head_analysis.resampling import (
    MAX_FOLDS,
    FoldedSums,
    MeanIntervals,
    class_separation_test,
    compare_with_null,
    expected_pairs_below,
    poisson_test,
)
from support.number_examples import make_example, make_examples, small_gpt2

Array = NDArray[np.float64]
LIGHT = RedundancyOptions(num_permutations=19)


def rows(heads: int = 5, count: int = 3, keys: int = 7, seed: int = 0) -> Tensor:
    """Rows of weights, some of them zero."""
    draw = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(heads, count, keys, generator=draw)
    return scores.masked_fill(torch.rand(scores.shape, generator=draw) < 0.2, -torch.inf).softmax(
        -1
    )


def divergence(p: Array, q: Array) -> float:
    """The mean of both relative entropies to the middle: another form than the one that is
    computed.
    """
    total = 0.0
    for one, other in zip(p, q, strict=True):
        middle = (one + other) / 2
        total += 0.5 * (one * math.log(one / middle) if one > 0 else 0)
        total += 0.5 * (other * math.log(other / middle) if other > 0 else 0)
    return total


def eager(net: Any, text: Any) -> Tensor:
    """The weights of all heads of all layers, layer by layer, in float64."""
    recorded = [hw.Probe("weights") for _ in net.spec.attention_specs()]
    net.probes = dict(zip((name for name, _ in net.spec.attention_specs()), recorded, strict=True))
    with torch.no_grad():
        net(text.inputs["x"])
    net.probes = {}
    return torch.cat([probe.tensors["weights"][0] for probe in recorded]).double()


def only(found: RedundancyResult) -> ComparableHeads:
    (one,) = found.readers
    return one


# --- distances ------------------------------------------------------------------------------------


def test_every_pair_as_it_is_defined():
    result = rows()
    found, weights = jensen_shannon_divergence(result).numpy(), result.double().numpy()
    for one, other in itertools.product(range(5), repeat=2):
        expected = sum(divergence(weights[one, row], weights[other, row]) for row in range(3))
        assert found[one, other] == pytest.approx(expected, abs=1e-6)


def test_pairs_in_pieces_are_pairs_at_once(monkeypatch: pytest.MonkeyPatch):
    result = rows(count=11)
    whole = jensen_shannon_divergence(result)
    monkeypatch.setattr("headwise.observe.head_analysis.head_similarity.MAX_CELLS", 40)
    assert torch.allclose(jensen_shannon_divergence(result), whole, atol=1e-12)


def test_the_other_rows_of_the_other_head():
    result, other = rows(), rows(seed=1)
    found = jensen_shannon_divergence(result, other)
    p, q = result.double().numpy(), other.double().numpy()
    assert found[1, 3].item() == pytest.approx(
        sum(divergence(p[1, row], q[3, row]) for row in range(3)), abs=1e-6
    )
    assert torch.equal(found.diagonal(), torch.zeros(5, dtype=torch.float64))


def test_distances_of_a_model_are_means_over_all_rows():
    net, texts = small_gpt2(), make_examples(3)
    found = only(measure_redundancy(net, texts, options=LIGHT))
    total, count = np.zeros((8, 8)), 0
    for text in texts:
        weights = eager(net, text).numpy()
        for row in range(weights.shape[1]):
            for one, other in itertools.product(range(8), repeat=2):
                total[one, other] += divergence(weights[one, row], weights[other, row])
            count += 1
    np.testing.assert_allclose(found.distances, total / count, atol=1e-6)
    assert found.heads[5] == HeadLocation("decoder.1.attention", 1, 1)
    inside = (found.low <= found.distances + 1e-9) & (found.distances <= found.high + 1e-9)
    assert inside.all()


def test_sampled_rows_are_near_all_rows_and_inside_their_interval():
    net, texts = small_gpt2(), make_examples(24)
    whole, some = (
        only(measure_redundancy(net, texts, options=LIGHT._replace(rows_per_text=count)))
        for count in (64, 5)
    )
    pairs = np.triu_indices(8, 1)
    stored = (some.low <= whole.distances) & (whole.distances <= some.high)
    assert not np.allclose(some.distances, whole.distances)
    assert stored[pairs].mean() > 0.9
    np.testing.assert_allclose(some.distances, whole.distances, atol=0.06)


def test_one_text_has_no_interval():
    folds = FoldedSums()
    folds.add(0, np.array([1.0]), 1.0)
    assert np.isnan(folds.mean_intervals()[1:]).all()


def test_means_are_those_of_all_texts_but_intervals_are_over_folds():
    sums, folds = np.random.default_rng(0).random((3 * MAX_FOLDS + 5, 2)), FoldedSums()
    for number, one in enumerate(sums):
        folds.add(number, one, 2.0)
    np.testing.assert_allclose(folds.mean, sums.mean(0) / 2)
    assert folds.num_folds == MAX_FOLDS
    result = folds.mean_intervals()
    error = sums.std(0) / math.sqrt(len(sums)) / 2
    np.testing.assert_allclose(result.high - result.low, 2 * 2.0 * error, rtol=0.35)


def test_permuted_weights_leave_sinks_where_they_are():
    may = torch.ones(5, 5, dtype=torch.bool).tril().expand(3, 5, 5)
    weights = (
        torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))
        .masked_fill(~may, -torch.inf)
        .softmax(-1)
    )
    is_sink = torch.tensor([True, False, False, True, False])
    sampled_rows = SampledRows(
        ("text", "text"),
        (),
        torch.nn.functional.pad(weights * 0.9, (0, 1), value=0.1),
        may,
        is_sink,
    )
    values = [sampled_rows.permute_weights((0, seed)) for seed in range(20)]
    for one in values:
        assert torch.equal(one[..., [0, 3, 5]], sampled_rows.weights[..., [0, 3, 5]])
        assert torch.equal(one.sort(-1).values, sampled_rows.weights.sort(-1).values)
        assert torch.equal(one[..., :5].masked_fill(may, 0), torch.zeros(3, 5, 5))
    assert any(not torch.equal(one, sampled_rows.weights) for one in values)
    assert any(not torch.equal(one[0, 4], one[1, 4]) for one in values)
    assert torch.equal(sampled_rows.permute_weights((0, 3)), values[3])


def with_sinks(text: Any, places: list[int]) -> Any:
    """The text with special tokens at these places."""
    special = torch.zeros(text.streams["text"].count, dtype=torch.bool)
    special[places] = True
    return replace(text, streams={"text": replace(text.streams["text"], is_special=special)})


def test_distances_leave_out_sinks_and_rows_that_sinks_fill():
    """As defined, pair by pair and row by row: both heads must leave sinks at least one percent."""
    net, texts = small_gpt2(sharp=9.0), [with_sinks(text, [0, 3]) for text in make_examples(4)]
    found = only(measure_redundancy(net, texts, options=LIGHT))
    total, count, rows, on_sinks = np.zeros((8, 8)), np.zeros((8, 8)), 0, 0.0
    for text in texts:
        weights = eager(net, text).numpy()
        rest = np.delete(weights, [0, 3], 2)
        on_sinks += float(weights[..., [0, 3]].sum()) / 8
        for row in range(weights.shape[1]):
            rows += 1
            for one, other in itertools.product(range(8), repeat=2):
                p, q = rest[one, row], rest[other, row]
                if min(p.sum(), q.sum()) >= 0.01:
                    total[one, other] += divergence(p / p.sum(), q / q.sum())
                    count[one, other] += 1
    assert count.min() < rows  # some rows are left out
    np.testing.assert_allclose(found.distances, total / count, atol=1e-5)
    assert found.sink_weight == pytest.approx(on_sinks / rows, abs=1e-6)


def shared_sink(seed: int, heads: int = 7, rows: int = 11, keys: int = 13) -> SampledRows:
    """Heads that put 0.8 of every row on the first key, and the rest on keys of their own."""
    draw = torch.Generator().manual_seed(seed)
    weights = 0.2 * torch.cat([torch.zeros(heads, rows, 1), rows_of(heads, rows, keys, draw)], -1)
    weights[..., 0] += 0.8
    locations = tuple(HeadLocation("decoder.0.attention", 0, head) for head in range(heads))
    is_sink = torch.arange(keys) == 0
    may = torch.ones(heads, rows, keys, dtype=torch.bool)
    return SampledRows(
        ("text", "text"), locations, torch.nn.functional.pad(weights, (0, 1)), may, is_sink
    )


def rows_of(heads: int, rows: int, keys: int, draw: torch.Generator) -> Tensor:
    return (4 * torch.randn(heads, rows, keys - 1, generator=draw)).softmax(-1)


def test_heads_that_share_only_a_sink_are_not_called_redundant():
    sums = module._RedundancySums(shared_sink(0), LIGHT)
    for number in range(9):
        sums.add(number, shared_sink(number))
    found = module._compare_heads(("text", "text"), sums, None)
    assert found is not None
    assert found.sentence.startswith("Not shown to be redundant: ")
    assert found.sink_weight == pytest.approx(0.8, abs=1e-6)


def test_a_head_that_reads_sinks_alone_is_left_out_and_reported():
    texts = []
    for number in range(5):
        rows = shared_sink(number)
        rows.weights[2] = 0
        rows.weights[2, :, 0] = 1
        texts.append(rows)
    sums = module._RedundancySums(texts[0], LIGHT)
    for number, rows in enumerate(texts):
        sums.add(number, rows)
    found = module._compare_heads(("text", "text"), sums, None)
    assert found is not None
    assert [head.head for head in found.heads] == [0, 1, 3, 4, 5, 6]
    assert [head.head for head in found.without_rest] == [2]
    assert np.isfinite(found.distances).all()


# --- what heads say -------------------------------------------------------------------------------


def by_kernels(x: Array, y: Array) -> float:
    """Unbiased CKA by sums over kernels without their diagonals (Song et al. 2012, equation 5)."""

    def hsic(k: Array, other: Array) -> float:
        n = len(k)
        sums = k.sum() * other.sum() / (n - 1) / (n - 2)
        return float((k * other).sum() + sums - 2 / (n - 2) * k.sum(0) @ other.sum(0))

    k, other = (z @ z.T - np.diag((z**2).sum(1)) for z in (x - x.mean(0), y - y.mean(0)))
    return hsic(k, other) / math.sqrt(hsic(k, k) * hsic(other, other))


def without_bias(x: Array, y: Array) -> float:
    """The same by sums over four different tokens (Song et al. 2012), every one of them."""

    def hsic(k: Array, other: Array) -> float:
        n = len(k)
        pairs = triples = quads = 0.0
        for i, j in itertools.permutations(range(n), 2):
            pairs += k[i, j] * other[i, j]
        for i, j, q in itertools.permutations(range(n), 3):
            triples += k[i, j] * other[i, q]
        for i, j, q, r in itertools.permutations(range(n), 4):
            quads += k[i, j] * other[q, r]
        return pairs / math.perm(n, 2) + quads / math.perm(n, 4) - 2 * triples / math.perm(n, 3)

    k, other = x @ x.T, y @ y.T
    return hsic(k, other) / math.sqrt(hsic(k, k) * hsic(other, other))


def test_similarity_of_head_outputs():
    x = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = centred_kernel_alignment(x).numpy()
    for one, other in itertools.product(range(3), repeat=2):
        for definition in (without_bias, by_kernels):
            expected = definition((x[one] + 5).numpy(), x[other].numpy())
            assert found[one, other] == pytest.approx(expected, abs=1e-9)


def test_a_constant_head_is_similar_to_none():
    x = torch.stack([torch.ones(9, 3), torch.randn(9, 3)])
    assert torch.isnan(centred_kernel_alignment(x)[0]).all()
    assert not torch.isnan(centred_kernel_alignment(x)[1, 1])
    with pytest.raises(ValueError, match="cannot compare head outputs over 3 tokens"):
        centred_kernel_alignment(torch.randn(2, 3, 4))


def test_a_sample_of_tokens_does_not_depend_on_how_they_come():
    values = [torch.randn(count, 2, 3) for count in (5, 9, 4, 30)]
    one, other = OutputReservoir(20), OutputReservoir(20)
    for number, z in enumerate(values):
        one.add(number, {"a": z})
    for number in (3, 1, 0, 2):
        other.add(number, {"a": values[number]})
    keep = [tensor.features(["a"])[0, :, 0].sort().values for tensor in (one, other)]
    assert torch.equal(*keep)
    assert len(keep[0]) == 20
    assert torch.equal(one.features(["a"]), one.outputs["a"].transpose(0, 1))


def test_outputs_of_all_tokens_are_compared():
    net, texts = small_gpt2(), make_examples(4)
    found = only(measure_redundancy(net, texts, options=LIGHT)).outputs
    recorded: list[Tensor] = []
    for text in texts:
        probe = [hw.Probe("heads") for _ in range(2)]
        net.probes = {f"decoder.{n}.attention": one for n, one in enumerate(probe)}
        with torch.no_grad():
            net(text.inputs["x"])
        recorded.append(torch.cat([one.tensors["heads"][0] for one in probe], 1))
    x = torch.cat(recorded).double().numpy()
    assert found is not None
    for one, other in ((0, 5), (2, 3), (7, 7)):
        assert found[one, other] == pytest.approx(by_kernels(x[:, one], x[:, other]), abs=1e-6)


# --- clusters and maps ----------------------------------------------------------------------------


def test_clusters_join_by_the_mean_over_pairs():
    places = np.random.default_rng(5).normal(size=(9, 3))
    far = np.linalg.norm(places[:, None] - places, axis=-1)
    groups = [{n} for n in range(9)]
    for joined in average_linkage(far):
        separate = {
            (a, b): far[np.ix_(sorted(one), sorted(other))].mean()
            for (a, one), (b, other) in itertools.combinations(enumerate(groups), 2)
        }
        a, b = min(separate, key=lambda pair: separate[pair])
        assert joined.height == pytest.approx(separate[a, b])
        assert {joined.one, joined.other} == {min(groups[a]), min(groups[b])}
        groups = [group for n, group in enumerate(groups) if n not in (a, b)] + [
            groups[a] | groups[b]
        ]


def test_a_cut_is_between_clusters():
    far = np.abs(
        np.subtract.outer(np.array([0.0, 10, 0.1, 10.2, 50]), np.array([0.0, 10, 0.1, 10.2, 50]))
    )
    assert cut_clusters(average_linkage(far), 1.0) == (0, 1, 0, 1, 2)
    assert cut_clusters(average_linkage(far), 0.0) == (0, 1, 2, 3, 4)
    assert cut_clusters(average_linkage(far), 99.0) == (0, 0, 0, 0, 0)


def test_a_plane_is_found_again_and_again_alike():
    places = np.random.default_rng(2).normal(size=(17, 2)) * [3, 1]
    far = np.linalg.norm(places[:, None] - places, axis=-1)
    found = embed_in_plane(far, seed=4)
    assert found.stress < 1e-3
    np.testing.assert_allclose(
        np.linalg.norm(found.points[:, None] - found.points, axis=-1), far, atol=1e-2
    )
    np.testing.assert_array_equal(found.points, embed_in_plane(far, seed=4).points)


def test_stress_is_minimised_until_a_step_gains_nothing(monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(3).normal(size=(14, 6))
    far = np.linalg.norm(draw[:, None] - draw, axis=-1)
    stress = {}
    monkeypatch.setattr(similarity, "NUM_STARTS", 1)
    for num_steps in (0, 1, 10, 1000, 3000):
        monkeypatch.setattr(similarity, "MAX_STEPS", num_steps)
        stress[num_steps] = embed_in_plane(far).stress
    for num_steps, gain in ((0, 1e-2), (1, 1e-3), (10, 1e-5)):
        assert stress[1000] < stress[num_steps] - gain
    assert stress[1000] == pytest.approx(stress[3000], abs=1e-12)


@pytest.mark.parametrize("far", [np.array([[0.0, 2.0], [2.0, 0.0]]), np.zeros((3, 3))])
def test_few_or_equal_places_have_a_plane(far: Array):
    found = embed_in_plane(far)
    assert found.points.shape == (len(far), 2)
    assert found.stress < 1e-6


# --- the answer -----------------------------------------------------------------------------------


def copied(net: Any, layer: int, one: int, other: int) -> None:
    """Set one head of a layer to what another is, but for what it writes."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.startswith(f"decoder.{layer}.attention.project"):
                heads = parameter.view(-1, 5, *parameter.shape[1:])
                heads[other] = heads[one]


def test_exactly_the_copied_heads_form_a_cluster():
    net, texts = small_gpt2(layers=3), make_examples(8)
    for layer, one, other in ((0, 1, 3), (2, 0, 2)):
        copied(net, layer, one, other)
    found = only(measure_redundancy(net, texts, options=LIGHT._replace(max_distance=0.05)))
    names = {(pair[0].site, pair[0].head, pair[1].head) for pair in found.similar_pairs[:2]}
    assert names == {("decoder.0.attention", 1, 3), ("decoder.2.attention", 0, 2)}
    place = found.heads.index
    for pair in found.similar_pairs[:2]:
        assert found.distances[place(pair[0]), place(pair[1])] == pytest.approx(0, abs=1e-7)
        assert found.outputs is not None
        assert found.outputs[place(pair[0]), place(pair[1])] == pytest.approx(1)
    assert [len(own) for own in found.cluster_members][:3] == [2, 2, 1]
    assert max(one.height for one in found.merges[:2]) < 1e-7 < found.merges[2].height
    assert len(found.similar_pairs) == 2
    assert found.num_chance_clusters == 12
    findings = found.list_findings()
    assert (findings["clusters"], findings["clusters by chance"]) == (10, 12)
    assert findings["closest pair"] == " and ".join(map(str, found.similar_pairs[0]))


def test_untrained_heads_that_read_all_alike_are_not_called_redundant():
    found = measure_redundancy(small_gpt2(sharp=1.0), make_examples(8), options=LIGHT)
    assert only(found).sentence.startswith("Not shown to be redundant: ")


def test_independent_heads_are_called_redundant_at_the_nominal_rate():
    found = [
        only(measure_redundancy(small_gpt2(seed=seed), make_examples(6), options=LIGHT))
        for seed in range(8)
    ]
    assert sum(one.similar_pair_test.p < 0.05 for one in found) <= 2
    assert sum(one.similar_pair_test.value for one in found) <= 4 + 3 * sum(
        one.similar_pair_test.chance for one in found
    )


def test_near_pairs_are_compared_with_a_poisson_count():
    assert poisson_test(3, 1.5).p == pytest.approx(1 - math.exp(-1.5) * (1 + 1.5 + 1.125))
    assert poisson_test(0, 1.5).p == 1.0
    draw, hits = np.random.default_rng(0), 0
    mean, error = np.array([5.0, 5.2, 6.0]), np.array([1.0, 0.5, 1.0])
    result = MeanIntervals(mean, mean - 1.959964 * error, mean + 1.959964 * error)
    for _ in range(20_000):
        sample = draw.normal(mean, error)
        hits += int((sample + 1.959964 * error < np.minimum(mean, 5.1)).sum())
    assert expected_pairs_below(result, 5.1, num_units=10**6) == pytest.approx(
        hits / 20_000, rel=0.1
    )


def test_heads_that_all_read_one_place_are_called_redundant():
    net = small_gpt2()
    for layer in (0, 1):
        for head in (1, 2, 3):
            copied(net, layer, 0, head)
    found = measure_redundancy(net, make_examples(8), options=LIGHT)
    assert only(found).sentence.startswith("12 of 28 pairs of heads are significantly more similar")
    assert str(found).startswith("Transformer, 8 texts: similarity of heads. 12 of 28 pairs")


def test_a_source_and_a_text_are_compared_apart():
    pytest.importorskip("transformers")
    from support.transformers_models import ZOO

    texts = []
    for ids in ([5, 9, 11, 3, 4, 8], [7, 3, 12, 5], [4, 4, 9, 13, 6]):
        source, text = make_example(ids), make_example([*ids[::-1], 3, 6])
        inputs = {"input_ids": source.inputs["x"], "decoder_input_ids": text.inputs["x"]}
        texts.append(
            replace(
                text,
                inputs=inputs,
                streams={"text": text.streams["text"], "source": source.streams["text"]},
            )
        )
    found = measure_redundancy(
        ZOO["bart"].build(), texts, options=RedundancyOptions(num_permutations=3), name="bart"
    )
    assert {one.streams for one in found.readers} == {
        ("source", "source"),
        ("text", "text"),
        ("text", "source"),
    }
    assert all(len(one.heads) == 8 and one.outputs is not None for one in found.readers)
    assert found.data["readers"][0]["streams"] == ["source", "source"]


@pytest.mark.parametrize("name", ["bert", "llama", "gpt-oss"])
def test_models_of_others(name: str):
    pytest.importorskip("transformers")
    from support.transformers_models import ZOO

    model, texts = ZOO[name].build(), make_examples(3, "input_ids")
    found = only(measure_redundancy(model, texts, options=LIGHT))
    total, count = np.zeros((8, 8)), 0
    for text in texts:
        with torch.no_grad():
            outputs = model(**text.inputs, output_attentions=True).attentions
        weights = torch.cat([one[0] for one in outputs]).double()
        weights = (weights / weights.sum(-1, keepdim=True)).numpy()  # without learned sinks
        for row in range(weights.shape[1]):
            total += [[divergence(p, q) for q in weights[:, row]] for p in weights[:, row]]
            count += 1
    np.testing.assert_allclose(found.distances, total / count, atol=2e-6)


def test_weights_that_do_not_sum_to_one_are_skipped_and_reported():
    block = hw.model_spec.BlockSpec(hw.design(model=20, heads=4, pattern="causal"), feed=None)
    raw = hw.model_spec.BlockSpec(
        hw.design(model=20, heads=4, pattern="causal", normaliser=hw.parts.Sigmoid()), feed=None
    )
    stack = hw.model_spec.StackSpec.from_blocks(
        "decoder", 20, [block, raw], embedding=hw.model_spec.EmbeddingSpec(29)
    )
    net = hw.build(hw.model_spec.ModelSpec("odd", "decoder", (stack,)), seed=0)
    with torch.no_grad():
        for parameter in net.get_submodule("decoder.1").parameters():
            parameter.mul_(9)
    found = measure_redundancy(net.eval(), make_examples(3), options=LIGHT)
    why = "its weights are negative or sum to more than one"
    assert [head.site for head in only(found).heads] == ["decoder.0.attention"] * 4
    assert found.notes[1:] == (f"decoder.1.attention is left out: {why}",)


def test_incomparable_heads_are_refused():
    net = small_gpt2()
    with pytest.raises(ValueError, match="confidence intervals from 1 text; give at least two"):
        measure_redundancy(net, make_examples(1), options=LIGHT)
    with pytest.raises(ValueError, match="rows_per_text must be >= 1, got 0"):
        measure_redundancy(net, make_examples(2), options=RedundancyOptions(rows_per_text=0))
    bare = [hw.Example({"x": torch.ones(1, 9, dtype=torch.long)}, {})] * 2
    with pytest.raises(ValueError, match="example 0 has no annotations of the tokens of 'text'"):
        measure_redundancy(net, bare, options=LIGHT)
    with pytest.raises(ValueError, match="Linear has no attention that headwise finds"):
        measure_redundancy(torch.nn.Linear(2, 2), make_examples(2))
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        measure_redundancy(net.train(), make_examples(2))


def test_memory_does_not_grow_with_text_length(monkeypatch: pytest.MonkeyPatch):
    recorded: list[int] = []
    original = module.jensen_shannon_divergence

    def spy(weights: Tensor, *others: Tensor | None) -> Tensor:
        recorded.append(weights.shape[1])
        return original(weights, *others)

    monkeypatch.setattr(module, "jensen_shannon_divergence", spy)
    monkeypatch.setattr(
        "headwise.observe.head_analysis.head_similarity.MAX_SAMPLED_CELLS", 8 * 10 * 30
    )
    measure_redundancy(
        small_gpt2(), [make_example([5] * 30), make_example([6] * 300)], options=LIGHT
    )
    assert recorded == [10] * 2 + [8] * 2


# --- chance ---------------------------------------------------------------------------------------


def test_p_is_how_often_chance_does_as_much():
    sample = np.array([1.0, 2, 3, 4])
    assert compare_with_null(1.0, sample, "low") == (1.0, 2.5, 0.4)
    assert compare_with_null(5.0, sample).p == 0.2
    assert compare_with_null(0.0, sample).p == 0.2
    assert math.isnan(compare_with_null(0.0, sample[:0]).p)


def test_within_layer_similarity_is_calibrated_and_finds_planted_pairs():
    of, hits = [0] * 4 + [1] * 4 + [2] * 4, 0
    for trial in range(120):
        places = np.random.default_rng(trial).normal(size=(12, 5))
        far = np.linalg.norm(places[:, None] - places, axis=-1)
        hits += class_separation_test(far, of, 39, trial).p <= 0.1
    assert 0.03 < hits / 120 < 0.18
    places = np.repeat(np.eye(3) * 9, 4, 0) + np.random.default_rng(0).normal(size=(12, 3))
    far = np.linalg.norm(places[:, None] - places, axis=-1)
    assert class_separation_test(far, of, 99, 0).p == 0.01
