"""Attentions found by what they do: a module that compares, heard in one run of the model on an example.

The innermost module in which a comparison begins and ends is the site. Whatever its parts are called, it is seen at the
function that compares, and what heads say is changed before anything else touches it. What is heard and not understood
is listed with the reason. What was found is known of these modules as long as they live, and of no copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..hooks import (
    AttentionCall,
    AttentionInputs,
    MethodPatch,
    SiteAdapter,
    SiteModule,
    WeightsOnlyCall,
    get_hooks,
    run_output_hooks,
)
from ..site import Ability
from . import module_tracer
from .module_attributes import NUM_HEADS_NAMES, UNKNOWN_PATTERN, HeadSizes, is_within, make_site, read_positive_int
from .module_tracer import AttentionTracer, TracedAttention
from .output_projection import is_declared

SEVERAL_ATTENTIONS = (
    "it compares several times in one call, and headwise does not know which heads are which; hw.declare says it"
)
NESTED_ATTENTION = "it compares, and so does a module within it"
UNUSED_WEIGHTS = "no values are multiplied with what its softmax gives, so that nobody knows what its weights weigh"


class AttentionLayout(NamedTuple):
    """How a module was heard to compare; `why` says what of it is not understood."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    pattern: str
    reason: str = ""


_LAYOUTS: WeakKeyDictionary[nn.Module, AttentionLayout] = WeakKeyDictionary()


class TracedAdapter(SiteAdapter):
    """Modules that were heard to compare, and understood."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        for path, module, manner in _known_layouts(model):
            if not manner.reason:
                module_tracer.override_forward(module, _run_traced)
                sizes = HeadSizes(manner.num_heads, manner.num_kv_heads, manner.head_dim)
                able = module_tracer.hook_ability(module)
                yield SiteModule(
                    make_site(path, module, sizes, pattern=manner.pattern, see=able, silence=able), module, self
                )

    def patches(self) -> list[MethodPatch]:
        return module_tracer.make_patches(_run_traced)


class UnclearTraceAdapter(SiteAdapter):
    """Modules that were heard to compare in a way that is not understood; nothing can be done to them."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        for path, module, manner in _known_layouts(model):
            if manner.reason:
                no = Ability(False, manner.reason)
                sizes = HeadSizes(manner.num_heads, manner.num_kv_heads, manner.head_dim)
                yield SiteModule(
                    make_site(path, module, sizes, pattern=UNKNOWN_PATTERN, see=no, silence=no), module, self
                )

    def patches(self) -> list[MethodPatch]:
        return []


def _known_layouts(model: nn.Module) -> Iterator[tuple[str, nn.Module, AttentionLayout]]:
    """What was heard of modules of a model; what somebody declared goes before it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    said = [path for path, module in modules.items() if is_declared(module)]
    for path, module in modules.items():
        if module in _LAYOUTS and not any(is_within(path, other) or is_within(other, path) for other in said):
            yield path, module, _LAYOUTS[module]


def _run_traced(
    module: nn.Module, run: module_tracer.ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The forward of a module that is watched; it must compare once, as it did when it was found."""
    those = get_hooks(module)
    if not those:
        return run(*args, **kwargs)
    heads, times = _LAYOUTS[module].num_heads, 0

    def told(heard: TracedAttention) -> Tensor | None:
        nonlocal times
        times += 1
        if heard.call is None or heard.z_BTHV is None or heard.z_BTHV.shape[2] != heads or times > 1:
            raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
        for watcher in those:
            if watcher.needs_call:
                watcher.on_call(heard.call)
        return run_output_hooks(those, heard.z_BTHV)

    with AttentionTracer(told):
        result = run(*args, **kwargs)
    if not times:
        raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
    return result


_CHANGED_LAYOUT = "does not compare as when it was found; give hw.sites(model, example) an example like this input"


def trace_example(model: nn.Module, example: Any) -> None:
    """Run a model on an example and remember which of its modules compare, and how."""
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in train mode, where a run would change it; call model.eval() first")
    trial = ExampleTrace()
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad(), trial.tracing() as ear:
        try:
            _run_example(model, example)
        except Exception as error:  # whatever a model raises
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{type(model).__name__} cannot be run on this example: {said}") from error
    for made in ear.softmax_calls:
        owners = [module for module in made.running_modules if not type(module).__module__.startswith("torch.nn.")]
        if owners and not made.has_output and made.num_axes == 4 and owners[-1] not in trial.manners:
            trial.manners[owners[-1]] = AttentionLayout(0, 0, 0, UNKNOWN_PATTERN, UNUSED_WEIGHTS)
    _LAYOUTS.update(trial.manners)


