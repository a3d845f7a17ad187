"""Jobs of the page on the whole model: capture a text, group tokens, measure heads, and compute
costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..observe import bundled_sample
from ..observe.traces.attention_trace import TokenGrouping
from ..util.errors import UnknownToken, suggest
from .model_worker import CLASSES, LINES, JobProgress, Pair, action, flag, integer, text
from .open_model import CAPTURE_BUDGET, OpenModel, Progress, id_inputs
from .weight_summaries import encode_arrays

if TYPE_CHECKING:
    from torch import nn

    from ..models.model_spec import ModelSpec
    from ..observe.head_analysis.annotated_examples import Example
    from ..observe.head_analysis.head_similarity import HeadLocation
    from ..observe.traces import Trace


SAMPLE_READS = "error.sampleReads"  # a sentence of the page, which has it in both languages
MAX_NEW_TOKENS = 64  # generated for a source without a target
MAX_TOKEN_CHARACTERS = 40  # of a token, on average; longer texts are refused before tokenization
MAX_CONTEXT = 2**20
MAX_BATCH = 2**12


class TextTooLong(ValueError):
    """Raised if a text has more tokens than the model or the page takes."""


# --- Texts ----------------------------------------------------------------------------------------


@action("text", target=text(key="text"), source=text())
def capture_text(
    model: OpenModel, progress: JobProgress, target: str, source: str
) -> dict[str, Any]:
    """Run the model on a text (and its target or source) and show the new trace."""
    net = model.get_model()
    if not (target or source).strip():
        raise ValueError("the text is empty; enter at least one word")
    check_text_length(model, target, source)
    try:
        captured = capture_trace(net, target, source, model.max_tokens, progress)
    except UnknownToken as error:
        if model.target != str(bundled_sample.MODEL):
            raise
        fact = str(error).partition("; ")[0]
        raise UnknownToken(f"{fact}; {SAMPLE_READS}") from None
    model.set_trace(captured)
    return {"revision": model.revision}


@action("group", words=flag(), special=flag(), first=flag())
def group_shown_tokens(
    model: OpenModel, progress: JobProgress, words: bool, special: bool, first: bool
) -> dict[str, Any]:
    """Merge subwords into words, leave special tokens or the first token out, or show all tokens
    again.
    """
    progress(0, 1, "merging tokens")
    model.set_grouping(TokenGrouping(words=words, special=special, first=first))
    return {"revision": model.revision}


@action("classes", classes=CLASSES)
def name_classes(
    model: OpenModel, progress: JobProgress, classes: Mapping[Pair, str]
) -> dict[str, Any]:
    """Store the user's head classes with the trace."""
    model.set_classes(classes)
    return {"count": len(classes)}


def check_text_length(model: OpenModel, *texts: str) -> None:
    """Raise TextTooLong for texts with too many characters to fit. Does not load the model."""
    count = sum(len(part) for part in texts)
    limit = model.max_tokens
    if model.model is not None:
        from ..observe.inspect.model_inputs import get_max_length

        limit = min(limit, get_max_length(model.model) or limit)
    if count > MAX_TOKEN_CHARACTERS * limit:
        raise TextTooLong(f"the text has {count} characters; give at most {limit} tokens")


def check_token_counts(counts: Mapping[str, int], max_tokens: int) -> None:
    """Raise TextTooLong if a stream has more tokens than the page takes."""
    for name, count in counts.items():
        if count > max_tokens:
            raise TextTooLong(f"the {name} has {count} tokens; give at most {max_tokens}")


def capture_trace(
    net: nn.Module, text: Any, source: str, max_tokens: int, progress: Progress = lambda *_: None
) -> Trace:
    """Record a trace of a text, or of other inputs of the model; for an encoder-decoder model, of a
    source and its target, generated if missing.
    """
    from ..observe.inspect.model_inputs import is_encoder_decoder, prepare_inputs
    from ..observe.inspect.trace_capture import Capture, trace

    inputs: Any = [text] if isinstance(text, str) else text
    new_tokens = 0
    if is_encoder_decoder(net) and isinstance(text, str):
        if source and text:
            inputs = {"source": source, "text": text}
        else:
            inputs = [source or text]
            new_tokens = MAX_NEW_TOKENS
    counts = prepare_inputs(net, inputs, new_tokens).token_counts or {}
    check_token_counts(counts, max_tokens)  # before it runs
    progress(0, 2, "running the model")
    captured = trace(
        net,
        inputs,
        max_new_tokens=new_tokens,
        capture=Capture(extra=("v",), budget=CAPTURE_BUDGET),
    )
    counts = {name: len(rows[0].ids) for name, rows in captured.streams.items() if rows}
    check_token_counts(counts, max_tokens)
    if new_tokens:
        row = captured.streams["text"][0]
        written = (replace(row, text=_read_ids(net, row.ids)),)
        captured = replace(captured, streams={**captured.streams, "text": written})
    progress(1, 2, "drawing thumbnails")
    return captured.with_thumbnails()


