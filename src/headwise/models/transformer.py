"""The `Transformer` module, `build`, which makes one from a `ModelSpec`, and the KV caches of all
its layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..attention import depth_scaled_init
from ..attention.cache import HiddenStateCache, ProjectedSource, RowEnds, TokenCache, check_rows
from ..attention.interfaces.core_types import Probe
from ..attention.masking.sequence_info import SequenceInfo
from ..attention.parts.initialisers import xavier_uniform
from ..kernels.capabilities import available_memory
from ..util.errors import SpecError, suggest
from .block import EarlierLayers, LayerInputs, LayerStack, TransformerLayer, last_states
from .embeddings_heads import ModelInput, OutputHead, TokenTypeInput
from .model_spec import ModelSpec, ProcessorSpec

# --- Caches of a model ----------------------------------------------------------------------------


@dataclass(eq=False)
class ModelCache:
    """The KV caches of every layer: made by `net.cache(...)`, passed to the model as `cache=`.

    >>> import headwise as hw, torch
    >>> from headwise import model_spec as bp
    >>> block = bp.BlockSpec(
    ...     hw.design(model=8, heads=2, kv=1, pattern="window(3)"), feed=bp.FeedForwardSpec(16)
    ... )
    >>> net = hw.build(
    ...     bp.ModelSpec(
    ...         "small",
    ...         "decoder",
    ...         (
    ...             bp.StackSpec.from_blocks(
    ...                 "decoder", 8, [block] * 2, embedding=bp.EmbeddingSpec(11)
    ...             ),
    ...         ),
    ...     )
    ... )
    >>> cache = net.cache(batch=1, capacity=100)
    >>> _ = net(torch.tensor([[3, 1, 4, 1, 5]]), cache=cache)
    >>> cache.used, cache.nbytes  # 2 layers of 3 tokens of 8 numbers of 4 bytes
    (5, 192)
    """

    layers: Sequence[Mapping[str, TokenCache]]
    counter: HiddenStateCache | None = None  # counts the tokens if no layer keeps anything of them

    def _iter_caches(self) -> Iterator[TokenCache]:
        if self.counter is not None:
            yield self.counter
        for layer in self.layers:
            yield from layer.values()

    @property
    def one(self) -> TokenCache:
        """One of the caches; all of them have received the same tokens."""
        return next(self._iter_caches())

    @property
    def used(self) -> int:
        """The number of tokens received per row, including padding."""
        return self.one.used

    @property
    def batch(self) -> int:
        """The number of rows (batch size)."""
        return self.one.batch

    @property
    def nbytes(self) -> int:
        """The total `nbytes` of all caches: bytes of cached tokens."""
        return sum(cache.nbytes for cache in self._iter_caches())

    def next_positions(self, count: int) -> SequenceInfo:
        """Return the positions of the next `count` tokens: directly after the cached ones."""
        return self.one.next_positions(count)

    def rows(self, index: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may occur more than once."""
        check_rows(index, self.batch)
        self.take_rows(index)

    def take_rows(self, index: Tensor) -> None:
        """`rows` for an index that was checked."""
        ends: dict[RowEnds, RowEnds] = {}
        for cache in self._iter_caches():
            cache.take_rows(index, ends)


class EncoderOutput(NamedTuple):
    """Encoder states, their positions, and their keys and values for every decoder layer, projected
    once.
    """

    states: Tensor
    tokens: SequenceInfo
    layers: tuple[ProjectedSource | None, ...]

    def rows(self, index: Tensor) -> EncoderOutput:
        """Return these rows of the batch, in this order; a row may occur more than once."""
        tokens = self.tokens
        if tokens.position.shape[0] > 1:
            tokens = SequenceInfo(tokens.position[index], tokens.segment[index], checked=True)
        layers = list[ProjectedSource | None]()
        for layer in self.layers:
            if layer is not None:
                entry = {name: tensor[index] for name, tensor in layer.entry.items()}
                layer = ProjectedSource(entry, tokens, layer.spec)
            layers.append(layer)
        return EncoderOutput(self.states[index], tokens, tuple(layers))


