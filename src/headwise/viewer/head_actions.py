"""The job that compares all heads with each other over several texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .action_fields import LINES, action
from .binary_answers import encode_arrays
from .model_actions import make_examples
from .model_worker import JobProgress
from .open_model import OpenModel

if TYPE_CHECKING:
    from ..observe.head_analysis.head_similarity import HeadLocation

MIN_TEXTS = 2  # an interval needs as many
MAX_CIRCUITS = 400  # heads whose circuits are compared, pair by pair
HALF_SIMILAR = 0.5  # cut of 1 - similarity, half way between equal heads (0) and unrelated ones (1)
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
