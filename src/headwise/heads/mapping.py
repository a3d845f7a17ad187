"""Heads by the distances between them: which stand together, and where on a plane."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DistanceArray = NDArray[np.float64]


class ClusterMerge(NamedTuple):
    """Two clusters that become one: the first of each's members, and how far apart they are."""

    one: int
    other: int
    height: float


def average_linkage(distances: DistanceArray) -> list[ClusterMerge]:
    """Which clusters join, the nearest first; how far two are apart is the mean over all pairs between them.

    >>> apart = np.abs(np.subtract.outer([0.0, 1.0, 5.0], [0.0, 1.0, 5.0]))
    >>> [tuple(joined) for joined in average_linkage(apart)]
    [(0, 1, 1.0), (0, 2, 4.5)]
    """
    far = _check_distances(distances).copy()
    np.fill_diagonal(far, np.inf)
    size, joined = np.ones(len(far)), list[ClusterMerge]()
    for _ in range(len(far) - 1):
        one, other = divmod(int(far.argmin()), len(far))
        joined.append(ClusterMerge(one, other, float(far[one, other])))
        mean = (size[one] * far[one] + size[other] * far[other]) / (size[one] + size[other])
        far[one], far[:, one] = mean, mean
        far[one, one], far[other], far[:, other] = np.inf, np.inf, np.inf
        size[one] += size[other]
    return joined


def cut_clusters(merges: list[ClusterMerge], max_distance: float) -> tuple[int, ...]:
    """The number of each one's cluster when all that stand nearer than `cut` have joined, the first cluster 0.

    >>> cut_clusters([ClusterMerge(0, 1, 1.0), ClusterMerge(0, 2, 4.5)], 2.0)
    (0, 0, 1)
    """
    of = list(range(len(merges) + 1))
    for one, other, height in merges:
        if height < max_distance:
            of = [of[one] if mine == of[other] else mine for mine in of]
    names = {first: number for number, first in enumerate(dict.fromkeys(of))}
    return tuple(names[mine] for mine in of)


class PlaneEmbedding(NamedTuple):
    """Places [n, 2], and how badly their distances say the true ones: sqrt(sum (d - D)^2 / sum D^2)."""

    places: DistanceArray
    stress: float


def embed_in_plane(distances: DistanceArray, *, num_starts: int = 5, max_steps: int = 1000, seed: int = 0) -> PlaneEmbedding:
    """Places on a plane whose distances say the true ones best: stress majorised (SMACOF) from several starts.

    The first start is the classical solution, the others are drawn; the best end is turned so that it is widest along
    the first axis. The same distances always have the same plane.

    >>> corners = np.array([[0.0, 0], [3, 0], [3, 4]])
    >>> found = embed_in_plane(np.linalg.norm(corners[:, None] - corners, axis=-1))
    >>> found.stress < 1e-6
    True
    """
    far = _check_distances(distances)
    draw, spread = np.random.default_rng(seed), float(far.max(initial=0.0)) or 1.0
    begin = [_classical_scaling(far), *(spread * draw.standard_normal((len(far), 2)) for _ in range(num_starts - 1))]
    best = min((_minimise_stress(far, places, max_steps) for places in begin), key=lambda found: found.stress)
    return best._replace(places=_canonical_orientation(best.places))


def _check_distances(distances: DistanceArray) -> DistanceArray:
    if distances.ndim != 2 or len(distances) != distances.shape[1] or not len(distances):
        raise ValueError(f"distances are {list(distances.shape)}; give one for every pair, [n, n]")
    if not np.isfinite(distances).all() or (distances < 0).any() or not np.allclose(distances, distances.T):
        raise ValueError("distances must be finite, not negative and the same both ways; leave out what has none")
    return distances.astype(np.float64)


def _classical_scaling(far: DistanceArray) -> DistanceArray:
    """The plane of the two largest eigenvalues of the centred squares."""
    middle = np.eye(len(far)) - 1 / len(far)
    values, vectors = np.linalg.eigh(-0.5 * middle @ (far**2) @ middle)
    found = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0))
    return np.pad(found, ((0, 0), (0, 2 - found.shape[1])))


def _minimise_stress(far: DistanceArray, places: DistanceArray, steps: int) -> PlaneEmbedding:
    """Where Guttman's transform leads: each step lowers the stress."""
    stress = _stress(far, places)
    for _ in range(steps):
        apart = np.linalg.norm(places[:, None] - places, axis=-1)
        ratio = -np.divide(far, apart, out=np.zeros_like(far), where=apart > 0)
        np.fill_diagonal(ratio, 0)
        np.fill_diagonal(ratio, -ratio.sum(1))
        places = ratio @ places / len(far)
        before, stress = stress, _stress(far, places)
        if before - stress < 1e-10:
            break
    return PlaneEmbedding(places, stress)


def _stress(far: DistanceArray, places: DistanceArray) -> float:
    apart = np.linalg.norm(places[:, None] - places, axis=-1)
    total = float((far**2).sum())
    return float(np.sqrt(((apart - far) ** 2).sum() / total)) if total else 0.0


def _canonical_orientation(places: DistanceArray) -> DistanceArray:
    """Centred, widest along the first axis, and the farthest out on the positive side of both."""
    places = places - places.mean(0)
    _, _, axes = np.linalg.svd(places, full_matrices=False)
    axes = np.concatenate([axes, np.eye(2)])[:2] if len(axes) < 2 else axes
    turned = places @ axes.T
    far = turned[np.abs(turned).argmax(0), [0, 1]]
    return turned * np.where(far < 0, -1, 1)
