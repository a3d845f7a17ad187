"""Who holds which page: handed out, shared and given back, whatever lies in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from ..errors import CacheFull


class PageAllocator:
    """So many pages by their numbers; each is free, or held by one row or by several.

    A page that was given a name keeps what lies in it when it is given back: until it is handed out anew, whoever knows
    the name may hold it again. Those without a name are handed out first, then the one given back longest ago.

    >>> pages = PageAllocator(3)
    >>> first, second = pages.take(), pages.take()
    >>> pages.name(first, "once upon")
    >>> pages.release(first), pages.held
    (None, 1)
    >>> pages.add_reference(pages.find("once upon")), pages.held
    (None, 2)
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # in the order of being handed out
        self._names: dict[int, Hashable] = {}
        self._named: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many somebody holds; one that is shared counts once."""
        return self.count - len(self._free)

    def holders(self, page: int) -> int:
        """How many rows hold it."""
        return self._holders[page]

    def allocate(self) -> int:
        """A page that nobody holds and that now has one holder; what lay in it is forgotten."""
        if not self._free:
            raise CacheFull(f"all {self.count:,} pages are held; wait until a row leaves, or give a larger budget")
        page, _ = self._free.popitem(last=False)
        if page in self._names:
            del self._named[self._names.pop(page)]
        self._holders[page] = 1
        return page

    def add_reference(self, page: int) -> None:
        """One holder more."""
        self._holders[page] += 1
        self._free.pop(page, None)

    def release(self, page: int) -> None:
        """One holder less; the last one's page is free."""
        if not self._holders[page]:
            raise ValueError(f"page {page} was given back twice; only who holds a page gives it back")
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free[page] = None
            self._free.move_to_end(page, last=page in self._names)

    def name(self, page: int, name: Hashable) -> None:
        """Let what lies in it be found; a name that another page has stays there."""
        if name not in self._named and page not in self._names:
            self._names[page], self._named[name] = name, page

    def find(self, name: Hashable) -> int | None:
        """The page of this name, held or not, while what lies in it is known."""
        return self._named.get(name)
