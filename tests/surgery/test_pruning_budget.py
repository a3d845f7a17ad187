"""Pruning head by head until a budget is met."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import headwise as hw
from headwise.surgery import HeadRanking, PruneToBudget, PruningBudget
from headwise.surgery.any_model import prune
from headwise.surgery.attention_replacement import remove_heads
from headwise.surgery.head_selection import count_cache_bytes, score_heads
from headwise.surgery.verification.efficiency import TimingOptions
from headwise.surgery.verification.quality_metrics import measure_quality
from support.importance_examples import GPT2, build_model, make_examples, with_random_biases
from support.pruning_examples import FAINT_HEADS, LLAMA, RANDOM_RANKING, with_faint_heads
from support.refusals import check_refused, refused_calls

MICHEL = HeadRanking("michel")


def test_parameters_go_down_to_the_budget():
    net = with_random_biases(build_model(LLAMA))
    done = prune(net, PruneToBudget(PruningBudget("parameters", 0.9), RANDOM_RANKING))
    was, now = (hw.costs.count_parameters(one.spec) for one in (net, done.after))
    assert now <= 0.9 * was
    unit = 2 * 4 * 12 * 2 + 2 * 4 * 12  # two heads of queries and outputs, one of keys and values
    assert now + unit > 0.9 * was
    assert (
        prune(net, PruneToBudget(PruningBudget("parameters", float(now)), RANDOM_RANKING)).plan.keep
        == done.plan.keep
    )


def test_the_cache_goes_down_to_the_budget():
    net = with_random_biases(build_model(LLAMA))
    done = prune(net, PruneToBudget(PruningBudget("cache", 0.5), RANDOM_RANKING))
    assert count_cache_bytes(net.spec, 8) == net.cache(batch=1, capacity=1).nbytes
    assert done.after.cache(batch=1, capacity=9).nbytes * 2 == net.cache(batch=1, capacity=9).nbytes


def test_time_goes_down_to_the_budget(monkeypatch):
    """Each head takes a quarter of the time of its layer, however fast the machine is."""

    def timed(before, after, pace):
        shares = [
            sum(spec.heads.q for _, spec in net.spec.attention_specs()) for net in (before, after)
        ]
        return SimpleNamespace(phases=[SimpleNamespace(speedup=shares[0] / shares[1])])

    monkeypatch.setattr("headwise.surgery.head_selection.compare_speed", timed)
    net = build_model(LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 4})
    done = prune(net, PruneToBudget(PruningBudget("time", 0.75), RANDOM_RANKING, min_units=1))
    assert done.plan.num_kept == 6


def test_time_is_measured():
    net = build_model(LLAMA)
    done = prune(
        net,
        PruneToBudget(
            PruningBudget("time", 0.999),
            RANDOM_RANKING,
            timing=TimingOptions(length=8, steps=1, seconds=0.05),
        ),
    )
    assert 1 <= done.plan.num_kept < 12


def test_loss_grows_no_further_than_allowed():
    net, texts = (
        with_faint_heads(with_random_biases(build_model(LLAMA)), FAINT_HEADS),
        make_examples(build_model(LLAMA)),
    )
    plain = measure_quality(net, texts).rows[0].after.value
    done = prune(net, PruneToBudget(PruningBudget("loss", 0.05), MICHEL, unit="head"), texts)
    assert measure_quality(done.after, texts).rows[0].after.value - plain <= 0.05
    assert set(FAINT_HEADS) <= set(done.plan.removed_heads)
    order = sorted(score_heads(net, texts, MICHEL).scores.items(), key=lambda one: one[1])
    assert {head for head, _ in order[: len(done.plan.removed_heads)]} == set(
        done.plan.removed_heads
    )
    following = remove_heads(
        net, _without(net, [head for head, _ in order[: len(done.plan.removed_heads) + 1]])
    )
    assert measure_quality(following, texts).rows[0].after.value - plain > 0.05


def _without(net, heads):
    keep = {
        site: range(len(spec.score_head_of_output)) for site, spec in net.spec.attention_specs()
    }
    return {site: [head for head in own if (site, head) not in heads] for site, own in keep.items()}


def test_scores_are_recomputed_on_request():
    """After each head, of what is left: as if every step were a choice of its own."""
    net, texts = with_random_biases(build_model(LLAMA)), make_examples(build_model(LLAMA))
    done = prune(
        net,
        PruneToBudget(PruningBudget("parameters", 0.92), MICHEL, rescore_every=1, unit="head"),
        texts,
    )
    heads = {
        (site, head): head
        for site, spec in net.spec.attention_specs()
        for head in range(len(spec.score_head_of_output))
    }
    removed, now = list[tuple[str, int]](), net
    while hw.costs.count_parameters(now.spec) > 0.92 * hw.costs.count_parameters(net.spec):
        found = score_heads(now, texts, MICHEL).scores
        site, place = min(found, key=lambda one: found[one])
        left = [
            head for head_site, head in heads if head_site == site and (site, head) not in removed
        ]
        removed.append((site, left[place]))
        now = remove_heads(net, _without(net, removed))
    assert set(done.plan.removed_heads) == set(removed)


@pytest.mark.parametrize(
    ("choice", "words"), refused_calls(Path(__file__).with_name("refused_budgets.txt"))
)
def test_impossible_budgets_are_reported(choice: str, words: str):
    check_refused(f"prune(build_model(LLAMA), {choice})", words, ValueError, globals())


def test_a_cache_without_attention_is_empty():
    net = build_model(GPT2)
    assert count_cache_bytes(
        remove_heads(net, {"decoder.0.attention": ()}).spec, 8
    ) * 2 == count_cache_bytes(net.spec, 8)
    assert torch.is_tensor(net(torch.tensor([[1, 2]])))
