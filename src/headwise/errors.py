"""What can go wrong, said as: the fact, the values, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecError(ValueError):
    """A description that cannot be meant: a wrong size, name, key, pattern or combination."""


class SequenceTooLong(ValueError):
    """More tokens than a model takes at once."""


class UnknownToken(SpecError):
    """A text that a model's tokenizer has no token for."""


class NoBackend(RuntimeError):
    """No backend can run this job; the message lists every refusal with its reason."""


class TrainingDiverged(ValueError):
    """A loss or a gradient that is no finite number; what was kept before it is whole."""


class CacheFull(RuntimeError):
    """More tokens were remembered than the cache has slots for."""


def suggest(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown word: the closest known one, or all of them.

    >>> suggest("windo", ["window", "first"])
    "did you mean 'window'?"
    >>> suggest("xyz", ["window", "first"])
    'use one of first, window'
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else "use one of " + ", ".join(sorted(known))
