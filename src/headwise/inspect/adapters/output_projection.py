"""Longformer's weights, which it keeps as a band: those of a query by how far away the key is.

A row of what its forward gives is [global keys, then keys from `side` before to `side` behind]; queries that read
everything have rows of their own, over all keys ([Longformer](https://arxiv.org/abs/2004.05150), section 3.1).
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

WINDOW_ATTRIBUTE = "one_sided_attn_window_size"


def is_banded(module: nn.Module) -> bool:
    """Whether a module keeps its weights so."""
    return isinstance(getattr(module, WINDOW_ATTRIBUTE, None), int)


def run_banded(
    module: nn.Module, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, WeightsOnlyCall]:
    """What such a module gives, and its weights [B, H, T, S]."""
    said = signature(type(module).forward).bind(module, *args, **kwargs)
    said.apply_defaults()
    asked = said.arguments.pop("output_attentions")
    told = {name: value for name, value in said.arguments.items() if name != "self"}
    z, band, *rows = run(**told, output_attentions=True)
    reads = told["is_index_global_attn"] if rows else None
    weights = unband_weights(band, getattr(module, WINDOW_ATTRIBUTE), reads, rows[0] if rows else None)
    return (z, band, *rows) if asked else (z,), WeightsOnlyCall(weights)


def unband_weights(band: Tensor, half_window: int, reads_BT: Tensor | None, rows: Tensor | None) -> Tensor:
    """Weights [B, H, T, S] of a band [B, T, H, global + 2 side + 1] and the rows of queries that read everything.

    >>> band = torch.tensor([[0.0, 0.9, 0.1], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]])[None, :, None]
    >>> unband_weights(band, 1, None, None)[0, 0]
    tensor([[0.9000, 0.1000, 0.0000],
            [0.2000, 0.3000, 0.5000],
            [0.0000, 0.6000, 0.4000]])
    """
    batch, length, heads, wide = band.shape
    everywhere = wide - 2 * half_window - 1
    padded = band.new_zeros(batch, length, heads, length + 2 * half_window)
    place = torch.arange(length, device=band.device)[:, None] + torch.arange(2 * half_window + 1, device=band.device)
    index = place[None, :, None, :].expand(batch, length, heads, -1)
    padded.scatter_(-1, index, band[..., everywhere:])
    weights = padded[..., half_window : half_window + length].permute(0, 2, 1, 3).contiguous()
    if reads_BT is None or rows is None:
        return weights
    for row, reads in enumerate(reads_BT):
        tokens = reads.nonzero().flatten()
        weights[row][:, :, tokens] += band[row, :, :, : len(tokens)].transpose(0, 1)
        weights[row][:, tokens] = rows[row][:, : len(tokens)].to(weights)
    return weights


# --- Attentions of anybody's ---------------------------------------------------------------------------

# What authors call the projection behind the heads, the usual names first; a dot leads to a neighbour's child.
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
WEIGHTS_NOT_VISIBLE = Ability(False, "its code names no softmax, so that nothing says its weights")
MISMATCH_REASON = "what enters its projection is not what its weights read of values"


class AttentionDeclaration(NamedTuple):
    """What somebody says of an attention: how many heads it has, and what its output projection is called."""

    heads: int
    output_name: str


_DECLARATIONS: WeakKeyDictionary[nn.Module, AttentionDeclaration] = WeakKeyDictionary()
_HEADS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # of a projection
_LAST: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()  # the projection of an attention


def declare(module: nn.Module, *, heads: int, output: str) -> None:
    """Say that a module is an attention of so many heads, whose output projection is its child `output`.

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
        raise ValueError(
            f"{get_input_width(children[output])} numbers do not divide among {heads} heads; give another number"
        )
    _DECLARATIONS[module] = AttentionDeclaration(heads, output)


def is_declared(module: nn.Module) -> bool:
    """Whether somebody said of this module that it is an attention."""
    return module in _DECLARATIONS


