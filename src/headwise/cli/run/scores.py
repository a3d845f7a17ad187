"""BLEU and chrF of generated lines against a file of references (--score)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...data.translation import SacreBleuScores, score_translations
from ..command_parser import UsageError

DEFAULT_BLEU_TOKENIZER = "13a"  # sacreBLEU's default


@dataclass
class TranslationScores:
    """Generated `hypotheses` and the `references` read from a file."""

    path: str
    references: list[str]
    tokenize: str
    hypotheses: list[str] = field(default_factory=list)

    @staticmethod
    def from_file(path: str | None, tokenize: str | None) -> TranslationScores | None:
        """Read the references, or return None without --score; raises before anything is generated."""
        if path is None:
            if tokenize is not None:
                raise UsageError("--score-tokenize needs --score; add --score REF")
            return None
        try:
            references = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path!r} cannot be read: {error}; give a text file with one reference per line"
            ) from None
        references = references[:-1] if references[-1] == "" else references
        scores = TranslationScores(path, [line.rstrip("\r") for line in references], tokenize or DEFAULT_BLEU_TOKENIZER)
        score_translations(["a"], ["a"], scores.tokenize)  # raises if sacreBLEU or the tokenizer is missing
        return scores

    @property
    def is_complete(self) -> bool:
        """Whether every hypothesis has a reference."""
        return len(self.hypotheses) == len(self.references)

    @property
    def metrics(self) -> SacreBleuScores:
        """Return BLEU and chrF over all lines."""
        if not self.is_complete:
            fact = f"{len(self.hypotheses)} lines were answered, but {self.path} has {len(self.references)}"
            raise UsageError(f"{fact}; give one reference per line")
        return score_translations(self.hypotheses, self.references, self.tokenize)

    @property
    def data(self) -> dict[str, Any]:
        """Scores as plain values."""
        return asdict(self.metrics)

    def __str__(self) -> str:
        metrics = self.metrics
        return "\n".join(
            [
                f"BLEU {metrics.bleu:6.2f}   {metrics.bleu_signature}",
                f"chrF {metrics.chrf:6.2f}   {metrics.chrf_signature}",
            ]
        )
