"""Invalid input gives one error with the fact, the values and the remedy, and leaves everything
unchanged.
"""

from __future__ import annotations

import re
from dataclasses import replace  # noqa: F401 - rows of CLASHES and SPECS say it

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.cache import make_cache
from support.spec_strategies import base

NAN = float("nan")


def layer(backend: str | None = None, **options: object) -> hw.Attention:
    return hw.Attention(base(**options), backend=backend).double()


def causal(**options: object) -> hw.Attention:
    return layer(pattern="causal()", **options)


def listing(**options: object) -> hw.AttentionSpec:
    """A spec with these modifiers: the name of the part, and its fields."""
    return base(modifiers=tuple(getattr(hw, name)(**fields) for name, fields in options.items()))


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


def rows(table: str) -> list[object]:
    split = (line.split(" -> ") for line in table.strip().splitlines())
    return [pytest.param(does.strip(), words.strip(), id=does.strip()) for does, words in split]


def check_refused(does: str, words: str, kind: type[Exception]) -> None:
    """`does` ends in one error of one line whose message holds these words, ` .. ` between them."""
    with pytest.raises(kind) as caught:
        eval(does, globals())
    message = str(caught.value)
    assert re.search(".*".join(re.escape(word) for word in words.split(" .. ")), message), message
    assert "\n" not in message


