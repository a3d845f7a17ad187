"""Named specs, and `design`, which fills in what is not said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .errors import SpecError, suggest
from .interfaces import Merge, Modifier, Part, Project
from .interfaces.registry import field_defaults
from .masking.patterns import Full, parse_pattern
from .parts.collaborative import Collaborative
from .parts.concat import Concat
from .parts.differential import Differential, DifferentialV2
from .parts.dot_product import Dot
from .parts.dynamic_composition import Dynamic
from .parts.entmax import Entmax
from .parts.feature_map import FeatureMap
from .parts.hard_concrete_gate import Concrete
from .parts.knocking_heads import Knocking
from .parts.latent_attention import Latent
from .parts.linear_projection import Direct
from .parts.mean_attention import Average
from .parts.mixture_of_heads import Routed
from .parts.overlapping_heads import Overlapping
from .parts.qk_norm import QKNorm
from .parts.rotary_embedding import Rotary
from .parts.softmax import Softmax
from .parts.sum_normaliser import Sum
from .parts.talking_heads import TalkingHeads
from .parts.value_projection import Values
from .spec.attention_spec import AttentionSpec
from .spec.heads import Heads
from .spec.serialization import from_json as _from_json, from_toml as _from_toml

# What a spec that does not choose is given.
DEFAULT_CHOICES: dict[str, Any] = {
    "project": Direct(),
    "similarity": Dot(),
    "pattern": Full(),
    "normaliser": Softmax(),
    "merge": Concat(),
}


# Every word that `design` knows; None where something follows from the others.
DESIGN_KEYWORDS: dict[str, Any] = {
    **DEFAULT_CHOICES,
    **dict.fromkeys(("model", "heads", "kv", "dim", "vdim", "bias", "source")),
    "modifiers": (),
}


def design(*, preset: str | None = None, **said: Any) -> AttentionSpec:
    """A spec from the few words that matter.

    model, heads; kv (as many as heads), dim (model / heads), vdim (dim); pattern, as text or as a pattern;
    modifiers; bias, the letters of "qkvo" that have one; source, the width of what cross-attention reads; and
    project, similarity, normaliser, merge. `preset` starts from a named spec instead.

    >>> design(model=512, heads=8, kv=2).heads
    Heads.grouped(q=8, kv=2, dim=64)
    """
    if preset is not None:
        if preset not in PRESETS:
            raise SpecError(f"there is no preset {preset!r}; {suggest(preset, PRESETS)}")
        _check_sizes({name: size for name, size in said.items() if size is not None or name in ("model", "heads")})
        return PRESETS[preset](**said)
    word = _check_keywords(said)
    slots = {slot: word[slot] for slot in ("project", "similarity", "normaliser", "merge")}
    heads = _heads(word)
    in_turn = sorted(word["modifiers"], key=lambda one: one.phase if isinstance(one, Modifier) else 0)
    for part in (*slots.values(), *in_turn):
        heads = part.fit_heads(heads) if isinstance(part, Part) else heads
    heads = heads if word["vdim"] is None else replace(heads, vdim=word["vdim"])
    if word["bias"] is not None:
        slots |= _biased(word["bias"], slots["project"], slots["merge"])
    pattern = parse_pattern(word["pattern"]) if isinstance(word["pattern"], str) else word["pattern"]
    rest = {"model": word["model"], "source": word["source"], "modifiers": word["modifiers"]}
    return AttentionSpec(heads=heads, pattern=pattern, **slots, **rest)


def _check_keywords(said: dict[str, Any]) -> dict[str, Any]:
    for name in said:
        if name not in DESIGN_KEYWORDS:
            raise SpecError(f"design has no {name!r}; {suggest(name, DESIGN_KEYWORDS)}")
    word = DESIGN_KEYWORDS | said
    _check_sizes({name: word[name] for name in ("model", "heads")})
    if not isinstance(word["modifiers"], (tuple, list)):
        raise SpecError(f"modifiers={word['modifiers']!r} is no list; write modifiers=(Rotary(),) with the comma")
    return word | {"modifiers": tuple(word["modifiers"])}


def _check_sizes(said: Mapping[str, object]) -> None:
    for name in ("model", "heads", "dim"):
        size = said.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise SpecError(f"design needs {name}, a whole number of at least 1, not {size!r}; say {name}=8")


def _heads(word: dict[str, Any]) -> Heads:
    model, heads, dim = word["model"], word["heads"], word["dim"]
    if dim is None and model % heads:
        ways = [n for n in range(1, model + 1) if model % n == 0]
        raise SpecError(f"a model of {model} does not divide among {heads} heads; use heads in {ways}, or say dim=")
    return Heads.grouped(q=heads, kv=word["kv"], dim=model // heads if dim is None else dim, vdim=word["vdim"])


def _biased(bias: object, project: Project, merge: Merge) -> dict[str, Part]:
    if not isinstance(bias, str):
        raise SpecError(f"bias={bias!r} is of type {type(bias).__name__}; name those that have one, as in bias='qkvo'")
    if unknown := sorted(set(bias) - set("qkvo")):
        raise SpecError(f"bias={bias!r} names {unknown[0]!r}; use letters of 'qkvo'")
    inner, outer = ("".join(letter for letter in letters if letter in bias) for letters in ("qkv", "o"))
    told: dict[str, tuple[Part, str]] = {"project": (project, inner), "merge": (merge, outer)}
    out: dict[str, Part] = {}
    for slot, (part, letters) in told.items():
        if "bias" not in field_defaults(type(part)) and letters:
            raise SpecError(f"{type(part).__name__} has no bias of its own; leave {letters!r} out of bias={bias!r}")
        out[slot] = replace(part, bias=letters) if "bias" in field_defaults(type(part)) else part
    return out


def mha(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Multi-head attention as first published: every head has keys and values of its own (1706.03762)."""
    return _filled(said, model=model, heads=heads)


