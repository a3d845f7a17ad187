"""`design`, which builds a spec from a few arguments, and the named presets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

from ..util.errors import SpecError, suggest
from .masking.patterns import PerHead, parse_pattern
from .parts.collaborative import Collaborative
from .parts.composed_heads import ComposedHeads
from .parts.contextual_positions import ContextualPositions
from .parts.differential import Differential, DifferentialV2
from .parts.dot_product import DotProduct
from .parts.dynamic_composition import DynamicComposition
from .parts.entmax import Entmax
from .parts.factored_queries import FactoredQueries
from .parts.feature_map import FeatureMap, SumNormaliser
from .parts.forgetting_attention import ForgetGate
from .parts.gated_attention import HardConcreteGate, OutputGate
from .parts.grouped_latent import GroupedLatent
from .parts.interleaved_heads import (
    HeadCollapse,
    JointSoftmax,
    PseudoHeads,
    PseudoOrder,
    PseudoRotary,
)
from .parts.latent_attention import MLAProjection
from .parts.linear_projection import ValueProjection
from .parts.mixture_of_heads import MixtureOfHeads
from .parts.multi_token_attention import KeyQueryConvolution
from .parts.overlapping_heads import Overlapping
from .parts.relative_position_bias import ContinuousBias
from .parts.rms_norms import HeadNorm, QKNorm
from .parts.rotary_embedding import Rotary
from .parts.row_groups import SumRows
from .parts.selective_attention import SelectiveAttention
from .parts.softmax import ScalableSoftmax, SinkSoftmax, Softpick, WeightDropout
from .parts.stick_breaking import StickBreaking
from .parts.switch_heads import SwitchOutputs, SwitchValues
from .parts.synthesizer import AverageNormaliser
from .parts.talking_heads import KnockingHeads, TalkingHeads
from .parts.tensor_product import TensorProduct
from .parts.tied_projections import TiedProjection
from .spec.attention_spec import AttentionSpec, from_json as _from_json, from_toml as _from_toml
from .spec_builder import DEFAULT_CHOICES, build_spec, check_sizes


def design(*, preset: str | None = None, **options: Any) -> AttentionSpec:
    """Build the spec of an attention layer.

    - `model`, `heads`: the model width and the number of query heads, both required;
    - `kv`: the number of key-value heads (default: `heads`);
    - `dim`, `vdim`: channels per query and key head (default: model / heads) and per value head
      (default: `dim`);
    - `pattern`: text such as "causal()" or a pattern (default: every query attends to every key);
    - `modifiers`: a tuple of parts such as ``Rotary()``;
    - `bias`: the projections that have one, letters of "qkvo";
    - `source`: the width of the sequence that cross-attention attends to;
    - `project`, `similarity`, `normaliser`, `merge`: parts that replace the usual ones.

    With `preset`, the name of a preset, the other arguments override its arguments.

    >>> design(model=512, heads=8, kv=2).heads
    Heads.grouped(q=8, kv=2, dim=64)
    """
    if preset is not None:
        if preset not in PRESETS:
            raise SpecError(f"there is no preset {preset!r}; {suggest(preset, PRESETS)}")
        check_sizes(
            {
                name: size
                for name, size in options.items()
                if size is not None or name in ("model", "heads")
            }
        )
        return PRESETS[preset](**options)
    return build_spec(options)


def design_core(
    sizes: tuple[int, int, int, int], *, causal: bool, scale: float | None, dropout: float
) -> AttentionSpec:
    """The spec of softmax attention over queries, keys and values in hand.

    `sizes` are query heads, key-value heads, and the channels of queries and of values.

    >>> design_core((8, 2, 16, 32), causal=True, scale=None, dropout=0.0).heads
    Heads.grouped(q=8, kv=2, dim=16, vdim=32)
    """
    heads, kv, dim, vdim = sizes
    return design(
        model=heads * dim,
        heads=heads,
        kv=kv,
        dim=dim,
        vdim=vdim,
        pattern="causal()" if causal else "full()",
        similarity=DotProduct(scale),
        modifiers=(WeightDropout(dropout),) if dropout else (),
    )


# --- Presets --------------------------------------------------------------------------------------


DIFF_KEYS = ("own", "repeated")  # key heads of a pair of score heads in the preset diff
CAUSAL: dict[str, Any] = {"pattern": "causal()"}
NEIGHBOURS = "window(513, after=256) | global((0,))"
DILATED = "dilated(513, 2, after=256) | global((0,))"


def _build(options: Mapping[str, Any], **choices: Any) -> AttentionSpec:
    """Build a preset's spec, with the caller's options on top.

    A choice that is a function takes the number of heads.
    """
    chosen: dict[str, Any] = {"model": 512, "heads": 8} | choices | dict(options)
    for name, choice in chosen.items():
        if isinstance(choice, FunctionType):
            chosen[name] = choice(chosen["heads"])
    return design(**chosen)


def _preset(text: str, **choices: Any) -> Callable[..., AttentionSpec]:
    """A preset of these choices, described by `text`."""

    def make(**options: Any) -> AttentionSpec:
        return _build(options, **choices)

    make.__doc__ = text
    return make


def _quarter(heads: int) -> int:
    """The largest divisor of `heads` that is at most a quarter of it (at least 1)."""
    return max(kv for kv in range(1, max(1, heads // 4) + 1) if heads % kv == 0)


def _two_groups(heads: int) -> int:
    """Two groups of heads, or one if two are not equally large."""
    return 2 if heads % 2 == 0 else 1


def _routed(heads: int) -> MixtureOfHeads:
    """A quarter of all heads is always active, and each token chooses another half."""
    always = max(1, heads // 4)
    return MixtureOfHeads(always=always, active=min(heads // 2, heads - always))


def _patterns_of_heads(num_first: int, first: str, second: str, heads: int) -> PerHead:
    """The first pattern for this many heads, and the second for the others."""
    patterns = parse_pattern(first), parse_pattern(second)
    return PerHead(patterns, tuple(int(head >= num_first) for head in range(heads)))


def _rotary(pairs: str, options: Mapping[str, Any]) -> Rotary:
    """The rotary embedding of a preset with an option `pairs`."""
    if pairs != "interleaved" and "modifiers" in options:
        raise SpecError(
            f"pairs={pairs!r} and modifiers exclude each other; give "
            f"modifiers=(Rotary(pairs={pairs!r}), ...)"
        )
    return Rotary(pairs=pairs)


def _moh_vit(
    *, model: int = 512, heads: int = 8, rows: int = 7, columns: int = 7, **options: Any
) -> AttentionSpec:
    """Mixture of heads for images (MoH-ViT): cosine attention with a continuous position bias
    (2410.11842).

    `rows` and `columns` are the size of the patch grid: 7 x 7 in the last stage of MoH-TransNeXt,
    where layers attend to all tokens. A quarter of the heads is always active, and each token
    chooses another half.
    """
    modifiers = (
        QKNorm(kind="l2-embedding", temperature=math.log(max(rows * columns, 2)) / 0.24),
        ContinuousBias(rows=rows, columns=columns, output="linear"),
        _routed(heads),
    )
    return _build(
        options,
        model=model,
        heads=heads,
        similarity=DotProduct(scale=1.0),
        modifiers=modifiers,
        bias="qkvo",
    )


def _collaborative(*, model: int = 512, heads: int = 8, **options: Any) -> AttentionSpec:
    """Collaborative attention: heads share a query-key space half as wide as all heads together
    (2006.16362).
    """
    width = max(1, heads * (options.get("dim") or model // heads) // 2)
    return _build(options, model=model, heads=heads, project=Collaborative(width=width))


def _diff(
    *,
    model: int = 512,
    heads: int = 8,
    pairs: str = "interleaved",
    keys: str = "own",
    **options: Any,
) -> AttentionSpec:
    """Differential attention: pairs of query heads of half the usual width, values of the usual
    width (2410.05258).

    `pairs` is passed to `Rotary`: "interleaved" as in all released codes, or "half". `keys` matters
    if `kv` is less than `heads`: "own" gives each head of a pair a separate key head, as the
    released flash code does; "repeated" gives score head j the key head j // (heads / kv), as the
    released naive code does.
    """
    modifiers = (_rotary(pairs, options), Differential())
    dim = max(1, model // heads // 2)
    spec = _build(
        options, model=model, heads=heads, dim=dim, pattern="causal()", modifiers=modifiers
    )
    if keys not in DIFF_KEYS:
        raise SpecError(f"diff has no keys={keys!r}; {suggest(keys, DIFF_KEYS)}")
    return spec if keys == "own" else replace(spec, heads=replace(spec.heads, kv_head_of_query=()))


def _diff2(
    *, model: int = 512, heads: int = 8, pairs: str = "interleaved", **options: Any
) -> AttentionSpec:
    """Differential attention, version 2: twice as many query heads on shared key-value heads
    (unilm, 2026).

    `pairs` is passed to `Rotary`: "interleaved" as in the released code, or "half".
    """
    modifiers = (_rotary(pairs, options), DifferentialV2())
    return _build(
        options, model=model, heads=heads, kv=_quarter, pattern="causal()", modifiers=modifiers
    )


PRESETS: dict[str, Callable[..., AttentionSpec]] = {
    "mha": _preset(
        "Multi-head attention as first published: every head has its own keys and values "
        "(1706.03762)."
    ),
    "gqa": _preset(
        "Grouped-query attention: four query heads share a key-value head; causal, with RoPE "
        "(2305.13245).",
        **CAUSAL,
        kv=_quarter,
        modifiers=(Rotary(),),
    ),
    "mqa": _preset(
        "Multi-query attention: all query heads share one key-value head; causal, with RoPE "
        "(1911.02150).",
        **CAUSAL,
        kv=1,
        modifiers=(Rotary(),),
    ),
    "mla": _preset(
        "Latent attention (MLA) sized as DeepSeek-V2-Lite: rank 512, 64 RoPE and 128 other "
        "channels (2405.04434).",
        **CAUSAL,
        model=2048,
        heads=16,
        dim=128,
        project=MLAProjection(rank=512, rope=64),
        modifiers=(Rotary(pairs="interleaved"),),
    ),
    "gla": _preset(
        "Grouped latent attention: two latents of 256, each for half of the heads, and 64 RoPE "
        "channels for all (2505.21487).",
        **CAUSAL,
        model=2048,
        heads=16,
        dim=128,
        kv=_two_groups,
        project=GroupedLatent(rank=256, rope=64),
        modifiers=(Rotary(),),
    ),
    "mlra": _preset(
        "Multi-head low-rank attention: four latents of 128 numbers; each head adds up attention "
        "over two of them (2603.02188).\n\n"
        "`kv=1`, `project=GroupedLatent(rank=128, branches=4)` and `SumRows(rows=4)` give every "
        "head all four.",
        **CAUSAL,
        kv=_two_groups,
        project=GroupedLatent(rank=128, branches=2),
        modifiers=(Rotary(), SumRows()),
    ),
    "gta": _preset(
        "Grouped tied attention: one state is the value and half of the key of a group of heads, a "
        "quarter as many groups as heads (2505.21487).",
        **CAUSAL,
        kv=_quarter,
        project=TiedProjection(),
        modifiers=(Rotary(),),
    ),
    "tpa": _preset(
        "Tensor product attention: keys and values are sums of 2 products of two factors, queries "
        "of 6 (2501.06425).",
        **CAUSAL,
        project=TensorProduct(),
        modifiers=(Rotary(),),
    ),
    "mfa": _preset(
        "Multi-matrix factorisation: one key and value head of 256 channels, and queries through "
        "512 channels that all heads share (2412.19255).",
        **CAUSAL,
        kv=1,
        dim=256,
        project=FactoredQueries(rank=512),
        modifiers=(Rotary(),),
    ),
    "mea": _preset(
        "Explicit composition of heads (MEA): keys and values are learned sums of those of all "
        "heads, and each head's output has a norm (2601.19611).\n\n"
        "`project=ComposedHeads(components=4)` keeps half as many keys and values in the cache.",
        **CAUSAL,
        project=ComposedHeads(),
        modifiers=(Rotary(), HeadNorm()),
    ),
    "iha": _preset(
        "Interleaved heads (IHA): two pseudo queries, keys and values in each head, all sums over "
        "heads, under one softmax (2602.21371).\n\n"
        '`modifiers=(PseudoRotary(), PseudoOrder(), HeadCollapse(kind="global"))` sums over the '
        "outputs of all heads.",
        **CAUSAL,
        project=PseudoHeads(),
        normaliser=JointSoftmax(),
        modifiers=(PseudoRotary(), PseudoOrder(), HeadCollapse()),
    ),
    "moh": _preset(
        "Mixture of heads: a quarter of all heads are always active, and each token chooses "
        "another half (2410.11842).",
        **CAUSAL,
        modifiers=lambda heads: (Rotary(), _routed(heads)),
    ),
    "moh_vit": _moh_vit,
    "moa": _preset(
        "Mixture of attention heads (MoA): each token chooses 8 of 32 query heads, which share one "
        "key and value head (2210.05144).",
        **CAUSAL,
        heads=32,
        dim=64,
        kv=1,
        modifiers=lambda heads: (
            Rotary(),
            MixtureOfHeads(always=0, active=max(1, heads // 4), norm="moa"),
        ),
    ),
    "switchhead": _preset(
        "SwitchHead: 2 heads, each with 4 value and 4 output projections, of which a token chooses "
        "2 (2312.07987).",
        **CAUSAL,
        heads=2,
        dim=64,
        project=SwitchValues(),
        modifiers=(Rotary(), SwitchOutputs()),
    ),
    "dcmha": _preset(
        "Dynamically composable heads (DCMHA): mixes scores and weights, each with rank 2 "
        "(2405.08553).",
        **CAUSAL,
        modifiers=(QKNorm(), Rotary(), DynamicComposition(), DynamicComposition(on="weights")),
    ),
    "mohsa": _preset(
        "Overlapping heads (MOHSA): layer l uses l + 1 channels of each of the two "
        "neighbouring heads (2410.14874).",
        project=Overlapping(overlap=1, schedule="l+1"),
    ),
    "collaborative": _collaborative,
    "talking": _preset(
        "Talking-heads attention: mixes heads before and after the softmax (2003.02436).",
        modifiers=(TalkingHeads(), TalkingHeads(on="weights")),
    ),
    "diff": _diff,
    "diff2": _diff2,
    "entmax": _preset(
        "Sparse attention with 1.5-entmax: most weights are exactly zero (1909.00015).",
        normaliser=Entmax(alpha=1.5),
    ),
    "linear": _preset(
        "Linear attention with features elu(x) + 1: decodes from a state of constant size "
        "(2006.16236).",
        **CAUSAL,
        similarity=FeatureMap(),
        normaliser=SumNormaliser(),
    ),
    "performer": _preset(
        "Performer: positive random features, an unbiased estimate of softmax attention "
        "(2009.14794).",
        **CAUSAL,
        similarity=FeatureMap(kind="favor"),
        normaliser=SumNormaliser(),
    ),
    "longformer": _preset(
        "Longformer: 256 neighbours on either side, and a global first token (2004.05150).\n\n"
        "The paper gives global tokens separate projections; hw.attention.LongformerAttention "
        "takes this spec and adds them.",
        pattern=NEIGHBOURS,
        bias="qkvo",
    ),
    "longformer_dilated": _preset(
        "Longformer with two dilated heads, which attend to every second of 1,025 tokens "
        "(2004.05150).\n\n"
        "The paper dilates the windows of two heads by a small amount, and only in higher "
        "layers (section 4.1); its windows grow from 32 to 512 tokens with the layer. Its "
        "released checkpoints have windows of 512 and dilate none.",
        pattern=lambda heads: _patterns_of_heads(
            heads - min(2, heads // 2), NEIGHBOURS, DILATED, heads
        ),
        bias="qkvo",
    ),
    "streaming_retrieval": _preset(
        "Retrieval heads read all tokens, streaming heads 64 first tokens and the latest 256: "
        "half of each (2410.10819).\n\n"
        "The paper learns which key-value heads of a trained model retrieve; here they are "
        "the first. The released scripts stream half of the heads of Llama-3-8B (GQA) and "
        "three quarters of Llama-2-7B (MHA), with 64 first and 256 latest tokens; they learn "
        "with 128 first ones. As there, the cache keeps all tokens for retrieval heads only.",
        kv=_quarter,
        pattern=lambda heads: _patterns_of_heads(
            heads - heads // 2, "causal()", "window(256) | first(64)", heads
        ),
        modifiers=(Rotary(),),
    ),
    "bigbird": _preset(
        "BigBird: blocks of 64; three neighbours, two global and three random blocks, up to "
        "4,096 tokens (2007.14062).\n\n"
        "All heads have the same random blocks. For different blocks per head, as in the "
        "released code, give pattern=PerHead.from_heads(BigBird(4096, seed=head) for head in "
        "range(heads)).",
        pattern="bigbird(4096)",
        bias="qkvo",
    ),
    "kha": _preset(
        "Knocking-heads attention: one small gated map of values, shared by all heads "
        "(2510.23052).",
        **CAUSAL,
        modifiers=(KnockingHeads("mlp"), Rotary()),
    ),
    "gated": _preset(
        "Gated attention: an elementwise sigmoid gate of the query token on the output of each "
        "head (2505.06708).",
        **CAUSAL,
        kv=_quarter,
        modifiers=(Rotary(), OutputGate()),
    ),
    "sinks": _preset(
        "Softmax with a learned sink per head over a window of 128 tokens, like the windowed "
        "layers of gpt-oss (2508.10925).",
        pattern="window(128)",
        kv=_quarter,
        normaliser=SinkSoftmax(),
        modifiers=(Rotary(),),
        bias="qkvo",
    ),
    "ssmax": _preset(
        "Scalable softmax: scores grow with the logarithm of the number of keys, so that long "
        "texts do not dilute weights (2501.19399).",
        **CAUSAL,
        normaliser=ScalableSoftmax(),
        modifiers=(Rotary(),),
    ),
    "softpick": _preset(
        "Softpick: weights of low scores are zero and need not sum to one, so that no key is a "
        "sink (2504.20966).",
        **CAUSAL,
        normaliser=Softpick(),
        modifiers=(Rotary(),),
    ),
    "stick_breaking": _preset(
        "Stick-breaking attention: the nearest keys take their share first; no positions are "
        "needed (2410.17980).",
        **CAUSAL,
        normaliser=StickBreaking(),
    ),
    "forgetting": _preset(
        "Forgetting attention: a gate of each token and head lowers the scores of all earlier "
        "keys; no positions are needed (2503.02130).",
        **CAUSAL,
        modifiers=(ForgetGate(),),
    ),
    "selective": _preset(
        "Selective attention: positive scores of the first head mask earlier tokens for all later "
        "queries, in every head (2410.02703).",
        **CAUSAL,
        modifiers=(Rotary(), SelectiveAttention()),
    ),
    "cope": _preset(
        "Contextual positions (CoPE): a key's position is the number of later keys that the query "
        "opens a gate for (2405.18719).",
        **CAUSAL,
        modifiers=(ContextualPositions(),),
    ),
    "mta": _preset(
        "Multi-token attention: scores are convolved over 6 queries and 11 keys, and weights mixed "
        "over heads (2504.00927).\n\n"
        "The released configurations convolve in every fourth layer only, from the third on.",
        **CAUSAL,
        modifiers=(
            Rotary(),
            KeyQueryConvolution(),
            TalkingHeads(on="weights"),
            HeadNorm(rescale="depth"),
        ),
    ),
    "average": _preset(
        "Causal average of the values, in constant memory: the averaging branch of merged "
        "attention (1908.11365).",
        **CAUSAL,
        project=ValueProjection(),
        normaliser=AverageNormaliser(),
    ),
}


def with_gates(spec: AttentionSpec, *, per: str = "head", start: float = 2.0) -> AttentionSpec:
    """A copy of the spec with a learned hard-concrete gate on every output head, or per key-value
    head with per="kv".

    `start` is the initial log_a; with 2, a gate is open with probability 0.94.

    >>> with_gates(design(preset="mha", model=8, heads=2)).modifiers
    (HardConcreteGate(start=2.0, evaluation='hard'),)
    """
    if any(isinstance(modifier, HardConcreteGate) for modifier in spec.modifiers):
        raise SpecError("the spec has learned head gates already; use those, or remove them first")
    return replace(
        spec, modifiers=(*spec.modifiers, HardConcreteGate(start=start, evaluation="hard", per=per))
    )


def from_toml(text: str) -> AttentionSpec:
    """The spec described by a TOML document; parts that it leaves out are the usual ones, as in
    `design`.

    >>> from_toml("model = 8\\nheads = {q = 2, dim = 4}") == design(model=8, heads=2)
    True
    """
    return _from_toml(text, DEFAULT_CHOICES)


def from_json(text: str) -> AttentionSpec:
    """Build the spec described by a JSON document; missing choices have their defaults."""
    return _from_json(text, DEFAULT_CHOICES)
