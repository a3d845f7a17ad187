"""`why` says what would run, before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import cases
import headwise as hw
from headwise import backends
from headwise.reasons import why


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    """The backends that layers really choose, in order."""
    seen: list[ModuleType] = []
    choose = backends.choose

    def noted(*job: object) -> ModuleType:
        seen.append(choose(*job))
        return seen[-1]

    monkeypatch.setattr(backends, "choose", noted)
    return seen


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_what_it_says_is_what_runs(name: str, chosen: list[ModuleType]):
    spec = cases.EXAMPLES[name]
    layer = hw.Attention(spec).eval()
    x, z = cases.tensors(spec, torch.float32)
    with torch.no_grad():
        layer(x, source=z)
    keys = (x if z is None else z).shape[1]
    assert [backends.BACKENDS[str(why(spec, tokens=keys).runs)]] == chosen


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_a_decoding_step_runs_what_it_says(name: str, chosen: list[ModuleType]):
    spec = cases.causal(cases.EXAMPLES[name])
    layer = hw.Attention(spec).eval()
    x, _ = cases.tensors(spec, torch.float32)
    with torch.no_grad():
        layer(x[:, :1], cache=layer.cache(batch=cases.BATCH, capacity=9))
    assert [backends.BACKENDS[str(why(spec, tokens="one").runs)]] == chosen


def test_the_form_of_a_single_query_is_said():
    said = why(hw.design(preset="mla"))
    assert said.asked.form == ""
    assert "absorbed" in said.other.form


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_every_page_fits_a_terminal(name: str):
    reasons = why(cases.EXAMPLES[name], want=["weights", "lse"], device="cuda", dtype="bf16", when=["grad", "mask"])
    assert max(map(len, str(reasons).splitlines())) <= 80
    told = json.loads(reasons.json())
    assert {row["name"] for row in told["backends"]} == set(backends.BACKENDS)
    assert told["runs"] == reasons.runs


def test_wanting_weights_needs_a_backend_that_shows_them():
    reasons = why(hw.design(model=12, heads=3), want="weights")
    assert reasons.runs == "dense"
    assert all("weights" in " ".join(said) for name, said in reasons.refusals.items() if name != "dense")


def test_two_parts_of_a_kind_say_a_reason_once():
    reasons = why(hw.design(preset="talking", model=12, heads=3))
    assert all(len(said) == len(set(said)) for said in reasons.refusals.values())
    assert sum("TalkingHeads" in said for said in reasons.refusals["sdpa"]) == 1


def test_another_device_needs_none_here():
    small = why(hw.design(model=12, heads=3), device="cuda:1", dtype="bf16")
    assert small.asked.job.device == "cuda"
    assert any("16 channels" in said for said in small.refusals["flex"])


def test_states_of_a_call_change_the_answer():
    spec = hw.design(model=12, heads=3, modifiers=(hw.WeightDropout(0.5),))
    assert why(spec).runs == "sdpa"
    assert why(spec, when=["training"]).runs == "composed"
    assert why(replace(spec, modifiers=()), when="mask").runs == "dense"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ({"want": ["wieghts"]}, "did you mean 'weights'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"device": "tpuu"}, "cpu, cuda"),
        ({"tokens": "two"}, "use one of many, one"),
        ({"when": ["traning"]}, "did you mean 'training'"),
    ],
)
def test_unknown_words_get_a_remedy(said: dict, remedy: str):
    with pytest.raises(ValueError, match=remedy.replace("(", r"\(")):
        why(hw.design(model=12, heads=3), **said)
