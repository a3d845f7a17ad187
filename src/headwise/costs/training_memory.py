"""Memory of training: activations of blocks and models, FLOPs that checkpointing recomputes, and
optimiser state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..attention.spec.attention_spec import AttentionSpec
from ..models.model_spec import BlockSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, StackSpec
from ..util.errors import SpecError, suggest
from . import activations
from .activations import (
    ActivationContext,
    NamedBytes,
    check_checkpoint_mode,
    default_profile,
    layer_activation_memory,
)
from .components import (
    AttentionComponent,
    ForwardCall,
    LinearComponent,
    list_attentions,
    list_block_components,
    list_components,
)
from .flops import CostBreakdown, MatrixProduct
from .workload import Workload


@dataclass(frozen=True)
class ActivationSettings:
    """How a model is trained: profile of the attention layers, activation checkpointing, and
    dropout.

    `profile` is a profile of `layer_activation_memory`; the default is each layer's own on the
    workload's device. `checkpoint` is what the backward pass recomputes: "none", or every "block".
    `source` is the number of encoder tokens, if it differs from the decoder's.
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

    def profile_of(self, spec: AttentionSpec, workload: Workload) -> str:
        """Return the profile of an attention layer."""
        return self.profile or default_profile(spec, workload)


DEFAULT_SETTINGS = ActivationSettings()
# Number of norms before and after each sublayer, by placement.
NORM_PLACEMENTS = {
    "pre": (1, 0),
    "parallel": (0, 0),
    "parallel_two_norms": (1, 0),
    "post": (0, 1),
    "post_sublayer": (0, 1),
    "sandwich": (1, 1),
}


def block_activation_memory(
    block: BlockSpec,
    model: int,
    workload: Workload,
    settings: ActivationSettings = DEFAULT_SETTINGS,
) -> CostBreakdown:
    """Count the bytes that one block of width `model` saves for the backward pass.

    A GPT block with fused attention saves 16 b s h elements, and the statistics of softmax and
    norms (2205.05198 has 34 b s h bytes, with two masks of one byte):

    >>> import headwise as hw
    >>> from headwise.models.model_spec import FeedForwardSpec
    >>> block = BlockSpec(
    ...     hw.design(model=64, heads=4, bias="qkvo"), feed=FeedForwardSpec(256, bias="ud")
    ... )
    >>> memory = block_activation_memory(
    ...     block, 64, hw.Workload(2, 10, "fp32"), ActivationSettings("sdpa")
    ... )
    >>> memory.total == 4 * 16 * 2 * 10 * 64 + 4 * 2 * 4 * 10 + 4 * 2 * 10 * 4
    True
    """
    return CostBreakdown.from_sums(_block_items(block, model, workload, settings))


def activation_memory(
    spec_or_model: AttentionSpec | ModelSpec,
    workload: Workload,
    settings: ActivationSettings = DEFAULT_SETTINGS,
) -> CostBreakdown:
    """Count the bytes that a layer, or a model with the cross-entropy loss of its first head, saves
    for the backward pass.

    Equal blocks are one term. With checkpoint="block" every block saves only its input;
    `peak_activation_memory` adds what the backward pass recomputes.

    >>> import headwise as hw
    >>> gpt = hw.families.read_model_spec({"model_type": "gpt2", "n_layer": 3})
    >>> inputs = activation_memory(gpt, hw.Workload(2, 10), ActivationSettings(checkpoint="block"))
    >>> [term.value for term in inputs.terms if "input of the block" in term.name]  # 6 b s h
    [92160]
    """
    if isinstance(spec_or_model, ModelSpec):
        return CostBreakdown.from_sums(_model_items(spec_or_model, workload, settings))
    if settings.dropout:
        fact = f"dropout={settings.dropout} applies to the branches of a block"
        raise SpecError(f"{fact}, and a layer alone has none; leave dropout out")
    source = settings.source if spec_or_model.source else None
    return layer_activation_memory(
        spec_or_model, workload, settings.profile, source=source, checkpoint=settings.checkpoint
    )


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
    everything = replace(settings, checkpoint="none")
    if isinstance(spec_or_model, AttentionSpec):
        return activation_memory(spec_or_model, workload, everything).total
    recomputed = 0
    for stack in spec_or_model.stacks:
        own = _stack_workload(spec_or_model, stack, workload, settings)
        for block in dict.fromkeys(stack.layers):
            saved = block_activation_memory(block, stack.model, own, settings).total
            whole = block_activation_memory(block, stack.model, own, everything).total
            recomputed = max(recomputed, whole - saved)
    return total + recomputed


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
    attentions = list_attentions(spec_or_model)
    names = dict.fromkeys(default_profile(one.spec, workload) for one in attentions)
    return " and ".join(names) or "no attention"


