"""What is said behind one prompt: ids and text, up to an end or a stop."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .words import Telling


class Answer:
    """Ids that are taken one by one until one ends them, or their text holds what stops it.

    It ends before what ends or stops it. What may still become a stop is not told before that is known: `fresh_ids`
    and `fresh_text` are what was not told yet and will stay. Without a `telling` there are ids alone.

    >>> answer = Answer(ends={2})
    >>> for one in (5, 7, 2, 9):
    ...     answer.take(one)
    >>> answer.ids, answer.over
    ([5, 7], True)
    """

    def __init__(self, ends: Collection[int] = (), stops: Sequence[str] = (), telling: Telling | None = None) -> None:
        self.ids: list[int] = []
        self.over = False
        self._ends, self._stops, self._telling = ends, tuple(stops), telling
        self._searched = 0  # characters in which no stop begins
        self._cut: int | None = None  # where a stop begins
        self._marks: list[int] = []  # how long the text was behind each id; -1 where bytes wait for others
        self._told_ids = self._told_text = 0

    @property
    def text(self) -> str:
        """What was said so far, up to a stop."""
        return "" if self._telling is None else self._telling.text[: self._cut]

    def take(self, one: int) -> None:
        """One more id; nothing more is taken when it is over."""
        if self.over:
            return
        if one in self._ends:
            self.close()
            return
        self.ids.append(one)
        if self._telling is not None:
            self._telling.push(one)
            self._marks.append(len(self._telling.text) if self._telling.whole else -1)
            self._search()

    def close(self) -> None:
        """Nothing more comes."""
        if self.over:
            return
        if self._telling is not None:
            self._telling.close()
            self._search()
        self.over = True

    def _search(self) -> None:
        """Look for the first stop in what was not looked at yet."""
        assert self._telling is not None, "there is no text"
        text = self._telling.text
        found = [at for stop in self._stops if (at := text.find(stop, self._searched)) >= 0]
        if not found:
            self._searched = max(self._searched, len(text) - max(map(len, self._stops), default=1) + 1)
            return
        self._cut, self.over = min(found), True
        within = [n for n, mark in enumerate(self._marks, 1) if 0 <= mark <= self._cut]
        self.ids = self.ids[: max(within, default=0)]

    @property
    def _safe(self) -> int:
        """Characters that stay, whatever comes."""
        text = self.text
        if self.over:
            return len(text)
        ways = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return len(text) - max(ways, default=0)

    def fresh_text(self) -> str:
        """What of the text was not told yet and will stay."""
        first, self._told_text = self._told_text, max(self._told_text, self._safe)
        return self.text[first : self._told_text]

    def fresh_ids(self) -> list[int]:
        """Which of the ids were not told yet and will stay."""
        first, count = self._told_ids, len(self.ids)
        if self._stops and not self.over:
            count = max((n for n, mark in enumerate(self._marks, 1) if 0 <= mark <= self._safe), default=0)
        self._told_ids = max(first, count)
        return self.ids[first : self._told_ids]
