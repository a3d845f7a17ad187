"""One layer of a stack, and a stack of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..cache import KVCache, ProjectedSource
from ..errors import SpecError
from ..interfaces.probe import Probe
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ApproximateAttention, BlockSpec, ExpertsSpec, StackSpec
from ..nn import MergedAttention
from ..nn.attention import Attention
from ..nn.part_weights import PartWeights
from ..ops.dropout import dropout
from ..spec.attention_spec import AttentionSpec
from .embeddings_heads import EmbeddingLayer, TokenTypeInput
from .feed_forward import FeedForward, MixtureOfExperts, NormLayer

# Who owns what layers of a stack hold in common, by role, name and shape.
SharedWeightOwners = dict[tuple[str, tuple[int, ...]], PartWeights]


class ConstantSublayer(nn.Module):
    """What is left of an attention that was cut away: one vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.zeros(width))


class LayerInputs(NamedTuple):
    """What a layer is told besides its input: where tokens stand, its caches, what it reads of another stack."""

    at: SequenceInfo
    caches: Mapping[str, KVCache] | None
    source: Tensor | ProjectedSource | None
    told: SequenceInfo | None
    probes: Mapping[str, Probe]


class TransformerLayer(nn.Module):
    """x, and what attention, cross-attention and feed-forward add to it, its norms where the blueprint places them."""

    def __init__(self, described: BlockSpec, name: str, width: int, dropout: float, owners: SharedWeightOwners) -> None:
        super().__init__()
        if isinstance(described.attention, ApproximateAttention):
            raise SpecError(f"{name}.attention cannot be built: {described.attention.reason}; change its spec")
        self.spec, self.name, self.dropout = described, name, dropout
        self.placement, self.scale = described.placement, described.scale
        self.sublayers, self.still = described.sublayer_names, described.still
        self._merged: tuple[MergedAttention, ...] = ()  # in a tuple: its parts are saved and moved as the layer's own
        for role, spec in described.attention_specs.items():
            self._add_attention(role, spec, owners, described.form)
        for role in described.still:
            self.add_module(role, ConstantSublayer(width))
        if isinstance(described.feed, ExpertsSpec):
            self.feed = MixtureOfExperts(described.feed, width, dropout)
        elif described.feed:
            self.feed = FeedForward(described.feed, width, dropout)
        for norm in described.norm_names:
            self.add_module(norm, NormLayer(described.norm, width))

    def _add_attention(self, role: str, spec: AttentionSpec, owners: SharedWeightOwners, form: str) -> None:
        """Make one attention, which reads what it has in common with earlier layers where these keep it."""
        tied = dict(_iter_tied_weights(role, spec))
        shares = {name: owners[key] for name, key in tied.items() if key in owners}
        if form == "merged":
            merged = MergedAttention(spec, shared=shares)
            self.cross, self.average, self._merged = merged.cross, merged.average, (merged,)
        else:
            self.add_module(role, Attention(spec, shared=shares))
        for name, key in tied.items():
            owners.setdefault(key, cast(Attention, self._modules[role]).weights[name.partition(".")[0]])

    @property
    def attentions(self) -> dict[str, Attention]:
        """Its attentions by the names that its blueprint gives them."""
        names = (name for name in self.sublayers if name != "feed" and name not in self.still)
        return {name: cast(Attention, self._modules[name]) for name in names}

    def cache(self, *, batch: int, capacity: int, storage_format: str | None = None) -> dict[str, KVCache]:
        """A fresh cache for each sublayer that reads the past: the sum, where that is a mean."""
        keeps = {"cross": self.average} if self._merged else {"attention": self._modules.get("attention")}
        return {
            name: attention.cache(batch=batch, capacity=capacity, storage_format=storage_format)
            for name, attention in keeps.items()
            if isinstance(attention, Attention)
        }

    def remember(self, z: Tensor, source_sequence: SequenceInfo) -> ProjectedSource | None:
        """What its cross-attention reads of another stack, projected once."""
        cross = self.attentions.get("cross")
        return None if cross is None else cross.project_source(z, sequence=source_sequence)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """The same shape."""
        if self.placement == "parallel" and self.sublayers:
            z = self._normalise("norm", x)
            for name in self.sublayers:
                x = x + self._sublayer_output(name, z, inputs)
            return x
        if self.placement == "abreast":
            return sum(
                (self._sublayer_output(name, self._normalise(f"{name}_norm", x), inputs) for name in self.sublayers), x
            )
        for name in self.sublayers:
            x = self._apply_sublayer(name, x, inputs)
        return x

    def _apply_sublayer(self, name: str, x: Tensor, call: LayerInputs) -> Tensor:
        """x and what one sublayer adds to it, where nothing stands beside that."""
        if self.placement == "post":
            return self._normalise(f"{name}_norm", x + self._sublayer_output(name, x, call))
        if self.placement == "after":
            return x + self._normalise(f"{name}_norm", self._sublayer_output(name, x, call))
        y = self._sublayer_output(name, self._normalise(f"{name}_norm", x), call)
        return x + (self._normalise(f"{name}_norm_after", y) if self.placement == "sandwich" else y)

    def _normalise(self, name: str, x: Tensor) -> Tensor:
        norm = self._modules.get(name)
        return x if norm is None else norm(x)  # what is still has none but a norm of all that is added up

    def _sublayer_output(self, name: str, z: Tensor, call: LayerInputs) -> Tensor:
        """One sublayer, scaled, with dropout behind it; one that is still says what it adds."""
        if name in self.still:
            return cast(ConstantSublayer, self._modules[name]).constant
        y = self.feed(z) if name == "feed" else self._attention_output(name, z, call)
        y = y if self.scale == 1 else y * self.scale
        return dropout(y, self.dropout, self.training)

    def _attention_output(self, name: str, z: Tensor, call: LayerInputs) -> Tensor:
        attention = cast(Attention, self._modules[name])
        probe, cache = call.probes.get(f"{self.name}.{name}"), call.caches and call.caches.get(name)
        if name == "attention":
            return attention(z, sequence=call.at, cache=cache, probe=probe)
        source = call.source
        if isinstance(source, Tensor):
            source = attention.project_source(source, sequence=call.told)
        if self._merged:
            return self._merged[0](z, source=source, sequence=call.at, cache=cache, probe=probe)
        return attention(z, source=source, sequence=call.at, probe=probe)


