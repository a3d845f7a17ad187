"""A run of any model, kept as a trace: what every attention worked with, and not its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..models import Transformer
from ..site import Sites
from ..traces import Row, Trace
from ..traces.telling import sized
from .estimating import Size, needed
from .finding import found
from .keeping import Capture, Keeper, Store
from .readable import Readable, readable, streams_of
from .routes.base import Found
from .running import Run
from .watching import Core

Tell = Callable[[str], object]


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    max_new_tokens: int = 0,
    how: Capture = Capture(),  # noqa: B008 - it is frozen
    tell: Tell = print,
) -> Trace:
    """What every attention of a model works with while it reads `inputs`, and then says so many new tokens.

    `inputs` are what the model is called with: a tensor, a tuple or a dictionary by names; or a text or several, where
    the model has a tokenizer. `tell` is told how many bytes will be kept, before they are.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}), seed=0
    ... )
    >>> kept = trace(net.eval(), torch.tensor([[3, 1, 4]]))
    about 435 bytes of 1.0 GB: queries and keys of 2 sites
    >>> kept.rows(1, 0).shape
    (3, 3)
    """
    those = _those(model, how)
    given = readable(model, inputs, max_new_tokens)
    run = Run(model, given, max_new_tokens)
    streams = {one.site.name: streams_of(one.site, given.two) for one in those}
    size = Size(given.batch, given.counts or _measured(run, those, streams), max_new_tokens)
    expected = needed(those, how, streams, size)
    tell(f"about {sized(expected)} of {sized(how.budget)}: {_what(how, those)}")
    if expected > how.budget:
        fact = f"about {sized(expected)} would be kept, beyond a budget of {sized(how.budget)}"
        raise SpecError(f"{fact}; give a larger one, fewer sites, fewer tokens, or numbers='half'")
    store = Store(how)
    keepers = {one.site.name: Keeper(one.site, store) for one in those}
    said = run.watched(those, keepers)
    return _trace(model, _spoken(given, said if max_new_tokens else None), those, keepers, streams)


def _trace(
    model: nn.Module, rows: Mapping[str, tuple[Row, ...]], those: Sequence[Found], keepers: Mapping[str, Keeper],
    streams: Mapping[str, tuple[str, str]],
) -> Trace:  # fmt: skip
    skipped = {one.site.name: one.site.see.why for one in found(model) if not one.site.see.can}
    for name, keeper in keepers.items():
        if keeper.why or not keeper.calls:
            skipped[name] = keeper.why or "it was not called"
    if len(skipped) == len(those) and those:
        raise ValueError(f"nothing could be kept: {next(iter(skipped.values()))}")
    layers = tuple(keeper.layer(streams[name]) for name, keeper in keepers.items() if name not in skipped)
    store = next(iter(keepers.values())).store
    told = {"name": name_of(model), "class": type(model).__name__, "torch": torch.__version__}
    return Trace(told, rows, layers, tuple(store.grids), skipped)


class Measure:
    """A watcher that looks at how many tokens ask and are read, and keeps nothing."""

    wants_core = True

    def __init__(self) -> None:
        self.counts = (0, 0)

    def core(self, seen: Core) -> None:
        """Note the counts."""
        told = seen.told
        weights = seen.rows(0, slice(0, 1)) if told is None else None
        if told is not None:
            self.counts = told.q_BTHK.shape[1], told.k_BSGK.shape[1]
        elif weights is not None:
            self.counts = seen.rows(0).shape[1], weights.shape[2]

    def heads(self, z: Tensor) -> None:
        """Leave it."""


def _measured(run: Run, those: Sequence[Found], streams: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    """How many tokens each stream has, from a run that keeps nothing: pictures and sounds do not say it themselves."""
    measures = {one.site.name: Measure() for one in those}
    run._replace(steps=min(run.steps, 1)).watched(those, measures)  # of a source alone a forward has nothing to say
    counts = {"text": 0, "source": 0}
    for name, measure in measures.items():
        for stream, count in zip(streams[name], measure.counts, strict=True):
            counts[stream] = max(counts[stream], count)
    return counts


def _those(model: nn.Module, how: Capture) -> list[Found]:
    """The sites that are to be kept, if they can be seen."""
    every = found(model)
    known = Sites([one.site for one in every], type(model).__name__)
    if not known:
        raise ValueError(f"{known.model} has no attention that headwise finds; hw.sites(model) says what it saw")
    names = {known.named(which).name for which in how.sites}
    those = [one for one in every if not names or one.site.name in names]
    if (names and (blind := [one for one in those if not one.site.see.can])) or not any(o.site.see.can for o in those):
        site = (blind if names else those)[0].site
        raise ValueError(f"{site.name} cannot be seen: {site.see.why}")
    if model.training:
        raise ValueError("the model is in train mode, where dropout changes what is read; call model.eval() first")
    return [one for one in those if one.site.see.can]


def _what(how: Capture, those: Sequence[Found]) -> str:
    names = ["queries", "keys", *({"v": "values", "z": "what heads say"}[name] for name in how.also)]
    by_weights = sum(one.route.gives(one.module) == "weights" for one in those)
    said = f"{', '.join(names[:-1])} and {names[-1]} of {len(those)} sites"
    return said if not by_weights else f"{said}, {by_weights} of them by their weights"


def _spoken(given: Readable, said: Any) -> dict[str, tuple[Row, ...]]:
    """The rows of all streams, with the tokens that were said."""
    if said is None:
        return dict(given.rows)
    new = said.tolist() if isinstance(said, Tensor) else said
    return dict(given.rows) | {"text": given.grown(new)}


def name_of(model: nn.Module) -> str:
    """What a model is called: by its description, its folder, or its class."""
    if isinstance(model, Transformer):
        return model.described.name
    path = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return path.rstrip("/").rpartition("/")[2] or type(model).__name__
