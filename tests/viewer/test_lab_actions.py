"""The Lab: its numbers are those of a model whose weights are edited by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.viewer import lab_actions
from headwise.viewer.lab_actions import compute_effect, plan_curves, remove_greedily, sweep_heads
from headwise.viewer.model_worker import Job, JobCancelled, JobProgress
from headwise.viewer.open_model import AblatedHead, OpenModel
from support.page_models import GPT, progress

BERT = {
    "model_type": "bert",
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "architectures": ["BertModel"],
}


def open_model(config: dict[str, Any]) -> tuple[OpenModel, Any, torch.Tensor]:
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    ids = torch.randint(0, 40, (1, 17), generator=torch.Generator().manual_seed(0))
    return OpenModel(hw.trace(net, ids, log=lambda _: None), net), net, ids


def without_head(net: Any, name: str, head: int) -> Any:
    """A copy whose output projection ignores a head of four channels."""
    edited = copy.deepcopy(net)
    edited.state_dict()[f"{name}.attention.output.o"][:, 4 * head : 4 * head + 4] = 0
    return edited


def test_the_effect_of_an_ablated_head_is_that_of_edited_weights():
    model, net, ids = open_model(GPT)
    found = compute_effect(model, {"heads": [[1, 2]]}, progress())
    with torch.inference_mode():
        old = net(ids)[0].double().log_softmax(-1)
        new = without_head(net, "decoder.1", 2)(ids)[0].double().log_softmax(-1)
    expected = F.kl_div(new, old, log_target=True, reduction="none").sum(-1)
    assert found["klByPosition"] == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-12)
    assert found["kl"] > 1e-9
    labels = ids[0, 1:]
    assert found["loss"]["before"] == pytest.approx(F.nll_loss(old[:-1], labels).item(), rel=1e-6)
    assert found["loss"]["after"] == pytest.approx(F.nll_loss(new[:-1], labels).item(), rel=1e-6)
    assert found["next"][0]["before"] == pytest.approx(old[-1].exp().max().item(), rel=1e-6)
    assert [item.head for item in model.ablated] == [2]


def test_a_mean_replaces_the_output_by_its_mean_over_the_text():
    model, net, ids = open_model(GPT)
    found = compute_effect(model, {"heads": [[0, 1, "mean"]]}, progress())
    means = hw.head_means(net, [ids], [("decoder.0.attention", 1)])
    with torch.inference_mode(), hw.patch(net, means):
        new = net(ids)[0].double().log_softmax(-1)
    old = net(ids)[0].double().log_softmax(-1)
    assert found["kl"] == pytest.approx(((old.exp() * (old - new)).sum(-1)).mean().item(), rel=1e-6)


def test_a_model_without_a_token_head_is_compared_by_its_vectors():
    model, net, ids = open_model(BERT)
    found = compute_effect(model, {"heads": [[1, 0]]}, progress())
    with torch.inference_mode():
        old, new = (one(ids).double() for one in (net, without_head(net, "encoder.1", 0)))
    assert found["klByPosition"] == pytest.approx(
        (1 - F.cosine_similarity(old, new, dim=-1)).tolist(), abs=1e-6
    )
    assert found["loss"] == {"before": None, "after": None}
    assert "cosine" in found["outputs"]


def test_a_sweep_ablates_every_head_alone():
    model, _, _ = open_model(GPT)
    found = sweep_heads(model, {}, progress())
    assert [entry[:2] for entry in found["heads"]] == [
        [site, head] for site in range(2) for head in range(3)
    ]
    alone = compute_effect(model, {"heads": [[1, 0]]}, progress())["kl"]
    assert found["heads"][3][2] == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([[0, 3]], "there is no head 3"),
        ([[7, 0]], "there is no site 7"),
        ([[0, 0, "mute"]], "unknown ablation 'mute'"),
        ([[0, 0, "zero", math.inf]], "is not a number"),
        ([[0, 0, "zero", True]], "is not a number"),
        ([[0]], "is not an ablated head"),
        ("all", "must be a list"),
    ],
)
def test_heads_that_are_not_there_are_refused(heads: Any, message: str):
    model, _, _ = open_model(GPT)
    with pytest.raises(ValueError, match=message):
        compute_effect(model, {"heads": heads}, progress())
    assert model.ablated == ()


# --- modes, tokens, and what a job leaves behind --------------------------------------------------

PAIR = {
    "model_type": "bart",
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def run_python(text: str, net: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The logits of the Python lines of a recipe."""
    monkeypatch.setattr(hw, "load", lambda name: net)
    names: dict[str, Any] = {}
    exec(text, names)  # the lines that the page shows
    return names["before"][0].double(), names["after"][0].double()


