"""How much each token of a text is read by every head: columns of weights summed band by band."""

from __future__ import annotations

import torch
from torch import Tensor

from .block import Block


class Received:
    """Sums of the weights on each token of one text, by site [heads, tokens]; `see` is handed to `look`.

    Divided by the number of queries it is the share of all reading that goes to a token.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def see(self, site: str, block: Block) -> None:
        """Add a band of rows."""
        heads = len(block.w_HTS)
        if site not in self.sums:
            self.sums[site] = torch.zeros(heads, block.told.count, dtype=torch.float64, device=block.w_HTS.device)
        keys = slice(block.first, block.first + block.w_HTS.shape[2])
        self.sums[site][:, keys] += block.w_HTS.sum(1)
