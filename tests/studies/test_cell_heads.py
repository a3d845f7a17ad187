"""Summaries of heads that a study stores for each cell, against the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.attention.interfaces import Gate
from headwise.studies.cells import resize_model
from headwise.studies.run_cell import summarise_heads
from headwise.training.data import make_task
from headwise.training.run_setup import replace_self_attention

TASK = make_task("recall", vocabulary=16, length=16, pairs=2)
NUM_TEXTS, HEADS, WIDTH = 3, 5, 20


def make_net(preset: str = "mha", layers: int = 2) -> hw.models.Transformer:
    spec = resize_model(
        TASK, {"width": WIDTH, "heads": HEADS, "layers": layers, "positions": "none"}
    )
    return hw.build(replace_self_attention(spec, preset), seed=3).eval()


def test_scores_weights_and_tokens_by_hand():
    """One layer without positions: scores are q k^T / sqrt(d), weights their softmax, in float64
    with numpy.
    """
    net = make_net(layers=1)
    layer = net.stacks["decoder"].blocks[0]
    inputs: list[torch.Tensor] = []
    outputs: list[np.ndarray] = []
    hooks = [
        layer.attentions["attention"].register_forward_pre_hook(
            lambda _, args: inputs.append(args[0])
        ),
        layer.register_forward_hook(
            lambda _, args, output: outputs.append(output[0].double().numpy())
        ),
    ]
    with torch.no_grad():
        for index in range(NUM_TEXTS):
            net(TASK.batch(index, 1, "valid").x)
    for hook in hooks:
        hook.remove()
    parameters = {name: one.detach().double().numpy() for name, one in net.named_parameters()}
    deviations, ranks, entropies, spreads = [], [], [], []
    for x in inputs:
        q, k = (
            x[0].double().numpy() @ parameters[f"decoder.0.attention.project.{name}"].T
            for name in "qk"
        )
        q, k = (one.reshape(len(one), HEADS, -1).transpose(1, 0, 2) for one in (q, k))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH // HEADS)
        weights = np.zeros_like(scores)
        for head in range(HEADS):
            for row in range(scores.shape[1]):
                allowed = scores[head, row, : row + 1]
                weights[head, row, : row + 1] = np.exp(allowed) / np.exp(allowed).sum()
                if row:
                    deviations.append(allowed.std(ddof=1))
            singular = np.linalg.svd(scores[head])[1]
            shares = singular / singular.sum()
            ranks.append(np.exp(-(shares[shares > 0] * np.log(shares[shares > 0])).sum()))
        entropies.append(entropy(weights).mean())
        spreads.append((entropy(weights.mean(0)) - entropy(weights).mean(0)) / np.log(HEADS))
    summary = summarise_heads(net, TASK, NUM_TEXTS)
    assert summary["score_deviation"] == pytest.approx(np.mean(deviations), rel=1e-5)
    assert summary["score_rank"] == pytest.approx(np.mean(ranks), rel=1e-4)
    assert summary["score_change"] == 0
    assert summary["measures"]["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert summary["diversity"] == pytest.approx(np.mean(spreads), rel=1e-4)
    residuals = [np.linalg.norm(one - one.mean(0)) / np.linalg.norm(one) for one in outputs]
    assert summary["residual"][-1] == pytest.approx(np.mean(residuals), rel=1e-5)
    assert "gates" not in summary


def entropy(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


def test_keys_with_a_weight():
    net = make_net("entmax")
    names = [name for name, _ in net.spec.attention_specs()]
    counts = np.zeros((len(names), HEADS))
    rows = 0
    for index in range(NUM_TEXTS):
        net.probes = {name: hw.Probe("weights") for name in names}
        with torch.no_grad():
            net(TASK.batch(index, 1, "valid").x)
        weights = [net.probes[name].tensors["weights"][0].numpy() for name in names]
        counts += [(one > 0).sum((1, 2)) for one in weights]
        rows += weights[0].shape[1]
    net.probes = {}
    summary = summarise_heads(net, TASK, NUM_TEXTS)
    assert summary["support"] == pytest.approx((counts / rows).mean())
    assert summary["support_spread"] == pytest.approx((counts / rows).std())
    assert summary["support_spread"] > 0
    assert summarise_heads(make_net(), TASK, NUM_TEXTS)["support_spread"] == 0


def test_gates_are_the_share_of_tokens():
    net = make_net("moh")
    gates = summarise_heads(net, TASK, NUM_TEXTS)["gates"]
    assert list(gates) == ["decoder.0.attention", "decoder.1.attention"]
    spec = dict(net.spec.attention_specs())["decoder.0.attention"]
    gate = next(part for _, part in spec.parts_of(Gate))
    for loads in gates.values():
        assert sum(loads) == pytest.approx(
            gate.always + gate.active, abs=1e-5
        )  # heads that are on for a token


def test_mixing_changes_scores_and_texts_are_needed():
    assert summarise_heads(make_net("talking"), TASK, NUM_TEXTS)["score_change"] >= 0
    net = make_net("talking")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "scores" in name or "mix" in name:
                parameter.add_(0.5)
    assert summarise_heads(net, TASK, NUM_TEXTS)["score_change"] > 0.1
    assert summarise_heads(net, TASK, 1) == {"note": "not measured"}


def test_weights_learned_by_position_have_no_change_of_scores():
    """Their scores are 0 before the table of weights is added, so a share of them means nothing."""
    spec = resize_model(TASK, {"width": WIDTH, "heads": HEADS, "layers": 1, "positions": "none"})
    learned = hw.design(
        model=WIDTH,
        heads=HEADS,
        pattern="causal()",
        project=hw.parts.ValueProjection(),
        modifiers=(hw.parts.LearnedScores(length=16),),
    )
    net = hw.build(replace_self_attention(spec, lambda _: learned), seed=3).eval()
    summary = summarise_heads(net, TASK, 2)
    assert "score_change" not in summary
    assert summary["score_deviation"] >= 0
