"""The jobs that compare heads over several texts: distances between all heads, and the texts that
show a class of a head best and worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .action_fields import LINES, MOST, action, integer, text
from .binary_answers import encode_arrays
from .model_actions import make_examples
from .model_worker import JobProgress
from .open_model import OpenModel

if TYPE_CHECKING:
    from ..observe.head_analysis.annotated_examples import Example
    from ..observe.head_analysis.attention_figures import PictureMaker
    from ..observe.head_analysis.head_similarity import HeadLocation
    from ..observe.head_analysis.head_table import HeadMeasures

MIN_TEXTS = 2  # an interval needs as many
MAX_CIRCUITS = 400  # heads whose circuits are compared, pair by pair
HALF_SIMILAR = 0.5  # cut of 1 - similarity, half way between equal heads (0) and unrelated ones (1)
MAX_TEXTS = 64  # that are scored
SHOWN_CHARACTERS = 200  # of a text
SHOWN_PAIRS = 3  # of a text, those with the largest weights
Distances = NDArray[np.float64]


# --- Similarity -----------------------------------------------------------------------------------


class HeadGroup(NamedTuple):
    """Heads that can be compared `by` attention, outputs or circuits: their distances, a plane, and
    a tree.

    `threshold` is where the tree is cut first, and `num_chance_clusters` the clusters that
    unrelated heads would form there.
    """

    by: str
    streams: tuple[str, ...]
    heads: tuple[HeadLocation, ...]
    distances: Distances
    points: Distances
    merges: Sequence[tuple[float, ...]]
    threshold: float
    num_chance_clusters: int
    sentence: str = ""


@action("similarity", texts=LINES)
def compute_similarity(model: OpenModel, progress: JobProgress, texts: Sequence[str]) -> bytes:
    """Compare all heads: by their attention and their outputs over the texts of the job, and by
    their OV circuits.

    The answer holds, for group n, the arrays "n.distances" [heads, heads], "n.points" [heads, 2]
    and "n.merges" [merges, 3]. Distances of attention are Jensen-Shannon divergences in nats; those
    of outputs are 1 - CKA, and those of circuits 1 - cosine.
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
    groups = [
        HeadGroup(
            "attention",
            group.streams,
            group.heads,
            group.distances,
            group.embedding.points,
            group.merges,
            group.threshold,
            group.num_chance_clusters,
            group.sentence,
        )
        for group in result.readers
    ]
    for group in result.readers:
        if group.outputs is not None:
            groups += group_by_similarity("outputs", group.streams, group.heads, group.outputs)
    progress(len(examples), len(examples), "comparing circuits")
    by_circuits, notes = _group_by_circuits(model)
    groups += by_circuits
    return _encode_groups(model, groups, texts=len(examples), notes=[*result.notes, *notes])


def group_by_similarity(
    by: str, streams: tuple[str, ...], heads: Sequence[HeadLocation], similarity: Distances
) -> list[HeadGroup]:
    """Heads by 1 - a similarity that is 1 for equal heads and on average 0 for unrelated ones.

    Heads without a similarity to the others are left out; no group for fewer than two heads.
    """
    from ..observe.head_analysis.head_similarity import average_linkage, embed_in_plane

    comparable = np.flatnonzero(np.isfinite(np.diagonal(similarity))).tolist()
    if len(comparable) < 2:
        return []
    distances = np.clip(1 - similarity[np.ix_(comparable, comparable)], 0, None)
    np.fill_diagonal(distances, 0)
    merges = average_linkage(distances)
    points = embed_in_plane(distances).points
    chosen = tuple(heads[number] for number in comparable)
    count = len(comparable)
    return [HeadGroup(by, streams, chosen, distances, points, merges, HALF_SIMILAR, count)]


