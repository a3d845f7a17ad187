"""What attentions work with, kept on the host as they run, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..models import Transformer
from ..traces import AttentionCallRecord, AttentionRecord, PackedMask, TokenRow, Trace
from ..traces.attention_trace import format_bytes
from ..traces.packed_masks import Array
from .attention_sites import find_attention
from .hooks import AttentionCall, AttentionInputs, SiteModule
from .model_inputs import ModelInputs, get_streams, prepare_inputs
from .site import Site, Sites
from .site_hooks import ModelRun

PRECISIONS = ("own", "half")
EXTRA_TENSORS = ("v", "z")


@dataclass(frozen=True)
class Capture:
    """What is kept of a run, beside queries and keys.

    `also` may name "v", the values, and "z", what each head says. `sites` are names or layers, all where none is
    given. What is kept may fill `budget` bytes. numbers="own" keeps numbers as the model has them; "half" keeps
    sixteen bits of each, and weights computed from them are off by as much.

    >>> Capture(extra=("values",))
    Traceback (most recent call last):
    headwise.errors.SpecError: Capture(also=('values',)) holds 'values'; give some of v, z
    """

    extra: tuple[str, ...] = ()
    sites: tuple[str | int, ...] = ()
    budget: int = 10**9
    precision: str = "own"

    def __post_init__(self) -> None:
        if wrong := [name for name in self.extra if name not in EXTRA_TENSORS]:
            raise SpecError(f"Capture(also={self.extra!r}) holds {wrong[0]!r}; give some of {', '.join(EXTRA_TENSORS)}")
        if self.precision not in PRECISIONS:
            raise SpecError(f"Capture(numbers={self.precision!r}) is unknown; give one of {', '.join(PRECISIONS)}")
        if type(self.budget) is not int or self.budget < 1:
            raise SpecError(f"Capture(budget={self.budget!r}) is no number of bytes; give a whole one, as in 10**9")

    @property
    def bytes_per_number(self) -> int:
        """The bytes of a number."""
        return 2 if self.precision == "half" else 4


@dataclass
class CaptureBuffer:
    """What all layers of a run keep together: the bytes so far, and each grid once."""

    capture: Capture
    nbytes: int = 0
    grids: list[PackedMask] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _masks_seen: list[tuple[Tensor, int]] = field(default_factory=list)

    def copy_to_host(self, tensor: Tensor) -> Array:
        """A tensor on the host, if there is room."""
        half = self.capture.precision == "half" or tensor.dtype == torch.float16
        kind = torch.float16 if half else torch.float32
        self.reserve(tensor.numel() * kind.itemsize)
        # to() may hand back the very tensor, which a cache writes over later
        return tensor.detach().to("cpu", kind, copy=True).contiguous().numpy()

    def reserve(self, nbytes: int) -> None:
        """Take note of more bytes, or refuse them."""
        self.nbytes += nbytes
        if self.nbytes > self.capture.budget:
            fact = (
                f"what is kept takes {format_bytes(self.nbytes)} and more, beyond a budget of "
                f"{format_bytes(self.capture.budget)}"
            )
            raise SpecError(f"{fact}; give a larger one, fewer sites, or numbers='half'")

    def add_mask(self, tensor: Tensor) -> int:
        """The number of a grid; masks that many layers share are looked at once."""
        for met, number in self._masks_seen:
            if met is tensor:
                return number
        told = tensor.detach()[(None,) * (4 - tensor.dim())]  # a grid of two or three axes is one for all
        grid = PackedMask.pack((told if told.dtype == torch.bool else told.float()).cpu().numpy())
        number = self._numbers.get(grid.identity)
        if number is None:
            number = self._numbers[grid.identity] = len(self.grids)
            self.reserve(grid.values.nbytes)
            self.grids.append(grid)
        self._masks_seen = [
            *self._masks_seen[-1:],
            (tensor, number),
        ]  # two: layers by turns local and global share one of each
        return number


class CallRecorder:
    """A watcher that keeps what one attention works with, call after call."""

    needs_call = True

    def __init__(self, site: Site, store: CaptureBuffer) -> None:
        self.site, self.store = site, store
        self.calls: list[AttentionCallRecord] = []
        self.pieces: dict[str, list[Array]] = {}
        self.reads: tuple[int, ...] = ()
        self.why = ""

    def on_call(self, seen: AttentionCall) -> None:
        """Keep it, or the reason why it cannot be kept."""
        if self.why:
            return
        told = seen.attention_inputs
        if told is None or not self._has_same_widths(told):
            self._record_weights(seen)
        else:
            self._record_scores(told)

    def on_head_outputs(self, z: Tensor) -> None:
        """Keep what heads say, if that was asked."""
        if "z" in self.store.capture.extra and not self.why:
            self._append("z", self.store.copy_to_host(z))

    def to_layer(self, streams: tuple[str, str]) -> AttentionRecord:
        """All that was kept."""
        arrays = {name: _concatenate(own) for name, own in self.pieces.items()}
        site = self.site
        heads = len(self.reads) or next(a.shape[1] for name, a in arrays.items() if name.startswith("weights"))
        return AttentionRecord(
            site.name,
            site.stack,
            site.layer,
            site.kind,
            site.path,
            heads,
            self.reads,
            *streams,
            tuple(self.calls),
            arrays,
        )

    def _append(self, name: str, array: Array) -> None:
        self.pieces.setdefault(name, []).append(array)

    def _num_queries(self) -> int:
        """How many queries were asked before."""
        return self.calls[-1].queries[1] if self.calls else 0

    def _count(self, name: str) -> int:
        return sum(piece.shape[1] for piece in self.pieces.get(name, ()))

    def _has_same_widths(self, told: AttentionInputs) -> bool:
        """Whether queries and keys are as wide as those before: a latent is read whole, then step by step as it is."""
        widths = {"q": told.q_BTHK.shape[2:], "k": told.k_BSGK.shape[2:]}
        return all(self.pieces[name][0].shape[2:] == wide for name, wide in widths.items() if name in self.pieces)

    def _record_weights(self, seen: AttentionCall) -> None:
        """A call whose weights no few tensors say: they are kept themselves."""
        try:
            weights = seen.all_weights()
        except ValueError as error:  # NoBackend among them: no weights are formed at all
            self.why = str(error)
            return
        stands = None
        if seen.key_positions is not None:
            order, stands = _key_order(seen.key_positions)
            weights = weights[..., order]
        start, (queries, keys) = self._num_queries(), weights.shape[2:]
        number = len(self.calls)
        self._append(f"weights.{number}", self.store.copy_to_host(weights))
        known = 0 if keys >= start + queries or self.site.kind == "cross" else None
        first, places = (known, None) if stands is None else self._record_key_positions(stands)
        self.calls.append(
            AttentionCallRecord((start, start + queries), (0, keys), first, weights=number, places=places)
        )

    def _record_scores(self, told: AttentionInputs) -> None:
        """A call whose weights follow from queries and keys."""
        if not self.reads:
            heads = told.q_BTHK.shape[2]
            self.reads = tuple(told.kv_head_of(head) for head in range(heads))
            if told.sinks is not None:
                self.pieces["sinks"] = [self.store.copy_to_host(told.sinks.flatten())]
        told, stands = _sort_keys(told)
        start, asked, queries = self._num_queries(), self._count("q"), told.q_BTHK.shape[1]
        self._append("q", self.store.copy_to_host(told.q_BTHK))
        grids = tuple(self._record_mask(grid, told) for grid in (told.bias, told.mask) if grid is not None)
        keys = self._record_keys(told, queries)
        first, places = (
            (self._first_position(keys, start + queries), None)
            if stands is None
            else self._record_key_positions(stands)
        )
        causal = told.causal and queries > 1
        self.calls.append(
            AttentionCallRecord(
                (start, start + queries),
                keys,
                first,
                told.scale,
                told.softcap,
                causal,
                grids,
                asked=asked,
                places=places,
            )
        )

    def _record_mask(self, grid: Tensor, told: AttentionInputs) -> int:
        """The number of a grid; what it says of keys that are not there, as of a cache's free places, is left out."""
        keys = told.k_BSGK.shape[1]
        return self.store.add_mask(grid if grid.shape[-1] <= keys else grid[..., :keys])

    def _record_keys(self, told: AttentionInputs, queries: int) -> tuple[int, int]:
        """Where the keys of this call stand among all that were kept; those that are there already are not again."""
        k_BSGK, count = told.k_BSGK, told.k_BSGK.shape[1]
        there = self._count("k")
        for fresh in (0, queries):
            known = count - fresh
            if self.calls and 0 < known <= there and self._ends_with(k_BSGK[:, :known]):
                break
        else:
            fresh = count
        sides = {"k": k_BSGK, "v": told.v_BSGV} if "v" in self.store.capture.extra else {"k": k_BSGK}
        for name, side in sides.items():
            if fresh:
                self._append(name, self.store.copy_to_host(side[:, count - fresh :]))
        stop = there + fresh
        return stop - count, stop

    def _ends_with(self, k_BSGK: Tensor) -> bool:
        """Whether what was kept of keys ends with these."""
        half = self.pieces["k"][0].dtype == np.float16
        rest = k_BSGK.detach().to("cpu", torch.float16 if half else torch.float32).numpy()
        for piece in reversed(self.pieces["k"]):
            count = min(piece.shape[1], rest.shape[1])
            if not np.array_equal(piece[:, piece.shape[1] - count :], rest[:, rest.shape[1] - count :]):
                return False
            rest = rest[:, : rest.shape[1] - count]
            if not rest.shape[1]:
                break
        return True

    def _record_key_positions(self, stands: Tensor) -> tuple[int | None, int | None]:
        """The number of the first key, if the others follow without a gap; else that of an array of all of them."""
        first, last = (int(stands[0]), int(stands[-1])) if len(stands) else (0, -1)
        if last - first == len(stands) - 1:
            return first, None
        number = len(self.calls)
        self.store.reserve(4 * len(stands))
        self._append(f"places.{number}", stands.to("cpu", torch.int32).numpy())
        return None, number

    def _first_position(self, keys: tuple[int, int], tokens: int) -> int | None:
        """The number of the first key among the tokens, None where a cache may hold them in an order of its own."""
        start, stop = keys
        if self.site.kind == "cross" or not self.calls:
            return 0
        last = self.calls[-1]
        if last.weights is None and last.first is not None and start < last.keys[1]:  # it goes on from what was there
            return last.first + start - last.keys[0]
        return 0 if stop - start >= tokens else None


