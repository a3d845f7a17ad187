"""Added positions: sinusoids against the formula, learned positions within their bounds."""

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
    result = hw.attention.position_embeddings.sinusoidal_table(
        torch.from_numpy(position), model, layout, base
    )
    assert result.shape == (6, model)
    np.testing.assert_allclose(
        result.numpy(), laid_out(position, model, layout, base), rtol=0, atol=1e-6
    )


def test_sines_follow_the_tokens():
    """Left padding, packing and a run that starts later: what counts is where a token stands, not
    its column.
    """
    add, x = hw.attention.SinusoidalPositions(6), torch.randn(2, TOKENS, 6)
    for tokens in (
        hw.SequenceInfo.from_batch(x, lengths=[TOKENS, 4], pad="left"),
        hw.SequenceInfo.from_batch(
            x, segments=torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, 2]])
        ),
        hw.SequenceInfo.contiguous(11, TOKENS, "cpu"),
    ):
        position = tokens.position.expand(2, -1).numpy()
        expected = np.stack([laid_out(row, 6, "interleaved") for row in position])
        added = add(x, sequence=tokens) - x
        np.testing.assert_allclose(
            added[tokens.is_real.expand(2, -1)], expected[tokens.is_real.expand(2, -1)], atol=1e-6
        )


def test_sines_in_float64_are_exact_in_float64():
    result = hw.attention.SinusoidalPositions(6)(torch.zeros(1, TOKENS, 6, dtype=torch.float64))[
        0
    ].numpy()
    np.testing.assert_allclose(
        result, laid_out(np.arange(TOKENS), 6, "interleaved"), rtol=0, atol=1e-14
    )


# --- learned --------------------------------------------------------------------------------------


def test_learned_positions_add_the_row_of_their_position():
    add, x = hw.attention.LearnedPositions(5, length=9), torch.randn(2, TOKENS, 5)
    torch.testing.assert_close(add(x), x + add.table[:TOKENS], rtol=0, atol=0)
    later = hw.SequenceInfo.contiguous(2, TOKENS, "cpu")
    torch.testing.assert_close(add(x, sequence=later), x + add.table[2:9], rtol=0, atol=0)
    left = hw.SequenceInfo.from_batch(x, lengths=[TOKENS, 4], pad="left")
    torch.testing.assert_close(
        add(x, sequence=left)[1, 3:], x[1, 3:] + add.table[:4], rtol=0, atol=0
    )


def test_learned_positions_end_where_they_end():
    add = hw.attention.LearnedPositions(5, length=TOKENS)
    assert add(torch.zeros(1, TOKENS, 5)).shape == (1, TOKENS, 5)
    message = r"position 7 is beyond the 7 learned ones; use length=8 or more"
    with pytest.raises(ValueError, match=message):
        add(torch.zeros(1, TOKENS + 1, 5))
    with pytest.raises(ValueError, match=message):
        add(torch.zeros(1, 1, 5), sequence=hw.SequenceInfo.contiguous(TOKENS, 1, "cpu"))
    x = torch.zeros(2, 3, 5)
    far = hw.SequenceInfo(
        torch.tensor([[0, 1, 2], [5, 6, 7]]), torch.zeros(2, 3, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match=message):
        add(x, sequence=far)


def test_learned_positions_of_empty_input():
    add = hw.attention.LearnedPositions(5, length=3)
    assert add(torch.zeros(2, 0, 5)).shape == (2, 0, 5)
    empty = torch.zeros(2, 0, dtype=torch.int64)
    assert add(torch.zeros(2, 0, 5), sequence=hw.SequenceInfo(empty, empty)).shape == (2, 0, 5)


def test_padding_needs_no_learned_position():
    """A row of 2 in a batch as wide as 5: only where tokens stand counts against the table."""
    x = torch.randn(2, 5, 4)
    tokens = hw.SequenceInfo.from_batch(x, lengths=[3, 2])
    add = hw.attention.LearnedPositions(4, length=3)
    result = add(x, sequence=tokens)
    torch.testing.assert_close(result[0, :3], x[0, :3] + add.table, rtol=0, atol=0)
