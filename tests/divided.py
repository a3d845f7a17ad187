"""Models for checks on several ranks, and what is compared with one rank's: outputs, gradients, steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from cases import check_close
from headwise import blueprint as bp
from headwise.spread.tensor import Divided
from headwise.spread.wires import Wire
from headwise.tasks import IGNORED, Batch

MODEL, HEADS, WORDS, STEPS = 16, 4, 11, 3
KINDS = ("decoder", "encoder", "encoder-decoder")
Loss = Callable[[nn.Module, Batch], Tensor]


def spec_of(preset: str, **said) -> hw.AttentionSpec:
    """A preset in a small size."""
    small = {"mla": {"dim": 6, "project": hw.Latent(rank=10, rope=4)}, "bigbird": {"pattern": "bigbird(64)"}}
    return hw.design(preset=preset, **({"model": MODEL, "heads": HEADS} | small.get(preset, {}) | said))


def stack(name: str, blocks, **said) -> bp.Stack:
    """A stack over a table of words with learned positions."""
    table = bp.Embedding(WORDS, positions=bp.Positions("learned", 12))
    return bp.Stack.of(name, MODEL, blocks, **({"embedding": table, "norm": bp.Norm()} | said))


def described(preset: str, kind: str) -> bp.Model:
    """Two layers of a preset: a decoder of vectors, an encoder that says one thing of a row, or both kinds of stack."""
    feed, full = bp.Dense(10, bias="ud"), {} if preset in ("longformer", "bigbird") else {"pattern": "full()"}
    heads = (bp.Head("tokens", WORDS, bias="learned"),)
    if kind == "decoder":
        return bp.Model("one", kind, (stack("decoder", [bp.Block(spec_of(preset), feed=feed)] * 2, embedding=None),), heads)
    encoder = stack("encoder", [bp.Block(spec_of(preset, **full), feed=feed)] * (2 if kind == "encoder" else 1))
    if kind == "encoder":
        return bp.Model("one", kind, (encoder,), (bp.Head("class", 5, at="mean"),))
    cross = spec_of(preset, pattern="full()", source=MODEL)
    return bp.Model("two", kind, (encoder, stack("decoder", [bp.Block(spec_of(preset), cross, feed)])), heads)


def built(model: bp.Model, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> hw.Transformer:
    """The model with no number at the zero or one it starts from; the same on every rank."""
    net = hw.build(model, seed=1, dropout=dropout).to(dtype)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=draw, dtype=torch.float64).to(dtype) * 0.3)
    return net


def batch_of(model: bp.Model, tokens: Mapping[str, hw.Tokens | None] = {}, count: int = 7) -> Batch:
    """Three rows of what a model reads, with labels."""
    draw = torch.Generator().manual_seed(3)
    ids, source = (torch.randint(WORDS, (3, size), generator=draw) for size in (count, 5))
    labels = ids[:, 0] % 5 if model.heads[0].at != "each" else ids.roll(-1, 1)
    x = ids if model.stacks[-1].embedding else torch.randn(3, count, MODEL, generator=draw, dtype=torch.float64)
    two = len(model.stacks) > 1
    return Batch(x, labels, tokens.get("x"), source if two else None, tokens.get("source") if two else None)


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    """The summed cross entropy."""
    logits = net(batch.x, tokens=batch.tokens, source=batch.source, source_tokens=batch.source_tokens)
    return F.cross_entropy(logits.flatten(0, -2), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")


def adamw(net: nn.Module) -> torch.optim.AdamW:
    """The optimiser that steps are taken with; its large eps keeps rounding from moving what has no gradient."""
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def world() -> Wire:
    """Every rank."""
    return Wire(dist.group.WORLD)


def check_gradients(ours: Mapping[str, Tensor], net: nn.Module, **tolerance: float) -> None:
    """Every gradient that one rank finds, of its size among all of them."""
    theirs = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    norm = nn.utils.get_total_norm(list(theirs.values()))
    for name, grad in theirs.items():
        check_close(ours[name] / norm, grad / norm, msg=lambda said, name=name: f"{name}: {said}", **tolerance)


def check_tensor(net: hw.Transformer, part: hw.Transformer, divided: Divided, batch: Batch, loss: Loss = loss_of) -> None:
    """A portion says, learns and becomes what the whole does."""
    steps = [adamw(net), adamw(part)]
    for step in range(STEPS):
        with torch.no_grad():
            given = {"tokens": batch.tokens, "source": batch.source, "source_tokens": batch.source_tokens}
            check_close(part(batch.x, **given), net(batch.x, **given))
        x = [batch.x.clone().requires_grad_(batch.x.is_floating_point()) for _ in range(2)]
        for one, read in zip((net, part), x, strict=True):
            loss(one, Batch(read, *list(vars(batch).values())[1:])).backward()
        if batch.x.is_floating_point():
            check_close(x[1].grad, x[0].grad)
        divided.settle(part)
        check_gradients(divided.whole({n: p.grad for n, p in part.named_parameters() if p.grad is not None}), net)
        check_close(divided.norm(part), nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))
        for one in steps:
            one.step()
            one.zero_grad()
    whole = divided.whole(part.state_dict())
    for name, tensor in net.state_dict().items():
        check_close(whole[name], tensor)
