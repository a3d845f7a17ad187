"""Memory of training: activations of blocks and models, FLOPs that checkpointing recomputes, and
optimiser state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import SpecError, suggest
from ..interfaces import Modifier, ValueStep
from ..interfaces.core_types import CallSize, Phase
from ..model_spec import (
    BlockSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    SequenceMixerSpec,
    StackSpec,
)
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
    """How a model is trained: profile of the attention layers, activation checkpointing, and
    dropout.

    `profile` is one of those of `layer_activation_memory`; the default is that of each layer on the
    workload's device. `checkpoint` is what the backward pass recomputes: "none", every "block", or
    the attention "core". `source` is the number of tokens of the encoder, if it differs from that
    of the decoder.
    """

    profile: str = ""
    checkpoint: str = "none"
    dropout: float = 0.0
    source: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise SpecError(f"dropout must be at least 0 and less than 1, got {self.dropout!r}")
        if self.source is not None and (type(self.source) is not int or self.source < 1):
            raise SpecError(f"source must be a whole number of at least 1, got {self.source!r}")


DEFAULT_SETTINGS = ActivationSettings()
# Number of norms before and after each sublayer, by placement.
NORM_PLACEMENTS = {
    "pre": (1, 0),
    "parallel": (0, 0),
    "abreast": (1, 0),
    "post": (0, 1),
    "after": (0, 1),
    "sandwich": (1, 1),
}


def block_activation_memory(
    block: BlockSpec,
    model: int,
    workload: Workload,
    settings: ActivationSettings = DEFAULT_SETTINGS,
) -> CostBreakdown:
    """Bytes that one block of width `model` saves for the backward pass.

    A GPT block with fused attention saves 16 b s h elements, and the statistics of softmax and
    norms (2205.05198 has 34 b s h bytes, with two masks of one byte):

    >>> import headwise as hw
    >>> from headwise.model_spec import FeedForwardSpec
    >>> block = BlockSpec(
    ...     hw.design(model=64, heads=4, bias="qkvo"), feed=FeedForwardSpec(256, bias="ud")
    ... )
    >>> memory = block_activation_memory(
    ...     block, 64, hw.Workload(2, 10, "fp32"), ActivationSettings("sdpa")
    ... )
    >>> memory.total == 4 * 16 * 2 * 10 * 64 + 4 * 2 * 4 * 10 + 4 * 2 * 10 * 4
    True
    """
    if settings.profile in activations.FORMULA_PROFILES:
        _check_no_dropout(settings)
        return CostBreakdown.from_items(
            activations.formula_block_bytes(
                block, model, workload, (settings.profile, settings.checkpoint)
            )
        )
    return CostBreakdown.from_items(
        _merge_items(_block_items(block, SymbolicInt.of(model, "model"), workload, settings))
    )


def activation_memory(
    spec_or_model: AttentionSpec | ModelSpec,
    workload: Workload,
    settings: ActivationSettings = DEFAULT_SETTINGS,
) -> CostBreakdown:
    """Bytes that a layer, or a model with the cross-entropy loss of its first head, saves for the
    backward pass.

    Equal blocks are one term. With checkpoint="block" every block saves only its input;
    `peak_activation_memory` adds what the backward pass recomputes.

    GPT-3 as the paper counts it, 96 (34 b s h + 5 b s^2 a) bytes:

    >>> import headwise as hw
    >>> config = {
    ...     "model_type": "gpt2",
    ...     "n_layer": 96,
    ...     "n_embd": 12288,
    ...     "n_head": 96,
    ...     "n_positions": 2048,
    ... }
    >>> gpt3 = hw.families.read_model_spec(config)
    >>> activation_memory(gpt3, hw.Workload(1, 2048), ActivationSettings("paper-2022")).total
    275414777856
    """
    if isinstance(spec_or_model, AttentionSpec):
        if settings.dropout:
            fact = f"dropout={settings.dropout} applies to the branches of a block"
            raise SpecError(f"{fact}, and a layer alone has none; leave dropout out")
        source = settings.source if spec_or_model.source else None
        return layer_activation_memory(
            spec_or_model, workload, settings.profile, source=source, checkpoint=settings.checkpoint
        )
    if settings.profile in activations.FORMULA_PROFILES:
        return _formula_model_bytes(spec_or_model, workload, settings)
    return CostBreakdown.from_items(_merge_items(_model_items(spec_or_model, workload, settings)))


def peak_activation_memory(
    spec_or_model: AttentionSpec | ModelSpec,
    workload: Workload,
    settings: ActivationSettings = DEFAULT_SETTINGS,
) -> int:
    """Greatest number of bytes saved at one time; with checkpoints, the largest block is recomputed
    completely.

    >>> import headwise as hw
    >>> spec, workload = hw.design(model=64, heads=4), hw.Workload(1, 100)
    >>> without_checkpoints = activation_memory(spec, workload, ActivationSettings("dense")).total
    >>> peak_activation_memory(
    ...     spec, workload, ActivationSettings("dense", "block")
    ... ) == without_checkpoints
    True
    """
    total = activation_memory(spec_or_model, workload, settings).total
    if settings.checkpoint == "none":
        return total
    uncheckpointed = replace(settings, checkpoint="none")
    if isinstance(spec_or_model, AttentionSpec):
        return activation_memory(spec_or_model, workload, uncheckpointed).total
    recomputed: list[int] = []
    for stack in spec_or_model.stacks:
        local_workload = stack_workload(spec_or_model, stack, workload, settings)
        for block in dict.fromkeys(stack.layers):
            saved = block_activation_memory(block, stack.model, local_workload, settings).total
            recomputed.append(
                block_activation_memory(block, stack.model, local_workload, uncheckpointed).total
                - saved
            )
    return total + max(recomputed, default=0)


def _check_no_dropout(settings: ActivationSettings) -> None:
    if settings.dropout:
        fact = f"profile {settings.profile} includes dropout in every branch"
        raise SpecError(f"{fact}; leave dropout={settings.dropout} out")


def _formula_model_bytes(
    model: ModelSpec, workload: Workload, settings: ActivationSettings
) -> CostBreakdown:
    _check_no_dropout(settings)
    (stack, *others) = model.stacks
    if others or stack.embedding is None or stack.embedding.patches:
        fact = f"profile {settings.profile} supports only one stack of GPT blocks over tokens"
        raise SpecError(f"{fact}; use profile='sdpa'")
    return CostBreakdown.from_items(_merge_items(_stack_items(stack, workload, settings)))


def _block_items(
    block: BlockSpec, model: int, workload: Workload, settings: ActivationSettings
) -> NamedBytes:
    """Yield what a block saves, in the order of the forward pass; a shared input counts where it is
    saved first.
    """
    profile = settings.profile or _profile_of_block(block, workload)
    context = ActivationContext.from_workload(workload, workload.context, profile, settings.dropout)
    if settings.checkpoint == "block":
        yield "input of the block", context.element_bytes * context.num_tokens * model
        return
    norms_before, norms_after = NORM_PLACEMENTS[block.placement]
    if block.placement == "parallel" and block.norm_names:
        yield from _norm_items("norm", block, model, context)
    branches = [name for name in block.sublayer_names if name not in block.constant_sublayers]
    for name in block.constant_sublayers:
        if f"{name}_norm" in block.norm_names:
            yield from _norm_items(f"{name}_norm", block, model, context)
    for name in branches:
        is_first = name == branches[0]
        if norms_before:
            norm_items = list(_norm_items(f"{name}_norm", block, model, context))
            # Branches side by side have norms of their own over one input, which the first one
            # saves.
            yield from (
                norm_items[1:] if block.placement == "abreast" and not is_first else norm_items
            )
        saves_input = block.placement != "parallel" or is_first
        yield from _branch_items(name, block, model, (workload, settings, context), saves_input)
        if context.has_dropout:
            yield f"{name}.dropout mask", context.dropout_mask_bytes(context.num_tokens, model)
        if norms_after:
            yield from _norm_items(f"{name}_norm" + "_after" * norms_before, block, model, context)


def _profile_of_block(block: BlockSpec, workload: Workload) -> str:
    """Profile of the first attention layer, which decides how norms and dropout masks are saved."""
    return next(
        (default_profile(spec, workload) for spec in block.attention_specs.values()), "sdpa"
    )


def _norm_items(name: str, block: BlockSpec, model: int, context: ActivationContext) -> NamedBytes:
    for item, size in activations.norm_bytes(block.norm, model, context.num_tokens, context):
        yield f"{name}.{item}", size


def _branch_items(
    name: str,
    block: BlockSpec,
    model: int,
    how: tuple[Workload, ActivationSettings, ActivationContext],
    saves_input: bool,
) -> NamedBytes:
    """Yield what one branch saves, with its input if `saves_input`.

    The source of cross-attention is left out, because all layers of a decoder share it.
    """
    workload, settings, context = how
    if name == "mixer" and block.mixer is not None:
        items = activations.mixer_bytes(block.mixer, model, context)
    elif name == "feed":
        items = _feed_forward_items(block, model, context)
    else:
        spec, source = block.attention_specs[name], None
        if name == "cross":
            spec, source = replace(spec, source=spec.source or spec.model), settings.source
        profile = settings.profile or default_profile(spec, workload)
        items = layer_activation_terms(
            spec, workload, (profile, settings.checkpoint), source
        ).items()
    excluded = {"source"} if saves_input else {"source", "input"}
    yield from ((f"{name}.{item}", size) for item, size in items if item not in excluded)


def _feed_forward_items(block: BlockSpec, model: int, context: ActivationContext) -> NamedBytes:
    if isinstance(block.feed, ExpertsSpec):
        yield from activations.experts_bytes(block.feed, model, context)
    elif block.feed:
        yield "input", context.element_bytes * context.num_tokens * model
        yield from activations.feed_forward_bytes(block.feed, context.num_tokens, context)


def stack_workload(
    model: ModelSpec, stack: StackSpec, workload: Workload, settings: ActivationSettings
) -> Workload:
    """Return the workload of one stack, whose context is the number of patches of images, or the
    source's length.
    """
    if stack.embedding and stack.embedding.patches:
        return replace(
            workload, context=stack.embedding.patches.num_patches + stack.embedding.first
        )
    if len(model.stacks) > 1 and stack is model.stacks[0]:
        return replace(workload, context=settings.source or workload.context)
    return workload


def _stack_items(stack: StackSpec, workload: Workload, settings: ActivationSettings) -> NamedBytes:
    """Yield what the blocks of a stack save; equal blocks are merged."""
    for block, times in Counter(stack.layers).items():
        if settings.profile in activations.FORMULA_PROFILES:
            how = (settings.profile, settings.checkpoint)
            items = activations.formula_block_bytes(block, stack.model, workload, how)
        else:
            items = _block_items(block, SymbolicInt.of(stack.model, "model"), workload, settings)
        yield from (
            (f"{stack.name}.*.{name}", SymbolicInt.of(times, "layer") * size)
            for name, size in items
            if size
        )


def _model_items(model: ModelSpec, workload: Workload, settings: ActivationSettings) -> NamedBytes:
    for stack in model.stacks:
        stack_load = stack_workload(model, stack, workload, settings)
        width = SymbolicInt.of(stack.model, "model")
        profile = settings.profile or next(
            (default_profile(spec, stack_load) for _, spec in model.attention_specs()), "sdpa"
        )
        context = ActivationContext.from_workload(
            stack_load, stack_load.context, profile, settings.dropout
        )
        if stack.embedding:
            items = activations.embedding_bytes(stack.embedding, width, context)
            yield from _with_prefix(f"{stack.name}.embedding", items)
        yield from _stack_items(stack, stack_load, settings)
        if stack.norm:
            items = activations.norm_bytes(stack.norm, width, context.num_tokens, context)
            yield from _with_prefix(f"{stack.name}.norm", items)
        if stack is not model.stacks[-1] and any(
            block.cross or block.starts_from_source for block in model.stacks[-1].layers
        ):
            source_tokens = SymbolicInt.of(stack_load.context, "S")
            yield (
                f"{stack.name}.output",
                context.element_bytes * context.rows * source_tokens * width,
            )
    for head in model.heads[:1]:
        yield from _with_prefix(f"head.{head.name}", activations.head_bytes(head, width, context))


def _with_prefix(prefix: str, items: NamedBytes) -> NamedBytes:
    return ((f"{prefix}.{name}", size) for name, size in items)


def _merge_items(items: NamedBytes) -> NamedBytes:
    """Sum items with equal names."""
    totals: dict[str, int] = {}
    for name, size in items:
        totals[name] = totals[name] + size if name in totals else size
    yield from totals.items()


def attention_profiles(
    spec_or_model: AttentionSpec | ModelSpec,
    workload: Workload,
    settings: ActivationSettings = DEFAULT_SETTINGS,
) -> str:
    """Return the profiles of the attention layers, joined by "and".

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
    return (
        " and ".join(dict.fromkeys(default_profile(spec, workload) for spec in specs))
        or "no attention"
    )