def _block_items(
    block: BlockSpec, model: int, workload: Workload, settings: ActivationSettings
) -> NamedBytes:
    """Yield what a block saves, in the order of the forward pass; a shared input counts where it is
    saved first.
    """
    if block.kv_layers_back or block.value_residual:
        raise SpecError(
            "the bytes that layers save which read keys or values of an earlier one are not "
            "counted; leave kv_layers_back and value_residual out to count the others"
        )
    # The first attention layer decides how norms and dropout masks are saved.
    profiles = (settings.profile_of(spec, workload) for spec in block.attention_specs.values())
    profile = settings.profile or next(profiles, "sdpa")
    context = ActivationContext.from_workload(workload, workload.context, profile, settings.dropout)
    if settings.checkpoint == "block":
        yield "input of the block", context.tensor_bytes(context.num_tokens, model)
        return

    def save_norm(name: str) -> list[tuple[str, int]]:
        sizes = activations.norm_bytes(block.norm, model, context.num_tokens, context)
        return [(f"{name}.{item}", size) for item, size in sizes]

    norms_before, norms_after = NORM_PLACEMENTS[block.placement]
    if block.placement == "parallel" and block.norm_names:
        yield from save_norm("norm")
    for name in block.constant_sublayers:
        if f"{name}_norm" in block.norm_names:
            yield from save_norm(f"{name}_norm")
    for number, name in enumerate(_branches(block)):
        if norms_before:
            items = save_norm(f"{name}_norm")
            # Parallel branches have separate norms over one input; the first norm saves it.
            yield from items[1:] if block.placement == "parallel_two_norms" and number else items
        # The source of cross-attention is left out, because all layers of a decoder share it.
        left_out = {"source", "input"} if block.placement == "parallel" and number else {"source"}
        for item, size in _branch_items(block, name, model, workload, settings, context):
            if item not in left_out:
                yield f"{name}.{item}", size
        yield f"{name}.dropout mask", context.mask_bytes(context.num_tokens, model)
        if norms_after:
            yield from save_norm(f"{name}_norm" + "_after" * norms_before)


def _branches(block: BlockSpec) -> list[str]:
    return [name for name in block.sublayer_names if name not in block.constant_sublayers]


def _branch_items(
    block: BlockSpec,
    name: str,
    model: int,
    workload: Workload,
    settings: ActivationSettings,
    context: ActivationContext,
) -> NamedBytes:
    """Yield what one branch saves, with its input."""
    if name == "mixer" and block.mixer:
        for item, vectors in block.mixer.saved_vectors.items():
            yield item, context.tensor_bytes(context.num_tokens, model, vectors)
    elif name == "feed" and isinstance(block.feed, ExpertsSpec):
        yield from activations.experts_bytes(block.feed, model, context)
    elif name == "feed" and isinstance(block.feed, FeedForwardSpec):
        yield "input", context.tensor_bytes(context.num_tokens, model)
        yield from activations.feed_forward_bytes(block.feed, context.num_tokens, context)
    else:
        spec = block.attention_specs[name]
        source = None
        if name == "cross":
            spec = replace(spec, source=spec.source or spec.model)
            source = settings.source
        profile = settings.profile_of(spec, workload)
        checkpoint = settings.checkpoint
        for term in layer_activation_memory(
            spec, workload, profile, source=source, checkpoint=checkpoint
        ).terms:
            yield term.name, term.value


def _stack_workload(
    model: ModelSpec, stack: StackSpec, workload: Workload, settings: ActivationSettings
) -> Workload:
    """Return the workload of one stack; its context is the number of image patches, or the source's
    length.
    """
    if stack.embedding and stack.embedding.patches:
        tokens = stack.embedding.patches.num_patches + stack.embedding.first
        return replace(workload, context=tokens)
    if len(model.stacks) > 1 and stack is model.stacks[0]:
        return replace(workload, context=settings.source or workload.context)
    return workload