@pytest.mark.parametrize("mode", ["zero", "mean", "resample", "noise"])
@pytest.mark.parametrize("tokens", [{}, {"text": [2, 5, 16]}])
def test_the_python_lines_of_a_recipe_give_the_same_change(
    mode: str, tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
):
    model, net, _ = open_model(GPT)
    heads = [[0, 1, mode, 0.0], [1, 0, "zero", 0.25]]
    found = compute_effect(model, {"heads": heads, "tokens": tokens, "seed": 3}, progress())
    old, new = (
        one.log_softmax(-1) for one in run_python(found["recipe"]["python"], net, monkeypatch)
    )
    expected = (old.exp() * (old - new)).sum(-1)
    assert found["klByPosition"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-9)
    assert found["kl"] > 1e-8
    if tokens:  # a causal model cannot change before the first chosen token
        assert max(found["klByPosition"][:2]) < 1e-12 < found["klByPosition"][2]


def test_tokens_are_those_of_the_stream_of_each_layer(monkeypatch: pytest.MonkeyPatch):
    net = hw.build(hw.families.read_model_spec(PAIR), seed=0).eval()
    ids = {"source": torch.arange(11)[None] + 3, "x": torch.arange(7)[None] + 3}
    model = OpenModel(hw.trace(net, ids, log=lambda _: None), net)
    stacks = [layer.query_stream for layer in model.get_trace().layers]
    arguments = {
        "heads": [[number, 1] for number in range(len(stacks))],
        "tokens": {"source": [10], "text": [6]},
    }
    found = compute_effect(model, arguments, progress())
    old, new = (
        one.log_softmax(-1) for one in run_python(found["recipe"]["python"], net, monkeypatch)
    )
    assert stacks.count("source") == 1
    assert found["kl"] == pytest.approx((old.exp() * (old - new)).sum(-1).mean().item(), rel=1e-4)
    with pytest.raises(ValueError, match="the source has 11 tokens, none at 11; give 0 to 10"):
        compute_effect(model, {"heads": [[0, 1]], "tokens": {"source": [11]}}, progress())


def test_a_recipe_of_whole_heads_is_a_pruning_command():
    model, _, _ = open_model(GPT)
    model.target = "a model"
    recipe = compute_effect(model, {"heads": [[0, 1], [1, 2], [0, 0]]}, progress())["recipe"]
    named = "--heads decoder.0.attention:0,1 decoder.1.attention:2"
    assert recipe["command"] == f"headwise prune 'a model' {named} --data texts.txt --out pruned"
    assert compute_effect(model, {"heads": [[0, 1, "mean"]]}, progress())["recipe"]["command"] == ""


