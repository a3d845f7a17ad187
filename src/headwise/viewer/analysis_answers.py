"""Answers about heads of the open text: products by channel, aggregates of heads, and the tokens that a head writes."""

from __future__ import annotations

import numpy as np

from ..traces.head_aggregates import aggregate_heads, roll_out_attention
from ..traces.query_key_map import multiply_channels
from .open_model import OpenModel
from .tile_encoding import encode_arrays

MAX_KEYS = 512  # keys with products by channel; those with the largest scores
MAX_AGGREGATE_CELLS = 2048**2  # of the matrix of many heads
SCOPES = ("layer", "all")
LISTED_TOKENS = 12  # with the largest and with the smallest effects


def encode_products(view: OpenModel, site: str, head: int, query: int, row: int = 0) -> bytes:
    """The products [keys, channels] of a query with its allowed keys; or the reason why there are none."""
    try:
        result = multiply_channels(view.get_recorded(), site, head, query, row=row, max_keys=MAX_KEYS)
    except ValueError as error:
        return encode_arrays({}, reason=str(error))
    arrays = {"products": result.products.astype(np.float32), "positions": result.positions}
    return encode_arrays(arrays, reason="", scale=result.scale, query=query)


def encode_aggregate(view: OpenModel, site: str, how: str, scope: str, row: int = 0) -> bytes:
    """Mean or maximum of the heads of a layer, or of all layers over the same tokens, or the rollout up to a layer."""
    trace = view.get_trace()
    layer = trace.get_layer(site)
    if layer.num_queries * layer.num_keys > MAX_AGGREGATE_CELLS:
        fact = f"{layer.num_queries} x {layer.num_keys} weights are too many to combine"
        raise ValueError(f"{fact}; give a text of at most {int(MAX_AGGREGATE_CELLS**0.5)} tokens, or choose one head")
    if how == "rollout":
        return encode_arrays({"weights": roll_out_attention(trace, site, row=row)})
    alike = [one.name for one in trace.layers if _is_alike(one, layer)] if scope == "all" else [site]
    return encode_arrays({"weights": aggregate_heads(trace, alike, how, row=row)})


def _is_alike(one: object, other: object) -> bool:
    """Whether two layers attend over the same tokens in the same way."""
    names = ("stack", "kind", "query_stream", "key_stream", "num_queries", "num_keys")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def encode_written(view: OpenModel, site: str, head: int, query: int) -> bytes:
    """The tokens whose logits a head raises and lowers most at a position; or the reason why there are none."""
    net = view.get_model()
    # After the model, which imports torch in one thread.
    from ..head_analysis.logit_attribution import attribute_all_logits
    from .lab_runs import find_token_decoder, id_inputs
    from .step_answers import get_native_copy

    try:
        native = get_native_copy(net)
        effects = attribute_all_logits(native, id_inputs(native, view.get_recorded()), site, head, query)
    except (ValueError, KeyError) as error:
        return encode_arrays({}, reason=str(error))
    count = min(LISTED_TOKENS, effects.values.numel() // 2)
    order = effects.values.argsort(descending=True)
    tokens = [*order[:count].tolist(), *order.flip(0)[:count].tolist()]
    decode = find_token_decoder(net)
    values = effects.values[tokens].float().cpu().numpy().astype(np.float32)
    ids = np.array(tokens, np.int32)
    return encode_arrays(
        {"effects": values, "ids": ids}, words=[decode(token) for token in tokens], note=effects.note, reason=""
    )


def encode_image(view: OpenModel, stream: str, row: int = 0) -> bytes:
    """The image of a stream, [height, width, channels]."""
    images = view.get_recorded().images
    if stream not in images:
        raise ValueError(f"the trace holds no image of {stream!r}; its images are {', '.join(images) or 'none'}")
    return encode_arrays({"image": np.ascontiguousarray(images[stream][row])})
