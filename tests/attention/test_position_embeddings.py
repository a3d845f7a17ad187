"""Added positions: sinusoids against the formula, learned positions within their bounds."""

from __future__ import annotations

import math

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


def test_the_layouts_hold_the_same_numbers_in_another_order():
    a, b = (
        hw.attention.position_embeddings.sinusoidal_table(torch.arange(TOKENS), 6, layout)
        for layout in ("interleaved", "halves")
    )
    torch.testing.assert_close(a[:, [0, 2, 4, 1, 3, 5]], b, rtol=0, atol=0)
    assert not torch.equal(a, b)


def test_one_position_by_hand():
    entry = hw.attention.SinusoidalPositions(4)(torch.zeros(1, 4, 4))[0, 3]
    by_hand = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    torch.testing.assert_close(entry, torch.tensor(by_hand), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_a_shift_is_a_rotation(layout: str):
    """PE(t + 3) is a fixed linear map of PE(t): each pair turns by 3 of its rate."""
    code = hw.attention.position_embeddings.sinusoidal_table(torch.arange(40), 6, layout).double()
    sines, cosines = (
        (code[:, 0::2], code[:, 1::2]) if layout == "interleaved" else code.chunk(2, -1)
    )
    rate = 3 * 10_000.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
    torch.testing.assert_close(
        sines[3:], (sines * rate.cos() + cosines * rate.sin())[:-3], rtol=0, atol=1e-6
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sines_keep_the_dtype_of_x(dtype: torch.dtype):
    assert (
        hw.attention.SinusoidalPositions(6)(torch.zeros(1, TOKENS, 6, dtype=dtype)).dtype == dtype
    )


def test_sines_in_float64_are_exact_in_float64():
    result = hw.attention.SinusoidalPositions(6)(torch.zeros(1, TOKENS, 6, dtype=torch.float64))[
        0
    ].numpy()
    np.testing.assert_allclose(
        result, laid_out(np.arange(TOKENS), 6, "interleaved"), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 7}, "come in pairs.*model=7.*even width"),
        ({"model": 0}, "model=0"),
        (
            {"model": 6, "layout": "halfs"},
            "'halfs' is unknown.*(interleaved, halves|did you mean 'halves')",
        ),
    ],
)
def test_sines_refuse_invalid_widths_and_layouts(options: dict[str, object], message: str):
    with pytest.raises(hw.SpecError, match=message):
        hw.attention.SinusoidalPositions(**options)


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


@pytest.mark.parametrize(("model", "length"), [(0, 3), (4, 0), (-1, 3)])
def test_an_empty_table_is_refused(model: int, length: int):
    with pytest.raises(hw.SpecError, match=f"{length} positions of width {model}.*at least 1"):
        hw.attention.LearnedPositions(model, length=length)


@pytest.mark.parametrize(
    "add",
    [hw.attention.SinusoidalPositions(4), hw.attention.LearnedPositions(4, length=9)],
    ids=["sines", "learned"],
)
@pytest.mark.parametrize("shape", [(1, 3, 1), (1, 3, 5), (3, 4)])
def test_x_of_another_width_is_refused(add: torch.nn.Module, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"shape.*4"):
        add(torch.zeros(shape))


@pytest.mark.parametrize(
    "add",
    [hw.attention.SinusoidalPositions(4), hw.attention.LearnedPositions(4, length=9)],
    ids=["sines", "learned"],
)
def test_tokens_of_another_batch_are_refused(add: torch.nn.Module):
    with pytest.raises(ValueError, match=r"sequence is \[1, 1\] but x is \[2, 3\]"):
        add(torch.zeros(2, 3, 4), sequence=hw.SequenceInfo.contiguous(0, 1, "cpu"))
