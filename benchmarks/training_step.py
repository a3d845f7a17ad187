"""Tokens a second of a training step of one GPT: ours, the same written plainly, transformers' and x-transformers'.

Every peer takes the same step: forward, cross entropy, backward, clipping, fused AdamW, at the same precision. A peer
that is not installed is left out by name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

from .plain import PlainGPT, Shape
from .shakespeare import described
from .timing import Case, interleaved

ROWS = {Shape(): 12, Shape(tokens=512, length=256, layers=6, heads=6, model=384): 4}


def peers(shape: Shape) -> dict[str, nn.Module]:
    """The same shape by others; logits come out of each under a name or bare."""
    made: dict[str, nn.Module] = {"plain": PlainGPT(shape)}
    for name, make in (("transformers", _transformers), ("x-transformers", _x_transformers)):
        try:
            made[name] = make(shape)
        except ImportError:
            print(f"{name} is not installed and left out")
    return made


def _transformers(shape: Shape) -> nn.Module:
    theirs = import_module("transformers")
    sizes = {"n_embd": shape.model, "n_head": shape.heads, "n_layer": shape.layers, "n_positions": shape.length}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return theirs.GPT2LMHeadModel(theirs.GPT2Config(vocab_size=shape.tokens, use_cache=False, **sizes, **drops))


def _x_transformers(shape: Shape) -> nn.Module:
    theirs = import_module("x_transformers")
    layers = theirs.Decoder(dim=shape.model, depth=shape.layers, heads=shape.heads, attn_flash=True)
    return theirs.TransformerWrapper(
        num_tokens=shape.tokens, max_seq_len=shape.length, attn_layers=layers, tie_embedding=True
    )


def logits_of(said: object) -> Tensor:
    """Logits, bare or inside what transformers returns."""
    return said if isinstance(said, Tensor) else said.logits


def step(net: nn.Module, shape: Shape, rows: int, dtype: torch.dtype) -> Callable[[], None]:
    """One training step on the same ids every time."""
    ids, labels = torch.randint(shape.tokens, (2, rows, shape.length), generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            said = logits_of(net(ids))
        loss = F.cross_entropy(said.float().flatten(0, 1), labels.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()

    return run


def main() -> list[dict[str, object]]:
    """Rows of the table, one for each shape and precision."""
    rows = []
    for shape, batch in ROWS.items():
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            nets = {"ours": hw.build(described(shape)), **peers(shape)}
            runs = {name: step(net.train(), shape, batch, dtype) for name, net in nets.items()}
            size = sum(p.numel() for p in nets["ours"].parameters())
            name = f"training step, {size / 1e6:.1f} M, {str(dtype).removeprefix('torch.')}"
            rows.append(interleaved(Case(name, runs.pop("ours"), runs), repeats=9, calls=4))
    return rows