# --- Transformer ----------------------------------------------------------------------------------

CHECKPOINTING_MODES = ("none", "block")


def build(
    spec: ModelSpec, *, dropout: float = 0.0, seed: int | None = None, init: str = "xavier"
) -> Transformer:
    """Build the model that `spec` describes; its tensors have the names that `spec.params()` lists.

    `dropout` applies to embeddings, to the hidden channels of feed-forwards and to the output of
    every sublayer; dropout of attention weights is a part of the attention spec. `seed` makes the
    initial weights reproducible without changing the state of torch's global generator. `init` is
    "xavier", "depth" (DS-Init, 1908.11365) or "gpt2".

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "vocab_size": 11}
    >>> net = build(hw.families.read_model_spec(config))
    >>> sum(p.numel() for p in net.parameters()) == hw.costs.count_parameters(net.spec)
    True
    >>> net(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 11])
    """
    if not isinstance(spec, ModelSpec):
        raise SpecError(f"spec is of type {type(spec).__name__}; give a ModelSpec")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise SpecError(
            f"dropout={dropout!r} is not a probability; give at least 0 and less than 1"
        )
    _check_memory(spec)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus, enabled=seed is not None):
        if seed is not None:
            (torch.manual_seed if gpus else torch.default_generator.manual_seed)(seed)
        net = Transformer(spec, dropout)
        initialise_model(net, net.stacks, init)
    return net


def _check_memory(spec: ModelSpec) -> None:
    """Refuse a model that is too large for main memory, or on another device for any address
    space.
    """
    needed = torch.get_default_dtype().itemsize * sum(weight.numel for weight in spec.weights())
    is_on_cpu = torch.get_default_device().type == "cpu"
    available, owner = (
        (available_memory(), "this machine has")
        if is_on_cpu
        else (sys.maxsize, "torch can address")
    )
    if needed > available:
        fact = f"its weights need {needed / 1e9:,.1f} GB, and {owner} {available / 1e9:,.1f} GB"
        raise SpecError(f"cannot build {spec.name}: {fact}; choose smaller sizes")


