"""Mixture of heads as its paper and released code have it, in plain PyTorch: all heads are asked, then many shut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ReferenceMoH(NamedTuple):
    """A causal layer of `heads`, the first `always` of which always speak, `active` others for each token (2410.11842).

    `maps` are W_Q, W_K, W_V, W_O [out, in] and the routers "shared", "router", "kind" by name, none with a bias.
    """

    heads: int
    num_shared: int
    num_routed: int
    maps: Mapping[str, Tensor]

    def gates(self, x_BTD: Tensor) -> Tensor:
        """g_BTH: eq. 5 and 6, as the released code scales them, so that a router without preferences gives 1."""
        share = F.linear(x_BTD, self.maps["router"]).on_softmax(-1)
        best, chosen = share.topk(self.num_routed, dim=-1)
        eps = torch.finfo(share.dtype).eps
        routed = torch.zeros_like(share).scatter(
            -1, chosen, self.num_routed * best / best.sum(-1, keepdim=True).clamp(min=eps)
        )
        if not self.num_shared:
            return routed
        shared = self.num_shared * F.linear(x_BTD, self.maps["shared"]).on_softmax(-1)
        kind = 2 * F.linear(x_BTD, self.maps["kind"]).on_softmax(-1)
        return torch.cat([kind[..., :1] * shared, kind[..., 1:] * routed], -1)

    def core(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTV: Tensor, gates_BTH: Tensor) -> Tensor:
        """o_BHTV: what every head reads, scaled by its gate."""
        o_BHTV = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTV, is_causal=True)
        return o_BHTV * gates_BTH.transpose(1, 2)[..., None]

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """The whole layer."""
        q, k, v = (
            F.linear(x_BTD, self.maps[name]).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in ("q", "k", "v")
        )
        o_BHTV = self.core(q, k, v, self.gates(x_BTD))
        return F.linear(o_BHTV.transpose(1, 2).flatten(2), self.maps["o"])
