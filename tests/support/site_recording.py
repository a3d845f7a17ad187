"""Recording what attention sites read and which weights they compute while a model runs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from headwise.inspect.adapters import transformers_interface
from headwise.inspect.attention_sites import find_attention
from headwise.inspect.hooks import AttentionInputs, install_hooks


class Keep:
    """A watcher that keeps what an attention worked with."""

    needs_call = True

    def __init__(self) -> None:
        self.seen: list[AttentionInputs] = []

    def on_call(self, seen: AttentionInputs) -> None:
        self.seen.append(seen)

    def on_head_outputs(self, z: Tensor) -> None:
        return None


@contextmanager
def looked(model):
    those = find_attention(model)
    keeps = {one.site.name: Keep() for one in those}
    stands = [stand for route in {one.adapter for one in those} for stand in route.patches()]
    with install_hooks({one.module: (keeps[one.site.name],) for one in those}, stands):
        yield keeps


@contextmanager
def own_weights(monkeypatch: pytest.MonkeyPatch):
    """What eager functions of the interface give as weights, by module."""
    given: dict[torch.nn.Module, Tensor] = {}
    original = transformers_interface._call_with_hooks

    def noting(function, kind, module, *said, **more):
        def also(*a, **k):
            got = function(*a, **k)
            given[module] = got[1]
            return got

        return original(also, kind, module, *said, **more)

    with monkeypatch.context() as patched:
        patched.setattr(transformers_interface, "_call_with_hooks", noting)
        yield given
