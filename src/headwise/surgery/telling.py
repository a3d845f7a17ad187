"""A proof on a terminal: what was done, whether it holds, what it saved, what it cost."""

from __future__ import annotations

from .page import line, sentences, wrapped
from .proof import Proof


def told(proof: Proof) -> str:
    """A few lines, no wider than a terminal, without colour."""
    lines = [*wrapped(f"{line(proof.model)}: {line(proof.what)}"), ""]
    for sentence in sentences(proof):
        lines += wrapped(sentence, "  ")
    for note in proof.notes:
        lines += wrapped(line(note), "note: ")
    return "\n".join(lines)
