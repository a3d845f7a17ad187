"""The demo computes what it says."""

from __future__ import annotations

import json
import math

import pytest

from headwise import counting, demo
from headwise.demo import lookup

# Checked by hand: three quarters of 40 and an eighth of 43 and 48; 45.5 by symmetry; (40/6 + 43 + 48) / (1/6 + 2);
# the others by kernel regression with these widths.
VALUES = [41.375, 45.5, 45.0769, 45.5, 45.5, 45.49999993, 45.465599, 44.406018, 43.873980]


def test_soft_look_up_gives_the_known_numbers():
    found = [one.value for one in lookup.answers()]
    for ours, known in zip(found, VALUES, strict=True):
        assert math.isclose(ours, known, abs_tol=6 * 10.0 ** -len(str(known).partition(".")[2])), (ours, known)


def test_every_answer_is_a_mean():
    assert all(math.isclose(sum(one.weights), 1) and min(one.weights) >= 0 for one in lookup.answers())


def test_weights_that_grow_with_distance_go_wrong():
    (beside, line), (met, key) = lookup.counterexamples()
    assert (beside.value, line.value) == (46.75, 44.25)
    assert (met.weights[0], key.value) == (0, 40)
    assert round(met.value, 2) == 45.92


def test_the_pages_fit_a_terminal_and_end_with_a_proof():
    said: list[str] = []
    demo.run(said.append, said.append)
    lines = "\n".join(said).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("float64") for line in lines)


def test_the_data_is_what_the_library_counts():
    told = json.loads(json.dumps(demo.data()))
    assert told["counts"]["parameters"] == counting.params(demo.spec())
    exact = next(row for row in told["proof"] if row["dtype"] == "float64")
    assert 0 < exact["largest"] < 1e-12
    assert exact["tokens"] > exact["slots"]  # the ring has forgotten, and nothing changed


@pytest.mark.parametrize("width", [1e-3, 1e6])
def test_kernel_regression_at_its_ends(width: float):
    near = lookup.answer("end", lookup.gaussian(width), query=56.4 if width < 1 else 57.0)
    assert math.isclose(near.value, 43.0 if width < 1 else sum(lookup.VALUES) / 3, rel_tol=1e-6)
