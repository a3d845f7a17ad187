"""A model run once, watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..models import Decoding, Transformer, generate
from .forwards import hook_sites
from .readable import ModelInputs
from .routes.base import SiteModule
from .watching import AttentionHook


class ModelRun(NamedTuple):
    """A model, and what it is to read, and how many tokens it is to say then."""

    model: nn.Module
    inputs: ModelInputs
    max_new_tokens: int = 0

    def run_with_hooks(self, sites: Sequence[SiteModule], hooks: Mapping[str, AttentionHook]) -> Any:
        """Run it while each of these sites is watched."""
        with hook_sites(self.model, sites, hooks), torch.inference_mode():
            return self.run()

    def run(self) -> Any:
        """What it says, whoever watches."""
        model, given = self.model, self.inputs
        try:
            if not self.max_new_tokens:
                return model(*given.args, **given.kwargs)
            if isinstance(model, Transformer):
                # rows that ended would leave the batch, so that among several none ends before the others
                how = Decoding(end=() if given.batch_size > 1 else None)
                return generate(model, given.prompt_ids, max_new_tokens=self.max_new_tokens, how=how)
            speak: Any = getattr(model, "generate", None)
            if speak is None:
                raise ValueError(f"{type(model).__name__} says no tokens; leave max_new_tokens out")
            return speak(**given.kwargs, max_new_tokens=self.max_new_tokens, do_sample=False)
        except IndexError as error:
            raise ValueError(f"{type(model).__name__} cannot read this: {error}; are there ids it does not know, or "
                             "more tokens than it takes?") from None  # fmt: skip
