"""`hw.prune` and `hw.convert`: models that headwise loads as its own change as specs, other models
of transformers, such as hybrids, as modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..util.errors import SpecError
from .conversion import AttentionConversion, ConversionResult, convert_native, read_conversion
from .head_selection import HeadSelection
from .model_and_texts import OriginalModel, UnreadModel, read_example, read_model_and_texts
from .module_surgery import ModuleChange, convert_module, prune_module
from .pruning import PruningResult, prune_native, read_selection


def prune(
    model: nn.Module | Path | str,
    selection: HeadSelection | float,
    texts: Any = (),
    *,
    fold: str = "none",
    tokenizer: object = None,
    log: Callable[[str], Any] = lambda _: None,
) -> PruningResult | ModuleChange:
    """Return a copy of a model without the heads that `selection` removes; a number is the fraction
    each layer keeps.

    `model` is a transformers or headwise model, which is not changed, or a name as in `hw.load`.
    Heads are judged on `texts`: strings, pairs (source, target) for an encoder-decoder model, or
    Examples. `tokenizer` is needed if the model comes without one. fold="mean" adds the average
    output of the removed heads over the texts to the output bias, fold="bias" the part of it that
    comes from their value bias. `save_pretrained` of the result writes the pruned model. Of a
    transformers model that headwise does not load as its own, such as a hybrid, the heads are
    removed as by `hw.prune_module`, and the first text is the example.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}
    ...     ),
    ...     seed=0,
    ... )
    >>> done = hw.prune(net, hw.surgery.DropHeads((("decoder.0.attention", 3),)))
    >>> (
    ...     done.plan.summary,
    ...     hw.costs.count_parameters(net.spec) - hw.costs.count_parameters(done.after.spec),
    ... )
    ('7 of 8 heads kept, all but the listed heads', 70)
    """
    strategy = read_selection(selection)
    try:
        opened = read_model_and_texts(model, texts, tokenizer)
    except UnreadModel as error:
        unread = error
    else:
        return prune_native(opened, strategy, fold, log)
    if fold != "none" or not strategy.takes_any_model:
        what = f"fold={fold!r}" if fold != "none" else type(strategy).__name__
        raise SpecError(f"{what} needs a model that headwise loads as its own: {unread}")
    with read_example(unread, texts, tokenizer) as (examples, example, notes):
        plan = strategy.plan(unread.model, examples, log)
        if not plan.removed_heads:
            raise SpecError(f"no head would be removed: {plan.summary}. Keep fewer heads")
        log("removing heads")
        change = prune_module(unread.model, plan.removed_heads, example)
    return replace(change, plan=plan, notes=notes, original=OriginalModel(unread.model, tokenizer))


def convert(
    model: nn.Module | Path | str,
    conversion: AttentionConversion | int,
    texts: Any = (),
    *,
    kind: str = "all",
    tokenizer: object = None,
    log: Callable[[str], Any] = lambda _: None,
) -> ConversionResult | ModuleChange:
    """Return a converted copy of a model; an int is the number of key-value heads per layer, as in
    `Pool`.

    `texts` are needed by conversions that look at keys, values or importance. Model, texts and
    tokenizer as in `hw.prune`; `model` is not changed. kind="self" or "cross" converts attentions
    of one kind only. `save_pretrained` of the result writes the converted model. A transformers
    model that headwise does not load as its own is converted as by `hw.convert_module`.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 2}
    ...     ),
    ...     seed=0,
    ... )
    >>> done = hw.convert(net, 2)
    >>> (
    ...     [spec.heads.kv for _, spec in done.after.spec.attention_specs()],
    ...     done.groups["decoder.0.attention"],
    ... )
    ([2, 2], ((0, 1), (2, 3)))
    """
    strategy = read_conversion(conversion)
    try:
        opened = read_model_and_texts(model, texts, tokenizer)
    except UnreadModel as error:
        unread = error
    else:
        return convert_native(opened, strategy, kind, log)
    with read_example(unread, texts, tokenizer) as (_, example, notes):
        done = convert_module(unread.model, strategy, example, kind=kind)
    return replace(done, notes=notes, original=OriginalModel(unread.model, tokenizer))
