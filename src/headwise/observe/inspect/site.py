"""Sites: the attention layers of any model, with their heads and what can be done to them; and one
attention call of any model: its inputs, and the weights that follow from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.parts.feature_map import to_at_least_float32
from ...attention.spec.attention_spec import AttentionSpec
from ...report.data import Item, Table
from ...report.notebook import NotebookResult
from ...report.render import to_text
from ...util.errors import pluralise
from ..head_names import find_layer

ABILITIES = ("observe", "ablate", "prune", "convert")


class Ability(NamedTuple):
    """State if an operation is possible at a site, and if not, the reason; `condition` is what is
    only known when it is tried.
    """

    possible: bool
    reason: str = ""
    condition: str = ""

    def __str__(self) -> str:
        return self.condition or ("yes" if self.possible else "no")


POSSIBLE = Ability(True)
IF_EXACT = Ability(True, condition="if exact")
IF_EXACT_NOTE = (
    "if exact: the modules themselves are changed, and a change is refused unless the outputs on a "
    "text equal those of the model with ablated or averaged heads"
)


@dataclass(frozen=True)
class Site:
    """One attention layer.

    The name is `stack.layer.kind`; `kind` is "attention" or "cross", and `path` is the path of the
    module. `heads` is the number of output heads, `q` of query heads, `kv` of KV heads, `dim` the
    head dimension. Four abilities: `observe` (read queries, keys and weights), `ablate` (change
    head outputs), `prune` (remove heads) and `convert` (to fewer KV heads). `pattern` is the
    attention pattern. `spec` is the layer as a headwise spec, or None, and then `spec_reason` is
    the reason. `same_as` names an earlier site that runs the same module.
    """

    name: str
    stack: str
    layer: int
    kind: str
    path: str
    heads: int
    q: int
    kv: int
    dim: int
    pattern: str
    spec: AttentionSpec | None
    spec_reason: str
    observe: Ability
    ablate: Ability
    prune: Ability
    convert: Ability
    same_as: str | None = None

    def with_spec(self, spec: AttentionSpec, ability: Ability) -> Site:
        """Return the site of a layer with this spec; `ability` is that to prune and to convert."""
        return replace(
            self,
            heads=len(spec.score_head_of_output),
            q=spec.heads.q,
            kv=spec.heads.kv,
            dim=spec.heads.dim,
            pattern=spec.pattern.text,
            spec=spec,
            spec_reason="",
            prune=ability,
            convert=ability,
        )

    @property
    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        fields = {
            name: value for name, value in asdict(self).items() if name not in (*ABILITIES, "spec")
        }
        abilities = {name: getattr(self, name)._asdict() for name in ABILITIES}
        return {**fields, "spec": None if self.spec is None else str(self.spec), **abilities}


class Sites(NotebookResult, list[Site]):
    """List the sites of a model in layer order.

    Prints as a table, followed by `notes` and the reasons for each "no".
    """

    def __init__(self, sites: Iterable[Site], model: str, notes: Sequence[str] = ()) -> None:
        super().__init__(sites)
        self.model = model
        self.notes = list(notes)

    def find(self, which: int | str) -> Site:
        """Return the site of this name or layer number, as in `observe.head_names`; -1 is the last.

        >>> yes = Ability(True)
        >>> site = Site(
        ...     "decoder.0.attention",
        ...     "decoder",
        ...     0,
        ...     "attention",
        ...     "h.0",
        ...     4,
        ...     4,
        ...     2,
        ...     8,
        ...     "",
        ...     None,
        ...     "",
        ...     *[yes] * 4,
        ... )
        >>> Sites([site], "small").find(0).name
        'decoder.0.attention'
        """
        return find_layer(which, self, self.model)

    @property
    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"model": self.model, "sites": [site.to_dict for site in self], "notes": self.notes}

    @property
    def report_items(self) -> Sequence[Item]:
        """The table of sites."""
        return [replace(self.table, title=f"{self.model}, {pluralise(len(self), 'site')}")]

    def __str__(self) -> str:
        if not self:
            return (
                f"{self.model} has no attention that headwise finds; hw.sites(model, example) "
                "finds it by tracing a "
                "forward call, hw.declare(module, ...) declares one"
            )
        return to_text(self.table)

    @property
    def table(self) -> Table:
        """A row for each site; the notes have the reasons for each "no"."""
        names = ("q", "kv", "dim", "pattern", *ABILITIES)
        rows: list[tuple[Any, ...]] = []
        sites_of_note: dict[str, dict[str, int]] = {}
        for site in self:
            rows.append((site.name, *(_cell(getattr(site, name)) for name in names)))
            reasons = [(name, getattr(site, name).reason) for name in ABILITIES]
            if site.spec is None:
                reasons.append(("spec", site.spec_reason))
            for name, reason in reasons:
                if reason:
                    counts = sites_of_note.setdefault(reason, {})
                    counts[name] = counts.get(name, 0) + 1
        conditions = [site for site in self if IF_EXACT in (site.prune, site.convert)]
        notes = [*self.notes, *([IF_EXACT_NOTE] if conditions else [])]
        for reason, counts in sites_of_note.items():
            where = f"{max(counts.values())} of {len(self)}"
            notes.append(f"no {' or '.join(counts)} at {where}: {reason}")
        return Table("", ("site", *names), rows, notes)


def _cell(value: object) -> Any:
    return str(value) if isinstance(value, Ability) else value


# --- One attention call ---------------------------------------------------------------------------

BY_A_RUN = "hw.sites(model, example) finds attention by a run"
MASK_THRESHOLD = -1e4  # a bias of this or less is treated as a mask
ALL = slice(None)


class ObservedCall(ABC):
    """Base class of attention calls, which `AttentionHook.on_call` receives.

    A call is valid only while it runs, because caches overwrite tensors. `key_positions` are the
    positions of the keys in the text, -1 for an empty slot, or None if they are unknown.
    `unsupported` is the reason why `attention_inputs` is None.
    """

    key_positions: Tensor | None = None
    unsupported: str = "they are not a softmax of q k^T plus a mask"

    @abstractmethod
    def all_weights(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """Return the attention weights of all heads for a range of queries, [B, H, T, S]. `keys`
        must include all allowed keys.
        """

    @abstractmethod
    def allowed_pairs(self, queries: slice = ALL) -> Tensor:
        """Return a mask of the keys that a range of queries may attend to, [B, H or 1, T, S]."""

    @abstractmethod
    def head_values(self, head: int) -> tuple[int, Tensor]:
        """Return the row of weights of an output head, and its values [B, S, V]; raise if they are
        unknown.
        """

    @property
    def queries(self) -> Tensor | None:
        """Return the queries, [B, T, H, K]; None if they are unknown."""
        return None

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of queries and keys."""
        if self.queries is None:
            queries, keys = self.all_weights().shape[2:]
            return queries, keys
        return self.queries.shape[1], self.allowed_pairs(slice(0, 1)).shape[-1]

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        """Return the inputs as tensors, or None if the weights cannot be recomputed from them."""
        return None

    @property
    def streamable_inputs(self) -> AttentionInputs | None:
        """Return `attention_inputs` unless a tensor with all scores must be made for them."""
        return self.attention_inputs

    def head_weights(self, head: int, queries: slice = ALL) -> Tensor:
        """Return the attention weights of one head for a range of queries, [B, T, S]."""
        return self.all_weights(queries)[:, head]


