"""One layer with its sublayers and norms, and a stack of layers with an embedding and a final norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..cache import HiddenStateCache, KVCache, ProjectedSource, TokenCache
from ..errors import SpecError
from ..interfaces.core_types import Probe
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ApproximateAttention, BlockSpec, ExpertsSpec, StackSpec
from ..nn import MergedAttention
from ..nn.attention import Attention
from ..nn.part_weights import PartWeights
from ..ops.counter_rng import dropout
from ..spec.attention_spec import AttentionSpec
from .embeddings_heads import EmbeddingLayer, TokenTypeInput
from .feed_forward import FeedForward, MixtureOfExperts, NormLayer
from .sequence_mixers import make_mixer

# The first layer's copy of each weight that the layers of a stack share, by (role and name, shape).
SharedWeightOwners = dict[tuple[str, tuple[int, ...]], PartWeights]


class ConstantSublayer(nn.Module):
    """Replaces an attention that was pruned away: adds one learned vector to every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.zeros(width))


class LayerInputs(NamedTuple):
    """Inputs of a layer besides its hidden states.

    `sequence` holds the positions of its tokens, `source` the encoder output and `source_sequence` its positions.
    `source_state` [B, model] is the encoder's state after its last token, if a recurrence starts from it.
    """

    sequence: SequenceInfo
    caches: Mapping[str, TokenCache] | None
    source: Tensor | ProjectedSource | None
    source_sequence: SequenceInfo | None
    probes: Mapping[str, Probe]
    source_state: Tensor | None = None


class TransformerLayer(nn.Module):
    """Adds mixer, attention, cross-attention, feed-forward to x, with norms where the `BlockSpec` places them."""

    def __init__(self, described: BlockSpec, name: str, width: int, dropout: float, owners: SharedWeightOwners) -> None:
        super().__init__()
        if isinstance(described.attention, ApproximateAttention):
            raise SpecError(f"cannot build {name}.attention: {described.attention.reason}; change its spec")
        self.spec, self.name, self.dropout = described, name, dropout
        self.placement, self.scale = described.placement, described.scale
        self.sublayers, self.constant_sublayers = described.sublayer_names, described.constant_sublayers
        self._merged: tuple[MergedAttention, ...] = ()  # in a tuple: its parts are saved and moved as the layer's own
        for role, spec in described.attention_specs.items():
            self._add_attention(role, spec, owners, described.form)
        for role in described.constant_sublayers:
            self.add_module(role, ConstantSublayer(width))
        if described.mixer:
            self.mixer = make_mixer(described.mixer, width)
        if isinstance(described.feed, ExpertsSpec):
            self.feed = MixtureOfExperts(described.feed, width, dropout)
        elif described.feed:
            self.feed = FeedForward(described.feed, width, dropout)
        for norm in described.norm_names:
            self.add_module(norm, NormLayer(described.norm, width))

    def _add_attention(self, role: str, spec: AttentionSpec, owners: SharedWeightOwners, form: str) -> None:
        """Add one attention; weights tied to an earlier layer are read from that layer."""
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
        """The attention modules by their names in the spec: "attention", "cross"."""
        names = (name for name in self.spec.attention_specs if name in self._modules)
        return {name: cast(Attention, self._modules[name]) for name in names}

    def cache(self, *, batch: int, capacity: int, storage_format: str | None = None) -> dict[str, TokenCache]:
        """Return empty caches for the self-attention (in a merged layer, its averaging) and for the mixer."""
        caches: dict[str, TokenCache] = {"mixer": self.mixer.cache(batch)} if self.spec.mixer else {}
        cacheable = {"cross": self.average} if self._merged else {"attention": self._modules.get("attention")}
        return caches | {
            name: attention.cache(batch=batch, capacity=capacity, storage_format=storage_format)
            for name, attention in cacheable.items()
            if isinstance(attention, Attention)
        }

    def project_source(self, z: Tensor, source_sequence: SequenceInfo) -> ProjectedSource | None:
        """Project encoder states to the keys and values of the cross-attention; None without cross-attention."""
        cross = self.attentions.get("cross")
        return None if cross is None else cross.project_source(z, sequence=source_sequence)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the hidden states after this layer, in the shape of `x`."""
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

    def _apply_sublayer(self, name: str, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Add the output of one sublayer to x, for placements that apply sublayers one after another."""
        if self.placement == "post":
            return self._normalise(f"{name}_norm", x + self._sublayer_output(name, x, inputs))
        if self.placement == "after":
            return x + self._normalise(f"{name}_norm", self._sublayer_output(name, x, inputs))
        y = self._sublayer_output(name, self._normalise(f"{name}_norm", x), inputs)
        return x + (self._normalise(f"{name}_norm_after", y) if self.placement == "sandwich" else y)

    def _normalise(self, name: str, x: Tensor) -> Tensor:
        norm = self._modules.get(name)
        return x if norm is None else norm(x)  # a constant sublayer has a norm only if placement="post"

    def _sublayer_output(self, name: str, z: Tensor, inputs: LayerInputs) -> Tensor:
        """The output of one sublayer after scale and dropout; a constant sublayer gives its vector."""
        if name in self.constant_sublayers:
            return cast(ConstantSublayer, self._modules[name]).constant
        if name == "mixer":
            y = self._mixer_output(z, inputs)
        else:
            y = self.feed(z) if name == "feed" else self._attention_output(name, z, inputs)
        y = y if self.scale == 1 else y * self.scale
        return dropout(y, self.dropout, self.training)

    def _mixer_output(self, z: Tensor, inputs: LayerInputs) -> Tensor:
        cache = inputs.caches and cast(HiddenStateCache, inputs.caches["mixer"])
        return self.mixer(z, inputs.sequence, cache or None, inputs.source_state)

    def _attention_output(self, name: str, z: Tensor, inputs: LayerInputs) -> Tensor:
        attention = cast(Attention, self._modules[name])
        probe = inputs.probes.get(f"{self.name}.{name}")
        cache = cast("KVCache | None", inputs.caches and inputs.caches.get(name))
        if name == "attention":
            return attention(z, sequence=inputs.sequence, cache=cache, probe=probe)
        source = inputs.source
        if isinstance(source, Tensor):
            source = attention.project_source(source, sequence=inputs.source_sequence)
        if self._merged:
            return self._merged[0](z, source=source, sequence=inputs.sequence, cache=cache, probe=probe)
        return attention(z, source=source, sequence=inputs.sequence, probe=probe)


