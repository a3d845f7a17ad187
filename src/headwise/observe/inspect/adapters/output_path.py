"""Decide where head outputs are edited: behind the attention function, or at the projection.

Setting a head to zero behind the attention function equals zero columns of the output projection if
the code between the two keeps heads apart and zeros zero, as reshapes and gates do. Behind a norm
or another function it does not, and the hooks run at the projection instead. `edit_place` reads
this from the forward of a module that uses transformers' attention interface; `check_edit_places`
measures it in two runs on an example.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..hooks import (
    AttentionHook,
    ForwardOverride,
    OutputHook,
    SiteModule,
    install_hooks,
    run_output_hooks,
)
from .declarations import get_input_width
from .output_projection import is_within, run_projection

INTERFACE_GETTER = "get_interface"


class EditPlace(NamedTuple):
    """Name where heads of a module are edited: the input of `projection`, or the function (None).

    `reason` is set if heads cannot be edited at either place.
    """

    projection: nn.Module | None = None
    reason: str = ""


AT_FUNCTION = EditPlace()
_MEASURED: WeakKeyDictionary[nn.Module, EditPlace] = WeakKeyDictionary()
_IS_AT_FUNCTION: ContextVar[bool] = ContextVar("is_at_function", default=False)


def edit_place(module: nn.Module) -> EditPlace:
    """Return where heads are edited: measured on an example, or read in the forward."""
    if _IS_AT_FUNCTION.get():
        return AT_FUNCTION
    return _MEASURED.get(module) or _read_edit_place(module)


@contextmanager
def edits_at_function() -> Iterator[None]:
    """Edit all heads behind the attention function, even if a norm follows."""
    token = _IS_AT_FUNCTION.set(True)
    try:
        yield
    finally:
        _IS_AT_FUNCTION.reset(token)


def edit_behind_function(module: nn.Module, hooks: Sequence[AttentionHook], z: Tensor) -> Tensor:
    """Run the hooks on head outputs, unless they run at the output projection."""
    return z if edit_place(module).projection is not None else run_output_hooks(hooks, z)


def projection_overrides(module: nn.Module, heads: int) -> tuple[ForwardOverride, ...]:
    """Return overrides that run the hooks at the output projection, if heads are edited there."""
    projection = edit_place(module).projection
    if projection is None:
        return ()
    return (ForwardOverride(projection, run_projection, (heads, module)),)


# --- Read from the source of a forward that calls transformers' attention interface ---------------


SEVERAL_CALLS = (
    "it calls the attention function {} times in one forward call, so its query heads are not its "
    "output heads; call "
    "hw.declare(module, heads=..., output=...) with the heads that its output projection reads"
)


def _read_edit_place(module: nn.Module) -> EditPlace:
    num_calls, submodules = read_forward(type(module))
    if num_calls > 1:
        return EditPlace(None, SEVERAL_CALLS.format(num_calls))
    passes_function = False
    for name in submodules:
        submodule = getattr(module, name, None)
        if isinstance(submodule, nn.Module) and get_input_width(submodule):
            return EditPlace(submodule) if passes_function else AT_FUNCTION
        if isinstance(submodule, nn.Module) and not isinstance(submodule, nn.Dropout | nn.Identity):
            passes_function = True
    return AT_FUNCTION


@cache
def read_forward(kind: type[nn.Module]) -> tuple[int, tuple[str, ...]]:
    """Read how often and where the forward of a class computes attention.

    Returns the number of calls of the attention function one after the other, and the submodules
    that its output passes on the way to the output projection, in order.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):  # no source, as in frozen programs
        return 1, ()
    functions = set[str]()
    followed = set[str]()
    submodules = list[str]()
    kinds = (ast.Assign, ast.AnnAssign, ast.Return)
    statements = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    for statement in sorted(statements, key=lambda node: node.lineno):
        nodes = list(ast.walk(statement))
        if any(getattr(node, "attr", "") == INTERFACE_GETTER for node in nodes):
            functions |= set(_names(statement, ast.Store))
            continue
        for call in reversed(nodes):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=args):
                    if any(followed & set(_names(argument)) for argument in args):
                        submodules.append(name)
                case _:
                    pass
        names = set(_names(statement))
        if names & functions:
            followed |= set(_names(statement, ast.Store)[:1])  # the second are the weights
        elif names & followed:
            followed |= set(_names(statement, ast.Store))
    return _count_calls(tree, functions), tuple(submodules)


def _names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> list[str]:
    """List names in a node, or only assigned names (`ast.Store`), in order."""
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, context)]


def _count_calls(tree: ast.AST, functions: set[str]) -> int:
    """Return the largest number of assignments of one block that call the attention function."""
    counts = [1]
    for node in ast.walk(tree):
        for block in [value for _, value in ast.iter_fields(node) if isinstance(value, list)]:
            assigned = [one.value for one in block if isinstance(one, ast.Assign)]
            counts.append(sum(_calls_one_of(value, functions) for value in assigned))
    return max(counts)