def _run_example(model: nn.Module, example: Any) -> None:
    if isinstance(example, Mapping):
        model(**example)
    else:
        model(*(example if isinstance(example, (tuple, list)) else [example]))


@dataclass
class ModuleFrame:
    """One call of a module: how it compared itself, and how often modules within it did."""

    module: nn.Module
    layouts: list[AttentionLayout]
    num_nested: int = 0


class ExampleTrace:
    """What is heard of the modules of a model while it runs once."""

    def __init__(self) -> None:
        self.frames: list[ModuleFrame] = []
        self.inside: list[nn.Module] = []
        self.manners: dict[nn.Module, AttentionLayout] = {}
        self.thread = get_ident()

    @contextmanager
    def tracing(self) -> Iterator[AttentionTracer]:
        """While this lasts, modules that this thread runs are told apart and heard."""
        ends = [register_module_forward_pre_hook(self.enter)]
        try:
            ends.append(register_module_forward_hook(self.leave, always_call=True))
            with AttentionTracer(self.record, running_modules=self.inside) as ear:
                yield ear
        finally:
            for end in ends:
                end.remove()

    def enter(self, module: nn.Module, _: Any) -> None:
        """A module begins."""
        if get_ident() == self.thread:
            self.frames.append(ModuleFrame(module, []))
            self.inside.append(module)

    def leave(self, module: nn.Module, _: Any, result: Any) -> None:
        """A module ends, or fails."""
        if get_ident() != self.thread or module is not self.inside[-1]:
            return
        frame = self.frames.pop()
        self.inside.pop()
        if not frame.layouts:
            return
        manner = frame.layouts[0]
        if len(frame.layouts) > 1:
            manner = manner._replace(reason=SEVERAL_ATTENTIONS)
        elif frame.num_nested:
            manner = manner._replace(reason=NESTED_ATTENTION)
        self.manners[module] = _merge_layouts(self.manners.get(module, manner), manner)

    def record(self, heard: TracedAttention) -> None:
        """Something was compared."""
        if not heard.depth:
            return
        frame = self.frames[heard.depth - 1]
        frame.layouts.append(_layout_of(frame.module, heard))
        for outer in self.frames[: heard.depth - 1]:
            outer.num_nested += 1


def _layout_of(module: nn.Module, heard: TracedAttention) -> AttentionLayout:
    if heard.call is None or heard.z_BTHV is None:
        return AttentionLayout(read_positive_int(module, NUM_HEADS_NAMES), 0, 0, UNKNOWN_PATTERN, heard.reason)
    heads, says = heard.z_BTHV.shape[2], read_positive_int(module, NUM_HEADS_NAMES)
    kv, dim = heard.num_kv_heads or heads, heard.head_dim or heard.z_BTHV.shape[3]
    why = f"it says that it has {says} heads, and compares {heads}" if says and says != heads else ""
    return AttentionLayout(heads, kv, dim, _pattern_of_call(heard.call), why)


def _pattern_of_call(core: AttentionCall) -> str:
    """Who reads whom, as far as one call shows it."""
    if isinstance(core, AttentionInputs) and core.mask is None:
        return "causal()" if core.causal else "full()"
    read = (core.weights if isinstance(core, WeightsOnlyCall) else core.head_weights(0)) > 0
    if bool(read.all()):
        return "full()"
    square = read.shape[-1] == read.shape[-2]
    return "causal()" if square and torch.equal(read, read.new_ones(read.shape).tril()) else UNKNOWN_PATTERN


def _merge_layouts(one: AttentionLayout, other: AttentionLayout) -> AttentionLayout:
    """How a module compares that was called twice."""
    if one.reason or other.reason or one[:3] != other[:3]:
        return one._replace(reason=one.reason or other.reason or "it compares otherwise each time that it is called")
    return one if one == other else one._replace(pattern=UNKNOWN_PATTERN)
