"""Find attention modules by tracing one run of the model on an example.

The innermost module in which an attention computation begins and ends is the site. Hooks run at the
function that computes attention, so head outputs are changed before any other code uses them, and
the names of submodules do not matter. Attention that is traced but not understood is listed with
the reason. The results are stored for these module objects as long as they live; copies of a module
have none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..hooks import SiteModule, get_hooks, install_hooks, run_call_hooks
from ..method_patches import ForwardOverride, Function
from ..observed_call import AttentionInputs, ObservedCall, WeightsOnlyCall
from ..site import Ability
from . import module_tracer
from .declarations import get_declaration
from .module_tracer import BATCH_FIRST, AttentionTracer, JointAxis, TracedAttention, find_joint_axis
from .output_path import (
    edit_behind_function,
    edit_place,
    projection_overrides,
    without_compile_warning,
)
from .output_projection import (
    NUM_HEADS_NAMES,
    UNKNOWN_PATTERN,
    HeadSizes,
    is_within,
    make_site,
    read_positive_int,
)

SEVERAL_ATTENTIONS = (
    "it computes attention several times in one call, so heads cannot be "
    "identified; declare it with hw.declare"
)
NESTED_ATTENTION = "it computes attention, and so does a module within it"
UNUSED_WEIGHTS = (
    "no values are multiplied with the output of its softmax, so it is unknown what "
    "its weights apply to"
)
UNKNOWN_JOINT_AXIS = (
    "batch and heads share an axis of its attention tensors, and the example does not show which "
    "comes first, so heads "
    "cannot be identified; give an example with two rows or more, or declare it with hw.declare"
)


class AttentionLayout(NamedTuple):
    """Heads and pattern of a traced attention module; `reason` if its attention is not understood.

    `joint` is the size of an axis that joins batch and heads, and `joint_axis` how it is split.
    With `separate_heads`, each head is computed by itself, and their outputs are concatenated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    pattern: str
    reason: str = ""
    joint: int = 0
    joint_axis: JointAxis | None = None
    separate_heads: bool = False


UNCLEAR_TRACE = "unclear trace"
_LAYOUTS: WeakKeyDictionary[nn.Module, AttentionLayout] = WeakKeyDictionary()


def find_traced_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield the sites of modules with traced attention; those whose attention is not understood
    have no abilities.
    """
    for path, module, layout in _known_layouts(model):
        sizes = HeadSizes(layout.num_heads, layout.num_kv_heads, layout.head_dim)
        if layout.reason:
            impossible = Ability(False, layout.reason)
            site = make_site(path, module, sizes, pattern=UNKNOWN_PATTERN, observe=impossible)
            yield SiteModule(site, module, UNCLEAR_TRACE)
            continue
        observe = module_tracer.hook_ability(module)
        reason = edit_place(module).reason
        ablate = Ability(False, reason) if reason else observe
        function = run_separate_heads if layout.separate_heads else run_traced
        projections = projection_overrides(module, layout.num_heads)
        overrides = (ForwardOverride(module, function, (layout,)), *projections)
        site = make_site(
            path, module, sizes, pattern=layout.pattern, observe=observe, ablate=ablate
        )
        yield SiteModule(site, module, "traced", overrides=overrides)


def _known_layouts(model: nn.Module) -> Iterator[tuple[str, nn.Module, AttentionLayout]]:
    """Traced layouts of the modules of a model; declared modules take
    precedence and are skipped.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    declared = [path for path, module in modules.items() if get_declaration(module) is not None]
    for path, module in modules.items():
        if module in _LAYOUTS and not any(
            is_within(path, other) or is_within(other, path) for other in declared
        ):
            yield path, module, _LAYOUTS[module]


def run_traced(
    module: nn.Module, run: Function, args: Any, kwargs: Any, layout: AttentionLayout
) -> Any:
    """Run a hooked module, and the hooks on the attention that it computes; it must compute
    attention once, with the same heads as when it was traced.
    """
    hooks = get_hooks(module)
    if not hooks:
        return run(*args, **kwargs)
    num_traced = 0

    def on_attention(traced: TracedAttention) -> Tensor | None:
        nonlocal num_traced
        num_traced += 1
        call = traced.call
        z_BTHV = traced.z_BTHV
        if call is None or z_BTHV is None or z_BTHV.shape[2] != layout.num_heads or num_traced > 1:
            raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
        run_call_hooks(hooks, lambda: call)
        return edit_behind_function(module, hooks, z_BTHV)

    with AttentionTracer(on_attention, layout.joint_axis):
        result = run(*args, **kwargs)
    if not num_traced:
        raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
    return result


