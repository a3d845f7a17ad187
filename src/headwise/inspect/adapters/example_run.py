"""Find attention modules by tracing one run of the model on an example.

The innermost module in which an attention computation begins and ends is the site. Hooks run at the function that
computes attention, so head outputs are changed before any other code uses them, and the names of submodules do not
matter. Attention that is traced but not understood is listed with the reason. The results are stored for these module
objects as long as they live; copies of a module have none.
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
from .module_tracer import AttentionTracer, TracedAttention
from .output_projection import (
    NUM_HEADS_NAMES,
    UNKNOWN_PATTERN,
    HeadSizes,
    is_declared,
    is_within,
    make_site,
    read_positive_int,
)

SEVERAL_ATTENTIONS = (
    "it computes attention several times in one call, so heads cannot be identified; declare it with hw.declare"
)
NESTED_ATTENTION = "it computes attention, and so does a module within it"
UNUSED_WEIGHTS = "no values are multiplied with the output of its softmax, so it is unknown what its weights apply to"


class AttentionLayout(NamedTuple):
    """Heads and pattern of a traced attention module; `reason` if its attention is not understood."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    pattern: str
    reason: str = ""


_LAYOUTS: WeakKeyDictionary[nn.Module, AttentionLayout] = WeakKeyDictionary()


class TracedAdapter(SiteAdapter):
    """Modules with traced attention that is understood."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        for path, module, layout in _known_layouts(model):
            if not layout.reason:
                module_tracer.override_forward(module, _run_traced)
                sizes = HeadSizes(layout.num_heads, layout.num_kv_heads, layout.head_dim)
                ability = module_tracer.hook_ability(module)
                yield SiteModule(
                    make_site(path, module, sizes, pattern=layout.pattern, observe=ability, ablate=ability),
                    module,
                    self,
                )

    def patches(self) -> list[MethodPatch]:
        return module_tracer.make_patches(_run_traced)


class UnclearTraceAdapter(SiteAdapter):
    """Modules with traced attention that is not understood; they are listed, but have no abilities."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        for path, module, layout in _known_layouts(model):
            if layout.reason:
                impossible = Ability(False, layout.reason)
                sizes = HeadSizes(layout.num_heads, layout.num_kv_heads, layout.head_dim)
                yield SiteModule(
                    make_site(path, module, sizes, pattern=UNKNOWN_PATTERN, observe=impossible, ablate=impossible),
                    module,
                    self,
                )

    def patches(self) -> list[MethodPatch]:
        return []


def _known_layouts(model: nn.Module) -> Iterator[tuple[str, nn.Module, AttentionLayout]]:
    """Traced layouts of the modules of a model; declared modules take precedence and are skipped."""
    modules = dict(model.named_modules(remove_duplicate=False))
    declared = [path for path, module in modules.items() if is_declared(module)]
    for path, module in modules.items():
        if module in _LAYOUTS and not any(is_within(path, other) or is_within(other, path) for other in declared):
            yield path, module, _LAYOUTS[module]