def _group_by_circuits(model: OpenModel) -> tuple[list[HeadGroup], list[str]]:
    """Heads by their OV circuits, one group for each width of model; or the reason why there are
    none.
    """
    from ..observe.head_analysis.head_circuits import compare_circuits

    names = {layer.name for layer in model.get_trace().layers}
    if len(model.heads) > MAX_CIRCUITS:
        return [], [f"OV circuits are not compared: there are more than {MAX_CIRCUITS} heads"]
    try:
        circuits = compare_circuits(model.get_model(), "ov")
    except (ValueError, KeyError, NotImplementedError) as error:
        return [], [f"OV circuits are not compared: {error}"]
    values = circuits.values.cpu().numpy()
    groups: list[HeadGroup] = []
    left = [number for number, head in enumerate(circuits.heads) if head.site in names]
    while left:
        alike = [number for number in left if np.isfinite(values[left[0], number])] or left[:1]
        heads = [circuits.heads[number] for number in alike]
        groups += group_by_similarity("circuits", (), heads, values[np.ix_(alike, alike)])
        left = [number for number in left if number not in alike]
    return groups, []


def _encode_groups(model: OpenModel, groups: Sequence[HeadGroup], **fields: Any) -> bytes:
    sites = {layer.name: number for number, layer in enumerate(model.get_trace().layers)}
    arrays: dict[str, Any] = {}
    described: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        arrays[f"{number}.distances"] = group.distances.astype(np.float32)
        arrays[f"{number}.points"] = np.asarray(group.points, np.float32)
        arrays[f"{number}.merges"] = np.array(group.merges, np.float32).reshape(-1, 3)
        described.append(
            {
                "by": group.by,
                "streams": list(group.streams),
                "heads": [[sites.get(head.site, -1), head.head] for head in group.heads],
                "threshold": float(group.threshold),
                "clustersByChance": int(group.num_chance_clusters),
                "sentence": group.sentence,
            }
        )
    return encode_arrays(arrays, groups=described, **fields)


# --- The texts that show a class ------------------------------------------------------------------


@action(
    "evidence", site=integer(0, MOST), head=integer(0, MOST), name=text(key="class"), texts=LINES
)
def find_evidence(
    model: OpenModel, progress: JobProgress, site: int, head: int, name: str, texts: Sequence[str]
) -> bytes:
    """How well each text of the job shows a class of a head, and its strongest pairs of tokens.

    The score of a text is the mean weight on the pairs that the class is about, or the measure
    behind the class.
    """
    from ..observe.head_analysis.attention_figures import PictureMaker

    place = model.site_name(site)
    if model.table is None:
        raise ValueError("the heads have not been measured; measure them first")
    measured = model.table.head(place, head)
    examples = make_examples(model, texts)[:MAX_TEXTS]
    maker = PictureMaker(model.get_model(), examples)
    scores: list[float] = []
    shown: list[dict[str, Any]] = []
    for number, example in enumerate(examples):
        progress(number, len(examples), "reading texts")
        scores.append(maker.score(number, measured, name))
        pairs = _strongest_pairs(maker, number, measured)
        shown.append({"text": _join_words(example), "pairs": pairs})
    return encode_arrays({"scores": np.array(scores, np.float32)}, texts=shown)


def _join_words(example: Example) -> str:
    """The words of all streams of an example, the source first."""
    parts: list[str] = []
    for name in ("source", "text"):
        words = example.streams[name].words if name in example.streams else ()
        parts.append(("" if any(" " in word for word in words) else " ").join(words))
    return " → ".join(part for part in parts if part)[:SHOWN_CHARACTERS]


def _strongest_pairs(maker: PictureMaker, number: int, head: HeadMeasures) -> list[dict[str, Any]]:
    """The pairs of a text with the largest weights, other than those of a token with itself or the
    first token.
    """
    traced = maker.trace(number)
    streams = maker.examples[number].streams
    layer = traced.get_layer(head.site)
    weights = traced.head_weights(head.site, head.head).copy()
    if layer.query_stream == layer.key_stream:
        np.fill_diagonal(weights, 0)
    weights[:, 0] = 0
    pairs: list[dict[str, Any]] = []
    for place in np.argsort(-weights, axis=None)[:SHOWN_PAIRS]:
        query, key = divmod(int(place), weights.shape[1])
        if weights[query, key] > 0:
            pairs.append(
                {
                    "query": streams[layer.query_stream].words[query],
                    "key": streams[layer.key_stream].words[key],
                    "weight": round(float(weights[query, key]), 4),
                }
            )
    return pairs
