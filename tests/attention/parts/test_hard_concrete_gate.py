"""Hard-concrete gates: samples follow the formulas, and a closed gate equals a removed head."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.attention import head_axis_ops
from headwise.attention.interfaces.core_types import QueryContext
from support import layer_cases as cases
from support.layer_cases import base, check_close

WIDE = {"temperature": 0.7, "low": -0.2, "high": 1.4}
LIMITS = [{}, WIDE, {"temperature": 2 / 3, "low": -0.3, "high": 1.05}]
SIX = torch.tensor([-3.0, -0.5, 0.0, 0.2, 1.0, 2.5], dtype=torch.float64)


def gated(log_a: Tensor, options: dict[str, object] | None = None, **spec: object) -> hw.Attention:
    """A layer with one gate for each of these numbers."""
    built = (
        hw.Attention(
            base(
                heads=len(log_a), modifiers=(hw.parts.HardConcreteGate(**(options or {})),), **spec
            )
        )
        .double()
        .eval()
    )
    with torch.no_grad():
        built.hard_concrete_gate["log_a"].copy_(log_a)
    return built


def gates(layer: hw.Attention, aux_losses: hw.attention.AuxLosses | None = None) -> Tensor:
    """g_O of one call."""
    x = torch.zeros(1, 1, layer.spec.model, dtype=torch.float64)
    return layer.spec.modifiers[0].gate(
        QueryContext(x, x, 1.0, hw.SequenceInfo.from_batch(x)), layer.hard_concrete_gate, aux_losses
    )[:, 0]


def sample_gates(many: int, log_a: float, options: dict[str, float], seed: int) -> Tensor:
    """Many gates of one log_a, drawn in training: a layer of 100 heads is
    called again and again.
    """
    torch.manual_seed(seed)
    layer = hw.Attention(
        hw.design(
            model=1,
            heads=100,
            dim=1,
            modifiers=(hw.parts.HardConcreteGate(start=log_a, **options),),
        )
    )
    layer.double().train()
    return torch.cat([gates(layer).detach().flatten() for _ in range(many // 100)])


def limits(options: dict[str, float]) -> tuple[float, float, float]:
    return options.get("temperature", 0.33), options.get("low", -0.1), options.get("high", 1.1)


def sigmoid(x: np.ndarray | float) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x, dtype=np.float64)))


def hard_concrete(
    u: np.ndarray, log_a: np.ndarray | float, options: dict[str, float]
) -> np.ndarray:
    """clip(low + (high - low) s, 0, 1), s = sigmoid((log u - log(1 - u) + log_a) / temperature)
    (1712.01312).
    """
    temperature, low, high = limits(options)
    s = sigmoid((np.log(u) - np.log(1 - u) + log_a) / temperature)
    return np.clip(low + (high - low) * s, 0, 1)


# --- what is drawn --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", LIMITS, ids=str)
def test_a_gate_is_the_formula_of_its_sample(options, monkeypatch):
    uniform = torch.tensor([0.0, 0.03, 0.4, 0.61, 0.97, 1.0], dtype=torch.float64)
    soft, hard = (gated(SIX, {**options, "sample": sample}).train() for sample in ("soft", "hard"))
    monkeypatch.setattr(
        torch, "rand", lambda shape, dtype, device: uniform.to(dtype).reshape(shape)
    )
    u = 1e-6 + (1 - 2e-6) * uniform.numpy()
    expected = torch.from_numpy(hard_concrete(u, SIX.numpy(), options))
    check_close(gates(soft), expected)
    assert torch.equal(gates(hard), (expected > 0.5).double())


@pytest.mark.parametrize("log_a", [-2.0, 0.0, 1.5])
@pytest.mark.parametrize("value", LIMITS, ids=str)
def test_gates_are_distributed_as_published(value, log_a):
    many = 20_000
    found = sample_gates(many, log_a, value, seed=7)
    temperature, low, high = limits(value)
    near = 4 * 0.5 / math.sqrt(many)  # four standard deviations of the widest fraction
    assert (found == 0).double().mean() == pytest.approx(
        sigmoid(temperature * math.log(-low / high) - log_a), abs=near
    )
    open_at = temperature * math.log((1 - low) / (high - 1))
    assert (found == 1).double().mean() == pytest.approx(sigmoid(log_a - open_at), abs=near)
    for below in (0.2, 0.5, 0.9):
        s = (below - low) / (high - low)
        share = sigmoid(temperature * math.log(s / (1 - s)) - log_a)
        assert (found <= below).double().mean() == pytest.approx(share, abs=near)
    middle = (np.arange(200_000) + 0.5) / 200_000
    assert found.mean() == pytest.approx(hard_concrete(middle, log_a, value).mean(), abs=near)


def test_one_draw_for_each_head_and_call():
    layer, x = gated(SIX * 0, vdim=5), cases.tensors(base())[0]
    whole = hw.Probe("heads")
    gates_of = []
    usual = hw.Attention(base(heads=6, vdim=5)).double()
    usual.load_state_dict({k: v for k, v in layer.state_dict().items() if "log_a" not in k})
    usual(x, probe=whole)
    layer.train()
    for _ in range(2):
        probe = hw.Probe("heads")
        layer(x, probe=probe)
        ratio = probe.tensors["heads"] / whole.tensors["heads"]
        check_close(ratio, ratio[:1, :1, :, :1].expand_as(ratio))
        gates_of.append(ratio[0, 0, :, 0])
    assert len(set(gates_of[0].tolist())) > 3
    assert not torch.allclose(*gates_of)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", LIMITS, ids=str)
def test_evaluation_as_released_forgets_the_temperature(value):
    _, low, high = limits(value)
    expected = np.clip(low + (high - low) * sigmoid(SIX.numpy()), 0, 1)
    check_close(gates(gated(SIX, value)), torch.from_numpy(expected))


@pytest.mark.parametrize("options", LIMITS, ids=str)
def test_evaluation_as_published_takes_the_likelier_end(options):
    log_a = torch.linspace(-3, 3, 121, dtype=torch.float64)
    found = gates(gated(log_a, {**options, "evaluation": "hard"}))
    temperature, low, high = limits(options)
    shut = sigmoid(temperature * math.log(-low / high) - log_a.numpy())
    opened = sigmoid(log_a.numpy() - temperature * math.log((1 - low) / (high - 1)))
    sure = np.abs(opened - shut) > 1e-9
    assert torch.equal(found[sure], torch.from_numpy(opened > shut).double()[sure])
    assert 0 < found.sum() < 121


def test_undecided_heads_stay_open():
    assert (gates(gated(torch.zeros(6), {"evaluation": "hard"})) == 1).all()
    # here log(-low / high) + log((1 - low) / (high - 1)) is exactly 0
    exact = {"evaluation": "hard", "low": -1.0, "high": 2.0}
    assert (gates(gated(torch.zeros(6), exact)) == 1).all()


@pytest.mark.parametrize("mode", ["code", "hard", "soft sample", "hard sample"])
def test_shut_gates_equal_ablated_and_pruned_heads(mode):
    ends = torch.tensor([60.0, -60.0, 60.0, -60.0, -60.0, 60.0])
    result = {"sample": mode.split()[0]} if "sample" in mode else {"evaluation": mode}
    layer, x = gated(ends, result, kv=2, vdim=5, pattern="causal()"), cases.tensors(base())[0]
    layer.train("sample" in mode)
    usual = hw.Attention(base(heads=6, kv=2, vdim=5, pattern="causal()")).double()
    usual.load_state_dict({k: v for k, v in layer.state_dict().items() if "log_a" not in k})
    loud = (ends > 0).double()[:, None]
    silenced = usual(x, probe=hw.Probe("heads", callback=lambda _, o: o * loud))
    check_close(layer(x), silenced)
    small, weights = head_axis_ops.keep_heads(layer.spec, layer.state_dict(), [0, 2, 5])
    cut = hw.Attention(small).double().train("sample" in mode)
    cut.load_state_dict(weights)
    check_close(cut(x), silenced)


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_reach_every_gate():
    x = cases.tensors(base())[0]
    slopes = []
    for sample in ("soft", "hard"):
        torch.manual_seed(3)
        layer = gated(SIX * 0, {"sample": sample, "temperature": 2.0}).train()
        weight = torch.linspace(1, 2, 6, dtype=torch.float64)
        slopes.append(
            torch.autograd.grad((gates(layer) * weight).sum(), layer.hard_concrete_gate["log_a"])[0]
        )
        assert (
            torch.autograd.grad(layer(x).square().sum(), layer.hard_concrete_gate["log_a"])[0]
            .abs()
            .sum()
            > 0
        )
    assert (slopes[0] != 0).sum() >= 4
    check_close(slopes[0], slopes[1])  # rounding passes the gradient on as if it were not there


@pytest.mark.parametrize("options", LIMITS, ids=str)
@pytest.mark.parametrize("layers", [1, 4])
def test_the_gradient_of_the_penalty_is_in_closed_form(options, layers):
    ends = torch.cat([SIX, torch.tensor([-60.0, 60.0])])
    layer, aux_losses = (
        gated(ends, {**options, "regulariser": "mean", "layers": layers}),
        hw.attention.AuxLosses(),
    )
    gates(layer, aux_losses)
    temperature, low, high = limits(options)
    chance = sigmoid(ends.numpy() - temperature * math.log(-low / high))
    slope = chance * (1 - chance) / layers
    slope[-2:] = 0  # where the probability is held
    ours = torch.autograd.grad(aux_losses.total("l0"), layer.hard_concrete_gate["log_a"])[0]
    check_close(ours, torch.from_numpy(slope))
    assert aux_losses.total("l0").item() == pytest.approx(
        np.clip(chance, 1e-6, 1 - 1e-6).sum() / layers
    )


# --- the ledger -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", ["train", "eval"])
@pytest.mark.parametrize("regulariser", ["sum", "mean"])
def test_aux_losses_of_two_layers_add_up(regulariser, training):
    """The sum over all heads, or the mean over layers of the sum over the heads of each."""
    x, aux_losses = cases.tensors(base())[0], hw.attention.AuxLosses()
    expected = []
    for depth, heads in enumerate((6, 4)):
        spec = base(
            heads=heads,
            modifiers=(hw.parts.HardConcreteGate(start=0.5 - depth, regulariser=regulariser),),
        )
        layer = hw.Attention(spec.at_depth(depth, 2)).double()
        getattr(layer, training)()
        aux_losses.layer = str(depth)
        for _ in range(2):  # a layer run again sets its term and does not add to it
            layer(x, probe=hw.Probe(aux_losses=aux_losses))
        expected.append(heads * sigmoid(0.5 - depth - 0.33 * math.log(0.1 / 1.1)))
    total = np.sum(expected) if regulariser == "sum" else np.mean(expected)
    assert aux_losses.total("l0").item() == pytest.approx(total)


def test_only_a_mean_has_to_know_the_depth():
    assert hw.parts.HardConcreteGate().at_depth(3, 12) == hw.parts.HardConcreteGate()
    assert hw.parts.HardConcreteGate(regulariser="mean").at_depth(
        3, 12
    ) == hw.parts.HardConcreteGate(regulariser="mean", layers=12)


def test_recomputing_a_layer_draws_the_same():
    x = cases.tensors(base())[0].requires_grad_()
    layer = gated(SIX).train()
    found = []
    for run in (
        layer,
        lambda *args, **kwargs: checkpoint(layer, *args, use_reentrant=False, **kwargs),
    ):
        torch.manual_seed(11)
        aux_losses = hw.attention.AuxLosses()
        loss = run(x, probe=hw.Probe(aux_losses=aux_losses)).square().sum() + aux_losses.total("l0")
        found.append(
            (loss.detach(), *torch.autograd.grad(loss, [x, layer.hard_concrete_gate["log_a"]]))
        )
        assert len(aux_losses.terms) == 1
    for plain, again in zip(*found, strict=True):
        check_close(again, plain, rtol=0, atol=0)


@pytest.mark.compile
@pytest.mark.parametrize("sample", ["soft", "hard"])
def test_one_graph_holds_the_draw(sample):
    x, layer = cases.tensors(base())[0], gated(SIX, {"sample": sample}).train()
    torch._dynamo.reset()
    traced = torch.compile(layer, fullgraph=True, backend="eager")
    torch.manual_seed(5)
    expected = layer(x)
    torch.manual_seed(5)
    check_close(traced(x), expected)
    assert (
        torch.autograd.grad(traced(x).sum(), layer.hard_concrete_gate["log_a"])[0].abs().sum() > 0
    )


# --- what is refused ------------------------------------------------------------------------------
