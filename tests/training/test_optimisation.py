"""Training against closed forms: schedules, AdamW, the loss, gradient accumulation, and step
options.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.attention.interfaces.core_types import AuxLosses, AxisLayout
from headwise.models.model_spec import WeightSpec
from headwise.training import Recipe, recipe as recipes, train_step, training_run
from headwise.training.data import IGNORE_INDEX, Batch
from headwise.training.train_step import StepOptions, count_batch_tokens, count_step_flops
from headwise.util.errors import SpecError
from headwise.util.files import read_lines
from support.refusals import refused_cases
from support.small_training import IDS, Echo, RoutedEcho, make_train_step, short_recipe

# --- schedules ------------------------------------------------------------------------------------

STEPS = 37


def rates(recipe: Recipe) -> list[float]:
    return [recipe.lr_at(step) for step in range(1, recipe.steps + 1)]


@pytest.mark.parametrize("floor", [0.0, 0.13])
def test_cosine_is_its_formula(floor: float):
    warmup = 5
    for step, rate in enumerate(
        rates(Recipe(steps=STEPS, lr=0.3, schedule="cosine", warmup=5 / STEPS, min_lr_ratio=floor)),
        1,
    ):
        part = (step - warmup) / (STEPS - warmup)
        expected = (
            step / warmup
            if step < warmup
            else floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * part))
        )
        assert rate == pytest.approx(0.3 * expected, abs=1e-12)


def test_inverse_square_root_is_the_one_of_attention_is_all_you_need():
    """model^-0.5 min(s^-0.5, s w^-1.5) (1706.03762), at a rate of (model w)^-0.5."""
    model, warmup = 512, 7
    ours = rates(
        Recipe(
            steps=STEPS, lr=(model * warmup) ** -0.5, schedule="inverse-sqrt", warmup=warmup / STEPS
        )
    )
    theirs = [model**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, STEPS + 1)]
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("floor", [0.004, 0.02])
def test_one_cycle_is_torchs(floor: float):
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        adamw,
        0.3,
        total_steps=STEPS,
        pct_start=0.3,
        final_div_factor=1 / (25 * floor),
        cycle_momentum=False,
    )
    expected = []
    for _ in range(STEPS):
        expected.append(theirs.get_last_lr()[0])
        adamw.step()
        theirs.step() if len(expected) < STEPS else None
    assert rates(
        Recipe(steps=STEPS, lr=0.3, schedule="one-cycle", warmup=0.3, min_lr_ratio=floor)
    ) == pytest.approx(expected)


def test_wsd_is_a_trapezium():
    ours = rates(Recipe(steps=20, lr=0.5, schedule="wsd", warmup=0.2, decay=0.25, min_lr_ratio=0.2))
    expected = [0.25, 0.5, 0.75, *[1.0] * 12, 0.84, 0.68, 0.52, 0.36, 0.2]
    assert ours == pytest.approx([0.5 * factor for factor in expected])


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), refused_cases(__file__, "recipes", globals()))
def test_absurd_recipes_are_refused_in_one_line(options: dict, message: str):
    with pytest.raises(SpecError, match=message) as refused:
        Recipe(**options)
    assert "\n" not in str(refused.value)


def test_a_recipe_survives_toml():
    one = Recipe(
        steps=7,
        lr=3e-5,
        betas=(0.8, 0.95),
        aux_losses=(("balance", 0.01), ("l0", 2.0)),
        schedule="wsd",
    )
    assert recipes.from_toml(recipes.to_toml(one)) == one
    assert recipes.from_toml("steps = 9", defaults=one).aux_losses == one.aux_losses
    with pytest.raises(SpecError, match="did you mean 'steps'"):
        recipes.from_toml("step = 9")
    with pytest.raises(SpecError, match="the recipe is not TOML"):
        recipes.from_toml("steps: 9")


# --- the optimiser --------------------------------------------------------------------------------


def test_decay_reaches_matrices_alone():
    described = Echo().model()
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in described.shapes().items()}
    matrices = train_step.group_parameters(named, described, "matrices")
    assert {name: sorted(group) for name, group in matrices.items() if "decayed" in name} == {
        "embedding, decayed": ["decoder.embedding.positions", "decoder.embedding.tokens"],
        "attention, decayed": [
            f"decoder.0.attention.{n}" for n in ("output.o", "project.k", "project.q", "project.v")
        ],
        "feed, decayed": ["decoder.0.feed.down", "decoder.0.feed.up"],
    }
    assert "embedding, decayed" not in train_step.group_parameters(
        named, described, "non-embeddings"
    )
    assert {name for group in matrices.values() for name in group} == set(named)


@pytest.mark.parametrize(
    ("name", "layout", "role"),
    [
        ("feed.expert.up_bias", "expert hidden", "feed"),
        ("feed.expert.shift", "expert hidden", "feed"),
        ("attention.qk_norm.q", "(q dim)", "attention"),
        ("attention.head_norm.scale", "out vdim", "attention"),
        ("attention.project.q_bias", "(q dim)", "attention"),
        ("attention_norm.weight", "model", "norm"),
    ],
)
def test_vectors_do_not_decay_however_many_axes_name_them(name: str, layout: str, role: str):
    sizes = {"expert": 3, "hidden": 5, "q": 7, "dim": 11, "out": 13, "vdim": 17, "model": 19}
    assert not train_step.has_weight_decay(
        WeightSpec(name, AxisLayout.parse(layout), sizes, role), "matrices"
    )


def test_adamw_is_its_formula():
    """Against 1711.05101 written out in float64, rates changing on the way, one group decayed and
    one kept.
    """
    recipe = Recipe(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    start, kinds = np.random.default_rng(0).normal(size=(2, 5)), ("feed, decayed", "norm, kept")
    named = {kind: nn.Parameter(torch.tensor(row)) for kind, row in zip(kinds, start, strict=True)}
    adamw = train_step.AdamWOptimiser({kind: {kind: p} for kind, p in named.items()}, recipe)
    w, m, v = start.copy(), np.zeros((2, 5)), np.zeros((2, 5))
    for step in range(1, 8):
        rate, g = 0.1 / step, np.random.default_rng(step).normal(size=(2, 5))
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        update = (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-6)
        w = w - rate * (np.array([[0.3], [0.0]]) * w + update)
        for row, parameter in enumerate(named.values()):
            parameter.grad = torch.tensor(g[row])
        adamw.step(rate)
    np.testing.assert_allclose(np.stack([p.detach().numpy() for p in named.values()]), w, rtol=1e-9)


def test_adamw_goes_on_from_its_tensors_however_often_and_in_whatever_order():
    def make_optimiser() -> tuple[dict[str, nn.Parameter], train_step.AdamWOptimiser]:
        named = {name: nn.Parameter(torch.ones(3)) for name in "cab"}
        return named, train_step.AdamWOptimiser({"feed, decayed": named}, Recipe())

    def go(named: dict[str, nn.Parameter], adamw: train_step.AdamWOptimiser, steps: range) -> None:
        for step in steps:
            for n, parameter in enumerate(named.values()):
                parameter.grad = torch.full((3,), 10.0**n + step)
            adamw.step(0.01)

    whole, adamw = make_optimiser()
    go(whole, adamw, range(6))
    named, adamw = make_optimiser()
    for first in (0, 2, 4):
        go(named, adamw, range(first, first + 2))
        again, other = make_optimiser()
        for name, parameter in named.items():
            again[name].data.copy_(parameter.data)
        other.load_state(
            {name: adamw.state_tensors[name].clone() for name in sorted(adamw.state_tensors)}
        )
        named, adamw = again, other
    assert all(torch.equal(named[name], whole[name]) for name in "cab")


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 7)])
def test_the_loss_is_its_definition(shape: tuple[int, ...], smoothing: float):
    logits, labels = torch.randn(shape), torch.randint(0, shape[-1], shape[:-1])
    labels.view(-1)[1] = IGNORE_INDEX
    log_p = logits.double().numpy() - np.log(np.exp(logits.double().numpy()).sum(-1, keepdims=True))
    expected = 0.0
    for place in np.ndindex(*shape[:-1]):
        if labels[place] != IGNORE_INDEX:
            target = np.full(shape[-1], smoothing / shape[-1])
            target[labels[place]] += 1 - smoothing
            expected -= (target * log_p[place]).sum()
    assert train_step.cross_entropy(logits, labels, smoothing).item() == pytest.approx(
        expected, rel=1e-5
    )


def gradients(
    recipe: Recipe, batch: Batch, dtype: torch.dtype = torch.float64
) -> tuple[float, dict[str, torch.Tensor]]:
    net = hw.build(Echo().model(), seed=3).to(dtype)
    gradients = make_train_step(net, recipe).compute_gradients(batch)
    return gradients.item(), {name: p.grad for name, p in net.named_parameters()}


def test_a_batch_in_parts_has_the_gradient_of_the_whole():
    """Rows are ragged, so that a mean of means would be another number."""
    batch = Echo().batch(0, 12)
    whole, expected = gradients(short_recipe(batch=12), batch)
    for parts in (2, 3, 12):
        found, each = gradients(short_recipe(batch=12, accumulate=parts), batch)
        assert found == pytest.approx(whole, rel=1e-12)
        for name, gradient in each.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_logits_of_labelled_tokens_alone_give_the_loss_of_all():
    """Against cross entropy over all logits."""
    batch, net = Echo().batch(0, 5), hw.build(Echo().model(), seed=3).double()
    logits = net(batch.x, sequence=batch.tokens)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX
    )
    expected.backward()
    found, each = gradients(short_recipe(), batch)
    assert found == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(each[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_smoothing_of_a_recipe_reaches_the_loss():
    batch, net = Echo().batch(0, 5), hw.build(Echo().model(), seed=3).double()
    logits, labels = net(batch.x, sequence=batch.tokens).flatten(0, 1), batch.labels.flatten()
    expected = nn.functional.cross_entropy(
        logits, labels, ignore_index=IGNORE_INDEX, label_smoothing=0.2
    )
    assert gradients(short_recipe(label_smoothing=0.2), batch)[0] == pytest.approx(
        expected.item(), rel=1e-12
    )


def test_recomputed_activations_give_the_same_gradient():
    batch, net = Echo().batch(0, 5), hw.build(Echo().model(), seed=3).double()
    net.checkpointing = "block"
    make_train_step(net, short_recipe()).compute_gradients(batch)
    for name, gradient in gradients(short_recipe(), batch)[1].items():
        torch.testing.assert_close(net.get_parameter(name).grad, gradient, rtol=1e-12, atol=1e-14)


def test_terms_join_the_loss_by_their_factor():
    """The loss with a factor of 0.5, less that without, is half of the balance summed over two
    layers.
    """
    batch, net = RoutedEcho().batch(0, 4), hw.build(RoutedEcho().model(), seed=3).double()
    plain = make_train_step(net, short_recipe(batch=4)).compute_gradients(batch).item()
    terms: dict = {}
    probes = {
        name: hw.Probe(aux_losses=AuxLosses(terms, name)) for name, _ in net.spec.attention_specs()
    }
    net.probes = probes
    net(batch.x, sequence=batch.tokens)
    balance = sum(term.item() for term in terms.values())
    assert len(terms) == 2
    found = (
        make_train_step(net, short_recipe(batch=4, aux_losses=(("balance", 0.5),)))
        .compute_gradients(batch)
        .item()
    )
    assert found - plain == pytest.approx(0.5 * balance, rel=1e-9)
    net.checkpointing = "block"
    assert (
        make_train_step(net, short_recipe(batch=4, aux_losses=(("balance", 0.5),)))
        .compute_gradients(batch)
        .item()
        == found
    )


def test_a_term_that_no_part_sets_is_refused():
    net = hw.build(RoutedEcho().model(), seed=3)
    with pytest.raises(
        SpecError,
        match="no layer has the auxiliary loss 'balanc' of aux_losses=; use one of balance",
    ):
        make_train_step(net, short_recipe(aux_losses=(("balanc", 0.5),))).compute_gradients(
            RoutedEcho().batch(0, 5)
        )


# --- what is chosen by measuring ------------------------------------------------------------------


def test_plain_attention_gives_the_same_gradients_and_leaves_layers_as_they_were():
    found = []
    for way in ("fused", "plain"):
        net = hw.build(Echo().model(), seed=0)
        make_train_step(
            net, short_recipe(), StepOptions("fp32", "off", attention=way)
        ).compute_gradients(Echo().batch(0, 5))
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        assert {
            module.backend_name for module in net.modules() if isinstance(module, hw.Attention)
        } == {None}
    torch.testing.assert_close(*found)


# --- what is measured -----------------------------------------------------------------------------


def test_a_step_is_worth_three_passes():
    """Every product of the echo model by hand: 12 rows of 7 tokens."""
    tokens, pairs = 12 * 7, 12 * (7 * 8 // 2)
    forward = 2 * tokens * (4 * 8 * 8 + 2 * 8 * 13 + 8 * IDS) + 2 * pairs * 2 * 8
    batch = Echo().batch(0, 12)
    assert count_step_flops(Echo().model(), batch) == 3 * forward
    assert count_batch_tokens(Echo().model(), batch) == int(batch.tokens.is_real.sum()) < tokens


def test_the_time_of_a_step_includes_the_update_of_the_weights(tmp_path, monkeypatch):
    """A GPU computes an update of 10 s after the call has returned, before the next value is read."""
    now = [0.0]
    queued = [0.0]

    def tick() -> float:
        now[0] += 1
        return now[0]

    def update(*args: Any) -> None:
        queued[0] += 10
        step(*args)

    def read(tensor: Tensor) -> Any:
        now[0] += queued[0]
        queued[0] = 0
        return tolist(tensor)

    step = train_step.AdamWOptimiser.step
    tolist = Tensor.tolist
    monkeypatch.setattr(train_step.AdamWOptimiser, "step", update)
    monkeypatch.setattr(Tensor, "tolist", read)
    monkeypatch.setattr(training_run, "measure_peak_flops", lambda *_: 1.0)
    monkeypatch.setattr(training_run, "time", SimpleNamespace(perf_counter=tick))
    hw.train(Echo(), None, short_recipe(steps=2), tmp_path / "run", curves=False)
    seconds = [
        record["seconds"]
        for record in read_lines(tmp_path / "run" / "metrics.jsonl")
        if record["event"] == "step"
    ]
    assert seconds[0] < 10 < seconds[1] < 20
