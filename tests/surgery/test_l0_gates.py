"""L0 gates: unneeded heads are found, exactly the requested number stays, and no gate remains."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.attention.presets import with_gates
from headwise.models import Transformer
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.objectives import choose_objective
from headwise.report.progress import CountedMessage
from headwise.surgery.attention_replacement import (
    AttentionChange,
    get_attention_parameters,
    remove_heads,
    replace_attentions,
)
from headwise.surgery.distillation import DistillationTexts
from headwise.surgery.l0_gates import (
    GateCountConstraint,
    GateTrainingOptions,
    GateTrainingResult,
    get_open_probabilities,
    select_most_open,
    train_gates,
)
from headwise.surgery.pruning_plan import HeadUnit, list_units
from headwise.util.errors import SpecError
from support.importance_examples import (
    LLAMA,
    WORDS,
    build_model,
    make_examples,
    with_uneven_attention,
)
from support.refusals import refused_cases

NEEDLESS = {"decoder.0.attention": (1, 2), "decoder.1.attention": (0, 3)}
GROUPED = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
BRIEF: dict[str, Any] = {"steps": 4, "batch": 4, "every": 2}
LONG: dict[str, Any] = {
    "steps": 80,
    "batch": 8,
    "every": 40,
    "freeze": "model",
    "alpha": 1.0,
    "gates_rate": 0.15,
}


def needy(needless: dict[str, tuple[int, ...]], seed: int = 0, **config: Any) -> Transformer:
    """A model of two layers and four heads in each, of which these say nothing that reaches
    anybody.
    """
    options = {
        "model_type": "gpt2",
        "n_embd": 20,
        "n_head": 4,
        "n_layer": 2,
        "vocab_size": WORDS,
        "n_positions": 32,
    }
    net = with_uneven_attention(
        hw.build(hw.families.read_model_spec(config or options), seed=seed), 3.0
    ).float()
    with torch.no_grad():
        for site, heads in needless.items():
            spec, weight = (
                dict(net.spec.attention_specs())[site],
                get_attention_parameters(net, site)["output.o"],
            )
            weight.view(spec.model, len(spec.score_head_of_output), -1)[:, list(heads)] = 0
    return net


def state(net: Transformer) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in net.state_dict().items()}


def same(net: Transformer, before: dict[str, torch.Tensor]) -> bool:
    now = net.state_dict()
    return now.keys() == before.keys() and all(
        torch.equal(one, before[name]) for name, one in now.items()
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def count(found: GateTrainingResult) -> int:
    return sum(map(len, found.keep.values()))


# --- what is found --------------------------------------------------------------------------------


def test_unneeded_heads_are_found_and_pruned_without_loss():
    net = needy(NEEDLESS)
    before = state(net)
    found = train_gates(net, make_examples(net, 60), GateTrainingOptions(heads=4, **LONG))
    assert found.keep == {"decoder.0.attention": (0, 3), "decoder.1.attention": (1, 2)}
    assert same(net, before)
    assert same(found.net, before)  # the model was frozen, and nothing of gates is left
    assert found.net.spec == net.spec
    assert abs(found.curve[-1].num_open_gates - 4) < 0.75
    x = make_examples(net)[0].inputs["x"]
    torch.testing.assert_close(remove_heads(found.net, found.keep)(x), net(x), rtol=1e-5, atol=1e-5)


def test_the_one_head_that_matters_is_found_while_the_model_learns_on():
    every = {"decoder.0.attention": (0, 1, 2, 3), "decoder.1.attention": (0, 1, 3)}
    net = needy(every)
    how = GateTrainingOptions(
        heads=1, steps=60, batch=8, every=60, alpha=0.9, rate=1e-5, gates_rate=0.2
    )
    found = train_gates(net, make_examples(net, 60), how)
    assert found.keep == {"decoder.0.attention": (), "decoder.1.attention": (2,)}
    assert not same(found.net, state(net))
    assert found.net.state_dict().keys() == net.state_dict().keys()
    assert all(parameter.requires_grad for parameter in found.net.parameters())


def test_heads_of_a_group_go_together():
    net = needy({"decoder.0.attention": (2, 3), "decoder.1.attention": (0, 1)}, **GROUPED)
    found = train_gates(
        net, make_examples(net, 60), GateTrainingOptions(heads=0.5, unit="kv", **LONG)
    )
    assert found.keep == {"decoder.0.attention": (0, 1), "decoder.1.attention": (2, 3)}
    assert all(
        entry[0] == entry[1] and entry[2] == entry[3] for entry in found.open_probabilities.values()
    )
    small = remove_heads(found.net, found.keep)
    assert [spec.heads.kv for _, spec in small.spec.attention_specs()] == [1, 1]


def test_the_count_of_groups_is_of_gates():
    net = needy({}, **GROUPED)
    found = train_gates(
        net, make_examples(net, 20), GateTrainingOptions(heads=3, unit="kv", start=0.7, **BRIEF)
    )
    assert found.curve[0].num_open_gates == pytest.approx(
        4 * sigmoid(0.7 - 0.33 * math.log(0.1 / 1.1)), abs=1e-5
    )
    assert count(found) == 6


def test_gates_of_a_group_are_drawn_once():
    spec = hw.design(model=12, heads=6, kv=2, modifiers=(hw.parts.HardConcreteGate(per="kv"),))
    layer, x = hw.Attention(spec).train(), torch.zeros(1, 1, 12)
    sequence = hw.interfaces.core_types.QueryContext(x, x, 1.0, hw.SequenceInfo.from_batch(x))
    torch.manual_seed(0)
    sample = torch.stack(
        [spec.modifiers[0].gate(sequence, layer.hard_concrete_gate, None)[:, 0] for _ in range(40)]
    )
    assert torch.equal(sample[:, :3], sample[:, :1].expand(-1, 3))
    assert torch.equal(sample[:, 3:], sample[:, 3:4].expand(-1, 3))
    assert not torch.equal(sample[:, 0], sample[:, 3])
    assert layer.hard_concrete_gate["log_a"].shape == (2,)


# --- counts ---------------------------------------------------------------------------------------


def test_the_expected_count_equals_the_closed_form_and_the_auxiliary_loss():
    net = needy({})
    found = train_gates(
        net, make_examples(net, 20), GateTrainingOptions(heads=3, start=0.7, **BRIEF)
    )
    assert found.curve[0].num_open_gates == pytest.approx(
        8 * sigmoid(0.7 - 0.33 * math.log(0.1 / 1.1)), abs=1e-5
    )
    assert found.curve[-1].num_open_gates == pytest.approx(
        sum(map(sum, found.open_probabilities.values())), abs=1e-5
    )
    spec = with_gates(net.spec.stacks[0].layers[0].attention, start=0.7)
    aux_losses, layer = hw.attention.AuxLosses(), hw.Attention(spec)
    layer(torch.zeros(1, 2, 20), probe=hw.Probe(aux_losses=aux_losses))
    assert float(aux_losses.total("l0").detach()) * 2 == pytest.approx(
        found.curve[0].num_open_gates, abs=1e-5
    )


@pytest.mark.parametrize("heads", [1, 8, 0.6])
def test_exactly_the_requested_number_of_heads_stays(heads):
    net = needy({})
    found = train_gates(net, make_examples(net, 20), GateTrainingOptions(heads=heads, **BRIEF))
    assert count(found) == {0.6: 5}.get(heads, heads)
    flat = sorted(
        (chance for entry in found.open_probabilities.values() for chance in entry), reverse=True
    )
    keep = [
        found.open_probabilities[site][head] for site, own in found.keep.items() for head in own
    ]
    assert sorted(keep, reverse=True) == flat[: count(found)]


def test_ties_keep_the_first_gates():
    assert select_most_open(
        {"a": (0.5, 0.5)}, {"a": [HeadUnit("a", (0,)), HeadUnit("a", (1,))]}, 1
    ) == {"a": (0,)}


def test_the_penalty_is_the_method_of_multipliers():
    net = needy({})
    units = list_units(net.spec, "head")
    how = GateTrainingOptions(heads=2, steps=100, ramp=0.5, strength=0.8, gates_rate=0.1)
    built = replace_attentions(
        net,
        {
            site: AttentionChange(with_gates(spec), gate_of(net, site))
            for site, spec in net.spec.attention_specs()
        },
    )
    one, factor = GateCountConstraint(built, units, 2, how), 0.0
    for step, target in ((25, 5.0), (50, 2.0), (90, 2.0)):
        expected = sum(
            float(get_open_probabilities(built, site).detach().double().sum()) for site in units
        )
        over = expected - target
        added = one.extra_loss(step)
        assert float(added.detach()) == pytest.approx(factor * over + 0.8 * over**2 / 8, rel=1e-4)
        added.backward()
        one.step(step)
        factor += 0.03 * 0.8 * over / 8
        assert one.num_open_gates < expected  # each of the eight gates was pushed shut


def gate_of(net: Transformer, site: str) -> dict[str, torch.Tensor]:
    return get_attention_parameters(net, site) | {"hard_concrete_gate.log_a": torch.full((4,), 2.0)}


def test_the_reported_loss_is_that_of_the_pruned_model():
    net = needy({})
    examples, how = make_examples(net, 20), GateTrainingOptions(heads=3, seed=3, **BRIEF)
    found = train_gates(net, examples, how)
    small, losses = remove_heads(found.net, found.keep), []
    for number in DistillationTexts(net, examples, how).held_out_ids:
        objective, _ = choose_objective(net, None, examples[number])
        question = objective.prepare_input(net, examples[number], number)
        losses.append(
            float(objective.value(small(**question.inputs.kwargs).detach(), None, question))
        )
    assert found.held_out == pytest.approx(np.mean(losses), rel=1e-5)


# --- what learns, and repeats ---------------------------------------------------------------------


def test_seeds_repeat():
    net = needy({})
    expected = torch.get_rng_state()
    runs = [
        train_gates(net, make_examples(net, 20), GateTrainingOptions(heads=3, seed=seed, **BRIEF))
        for seed in (4, 4, 5)
    ]
    assert torch.equal(torch.get_rng_state(), expected)
    assert runs[0].open_probabilities == runs[1].open_probabilities != runs[2].open_probabilities
    assert same(runs[0].net, state(runs[1].net))
    assert runs[0].curve == runs[1].curve


def test_a_table_that_the_decoder_reads_is_frozen_with_it():
    from support.importance_examples import T5

    net = build_model(T5).float()
    assert net.spec.stacks[-1].embedding.table == "encoder"
    found = train_gates(
        net,
        make_examples(net, 20),
        GateTrainingOptions(heads=3, sites=("encoder",), freeze="decoder", **BRIEF),
    )
    moved = {
        name
        for name, one in found.net.state_dict().items()
        if not torch.equal(one, state(net)[name])
    }
    assert moved
    assert not [
        name
        for name in moved
        if name.startswith(("decoder.", "head.")) or name.endswith("embedding.tokens")
    ]


def test_an_interrupt_reports_the_gates_so_far():
    def stop(message: CountedMessage) -> None:
        if message.done == 3:
            raise KeyboardInterrupt

    net = needy({})
    found = train_gates(net, make_examples(net, 20), GateTrainingOptions(heads=3, **BRIEF), stop)
    assert found.stop_reason == "interrupted at step 3 of 4"
    assert count(found) == 3
    assert found.curve[-1].step == 2
    assert "gates were expected to be open at the end, the target was 3" in found.notes[-1]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "why"), refused_cases(__file__, "gates", globals()))
def test_invalid_arguments_are_refused(options, why):
    net = needy({})
    with pytest.raises(SpecError, match=why) as excinfo:
        train_gates(net, make_examples(net, 20), GateTrainingOptions(**{**BRIEF, **options}))
    assert "\n" not in str(excinfo.value)


def test_models_that_gates_cannot_be_put_on_are_refused():
    from support.importance_examples import classifier, model_without_head

    none = model_without_head()
    with pytest.raises(SpecError, match="no loss on these examples; use alpha=1"):
        train_gates(none, make_examples(none, 20), GateTrainingOptions(heads=2, **BRIEF))
    net = classifier("first")
    with pytest.raises(SpecError, match="no loss on these"):
        train_gates(
            net,
            [Example(example.inputs, {}) for example in make_examples(net, 20)],
            GateTrainingOptions(heads=2, **BRIEF),
        )
    net = needy({})
    sites = dict(net.spec.attention_specs())
    twice = replace_attentions(
        net,
        {
            site: AttentionChange(with_gates(spec), gate_of(net, site))
            for site, spec in sites.items()
        },
    )
    with pytest.raises(
        SpecError, match=r"decoder\.0\.attention: the spec has learned head gates already"
    ):
        train_gates(twice, make_examples(net, 20), GateTrainingOptions(heads=2, **BRIEF))
    assert (
        train_gates(
            none, make_examples(none, 20), GateTrainingOptions(heads=2, **{**BRIEF, "alpha": 1.0})
        )
        .curve[0]
        .held_out
        < 1e-9
    )
