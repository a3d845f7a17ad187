"""The slow reference implementation, one query at a time over its list of allowed keys, that every
backend must match.

It uses no mask and no vectorised form: the scores of a (query, key) pair are a vector over heads,
mixes run their `pair`, and each row is normalised by `normalise_row`. Run it in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import Attention
from .interfaces import (
    Gate,
    Mix,
    Modifier,
    OutputStep,
    QKTransform,
    RowFactors,
    RowStep,
    ScoreStep,
    ValueStep,
)
from .interfaces.core_types import PartParams, Phase, QueryContext
from .interfaces.part_types import MixFactors
from .masking.patterns import head_pattern
from .masking.sequence_info import SequenceInfo
from .spec.attention_spec import AttentionSpec


class QueryKeyPair(NamedTuple):
    """One query and one key, or all of its keys, by position."""

    i: Tensor
    j: Tensor

    def take(self, factors: Tensor, index: Tensor) -> Tensor:
        """This query's factors [H, R] at an index."""
        return factors[:, index]


def reference_attention(
    layer: Attention,
    x_BTD: Tensor,
    *,
    source: Tensor | None = None,
    tokens: SequenceInfo | None = None,
    source_tokens: SequenceInfo | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """y_BTD from the definition; a mask must be the same for all heads."""
    if mask is not None and mask.shape[1] != 1:
        raise ValueError(
            f"mask has {mask.shape[1]} heads; the definition reads one list of keys for all, give "
            "[B, 1, T, S]"
        )
    spec = layer.spec
    p = layer.weights
    queries = tokens or SequenceInfo.contiguous(0, x_BTD.shape[1], x_BTD.device)
    z_BSE = x_BTD if source is None else source
    keys = source_tokens or (
        queries if source is None else SequenceInfo.contiguous(0, z_BSE.shape[1], x_BTD.device)
    )
    query_transforms = _ReferenceTransforms(spec, p, queries)
    key_transforms = _ReferenceTransforms(spec, p, keys)
    q = spec.project.project_query(x_BTD, query_transforms, p["project"])
    kv_entry = spec.project.project_kv(z_BSE, key_transforms, p["project"])
    k, v = spec.project.expand_kv(kv_entry, key_transforms, p["project"])
    context = QueryContext(x_BTD, q, spec.similarity.score_scale(spec.core), queries)
    attention = _SingleQueryAttention(spec, p, context, z_BSE)
    rows: list[Tensor] = []
    for b in range(x_BTD.shape[0]):
        positions = _row_of(queries, b), _row_of(keys, b)
        for t in range(x_BTD.shape[1]):
            visible = _visible_keys(layer, b, t, queries, keys, mask)
            rows.append(attention.attend(b, t, visible, k[b], v[b], positions))
    shape = (*x_BTD.shape[:2], len(spec.core.value_head_of_row), spec.core.vdim)
    o_BTOV = spec.project.project_heads(
        torch.stack(rows).view(shape) if rows else v.new_zeros(shape),
        spec.score_head_of_row,
        p["project"],
    )
    for name, step in spec.parts_of(OutputStep):
        o_BTOV = step.transform_outputs(o_BTOV, x_BTD, p[name])
    for name, gate in spec.parts_of(Gate):
        o_BTOV = o_BTOV * gate.gate(context, p[name], None)
    return spec.merge.merge(o_BTOV, p["output"])


class _ReferenceTransforms:
    """All query and key transforms of the spec, at the positions of these tokens."""

    def __init__(
        self, spec: AttentionSpec, p: Mapping[str, PartParams], sequence: SequenceInfo
    ) -> None:
        self.transforms = [
            (part, part.transformed_sides(spec), p[name])
            for name, part in spec.parts_of(QKTransform)
        ]
        self.sequence = sequence

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor:
        for part, sides, p in self.transforms:
            precomputed = part.precompute(self.sequence, x_BTHK.dtype, p)
            x_BTHK = part.transform(x_BTHK, side, precomputed, p) if side in sides else x_BTHK
        return x_BTHK


def _visible_keys(
    layer: Attention, b: int, t: int, queries: SequenceInfo, keys: SequenceInfo, mask: Tensor | None
) -> list[int]:
    """The indices of the keys that query t may attend to: same segment, allowed by the pattern, and
    not masked.
    """
    query_row = _row_of(queries, b)
    key_row = _row_of(keys, b)
    segment = int(query_row.segment[t])
    return [
        s
        for s in range(keys.count)
        if segment >= 0
        and int(key_row.segment[s]) == segment
        and bool(layer.spec.pattern.allows(int(query_row.position[t]), int(key_row.position[s])))
        and (mask is None or bool(mask[b % mask.shape[0], 0, t % mask.shape[2], s % mask.shape[3]]))
    ]


class _SequenceRow(NamedTuple):
    position: Tensor
    segment: Tensor


def _row_of(tokens: SequenceInfo, b: int) -> _SequenceRow:
    row = b if tokens.position.shape[0] > 1 else 0
    return _SequenceRow(tokens.position[row], tokens.segment[row])


class _SingleQueryAttention:
    """Attention of one query over its keys, one by one: scores, score steps, normaliser, mixes and
    values.
    """

    def __init__(
        self, spec: AttentionSpec, p: Mapping[str, PartParams], context: QueryContext, z_BSE: Tensor
    ) -> None:
        self.spec = spec
        self.core = spec.core
        self.p = p
        self.context = context
        self.factors = {
            name: step.query_factors(context, p[name]) for name, step in spec.parts_of(ScoreStep)
        }
        self.mixes = {
            name: (m.query_factors(context.x_BTD, p[name]), m.key_factors(z_BSE, p[name]))
            for name, m in spec.parts_of(Mix)
        }
        self.row_factors = {
            name: (
                step.query_factors(context, p[name]),
                step.key_factors(z_BSE, context.q_BTHK, p[name]),
            )
            for name, step in spec.parts_of(RowStep)
        }
        self.score_steps = [
            (name, step) for name, step in spec.parts_of(Modifier) if step.phase is Phase.SCORES
        ]
        self.weight_mixes = [
            (name, mix) for name, mix in spec.parts_of(Mix) if mix.phase is Phase.WEIGHTS
        ]
        self.value_steps = spec.parts_of(ValueStep)
        self.key_heads = list(spec.project.core(spec).key_head_of_query)
        self.value_heads = list(self.core.value_head_of_row)
        self.score_heads = list(spec.score_head_of_row)

    def attend(
        self,
        b: int,
        t: int,
        keys: Sequence[int],
        k: Tensor,
        v: Tensor,
        rows: tuple[_SequenceRow, _SequenceRow],
    ) -> Tensor:
        """Outputs o_RV: one for each row of this query's weights. `rows` has the positions of
        queries and keys.
        """
        if not keys:
            return v.new_zeros(len(self.core.value_head_of_row), v.shape[-1])
        pairs = [(s, QueryKeyPair(rows[0].position[t], rows[1].position[s])) for s in keys]
        i = int(rows[0].position[t])
        j_N = [int(rows[1].position[s]) for s in keys]
        s_NH = torch.stack([self._similarity(b, t, s, k) for s in keys])
        for name, step in self.score_steps:
            if isinstance(step, RowStep):
                s_NH = self._changed_rows(name, step, s_NH, (b, t, keys), (i, j_N), k)
            else:
                scores = zip(s_NH, pairs, strict=True)
                changed = [self._changed(name, step, s_H, b, t, *pair) for s_H, pair in scores]
                s_NH = torch.stack(changed)
        w_NH = torch.zeros_like(s_NH)
        for heads in sorted({self._heads_of_row(head) for head in range(s_NH.shape[1])}):
            w_NH[:, heads] = self._normalised(s_NH[:, heads], heads, i, j_N)
        for name, mix in self.weight_mixes:
            w_NH = torch.stack(
                [self._mixed(name, mix, w_NH[n], b, t, s) for n, s in enumerate(keys)]
            )
        w_NR = w_NH if self.weight_mixes else w_NH[:, self.score_heads]
        weighted = [
            w_R[:, None] * self._value(s, pair, v)
            for w_R, (s, pair) in zip(w_NR, pairs, strict=True)
        ]
        return torch.stack(weighted).sum(0)

    def _heads_of_row(self, head: int) -> tuple[int, ...]:
        return self.spec.normaliser.heads_of_row(self.spec, head)

    def _normalised(self, s_NH: Tensor, heads: Sequence[int], i: int, j_N: Sequence[int]) -> Tensor:
        """Weights over keys at positions j of heads that are one row together, usually one head;
        zero where a head's pattern forbids a key.
        """
        patterns = [head_pattern(self.spec.pattern, head) for head in heads]
        allowed = torch.tensor([[pattern.allows(i, j) for pattern in patterns] for j in j_N])
        if not allowed.any():
            return torch.zeros_like(s_NH)
        row = self.spec.normaliser.normalise_row(s_NH[allowed], self.p["normaliser"].head(heads[0]))
        return torch.zeros_like(s_NH).index_put((allowed,), row)

    def _changed_rows(
        self,
        name: str,
        step: RowStep,
        s_NH: Tensor,
        indices: tuple[int, int, Sequence[int]],
        positions: tuple[int, Sequence[int]],
        k: Tensor,
    ) -> Tensor:
        """Change the row of each head over its allowed keys, in order of position."""
        b, t, keys = indices
        i, j_N = positions
        query_factors, key_factors = self.row_factors[name]
        columns: list[Tensor] = []
        for head, s_N in enumerate(s_NH.T):
            pattern = head_pattern(self.spec.pattern, head)
            own = [n for n in range(len(keys)) if pattern.allows(i, j_N[n])]
            own.sort(key=j_N.__getitem__)
            of_query = None if query_factors is None else query_factors[b, t, head]
            at_keys = [keys[n] for n in own]
            factors = RowFactors(
                of_query,
                {key: factor[b, at_keys] for key, factor in key_factors.items()},
                QueryKeyPair(torch.tensor(i), torch.tensor([j_N[n] for n in own])),
                k[at_keys],
                tuple(self.key_heads),
                self.context.scale,
            )
            row = step.change_row(s_N[own], head, factors, self.p[name])
            columns.append(s_N.index_put((torch.tensor(own, dtype=torch.int64),), row))
        return torch.stack(columns, 1)

    def _similarity(self, b: int, t: int, s: int, k: Tensor) -> Tensor:
        pair_of = self.spec.similarity.pair
        keys = k[s, self.key_heads]
        heads = enumerate(zip(self.context.q_BTHK[b, t], keys, strict=True))
        return torch.stack(
            [pair_of(q, k, self.context.scale, self.p["similarity"].head(h)) for h, (q, k) in heads]
        )

    def _changed(
        self, name: str, step: Modifier, s_H: Tensor, b: int, t: int, s: int, pair: QueryKeyPair
    ) -> Tensor:
        if isinstance(step, Mix):
            return self._mixed(name, step, s_H, b, t, s)
        assert isinstance(step, ScoreStep)
        factors = self.factors[name]
        p = self.p[name]
        own_factors = None if factors is None else factors[b, t]
        return step.score(s_H, pair, own_factors, {key: p[key] for key in step.params(self.spec)})

    def _mixed(self, name: str, mix: Mix, a_H: Tensor, b: int, t: int, s: int) -> Tensor:
        query_factors, key_factors = self.mixes[name]
        of_pair = MixFactors(
            {key: factor[b, t] for key, factor in query_factors.items()},
            {key: factor[b, s] for key, factor in key_factors.items()},
        )
        return mix.mix_pair(a_H, of_pair, self.p[name])

    def _value(self, s: int, pair: QueryKeyPair, v: Tensor) -> Tensor:
        v_RV = v[s, self.value_heads]
        for name, step in self.value_steps:
            v_RV = v_RV + step.pair_value(int(pair.i), int(pair.j), self.p[name])
        return v_RV
