"""Window attention whose global tokens ask, and are answered, in projections of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..errors import SpecError
from ..interfaces import Gate
from ..interfaces.core_types import Probe
from ..masking.patterns import Full, Global, Or, Pattern, is_listed
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .attention import Attention
from .attention_call import AttentionArguments


class LongformerAttention(nn.Module):
    """Every token reads what the pattern allows; what global tokens read, they read anew in q, k, v of their own.

    y_t = W_O concat_h softmax(q_t k_S^T / sqrt dim) v_S over the keys S that `window(...) | global(...)` allows,
    and where t is global y_t = W_O concat_h softmax(q'_t k'^T / sqrt dim) v' over all keys, q', k', v' of a second
    set of projections (2004.05150, section 3.1). Others read a global key with the first set. All else is shared, W_O
    and what modifiers learn; gates open once a call, as the first set has them, on whatever their heads read. The
    second set starts as a copy of the first, as the paper says, so that a fresh block is a plain layer.

    Positions count inside each segment, so packed documents and rows padded on the left each have their own global
    tokens; tokens global in one row only cannot be said. With `tokens` whose rows are not all alike the device is
    asked, once a call, how many there are.

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
        held = self.local.state_dict()
        self.overall.load_state_dict({name: held[name] for name in self.overall.state_dict()})

    def forward(
        self,
        x: Tensor,
        *,
        sequence: SequenceInfo | None = None,
        cache: KVCache | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """y [B, T, model]; `probe` looks into the local layer, where what global tokens read is not used."""
        if cache is not None:
            raise ValueError("global tokens read those that have not come yet; pass the whole sequence, without cache=")
        o_BTOV, gates = self.local.head_outputs_and_gates(AttentionArguments(x, sequence=sequence, probe=probe))
        at = sequence or SequenceInfo.contiguous(0, x.shape[1], x.device)
        chosen_BT = at.is_real & is_listed((-1, *self.positions), at.position)
        # Who shares the rows with others takes part whether or not a global token is among its own.
        if count := max(self._max_global_tokens(at, chosen_BT), int(self.overall.parallel.num_token_shards > 1)):
            there, asks = self._global_queries(x, at, chosen_BT, count)
            read = self.overall.head_outputs(
                x[there], source=self.overall.project_source(x, sequence=at), sequence=asks
            )
            for gate in gates:
                read = read * gate.expand(*o_BTOV.shape[:-1], 1)[there]
            # A row with fewer global tokens than another keeps what it had.
            o_BTOV = o_BTOV.index_put(there, torch.where(asks.is_real[..., None, None], read, o_BTOV[there]))
        return self.local.merge_heads(o_BTOV)

    def _max_global_tokens(self, at: SequenceInfo, chosen_BT: Tensor) -> int:
        """The most global tokens that a row has."""
        if at.start is not None:
            return sum(at.start <= position < at.start + at.count for position in self.positions)
        return int(chosen_BT.sum(1).amax()) if chosen_BT.numel() else 0

    def _global_queries(
        self, x_BTD: Tensor, at: SequenceInfo, chosen_BT: Tensor, count: int
    ) -> tuple[tuple[Tensor, Tensor], SequenceInfo]:
        """Where the global tokens of each row are, and as what they ask; a row with fewer is filled up with padding."""
        batch = x_BTD.shape[0]
        chosen, index = chosen_BT.expand(batch, -1).byte().topk(count, dim=1)
        there = torch.arange(batch, device=x_BTD.device)[:, None], index
        segment = at.segment.expand(batch, -1)[there].where(chosen > 0, -1)
        return there, SequenceInfo(at.position.expand(batch, -1)[there], segment, checked=True)


def _positions(spec: AttentionSpec) -> tuple[int, ...]:
    positions = tuple(sorted(_global(spec.pattern)))
    if not positions:
        raise SpecError(
            f"pattern {spec.pattern.text} joins no global tokens to what it allows; write it like "
            "window(5, after=2) | global((0,))"
        )
    if spec.source is not None:
        raise SpecError(f"global tokens belong to one sequence, but source={spec.source} is another; leave source out")
    return positions


def _global(pattern: Pattern) -> frozenset[int]:
    """The tokens that a union names global."""
    if isinstance(pattern, Or):
        return _global(pattern.left) | _global(pattern.right)
    return frozenset(pattern.positions if isinstance(pattern, Global) else ())
