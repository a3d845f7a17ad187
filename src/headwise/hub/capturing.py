"""A run of any model, kept as a trace: what every attention worked with, and not its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..models import Transformer
from ..site import Sites
from ..traces import TokenRow, Trace
from ..traces.telling import format_bytes
from .estimating import CaptureSize, estimate_bytes
from .finding import find_attention
from .keeping import Capture, CallRecorder, CaptureBuffer
from .readable import ModelInputs, prepare_inputs, get_streams
from .routes.base import SiteModule
from .running import ModelRun
from .watching import AttentionCall

ProgressFunction = Callable[[str], object]


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    max_new_tokens: int = 0,
    capture: Capture = Capture(),  # noqa: B008 - it is frozen
    log: ProgressFunction = print,
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
    those = _select_sites(model, capture)
    given = prepare_inputs(model, inputs, max_new_tokens)
    run = ModelRun(model, given, max_new_tokens)
    streams = {one.site.name: get_streams(one.site, given.has_source) for one in those}
    size = CaptureSize(given.batch_size, given.token_counts or _count_tokens(run, those, streams), max_new_tokens)
    expected = estimate_bytes(those, capture, streams, size)
    log(f"about {format_bytes(expected)} of {format_bytes(capture.budget)}: {_describe_capture(capture, those)}")
    if expected > capture.budget:
        fact = f"about {format_bytes(expected)} would be kept, beyond a budget of {format_bytes(capture.budget)}"
        raise SpecError(f"{fact}; give a larger one, fewer sites, fewer tokens, or numbers='half'")
    store = CaptureBuffer(capture)
    keepers = {one.site.name: CallRecorder(one.site, store) for one in those}
    said = run.run_with_hooks(those, keepers)
    return _make_trace(model, _rows_with_output(given, said if max_new_tokens else None), those, keepers, streams)


def _make_trace(
    model: nn.Module, rows: Mapping[str, tuple[TokenRow, ...]], those: Sequence[SiteModule], keepers: Mapping[str, CallRecorder],
    streams: Mapping[str, tuple[str, str]],
) -> Trace:  # fmt: skip
    skipped = {one.site.name: one.site.see.why for one in find_attention(model) if not one.site.see.can}
    for name, keeper in keepers.items():
        if keeper.why or not keeper.calls:
            skipped[name] = keeper.why or "it was not called"
    if len(skipped) == len(those) and those:
        raise ValueError(f"nothing could be kept: {next(iter(skipped.values()))}")
    layers = tuple(keeper.to_layer(streams[name]) for name, keeper in keepers.items() if name not in skipped)
    store = next(iter(keepers.values())).store
    told = {"name": get_model_name(model), "class": type(model).__name__, "torch": torch.__version__}
    return Trace(told, rows, layers, tuple(store.grids), skipped)


class TokenCounter:
    """A watcher that looks at how many tokens ask and are read, and keeps nothing."""

    needs_call = True

    def __init__(self) -> None:
        self.counts = (0, 0)

    def on_call(self, seen: AttentionCall) -> None:
        """Note the counts."""
        told = seen.attention_inputs
        weights = seen.head_weights(0, slice(0, 1)) if told is None else None
        if told is not None:
            self.counts = told.q_BTHK.shape[1], told.k_BSGK.shape[1]
        elif weights is not None:
            self.counts = seen.head_weights(0).shape[1], weights.shape[2]

    def on_head_outputs(self, z: Tensor) -> None:
        """Leave it."""


def _count_tokens(run: ModelRun, those: Sequence[SiteModule], streams: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    """How many tokens each stream has, from a run that keeps nothing: pictures and sounds do not say it themselves."""
    measures = {one.site.name: TokenCounter() for one in those}
    run._replace(max_new_tokens=min(run.max_new_tokens, 1)).run_with_hooks(those, measures)  # of a source alone a forward has nothing to say
    counts = {"text": 0, "source": 0}
    for name, measure in measures.items():
        for stream, count in zip(streams[name], measure.counts, strict=True):
            counts[stream] = max(counts[stream], count)
    return counts


def _select_sites(model: nn.Module, how: Capture) -> list[SiteModule]:
    """The sites that are to be kept, if they can be seen."""
    every = find_attention(model)
    known = Sites([one.site for one in every], type(model).__name__)
    if not known:
        raise ValueError(f"{known.model} has no attention that headwise finds; hw.sites(model) says what it saw")
    names = {known.find(which).name for which in how.sites}
    those = [one for one in every if not names or one.site.name in names]
    if (names and (blind := [one for one in those if not one.site.see.can])) or not any(o.site.see.can for o in those):
        site = (blind if names else those)[0].site
        raise ValueError(f"{site.name} cannot be seen: {site.see.why}")
    if model.training:
        raise ValueError("the model is in train mode, where dropout changes what is read; call model.eval() first")
    return [one for one in those if one.site.see.can]


def _describe_capture(how: Capture, those: Sequence[SiteModule]) -> str:
    names = ["queries", "keys", *({"v": "values", "z": "what heads say"}[name] for name in how.extra)]
    by_weights = sum(one.adapter.visible_tensors(one.module) == "weights" for one in those)
    said = f"{', '.join(names[:-1])} and {names[-1]} of {len(those)} sites"
    return said if not by_weights else f"{said}, {by_weights} of them by their weights"


def _rows_with_output(given: ModelInputs, said: Any) -> dict[str, tuple[TokenRow, ...]]:
    """The rows of all streams, with the tokens that were said."""
    if said is None:
        return dict(given.token_rows)
    new = said.tolist() if isinstance(said, Tensor) else said
    return dict(given.token_rows) | {"text": given.extend_rows(new)}


def get_model_name(model: nn.Module) -> str:
    """What a model is called: by its description, its folder, or its class."""
    if isinstance(model, Transformer):
        return model.described.name
    path = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return path.rstrip("/").rpartition("/")[2] or type(model).__name__
