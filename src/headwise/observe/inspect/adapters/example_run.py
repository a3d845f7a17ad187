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
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..hooks import (
    EAGER_STANCE,
    ForwardOverride,
    Function,
    SharedPatch,
    SiteModule,
    get_hooks,
    install_hooks,
    run_call_hooks,
)
from ..model_inputs import check_eval_mode
from ..site import Ability, AttentionInputs, ObservedCall, WeightsOnlyCall
from .declarations import get_declaration
from .module_tracer import (
    BATCH_FIRST,
    AttentionTracer,
    JointAxis,
    TracedAttention,
    find_joint_axis,
    hook_ability,
)
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
    make_site,
    overlaps,
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
    """Store heads and pattern of a traced module; `reason` if its attention is not understood.

    `joint` is the size of an axis that joins batch and heads, and `joint_axis` how it is split.
    With `separate_heads`, each head is computed separately, and their outputs are concatenated.
    """

    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    pattern: str = UNKNOWN_PATTERN
    reason: str = ""
    joint: int = 0
    joint_axis: JointAxis | None = None
    separate_heads: bool = False


UNCLEAR_TRACE = "unclear trace"
_LAYOUTS: WeakKeyDictionary[nn.Module, AttentionLayout] = WeakKeyDictionary()


def find_torch_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield the site of every nn.MultiheadAttention."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            sizes = HeadSizes(module.num_heads, module.num_heads, module.head_dim)
            observe = hook_ability(module)
            site = make_site(path, module, sizes, pattern=UNKNOWN_PATTERN, observe=observe)
            run = ForwardOverride(module, run_traced, (AttentionLayout(module.num_heads),))
            yield SiteModule(site, module, "torch", patches=(SLOW_PATH,), overrides=(run,))


@contextmanager
def _slow_path() -> Iterator[None]:
    """Disable torch's fast path for encoder layers, which skips the forward of their modules."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


SLOW_PATH = SharedPatch(_slow_path)


def find_traced_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield the sites of modules with traced attention; unreadable attention gets no abilities."""
    modules = dict(model.named_modules(remove_duplicate=False))
    declared = [path for path, module in modules.items() if get_declaration(module) is not None]
    for path, module in modules.items():
        layout = _LAYOUTS.get(module)
        if layout is None or any(overlaps(path, other) for other in declared):
            continue
        sizes = HeadSizes(layout.num_heads, layout.num_kv_heads, layout.head_dim)
        if layout.reason:
            impossible = Ability(False, layout.reason)
            site = make_site(path, module, sizes, pattern=UNKNOWN_PATTERN, observe=impossible)
            yield SiteModule(site, module, UNCLEAR_TRACE)
            continue
        observe = hook_ability(module)
        reason = edit_place(module).reason
        ablate = Ability(False, reason) if reason else observe
        run = ForwardOverride(module, run_traced, (layout,))
        site = make_site(
            path, module, sizes, pattern=layout.pattern, observe=observe, ablate=ablate
        )
        overrides = (run, *projection_overrides(module, layout.num_heads))
        yield SiteModule(site, module, "traced", overrides=overrides)


def run_traced(
    module: nn.Module, run: Function, args: Any, kwargs: Any, layout: AttentionLayout
) -> Any:
    """Run a hooked module, and the hooks on the attention that it computes.

    It must compute attention once, with the same heads as when it was traced.
    """
    hooks = get_hooks(module)
    if not hooks:
        return run(*args, **kwargs)
    num_traced = 0

    def on_attention(traced: TracedAttention) -> Tensor | None:
        nonlocal num_traced
        num_traced += 1
        if traced.reason or traced.z_BTHV.shape[2] != layout.num_heads or num_traced > 1:
            raise ValueError(f"{type(module).__name__} {_CHANGED_LAYOUT}")
        run_call_hooks(hooks, lambda: traced.call)
        return edit_behind_function(module, hooks, traced.z_BTHV)

    axes = () if layout.joint_axis is None else (layout.joint_axis,)
    with AttentionTracer(on_attention, axes, joins_heads=layout.separate_heads):
        result = run(*args, **kwargs)
    if not num_traced:
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
    check_eval_mode(model)
    layouts: dict[nn.Module, AttentionLayout] = {}
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            with _tracing(layouts) as tracer:
                model(*args, **kwargs)
            joint = [one for one, layout in layouts.items() if layout.joint and not layout.reason]
            if joint:
                resolve_joint_axes(layouts, joint, lambda: model(*args, **kwargs))
                join_separate_heads(model, layouts, lambda: model(*args, **kwargs))
        except Exception as error:  # the model may raise anything
            message = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"{type(model).__name__} cannot run on this example: {message}"
            ) from error
    for softmax_call in tracer.softmax_calls:
        if softmax_call.has_output or softmax_call.num_axes != 4:
            continue
        for module in reversed(softmax_call.running_modules):
            if not type(module).__module__.startswith("torch.nn."):
                layouts.setdefault(module, AttentionLayout(0, reason=UNUSED_WEIGHTS))
                break
    for module in model.modules():
        _LAYOUTS.pop(module, None)
    _LAYOUTS.update(layouts)


