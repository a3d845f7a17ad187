"""Statistics of head outputs over a data set, for mean ablation and noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import suggest
from ..masking.sequence_info import SequenceInfo
from .ablation import ALL_HEADS, HeadRef, Noise, check_shape, group_by_site
from .attention_sites import find_attention, find_attention_in_run
from .hooks import OutputHook, hook_sites
from .model_inputs import INPUT_KINDS, ModelInputs, prepare_inputs

TokenMasks = Mapping[str, Tensor]  # stack -> mask [B, T] of the tokens that count (missing: all)


@dataclass(eq=False)
class OutputObserver(OutputHook, ABC):
    """Base class of observers of some heads of a site; `token_mask` marks the tokens of the batch
    that count.
    """

    site: str
    head_indices: tuple[int, ...]
    token_mask: Tensor | None = field(default=None, init=False)

    def on_head_outputs(self, z: Tensor) -> None:
        """Select the observed heads, and pass their outputs to `observe`."""
        if max(self.head_indices) >= z.shape[-2]:
            raise ValueError(
                f"{self.site} has no head {max(self.head_indices)}; give heads in "
                f"0..{z.shape[-2] - 1}"
            )
        outputs = z.detach()[..., list(self.head_indices), :]
        token_mask = torch.ones(outputs.shape[:-2], dtype=torch.bool, device=z.device)
        if self.token_mask is not None:
            check_shape(self.site, self.token_mask, outputs[..., 0, :])
            token_mask &= self.token_mask.to(z.device)
        self.observe(outputs, token_mask)

    @abstractmethod
    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        """Process outputs [B, T, heads, head_dim] and the mask [B, T] of the tokens that count."""


Observer = TypeVar("Observer", bound=OutputObserver)


def observe_dataset(
    model: nn.Module,
    batches: Iterable[Any],
    heads: Iterable[HeadRef] | None,
    make_observer: Callable[[str, tuple[int, ...]], Observer],
    tokenizer: object = None,
) -> list[Observer]:
    """Run the model over all batches with observers at these heads (default: all); returns one
    observer per site.
    """
    is_single = isinstance(batches, (Tensor, Mapping, str)) or (
        isinstance(batches, tuple) and bool(batches) and isinstance(batches[0], Tensor)
    )
    batches = [batches] if is_single else batches
    site_modules = find_attention(model)
    if not site_modules and isinstance(batches, Sequence) and batches:
        first = prepare_inputs(model, _split_mask(batches[0])[0], 0, tokenizer)
        site_modules = find_attention_in_run(model, first)
    refs = heads
    if refs is None:
        refs = [(site_module.site.name, ALL_HEADS) for site_module in site_modules]
    heads_by_site = group_by_site(model, site_modules, refs)
    _check_batches(model, batches, heads_by_site)
    observers = {name: make_observer(name, tuple(heads_by_site[name])) for name in heads_by_site}
    stack_of_site: dict[str, str] = {}
    for site_module in site_modules:
        site = site_module.site
        if site.name not in observers:
            continue
        stack_of_site[site.name] = site.stack
        if not site.ablate.possible:
            raise ValueError(f"{site.name} cannot be observed: {site.ablate.reason}")
    stacks = {site_module.site.stack for site_module in site_modules}
    num_batches = 0
    with torch.no_grad(), hook_sites(model, site_modules, observers) as hooks:
        for batch in batches:
            num_batches += 1
            inputs, given_masks = _split_mask(batch)
            arguments = prepare_inputs(model, inputs, 0, tokenizer)
            masks = _read_masks(given_masks, stacks, arguments)
            for name, observer in observers.items():
                observer.token_mask = masks.get(stack_of_site[name])
            model(*arguments.args, **arguments.kwargs)
    hooks.check_all_ran()
    if not num_batches:
        raise ValueError("no batches given; give at least one")
    return list(observers.values())


def _check_batches(model: nn.Module, batches: object, heads_by_site: Mapping[str, object]) -> None:
    if not heads_by_site:
        raise ValueError("no heads are named; give some, or leave heads out for all")
    if any(module.training for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is in train mode, where dropout changes head outputs; call "
            ".eval()"
        )
    if not isinstance(batches, Iterable):
        raise ValueError(
            f"batches are of type {type(batches).__name__}; give {INPUT_KINDS}, or a list of these"
        )


def _split_mask(batch: Any) -> tuple[Any, Any]:
    """The inputs and the mask of a batch that is a pair of both; of a tuple of arguments or texts,
    all and None.
    """
    if not isinstance(batch, tuple) or len(batch) != 2 or isinstance(batch[1], str):
        return batch, None
    is_argument = isinstance(batch[1], Tensor) and batch[1].dtype != torch.bool
    return (batch, None) if is_argument else batch


def _read_masks(token_masks: object, stacks: set[str], inputs: ModelInputs) -> TokenMasks:
    """Masks given by the caller: one for all stacks, or a mapping by stack; without any, those of
    the padding.
    """
    if token_masks is None:
        return _padding_masks(inputs, stacks)
    masks = token_masks if isinstance(token_masks, Mapping) else dict.fromkeys(stacks, token_masks)
    for stack, mask in masks.items():
        if stack not in stacks:
            raise ValueError(f"the model has no stack {stack!r}; {suggest(str(stack), stacks)}")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(
                "the mask of a batch must be a tensor [B, T] of torch.bool, true for the tokens "
                "that count"
            )
    return masks


def _padding_masks(inputs: ModelInputs, stacks: set[str]) -> TokenMasks:
    """Padding masks from the batch itself; raises if it is unclear to which
    stack a mask belongs.
    """
    named = next((value for value in inputs.args[:1] if isinstance(value, Mapping)), inputs.kwargs)
    padding = named.get("attention_mask", named.get("sequence"))
    mask = padding.is_real if isinstance(padding, SequenceInfo) else padding
    if not isinstance(mask, Tensor) or bool((mask == 1).all()):
        return {}
    if mask.dim() != 2 or len(stacks) > 1:
        raise ValueError(
            "the stack of the attention mask of this batch is unclear; "
            f"give (batch, {{stack: mask [B, T]}}) for {', '.join(sorted(stacks))}"
        )
    return dict.fromkeys(stacks, mask.bool())


# --- Means and deviations of head outputs ---------------------------------------------------------

MEAN_KINDS = ("overall", "position")


def head_means(
    model: nn.Module,
    batches: Any,
    heads: Iterable[HeadRef] | None = None,
    *,
    kind: str = "overall",
    tokenizer: object = None,
) -> dict[HeadRef, Tensor]:
    """Mean output of each head over the tokens of a data set, float64 [head_dim], or by position
    [1, T, head_dim].

    `batches` is one input, or a list of inputs: ids or another tensor, a tuple or mapping of the
    model's arguments, or a text, which `tokenizer` encodes (default: that of the model). A batch
    may also be a pair of such an input and a mask [B, T] of the tokens that count, or a mapping of
    stack names to masks. Without a mask, tokens hidden by an `attention_mask`, or padding in a
    headwise `sequence`, do not count. kind="position" averages each column and needs rows padded on
    the right.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> means = head_means(net, [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])], [(0, 1)])
    >>> [(head, mean.shape) for head, mean in means.items()]
    [(('decoder.0.attention', 1), torch.Size([4]))]
    >>> with hw.patch(net, means):
    ...     _ = net(torch.tensor([[3, 1, 4]]))
    """
    if kind not in MEAN_KINDS:
        raise ValueError(f'kind={kind!r} is unknown; give "overall" or "position"')
    observers = observe_dataset(model, batches, heads, partial(OutputMoments, kind=kind), tokenizer)
    means: dict[HeadRef, Tensor] = {}
    for moments in observers:
        for n, head in enumerate(moments.head_indices):
            means[moments.site, head] = moments.mean[..., n, :]
    return means


def head_noise(
    model: nn.Module,
    batches: Any,
    heads: Iterable[HeadRef] | None = None,
    *,
    seed: int = 0,
    tokenizer: object = None,
) -> dict[HeadRef, Noise]:
    """Noise with the mean and standard deviation of each head's outputs over a data set. Batches as
    in `head_means`.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> with hw.patch(net, head_noise(net, [torch.tensor([[3, 1, 4]])], [(0, 1)], seed=3)):
    ...     _ = net(torch.tensor([[3]]))
    """
    Noise(seed)  # raises if the seed is invalid
    observers = observe_dataset(model, batches, heads, OutputMoments, tokenizer)
    noise: dict[HeadRef, Noise] = {}
    for moments in observers:
        for n, head in enumerate(moments.head_indices):
            noise[moments.site, head] = Noise(seed, moments.mean[n], moments.std[n])
    return noise


def head_outputs(
    model: nn.Module,
    inputs: Any,
    heads: Iterable[HeadRef] | None = None,
    *,
    tokenizer: object = None,
) -> dict[HeadRef, Tensor]:
    """Outputs of each head for one input, [B, T, head_dim], before the output projection.

    Inputs and `tokenizer` as in `run_model`.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> other = head_outputs(net, torch.tensor([[3, 1, 4]]), [(0, 1)])
    >>> with hw.patch(net, other):
    ...     _ = net(torch.tensor([[1, 5, 9]]))
    """
    recorders = observe_dataset(model, [(inputs, {})], heads, OutputRecorder, tokenizer)
    outputs: dict[HeadRef, Tensor] = {}
    for recorder in recorders:
        for head, output in recorder.outputs.items():
            outputs[recorder.site, head] = output
    return outputs


@dataclass(eq=False)
class OutputRecorder(OutputObserver):
    """Observer that stores head outputs."""

    outputs: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        if self.outputs:
            raise ValueError(
                f"{self.site} ran twice; give an input that the model processes in one call"
            )
        self.outputs = {
            head: outputs[..., n, :].clone() for n, head in enumerate(self.head_indices)
        }


@dataclass(eq=False)
class OutputMoments(OutputObserver):
    """Observer that updates count, mean and squared deviations of head outputs batch by batch.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979).
    """

    kind: str = "overall"
    count: Tensor = field(default_factory=lambda: torch.zeros(()))
    means: Tensor = field(default_factory=lambda: torch.zeros(()))
    squared_deviations: Tensor = field(default_factory=lambda: torch.zeros(()))

    def observe(self, outputs: Tensor, token_mask: Tensor) -> None:
        if self.kind == "position":
            self._check_columns(outputs, token_mask)
        else:
            outputs = outputs.flatten(0, -3)[:, None]
            token_mask = token_mask.flatten()[:, None]
        counted = token_mask[..., None, None]
        values = torch.where(counted, outputs.double(), 0.0)
        count = counted.sum(0).double()
        mean = values.sum(0) / count.clamp(min=1)
        squares = torch.where(counted, (values - mean).square(), 0.0).sum(0)
        if not mean.isfinite().all():
            raise ValueError(
                f"heads of {self.site} output values that are not finite; mask padding, or check "
                "the weights"
            )
        self._add(count.cpu(), mean.cpu(), squares.cpu())

    def _check_columns(self, outputs: Tensor, token_mask: Tensor) -> None:
        if outputs.dim() != 4 or (token_mask[:, 1:] & ~token_mask[:, :-1]).any():
            raise ValueError(
                f"means by position of {self.site} need rows [B, T] padded on the right"
            )

    def _add(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        if not self.means.dim():
            self.count = count
            self.means = mean
            self.squared_deviations = squares
            return
        length = max(len(count), len(self.count))
        count, mean, squares = (_pad_positions(new, length) for new in (count, mean, squares))
        old_count, old_means, old_squares = (
            _pad_positions(old, length) for old in (self.count, self.means, self.squared_deviations)
        )
        self.count = old_count + count
        difference = mean - old_means
        new_share = count / self.count.clamp(min=1)
        self.means = old_means + difference * new_share
        self.squared_deviations = (
            old_squares + squares + difference.square() * old_count * new_share
        )

    @property
    def mean(self) -> Tensor:
        """Mean, [heads, head_dim] or [1, T, heads, head_dim]."""
        has_tokens = self.count.flatten() > 0
        if not has_tokens.any():
            raise ValueError(
                f"no token of {self.site} counts; give batches with at least one that does"
            )
        return self.means[0] if self.kind == "overall" else self.means[has_tokens][None]

    @property
    def std(self) -> Tensor:
        """Standard deviation, [heads, head_dim]."""
        if self.count.min() < 2:
            raise ValueError(
                f"{self.site} has fewer than two tokens and so no standard deviation; give more "
                "data"
            )
        return (self.squared_deviations / (self.count - 1)).sqrt()[0]


def _pad_positions(tensor: Tensor, length: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])
