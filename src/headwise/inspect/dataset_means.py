"""A model run over a data set while somebody looks at its heads: what a batch is, and which of its tokens count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..errors import suggest
from ..masking.sequence_info import SequenceInfo
from .ablation import ALL_HEADS, HeadCall, HeadPatch, HeadRef, Noise, PatchFunction, check_shape, group_by_site
from .attention_sites import find_attention
from .hooks import AttentionCall, HeadValues
from .site_hooks import hook_sites

TokenMasks = Mapping[str, Tensor]  # by stack: which tokens [B, T] count, where not all do


@dataclass(eq=False)
class OutputObserver(ABC):
    """A watcher that looks at what some heads of a site say; `tokens` of the batch count, as it is told before."""

    needs_call = False
    site: str
    head_indices: tuple[int, ...]
    token_mask: Tensor | None = field(default=None, init=False)
    call: AttentionCall | None = field(default=None, init=False)

    def on_call(self, seen: AttentionCall) -> None:
        """Keep what the attention works with, until it is known what they say."""
        self.call = seen

    def on_head_outputs(self, z: Tensor) -> None:
        """Look at what they say."""
        if max(self.head_indices) >= z.shape[-2]:
            raise ValueError(f"{self.site} has no head {max(self.head_indices)}; give heads in 0..{z.shape[-2] - 1}")
        said = z.detach()[..., list(self.head_indices), :]
        counts = torch.ones(said.shape[:-2], dtype=torch.bool, device=z.device)
        if self.token_mask is not None:
            check_shape(self.site, self.token_mask, said[..., 0, :])
            counts &= self.token_mask.to(z.device)
        self.observe(said, counts)

    @abstractmethod
    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        """What they say, [B, T, heads, width], and which tokens [B, T] count."""


Observer = TypeVar("Observer", bound=OutputObserver)


def observe_dataset(
    model: nn.Module,
    batches: Iterable[Any],
    heads: Iterable[HeadRef] | None,
    make_observer: Callable[[str, tuple[int, ...]], Observer],
) -> list[Observer]:
    """Lookers at these heads, or at all there are, after the model has run over all batches."""
    those = find_attention(model)
    named = group_by_site(model, those, [(one.site.name, ALL_HEADS) for one in those] if heads is None else heads)
    _check_batches(model, batches, named)
    sites = {one.site.name: one.site for one in those if one.site.name in named}
    lookers = {name: make_observer(name, tuple(own)) for name, own in named.items()}
    for name, site in sites.items():
        if not site.silence.can:
            raise ValueError(f"{name} cannot be watched: {site.silence.why}")
        if lookers[name].needs_call and not site.see.can:
            raise ValueError(f"{name} cannot be seen: {site.see.why}")
    stacks, any_yet = {one.site.stack for one in those}, False
    with torch.no_grad(), hook_sites(model, those, lookers) as posts:
        for batch in batches:
            any_yet = True
            inputs, told = batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, None)
            masks = _padding_masks(inputs, stacks) if told is None else _read_masks(told, stacks)
            for name, looker in lookers.items():
                looker.token_mask = masks.get(sites[name].stack)
            _run_model(model, inputs)
    posts.check_all_ran()
    if not any_yet:
        raise ValueError("there is no batch; give at least one")
    return list(lookers.values())


def _check_batches(model: nn.Module, batches: object, named: Mapping[str, object]) -> None:
    if not named:
        raise ValueError("no heads are named; give some, or leave heads out for all")
    if any(module.training for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is in train mode, where heads say what dropout leaves; call .eval()")
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise ValueError(f"batches are of type {type(batches).__name__}; give several, or one as [batch]")


def _run_model(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, Tensor):
        model(inputs)
    else:
        raise ValueError(f"a batch is of type {type(inputs).__name__}; give a tensor, or what the model is called with")


def _read_masks(told: object, stacks: set[str]) -> TokenMasks:
    """Masks as somebody says them: one for all stacks, or by stack."""
    masks = told if isinstance(told, Mapping) else dict.fromkeys(stacks, told)
    for stack, mask in masks.items():
        if stack not in stacks:
            raise ValueError(f"the model has no stack {stack!r}; {suggest(str(stack), stacks)}")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError("beside a batch stands which of its tokens count; give a tensor [B, T] of torch.bool")
    return masks


def _padding_masks(inputs: object, stacks: set[str]) -> TokenMasks:
    """What a batch itself says of padding, as long as there is no doubt of whom it speaks."""
    if not isinstance(inputs, Mapping):
        return {}
    hides = inputs.get("attention_mask", inputs.get("sequence"))
    mask = hides.is_real if isinstance(hides, SequenceInfo) else hides
    if not isinstance(mask, Tensor) or bool((mask == 1).all()):
        return {}
    if mask.dim() != 2 or len(stacks) > 1:
        raise ValueError(
            "the mask of this batch hides tokens, and it is not plain where; "
            f"give (batch, {{stack: mask [B, T]}}) for {', '.join(sorted(stacks))}"
        )
    return dict.fromkeys(stacks, mask.bool())


# --- What heads say over data --------------------------------------------------------------------------

MEAN_KINDS = ("overall", "position")


def head_means(
    model: nn.Module, batches: Iterable[Any], heads: Iterable[HeadRef] | None = None, *, kind: str = "overall"
) -> dict[HeadRef, Tensor]:
    """The mean of what each head says over the tokens of a data set, in float64: [width], or by position [1, T, width].

    A batch is what the model reads: a tensor, or a mapping of what it is called with; or a pair of this and of the
    tokens that count: a mask [B, T], or one for each stack by its name. Without, what an `attention_mask` hides does
    not count, nor does padding among `tokens` of ours. With kind="position" rows begin at their first column.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... ).eval()
    >>> means = head_means(net, [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])], [(0, 1)])
    >>> [(head, mean.shape) for head, mean in means.items()]
    [(('decoder.0.attention', 1), torch.Size([4]))]
    >>> with hw.patch(net, means):
    ...     _ = net(torch.tensor([[3, 1, 4]]))
    """
    if kind not in MEAN_KINDS:
        raise ValueError(f'kind={kind!r} is no kind of mean; use "overall" or "position"')
    sums = observe_dataset(model, batches, heads, partial(OutputMoments, kind=kind))
    return {(one.site, head): one.mean[..., n, :] for one in sums for n, head in enumerate(one.head_indices)}


def head_noise(
    model: nn.Module, batches: Iterable[Any], heads: Iterable[HeadRef] | None = None, *, seed: int = 0
) -> dict[HeadRef, Noise]:
    """Noise with the mean and the standard deviation of what each head says over a data set; batches as `head_means`.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... ).eval()
    >>> with hw.patch(net, head_noise(net, [torch.tensor([[3, 1, 4]])], [(0, 1)], seed=3)):
    ...     _ = net(torch.tensor([[3]]))
    """
    Noise(seed)  # which refuses what is no seed
    sums = observe_dataset(model, batches, heads, OutputMoments)
    return {
        (one.site, head): Noise(seed, one.mean[n], one.std[n])
        for one in sums
        for n, head in enumerate(one.head_indices)
    }


def head_outputs(model: nn.Module, inputs: Any, heads: Iterable[HeadRef] | None = None) -> dict[HeadRef, Tensor]:
    """What each head says of one input, [B, T, width], before it is merged.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... ).eval()
    >>> other = head_outputs(net, torch.tensor([[3, 1, 4]]), [(0, 1)])
    >>> with hw.patch(net, other):
    ...     _ = net(torch.tensor([[1, 5, 9]]))
    """
    kept = observe_dataset(model, [(inputs, {})], heads, OutputRecorder)
    return {(one.site, head): said for one in kept for head, said in one.outputs.items()}


@dataclass(eq=False)
class OutputRecorder(OutputObserver):
    """It keeps them."""

    outputs: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        if self.outputs:
            raise ValueError(f"{self.site} ran twice; give an input that the model reads in one call")
        self.outputs = {head: outputs[..., n, :].clone() for n, head in enumerate(self.head_indices)}


@dataclass(eq=False)
class OutputMoments(OutputObserver):
    """It keeps count, mean and squared distances from the mean, brought up to date batch by batch.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """

    kind: str = "overall"
    count: Tensor = field(default_factory=lambda: torch.zeros(()))
    means: Tensor = field(default_factory=lambda: torch.zeros(()))
    squared_deviations: Tensor = field(default_factory=lambda: torch.zeros(()))

    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        if self.kind == "position":
            self._check_columns(outputs, token_mask)
        else:
            outputs, token_mask = outputs.flatten(0, -3)[:, None], token_mask.flatten()[:, None]
        kept = token_mask[..., None, None]
        own = torch.where(kept, outputs.double(), 0.0)
        count = kept.sum(0).double()
        mean = own.sum(0) / count.clamp(min=1)
        squares = torch.where(kept, (own - mean).square(), 0.0).sum(0)
        if not mean.isfinite().all():
            raise ValueError(
                f"heads of {self.site} say numbers that are not finite; say which tokens count, or mend it"
            )
        self._add(count.cpu(), mean.cpu(), squares.cpu())

    def _check_columns(self, said: Tensor, counts: Tensor) -> None:
        if said.dim() != 4 or (counts[:, 1:] & ~counts[:, :-1]).any():
            raise ValueError(f"positions of {self.site} are its columns; give rows that are padded on the right")

    def _add(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        if not self.means.dim():
            self.count, self.means, self.squared_deviations = count, mean, squares
            return
        long = max(len(count), len(self.count))
        count, mean, squares = (_pad_positions(new, long) for new in (count, mean, squares))
        own, means, seen = (_pad_positions(old, long) for old in (self.count, self.means, self.squared_deviations))
        self.count, far = own + count, mean - means
        share = count / self.count.clamp(min=1)
        self.means = means + far * share
        self.squared_deviations = seen + squares + far.square() * own * share

    @property
    def mean(self) -> Tensor:
        """Their mean, [heads, width] or [1, T, heads, width]."""
        there = self.count.flatten() > 0
        if not there.any():
            raise ValueError(f"no token of {self.site} counts; give batches with some that do")
        return self.means[0] if self.kind == "overall" else self.means[there][None]

    @property
    def std(self) -> Tensor:
        """Their standard deviation, [heads, width]."""
        if self.count.min() < 2:
            raise ValueError(f"one token of {self.site} has no standard deviation; give more")
        return (self.squared_deviations / (self.count - 1)).sqrt()[0]


def _pad_positions(one: Tensor, length: int) -> Tensor:
    return torch.cat([one, one.new_zeros(length - len(one), *one.shape[1:])])


# --- Heads that look by distance alone -----------------------------------------------------------------

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}  # relative; of what is narrower, less can be asked
LOW_PRECISION_TOLERANCE = 0.05


@dataclass(frozen=True, eq=False)
class OffsetWeights(HeadPatch):
    """A head whose weight of a key follows from its offset, query minus key, alone.

    `weights[n]` belongs to offset n - longest + 1, where `longest` is how many tokens the longest text had; it is the
    mean over `pairs[n]` pairs. The weights of a query are brought to the sum `mass` over the keys that it may read:
    one, or less where a head has a sink.
    """

    needs_call: ClassVar[bool] = True
    weights: Tensor
    pair_counts: Tensor
    row_sum: float

    @property
    def max_length(self) -> int:
        """How many tokens the longest text had."""
        return (len(self.weights) + 1) // 2

    def make_function(self, site: str, head: int) -> PatchFunction:
        return self._output

    def _output(self, moment: HeadCall) -> Tensor:
        assert moment.call is not None
        own_BTV, reading = moment.output, moment.call.head_values(moment.head)
        a_BTS = self.weights_at(
            moment.site, _allowed_pairs(moment.site, moment.call, reading, own_BTV), moment.token_mask
        )
        return (a_BTS.to(reading.v_BSV) @ reading.v_BSV).to(own_BTV)

    def weights_at(self, site: str, readable_BTS: Tensor, token_mask: Tensor | None) -> Tensor:
        """The weights over the keys that each query may read, in float64; only the tokens asked for need be known."""
        count, device = readable_BTS.shape[1], readable_BTS.device
        offset = _make_offsets(count, device) - count + 1
        beyond = offset.abs() >= self.max_length
        place = (offset + self.max_length - 1).clamp(0, len(self.weights) - 1)
        unknown = readable_BTS & (beyond | (self.pair_counts.to(device)[place] == 0))
        if token_mask is not None:
            unknown = unknown & token_mask[..., None]
        if unknown.any():
            far = int(offset[unknown.any(0)][0])
            raise ValueError(
                f"{site} reads at offset {far}, of which the data say nothing; give offset_means longer texts"
            )
        a_BTS = torch.where(readable_BTS, self.weights.to(device)[place], 0.0)
        total_BT = a_BTS.sum(-1)
        return a_BTS * torch.where(total_BT > 0, self.row_sum / total_BT, 0.0)[..., None]


def offset_means(
    model: nn.Module, batches: Iterable[Any], heads: Iterable[HeadRef] | None = None
) -> dict[HeadRef, OffsetWeights]:
    """For each head, the mean weight of all keys at one offset from their query, over a data set; for `hw.patch`.

    Batches are those of `hw.head_means`; queries that do not count are left out. What a head loses when it is patched
    so is what it knew of content.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... ).eval()
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> means = offset_means(net, [ids], [(0, 1)])
    >>> means["decoder.0.attention", 1].pair_counts.tolist()  # at offsets -2 .. 2
    [0.0, 0.0, 3.0, 2.0, 1.0]
    >>> with hw.patch(net, means):
    ...     _ = net(ids)
    """
    return {
        (one.site, head): OffsetWeights(*one.mean_weights(head))
        for one in observe_dataset(model, batches, heads, OffsetObserver)
        for head in one.head_indices
    }


@dataclass(eq=False)
class OffsetTotals:
    """Of one head: the sum of its weights at each offset, of how many pairs, and the sum of all rows, of how many."""

    weights: Tensor
    pair_counts: Tensor
    row_sum: float = 0.0
    num_rows: int = 0


@dataclass(eq=False)
class OffsetObserver(OutputObserver):
    """It sums weights by offset."""

    needs_call = True
    totals: dict[int, OffsetTotals] = field(default_factory=dict)

    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        seen, self.call = self.call, None
        assert seen is not None
        for n, head in enumerate(self.head_indices):
            reading = seen.head_values(head)
            readable_BTS = _allowed_pairs(self.site, seen, reading, outputs[..., n, :])
            a_BTS = seen.head_weights(reading.score_head)
            self._check_output(head, a_BTS, reading, torch.where(token_mask[..., None], outputs[..., n, :], 0.0))
            self._add(head, a_BTS.double(), readable_BTS & token_mask[..., None])

    def _check_output(self, head: int, a_BTS: Tensor, reading: HeadValues, said_BTV: Tensor) -> None:
        """Only what is weights times values can be had by other weights."""
        exact = torch.promote_types(said_BTV.dtype, torch.float32)
        read_BTV = a_BTS.to(exact) @ reading.v_BSV.to(exact)
        far = torch.where((said_BTV != 0).any(-1, keepdim=True), read_BTV - said_BTV.to(exact), 0.0).abs().max()
        if (
            not far <= TOLERANCE.get(said_BTV.dtype, LOW_PRECISION_TOLERANCE) * said_BTV.abs().max()
            or (a_BTS < 0).any()
        ):
            raise ValueError(
                f"head {head} of {self.site} says more than the mean of what it reads; other weights do not"
            )

    def _add(self, head: int, a_BTS: Tensor, counted_BTS: Tensor) -> None:
        count = a_BTS.shape[1]
        place = _make_offsets(count, a_BTS.device).expand_as(counted_BTS)[counted_BTS]
        weights = torch.bincount(place, a_BTS[counted_BTS], minlength=2 * count - 1).cpu()
        pairs = torch.bincount(place, minlength=2 * count - 1).double().cpu()
        had = self.totals.get(head, OffsetTotals(torch.zeros(1).double(), torch.zeros(1).double()))
        self.totals[head] = OffsetTotals(
            _add_centred(had.weights, weights),
            _add_centred(had.pair_counts, pairs),
            had.row_sum + float(weights.sum()),
            had.num_rows + int(counted_BTS.any(-1).sum()),
        )

    def mean_weights(self, head: int) -> tuple[Tensor, Tensor, float]:
        """Means by offset, of how many pairs, and the mean sum of a row."""
        total = self.totals[head]
        if not total.num_rows:
            raise ValueError(f"no token of {self.site} counts; give batches with some that do")
        return total.weights / total.pair_counts.clamp(min=1), total.pair_counts, total.row_sum / total.num_rows


def _make_offsets(count: int, device: torch.device) -> Tensor:
    """Query minus key for all pairs of so many tokens, counted from the least."""
    place = torch.arange(count, device=device)
    return place[:, None] - place + count - 1


def _add_centred(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two that are centred alike."""
    short, long = sorted((one, other), key=len)
    around = (len(long) - len(short)) // 2
    return long + torch.nn.functional.pad(short, (around, around))


def _allowed_pairs(site: str, core: AttentionCall, reading: HeadValues, own_BTV: Tensor) -> Tensor:
    """Which keys each query of a head may read, [B or 1, T, S], if its weights by offset can be meant."""
    queries, keys = own_BTV.shape[1], reading.v_BSV.shape[1]
    if own_BTV.dim() != 3 or queries != keys:
        raise ValueError(
            f"{site} reads {keys} keys with {queries} queries; offsets are known where a text reads itself"
        )
    if reading.v_BSV.shape[-1] != own_BTV.shape[-1]:
        wide = own_BTV.shape[-1], reading.v_BSV.shape[-1]
        raise ValueError(f"heads of {site} say {wide[0]} numbers and read {wide[1]}; these are not the same")
    allowed = core.allowed_pairs()
    return allowed[:, reading.score_head if allowed.shape[1] > 1 else 0].expand(-1, queries, keys)
