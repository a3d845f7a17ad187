"""Layers made of several: Longformer attention, and cross attention merged with
average attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..util.errors import SpecError
from .attention import Attention
from .attention_call import AttentionArguments, check_options, check_tensor
from .bound_parts import NO_SHARED, PartWeights
from .cache import KVCache, ProjectedSource
from .interfaces import Gate, OutputStep, QKTransform
from .interfaces.core_types import Probe
from .masking.patterns import Full, Global, Or, Pattern, PerHead, is_listed
from .masking.sequence_info import SequenceInfo
from .presets import design
from .spec.attention_spec import AttentionSpec


class MergedAttention(nn.Module):
    """y_t = (concat_h softmax(q_h k_h^T / sqrt dim) v_h + mean over t' <= t of x_t' W_V) W_O: MAtt
    (1908.11365).

    It replaces self-attention and cross-attention in a decoder layer. `spec` describes the
    cross-attention: its keys and values come from the encoder's outputs. The mean runs over the
    decoder's own tokens. Both branches share W_V and W_O, which are stored once. Paper and released
    code agree. Modifiers and `backend` apply to the cross-attention only. Decoding caches one sum
    per row, independent of the length. Rows may be padded on the left, which the released code does
    not support.

    >>> import headwise as hw, torch
    >>> block = MergedAttention(hw.design(model=8, heads=2))
    >>> sum(p.numel() for p in block.parameters()), [name for name in block.state_dict()]  # 4 d^2
    (256, ['cross.project.q', 'cross.project.k', 'cross.project.v', 'cross.output.o'])
    >>> memory, x = block.project_source(torch.randn(1, 7, 8)), torch.randn(1, 5, 8)
    >>> cache = block.cache(batch=1, capacity=5)
    >>> steps = [block(x[:, t : t + 1], source=memory, cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), block(x, source=memory), atol=1e-6)
    True
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        backend: str | None = None,
        shared: Mapping[str, PartWeights] = NO_SHARED,
    ) -> None:
        super().__init__()
        self.cross = Attention(spec, backend=backend, shared=shared)
        reasons = list(_conflicts(spec))
        if reasons:
            raise SpecError("; ".join(reasons))
        weights = self.cross.weights
        self.average = Attention(
            averaging_spec(spec), shared={name: weights[name] for name in ("project", "output")}
        )

    def forward(
        self,
        x: Tensor,
        *,
        source: Tensor | ProjectedSource,
        cache: KVCache | None = None,
        sequence: SequenceInfo | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """y [B, T, model]; `cache` keeps the sum of x for later calls, `probe` reads the
        cross-attention.
        """
        spec = self.average.spec
        check_tensor("x", x, spec.model, self.cross.first_parameter)
        check_options(spec, AttentionArguments(x, cache=cache, sequence=sequence), 1)
        at = (
            cache.next_positions(x.shape[1]) if sequence is None and cache is not None else sequence
        )
        cross_BTOV = self.cross.head_outputs(x, source=source, sequence=at, probe=probe)
        mean_BTOV = self.average.head_outputs(x, cache=cache, sequence=at)
        return self.cross.merge_heads(cross_BTOV + mean_BTOV)

    def project_source(self, z: Tensor, *, sequence: SequenceInfo | None = None) -> ProjectedSource:
        """Keys and values of the encoder's outputs, projected once; pass them as `source` to every
        decode step.
        """
        return self.cross.project_source(z, sequence=sequence)

    def cache(self, *, batch: int, capacity: int) -> KVCache:
        """Return an empty cache: one sum per row, of the same size for every capacity."""
        return self.average.cache(batch=batch, capacity=capacity)


def averaging_spec(spec: AttentionSpec) -> AttentionSpec:
    """Spec of average attention with the value projection and the merge of this cross-attention.

    >>> import headwise as hw
    >>> hw.costs.count_parameters(averaging_spec(hw.design(model=8, heads=2)))  # W_V and W_O
    128
    """
    bias = "v" if "v_bias" in spec.project.params(spec) else ""
    mean = design(
        preset="average", model=spec.model, heads=spec.heads.q, dim=spec.heads.dim, bias=bias
    )
    return replace(mean, heads=spec.heads, merge=spec.merge)


def _conflicts(spec: AttentionSpec) -> Iterator[str]:
    if spec.source not in (None, spec.model):
        yield (
            f"W_V projects the source and x, but their widths are {spec.source} and {spec.model}; "
            f"use source={spec.model} and project the source to that width first"
        )
    if not spec.project.uses_head_dims or "v" not in spec.project.params(spec):
        name = type(spec.project).__name__
        yield f"{name} has no value projection W_V; use project LinearProjection()"
    for name, transform in spec.parts_of(QKTransform):
        if "v" in transform.transformed_sides(spec):
            yield f"{name} changes values, but the mean is over unchanged values; leave it out"
    if spec.heads.rows != spec.heads.q:
        yield (
            f"{spec.heads.q} score heads are mixed to {spec.heads.rows} rows, but the mean is not "
            "mixed; "
            "use as many rows as score heads"
        )
    for name, step in spec.parts_of(OutputStep):
        if step.combines_rows:
            yield f"{name} combines rows into fewer heads than the mean has; leave it out"


class LongformerAttention(nn.Module):
    """Attention with two sets of q, k, v projections: one for all tokens, and one for the queries
    of global tokens.

    y_t = W_O concat_h softmax(q_t k_S^T / sqrt dim) v_S over the keys S that `window(...) |
    global(...)` allows. If t is global, y_t = W_O concat_h softmax(q'_t k'^T / sqrt dim) v' over
    all keys, with q', k', v' of the second set of projections (2004.05150, section 3.1). Other
    tokens attend to a global key with the first set. W_O and the weights of all modifiers are
    shared; gates are computed once per call, from the first set, for both kinds of output. The
    second set starts as a copy of the first, as in the paper, so a new block computes the same as a
    plain layer.

    Positions count within each segment, so every packed document and every padded row has its own
    global tokens; tokens that are global in only one row are not supported. If the rows of
    `sequence` differ, each call waits once for the device to count the global tokens.

    >>> import headwise as hw, torch
    >>> spec = hw.design(model=8, heads=2, pattern="window(5, after=2) | global((0,))")
    >>> block = LongformerAttention(spec)
    >>> sum(p.numel() for p in block.parameters())  # 7 d^2
    448
    >>> plain, x = hw.Attention(spec), torch.randn(1, 9, 8)
    >>> _ = plain.load_state_dict(block.local.state_dict())
    >>> torch.allclose(block(x), plain(x), atol=1e-6)
    True
    """

    def __init__(self, spec: AttentionSpec, *, backend: str | None = None) -> None:
        super().__init__()
        self.positions = _positions(spec)
        self.local = Attention(spec, backend=backend)
        ungated = tuple(modifier for modifier in spec.modifiers if not isinstance(modifier, Gate))
        far = replace(spec, pattern=Full(), source=spec.model, modifiers=ungated)
        shares = {name: self.local.weights[name] for name, _ in far.parts() if name != "project"}
        self.overall = Attention(far, backend=backend, shared=shares)
        state = self.local.state_dict()
        self.overall.load_state_dict({name: state[name] for name in self.overall.state_dict()})

    def forward(
        self,
        x: Tensor,
        *,
        sequence: SequenceInfo | None = None,
        cache: KVCache | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """y [B, T, model]; `probe` reads the local layer, before its outputs at global tokens
        are replaced.
        """
        if cache is not None:
            raise ValueError(
                "global tokens attend to future tokens, so cache= is not supported; pass whole "
                "sequences"
            )
        o_BTOV, gates = self.local.head_outputs_and_gates(
            AttentionArguments(x, sequence=sequence, probe=probe)
        )
        at = sequence or SequenceInfo.contiguous(0, x.shape[1], x.device)
        is_global_BT = at.is_real & is_listed((-1, *self.positions), at.position)
        # A rank with a shard of the tokens joins the collectives even if its shard has no global
        # token.
        count = max(
            self._max_global_tokens(at, is_global_BT),
            int(self.overall.parallel.num_token_shards > 1),
        )
        if count:
            index, queries = self._global_queries(x, at, is_global_BT, count)
            global_o_BNOV = self.overall.head_outputs(
                x[index], source=self.overall.project_source(x, sequence=at), sequence=queries
            )
            for gate in gates:
                global_o_BNOV = global_o_BNOV * gate.expand(*o_BTOV.shape[:-1], 1)[index]
            # Padding queries, in rows with fewer global tokens than others, keep the output of the
            # local layer.
            is_real = queries.is_real[..., None, None]
            o_BTOV = o_BTOV.index_put(index, torch.where(is_real, global_o_BNOV, o_BTOV[index]))
        return self.local.merge_heads(o_BTOV)

    def _max_global_tokens(self, at: SequenceInfo, is_global_BT: Tensor) -> int:
        """The largest number of global tokens in a row."""
        if at.start is not None:
            return sum(at.start <= position < at.start + at.count for position in self.positions)
        return int(is_global_BT.sum(1).amax()) if is_global_BT.numel() else 0

    def _global_queries(
        self, x_BTD: Tensor, at: SequenceInfo, is_global_BT: Tensor, count: int
    ) -> tuple[tuple[Tensor, Tensor], SequenceInfo]:
        """Index (rows, columns) of `count` global tokens per row and their sequence info; missing
        ones are padding.
        """
        batch = x_BTD.shape[0]
        is_global_BN, column = is_global_BT.expand(batch, -1).byte().topk(count, dim=1)
        index = torch.arange(batch, device=x_BTD.device)[:, None], column
        segment = at.segment.expand(batch, -1)[index].where(is_global_BN > 0, -1)
        return index, SequenceInfo(at.position.expand(batch, -1)[index], segment, checked=True)


def _positions(spec: AttentionSpec) -> tuple[int, ...]:
    positions = tuple(sorted(_global(spec.pattern)))
    if not positions:
        raise SpecError(
            f"pattern {spec.pattern.text} has no global tokens; add them with |, as in "
            "window(5, after=2) | global((0,))"
        )
    if spec.source is not None:
        raise SpecError(
            f"LongformerAttention is self-attention, but the spec has source={spec.source}; leave "
            "source out"
        )
    return positions


def _global(pattern: Pattern) -> frozenset[int]:
    """Positions of the global tokens of a pattern, of a union of patterns, or of the patterns of
    all heads.
    """
    if isinstance(pattern, PerHead):
        return frozenset.intersection(*map(_global, pattern.patterns))
    if isinstance(pattern, Or):
        return _global(pattern.left) | _global(pattern.right)
    return frozenset(pattern.positions if isinstance(pattern, Global) else ())