def test_a_job_that_fails_or_is_cancelled_keeps_the_ablated_heads(monkeypatch: pytest.MonkeyPatch):
    model, _, _ = open_model(GPT)
    compute_effect(model, {"heads": [[0, 1]]}, progress())
    before, revision = model.ablated, model.revision
    stopped = progress()
    stopped.job.cancel()
    with pytest.raises(JobCancelled):
        compute_effect(model, {"heads": [[1, 1]]}, stopped)
    monkeypatch.setattr(lab_actions, "compare_outputs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compute_effect(model, {"heads": [[1, 1]]}, progress())
    assert (model.ablated, model.revision) == (before, revision)


def test_tables_of_next_tokens_follow_every_position():
    model, net, ids = open_model(GPT)
    found = compute_effect(model, {"heads": [[1, 2]]}, progress())
    with torch.inference_mode():
        shares = net(ids)[0].double().softmax(-1)
    assert [len(found["nextAt"]), found["nextFrom"]] == [17, 0]
    for position, table in enumerate(found["nextAt"]):
        assert table[0]["before"] == pytest.approx(shares[position].max().item(), rel=1e-6)
    losses = found["lossByPosition"]["before"]
    assert losses == pytest.approx(
        (-shares[:-1].log()[torch.arange(16), ids[0, 1:]]).tolist(), rel=1e-6
    )


def test_random_sets_have_as_many_other_heads():
    model, _, _ = open_model(GPT)
    found = compute_effect(model, {"heads": [[0, 0], [1, 1]], "random": 4}, progress())
    assert len(found["random"]) == 4
    all_heads = [(f"decoder.{layer}.attention", head) for layer in range(2) for head in range(3)]
    heads = [AblatedHead(*all_heads[0], "mean", 0.5), AblatedHead(*all_heads[4])]
    sets = lab_actions.sample_heads(all_heads, heads, 20)
    for chosen in sets:
        assert not {head[:2] for head in chosen} & {all_heads[0], all_heads[4]}
        assert [head[2:] for head in chosen] == [("mean", 0.5), ("zero", 0.0)]
        assert len({head[:2] for head in chosen}) == 2
    with pytest.raises(ValueError, match="random=-1 is out of range; give 0 to 20"):
        compute_effect(model, {"heads": [], "random": -1}, progress())


# --- curves ---------------------------------------------------------------------------------------


def loss_without(net: Any, ids: torch.Tensor, heads: list[tuple[str, int]]) -> float:
    with torch.inference_mode(), hw.ablate(net, heads):
        logits = net(ids)[0].float()
    return F.cross_entropy(logits[:-1], ids[0, 1:]).item()


@pytest.mark.parametrize("ranking", ["once", "every"])
def test_a_cumulative_curve_is_the_loss_of_more_and_more_heads(ranking: str):
    model, net, ids = open_model(GPT)
    job = Job("greedy", {})
    found = remove_greedily(model, {"ranking": ranking}, JobProgress(job))
    names = [layer.name for layer in model.get_trace().layers]
    order = [(names[site], head) for site, head, _ in found["order"]]
    assert sorted(order) == sorted(model.heads)
    assert found["baseline"] == pytest.approx(
        F.cross_entropy(net(ids)[0, :-1], ids[0, 1:]).item(), rel=1e-5
    )
    for count, (_, _, value) in enumerate(found["order"], 1):
        assert value == pytest.approx(loss_without(net, ids, order[:count]), rel=1e-5)
        rivals = [head for head in model.heads if head not in order[: count - 1]]
        if ranking == "every" or count == 1:
            assert (
                value
                <= min(loss_without(net, ids, [*order[: count - 1], head]) for head in rivals)
                + 1e-6
            )
    assert found["random"][-1]["mean"] == pytest.approx(found["order"][-1][2], rel=1e-5)
    assert all(point["low"] <= point["mean"] <= point["high"] for point in found["random"])
    total = lab_actions.count_runs(6, ranking)
    assert [event["total"] for event in job.events if event["state"] == "running"][-1] == total


def test_a_plan_leaves_heads_out_where_all_would_take_too_long(monkeypatch: pytest.MonkeyPatch):
    model, _, _ = open_model(GPT)
    found = plan_curves(model, {}, progress())
    assert [plan["heads"] for plan in found["plans"].values()] == [6, 6, 6]
    assert found["plans"]["sweep"]["seconds"] == pytest.approx(6 * found["secondsPerRun"])
    monkeypatch.setattr(lab_actions, "MAX_CURVE_SECONDS", 4.5 * found["secondsPerRun"])
    times = iter([0.0, 1.0, 1.0, 1.0 + found["secondsPerRun"], 2.0, 4.0])
    monkeypatch.setattr(lab_actions.time, "perf_counter", lambda: next(times))
    assert plan_curves(model, {}, progress())["plans"]["sweep"]["heads"] == 4
    heads = sweep_heads(model, {"limit": 4}, progress())["heads"]
    assert [entry[:2] for entry in heads] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [entry[:2] for entry in sweep_heads(model, {"sites": [1]}, progress())["heads"]] == [
        [1, 0],
        [1, 1],
        [1, 2],
    ]


def test_a_sweep_reports_the_loss_and_takes_every_mode():
    model, _, _ = open_model(GPT)
    for mode in ("zero", "mean", "resample", "noise"):
        found = sweep_heads(model, {"mode": mode}, progress())
        alone = compute_effect(model, {"heads": [[1, 0, mode]]}, progress())
        assert found["heads"][3][2] == pytest.approx(alone["kl"], rel=1e-6)
        assert found["heads"][3][3] == pytest.approx(
            alone["loss"]["after"] - alone["loss"]["before"], abs=1e-9
        )
    with pytest.raises(ValueError, match="mode='mute' is unknown"):
        sweep_heads(model, {"mode": "mute"}, progress())