def _read_ids(net: nn.Module, ids: Sequence[int]) -> str:
    """Return the text of the ids that a model wrote, without special tokens."""
    from ..models import Transformer
    from ..models.generation.text_output import load_tokenizers
    from ..models.vocabulary import decode_tokens
    from ..observe.inspect.model_tokenizer import find_tokenizer

    if isinstance(net, Transformer):
        return load_tokenizers(net)[1].text(ids)
    tokenizer = find_tokenizer(net)
    return "" if tokenizer is None else decode_tokens(tokenizer, ids)


def capture_image(net: nn.Module, path: str) -> Trace:
    """Record a trace of a vision model on the first image of a file, a folder or an .npy."""
    from ..models import Transformer
    from ..observe.head_analysis.image_examples import read_images
    from ..observe.inspect.trace_capture import Capture, trace

    name = "x" if isinstance(net, Transformer) else "pixel_values"
    capture = Capture(extra=("v",), budget=CAPTURE_BUDGET)
    return trace(net, {name: read_images(net, path, 1)}, capture=capture).with_thumbnails()


# --- Measures -------------------------------------------------------------------------------------


def list_texts(model: OpenModel) -> list[str]:
    """Return the open text as one line; a tab separates a source and its target."""
    streams = model.get_recorded().streams
    rows = [streams[name][0] for name in ("source", "text") if streams.get(name)]
    texts = [row.text or " ".join(row.words) for row in rows]
    return ["\t".join(" ".join(part.split()) for part in texts)]


def make_examples(model: OpenModel, texts: Sequence[str] = ()) -> list[Example]:
    """Make examples from the job's texts (a tab separates source and target), or from the open
    text.
    """
    from ..observe.head_analysis.annotated_examples import ExampleReader
    from ..observe.head_analysis.text_analysis import text_reader

    reader = ExampleReader(model.get_model())
    if texts:
        pairs = [line.partition("\t")[::2] for line in texts]
    else:
        streams = model.get_recorded().streams
        rows = [streams[name][0] for name in ("source", "text") if name in streams]
        if not any(row.text for row in rows):  # token ids were given
            reader.add_inputs(id_inputs(model.get_model(), model.get_recorded()))
            return reader.examples_with_frequencies()
        shown = [row.text or " ".join(row.words) for row in rows]
        pairs = [(shown[0], shown[1] if len(shown) > 1 else "")]
    with text_reader(reader.model):
        for first, target in pairs:
            reader.add_text(first, target)
    examples = reader.examples_with_frequencies()
    if not examples:
        raise ValueError("there is no text to measure; enter one")
    return examples


@action("measure", texts=LINES)
def measure(model: OpenModel, progress: JobProgress, texts: Sequence[str] = ()) -> dict[str, Any]:
    """Measure and classify all heads, on the open text or on several texts; of a trace alone, by
    its weights.
    """
    from ..observe.head_analysis.annotated_examples import GENERAL_TEXTS, read_lines
    from ..observe.head_analysis.head_measurement import MeasureOptions
    from ..observe.head_analysis.text_analysis import heads, measure_and_classify

    if not model.has_model and not texts:
        model.set_tables(own=heads(model.get_recorded()))
        return {"revision": model.revision, "texts": 1}
    examples = make_examples(model, texts)
    table = measure_and_classify(
        model.get_model(),
        examples,
        options=MeasureOptions(min_texts=1),  # the intervals of a single text are NaN
        progress=lambda count: progress(count, len(examples)),
    )
    if [*texts] == read_lines(GENERAL_TEXTS):
        table = replace(table, texts=table.texts.replace(" ", " general "))
    model.set_tables(table) if texts else model.set_tables(own=table)
    return {"revision": model.revision, "texts": len(examples)}


