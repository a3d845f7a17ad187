"""Analysis of a model's heads over plain texts: `heads` measures and classifies them, `importance`
rates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...hub.pretrained_models import open_model
from ...models import Transformer
from ...util.errors import SpecError
from ..inspect import attention_sites
from ..inspect.model_inputs import is_encoder_decoder, is_token_input
from ..inspect.model_tokenizer import find_tokenizer, use_tokenizer
from ..inspect.trace_capture import get_model_name
from ..traces import Trace
from .annotated_examples import (
    GENERAL_TEXTS,
    GENERAL_TEXTS_NOTE,
    Example,
    ExampleReader,
    examples_from_lines,
    read_lines,
)
from .head_classes import MIN_ROWS, classify_heads
from .head_importance import DEFAULT_OPTIONS, ImportanceOptions, estimate_importance
from .head_measurement import MeasureCollector, MeasureOptions, measure_heads, measure_trace
from .head_metrics import IMAGE_METRICS, NOT_FOR_IMAGES, metrics_for_criteria
from .head_table import HeadTable, ImportanceResult
from .image_examples import as_pixels, examples_from_pixels, plain_image_examples
from .importance_methods import ImportanceMethod
from .objectives import Objective

TEXT_KINDS = (
    "strings, pairs (source, target) of strings, token ids, mappings of the model's arguments, "
    "Examples, or images as one tensor of floats"
)
ONE_TEXT_NOTE = (
    f"one text: each measure stands beside its chance level, without an interval; classes need "
    f"{MIN_ROWS} rows and are not tested, which needs several texts"
)


@contextmanager
def text_reader(model: Any, tokenizer: object = None) -> Iterator[nn.Module]:
    """Context in which texts for a model are encoded with `tokenizer` (default: its own), which is
    read only once.
    """
    module = open_model(model)
    if tokenizer is None and not isinstance(module, Transformer):
        tokenizer = find_tokenizer(module)
    with use_tokenizer(module, tokenizer) as reader:
        yield reader


def read_texts(
    model: nn.Module, texts: Any, min_count: int = 0
) -> tuple[list[Example], tuple[str, ...]]:
    """Return texts as examples of a model, with notes on what was skipped or split.

    `texts` is one string, or an iterable of strings, of pairs (source, target) for an
    encoder-decoder model, of token ids [T] or batches [B, T] of them, of mappings of the model's
    arguments, such as the output of a tokenizer, or of Examples, which are returned unchanged. In a
    string for an encoder-decoder model, a tab separates source and target. Of a vision model,
    `texts` are images, floats [n, channels, height, width].
    """
    if isinstance(texts, ExampleReader):
        return texts.examples_with_frequencies(), texts.notes
    pixels = _read_pixels(texts, min_count)
    if pixels is not None:
        return plain_image_examples(model, pixels), ()
    if isinstance(texts, str) or is_token_input(texts):
        texts = [texts]
    if not isinstance(texts, Iterable):
        raise SpecError(f"texts are of type {type(texts).__name__}; give a list of {TEXT_KINDS}")
    items = list(texts)
    inputs: list[Any] = []  # token ids, and mappings of arguments
    pairs: list[tuple[str, str]] = []  # source and target, which is empty if there is none
    has_source = is_encoder_decoder(model)
    for number, item in enumerate(items):
        if isinstance(item, str):
            source, _, target = item.partition("\t") if has_source else (item, "", "")
            pairs.append((source, target))
        elif isinstance(item, (tuple, list)) and [*map(type, item)] == [str, str]:
            pairs.append((item[0], item[1]))
        elif is_token_input(item):
            inputs.append(item)
        elif not isinstance(item, Example):
            kind = type(item).__name__
            raise SpecError(f"text {number} is of type {kind}; give {TEXT_KINDS}")
    if len(items) not in (len(pairs), len(inputs), len(items) - len(pairs) - len(inputs)):
        raise SpecError("texts are of several kinds; give strings, token ids or Examples only")
    examples = items
    notes: tuple[str, ...] = ()
    if pairs or inputs:
        reader = examples_from_lines(model, pairs)
        for item in inputs:
            reader.add_inputs(item)
        examples = reader.examples_with_frequencies()
        notes = reader.notes
    if len(examples) < min_count:
        reasons = f" ({'; '.join(notes)})" if notes else ""
        raise SpecError(
            f"only {len(examples)} of the texts can be read{reasons}; give at least {min_count}"
        )
    return examples, notes


def _read_pixels(images: Any, min_count: int) -> Tensor | None:
    """Images as one tensor, at least `min_count`; None for anything else."""
    pixels = as_pixels(images)
    if pixels is not None and len(pixels) < min_count:
        count = "1 image is" if len(pixels) == 1 else f"{len(pixels)} images are"
        raise SpecError(f"{count} too few; give at least {min_count}")
    return pixels


def find_sites(model: nn.Module, examples: Sequence[Example]) -> None:
    """Find attention in a run of the first example if it cannot be found otherwise."""
    if examples and not any(site.observe.possible for site in attention_sites.sites(model)):
        attention_sites.sites(model, examples[0].model_inputs)


def measure_and_classify(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    criteria: str = "ours",
    options: MeasureOptions = MeasureOptions(),  # noqa: B008 - it is frozen
    collectors: Sequence[MeasureCollector] = (),
    progress: Callable[[int], object] = lambda _: None,
) -> HeadTable:
    """Measure every head over examples, with the metrics that `criteria` need, and classify it by
    them; over one text by scores that are not tested.
    """
    find_sites(model, examples)
    metrics = (*options.metrics, *metrics_for_criteria(criteria))
    table = measure_heads(
        model,
        examples,
        options=options._replace(metrics=metrics),
        collectors=collectors,
        name=get_model_name(model),
        progress=progress,
    )
    return _classify(table, criteria)


def _classify(table: HeadTable, criteria: str) -> HeadTable:
    if table.texts != "1 text" or criteria != "ours":
        return classify_heads(table, criteria=criteria)
    return classify_heads(table.with_notes([ONE_TEXT_NOTE]), criteria="untested")


def heads(
    model: nn.Module | Path | str | Trace,
    texts: Any = None,
    *,
    criteria: str = "ours",
    options: MeasureOptions = MeasureOptions(),  # noqa: B008 - it is frozen
    tokenizer: object = None,
    progress: Callable[[int], object] = lambda _: None,
) -> HeadTable:
    """Measure what every head of a model attends to over texts, and classify it; the result prints
    as a table.

    `model` is a transformers model, a headwise model, or your own module, if `hw.sites` finds its
    attention; a name as in `hw.load`; or a trace, whose texts are measured. `texts` are strings,
    pairs (source, target) for an encoder-decoder model, token ids [T] or [B, T], mappings of the
    model's arguments, or two or more images for a vision model, floats [n, channels, height, width]
    as the model takes them; without them, general texts in English that come with headwise. One
    text has measures beside chance, and no tests. `tokenizer` is needed for texts if the model has
    none. `criteria` define the classes, as in
    `classify_heads`.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> table = hw.heads(net, ["one text", "another one"], tokenizer="bytes")
    >>> table.texts, [head.classes[0].name for head in table.heads]
    ('2 texts', ['unclear', 'unclear'])
    """
    if isinstance(model, Trace):
        if texts is not None:
            raise SpecError("a trace records its own texts; leave texts out, or give the model")
        return _classify(measure_trace(model), criteria)
    general = () if texts is not None else (GENERAL_TEXTS_NOTE,)
    if texts is None:
        texts = read_lines(GENERAL_TEXTS)
    with text_reader(model, tokenizer) as reader:
        pixels = _read_pixels(texts, min_count=2)
        if pixels is not None:
            examples, sites, notes = examples_from_pixels(reader, pixels)
            kind = "image"
            notes = (*notes, NOT_FOR_IMAGES)
            options = options._replace(metrics=IMAGE_METRICS, sites=options.sites or sites)
        else:
            kind = "text"
            examples, notes = read_texts(reader, texts, min_count=1)
            options = options._replace(min_texts=min(len(examples), options.min_texts))
        table = measure_and_classify(
            reader, examples, criteria=criteria, options=options, progress=progress
        )
    return replace(table, texts=table.texts.replace("text", kind)).with_notes((*general, *notes))


def importance(
    model: nn.Module | Path | str,
    texts: Any,
    method: str | ImportanceMethod = "leave-one-out",
    *,
    objective: str | Objective | None = None,
    options: ImportanceOptions = DEFAULT_OPTIONS,
    tokenizer: object = None,
    log: Callable[[str], object] = lambda _: None,
) -> ImportanceResult:
    """Estimate how much every head of a model matters over texts; the result prints as a table.

    Model, texts (two or more) and tokenizer as in `hw.heads`; method, objective, options and log as
    in `hw.estimate_importance`.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> result = hw.importance(net, ["one text", "another one"], tokenizer="bytes")
    >>> result.objective, len(result.heads)
    ('next-token', 2)
    """
    with text_reader(model, tokenizer) as reader:
        examples, notes = read_texts(reader, texts, min_count=2)
        result = estimate_importance(
            reader, examples, method=method, objective=objective, options=options, log=log
        )
    return result.with_notes(notes)
