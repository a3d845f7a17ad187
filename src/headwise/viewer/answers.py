"""Handlers of the page's read-only requests. Each reads the request parameters and returns arrays,
JSON, or a file.

`ask(view, address)` answers an address such as "/api/row?site=0&head=1&query=3". The server and the
single-file page use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..observe.traces import map_queries_and_keys
from ..observe.traces.attention_record import AttentionRecord
from ..observe.traces.attention_trace import AGGREGATES, aggregate_heads, roll_out_attention
from ..observe.traces.head_steps import HeadPlace, HeadSteps, multiply_channels, recorded_steps
from .comparison_actions import exact_pair, pool_difference
from .model_worker import REQUIRED, Field, choice, integer, number
from .open_model import (
    LENSES,
    MAX_TILE_CELLS,
    ONLY_TRACE,
    OpenModel,
    TileRange,
    get_native_copy,
    id_inputs,
)
from .weight_summaries import encode_arrays, list_classes, stack_measures, thumbnail_masks

if TYPE_CHECKING:
    from torch import nn

    from ..models import Transformer
    from ..observe.head_analysis.head_report import PictureMaker

NUMBER = re.compile(r"-?\d{1,12}(\.\d{1,9})?", re.ASCII)  # in a parameter
MAX_KEYS = 512  # keys with products by channel; those with the largest scores
MAX_AGGREGATE_CELLS = 2048**2  # of the matrix of many heads
LISTED_TOKENS = 12  # with the largest and with the smallest effects
LISTED_WRITERS = 8  # those that add most to a score
MOST_SITES = 10**6


class Query:
    """Request parameters for an open model, parsed and range-checked."""

    def __init__(self, view: OpenModel, parameters: Mapping[str, str]) -> None:
        self.view = view
        self.parameters = parameters

    def _get(self, name: str, field: Field) -> Any:
        """Return the value of a parameter; digits become a number."""
        values: dict[str, Any] = dict(self.parameters)
        text = values.get(name, "")
        if NUMBER.fullmatch(text):
            values[name] = float(text) if "." in text else int(text)
        return field.get(self.view, name, values)

    def integer(self, name: str, low: int, high: int, default: Any = REQUIRED) -> int:
        """Read an integer from `low` to `high`."""
        return self._get(name, integer(low, high, default))

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """Read a number from `low` to `high`."""
        return self._get(name, number(default, low, high))

    def span(self, prefix: str, count: int) -> slice:
        """Read a range of positions, from `prefix`0 to `prefix`1; all by default."""
        start = self.integer(f"{prefix}0", 0, count, 0)
        stop = self.integer(f"{prefix}1", 0, count, count)
        if stop <= start:
            raise ValueError(
                f"{prefix}0={start} and {prefix}1={stop} give no position; give {prefix}0 < "
                f"{prefix}1"
            )
        return slice(start, stop)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Read one of several words; the first by default."""
        return self._get(name, choice(choices, choices[0]))

    def text(self, name: str, default: str) -> str:
        """A short text."""
        return self.parameters.get(name, default)[:200]

    # --- parameters of many answers ---------------------------------------------------------------

    @property
    def site(self) -> str:
        """Return the name of the attention layer."""
        return self.view.site_name(self.integer("site", 0, MOST_SITES))

    @property
    def layer(self) -> AttentionRecord:
        """Return the layer as shown, perhaps with merged tokens."""
        return self.view.get_trace().get_layer(self.site)

    @property
    def recorded(self) -> AttentionRecord:
        """Return the layer as recorded."""
        return self.view.get_recorded().get_layer(self.site)

    @property
    def part(self) -> TileRange:
        """Read the range of queries and keys, all by default."""
        layer = self.layer
        return TileRange(self.span("q", layer.num_queries), self.span("k", layer.num_keys))

    @property
    def head(self) -> int:
        """Return the number of the head."""
        return self.integer("head", 0, self.layer.heads - 1)

    @property
    def lens(self) -> str:
        """Return the name of the factor applied to the weights."""
        return self.choice("lens", LENSES)


Answer = Callable[[OpenModel, Query], Any]
ANSWERS: dict[str, Answer] = {}


def answer(path: str) -> Callable[[Answer], Answer]:
    """Register a function as the handler of a path below /api/."""

    def register(function: Answer) -> Answer:
        ANSWERS[path] = function
        return function

    return register


