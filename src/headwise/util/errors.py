"""The exceptions of headwise and words of their messages, which give the fact, the values and a
remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecError(ValueError):
    """An invalid spec or option: a wrong size, name, key, pattern or combination."""


class SequenceTooLong(ValueError):
    """A sequence with more tokens than the model supports."""


class UnknownToken(SpecError):
    """A text that the model's tokenizer cannot encode."""


class NoBackend(RuntimeError):
    """No backend supports this call; the message lists each backend with the reason."""


class TrainingDiverged(ValueError):
    """The loss or a gradient is not finite; checkpoints written before it are intact."""


class CacheFull(RuntimeError):
    """More tokens than the KV cache has slots for."""


def suggest(word: str, names: Iterable[str]) -> str:
    """Suggest a remedy for an unknown name: the closest known name, or a list of all known names.

    >>> suggest("windo", ["window", "first"])
    "did you mean 'window'?"
    >>> suggest("xyz", ["window", "first"])
    'use one of first, window'
    """
    close = difflib.get_close_matches(word, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else "use one of " + ", ".join(sorted(names))


def check_known(what: str, name: object, names: Iterable[str]) -> None:
    """Raise SpecError with a suggestion if a name is not one of `names`.

    >>> check_known("metric", "entrpy", ["entropy", "sink"])
    Traceback (most recent call last):
    headwise.util.errors.SpecError: unknown metric 'entrpy'; did you mean 'entropy'?
    """
    names = list(names)
    if name not in names:
        raise SpecError(f"unknown {what} {name!r}; {suggest(str(name), names)}")


def pluralise(count: int, what: str) -> str:
    """Return a count with its noun.

    >>> pluralise(1, "row"), pluralise(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