class OutputProjectionAdapter(SiteAdapter):
    """Modules that were declared, or that are called attention and whose projection is found by its name."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            own = _DECLARATIONS.get(module) or _guess_declaration(path, module, modules)
            if own is None:
                continue
            last = modules[_projection_path(path, own.output_name)]
            _HEADS[last], _LAST[module] = own.heads, last
            module_tracer.override_forward(last, _run_projection)
            module_tracer.override_forward(module, _run_attention)
            sizes = HeadSizes(own.heads, own.heads, get_input_width(last) // own.heads)
            see = module_tracer.hook_ability(module) if _names_softmax(module) else WEIGHTS_NOT_VISIBLE
            yield SiteModule(
                make_site(path, module, sizes, see=see, silence=module_tracer.hook_ability(last)), last, self
            )

    def patches(self) -> list[MethodPatch]:
        return [*module_tracer.make_patches(_run_projection), *module_tracer.make_patches(_run_attention)]


def _guess_declaration(path: str, module: nn.Module, modules: dict[str, nn.Module]) -> AttentionDeclaration | None:
    """What the names in a module say it is; its projection is a child, or stands beside it as BERT has it."""
    if "Attention" not in type(module).__name__ or isinstance(module, nn.MultiheadAttention):
        return None
    heads = read_positive_int(module, NUM_HEADS_NAMES)
    if not heads:
        return None
    around = modules.get(path.rpartition(".")[0])
    for out in OUTPUT_PROJECTION_NAMES:
        if out.startswith("^") and "Attention" not in type(around).__name__:
            continue  # what stands beside it may be a feed-forward's
        last = modules.get(_projection_path(path, out))
        if last is not None and get_input_width(last) and get_input_width(last) % heads == 0:
            return AttentionDeclaration(heads, out)
    return None


def _projection_path(path: str, out: str) -> str:
    parent = path.rpartition(".")[0] if out.startswith("^") else path
    return f"{parent}.{out.removeprefix('^')}".removeprefix(".")


def get_input_width(module: nn.Module) -> int:
    """How many numbers a projection reads; 0 of what is none."""
    said = getattr(module, "in_features", None)  # of nn.Linear, and of what takes its place
    if isinstance(said, int):
        return said
    inner = getattr(module, "base_layer", None)  # of what wraps it
    if isinstance(inner, nn.Module):
        return get_input_width(inner)
    weight = getattr(module, "weight", None)
    # transformers keeps GPT-2's maps the other way round
    return weight.shape[0] if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) else 0


def _names_softmax(module: nn.Module) -> bool:
    """Whether the code of a module, or of one within it, names what makes weights."""
    codes = [
        getattr(one, "__code__", None)
        for part in module.modules()
        for kind in type(part).__mro__
        if kind.__module__.partition(".")[0] != "torch"
        for one in vars(kind).values()
    ]
    named = any(name in SOFTMAX_NAMES for code in codes if code is not None for name in code.co_names)
    return named or any(type(part).__name__.lower() in SOFTMAX_NAMES for part in module.modules())


class TraceSession:
    """What is overheard of one attention while it runs: the comparison whose heads say what is told in the end."""

    def __init__(self, last: nn.Module) -> None:
        self.last, self.heard = last, list[TracedAttention]()
        self.seers = [watcher for watcher in get_hooks(last) if watcher.needs_call]
        self.done = False

    def record(self, heard: TracedAttention) -> None:
        """Something was compared."""
        self.heard.append(heard)

    def publish(self, z_BTHV: Tensor) -> None:
        """Heads said this: tell who wants to see by which weights, once."""
        if self.done:
            return
        self.done = True
        core = next(
            (heard.call for heard in reversed(self.heard) if heard.call and _equals(heard.z_BTHV, z_BTHV)), None
        )
        if core is None:
            core = UnreadableCall(next((heard.reason for heard in self.heard if heard.reason), MISMATCH_REASON))
        _send_call(self.seers, core)


_TRACE_SESSION: ContextVar[TraceSession | None] = ContextVar("listening", default=None)


class UnreadableCall:
    """What an attention worked with, where it was not understood: whatever is asked is refused with the reason."""

    attention_inputs = key_positions = None

    def __init__(self, why: str) -> None:
        self.why = why

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Refused."""
        return self.all_weights(queries)

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Refused."""
        raise ValueError(f"its weights are not known: {self.why}")

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Refused."""
        return self.all_weights(queries)

    def head_values(self, head: int) -> HeadValues:
        """Refused."""
        raise ValueError(f"its weights are not known: {self.why}")


def _send_call(those: list[AttentionHook], core: AttentionCall) -> None:
    for watcher in those:
        watcher.on_call(core)


def _equals(z_BTHV: Tensor | None, other: Tensor) -> bool:
    return z_BTHV is not None and z_BTHV.shape == other.shape and torch.equal(z_BTHV.to(other.dtype), other)


def _run_attention(
    module: nn.Module, run: module_tracer.ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The forward of an attention; somebody may want to see what it compares."""
    last = _LAST[module]
    listening = TraceSession(last)
    if not listening.seers:
        return run(*args, **kwargs)
    if is_banded(module):
        result, core = run_banded(module, run, args, kwargs)
        _send_call(listening.seers, core)
        return result
    token = _TRACE_SESSION.set(listening)
    try:
        with AttentionTracer(listening.record, _HEADS[last]):
            result = run(*args, **kwargs)
    finally:
        _TRACE_SESSION.reset(token)
    z = result[0] if isinstance(result, tuple) else result
    if isinstance(z, Tensor) and z.shape[-1] == get_input_width(last):  # its projection stands beside it
        listening.publish(_split_heads(z, last))
    return result


def _run_projection(
    last: nn.Module, run: module_tracer.ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The forward of a projection: what enters it is what heads say."""
    those = get_hooks(last)
    if not those:
        return run(*args, **kwargs)
    z_BTHV = _split_heads(args[0], last)
    listening = _TRACE_SESSION.get()
    if listening is not None and listening.last is last:
        listening.publish(z_BTHV)
    return run(run_output_hooks(those, z_BTHV).reshape(args[0].shape), *args[1:], **kwargs)


def _split_heads(z: Tensor, last: nn.Module) -> Tensor:
    """[B, T, heads, width] of what enters a projection, whose tokens may lie on two axes, or rows on none."""
    return z.reshape(z.shape[0] if z.dim() > 2 else 1, -1, _HEADS[last], z.shape[-1] // _HEADS[last])
