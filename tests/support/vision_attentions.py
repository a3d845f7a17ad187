"""Attention modules of the shapes found in vision libraries, written from their formulas, with
independent weights.

Every class is named, and names its children, as in the library of its comment, because names are
what adapters read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

WIDE, HEADS, DIM = 15, 3, 5
SIDE, WINDOW = 4, 2  # tokens on a side of an image, and of a window


class Attention(nn.Module):
    """timm's ViT and DeiT: one projection for q, k and v."""

    fused = False

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim, self.scale = HEADS, DIM, WIDE, DIM**-0.5
        self.qkv = nn.Linear(WIDE, 3 * WIDE)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_drop, self.proj, self.proj_drop = (
            nn.Dropout(0.0),
            nn.Linear(WIDE, WIDE),
            nn.Dropout(0.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        y = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused:
            z = F.scaled_dot_product_attention(q, k, v)
        else:
            z = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(z.transpose(1, 2).reshape(batch, tokens, self.attn_dim)))


class FusedAttention(Attention):
    """The same with the fused call, which is what timm runs by default."""

    fused = True


class BeitAttention(nn.Module):
    """timm's BEiT: biases of q and v alone, and a table of position biases."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale = HEADS, DIM**-0.5
        self.qkv = nn.Linear(WIDE, 3 * WIDE, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(WIDE)), nn.Parameter(torch.randn(WIDE))
        self.relative_position_bias_table = nn.Parameter(torch.randn(2 * SIDE**2 - 1, HEADS))
        places = torch.arange(SIDE**2)
        self.register_buffer("relative_position_index", places[:, None] - places + SIDE**2 - 1)
        self.proj = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, wide = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        qkv = (
            F.linear(x, self.qkv.weight, bias)
            .reshape(batch, tokens, 3, HEADS, -1)
            .permute(2, 0, 3, 1, 4)
        )
        table = self.relative_position_bias_table[self.relative_position_index.flatten()]
        table = table.view(SIDE**2, SIDE**2, -1).permute(2, 0, 1).contiguous()[None]
        z = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=table, dropout_p=0.0)
        return self.proj(z.transpose(1, 2).reshape(batch, tokens, wide))


class EvaAttention(nn.Module):
    """timm's EVA02: rotated patches behind a prefix token, and a norm between the heads and their
    projection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_prefix_tokens = HEADS, 1
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(WIDE, 12),
            nn.Linear(WIDE, 12, bias=False),
            nn.Linear(WIDE, 12),
        )
        self.norm, self.proj = nn.LayerNorm(12), nn.Linear(12, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (HEADS, 4)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (torch.cat([y[:, :, :1], rotate(y[:, :, 1:])], 2) for y in (q, k))
        z = F.scaled_dot_product_attention(q, k, v)
        return self.proj(self.norm(z.transpose(1, 2).flatten(2)))


def rotate(y_BHTK: Tensor) -> Tensor:
    """Neighbouring channels rotated by angles that grow with the token."""
    angles = torch.arange(y_BHTK.shape[2], dtype=y_BHTK.dtype)[:, None] * torch.tensor(
        [1.0, 0.1], dtype=y_BHTK.dtype
    )
    angles = angles.repeat_interleave(2, -1)
    turned = torch.stack([-y_BHTK[..., 1::2], y_BHTK[..., ::2]], -1).flatten(-2)
    return y_BHTK * angles.cos() + turned * angles.sin()


class AttentionCl(nn.Module):
    """timm's MaxViT: tokens of a window on two axes, heads before q, k and v in the fused
    projection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.dim_head, self.scale = HEADS, DIM, DIM**-0.5
        self.qkv, self.proj = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:-1]
        q, k, v = (
            self.qkv(x)
            .view(x.shape[0], -1, self.num_heads, 3 * DIM)
            .transpose(1, 2)
            .chunk(3, dim=3)
        )
        z = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(z.transpose(1, 2).reshape(*shape, -1))


class PartitionAttentionCl(nn.Module):
    """timm's MaxViT: attention within windows of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDE), AttentionCl()

    def forward(self, x: Tensor) -> Tensor:
        windows = rearrange(self.norm(x), "b (y p) (x q) c -> (b y x) p q c", p=WINDOW, q=WINDOW)
        sizes = {"b": x.shape[0], "y": SIDE // WINDOW, "x": SIDE // WINDOW}
        return x + rearrange(self.attn(windows), "(b y x) p q c -> b (y p) (x q) c", **sizes)


def shifted_window_attention(x: Tensor, qkv: nn.Linear, proj: nn.Linear, table: Tensor) -> Tensor:
    """torchvision's Swin: a function gets the weights of both projections, which are never called
    as modules.
    """
    shape, shift = x.shape, WINDOW // 2
    x = torch.roll(x, (-shift, -shift), (1, 2))
    x = rearrange(x, "b (y p) (x q) c -> (b y x) (p q) c", p=WINDOW, q=WINDOW)
    q, k, v = (
        F.linear(x, qkv.weight, qkv.bias)
        .reshape(*x.shape[:2], 3, HEADS, DIM)
        .permute(2, 0, 3, 1, 4)
    )
    attn = (q * DIM**-0.5).matmul(k.transpose(-2, -1)) + table
    areas = torch.zeros(SIDE, SIDE)
    for number, (rows, columns) in enumerate(AREAS):
        areas[rows, columns] = number
    areas = rearrange(areas, "(y p) (x q) -> (y x) (p q)", p=WINDOW, q=WINDOW)
    mask = (areas[:, None] - areas[:, :, None]).ne(0) * -100.0
    attn = attn.view(shape[0], -1, HEADS, *attn.shape[2:]) + mask[None, :, None]
    attn = F.dropout(F.softmax(attn.flatten(0, 1), dim=-1), p=0.0, training=False)
    z = F.linear(attn.matmul(v).transpose(1, 2).reshape(*x.shape), proj.weight, proj.bias)
    z = rearrange(z, "(b y x) (p q) c -> b (y p) (x q) c", b=shape[0], y=SIDE // WINDOW, p=WINDOW)
    return torch.roll(z, (shift, shift), (1, 2))


FIRST, MIDDLE, LAST = slice(0, -WINDOW), slice(-WINDOW, -WINDOW // 2), slice(-WINDOW // 2, None)
AREAS = [(rows, columns) for rows in (FIRST, MIDDLE, LAST) for columns in (FIRST, MIDDLE, LAST)]


class ShiftedWindowAttention(nn.Module):
    """torchvision's Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.relative_position_bias = nn.Parameter(torch.randn(HEADS, WINDOW**2, WINDOW**2))

    def forward(self, x: Tensor) -> Tensor:
        return shifted_window_attention(x, self.qkv, self.proj, self.relative_position_bias)


class SequentialAttention(nn.Module):
    """vit-pytorch: softmax as a module, and a projection inside a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, DIM**-0.5
        self.norm, self.attend, self.dropout = (
            nn.LayerNorm(WIDE),
            nn.Softmax(dim=-1),
            nn.Dropout(0.0),
        )
        self.to_qkv = nn.Linear(WIDE, 3 * WIDE, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            rearrange(y, "b n (h d) -> b h n d", h=self.heads)
            for y in self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attn = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
        return self.to_out(rearrange(torch.matmul(attn, v), "b h n d -> b n (h d)"))


# --- Weights of the first layer in float64, computed in another way -------------------------------


def softmax_by_definition(scores: Tensor) -> Tensor:
    """exp(s) / sum exp(s) over the last axis."""
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


def project_by_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[B, T, C] -> [heads, B, T, K] of consecutive rows of a weight."""
    parts = (
        torch.stack(weight.chunk(HEADS)),
        None if bias is None else torch.stack(bias.chunk(HEADS)),
    )
    y = torch.einsum("btc,hkc->hbtk", x, parts[0])
    return y if parts[1] is None else y + parts[1][:, None, None]


def weights_of_vit(layer: nn.Module, x: Tensor) -> Tensor:
    """ViT, vit-pytorch and BEiT."""
    x = layer.norm(x) if isinstance(layer, SequentialAttention) else x
    fused = layer.to_qkv if isinstance(layer, SequentialAttention) else layer.qkv
    weights = fused.weight.chunk(3)
    biases = (None, None) if fused.bias is None else fused.bias.chunk(3)[:2]
    biases = (layer.q_bias, None) if isinstance(layer, BeitAttention) else biases
    q, k = (project_by_head(x, one, bias) for one, bias in zip(weights[:2], biases, strict=True))
    scores = torch.einsum("hbtk,hbsk->bhts", q, k) / DIM**0.5
    if isinstance(layer, BeitAttention):
        table = layer.relative_position_bias_table
        for t in range(SIDE**2):
            for s in range(SIDE**2):
                scores[:, :, t, s] += table[t - s + SIDE**2 - 1]
    return softmax_by_definition(scores)


def weights_of_eva(layer: nn.Module, x: Tensor) -> Tensor:
    """EVA02, by complex numbers."""
    sides = []
    for one in (layer.q_proj, layer.k_proj):
        y = torch.view_as_complex(
            project_by_head(x, one.weight, one.bias).unflatten(-1, (2, 2)).contiguous()
        )
        turns = torch.outer(torch.arange(x.shape[1] - 1.0), torch.tensor([1.0, 0.1])).double()
        y[:, :, 1:] *= torch.polar(torch.ones_like(turns), turns)
        sides.append(y)
    return softmax_by_definition(
        torch.einsum("hbtk,hbsk->bhts", sides[0], sides[1].conj()).real / 2
    )


def window_tokens(x: Tensor, shift: int) -> tuple[Tensor, list[list[tuple[int, int]]]]:
    """The tokens of each window [B * windows, tokens, C], and their places in the image."""
    places = [
        [
            ((y * WINDOW + p + shift) % SIDE, (z * WINDOW + q + shift) % SIDE)
            for p in range(WINDOW)
            for q in range(WINDOW)
        ]
        for y in range(SIDE // WINDOW)
        for z in range(SIDE // WINDOW)
    ]
    return torch.stack(
        [torch.stack([row[at] for at in window]) for row in x for window in places]
    ), places


def weights_of_maxvit(layer: nn.Module, x: Tensor) -> Tensor:
    """MaxViT: the rows of a head are q, k and v together."""
    tokens, _ = window_tokens(layer.norm(x), 0)
    one = layer.attn.qkv
    y = project_by_head(tokens, one.weight, one.bias)
    return softmax_by_definition(
        torch.einsum("hbtk,hbsk->bhts", y[..., :DIM], y[..., DIM : 2 * DIM]) / DIM**0.5
    )


def weights_of_swin(layer: nn.Module, x: Tensor) -> Tensor:
    """Swin: tokens of a window that the shift brought together from opposite borders do not attend
    to each other.
    """
    tokens, places = window_tokens(x, WINDOW // 2)
    q, k = (
        project_by_head(tokens, *layer_part)
        for layer_part in zip(
            layer.qkv.weight.chunk(3)[:2], layer.qkv.bias.chunk(3)[:2], strict=True
        )
    )
    scores = torch.einsum("hbtk,hbsk->bhts", q, k) / DIM**0.5 + layer.relative_position_bias
    for number in range(len(scores)):
        window = places[number % len(places)]
        for t, (row, column) in enumerate(window):
            for s, (other_row, other_column) in enumerate(window):
                if abs(row - other_row) >= WINDOW or abs(column - other_column) >= WINDOW:
                    scores[number, :, t, s] -= 100.0
    return softmax_by_definition(scores)


class VisionCase(NamedTuple):
    """A layer, its independent weights, the path of its output projection, and the form of its
    input.
    """

    make: Callable[[], nn.Module]
    weights: Callable[[nn.Module, Tensor], Tensor]
    projection: str
    shape: tuple[int, ...] = (2, SIDE**2, WIDE)

    def build(self) -> tuple[nn.Module, Tensor]:
        """Two layers with uneven attention, and an input."""
        torch.manual_seed(0)
        model = nn.Sequential(self.make(), self.make()).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        return model, torch.randn(self.shape)

    def expected_weights(self, model: nn.Module, x: Tensor) -> Tensor:
        """Weights [B, H, T, S] of the first layer, in float64."""
        with torch.no_grad():
            return self.weights(copy.deepcopy(model[0]).double(), x.double())


IMAGE = (2, SIDE, SIDE, WIDE)
CASES = {
    "timm vit": VisionCase(FusedAttention, weights_of_vit, "proj"),
    "timm deit": VisionCase(Attention, weights_of_vit, "proj"),
    "timm beit": VisionCase(BeitAttention, weights_of_vit, "proj"),
    "timm eva02": VisionCase(EvaAttention, weights_of_eva, "proj"),
    "timm maxvit": VisionCase(PartitionAttentionCl, weights_of_maxvit, "attn.proj", IMAGE),
    "torchvision swin": VisionCase(ShiftedWindowAttention, weights_of_swin, "proj", IMAGE),
    "vit-pytorch": VisionCase(SequentialAttention, weights_of_vit, "to_out.0"),
}
