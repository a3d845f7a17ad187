"""The jobs of the Class screen: the texts that show a class of a head best and worst, and
dependency relations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .binary_answers import encode_arrays
from .model_actions import make_examples, read_text
from .model_worker import JobProgress
from .open_model import OpenModel

if TYPE_CHECKING:
    from ..head_analysis.annotated_examples import Example
    from ..head_analysis.attention_figures import PictureMaker
    from ..head_analysis.head_table import HeadMeasures

MAX_TEXTS = 64  # that are scored
SHOWN_CHARACTERS = 200  # of a text
SHOWN_PAIRS = 3  # of a text, those with the largest weights


def find_evidence(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> bytes:
    """How well each text of the job shows a class of a head, and its strongest pairs of tokens.

    The score of a text is the mean weight on the pairs that the class is about, or the measure
    behind the class.
    """
    site, head = arguments.get("site"), arguments.get("head")
    if type(site) is not int or type(head) is not int:
        raise ValueError("give the numbers of a site and of a head")
    name = read_text(arguments, "class")
    measured = _measured_head(model, model.site_name(site), head)
    from ..head_analysis.attention_figures import PictureMaker

    examples = make_examples(model, arguments)[:MAX_TEXTS]
    maker = PictureMaker(model.get_model(), examples)
    scores: list[float] = []
    texts: list[dict[str, Any]] = []
    for number, example in enumerate(examples):
        progress(number, len(examples), "reading texts")
        scores.append(maker.score(number, measured, name))
        texts.append(
            {"text": _join_words(example), "pairs": _strongest_pairs(maker, number, measured)}
        )
    return encode_arrays({"scores": np.array(scores, np.float32)}, texts=texts)


def _measured_head(model: OpenModel, site: str, head: int) -> HeadMeasures:
    if model.table is None:
        raise ValueError("the heads have not been measured; measure them first")
    return model.table.head(site, head)


def _join_words(example: Example) -> str:
    """The words of all streams of an example, the source first."""
    streams = [example.streams[name] for name in ("source", "text") if name in example.streams]
    text = " → ".join(
        "".join(tokens.words) if _has_spaces(tokens.words) else " ".join(tokens.words)
        for tokens in streams
    )
    return text[:SHOWN_CHARACTERS]


def _has_spaces(words: tuple[str, ...]) -> bool:
    return any(" " in word for word in words)


def _strongest_pairs(maker: PictureMaker, number: int, head: HeadMeasures) -> list[dict[str, Any]]:
    """The pairs of a text with the largest weights, other than those of a token with itself or the
    first token.
    """
    traced, example = maker.trace(number), maker.examples[number]
    layer = traced.get_layer(head.site)
    weights = traced.head_weights(head.site, head.head).copy()
    if layer.query_stream == layer.key_stream:
        np.fill_diagonal(weights, 0)
    weights[:, 0] = 0
    queries, keys = (example.streams[name].words for name in (layer.query_stream, layer.key_stream))
    order = np.argsort(-weights, axis=None)[:SHOWN_PAIRS]
    places = [divmod(int(place), weights.shape[1]) for place in order]
    return [
        {"query": queries[t], "key": keys[s], "weight": round(float(weights[t, s]), 4)}
        for t, s in places
        if weights[t, s] > 0
    ]


def measure_syntax(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Measure all heads over parsed sentences (CoNLL-U), with the dependency relations that each
    head follows.
    """
    from ..head_analysis.annotated_examples import examples_from_sentences, read_conllu
    from ..head_analysis.dependency_syntax import SYNTAX_PREFIX, DependencyScores
    from ..head_analysis.text_analysis import measure_and_classify

    conllu = read_text(arguments, "conllu")
    if not conllu.strip():
        raise ValueError("there are no sentences; choose a file in the format CoNLL-U")
    progress(0, 0, "reading sentences")
    net = model.get_model()
    reader = examples_from_sentences(net, read_conllu(conllu.splitlines()))
    examples = reader.examples_with_frequencies()
    if len(examples) < 2:
        raise ValueError(
            f"{len(examples)} parsed sentences are too few for an interval; give at least two"
        )
    table = measure_and_classify(
        net,
        examples,
        collectors=[DependencyScores()],
        progress=lambda count: progress(count, len(examples), "measuring heads"),
    ).with_notes(reader.notes)
    relations = {
        name for head in table.heads for name in head.measures if name.startswith(SYNTAX_PREFIX)
    }
    if not relations:
        raise ValueError(
            "no relation occurs often enough to be measured (20 times); give more sentences"
        )
    model.set_table(table)
    return {"revision": model.revision, "texts": len(examples), "relations": len(relations)}
