"""Heads made silent, or made to say something else, while a model runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..site import Sites
from .finding import found
from .watching import Holding, Watcher, watching

Head = tuple[int | str, int]  # a layer, or the name of a site, and a head of it


@dataclass(frozen=True)
class Edit:
    """Some heads of one site multiplied, or replaced by vectors [heads, width], at some tokens [B, T] or at all."""

    heads: tuple[int, ...]
    scale: float = 0.0
    values: Tensor | None = None
    tokens: Tensor | None = None

    def heads_of(self, z: Tensor) -> Tensor:
        """What takes the place of what these heads say."""
        own = z[:, :, list(self.heads)]
        if self.values is None:
            return own * self.scale
        return self.values.to(z).expand_as(own)


class Editor:
    """A watcher that makes one edit."""

    wants_core = False

    def __init__(self, name: str, edit: Edit) -> None:
        self.name, self.edit = name, edit

    def core(self, seen: object) -> None:
        """Nothing to look at."""

    def heads(self, z: Tensor) -> Tensor:
        """The same with the edit made."""
        count = z.shape[2]
        if wrong := [head for head in self.edit.heads if not 0 <= head < count]:
            raise ValueError(f"{self.name} has no head {wrong[0]}; give heads in 0..{count - 1}")
        other, values, tokens = z.clone(), self.edit.values, self.edit.tokens
        if values is not None and values.shape[-1] != z.shape[-1]:
            raise ValueError(f"heads of {self.name} say {z.shape[-1]} numbers, not {values.shape[-1]}; give as many")
        for said in (tokens, values if values is not None and values.dim() == 4 else None):
            self._check_rows(said, z)
        new = self.edit.heads_of(z)
        if self.edit.tokens is not None:
            new = torch.where(self.edit.tokens[:, :, None, None].to(z.device), new, z[:, :, list(self.edit.heads)])
        other[:, :, list(self.edit.heads)] = new
        return other

    def _check_rows(self, said: Tensor | None, z: Tensor) -> None:
        if said is None:
            return
        told, seen = list(said.shape[:2]), list(z.shape[:2])
        if any(own not in (1, count) for own, count in zip(told, seen, strict=True)):
            raise ValueError(f"{self.name} reads {seen} tokens, told were {told}; give as many")


@contextmanager
def silence(
    model: nn.Module, heads: Iterable[Head], *, scale: float = 0.0, tokens: Tensor | None = None
) -> Iterator[None]:
    """While this lasts, what these heads say is multiplied by `scale` before it is merged, at `tokens` [B, T] or all.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}), seed=0
    ... )
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> with silence(net, [(0, 1), (1, 0)]):
    ...     quiet = net(ids)
    >>> torch.equal(quiet, net(ids))
    False
    """
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale={scale!r} is no number to multiply with; give 0 to silence, 0.5 to halve")
    _check_tokens(tokens)
    named = _by_site(model, heads)
    with edited(model, {name: Edit(tuple(those), scale, None, tokens) for name, those in named.items()}):
        yield


@contextmanager
def patch(model: nn.Module, values: Mapping[Head, Tensor], *, tokens: Tensor | None = None) -> Iterator[None]:
    """While this lasts, each of these heads says a vector [width], or one for each token [B, T, width]."""
    _check_tokens(tokens)
    edits: dict[str, Edit] = {}
    for name, those in _by_site(model, values).items():
        vectors = [values[spelt] for spelt in those.values()]
        for one in vectors:
            if not isinstance(one, Tensor) or one.dim() not in (1, 3):
                raise ValueError(
                    f"{name} is given {type(one).__name__}; give each head a tensor [width] or [B, T, width]"
                )
        if len({one.shape for one in vectors}) > 1:
            raise ValueError(f"heads of {name} are given tensors of several shapes; give all of them one")
        edits[name] = Edit(tuple(those), 0.0, torch.stack(vectors, -2), tokens)
    with edited(model, edits):
        yield


@contextmanager
def edited(model: nn.Module, edits: Mapping[str, Edit]) -> Iterator[None]:
    """While this lasts, these edits are made at sites of these names."""
    who: dict[nn.Module, tuple[Watcher, ...]] = {}
    stands: list[Holding] = []
    for one in found(model):
        if one.site.name in edits:
            if not one.site.silence.can:
                raise ValueError(f"{one.site.name} cannot be silenced: {one.site.silence.why}")
            who[one.module] = (*who.get(one.module, ()), Editor(one.site.name, edits[one.site.name]))
            stands += [stand for stand in one.route.stands() if stand not in stands]
    with watching(who, stands):
        yield


def _by_site(model: nn.Module, heads: Iterable[Head]) -> dict[str, dict[int, Head]]:
    """The heads of each site, with how each was spelt."""
    those = Sites([one.site for one in found(model)], type(model).__name__)
    if not those:
        raise ValueError(
            f"{type(model).__name__} has no attention that headwise finds; hw.sites(model) says what it saw"
        )
    named: dict[str, dict[int, Head]] = {}
    for spelt in _pairs(heads):
        where, head = spelt
        site = those.named(where)
        if site.heads and not 0 <= head < site.heads:
            raise ValueError(f"{site.name} has no head {head}; give heads in 0..{site.heads - 1}")
        if head in named.setdefault(site.name, {}):
            raise ValueError(f"head {head} of {site.name} is named twice; name it once")
        named[site.name][head] = spelt
    return named


def _pairs(heads: Any) -> list[Head]:
    """The same, if they are pairs of a layer or a name and a number."""
    told: list[Any] = list(heads) if isinstance(heads, Iterable) else [heads]
    for one in told:
        if not isinstance(one, tuple) or [type(part) for part in one] not in ([int, int], [str, int]):
            raise ValueError(f"{one!r} names no head; give (layer, head) or (site, head), as in (3, 5)")
    return told


def _check_tokens(tokens: Tensor | None) -> None:
    if tokens is not None and (not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype != torch.bool):
        raise ValueError("tokens say at which tokens; give a tensor [B, T] of torch.bool")
