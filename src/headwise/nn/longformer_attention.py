"""Longformer attention: window attention in which global tokens attend to all tokens with projections of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..errors import SpecError
from ..interfaces import Gate
from ..interfaces.core_types import Probe
from ..masking.patterns import Full, Global, Or, Pattern, PerHead, is_listed
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .attention import Attention
from .attention_call import AttentionArguments


class LongformerAttention(nn.Module):
    """Attention with two sets of q, k, v projections: one for all tokens, and one for the queries of global tokens.

    y_t = W_O concat_h softmax(q_t k_S^T / sqrt dim) v_S over the keys S that `window(...) | global(...)` allows. If t
    is global, y_t = W_O concat_h softmax(q'_t k'^T / sqrt dim) v' over all keys, with q', k', v' of the second set of
    projections (2004.05150, section 3.1). Other tokens attend to a global key with the first set. W_O and the weights
    of all modifiers are shared; gates are computed once per call, from the first set, for both kinds of output. The
    second set starts as a copy of the first, as in the paper, so a new block computes the same as a plain layer.

    Positions count within each segment, so every packed document and every padded row has its own global tokens;
    tokens that are global in only one row are not supported. If the rows of `sequence` differ, each call waits once for
    the device to count the global tokens.

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
        """y [B, T, model]; `probe` reads the local layer, whose outputs at global tokens are replaced afterwards."""
        if cache is not None:
            raise ValueError("global tokens attend to future tokens, so cache= is not supported; pass whole sequences")
        o_BTOV, gates = self.local.head_outputs_and_gates(AttentionArguments(x, sequence=sequence, probe=probe))
        at = sequence or SequenceInfo.contiguous(0, x.shape[1], x.device)
        is_global_BT = at.is_real & is_listed((-1, *self.positions), at.position)
        # A rank with a shard of the tokens joins the collectives even if its shard has no global token.
        if count := max(self._max_global_tokens(at, is_global_BT), int(self.overall.parallel.num_token_shards > 1)):
            index, queries = self._global_queries(x, at, is_global_BT, count)
            global_o_BNOV = self.overall.head_outputs(
                x[index], source=self.overall.project_source(x, sequence=at), sequence=queries
            )
            for gate in gates:
                global_o_BNOV = global_o_BNOV * gate.expand(*o_BTOV.shape[:-1], 1)[index]
            # Padding queries, in rows with fewer global tokens than others, keep the output of the local layer.
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
        """Index (rows, columns) of `count` global tokens per row and their sequence info; missing ones are padding."""
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
            f"LongformerAttention is self-attention, but the spec has source={spec.source}; leave source out"
        )
    return positions


def _global(pattern: Pattern) -> frozenset[int]:
    """Positions of the global tokens of a pattern, of a union of patterns, or of the patterns of all heads."""
    if isinstance(pattern, PerHead):
        return frozenset.intersection(*map(_global, pattern.patterns))
    if isinstance(pattern, Or):
        return _global(pattern.left) | _global(pattern.right)
    return frozenset(pattern.positions if isinstance(pattern, Global) else ())
