"""Adapter for modules whose output projection is found by name or declared with `hw.declare`.

Head outputs are the input of the projection. The weights are traced while the module's own code runs, and accepted only
if weights @ values equal that input. Longformer and LED return their weights as a band, which is converted first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..hooks import (
    AttentionCall,
    AttentionHook,
    HeadValues,
    MethodPatch,
    SiteAdapter,
    SiteModule,
    WeightsOnlyCall,
    get_hooks,
    run_output_hooks,
)
from ..site import Ability
from . import module_tracer
from .module_attributes import NUM_HEADS_NAMES, HeadSizes, make_site, read_positive_int
from .module_tracer import AttentionTracer, TracedAttention

# --- Banded weights of Longformer and LED -----------------------------------------------------------------
#
# A row of weights is [global keys, then keys from `half_window` before to `half_window` behind the query]; queries with
# global attention have separate rows over all keys (Longformer, arXiv:2004.05150, section 3.1).

WINDOW_ATTRIBUTE = "one_sided_attn_window_size"


def is_banded(module: nn.Module) -> bool:
    """Whether a module returns its weights as a band."""
    return isinstance(getattr(module, WINDOW_ATTRIBUTE, None), int)


def run_banded(
    module: nn.Module, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, WeightsOnlyCall]:
    """Run such a module; returns its output and its weights [B, H, T, S]."""
    bound = signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    weights_requested = bound.arguments.pop("output_attentions")
    arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
    z, band, *rows = run(**arguments, output_attentions=True)
    is_global = arguments["is_index_global_attn"] if rows else None
    weights = unband_weights(band, getattr(module, WINDOW_ATTRIBUTE), is_global, rows[0] if rows else None)
    return (z, band, *rows) if weights_requested else (z,), WeightsOnlyCall(weights)


def unband_weights(band: Tensor, half_window: int, is_global_BT: Tensor | None, rows: Tensor | None) -> Tensor:
    """Weights [B, H, T, S] from a band [B, T, H, global + 2 half_window + 1] and the rows of global queries.

    >>> band = torch.tensor([[0.0, 0.9, 0.1], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]])[None, :, None]
    >>> unband_weights(band, 1, None, None)[0, 0]
    tensor([[0.9000, 0.1000, 0.0000],
            [0.2000, 0.3000, 0.5000],
            [0.0000, 0.6000, 0.4000]])
    """
    batch, length, heads, band_width = band.shape
    num_global = band_width - 2 * half_window - 1
    padded = band.new_zeros(batch, length, heads, length + 2 * half_window)
    columns = torch.arange(length, device=band.device)[:, None] + torch.arange(2 * half_window + 1, device=band.device)
    index = columns[None, :, None, :].expand(batch, length, heads, -1)
    padded.scatter_(-1, index, band[..., num_global:])
    weights = padded[..., half_window : half_window + length].permute(0, 2, 1, 3).contiguous()
    if is_global_BT is None or rows is None:
        return weights
    for row, is_global in enumerate(is_global_BT):
        tokens = is_global.nonzero().flatten()
        weights[row][:, :, tokens] += band[row, :, :, : len(tokens)].transpose(0, 1)
        weights[row][:, tokens] = rows[row][:, : len(tokens)].to(weights)
    return weights


# --- Attention modules with an output projection ----------------------------------------------------------

# Names of output projections, the most common first; "^" starts at the parent of the module.
OUTPUT_PROJECTION_NAMES = (
    "out_proj",
    "o_proj",
    "c_proj",
    "dense",
    "out_lin",
    "wo",
    "o",
    "proj",
    "to_out",
    "fc_out",
    "linear_out",
    "out",
    "to_out.0",
    "output",
    "^output.dense",
    "^attention_output.dense",
    "^output.out_proj",
    "^output",
)
SOFTMAX_NAMES = ("softmax", "scaled_dot_product_attention")
WEIGHTS_NOT_VISIBLE = Ability(False, "its code calls no softmax by name, so its weights cannot be traced")
MISMATCH_REASON = "the input of its projection is not weights @ values"


class AttentionDeclaration(NamedTuple):
    """User declaration of a custom attention module: number of heads, and path of its output projection."""

    heads: int
    output_name: str


_DECLARATIONS: WeakKeyDictionary[nn.Module, AttentionDeclaration] = WeakKeyDictionary()
_HEADS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # projection -> number of heads
_LAST: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()  # attention module -> its projection


def declare(module: nn.Module, *, heads: int, output: str) -> None:
    """Declare a module as attention with `heads` heads, whose output projection is its child `output`.

    >>> import headwise as hw
    >>> class Mine(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
    >>> net = nn.Sequential(Mine())
    >>> hw.declare(net[0], heads=3, output="last")
    >>> [(site.name, site.q, site.dim) for site in hw.sites(net)]
    [('model.0.attention', 3, 2)]
    """
    children = dict(module.named_modules())
    if output not in children or not get_input_width(children[output]):
        raise ValueError(f"{type(module).__name__} has no projection {output!r}; name a child that is an nn.Linear")
    if not isinstance(heads, int) or heads < 1 or get_input_width(children[output]) % heads:
        width = get_input_width(children[output])
        raise ValueError(f"heads={heads!r} does not divide the {width} input channels of {output}; give a divisor")
    _DECLARATIONS[module] = AttentionDeclaration(heads, output)


def is_declared(module: nn.Module) -> bool:
    """Whether this module was declared with `declare`."""
    return module in _DECLARATIONS


class OutputProjectionAdapter(SiteAdapter):
    """Declared modules, and modules named "...Attention..." whose projection is found by name."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            declaration = _DECLARATIONS.get(module) or _guess_declaration(path, module, modules)
            if declaration is None:
                continue
            projection = modules[_projection_path(path, declaration.output_name)]
            _HEADS[projection], _LAST[module] = declaration.heads, projection
            module_tracer.override_forward(projection, _run_projection)
            module_tracer.override_forward(module, _run_attention)
            sizes = HeadSizes(declaration.heads, declaration.heads, get_input_width(projection) // declaration.heads)
            see = module_tracer.hook_ability(module) if _names_softmax(module) else WEIGHTS_NOT_VISIBLE
            yield SiteModule(
                make_site(path, module, sizes, see=see, silence=module_tracer.hook_ability(projection)),
                projection,
                self,
            )

    def patches(self) -> list[MethodPatch]:
        return [*module_tracer.make_patches(_run_projection), *module_tracer.make_patches(_run_attention)]


def _guess_declaration(path: str, module: nn.Module, modules: dict[str, nn.Module]) -> AttentionDeclaration | None:
    """Guess heads and projection from names; the projection is a child, or a sibling as in BERT."""
    if "Attention" not in type(module).__name__ or isinstance(module, nn.MultiheadAttention):
        return None
    heads = read_positive_int(module, NUM_HEADS_NAMES)
    if not heads:
        return None
    parent = modules.get(path.rpartition(".")[0])
    for name in OUTPUT_PROJECTION_NAMES:
        if name.startswith("^") and "Attention" not in type(parent).__name__:
            continue  # the sibling may belong to a feed-forward layer
        projection = modules.get(_projection_path(path, name))
        if projection is not None and get_input_width(projection) and get_input_width(projection) % heads == 0:
            return AttentionDeclaration(heads, name)
    return None


def _projection_path(path: str, name: str) -> str:
    parent = path.rpartition(".")[0] if name.startswith("^") else path
    return f"{parent}.{name.removeprefix('^')}".removeprefix(".")


def get_input_width(module: nn.Module) -> int:
    """Number of input channels of a projection; 0 if the module is not a projection."""
    in_features = getattr(module, "in_features", None)  # nn.Linear and its replacements
    if isinstance(in_features, int):
        return in_features
    inner = getattr(module, "base_layer", None)  # wrappers such as LoRA layers
    if isinstance(inner, nn.Module):
        return get_input_width(inner)
    weight = getattr(module, "weight", None)
    # transformers' Conv1D (GPT-2) stores the transposed weight
    return weight.shape[0] if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) else 0


def _names_softmax(module: nn.Module) -> bool:
    """Whether the code of a module or of its submodules names a softmax function."""
    codes = [
        getattr(one, "__code__", None)
        for part in module.modules()
        for cls in type(part).__mro__
        if cls.__module__.partition(".")[0] != "torch"
        for one in vars(cls).values()
    ]
    named = any(name in SOFTMAX_NAMES for code in codes if code is not None for name in code.co_names)
    return named or any(type(part).__name__.lower() in SOFTMAX_NAMES for part in module.modules())


class TraceSession:
    """Attention traced during one call of a module; publishes the one whose head outputs enter the projection."""

    def __init__(self, projection: nn.Module) -> None:
        self.projection, self.traced = projection, list[TracedAttention]()
        self.observers = [hook for hook in get_hooks(projection) if hook.needs_call]
        self.published = False

    def record(self, traced: TracedAttention) -> None:
        """Remember a traced attention computation."""
        self.traced.append(traced)

    def publish(self, z_BTHV: Tensor) -> None:
        """Given the head outputs, send the matching attention call to the observers, once."""
        if self.published:
            return
        self.published = True
        call = next(
            (traced.call for traced in reversed(self.traced) if traced.call and _equals(traced.z_BTHV, z_BTHV)), None
        )
        if call is None:
            call = UnreadableCall(next((traced.reason for traced in self.traced if traced.reason), MISMATCH_REASON))
        _send_call(self.observers, call)


_TRACE_SESSION: ContextVar[TraceSession | None] = ContextVar("listening", default=None)


class UnreadableCall:
    """An attention call that was not understood; every query raises with the reason."""

    attention_inputs = key_positions = None

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Raises with the reason."""
        return self.all_weights(queries)

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Raises with the reason."""
        raise ValueError(f"cannot observe its weights: {self.reason}")

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Raises with the reason."""
        return self.all_weights(queries)

    def head_values(self, head: int) -> HeadValues:
        """Raises with the reason."""
        raise ValueError(f"cannot observe its weights: {self.reason}")


def _send_call(hooks: list[AttentionHook], call: AttentionCall) -> None:
    for hook in hooks:
        hook.on_call(call)


def _equals(z_BTHV: Tensor | None, other: Tensor) -> bool:
    return z_BTHV is not None and z_BTHV.shape == other.shape and torch.equal(z_BTHV.to(other.dtype), other)


def _run_attention(
    module: nn.Module, run: module_tracer.ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Forward of an attention module; traces it if an observer needs its inputs."""
    projection = _LAST[module]
    session = TraceSession(projection)
    if not session.observers:
        return run(*args, **kwargs)
    if is_banded(module):
        result, call = run_banded(module, run, args, kwargs)
        _send_call(session.observers, call)
        return result
    token = _TRACE_SESSION.set(session)
    try:
        with AttentionTracer(session.record, _HEADS[projection]):
            result = run(*args, **kwargs)
    finally:
        _TRACE_SESSION.reset(token)
    z = result[0] if isinstance(result, tuple) else result
    if isinstance(z, Tensor) and z.shape[-1] == get_input_width(projection):  # the projection is a sibling
        session.publish(_split_heads(z, projection))
    return result


def _run_projection(
    projection: nn.Module, run: module_tracer.ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Forward of an output projection; its input are the head outputs."""
    hooks = get_hooks(projection)
    if not hooks:
        return run(*args, **kwargs)
    z_BTHV = _split_heads(args[0], projection)
    session = _TRACE_SESSION.get()
    if session is not None and session.projection is projection:
        session.publish(z_BTHV)
    return run(run_output_hooks(hooks, z_BTHV).reshape(args[0].shape), *args[1:], **kwargs)


def _split_heads(z: Tensor, projection: nn.Module) -> Tensor:
    """Input of a projection as [B, T, heads, head_dim]; it may have two token axes, or no batch axis."""
    return z.reshape(z.shape[0] if z.dim() > 2 else 1, -1, _HEADS[projection], z.shape[-1] // _HEADS[projection])