@contextmanager
def _tracing(layouts: dict[nn.Module, AttentionLayout]) -> Iterator[AttentionTracer]:
    """Add the attention that modules compute in this thread to `layouts`."""
    # for each running module the attention computed by itself, and None for each within it
    frames: list[list[AttentionLayout | None]] = []
    running_modules: list[nn.Module] = []
    thread = get_ident()

    def enter(module: nn.Module, _: Any) -> None:
        if get_ident() == thread:
            frames.append([])
            running_modules.append(module)

    def leave(module: nn.Module, _: Any, result: Any) -> None:
        if get_ident() != thread or module is not running_modules[-1]:
            return
        frame = frames.pop()
        running_modules.pop()
        own = [layout for layout in frame if layout is not None]
        if not own:
            return
        layout = own[0]
        if len(own) > 1 and not (layout.joint and len(set(own)) == 1):
            layout = layout._replace(reason=SEVERAL_ATTENTIONS)
        elif len(own) < len(frame):
            layout = layout._replace(reason=NESTED_ATTENTION)
        first = layouts.setdefault(module, layout)  # of an earlier call
        reason = first.reason or layout.reason
        if not reason and first[:3] != layout[:3]:
            reason = "its heads differ from call to call"
        if reason:
            layouts[module] = first._replace(reason=reason)
        elif first != layout:
            layouts[module] = first._replace(pattern=UNKNOWN_PATTERN)

    def record(traced: TracedAttention) -> None:
        if not traced.depth:
            return
        *outer, frame = frames[: traced.depth]
        frame.append(_layout_of(running_modules[traced.depth - 1], traced))
        for other in outer:
            other.append(None)

    handles = [register_module_forward_pre_hook(enter)]
    tracer = AttentionTracer(record, running_modules=running_modules)
    try:
        handles.append(register_module_forward_hook(leave, always_call=True))
        with without_compile_warning(), EAGER_STANCE.active(), tracer:
            yield tracer
    finally:
        for handle in handles:
            handle.remove()


def _layout_of(module: nn.Module, traced: TracedAttention) -> AttentionLayout:
    if traced.reason:
        return AttentionLayout(read_positive_int(module, NUM_HEADS_NAMES), reason=traced.reason)
    heads = traced.z_BTHV.shape[2]
    kv, dim = traced.kv_shape or (heads, traced.z_BTHV.shape[3])
    reason = "" if traced.joint else _undeclared_heads_reason(module, heads)
    return AttentionLayout(heads, kv, dim, _pattern_of_call(traced.call), reason, traced.joint)


def _undeclared_heads_reason(module: nn.Module, heads: int) -> str:
    """Explain why this number of heads contradicts the module's attributes; "" if it does not."""
    declared_heads = read_positive_int(module, NUM_HEADS_NAMES)
    if declared_heads in (0, heads):
        return ""
    return f"its attributes declare {declared_heads} heads, but it computes attention with {heads}"


def _pattern_of_call(call: ObservedCall) -> str:
    """Describe the attention pattern that one call shows."""
    if isinstance(call, AttentionInputs) and call.mask is None:
        return "causal()" if call.causal else "full()"
    attended = (call.weights if isinstance(call, WeightsOnlyCall) else call.head_weights(0)) > 0
    if bool(attended.all()):
        return "full()"
    is_square = attended.shape[-1] == attended.shape[-2]
    is_causal = is_square and torch.equal(attended, torch.ones_like(attended).tril())
    return "causal()" if is_causal else UNKNOWN_PATTERN


# --- Axes that join batch and heads, and heads that are computed one by one -----------------------


def resolve_joint_axes(
    layouts: dict[nn.Module, AttentionLayout], modules: Sequence[nn.Module], run: Callable[[], None]
) -> None:
    """Decide how the joint axes of these modules are split, by another run of the model; edits
    `layouts`.

    Each module runs as it is, then again with slice 1 of its joint axis changed, and the outputs
    are compared.
    """

    def probe(module: nn.Module, run: Function, args: Any, kwargs: Any) -> Any:
        # a cache among the arguments is changed by each run
        other_args, other_kwargs = copy.deepcopy((args, kwargs))
        result = run(*args, **kwargs)
        sizes: list[int] = []

        def change_slice(traced: TracedAttention) -> Tensor | None:
            sizes.append(traced.joint)
            if len(sizes) > 1 or traced.joint < 2:
                return None
            changed = traced.z_BTHV.clone()
            changed[1] += 1
            return changed

        with AttentionTracer(change_slice):
            other = run(*other_args, **other_kwargs)
        before = _first_tensor(result)
        after = _first_tensor(other)
        axis = None
        if sizes and before is not None and after is not None and before.shape == after.shape:
            axis = find_joint_axis(sizes[0], before, after)
        layout = layouts[module]._replace(joint_axis=axis)
        if axis is None:
            layout = layout._replace(num_heads=0, num_kv_heads=0, reason=UNKNOWN_JOINT_AXIS)
        else:
            heads = axis.num_heads
            reason = _undeclared_heads_reason(module, heads)
            layout = layout._replace(num_heads=heads, num_kv_heads=heads, reason=reason)
            if len(sizes) > 1:
                layout = layout._replace(reason=SEVERAL_ATTENTIONS, separate_heads=heads == 1)
        layouts[module] = layout
        return result

    with install_hooks({}, overrides=[ForwardOverride(module, probe) for module in modules]):
        run()


def _first_tensor(result: Any) -> Tensor | None:
    """Return the first tensor of a module's output."""
    values: Any = result.values() if isinstance(result, Mapping) else result
    values = values if isinstance(result, (Mapping, tuple, list)) else [result]
    return next((value for value in values if isinstance(value, Tensor)), None)


def join_separate_heads(
    model: nn.Module, layouts: dict[nn.Module, AttentionLayout], run: Callable[[], None]
) -> None:
    """Make one layout of heads that are computed one by one; edits `layouts`.

    The heads are computed in one module each, or in a loop.
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
        def count(traced: TracedAttention) -> None:
            counts[owner].add(traced.z_BTHV.shape[2])

        with AttentionTracer(count, joins_heads=True):
            return run(*args, **kwargs)

    with install_hooks({}, overrides=[ForwardOverride(owner, count_heads) for owner in owners]):
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
