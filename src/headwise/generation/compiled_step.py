"""Steps of one token as one graph, compiled where so many are asked for that it pays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SpecError
from ..models.transformer import Transformer

Step = Callable[..., Tensor]
Tell = Callable[["Choice"], object]
COMPILERS = ("c++", "g++", "clang++")
# Measured on two cores (log/2026-11-22-fast-models.md): processor seconds of a graph, and of each layer of it; and
# seconds a step that it saves for each layer in float32. In bfloat16, whose small operations are slow, it saves more.
COMPILING, GAIN = (22.0, 2.4), 0.08e-3


@dataclass(frozen=True)
class Choice:
    """Whether steps are compiled, and why."""

    compiled: bool
    reason: str


RAGGED = Choice(False, "not compiled: rows are of several lengths")
TOGETHER = Choice(False, "not compiled: requests of several lengths are answered together")


def unheard(choice: Choice) -> None:
    """What is told to nobody."""


def chosen(net: Transformer, how: str, count: int) -> Choice:
    """Whether up to `count` steps of a model are compiled, as asked by "on", "off" or "auto"; "on" may be refused.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> chosen(hw.build(hw.families.read(config)), "off", 64)
    Choice(compiled=False, reason='not compiled: nobody asked for it')
    """
    if how == "off":
        return Choice(False, "not compiled: nobody asked for it")
    if reason := hindered(net):
        if how == "on":
            raise SpecError(f"steps cannot be compiled: {reason}; leave compile out, or give compile='auto'")
        return Choice(False, f"not compiled: {reason}")
    if how == "on":
        return Choice(True, "compiled: it was asked for")
    return worth(len(list(net.stacks.values())[-1].blocks), count)


def hindered(net: Transformer) -> str:
    """Why steps of this model cannot be compiled here; nothing where they can."""
    if next(net.parameters()).device.type == "cpu" and not any(shutil.which(name) for name in COMPILERS):
        return "there is no C++ compiler"
    if net.probes:
        return "probes look into its attentions"
    return ""


def worth(layers: int, count: int) -> Choice:
    """Whether so many steps of a model of so many layers pay for being compiled.

    >>> worth(12, 64)
    Choice(compiled=False, reason='not compiled: 64 steps could gain about 0.1 s, compiling takes about 51 s')
    >>> worth(12, 100_000).compiled
    True
    """
    gain, cost = count * layers * GAIN, COMPILING[0] + COMPILING[1] * layers
    told = f"{count} steps could gain about {gain:.1f} s, compiling takes about {cost:.0f} s"
    return Choice(gain > cost, f"{'compiled' if gain > cost else 'not compiled'}: {told}")


def compiled(net: Transformer) -> Step:
    """The model for one token of each row behind caches: a graph for any position, any room and any rows above one.

    It may be asked only where `cache.foreseen` says so, behind a step that was not compiled: then what a layer finds
    out when it first runs is known, and nothing is compiled again.
    """
    return torch.compile(net.forward, dynamic=True, fullgraph=True)
