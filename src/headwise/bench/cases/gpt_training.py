"""Steps of training one GPT: ours, the same written plainly, and those of other libraries.

Everybody takes the same step: forward, cross entropy, backward, clipping, fused AdamW, at the same precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models import build
from ..benchmark_case import BenchmarkCase, MissingPeer, RequiredWork, SpeedTarget, TimedCall, make_peer
from ..reference_models import GPTShape, PlainGPT, to_model_spec

TITLE = "Steps of training a GPT"
SMALL_GPT, LARGE_GPT = GPTShape(), GPTShape(tokens=512, length=256, layers=6, heads=6, model=384)
HANDWRITTEN, HANDWRITTEN_COMPILED = "written plainly", "written plainly, compiled"
HISTORY = (
    "Joining q, k and v for each call takes 0.79 to 0.91 of three products in bf16; whole products of matrices instead "
    "of the fused call took bf16 steps from 0.96 and 0.98 to 1.17 and 1.52 times as fast as plain. In fp32 a small "
    "step is 0.96 to 0.98, with q, k and v joined 0.97, with tiles from 60 keys on as well 0.98: operations take as "
    "long, and 0.2 ms a layer lie between those of the forward. See log/2026-11-22-fast-halves.md."
)


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Two sizes in two precisions; the larger one compiled as well, unless it is to be quick."""
    for shape, rows in ((SMALL_GPT, 12), (LARGE_GPT, 4)):
        for dtype in (torch.float32, torch.bfloat16):
            yield _case(shape, rows, dtype, compiled=False)
    if not quick:
        yield _case(LARGE_GPT, 4, torch.bfloat16, compiled=True)


def _case(shape: GPTShape, rows: int, dtype: torch.dtype, *, compiled: bool) -> BenchmarkCase:
    torch.manual_seed(0)
    own = build(to_model_spec(shape), seed=0)
    size = sum(p.numel() for p in own.parameters())

    def run(net: nn.Module) -> TimedCall:
        return _training_step(torch.compile(net, dynamic=False) if compiled else net, shape, rows, dtype)

    peers: dict[str, TimedCall | MissingPeer] = {
        HANDWRITTEN_COMPILED if compiled else HANDWRITTEN: run(PlainGPT(shape))
    }
    if not compiled:
        peers["transformers GPT-2"] = make_peer("transformers", lambda library: run(_transformers_gpt2(library, shape)))
        peers["x-transformers"] = make_peer(
            "x_transformers", lambda library: run(_x_transformers_decoder(library, shape))
        )
    kind = f"{'float32' if dtype == torch.float32 else 'bfloat16'}{', compiled' if compiled else ''}"
    name = f"training step, {size / 1e6:.1f} M parameters, {kind}"
    # Two FLOPs of every parameter that is multiplied with, forward, and twice as many backward.
    need = RequiredWork(flops=6 * rows * shape.length * size, dtype=dtype)
    aims = tuple(SpeedTarget(peer, 1.0) for peer, one in peers.items() if not isinstance(one, MissingPeer))
    notes = {"tokens a step": f"{rows * shape.length:,}"}
    return BenchmarkCase(name, run(own), peers, aims, need, tolerance=None, history=HISTORY, notes=notes)


def _transformers_gpt2(library: Any, shape: GPTShape) -> nn.Module:
    sizes = {"n_embd": shape.model, "n_head": shape.heads, "n_layer": shape.layers, "n_positions": shape.length}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return library.GPT2LMHeadModel(library.GPT2Config(vocab_size=shape.tokens, use_cache=False, **sizes, **drops))


def _x_transformers_decoder(library: Any, shape: GPTShape) -> nn.Module:
    layers = library.Decoder(dim=shape.model, depth=shape.layers, heads=shape.heads, attn_flash=True)
    sizes = {"num_tokens": shape.tokens, "max_seq_len": shape.length}
    return library.TransformerWrapper(**sizes, attn_layers=layers, tie_embedding=True)


def _training_step(net: Callable[..., Any], shape: GPTShape, rows: int, dtype: torch.dtype) -> TimedCall:
    """One step on the same ids every time."""
    assert isinstance(net, nn.Module)
    net.train()
    ids, labels = torch.randint(shape.tokens, (2, rows, shape.length), generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    low = torch.autocast("cpu", dtype) if dtype == torch.bfloat16 else nullcontext()

    def run() -> None:
        with low:
            said = net(ids)
        logits = said if isinstance(said, Tensor) else said.logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()

    return run
