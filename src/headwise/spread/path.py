"""The way from a batch to what a model says of it."""

from __future__ import annotations

from torch import Tensor, nn

from ..models import Transformer
from ..tasks import Batch


class Path(nn.Module):
    """A model from what it reads to what its first head says, in one call: tensors that are put together for a call
    are there inside and let go behind it.

    `hidden` is how it comes to its states, compiled or not.
    """

    def __init__(self, net: Transformer) -> None:
        super().__init__()
        self.net, self.hidden = net, net.hidden

    def forward(self, batch: Batch, index: Tensor | None = None) -> Tensor:
        """[B, T, outputs] or [B, outputs]; [1, n, outputs] of the n states that `index` names among all rows'."""
        h = self.hidden(batch.x, tokens=batch.tokens, source=batch.source, source_tokens=batch.source_tokens)
        if index is not None:
            h = h.flatten(0, 1).index_select(0, index)[None]
        return self.net.read(h, tokens=batch.tokens)
