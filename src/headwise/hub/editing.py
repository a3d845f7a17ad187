"""Heads made silent, or made to say something else, while a model runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..site import Site, Sites
from .finding import find_attention
from .forwards import hook_sites
from .patches import ConstantOutput, HeadCall, HeadPatch, ScaledOutput, check_shape
from .routes.base import SiteModule
from .watching import AttentionCall

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
    model: nn.Module, heads: Iterable[HeadRef] | Mapping[HeadRef, float], *, scale: float = 0.0, tokens: TokenSelection = None
) -> Iterator[None]:
    """While this lasts, what these heads say is multiplied by `scale` before it is merged, at `tokens` or at all.

    A head is (layer, head), (name of a site, head), or (layer, "all"); a mapping gives each a scale of its own.
    `tokens` is a mask [B, T], or numbers of columns of every call.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}), seed=0
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
def patch(model: nn.Module, values: Mapping[HeadRef, Tensor | HeadPatch], *, tokens: TokenSelection = None) -> Iterator[None]:
    """While this lasts, each of these heads says what it is given, at `tokens` or at all.

    That is a vector [width], such as a mean over data; one for each token [B, T, width], such as what heads said of
    another text; `hw.Resample`, `hw.Noise`, or the weights that `hw.offset_means` gives.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
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


def group_by_site(model: nn.Module, those: Sequence[SiteModule], heads: Iterable[HeadRef]) -> dict[str, dict[int, HeadRef]]:
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
