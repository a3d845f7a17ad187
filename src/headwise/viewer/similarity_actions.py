"""The job of the Similarity screen: distances between all heads, their clusters, and which heads could go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .model_actions import make_examples
from .model_worker import JobProgress
from .open_model import OpenModel
from .tile_encoding import encode_arrays

if TYPE_CHECKING:
    from ..head_analysis.head_redundancy import ComparableHeads

MIN_TEXTS = 2  # a bootstrap interval needs as many


def compute_similarity(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> bytes:
    """Compare the attention of all heads over the texts of the job; one group of heads for each pair of streams.

    The answer holds, for group n, the arrays "n.distances" and "n.high" [heads, heads] (Jensen-Shannon divergences in
    nats, and the upper ends of their intervals), "n.points" [heads, 2] and "n.merges" [merges, 3].
    """
    from ..head_analysis.head_redundancy import measure_redundancy

    texts = arguments.get("texts")
    if not isinstance(texts, list) or len([text for text in texts if str(text).strip()]) < MIN_TEXTS:
        raise ValueError("similarity needs several texts, because its intervals are over texts; give one text a line")
    examples = make_examples(model, arguments)
    result = measure_redundancy(
        model.get_model(), examples, progress=lambda count: progress(count, len(examples), "comparing heads")
    )
    sites = {layer.name: number for number, layer in enumerate(model.get_trace().layers)}
    arrays: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(result.readers):
        arrays[f"{number}.distances"] = group.distances.astype(np.float32)
        arrays[f"{number}.high"] = group.high.astype(np.float32)
        arrays[f"{number}.points"] = np.asarray(group.embedding.points, np.float32)
        arrays[f"{number}.merges"] = np.array(group.merges, np.float32).reshape(-1, 3)
        groups.append(_describe_group(group, sites))
    return encode_arrays(arrays, groups=groups, texts=len(examples), notes=list(result.notes))


def _describe_group(group: ComparableHeads, sites: Mapping[str, int]) -> dict[str, Any]:
    return {
        "streams": list(group.streams),
        "heads": [[sites.get(head.site, -1), head.head] for head in group.heads],
        "threshold": float(group.threshold),
        "clustersByChance": int(group.num_chance_clusters),
        "sentence": group.sentence,
    }