def _iter_tied_weights(role: str, spec: AttentionSpec) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Names of weights that layers may share, each with its key in `SharedWeightOwners`."""
    for name, part in spec.parts():
        for key, param in part.params(spec).items():
            if param.tied_to:
                yield f"{name}.{key}", (f"{role}.{name}.{key}", param.layout.shape(spec.sizes_of(part)))


class LayerStack(nn.Module):
    """An embedding, numbered layers and a final norm; embedding and norm are optional."""

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
        """The layers in order."""
        return [cast(TransformerLayer, self._modules[str(depth)]) for depth in range(self.depth)]

    def embed(self, inputs: Tensor | TokenTypeInput) -> tuple[Tensor, Tensor | None]:
        """Return vectors [B, T, model] without positions, and the token types if given."""
        x, types = inputs if isinstance(inputs, TokenTypeInput) else (inputs, None)
        if self.embedding is not None:
            return self.embedding(x), types
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.spec.model:
            actual = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
            name, model = self.spec.name, self.spec.model
            raise ValueError(
                f"{name} has no embedding and takes vectors, but x is {actual}; give [batch, tokens, {model}]"
            )
        return x, types

    def place(self, h: Tensor, sequence: SequenceInfo, types: Tensor | None) -> Tensor:
        """Add position and token-type embeddings, then the embedding's norm and dropout."""
        if self.embedding is not None:
            return self.embedding.place(h, sequence, types)
        if types is not None:
            raise ValueError(f"{self.spec.name} has no embedding, so it takes no token types; give vectors alone")
        return h

    def run(self, h: Tensor, layer_inputs: Iterable[LayerInputs], checkpointing: str) -> Tensor:
        """Apply all layers and the final norm; `layer_inputs` holds one `LayerInputs` per layer."""
        recompute = checkpointing == "block" and torch.is_grad_enabled()
        for layer, inputs in zip(self.blocks, layer_inputs, strict=True):
            h = cast(Tensor, checkpoint(layer, h, inputs, use_reentrant=False)) if recompute else layer(h, inputs)
        return h if self.norm is None else self.norm(h)
