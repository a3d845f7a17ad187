"""What may be put in the place of what a head says: a share of it, a vector, another row's, noise."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .attention_sites import find_attention
from .hooks import AttentionCall, SiteModule
from .site import Site, Sites
from .site_hooks import hook_sites

MAX_SEED = 2**31


class HeadCall(NamedTuple):
    """One head in one call: what it says itself, [B, T, width], which tokens [B, T] are asked for, if not all of them,
    and what the attention worked with, where a patch sees it."""

    site: str
    head: int
    output: Tensor
    token_mask: Tensor | None
    call: AttentionCall | None


PatchFunction = Callable[[HeadCall], Tensor]


class HeadPatch(ABC):
    """What a head says instead of its own."""

    needs_call: ClassVar[bool] = False  # whether it needs what the attention worked with

    @abstractmethod
    def make_function(self, site: str, head: int) -> PatchFunction:
        """What it says from now on, at one head."""


@dataclass(frozen=True)
class ScaledOutput(HeadPatch):
    """A share of its own."""

    scale: float

    def make_function(self, site: str, head: int) -> PatchFunction:
        return lambda moment: moment.output * self.scale


@dataclass(frozen=True, eq=False)
class ConstantOutput(HeadPatch):
    """A vector [width], or one for each token [B, T, width]."""

    value: Tensor

    def make_function(self, site: str, head: int) -> PatchFunction:
        return self._output

    def _output(self, moment: HeadCall) -> Tensor:
        value, own = self.value, moment.output
        if value.shape[-1] != own.shape[-1]:
            raise ValueError(f"heads of {moment.site} say {own.shape[-1]} numbers, not {value.shape[-1]}; give as many")
        if value.dim() == 3:
            check_shape(moment.site, value, own)
        return value.to(own).expand_as(own)


@dataclass(frozen=True)
class Resample(HeadPatch):
    """What the same head says for another row of the batch: row `rows[n]` for row n, or rows drawn from `seed`.

    Drawn rows are never a row's own. Heads that are given one seed read the same rows. Rows of one length are meant:
    where another row has padding, its padding is what is read. A model that cuts pictures into windows makes a row of
    each.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    >>> with hw.patch(net, {(0, "all"): Resample(rows=(1, 0))}):
    ...     swapped = net(ids)
    >>> torch.equal(swapped, net(ids))
    False
    """

    rows: tuple[int, ...] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.seed is None):
            raise ValueError("rows and seed are two ways to say the same; give rows=(1, 0), say, or seed=0")
        if self.rows is not None:
            object.__setattr__(self, "rows", tuple(self.rows))
            if not self.rows or any(type(row) is not int or row < 0 for row in self.rows):
                raise ValueError(f"rows={self.rows!r} names no rows; give the number of a row for each, as in (1, 0)")
        if self.seed is not None:
            check_seed(self.seed)

    def make_function(self, site: str, head: int) -> PatchFunction:
        draws = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        return partial(self._output, draws)

    def _output(self, draws: torch.Generator | None, moment: HeadCall) -> Tensor:
        rows = len(moment.output)
        order = self._sample_rows(draws, rows) if self.rows is None else self.rows
        if len(order) != rows or max(order) >= rows:
            raise ValueError(f"{moment.site} reads {rows} rows, and rows={order} are not that many of 0..{rows - 1}")
        return moment.output[torch.tensor(order, device=moment.output.device)]

    @staticmethod
    def _sample_rows(draws: torch.Generator | None, rows: int) -> tuple[int, ...]:
        """One cycle through all rows, so that none keeps its own."""
        if rows < 2:
            raise ValueError("a batch of one row has no other row to read; give several")
        cycle = torch.randperm(rows, generator=draws).tolist()
        after = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        return tuple(after[row] for row in range(rows))


@dataclass(frozen=True, eq=False)
class Noise(HeadPatch):
    """Gaussian noise, channel by channel, of this mean and standard deviation: a number, or a vector [width].

    What is left out is the head's own, over the tokens that are patched in a call. Each head draws from a stream of its
    own, and every call draws on; to enter the context again is to begin again.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> said = []
    >>> for _ in range(2):
    ...     with hw.patch(net, {(0, 1): Noise(seed=7)}):
    ...         said.append(net(torch.tensor([[3, 1, 4]])))
    >>> torch.equal(*said)
    True
    """

    seed: int = 0
    mean: Tensor | float | None = None
    std: Tensor | float | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("mean", "std"):
            told = getattr(self, name)
            if told is None:
                continue
            if type(told) not in (int, float) and not (isinstance(told, Tensor) and told.dim() == 1):
                raise ValueError(f"{name} is of type {type(told).__name__}; give a number, or a tensor [width]")
            if not torch.as_tensor(told).isfinite().all() or (name == "std" and (torch.as_tensor(told) < 0).any()):
                raise ValueError(f"{name} holds what no Gaussian has; give finite numbers, std not below 0")

    def make_function(self, site: str, head: int) -> PatchFunction:
        number = zlib.crc32(f"{self.seed} {site} {head}".encode())  # torch's generator takes 32 bits, and no more
        return partial(self._output, torch.Generator().manual_seed(number))

    def _output(self, draws: torch.Generator, moment: HeadCall) -> Tensor:
        own = moment.output
        mean, std = (self._statistic(moment, name) for name in ("mean", "std"))
        drawn = torch.randn(own.shape, generator=draws, dtype=torch.float64).to(own)
        return (mean + std * drawn).to(own)

    def _statistic(self, moment: HeadCall, name: str) -> Tensor:
        told, own = getattr(self, name), moment.output
        if told is not None:
            told = torch.as_tensor(told, device=own.device)
            if told.dim() and told.shape[0] != own.shape[-1]:
                raise ValueError(f"heads of {moment.site} say {own.shape[-1]} numbers, not {len(told)}; give as many")
            return told
        those = own.flatten(0, -2) if moment.token_mask is None else own[moment.token_mask.expand(own.shape[:-1])]
        if len(those) < 2:
            raise ValueError(f"{len(those)} token has no mean and deviation of its own; give mean= and std= to Noise")
        those = those.to(torch.promote_types(own.dtype, torch.float32))
        return those.mean(0) if name == "mean" else those.std(0)


def check_seed(seed: object) -> None:
    """Refuse what is no seed."""
    if type(seed) is not int or not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed={seed!r} is no seed; give a whole number in 0..{MAX_SEED - 1}")


def check_shape(site: str, value: Tensor, output: Tensor) -> None:
    """Refuse what is told of other rows and tokens than there are; one may stand for all."""
    said, seen = list(value.shape[:2]), list(output.shape[:2])
    if output.dim() != 3 or any(one not in (1, count) for one, count in zip(said, seen, strict=True)):
        raise ValueError(f"{site} reads {list(output.shape[:-1])} tokens, told were {said}; give as many")


# --- Heads made silent, or made to say something else, while a model runs ------------------------------

ALL_HEADS = "all"
HeadRef = tuple[int | str, int | str]  # a layer, or the name of a site; and a head of it, or "all"
TokenSelection = Tensor | Sequence[int] | None  # a mask [B, T], columns of a call, or all tokens


class OutputEditor:
    """A watcher that puts something in the place of what some heads of a site say, at some tokens or at all."""

    def __init__(self, site: str, patches: Mapping[int, HeadPatch], tokens: TokenSelection) -> None:
        self.site, self.tokens = site, tokens
        self.needs_call = any(patch.needs_call for patch in patches.values())
        self.says = {head: patch.make_function(site, head) for head, patch in patches.items()}
        self._core: AttentionCall | None = None

    def on_call(self, seen: AttentionCall) -> None:
        """What the attention works with, for patches that need it."""
        self._core = seen

    def on_head_outputs(self, z: Tensor) -> Tensor:
        """The same with the edits made."""
        count = z.shape[-2]
        if wrong := [head for head in self.says if head >= count]:
            raise ValueError(f"{self.site} has no head {wrong[0]}; give heads in 0..{count - 1}")
        core, self._core = self._core, None
        other, at = z.clone(), make_token_mask(self.site, self.tokens, z)
        for head, says in self.says.items():
            own = z[..., head, :]
            said = says(HeadCall(self.site, head, own, at, core))
            other[..., head, :] = said if at is None else torch.where(at[..., None], said, own)
        return other


def make_token_mask(site: str, tokens: TokenSelection, outputs: Tensor) -> Tensor | None:
    """Which of the tokens of a call are asked for, [B or 1, T or 1]; None is all of them."""
    if tokens is None:
        return None
    if isinstance(tokens, Tensor):
        check_shape(site, tokens, outputs[..., 0, :])
        return tokens.to(outputs.device)
    count = outputs.shape[1]
    if wrong := [column for column in tokens if not -count <= column < count]:
        raise ValueError(f"{site} reads {count} tokens, none of them number {wrong[0]}; count from 0, or back from -1")
    at = torch.zeros(1, count, dtype=torch.bool, device=outputs.device)
    at[:, list(tokens)] = True
    return at


@contextmanager
def ablate(
    model: nn.Module,
    heads: Iterable[HeadRef] | Mapping[HeadRef, float],
    *,
    scale: float = 0.0,
    tokens: TokenSelection = None,
) -> Iterator[None]:
    """While this lasts, what these heads say is multiplied by `scale` before it is merged, at `tokens` or at all.

    A head is (layer, head), (name of a site, head), or (layer, "all"); a mapping gives each a scale of its own.
    `tokens` is a mask [B, T], or numbers of columns of every call.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> with ablate(net, [(0, 1), (1, "all")], tokens=[-1]):
    ...     quiet = net(ids)
    >>> torch.equal(quiet[:, :-1], net(ids)[:, :-1]), torch.equal(quiet[:, -1], net(ids)[:, -1])
    (True, False)
    """
    scales = heads if isinstance(heads, Mapping) else dict.fromkeys(_check_pairs(heads), scale)
    if isinstance(heads, Mapping) and scale:
        raise ValueError("each head is told its own scale; leave scale out, or give a list of heads")
    for one in scales.values():
        if type(one) not in (int, float) or not math.isfinite(one):
            raise ValueError(f"scale={one!r} is no number to multiply with; give 0 to silence, 0.5 to halve")
    with edit_heads(model, {head: ScaledOutput(one) for head, one in scales.items()}, tokens):
        yield


@contextmanager
def patch(
    model: nn.Module, values: Mapping[HeadRef, Tensor | HeadPatch], *, tokens: TokenSelection = None
) -> Iterator[None]:
    """While this lasts, each of these heads says what it is given, at `tokens` or at all.

    That is a vector [width], such as a mean over data; one for each token [B, T, width], such as what heads said of
    another text; `hw.Resample`, `hw.Noise`, or the weights that `hw.offset_means` gives.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> with patch(net, {(0, 1): torch.zeros(4)}):
    ...     patched = net(ids)
    >>> with ablate(net, [(0, 1)]):
    ...     torch.equal(patched, net(ids))
    True
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"values are of type {type(values).__name__}; give what each head says, {{(3, 5): vector}}")
    with edit_heads(model, {head: _make_patch(head, value) for head, value in values.items()}, tokens):
        yield