def ask(view: OpenModel, address: str) -> Any:
    """Return the answer for an address such as "/api/tile?site=0&head=0"."""
    parts = urlsplit(address)
    parameters = dict(parse_qsl(parts.query))
    return ANSWERS[parts.path.removeprefix("/api/")](view, Query(view, parameters))


# --- The open trace and its measures --------------------------------------------------------------


@answer("document")
def answer_document(view: OpenModel, query: Query) -> dict[str, Any]:
    """Describe the open model or trace in JSON."""
    return view.describe()


@answer("thumbnails")
def answer_thumbnails(view: OpenModel, query: Query) -> bytes:
    """Return thumbnails of all heads, [heads, 64, 64], where 255 is a weight of 1, and their shared
    masks.
    """
    masks, mask_of_head = thumbnail_masks(view.get_trace())
    arrays = {"thumbnails": view.thumbnails(), "masks": masks, "mask_of_head": mask_of_head}
    return encode_arrays(arrays, revision=view.revision)


@answer("measures")
def answer_measures(view: OpenModel, query: Query) -> bytes:
    """Return the measures of all heads, [heads, measures, 4], with names and classes; and those of
    the open text, if they are not the same. Without measurements, the names are empty.
    """
    table = view.shown_table
    if table is None:
        return encode_arrays({}, names=[], classes=[], texts="", notes=[], revision=view.revision)
    names, stacked = stack_measures(table, view.heads)
    own_names, own = stack_measures(view.own_table or table, view.heads)
    return encode_arrays(
        {"measures": stacked, "own": own},
        names=names,
        ownNames=own_names if view.own_table else [],
        severalTexts=view.table is not None,
        classes=list_classes(table, [layer.name for layer in view.get_trace().layers]),
        texts=table.texts,
        notes=list(table.notes),
        revision=view.revision,
    )


@answer("image")
def answer_image(view: OpenModel, query: Query) -> bytes:
    """Return the image of a stream, [height, width, channels]."""
    images = view.get_recorded().images
    stream = query.text("stream", "text")
    if stream not in images:
        raise ValueError(
            f"the trace holds no image of {stream!r}; its images are {', '.join(images) or 'none'}"
        )
    return encode_arrays({"image": np.ascontiguousarray(images[stream][0])})


# --- Weights of a head ----------------------------------------------------------------------------


@answer("tile")
def answer_tile(view: OpenModel, query: Query) -> bytes:
    """Return a range of weights as a picture with its masked cells; `scale` is the weight shown as
    255.
    """
    rows = query.integer("rows", 1, MAX_TILE_CELLS, 512)
    columns = query.integer("cols", 1, MAX_TILE_CELLS, 512)
    part = query.part._replace(size=(rows, columns))
    tile = view.tile(query.site, query.head, part, lens=query.lens)
    return encode_arrays(
        {"weights": tile.weights, "masked": tile.masked},
        scale=tile.scale,
        revision=view.revision,
        q0=part.queries.start,
        q1=part.queries.stop,
        k0=part.keys.start,
        k1=part.keys.stop,
    )


@answer("row")
def answer_row(view: OpenModel, query: Query) -> bytes:
    """Return the exact weights of one query, and its masked keys."""
    number = query.integer("query", 0, query.layer.num_queries - 1)
    block = slice(number, number + 1)
    weights = view.weights(query.site, query.head, block, lens=query.lens)[0]
    allowed = view.get_trace().head_mask(query.site, query.head, block)[0]
    return encode_arrays({"weights": weights, "masked": (~allowed).astype(np.uint8)}, query=number)


@answer("column")
def answer_column(view: OpenModel, query: Query) -> bytes:
    """Return the exact weights of one key."""
    number = query.integer("key", 0, query.layer.num_keys - 1)
    weights = view.weights(query.site, query.head, slice(None), lens=query.lens)
    return encode_arrays({"weights": np.ascontiguousarray(weights[:, number])}, key=number)


