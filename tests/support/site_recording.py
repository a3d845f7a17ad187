"""Recording of the inputs and weights of attention sites while a model runs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from headwise.observe.inspect.adapters import known_interfaces
from headwise.observe.inspect.attention_sites import find_attention
from headwise.observe.inspect.hooks import AttentionHook, install_hooks
from headwise.observe.inspect.site import AttentionInputs


class InputRecorder(AttentionHook):
    """A hook that records the inputs of an attention."""

    def __init__(self) -> None:
        self.seen: list[AttentionInputs] = []

    def on_call(self, inputs: AttentionInputs) -> None:
        self.seen.append(inputs)


@contextmanager
def record_sites(model):
    """Record the inputs of every attention of a model, by site."""
    attentions = find_attention(model)
    recorders = {one.site.name: InputRecorder() for one in attentions}
    hooks = {one.module: (recorders[one.site.name],) for one in attentions}
    with install_hooks(hooks, attentions):
        yield recorders


@contextmanager
def record_eager_weights(monkeypatch: pytest.MonkeyPatch):
    """Record the weights that eager attention functions of transformers return, by module."""
    weights: dict[torch.nn.Module, Tensor] = {}
    original = known_interfaces._call_with_hooks

    def call_with_recording(function, kind, module, *args, **more):
        def also(*a, **k):
            got = function(*a, **k)
            weights[module] = got[1]
            return got

        return original(also, kind, module, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(known_interfaces, "_call_with_hooks", call_with_recording)
        yield weights