def _run_traced(
    module: nn.Module, run: module_tracer.ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Forward of a hooked module; it must compute attention once, with the same heads as when it was traced."""
    hooks = get_hooks(module)
    if not hooks:
        return run(*args, **kwargs)
    heads, num_traced = _LAYOUTS[module].num_heads, 0

    def on_attention(traced: TracedAttention) -> Tensor | None:
        nonlocal num_traced
        num_traced += 1
        if traced.call is None or traced.z_BTHV is None or traced.z_BTHV.shape[2] != heads or num_traced > 1:
            raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
        for hook in hooks:
            if hook.needs_call:
                hook.on_call(traced.call)
        return run_output_hooks(hooks, traced.z_BTHV)

    with AttentionTracer(on_attention):
        result = run(*args, **kwargs)
    if not num_traced:
        raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
    return result


_CHANGED_LAYOUT = (
    "does not compute attention as it did when traced; call hw.sites(model, example) with an example like this input"
)


def trace_example(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a model with these arguments, and store the layout of each module that computes attention."""
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in train mode, where a run changes its state; call model.eval() first")
    example_trace = ExampleTrace()
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad(), example_trace.tracing() as tracer:
        try:
            model(*args, **kwargs)
        except Exception as error:  # the model may raise anything
            message = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{type(model).__name__} cannot run on this example: {message}") from error
    for softmax_call in tracer.softmax_calls:
        owners = [
            module for module in softmax_call.running_modules if not type(module).__module__.startswith("torch.nn.")
        ]
        if (
            owners
            and not softmax_call.has_output
            and softmax_call.num_axes == 4
            and owners[-1] not in example_trace.layouts
        ):
            example_trace.layouts[owners[-1]] = AttentionLayout(0, 0, 0, UNKNOWN_PATTERN, UNUSED_WEIGHTS)
    _LAYOUTS.update(example_trace.layouts)


@dataclass
class ModuleFrame:
    """One running call of a module: attention computed by itself, and the number computed by modules within it."""

    module: nn.Module
    layouts: list[AttentionLayout]
    num_nested: int = 0


class ExampleTrace:
    """Traces which modules compute attention during one run of a model."""

    def __init__(self) -> None:
        self.frames: list[ModuleFrame] = []
        self.running_modules: list[nn.Module] = []
        self.layouts: dict[nn.Module, AttentionLayout] = {}
        self.thread = get_ident()

    @contextmanager
    def tracing(self) -> Iterator[AttentionTracer]:
        """Context in which module calls of this thread are traced."""
        handles = [register_module_forward_pre_hook(self.enter)]
        try:
            handles.append(register_module_forward_hook(self.leave, always_call=True))
            with AttentionTracer(self.record, running_modules=self.running_modules) as tracer:
                yield tracer
        finally:
            for handle in handles:
                handle.remove()

    def enter(self, module: nn.Module, _: Any) -> None:
        """Forward pre-hook: a module call begins."""
        if get_ident() == self.thread:
            self.frames.append(ModuleFrame(module, []))
            self.running_modules.append(module)

    def leave(self, module: nn.Module, _: Any, result: Any) -> None:
        """Forward hook: a module call ends or raises."""
        if get_ident() != self.thread or module is not self.running_modules[-1]:
            return
        frame = self.frames.pop()
        self.running_modules.pop()
        if not frame.layouts:
            return
        layout = frame.layouts[0]
        if len(frame.layouts) > 1:
            layout = layout._replace(reason=SEVERAL_ATTENTIONS)
        elif frame.num_nested:
            layout = layout._replace(reason=NESTED_ATTENTION)
        self.layouts[module] = _merge_layouts(self.layouts.get(module, layout), layout)

    def record(self, traced: TracedAttention) -> None:
        """Store a traced attention with the module that computed it."""
        if not traced.depth:
            return
        frame = self.frames[traced.depth - 1]
        frame.layouts.append(_layout_of(frame.module, traced))
        for outer in self.frames[: traced.depth - 1]:
            outer.num_nested += 1


def _layout_of(module: nn.Module, traced: TracedAttention) -> AttentionLayout:
    if traced.call is None or traced.z_BTHV is None:
        return AttentionLayout(read_positive_int(module, NUM_HEADS_NAMES), 0, 0, UNKNOWN_PATTERN, traced.reason)
    heads, declared_heads = traced.z_BTHV.shape[2], read_positive_int(module, NUM_HEADS_NAMES)
    kv, dim = traced.num_kv_heads or heads, traced.head_dim or traced.z_BTHV.shape[3]
    reason = (
        f"its attributes declare {declared_heads} heads, but it computes attention with {heads}"
        if declared_heads and declared_heads != heads
        else ""
    )
    return AttentionLayout(heads, kv, dim, _pattern_of_call(traced.call), reason)


def _pattern_of_call(call: AttentionCall) -> str:
    """Attention pattern as far as one call shows it."""
    if isinstance(call, AttentionInputs) and call.mask is None:
        return "causal()" if call.causal else "full()"
    attended = (call.weights if isinstance(call, WeightsOnlyCall) else call.head_weights(0)) > 0
    if bool(attended.all()):
        return "full()"
    is_square = attended.shape[-1] == attended.shape[-2]
    return (
        "causal()" if is_square and torch.equal(attended, attended.new_ones(attended.shape).tril()) else UNKNOWN_PATTERN
    )


def _merge_layouts(first: AttentionLayout, second: AttentionLayout) -> AttentionLayout:
    """Merge the layouts of two calls of one module."""
    if first.reason or second.reason or first[:3] != second[:3]:
        return first._replace(reason=first.reason or second.reason or "its heads differ from call to call")
    return first if first == second else first._replace(pattern=UNKNOWN_PATTERN)
