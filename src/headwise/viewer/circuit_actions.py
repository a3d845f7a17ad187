"""The job that compares the open text with another one: which edges between heads, MLPs,
embeddings and logits carry the difference of their next tokens.
"""

from __future__ import annotations

from typing import Any

from .model_worker import JobProgress, action, text
from .open_model import OpenModel, id_inputs


@action("edges", other=text(), tokens=text())
def score_text_edges(
    model: OpenModel, progress: JobProgress, other: str, tokens: str
) -> dict[str, Any]:
    """Score all edges for the difference of two logits after the open text and the `other` one.

    `tokens` are "A,B", or empty: then each is the likeliest next token of one text. Edges are
    [sender, receiver, score, effect by path patching or null], largest score first.
    """
    from ..observe.head_analysis.circuit_metrics import LOGIT_DIFFERENCE, TokenMetric
    from ..observe.head_analysis.edge_attribution import EdgeOptions, attribute_edges
    from ..observe.head_analysis.objectives import detect_head_objective
    from ..observe.inspect.model_tokenizer import find_token_decoder

    net = model.get_model()
    if detect_head_objective(net) != "next-token":
        raise ValueError("error.onlyDecoderEdges")
    if not other.strip():
        raise ValueError("the other text is empty; give a text with as many tokens as the open one")
    pair = (id_inputs(net, model.get_recorded()), other)
    named = tuple(tokens.split(",")) if tokens.strip() else _likeliest_tokens(net, pair)
    metric = TokenMetric(LOGIT_DIFFERENCE, named).resolve(net)
    graph = attribute_edges(
        net,
        [pair],
        metric,
        options=EdgeOptions(points=0),
        progress=lambda note: progress(0, 0, note),
    )
    decode = find_token_decoder(net)
    agreement = graph.agreement
    return {
        "words": [decode(token) for token in metric.tokens if isinstance(token, int)],
        "clean": graph.clean,
        "corrupt": graph.clean + graph.total,
        "count": graph.num_edges,
        "edges": [[one.sender, one.receiver, one.score.value, one.exact] for one in graph.edges],
        "agreement": None if agreement is None else [agreement.count, agreement.pearson],
        "notes": graph.notes,
    }


def _likeliest_tokens(net: Any, pair: tuple[Any, str]) -> tuple[int, ...]:
    """Return the likeliest next token of both texts; raise if it is the same."""
    import torch

    from ..observe.head_analysis.circuit_graph import prepare_pair
    from ..observe.head_analysis.objectives import get_output_tensor
    from ..observe.inspect.model_tokenizer import find_token_decoder

    texts = prepare_pair(net, *pair, lambda logits: logits.sum())[:2]
    with torch.inference_mode():
        logits = [get_output_tensor(net(**inputs.kwargs))[0, -1] for inputs in texts]
    ids = tuple(int(row.argmax()) for row in logits)
    if ids[0] == ids[1]:
        word = find_token_decoder(net)(ids[0])
        raise ValueError(
            f"both texts go on with {word!r}; name two next tokens, or give a text that goes on "
            "otherwise"
        )
    return ids
