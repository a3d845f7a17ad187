"""Perplexity of a long text at a stated context and stride."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...models import Transformer
from ...models.generation import ModelTokenizer, load_tokenizers
from ...models.generation.decoding_state import require_language_model
from ...models.model_spec import ProcessorSpec
from ...observe.head_analysis.objectives import detect_head_objective
from ...observe.inspect.model_inputs import get_device, get_max_length
from ...observe.inspect.model_tokenizer import (
    TOKENIZER_REMEDY,
    find_tokenizer,
    get_surrounding_ids,
)
from ...util.errors import SpecError
from ...util.files import read_text_file
from .model_comparison import get_model_name
from .quality_metrics import LOSS, PERPLEXITY, MetricRow, TextCounts, build_metric_row

DEFAULT_CONTEXT = 1024  # tokens, if the model takes as many
BATCH_TOKENS = 4096  # in one forward call


class ScoredWindow(NamedTuple):
    """A forward call over tokens start..end of a text, which scores the tokens first..end."""

    start: int
    first: int
    end: int


@dataclass(frozen=True)
class PerplexityOptions:
    """A text file, the tokens per window (`context`), and those between the starts of windows.

    By default the context is 1,024 tokens or all that the model can take, and `stride` half of it.
    """

    file: Path | str
    context: int | None = None
    stride: int | None = None


def cut_windows(num_tokens: int, context: int, stride: int) -> list[ScoredWindow]:
    """Return the windows of a text; every token but the first is scored at most once.

    A token that is scored has all tokens before it in its window, at least `context - stride` of
    them after the first window. With `stride=context` the first token of a window has none, so it
    is not scored.

    >>> cut_windows(10, context=4, stride=3)[:2]
    [ScoredWindow(start=0, first=1, end=4), ScoredWindow(start=3, first=4, end=7)]
    """
    windows = list[ScoredWindow]()
    scored = 0
    for start in range(0, num_tokens, stride):
        end = min(start + context, num_tokens)
        first = max(scored, start + 1)
        if first < end:
            windows.append(ScoredWindow(start, first, end))
        scored = end
        if end == num_tokens:
            break
    return windows


def compare_perplexity(
    before: nn.Module, after: nn.Module, options: PerplexityOptions
) -> MetricRow:
    """Return the perplexity of a text file under both models, with intervals over windows."""
    file = Path(options.file)
    check_perplexity(before, options)
    context = default_context(before) if options.context is None else options.context
    stride = max(1, context // 2) if options.stride is None else options.stride
    usage, tokenizer = read_usage(before)
    ids = [*usage.prefix_ids, *tokenizer.ids(read_text_file(file))]
    windows = cut_windows(len(ids), context, stride)
    if len(windows) < 2:
        raise SpecError(
            f"cannot compute the interval of a perplexity: {file} has {len(ids)} tokens, one "
            f"window of {context}. Give a longer text, or a smaller context"
        )
    counts = list[list[TextCounts]]()
    for net in (after, before):
        rows = [ids[window.start : window.end] for window in windows]
        firsts = [window.first - window.start for window in windows]
        scores = score_targets(net, rows, firsts)
        counts.append([TextCounts({LOSS: -score.total}, score.num_targets) for score in scores])
    row = build_metric_row(PERPLEXITY, LOSS, (counts[0], counts[1]), np.exp)
    return row._replace(name=f"perplexity of {file.name}, context {context}, stride {stride}")


def default_context(model: nn.Module) -> int:
    """Return the default number of tokens per window."""
    return min(DEFAULT_CONTEXT, get_max_length(model) or DEFAULT_CONTEXT)


def check_perplexity(model: nn.Module, options: PerplexityOptions) -> None:
    """Refuse windows that the model cannot take, before anything is computed."""
    check_decoder(model)
    context = default_context(model) if options.context is None else options.context
    limit = get_max_length(model)
    if limit is not None and context > limit:
        raise SpecError(
            f"a context of {context} tokens is longer than the {limit} positions of "
            f"{get_model_name(model)}; give at most {limit}"
        )
    if context < 2:
        raise SpecError(f"a context of {context} predicts no token; give 2 or more")
    if options.stride is not None and not 1 <= options.stride <= context:
        raise SpecError(
            f"a stride of {options.stride} tokens leaves out tokens between windows of {context}; "
            f"give 1 to {context}"
        )


def check_decoder(model: nn.Module) -> None:
    """Refuse models that do not predict the next token from the tokens before it."""
    kind = "model without such a head"
    is_decoder = detect_head_objective(model) == "next-token"
    if isinstance(model, Transformer):
        require_language_model(model.spec)
        kind = model.spec.kind
        is_decoder = kind == "decoder"
    if not is_decoder:
        article = "an" if kind.startswith("e") else "a"
        raise SpecError(
            f"{get_model_name(model)} is {article} {kind}, and next tokens are scored under "
            "decoders; leave out its perplexity and evaluation tasks"
        )


def read_usage(model: nn.Module) -> tuple[ProcessorSpec, ModelTokenizer]:
    """Return the special ids and the tokenizer of a decoder."""
    if isinstance(model, Transformer):
        return model.usage, load_tokenizers(model)[1]
    fast = find_tokenizer(model)
    if fast is None:
        raise SpecError(f"{get_model_name(model)} has no tokenizer; {TOKENIZER_REMEDY}")
    own: Any = model
    config = own.config.get_text_config()
    values = [config.bos_token_id, config.eos_token_id]
    ids = [one if isinstance(one, list) else [one][one is None :] for one in values]
    usage = ProcessorSpec(get_surrounding_ids(fast)[0], bos=tuple(ids[0]), eos=tuple(ids[1]))
    return usage, ModelTokenizer(fast.to_str(), parse_special=True)


# --- Log-probabilities of targets -----------------------------------------------------------------


class TargetScore(NamedTuple):
    """Sum of the log-probabilities of the targets of one text, and if each is the likeliest."""

    total: float
    num_targets: int
    is_greedy: bool


def score_targets(
    model: nn.Module, rows: Sequence[Sequence[int]], firsts: Sequence[int]
) -> list[TargetScore]:
    """Score the tokens of each row from the index `first` on, given all tokens before them.

    Rows are batched by length and padded at their ends, which no earlier token attends to.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
    scores: dict[int, TargetScore] = {}
    start = 0
    while start < len(order):
        # the longest come first, so that a padded batch has about `BATCH_TOKENS`
        size = max(1, BATCH_TOKENS // max(1, len(rows[order[start]])))
        batch = order[start : start + size]
        start += size
        batch_scores = _score_batch(model, [rows[n] for n in batch], [firsts[n] for n in batch])
        scores |= zip(batch, batch_scores, strict=True)
    return [scores[index] for index in range(len(rows))]


@torch.inference_mode()
def _score_batch(
    model: nn.Module, rows: Sequence[Sequence[int]], firsts: Sequence[int]
) -> list[TargetScore]:
    device = get_device(model)
    length = max(len(row) for row in rows) - 1
    padded = [[*row[:-1], *[0] * (length + 1 - len(row))] for row in rows]
    inputs = torch.tensor(padded, device=device)
    # of a headwise model, only the logits of targets are computed
    is_native = isinstance(model, Transformer)
    h = model.hidden(inputs) if is_native else model(input_ids=inputs, use_cache=False).logits
    totals = list[Tensor]()
    greedy = list[Tensor]()
    for index, row in enumerate(rows):
        first = firsts[index]
        own = h[index : index + 1, first - 1 : len(row) - 1]
        logits = (model.apply_head(own) if is_native else own)[0].float()
        targets = torch.tensor(list(row[first:]), device=device)
        log_probs = logits.log_softmax(-1).gather(-1, targets[:, None])
        totals.append(log_probs.double().sum() if device.type == "cpu" else log_probs.sum())
        greedy.append((logits.argmax(-1) == targets).all())
    sums = torch.stack(totals).tolist()
    hits = torch.stack(greedy).tolist()
    return [
        TargetScore(sums[index], len(row) - firsts[index], hits[index])
        for index, row in enumerate(rows)
    ]