def _key_order(stands: Tensor) -> tuple[Tensor, Tensor]:
    """What brings keys into the order of their tokens, and the numbers of these."""
    order = stands.argsort()[int((stands < 0).sum()) :]
    return order, stands[order]


def _sort_keys(told: AttentionInputs) -> tuple[AttentionInputs, Tensor | None]:
    """The same with its keys in the order of their tokens, and the numbers of these, where they are known."""
    if told.key_positions is None:
        return told, None
    order, stands = _key_order(told.key_positions)
    if torch.equal(order, torch.arange(told.k_BSGK.shape[1], device=order.device)):
        return told, stands
    sides = {"k_BSGK": told.k_BSGK[:, order], "v_BSGV": told.v_BSGV[:, order]}
    grids = {
        name: grid[..., order]
        for name, grid in (("mask", told.mask), ("bias", told.bias))
        if grid is not None and grid.shape[-1] > 1
    }
    return _replace_inputs(told, **sides, **grids), stands


def _replace_inputs(told: AttentionInputs, **other: Tensor) -> AttentionInputs:
    return AttentionInputs(**{**vars(told), **other})


def _concatenate(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, 1)


# --- What a capture will take, before it is taken ------------------------------------------------------


class CaptureSize(NamedTuple):
    """One run: texts side by side, tokens of each stream, and new ones that are said step by step."""

    batch_size: int
    num_tokens: Mapping[str, int]
    max_new_tokens: int = 0


