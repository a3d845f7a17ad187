"""Invalid input gives one error with the fact, the values and the remedy, and leaves everything
unchanged.
"""

from __future__ import annotations

from dataclasses import replace  # noqa: F401 - lines of refused_specs.txt use it
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.cache import make_cache
from support.refusals import check_refused, refused_calls
from support.spec_strategies import base

NAN = float("nan")


def layer(backend: str | None = None, **options: object) -> hw.Attention:
    return hw.Attention(base(**options), backend=backend).double()


def causal(**options: object) -> hw.Attention:
    return layer(pattern="causal()", **options)


def listing(**options: object) -> hw.AttentionSpec:
    """A spec with these modifiers: the name of the part, and its fields."""
    return base(
        modifiers=tuple(getattr(hw.parts, name)(**fields) for name, fields in options.items())
    )


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def whole(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def at(position: list[int], segment: list[int]) -> hw.SequenceInfo:
    return hw.SequenceInfo(torch.tensor([position]), torch.tensor([segment]))


def cached(x: Tensor, **options: object) -> Tensor:
    """A causal layer with a cache that fits it but for what is said."""
    usual = {"spec": base(pattern="causal()"), "batch": 2, "capacity": 9, "dtype": torch.float64}
    return causal()(x, cache=make_cache(**(usual | options)))


def toml(value: str) -> hw.AttentionSpec:
    return hw.from_toml("model = 10\nheads = {q = 6, dim = 4}\n" + value)


def heads(**options: object) -> hw.Heads:
    return hw.Heads(**({"q": 2, "kv": 2, "dim": 4} | options))


TABLES = Path(__file__).parent
X = torch.zeros(2, 7, 10, dtype=torch.float64)
MASK = torch.ones(2, 1, 7, 7, dtype=torch.bool)


@pytest.mark.parametrize(("does", "words"), refused_calls(TABLES / "refused_specs.txt"))
def test_a_spec_that_cannot_be_meant(does: str, words: str):
    check_refused(does, words, hw.SpecError, globals())


@pytest.mark.parametrize(("does", "words"), refused_calls(TABLES / "refused_calls.txt"))
def test_a_call_that_cannot_be_meant(does: str, words: str):
    check_refused(does, words, ValueError, globals())


def test_an_unsupported_call_lists_the_reason_of_each_backend():
    with pytest.raises(hw.NoBackend, match=r"'sdpaa'.*did you mean 'sdpa'"):
        layer(backend="sdpaa")(X)
    state = {
        "similarity": hw.parts.FeatureMap(),
        "normaliser": hw.parts.SumNormaliser(),
        "pattern": "causal()",
    }
    stated = layer(**state)
    with pytest.raises(hw.NoBackend) as caught:
        stated(X, cache=stated.cache(batch=2, capacity=9), probe=hw.Probe("weights"))
    assert all(f"{name}: " in str(caught.value) for name in hw.backends.BACKENDS)
    assert "cannot show weights" in str(caught.value)


# --- what was refused has done nothing ------------------------------------------------------------

CACHES = {
    "plain": {"pattern": "causal()"},
    "ring": {"pattern": "window(3)"},
    "state": {
        "pattern": "causal()",
        "similarity": hw.parts.FeatureMap(),
        "normaliser": hw.parts.SumNormaliser(),
    },
}
REFUSALS = {
    "tokens that go back": {"sequence": hw.SequenceInfo.contiguous(1, 2, "cpu")},
    "a mask of floats": {"mask": torch.ones(2, 1, 2, 2)},
    "no backend": {"backend": "absent"},
}


@pytest.mark.parametrize(
    ("kind", "what"),
    [(kind, what) for kind in CACHES for what in REFUSALS],
)
def test_a_refusal_leaves_the_cache_as_it_was(kind: str, what: str):
    used, x, call = layer(**CACHES[kind]), numbers(2, 7, 10), dict(REFUSALS[what])
    cache = used.cache(batch=2, capacity=9)
    used(x[:, :3], cache=cache)
    used.backend_name = call.pop("backend", None)
    with pytest.raises((ValueError, hw.NoBackend)):
        used(x[:, 3:5], cache=cache, **call)
    used.backend_name = None
    torch.testing.assert_close(used(x[:, 3:], cache=cache), used(x)[:, 3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_full_cache_raises_and_keeps_its_tokens(ragged: bool):
    used, x = causal(), numbers(2, 7, 10)
    cache = used.cache(batch=2, capacity=7)
    lengths = [5, 4] if ragged else [5, 5]
    used(
        x[:, :5],
        cache=cache,
        sequence=hw.SequenceInfo.from_batch(x[:, :5], lengths=lengths) if ragged else None,
    )
    with pytest.raises(hw.CacheFull, match=r"8 tokens do not fit in 7 slots; .*capacity=8"):
        used(x[:, :3], cache=cache)
    torch.testing.assert_close(used(x[:, 5:], cache=cache)[0], used(x)[0, 5:], rtol=0, atol=1e-12)
