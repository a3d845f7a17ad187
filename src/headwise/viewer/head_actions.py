"""The job that compares all heads with each other over several texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


class HeadGroups:
    """Groups of heads that can be compared, as the answer of the job.

    Group n has the arrays "n.distances" [heads, heads], "n.points" [heads, 2] on a plane and
    "n.merges" [merges, 3] of a tree, which is cut at its `threshold` first.
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
        """Add heads with their distances, their places on a plane, and the merges of their tree."""
        number = len(self.groups)
        self.arrays[f"{number}.distances"] = distances.astype(np.float32)
        self.arrays[f"{number}.points"] = np.asarray(points, np.float32)
        self.arrays[f"{number}.merges"] = np.array(merges, np.float32).reshape(-1, 3)
        places = [[self.sites.get(head.site, -1), head.head] for head in heads]
        self.groups.append({"heads": places, "sentence": "", **fields})

    def add_similarity(
        self, by: str, streams: Sequence[str], heads: Sequence[HeadLocation], similarity: Distances
    ) -> None:
        """Add heads by 1 - a similarity that is 1 for equal heads and 0 for unrelated ones.

        Heads without a similarity to the others are left out; fewer than two heads are no group.
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
        """Add heads by the cosine of their OV circuits, one group for each width of model; return
        the reason why there are none.
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
    """Compare all heads: by their attention (Jensen-Shannon divergence in nats) and their outputs
    (1 - CKA) over the texts of the job, and by their OV circuits (1 - cosine).
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
        fields = {"by": "attention", "streams": list(group.streams), "sentence": group.sentence}
        groups.add(
            group.heads,
            group.distances,
            group.embedding.points,
            group.merges,
            threshold=float(group.threshold),
            clustersByChance=int(group.num_chance_clusters),
            **fields,
        )
    for group in result.readers:
        if group.outputs is not None:
            groups.add_similarity("outputs", group.streams, group.heads, group.outputs)
    progress(len(examples), len(examples), "comparing circuits")
    notes = [*result.notes, *groups.add_circuits(model)]
    return encode_arrays(groups.arrays, groups=groups.groups, texts=len(examples), notes=notes)
