"""Soft look-up gives the numbers of the article, and shows where its weights go wrong."""

from __future__ import annotations

import math

import pytest

from headwise.learn.kernel_lookup import (
    KEYS,
    QUERY,
    VALUES,
    distance_weights,
    gaussian_weights,
    inverse_distance_weights,
    linear_interpolation_weights,
    look_up,
)


@pytest.mark.parametrize(
    ("weigh", "expected"),
    [
        # Checked by hand: three quarters of 40 and an eighth of 43 and 48; 45.5 by symmetry;
        # (40/6 + 43 + 48) / (1/6 + 2); the others by kernel regression with these widths.
        (distance_weights, 41.375),
        (inverse_distance_weights, 45.0769),
        (linear_interpolation_weights, 45.5),
        (gaussian_weights(0.5), 45.49999993),
        (gaussian_weights(1.0), 45.49999993),
        (gaussian_weights(2.0), 45.465599),
        (gaussian_weights(5.0), 44.406018),
        (gaussian_weights(10.0), 43.873980),
    ],
)
def test_soft_look_up_gives_the_known_numbers(weigh, expected: float):
    assert look_up(weigh) == pytest.approx(expected, abs=1e-4)
    weights = weigh(QUERY, KEYS)
    assert math.isclose(sum(weights), 1)
    assert min(weights) >= 0


def test_weights_that_grow_with_distance_go_wrong():
    beside = look_up(distance_weights, 56.5, KEYS[1:])
    line = look_up(linear_interpolation_weights, 56.5)
    assert (beside, line) == (46.75, 44.25)
    assert distance_weights(51.0, KEYS)[0] == 0
    assert round(look_up(distance_weights, 51.0), 2) == 45.92
    assert look_up(linear_interpolation_weights, 51.0) == 40


@pytest.mark.parametrize("width", [1e-3, 1e6])
def test_kernel_regression_at_its_ends(width: float):
    near = look_up(gaussian_weights(width), query=56.4 if width < 1 else 57.0)
    assert math.isclose(near, 43.0 if width < 1 else sum(VALUES) / 3, rel_tol=1e-6)