# --- FLOPs that activation checkpointing recomputes -----------------------------------------------

CORE_PHASES = (Phase.SCORES, Phase.WEIGHTS, Phase.VALUES)
SCORE_TERM, VALUE_TERM = "core (scores)", "core (values)"


def layer_recompute_flops(spec: AttentionSpec, work: CallSize, checkpoint: str) -> CostBreakdown:
    """FLOPs of one layer that the backward pass recomputes: with "block" all but the last product,
    with "core" scores.

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.CallSize(1, 5, 5, 5)
    >>> [term.name for term in layer_recompute_flops(spec, work, "block").terms]
    ['project.q', 'project.k', 'project.v', 'core (scores)', 'core (values)']
    >>> layer_recompute_flops(spec, work, "core").total  # 2 T S model
    400
    """
    _check_checkpoint_mode(checkpoint)
    if checkpoint == "none":
        return CostBreakdown(())
    terms = flops.forward_flops(spec, work).terms
    if checkpoint == "core":
        if steps := [name for name, _ in spec.parts_of(ValueStep)]:
            fact = (
                f"checkpoint='core' does not support {steps[0]}, which runs after the values "
                "are read"
            )
            raise SpecError(f"{fact}; use checkpoint='block' or 'none'")
        return CostBreakdown(tuple(term for term in terms if _is_recomputed_in_core(spec, term)))
    return CostBreakdown(tuple(term for term in terms if not term.name.startswith("output.")))


