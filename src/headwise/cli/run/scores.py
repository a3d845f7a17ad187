"""How good translations are, beside those of a file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...data.translation import SacreBleuScores, score_translations
from ..arguments import UsageError

DEFAULT_BLEU_TOKENIZER = "13a"  # how sacreBLEU cuts a line into words


@dataclass
class TranslationScores:
    """Lines that were `said`, and the lines that they are held to."""

    path: str
    references: list[str]
    tokenize: str
    hypotheses: list[str] = field(default_factory=list)

    @staticmethod
    def from_file(path: str | None, tokenize: str | None) -> TranslationScores | None:
        """What a file of references asks for, known to be there before anything is answered."""
        if path is None:
            if tokenize is not None:
                raise UsageError(f"--score-tokenize {tokenize} says how scores are reckoned; give --score REF too")
            return None
        try:
            wanted = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path!r} cannot be read: {error}; give a file with a line for each answer") from None
        wanted = wanted[:-1] if wanted[-1] == "" else wanted
        scores = TranslationScores(path, [line.rstrip("\r") for line in wanted], tokenize or DEFAULT_BLEU_TOKENIZER)
        score_translations(["a"], ["a"], scores.tokenize)  # refuses what is not installed or not known
        return scores

    @property
    def is_complete(self) -> bool:
        """Whether there is a reference for each line."""
        return len(self.hypotheses) == len(self.references)

    @property
    def metrics(self) -> SacreBleuScores:
        """BLEU and chrF of all lines."""
        if not self.is_complete:
            fact = f"{len(self.hypotheses)} lines were answered, and {self.path} has {len(self.references)}"
            raise UsageError(f"{fact}; give a reference for each")
        return score_translations(self.hypotheses, self.references, self.tokenize)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self.metrics)

    def __str__(self) -> str:
        found = self.metrics
        return "\n".join(
            [
                f"BLEU {found.bleu:6.2f}   {found.bleu_signature}",
                f"chrF {found.chrf:6.2f}   {found.chrf_signature}",
            ]
        )
