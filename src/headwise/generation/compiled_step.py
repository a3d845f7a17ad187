"""Compile the decode step into one graph when enough steps are requested to repay it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SpecError
from ..models.transformer import Transformer

DecodeStep = Callable[..., Tensor]
CompileReporter = Callable[["CompileDecision"], object]
COMPILERS = ("c++", "g++", "clang++")
# Measured on two cores (log/2026-11-22-fast-models.md): processor seconds of a graph, and of each layer of it; and
# seconds a step that it saves for each layer in float32. In bfloat16, whose small operations are slow, it saves more.
COMPILE_SECONDS, SECONDS_SAVED_PER_LAYER = (22.0, 2.4), 0.08e-3


@dataclass(frozen=True)
class CompileDecision:
    """Whether decode steps are compiled, and why."""

    should_compile: bool
    reason: str


UNEQUAL_LENGTHS = CompileDecision(False, "not compiled: rows are of several lengths")
MIXED_REQUESTS = CompileDecision(False, "not compiled: requests of several lengths are answered together")


def ignore_decision(decision: CompileDecision) -> None:
    """A reporter that does nothing."""


def decide_compile(net: Transformer, mode: str, num_steps: int) -> CompileDecision:
    """Decide whether up to `num_steps` steps are compiled in mode "on", "off" or "auto"; "on" raises if it cannot.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> decide_compile(hw.build(hw.families.read_model_spec(config)), "off", 64)
    CompileDecision(should_compile=False, reason='not compiled: compile is off')
    """
    if mode == "off":
        return CompileDecision(False, "not compiled: compile is off")
    if reason := find_compile_obstacle(net):
        if mode == "on":
            raise SpecError(f"steps cannot be compiled: {reason}; leave compile out, or give compile='auto'")
        return CompileDecision(False, f"not compiled: {reason}")
    if mode == "on":
        return CompileDecision(True, "compiled: compile is on")
    return estimate_compile_gain(len(list(net.stacks.values())[-1].blocks), num_steps)


def find_compile_obstacle(net: Transformer) -> str:
    """Return why steps of this model cannot be compiled here, or an empty string."""
    if next(net.parameters()).device.type == "cpu" and not any(shutil.which(name) for name in COMPILERS):
        return "there is no C++ compiler"
    if net.probes:
        return "probes observe its attention"
    return ""


def estimate_compile_gain(num_layers: int, num_steps: int) -> CompileDecision:
    """Decide whether compiling saves more time over `num_steps` steps than it takes.

    >>> estimate_compile_gain(12, 64)
    CompileDecision(should_compile=False, reason='not compiled: 64 steps could gain about 0.1 s, compiling takes about
    51 s')
    >>> estimate_compile_gain(12, 100_000).should_compile
    True
    """
    gain, cost = num_steps * num_layers * SECONDS_SAVED_PER_LAYER, COMPILE_SECONDS[0] + COMPILE_SECONDS[1] * num_layers
    estimate = f"{num_steps} steps could gain about {gain:.1f} s, compiling takes about {cost:.0f} s"
    return CompileDecision(gain > cost, f"{'compiled' if gain > cost else 'not compiled'}: {estimate}")


def compile_decode_step(net: Transformer) -> DecodeStep:
    """Return the compiled forward pass for one token per row: one graph for any position, capacity and rows above one.

    Call it only if `cache.is_predictable`, and after one uncompiled step. That step computes what layers determine on
    their first run, so that nothing is recompiled.
    """
    return torch.compile(net.forward, dynamic=True, fullgraph=True)
