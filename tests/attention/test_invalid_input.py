"""Invalid input gives one error with the fact, the values and the remedy, and leaves everything
unchanged.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention import op_trace
from headwise.attention.backends import CallSignature
from headwise.attention.cache import make_cache
from headwise.attention.parts.latent_attention import convert_to_latent
from headwise.attention.parts.mixture_of_heads import convert_to_mixture_of_heads
from support.refusals import check_refused, has_words, refused_calls
from support.spec_strategies import base

NAN = float("nan")


def layer(backend: str | None = None, **options: object) -> hw.Attention:
    return hw.Attention(base(**options), backend=backend).double()


def causal(**options: object) -> hw.Attention:
    return layer(pattern="causal()", **options)


def listing(**options: object) -> hw.AttentionSpec:
    """A spec with these modifiers: the name of the part, and its fields."""
    return base(
        modifiers=tuple(getattr(hw.parts, name)(**values) for name, values in options.items())
    )


def features(**options: object) -> hw.AttentionSpec:
    return base(similarity=hw.parts.FeatureMap(**options), normaliser=hw.parts.SumNormaliser())


def paired(name: str, **options: object) -> hw.AttentionSpec:
    """A spec whose heads form pairs of this part."""
    return replace(base(), heads=heads(**options), modifiers=(getattr(hw.parts, name)(),))


def collaborative(width: int, **options: object) -> object:
    spec = base(**options)
    return hw.parts.convert_to_collaborative(spec, hw.Attention(spec).state_dict(), width)


def latent(**options: object) -> object:
    spec = base(**options)
    return convert_to_latent(spec, hw.Attention(spec).state_dict())


def routed(shared: list[int], active: int, **options: object) -> object:
    spec = base(**options)
    return convert_to_mixture_of_heads(spec, hw.Attention(spec).state_dict(), shared, active)


def depth_scaled(**options: object) -> None:
    """Refused before a weight is sampled."""
    linear = torch.nn.Linear(3, 5)
    before = linear.weight.clone()
    try:
        hw.attention.depth_scaled_init(**({"modules": linear, "depth": 2} | options))
    finally:
        assert torch.equal(linear.weight, before)


def walk(**sizes: object) -> object:
    return op_trace.walk(hw.design(model=12, heads=3), **sizes)


def why(**options: object) -> object:
    return hw.why(hw.design(model=12, heads=3), **options)


def torch_class(**options: object) -> object:
    x = torch.zeros(2, 7, 10)
    return hw.attention.MultiheadAttention(10, 2, batch_first=True)(x, x, x, **options)


def attend(**tensors: Tensor) -> object:
    usual = {"query": numbers(2, 6, 5, 8), "key": numbers(2, 2, 7, 8), "value": numbers(2, 2, 7, 4)}
    return hw.attend(**(usual | tensors))


def reasons(backend: str, **options: object) -> list[str]:
    """Why a backend does not support a call: options of its spec, and states of the call."""
    states = {field.name for field in fields(CallSignature) if field.init}
    spec = base(**{name: value for name, value in options.items() if name not in states})
    call = {name: value for name, value in options.items() if name in states}
    core = spec.core_of(spec.projection_form(one=call.get("single_query", False)))
    return hw.backends.unsupported_reasons(backend, CallSignature(spec, core, **call))


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
HALF = (hw.parts.MixtureOfHeads(always=0, active=3),)
PER_HEAD = hw.patterns.PerHead((hw.patterns.Causal(), hw.patterns.Window(3)), (0, 1, 1, 0, 1, 0))
MASK = torch.ones(2, 1, 7, 7, dtype=torch.bool)


@pytest.mark.parametrize(("does", "words"), refused_calls(TABLES / "refused_specs.txt"))
def test_a_spec_that_cannot_be_meant(does: str, words: str):
    check_refused(does, words, hw.SpecError, globals())


@pytest.mark.parametrize(("does", "words"), refused_calls(TABLES / "refused_calls.txt"))
def test_a_call_that_cannot_be_meant(does: str, words: str):
    check_refused(does, words, ValueError, globals())


@pytest.mark.parametrize(("does", "words"), refused_calls(TABLES / "unsupported_calls.txt"))
def test_an_unsupported_call_has_its_reason(does: str, words: str):
    assert has_words(words, "; ".join(eval(does)))


def test_a_shared_query_key_space_allows_transforms_of_values():
    knocking = hw.parts.KnockingHeads(sides="v")
    spec = base(project=hw.parts.Collaborative(width=9), modifiers=(knocking,))
    assert spec.modifiers == (knocking,)


def test_supported_calls_have_no_reason():
    paged = {"single_query": True, "has_paged_cache": True}
    assert reasons("routed", modifiers=(hw.parts.Rotary(), *HALF), training=True) == []
    assert reasons("routed", modifiers=HALF, grad_enabled=True) == []
    by_norm = hw.parts.MixtureOfHeads(always=2, active=2, router="norm")
    assert reasons("routed", modifiers=(by_norm,)) == []
    for call in ({"grad_enabled": True}, {"training": True}, {"dtype": torch.float64}):
        assert reasons("flash_cpu", kv=2, modifiers=(hw.parts.Rotary(),), **call) == []
    assert reasons("flash_cpu", vdim=5, pattern="causal()", is_compiling=True) == []
    assert reasons("ragged", kv=2, pattern="causal", single_query=True) == []
    assert reasons("paged", kv=2, **paged) == []
    assert reasons("paged", normaliser=hw.parts.SinkSoftmax(), **paged) == []


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
