"""One layer with its sublayers and norms, and a stack of layers with an embedding and a final norm.

In place of attention a layer may have a sequence mixer: a gated recurrent unit, or a causal
convolution, over the tokens of each row. Also the state of an encoder that a decoder starts from.

Shapes: B batch, T tokens, D model width, R tokens of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import MergedAttention
from ..attention.attention import Attention
from ..attention.bound_parts import PartWeights
from ..attention.cache import HiddenStateCache, KVCache, ProjectedSource, TokenCache
from ..attention.interfaces.core_types import Probe
from ..attention.masking.sequence_info import SequenceInfo
from ..attention.spec.attention_spec import AttentionSpec
from ..kernels.compilation import with_same_kernels
from ..kernels.counter_rng import dropout
from ..kernels.linear import linear
from ..util.errors import SpecError
from .embeddings_heads import EmbeddingLayer, ModelInput, TokenTypeInput, pool_last
from .feed_forward import FeedForward, MixtureOfExperts, NormLayer, SpecModule
from .model_spec import (
    BlockSpec,
    ConvolutionSpec,
    ExpertsSpec,
    RecurrentSpec,
    SequenceMixerSpec,
    StackSpec,
    kv_owner,
)

# The first layer's copy of each weight that the layers of a stack share, by (role and name, shape).
SharedWeightOwners = dict[tuple[str, tuple[int, ...]], PartWeights]


class ConstantSublayer(nn.Module):
    """Replaces an attention that was pruned away: adds one learned vector to every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.zeros(width))


@dataclass
class EarlierLayers:
    """Tensors that the layers of one call keep for later ones: keys and values, by the name of the
    layer, and the first layer's values of the new tokens.
    """

    kv: dict[str, ProjectedSource] = field(default_factory=dict)
    first_values: Tensor | None = None


class LayerEdges(NamedTuple):
    """How a layer is connected with others besides its hidden states: the layer whose keys and
    values it reads, and whether later layers read its own, or its values.
    """

    owner: TransformerLayer | None = None
    keeps_kv: bool = False
    keeps_values: bool = False


class LayerInputs(NamedTuple):
    """Inputs of a layer besides its hidden states.

    `sequence` holds the positions of its tokens, `source` the encoder output and `source_sequence`
    its positions. `source_state` [B, model] is the encoder's state after its last token, if a
    recurrence starts from it. `earlier` is one object for all layers of a stack.
    """

    sequence: SequenceInfo
    caches: Mapping[str, TokenCache] | None
    source: Tensor | ProjectedSource | None
    source_sequence: SequenceInfo | None
    probes: Mapping[str, Probe]
    earlier: EarlierLayers
    source_state: Tensor | None = None


