"""`hw.check_part`: parts that keep the contract pass, and each way to break it fails the check for
it and no other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch

import headwise as hw
from headwise.attention.backends import BACKENDS
from headwise.attention.interfaces import Part, ScoreStep
from headwise.attention.interfaces.core_types import AxisLayout, Param
from headwise.attention.interfaces.part import part
from headwise.attention.parts.initialisers import zeros_init
from headwise.costs.part_checks import CHECKS, CheckResult, PartReport, measure_error
from support.own_parts import forget_parts

pytestmark = pytest.mark.lengthy


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget the parts of each test."""
    with forget_parts():
        yield


def failed(report: PartReport) -> set[str]:
    return {result.name for result in report.results if result.outcome == "failed"}


# --- Parts that keep the contract -----------------------------------------------------------------

KEEP = {
    "project": lambda: hw.parts.Overlapping(overlap=1),
    "mix": lambda: hw.parts.TalkingHeads(on="weights"),
}


@pytest.mark.parametrize("kind", KEEP)
def test_parts_of_every_slot_pass(kind: str):
    checked_part = KEEP[kind]()
    report = hw.check_part(checked_part)
    assert report.passed, str(report)
    report.raise_if_failed()
    assert [result.outcome for result in report.results] == ["passed"] * 6
    assert report.part == repr(checked_part)
    assert {"dense"} <= set(report.backends) <= set(BACKENDS)


# --- Parts that break it --------------------------------------------------------------------------


class _Temperature(ScoreStep):
    def params(self, spec):
        return {"log": Param(AxisLayout.parse("q"), zeros_init)}

    def score(self, s, position, factors, p):
        return s * (-p["log"]).exp().to(s.dtype)


def keeps() -> Part:
    @part
    class Warm(_Temperature):
        pass

    return Warm()


def vectorised_form_differs() -> Part:
    @part
    class Doubled(hw.parts.TalkingHeads):
        def mix(self, a_BHTS, factors, p):
            return super().mix(a_BHTS, factors, {"mixing": 2 * p["mixing"]})

    return Doubled()


def gradient_is_lost() -> Part:
    @part
    class Detached(_Temperature):
        def score(self, s, position, factors, p):
            return super().score(
                s, position, factors, {"log": p["log"].detach() if s.dim() == 4 else p["log"]}
            )

    return Detached()


def depends_on_the_number_of_queries() -> Part:
    @part
    class Hasty(_Temperature):
        def score(self, s, position, factors, p):
            return super().score(s, position, factors, p) * (
                2 if s.dim() == 4 and s.shape[-2] == 1 else 1
            )

    return Hasty()


def declares_no_dependencies() -> Part:
    @part
    class Forgetful(hw.parts.TalkingHeads):
        def required_score_heads(self, spec, heads):
            return heads

    return Forgetful()


def declares_no_flops() -> Part:
    @part
    class Busy(_Temperature):
        def score(self, s, position, factors, p):
            s = super().score(s, position, factors, p)
            return s @ torch.eye(s.shape[-1], dtype=s.dtype) if s.dim() == 4 else s

    return Busy()


def changes_when_it_is_read() -> Part:
    @part
    class Growing(_Temperature):
        start: float = 0.0

        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "start", self.start + 1.0)

    return Growing()


BREAK: dict[str, tuple[Callable[[], Part], set[str], str]] = {
    "definition": (
        vectorised_form_differs,
        {"definition", "gradients", "decoding"},
        "whole rows, backend dense: error",
    ),
    "gradients": (
        gradient_is_lost,
        {"gradients"},
        "gradient of detached.log, backend dense: error",
    ),
    "decoding": (
        depends_on_the_number_of_queries,
        {"decoding"},
        "chunks of 1, 1, 1, 1, 1, 1, 1 tokens: error",
    ),
    "pruning": (declares_no_dependencies, {"pruning"}, "all keys: "),
    "counts": (declares_no_flops, {"counts"}, "all keys: FLOPs: "),
    "saving": (changes_when_it_is_read, {"saving"}, "all keys: TOML: "),
}


@pytest.mark.parametrize("check", BREAK)
def test_a_broken_part_fails_its_check_alone(check: str):
    make, names, words = BREAK[check]
    report = hw.check_part(make())
    assert failed(report) == names
    assert not report.passed
    assert f"\n{check} failed:\n" in str(report)
    assert words in str(report)
    with pytest.raises(AssertionError, match=f"{len(names)} of 6 checks failed"):
        report.raise_if_failed()