def estimate_bytes(
    sites: Sequence[SiteModule], capture: Capture, streams: Mapping[str, tuple[str, str]], size: CaptureSize
) -> int:
    """The bytes that a run of this size is expected to take: queries, keys and what else is asked, and masks as bits.

    Additions to scores are expected to follow the distance of tokens, as learned and fixed ones do.
    """
    total, patterns = 0, dict[tuple[str, int, int], int]()
    for one in sites:
        asks, told = streams[one.site.name]
        new = {name: 0 if name == "source" else size.max_new_tokens for name in (asks, told)}
        queries, keys = size.num_tokens[asks] + new[asks], size.num_tokens[told] + new[told]
        if one.adapter.visible_tensors(one.module) == "weights":
            total += size.batch_size * one.site.heads * queries * keys * capture.bytes_per_number
        else:
            total += size.batch_size * capture.bytes_per_number * _numbers_per_text(one.site, capture, queries, keys)
            patterns[one.site.pattern, queries, keys] = _mask_bytes(one.site, queries, keys, size.batch_size)
        if "z" in capture.extra:
            total += size.batch_size * capture.bytes_per_number * queries * one.site.heads * _head_width(one.site)
    return total + sum(patterns.values())


def _numbers_per_text(site: Site, how: Capture, queries: int, keys: int) -> int:
    """How many numbers queries and keys of one text are, and values if they are kept."""
    if site.spec is None:
        heads, groups, dim = site.q, site.kv, site.dim
    else:
        core = site.spec.core_of(site.spec.projection_form(one=False))
        heads, groups, dim = len(core.key_head_of_query), max(core.key_head_of_query) + 1, core.dim
    return queries * heads * dim + keys * groups * (dim + (_head_width(site) if "v" in how.extra else 0))


