"""Cross attention and average attention as one sub-layer of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor, nn

from ..cache import KVCache, ProjectedSource
from ..errors import SpecError
from ..interfaces import OutputStep, QKTransform
from ..interfaces.core_types import Probe
from ..masking.sequence_info import SequenceInfo
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import call_validation
from .attention import Attention
from .part_weights import NO_SHARED, PartWeights


class MergedAttention(nn.Module):
    """y_t = (concat_h softmax(q_h k_h^T / sqrt dim) v_h + mean over t' <= t of x_t' W_V) W_O: MAtt (1908.11365).

    It replaces self-attention and cross-attention in a decoder layer. `spec` is that of the cross-attention, whose keys
    and values come from the encoder's outputs. The mean runs over the decoder's own tokens; both branches share W_V and
    W_O, which are stored once. Paper and released code agree. Modifiers and `backend` concern the cross-attention only.
    Decoding caches one sum per row, independent of the length. Rows may be padded on the left, which the released code
    does not support.

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
        self, spec: AttentionSpec, *, backend: str | None = None, shared: Mapping[str, PartWeights] = NO_SHARED
    ) -> None:
        super().__init__()
        self.cross = Attention(spec, backend=backend, shared=shared)
        if reasons := list(_conflicts(spec)):
            raise SpecError("; ".join(reasons))
        weights = self.cross.weights
        self.average = Attention(averaging_spec(spec), shared={name: weights[name] for name in ("project", "output")})

    def forward(
        self,
        x: Tensor,
        *,
        source: Tensor | ProjectedSource,
        cache: KVCache | None = None,
        sequence: SequenceInfo | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """y [B, T, model]; `cache` keeps the sum of x for later calls, `probe` reads the cross-attention."""
        call_validation.check_call(
            self.average.spec, x, None, cache, sequence, self.cross.weights["project"].first_parameter
        )
        at = cache.next_positions(x.shape[1]) if sequence is None and cache is not None else sequence
        cross_BTOV = self.cross.head_outputs(x, source=source, sequence=at, probe=probe)
        mean_BTOV = self.average.head_outputs(x, cache=cache, sequence=at)
        return self.cross.merge_heads(cross_BTOV + mean_BTOV)

    def project_source(self, z: Tensor, *, sequence: SequenceInfo | None = None) -> ProjectedSource:
        """Keys and values of the encoder's outputs, projected once; pass them as `source` to every decode step."""
        return self.cross.project_source(z, sequence=sequence)

    def cache(self, *, batch: int, capacity: int) -> KVCache:
        """An empty cache: one sum per row, whose size does not depend on the capacity."""
        return self.average.cache(batch=batch, capacity=capacity)


def averaging_spec(spec: AttentionSpec) -> AttentionSpec:
    """Spec of average attention with the value projection and the merge of this cross-attention.

    >>> import headwise as hw
    >>> hw.costs.count_parameters(averaging_spec(hw.design(model=8, heads=2)))  # W_V and W_O
    128
    """
    bias = "v" if "v_bias" in spec.project.params(spec) else ""
    mean = design(preset="average", model=spec.model, heads=spec.heads.q, dim=spec.heads.dim, bias=bias)
    return replace(mean, heads=spec.heads, merge=spec.merge)


def _conflicts(spec: AttentionSpec) -> Iterator[str]:
    if spec.source not in (None, spec.model):
        yield (
            f"W_V projects the source and x, but their widths are {spec.source} and {spec.model}; "
            f"use source={spec.model} and project the source to that width first"
        )
    if not spec.project.uses_head_dims or "v" not in spec.project.params(spec):
        yield f"{type(spec.project).__name__} has no value projection W_V; use project Direct()"
    for name, transform in spec.parts_of(QKTransform):
        if "v" in transform.transformed_sides(spec):
            yield f"{name} changes values, but the mean is over unchanged values; leave it out"
    if spec.heads.rows != spec.heads.q:
        yield (
            f"{spec.heads.q} score heads are mixed to {spec.heads.rows} rows, but the mean is not mixed; "
            "use as many rows as score heads"
        )
    for name, step in spec.parts_of(OutputStep):
        if step.combines_rows:
            yield f"{name} combines rows into fewer heads than the mean has; leave it out"
