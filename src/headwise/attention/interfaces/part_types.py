"""Base classes of the parts: of the slots that every spec fills once, and of the optional
modifiers, one per phase.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from .core_types import (
    AttentionSpec,
    AuxLosses,
    CallSize,
    CoreShape,
    Heads,
    PartParams,
    Phase,
    QueryContext,
    ScorePosition,
    SymmetryGroup,
    TransformsQK,
)
from .part import Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..masking.sequence_info import SequenceInfo


class Project(Part):
    """Computes queries, keys and values from the input, and decides what is cached of a token.

    `project_kv` computes the entry that is cached for each token; `expand_kv` computes keys and
    values from entries.
    """

    # True if queries and keys have heads.dim channels and values heads.vdim, in the cache too, in
    # every form.
    uses_head_dims: ClassVar[bool] = False
    # True if several score heads may share a key-value head.
    supports_grouping: ClassVar[bool] = True
    # True if expand_kv returns the entry's "k" and "v" unchanged.
    caches_keys_and_values: ClassVar[bool] = False
    # True if project_heads changes the weighted sums.
    projects_heads: ClassVar[bool] = False

    def grouping_conflicts(self, heads: Heads) -> Iterator[str]:
        """Reasons why the project cannot have these heads; empty if it supports grouping."""
        is_plain = heads.kv_head_of_query == tuple(range(heads.q)) and not heads.value_heads
        if not (self.supports_grouping or is_plain):
            actual = f"kv={heads.kv}; use kv={heads.q}"
            if heads.value_heads or heads.kv == heads.q:
                actual = "custom kv_head_of_query= or value_heads=; use project LinearProjection()"
            name = type(self).__name__
            yield f"{name} needs one key-value head per query head, not {actual}"

    @abstractmethod
    def core(self, spec: AttentionSpec) -> CoreShape: ...
    @abstractmethod
    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor: ...
    @abstractmethod
    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]: ...
    @abstractmethod
    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]: ...

    def project_qkv(
        self, x_BTD: Tensor, transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Queries and cache entries of self-attention; a project may compute them in one matrix
        product.
        """
        entry = self.project_kv(x_BTD, transform, p)
        return self.project_query(x_BTD, transform, p), entry

    def project_heads(self, o_BTRV: Tensor, score_heads: tuple[int, ...], p: PartParams) -> Tensor:
        """The weighted sums of these score heads, projected to value width."""
        return o_BTRV

    def transformed_dims(self, spec: AttentionSpec) -> int:
        """The number of channels per query or key head that QK transforms
        (RoPE, QK-norm) receive.
        """
        return spec.heads.dim

    def constant_biases(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Biases that are added to all keys ("k", per key head) or to all values ("v", per row of
        weights).
        """
        return {}

    def without_biases(self, biases: frozenset[str]) -> Self:
        """A copy without these biases."""
        return self

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        """The weights of one side (with bias) after folding in a matrix that multiplies the side's
        heads.

        `matrix` is [out, in] for all heads, or [heads, out, in]. Empty if the project cannot absorb
        it.
        """
        return {}

    def equivalent_forms(self, spec: AttentionSpec) -> Mapping[str, Project]:
        """Algebraically equivalent projects over the same parameters; "step" is the one for a
        single query.
        """
        return {}


class Similarity(Part):
    """Computes the score of a query and a key.

    `signed`: scores may be negative. `linear`: scores are linear in the key. `per_head`: the
    similarity has parameters per score head, so that score heads which share a key head still
    differ.
    """

    signed: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    unrestricted_sides: ClassVar[str] = "v"

    @abstractmethod
    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor: ...

    def score_scale(self, core: CoreShape) -> float:
        """The factor of the scores."""
        return core.scale

    def can_be_all_zero(self) -> bool:
        """True if all scores of a row with allowed keys can be 0, so that proportional weights
        would sum to 0.
        """
        return False

    def has_arbitrary_scale(self) -> bool:
        """True if scores are computed up to an unknown factor, so that only their ratios have a
        meaning.
        """
        return False

    def feature_map(self, x_BTHK: Tensor, side: str, p: PartParams) -> Tensor:
        """The features of queries (side "q") or keys (side "k") that `scores` takes.

        It is applied once per token, before keys are repeated for the score heads that share them.
        """
        return x_BTHK

    def feature_dim(self, core: CoreShape) -> int:
        """The number of channels of the feature map."""
        return core.dim


class Normaliser(Part):
    """Turns scores into attention weights. All weights of a query without allowed keys are zero.

    `proportional`: weights are the scores divided by `divisor` of their sum. This is the only kind
    that a similarity with a recurrent state can use; a normaliser that ignores the scores may have
    a separate state. `shift_invariant`: adding a constant to all scores of a score head changes
    nothing. `sums_to_one`: the weights of every score head with an allowed key sum to one.
    `ordered`: weights depend on the order of the keys, which caches then keep.
    """

    proportional: ClassVar[bool] = False
    shift_invariant: ClassVar[bool] = False
    sums_to_one: ClassVar[bool] = False
    ordered: ClassVar[bool] = False

    def heads_of_row(self, spec: AttentionSpec, head: int) -> tuple[int, ...]:
        """The score heads whose scores are normalised as one row with those of this head."""
        return (head,)

    @abstractmethod
    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor: ...

    def divisor(self, total: Tensor) -> Tensor:
        """The divisor of proportional weights, given the sum of the scores of a row; never zero."""
        return total.masked_fill(total == 0, 1.0)

    def always_sums_to_one(self) -> bool:
        """True if `sums_to_one` holds exactly with these options."""
        return self.sums_to_one

    def fused_normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        """Like `normalise`, in one pass over each row where a fused kernel exists."""
        return self.normalise(s_BHTS, allowed, p)

    def prefers_gather(self, device: str, dtype: torch.dtype) -> bool:
        """True if `gather_values` is faster for values of this dtype than multiplying all values
        with all weights.
        """
        return False

    def gather_values(
        self,
        s_BHTS: Tensor,
        allowed: Tensor,
        v_BSGV: Tensor,
        value_heads: tuple[int, ...],
        p: PartParams,
    ) -> Tensor:
        """Outputs o_BHTV, where row h uses value head ``value_heads[h]``; may skip the values of
        zero weights.
        """
        v_BHSV = v_BSGV[:, :, list(value_heads)].transpose(1, 2)
        return self.fused_normalise(s_BHTS, allowed, p).to(v_BSGV.dtype) @ v_BHSV


class Merge(Part):
    """Combines the outputs of all heads into a vector of the model's width."""

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], matrix: Tensor
    ) -> Mapping[str, Tensor]:
        """The weights after folding in a matrix per output head, [heads, out, in], that multiplies
        the head's output.

        Empty if the merge cannot absorb it.
        """
        return {}

    @abstractmethod
    def merge(self, o_BTOV: Tensor, p: PartParams) -> Tensor: ...


