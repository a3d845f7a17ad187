"""What key and value heads of a model say over data, before turns, as sums of products: what sharing them asks for."""

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
    """Products of keys ("k") and values ("v") for each attention of ours, or those of these names, over a data set.

    A batch is a tensor, or a mapping of what the model is called with; padding among its tokens does not count. Nothing
    is kept but the sums, of (heads x width)^2 numbers a site and side.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... ).eval()
    >>> told = collect_kv_statistics(net, [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5]])])
    >>> [(site, side, said.num_tokens) for site, sides in told.items() for side, said in sides.items()]
    [('decoder.0.attention', 'k', 5), ('decoder.0.attention', 'v', 5)]
    """
    named = _select_attentions(model, sites)
    if any(module.training for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is in train mode, where heads say what dropout leaves; call .eval()")
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise ValueError(f"batches are of type {type(batches).__name__}; give several, or one as [batch]")
    gatherers = {site: KVStatisticsCollector(attention) for site, attention in named.items()}
    with torch.no_grad(), install_hooks({one.attention: (one,) for one in gatherers.values()}, METHOD_PATCHES):
        for batch in batches:
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    if silent := [site for site, one in gatherers.items() if not one.told]:
        raise ValueError(f"nothing was gathered of {silent[0]}; give at least one batch that the model reads there")
    return {site: one.told for site, one in gatherers.items()}


def _select_attentions(model: nn.Module, sites: Iterable[str] | None) -> dict[str, Attention]:
    ours = {one.site.name: one.module for one in find_attention(model) if isinstance(one.module, Attention)}
    for site in sites or ():
        if site not in ours:
            raise SpecError(f"the model has no attention {site!r} of ours; {suggest(site, ours)}")
    return ours if sites is None else {site: ours[site] for site in sites}


class KVStatisticsCollector:
    """Adds up what the heads of one attention make of each input that it remembers."""

    needs_call = False

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.told: dict[str, CrossProducts] = {}

    def on_call(self, call: AttentionCall) -> None:
        """Nothing: the collector reads inputs."""

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Nothing: the collector reads inputs."""

    def add(self, z_BSE: Tensor, tokens: SequenceInfo | None) -> None:
        """Take one input, its padding left out."""
        for side, said in compute_kv_features(self.attention, z_BSE).items():
            live = said if tokens is None else said[tokens.is_real.expand(said.shape[:2])]
            own = CrossProducts.from_features(live)
            self.told[side] = self.told[side] + own if side in self.told else own


def _notify_collectors(attention: Attention, z_BSE: Tensor, tokens: SequenceInfo | None) -> None:
    for watcher in get_hooks(attention):
        if isinstance(watcher, KVStatisticsCollector):
            watcher.add(z_BSE, tokens)


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