@contextmanager
def edit_heads(model: nn.Module, patches: Mapping[HeadRef, HeadPatch], tokens: TokenSelection) -> Iterator[None]:
    """While this lasts, these heads are patched."""
    _check_tokens(tokens)
    those = find_attention(model)
    editors: dict[str, OutputEditor] = {}
    for name, heads in group_by_site(model, those, patches).items():
        own = {head: patches[spelt] for head, spelt in heads.items()}
        site = next(one.site for one in those if one.site.name == name)
        if not site.silence.can:
            raise ValueError(f"{name} cannot be silenced: {site.silence.why}")
        if any(patch.needs_call for patch in own.values()) and not site.see.can:
            raise ValueError(f"{name} cannot be seen: {site.see.why}")
        editors[name] = OutputEditor(name, own, tokens)
    with hook_sites(model, those, editors) as posts:
        yield
    posts.check_all_ran()


def group_by_site(
    model: nn.Module, those: Sequence[SiteModule], heads: Iterable[HeadRef]
) -> dict[str, dict[int, HeadRef]]:
    """The heads of each site by number, with how each was spelt."""
    if not those:
        raise ValueError(
            f"{type(model).__name__} has no attention that headwise finds; hw.sites(model) says what it saw"
        )
    sites = Sites([one.site for one in those], type(model).__name__)
    named: dict[str, dict[int, HeadRef]] = {}
    for spelt in _check_pairs(heads):
        site = sites.find(spelt[0])
        own = named.setdefault(site.name, {})
        for head in _head_indices(site, spelt[1]):
            if head in own:
                raise ValueError(f"head {head} of {site.name} is named twice; name it once")
            own[head] = spelt
    return named