def recompute_flops(
    spec_or_model: AttentionSpec | ModelSpec,
    workload: Workload,
    settings: ActivationSettings = DEFAULT_SETTINGS,
) -> CostBreakdown:
    """FLOPs of a layer or model that the backward pass recomputes, over all query-key pairs, as
    torch counts them.

    Embeddings, the final norm and output heads are never recomputed.

    >>> import headwise as hw
    >>> gpt = hw.families.read_model_spec({"model_type": "gpt2", "n_layer": 3})
    >>> recomputed = recompute_flops(
    ...     gpt, hw.Workload(2, 10), ActivationSettings(checkpoint="block")
    ... ).total
    >>> block = 24 * 2 * 10 * 768**2 + 4 * 2 * 10**2 * 768  # 24 b s h^2 + 4 b s^2 h
    >>> recomputed == 3 * (block - 8 * 2 * 10 * 768**2)
    True
    """
    if isinstance(spec_or_model, AttentionSpec):
        keys = (spec_or_model.source and settings.source) or workload.context
        return layer_recompute_flops(spec_or_model, _full_work(workload, keys), settings.checkpoint)
    sums: dict[str, tuple[str, int]] = {}
    for stack in spec_or_model.stacks:
        local_workload = stack_workload(spec_or_model, stack, workload, settings)
        for block, times in Counter(stack.layers).items():
            for name, formula, value in _block_recompute_items(
                block, stack.model, local_workload, settings
            ):
                key, summand = f"{stack.name}.*.{name}", f"{times} ({formula})"
                text, total = sums.get(key, ("", 0))
                sums[key] = (f"{text} + {summand}" if text else summand, total + times * value)
    return CostBreakdown(tuple(CostTerm(name, text, total) for name, (text, total) in sums.items()))


