"""The cores of heads that are mixed at every pair: dynamically composed ones, and talking heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import backends
from ...backends import Inputs, Job
from ...module import Attention
from ...presets import design
from ...spec import AttentionSpec
from ...terms import Asked
from ...tokens import Sight, Tokens
from .. import published_dcmha as published
from ..case import Aim, Case, Need, Run

TITLE = "Cores of heads that are mixed at every pair: 16 heads of 64, causal"
HEADS, DIM, TOKENS = 16, 64, 1024
FLASH, PUBLISHED = "plain heads, SDPA", "DCMHA as published (plain PyTorch)"
SHARE = 1 / 3  # at most three times as long as the core of plain heads


def cases(quick: bool) -> Iterator[Case]:
    """Forward, and forward with backward, beside the core of as many plain heads."""
    yield _dcmha(backward=False)
    yield _dcmha(backward=True)
    yield _talking()


class Core:
    """The core of one spec on given queries, keys, values and factors; its gradients go to all of these."""

    def __init__(self, spec: AttentionSpec, tokens: int) -> None:
        torch.manual_seed(0)
        self.layer = Attention(spec)
        with torch.no_grad():  # composition starts next to none
            for parameter in self.layer.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        self.x, self.at = torch.randn(1, tokens, spec.model), Tokens.run(0, tokens, "cpu")
        self.qkv = [torch.randn(1, tokens, HEADS, DIM).requires_grad_() for _ in range(3)]
        self.entry = self._entry()
        self.grad = torch.randn(1, tokens, HEADS, DIM)
        self.job = Job(spec, spec.core, grad=True)
        self.backend = backends.choose(self.job)

    def _entry(self) -> dict[str, Tensor]:
        """What keys bring beside themselves."""
        held = {}
        with torch.no_grad():
            for name, mix, p in self.layer.mixes:
                held |= {f"{name}.{key}": factor for key, factor in mix.remember(self.x, p).items()}
        return {name: factor.clone().requires_grad_() for name, factor in held.items()}

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients are asked of."""
        own = [p for name, p in self.layer.named_parameters() if name.split(".")[-1] in ("mixing", *_QUERY)]
        return [*self.qkv, *self.entry.values(), *own]

    def run(self) -> Tensor:
        """o_BTHV."""
        q, k, v = self.qkv
        inputs = Inputs(q, k, v, Asked(self.x, q, self.job.core.scale, self.at), self.entry, {})
        sight = Sight(self.at, self.at, self.job.spec.pattern)
        return self.backend.attend(self.job, sight, inputs, self.layer.bound, None)

    def kept(self) -> int:
        """Bytes that it keeps for the way back, each storage once."""
        held: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            made = self.run()
        assert made.requires_grad
        return sum(held.values())


_QUERY = tuple(f"query_{name}" for name in ("hidden", "source", "target", "gate"))


def _dcmha(backward: bool) -> Case:
    spec = design(preset="dcmha", model=HEADS * DIM, heads=HEADS)
    core = Core(spec, TOKENS)
    title = f"DCMHA core, {TOKENS:,} tokens, {'forward and backward' if backward else 'forward'}"
    runs = {"ours": core.run, FLASH: lambda: _plain(core), PUBLISHED: lambda: _published(core)}
    return _case(title, core, runs, backward, _growth(spec) if backward else {})


def _talking() -> Case:
    spec = design(preset="talking", model=HEADS * DIM, heads=HEADS, pattern="causal()")
    core = Core(spec, TOKENS)
    mixing = [p for name, p in core.layer.named_parameters() if name.endswith("mixing")]
    runs = {"ours": core.run, FLASH: lambda: _plain(core)}
    runs["talking heads by hand (plain PyTorch)"] = lambda: _talked(core, mixing)
    return _case(f"talking heads core, {TOKENS:,} tokens, forward and backward", core, runs, True, _growth(spec))


def _case(name: str, core: Core, runs: dict[str, Callable[[], Tensor]], backward: bool, notes: dict[str, str]) -> Case:
    held = {who: _both(run, core, who) if backward else _forward(run) for who, run in runs.items()}
    ours = held.pop("ours")
    products = core.job.core.flops(TOKENS * (TOKENS + 1) // 2)
    need = Need(flops=7 * products // 2 if backward else products)
    aims = (Aim(FLASH, SHARE),) if backward else ()
    return Case(name, ours, {**held}, aims, need, notes=notes, beside=(FLASH,))


def _forward(run: Callable[[], Tensor]) -> Run:
    def made() -> Tensor:
        with torch.no_grad():
            return run()

    return made


def _both(run: Callable[[], Tensor], core: Core, who: str) -> Run:
    """Every gradient; of plain heads, those they have."""
    leaves = core.qkv if who == FLASH else core.leaves
    return lambda: torch.autograd.grad(run(), leaves, core.grad)


def _plain(core: Core) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in core.qkv)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _published(core: Core) -> Tensor:
    pairs: list[Any] = []
    for name, _, p in core.layer.mixes:
        kept = published.Factors(*(core.entry[f"{name}.{key}"] for key in published.Factors._fields))
        pairs.append((published.branch(p)(core.x), kept))
    return published.attention(core.qkv, pairs[0], pairs[1])


def _talked(core: Core, mixing: list[Tensor]) -> Tensor:
    """a' = P^T a on the scores, and again on the weights (2003.02436)."""
    q, k, v = (t.transpose(1, 2) for t in core.qkv)
    a = torch.einsum("bgts,gh->bhts", q @ k.mT * DIM**-0.5, mixing[0])
    later = torch.ones(a.shape[-2:], dtype=torch.bool).triu(1)
    w = torch.einsum("bgts,gh->bhts", a.masked_fill(later, torch.finfo(a.dtype).min).softmax(-1), mixing[1])
    return (w @ v).transpose(1, 2)


def _growth(spec: AttentionSpec) -> dict[str, str]:
    """What is kept at one length and at twice that."""
    short, long = (Core(spec, count).kept() / 1e6 for count in (TOKENS, 2 * TOKENS))
    return {"memory": f"keeps {short:.1f} MB for the way back at {TOKENS:,} tokens, {long:.1f} MB at {2 * TOKENS:,}"}
