"""Sizes that no document needs are refused before anything is allocated or enumerated, with the
largest value.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import headwise as hw
from headwise.training import recipe
from headwise.util import size_limits
from support.refusals import check_refused, refused_calls

SPEC = (
    "model = 8\npattern = 'full()'\nproject = 'LinearProjection'\nsimilarity = 'DotProduct'\nnormaliser = "
    "'Softmax'\nmerge = 'ConcatMerge'\n"
)
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2, "vocab_size": 11}
HEADS = "heads = {{q = {q}, kv = {kv}, dim = {dim}, kv_head_of_query = [{map}]}}\n"


def spec(
    model: object = 8, q: object = 2, kv: object = 2, dim: object = 4, head_map: str = "0, 1"
) -> str:
    """A spec as TOML, with other sizes."""
    return SPEC.replace("model = 8", f"model = {model}") + HEADS.format(
        q=q, kv=kv, dim=dim, map=head_map
    )


PRIME = 2**61 - 1


@pytest.mark.parametrize(
    ("does", "words"), refused_calls(Path(__file__).with_name("refused_sizes.txt"))
)
def test_sizes_beyond_the_ceilings_are_refused_at_once(does: str, words: str):
    begin = time.perf_counter()
    check_refused(does, words, hw.SpecError, globals())
    assert time.perf_counter() - begin < 2


def test_sizes_at_the_ceilings_are_read():
    assert hw.from_toml(spec(model=2**24, dim=65536)).model == 2**24
    assert hw.design(model=2**24, heads=2**16, dim=1).heads.q == 2**16


def test_a_prime_batch_is_divided_without_counting():
    with pytest.raises(hw.SpecError, match=r"use accumulate=1 or batch=19999980"):
        recipe.from_toml("batch = 9999991\naccumulate = 9999990")


@pytest.mark.parametrize("depth", [64, 65])
def test_nesting_is_counted_in_tables_and_lists(depth: int):
    text = (
        '{"a": ' * (depth // 2)
        + "[" * (depth - depth // 2)
        + "]" * (depth - depth // 2)
        + "}" * (depth // 2)
    )
    if depth == 64:
        assert size_limits.parse_json("it", text, "") == json.loads(text)
    else:
        with pytest.raises(hw.SpecError, match="nested too deeply"):
            size_limits.parse_json("it", text, "")


@pytest.mark.parametrize("value", [10**19, 10**20, 10**4000, 10**6000, -(10**30)], ids=range(5))
def test_long_numbers_are_shown_by_their_length(value: int):
    shown = size_limits.show_int(value)
    assert len(shown) < 40
    if abs(value) >= 10**20:
        digits = int(shown.split()[3])
        assert abs(digits - (len(f"{abs(value):x}") * 1.2041)) < 3
