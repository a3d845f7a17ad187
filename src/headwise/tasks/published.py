"""The scores that translations are published with, as sacreBLEU reckons them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..errors import SpecError


@dataclass(frozen=True)
class Published:
    """BLEU and chrF of a whole corpus, 0 to 100, each with the signature that says how it was reckoned."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def translation_scores(hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> Published:
    """The scores of translations against one reference each; tokenize="zh" for Chinese, as sacreBLEU names it.

    >>> translation_scores(["the cat sat on the mat"], ["the cat sat on the mat"]).chrf
    100.0
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} translations for {len(references)} references; give one for each")
    metrics = _metrics()
    try:
        bleu, chrf = metrics.BLEU(tokenize=tokenize), metrics.CHRF()
    except (KeyError, AssertionError, ValueError):
        raise SpecError(f"tokenize={tokenize!r} is unknown to sacrebleu; use '13a', 'zh', 'char' or 'intl'") from None
    scores = [metric.corpus_score(list(hypotheses), [list(references)]).score for metric in (bleu, chrf)]
    return Published(scores[0], scores[1], str(bleu.get_signature()), str(chrf.get_signature()))


def _metrics() -> Any:
    try:
        return import_module("sacrebleu.metrics")
    except ImportError:
        raise SpecError("BLEU and chrF need sacrebleu; pip install 'headwise[mt]'") from None
