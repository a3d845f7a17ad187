"""Bytes that a block, or a whole model, keeps for the way back, put together from what its pieces keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..blueprint import BlockSpec, ExpertsSpec, ModelSpec, StackSpec
from ..errors import SpecError
from ..spec import AttentionSpec
from . import around, textbook
from .around import NamedBytes, ActivationContext
from .bills import CostBreakdown
from .keeping import layer_activation_memory, layer_activation_terms, default_profile
from .symbols import SymbolicInt

if TYPE_CHECKING:
    from .pricing import Workload


@dataclass(frozen=True)
class ActivationSettings:
    """How a model is trained: the profile of its attentions, what is computed anew, and how much is dropped.

    Without a profile each attention runs as it usually does on the device of the load. `source` is how many tokens
    an encoder reads for a decoder, if not as many.
    """

    profile: str = ""
    checkpoint: str = "none"
    dropout: float = 0.0
    source: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise SpecError(f"dropout={self.dropout!r} is no rate; give 0.1, say, or 0 for none")
        if self.source is not None and (type(self.source) is not int or self.source < 1):
            raise SpecError(f"source={self.source!r} is no length of a source; give a whole number of at least 1")


DEFAULT_SETTINGS = ActivationSettings()
# Norms before a sublayer and behind it, by where a block has them.
NORM_PLACEMENTS = {"pre": (1, 0), "parallel": (0, 0), "abreast": (1, 0), "post": (0, 1), "after": (0, 1), "sandwich": (1, 1)}


def block_activation_memory(block: BlockSpec, model: int, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS) -> CostBreakdown:
    """What one block of this width keeps.

    A GPT block under a fused kernel, 16 b s h elements and a few numbers of each token (2205.05198 has 34 b s h
    bytes, with two masks of one byte):

    >>> import headwise as hw
    >>> from headwise.blueprint import Dense
    >>> block = BlockSpec(hw.design(model=64, heads=4, bias="qkvo"), feed=Dense(256, bias="ud"))
    >>> told = block_activation_memory(block, 64, hw.Workload(2, 10, "fp32"), ActivationSettings("sdpa"))
    >>> told.total == 4 * 16 * 2 * 10 * 64 + 4 * 2 * 4 * 10 + 4 * 2 * 10 * 4
    True
    """
    if settings.profile in textbook.FORMULA_PROFILES:
        _check_no_dropout(settings)
        return CostBreakdown.from_items(textbook.formula_block_bytes(block, model, workload, (settings.profile, settings.checkpoint)))
    return CostBreakdown.from_items(_merge_items(_block_items(block, SymbolicInt.of(model, "model"), workload, settings)))


def activation_memory(spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS) -> CostBreakdown:
    """What a layer keeps, or a whole model under the cross-entropy of its first head; equal blocks are one term.

    With checkpoint="block" every block keeps its input alone, and `peak` says what the way back adds.

    GPT-3 as the paper counts it, 96 (34 b s h + 5 b s^2 a) bytes:

    >>> import headwise as hw
    >>> gpt3 = {"model_type": "gpt2", "n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}
    >>> activation_memory(hw.families.read(gpt3), hw.Workload(1, 2048), ActivationSettings("paper-2022")).total
    275414777856
    """
    if isinstance(spec_or_model, AttentionSpec):
        if settings.dropout:
            raise SpecError(f"dropout={settings.dropout} stands behind the branches of a block, and a layer alone has none")
        source = settings.source if spec_or_model.source else None
        return layer_activation_memory(spec_or_model, workload, settings.profile, source=source, checkpoint=settings.checkpoint)
    if settings.profile in textbook.FORMULA_PROFILES:
        return _formula_model_bytes(spec_or_model, workload, settings)
    return CostBreakdown.from_items(_merge_items(_model_items(spec_or_model, workload, settings)))


def peak_activation_memory(spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS) -> int:
    """Bytes kept at the fullest moment of the way back: with checkpoints, the dearest block has all of its own again.

    >>> import headwise as hw
    >>> spec, load = hw.design(model=64, heads=4), hw.Workload(1, 100)
    >>> peak_activation_memory(spec, load, ActivationSettings("dense", "block")) == activation_memory(spec, load, ActivationSettings("dense")).total
    True
    """
    total, full, part, model = activation_memory(spec_or_model, workload, settings).total, replace(settings, checkpoint="none"), settings, spec_or_model
    if settings.checkpoint == "none":
        return total
    if isinstance(model, AttentionSpec):
        return activation_memory(model, workload, full).total
    rows = [(s, stack_workload(model, s, workload, settings), b) for s in model.stacks for b in dict.fromkeys(s.layers)]
    each = [block_activation_memory(b, s.model, of, full).total - block_activation_memory(b, s.model, of, part).total for s, of, b in rows]
    return total + max(each, default=0)


def _check_no_dropout(way: ActivationSettings) -> None:
    if way.dropout:
        raise SpecError(f"profile {way.profile} has dropout everywhere already; leave dropout={way.dropout} out")


def _formula_model_bytes(model: ModelSpec, load: Workload, way: ActivationSettings) -> CostBreakdown:
    _check_no_dropout(way)
    (stack, *more) = model.stacks
    if more or stack.embedding is None or stack.embedding.patches:
        raise SpecError(f"profile {way.profile} is of one stack of GPT blocks over tokens; use profile='sdpa'")
    return CostBreakdown.from_items(_merge_items(_stack_items(stack, load, way)))


def _block_items(described: BlockSpec, model: int, load: Workload, way: ActivationSettings) -> NamedBytes:
    """In the order of the way forth; what enters is the input of whoever keeps it first."""
    at = ActivationContext.from_workload(load, load.context, way.profile or _norm_context(described, load), way.dropout)
    if way.checkpoint == "block":
        yield "input of the block", at.element_bytes * at.num_tokens * model
        return
    before, after = NORM_PLACEMENTS[described.placement]
    if described.placement == "parallel" and described.norm_names:
        yield from _norm_items("norm", described, model, at)
    branches = [name for name in described.sublayer_names if name not in described.still]
    for name in described.still:
        if f"{name}_norm" in described.norm_names:
            yield from _norm_items(f"{name}_norm", described, model, at)
    for name in branches:
        if before:
            held = list(_norm_items(f"{name}_norm", described, model, at))
            yield from held[1:] if described.placement == "abreast" and name != branches[0] else held
        alone = described.placement != "parallel" or name == branches[0]
        yield from _branch_items(name, described, model, (load, way, at), alone)
        if at.has_dropout:
            yield f"{name}.dropout mask", at.dropout_mask_bytes(at.num_tokens, model)
        if after:
            yield from _norm_items(f"{name}_norm" + "_after" * before, described, model, at)


def _norm_context(described: BlockSpec, load: Workload) -> str:
    """How norms and masks are kept: as on the device of its attentions."""
    return next((default_profile(spec, load) for spec in described.attention_specs.values()), "sdpa")


def _norm_items(name: str, described: BlockSpec, model: int, at: ActivationContext) -> NamedBytes:
    return ((f"{name}.{item}", size) for item, size in around.norm_bytes(described.norm, model, at.num_tokens, at))


def _branch_items(name: str, described: BlockSpec, model: int, how: tuple[Workload, ActivationSettings, ActivationContext], alone: bool) -> NamedBytes:
    """One branch; its input too, unless another has kept it. What a decoder reads is one for all its layers."""
    load, way, at = how
    if name == "feed":
        kept = _feed_forward_items(described, model, at)
    else:
        spec, source = described.attention_specs[name], None
        if name == "cross":
            spec, source = replace(spec, source=spec.source or spec.model), way.source
        kept = layer_activation_terms(spec, load, (way.profile or default_profile(spec, load), way.checkpoint), source).items()
    shared = {"source"} if alone else {"source", "input"}
    yield from ((f"{name}.{item}", size) for item, size in kept if item not in shared)


def _feed_forward_items(described: BlockSpec, model: int, at: ActivationContext) -> NamedBytes:
    if isinstance(described.feed, ExpertsSpec):
        yield from around.experts_bytes(described.feed, model, at)
    elif described.feed:
        yield "input", at.element_bytes * at.num_tokens * model
        yield from around.feed_forward_bytes(described.feed, at.num_tokens, at)


def stack_workload(model: ModelSpec, stack: StackSpec, workload: Workload, settings: ActivationSettings) -> Workload:
    """The load of one stack: an image has as many tokens as patches, an encoder as many as its source."""
    if stack.embedding and stack.embedding.patches:
        return replace(workload, context=stack.embedding.patches.num_patches + stack.embedding.first)
    if len(model.stacks) > 1 and stack is model.stacks[0]:
        return replace(workload, context=settings.source or workload.context)
    return workload


def _stack_items(stack: StackSpec, load: Workload, way: ActivationSettings) -> NamedBytes:
    """Every block, equal ones at once."""
    for block, times in Counter(stack.layers).items():
        if way.profile in textbook.FORMULA_PROFILES:
            items = textbook.formula_block_bytes(block, stack.model, load, (way.profile, way.checkpoint))
        else:
            items = _block_items(block, SymbolicInt.of(stack.model, "model"), load, way)
        yield from ((f"{stack.name}.*.{name}", SymbolicInt.of(times, "layer") * size) for name, size in items if size)


def _model_items(model: ModelSpec, load: Workload, way: ActivationSettings) -> NamedBytes:
    for stack in model.stacks:
        told, width = stack_workload(model, stack, load, way), SymbolicInt.of(stack.model, "model")
        profile = way.profile or next((default_profile(spec, told) for _, spec in model.attention_specs()), "sdpa")
        at = ActivationContext.from_workload(told, told.context, profile, way.dropout)
        if stack.embedding:
            yield from _with_prefix(f"{stack.name}.embedding", around.embedding_bytes(stack.embedding, width, at))
        yield from _stack_items(stack, told, way)
        if stack.norm:
            yield from _with_prefix(f"{stack.name}.norm", around.norm_bytes(stack.norm, width, at.num_tokens, at))
        if stack is not model.stacks[-1] and any(block.cross for block in model.stacks[-1].layers):
            yield f"{stack.name}.read by every layer", at.element_bytes * at.rows * SymbolicInt.of(told.context, "t") * width
    for described in model.heads[:1]:
        yield from _with_prefix(f"head.{described.name}", around.head_bytes(described, width, at))


def _with_prefix(where: str, items: NamedBytes) -> NamedBytes:
    return ((f"{where}.{name}", size) for name, size in items)


def _merge_items(items: NamedBytes) -> NamedBytes:
    """Items of one name at once."""
    found: dict[str, int] = {}
    for name, size in items:
        found[name] = found[name] + size if name in found else size
    yield from found.items()


def attention_profiles(spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS) -> str:
    """The profile, or the profiles, that its attentions run under.

    >>> import headwise as hw
    >>> attention_profiles(hw.design(preset="dcmha"), hw.Workload())
    'composed'
    """
    if settings.profile:
        return settings.profile
    specs = [spec_or_model] if isinstance(spec_or_model, AttentionSpec) else [spec for _, spec in spec_or_model.attention_specs()]
    return " and ".join(dict.fromkeys(default_profile(spec, workload) for spec in specs)) or "no attention"
