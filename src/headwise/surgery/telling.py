"""A proof on a terminal: what was done, whether it holds, what it saved, what it cost."""

from __future__ import annotations

from .page import to_one_line, iter_summary, wrap_text
from .proof import ModelProof


def render_summary(proof: ModelProof) -> str:
    """A few lines, no wider than a terminal, without colour."""
    lines = [*wrap_text(f"{to_one_line(proof.model)}: {to_one_line(proof.what)}"), ""]
    for sentence in iter_summary(proof):
        lines += wrap_text(sentence, "  ")
    for note in proof.notes:
        lines += wrap_text(to_one_line(note), "note: ")
    return "\n".join(lines)