class Transformer(nn.Module):
    """One stack of layers, or an encoder and a decoder, with output heads on the last stack. Made
    by `build`.

    `checkpointing = "block"` recomputes the activations inside each block during the backward pass,
    to save memory. `probes` maps names of attentions, such as "decoder.3.attention", to probes that
    observe them. `usage` is the `ProcessorSpec`: tokenizer, special tokens, labels and pixel
    scaling.
    """

    def __init__(self, spec: ModelSpec, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec = spec
        self.dropout = dropout
        self.usage = ProcessorSpec()
        self._checkpointing = "none"
        self._probes = dict[str, Probe]()
        _check_names("stack", [stack.name for stack in spec.stacks], dir(self))
        _check_names("head", [head.name for head in spec.heads], dir(nn.ModuleDict()))
        for stack in spec.stacks:
            self.add_module(stack.name, LayerStack(stack, dropout))
        owners = {
            name: stack.embedding
            for name, stack in self.stacks.items()
            if stack.embedding is not None
        }
        for embedding in owners.values():
            table = embedding.spec.table
            if table:
                embedding.share(owners[table])
        last = spec.stacks[-1].model
        heads = {
            head.name: OutputHead(head, last, owners[head.table] if head.table else None)
            for head in spec.heads
        }
        self.head = nn.ModuleDict(heads)

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """The stacks by name, in the order of the spec."""
        return {
            stack.name: cast(LayerStack, self._modules[stack.name]) for stack in self.spec.stacks
        }

    @property
    def checkpointing(self) -> str:
        """The part that the backward pass recomputes instead of storing it: "none", or the inside
        of every "block".
        """
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, kind: str) -> None:
        if kind not in CHECKPOINTING_MODES:
            raise ValueError(
                f"checkpointing={kind!r} is unknown; {suggest(str(kind), CHECKPOINTING_MODES)}"
            )
        self._checkpointing = kind

    @property
    def probes(self) -> Mapping[str, Probe]:
        """The probes by the name of the attention that they observe."""
        return self._probes

    @probes.setter
    def probes(self, probes: Mapping[str, Probe]) -> None:
        attentions = [name for name, _ in self.spec.attention_specs()]
        unknown = [name for name in probes if name not in attentions]
        if unknown:
            raise ValueError(
                f"no attention is called {unknown[0]!r}; {suggest(unknown[0], attentions)}"
            )
        self._probes = dict(probes)

    def forward(
        self,
        x: ModelInput,
        *,
        sequence: SequenceInfo | None = None,
        source: Tensor | TokenTypeInput | EncoderOutput | None = None,
        source_sequence: SequenceInfo | None = None,
        cache: ModelCache | None = None,
        head: str | None = None,
    ) -> Tensor:
        """Return the outputs of one output head: [B, T, outputs], or [B, outputs] if the head pools
        each row.

        `x` holds ids, pixels, frames or vectors, as the embedding of the last stack expects.
        `sequence` gives the positions of its tokens and marks padding. `source` is the input of the
        encoder in a model with two stacks, or the result of `encode`. `head` names the output head
        (default: the first). A model without heads returns its hidden states.
        """
        h = self.hidden(
            x, sequence=sequence, source=source, source_sequence=source_sequence, cache=cache
        )
        return self.apply_head(h, sequence=sequence, head=head)

    def hidden(
        self,
        x: ModelInput,
        *,
        sequence: SequenceInfo | None = None,
        source: Tensor | TokenTypeInput | EncoderOutput | None = None,
        source_sequence: SequenceInfo | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """Return the hidden states [B, T, model] after the last stack and its final norm: the input
        of the heads.
        """
        first, last = self._first_and_last_stack()
        encoded: tuple[Tensor | EncoderOutput | None, SequenceInfo | None] = None, None
        if first is not last:
            encoded = self._encoder_output(first, source, source_sequence)
        elif source is not None or source_sequence is not None:
            raise ValueError(
                f"{self.spec.name} has no encoder, so it takes x alone; leave source out"
            )
        h, types = last.embed(x)
        sequence = resolve_sequence(h, sequence, cache)
        inputs = self._layer_inputs(sequence, cache, *encoded)
        h = last.run_layers(last.place(h, sequence, types), inputs, self._checkpointing)
        if cache is not None and cache.counter is not None:
            cache.counter.advance(None, sequence)
        return h

    def apply_head(
        self, h: Tensor, *, sequence: SequenceInfo | None = None, head: str | None = None
    ) -> Tensor:
        """Return the outputs of one output head (default: the first) for hidden states [B, T,
        model].
        """
        if head is None and not self.spec.heads:
            return h
        name = self.spec.heads[0].name if head is None else head
        if name not in self.head:
            heads = [head.name for head in self.spec.heads]
            raise ValueError(f"{self.spec.name} has no head {name!r}; {suggest(name, heads)}")
        return self.head[name](h, sequence)

    def encode(self, source: ModelInput, *, sequence: SequenceInfo | None = None) -> EncoderOutput:
        """Run the encoder once and project its states to keys and values for
        every decoder layer.
        """
        first, last = self._first_and_last_stack()
        if first is last:
            raise ValueError(f"{self.spec.name} has no encoder; call it with x alone")
        states, sequence = self._run_encoder(first, source, sequence)
        return EncoderOutput(
            states, sequence, tuple(layer.project_source(states, sequence) for layer in last.blocks)
        )

    def cache(
        self,
        *,
        batch: int,
        capacity: int,
        storage_format: str | None = None,
        kind: str = "smallest",
    ) -> ModelCache:
        """Return empty KV caches for the last stack, in the model's dtype and on its device.

        storage_format="int8" stores keys and values in 8 bits per number. kind="static" makes
        caches for compiled decode steps (`StaticCache`).
        """
        layers = [
            layer.cache(batch=batch, capacity=capacity, storage_format=storage_format, kind=kind)
            for layer in self._first_and_last_stack()[1].blocks
        ]
        if any(layers):
            return ModelCache(layers)
        if batch < 0 or capacity < 1:
            raise SpecError(
                f"cannot make a cache of batch={batch}, capacity={capacity}; capacity must be at "
                "least 1"
            )
        if storage_format is not None:
            fact = f"{self.spec.name} has no self-attention, so that it stores no keys or values"
            raise SpecError(f"{fact}; leave storage_format={storage_format!r} out")
        weight = next(self.parameters())
        return ModelCache(layers, HiddenStateCache(batch, weight.dtype, weight.device))

    def _first_and_last_stack(self) -> tuple[LayerStack, LayerStack]:
        layers = list(self.stacks.values())
        return layers[0], layers[-1]

    def _encoder_output(
        self,
        first: LayerStack,
        source: Tensor | TokenTypeInput | EncoderOutput | None,
        sequence: SequenceInfo | None,
    ) -> tuple[Tensor | EncoderOutput, SequenceInfo]:
        if isinstance(source, EncoderOutput):
            if sequence is not None:
                raise ValueError(
                    "source= is an EncoderOutput, which has its own positions; leave "
                    "source_sequence out"
                )
            return source, source.tokens
        if source is None:
            raise ValueError(
                f"{self.spec.name} has an encoder, which needs an input; give source= as ids, or "
                "as net.encode(ids)"
            )
        return self._run_encoder(first, source, sequence)

    def _run_encoder(
        self, first: LayerStack, source: ModelInput, sequence: SequenceInfo | None
    ) -> tuple[Tensor, SequenceInfo]:
        h, types = first.embed(source)
        sequence = resolve_sequence(h, sequence, None)
        one = LayerInputs(sequence, None, None, None, self._probes, EarlierLayers())
        inputs = repeat(one, first.depth)
        return first.run_layers(
            first.place(h, sequence, types), inputs, self._checkpointing
        ), sequence

    def _layer_inputs(
        self,
        sequence: SequenceInfo,
        cache: ModelCache | None,
        encoded: Tensor | EncoderOutput | None,
        source_sequence: SequenceInfo | None,
    ) -> list[LayerInputs]:
        """Return the inputs of each layer of the last stack, besides its hidden states."""
        depth = self._first_and_last_stack()[1].depth
        caches = repeat(None, depth) if cache is None else cache.layers
        sources = encoded.layers if isinstance(encoded, EncoderOutput) else repeat(encoded, depth)
        state = self._source_state(encoded, source_sequence)
        earlier = EarlierLayers()
        return [
            LayerInputs(sequence, cached, source, source_sequence, self._probes, earlier, state)
            for cached, source in zip(caches, sources, strict=True)
        ]

    def _source_state(
        self, encoded: Tensor | EncoderOutput | None, sequence: SequenceInfo | None
    ) -> Tensor | None:
        """Return the encoder's state after its last token, if a recurrence starts from it."""
        blocks = self.spec.stacks[-1].layers
        if encoded is None or not any(block.starts_from_source for block in blocks):
            return None
        if isinstance(encoded, EncoderOutput):
            return last_states(encoded.states, encoded.tokens)
        assert sequence is not None  # `_run_encoder` returns both
        return last_states(encoded, sequence)


def resolve_sequence(
    h: Tensor, sequence: SequenceInfo | None, cache: ModelCache | None
) -> SequenceInfo:
    """Return the positions of vectors [B, T, model]: `sequence` if given, else after the cached
    tokens, else from 0.
    """
    if sequence is None:
        if cache is None:
            return SequenceInfo.contiguous(0, h.shape[1], h.device)
        return cache.next_positions(h.shape[1])
    shape = tuple(sequence.position.shape)
    if (
        shape[0] not in (1, h.shape[0])
        or shape[1] != h.shape[1]
        or sequence.position.device != h.device
    ):
        raise ValueError(
            f"sequence is {list(shape)} on {sequence.position.device} but x is "
            f"{list(h.shape[:2])} on {h.device}; "
            "give SequenceInfo.from_batch(x, ...)"
        )
    return sequence


def _check_names(kind: str, names: list[str], reserved: list[str]) -> None:
    """Refuse names that are attributes of every module."""
    conflicts = [name for name in names if name in reserved]
    if conflicts:
        raise SpecError(
            f"a {kind} cannot be called {conflicts[0]!r}: every model has this attribute; choose "
            "another name"
        )


GPT2_STD = 0.02  # standard deviation of every matrix in GPT-2
Stacks = Mapping[str, LayerStack]


def initialise_model(net: nn.Module, stacks: Stacks, init: str) -> None:
    """Initialise the matrices of a new model by the scheme `init`.

    "xavier" keeps the initial weights of every part. "depth" multiplies the matrices of layer l,
    counted from 1, by l^-0.5 (1908.11365). "gpt2" draws from N(0, 0.02); the standard deviation of
    the last matrix of each sublayer is divided by sqrt(number of sublayers in the stack).
    """
    if init not in INIT_SCHEMES:
        raise SpecError(f"init={init!r} is unknown; {suggest(init, INIT_SCHEMES)}")
    with torch.no_grad():
        INIT_SCHEMES[init](net, stacks)


def _keep_part_init(net: nn.Module, stacks: Stacks) -> None:
    """Leave the weights as the parts initialised them."""


def _scale_by_depth(net: nn.Module, stacks: Stacks) -> None:
    for layers in stacks.values():
        for depth, layer in enumerate(layers.blocks, 1):
            attentions = list(layer.attentions.values())
            if attentions:
                depth_scaled_init(attentions, depth=depth)
            for _, matrix in _feed_matrices(layer):
                matrix.mul_(depth**-0.5)  # already Xavier-uniform


def _initialise_like_gpt2(net: nn.Module, stacks: Stacks) -> None:
    for name, tensor in net.named_parameters():
        if tensor.dim() > 1 and (".embedding." in name or name.startswith("head.")):
            tensor.normal_(std=GPT2_STD)
    for layers in stacks.values():
        sublayers = sum(len(layer.sublayers) for layer in layers.blocks)
        for layer in layers.blocks:
            for is_last, matrix in (*_attention_matrices(layer), *_feed_matrices(layer)):
                matrix.normal_(std=GPT2_STD * sublayers**-0.5 if is_last else GPT2_STD)


def _attention_matrices(layer: TransformerLayer) -> Iterator[tuple[bool, Tensor]]:
    """Yield matrices that are Xavier-uniform initially, and whether each is the last of its
    sublayer.
    """
    for attention in layer.attentions.values():
        declared = attention.spec.params()
        for name, tensor in attention.named_parameters():
            if declared[name].applied is not None and declared[name].init is xavier_uniform:
                yield name.startswith("output."), tensor


def _feed_matrices(layer: TransformerLayer) -> Iterator[tuple[bool, Tensor]]:
    for name, tensor in layer.named_parameters():
        parts = name.split(".")
        if parts[0] == "feed" and not parts[-1].endswith("bias"):
            yield parts[-1] == "down", tensor


INIT_SCHEMES: dict[str, Callable[[nn.Module, Stacks], None]] = {
    "xavier": _keep_part_init,
    "depth": _scale_by_depth,
    "gpt2": _initialise_like_gpt2,
}
