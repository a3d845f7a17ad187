"""Measure statistics of head outputs over a data set, for mean ablation and noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.masking.sequence_info import SequenceInfo
from ...util.errors import check_known
from .ablation import ALL_HEADS, HeadRef, Noise, check_shape, group_by_site
from .attention_sites import check_head_part, find_attention, find_attention_in_run
from .hooks import AttentionHook, hook_sites
from .model_inputs import INPUT_KINDS, ModelInputs, check_eval_mode, prepare_inputs
from .site import HEAD_PARTS, OUTPUT, HeadVectors, Site

TokenMasks = Mapping[str, Tensor]  # stack -> mask [B, T] of the tokens that count (missing: all)
HeadsBySite = Mapping[str, Sequence[int]]
# gets the name of a site, outputs of its heads [B, T, heads, head_dim], and the mask [B, T]
ObserveOutputs = Callable[[str, Tensor, Tensor], None]


def observe_dataset(
    model: nn.Module,
    batches: Iterable[Any],
    heads: Iterable[HeadRef] | None,
    observe: ObserveOutputs,
    tokenizer: object = None,
    part: str = OUTPUT,
) -> HeadsBySite:
    """Run the model over all batches and observe one part of these heads (default: all).

    Returns their numbers by site.
    """
    check_known("part", part, HEAD_PARTS)
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
    if not heads_by_site:
        raise ValueError("no heads are named; give some, or leave heads out for all")
    check_eval_mode(model)
    if not isinstance(batches, Iterable):
        raise ValueError(
            f"batches are of type {type(batches).__name__}; give {INPUT_KINDS}, or a list of these"
        )
    numbers = {name: tuple(of_site) for name, of_site in heads_by_site.items()}
    sites = [site_module.site for site_module in site_modules]
    for site_module in site_modules:
        if site_module.site.name in numbers:
            check_head_part(site_module, part, "observed")
    stacks = {site.stack for site in sites}
    masks: TokenMasks = {}

    def on_outputs(site: Site, outputs: Tensor) -> None:
        count = outputs.shape[-2]
        wrong = [head for head in numbers[site.name] if head >= count]
        if wrong:
            raise ValueError(f"{site.name} has no head {wrong[0]}; give heads in 0..{count - 1}")
        selected = outputs.detach()[..., list(numbers[site.name]), :]
        token_mask = torch.ones(selected.shape[:-2], dtype=torch.bool, device=outputs.device)
        if site.stack in masks:
            check_shape(site.name, masks[site.stack], selected[..., 0, :])
            token_mask &= masks[site.stack].to(outputs.device)
        observe(site.name, selected, token_mask)

    observers = {
        one.name: PartObserver(part, partial(on_outputs, one))
        for one in sites
        if one.name in numbers
    }
    num_batches = 0
    with torch.no_grad(), hook_sites(model, site_modules, observers) as hooks:
        for batch in batches:
            num_batches += 1
            inputs, given_masks = _split_mask(batch)
            arguments = prepare_inputs(model, inputs, 0, tokenizer)
            masks = _read_masks(given_masks, stacks, arguments)
            model(*arguments.args, **arguments.kwargs)
    hooks.check_all_ran()
    if not num_batches:
        raise ValueError("no batches given; give at least one")
    return numbers


@dataclass(frozen=True, eq=False)
class PartObserver(AttentionHook):
    """Pass one part of all heads, [B, T, heads, width], to a function."""

    part: str
    function: Callable[[Tensor], None]

    @property
    def needs_vectors(self) -> bool:
        return self.part != OUTPUT

    def on_vectors(self, vectors: HeadVectors, /) -> None:
        heads = range(vectors.num_heads)
        self.function(torch.stack([vectors.get(self.part, head) for head in heads], 2))

    def on_head_outputs(self, outputs: Tensor, /) -> None:
        if self.part == OUTPUT:
            self.function(outputs)


def _split_mask(batch: Any) -> tuple[Any, Any]:
    """Split a batch that is a pair of inputs and mask; return None as mask otherwise.

    A tuple of arguments or texts is not such a pair.
    """
    if not isinstance(batch, tuple) or len(batch) != 2 or isinstance(batch[1], str):
        return batch, None
    is_argument = isinstance(batch[1], Tensor) and batch[1].dtype != torch.bool
    return (batch, None) if is_argument else batch


def _read_masks(token_masks: object, stacks: set[str], inputs: ModelInputs) -> TokenMasks:
    """Read the caller's masks: one, or a mapping by stack; default: padding masks."""
    if token_masks is None:
        return _padding_masks(inputs, stacks)
    masks = token_masks if isinstance(token_masks, Mapping) else dict.fromkeys(stacks, token_masks)
    for stack, mask in masks.items():
        check_known("stack", stack, stacks)
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(
                "the mask of a batch must be a tensor [B, T] of torch.bool, true for the tokens "
                "that count"
            )
    return masks


def _padding_masks(inputs: ModelInputs, stacks: set[str]) -> TokenMasks:
    """Read padding masks from the batch; raise if it is unclear to which stack a mask belongs."""
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