class Modifier(Part):
    """A part that changes the computation in one phase; a spec may have any number of them."""

    @property
    @abstractmethod
    def phase(self) -> Phase: ...


class QKTransform(Modifier):
    """Changes queries, keys or values token by token, before scores are
    computed (RoPE, QK-norm).
    """

    @property
    def phase(self) -> Phase:
        """Before the scores."""
        return Phase.QK_TRANSFORM

    def transformed_sides(self, spec: AttentionSpec) -> frozenset[str]:
        """The sides changed by this transform, of "q", "k" and "v"."""
        return frozenset("qk")

    def normalises_length(self) -> bool:
        """True if the transformed vectors of every head all have the same length."""
        return False

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        """Orthogonal maps that commute with this transform; by default none on changed sides."""
        changed = self.transformed_sides(spec) & frozenset({"k": "qk", "v": "v"}[side])
        return SymmetryGroup() if changed else super().symmetry(spec, side, p)

    def precompute(
        self, sequence: SequenceInfo, table_dtype: torch.dtype, p: PartParams, keeps: bool = False
    ) -> Any:
        """Values that depend on positions only, such as rotary angles; computed once and passed to
        `transform`.

        `table_dtype` has enough precision for angles. With `keeps`, the values may be kept in
        `p.cached` for later calls.
        """
        return None

    @abstractmethod
    def transform(self, x_BTHK: Tensor, side: str, precomputed: Any, p: PartParams) -> Tensor: ...

    def as_matrix(self, side: str, p: Mapping[str, Tensor]) -> Tensor | None:
        """The matrix [out, in] applied to every head's channels; None if not linear."""
        return None

    def without_sides(self, sides: frozenset[str]) -> Self | None:
        """This transform on its other sides only; None if no side remains."""
        return self

    def as_single_vector(
        self, spec: AttentionSpec, heads: int, p: Mapping[str, Tensor]
    ) -> SingleVectorTransform | None:
        """This transform for `heads` key heads concatenated into one vector; None if there is no
        such form.
        """
        return None


class SingleVectorTransform(NamedTuple):
    """A transform of several heads concatenated into one vector.

    `channel_sources` lists the (head, channel) of each channel that `transform` changes; `weights`
    are its parameters.
    """

    transform: QKTransform
    channel_sources: tuple[tuple[int, int], ...]
    weights: Mapping[str, Tensor]


