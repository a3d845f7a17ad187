"""The jobs of the page on the whole model: capture a text, measure the heads,
and compute the cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import suggest
from ..traces.token_grouping import TokenGrouping
from .model_worker import JobFunction, JobProgress
from .open_model import CAPTURE_BUDGET, AblatedHead, OpenModel, Progress

if TYPE_CHECKING:
    from torch import nn

    from ..costs.workload import Workload
    from ..head_analysis.annotated_examples import Example
    from ..head_analysis.head_table import HeadTable
    from ..model_spec import ModelSpec
    from ..traces import Trace


MAX_NEW_TOKENS = 64  # generated for a source without a target
MAX_CLASS_CHARACTERS = 60  # of the name of a class
MAX_TOKEN_CHARACTERS = (
    40  # characters of a token, on average; longer texts are refused before they are tokenized
)


class TextTooLong(ValueError):
    """The text has more tokens than the model or the page takes."""


def read_text(arguments: Mapping[str, Any], name: str, default: str = "") -> str:
    """A text argument of a job; raises ValueError for another type."""
    value = arguments.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} is of type {type(value).__name__}; give a text")
    return value


def read_heads(model: OpenModel, arguments: Mapping[str, Any]) -> list[AblatedHead]:
    """The ablated heads of a job: a list of [site number, head, mode, scale], where mode and scale
    may be left out.
    """
    entries = arguments.get("heads", [])
    if not isinstance(entries, list):
        raise ValueError("heads must be a list of [site, head, mode, scale]")
    heads: list[AblatedHead] = []
    for entry in entries:
        if (
            not isinstance(entry, list)
            or not 2 <= len(entry) <= 4
            or not all(type(n) is int for n in entry[:2])
        ):
            raise ValueError(f"{entry!r} is no ablated head; give [site, head, mode, scale]")
        site, head = int(entry[0]), int(entry[1])
        mode, scale = [*entry[2:], *("zero", 0.0)[len(entry) - 2 :]]
        if (
            not isinstance(scale, (int, float))
            or isinstance(scale, bool)
            or not math.isfinite(scale)
        ):
            raise ValueError(f"the scale {scale!r} is not a number; give for example 0.5")
        heads.append(AblatedHead(model.site_name(site), head, str(mode), float(scale)))
    return heads


def capture_text(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Run the model on a text (and its target or source) and show the new trace."""
    net = model.get_model()
    text, source = read_text(arguments, "text"), read_text(arguments, "source")
    if not (text or source).strip():
        raise ValueError("the text is empty; enter at least one word")
    check_text_length(model, arguments)
    model.set_trace(capture_trace(net, text, source, model.max_tokens, progress))
    return {"revision": model.revision}