class TransformerLayer(nn.Module):
    """Adds mixer, attention, cross-attention, feed-forward to x, with norms where the `BlockSpec`
    places them.
    """

    def __init__(
        self,
        described: BlockSpec,
        name: str,
        width: int,
        dropout: float,
        owners: SharedWeightOwners,
        edges: LayerEdges,
    ) -> None:
        super().__init__()
        self.spec = described
        self.name = name
        self.dropout = dropout
        self.placement = described.placement
        self.scale = described.scale
        self.sublayers = described.sublayer_names
        self.constant_sublayers = described.constant_sublayers
        # in a tuple: its parts are saved and moved as the layer's own
        self._merged: tuple[MergedAttention, ...] = ()
        self.keeps_kv = edges.keeps_kv
        self.keeps_values = edges.keeps_values
        self.kv_owner = "" if edges.owner is None else edges.owner.name
        read = {
            f"{part}.{key}": edges.owner.attentions["attention"].weights[part]
            for _, part, key in described.params_read_elsewhere
            if edges.owner is not None
        }
        for role, spec in described.attention_specs.items():
            self._add_attention(role, spec, owners, read if role == "attention" else {})
        if described.value_residual == "learned":
            self.value_mix = nn.Parameter(torch.full((2,), 0.5))
        for role in described.constant_sublayers:
            self.add_module(role, ConstantSublayer(width))
        if described.mixer:
            self.mixer = MIXERS[type(described.mixer)](described.mixer, width)
        if isinstance(described.feed, ExpertsSpec):
            self.feed = MixtureOfExperts(described.feed, width, dropout)
        elif described.feed:
            self.feed = FeedForward(described.feed, width, dropout)
        for norm in described.norm_names:
            self.add_module(norm, NormLayer(described.norm, width))

    def _add_attention(
        self,
        role: str,
        spec: AttentionSpec,
        owners: SharedWeightOwners,
        read: Mapping[str, PartWeights],
    ) -> None:
        """Add one attention; weights tied to an earlier layer, and those in `read`, belong to that
        layer.
        """
        tied = dict(_iter_tied_weights(role, spec))
        shares = {name: owners[key] for name, key in tied.items() if key in owners} | dict(read)
        if self.spec.form == "merged":
            merged = MergedAttention(spec, shared=shares)
            self.cross = merged.cross
            self.average = merged.average
            self._merged = (merged,)
        else:
            self.add_module(role, Attention(spec, shared=shares))
        for name, key in tied.items():
            owners.setdefault(
                key, cast(Attention, self._modules[role]).weights[name.partition(".")[0]]
            )

    @property
    def attentions(self) -> dict[str, Attention]:
        """The attention modules by their names in the spec: "attention", "cross"."""
        names = (name for name in self.spec.attention_specs if name in self._modules)
        return {name: cast(Attention, self._modules[name]) for name in names}

    @property
    def has_edges(self) -> bool:
        """True if it reads keys or values of an earlier layer, or a later one reads its own."""
        return bool(self.kv_owner or self.keeps_kv or self.keeps_values or self.spec.value_residual)

    @property
    def kv_from_elsewhere(self) -> str:
        """Why its keys and values are not those of its own input alone; empty if they are."""
        if self.kv_owner:
            return f"it attends to the keys and values of {self.kv_owner}.attention"
        return "the first layer's values are added to its own" if self.spec.value_residual else ""

    def cache(
        self,
        *,
        batch: int,
        capacity: int,
        storage_format: str | None = None,
        kind: str = "smallest",
    ) -> dict[str, TokenCache]:
        """Return empty caches for the self-attention (in a merged layer, its averaging) and for the
        mixer.
        """
        if self.spec.mixer and kind == "static":
            raise SpecError(
                f"the mixer of {self.name} counts its tokens on the host, so it has no static "
                "cache; leave out kind='static' or compile=True"
            )
        caches: dict[str, TokenCache] = (
            {"mixer": self.mixer.cache(batch)} if self.spec.mixer else {}
        )
        cacheable = {"attention": None if self.kv_owner else self._modules.get("attention")}
        if self._merged:
            cacheable = {"cross": self.average}
        return caches | {
            name: attention.cache(
                batch=batch, capacity=capacity, storage_format=storage_format, kind=kind
            )
            for name, attention in cacheable.items()
            if isinstance(attention, Attention)
        }

    def project_source(self, z: Tensor, source_sequence: SequenceInfo) -> ProjectedSource | None:
        """Project encoder states to the keys and values of the cross-attention; None without
        cross-attention.
        """
        cross = self.attentions.get("cross")
        return None if cross is None else cross.project_source(z, sequence=source_sequence)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the hidden states after this layer, in the shape of `x`."""
        if self.placement == "parallel" and self.sublayers:
            z = self._normalise("norm", x)
            for name in self.sublayers:
                x = x + self._sublayer_output(name, z, inputs)
            return x
        if self.placement == "parallel_two_norms":
            return sum(
                (
                    self._sublayer_output(name, self._normalise(f"{name}_norm", x), inputs)
                    for name in self.sublayers
                ),
                x,
            )
        for name in self.sublayers:
            x = self._apply_sublayer(name, x, inputs)
        return x

    def _apply_sublayer(self, name: str, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Add the output of one sublayer to x, for placements that apply sublayers one after
        another.
        """
        if self.placement == "post":
            return self._normalise(f"{name}_norm", x + self._sublayer_output(name, x, inputs))
        if self.placement == "post_sublayer":
            return x + self._normalise(f"{name}_norm", self._sublayer_output(name, x, inputs))
        y = self._sublayer_output(name, self._normalise(f"{name}_norm", x), inputs)
        return x + (self._normalise(f"{name}_norm_after", y) if self.placement == "sandwich" else y)

    def _normalise(self, name: str, x: Tensor) -> Tensor:
        norm = self._modules.get(name)
        # a constant sublayer has a norm only if placement="post"
        return x if norm is None else norm(x)

    def _sublayer_output(self, name: str, z: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the output of one sublayer after scale and dropout; a constant sublayer gives its
        vector.
        """
        if name in self.constant_sublayers:
            return cast(ConstantSublayer, self._modules[name]).constant
        if name == "mixer":
            cache = inputs.caches and cast(HiddenStateCache, inputs.caches["mixer"])
            y = self.mixer(z, inputs.sequence, cache or None, inputs.source_state)
        else:
            y = self.feed(z) if name == "feed" else self._attention_output(name, z, inputs)
        y = y if self.scale == 1 else y * self.scale
        return dropout(y, self.dropout, self.training)

    def _attention_output(self, name: str, z: Tensor, inputs: LayerInputs) -> Tensor:
        attention = cast(Attention, self._modules[name])
        probe = inputs.probes.get(f"{self.name}.{name}")
        cache = cast("KVCache | None", inputs.caches and inputs.caches.get(name))
        if name == "attention" and not self.has_edges:
            return attention(z, sequence=inputs.sequence, cache=cache, probe=probe)
        if name == "attention":
            own = self._read_or_project_kv(attention, z, inputs, cache)
            return attention(z, source=own, sequence=inputs.sequence, probe=probe)
        source = inputs.source
        if isinstance(source, Tensor):
            source = attention.project_source(source, sequence=inputs.source_sequence)
        if self._merged:
            return self._merged[0](
                z, source=source, sequence=inputs.sequence, cache=cache, probe=probe
            )
        return attention(z, source=source, sequence=inputs.sequence, probe=probe)

    def _read_or_project_kv(
        self, attention: Attention, z: Tensor, inputs: LayerInputs, cache: KVCache | None
    ) -> ProjectedSource:
        """Return the keys and values of an earlier layer, or this layer's own, which later layers
        may read.
        """
        earlier = inputs.earlier
        if self.kv_owner:
            source = earlier.kv[self.kv_owner]
            if (
                source.spec.pattern != attention.spec.pattern
                and source.sequence is not inputs.sequence
            ):
                source = source._replace(sequence=source.sequence.for_other_pattern())
            return source._replace(spec=attention.spec)
        new = attention.project_source(z, sequence=inputs.sequence)
        # Kept once: a backward pass that recomputes this layer needs nothing of later ones.
        if self.keeps_values and earlier.first_values is None:
            earlier.first_values = new.entry["v"]
        if self.spec.value_residual:
            assert earlier.first_values is not None  # the first layer keeps them
            new.entry["v"] = self._add_first_values(earlier.first_values, new.entry["v"])
        own = attention.extend_own_sequence(new, cache, z)
        if self.keeps_kv:
            earlier.kv.setdefault(self.name, own)
        return own

    def _add_first_values(self, first: Tensor, v: Tensor) -> Tensor:
        if self.spec.value_residual == "mean":
            return (first + v) / 2
        mix = self.value_mix.to(v.dtype)
        return mix[0] * first + mix[1] * v


def _iter_tied_weights(
    role: str, spec: AttentionSpec
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield names of weights that layers may share, each with its key in `SharedWeightOwners`."""
    for name, part in spec.parts():
        for key, param in part.params(spec).items():
            if param.tied_to:
                yield (
                    f"{name}.{key}",
                    (f"{role}.{name}.{key}", param.layout.shape(spec.sizes_of(part))),
                )


class LayerStack(nn.Module):
    """An embedding, numbered layers and a final norm; embedding and norm are optional."""

    def __init__(self, spec: StackSpec, dropout: float) -> None:
        super().__init__()
        self.spec = spec
        self.depth = len(spec.layers)
        self.embedding = (
            EmbeddingLayer(spec.embedding, spec.model, dropout) if spec.embedding else None
        )
        owners: SharedWeightOwners = {}
        kv_owners = [kv_owner(spec.layers, depth) for depth in range(self.depth)]
        adds_first_values = any(block.value_residual for block in spec.layers)
        for depth, (block, owner) in enumerate(zip(spec.layers, kv_owners, strict=True)):
            edges = LayerEdges(
                None if owner == depth else cast(TransformerLayer, self._modules[str(owner)]),
                keeps_kv=kv_owners.count(depth) > 1,
                keeps_values=adds_first_values and depth == 0,
            )
            name = f"{spec.name}.{depth}"
            layer = TransformerLayer(block, name, spec.model, dropout, owners, edges)
            self.add_module(str(depth), layer)
        self.norm = NormLayer(spec.norm, spec.model) if spec.norm else None

    @property
    def blocks(self) -> list[TransformerLayer]:
        """The layers in order."""
        return [cast(TransformerLayer, self._modules[str(depth)]) for depth in range(self.depth)]

    def embed(self, inputs: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return vectors [B, T, model] without positions, and the token types if given."""
        x, types = inputs if isinstance(inputs, TokenTypeInput) else (inputs, None)
        if self.embedding is not None:
            return self.embedding(x), types
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.spec.model:
            actual = (
                f"of shape {list(x.shape)}"
                if isinstance(x, Tensor)
                else f"of type {type(x).__name__}"
            )
            name = self.spec.name
            model = self.spec.model
            raise ValueError(
                f"{name} has no embedding and takes vectors, but x is {actual}; give [batch, "
                f"tokens, {model}]"
            )
        return x, types

    def place(self, h: Tensor, sequence: SequenceInfo, types: Tensor | None) -> Tensor:
        """Add position and token-type embeddings, then the embedding's norm and dropout."""
        if self.embedding is not None:
            return self.embedding.place(h, sequence, types)
        if types is not None:
            raise ValueError(
                f"{self.spec.name} has no embedding, so it takes no token types; give vectors alone"
            )
        return h

    def run_layers(
        self, h: Tensor, layer_inputs: Iterable[LayerInputs], checkpointing: str
    ) -> Tensor:
        """Apply all layers and the final norm; `layer_inputs` holds one `LayerInputs` per layer."""
        recompute = checkpointing == "block" and torch.is_grad_enabled()
        for layer, inputs in zip(self.blocks, layer_inputs, strict=True):
            h = (
                cast(Tensor, checkpoint(with_same_kernels(layer), h, inputs, use_reentrant=False))
                if recompute
                else layer(h, inputs)
            )
        return h if self.norm is None else self.norm(h)


class SequenceMixer(SpecModule):
    """Base class of mixers: a module as wide as the model, with a state of
    fixed size for each row.
    """

    def __init__(self, spec: SequenceMixerSpec, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_weights(spec.weights(width))

    def cache(self, batch: int) -> HiddenStateCache:
        """Return an empty cache for the state of each row."""
        weight = next(self.parameters())
        return HiddenStateCache(batch, weight.dtype, weight.device)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceInfo,
        cache: HiddenStateCache | None = None,
        source_state: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs [B, T, D]; `cache` has the state after the tokens before them.

        `source_state` [B, D] is the encoder's state after its last token. Padding leaves the state
        as it is.
        """
        _check_one_segment(sequence)
        is_real = None if sequence.start is not None else sequence.is_real.expand(x_BTD.shape[:2])
        state = None if cache is None else cache.state
        state = self.initial_state(x_BTD, source_state) if state is None else state
        y_BTD, state = self.mix(x_BTD, state, is_real)
        if cache is not None:
            # The state of a convolution is a view of all its tokens, which the cache would keep in
            # memory.
            cache.advance(state.clone(), sequence)
        return y_BTD

    def initial_state(self, x_BTD: Tensor, source_state: Tensor | None) -> Tensor:
        """Return the state of each row before its first token."""
        raise NotImplementedError(f"{type(self).__name__} has no first state")

    def mix(self, x_BTD: Tensor, state: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the last state; `is_real` [B, T] is False for padding, None
        without padding.
        """
        raise NotImplementedError(f"{type(self).__name__} does not mix")


class GatedRecurrence(SequenceMixer):
    """h_t = (1 - z_t) n_t + z_t h_(t-1) for the tokens of a row in order (1406.1078).

    r_t = sigmoid(W_r x_t + U_r h_(t-1)), z_t likewise, and n_t = tanh(W_n x_t + r_t U_n h_(t-1)),
    each matrix with a bias, as in `torch.nn.GRU`. The outputs are the states.
    """

    def __init__(self, spec: RecurrentSpec, width: int) -> None:
        super().__init__(spec, width)
        self.initial = spec.initial

    def mix(self, x_BTD: Tensor, state: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states after each token, and the last one."""
        inputs = self.linear(x_BTD, "input").unbind(1)
        states_BTD: list[Tensor] = []
        for t, input_BG in enumerate(inputs):
            new_BD = self._next_state(input_BG, state)
            state = new_BD if is_real is None else torch.where(is_real[:, t, None], new_BD, state)
            states_BTD.append(state)
        return torch.stack(states_BTD, 1) if states_BTD else x_BTD, state

    def _next_state(self, input_BG: Tensor, state_BD: Tensor) -> Tensor:
        hidden_BG = linear(state_BD, self.get_parameter("state"), self.get_parameter("state_bias"))
        gates = 2 * self.width
        reset_BD, update_BD = torch.sigmoid(input_BG[:, :gates] + hidden_BG[:, :gates]).chunk(2, -1)
        candidate_BD = torch.tanh(input_BG[:, gates:] + reset_BD * hidden_BG[:, gates:])
        return candidate_BD + update_BD * (state_BD - candidate_BD)

    def initial_state(self, x_BTD: Tensor, source_state: Tensor | None) -> Tensor:
        """Return zeros, or the state that follows from the encoder's last one."""
        if self.initial == "zeros":
            return x_BTD.new_zeros(x_BTD.shape[0], self.width)
        if source_state is None:
            raise ValueError(
                "this recurrence starts from the state of an encoder; call the model with source="
            )
        return torch.tanh(self.linear(source_state, "start"))


class CausalConvolution(SequenceMixer):
    """y_t = b + the sum of W_j x_(t - j dilation), with zeros before the first token, as in
    `torch.nn.Conv1d` with padding on the left. The state is the last (kernel - 1) dilation tokens.

    The tokens that a token reads are laid side by side, so that one matrix product computes all
    positions.
    """

    def __init__(self, spec: ConvolutionSpec, width: int) -> None:
        super().__init__(spec, width)
        self.reach = spec.reach
        self.dilation = spec.dilation

    def initial_state(self, x_BTD: Tensor, source_state: Tensor | None) -> Tensor:
        """Return zeros, [B, R, D]."""
        return x_BTD.new_zeros(x_BTD.shape[0], self.reach, self.width)

    def mix(self, x_BTD: Tensor, state: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolution over the state and x, and the last tokens of both."""
        if is_real is None:
            return self._convolve(torch.cat([state, x_BTD], 1))
        # Padding is moved to the front of each row, before the state, where no token reads it.
        is_real = torch.cat([is_real.new_ones(state.shape[:2]), is_real], 1)
        order = is_real.byte().argsort(dim=1, stable=True)
        rows = torch.arange(len(order), device=order.device)[:, None]
        y_BTD, state = self._convolve(torch.cat([state, x_BTD], 1)[rows, order])
        # Outputs begin after the first R places, which hold padding or the state alone.
        return y_BTD[rows, (order.argsort(1)[:, self.reach :] - self.reach).clamp(min=0)], state

    def _convolve(self, tokens_BSD: Tensor) -> tuple[Tensor, Tensor]:
        count = tokens_BSD.shape[1] - self.reach
        window = [
            tokens_BSD[:, first : first + count]
            for first in range(0, self.reach + 1, self.dilation)
        ]
        return self.linear(torch.cat(window, -1), "taps"), tokens_BSD[:, count:]


MIXERS: Mapping[type[SequenceMixerSpec], Callable[..., SequenceMixer]] = {
    RecurrentSpec: GatedRecurrence,
    ConvolutionSpec: CausalConvolution,
}


def last_states(states_BTD: Tensor, sequence: SequenceInfo) -> Tensor:
    """Return the state of the last non-padding token in each row, [B, D].

    >>> states = torch.arange(6.0).view(2, 3, 1)
    >>> last_states(states, SequenceInfo.from_batch(states, lengths=[3, 2])).tolist()
    [[2.0], [4.0]]
    """
    _check_one_segment(sequence)
    return pool_last(states_BTD, sequence)


def _check_one_segment(sequence: SequenceInfo) -> None:
    if sequence.start is None and bool((sequence.segment > 0).any()):
        raise ValueError(
            "a recurrence or convolution has one state per row and cannot separate packed texts; "
            "pad them"
        )
