"""Attribution patching against gradients of plain transformers and against small patches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.hub.pretrained_models import copy_live_model
from headwise.observe.head_analysis.attribution_patching import attribute_heads
from headwise.observe.head_analysis.circuit_graph import CircuitModel
from headwise.observe.head_analysis.edge_attribution import (
    EdgeOptions,
    attribute_edges,
    run_circuit,
    score_edges,
)
from headwise.observe.head_analysis.path_patching import PairRuns, read_pairs
from support.families import FAMILIES
from support.plain_patching import (
    CLEAN,
    CORRUPT,
    LAYERS,
    SHAPES,
    Plain,
    build,
    metric,
    name_of,
    output_of,
)
from support.transformers_models import HEADS, ZOO

# of the derivatives, with their relative tolerance: norms of Llama in transformers are in float32
STEPS = {"gpt2": (1e-4, 1e-4), "bert": (1e-4, 1e-4), "llama": (1e-2, 1e-2)}
HEAD_PARTS = ("output", "q", "k", "v")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ours", [False, True])
def test_estimates_are_derivatives_of_patches(name, ours):
    """Each estimate is the derivative of the metric as the head moves to the corrupt text."""
    if ours and name == "bert":
        pytest.skip("the encoder is covered by the model of transformers")
    model = copy_live_model(build(name)) if ours else build(name)
    result = attribute_heads(model, [(CLEAN, CORRUPT)], metric, exact=0)
    by_name = {one.name: one for one in result.heads}
    (size, tolerance) = STEPS["gpt2" if ours else name]
    for layer, head in ((0, 1), (1, 3), (2, 0)):
        for part in HEAD_PARTS:
            clean = hw.head_outputs(model, CLEAN, [(layer, head)], part=part)
            corrupt = hw.head_outputs(model, CORRUPT, [(layer, head)], part=part)
            values: list[float] = []
            for step in (size, -size):
                moved = {ref: one + step * (corrupt[ref] - one) for ref, one in clean.items()}
                with hw.patch(model, moved, part=part), torch.no_grad():
                    output = model(CLEAN) if ours else output_of(model, CLEAN)
                    values.append(float(metric(output)))
            expected = (values[0] - values[1]) / (2 * size)
            of_head = by_name[f"L{layer}H{head}"]
            assert of_head.effects[part].value == pytest.approx(
                expected, rel=tolerance, abs=tolerance / 100
            )
            assert sum(of_head.tokens[part]) == pytest.approx(of_head.effects[part].value)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_equal_those_of_plain_transformers(name):
    plain = Plain(name)
    parts: list[dict] = []
    for ids in (CORRUPT, CLEAN):
        output = plain.model(input_ids=ids).logits
        parts.append(dict(plain.parts))
    grads = torch.autograd.grad(metric(output), list(parts[1].values()))
    result = attribute_heads(build(name), [(CLEAN, CORRUPT)], metric, exact=0)
    by_name = {one.name: one for one in result.heads}
    for (layer, part), grad in zip(parts[1], grads, strict=True):
        difference = parts[0][layer, part] - parts[1][layer, part]
        expected = (difference * grad).sum((0, 2, 3)).tolist()
        for head in range(HEADS):
            actual = by_name[f"L{layer}H{head}"].effects[part].value
            assert actual == pytest.approx(expected[head], rel=1e-5, abs=1e-9)


def test_exact_effects_are_patches_and_agreement_is_measured():
    model = build("llama")
    result = attribute_heads(model, [(CLEAN, CORRUPT)], metric, exact=6)
    measured = [one for one in result.heads if one.exact is not None]
    assert len(measured) == 6
    for one in measured:
        values = hw.head_outputs(model, CORRUPT, [one.name])
        with hw.patch(model, values):
            expected = float(metric(output_of(model, CLEAN))) - result.clean
        assert one.exact is not None
        assert one.exact.value == pytest.approx(expected, rel=1e-9)
    assert result.agreement is not None
    exact = [one.exact.value for one in measured if one.exact is not None]
    pairs = np.array([[one.effects["output"].value for one in measured], exact]).T
    assert result.agreement.pearson == pytest.approx(np.corrcoef(pairs.T)[0, 1])


def test_integrated_estimates_of_the_embeddings_sum_to_the_whole():
    """Integrated gradients are complete: over enough steps they add up to the difference."""
    model = build("gpt2")
    nodes = CircuitModel(model)
    (pair,) = read_pairs(model, [(CLEAN, CORRUPT)], metric)
    from headwise.observe.head_analysis.attribution_patching import attribute_pair

    runs = PairRuns(nodes, pair, nodes.vector_sites)
    total = runs.corrupt_value - runs.clean_value
    errors = [
        abs(attribute_pair(runs, steps)["embedding"][""].sum() - total) for steps in (1, 20, 400)
    ]
    assert errors[2] < 1e-3 * abs(total)
    assert errors[2] < errors[1] < errors[0]


# --- Edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_edges_are_derivatives_of_path_patching(name):
    plain = Plain(name)
    model = build(name)
    nodes = CircuitModel(model)
    (pair,) = read_pairs(model, [(CLEAN, CORRUPT)], metric)
    scores = score_edges(PairRuns(nodes, pair, nodes.vector_sites), 1)
    rows = [nodes.name(node) for node in nodes.senders]
    columns = [nodes.name(node) for node in nodes.receivers]
    edges = [
        ((0, 1), (2, "k", 3)),
        ((0, 2), (1, "q", 0)),
        ((1, 0), (2, "v", 2)),
        ((0, 3), 2),
        (0, (1, "v", 1)),
        (1, 2),
        (1, "logits"),
        ((2, 1), "logits"),
        ((1, 2), 1),
    ]
    (size, tolerance) = STEPS[name]
    for sender, receiver in edges:
        moved = [float(plain.path([sender], [receiver], True, share)) for share in (size, -size)]
        expected = (moved[0] - moved[1]) / (2 * size)
        actual = scores[rows.index(name_of(sender)), columns.index(name_of(receiver))]
        assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance / 100)
    for sender, receiver in [((1, 1), (1, "q", 2)), (1, (1, "k", 0)), ((2, 0), 1)]:
        edge = scores[rows.index(name_of(sender)), columns.index(name_of(receiver))]
        assert np.isnan(edge)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_circuits_equal_runs_node_by_node(name, seed):
    plain = Plain(name)
    model = build(name)
    nodes = CircuitModel(model)
    (pair,) = read_pairs(model, [(CLEAN, CORRUPT)], metric)
    runs = PairRuns(nodes, pair)
    kept = np.random.default_rng(seed).random((len(nodes.senders), len(nodes.receivers))) < 0.6
    kept[0] = True  # the embeddings
    rows = [nodes.name(node) for node in nodes.senders]
    columns = [nodes.name(node) for node in nodes.receivers]

    def is_kept(sender, receiver):
        return kept[rows.index(name_of(sender)), columns.index(name_of(receiver))]

    expected = float(plain.circuit(is_kept))
    assert run_circuit(runs, kept) == pytest.approx(expected, rel=1e-6)
    ours = copy_live_model(model) if name != "bert" else model
    (pair,) = read_pairs(ours, [(CLEAN, CORRUPT)], metric)
    runs_of_ours = PairRuns(CircuitModel(ours), pair)
    assert run_circuit(runs_of_ours, kept) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "olmo2", "qwen3"])
def test_all_edges_keep_the_metric_and_none_lose_it(name):
    model = ZOO[name].build()
    nodes = CircuitModel(model)
    (pair,) = read_pairs(model, [(CLEAN, CORRUPT)], metric)
    runs = PairRuns(nodes, pair)
    shape = (len(nodes.senders), len(nodes.receivers))
    assert run_circuit(runs, np.ones(shape, bool)) == pytest.approx(runs.clean_value, rel=1e-3)
    assert run_circuit(runs, np.zeros(shape, bool)) == pytest.approx(runs.corrupt_value, rel=1e-3)


def test_a_graph_has_curves_and_agreement():
    model = build("llama")
    graph = attribute_edges(
        model, [(CLEAN, CORRUPT), (CORRUPT, CLEAN)], metric, options=EdgeOptions(exact=20, points=5)
    )
    assert graph.num_edges == sum(~np.isnan(graph.scores.ravel()))
    heads = HEADS
    per_layer = [1 + layer * (heads + 1) for layer in range(LAYERS)]
    expected = sum(3 * heads * count + count + heads for count in per_layer) + 1 + LAYERS * 5
    assert graph.num_edges == expected
    last = graph.sizes[-1]
    assert last.edges == graph.num_edges
    assert last.faithfulness.value == pytest.approx(1, rel=1e-6)
    assert last.completeness.value == pytest.approx(0, abs=1e-6)
    assert graph.agreement is not None
    assert graph.agreement.count == 20
    assert graph.data["edges"][0]["sender"]
    assert "kept" in str(graph)
    assert len(graph.figure.panels) == 2


def test_a_graph_beyond_the_budget_is_refused_before_it_starts():
    with pytest.raises(ValueError, match=r"the graph has 16 senders .* 40 receivers .* budget"):
        attribute_edges(
            build("llama"), [(CLEAN, CORRUPT)], metric, options=EdgeOptions(budget=1000)
        )


def test_without_curves_a_graph_needs_memory_for_its_scores_alone():
    """16 x 40 numbers for each pair, and no run of a circuit."""
    options = EdgeOptions(budget=20_000, points=0, exact=0)
    graph = attribute_edges(build("llama"), [(CLEAN, CORRUPT)], metric, options=options)
    assert graph.sizes == ()
    assert graph.edges


def test_blocks_without_attention_or_known_mlp_are_refused():
    """What the Mamba block of Nemotron-H writes would count as the direct path around it."""
    [family] = [one for one in FAMILIES if one.model_type == "nemotron_h"]
    words = "headwise finds no MLP in model.layers.0 of NemotronHForCausalLM, which also has"
    with pytest.raises(ValueError, match=words):
        attribute_edges(family.build().eval().float(), [(CLEAN, CORRUPT)], metric)
