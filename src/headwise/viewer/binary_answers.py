"""The binary answers of the server and the export: thumbnails, tiles, marginals and measures."""

from __future__ import annotations

from .open_model import OpenModel, Tile, TileRange
from .tile_encoding import encode_arrays
from .view_document import list_classes, stack_measures
from .weight_summaries import Marginals, thumbnail_masks


def encode_thumbnails(model: OpenModel) -> bytes:
    """The thumbnails of all heads, [heads, 64, 64], 255 for a weight of 1, and the masks that they share."""
    masks, mask_of_head = thumbnail_masks(model.get_trace())
    arrays = {"thumbnails": model.thumbnails(), "masks": masks, "mask_of_head": mask_of_head}
    return encode_arrays(arrays, revision=model.revision)


def encode_tile(model: OpenModel, tile: Tile, part: TileRange) -> bytes:
    """A tile with its masked cells; `scale` is the value of 255."""
    span = {"q0": part.queries.start, "q1": part.queries.stop, "k0": part.keys.start, "k1": part.keys.stop}
    arrays = {"weights": tile.weights, "masked": tile.masked}
    return encode_arrays(arrays, scale=tile.scale, revision=model.revision, **span)


def encode_marginals(model: OpenModel, marginals: Marginals, num_keys: int) -> bytes:
    """The marginals of a head; `first` is the distance query - key of the first mean of `by_offset`."""
    return encode_arrays(marginals._asdict(), first=-(num_keys - 1), revision=model.revision)


def encode_measures(model: OpenModel) -> bytes:
    """The measures of all heads, [heads, measures, 4], with names and classes; no names if nothing was measured."""
    table = model.table
    if table is None:
        return encode_arrays({}, names=[], classes=[], texts="", notes=[], revision=model.revision)
    names, stacked = stack_measures(table, model.heads)
    classes = list_classes(table, [layer.name for layer in model.get_trace().layers])
    fields = {"names": names, "classes": classes, "texts": table.texts, "notes": list(table.notes)}
    return encode_arrays({"measures": stacked}, **fields, revision=model.revision)