def run_separate_heads(
    module: nn.Module, run: Function, args: Any, kwargs: Any, layout: AttentionLayout
) -> Any:
    """Run a hooked module that computes one head at a time; the hooks run where the head outputs
    are concatenated.
    """
    hooks = get_hooks(module)
    if not hooks:
        return run(*args, **kwargs)
    num_joined = 0

    def on_heads(heads: Sequence[TracedAttention], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        nonlocal num_joined
        num_joined += 1
        if len(heads) != layout.num_heads or num_joined > 1:
            raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
        weights = [head.call.all_weights() for head in heads if head.call is not None]
        run_call_hooks(hooks, lambda: WeightsOnlyCall(torch.cat(weights, 1)))
        return edit_behind_function(module, hooks, torch.stack(list(outputs), 2)).unbind(2)

    with trace_separate_heads(on_heads):
        result = run(*args, **kwargs)
    if not num_joined:
        raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
    return result


_CHANGED_LAYOUT = (
    "does not compute attention as it did when traced; call hw.sites(model, "
    "example) with an example like this input"
)


def trace_example(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a model with these arguments, and store the layout of each module that computes
    attention.
    """
    if any(module.training for module in model.modules()):
        raise ValueError(
            "the model is in train mode, where a run changes its state; call model.eval() first"
        )
    example_trace = ExampleTrace()
    layouts = example_trace.layouts
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            with example_trace.tracing() as tracer:
                model(*args, **kwargs)
            joint = [
                module for module, layout in layouts.items() if layout.joint and not layout.reason
            ]
            if joint:
                resolve_joint_axes(layouts, joint, lambda: model(*args, **kwargs))
                join_separate_heads(model, layouts, lambda: model(*args, **kwargs))
        except Exception as error:  # the model may raise anything
            message = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"{type(model).__name__} cannot run on this example: {message}"
            ) from error
    for softmax_call in tracer.softmax_calls:
        owners = [
            module
            for module in softmax_call.running_modules
            if not type(module).__module__.startswith("torch.nn.")
        ]
        if (
            owners
            and not softmax_call.has_output
            and softmax_call.num_axes == 4
            and owners[-1] not in layouts
        ):
            layouts[owners[-1]] = AttentionLayout(0, 0, 0, UNKNOWN_PATTERN, UNUSED_WEIGHTS)
    for module in model.modules():
        _LAYOUTS.pop(module, None)
    _LAYOUTS.update(layouts)


@dataclass
class ModuleFrame:
    """One running call of a module: attention computed by itself, and the number computed by
    modules within it.
    """

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
        tracer = AttentionTracer(self.record, running_modules=self.running_modules)
        try:
            handles.append(register_module_forward_hook(self.leave, always_call=True))
            with without_compile_warning(), tracer:
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
        if len(frame.layouts) > 1 and not (layout.joint and len(set(frame.layouts)) == 1):
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
        return AttentionLayout(
            read_positive_int(module, NUM_HEADS_NAMES), 0, 0, UNKNOWN_PATTERN, traced.reason
        )
    heads = traced.z_BTHV.shape[2]
    pattern = _pattern_of_call(traced.call)
    kv = traced.num_kv_heads or heads
    dim = traced.head_dim or traced.z_BTHV.shape[3]
    reason = "" if traced.joint else _undeclared_heads_reason(module, heads)
    return AttentionLayout(heads, kv, dim, pattern, reason, traced.joint)


def _undeclared_heads_reason(module: nn.Module, heads: int) -> str:
    """Why this number of heads cannot be right; "" if the attributes of the module do not say
    otherwise.
    """
    declared_heads = read_positive_int(module, NUM_HEADS_NAMES)
    is_other = declared_heads and declared_heads != heads
    return (
        f"its attributes declare {declared_heads} heads, but it computes attention with {heads}"
        if is_other
        else ""
    )


def _pattern_of_call(call: ObservedCall) -> str:
    """Attention pattern as far as one call shows it."""
    if isinstance(call, AttentionInputs) and call.mask is None:
        return "causal()" if call.causal else "full()"
    attended = (call.weights if isinstance(call, WeightsOnlyCall) else call.head_weights(0)) > 0
    if bool(attended.all()):
        return "full()"
    is_square = attended.shape[-1] == attended.shape[-2]
    return (
        "causal()"
        if is_square and torch.equal(attended, attended.new_ones(attended.shape).tril())
        else UNKNOWN_PATTERN
    )


def _merge_layouts(first: AttentionLayout, second: AttentionLayout) -> AttentionLayout:
    """Merge the layouts of two calls of one module."""
    if first.reason or second.reason or first[:3] != second[:3]:
        return first._replace(
            reason=first.reason or second.reason or "its heads differ from call to call"
        )
    return first if first == second else first._replace(pattern=UNKNOWN_PATTERN)


# --- Axes that join batch and heads, and heads that are computed one by one -----------------------


class JointAxisProbe:
    """The joint axis of a module, and how often it computes attention."""

    num_attentions = 0
    joint_axis: JointAxis | None = None

    def run(self, module: nn.Module, run: Function, args: Any, kwargs: Any) -> Any:
        """Run the module as it is, then again with slice 1 of its joint axis changed, and compare
        the outputs.
        """
        # a cache among the arguments is changed by each run
        other_args, other_kwargs = copy.deepcopy((args, kwargs))
        result = run(*args, **kwargs)
        sizes = list[int]()

        def change_slice(traced: TracedAttention) -> Tensor | None:
            sizes.append(traced.joint)
            if traced.z_BTHV is None or len(sizes) > 1 or traced.joint < 2:
                return None
            changed = traced.z_BTHV.clone()
            changed[1] += 1
            return changed

        with AttentionTracer(change_slice):
            other = run(*other_args, **other_kwargs)
        self.num_attentions = len(sizes)
        before = _first_tensor(result)
        after = _first_tensor(other)
        if sizes and before is not None and after is not None and before.shape == after.shape:
            self.joint_axis = find_joint_axis(sizes[0], before, after)
        return result


def _first_tensor(result: Any) -> Tensor | None:
    """The first tensor of a module's output."""
    values: Any = [result]
    if isinstance(result, Mapping):
        values = result.values()
    elif isinstance(result, (tuple, list)):
        values = result
    return next((value for value in values if isinstance(value, Tensor)), None)


def resolve_joint_axes(
    layouts: dict[nn.Module, AttentionLayout], modules: Sequence[nn.Module], run: Callable[[], None]
) -> None:
    """Decide how the joint axes of these modules are split, by another run of the model; edits
    `layouts`.
    """
    probes = {module: JointAxisProbe() for module in modules}
    overrides = [ForwardOverride(module, probe.run) for module, probe in probes.items()]
    with install_hooks({}, overrides=overrides):
        run()
    for module, probe in probes.items():
        axis = probe.joint_axis
        is_repeated = probe.num_attentions > 1
        if axis is None:
            changes = {"num_heads": 0, "num_kv_heads": 0, "reason": UNKNOWN_JOINT_AXIS}
        else:
            heads = axis.num_heads
            reason = _undeclared_heads_reason(module, heads)
            changes = {
                "num_heads": heads,
                "num_kv_heads": heads,
                "joint_axis": axis,
                "reason": SEVERAL_ATTENTIONS if is_repeated else reason,
                "separate_heads": is_repeated and heads == 1,
            }
        layouts[module] = layouts[module]._replace(**changes)


HeadsCallback = Callable[[Sequence[TracedAttention], Sequence[Tensor]], Sequence[Tensor] | None]


def trace_separate_heads(on_heads: HeadsCallback) -> AttentionTracer:
    """Tracer of heads that are computed one by one; `on_heads` gets them, and the outputs, where
    these are joined.
    """
    heads: list[TracedAttention] = []

    def on_concatenation(tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        outputs = [head.z_BTHV[:, :, 0] for head in heads if head.z_BTHV is not None]
        is_joined = len(tensors) == len(outputs) > 1 and all(
            tensor.shape == output.shape and torch.equal(tensor, output)
            for tensor, output in zip(tensors, outputs, strict=True)
        )
        return on_heads(heads, outputs) if is_joined else None

    return AttentionTracer(heads.append, on_concatenation=on_concatenation)


def join_separate_heads(
    model: nn.Module, layouts: dict[nn.Module, AttentionLayout], run: Callable[[], None]
) -> None:
    """Make one layout of heads that are computed one by one: by one module each, or in a loop;
    edits `layouts`.
    """
    paths = {module: path for path, module in model.named_modules()}
    owners: dict[nn.Module, list[nn.Module]] = {}
    for module, layout in layouts.items():
        if layout.separate_heads:
            owners.setdefault(module, []).append(module)
        elif layout.joint_axis == JointAxis(1, BATCH_FIRST) and not layout.reason:
            container = model.get_submodule(paths[module].rpartition(".")[0])
            owner = container
            while isinstance(owner, nn.ModuleList) and paths[owner]:
                owner = model.get_submodule(paths[owner].rpartition(".")[0])
            if owner is not module and not isinstance(owner, nn.ModuleList):
                owners.setdefault(owner, []).append(module)
    counts: dict[nn.Module, set[int]] = {owner: set() for owner in owners}

    def count_heads(owner: nn.Module, run: Function, args: Any, kwargs: Any) -> Any:
        with trace_separate_heads(lambda heads, _: counts[owner].add(len(heads))):
            return run(*args, **kwargs)

    overrides = [ForwardOverride(owner, count_heads) for owner in owners]
    with install_hooks({}, overrides=overrides):
        run()
    for owner, parts in owners.items():
        if len(counts[owner]) != 1 or len({layouts[part][1:4] for part in parts}) != 1:
            continue
        (count,) = counts[owner]
        reason = _undeclared_heads_reason(owner, count)
        layout = layouts[parts[0]]._replace(
            num_heads=count, num_kv_heads=count, reason=reason, separate_heads=True
        )
        for part in parts:
            del layouts[part]
        layouts[owner] = layout