CLASHES = """
base(project=hw.Collaborative(bias="q")) -> bias='q' .. use '' or 'v'
base(project=hw.Collaborative(width=0)) -> width=0 .. at least 1
base(project=hw.Collaborative(), modifiers=(hw.Rotary(),)) -> QK transforms
base(merge=hw.Concat(bias="v")) -> bias='v' .. '' or 'o'
listing(Differential={"depth": -1}) -> depth=-1 .. at least 0
replace(base(), modifiers=(hw.Differential(),)) -> Differential .. pairs .. value_heads=
base(project=hw.Direct(bias="qo")) -> bias='qo' .. q, k and v
base(project=hw.Direct(bias="qq")) -> bias='qq' .. at most once
base(similarity=hw.Dot(scale=0.0)) -> scale=0.0 .. positive
listing(Dynamic={"on": "values"}) -> on='values' .. use 'scores' or 'weights'
listing(Dynamic={"static": "half"}) -> static='half' .. use 'none' or 'full'
listing(Dynamic={"rank": 0}) -> rank=0 .. at least 1
listing(Dynamic={"on": "weights"}, Differential={}) -> output heads .. output step
base(similarity=hw.FeatureMap(), modifiers=(hw.Alibi(),)) -> FeatureMap .. scores
base(project=hw.Latent(form="naive")) -> form='naive' .. 'expanded' or 'absorbed'
base(project=hw.Latent(rank=0)) -> rank=0 .. at least 1
base(project=hw.Latent(query_rank=0)) -> query_rank=0 .. at least 1
base(project=hw.Latent(rope=-2)) -> rope=-2 .. at least 0
base(project=hw.Latent(), kv=2) -> kv=2 .. use kv=6
base(project=hw.Overlapping(bias="o")) -> bias='o' .. q, k and v
base(project=hw.Overlapping(overlap=-1)) -> overlap=-1 .. at least 0
base(project=hw.Overlapping(), kv=2) -> Overlapping .. kv=2 .. use kv=6
base(project=hw.Overlapping(overlap=1), vdim=4) -> overlap .. use vdim=6
base(project=hw.Overlapping(channels=3)) -> channels=3 .. 24
listing(QKNorm={"kind": "l3"}) -> kind='l3' .. use kind 'rms'
listing(QKNorm={"kind": "l2"}) -> temperature .. Dot(scale=1.0)
base(modifiers=(hw.QKNorm(),), project=hw.Latent()) -> QKNorm .. slice
listing(Rotary={"pairs": "both"}) -> pairs='both' .. 'half' or 'interleaved'
listing(Rotary={"scaling": "PI"}) -> scaling='PI' .. PI(), Plain()
listing(Rotary={"base": NAN}) -> base=nan .. finite
listing(Rotary={"dims": 3}) -> 3 of 4 channels .. even number up to 4
base(modifiers=(hw.Rotary(),), dim=5) -> 5 of 5 channels .. even
listing(Routed={"norm": "l1"}) -> norm='l1' .. 'code' or 'paper'
listing(Routed={"always": 4, "active": 3}) -> always=4, active=3 .. 6 heads
listing(Routed={"active": 0}) -> active=0 .. prune them, or use active=1
listing(Routed={"heads": 3}) -> heads=3 .. 6
listing(Shaw={"reach": 0}) -> reach=0 .. at least 1
base(modifiers=(hw.Shaw(),), project=hw.Latent(rank=8, rope=2)) -> Latent .. Direct()
listing(ShawValues={"reach": 0}) -> reach=0 .. at least 1
base(modifiers=(hw.ShawValues(),), project=hw.Latent(rope=0, form="absorbed")) -> ShawValues .. values
listing(Softcap={"limit": 0.0}) -> limit=0.0 .. positive
listing(T5Bias={"looking": "up"}) -> looking='up' .. 'both' or 'back'
listing(T5Bias={"buckets": 2}) -> buckets=2 .. at least 4 buckets
listing(T5Bias={"columns": 2}) -> columns=2 .. 6
listing(TalkingHeads={"on": "x"}) -> on='x' .. use 'scores' or 'weights'
listing(TalkingHeads={"on": "weights"}, Differential={}) -> output heads .. output step
replace(base(heads=5), modifiers=(hw.QKNorm(), hw.Differential())) -> Differential .. pairs
listing(WeightDropout={"rate": 1.0}) -> rate=1.0 .. [0, 1) .. 0.1
listing(Rotary={"base": "x"}) -> base .. 'x'
hw.PI(0.0) -> PI(factor=0.0) .. positive
hw.YaRN(ramp="line") -> ramp='line' .. 'code' .. 'paper'
hw.YaRN(fast=1.0, slow=2.0) -> fast=1.0, slow=2.0 .. fast > slow
hw.Llama3(low=4.0, high=4.0) -> low=4.0, high=4.0 .. high > low
"""
SPECS = """
hw.design(model=10, heads=3) -> 10 .. 3 heads .. use heads in [1, 2, 5, 10]
base(kv=4) -> 6 query heads .. 4 .. use kv in [1, 2, 3, 6]
base(vdim=0) -> vdim .. at least 1, not 0
hw.design(model=True, heads=1) -> model .. whole number .. True
hw.design(model=10) -> needs heads
base(head=3) -> 'head' .. did you mean 'heads'
hw.design(preset="gqq") -> 'gqq' .. did you mean 'gqa'
base(bias="qx") -> bias='qx' .. 'x' .. 'qkvo'
base(project=hw.Latent(), bias="k") -> Latent(bias='k') is unknown .. 'q', 'kv' or 'qkv'
base(bias=True) -> bias=True .. 'qkvo'
base(pattern=3) -> pattern .. 3 is .. int .. Pattern
base(pattern="windo(3)") -> 'windo' .. did you mean 'window'
base(normaliser=hw.Dot()) -> normaliser .. Dot() .. Normaliser .. REGISTRY
base(modifiers=(hw.Alibi,)) -> modifiers .. Alibi .. not .. Modifier
base(modifiers=hw.Alibi()) -> modifiers=Alibi() .. the comma
replace(base(), modifiers=hw.Alibi()) -> modifiers=Alibi() .. the comma
base(source=0) -> source=0 .. at least 1
heads(q=3, kv_head_of_query=(0, 1)) -> kv_head_of_query=(0, 1) .. 3 .. one .. each
heads(q=3, kv_head_of_query=(0, 0, 0)) -> every key-value head 0..1
heads(kv_head_of_query=(0, "a")) -> kv_head_of_query=(0, 'a') .. head indices
heads(kv_head_of_query=(0.0, 1.0)) -> kv_head_of_query=(0.0, 1.0) .. head indices
heads(kv_head_of_query=5) -> kv_head_of_query=5
heads(score_head_of_output=(0, 2)) -> score_head_of_output=(0, 2) .. 0..1
heads(score_head_of_output=("x",)) -> score_head_of_output=('x',) .. head indices
base().with_heads(kvs=2) -> 'kvs' .. did you mean 'kv'
hw.from_toml("modle = 10") -> 'modle' .. did you mean 'model'
hw.from_toml("model = 10\\nheads = {q = 6}") -> lack dim .. add dim
hw.from_toml("model = 10\\nheads = 6") -> heads = 6 is .. int .. a table
hw.from_toml("model = 10\\nheads = {q = 6, dims = 4}") -> heads .. 'dims' .. did you mean 'dim'
hw.from_toml('model = "10"\\nheads = {q = 6, dim = 4}') -> model='10' .. integer
hw.from_toml("model 10") -> not TOML .. print(spec)
toml("pattern = 3") -> pattern = 3 is .. int .. 'causal()'
toml('modifiers = ["Alibii"]') -> 'Alibii' .. did you mean 'Alibi'
toml('modifiers = "Alibi"') -> modifiers = 'Alibi' is .. str .. a list
toml("modifiers = [{limit = 3.0}]") -> modifiers[0].part .. the name of a part
toml('modifiers = [{part = "Softcap", limits = 3.0}]') -> 'limits' .. did you mean 'limit'
toml('merge = "Dot"') -> merge .. Dot() .. Merge
toml('modifiers = [{part = "WeightDropout", rate = "x"}]') -> rate .. 'x'
toml('modifiers = [{part = "Rotary", scaling = {part = "PI", factor = "x"}}]') -> factor .. 'x'
toml('modifiers = [{part = "Shaw", reach = 2.5}]') -> reach .. 2.5
hw.from_json("{") -> not JSON .. to_json
hw.from_json("[1]") -> [1] is .. list .. a table
hw.from_json('{"model": 10, "headz": {}}') -> 'headz' .. did you mean 'heads'
hw.from_json('{"model": 10, "heads": {"q": 6, "dim": 4}, "merge": null}') -> merge = None .. a table
hw.from_json('{"model": 10, "heads": {"q": 6, "dim": 4, "kv": null}}') -> kv .. at least 1, not None
make_cache(base(), batch=1, capacity=0) -> capacity=0 .. at least 1
layer(pattern="window(5, after=2)").cache(batch=2, capacity=9) -> attends to future tokens .. causal()
"""
X = torch.zeros(2, 7, 10, dtype=torch.float64)
MASK = torch.ones(2, 1, 7, 7, dtype=torch.bool)
CALLS = """
layer()(X[0]) -> x has shape (7, 10) .. give [batch, tokens, 10]
layer()(X[..., :9]) -> x has shape (2, 7, 9) .. give [batch, tokens, 10]
layer()(X.long()) -> x is torch.int64 .. floating-point
layer()(X.float()) -> x is torch.float32 .. torch.float64 .. autocast
layer()(X.to("meta")) -> x is on meta .. the layer is on cpu .. move one
layer().to("meta")(X.float().to("meta")) -> x is torch.float32 .. torch.float64
layer()([[0.0]]) -> x is .. list .. tensor
layer()(X, sequence=hw.SequenceInfo.contiguous(0, 6, "cpu")) -> [1, 6] .. [2, 7] .. SequenceInfo.from_batch
layer()(X, sequence=hw.SequenceInfo.from_batch(numbers(3, 7, 1), lengths=[7, 7, 7])) -> [3, 7] .. [2, 7] .. SequenceInfo.from_batch
layer()(X, sequence=hw.SequenceInfo.contiguous(0, 7, "meta")) -> sequence is on meta .. cpu .. move one
layer()(X, sequence="left") -> sequence .. str
hw.SequenceInfo(whole(1, 1), whole(1, 1).to("meta")) -> cpu .. meta
at([0, 1, 1], [0, 0, 0]) -> one segment .. same position .. from 0
hw.SequenceInfo.from_batch(X[:1, :3], segments=torch.tensor([[0, 1, 0]])) -> one segment .. same position
at([-1, 0], [0, 0]) -> below 0 .. count from 0
hw.SequenceInfo(numbers(1, 3), whole(1, 3)) -> torch.float64 .. whole numbers
hw.SequenceInfo(whole(3), whole(3)) -> (3,) .. [batch, tokens]
hw.SequenceInfo([[0]], [[0]]) -> list
hw.SequenceInfo.from_batch(X, lengths=[3, 8]) -> lengths=[3, 8] .. 2 rows of 7 .. 0..7
hw.SequenceInfo.from_batch(X, lengths=[3]) -> lengths=[3] .. 2 rows
hw.SequenceInfo.from_batch(X, lengths="37") -> lengths='37'
hw.SequenceInfo.from_batch(X, lengths=[3, 3], segments=whole(2, 7)) -> both .. segments alone
hw.SequenceInfo.from_batch(X, segments=whole(2, 6)) -> (2, 6) .. whole numbers [2, 7]
hw.SequenceInfo.from_batch(X, lengths=[3, 3], pad="top") -> pad='top' .. 'right' or 'left'
layer()(X, mask=MASK[:, 0]) -> (2, 7, 7) .. torch.bool [2 or 1, 6 or 1, 7
layer()(X, mask=MASK.double()) -> torch.float64 .. True where a key may be read
layer()(X, mask=MASK.to("meta")) -> on meta .. on cpu
layer()(X, mask=[True]) -> mask .. list
layer()(X, probe="weights") -> probe .. 'weights' .. Probe
hw.Probe("weight") -> 'weight' .. did you mean 'weights'
layer()(X, source=numbers(2, 7)) -> source has shape (2, 7) .. [batch, tokens, 10]
layer(source=13)(X, source=X) -> source has shape (2, 7, 10) .. [batch, tokens, 13]
layer()(X, source=X[:1]) -> source has 1 rows but x has 2 .. each row
layer()(X, source=X.long()) -> source is torch.int64 .. floating-point
layer()(X, source=X.to("meta")) -> source is on meta .. cpu
layer()(X, source=[0]) -> source .. list
layer()(X, source=layer(kv=2).project_source(X)) -> another spec .. own project_source(z)
layer()(X, source=layer().float().project_source(X.float())) -> float32 .. float64
layer(source=13)(X) -> source of width 13 .. source=z
causal()(X, source=X) -> causal() compares .. source=10 .. full()
layer(modifiers=(hw.Rotary(),))(X, source=X) -> Rotary .. source=10
layer()(X, source=X, cache=causal().cache(batch=2, capacity=9)) -> project_source(z) .. pass one of the two
cached(X, spec=base(pattern="causal()", kv=2)) -> another spec .. layer.cache
cached(X, batch=3) -> 3 rows, not 2 .. batch=2
cached(X, dtype=torch.float32) -> torch.float32 .. torch.float64
cached(X, device="meta") -> on meta .. on cpu
cached(X, capacity=2.5) -> capacity=2.5
causal()(X, cache="c") -> cache .. str
(half := layer(pattern="prefix(3)"))(X[:, :2], cache=half.cache(batch=2, capacity=9)) -> first 3 .. not 2 .. prefix
causal().cache(batch=2, capacity=9).select_rows(torch.tensor([2])) -> 0..1
causal().cache(batch=2, capacity=9).select_rows(torch.tensor([True, False])) -> torch.bool
"""


