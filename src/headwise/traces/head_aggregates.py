"""Weights of many heads as one matrix: the mean or maximum of heads, and attention rollout through layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .attention_record import Array, AttentionRecord
from .attention_trace import Trace, query_blocks

AGGREGATES = ("mean", "max", "rollout")
RESIDUAL_SHARE = 0.5  # of a token itself in a layer of the rollout (2005.00928, section 3)


def aggregate_heads(trace: Trace, sites: Sequence[str], how: str, *, row: int = 0) -> Array:
    """The mean or maximum of all heads of some sites over the same tokens, [queries, keys], in float32.

    >>> from headwise.traces import trace_from_weights
    >>> weights = np.stack([np.eye(2), np.full((2, 2), 0.5)])[None]
    >>> trace = trace_from_weights([weights], ["a", "b"])
    >>> aggregate_heads(trace, [trace.layers[0].name], "max").tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    if how not in AGGREGATES[:2]:
        raise ValueError(f"unknown how={how!r}; use 'mean' or 'max'")
    layers = [trace.get_layer(site) for site in sites]
    shape = _common_shape(layers)
    total = np.zeros(shape, np.float64 if how == "mean" else np.float32)
    combine = np.add if how == "mean" else np.maximum
    heads = [(layer.name, head) for layer in layers for head in range(layer.heads)]
    for site, head in heads:
        for start, stop in query_blocks(shape[0]):
            weights = trace.head_weights(site, head, slice(start, stop), row=row)
            combine(total[start:stop], weights, out=total[start:stop])
    count = len(heads) if how == "mean" else 1
    return (total / count).astype(np.float32)


def roll_out_attention(trace: Trace, site: str, *, row: int = 0) -> Array:
    """Attention rollout (2005.00928) up to a self-attention site: [queries, tokens of the input], in float32.

    Each layer of the stack is half the mean of its heads and half the token itself, for the residual connection; the
    rollout is the product of these matrices from the first layer to the site. Rows of means are rescaled to sum to one
    where a sink takes a part. `compute_attention_maps(model, inputs).rollout()` gives the same from a model; this needs
    no torch.
    """
    last = trace.get_layer(site)
    if last.query_stream != last.key_stream:
        raise ValueError(f"{site} is cross-attention, and a rollout follows one stack of tokens; choose self-attention")
    layers = [
        layer
        for layer in trace.layers
        if layer.stack == last.stack and layer.kind == last.kind and layer.layer <= last.layer
    ]
    _common_shape(layers)
    in_order = sorted(layers, key=lambda one: one.layer)
    means = (aggregate_heads(trace, [layer.name], "mean", row=row) for layer in in_order)
    return multiply_rollout(means).astype(np.float32)


def multiply_rollout(means: Iterable[Array], residual: float = RESIDUAL_SHARE) -> Array:
    """The product over layers of residual I + (1 - residual) A, from the mean A of the heads of each layer, in float64.

    >>> multiply_rollout([np.array([[1.0, 0.0], [1.0, 0.0]])] * 2).tolist()
    [[1.0, 0.0], [0.75, 0.25]]
    """
    rollout: Array | None = None
    for mean in means:
        rescaled = _rescale_rows(mean.astype(np.float64))
        step = _rescale_rows((1 - residual) * rescaled + residual * np.eye(len(mean)))
        rollout = step if rollout is None else step @ rollout
    if rollout is None:
        raise ValueError("a rollout needs at least one layer")
    return rollout


def _rescale_rows(weights: Array) -> Array:
    """Rows that sum to one; a row without any weight stays zero, and is the token itself with its residual share."""
    total = weights.sum(1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def _common_shape(layers: Sequence[AttentionRecord]) -> tuple[int, int]:
    """Queries and keys of some layers; raises if they attend over different tokens."""
    shapes = {(layer.num_queries, layer.num_keys) for layer in layers}
    streams = {(layer.query_stream, layer.key_stream) for layer in layers}
    if len(shapes) != 1 or len(streams) != 1:
        names = ", ".join(layer.name for layer in layers)
        raise ValueError(f"{names or 'no sites'} attend over different tokens; give sites over the same ones")
    return shapes.pop()
