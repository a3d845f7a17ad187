"""Metrics of heads over the patches of an image, which lie on a grid of rows and columns.

Rows of weights whose query is no patch, such as those of a class token, do not count. Weight on other tokens is left
out: they are sinks, and the weight that remains is rescaled to sum to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .annotated_examples import TokenAnnotations
from .head_metrics import HeadMetric, SumAndCount, mean_over_rows
from .weight_bands import WeightBand

PairFunction = Callable[[Tensor, Tensor], Tensor]  # from differences of rows and of columns, [T, S] each


def make_pair_metric(selects: PairFunction) -> Callable[[WeightBand], SumAndCount]:
    """Return a metric of the weight on patches in a relation to the query, over rows that may read one of them."""

    def sums(band: WeightBand) -> SumAndCount:
        rows, columns, is_patch = _differences(band)
        pairs = selects(rows, columns) & is_patch
        weights = (band.w_HTS * pairs.to(band.w_HTS.dtype)).sum(-1)
        return mean_over_rows(weights, band.select_counted((band.allowed & pairs).any(-1)))

    return sums


def patch_distance_sums(band: WeightBand) -> SumAndCount:
    """Mean Euclidean distance between query and key in patches, weighted by attention (2010.11929, appendix D.7)."""
    rows, columns, is_patch = _differences(band)
    distance = (rows.square() + columns.square()).to(band.w_HTS.dtype).sqrt()
    sums = (band.w_HTS * (distance * is_patch)).sum(-1)
    return mean_over_rows(sums, band.select_counted((band.allowed & is_patch).any(-1)))


def _differences(band: WeightBand) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns from query to key, [T, S] each, and whether both are patches."""
    queries, keys = _get_grid(band.query_tokens, band)[band.query_positions], _get_grid(band.key_tokens, band)
    keys = band.slice_keys(keys)
    difference = keys[None] - queries[:, None]
    is_patch = (queries[:, None, 0] >= 0) & (keys[None, :, 0] >= 0)
    return difference[..., 0], difference[..., 1], is_patch


def _get_grid(tokens: TokenAnnotations, band: WeightBand) -> Tensor:
    """Row and column of each token, [tokens, 2]; -1 for tokens that are no patches, such as all tokens of a text."""
    grid = tokens.patch_grid
    return torch.full((tokens.count, 2), -1, device=band.w_HTS.device) if grid is None else grid.to(band.w_HTS.device)


def _is_neighbour(rows: Tensor, columns: Tensor) -> Tensor:
    return (torch.maximum(rows.abs(), columns.abs()) == 1).bool()


PATCH_METRICS: Mapping[str, HeadMetric] = {
    metric.name: metric
    for metric in (
        HeadMetric("patch_distance", "distance between query and key, in patches", patch_distance_sums, "rest"),
        HeadMetric("same_patch", "weight on the patch itself", make_pair_metric(
            lambda rows, columns: (rows == 0) & (columns == 0)), "rest"),
        HeadMetric("neighbours", "weight on the 8 patches around the query", make_pair_metric(_is_neighbour), "rest"),
        HeadMetric("same_row", "weight on other patches of the same row", make_pair_metric(
            lambda rows, columns: (rows == 0) & (columns != 0)), "rest"),
        HeadMetric("same_column", "weight on other patches of the same column", make_pair_metric(
            lambda rows, columns: (rows != 0) & (columns == 0)), "rest"),
    )
}  # fmt: skip
# The measures of texts that also describe images.
IMAGE_METRICS = (
    *("entropy", "breadth", "confidence", "sink", "support50", "support90", "support95"),
    *PATCH_METRICS,
)
NOT_FOR_IMAGES = (
    "not measured on images: previous, next, offset, peak, positional_share and distance (patches lie on two axes), "
    "and duplicate, induction, rare, punctuation and separator (patches have no words)"
)