class ScoreStep(Modifier):
    """Changes each score on its own.

    `score` is written once and works on a single number (the reference), a score tensor (dense
    backends) or inside a FlexAttention kernel. `additive` steps only add a bias that does not
    depend on the score.
    """

    additive: ClassVar[bool] = False
    per_head: ClassVar[bool] = False  # True if query factors differ between score heads
    unrestricted_sides: ClassVar[str] = "v"

    @property
    def phase(self) -> Phase:
        """On the scores."""
        return Phase.SCORES

    def query_factors(self, context: QueryContext, p: PartParams) -> Tensor | None:
        """Factors [B, T, H, R] of each query, passed on to `score`; None if the step needs none."""
        return None

    @abstractmethod
    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor: ...


class MixFactors(NamedTuple):
    """Factors of queries and of keys by name, of all tokens or of one pair; see `Mix`."""

    query: Mapping[str, Tensor]
    key: Mapping[str, Tensor]


class JointStep(Modifier):
    """Changes several scores or weights together: of all heads at a pair (`Mix`), or of all keys of
    a query (`RowStep`). The core computes all heads in one call.
    """


class Mix(JointStep):
    """Mixes heads at every (query, key) pair, on the scores or on the weights.

    `position_independent` mixes use the same mixing matrix at all pairs.
    """

    position_independent: ClassVar[bool] = False

    def num_outputs(self, heads: int) -> int:
        """The number of heads after mixing `heads` heads."""
        return heads

    def mixed_flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """The part of `flops` that multiplies mixed scores or weights, without other products."""
        return self.flops(spec, work)

    def query_factors(self, x_BTD: Tensor, p: PartParams) -> dict[str, Tensor]:
        """Factors of each query token, by name."""
        return {}

    def key_factors(self, z_BSE: Tensor, p: PartParams) -> dict[str, Tensor]:
        """Factors of each key token, by name; they are cached with its keys and values."""
        return {}

    def pair_bias(self, p: PartParams) -> Tensor | None:
        """A number for each head after mixing that is added at every allowed pair, [heads]; None if
        there is none.

        `mix_pair` adds it; `mix` does not, because it sees no mask.
        """
        return None

    @abstractmethod
    def mix_pair(self, a_H: Tensor, factors: MixFactors, p: PartParams) -> Tensor: ...
    @abstractmethod
    def mix(self, a_BHTS: Tensor, factors: MixFactors, p: PartParams) -> Tensor: ...

    def fused_mix(self, a_BHTS: Tensor, factors: MixFactors, p: PartParams) -> Tensor:
        """Like `mix`, in one pass over all pairs where a fused kernel exists."""
        return self.mix(a_BHTS, factors, p)


class RowFactors(NamedTuple):
    """Inputs of a `RowStep` beside the scores, for a whole call or for one query with its keys.

    `query` has the factors of the queries, and `key` those of the keys by name. `positions` has the
    positions i of queries and j of keys, `keys` all key heads, and `scale` the factor of scores.
    For one query, `query` is [R], tensors of `key` and `positions.j` start with the axis of keys,
    `keys` is [S, G, K], and there is no mask `allowed`.

    `carried` is the result of `RowStep.carry` for the queries before those of the call: 0 if there
    are none, None if it has to be computed from the factors of the keys.
    """

    query: Tensor | None
    key: Mapping[str, Tensor]
    positions: ScorePosition
    keys: Tensor
    key_head_of_query: tuple[int, ...]
    scale: float
    allowed: Tensor | None = None
    carried: Tensor | float | None = None

    def keys_of(self, head: int) -> Tensor:
        """Return the keys [B, S, K] that a score head compares with."""
        return self.keys[..., self.key_head_of_query[head], :]

    def sum_after(self, x_BHTS: Tensor) -> Tensor:
        """Return the sum over the allowed keys of each query that come after a key."""
        assert self.allowed is not None, "one query has no mask"
        x_BHTS = x_BHTS.masked_fill(~self.allowed, 0.0)
        return x_BHTS.flip(-1).cumsum(-1).flip(-1) - x_BHTS