@pytest.mark.parametrize(("does", "words"), rows(CLASHES + SPECS.lstrip()))
def test_a_spec_that_cannot_be_meant(does: str, words: str):
    check_refused(does, words, hw.SpecError)


@pytest.mark.parametrize(("does", "words"), rows(CALLS))
def test_a_call_that_cannot_be_meant(does: str, words: str):
    check_refused(does, words, ValueError)


def test_an_unsupported_call_lists_the_reason_of_each_backend():
    check_refused('layer(backend="sdpaa")(X)', "'sdpaa' .. did you mean 'sdpa'", hw.NoBackend)
    state = {"similarity": hw.FeatureMap(), "normaliser": hw.Sum(), "pattern": "causal()"}
    stated = layer(**state)
    with pytest.raises(hw.NoBackend) as caught:
        stated(X, cache=stated.cache(batch=2, capacity=9), probe=hw.Probe("weights"))
    assert all(f"{name}: " in str(caught.value) for name in hw.backends.BACKENDS)
    assert "cannot show weights" in str(caught.value)


# --- what was refused has done nothing ------------------------------------------------------------

CACHES = {
    "plain": {"pattern": "causal()"},
    "ring": {"pattern": "window(3)"},
    "state": {"pattern": "causal()", "similarity": hw.FeatureMap(), "normaliser": hw.Sum()},
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