@answer("rows")
def answer_rows(view: OpenModel, query: Query) -> bytes:
    """Return one query's weights in all heads of the layers that have it: [heads, keys],
    zero-padded.
    """
    number = query.integer("query", 0, view.max_tokens)
    stream = query.text("stream", "text")
    rows: list[np.ndarray] = []
    heads: list[list[int]] = []
    for site, layer in enumerate(view.get_trace().layers):
        if layer.query_stream != stream or number >= layer.num_queries:
            continue
        for head in range(layer.heads):
            rows.append(view.weights(layer.name, head, slice(number, number + 1))[0])
            heads.append([site, head])
    weights = np.zeros((len(rows), max(map(len, rows), default=0)), np.float32)
    for place, values in enumerate(rows):
        weights[place, : len(values)] = values
    return encode_arrays({"weights": weights}, heads=heads, query=number)


@answer("marginals")
def answer_marginals(view: OpenModel, query: Query) -> bytes:
    """Return the marginals of a head; `first` is the distance query - key of `by_offset[0]`."""
    marginals = view.marginals(query.site, query.head, lens=query.lens)
    first = 1 - query.layer.num_keys
    return encode_arrays(marginals, first=first, revision=view.revision)


@answer("peak")
def answer_peak(view: OpenModel, query: Query) -> bytes:
    """Find the exact largest weight in a range, for a cell that covers several pairs."""
    *place, weight = view.peak(query.site, query.head, query.part, lens=query.lens)
    arrays = {"weight": np.array([weight], np.float32), "place": np.array(place, np.int32)}
    return encode_arrays(arrays)


@answer("aggregate")
def answer_aggregate(view: OpenModel, query: Query) -> bytes:
    """Aggregate heads: mean or maximum over one layer or all layers of the same tokens, or the
    rollout up to a layer.
    """
    layer = query.layer
    how = query.choice("how", AGGREGATES)
    scope = query.choice("scope", ("layer", "all"))
    if layer.num_queries * layer.num_keys > MAX_AGGREGATE_CELLS:
        raise ValueError(
            f"{layer.num_queries} x {layer.num_keys} weights are too many to combine; give a text "
            f"of at most {int(MAX_AGGREGATE_CELLS**0.5)} tokens, or choose one head"
        )
    trace = view.get_trace()
    if how == "rollout":
        return encode_arrays({"weights": roll_out_attention(trace, layer.name)})
    kind = attrgetter("stack", "kind", "query_stream", "key_stream", "num_queries", "num_keys")
    alike = [other.name for other in trace.layers if kind(other) == kind(layer)]
    chosen = alike if scope == "all" else [layer.name]
    return encode_arrays({"weights": aggregate_heads(trace, chosen, how)})


# --- Queries, keys and values of a head -----------------------------------------------------------


@answer("steps")
def answer_steps(view: OpenModel, query: Query) -> bytes:
    """Return the computation of one head for one query, step by step."""
    layer = query.recorded
    key = None
    if "key" in query.parameters:
        key = query.integer("key", 0, layer.num_keys - 1)
    number = query.integer("query", 0, layer.num_queries - 1)
    row = query.integer("row", 0, layer.batch_size - 1, 0)
    return encode_steps(*find_steps(view, HeadPlace(query.site, query.head, number, row), key))


@answer("points")
def answer_points(view: OpenModel, query: Query) -> bytes:
    """Project the queries and keys of a head onto their plane of largest variance."""
    points = map_queries_and_keys(view.get_trace(), query.site, query.head)
    return encode_arrays({"queries": points.queries, "keys": points.keys}, share=points.share)


@answer("products")
def answer_products(view: OpenModel, query: Query) -> bytes:
    """Return products [keys, channels] of a query and its allowed keys, or why there are none."""
    number = query.integer("query", 0, query.recorded.num_queries - 1)
    trace = view.get_recorded()
    head = query.head
    try:
        result = multiply_channels(trace, query.site, head, number, max_keys=MAX_KEYS)
    except ValueError as error:
        return encode_arrays({}, reason=str(error))
    arrays = {"products": result.products.astype(np.float32), "positions": result.positions}
    return encode_arrays(arrays, reason="", scale=result.scale, query=number)


