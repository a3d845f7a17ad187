"""Links from entries to a screen of the page of `headwise view`, with a head and a token of the
bundled translator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from ..observe.head_names import Layer, locate_head


@dataclass(frozen=True)
class ViewLink:
    """A screen, "steps", "head" or "lab", a head and a token; without texts, those of the sample.

    On the Lab the head is ablated.
    """

    entry: str
    screen: str
    head: str
    token: int
    source: str = ""
    text: str = ""

    @property
    def command(self) -> str:
        """The command that starts the page with this screen."""
        return f"headwise view --learn {self.entry}"

    def address(self, layers: Sequence[Layer]) -> str:
        """The address after # of the page of a model with these layers."""
        site, head = locate_head(self.head, layers)
        number = [layer.name for layer in layers].index(site)
        values = {"site": number, "head": head, "position": self.token}
        texts = {"text": self.text, "source": self.source} if self.source else {}
        off = {"off": f"{number}.{head}"} if self.screen == "lab" else {}
        return f"/{self.screen}?{urlencode(values | off | texts | {'learn': self.entry})}"
