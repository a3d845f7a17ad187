"""The job that compares the open text with another one: which edges between heads, MLPs,
embeddings and logits carry the difference of their next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..report.progress import CountedMessage
from ..util.errors import pluralise
from .model_worker import JobProgress, action, text
from .open_model import OpenModel, id_inputs

if TYPE_CHECKING:
    from ..observe.inspect.model_inputs import ModelInputs
    from ..observe.traces.attention_record import TokenRow

NUM_SHOWN = 12  # tokens of a text in an error


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
    from ..observe.inspect.model_inputs import prepare_inputs
    from ..observe.inspect.model_tokenizer import find_token_decoder

    named = _read_tokens(tokens)
    net = model.get_model()
    recorded = model.get_recorded()
    texts = [_read(net, other)]
    _check_texts(recorded.streams["text"][0], texts[0].token_rows["text"][0])
    texts.insert(0, prepare_inputs(net, id_inputs(net, recorded), 0))
    metric = TokenMetric(LOGIT_DIFFERENCE, named or _likeliest_tokens(net, texts)).resolve(net)
    graph = attribute_edges(
        net,
        [[inputs.kwargs for inputs in texts]],
        metric,
        options=EdgeOptions(points=0),
        progress=partial(_show, progress),
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


def _show(progress: JobProgress, message: str) -> None:
    """Report a counted message of the library as progress of the job."""
    if isinstance(message, CountedMessage):
        progress(message.done, message.total, message.label)
    else:
        progress(0, 0, message)


def _read_tokens(tokens: str) -> tuple[str, ...]:
    """Return the two next tokens that are named; none if the field is empty."""
    if not tokens.strip():
        return ()
    words = tuple(tokens.split(","))
    if len(words) != 2 or not all(words) or words[0] == words[1]:
        raise ValueError(
            f"{tokens!r} are not two different next tokens; write two as in A,B, or leave the "
            "field empty"
        )
    return words


def _read(net: Any, other: str) -> ModelInputs:
    """Return the inputs of the other text; raise if the model reads none."""
    from ..hub.transformers_loading import has_tokenizer
    from ..observe.head_analysis.objectives import detect_head_objective
    from ..observe.inspect.model_inputs import prepare_inputs

    if detect_head_objective(net) != "next-token":
        raise ValueError("error.onlyDecoderEdges")
    if not has_tokenizer(net):
        raise ValueError(
            "the model has no tokenizer, so it reads no other text; start the page with --tokenizer"
        )
    if not other.strip():
        raise ValueError("the other text is empty; give a text with as many tokens as the open one")
    return prepare_inputs(net, [other], 0)


def _check_texts(ours: TokenRow, other: TokenRow) -> None:
    """Raise if two texts differ in their number of tokens, or do not differ at all."""
    if len(ours.ids) != len(other.ids):
        shown = [" ".join(map(repr, row.words[:NUM_SHOWN])) for row in (ours, other)]
        raise ValueError(
            f"the open text has {pluralise(len(ours.ids), 'token')} and the other one "
            f"{len(other.ids)} (the open text: {shown[0]}; the other: {shown[1]}); change words of "
            "one so that both have equally many tokens"
        )
    if list(ours.ids) == list(other.ids):
        raise ValueError("the other text is the open one; change a word of it")


def _likeliest_tokens(net: Any, texts: Sequence[ModelInputs]) -> tuple[int, ...]:
    """Return the likeliest next token of both texts; raise if it is the same."""
    import torch

    from ..observe.head_analysis.objectives import get_output_tensor
    from ..observe.inspect.model_tokenizer import find_token_decoder

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