def _head_indices(site: Site, head: int | str) -> Sequence[int]:
    """The number of a head, or of all; of a site that does not say how many it has, it shows when it runs."""
    if not isinstance(head, int):
        if not site.heads:
            raise ValueError(f"{site.name} does not say how many heads it has; name each by its number")
        return range(site.heads)
    if head < 0 or (site.heads and head >= site.heads):
        raise ValueError(f"{site.name} has no head {head}; give heads in 0..{max(site.heads - 1, 0)}")
    return (head,)


def _check_pairs(heads: Any) -> list[HeadRef]:
    """The same, if they are pairs of a layer or a name, and a number or "all"."""
    told: list[Any] = list(heads) if isinstance(heads, Iterable) else [heads]
    for one in told:
        if not isinstance(one, tuple) or len(one) != 2 or not _is_head_ref(*one):
            raise ValueError(f'{one!r} names no head; give (layer, head), (site, head) or (layer, "all"), as in (3, 5)')
    return told


def _is_head_ref(where: object, head: object) -> bool:
    return type(where) in (int, str) and (type(head) is int or head == ALL_HEADS)


def _make_patch(head: HeadRef, value: object) -> HeadPatch:
    if isinstance(value, HeadPatch):
        return value
    if not isinstance(value, Tensor) or value.dim() not in (1, 3) or not value.is_floating_point():
        said = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{head} is given {said}; give a tensor of floats [width] or [B, T, width], or hw.Noise, say")
    if value.is_meta or not value.isfinite().all():
        raise ValueError(f"{head} is given numbers that are not finite; a model would say nothing else from there on")
    return ConstantOutput(value)


def _check_tokens(tokens: Any) -> None:
    if tokens is None or (isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.dtype == torch.bool):
        return
    if isinstance(tokens, Tensor) or not isinstance(tokens, Sequence) or any(type(one) is not int for one in tokens):
        raise ValueError("tokens say at which tokens; give a tensor [B, T] of torch.bool, or numbers of columns")
