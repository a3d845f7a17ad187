"""A model run over a data set while somebody looks at its heads: what a batch is, and which of its tokens count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import suggest
from ..tokens import SequenceInfo
from .editing import ALL_HEADS, HeadRef, group_by_site
from .finding import find_attention
from .forwards import hook_sites
from .patches import check_shape
from .watching import AttentionCall

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


Observer = TypeVar("L", bound=OutputObserver)


def observe_dataset(
    model: nn.Module, batches: Iterable[Any], heads: Iterable[HeadRef] | None, make_observer: Callable[[str, tuple[int, ...]], Observer]
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
    hides = inputs.get("attention_mask", inputs.get("tokens"))
    mask = hides.is_real if isinstance(hides, SequenceInfo) else hides
    if not isinstance(mask, Tensor) or bool((mask == 1).all()):
        return {}
    if mask.dim() != 2 or len(stacks) > 1:
        raise ValueError(
            "the mask of this batch hides tokens, and it is not plain where; "
            f"give (batch, {{stack: mask [B, T]}}) for {', '.join(sorted(stacks))}"
        )
    return dict.fromkeys(stacks, mask.bool())