def test_every_check_is_seen_to_fail():
    assert list(BREAK) == list(CHECKS)


def test_an_undeclared_product_is_counted_exactly():
    report = hw.check_part(declares_no_flops())
    (whole,) = [f for f in report.results[4].failures if f.startswith("all keys: FLOPs")]
    counted, real = (
        int(number) for number in whole.removeprefix("all keys: FLOPs: ").split(", expected ")
    )
    batch, heads, tokens = 3, 6, 7
    assert real - counted == 2 * batch * heads * tokens**3


def test_errors_of_a_part_are_reported():
    @part
    class Refusing(_Temperature):
        def score(self, s, position, factors, p):
            raise ValueError("no scores\ntoday")

    report = hw.check_part(Refusing())
    assert failed(report) == set(CHECKS)
    assert "all keys: ValueError: no scores today" in str(report)


# --- The report -----------------------------------------------------------------------------------


def test_the_report_is_a_table_and_plain_values():
    report = hw.check_part(keeps())
    lines = str(report).splitlines()
    assert lines[0] == "Warm(): all 6 checks hold"
    assert [line.split()[0] for line in lines[3:9]] == list(CHECKS)
    assert len({line.rindex("  ") for line in lines[2:9]}) == 1
    data = json.loads(json.dumps(report.data))
    assert data["passed"] is True
    num_backends = len(report.backends)
    # four ways to fill a batch
    assert data["results"][0]["comparisons"] == 4 * len(report.specs) * num_backends
    assert all(
        result["largest_error"] is None or result["largest_error"] < 1e-12
        for result in data["results"]
    )


def test_a_report_repeats_with_its_seed_and_leaves_the_generator():
    state = torch.get_rng_state()
    first, again = (hw.check_part(hw.parts.SumMerge(), seed=1).data for _ in range(2))
    assert first == again
    assert torch.equal(state, torch.get_rng_state())


def test_specs_that_a_part_conflicts_with_are_listed():
    report = hw.check_part(hw.parts.AverageNormaliser())
    assert report.passed
    assert len(report.impossible) + len(report.specs) >= 4
    skipping = hw.check_part(hw.parts.SumNormaliser())
    assert skipping.impossible
    assert f"not used   {skipping.impossible[0]}" in str(skipping)
    assert "use similarity FeatureMap()" in skipping.impossible[0]


def test_checks_that_do_not_apply_are_listed_with_the_reason():
    @part
    class Bidirectional(_Temperature):
        def conflicts(self, spec):
            if spec.pattern == hw.patterns.Causal():
                yield "Bidirectional needs future keys; use full()"

    report = hw.check_part(Bidirectional())
    assert report.passed
    reason = "Bidirectional needs future keys; use full()"
    assert report.impossible == (f"causal, 2 key-value heads: {reason}",)
    outcomes = {result.name: result.skipped for result in report.results}
    assert (
        outcomes["decoding"]
        == outcomes["counts"]
        == [f"all keys: {reason}", f"cross-attention: {reason}"]
    )
    assert f"skipped    decoding: all keys: {reason}" in str(report)


def test_a_part_that_fits_no_layer_is_refused():
    @part
    class Picky(_Temperature):
        def conflicts(self, spec):
            yield "Picky fits nothing; use another"

    with pytest.raises(
        hw.SpecError,
        match=r"fits none of the layers .*: Picky fits nothing; use another; add specs to",
    ):
        hw.check_part(Picky())


def test_errors_are_relative_and_never_hide_what_is_not_finite():
    nan, inf = float("nan"), float("inf")
    assert measure_error(
        torch.tensor([3.0]), torch.tensor([2.9], dtype=torch.float64)
    ) == pytest.approx(0.1 / 3.0)
    assert measure_error(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 1.0])) == pytest.approx(
        0.5 / 0.1
    )
    for actual, expected in [
        (nan, 1.0),
        (1.0, nan),
        (inf, 1.0),
        (1.0, inf),
        (nan, nan),
        (inf, -inf),
    ]:
        assert measure_error(torch.tensor([1.0, actual]), torch.tensor([1.0, expected])) == inf
    result = CheckResult("a", "b")
    result.compare("shapes", torch.zeros(2, 3), torch.zeros(3, 2))
    result.compare("names", ["x"], ["y"])
    result.compare("nan", torch.tensor(nan), torch.tensor(1.0))
    assert result.failures == [
        "shapes: shape [2, 3], expected [3, 2]",
        "names: ['x'], expected ['y']",
        "nan: error inf, at most 1e-10 is rounding",
    ]