def head_means(
    model: nn.Module,
    batches: Any,
    heads: Iterable[HeadRef] | None = None,
    *,
    tokenizer: object = None,
) -> dict[HeadRef, Tensor]:
    """Compute the mean output of each head over the tokens of a data set, float64 [head_dim].

    `batches` is one input, or a list of inputs: ids or another tensor, a tuple or mapping of the
    model's arguments, or a text, which `tokenizer` encodes (default: the model's own). A batch may
    also be a pair of such an input and a mask [B, T] of the tokens that count, or a mapping of
    stack names to masks. Without a mask, tokens hidden by an `attention_mask`, or padding in a
    headwise `sequence`, do not count.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> means = head_means(net, [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])], [(0, 1)])
    >>> [(head, mean.shape) for head, mean in means.items()]
    [(('decoder.0.attention', 1), torch.Size([4]))]
    >>> with hw.patch(net, means):
    ...     _ = net(torch.tensor([[3, 1, 4]]))
    """
    numbers, moments = _dataset_moments(model, batches, heads, tokenizer)
    return _by_head(numbers, {site: one.mean for site, one in moments.items()})


def head_noise(
    model: nn.Module,
    batches: Any,
    heads: Iterable[HeadRef] | None = None,
    *,
    seed: int = 0,
    tokenizer: object = None,
) -> dict[HeadRef, Noise]:
    """Make noise with the mean and standard deviation of each head's outputs over a data set.

    Batches as in `head_means`.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> with hw.patch(net, head_noise(net, [torch.tensor([[3, 1, 4]])], [(0, 1)], seed=3)):
    ...     _ = net(torch.tensor([[3]]))
    """
    Noise(seed)  # raises if the seed is invalid
    numbers, moments = _dataset_moments(model, batches, heads, tokenizer)
    deviations: dict[str, Tensor] = {}
    for site, one in moments.items():
        if one.count < 2:
            raise ValueError(
                f"{site} has fewer than two tokens and so no standard deviation; give more data"
            )
        deviations[site] = (one.squares / (one.count - 1)).sqrt()
    stds = _by_head(numbers, deviations)
    means = _by_head(numbers, {site: one.mean for site, one in moments.items()})
    return {head: Noise(seed, means[head], std) for head, std in stds.items()}


def head_outputs(
    model: nn.Module,
    inputs: Any,
    heads: Iterable[HeadRef] | None = None,
    *,
    part: str = OUTPUT,
    tokenizer: object = None,
) -> dict[HeadRef, Tensor]:
    """Return outputs of each head for one input, [B, T, head_dim], before the output projection.

    With another `part`, queries "q", keys "k", values "v" or weights "pattern" [B, T, keys], as
    `hw.patch` replaces them. Inputs and `tokenizer` as in `run_model`.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> other = head_outputs(net, torch.tensor([[3, 1, 4]]), [(0, 1)])
    >>> with hw.patch(net, other):
    ...     _ = net(torch.tensor([[1, 5, 9]]))
    >>> head_outputs(net, torch.tensor([[3, 1, 4]]), [(0, 1)], part="pattern")[
    ...     "decoder.0.attention", 1
    ... ].shape
    torch.Size([1, 3, 3])
    """
    recorded: dict[str, Tensor] = {}

    def observe(site: str, outputs: Tensor, token_mask: Tensor) -> None:
        if site in recorded:
            raise ValueError(
                f"{site} ran twice; give an input that the model processes in one call"
            )
        recorded[site] = outputs.clone()

    numbers = observe_dataset(model, [(inputs, {})], heads, observe, tokenizer, part)
    return _by_head(numbers, recorded)


def _by_head(numbers: HeadsBySite, values: Mapping[str, Tensor]) -> dict[HeadRef, Tensor]:
    """Select single heads from the values of sites [..., heads, head_dim]."""
    by_head: dict[HeadRef, Tensor] = {}
    for site, heads in numbers.items():
        by_head |= {(site, head): values[site][..., n, :] for n, head in enumerate(heads)}
    return by_head


class OutputMoments:
    """Track count, mean and squared deviations of head outputs [heads, head_dim] batch by batch.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979).
    """

    count = 0
    mean: Any = 0.0
    squares: Any = 0.0

    def add(self, values: Tensor) -> None:
        """Add outputs of at least one token, [tokens, heads, head_dim]."""
        mean = values.mean(0)
        squares = (values - mean).square().sum(0)
        difference = mean - self.mean
        count = self.count + len(values)
        share = len(values) / count
        self.mean = self.mean + difference * share
        self.squares = self.squares + squares + difference.square() * self.count * share
        self.count = count


def _dataset_moments(
    model: nn.Module, batches: Any, heads: Iterable[HeadRef] | None, tokenizer: object
) -> tuple[HeadsBySite, dict[str, OutputMoments]]:
    """Measure moments of head outputs over a data set by site, with the head numbers."""
    moments: dict[str, OutputMoments] = {}

    def observe(site: str, outputs: Tensor, token_mask: Tensor) -> None:
        values = outputs[token_mask].cpu().double()
        if not values.isfinite().all():
            raise ValueError(
                f"heads of {site} output values that are not finite; mask padding, or check the "
                "weights"
            )
        if len(values):
            moments.setdefault(site, OutputMoments()).add(values)

    numbers = observe_dataset(model, batches, heads, observe, tokenizer)
    for site in numbers:
        if site not in moments:
            raise ValueError(f"no token of {site} counts; give batches with at least one that does")
    return numbers, moments