def _calls_one_of(value: ast.expr, functions: set[str]) -> bool:
    called = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    return any(isinstance(one, ast.Name) and one.id in functions for one in called)


# --- Measured on an example -----------------------------------------------------------------------

# linear layers to compare behind each attention computation: projections, and perhaps gates
MAX_PROJECTIONS = 4
TOLERANCE = 1e-4  # of the largest input of a projection
MIXED_HEADS = (
    "the code between its heads and its output projection mixes them, so setting one to zero is "
    "not zero columns of "
    "the projection; declare the heads of the projection with hw.declare"
)


ProjectionInput = tuple[nn.Module, Tensor]  # a linear layer and its input


class ProjectionRecorder:
    """Record inputs of the linear layers that run after each module's first attention computation.

    With `expected`, the inputs of an earlier run, each input is compared, and replaced by the
    expected one, so that a change of one module's heads does not reach the next module. `changes`
    has the first different input of each module: the layer, its input, and the expected one.
    """

    def __init__(self, expected: Mapping[nn.Module, list[ProjectionInput]] | None = None) -> None:
        self.expected = expected
        self.thread = get_ident()
        self.inputs: dict[nn.Module, list[ProjectionInput]] = {}
        self.changes: dict[nn.Module, tuple[nn.Module, Tensor, Tensor]] = {}
        self.module: nn.Module | None = None

    def on_head_outputs(self, module: nn.Module, outputs: Tensor) -> Tensor | None:
        """Record that the attention of a module was computed; set its last head to zero if inputs
        are expected.
        """
        self.module = None if module in self.inputs else module
        self.inputs.setdefault(module, [])
        if self.expected is None:
            return None
        erased = outputs.clone()
        erased[..., -1, :] = 0
        return erased

    def before_layer(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Record a layer's input, or replace it by the expected one (global pre-hook)."""
        if self.module is None or get_ident() != self.thread or not get_input_width(layer):
            return None
        inputs = self.inputs[self.module]
        if len(inputs) == MAX_PROJECTIONS or not args or not isinstance(args[0], Tensor):
            return None
        inputs.append((layer, args[0].detach().clone()))
        if self.expected is None or len(self.expected[self.module]) < len(inputs):
            return None
        expected_layer, expected = self.expected[self.module][len(inputs) - 1]
        if expected_layer is not layer or expected.shape != args[0].shape:
            return None
        if changed_columns(args[0], expected).any():
            self.changes.setdefault(self.module, (*inputs[-1], expected))
        return (expected, *args[1:])


def changed_columns(x: Tensor, expected: Tensor) -> Tensor:
    """Mark, along the last axis, where two tensors differ."""
    tolerance = TOLERANCE * float(expected.abs().max())
    return ((x - expected).abs() > tolerance).flatten(0, -2).any(0)


def measure_edit_places(
    model: nn.Module, site_modules: Sequence[SiteModule], run: Callable[[], object]
) -> None:
    """Run the model twice to find where heads are edited; store the result.

    The last head of each module is zero in the second run.

    `site_modules` are the modules with heads edited behind the attention function.
    """
    modules = {site_module.module: site_module for site_module in site_modules}
    if not modules:
        return
    expected = _record_run(modules, run, ProjectionRecorder())
    recorder = _record_run(modules, run, ProjectionRecorder(expected.inputs))
    layer_paths = {layer: path for path, layer in model.named_modules()}
    for module, (layer, x, expected_x) in recorder.changes.items():
        site = modules[module].site
        changed = changed_columns(x, expected_x)
        if not x[..., changed].any():
            continue  # zero columns
        path = layer_paths.get(layer)
        has_projection = any(map(get_input_width, module.modules()))
        owner = site.path if has_projection else site.path.rpartition(".")[0]
        if path is None or not is_within(path, owner):
            continue  # the projection is not a linear layer, and this is a layer behind it
        width = len(changed)
        last_head = torch.arange(width, device=changed.device) >= width - width // site.heads
        is_last_head = torch.equal(changed, last_head)  # a function of each channel
        is_clear = width % site.heads == 0 and (is_last_head or bool(changed.all()))
        _MEASURED[module] = EditPlace(layer) if is_clear else EditPlace(None, MIXED_HEADS)


def _record_run(
    modules: Mapping[nn.Module, SiteModule], run: Callable[[], object], recorder: ProjectionRecorder
) -> ProjectionRecorder:
    hooks = {one: (OutputHook(partial(recorder.on_head_outputs, one)),) for one in modules}
    handle = register_module_forward_pre_hook(
        recorder.before_layer  # pyright: ignore[reportArgumentType] - may return arguments
    )
    try:
        with without_compile_warning(), install_hooks(hooks, list(modules.values())):
            run()
    finally:
        handle.remove()
    return recorder


@contextmanager
def without_compile_warning() -> Iterator[None]:
    """Silence torch's warning that compiled submodules run eagerly under global hooks."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"Using `torch.compile\(module\)` when there are global hooks"
        )
        yield
