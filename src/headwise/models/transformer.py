"""A whole model that runs, built from its description alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import cast

import torch
from torch import Tensor, nn

from ..errors import SpecError, suggest
from ..interfaces.probe import Probe
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, ProcessorSpec
from .block import LayerInputs, LayerStack
from .embeddings_heads import OutputHead, TokenTypeInput
from .initialisation import initialise_model
from .model_cache import EncoderOutput, ModelCache

CHECKPOINTING_MODES = ("none", "block")


def build(spec: ModelSpec, *, dropout: float = 0.0, seed: int | None = None, init: str = "xavier") -> Transformer:
    """The model that a blueprint describes, its tensors named as the blueprint names them.

    `dropout` is of embeddings, of what feed-forwards hold inside, and of what every sublayer adds; that of attention
    weights is a part of the spec. `seed` makes the start repeatable without touching torch's own generator; `start`
    is "xavier", "depth" (DS-Init, 1908.11365) or "gpt2".

    >>> import headwise as hw
    >>> net = build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "vocab_size": 11}
    ...     )
    ... )
    >>> sum(p.numel() for p in net.parameters()) == hw.costs.count_parameters(net.spec)
    True
    >>> net(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 11])
    """
    if not isinstance(spec, ModelSpec):
        raise SpecError(f"described is of type {type(spec).__name__}; give a blueprint.Model")
    for stack in (stack for stack in spec.stacks if stack.weights_of == "first"):
        one = "all layers read the weights of the first"
        raise SpecError(f"{spec.name} cannot be built: in {stack.name} {one}; give each its own, weights_of='each'")
    for beyond in spec.beyond:
        raise SpecError(f"{spec.name} cannot be built: {beyond.reason}; describe it without that")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise SpecError(f"dropout={dropout!r} is no share of what is dropped; give 0 or more and less than 1")
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(cards, enabled=seed is not None):
        if seed is not None:
            (torch.manual_seed if cards else torch.default_generator.manual_seed)(seed)
        net = Transformer(spec, dropout)
        initialise_model(net, init)
    return net


class Transformer(nn.Module):
    """Stacks over embeddings, and heads on the last of them: what `build` makes of a blueprint.

    `checkpointing` = "block" forgets what is inside a block and computes it anew on the way back. `probes` look into
    attentions by their names, "decoder.3.attention". `usage` says how it is spoken to: its tokenizer, what ends a text.
    """

    def __init__(self, spec: ModelSpec, dropout: float = 0.0) -> None:
        super().__init__()
        self.spec, self.dropout = spec, dropout
        self.usage = ProcessorSpec()
        self._checkpointing, self._probes = "none", dict[str, Probe]()
        _check_names("stack", [stack.name for stack in spec.stacks], dir(self))
        _check_names("head", [head.name for head in spec.heads], dir(nn.ModuleDict()))
        for stack in spec.stacks:
            self.add_module(stack.name, LayerStack(stack, dropout))
        owners = {name: stack.embedding for name, stack in self.stacks.items() if stack.embedding is not None}
        for embedding in owners.values():
            if table := embedding.spec.table:
                embedding.share(owners[table])
        last = spec.stacks[-1].model
        heads = {head.name: OutputHead(head, last, owners[head.table] if head.table else None) for head in spec.heads}
        self.head = nn.ModuleDict(heads)

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """Its stacks by name, in order."""
        return {stack.name: cast(LayerStack, self._modules[stack.name]) for stack in self.spec.stacks}

    @property
    def checkpointing(self) -> str:
        """What is computed anew on the way back: "none" or every "block"."""
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, kind: str) -> None:
        if kind not in CHECKPOINTING_MODES:
            raise ValueError(f"checkpointing={kind!r} is unknown; {suggest(str(kind), CHECKPOINTING_MODES)}")
        self._checkpointing = kind

    @property
    def probes(self) -> Mapping[str, Probe]:
        """Who looks into which attention."""
        return self._probes

    @probes.setter
    def probes(self, probes: Mapping[str, Probe]) -> None:
        known = [name for name, _ in self.spec.attention_specs()]
        if wrong := [name for name in probes if name not in known]:
            raise ValueError(f"no attention is called {wrong[0]!r}; {suggest(wrong[0], known)}")
        self._probes = dict(probes)

    def forward(
        self,
        x: Tensor | TokenTypeInput,
        *,
        sequence: SequenceInfo | None = None,
        source: Tensor | TokenTypeInput | EncoderOutput | None = None,
        source_sequence: SequenceInfo | None = None,
        cache: ModelCache | None = None,
        head: str | None = None,
    ) -> Tensor:
        """What a head, the first unless named, says of x: [B, T, outputs], or [B, outputs] if it reads whole rows.

        x is ids, pixels, frames or vectors, whatever the last stack embeds; `tokens` says where they stand and what is
        padding. `source` is what the first of two stacks reads, or what `encode` made of it. A model without heads
        gives its states.
        """
        h = self.hidden(x, sequence=sequence, source=source, source_sequence=source_sequence, cache=cache)
        return self.read(h, sequence=sequence, head=head)

    def hidden(
        self,
        x: Tensor | TokenTypeInput,
        *,
        sequence: SequenceInfo | None = None,
        source: Tensor | TokenTypeInput | EncoderOutput | None = None,
        source_sequence: SequenceInfo | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """States [B, T, model] behind the last stack, its norm included: what heads read."""
        first, last = self._first_and_last_stack()
        read: tuple[Tensor | EncoderOutput | None, SequenceInfo | None] = None, None
        if first is not last:
            read = self._encoder_output(first, source, source_sequence)
        elif source is not None or source_sequence is not None:
            raise ValueError(f"{self.spec.name} has one stack, which reads x alone; leave source out")
        h, types = last.embed(x)
        at = resolve_sequence(h, sequence, cache)
        return last.run(last.place(h, at, types), self._layer_inputs(at, cache, *read), self._checkpointing)

    def read(self, h: Tensor, *, sequence: SequenceInfo | None = None, head: str | None = None) -> Tensor:
        """What a head, the first unless named, says of these states."""
        if head is None and not self.spec.heads:
            return h
        name = self.spec.heads[0].name if head is None else head
        if name not in self.head:
            known = [head.name for head in self.spec.heads]
            raise ValueError(f"{self.spec.name} has no head {name!r}; {suggest(name, known)}")
        return self.head[name](h, sequence)

    def encode(self, source: Tensor | TokenTypeInput, *, sequence: SequenceInfo | None = None) -> EncoderOutput:
        """What the first of two stacks makes of a source, projected for every layer of the second."""
        first, last = self._first_and_last_stack()
        if first is last:
            raise ValueError(f"{self.spec.name} has one stack and reads no other; give x alone")
        states, told = self._run_encoder(first, source, sequence)
        return EncoderOutput(states, told, tuple(layer.remember(states, told) for layer in last.blocks))

    def cache(self, *, batch: int, capacity: int, storage_format: str | None = None) -> ModelCache:
        """Fresh caches for the last stack, in the model's dtype and on its device; store="int8" keeps keys and values
        in 8 bits each."""
        layers = [
            layer.cache(batch=batch, capacity=capacity, storage_format=storage_format)
            for layer in self._first_and_last_stack()[1].blocks
        ]
        if not any(layers):
            raise SpecError(f"{self.spec.name} has no attention that reads its past; call it without cache=")
        return ModelCache(layers)

    def _first_and_last_stack(self) -> tuple[LayerStack, LayerStack]:
        layers = list(self.stacks.values())
        return layers[0], layers[-1]

    def _encoder_output(
        self, first: LayerStack, source: Tensor | TokenTypeInput | EncoderOutput | None, tokens: SequenceInfo | None
    ) -> tuple[Tensor | EncoderOutput, SequenceInfo]:
        if isinstance(source, EncoderOutput):
            if tokens is not None:
                raise ValueError("what was encoded knows its tokens; leave source_tokens out")
            return source, source.tokens
        if source is None:
            raise ValueError(f"{self.spec.name} reads two sequences; give source= as ids, or as net.encode(ids)")
        return self._run_encoder(first, source, tokens)

    def _run_encoder(
        self, first: LayerStack, source: Tensor | TokenTypeInput, tokens: SequenceInfo | None
    ) -> tuple[Tensor, SequenceInfo]:
        h, types = first.embed(source)
        told = resolve_sequence(h, tokens, None)
        calls = repeat(LayerInputs(told, None, None, None, self._probes), first.depth)
        return first.run(first.place(h, told, types), calls, self._checkpointing), told

    def _layer_inputs(
        self,
        at: SequenceInfo,
        cache: ModelCache | None,
        memory: Tensor | EncoderOutput | None,
        told: SequenceInfo | None,
    ) -> list[LayerInputs]:
        """What each layer of the last stack is told."""
        depth = self._first_and_last_stack()[1].depth
        kept = repeat(None, depth) if cache is None else cache.layers
        read = memory.layers if isinstance(memory, EncoderOutput) else repeat(memory, depth)
        return [LayerInputs(at, own, source, told, self._probes) for own, source in zip(kept, read, strict=True)]


def resolve_sequence(h: Tensor, sequence: SequenceInfo | None, cache: ModelCache | None) -> SequenceInfo:
    """Where these vectors [B, T, model] stand: as told, behind what is remembered, or from 0 on."""
    if sequence is None:
        return SequenceInfo.contiguous(0, h.shape[1], h.device) if cache is None else cache.next_positions(h.shape[1])
    shape = tuple(sequence.position.shape)
    if shape[0] not in (1, h.shape[0]) or shape[1] != h.shape[1] or sequence.position.device != h.device:
        raise ValueError(
            f"tokens are {list(shape)} on {sequence.position.device} but x is {list(h.shape[:2])} on {h.device}; "
            "give SequenceInfo.from_batch(x, ...)"
        )
    return sequence


def _check_names(kind: str, names: list[str], reserved: list[str]) -> None:
    """Refuse names that a module has for something else."""
    if wrong := [name for name in names if name in reserved]:
        raise SpecError(f"a {kind} cannot be called {wrong[0]!r}, which every model has; choose another name")