def _mask_bytes(site: Site, queries: int, keys: int, batch: int) -> int:
    """A mask as bits, and a band of numbers for each head."""
    return batch * queries * -(-keys // 8) + 4 * site.q * (queries + keys)


def _head_width(site: Site) -> int:
    return site.spec.heads.vdim if site.spec is not None else site.dim


# --- A run of any model, kept as a trace ---------------------------------------------------------------

ProgressFunction = Callable[[str], object]


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    max_new_tokens: int = 0,
    capture: Capture = Capture(),
    log: ProgressFunction = print,
) -> Trace:
    """What every attention of a model works with while it reads `inputs`, and then says so many new tokens.

    `inputs` are what the model is called with: a tensor, a tuple or a dictionary by names; or a text or several, where
    the model has a tokenizer. `tell` is told how many bytes will be kept, before they are.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> kept = trace(net.eval(), torch.tensor([[3, 1, 4]]))
    about 435 bytes of 1.0 GB: queries and keys of 2 sites
    >>> kept.head_weights(1, 0).shape
    (3, 3)
    """
    those = _select_sites(model, capture)
    given = prepare_inputs(model, inputs, max_new_tokens)
    run = ModelRun(model, given, max_new_tokens)
    streams = {one.site.name: get_streams(one.site, given.has_source) for one in those}
    size = CaptureSize(given.batch_size, given.token_counts or _count_tokens(run, those, streams), max_new_tokens)
    expected = estimate_bytes(those, capture, streams, size)
    log(f"about {format_bytes(expected)} of {format_bytes(capture.budget)}: {_describe_capture(capture, those)}")
    if expected > capture.budget:
        fact = f"about {format_bytes(expected)} would be kept, beyond a budget of {format_bytes(capture.budget)}"
        raise SpecError(f"{fact}; give a larger one, fewer sites, fewer tokens, or numbers='half'")
    store = CaptureBuffer(capture)
    keepers = {one.site.name: CallRecorder(one.site, store) for one in those}
    said = run.run_with_hooks(those, keepers)
    return _make_trace(model, _rows_with_output(given, said if max_new_tokens else None), those, keepers, streams)


