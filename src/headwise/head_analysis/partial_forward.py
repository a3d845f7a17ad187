"""Repeated forward passes of one text with different heads edited: in full, or from the edited layer on."""

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

# Arguments of a headwise model with which a forward pass can restart midway.
STACK_ARGUMENTS = frozenset({"x", "sequence", "source", "source_sequence"})


class HeadAblationHook:
    """Hook that sets the outputs of some heads to zero, and counts the heads of the site."""

    needs_call = False

    def __init__(self, *heads: int) -> None:
        self.ablated_heads = list(heads)
        self.num_heads = 0

    def on_call(self, call: AttentionCall) -> None:
        """Do nothing: weights are not needed."""

    def on_head_outputs(self, outputs: Tensor) -> Tensor:
        """Head outputs [..., heads, channels] with the ablated heads set to zero."""
        self.num_heads = outputs.shape[-2]
        ablated = outputs.clone()
        ablated[..., self.ablated_heads, :] = 0
        return ablated


class HeadOutputCapture:
    """Hook that keeps head outputs, for gradients with respect to them."""

    needs_call = False

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_call(self, call: AttentionCall) -> None:
        """Do nothing: weights are not needed."""

    def on_head_outputs(self, outputs: Tensor) -> Tensor:
        """Keep the outputs; they become leaves of the graph if nothing before them requires gradients."""
        outputs = outputs if outputs.requires_grad else outputs.detach().requires_grad_()
        self.outputs.append(outputs)
        return outputs


class RepeatedForward:
    """Runs a model on one text again and again, with different hooks at its attention sites."""

    is_partial = False

    def __init__(self, model: nn.Module, sites: Sequence[SiteModule], inputs: ModelInputs) -> None:
        self.model, self.sites, self.inputs = model, sites, inputs
        self._head_counters = {module.site.name: HeadAblationHook() for module in sites}
        self._baseline: list[Any] = []

    @property
    def baseline_outputs(self) -> Any:
        """Outputs of the unedited model, computed on first access."""
        if not self._baseline:
            self._baseline.append(self._run_baseline(self._head_counters))
        return self._baseline[0]

    @property
    def head_counts(self) -> dict[str, int]:
        """Number of heads of each site that the text reaches."""
        _ = self.baseline_outputs
        return {name: counter.num_heads for name, counter in self._head_counters.items() if counter.num_heads}

    def _run_baseline(self, hooks: Mapping[str, AttentionHook]) -> Any:
        return self.run_with_hooks(hooks)

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """Outputs of the model with these hooks, by site name."""
        return ModelRun(self.model, self.inputs).run_with_hooks(self.sites, hooks)

    def run_with_gradients(self, hooks: Mapping[str, AttentionHook]) -> Any:
        """Outputs of the model with these hooks, with the graph for gradients."""
        with hook_sites(self.model, self.sites, hooks), torch.enable_grad():
            return ModelRun(self.model, self.inputs).run()


class PartialForward(RepeatedForward):
    """Repeated forward passes of a headwise model that keep the input of every layer and restart at the first edited
    one.
    """

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
        h: Tensor | None = None
        source_sequence = None
        stack_inputs = _stack_inputs(self.inputs.kwargs)[-len(stacks) :]
        for stack, (ids, tokens) in zip(stacks, stack_inputs, strict=True):
            name, (x, types) = stack.spec.name, stack.embed(ids)
            sequence = resolve_sequence(x, tokens, None)
            call = LayerInputs(sequence, None, None, source_sequence, self.model_network.probes)
            self.calls[name] = _layer_calls(stack, call, h)
            embedded = stack.place(x, sequence, types)
            h = _run_layers(stack, self.calls[name], embedded, self.layer_inputs[name].append)
            source_sequence = sequence
        assert h is not None
        return self._apply_head(h)

    def run_with_hooks(self, hooks: Mapping[str, AttentionHook]) -> Tensor:
        """Outputs of the model with these hooks, computed from the first hooked layer on."""
        sites = {module.site.name: module.site for module in self.sites}
        stack_names = [stack.spec.name for stack in self.stacks]
        _ = self.baseline_outputs  # fills `calls` and `layer_inputs`
        first_stack, first_layer = min((stack_names.index(sites[name].stack), sites[name].layer) for name in hooks)
        with hook_sites(self.model, self.sites, hooks), torch.inference_mode():
            return self._run_from_layer(self.stacks[first_stack:], first_layer)

    def _run_from_layer(self, stacks: Sequence[LayerStack], first_layer: int) -> Tensor:
        """Run from a layer of the first of these stacks on; a following stack reads its new outputs."""
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
    """Run the layers of a stack from `start` on, and its norm; `keep` receives the input of each layer."""
    for layer, call in zip(stack.blocks[start:], calls[start:], strict=True):
        keep(h)
        h = layer(h, call)
    return h if stack.norm is None else stack.norm(h)


def _layer_calls(stack: LayerStack, call: LayerInputs, states: Tensor | None) -> list[LayerInputs]:
    """Inputs of each layer beside the hidden states; keys and values of another stack's states are projected once."""
    if states is None:
        return [call] * stack.depth
    assert call.told is not None
    return [call._replace(source=layer.remember(states, call.told)) for layer in stack.blocks]


def _stack_inputs(kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Ids and sequence information of the source stack and of the text stack."""
    return [(kwargs.get("source"), kwargs.get("source_sequence")), (kwargs["x"], kwargs.get("sequence"))]


def make_forward(model: nn.Module, sites: Sequence[SiteModule], inputs: ModelInputs) -> RepeatedForward:
    """Return a forward pass that can be repeated: restarted midway for a headwise model, else run in full."""
    if isinstance(model, Transformer) and not inputs.args and inputs.kwargs.keys() <= STACK_ARGUMENTS:
        return PartialForward(model, sites, inputs)
    return RepeatedForward(model, sites, inputs)
