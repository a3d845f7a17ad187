"""Test whether the newest token attends to every token that a cache still stores."""

from __future__ import annotations

from collections.abc import Callable

from ..masking.patterns import Causal, First, Pattern, Window


class FullVisibility:
    """Tests whether a pattern allows exactly the tokens that a cache retains, by counting pairs ahead of time.

    >>> from headwise.masking.patterns import Dilated
    >>> [FullVisibility(pattern).sees_all(1000, Causal) for pattern in (Causal(), Dilated(keys=5, rate=2))]
    [True, False]
    """

    def __init__(self, pattern: Pattern, least: int = 0) -> None:
        self._pattern, self._least = pattern, least
        self.known, self._all = 0, False  # number of tokens up to which pairs have been counted

    def sees_all(self, used: int, rule: Callable[[], Pattern]) -> bool:
        """Return whether each of the first `used` tokens sees all tokens that `rule` retains.

        Always pass the same rule. It is not stored: a bound method of the cache would make a reference cycle.
        """
        if used > self.known:
            first, self.known = not self.known, 64 * max(used, self._least)
            span = range(self.known)
            if self._all or first:  # once unequal, always unequal
                self._all = (self._pattern & Causal()).pairs(span, span) == rule().pairs(span, span)
        return self._all


def retained_tokens(pattern: Pattern) -> Pattern:
    """Return the pattern of tokens to retain: those that later queries may still attend to."""
    first, last = pattern.retention
    if last is None:
        return Causal()
    return Window(last) | First(first) if first else Window(last)