class WeightsOnlyCall(ObservedCall):
    """Represent a call with only its attention weights [B, H, T, S] known, and perhaps which pairs
    are `allowed`, of the same shape.
    """

    unsupported = "the model shows only the weights of its heads, not their values"

    def __init__(self, weights: Tensor, allowed: Tensor | None = None) -> None:
        self.weights = weights
        self.allowed = allowed

    def all_weights(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        return self.weights[:, :, queries, keys]

    def allowed_pairs(self, queries: slice = ALL) -> Tensor:
        """Return the allowed pairs; those where any head has a nonzero weight if the mask is
        unknown.
        """
        if self.allowed is not None:
            return self.allowed[:, :, queries]
        return (self.weights[:, :, queries] != 0).any(1, keepdim=True)

    def head_values(self, head: int) -> tuple[int, Tensor]:
        raise ValueError(
            "only the weights of this layer can be observed, not its values; give this head a "
            "mean instead"
        )


class UnreadableCall(ObservedCall):
    """Represent a call that was not understood; every question raises with the reason."""

    def __init__(self, reason: str) -> None:
        self.unsupported = reason

    def all_weights(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        raise ValueError(f"cannot observe its weights: {self.unsupported}; {BY_A_RUN}")

    def allowed_pairs(self, queries: slice = ALL) -> Tensor:
        return self.all_weights()

    def head_values(self, head: int) -> Any:
        return self.all_weights()


@dataclass(frozen=True)
class AttentionInputs(ObservedCall):
    """Hold queries, keys and values by head, the mask, and how scores are computed.

    Scores are q k^T times `scale`, soft-capped at `softcap`, plus `bias`. `mask` is boolean (true:
    attend) or added to scores; with `causal`, keys after the query are masked. `sinks` are
    additional scores without a value, one per head. `unsupported` names arguments of the layer that
    this class cannot represent; the weights cannot be recomputed then. `kv_head_of_query[h]` is the
    KV head of head h (None: equal groups of neighbouring heads).

    >>> q = torch.zeros(1, 2, 1, 3)
    >>> AttentionInputs(q, q, q, 1.0, causal=True).head_weights(0)
    tensor([[[1.0000, 0.0000],
             [0.5000, 0.5000]]])
    """

    q_BTHK: Tensor
    k_BSGK: Tensor
    v_BSGV: Tensor
    scale: float
    mask: Tensor | None = None
    causal: bool = False
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    unsupported: str = ""
    kv_head_of_query: tuple[int, ...] | None = None
    key_positions: Tensor | None = None

    @property
    def queries(self) -> Tensor | None:
        return None if self.unsupported else self.q_BTHK

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        return None if self.unsupported else self

    def kv_head_of(self, head: int) -> int:
        """Return the KV head of a query head."""
        if self.kv_head_of_query is not None:
            return self.kv_head_of_query[head]
        return head * self.k_BSGK.shape[2] // self.q_BTHK.shape[2]

    def all_weights(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        """Return the weights, recomputed in float32 or float64."""
        if self.unsupported:
            raise ValueError(
                f"cannot recompute weights: {self.unsupported}; read the weights that the model "
                "itself returns"
            )
        q_BHTK = to_at_least_float32(self.q_BTHK[:, queries].transpose(1, 2)) * self.scale
        k_BGSK = to_at_least_float32(self.k_BSGK[:, keys].transpose(1, 2))
        heads = q_BHTK.shape[1]
        if self.kv_head_of_query is not None or heads % k_BGSK.shape[1]:
            k_BGSK = k_BGSK[:, [self.kv_head_of(head) for head in range(heads)]]
        # heads of a KV group share one matrix product
        rows = q_BHTK.unflatten(1, (k_BGSK.shape[1], -1)).flatten(2, 3)
        s_BHTS = (rows @ k_BGSK.transpose(2, 3)).unflatten(2, (-1, q_BHTK.shape[2])).flatten(1, 2)
        if self.softcap is not None:
            s_BHTS = self.softcap * torch.tanh(s_BHTS / self.softcap)
        biases = self.additive_masks(queries, keys)
        for bias in biases:
            s_BHTS = s_BHTS + bias
        masks = self.boolean_masks(queries, keys)
        for mask in masks:
            s_BHTS.masked_fill_(~mask, -torch.inf)
        if self.causal:  # keys up to the first query are masked for no query
            start = queries.indices(self.q_BTHK.shape[1])[0]
            first = max(0, start + 1 - keys.indices(self.k_BSGK.shape[1])[0])
            masked = self._later_keys(queries, keys)[:, first:]
            added = torch.zeros_like(masked, dtype=s_BHTS.dtype).masked_fill_(masked, -torch.inf)
            s_BHTS[..., first:] += added  # faster than to fill the scores of all heads
        if self.sinks is None:
            w_BHTS = s_BHTS.softmax(-1)
            if not biases and not masks:  # every query may attend to the first key
                return w_BHTS
            # a query without any allowed key has weights of zero
            is_empty = s_BHTS.amax(-1, keepdim=True) == -torch.inf
            if is_empty.device.type == "cpu" and not bool(is_empty.any()):
                return w_BHTS
            return w_BHTS.masked_fill(is_empty, 0)
        sink = self.sinks.flatten().to(s_BHTS.dtype)[:, None, None].expand(*s_BHTS.shape[:3], 1)
        return torch.cat([s_BHTS, sink], -1).softmax(-1)[..., :-1]

    def allowed_pairs(self, queries: slice = ALL) -> Tensor:
        q_BTHK = self.q_BTHK[:, queries]
        shape = (len(q_BTHK), 1, q_BTHK.shape[1], self.k_BSGK.shape[1])
        allowed = torch.ones(shape, dtype=torch.bool, device=q_BTHK.device)
        biases = self.additive_masks(queries)
        if biases:
            allowed = allowed & (sum(biases[1:], biases[0]) > MASK_THRESHOLD)
        for mask in self.boolean_masks(queries):
            allowed = allowed & mask
        return allowed & ~self._later_keys(queries, ALL) if self.causal else allowed

    def additive_masks(self, queries: slice = ALL, keys: slice = ALL) -> list[Tensor]:
        """List biases and additive masks to add to scores, [B or 1, heads or 1, T or 1, S or 1]."""
        is_added = self.mask is not None and self.mask.dtype != torch.bool
        biases = [self.bias, self.mask if is_added else None]
        slices = [self._slice(bias, queries, keys) for bias in biases if bias is not None]
        return [to_at_least_float32(bias) for bias in slices]

    def boolean_masks(self, queries: slice = ALL, keys: slice = ALL) -> list[Tensor]:
        """List the boolean mask, true where a key is allowed, if there is one."""
        if self.mask is None or self.mask.dtype != torch.bool:
            return []
        return [self._slice(self.mask, queries, keys)]

    def _later_keys(self, queries: slice, keys: slice) -> Tensor:
        """True where a key comes after the query, [T, S]."""
        device = self.q_BTHK.device
        query_positions = torch.arange(self.q_BTHK.shape[1], device=device)[queries, None]
        return torch.arange(self.k_BSGK.shape[1], device=device)[keys] > query_positions

    def _slice(self, mask: Tensor, queries: slice, keys: slice) -> Tensor:
        """Slice a mask as [B or 1, heads or 1, T or 1, S or 1].

        Adds missing axes and drops columns beyond the keys.
        """
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[:, :, queries] if mask.shape[2] > 1 else mask
        return mask[..., : self.k_BSGK.shape[1]][..., keys] if mask.shape[3] > 1 else mask

    def head_values(self, head: int) -> tuple[int, Tensor]:
        if self.unsupported:
            raise ValueError(
                f"values of this layer are unknown: {self.unsupported}; give this head a mean "
                "instead"
            )
        return head, self.v_BSGV[:, :, self.kv_head_of(head)]


# --- Vectors of single heads, which hooks may replace ---------------------------------------------

OUTPUT = "output"  # of a head, before the output projection
VECTOR_FIELDS = {"q": "q_BTHK", "k": "k_BSGK", "v": "v_BSGV"}
PATTERN = "pattern"  # attention weights
HEAD_PARTS = (*VECTOR_FIELDS, PATTERN, OUTPUT)


class HeadVectors:
    """Queries, keys, values and attention weights by query head in one call, which hooks may
    replace.

    Each head has keys and values of its own, also where several heads share them. So a change of
    one head leaves the other heads of its group as they are.

    >>> q, kv = torch.zeros(1, 2, 2, 3), torch.ones(1, 2, 1, 3)
    >>> vectors = HeadVectors(AttentionInputs(q, kv, kv, 1.0))
    >>> vectors.replace("v", 1, torch.zeros(1, 2, 3))
    >>> vectors.edit_outputs(torch.ones(1, 2, 2, 3))[0, 0]
    tensor([[1., 1., 1.],
            [0., 0., 0.]])
    """

    def __init__(self, call: ObservedCall) -> None:
        inputs = call.attention_inputs
        if inputs is None:
            raise ValueError(
                f"cannot replace queries, keys, values and weights of heads, because the weights "
                f"cannot be computed again: {call.unsupported}; patch the outputs of heads"
            )
        kv_heads = [inputs.kv_head_of(head) for head in range(inputs.q_BTHK.shape[2])]
        self.inputs = replace(
            inputs,
            k_BSGK=inputs.k_BSGK[:, :, kv_heads],
            v_BSGV=inputs.v_BSGV[:, :, kv_heads],
            kv_head_of_query=None,
        )
        self.patterns: dict[int, Tensor] = {}
        self.changed_heads: set[int] = set()

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.inputs.q_BTHK.shape[2]

    def get(self, part: str, head: int) -> Tensor:
        """Return q [B, T, K], k [B, S, K], v [B, S, V] or the pattern [B, T, S] of a head."""
        if part != PATTERN:
            return getattr(self.inputs, VECTOR_FIELDS[part])[:, :, head]
        return self._weights([head])[:, 0]

    def replace(self, part: str, head: int, value: Tensor) -> None:
        """Replace one part of a head; its output is computed again."""
        self.changed_heads.add(head)
        if part == PATTERN:
            self.patterns[head] = value
            return
        field = VECTOR_FIELDS[part]
        vectors = getattr(self.inputs, field).clone()
        vectors[:, :, head] = value
        self.inputs = replace(self.inputs, **{field: vectors})

    def change_all(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change q, k and v [B, T, H, width] of all heads; all outputs are computed again."""
        fields = VECTOR_FIELDS.values()
        self.inputs = replace(
            self.inputs, **{one: change(getattr(self.inputs, one)) for one in fields}
        )
        self.changed_heads.update(range(self.num_heads))

    def edit_outputs(self, outputs: Tensor) -> Tensor:
        """Return the head outputs [B, T, H, V] with those of changed heads computed again."""
        heads = sorted(self.changed_heads)
        if not heads:
            return outputs
        weights = self._weights(heads)
        v_BHSV = self.inputs.v_BSGV[:, :, heads].transpose(1, 2).to(weights.dtype)
        edited = outputs.clone()
        edited[:, :, heads] = (weights @ v_BHSV).transpose(1, 2).to(outputs.dtype)
        return edited

    def _weights(self, heads: list[int]) -> Tensor:
        """Return the attention weights of some heads, [B, heads, T, S]."""
        inputs = self.inputs
        sinks = inputs.sinks
        weights = replace(
            inputs,
            q_BTHK=inputs.q_BTHK[:, :, heads],
            k_BSGK=inputs.k_BSGK[:, :, heads],
            v_BSGV=inputs.v_BSGV[:, :, heads],
            mask=_take_heads(inputs.mask, heads),
            bias=_take_heads(inputs.bias, heads),
            sinks=None if sinks is None else sinks.flatten()[heads],
        ).all_weights()
        replaced = [(n, head) for n, head in enumerate(heads) if head in self.patterns]
        if replaced:
            weights = weights.clone()
        for n, head in replaced:
            weights[:, n] = self.patterns[head].to(weights.dtype)
        return weights


def _take_heads(mask: Tensor | None, heads: list[int]) -> Tensor | None:
    """Return the part of a mask [..., heads or 1, T, S] that belongs to some heads."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    return mask[..., heads, :, :]
