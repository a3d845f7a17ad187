"""Sizes that no document needs are refused before anything is allocated or enumerated, with the
largest value.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

import headwise as hw
from headwise.attention.parts.latent_attention import Latent
from headwise.models import families, model_spec
from headwise.surgery.pruning_plan import PruningPlan
from headwise.training import recipe
from headwise.util import size_limits

SPEC = (
    "model = 8\npattern = 'full()'\nproject = 'Direct'\nsimilarity = 'Dot'\nnormaliser = "
    "'Softmax'\nmerge = 'Concat'\n"
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
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "width": (
        lambda: hw.from_toml(spec(model=2**24 + 1)),
        "model = 16777217 is too large; give 16777216 or less",
    ),
    "heads": (
        lambda: hw.from_toml(spec(q=65537)),
        "heads.q = 65537 is too large; give 65536 or less",
    ),
    "kv": (lambda: hw.from_toml(spec(kv=PRIME)), "too large; give 65536 or less"),
    "dim": (
        lambda: hw.from_toml(spec(dim=65537)),
        "heads.dim = 65537 is too large; give 65536 or less",
    ),
    "map": (lambda: hw.from_toml(spec(head_map=f"0, {PRIME}")), "too large; give 65536 or less"),
    "digits": (lambda: hw.from_toml(spec(model="9" * 5000)), "a number has more than 4,300 digits"),
    "many digits": (
        lambda: hw.from_toml(spec(model="9" * 4000)),
        "a number of 4000 digits is too large",
    ),
    "design": (lambda: hw.design(model=PRIME, heads=2), "is too large; give 16777216 or less"),
    "design heads": (lambda: hw.design(model=PRIME - 1, heads=PRIME), "too large"),
    "preset": (
        lambda: hw.design(preset="gqa", model=8, heads=PRIME),
        "too large; give 65536 or less",
    ),
    "python": (lambda: hw.design(model=10**6000, heads=2), "a number of 6001 digits is too large"),
    "part": (lambda: Latent(rank=2**64), "Latent.rank = 18446744073709551616 is too large"),
    "grid": (
        lambda: hw.ContinuousBias(rows=10**6, columns=10**6),
        "hidden of ContinuousBias = 2047997952000512 is too large; give 268435456 or less",
    ),
    "toml": (
        lambda: hw.from_toml("a = " + "[" * 100_000),
        "nested too deeply; give at most 64 levels",
    ),
    "json": (lambda: hw.from_json("[" * 100_000), "nested too deeply; give at most 64 levels"),
    "shallow json": (lambda: hw.from_json('{"a":' * 65 + "1" + "}" * 65), "nested too deeply"),
    "model toml": (lambda: model_spec.from_toml("a = " + "[" * 100_000), "nested too deeply"),
    "model width": (
        lambda: families.read_model_spec(GPT2 | {"n_embd": 2**25, "n_head": 2**16}),
        "is too large; give 16777216 or less",
    ),
    "recipe": (lambda: recipe.from_toml("a = " + "[" * 100_000), "nested too deeply"),
    "recipe digits": (lambda: recipe.from_toml("steps = " + "9" * 5000), "more than 4,300 digits"),
    "plan": (
        lambda: PruningPlan.from_dict(
            families.read_model_spec(GPT2), {"keep": {"decoder.0.attention": [PRIME]}}
        ),
        "too large; give 65536 or less",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_beyond_the_ceilings_are_refused_at_once(name: str):
    read, message = REFUSED[name]
    begin = time.perf_counter()
    with pytest.raises(hw.SpecError) as excinfo:
        read()
    assert message in str(excinfo.value)
    assert "\n" not in str(excinfo.value)
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
