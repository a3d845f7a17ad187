"""Hard-concrete gates against their formulas in numpy, their own distribution, and heads that are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cases
import headwise as hw
from cases import base, check_close
from headwise import axes

BETA, LOW, HIGH = 0.33, -0.1, 1.1


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gated(spec, log_a) -> hw.Attention:
    layer = cases.layer(spec)
    with torch.no_grad():
        layer.concrete["log_a"].copy_(torch.as_tensor(log_a))
    return layer


def gates(layer: hw.Attention, x: torch.Tensor) -> torch.Tensor:
    """What the layer multiplies its heads with, found from its outputs."""
    plain = cases.layer(base())
    plain.load_state_dict({name: held for name, held in layer.state_dict().items() if "concrete" not in name})
    return (layer.heads(x) / plain.heads(x))[0, 0, :, 0]


A = np.array([-3.0, -0.5, 0.0, 0.4, 1.5, 4.0])
X = torch.randn(2, 7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_training_draws_as_the_formula_says(monkeypatch):
    u = np.array([0.9, 0.2, 0.5, 0.7, 0.999, 0.05])
    monkeypatch.setattr(torch, "rand_like", lambda t: torch.as_tensor(u, dtype=t.dtype))
    layer = gated(base(modifiers=(hw.Concrete(),)), A).train()
    s = sigmoid((np.log(u) - np.log(1 - u) + A) / BETA)
    soft = np.clip(s * (HIGH - LOW) + LOW, 0, 1)
    check_close(gates(layer, X), torch.as_tensor(soft))
    layer = gated(base(modifiers=(hw.Concrete(sampling="hard"),)), A).train()
    check_close(gates(layer, X), torch.as_tensor((soft > 0.5).astype(float)))
    layer.heads(X).sum().backward()
    slope = layer.concrete["log_a"].grad
    inside = (soft > 0) & (soft < 1)
    assert (slope[inside] != 0).all()
    assert (slope[~inside] == 0).all()


def test_gates_are_shut_and_open_as_often_as_they_cost():
    part, draws = hw.Concrete(), 200_000
    torch.manual_seed(0)
    for a in (-1.0, 0.0, 1.5):
        log_a = torch.full((draws,), a, dtype=torch.float64)
        drawn = part._sampled(log_a).numpy()
        shut, wide = sigmoid(BETA * np.log(-LOW / HIGH) - a), 1 - sigmoid(BETA * np.log((1 - LOW) / (HIGH - 1)) - a)
        assert abs((drawn == 0).mean() - shut) < 4 * np.sqrt(shut * (1 - shut) / draws)
        assert abs((drawn == 1).mean() - wide) < 4 * np.sqrt(wide * (1 - wide) / draws)
        grid = (np.arange(10**5) + 0.5) / 10**5
        s = sigmoid((np.log(grid) - np.log(1 - grid) + a) / BETA)
        assert abs(drawn.mean() - np.clip(s * (HIGH - LOW) + LOW, 0, 1).mean()) < 4 * drawn.std() / np.sqrt(draws)
        assert part.opened(log_a)[0].item() == pytest.approx(1 - shut, abs=1e-12)


def test_a_draw_is_one_for_all_rows_and_tokens_and_new_in_every_call():
    layer = gated(base(modifiers=(hw.Concrete(),)), np.zeros(6)).train()
    plain = gated(base(modifiers=(hw.Concrete(),)), np.full(6, 50.0)).eval()
    plain.load_state_dict({**layer.state_dict(), "concrete.log_a": torch.full((6,), 50.0)})
    torch.manual_seed(3)
    first, second = (layer.heads(X) / plain.heads(X) for _ in range(2))
    check_close(first, first[:1, :1].expand_as(first))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("evaluation", "rule"), [("code", "soft"), ("hard", "hard")])
def test_evaluation_draws_nothing(evaluation, rule):
    layer = gated(base(modifiers=(hw.Concrete(evaluation=evaluation),)), A)
    soft = np.clip(sigmoid(A) * (HIGH - LOW) + LOW, 0, 1)
    shut, wide = sigmoid(BETA * np.log(-LOW / HIGH) - A), 1 - sigmoid(BETA * np.log((1 - LOW) / (HIGH - 1)) - A)
    check_close(gates(layer, X), torch.as_tensor(soft if rule == "soft" else (wide >= shut).astype(float)))


def test_the_ledger_holds_the_sum_or_the_mean_over_layers():
    cost = sigmoid(A - BETA * np.log(-LOW / HIGH))
    for regulariser, total in (("sum", 2 * cost.sum()), ("mean", cost.sum())):
        spec = base(modifiers=(hw.Concrete(regulariser=regulariser),))
        ledger = hw.Ledger()
        for depth in range(2):
            layer = gated(spec.placed(depth, 2), A)
            ledger.layer = str(depth)
            layer(X, probe=hw.Probe(ledger=ledger))
            layer(X, probe=hw.Probe(ledger=ledger))  # set, not added
        assert ledger.total("l0").item() == pytest.approx(total, rel=1e-12)
    ledger.terms["1", "l0"].backward()
    check_close(layer.concrete["log_a"].grad, torch.as_tensor(cost * (1 - cost) / 2))


def test_shut_gates_are_cut_heads():
    layer = gated(base(modifiers=(hw.Concrete(),), kv=2), [-9.0, 9.0, 9.0, -9.0, 9.0, -9.0])
    small, weights = axes.cut(layer.spec, layer.state_dict(), [1, 2, 4])
    cut = hw.Attention(small).double().eval()
    cut.load_state_dict(weights)
    check_close(cut(X), layer(X))


def test_a_checkpoint_draws_the_same_again():
    layer = gated(base(modifiers=(hw.Concrete(),)), A).train()
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(5)
        x = X.clone().requires_grad_()
        run(x).sum().backward()
        grads.append(x.grad)
    check_close(*grads)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"temperature": 0.0}, "must be positive"),
        ({"low": 0.0}, "never shuts or never opens"),
        ({"high": 1.0}, "never shuts or never opens"),
        ({"layers": 0}, "at least 1"),
        ({"regulariser": "max"}, "'sum' or 'mean'"),
        ({"evaluation": "soft"}, "'code' or 'hard'"),
        ({"sampling": "gumbel"}, "'soft' or 'hard'"),
    ],
)
def test_gates_that_cannot_be_meant(words, said):
    with pytest.raises(hw.SpecError, match=said):
        base(modifiers=(hw.Concrete(**words),))
