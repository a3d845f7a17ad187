"""The Lab: its numbers are those of a model whose weights are edited by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.viewer.lab_actions import compute_effect, sweep_heads
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel

GPT = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 40, "n_positions": 64}
BERT = {"model_type": "bert", "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "vocab_size": 40,
        "intermediate_size": 20, "max_position_embeddings": 64, "architectures": ["BertModel"]}  # fmt: skip


def open_model(config: dict[str, Any]) -> tuple[OpenModel, Any, torch.Tensor]:
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    ids = torch.randint(0, 40, (1, 17), generator=torch.Generator().manual_seed(0))
    return OpenModel(hw.trace(net, ids, log=lambda _: None), net), net, ids


def without_head(net: Any, name: str, head: int) -> Any:
    """A copy whose output projection ignores a head of four channels."""
    edited = copy.deepcopy(net)
    edited.state_dict()[f"{name}.attention.output.o"][:, 4 * head : 4 * head + 4] = 0
    return edited


def progress() -> JobProgress:
    return JobProgress(Job("test", {}))


def test_the_effect_of_an_ablated_head_is_that_of_edited_weights():
    model, net, ids = open_model(GPT)
    found = compute_effect(model, {"heads": [[1, 2]]}, progress())
    with torch.inference_mode():
        old = net(ids)[0].double().log_softmax(-1)
        new = without_head(net, "decoder.1", 2)(ids)[0].double().log_softmax(-1)
    wanted = F.kl_div(new, old, log_target=True, reduction="none").sum(-1)
    assert found["klByPosition"] == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-12)
    assert found["kl"] > 1e-9
    labels = ids[0, 1:]
    assert found["loss"]["before"] == pytest.approx(F.nll_loss(old[:-1], labels).item(), rel=1e-6)
    assert found["loss"]["after"] == pytest.approx(F.nll_loss(new[:-1], labels).item(), rel=1e-6)
    assert found["next"][0]["before"] == pytest.approx(old[-1].exp().max().item(), rel=1e-6)
    assert [item.head for item in model.ablated] == [2]


def test_a_scale_of_one_changes_nothing():
    model, _, _ = open_model(GPT)
    found = compute_effect(model, {"heads": [[0, 1, "zero", 1.0]]}, progress())
    assert found["kl"] == 0
    assert found["loss"]["before"] == found["loss"]["after"]


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
    assert found["klByPosition"] == pytest.approx((1 - F.cosine_similarity(old, new, dim=-1)).tolist(), abs=1e-6)
    assert found["loss"] == {"before": None, "after": None}
    assert "cosine" in found["outputs"]


def test_a_sweep_ablates_every_head_alone():
    model, _, _ = open_model(GPT)
    found = sweep_heads(model, {}, progress())
    assert [entry[:2] for entry in found["heads"]] == [[site, head] for site in range(2) for head in range(3)]
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
        ([[0]], "is no ablated head"),
        ("all", "must be a list"),
    ],
)
def test_heads_that_are_not_there_are_refused(heads: Any, message: str):
    model, _, _ = open_model(GPT)
    with pytest.raises(ValueError, match=message):
        compute_effect(model, {"heads": heads}, progress())
    assert model.ablated == ()