def gqa(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Grouped queries: four heads share a key-value head; causal, with rotary positions (2305.13245)."""
    return _filled(said, model=model, heads=heads, kv=_quarter(heads), pattern="causal()", modifiers=(Rotary(),))


def mqa(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """One key-value head for all (1911.02150)."""
    return _filled(said, model=model, heads=heads, kv=1, pattern="causal()", modifiers=(Rotary(),))


def mla(*, model: int = 2048, heads: int = 16, **said: Any) -> AttentionSpec:
    """Latent attention in the sizes of DeepSeek-V2-Lite (2405.04434): rank 512, 64 turned and 128 other channels."""
    turns, latent = (Rotary(pairs="interleaved"),), Latent(rank=512, rope=64)
    return _filled(said, model=model, heads=heads, dim=128, pattern="causal()", project=latent, modifiers=turns)


def moh(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Mixture of heads: a quarter of them always speak, and for each token the best half of all (2410.11842)."""
    always = max(1, heads // 4)
    routed = Routed(always=always, active=min(heads // 2, heads - always))
    return _filled(said, model=model, heads=heads, pattern="causal()", modifiers=(Rotary(), routed))


def dcmha(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Dynamically composed heads, on the scores and on the weights, in rank 2 (2405.08553)."""
    composed = (QKNorm(), Rotary(), Dynamic(), Dynamic(on="weights"))
    return _filled(said, model=model, heads=heads, pattern="causal()", modifiers=composed)


def mohsa(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Overlapped heads: each sees a channel of both its neighbours, and one more in every deeper layer (2410.14874)."""
    return _filled(said, model=model, heads=heads, project=Overlapping(overlap=1, schedule="l+1"))


def collaborative(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Heads that share one query-key space, half as wide as all of theirs together (2006.16362)."""
    width = max(1, heads * (said.get("dim") or model // heads) // 2)
    return _filled(said, model=model, heads=heads, project=Collaborative(width=width))


def talking(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Talking heads, mixed before the softmax and behind it (2003.02436)."""
    return _filled(said, model=model, heads=heads, modifiers=(TalkingHeads(), TalkingHeads(on="weights")))


def diff(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Differential attention: pairs of heads half as wide as usual, on values of the usual width (2410.05258)."""
    modifiers, dim = (Rotary(), Differential()), max(1, model // heads // 2)
    return _filled(said, model=model, heads=heads, dim=dim, pattern="causal()", modifiers=modifiers)


def diff2(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Differential attention, version 2: twice the query heads on shared key-value heads (unilm, 2026)."""
    modifiers = (Rotary(), DifferentialV2())
    return _filled(said, model=model, heads=heads, kv=_quarter(heads), pattern="causal()", modifiers=modifiers)


def entmax(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Sparse weights: 1.5-entmax gives most keys none at all (1909.00015)."""
    return _filled(said, model=model, heads=heads, normaliser=Entmax(alpha=1.5))


def linear(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Linear attention: elu(x) + 1 as features, and all past tokens in one state (2006.16236)."""
    return _filled(said, model=model, heads=heads, pattern="causal()", similarity=FeatureMap(), normaliser=Sum())


def performer(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Performer: positive random features whose products are softmax's on average (2009.14794)."""
    features = FeatureMap(kind="favor")
    return _filled(said, model=model, heads=heads, pattern="causal()", similarity=features, normaliser=Sum())


def longformer(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """256 neighbours on either side, and a first token that reads and is read by all (2004.05150).

    The global token's own projections need a second set of weights: hw.LongformerAttention takes this spec.
    """
    return _filled(said, model=model, heads=heads, pattern="window(513, after=256) | global((0,))", bias="qkvo")


def bigbird(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Blocks of 64: three neighbours, two that all read, three drawn at random, up to 4,096 tokens (2007.14062)."""
    return _filled(said, model=model, heads=heads, pattern="bigbird(4096)", bias="qkvo")


def kha(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Knocking heads: all of them share one small gated map of their values (2510.23052)."""
    return _filled(said, model=model, heads=heads, pattern="causal()", modifiers=(Knocking("mlp"), Rotary()))


def average(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """The mean of the values so far, in constant memory: merged attention's other branch (1908.11365)."""
    return _filled(said, model=model, heads=heads, project=Values(), normaliser=Average(), pattern="causal()")


def with_gates(spec: AttentionSpec, *, per: str = "head", start: float = 2.0) -> AttentionSpec:
    """The same layer with a learned gate on every head behind all else, one for a whole group with per="kv".

    `start` is log_a: 2 lets a head speak with a probability of 0.94 at first.

    >>> with_gates(mha(model=8, heads=2)).modifiers
    (Concrete(start=2.0, evaluation='hard'),)
    """
    if any(isinstance(modifier, Concrete) for modifier in spec.modifiers):
        raise SpecError("its heads have learned gates already; read what those learned, or take them off first")
    return replace(spec, modifiers=(*spec.modifiers, Concrete(start=start, evaluation="hard", per=per)))


def _filled(said: dict[str, Any], **usual: Any) -> AttentionSpec:
    """What a preset says, where the caller says nothing else."""
    return design(**(usual | said))


def _quarter(heads: int) -> int:
    """The largest number of key-value heads up to a quarter of the heads that divides them."""
    return max(kv for kv in range(1, max(1, heads // 4) + 1) if heads % kv == 0)


_ALL = (mha, gqa, mqa, mla, moh, dcmha, mohsa, collaborative, talking, diff, diff2, entmax, linear, performer)
_ALL += (longformer, bigbird, kha, average)
PRESETS: dict[str, Callable[..., AttentionSpec]] = {make.__name__: make for make in _ALL}


def from_toml(text: str) -> AttentionSpec:
    """The spec that a TOML document describes; a choice it does not make is the usual one.

    >>> from_toml("model = 8\\nheads = {q = 2, dim = 4}") == design(model=8, heads=2)
    True
    """
    return _from_toml(text, DEFAULT_CHOICES)


def from_json(text: str) -> AttentionSpec:
    """The spec that a JSON document describes; a choice it does not make is the usual one."""
    return _from_json(text, DEFAULT_CHOICES)
