"""Path patching against an implementation with plain hooks on plain transformers, and on models in
which the path is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.hub.pretrained_models import copy_live_model
from headwise.observe.head_analysis.circuit_graph import CircuitModel, Node
from headwise.observe.head_analysis.edge_attribution import EdgeOptions, run_circuit
from headwise.observe.head_analysis.path_patching import PairRuns, random_sets, read_pairs
from support.plain_patching import (
    CLEAN,
    CORRUPT,
    SHAPES,
    Plain,
    build,
    metric,
    name_of,
    output_of,
)
from support.transformers_models import FALLBACK, ZOO

PATHS: list[tuple[list[Any], list[Any]]] = [
    ([(0, 1)], [(2, "k", 3)]),
    ([(0, 1)], [(1, "v", 2)]),
    ([(0, 1), (1, 0)], [(2, "q", 0), (2, "k", 1), (2, "v", 1)]),
    ([(0, 2)], ["logits"]),
    ([(0, 1), (0, 3)], [2]),
    ([0], [(2, "v", 1)]),
]


@pytest.mark.parametrize("mlps", ["free", "frozen"])
@pytest.mark.parametrize("name", SHAPES)
def test_paths_equal_those_of_plain_hooks(name, mlps):
    plain = Plain(name)
    expected = [float(plain.path(*path, mlps == "frozen")) for path in PATHS]
    model = build(name)
    paths = [([*map(name_of, one)], [*map(name_of, other)]) for one, other in PATHS]
    models = [model] if name == "bert" else [model, copy_live_model(model)]
    for each in models:
        result = hw.head_analysis.patch_paths(each, [(CLEAN, CORRUPT)], metric, paths, mlps=mlps)
        assert result.clean == pytest.approx(float(metric(output_of(model, CLEAN))), rel=1e-6)
        actual = [path.effect.value + result.clean for path in result.paths]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
        changes = np.abs(np.array(expected) - result.clean)
        assert (changes > 1e-6).all()


@pytest.mark.parametrize(
    "path", [("L1H1", "L1H2.v"), ("L1H0", "L0H0.q"), ("M0", "M0"), ("M1", ["M0", "L1H0.k"])]
)
def test_paths_backwards_are_refused(path):
    with pytest.raises(ValueError, match=r"there is no path from .* of earlier layers"):
        hw.head_analysis.patch_paths(build("gpt2"), [(CLEAN, CORRUPT)], metric, [path])


@pytest.mark.parametrize("pairs", [("the cat", "the dog"), ("ab", "cd"), [("a", "b", "c", "d")]])
def test_texts_are_no_pairs(pairs):
    with pytest.raises(ValueError, match="is no pair of texts; give a list of pairs"):
        hw.head_analysis.patch_paths(build("gpt2"), pairs, metric, [("L0H1", "logits")])


def test_seeds_are_natural():
    pairs = [(CLEAN, CORRUPT)]
    with pytest.raises(ValueError, match="seed=-1 is no seed"):
        hw.head_analysis.patch_paths(build("gpt2"), pairs, metric, [("L0H1", "logits")], seed=-1)
    options = EdgeOptions(seed=-1)
    with pytest.raises(ValueError, match="seed=-1 is no seed"):
        hw.head_analysis.attribute_edges(build("gpt2"), pairs, metric, options=options)


def test_all_senders_and_the_embedding_reach_the_logits():
    """With every node a sender, the frozen run is the run of the corrupt text."""
    model = build("llama")
    nodes = CircuitModel(model)
    everything = [nodes.name(node) for node in nodes.senders]
    result = hw.head_analysis.patch_paths(
        model, [(CLEAN, CORRUPT)], metric, [(everything, "logits")], mlps="frozen"
    )
    assert result.paths[0].effect.value == pytest.approx(result.total, rel=1e-9)


def test_several_receivers_are_a_whole_group():
    """Both query heads of a group read what the projected keys of the group are."""
    plain = Plain("llama")
    one = plain.path([(0, 1)], [(2, "k", 2)], False)
    both = plain.path([(0, 1)], [(2, "k", 2), (2, "k", 3)], False)
    assert abs(float(one - both)) > 1e-6


def test_the_chance_level_is_the_mean_of_other_heads_of_the_layer():
    model = build("gpt2")
    paths = [(f"L0H{head}", "L2H0.k") for head in range(4)]
    result = hw.head_analysis.patch_paths(model, [(CLEAN, CORRUPT)], metric, paths)
    values = [path.effect.value for path in result.paths]
    for head, path in enumerate(result.paths):
        others = [value for number, value in enumerate(values) if number != head]
        assert path.effect.chance == pytest.approx(np.mean(others))
    nodes = CircuitModel(model)
    senders = nodes.find_all(["L0:0,3", "L1H2"])
    sets = random_sets(nodes, senders, seed=0)
    for one in sets:
        assert [node.place for node in one] == [node.place for node in senders]
        assert len(set(one)) == 3
        assert not set(one) & set(senders)
    assert random_sets(nodes, nodes.find_all(["L0:0,1,2"]), seed=0) == []
    assert random_sets(nodes, nodes.find_all(["M0"]), seed=0) == []


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "qwen3", "gemma2", "gpt-oss", "olmo2", "deepseek"]
)
def test_every_block_has_an_mlp(name):
    model = ZOO[name].build()
    nodes = CircuitModel(model)
    assert len(nodes.mlps) == 2
    kinds = [node.kind for node in nodes.senders]
    assert kinds == ["embedding"] + 2 * (4 * ["head"] + ["mlp"])
    assert nodes.find("M1") == [Node("mlp", nodes.blocks[1])]


@pytest.mark.parametrize("name", ["bloom", "gptj", "falcon"])
def test_models_whose_heads_are_only_read_have_effects_of_outputs(name):
    """An MLP that adds the residual stream itself cannot be frozen."""
    model = FALLBACK[name].build()
    pair = [(CLEAN, CORRUPT)]
    result = hw.head_analysis.attribute_heads(model, pair, metric)
    assert result.agreement is not None
    assert result.agreement.pearson > 0.9
    assert result.notes == ("the weights come from no checkpoint, so they may be untrained",)
    paths = [("L0H1", "logits")]
    if name == "bloom":
        with pytest.raises(ValueError, match="finds no MLP in transformer"):
            hw.head_analysis.patch_paths(model, pair, metric, paths, mlps="frozen")
    else:
        frozen = hw.head_analysis.patch_paths(model, pair, metric, paths, mlps="frozen")
        assert abs(frozen.paths[0].effect.value) > 1e-3
    with pytest.raises(ValueError, match=r"k of .* cannot be replaced"):
        hw.head_analysis.patch_paths(model, pair, metric, [("L0H1", "L1H0.k")])
    with pytest.raises(ValueError, match=r"q of .* cannot be replaced"):
        hw.head_analysis.attribute_edges(model, pair, metric)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda logits: logits, r"the metric returns \[1, 7, 67\]"),
        (lambda logits: 3.0, "the metric returns float; return a tensor"),
        (lambda logits: logits[0, 0, 0] * float("nan"), "the metric is not finite"),
    ],
)
def test_metrics_that_are_no_number_are_refused(function, words):
    with pytest.raises(ValueError, match=words):
        hw.head_analysis.attribute_heads(build("gpt2"), [(CLEAN, CORRUPT)], function)


def test_texts_without_a_difference_are_noted():
    result = hw.head_analysis.patch_paths(
        build("gpt2"), [(CLEAN, CLEAN)], metric, [("L0H1", "logits")]
    )
    assert result.notes[-1].endswith("there is no difference")


def test_several_stacks_have_no_graph():
    model = ZOO["t5"].build()
    inputs = [{"input_ids": ids, "decoder_input_ids": CLEAN[:, :3]} for ids in (CLEAN, CORRUPT)]
    with pytest.raises(ValueError, match="2 stacks of layers instead of one residual stream"):
        hw.head_analysis.attribute_edges(model, [tuple(inputs)], metric)
    result = hw.head_analysis.patch_paths(
        model, [tuple(inputs)], lambda logits: logits[0, -1, 3], [("E0H1", "X1H0.v")]
    )
    assert result.pairs == 1
    with pytest.raises(
        ValueError, match=r"M0 is the MLP of encoder.block.0 and of decoder.block.0"
    ):
        hw.head_analysis.patch_paths(model, [tuple(inputs)], metric, [("M0", "D1H0.q")])


# --- Uncommon models ------------------------------------------------------------------------------


def test_blocks_that_run_several_times_have_paths_between_heads():
    """ALBERT by hooks of torch that count the calls of its one block."""
    entry = ZOO["bert"]._replace(
        model="AlbertForMaskedLM",
        config="AlbertConfig",
        keys={**ZOO["bert"].keys, "embedding_size": 16, "num_hidden_layers": 3},
    )
    model = entry.build("sdpa").double()
    dense = model.get_submodule(
        "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense"
    )

    def run(ids, heads=None):
        seen = []

        def replace(_, args):
            seen.append(args[0] if heads is None else heads[len(seen)])
            return (seen[-1],)

        handle = dense.register_forward_pre_hook(replace)
        output = output_of(model, ids)
        handle.remove()
        return metric(output), seen

    (clean, frozen) = run(CLEAN)
    (_, corrupt) = run(CORRUPT)
    expected = []
    for layer in range(3):
        heads = [one.clone() for one in frozen]
        heads[layer][..., :8] = corrupt[layer][..., :8]
        expected.append(float(run(CLEAN, heads)[0] - clean))
    paths = [(f"L{layer}H0", "logits") for layer in range(3)]
    result = hw.head_analysis.patch_paths(model, [(CLEAN, CORRUPT)], metric, paths)
    assert [path.effect.value for path in result.paths] == pytest.approx(expected, rel=1e-6)
    assert min(map(abs, expected)) > 1e-4
    heads = hw.head_analysis.attribute_heads(model, [(CLEAN, CORRUPT)], metric)
    assert heads.agreement is not None
    assert heads.agreement.count == 12
    last = {one.name: one.exact for one in heads.heads}["L2H0"]
    assert last is not None
    assert last.value == pytest.approx(expected[2], rel=1e-6)
    words = "AlbertForMaskedLM runs the same blocks several times"
    pairs = [(CLEAN, CORRUPT)]
    with pytest.raises(ValueError, match=words):
        hw.head_analysis.patch_paths(model, pairs, metric, [("L0H0", "logits")], mlps="frozen")
    with pytest.raises(ValueError, match=words):
        hw.head_analysis.patch_paths(model, pairs, metric, [("embedding", "logits")])
    with pytest.raises(ValueError, match=words):
        hw.head_analysis.patch_paths(model, [(CLEAN, CORRUPT)], metric, [("M0", "logits")])
    with pytest.raises(ValueError, match=words):
        hw.head_analysis.attribute_heads(model, [(CLEAN, CORRUPT)], metric, steps=2)
    with pytest.raises(ValueError, match=words):
        hw.head_analysis.attribute_edges(model, [(CLEAN, CORRUPT)], metric)


def test_all_windows_count():
    """The last of four windows alone changes; estimates are derivatives of patches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=16,
        patch_size=4,
        num_channels=1,
        embed_dim=8,
        depths=[2],
        num_heads=[2],
        window_size=2,
        num_labels=5,
        drop_path_rate=0.0,
    )
    model = transformers.SwinForImageClassification(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    images = torch.randn(2, 1, 1, 16, 16, dtype=torch.float64)
    images[1, ..., :8, :] = images[0, ..., :8, :]
    pair = tuple({"pixel_values": image} for image in images)

    def first_logits(logits):
        return logits.flatten()[0] - logits.flatten()[1]

    result = hw.head_analysis.attribute_heads(model, [pair], first_logits, exact=0)
    for head in range(2):
        clean, corrupt = (hw.head_outputs(model, one, [(0, head)]) for one in pair)
        values = []
        for step in (1e-4, -1e-4):
            moved = {ref: one + step * (corrupt[ref] - one) for ref, one in clean.items()}
            with hw.patch(model, moved), torch.no_grad():
                values.append(float(first_logits(model(**pair[0]).logits)))
        expected = (values[0] - values[1]) / 2e-4
        assert abs(expected) > 1e-4
        assert result.heads[head].effects["output"].value == pytest.approx(expected, rel=1e-4)


def test_a_second_mlp_of_a_block_cannot_be_frozen():
    entry = ZOO["gpt-oss"]._replace(
        model="GraniteMoeSharedForCausalLM",
        config="GraniteMoeSharedConfig",
        keys={**ZOO["llama"].keys, "num_local_experts": 4, "shared_intermediate_size": 16},
    )
    model = entry.build("sdpa")
    paths = [("L0H1", "logits")]
    free = hw.head_analysis.patch_paths(model, [(CLEAN, CORRUPT)], metric, paths)
    assert abs(free.paths[0].effect.value) > 1e-4
    with pytest.raises(
        ValueError, match=r"finds one MLP in .*, which also has weights such as shared_"
    ):
        hw.head_analysis.patch_paths(model, [(CLEAN, CORRUPT)], metric, paths, mlps="frozen")


def test_circuits_of_rows_and_tokens_in_one_axis():
    """The MLPs of OPT read [rows * T, width]: all edges are the clean run, none the corrupt one."""
    keys = {**ZOO["gpt2"].keys, "vocab_size": 67, "hidden_size": 32, "word_embed_proj_dim": 32}
    keys |= {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
    entry = ZOO["gpt2"]._replace(model="OPTForCausalLM", config="OPTConfig", keys=keys)
    model = entry.build("sdpa").double()
    options = EdgeOptions(points=3, draws=1, steps=32)
    graph = hw.head_analysis.attribute_edges(model, [(CLEAN, CORRUPT)], metric, options=options)
    assert graph.sizes[-1].faithfulness.value == pytest.approx(1, abs=1e-4)
    assert graph.sizes[-1].completeness.value == pytest.approx(0, abs=1e-4)
    assert graph.agreement is not None
    assert graph.agreement.pearson > 0.5
    nodes = CircuitModel(model)
    (pair,) = read_pairs(model, [(CLEAN, CORRUPT)], metric)
    runs = PairRuns(nodes, pair)
    is_edge = ~np.isnan(graph.scores)
    without = is_edge.copy()
    rows = [nodes.name(node) for node in nodes.senders]
    columns = [nodes.name(node) for node in nodes.receivers]
    place = (rows.index("M0"), columns.index("M1"))
    without[place] = False
    assert abs(run_circuit(runs, without) - runs.clean_value) > 1e-6
