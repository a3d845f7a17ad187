"""Whether the newest token may read whatever a cache still holds."""

from __future__ import annotations

from collections.abc import Callable

from ..masking.patterns import Causal, First, Pattern, Window


class FullVisibility:
    """Whether a pattern allows exactly what is held by a rule, found by counting pairs, ahead of need.

    >>> from headwise.masking.patterns import Dilated
    >>> [FullVisibility(pattern).sees_all(1000, Causal) for pattern in (Causal(), Dilated(keys=5, rate=2))]
    [True, False]
    """

    def __init__(self, pattern: Pattern, least: int = 0) -> None:
        self._pattern, self._least = pattern, least
        self.known, self._all = 0, False  # up to how many tokens it has been counted

    def sees_all(self, used: int, rule: Callable[[], Pattern]) -> bool:
        """Of each of so many tokens; always the same rule, which is not kept: it may be a method of whoever keeps this,
        and then the two would outlive their last use."""
        if used > self.known:
            first, self.known = not self.known, 64 * max(used, self._least)
            span = range(self.known)
            if self._all or first:  # once unequal they stay so
                self._all = (self._pattern & Causal()).pairs(span, span) == rule().pairs(span, span)
        return self._all


def retained_tokens(pattern: Pattern) -> Pattern:
    """What is held of all tokens so far: those that later queries may still read, as far as a pattern can say."""
    first, last = pattern.retention
    if last is None:
        return Causal()
    return Window(last) | First(first) if first else Window(last)