def _iter_tied_weights(role: str, spec: AttentionSpec) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Tensors that layers may hold in common, with what they must agree in."""
    for name, part in spec.parts():
        for key, param in part.params(spec).items():
            if param.tied_to:
                yield f"{name}.{key}", (f"{role}.{name}.{key}", param.layout.shape(spec.sizes_of(part)))


class LayerStack(nn.Module):
    """A stack: an embedding, layers by their numbers, and a norm behind them."""

    def __init__(self, spec: StackSpec, dropout: float) -> None:
        super().__init__()
        self.spec, self.depth = spec, len(spec.layers)
        self.embedding = EmbeddingLayer(spec.embedding, spec.model, dropout) if spec.embedding else None
        owners: SharedWeightOwners = {}
        for depth, block in enumerate(spec.layers):
            name = f"{spec.name}.{depth}"
            self.add_module(str(depth), TransformerLayer(block, name, spec.model, dropout, owners))
        self.norm = NormLayer(spec.norm, spec.model) if spec.norm else None

    @property
    def blocks(self) -> list[TransformerLayer]:
        """Its layers, in order."""
        return [cast(TransformerLayer, self._modules[str(depth)]) for depth in range(self.depth)]

    def embed(self, inputs: Tensor | TokenTypeInput) -> tuple[Tensor, Tensor | None]:
        """Vectors [B, T, model], before anybody knows where they stand, and the types of tokens if told."""
        x, types = inputs if isinstance(inputs, TokenTypeInput) else (inputs, None)
        if self.embedding is not None:
            return self.embedding(x), types
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.spec.model:
            said = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
            name, model = self.spec.name, self.spec.model
            raise ValueError(
                f"{name} has no embedding and reads vectors, but x is {said}; give [batch, tokens, {model}]"
            )
        return x, types

    def place(self, h: Tensor, sequence: SequenceInfo, types: Tensor | None) -> Tensor:
        """The same with positions and types."""
        if self.embedding is not None:
            return self.embedding.place(h, sequence, types)
        if types is not None:
            raise ValueError(f"{self.spec.name} has no embedding, so no types of tokens; give vectors alone")
        return h

    def run(self, h: Tensor, layer_inputs: Iterable[LayerInputs], checkpointing: str) -> Tensor:
        """What its layers and its norm make of these vectors; each layer has a call of its own."""
        again = checkpointing == "block" and torch.is_grad_enabled()
        for layer, call in zip(self.blocks, layer_inputs, strict=True):
            h = cast(Tensor, checkpoint(layer, h, call, use_reentrant=False)) if again else layer(h, call)
        return h if self.norm is None else self.norm(h)