def group_shown_tokens(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Merge subwords into words, leave special tokens or the first token out, or show all tokens
    again.
    """
    names = ("words", "special", "first")
    if wrong := [name for name in names if not isinstance(arguments.get(name, False), bool)]:
        raise ValueError(
            f"{wrong[0]}={arguments[wrong[0]]!r} is neither true nor false; give one of them"
        )
    progress(0, 1, "merging tokens")
    model.set_grouping(TokenGrouping(**{name: arguments.get(name, False) for name in names}))
    return {"revision": model.revision}


def name_classes(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Keep the classes that the user gave to heads, a list of [site number, head, name], with the
    trace.
    """
    entries = arguments.get("classes", [])
    if not isinstance(entries, list) or any(
        not isinstance(entry, list) or [type(part) for part in entry] != [int, int, str]
        for entry in entries
    ):
        raise ValueError("classes must be a list of [site, head, name]")
    if too_long := [entry[2] for entry in entries if not 0 < len(entry[2]) <= MAX_CLASS_CHARACTERS]:
        raise ValueError(
            f"{too_long[0][:20]!r} is no name of a class; give 1 to {MAX_CLASS_CHARACTERS} "
            "characters"
        )
    model.set_classes({(model.site_name(site), head): name for site, head, name in entries})
    return {"count": len(entries)}


def check_text_length(model: OpenModel, arguments: Mapping[str, Any]) -> None:
    """Raise TextTooLong for a text that has too many characters to fit; cheap, and without loading
    the model.
    """
    count = sum(len(read_text(arguments, name)) for name in ("text", "source"))
    limit = model.max_tokens
    if model.model is not None:
        from ..inspect.model_inputs import get_max_length

        limit = min(limit, get_max_length(model.model) or limit)
    if count > MAX_TOKEN_CHARACTERS * limit:
        raise TextTooLong(f"the text has {count} characters; give at most {limit} tokens")


def check_token_counts(counts: Mapping[str, int], max_tokens: int) -> None:
    """Raise TextTooLong if a stream has more tokens than the page takes."""
    for name, count in counts.items():
        if count > max_tokens:
            raise TextTooLong(f"the {name} has {count} tokens; give at most {max_tokens}")


def capture_trace(
    net: nn.Module, text: str, source: str, max_tokens: int, progress: Progress = lambda *_: None
) -> Trace:
    """Record a trace of a text; for an encoder-decoder model, of a source and its target, generated
    if missing.
    """
    from ..inspect.model_inputs import is_encoder_decoder, prepare_inputs
    from ..inspect.trace_capture import Capture, trace

    if is_encoder_decoder(net):
        if not source:
            text, source = "", text
        inputs: Any = {"source": source, "text": text} if text else [source]
        new_tokens = 0 if text else MAX_NEW_TOKENS
    else:
        inputs, new_tokens = [text], 0
    check_token_counts(
        prepare_inputs(net, inputs, new_tokens).token_counts or {}, max_tokens
    )  # before it runs
    progress(0, 2, "running the model")
    captured = trace(
        net,
        inputs,
        max_new_tokens=new_tokens,
        capture=Capture(extra=("v",), budget=CAPTURE_BUDGET),
        log=lambda note: progress(0, 2, note),
    )
    check_token_counts(
        {name: len(rows[0].ids) for name, rows in captured.streams.items() if rows}, max_tokens
    )
    progress(1, 2, "drawing thumbnails")
    return captured.with_thumbnails()


def capture_image(net: nn.Module, path: str) -> Trace:
    """Record a trace of a vision model on the first image of a file, a folder or an .npy."""
    from ..head_analysis.image_examples import read_images
    from ..inspect.trace_capture import Capture, trace
    from ..models import Transformer

    name = "x" if isinstance(net, Transformer) else "pixel_values"
    inputs = {name: read_images(net, path, 1)}
    return trace(
        net, inputs, capture=Capture(extra=("v",), budget=CAPTURE_BUDGET)
    ).with_thumbnails()


def make_examples(model: OpenModel, arguments: Mapping[str, Any]) -> list[Example]:
    """The texts of a job as examples: `texts`, where a tab separates source and target, or the text
    that is shown.
    """
    from ..head_analysis.annotated_examples import ExampleReader

    reader = ExampleReader(model.get_model())
    texts = arguments.get("texts")
    if isinstance(texts, list) and texts:
        for text in texts:
            source, _, target = str(text).partition("\t")
            reader.add_text(source, target)
    else:
        streams = model.get_recorded().streams
        text = streams["text"][0].text or " ".join(streams["text"][0].words)
        if "source" in streams:
            reader.add_text(streams["source"][0].text or " ".join(streams["source"][0].words), text)
        else:
            reader.add_text(text)
    examples = reader.examples_with_frequencies()
    if not examples:
        raise ValueError("there is no text to measure; enter one")
    return examples


def measure(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Measure and classify all heads on texts; with a single text there are no confidence
    intervals.
    """
    examples = make_examples(model, arguments)
    model.set_table(measure_table(model.get_model(), examples, progress))
    return {"revision": model.revision, "texts": len(examples)}


def measure_table(net: nn.Module, examples: Sequence[Example], progress: JobProgress) -> HeadTable:
    """Measures and classes of all heads; the intervals of a single text are NaN."""
    from ..head_analysis.head_classes import classify_heads
    from ..head_analysis.head_measurement import MeasureOptions, measure_heads

    options = MeasureOptions(min_texts=1)
    table = measure_heads(
        net, examples, options=options, progress=lambda count: progress(count, len(examples))
    )
    if table.texts != "1 text":
        return classify_heads(table)
    note = (
        "one text: no confidence intervals, and classes by scores that are not tested; give "
        "several texts"
    )
    return classify_heads(table.with_notes([note]), criteria="untested")


JOB_KINDS: dict[str, JobFunction] = {
    "text": capture_text,
    "measure": measure,
    "group": group_shown_tokens,
    "classes": name_classes,
}


MAX_CONTEXT, MAX_BATCH = 2**20, 2**12


def compute_cost(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Cost of the whole model and of each attention layer for one workload, before it runs.

    `context` defaults to 2,048 or the maximum of the model, `source` to the context, and `dtype` to
    that of the model.
    """
    from ..costs.cost_report import CostEstimate, cost
    from ..costs.roofline import Device

    net = model.get_model()
    workload = _read_workload(net, arguments)
    progress(0, 2, "the whole model")
    notes: list[str] = []
    estimates: list[CostEstimate] = []
    sources = workload.source or workload.context
    try:
        estimates.extend(cost(read_spec(net), workload))
        workload, sources = estimates[0].workload, estimates[0].full_call.source
    except ValueError as error:
        notes.append(f"the whole model: {error}")
    progress(1, 2, "attention layers")
    with_source = {site.stack for site in model.sites.values() if site.kind == "cross"}
    for name, site in model.sites.items():
        if site.spec is None:
            notes.append(f"{name}: {site.spec_reason}")
            continue
        # A model adds a source width only to the specs that have another one than the layer.
        spec = (
            replace(site.spec, source=site.spec.source or site.spec.model)
            if site.kind == "cross"
            else site.spec
        )
        is_encoder = bool(with_source) and site.stack not in with_source
        lengths = {"context": sources if is_encoder else workload.context, "source": sources}
        try:
            estimates.extend(cost({name: spec}, replace(workload, **lengths)))
        except ValueError as error:
            notes.append(f"{name}: {error}")
    values = {"context": workload.context, "batch": workload.batch, "dtype": workload.dtype}
    values |= {
        "source": sources if with_source else None,
        "device": Device.from_name(workload.device).description,
    }
    return {
        "rows": [_select(estimate.data) for estimate in estimates],
        "workload": values,
        "notes": notes,
    }


def _read_workload(net: nn.Module, arguments: Mapping[str, Any]) -> Workload:
    from ..costs.flops import TORCH_DTYPES
    from ..costs.workload import Workload

    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    own = next(
        (names[tensor.dtype] for tensor in net.parameters() if tensor.dtype in names), "fp32"
    )
    sizes: dict[str, Any] = {
        name: None if arguments.get(name) is None else _read_count(arguments, name, 1, MAX_CONTEXT)
        for name in ("context", "source")
    }
    dtype = arguments.get("dtype") or own
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; {suggest(str(dtype), TORCH_DTYPES)}")
    return Workload(batch=_read_count(arguments, "batch", 1, MAX_BATCH), dtype=dtype, **sizes)


def read_spec(net: nn.Module) -> ModelSpec:
    """The spec of a headwise model, or that of a transformers model by its config; raises
    ValueError without one.
    """
    from ..families import read_model_spec
    from ..models import Transformer

    if isinstance(net, Transformer):
        return net.spec
    config = getattr(net, "config", None)
    if config is None:
        raise ValueError(
            f"{type(net).__name__} has no config; its cost is only known by attention layer"
        )
    return read_model_spec(config.to_dict())


def _read_count(arguments: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = arguments.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name}={value!r} is out of range; give 1 to {most}")
    return value


def _select(row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a row of the cost report that the page shows."""
    names = ("name", "params", "kv_bytes_per_token", "kv_bytes", "intensity", "bound")
    flops = row["flops"]
    return {name: row[name] for name in names} | {
        "prefill": flops.get("prefill"),
        "decode": flops.get("decode"),
    }
