"""Bad input gives one error that says the fact, the values and the remedy; and what is odd but legal just works.

Each row of a table is one thing that a user may get wrong and the words that the message must hold, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headwise as hw
from strategies import base, pool

BATCH, TOKENS, MODEL = 2, 7, 10
NAN = float("nan")


def built(backend: str | None = None, **said: object) -> hw.Attention:
    return hw.Attention(base(**said), backend=backend).double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def whole(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def bug(*row: object) -> object:
    """A row that is not refused as it should be; the mark goes when it is."""
    return pytest.param(*row, marks=pytest.mark.xfail(strict=True, reason="refused too late, otherwise, or not at all"))


def check_refused(does: Callable[[], object], words: str, kind: type[Exception] = ValueError) -> None:
    """`does` ends in one error whose message holds these words, ` .. ` between them."""
    with pytest.raises(kind) as caught:
        does()
    said = str(caught.value)
    assert re.search(".*".join(re.escape(word) for word in words.split(" .. ")), said), said
    assert "\n" not in said


# --- specs ---------------------------------------------------------------------------------------------

ROT = hw.Rotary
CLASHES = [
    ("Collaborative", {"project": hw.Collaborative(bias="q")}, "bias='q' .. use '' or 'v'"),
    ("Collaborative", {"project": hw.Collaborative(width=0)}, "width=0 .. at least 1"),
    ("Collaborative", {"project": hw.Collaborative(), "modifiers": (ROT(),)}, "no per-head turn .. leave turns out"),
    ("Concat", {"merge": hw.Concat(bias="v")}, "bias='v' .. bias='o'"),
    ("Differential", {"modifiers": (hw.Differential(depth=-1),)}, "depth=-1 .. first layer is 0"),
    ("Differential", {"modifiers": (hw.Differential(),), "vdim": 4}, "in pairs .. use an even q"),
    ("Direct", {"project": hw.Direct(bias="qo")}, "bias='qo' .. q, k and v"),
    ("Direct", {"project": hw.Direct(bias="qq")}, "bias='qq' .. at most once"),
    ("Dot", {"similarity": hw.Dot(scale=0.0)}, "scale=0.0 .. positive .. 1/sqrt(dim)"),
    ("Dynamic", {"modifiers": (hw.Dynamic(on="values"),)}, "on='values' .. use 'scores' or 'weights'"),
    ("Dynamic", {"modifiers": (hw.Dynamic(static="half"),)}, "static='half' .. use 'none' or 'full'"),
    ("Dynamic", {"modifiers": (hw.Dynamic(rank=0),)}, "rank=0 .. at least 1"),
    ("Dynamic", {"modifiers": (hw.Dynamic(on="weights"), hw.Differential())}, "on='weights' .. join their rows first"),
    ("FeatureMap", {"similarity": hw.FeatureMap(), "modifiers": (hw.Alibi(),)}, "FeatureMap .. nothing may change"),
    ("Latent", {"project": hw.Latent(form="naive")}, "form='naive' .. 'expanded' or 'absorbed'"),
    ("Latent", {"project": hw.Latent(rank=0)}, "rank=0 .. at least 1"),
    bug("Latent", {"project": hw.Latent(query_rank=0)}, "query_rank=0 .. at least 1"),
    ("Latent", {"project": hw.Latent(), "kv": 2}, "kv=2 .. use kv=6"),
    ("Overlapping", {"project": hw.Overlapping(bias="o")}, "bias='o' .. q, k and v"),
    ("Overlapping", {"project": hw.Overlapping(overlap=-1)}, "overlap=-1 .. 0 is plain"),
    ("Overlapping", {"project": hw.Overlapping(), "kv": 2}, "6 heads read 2 .. use kv=6"),
    ("Overlapping", {"project": hw.Overlapping(overlap=1), "vdim": 4}, "overlap .. use vdim=6"),
    bug("Overlapping", {"project": hw.Overlapping(channels=3)}, "channels=3 .. 24"),
    ("QKNorm", {"modifiers": (hw.QKNorm(kind="l3"),)}, "kind='l3' .. use kind 'rms'"),
    ("QKNorm", {"modifiers": (hw.QKNorm(kind="l2"),)}, "temperature .. Dot(scale=1.0)"),
    ("QKNorm", {"modifiers": (hw.QKNorm(),), "project": hw.Latent()}, "QKNorm .. only a slice"),
    ("Rotary", {"modifiers": (ROT(pairs="both"),)}, "pairs='both' .. 'half' or 'interleaved'"),
    ("Rotary", {"modifiers": (ROT(scaling="PI"),)}, "scaling='PI' .. use Plain, PI"),
    ("Rotary", {"modifiers": (ROT(base=NAN),)}, "base=nan .. above 1 .. 10000.0"),
    ("Rotary", {"modifiers": (ROT(dims=3),)}, "3 of 4 channels .. even number up to 4"),
    ("Rotary", {"modifiers": (ROT(),), "dim": 5}, "5 of 5 channels .. even"),
    ("Routed", {"modifiers": (hw.Routed(norm="l1"),)}, "norm='l1' .. 'code' or 'paper'"),
    ("Routed", {"modifiers": (hw.Routed(always=4, active=3),)}, "always=4, active=3 .. 6 heads"),
    ("Routed", {"modifiers": (hw.Routed(active=0),)}, "active=0 .. prune them, or use active=1"),
    bug("Routed", {"modifiers": (hw.Routed(heads=3),)}, "heads=3 .. 6"),
    ("Shaw", {"modifiers": (hw.Shaw(reach=0),)}, "reach=0 .. at least 1"),
    ("Shaw", {"modifiers": (hw.Shaw(),), "project": hw.Latent(rank=8, rope=2)}, "4 wide .. 6 .. use Direct()"),
    ("ShawValues", {"modifiers": (hw.ShawValues(reach=0),)}, "reach=0 .. at least 1"),
    ("Softcap", {"modifiers": (hw.Softcap(0.0),)}, "limit=0.0 .. positive .. 50.0"),
    ("T5Bias", {"modifiers": (hw.T5Bias(looking="up"),)}, "looking='up' .. 'both' or 'back'"),
    ("T5Bias", {"modifiers": (hw.T5Bias(buckets=2),)}, "buckets=2 .. at least 4 buckets"),
    bug("T5Bias", {"modifiers": (hw.T5Bias(columns=2),)}, "columns=2 .. 6"),
    ("TalkingHeads", {"modifiers": (hw.TalkingHeads(on="x"),)}, "on='x' .. use 'scores' or 'weights'"),
    ("TalkingHeads", {"modifiers": (hw.TalkingHeads(on="weights"), hw.Differential())}, "join their rows first"),
    ("WeightDropout", {"modifiers": (hw.WeightDropout(1.0),)}, "rate=1.0 .. [0, 1) .. 0.1"),
]


@pytest.mark.parametrize(("part", "said", "words"), CLASHES)
def test_every_clash_has_its_reason(part: str, said: dict[str, object], words: str):
    assert part in hw.REGISTRY
    check_refused(lambda: base(**said), words, hw.SpecError)


MADE = {
    "heads that do not divide": (lambda: hw.design(model=10, heads=3), "10 .. 3 heads .. use heads in [1, 2, 5, 10]"),
    "kv that does not divide": (lambda: base(kv=4), "6 query heads .. 4 .. use kv in [1, 2, 3, 6]"),
    "kv of zero": (lambda: base(kv=0), "kv .. at least 1, not 0"),
    "a float of heads": (lambda: hw.design(model=10, heads=5.0), "heads .. whole number .. 5.0"),
    "a true model": (lambda: hw.design(model=True, heads=1), "model .. whole number .. True"),
    "no heads": (lambda: hw.design(model=10), "heads"),
    "an unknown word": (lambda: base(head=3), "no 'head' .. did you mean 'heads'"),
    "an unknown preset": (lambda: hw.design(preset="gqq"), "no preset 'gqq' .. did you mean 'gqa'"),
    "an unknown bias": (lambda: base(bias="qx"), "bias='qx' .. 'x' .. 'qkvo'"),
    "a bias for who has none": (lambda: base(project=hw.Latent(), bias="q"), "Latent .. no bias"),
    "a true bias": (lambda: base(bias=True), "bias=True .. 'qkvo'"),
    "a vdim of zero": (lambda: base(vdim=0), "vdim .. at least 1, not 0"),
    "a pattern of another type": (lambda: base(pattern=3), "pattern .. 3 is a int .. Pattern"),
    "an unknown pattern": (lambda: base(pattern="windo(3)"), "'windo' .. did you mean 'window'"),
    "a part in the wrong slot": (lambda: base(normaliser=hw.Dot()), "normaliser .. Dot() .. Normaliser .. REGISTRY"),
    "a class for a modifier": (lambda: base(modifiers=(hw.Alibi,)), "modifiers .. Alibi .. not a Modifier"),
    "a forgotten comma": (lambda: base(modifiers=hw.Alibi()), "modifiers=Alibi() .. the comma"),
    "the same in a spec": (lambda: replace(base(), modifiers=hw.Alibi()), "modifiers=Alibi() .. the comma"),
    "a source of zero": (lambda: base(source=0), "source=0 .. at least 1"),
    "too few reads": (lambda: hw.Heads(q=3, kv=2, dim=4, reads=(0, 1)), "reads=(0, 1) .. 3 .. one .. each"),
    "an unread head": (lambda: hw.Heads(q=3, kv=2, dim=4, reads=(0, 0, 0)), "every key-value head 0..1"),
    "a read of text": (lambda: hw.Heads(q=2, kv=2, dim=4, reads=(0, "a")), "reads=(0, 'a') .. 0..1"),
    "a read of a float": (lambda: hw.Heads(q=2, kv=2, dim=4, reads=(0.0, 1.0)), "reads=(0.0, 1.0) .. 0..1"),
    "reads that are one": (lambda: hw.Heads(q=2, kv=2, dim=4, reads=5), "reads=5 .. each"),
    "a head that is not there": (lambda: hw.Heads(q=2, kv=2, dim=4, speaks=(0, 2)), "speaks=(0, 2) .. 0..1"),
    "a head by name": (lambda: hw.Heads(q=2, kv=2, dim=4, speaks=("x",)), "speaks=('x',) .. 0..1"),
    "an unknown change of heads": (lambda: base().with_heads(kvs=2), "no 'kvs' .. did you mean 'kv'"),
    "a factor of zero": (lambda: hw.PI(0.0), "PI(factor=0.0) .. positive"),
    "a ramp of another name": (lambda: hw.YaRN(ramp="line"), "ramp='line' .. 'code' or 'paper'"),
    "a ramp that falls": (lambda: hw.YaRN(fast=1.0, slow=2.0), "fast=1.0, slow=2.0 .. fast > slow"),
    "a ramp that is flat": (lambda: hw.Llama3(low=4.0, high=4.0), "low=4.0, high=4.0 .. high > low"),
    "a number as text": (lambda: base(modifiers=(ROT(base="x"),)), "base='x'"),
    "no spec": (lambda: hw.Attention("mha"), "'mha' .. spec"),
    "an unknown probe": (lambda: hw.Probe("weight"), "'weight' .. did you mean 'weights'"),
}
MADE_BUGS = ("a true bias", "a vdim of zero", "a part in the wrong slot", "the same in a spec", "a read of text")
MADE_BUGS += ("a read of a float", "reads that are one", "a head by name", "a number as text", "no spec")


def rows(table: dict[str, tuple[object, ...]], bugs: tuple[str, ...]) -> list[object]:
    return [(bug if name in bugs else pytest.param)(*row) for name, row in table.items()]


@pytest.mark.parametrize(("makes", "words"), rows(MADE, MADE_BUGS), ids=list(MADE))
def test_what_cannot_be_made(makes: Callable[[], object], words: str):
    check_refused(makes, words)


SMALL = "model = 10\nheads = {q = 6, dim = 4}\n"
TEXTS = {
    "unknown key": ("modle = 10", "a spec .. 'modle' .. did you mean 'model'"),
    "unknown heads key": ("model = 10\nheads = {q = 6, dims = 4}", "heads .. 'dims' .. did you mean 'dim'"),
    "unknown part": (SMALL + 'modifiers = ["Alibii"]', "'Alibii' .. did you mean 'Alibi'"),
    "unknown field": (SMALL + 'modifiers = [{part = "Softcap", limits = 3.0}]', "'limits' .. did you mean 'limit'"),
    "missing field of heads": ("model = 10\nheads = {q = 6}", "nothing of dim .. add dim"),
    "heads as a number": ("model = 10\nheads = 6", "heads = 6 is a int .. a table"),
    "model as text": ('model = "10"\nheads = {q = 6, dim = 4}', "model='10' .. whole number"),
    "pattern as a number": (SMALL + "pattern = 3", "pattern = 3 is a int .. 'causal()'"),
    "modifiers as text": (SMALL + 'modifiers = "Alibi"', "modifiers = 'Alibi' is a str .. a list"),
    "a part without a name": (SMALL + "modifiers = [{limit = 3.0}]", "modifiers[0].part .. the name of a part"),
    "a part of the wrong slot": (SMALL + 'merge = "Dot"', "merge .. Dot() .. Merge"),
    "reads of two types": ('model = 10\nheads = {q = 2, dim = 4, reads = [0, "a"]}', "reads .. 0..1"),
    "a float as text": (SMALL + 'modifiers = [{part = "WeightDropout", rate = "x"}]', "rate .. 'x'"),
    "an inner number as text": (
        SMALL + 'modifiers = [{part = "Rotary", scaling = {part = "PI", factor = "x"}}]',
        "factor .. 'x'",
    ),
    "a whole number as a float": (SMALL + 'modifiers = [{part = "Shaw", reach = 2.5}]', "reach .. 2.5"),
    "no TOML": ("model 10", "not TOML .. print(spec)"),
}
TEXT_BUGS = ("reads of two types", "a float as text", "an inner number as text", "a whole number as a float")


@pytest.mark.parametrize(("said", "words"), rows(TEXTS, TEXT_BUGS), ids=list(TEXTS))
def test_text_that_cannot_be_meant(said: str, words: str):
    check_refused(lambda: hw.from_toml(said), words, hw.SpecError)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("{", "not JSON .. to_json"),
        ("[1]", "[1] is a list .. a table"),
        ('{"model": 10, "heads": {"q": 6, "dim": 4}, "merge": null}', "merge = None .. a table"),
        ('{"model": 10, "heads": {"q": 6, "dim": 4, "kv": null}}', "kv of at least 1, not None"),
        ('{"model": 10, "headz": {}}', "'headz' .. did you mean 'heads'"),
    ],
)
def test_json_that_cannot_be_meant(said: str, words: str):
    check_refused(lambda: hw.from_json(said), words, hw.SpecError)


# --- calls ---------------------------------------------------------------------------------------------


def at(position: list[list[int]], segment: list[list[int]]) -> hw.Tokens:
    return hw.Tokens(torch.tensor(position), torch.tensor(segment))


def cached(x: Tensor, **said: object) -> Tensor:
    return built(pattern="causal()")(
        x,
        cache=hw.Cache.of(
            **({"spec": base(pattern="causal()"), "batch": 2, "capacity": 9, "dtype": torch.float64} | said)
        ),
    )


X = torch.zeros(BATCH, TOKENS, MODEL, dtype=torch.float64)
BOOL = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
CALLS = {
    "x of two axes": (lambda: built()(X[0]), "x has shape (7, 10) .. give [batch, tokens, 10]"),
    "x too wide": (lambda: built()(X[..., :9]), "x has shape (2, 7, 9) .. give [batch, tokens, 10]"),
    "x of whole numbers": (lambda: built()(X.long()), "x is torch.int64 .. floating-point"),
    "x in another precision": (lambda: built()(X.float()), "x is torch.float32 .. torch.float64 .. autocast"),
    "x elsewhere": (lambda: built()(X.to("meta")), "x is on meta .. the layer is on cpu .. move one"),
    "x in another precision elsewhere": (
        lambda: built().to("meta")(X.float().to("meta")),
        "x is torch.float32 .. float64",
    ),
    "x as a list": (lambda: built()([[0.0]]), "x is a list .. a tensor"),
    "tokens of another length": (
        lambda: built()(X, tokens=hw.Tokens.run(0, 6, "cpu")),
        "[1, 6] .. [2, 7] .. Tokens.of",
    ),
    "tokens of another batch": (
        lambda: built()(
            X, tokens=hw.Tokens.of(X[:1], lengths=[3]).__class__(whole(3, 7) + torch.arange(7), whole(3, 7))
        ),
        "[3, 7] .. [2, 7]",
    ),
    "tokens elsewhere": (lambda: built()(X, tokens=hw.Tokens.run(0, 7, "meta")), "tokens are on meta .. cpu"),
    "tokens of two devices": (lambda: hw.Tokens(whole(1, 1), whole(1, 1).to("meta")), "cpu .. meta"),
    "tokens as text": (lambda: built()(X, tokens="left"), "tokens .. str .. Tokens.of"),
    "a start that is not so": (lambda: hw.Tokens(torch.arange(3)[None] + 5, whole(1, 3), start=0), "start=0"),
    "a position twice": (lambda: at([[0, 1, 1]], [[0, 0, 0]]), "one segment .. same position .. from 0"),
    "a segment twice": (
        lambda: hw.Tokens.of(X[:1, :3], segments=torch.tensor([[0, 1, 0]])),
        "one segment .. same position",
    ),
    "a position below 0": (lambda: at([[-1, 0]], [[0, 0]]), "below 0 .. count from 0"),
    "positions of floats": (lambda: hw.Tokens(torch.zeros(1, 3), whole(1, 3)), "torch.float32 .. whole numbers"),
    "positions of one axis": (lambda: hw.Tokens(whole(3), whole(3)), "(3,) .. [batch, tokens]"),
    "positions as a list": (lambda: hw.Tokens([[0]], [[0]]), "list .. [batch, tokens]"),
    "lengths beyond the row": (lambda: hw.Tokens.of(X, lengths=[3, 8]), "lengths=[3, 8] .. 2 rows of 7 .. 0..7"),
    "lengths of another batch": (lambda: hw.Tokens.of(X, lengths=[3]), "lengths=[3] .. 2 rows"),
    "lengths as text": (lambda: hw.Tokens.of(X, lengths="37"), "lengths='37' .. 2 rows"),
    "both": (lambda: hw.Tokens.of(X, lengths=[3, 3], segments=whole(2, 7)), "both .. segments alone"),
    "segments as a list": (lambda: hw.Tokens.of(X, segments=[[0] * 7] * 2), "segments .. whole numbers [2, 7]"),
    "segments of another shape": (lambda: hw.Tokens.of(X, segments=whole(2, 6)), "(2, 6) .. whole numbers [2, 7]"),
    "an unknown side": (lambda: hw.Tokens.of(X, lengths=[3, 3], pad="top"), "pad='top' .. 'right' or 'left'"),
    "a mask of three axes": (lambda: built()(X, mask=BOOL[:, 0]), "(2, 7, 7) .. torch.bool [2 or 1, 6 or 1, 7, 7]"),
    "a mask of floats": (lambda: built()(X, mask=BOOL.double()), "torch.float64 .. True where a key may be read"),
    "a mask elsewhere": (lambda: built()(X, mask=BOOL.to("meta")), "on meta .. on cpu"),
    "a mask as a list": (lambda: built()(X, mask=[True]), "mask is a list .. torch.bool"),
    "a probe as text": (lambda: built()(X, probe="weights"), "probe .. 'weights' .. Probe"),
    "a source of two axes": (lambda: built()(X, source=X[0, :2]), "source .. [batch, tokens, 10]"),
    "a source too narrow": (
        lambda: built(source=13)(X, source=X),
        "source has shape (2, 7, 10) .. [batch, tokens, 13]",
    ),
    "a source of another batch": (lambda: built()(X, source=X[:1]), "source has 1 rows but x has 2 .. each row"),
    "a source of whole numbers": (lambda: built()(X, source=X.long()), "source is torch.int64"),
    "a source elsewhere": (lambda: built()(X, source=X.to("meta")), "source is on meta .. cpu"),
    "a source as a list": (lambda: built()(X, source=[0]), "source is a list"),
    "a source of another layer": (
        lambda: built()(X, source=built(kv=2).remember(X)),
        "another spec .. own remember(z)",
    ),
    "a source in another precision": (
        lambda: built()(X, source=built().float().remember(X.float())),
        "float32 .. float64",
    ),
    "no source": (lambda: built(source=13)(X), "source of width 13 .. source=z"),
    "an unforeseen source": (
        lambda: built(pattern="causal()")(X, source=X),
        "causal() compares .. source=width .. full()",
    ),
    "an unforeseen turn": (lambda: built(modifiers=(ROT(),))(X, source=X), "Rotary .. compares .. source=width"),
    "both source and cache": (
        lambda: (layer := built())(X, source=X, cache=built(pattern="causal()").cache(batch=2, capacity=9)),
        "remember(z) .. one or the other",
    ),
    "a cache of another spec": (lambda: cached(X, spec=base(pattern="causal()", kv=2)), "another spec .. layer.cache"),
    "a cache of another batch": (lambda: cached(X, batch=3), "3 rows, not 2 .. batch=2"),
    "a cache in another precision": (lambda: cached(X, dtype=torch.float32), "torch.float32 .. torch.float64"),
    "a cache elsewhere": (lambda: cached(X, device="meta"), "on meta .. on cpu"),
    "a cache as text": (lambda: built(pattern="causal()")(X, cache="c"), "cache .. str .. layer.cache"),
    "a cache of nothing": (lambda: cached(X, capacity=0), "capacity=0 .. at least 1"),
    "a cache of half a token": (lambda: cached(X, capacity=2.5), "capacity=2.5 .. whole"),
    "a cache for what looks ahead": (
        lambda: built(pattern="window(5, after=2)").cache(batch=2, capacity=9),
        "not come yet .. causal()",
    ),
    "half a prefix": (
        lambda: (l := built(pattern="prefix(3)"))(X[:, :2], cache=l.cache(batch=2, capacity=9)),
        "first 3 tokens .. not 2 .. whole prefix",
    ),
    "rows out of range": (
        lambda: built(pattern="causal()").cache(batch=2, capacity=9).rows(torch.tensor([2])),
        "2 .. 0..1",
    ),
    "rows as truth": (
        lambda: built(pattern="causal()").cache(batch=2, capacity=9).rows(torch.tensor([True, False])),
        "torch.bool",
    ),
}