# --- Cost -----------------------------------------------------------------------------------------


@action(
    "cost",
    context=integer(1, MAX_CONTEXT, None),
    source=integer(1, MAX_CONTEXT, None),
    batch=integer(1, MAX_BATCH, 1),
    dtype=text(None),
)
def compute_cost(
    model: OpenModel, progress: JobProgress, dtype: str | None, **sizes: Any
) -> dict[str, Any]:
    """Estimate the cost of the whole model and of each attention layer for one workload.

    `context` defaults to 2,048 or the model's maximum, `source` to the context, and `dtype` to the
    model's dtype.
    """
    from ..costs.cost_estimate import CostEstimate
    from ..costs.cost_report import cost
    from ..costs.flops import TORCH_DTYPES
    from ..costs.roofline import Device
    from ..costs.workload import Workload

    net = model.get_model()
    names = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}
    own = [names[tensor.dtype] for tensor in net.parameters() if tensor.dtype in names]
    dtype = dtype or (own[0] if own else "fp32")
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; {suggest(dtype, TORCH_DTYPES)}")
    workload = Workload(dtype=dtype, **sizes)
    progress(0, 2, "the whole model")
    notes: list[str] = []
    estimates: list[CostEstimate] = []
    sources = workload.source or workload.context
    try:
        estimates.extend(cost(read_spec(net), workload))
        workload = estimates[0].workload
        sources = estimates[0].full_call.source
    except ValueError as error:
        notes.append(f"the whole model: {error}")
    progress(1, 2, "attention layers")
    with_source = {site.stack for site in model.sites.values() if site.kind == "cross"}
    for name, site in model.sites.items():
        spec = site.spec
        if spec is None:
            notes.append(f"{name}: {site.spec_reason}")
            continue
        if site.kind == "cross":
            # A model adds a source width only to the specs that have another one than the layer.
            spec = replace(spec, source=spec.source or spec.model)
        is_encoder = bool(with_source) and site.stack not in with_source
        lengths = {"context": sources if is_encoder else workload.context, "source": sources}
        try:
            estimates.extend(cost({name: spec}, replace(workload, **lengths)))
        except ValueError as error:
            notes.append(f"{name}: {error}")
    return {
        "rows": [_select(estimate.data) for estimate in estimates],
        "workload": {
            "context": workload.context,
            "batch": workload.batch,
            "dtype": workload.dtype,
            "source": sources if with_source else None,
            "device": Device.from_name(workload.device).description,
        },
        "notes": notes,
    }


def read_spec(net: nn.Module) -> ModelSpec:
    """Return the spec of a headwise model, or of a transformers model from its config. Raises
    ValueError without a config.
    """
    from ..models import Transformer
    from ..models.families import read_model_spec

    if isinstance(net, Transformer):
        return net.spec
    config = getattr(net, "config", None)
    if config is None:
        raise ValueError(
            f"{type(net).__name__} has no config; its cost is only known by attention layer"
        )
    return read_model_spec(config.to_dict())


def _select(row: Mapping[str, Any]) -> dict[str, Any]:
    """Select the numbers of a cost report row that the page shows."""
    names = ("name", "params", "kv_bytes_per_token", "kv_bytes", "intensity", "bound")
    flops = row["flops"]
    shown = {name: row[name] for name in names}
    return shown | {"prefill": flops.get("prefill"), "decode": flops.get("decode")}


MIN_TEXTS = 2  # an interval needs as many
MAX_CIRCUITS = 400  # limit on heads with pairwise circuit comparison
HALF_SIMILAR = 0.5  # cut of 1 - similarity, half way between equal heads (0) and unrelated ones (1)
Distances = NDArray[np.float64]


