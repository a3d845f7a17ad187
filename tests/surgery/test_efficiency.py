"""Speed comparison by interleaved rounds, inconclusive for few or scattered rounds."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.surgery.attention_replacement import remove_heads
from headwise.surgery.verification import efficiency as timing
from headwise.surgery.verification.efficiency import (
    TimedPhase,
    TimingOptions,
    compare_speed,
    summarise_rounds,
)
from support.pruned_models import KEEP, KINDS, build_model, make_model_spec
from support.tiny_configs import model_config

READ = TimedPhase("prefill", "tokens/s", 100, lambda net: lambda: None)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_timed_in_its_own_phases(kind):
    net = build_model(make_model_spec(kind))
    found = compare_speed(
        net, remove_heads(net, KEEP[kind]), TimingOptions(batch=2, length=9, steps=3, seconds=0.02)
    )
    phases = {"decoder": ["prefill", "decode"], "encoder-decoder": ["encode", "decode"]}.get(
        kind, ["forward"]
    )
    assert [one.phase for one in found.phases] == ["attention", *phases]
    assert {one.unit for one in found.phases} == {"images/s" if kind == "vision" else "tokens/s"}
    assert all(one.before > 0 and one.after > 0 and one.rounds >= 1 for one in found.phases)
    assert "thread" in found.machine
    assert found.batch == 2
    assert found.length == (16 if kind == "vision" else 9)


def test_medians_ratios_and_spread_are_those_of_the_rounds():
    seconds = np.array([[4.0, 2.0], [4.0, 2.1], [4.2, 2.0], [4.0, 1.9], [9.0, 2.0]])
    found = summarise_rounds(READ, seconds)
    assert (found.before, found.after, found.rounds) == (25.0, 50.0, 5)
    assert found.speedup == 2.1
    assert (found.low, found.high) == pytest.approx((2.0, 4 / 1.9))
    assert found.spread == pytest.approx(
        0.05
    )  # 4.2 less 4.0 over 4.0: the odd round is outside the middle half
    assert found.verdict == "faster"
    assert summarise_rounds(READ, seconds[:, ::-1]).verdict == "slower"
    assert summarise_rounds(READ, np.array([[1.0, 1.01], [1.01, 1.0]] * 3)).verdict == "as fast"


def test_few_or_scattered_rounds_are_inconclusive():
    assert (
        summarise_rounds(READ, np.array([[4.0, 1.0]] * 4)).verdict
        == "too few rounds: 4 in the time limit, 5 needed"
    )
    wild = np.array([[4.0, 1.0], [6.0, 1.0], [4.0, 1.0], [6.0, 1.5], [4.0, 1.0], [6.0, 1.5]])
    assert summarise_rounds(READ, wild).verdict == "no verdict: spread 40% of rounds exceeds 20%"


def test_both_models_take_turns_in_changing_order(monkeypatch):
    net = build_model(make_model_spec("decoder", 1))
    after, order = remove_heads(net, {"decoder.0.attention": [0]}), []
    monkeypatch.setattr(timing, "_time_run", lambda phase, one: order.append(one is after) or 1.0)
    monkeypatch.setattr(timing, "MAX_ROUNDS", 3)
    compare_speed(net, after, TimingOptions(length=4, steps=1, seconds=60))
    assert order[:8] == [False, True, False, True, True, False, False, True]


def test_unsupported_models_are_refused():
    for wrong in ({"batch": 0}, {"length": 0}, {"steps": -1}, {"batch": True}):
        with pytest.raises(ValueError, match="must be an int >= 1"):
            TimingOptions(**wrong)
    with pytest.raises(ValueError, match="must be > 0"):
        TimingOptions(seconds=0)


def test_a_model_of_few_positions_is_timed_within_them():
    import headwise as hw

    config = model_config("gpt2", n_embd=12, n_head=3, n_layer=1, vocab_size=11, n_positions=20)
    net = hw.build(hw.families.read_model_spec(config), seed=0)
    found = compare_speed(net, net, TimingOptions(steps=6, seconds=0.01))
    assert (found.length, found.steps) == (14, 6)