def _model_items(model: ModelSpec, workload: Workload, settings: ActivationSettings) -> NamedBytes:
    last = model.stacks[-1]
    reads_source = any(block.cross or block.starts_from_source for block in last.layers)
    for stack in model.stacks:
        own = _stack_workload(model, stack, workload, settings)
        profiles = (settings.profile_of(spec, own) for _, spec in model.attention_specs())
        profile = settings.profile or next(profiles, "sdpa")
        context = ActivationContext.from_workload(own, own.context, profile, settings.dropout)
        if stack.embedding:
            for name, size in activations.embedding_bytes(stack.embedding, stack.model, context):
                yield f"{stack.name}.embedding.{name}", size
        for block, times in Counter(stack.layers).items():
            for name, size in _block_items(block, stack.model, own, settings):
                yield f"{stack.name}.*.{name}", times * size
        if stack.norm:
            sizes = activations.norm_bytes(stack.norm, stack.model, context.num_tokens, context)
            for name, size in sizes:
                yield f"{stack.name}.norm.{name}", size
        if stack is not last and reads_source:
            yield f"{stack.name}.output", context.tensor_bytes(context.num_tokens, stack.model)
    for head in model.heads[:1]:
        for name, size in activations.head_bytes(head, last.model, context):
            yield f"head.{head.name}.{name}", size


# --- FLOPs that activation checkpointing recomputes -----------------------------------------------


def recompute_flops(
    spec_or_model: AttentionSpec | ModelSpec,
    workload: Workload,
    settings: ActivationSettings = DEFAULT_SETTINGS,
) -> CostBreakdown:
    """FLOPs of a layer or model that the backward pass recomputes, over all query-key pairs, as
    torch counts them.

    With checkpoint="block" these are all products of a block but the last, unless a later operation
    saves tensors: dropout, or a norm. Embeddings, the final norm and output heads are never
    recomputed.

    >>> import headwise as hw
    >>> gpt = hw.families.read_model_spec({"model_type": "gpt2", "n_layer": 3})
    >>> recomputed = recompute_flops(
    ...     gpt, hw.Workload(2, 10), ActivationSettings(checkpoint="block")
    ... ).total
    >>> block = 24 * 2 * 10 * 768**2 + 4 * 2 * 10**2 * 768  # 24 b s h^2 + 4 b s^2 h
    >>> recomputed == 3 * (block - 8 * 2 * 10 * 768**2)
    True
    """
    check_checkpoint_mode(settings.checkpoint)
    items: list[tuple[str, int, int]] = []
    if settings.checkpoint == "none":
        return CostBreakdown.from_repeated_items(items)
    for component, call, includes_last in _recomputed_components(spec_or_model, workload, settings):
        for product in _recomputed_products(component, call, includes_last):
            name = f"{component.name}.{product.name}".lstrip(".")
            items.append((name, product.flops, component.times))
    return CostBreakdown.from_repeated_items(items)


def _recomputed_components(
    spec_or_model: AttentionSpec | ModelSpec, workload: Workload, settings: ActivationSettings
) -> Iterator[tuple[AttentionComponent | LinearComponent, ForwardCall, bool]]:
    """Yield components of blocks, their calls, and True where the last product is recomputed."""
    source = settings.source or workload.context
    if isinstance(spec_or_model, AttentionSpec):
        call = ForwardCall(workload.batch, workload.context, source=source)
        for component in list_components(spec_or_model):
            yield component, call, False
        return
    for stack in spec_or_model.stacks:
        tokens = _stack_workload(spec_or_model, stack, workload, settings).context
        call = ForwardCall(workload.batch, tokens, source=source)
        for block, times in Counter(stack.layers).items():
            is_saved_later = settings.dropout or block.placement in (
                "post",
                "post_sublayer",
                "sandwich",
            )
            last = _branches(block)[-1:]
            for component in list_block_components(stack, block, times=times):
                branch = component.role
                if branch in _branches(block):
                    yield component, call, bool(is_saved_later) or [branch] != last


def _recomputed_products(
    component: AttentionComponent | LinearComponent, call: ForwardCall, includes_last: bool
) -> list[MatrixProduct]:
    """Return the recomputed products of a component, with its last product if `includes_last`."""
    products = component.counted_products(call) or []
    if isinstance(component, AttentionComponent):
        return [one for one in products if includes_last or not one.name.startswith("output.")]
    return products if includes_last or not component.ends_with_product else products[:-1]


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
OPTIMISERS = {convention.name: convention for convention in _OPTIMISER_CONVENTIONS}