class RowStep(JointStep):
    """Changes the scores of a query over all of its keys together, which are ordered by position.

    `change_row` defines it for one head of one query: its scores on the allowed keys, in order.
    `change_rows` does so for all; its results at pairs that are not allowed are ignored.
    """

    positional: ClassVar[bool] = True
    unrestricted_sides: ClassVar[str] = "v"
    needs_one_mask: ClassVar[bool] = False  # it reads keys and queries by the mask of all heads
    additive: ClassVar[bool] = False  # adds numbers that do not depend on the scores

    @property
    def phase(self) -> Phase:
        """On the scores."""
        return Phase.SCORES

    def order_conflicts(self, spec: AttentionSpec) -> Iterator[str]:
        """Return the reasons why keys have no order in this spec that a query is the end of."""
        name = type(self).__name__
        if spec.source is not None:
            yield f"{name} needs queries and keys of one sequence; leave source out"
        if spec.pattern.tokens_before_decode != 0:
            yield (
                f"{name} sums from a key to the query after it, but {spec.pattern.text} allows "
                "later keys; use pattern causal() or a window of past tokens"
            )
        if spec.num_heads_after(Phase.SCORES) != spec.heads.q:
            yield f"{name} needs one row of scores per query head; use mixes with heads=0"

    def first_step_conflicts(self, spec: AttentionSpec, action: str) -> Iterator[str]:
        """Return the reason why another part changes the scores before this step uses them."""
        name = type(self).__name__
        first = next(part for part in spec.modifiers if part.phase is Phase.SCORES)
        if first is not self:
            other = type(first).__name__
            yield (
                f"{name} {action} the scores of queries and keys, before {other} changes them; "
                f"write it before {other}"
            )

    def query_factors(self, context: QueryContext, p: PartParams) -> Tensor | None:
        """Factors [B, T, H, R] of each query; None if the step needs none."""
        return None

    def key_factors(self, z_BSE: Tensor, q_BSHK: Tensor, p: PartParams) -> dict[str, Tensor]:
        """Factors of each key token, by name, from its input and its queries; they are cached."""
        return {}

    def carry(self, s_BHTS: Tensor, factors: RowFactors, p: PartParams) -> Tensor | None:
        """Summary of these queries and all before them that later queries of the sequence need,
        computed from the scores before this step; None if they need none.
        """
        return None

    @abstractmethod
    def change_row(self, s_S: Tensor, head: int, factors: RowFactors, p: PartParams) -> Tensor: ...
    @abstractmethod
    def change_rows(self, s_BHTS: Tensor, factors: RowFactors, p: PartParams) -> Tensor: ...


class WeightStep(Modifier):
    """Changes each attention weight on its own, after normalisation."""

    @property
    def phase(self) -> Phase:
        """On the weights."""
        return Phase.WEIGHTS

    @abstractmethod
    def transform_weights(self, w_BHTS: Tensor, p: PartParams) -> Tensor: ...


class ValueStep(Modifier):
    """Adds a vector to each value that depends on the positions of the query and the key."""

    unrestricted_sides: ClassVar[str] = "k"

    @property
    def phase(self) -> Phase:
        """On the values."""
        return Phase.VALUES

    @abstractmethod
    def pair_value(self, i: int, j: int, p: PartParams) -> Tensor: ...
    @abstractmethod
    def weighted_values(self, w_BRTS: Tensor, i: Tensor, j: Tensor, p: PartParams) -> Tensor: ...


class OutputStep(Modifier):
    """Changes per-head outputs token by token; with `combines_rows`, several rows become one output
    head.

    `transform_outputs` receives o_BTRV, one output for each row of weights (or for each output of
    the step before), and returns o_BTOV.
    """

    combines_rows: ClassVar[bool] = False
    unrestricted_sides: ClassVar[str] = "k"

    @property
    def phase(self) -> Phase:
        """On the outputs."""
        return Phase.OUTPUTS

    def required_rows(self, own_rows: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """The input rows, in order and of `rows` in all, from which the output heads with these own
        rows are computed.
        """
        return own_rows

    def own_row_of_output(self, rows: int) -> tuple[int, ...]:
        """The row that identifies each output head, for `rows` input rows and no pruned heads."""
        return tuple(range(rows))

    @abstractmethod
    def transform_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor: ...


class Gate(Modifier):
    """Scales output heads by factors that are known before the attention core runs.

    A backend can therefore skip heads with a factor of zero.
    """

    unrestricted_sides: ClassVar[str] = ""

    @property
    def phase(self) -> Phase:
        """Last, before the merge."""
        return Phase.GATES

    @abstractmethod
    def gate(
        self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None
    ) -> Tensor: ...

    def open_fractions(self, spec: AttentionSpec) -> tuple[Fraction, ...] | None:
        """The fraction of tokens with each output head's gate not exactly zero.

        None if gates never close.
        """
        return None

    def blocks_gradient_when_closed(self) -> bool:
        """True if a gate of zero passes no gradient to the parameters that set it."""
        return False

    def open_probabilities(self, p: PartParams) -> Tensor | None:
        """The probability that each output head's gate is open; None if it depends on the input."""
        return None
