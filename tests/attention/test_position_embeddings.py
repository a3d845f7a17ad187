"""Sinusoidal positions against the formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw

TOKENS = 7


def published(position: np.ndarray, model: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """sin and cos of t / base^(2i / model), each [T, model / 2] (1706.03762, section 3.5)."""
    angle = position[:, None] / base ** (2 * np.arange(model // 2) / model)
    return np.sin(angle), np.cos(angle)


def laid_out(position: np.ndarray, model: int, layout: str, base: float = 10_000.0) -> np.ndarray:
    sines, cosines = published(position, model, base)
    if layout == "halves":
        return np.concatenate([sines, cosines], -1)
    mixed = np.zeros((len(position), model))
    mixed[:, 0::2], mixed[:, 1::2] = sines, cosines
    return mixed


@pytest.mark.parametrize("base", [10_000.0, 50.0])
@pytest.mark.parametrize("model", [2, 6, 14])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sines_are_those_of_the_formula(layout: str, model: int, base: float):
    position = np.array([0, 1, 2, 5, 100, 4095])
    result = hw.attention.sinusoidal_table(torch.from_numpy(position), model, layout, base)
    assert result.shape == (6, model)
    np.testing.assert_allclose(
        result.numpy(), laid_out(position, model, layout, base), rtol=0, atol=1e-6
    )


def test_sines_follow_the_tokens():
    """Left padding, packing and a run that starts later: what counts is where a token stands, not
    its column.
    """
    x = torch.randn(2, TOKENS, 6)
    for tokens in (
        hw.SequenceInfo.from_batch(x, lengths=[TOKENS, 4], pad="left"),
        hw.SequenceInfo.from_batch(
            x, segments=torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, 2]])
        ),
        hw.SequenceInfo.contiguous(11, TOKENS, "cpu"),
    ):
        position = tokens.position.expand(2, -1).numpy()
        expected = np.stack([laid_out(row, 6, "interleaved") for row in position])
        added = hw.attention.sinusoidal_table(tokens.position, 6).expand(2, -1, -1)
        np.testing.assert_allclose(
            added[tokens.is_real.expand(2, -1)], expected[tokens.is_real.expand(2, -1)], atol=1e-6
        )


def test_sines_in_float64_are_exact_in_float64():
    result = hw.attention.sinusoidal_table(torch.arange(TOKENS), 6).numpy()
    np.testing.assert_allclose(
        result, laid_out(np.arange(TOKENS), 6, "interleaved"), rtol=0, atol=1e-14
    )