def fused_backward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """FLOPs of the backward pass with a fused kernel, which recomputes the scores: 5 products
    instead of 4.

    The core has 2 B q T S (3 dim + 2 vdim) (flash attention, 2205.14135), with plain operations 4 B
    q T S (dim + vdim):

    >>> import headwise as hw
    >>> spec, work = hw.design(model=8, heads=2), hw.CallSize(1, 5, 5, 5)
    >>> fused_backward_flops(spec, work).total - flops.backward_flops(
    ...     spec, work
    ... ).total == 2 * 2 * 5 * 5 * 4
    True
    """
    multiples = {SCORE_TERM: 3, VALUE_TERM: 2}  # of the forward product
    terms = [term for term in flops.backward_flops(spec, work).terms if term.name not in multiples]
    for term in flops.forward_flops(spec, work).terms:
        if term.name in multiples:
            multiple = multiples[term.name]
            terms.append(CostTerm(term.name, f"{multiple} ({term.formula})", multiple * term.value))
    return CostBreakdown(tuple(terms))


def _check_checkpoint_mode(checkpoint: str) -> None:
    if checkpoint not in CHECKPOINT_MODES:
        raise SpecError(
            f"checkpoint={checkpoint!r} is unknown; {suggest(checkpoint, CHECKPOINT_MODES)}"
        )