def _make_trace(
    model: nn.Module,
    rows: Mapping[str, tuple[TokenRow, ...]],
    those: Sequence[SiteModule],
    keepers: Mapping[str, CallRecorder],
    streams: Mapping[str, tuple[str, str]],
) -> Trace:
    skipped = {one.site.name: one.site.see.why for one in find_attention(model) if not one.site.see.can}
    for name, keeper in keepers.items():
        if keeper.why or not keeper.calls:
            skipped[name] = keeper.why or "it was not called"
    if len(skipped) == len(those) and those:
        raise ValueError(f"nothing could be kept: {next(iter(skipped.values()))}")
    layers = tuple(keeper.to_layer(streams[name]) for name, keeper in keepers.items() if name not in skipped)
    store = next(iter(keepers.values())).store
    told = {"name": get_model_name(model), "class": type(model).__name__, "torch": torch.__version__}
    return Trace(told, rows, layers, tuple(store.grids), skipped)


class TokenCounter:
    """A watcher that looks at how many tokens ask and are read, and keeps nothing."""

    needs_call = True

    def __init__(self) -> None:
        self.counts = (0, 0)

    def on_call(self, seen: AttentionCall) -> None:
        """Note the counts."""
        told = seen.attention_inputs
        weights = seen.head_weights(0, slice(0, 1)) if told is None else None
        if told is not None:
            self.counts = told.q_BTHK.shape[1], told.k_BSGK.shape[1]
        elif weights is not None:
            self.counts = seen.head_weights(0).shape[1], weights.shape[2]

    def on_head_outputs(self, z: Tensor) -> None:
        """Leave it."""


def _count_tokens(run: ModelRun, those: Sequence[SiteModule], streams: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    """How many tokens each stream has, from a run that keeps nothing: pictures and sounds do not say it themselves."""
    measures = {one.site.name: TokenCounter() for one in those}
    run._replace(max_new_tokens=min(run.max_new_tokens, 1)).run_with_hooks(
        those, measures
    )  # of a source alone a forward has nothing to say
    counts = {"text": 0, "source": 0}
    for name, measure in measures.items():
        for stream, count in zip(streams[name], measure.counts, strict=True):
            counts[stream] = max(counts[stream], count)
    return counts


def _select_sites(model: nn.Module, how: Capture) -> list[SiteModule]:
    """The sites that are to be kept, if they can be seen."""
    every = find_attention(model)
    known = Sites([one.site for one in every], type(model).__name__)
    if not known:
        raise ValueError(f"{known.model} has no attention that headwise finds; hw.sites(model) says what it saw")
    names = {known.find(which).name for which in how.sites}
    those = [one for one in every if not names or one.site.name in names]
    if (names and (blind := [one for one in those if not one.site.see.can])) or not any(o.site.see.can for o in those):
        site = (blind if names else those)[0].site
        raise ValueError(f"{site.name} cannot be seen: {site.see.why}")
    if model.training:
        raise ValueError("the model is in train mode, where dropout changes what is read; call model.eval() first")
    return [one for one in those if one.site.see.can]


def _describe_capture(how: Capture, those: Sequence[SiteModule]) -> str:
    names = ["queries", "keys", *({"v": "values", "z": "what heads say"}[name] for name in how.extra)]
    by_weights = sum(one.adapter.visible_tensors(one.module) == "weights" for one in those)
    said = f"{', '.join(names[:-1])} and {names[-1]} of {len(those)} sites"
    return said if not by_weights else f"{said}, {by_weights} of them by their weights"


def _rows_with_output(given: ModelInputs, said: Any) -> dict[str, tuple[TokenRow, ...]]:
    """The rows of all streams, with the tokens that were said."""
    if said is None:
        return dict(given.token_rows)
    new = said.tolist() if isinstance(said, Tensor) else said
    return dict(given.token_rows) | {"text": given.extend_rows(new)}


def get_model_name(model: nn.Module) -> str:
    """What a model is called: by its description, its folder, or its class."""
    if isinstance(model, Transformer):
        return model.spec.name
    path = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return path.rstrip("/").rpartition("/")[2] or type(model).__name__
