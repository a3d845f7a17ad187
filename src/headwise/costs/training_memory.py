"""Bytes that a block, or a whole model, keeps for the way back, put together from what its pieces keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import SpecError, suggest
from ..interfaces import Modifier, ValueStep
from ..interfaces.core_types import CallSize, Phase
from ..model_spec import BlockSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, StackSpec
from ..spec.attention_spec import AttentionSpec
from . import activations, flops
from .activations import (
    CHECKPOINT_MODES,
    ActivationContext,
    NamedBytes,
    default_profile,
    layer_activation_memory,
    layer_activation_terms,
)
from .flops import CostBreakdown, CostTerm
from .symbolic_int import SymbolicInt

if TYPE_CHECKING:
    from .cost_report import Workload


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
NORM_PLACEMENTS = {
    "pre": (1, 0),
    "parallel": (0, 0),
    "abreast": (1, 0),
    "post": (0, 1),
    "after": (0, 1),
    "sandwich": (1, 1),
}


def block_activation_memory(
    block: BlockSpec, model: int, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS
) -> CostBreakdown:
    """What one block of this width keeps.

    A GPT block under a fused kernel, 16 b s h elements and a few numbers of each token (2205.05198 has 34 b s h
    bytes, with two masks of one byte):

    >>> import headwise as hw
    >>> from headwise.model_spec import FeedForwardSpec
    >>> block = BlockSpec(hw.design(model=64, heads=4, bias="qkvo"), feed=FeedForwardSpec(256, bias="ud"))
    >>> told = block_activation_memory(block, 64, hw.Workload(2, 10, "fp32"), ActivationSettings("sdpa"))
    >>> told.total == 4 * 16 * 2 * 10 * 64 + 4 * 2 * 4 * 10 + 4 * 2 * 10 * 4
    True
    """
    if settings.profile in activations.FORMULA_PROFILES:
        _check_no_dropout(settings)
        return CostBreakdown.from_items(
            activations.formula_block_bytes(block, model, workload, (settings.profile, settings.checkpoint))
        )
    return CostBreakdown.from_items(
        _merge_items(_block_items(block, SymbolicInt.of(model, "model"), workload, settings))
    )


def activation_memory(
    spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS
) -> CostBreakdown:
    """What a layer keeps, or a whole model under the cross-entropy of its first head; equal blocks are one term.

    With checkpoint="block" every block keeps its input alone, and `peak` says what the way back adds.

    GPT-3 as the paper counts it, 96 (34 b s h + 5 b s^2 a) bytes:

    >>> import headwise as hw
    >>> gpt3 = {"model_type": "gpt2", "n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}
    >>> activation_memory(
    ...     hw.families.read_model_spec(gpt3), hw.Workload(1, 2048), ActivationSettings("paper-2022")
    ... ).total
    275414777856
    """
    if isinstance(spec_or_model, AttentionSpec):
        if settings.dropout:
            raise SpecError(
                f"dropout={settings.dropout} stands behind the branches of a block, and a layer alone has none"
            )
        source = settings.source if spec_or_model.source else None
        return layer_activation_memory(
            spec_or_model, workload, settings.profile, source=source, checkpoint=settings.checkpoint
        )
    if settings.profile in activations.FORMULA_PROFILES:
        return _formula_model_bytes(spec_or_model, workload, settings)
    return CostBreakdown.from_items(_merge_items(_model_items(spec_or_model, workload, settings)))


def peak_activation_memory(
    spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS
) -> int:
    """Bytes kept at the fullest moment of the way back: with checkpoints, the dearest block has all of its own again.

    >>> import headwise as hw
    >>> spec, load = hw.design(model=64, heads=4), hw.Workload(1, 100)
    >>> peak_activation_memory(spec, load, ActivationSettings("dense", "block")) == activation_memory(
    ...     spec, load, ActivationSettings("dense")
    ... ).total
    True
    """
    total, full, part, model = (
        activation_memory(spec_or_model, workload, settings).total,
        replace(settings, checkpoint="none"),
        settings,
        spec_or_model,
    )
    if settings.checkpoint == "none":
        return total
    if isinstance(model, AttentionSpec):
        return activation_memory(model, workload, full).total
    rows = [(s, stack_workload(model, s, workload, settings), b) for s in model.stacks for b in dict.fromkeys(s.layers)]
    each = [
        block_activation_memory(b, s.model, of, full).total - block_activation_memory(b, s.model, of, part).total
        for s, of, b in rows
    ]
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
    return ((f"{name}.{item}", size) for item, size in activations.norm_bytes(described.norm, model, at.num_tokens, at))


def _branch_items(
    name: str,
    described: BlockSpec,
    model: int,
    how: tuple[Workload, ActivationSettings, ActivationContext],
    alone: bool,
) -> NamedBytes:
    """One branch; its input too, unless another has kept it. What a decoder reads is one for all its layers."""
    load, way, at = how
    if name == "feed":
        kept = _feed_forward_items(described, model, at)
    else:
        spec, source = described.attention_specs[name], None
        if name == "cross":
            spec, source = replace(spec, source=spec.source or spec.model), way.source
        kept = layer_activation_terms(
            spec, load, (way.profile or default_profile(spec, load), way.checkpoint), source
        ).items()
    shared = {"source"} if alone else {"source", "input"}
    yield from ((f"{name}.{item}", size) for item, size in kept if item not in shared)


def _feed_forward_items(described: BlockSpec, model: int, at: ActivationContext) -> NamedBytes:
    if isinstance(described.feed, ExpertsSpec):
        yield from activations.experts_bytes(described.feed, model, at)
    elif described.feed:
        yield "input", at.element_bytes * at.num_tokens * model
        yield from activations.feed_forward_bytes(described.feed, at.num_tokens, at)


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
        if way.profile in activations.FORMULA_PROFILES:
            items = activations.formula_block_bytes(block, stack.model, load, (way.profile, way.checkpoint))
        else:
            items = _block_items(block, SymbolicInt.of(stack.model, "model"), load, way)
        yield from ((f"{stack.name}.*.{name}", SymbolicInt.of(times, "layer") * size) for name, size in items if size)


def _model_items(model: ModelSpec, load: Workload, way: ActivationSettings) -> NamedBytes:
    for stack in model.stacks:
        told, width = stack_workload(model, stack, load, way), SymbolicInt.of(stack.model, "model")
        profile = way.profile or next((default_profile(spec, told) for _, spec in model.attention_specs()), "sdpa")
        at = ActivationContext.from_workload(told, told.context, profile, way.dropout)
        if stack.embedding:
            yield from _with_prefix(f"{stack.name}.embedding", activations.embedding_bytes(stack.embedding, width, at))
        yield from _stack_items(stack, told, way)
        if stack.norm:
            yield from _with_prefix(f"{stack.name}.norm", activations.norm_bytes(stack.norm, width, at.num_tokens, at))
        if stack is not model.stacks[-1] and any(block.cross for block in model.stacks[-1].layers):
            yield (
                f"{stack.name}.read by every layer",
                at.element_bytes * at.rows * SymbolicInt.of(told.context, "t") * width,
            )
    for described in model.heads[:1]:
        yield from _with_prefix(f"head.{described.name}", activations.head_bytes(described, width, at))


def _with_prefix(where: str, items: NamedBytes) -> NamedBytes:
    return ((f"{where}.{name}", size) for name, size in items)


def _merge_items(items: NamedBytes) -> NamedBytes:
    """Items of one name at once."""
    found: dict[str, int] = {}
    for name, size in items:
        found[name] = found[name] + size if name in found else size
    yield from found.items()


def attention_profiles(
    spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS
) -> str:
    """The profile, or the profiles, that its attentions run under.

    >>> import headwise as hw
    >>> attention_profiles(hw.design(preset="dcmha"), hw.Workload())
    'chunked'
    """
    if settings.profile:
        return settings.profile
    specs = (
        [spec_or_model]
        if isinstance(spec_or_model, AttentionSpec)
        else [spec for _, spec in spec_or_model.attention_specs()]
    )
    return " and ".join(dict.fromkeys(default_profile(spec, workload) for spec in specs)) or "no attention"


# --- FLOPs that checkpoints cost -----------------------------------------------------------------------

CORE_PHASES = (Phase.SCORES, Phase.WEIGHTS, Phase.VALUES)
SCORE_TERM, VALUE_TERM = "core (scores)", "core (values)"


def layer_recompute_flops(spec: AttentionSpec, work: CallSize, checkpoint: str) -> CostBreakdown:
    """FLOPs of one layer that are done again on the way back: "block" all but the last product, "core" the scores.

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.CallSize(1, 5, 5, 5)
    >>> [term.name for term in layer_recompute_flops(spec, work, "block").terms]
    ['project.q', 'project.k', 'project.v', 'core (scores)', 'core (values)']
    >>> layer_recompute_flops(spec, work, "core").total  # 2 s t d
    400
    """
    _check_checkpoint_mode(checkpoint)
    if checkpoint == "none":
        return CostBreakdown(())
    forth = flops.forward_flops(spec, work).terms
    if checkpoint == "core":
        if steps := [name for name, _ in spec.parts_of(ValueStep)]:
            raise SpecError(f"{steps[0]} reads behind the values, half of it last; use checkpoint='block' or 'none'")
        return CostBreakdown(tuple(term for term in forth if _is_recomputed_in_core(spec, term)))
    return CostBreakdown(tuple(term for term in forth if not term.name.startswith("output.")))


def recompute_flops(
    spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings = DEFAULT_SETTINGS
) -> CostBreakdown:
    """FLOPs of a layer or a whole model that are done again, every pair of tokens, as torch counts them.

    Embeddings, the last norm and heads never are.

    >>> import headwise as hw
    >>> gpt = hw.families.read_model_spec({"model_type": "gpt2", "n_layer": 3})
    >>> block = 24 * 2 * 10 * 768**2 + 4 * 2 * 10**2 * 768  # 24 b s h^2 + 4 b s^2 h
    >>> recompute_flops(gpt, hw.Workload(2, 10), ActivationSettings(checkpoint="block")).total == 3 * (
    ...     block - 8 * 2 * 10 * 768**2
    ... )
    True
    """
    if isinstance(spec_or_model, AttentionSpec):
        return layer_recompute_flops(
            spec_or_model,
            _full_work(workload, (spec_or_model.source and settings.source) or workload.context),
            settings.checkpoint,
        )
    found: dict[str, tuple[str, int]] = {}
    for stack in spec_or_model.stacks:
        told = stack_workload(spec_or_model, stack, workload, settings)
        for block, times in Counter(stack.layers).items():
            for name, formula, count in _block_recompute_items(block, stack.model, told, settings):
                where, (text, value) = f"{stack.name}.*.{name}", found.get(f"{stack.name}.*.{name}", ("", 0))
                found[where] = " + ".join(filter(None, [text, f"{times} ({formula})"])), value + times * count
    return CostBreakdown(tuple(CostTerm(name, *told) for name, told in found.items()))


def fused_backward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """FLOPs behind gradients when a fused kernel reads the values: it forms the scores once more, 5 products on 4.

    2 b q s t (3 dim + 2 vdim) of the core (flash attention, 2205.14135), where plain operations have 4 (dim + vdim):

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.CallSize(1, 5, 5, 5)
    >>> fused_backward_flops(spec, work).total - flops.backward_flops(spec, work).total == 2 * 2 * 5 * 5 * 4
    True
    """
    times = {SCORE_TERM: 3, VALUE_TERM: 2}
    rest = [term for term in flops.backward_flops(spec, work).terms if term.name not in times]
    core = [term for term in flops.forward_flops(spec, work).terms if term.name in times]
    return CostBreakdown(
        (*rest, *(CostTerm(t.name, f"{times[t.name]} ({t.formula})", times[t.name] * t.value) for t in core))
    )


def _check_checkpoint_mode(checkpoint: str) -> None:
    if checkpoint not in CHECKPOINT_MODES:
        raise SpecError(f"checkpoint={checkpoint!r} is unknown; {suggest(checkpoint, CHECKPOINT_MODES)}")


def _is_recomputed_in_core(spec: AttentionSpec, term: CostTerm) -> bool:
    """Whether a product is made between queries, keys and values and what is read of them, and is not the last.

    Of a similarity, products with constants are features, made of queries and keys before they meet.
    """
    if term.name == SCORE_TERM:
        return True
    if term.name == "similarity (with constants)":
        return False
    inside = {name for name, step in spec.parts_of(Modifier) if step.phase in CORE_PHASES} | {
        "similarity",
        "normaliser",
    }
    owner, _, param = term.name.replace(" ", ".").partition(".")
    met = spec.params().get(f"{owner}.{param}")
    return owner in inside and (met is None or met.applied == "query")


def _block_recompute_items(
    described: BlockSpec, model: int, load: Workload, way: ActivationSettings
) -> Iterator[CostTerm]:
    """What one block does again, each branch under its name."""
    branches = [*described.attention_specs, *(["feed"] if described.feed else [])]
    for name in branches if way.checkpoint != "none" else ():
        whole = name != branches[-1] or bool(way.dropout) or described.placement in ("post", "after", "sandwich")
        for term in _branch_recompute_items(name, described, model, (load, way), whole):
            yield term._replace(name=f"{name}.{term.name}")


def _branch_recompute_items(
    name: str, described: BlockSpec, model: int, how: tuple[Workload, ActivationSettings], whole: bool
) -> Iterable[CostTerm]:
    """All products of a branch, or all but the last one."""
    load, way = how
    if name == "feed":
        if way.checkpoint == "core" or described.feed is None:
            return ()
        products = list(feed_forward_products(described.feed, model, load.batch * load.context))
        last = isinstance(described.feed, FeedForwardSpec) or described.feed.shared
        return products if whole or not last else products[:-1]
    spec = described.attention_specs[name]
    work = _full_work(load, (way.source if name == "cross" else None) or load.context)
    if way.checkpoint == "block" and whole:
        return flops.forward_flops(spec, work).terms
    return layer_recompute_flops(spec, work, way.checkpoint).terms


def _full_work(load: Workload, keys: int) -> CallSize:
    return CallSize(load.batch, load.context, keys, keys)


def feed_forward_products(feed: FeedForwardSpec | ExpertsSpec, model: int, count: int) -> Iterator[CostTerm]:
    """FLOPs of a feed-forward on so many tokens, product by product, the last one last.

    >>> [term.value for term in feed_forward_products(FeedForwardSpec(32), 8, 10)]  # 2 tokens d f each
    [5120, 5120]
    """
    if isinstance(feed, ExpertsSpec):
        yield CostTerm("router", f"2 {count} {feed.count} {model}", 2 * count * feed.count * model)
        yield from (
            t._replace(name=f"each.{t.name}") for t in feed_forward_products(feed.each, model, count * feed.active)
        )
        if feed.shared:
            yield from (t._replace(name=f"shared.{t.name}") for t in feed_forward_products(feed.shared, model, count))
        return
    for name in sorted(feed.matrix_layouts, key="down".__eq__):
        yield CostTerm(name, f"2 {count} {feed.hidden} {model}", 2 * count * feed.hidden * model)


# --- Bytes that training keeps of every learned number, by the name of who counts so -------------------

ADAM_MOMENT_BYTES = {"first moments": 4, "second moments": 4}


@dataclass(frozen=True)
class OptimiserMemory:
    """What is kept besides activations: bytes of each number by what they hold, and who says so."""

    name: str
    description: str
    bytes_by_tensor: Mapping[str, int]

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of a learned number in all."""
        return sum(self.bytes_by_tensor.values())

    @staticmethod
    def from_name(name: str) -> OptimiserMemory:
        """The convention of this name.

        >>> [
        ...     OptimiserMemory.from_name(name).bytes_per_parameter
        ...     for name in ("zero", "megatron", "zhihu-624740065", "adam-fp32", "muon")
        ... ]
        [16, 18, 20, 16, 12]
        """
        if name not in OPTIMISERS:
            raise SpecError(f"there is no optimiser {name!r}; {suggest(name, OPTIMISERS)}")
        return OPTIMISERS[name]


_OPTIMISER_CONVENTIONS = (
    OptimiserMemory(
        "zero",
        "Adam in 16 bits, gradients too (1910.02054)",
        {"weights": 2, "gradients": 2, "master weights": 4} | ADAM_MOMENT_BYTES,
    ),
    OptimiserMemory(
        "megatron",
        "Adam in 16 bits, gradients in 32",
        {"weights": 2, "gradients": 4, "master weights": 4} | ADAM_MOMENT_BYTES,
    ),
    OptimiserMemory(
        "zhihu-624740065",
        "Adam in 16 bits, gradients in 16 and in 32",
        {"weights": 2, "gradients": 2, "master weights": 4, "gradients again": 4} | ADAM_MOMENT_BYTES,
    ),
    OptimiserMemory("adam-fp32", "Adam in 32 bits (1412.6980)", {"weights": 4, "gradients": 4} | ADAM_MOMENT_BYTES),
    OptimiserMemory("sgd-momentum", "SGD with momentum, in 32 bits", {"weights": 4, "gradients": 4, "momentum": 4}),
    OptimiserMemory("muon", "Muon in 32 bits, as if all were matrices", {"weights": 4, "gradients": 4, "momentum": 4}),
)
OPTIMISERS: dict[str, OptimiserMemory] = {one.name: one for one in _OPTIMISER_CONVENTIONS}
