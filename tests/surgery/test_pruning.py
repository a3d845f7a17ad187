"""Selection of heads by importance, in units, by class and by cluster, and folding of the removed
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.surgery import DropHeads, HeadRanking, KeepOnePerCluster, KeepTop, PruningPlan
from headwise.surgery.any_model import prune
from headwise.surgery.attention_replacement import get_attention, remove_heads
from headwise.surgery.head_selection import score_heads
from headwise.surgery.pruning_plan import list_units
from support.importance_examples import (
    GPT2,
    build_model,
    make_examples,
    model_output,
    random_ids,
    translator,
    with_random_biases,
)
from support.number_examples import make_example
from support.pruning_examples import FAINT_HEADS, LLAMA, RANDOM_RANKING, with_faint_heads
from support.refusals import check_refused, refused_calls


@pytest.mark.parametrize(
    "by",
    [HeadRanking(objective="drift"), HeadRanking("michel"), HeadRanking("michel-code")],
    ids=lambda by: by.method,
)
def test_heads_without_effect_go_first(by):
    net = with_faint_heads(with_random_biases(build_model(LLAMA)), FAINT_HEADS)
    done = prune(net, KeepTop(4, by, unit="head"), make_examples(net))
    assert sorted(done.plan.removed_heads) == FAINT_HEADS
    with torch.no_grad():
        torch.testing.assert_close(model_output(done.after), model_output(net), rtol=0, atol=0.05)
    assert {spec.heads.q for _, spec in done.after.spec.attention_specs()} == {4}
    assert done.data["keep"]["decoder.0.attention"] == [0, 2, 3, 5]


def test_groups_go_whole_and_the_cache_with_them():
    net = with_faint_heads(
        with_random_biases(build_model(LLAMA)),
        [("decoder.0.attention", 2), ("decoder.0.attention", 3), ("decoder.1.attention", 5)],
    )
    done = prune(net, KeepTop(2 / 3, HeadRanking("michel")), make_examples(net))
    assert done.plan.keep["decoder.0.attention"] == (0, 1, 4, 5)
    assert all(len(keep) == 4 for keep in done.plan.keep.values())
    was, now = (one.cache(batch=1, capacity=7).nbytes for one in (net, done.after))
    assert 3 * now == 2 * was


@pytest.mark.parametrize(
    ("amount", "scope", "note"),
    [
        (
            0.5,
            "layer",
            "keep=0.5 was rounded to whole key-value groups: 4 of 6 heads (0.667) in each layer",
        ),
        (
            0.5,
            "stack",
            "keep=0.5 was rounded to whole key-value groups: 4 of 6 heads (0.667) in each layer",
        ),
        (
            7,
            "model",
            "keep=7 was rounded to whole key-value groups: 6 of 12 heads (0.500) in the model",
        ),
        (2 / 3, "layer", None),
        (0.5, "model", None),
        (4, "layer", None),
    ],
)
def test_rounding_to_whole_groups_is_noted(amount: float, scope: str, note: str | None):
    done = prune(build_model(LLAMA), KeepTop(amount, HeadRanking("random"), scope=scope))
    notes = [line for line in done.plan.notes if "rounded" in line]
    assert notes == [note] * (note is not None)
    assert str(done).count("was rounded") == len(notes)
    single = prune(build_model(LLAMA), KeepTop(0.4, HeadRanking("random"), unit="head"))
    assert not [line for line in single.plan.notes if "rounded" in line]


def test_a_share_of_the_model_leaves_some_layers_more():
    net = with_faint_heads(
        with_random_biases(build_model(LLAMA)), [("decoder.1.attention", head) for head in range(6)]
    )
    plan = prune(
        net, KeepTop(0.5, HeadRanking("michel"), scope="model", unit="head"), make_examples(net)
    ).plan
    assert [len(keep) for keep in plan.keep.values()] == [5, 1]
    plan = prune(
        net,
        KeepTop(0.5, HeadRanking("michel"), scope="model", unit="head", min_units=0),
        make_examples(net),
    ).plan
    assert [len(keep) for keep in plan.keep.values()] == [6, 0]
    plan = prune(
        net,
        KeepTop(7, HeadRanking("michel"), scope="model", unit="head", min_units=3),
        make_examples(net),
    ).plan
    assert [len(keep) for keep in plan.keep.values()] == [4, 3]


@pytest.mark.parametrize(("scope", "amount"), [("model", 2), ("layer", 0.5), ("stack", 1)])
def test_only_named_attentions_lose_heads(scope: str, amount: float):
    net = with_random_biases(build_model(LLAMA))
    selection = KeepTop(
        amount, HeadRanking("michel"), scope=scope, unit="head", sites=("decoder.1",)
    )
    plan = prune(net, selection, make_examples(net)).plan
    all_heads = LLAMA["num_attention_heads"]
    assert len(plan.keep["decoder.0.attention"]) == all_heads
    assert len(plan.keep["decoder.1.attention"]) == round(
        amount if amount >= 1 else amount * all_heads
    )
    assert "in decoder.1 by" in plan.summary


def test_sites_that_do_not_exist_are_named():
    with pytest.raises(hw.SpecError, match=r"no attention 'decoder\.7'; use one of decoder"):
        prune(build_model(LLAMA), KeepTop(0.5, RANDOM_RANKING, sites=("decoder.7",)))


def test_a_stack_gives_up_the_same_numbers():
    net = with_faint_heads(
        with_random_biases(build_model(LLAMA)),
        [(f"decoder.{layer}.attention", head) for layer in (0, 1) for head in (1, 2, 5)],
    )
    plan = prune(
        net, KeepTop(3, HeadRanking("michel"), scope="stack", unit="head"), make_examples(net)
    ).plan
    assert set(plan.keep.values()) == {(0, 3, 4)}


def test_three_kinds_of_attention_are_shares_of_their_own():
    net = translator()
    plan = prune(net, KeepTop(1, RANDOM_RANKING)).plan
    assert {len(keep) for keep in plan.keep.values()} == {1}
    assert plan.num_kept == len(plan.keep) == 6
    assert (
        prune(net, KeepTop(1, RANDOM_RANKING)).plan
        == plan
        != prune(net, KeepTop(1, HeadRanking("random", seed=4))).plan
    )


def test_one_of_each_cluster_stays():
    """A head and its copy look alike; of the two the louder stays."""
    net = with_random_biases(build_model(GPT2))
    for layer in (0, 1):
        weights = get_attention(net, f"decoder.{layer}.attention").weights
        with torch.no_grad():
            for key in ("q", "k", "q_bias", "k_bias"):
                weights["project"][key].view(3, 4, -1)[2] = weights["project"][key].view(3, 4, -1)[
                    0
                ]
    texts = [make_example(random_ids(n, 9)[0].tolist()) for n in range(6)]
    quiet = with_faint_heads(net, [("decoder.0.attention", 0), ("decoder.1.attention", 2)])
    done = prune(quiet, KeepOnePerCluster(HeadRanking("michel"), max_distance=1e-9), texts)
    assert done.plan.keep == {"decoder.0.attention": (1, 2), "decoder.1.attention": (0, 1)}


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config["model_type"])
def test_folding_means_is_patching_with_them(config):
    net = with_random_biases(build_model(config))
    texts = make_examples(net)
    removed = [("decoder.0.attention", 1), ("decoder.0.attention", 2), ("decoder.1.attention", 0)]
    done = prune(net, DropHeads(tuple(removed)), texts, fold="mean")
    means = hw.head_means(net, [text.inputs for text in texts], removed)
    with hw.patch(net, means):
        patched = model_output(net)
    torch.testing.assert_close(model_output(done.after), patched, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(
        model_output(done.after),
        model_output(remove_heads(net, done.plan.changed_sites)),
        atol=1e-3,
    )


def test_a_layer_that_goes_leaves_its_mean():
    net = with_random_biases(build_model(GPT2))
    texts, values = make_examples(net), [("decoder.0.attention", head) for head in range(3)]
    done = prune(net, DropHeads(tuple(values)), texts, fold="mean")
    with hw.patch(net, hw.head_means(net, [text.inputs for text in texts], values)):
        patched = model_output(net)
    torch.testing.assert_close(model_output(done.after), patched, rtol=1e-9, atol=1e-9)
    assert done.after.spec.stacks[0].layers[0].attention is None


def test_folded_biases_keep_the_outputs():
    net = with_random_biases(build_model(GPT2))
    arguments = (("decoder.0.attention", 1), ("decoder.1.attention", 2))
    done = prune(net, DropHeads(arguments), fold="bias")
    biases: dict[Any, torch.Tensor] = {
        (site, head): get_attention(net, site)
        .weights["project"]["v_bias"]
        .detach()
        .view(3, 4)[head]
        for site, head in arguments
    }
    with hw.patch(net, biases):
        patched = model_output(net)
    torch.testing.assert_close(model_output(done.after), patched, rtol=1e-9, atol=1e-9)


def test_a_unit_is_the_query_heads_of_one_key_head():
    both = list_units(hw.families.read_model_spec(LLAMA))["decoder.0.attention"]
    assert [unit.heads for unit in both] == [(0, 1), (2, 3), (4, 5)]
    assert len(list_units(hw.families.read_model_spec(LLAMA), "head")["decoder.0.attention"]) == 6
    assert (
        len(
            list_units(hw.families.read_model_spec(LLAMA | {"num_key_value_heads": 1}))[
                "decoder.0.attention"
            ]
        )
        == 6
    )
    one = list_units(hw.families.read_model_spec(LLAMA | {"num_key_value_heads": 1}), "group")[
        "decoder.0.attention"
    ]
    assert [unit.heads for unit in one] == [(0, 1, 2, 3, 4, 5)]


def test_worths_are_importance():
    net = build_model(GPT2)
    found = score_heads(net, make_examples(net), HeadRanking("michel"))
    expected = hw.estimate_importance(net, make_examples(net), method="michel")
    assert found.scores == {(one.site, one.head): one.value for one in expected.heads}
    assert "michel" in found.notes[0]


def test_the_default_ranking_uses_gradients_if_available():
    net = build_model(GPT2)
    assert (
        score_heads(net, make_examples(net)).scores
        == score_heads(net, make_examples(net), HeadRanking("michel")).scores
    )
    drift = score_heads(net, make_examples(net), HeadRanking(objective="drift"))
    assert (
        drift.scores
        == score_heads(
            net, make_examples(net), HeadRanking("leave-one-out", objective="drift")
        ).scores
    )


def test_a_plan_lists_the_heads_it_keeps():
    plan = PruningPlan.without(build_model(GPT2).spec, [("decoder.1.attention", 0)], "as asked")
    assert plan.keep == {"decoder.0.attention": (0, 1, 2), "decoder.1.attention": (1, 2)}
    assert plan.changed_sites == {"decoder.1.attention": (1, 2)}
    assert plan.summary == "5 of 6 heads kept, as asked"
    with pytest.raises(hw.SpecError, match=r"has no attention 'encoder\.0\.attention'"):
        PruningPlan.from_kept_heads(
            build_model(GPT2).spec, {"encoder.0.attention": [0]}, "of another model"
        )


@pytest.mark.parametrize(
    ("choice", "words"), refused_calls(Path(__file__).with_name("refused_selections.txt"))
)
def test_impossible_selections_are_reported(choice: str, words: str):
    check_refused(f"prune(build_model(LLAMA), {choice})", words, ValueError, globals())


def test_impossible_folding_is_reported():
    net, one = build_model(GPT2), DropHeads((("decoder.0.attention", 1),))
    with pytest.raises(hw.SpecError, match="fold='mean' needs examples"):
        prune(net, one, fold="mean")
    with pytest.raises(hw.SpecError, match="unknown fold='median'; did you mean 'mean'"):
        prune(net, one, fold="median")
    with pytest.raises(
        ValueError, match=r"Linear is no model of transformers or headwise; hw\.prune_module"
    ):
        prune(torch.nn.Linear(2, 2), 0.5)