def _is_recomputed_in_core(spec: AttentionSpec, term: CostTerm) -> bool:
    """Whether a product lies between q, k, v and the head outputs, and is not the last one
    ("weights @ values").

    Products of a similarity with constants do not count: they map queries and keys to features
    before the core.
    """
    if term.name == SCORE_TERM:
        return True
    if term.name == "similarity (with constants)":
        return False
    core_parts = {name for name, step in spec.parts_of(Modifier) if step.phase in CORE_PHASES}
    core_parts |= {"similarity", "normaliser"}
    owner, _, param_name = term.name.replace(" ", ".").partition(".")
    param = spec.params().get(f"{owner}.{param_name}")
    return owner in core_parts and (param is None or param.applied == "query")


def _block_recompute_items(
    block: BlockSpec, model: int, workload: Workload, settings: ActivationSettings
) -> Iterator[CostTerm]:
    """Yield the products that one block recomputes.

    The last product of the block is not recomputed, unless a later operation saves tensors:
    dropout, or a norm.
    """
    if settings.checkpoint == "none":
        return
    branches = [name for name in block.sublayer_names if name not in block.constant_sublayers]
    for name in branches:
        includes_last = (
            name != branches[-1]
            or bool(settings.dropout)
            or block.placement in ("post", "after", "sandwich")
        )
        for term in _branch_recompute_items(
            name, block, model, (workload, settings), includes_last
        ):
            yield term._replace(name=f"{name}.{term.name}")


def _branch_recompute_items(
    name: str,
    block: BlockSpec,
    model: int,
    how: tuple[Workload, ActivationSettings],
    includes_last: bool,
) -> Iterable[CostTerm]:
    """Return the recomputed products of a branch, with its last product if `includes_last`."""
    workload, settings = how
    if name == "mixer":
        if settings.checkpoint == "core" or block.mixer is None:
            return ()
        products = list(mixer_products(block.mixer, model, workload.batch, workload.context))
        return products if includes_last or not block.mixer.ends_with_product else products[:-1]
    if name == "feed":
        if settings.checkpoint == "core" or block.feed is None:
            return ()
        products = list(feed_forward_products(block.feed, model, workload.batch * workload.context))
        ends_with_product = isinstance(block.feed, FeedForwardSpec) or block.feed.shared
        return products if includes_last or not ends_with_product else products[:-1]
    spec = block.attention_specs[name]
    work = _full_work(workload, (settings.source if name == "cross" else None) or workload.context)
    if settings.checkpoint == "block" and includes_last:
        return flops.forward_flops(spec, work).terms
    return layer_recompute_flops(spec, work, settings.checkpoint).terms


