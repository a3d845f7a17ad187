"""How much each token of a text is read by every head: columns of weights summed band by band."""

from __future__ import annotations

import torch
from torch import Tensor

from .block import WeightBand


class AttentionReceived:
    """Sums of the weights on each token of one text, by site [heads, tokens]; `see` is handed to `look`.

    Divided by the number of queries it is the share of all reading that goes to a token.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows."""
        heads = len(band.w_HTS)
        if site not in self.sums:
            self.sums[site] = torch.zeros(heads, band.key_tokens.count, dtype=torch.float64, device=band.w_HTS.device)
        keys = slice(band.first_key, band.first_key + band.w_HTS.shape[2])
        self.sums[site][:, keys] += band.w_HTS.sum(1)
