"""Cross products of a model's key and value heads over data, before RoPE: the input to grouping and alignment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import KVEntry
from ..errors import SpecError, suggest
from ..inspect.attention_sites import find_attention
from ..inspect.hooks import AttentionCall, MethodPatch, get_hooks, install_hooks
from ..masking.sequence_info import SequenceInfo
from ..nn.attention import Attention
from ..nn.attention_call import AttentionCall as PlannedCall
from .head_alignment import CrossProducts, compute_kv_features


def collect_kv_statistics(
    model: nn.Module, batches: Iterable[Any], sites: Iterable[str] | None = None
) -> dict[str, dict[str, CrossProducts]]:
    """Collect cross products of keys ("k") and values ("v") of each headwise attention, or of `sites`, over batches.

    A batch is a tensor or a mapping of keyword arguments of the model; padding tokens do not count. Only sums are
    stored: (heads x head dimension)^2 numbers per site and side.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... ).eval()
    >>> statistics = collect_kv_statistics(net, [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])])
    >>> [(site, side, sums.num_tokens) for site, sides in statistics.items() for side, sums in sides.items()]
    [('decoder.0.attention', 'k', 5), ('decoder.0.attention', 'v', 5)]
    """
    attentions = _select_attentions(model, sites)
    if any(module.training for module in model.modules()):
        raise ValueError(
            f"cannot collect statistics: {type(model).__name__} is in train mode, where dropout changes outputs. "
            "Call .eval()"
        )
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches must be an iterable of batches, got {type(batches).__name__}; pass a single one as [batch]"
        )
    collectors = {site: KVStatisticsCollector(attention) for site, attention in attentions.items()}
    with (
        torch.no_grad(),
        install_hooks({collector.attention: (collector,) for collector in collectors.values()}, METHOD_PATCHES),
    ):
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    if empty := [site for site, collector in collectors.items() if not collector.statistics]:
        raise ValueError(f"no tokens reached {empty[0]}; give at least one batch that does")
    return {site: collector.statistics for site, collector in collectors.items()}


def _select_attentions(model: nn.Module, sites: Iterable[str] | None) -> dict[str, Attention]:
    attentions = {
        found.site.name: found.module for found in find_attention(model) if isinstance(found.module, Attention)
    }
    for site in sites or ():
        if site not in attentions:
            raise SpecError(f"the model has no headwise attention {site!r}; {suggest(site, attentions)}")
    return attentions if sites is None else {site: attentions[site] for site in sites}


class KVStatisticsCollector:
    """Sums cross products of the keys and values that one attention computes."""

    needs_call = False

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.statistics: dict[str, CrossProducts] = {}

    def on_call(self, call: AttentionCall) -> None:
        """Do nothing: the collector uses inputs only."""

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Do nothing: the collector uses inputs only."""

    def add(self, z_BSE: Tensor, sequence: SequenceInfo | None) -> None:
        """Add one input [batch, tokens, model], without its padding."""
        for side, features in compute_kv_features(self.attention, z_BSE).items():
            real_features = features if sequence is None else features[sequence.is_real.expand(features.shape[:2])]
            products = CrossProducts.from_features(real_features)
            self.statistics[side] = self.statistics[side] + products if side in self.statistics else products


def _notify_collectors(attention: Attention, z_BSE: Tensor, sequence: SequenceInfo | None) -> None:
    for hook in get_hooks(attention):
        if isinstance(hook, KVStatisticsCollector):
            hook.add(z_BSE, sequence)


def _wrap_project_kv(original: Callable[..., Any]) -> Callable[..., Any]:
    def project_source(self: Attention, z: Tensor, *, sequence: SequenceInfo | None = None) -> Any:
        _notify_collectors(self, z, sequence)
        return original(self, z, sequence=sequence)

    return project_source


def _wrap_attention_kv(original: Callable[..., Any]) -> Callable[..., Any]:
    def extend_kv(self: Attention, kv_entry: KVEntry, call: PlannedCall) -> Any:
        _notify_collectors(self, call.x, call.sequence)
        return original(self, kv_entry, call)

    return extend_kv


METHOD_PATCHES = (
    MethodPatch(Attention, "project_source", _wrap_project_kv),
    MethodPatch(Attention, "extend_kv", _wrap_attention_kv),
)
