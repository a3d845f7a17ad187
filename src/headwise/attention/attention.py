"""The attention layer: the steps of attention in order.

     1 project      x to queries, keys and values; a cache stores the last two
     2 transform    queries and keys, by position or norm (RoPE, QK-norm)
     3 compare      similarity scores of every query with every key
     4 change       scores (ALiBi, softcap, talking heads)
     5 mask         keys that a query may not attend to
     6 normalise    scores to weights (softmax)
     7 change       weights (talking heads, dropout)
     8 gather       values, weighted
     9 change       head outputs (differential attention, norm per head)
    10 gate         heads
    11 merge        head outputs to the model's width

`Attention` runs 1, 2 and 9 to 11. Steps 3 to 8 are the core: `backends/dense.py` writes them out in
plain tensor operations, and the backend that `backends/dispatch.py` selects computes the same
result, usually faster. Before step 1, `attention_call` checks the arguments and, once for each kind
of call, lists the backends that may run it. `attention_base` creates the weights. `core_extras`
runs what only some layers need, such as gates and recurrent states.

Shapes: B batch, T queries, S keys, H query heads, G key-value heads, R rows of weights, O output
heads, K and V channels of a key and a value, D model width. In a plain layer H = R = O; parts that
mix or combine heads make them differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .attention_base import AttentionBase
from .attention_call import AttentionArguments, PlannedCall
from .backends import CoreInputs, HeadsKV
from .bound_parts import QKTransforms
from .cache import KVCache, KVEntry, ProjectedSource
from .core_extras import attend_with_extras, extend_by_heads, refuse_mask, sum_over_ranks
from .interfaces.core_types import SINGLE_PROCESS, Probe, QueryContext
from .masking.sequence_info import AttentionMask, SequenceInfo


class Attention(AttentionBase):
    """Multi-head attention built from a spec. Each call runs on the first backend that supports it,
    accepts its tensors and was not measured to be slower at its size.

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, pattern="causal"))
    >>> x = torch.randn(1, 5, 8)
    >>> cache = layer.cache(batch=1, capacity=16)
    >>> steps = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-6)
    True
    """

    def forward(
        self,
        x: Tensor,
        *,
        source: Tensor | ProjectedSource | None = None,
        cache: KVCache | None = None,
        sequence: SequenceInfo | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """y [B, T, model]: attention of each token of x over x itself, or over `source`
        (cross-attention).

        `cache` keeps the tokens of x for later calls; `sequence` gives positions and marks padding;
        `mask` [B, H, T, S] is True where a key may be attended to; `probe` reads or changes tensors
        inside the layer.
        """
        arguments = AttentionArguments(x, source, cache, sequence, mask, probe)
        return self.merge_heads(self.head_outputs_and_gates(arguments)[0])

    def head_outputs_and_gates(
        self, arguments: AttentionArguments
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Gated head outputs o [B, T, O, vdim] and the values of the gates: steps 1 to 10."""
        call = self.planner.plan_call(arguments, self)  # raises before a cache changes
        parts = self.parts
        project = call.plan.project
        x_BTD = call.x if self.parallel is SINGLE_PROCESS else self.parallel.copy_to_heads(call.x)

        # 1 project, 2 transform
        q_BTHK, kv_entry, keys, kv_by_heads = self.project_queries_and_kv(x_BTD, call)
        if project.caches_keys_and_values:
            k_BSGK = kv_entry["k"]
            v_BSGV = kv_entry["v"]
        else:
            transforms = QKTransforms(parts, keys, call.plan.keeps_angles)
            k_BSGK, v_BSGV = project.expand_kv(kv_entry, transforms, parts.weights["project"])

        # 3 to 8, the core
        context = QueryContext(x_BTD, q_BTHK, call.plan.scale, call.sequence)
        mask = AttentionMask(call.sequence, keys, parts.core_pattern, call.mask)
        qkv = (q_BTHK, k_BSGK, v_BSGV)
        inputs = CoreInputs(
            *qkv, mask, parts.core_steps, context, kv_entry, call.probe, kv_by_heads=kv_by_heads
        )
        if parts.has_extras or call.probe.points or self.parallel is not SINGLE_PROCESS:
            o_BTRV, gates = attend_with_extras(self, call, inputs)
        else:
            o_BTRV, gates = self.attend(call, inputs), ()

        # 9 change outputs, 10 gate
        if project.projects_heads:
            p = parts.weights["project"]
            o_BTRV = project.project_heads(o_BTRV, parts.score_head_of_row, p)
        o_BTOV = parts.finish_outputs(o_BTRV, x_BTD, gates) if parts.changes_outputs else o_BTRV
        return call.probe("heads", o_BTOV) if call.probe.points else o_BTOV, gates

    def project_queries_and_kv(
        self, x_BTD: Tensor, call: PlannedCall
    ) -> tuple[Tensor, KVEntry, SequenceInfo, Sequence[HeadsKV]]:
        """Project queries from x; return also the kv entry and positions of the tokens they attend
        to: x and the cached ones, or the source; and those of head groups with separate caches.
        """
        project = call.plan.project
        transforms = QKTransforms(self.parts, call.sequence, call.plan.keeps_angles)
        if call.source is None:
            q_BTHK, kv_entry = self.parts.project_qkv(project, x_BTD, transforms)
            if call.plan.reads_cache_by_heads:
                return q_BTHK, *extend_by_heads(self, kv_entry, call)
            return q_BTHK, *self.extend_kv(kv_entry, call), ()
        q_BTHK = project.project_query(x_BTD, transforms, self.weights["project"])
        source = call.source
        if isinstance(source, Tensor):
            source = self.project_source(source)
        return q_BTHK, source.entry, source.sequence, ()

    def extend_kv(self, kv_entry: KVEntry, call: PlannedCall) -> tuple[KVEntry, SequenceInfo]:
        """Add the tokens of other ranks and of the cache to a kv entry of new tokens."""
        sequence = call.sequence
        if self.parallel is not SINGLE_PROCESS:
            kv_entry, sequence = self.parallel.gather_tokens(kv_entry, sequence)
        if call.cache is None:
            return kv_entry, sequence
        if call.plan.may_refuse_mask:
            refuse_mask(self, call, sequence)
        extend = call.cache.extend_in_place if call.plan.reads_cache_in_place else call.cache.extend
        return extend(kv_entry, sequence)

    def attend(self, call: PlannedCall, inputs: CoreInputs) -> Tensor:
        """Run the core (steps 3 to 8), o [B, T, R, vdim], on the backend that fits the tensors."""
        return call.plan.dispatch.attend(inputs)

    def merge_heads(self, o_BTOV: Tensor) -> Tensor:
        """Merge head outputs to y [B, T, model], summed over tensor-parallel ranks."""
        y_BTD = self.spec.merge.merge(o_BTOV, self.parts.weights["output"])
        return y_BTD if self.parallel is SINGLE_PROCESS else sum_over_ranks(self, y_BTD, o_BTOV)
