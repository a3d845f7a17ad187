"""One text on its way through a model, again and again with other heads: whole, or from the layer that is edited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.hooks import AttentionCall, AttentionHook, SiteModule
from ..inspect.model_inputs import ModelInputs
from ..inspect.site_hooks import ModelRun, hook_sites
from ..models import Transformer
from ..models.block import LayerInputs, LayerStack
from ..models.transformer import resolve_sequence

STACK_ARGUMENTS = frozenset(
    {"x", "sequence", "source", "source_sequence"}
)  # what a model of ours is told that can go on midway


class HeadAblationHook:
    """A watcher that makes some heads say nothing, and counts how many there are."""

    needs_call = False

    def __init__(self, *heads: int) -> None:
        self.ablated_heads = list(heads)
        self.num_heads = 0

    def on_call(self, call: AttentionCall) -> None:
        """Nothing to look at."""

    def on_head_outputs(self, outputs: Tensor) -> Tensor:
        """The same without these."""
        self.num_heads = outputs.shape[-2]
        other = outputs.clone()
        other[..., self.ablated_heads, :] = 0
        return other


class HeadOutputCapture:
    """A watcher that keeps what heads say, for gradients to be taken at."""

    needs_call = False

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_call(self, call: AttentionCall) -> None:
        """Nothing to look at."""

    def on_head_outputs(self, outputs: Tensor) -> Tensor:
        """The same, kept; where nothing before it is learned, it is where gradients begin."""
        outputs = outputs if outputs.requires_grad else outputs.detach().requires_grad_()
        self.outputs.append(outputs)
        return outputs


class RepeatedForward:
    """A model, its sites and one text: what it says, and what it says with watchers at some sites."""

    is_partial = False

    def __init__(self, model: nn.Module, sites: Sequence[SiteModule], inputs: ModelInputs) -> None:
        self.model, self.sites, self.inputs = model, sites, inputs
        self._counting = {one.site.name: HeadAblationHook() for one in sites}
        self._plain: list[Any] = []

    @property
    def baseline_outputs(self) -> Any:
        """What the model says unedited; it is run when this is first asked for."""
        if not self._plain:
            self._plain.append(self._run_baseline(self._counting))
        return self._plain[0]

    @property
    def head_counts(self) -> dict[str, int]:
        """How many heads there are at each site that the text reaches."""
        _ = self.baseline_outputs
        return {name: one.num_heads for name, one in self._counting.items() if one.num_heads}

    def _run_baseline(self, hooks: Mapping[str, AttentionHook]) -> Any:
        return self.run_with_hooks(hooks)

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """What the model says while these watch."""
        return ModelRun(self.model, self.inputs).run_with_hooks(self.sites, hooks)

    def run_with_gradients(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """The same with what gradients need."""
        with hook_sites(self.model, self.sites, hooks), torch.enable_grad():
            return ModelRun(self.model, self.inputs).run()


class PartialForward(RepeatedForward):
    """The same of a model of ours: the input of every layer is kept, and a run begins at the first that is edited."""

    is_partial = True

    def __init__(self, model: Transformer, sites: Sequence[SiteModule], inputs: ModelInputs) -> None:
        self.model_network, self.stacks = model, list(model.stacks.values())
        super().__init__(model, sites, inputs)

    def _run_baseline(self, hooks: Mapping[str, AttentionHook]) -> Tensor:
        self.layer_inputs: dict[str, list[Tensor]] = {stack.spec.name: [] for stack in self.stacks}
        self.calls: dict[str, list[LayerInputs]] = {}
        with hook_sites(self.model, self.sites, hooks), torch.inference_mode():
            return self._run_from_start(self.stacks)

    def _run_from_start(self, stacks: Sequence[LayerStack]) -> Tensor:
        names, told = self.inputs.kwargs, None
        h: Tensor | None = None
        for stack, (ids, tokens) in zip(stacks, _stack_inputs(names)[-len(stacks) :], strict=True):
            name, (x, types) = stack.spec.name, stack.embed(ids)
            at = resolve_sequence(x, tokens, None)
            self.calls[name] = _layer_calls(stack, LayerInputs(at, None, None, told, self.model_network.probes), h)
            h, told = (
                _run_layers(stack, self.calls[name], stack.place(x, at, types), self.layer_inputs[name].append),
                at,
            )
        assert h is not None
        return self._apply_head(h)

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Tensor:
        """What the model says while these watch, from the first layer on at which anybody does."""
        named = {one.site.name: one.site for one in self.sites}
        where = {name: (named[name].stack, named[name].layer) for name in hooks}
        order = [stack.spec.name for stack in self.stacks]
        _ = self.baseline_outputs  # which keeps what is gone on from
        first, depth = min((order.index(stack), layer) for stack, layer in where.values())
        with hook_sites(self.model, self.sites, hooks), torch.inference_mode():
            return self._run_from_layer(self.stacks[first:], depth)

    def _run_from_layer(self, stacks: Sequence[LayerStack], first_layer: int) -> Tensor:
        """From a layer of the first of these stacks on; the next reads what that says now."""
        name = stacks[0].spec.name
        h = _run_layers(stacks[0], self.calls[name], self.layer_inputs[name][first_layer], start=first_layer)
        for stack in stacks[1:]:
            name = stack.spec.name
            h = _run_layers(stack, _layer_calls(stack, self.calls[name][0], h), self.layer_inputs[name][0])
        return self._apply_head(h)

    def _apply_head(self, h: Tensor) -> Tensor:
        return self.model_network.read(h, sequence=self.inputs.kwargs.get("sequence"))


def _run_layers(
    stack: LayerStack, calls: Sequence[LayerInputs], h: Tensor, keep: Callable[[Tensor], object] = id, start: int = 0
) -> Tensor:
    """Through the layers of a stack from one of them on, and its norm; `keep` is handed the input of each."""
    for layer, call in zip(stack.blocks[start:], calls[start:], strict=True):
        keep(h)
        h = layer(h, call)
    return h if stack.norm is None else stack.norm(h)


def _layer_calls(stack: LayerStack, call: LayerInputs, states: Tensor | None) -> list[LayerInputs]:
    """The call of each layer, with what it reads of another stack projected once."""
    if states is None:
        return [call] * stack.depth
    assert call.told is not None
    return [call._replace(source=layer.remember(states, call.told)) for layer in stack.blocks]


def _stack_inputs(names: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """What each of two stacks reads, and where that stands."""
    return [(names.get("source"), names.get("source_sequence")), (names["x"], names.get("sequence"))]


def make_forward(model: nn.Module, sites: Sequence[SiteModule], inputs: ModelInputs) -> RepeatedForward:
    """A text on its way; one that is begun again midway where the model is ours."""
    if isinstance(model, Transformer) and not inputs.args and inputs.kwargs.keys() <= STACK_ARGUMENTS:
        return PartialForward(model, sites, inputs)
    return RepeatedForward(model, sites, inputs)