@answer("written")
def answer_written(view: OpenModel, query: Query) -> bytes:
    """Return the tokens that a head promotes and suppresses most at a position, or why there are
    none.
    """
    head = query.head
    number = query.integer("query", 0, query.recorded.num_queries - 1)
    net = view.get_model()
    # After the model, which imports torch in one thread.
    from ..observe.head_analysis.attention_maps import attribute_all_logits
    from ..observe.inspect.model_tokenizer import find_token_decoder

    try:
        native = get_native_copy(net)
        inputs = id_inputs(native, view.get_recorded())
        effects, note = attribute_all_logits(native, inputs, query.site, head, number)
    except (ValueError, KeyError) as error:
        return encode_arrays({}, reason=str(error))
    count = min(LISTED_TOKENS, effects.numel() // 2)
    order = effects.argsort(descending=True)
    tokens = [*order[:count].tolist(), *order.flip(0)[:count].tolist()]
    decode = find_token_decoder(net)
    values = effects[tokens].float().cpu().numpy().astype(np.float32)
    return encode_arrays(
        {"effects": values, "ids": np.array(tokens, np.int32)},
        words=[decode(token) for token in tokens],
        note=note,
        reason="",
    )


@answer("why")
def answer_why(view: OpenModel, query: Query) -> bytes:
    """Return what earlier heads, MLPs and embeddings add to the score of a query and a key, less
    the mean over the query's keys; or why that is unknown.
    """
    head = query.head
    recorded = query.recorded
    number = query.integer("query", 0, recorded.num_queries - 1)
    key = query.integer("key", 0, recorded.num_keys - 1)
    net = view.get_model()
    from ..observe.head_analysis.score_attribution import attribute_score

    place = (id_inputs(net, view.get_recorded()), number, key)
    try:
        result = attribute_score(net, [place], f"{query.site}:{head}", "mean")
    except (ValueError, KeyError) as error:
        return encode_arrays({}, reason=str(error))
    parts = {side: one.by_size[:LISTED_WRITERS] for side, one in result.sides.items()}
    values = {
        side: np.array([one.value for _, one in of_side], np.float32)
        for side, of_side in parts.items()
    }
    return encode_arrays(
        values,
        writers={side: [writer for writer, _ in of_side] for side, of_side in parts.items()},
        total=result.total.value,
        reason="",
    )


@answer("examples")
def answer_examples(view: OpenModel, query: Query) -> bytes:
    """Return the texts that show the class of a head best, with the largest weight on each key of
    the pairs that the class is about, and its query.
    """
    table = view.table
    if table is None or not view.texts:
        return encode_arrays({}, texts=[], name="")
    net = view.get_model()
    from ..observe.head_analysis.head_report import MAX_TEXTS, PictureMaker
    from .model_actions import make_examples

    if net not in _pictures:
        _pictures[net] = PictureMaker(net, make_examples(view, view.texts[:MAX_TEXTS]))
    place = (query.site, query.head)
    head = next(one for one in table.heads if (one.site, one.head) == place)
    name = head.classes[0].name
    texts: list[list[list[str]]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for chosen, cells in _pictures[net].rank_texts(head, name)[:SHOWN_TEXTS]:
        picture = _pictures[net].first_picture(head, name, "", chosen)
        weights = picture.weights
        if cells is not None:
            pairs = tuple(zip(*cells, strict=True))
            weights = np.zeros_like(picture.weights)
            weights[pairs] = picture.weights[pairs]
        arrays[f"{len(texts)}.weights"] = weights.max(0).astype(np.float32)
        arrays[f"{len(texts)}.queries"] = weights.argmax(0).astype(np.int32)
        texts.append([list(picture.query_tokens), list(picture.key_tokens)])
    return encode_arrays(arrays, texts=texts, name=name)


SHOWN_TEXTS = 3  # that show a head
_pictures: WeakKeyDictionary[nn.Module, PictureMaker] = WeakKeyDictionary()


# --- The last comparison --------------------------------------------------------------------------


@answer("difference")
def answer_difference(view: OpenModel, query: Query) -> bytes:
    """Return one head in both traces of the last comparison, over the aligned tokens."""
    site = query.site
    head = query.head
    cells = query.integer("cells", 1, MAX_TILE_CELLS, 256)
    return encode_arrays(pool_difference(view.get_comparison(), site, head, cells))


@answer("difference/pair")
def answer_difference_pair(view: OpenModel, query: Query) -> bytes:
    """Return the exact weights of both traces for the aligned pairs `query` and `key`."""
    site = query.site
    head = query.head
    comparison = view.get_comparison()
    counts = [len(pairs.first) for pairs in comparison.aligned_tokens(query.recorded)]
    first = query.integer("query", 0, counts[0] - 1)
    second = query.integer("key", 0, counts[1] - 1)
    return encode_arrays({"weights": exact_pair(comparison, site, head, first, second)})


# --- The steps of one head for one query ----------------------------------------------------------

WEIGHT_TOLERANCE = 5e-3  # a trace in half precision rounds its queries and keys


def find_steps(view: OpenModel, place: HeadPlace, key: int | None = None) -> tuple[HeadSteps, str]:
    """Return the steps of a head for a query, including the vectors of `key`, and why some are
    missing.

    A headwise model, or a headwise copy of a transformers model, runs again on the tokens of the
    trace. Its steps are accepted only if they reproduce the recorded weights. Other models, or a
    trace without a model, give the recorded steps and name the missing ones with the reason.
    """
    if not view.has_model:
        return recorded_steps(view.get_recorded(), place, key), ONLY_TRACE
    model = view.get_model()
    try:
        native = get_native_copy(model)
        note = (
            ""
            if native is model
            else f"computed in a headwise copy of {type(model).__name__}; the weights agree"
        )
        return _steps_of_model(view, native, place, key), note
    except (
        ValueError,
        IndexError,
        KeyError,
        NotImplementedError,
    ) as error:  # what a trace holds is still true
        return recorded_steps(view.get_recorded(), place, key), str(error)


def _steps_of_model(
    view: OpenModel, model: Transformer, place: HeadPlace, key: int | None
) -> HeadSteps:
    """Compute the steps of a headwise model and check them against the recorded weights."""
    import torch

    from ..observe.head_analysis.model_steps import model_steps

    trace = view.get_recorded()
    layer = trace.get_layer(place.site)
    device = next(model.parameters()).device
    ids = {
        name: np.array(rows[place.row].ids, np.int64)
        for name, rows in trace.streams.items()
        if rows
    }
    real = {name: np.flatnonzero(row >= 0) for name, row in ids.items()}  # padding has the id -1
    tensors = {
        name: torch.from_numpy(ids[name][real_positions])[None].to(device)
        for name, real_positions in real.items()
    }
    if "text" not in tensors or not {layer.query_stream, layer.key_stream} <= set(real):
        raise ValueError("the trace holds no token ids to run the model on; capture a text")
    queries = real[layer.query_stream]
    keys = real[layer.key_stream]
    if place.query not in queries:
        raise ValueError(f"query {place.query} is padding; choose a token")
    own = place._replace(query=int(np.searchsorted(queries, place.query)))
    shown = int(np.searchsorted(keys, key)) if key is not None and key in keys else None
    steps = model_steps(model, tensors["text"], own, source=tensors.get("source"), key=shown)
    block = slice(place.query, place.query + 1)
    trace_weights = trace.head_weights(place.site, place.head, block, row=place.row)[0]
    last = [step for step in steps.steps if step.name in ("normalise", "weight_step")][-1]
    actual = last.arrays["out"]
    expected = (
        trace_weights[keys] if len(trace_weights) == len(ids[layer.key_stream]) else trace_weights
    )
    if actual.shape != expected.shape:
        raise ValueError(
            f"the open model has {len(actual)} keys here, and the trace {len(expected)}; capture "
            "the text again"
        )
    error = float(np.abs(actual - expected).max(initial=0.0))
    if not error <= WEIGHT_TOLERANCE:
        raise ValueError(
            f"the open model gives other weights than the trace (by {error:.2g}); capture the "
            "text again"
        )
    return replace(steps, place=place, positions=keys.astype(np.int32))


def encode_steps(steps: HeadSteps, note: str = "") -> bytes:
    """Encode the steps as one message; the array "2.out" is the array "out" of step 2."""
    arrays: dict[str, NDArray[Any]] = {"positions": steps.positions, "shown": steps.shown_keys}
    entries: list[dict[str, Any]] = []
    for place, step in enumerate(steps.steps):
        arrays |= {f"{place}.{name}": array for name, array in step.arrays.items()}
        facts = {name: value for name, value in step.facts.items() if np.isfinite(value)}
        entries.append(
            {"name": step.name, "formula": step.formula, "part": step.part, "facts": facts}
        )
    fields = {**steps.place._asdict(), "origin": steps.origin, "note": note, "steps": entries}
    return encode_arrays(arrays, **fields, missing=dict(steps.missing))