def _full_work(workload: Workload, keys: int) -> CallSize:
    return CallSize(workload.batch, workload.context, keys, keys)


def feed_forward_products(
    feed: FeedForwardSpec | ExpertsSpec, model: int, count: int
) -> Iterator[CostTerm]:
    """Yield the FLOPs of a feed-forward on `count` tokens, product by product, in the order of
    execution.

    >>> [
    ...     term.value for term in feed_forward_products(FeedForwardSpec(32), 8, 10)
    ... ]  # 2 tokens d f each
    [5120, 5120]
    """
    if isinstance(feed, ExpertsSpec):
        yield CostTerm("router", f"2 {count} {feed.count} {model}", 2 * count * feed.count * model)
        for term in feed_forward_products(feed.each, model, count * feed.active):
            yield term._replace(name=f"each.{term.name}")
        if feed.shared:
            for term in feed_forward_products(feed.shared, model, count):
                yield term._replace(name=f"shared.{term.name}")
        return
    for name in sorted(feed.matrix_layouts, key="down".__eq__):
        yield CostTerm(name, f"2 {count} {feed.hidden} {model}", 2 * count * feed.hidden * model)


def mixer_products(
    mixer: SequenceMixerSpec, model: int, rows: int, context: int
) -> Iterator[CostTerm]:
    """Yield the FLOPs of a mixer on rows of `context` tokens; the first state is computed once a
    row.

    >>> from headwise.model_spec import RecurrentSpec
    >>> [
    ...     term.value for term in mixer_products(RecurrentSpec("source"), 8, 2, 5)
    ... ]  # 2 tokens 3 d d, 2 rows d d
    [3840, 3840, 256]
    """
    for weight in mixer.weights(model):
        if len(weight.shape) == 2:
            count = rows if weight.name == "start" else rows * context
            yield CostTerm(
                weight.name,
                f"2 {count} {weight.shape[0]} {weight.shape[1]}",
                2 * count * weight.numel,
            )


# --- Memory of the optimiser: bytes per parameter, by convention ----------------------------------

ADAM_MOMENT_BYTES = {"first moments": 4, "second moments": 4}


@dataclass(frozen=True)
class OptimiserMemory:
    """Training memory besides activations, by one convention: bytes per parameter of weights,
    gradients and moments.
    """

    name: str
    description: str
    bytes_by_tensor: Mapping[str, int]

    @property
    def bytes_per_parameter(self) -> int:
        """Total bytes per parameter."""
        return sum(self.bytes_by_tensor.values())

    @staticmethod
    def from_name(name: str) -> OptimiserMemory:
        """Return the convention with this name.

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
        "Adam with 16-bit weights and gradients (1910.02054)",
        {"weights": 2, "gradients": 2, "master weights": 4} | ADAM_MOMENT_BYTES,
    ),
    OptimiserMemory(
        "megatron",
        "Adam with 16-bit weights, 32-bit gradients",
        {"weights": 2, "gradients": 4, "master weights": 4} | ADAM_MOMENT_BYTES,
    ),
    OptimiserMemory(
        "zhihu-624740065",
        "Adam with 16-bit weights, 16-bit and 32-bit gradients",
        {"weights": 2, "gradients": 2, "master weights": 4, "32-bit gradients": 4}
        | ADAM_MOMENT_BYTES,
    ),
    OptimiserMemory(
        "adam-fp32", "Adam in fp32 (1412.6980)", {"weights": 4, "gradients": 4} | ADAM_MOMENT_BYTES
    ),
    OptimiserMemory(
        "sgd-momentum", "SGD with momentum in fp32", {"weights": 4, "gradients": 4, "momentum": 4}
    ),
    OptimiserMemory(
        "muon", "Muon in fp32, for all parameters", {"weights": 4, "gradients": 4, "momentum": 4}
    ),
)
OPTIMISERS: dict[str, OptimiserMemory] = {
    convention.name: convention for convention in _OPTIMISER_CONVENTIONS
}