class HeadGroups:
    """Groups of comparable heads: the result of the job.

    Group n has the arrays "n.distances" [heads, heads], "n.points" [heads, 2] on a plane and
    "n.merges" [merges, 3] of a tree. `threshold` is where the tree is cut first.
    """

    def __init__(self, model: OpenModel) -> None:
        layers = model.get_trace().layers
        self.sites = {layer.name: number for number, layer in enumerate(layers)}
        self.arrays: dict[str, Any] = {}
        self.groups: list[dict[str, Any]] = []

    def add(
        self,
        heads: Sequence[HeadLocation],
        distances: Distances,
        points: Any,
        merges: Any,
        **fields: Any,
    ) -> None:
        """Add heads with their distances, coordinates on a plane, and tree merges."""
        number = len(self.groups)
        self.arrays[f"{number}.distances"] = distances.astype(np.float32)
        self.arrays[f"{number}.points"] = np.asarray(points, np.float32)
        self.arrays[f"{number}.merges"] = np.array(merges, np.float32).reshape(-1, 3)
        places = [[self.sites.get(head.site, -1), head.head] for head in heads]
        self.groups.append({"heads": places, **fields})

    def add_similarity(
        self, by: str, streams: Sequence[str], heads: Sequence[HeadLocation], similarity: Distances
    ) -> None:
        """Add heads with the distance 1 - similarity: 0 for equal heads, 1 for unrelated ones.

        Skips heads without a similarity to the others. Adds no group for fewer than two heads.
        """
        from ..observe.head_analysis.head_similarity import average_linkage, embed_in_plane

        measured = np.flatnonzero(np.isfinite(np.diagonal(similarity))).tolist()
        if len(measured) < 2:
            return
        distances = np.clip(1 - similarity[np.ix_(measured, measured)], 0, None)
        np.fill_diagonal(distances, 0)
        points = embed_in_plane(distances).points
        fields = {"by": by, "streams": list(streams), "threshold": HALF_SIMILAR}
        chosen = [heads[number] for number in measured]
        merges = average_linkage(distances)
        self.add(chosen, distances, points, merges, **fields, clustersByChance=len(measured))

    def add_circuits(self, model: OpenModel) -> list[str]:
        """Add heads by the cosine of their OV circuits, one group per model width. Returns a reason
        if there are none.
        """
        from ..observe.head_analysis.head_circuits import compare_circuits

        if len(model.heads) > MAX_CIRCUITS:
            return [f"OV circuits are not compared: there are more than {MAX_CIRCUITS} heads"]
        try:
            circuits = compare_circuits(model.get_model())
        except (ValueError, KeyError, NotImplementedError) as error:
            return [f"OV circuits are not compared: {error}"]
        values = circuits.values.cpu().numpy()
        left = [number for number, head in enumerate(circuits.heads) if head.site in self.sites]
        while left:
            alike = [number for number in left if np.isfinite(values[left[0], number])] or left[:1]
            heads = [circuits.heads[number] for number in alike]
            self.add_similarity("circuits", (), heads, values[np.ix_(alike, alike)])
            left = [number for number in left if number not in alike]
        return []


@action("similarity", texts=LINES)
def compute_similarity(model: OpenModel, progress: JobProgress, texts: Sequence[str]) -> bytes:
    """Compare all heads by attention (Jensen-Shannon divergence in nats) and outputs (1 - CKA) over
    the job's texts, and by OV circuits (1 - cosine).
    """
    from ..observe.head_analysis.head_redundancy import measure_redundancy

    if len(texts) < MIN_TEXTS:
        raise ValueError(
            "similarity needs several texts, because its intervals are over texts; give one text "
            "a line"
        )
    examples = make_examples(model, texts)
    result = measure_redundancy(
        model.get_model(),
        examples,
        progress=lambda count: progress(count, len(examples), "comparing heads"),
    )
    groups = HeadGroups(model)
    for group in result.readers:
        test = group.similar_pair_test
        groups.add(
            group.heads,
            group.distances,
            group.embedding.points,
            group.merges,
            by="attention",
            streams=list(group.streams),
            threshold=float(group.threshold),
            clustersByChance=int(group.num_chance_clusters),
            pairTest={
                "found": len(group.similar_pairs),
                "pairs": group.num_pairs,
                "chance": float(test.chance),
                "p": float(test.p),
            },
        )
    for group in result.readers:
        if group.outputs is not None:
            groups.add_similarity("outputs", group.streams, group.heads, group.outputs)
    progress(len(examples), len(examples), "comparing circuits")
    notes = [*result.notes, *groups.add_circuits(model)]
    return encode_arrays(groups.arrays, groups=groups.groups, texts=len(examples), notes=notes)
