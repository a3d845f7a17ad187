"""A model run once, watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..models import Decoding, Transformer, generate
from .forwards import standing
from .readable import Readable
from .routes.base import Found
from .watching import Watcher


class Run(NamedTuple):
    """A model, and what it is to read, and how many tokens it is to say then."""

    model: nn.Module
    given: Readable
    steps: int = 0

    def watched(self, those: Sequence[Found], watchers: Mapping[str, Watcher]) -> Any:
        """Run it while each of these sites is watched."""
        with standing(self.model, those, watchers), torch.inference_mode():
            return self.said()

    def said(self) -> Any:
        """What it says, whoever watches."""
        model, given = self.model, self.given
        try:
            if not self.steps:
                return model(*given.places, **given.names)
            if isinstance(model, Transformer):
                # rows that ended would leave the batch, so that among several none ends before the others
                how = Decoding(end=() if given.batch > 1 else None)
                return generate(model, given.ids, max_new_tokens=self.steps, how=how)
            speak: Any = getattr(model, "generate", None)
            if speak is None:
                raise ValueError(f"{type(model).__name__} says no tokens; leave max_new_tokens out")
            return speak(**given.names, max_new_tokens=self.steps, do_sample=False)
        except IndexError as error:
            raise ValueError(f"{type(model).__name__} cannot read this: {error}; are there ids it does not know, or "
                             "more tokens than it takes?") from None  # fmt: skip
