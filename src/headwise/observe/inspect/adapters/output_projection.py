"""Adapt modules with an output projection found by name or declared with `hw.declare`.

Head outputs are the input of the projection. The weights are traced while the module's own code
runs, and accepted only if weights @ values equal that input. Longformer and LED return their
weights as a band, which is converted first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature, unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....attention.masking.patterns import Blocks, Causal, Window
from ..hooks import (
    ForwardOverride,
    Function,
    SiteModule,
    get_hooks,
    override_forwards,
    run_call_hooks,
    run_output_hooks,
)
from ..site import (
    BY_A_RUN,
    IF_EXACT,
    POSSIBLE,
    Ability,
    ObservedCall,
    Site,
    UnreadableCall,
    WeightsOnlyCall,
)
from .declarations import (
    OUTPUT_PROJECTION_NAMES,
    AttentionDeclaration,
    get_declaration,
    get_input_width,
)
from .module_tracer import (
    BATCH_FIRST,
    HEADS_FIRST,
    AttentionTracer,
    JointAxis,
    TracedAttention,
    hook_ability,
)

# --- Properties of a third-party module -----------------------------------------------------------


UNKNOWN_PATTERN = "set by each call"


def describe_pattern(module: nn.Module, kind: str) -> str:
    """Return the pattern of a module as headwise spec text, or UNKNOWN_PATTERN."""
    if kind == "cross":
        return "full()"
    config = getattr(module, "config", None)
    causal = is_causal(module)
    if causal is None:
        return UNKNOWN_PATTERN
    layer_type = _read_layer_type(module, config)
    if layer_type == "chunked_attention" and causal:
        return (Causal() & Blocks(_read_int(config, "attention_chunk_size"))).text
    window = _read_window(module, config, layer_type)
    if window and causal:
        return Window(window).text
    if window:  # most configs give the reach to one side, with or without the query's own key
        if window == _read_int(config, "sliding_window") + 1:
            return Window(2 * window - 1, after=window - 1).text
        return UNKNOWN_PATTERN
    return "causal()" if causal else "full()"


def is_causal(module: nn.Module) -> bool | None:
    """Return the module's `is_causal` or `is_decoder`; None if it has neither."""
    values = [getattr(module, name, None) for name in ("is_causal", "is_decoder")]
    return next((bool(value) for value in values if value is not None), None)


def _read_layer_type(module: nn.Module, config: Any) -> str:
    """Read the layer type ("sliding_attention", ...) from the config or module; "" if unknown."""
    kinds = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if isinstance(kinds, Sequence) and isinstance(layer, int) and layer < len(kinds):
        return str(kinds[layer])
    return str(getattr(module, "attention_type", ""))


def _read_window(module: nn.Module, config: Any, layer_type: str) -> int:
    """Return the number of keys in the sliding window; 0 if there is none."""
    if "sliding_window" in vars(module):
        return _read_int(module, "sliding_window")
    if layer_type == "local":
        return _read_int(config, "window_size")
    code = getattr(unwrap(type(module).forward), "__code__", None)
    mentions_window = code is not None and "sliding_window" in (*code.co_names, *code.co_consts)
    if layer_type == "sliding_attention" or (not layer_type and mentions_window):
        return _read_int(config, "sliding_window")
    return 0


def _read_int(holder: Any, name: str) -> int:
    return read_positive_int(holder, (name,))


# --- Head sizes and sites of third-party modules --------------------------------------------------

NUM_HEADS_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads", "heads")
NUM_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_head")
GROUP_SIZE_NAMES = ("num_key_value_groups", "num_kv_groups", "n_rep")
HEAD_DIM_NAMES = (
    "qk_head_dim",
    "head_dim",
    "attention_head_size",
    "head_size",
    "key_value_proj_dim",
    "d_kv",
    "dim_head",
    "v_head_dim",
)
WIDTH_NAMES = ("embed_dim", "all_head_size", "hidden_size", "inner_dim")
CROSS_ATTENTION_NAME = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)


UNKNOWN_STACK = "model"  # stack name if neither path nor attributes identify encoder or decoder
NOT_PRUNABLE = Ability(
    False,
    "headwise cannot load this model as its own; hw.prune_module(model, heads, example) removes "
    "its heads",
)
NOT_CONVERTIBLE = Ability(
    False,
    "headwise cannot load this model as its own; hw.convert_module(model, kv, example) shares "
    "keys and values",
)


class HeadSizes(NamedTuple):
    """Store query heads, KV heads and head dimension; 0 where unknown."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def make_site(
    path: str,
    module: nn.Module,
    sizes: HeadSizes,
    *,
    pattern: str | None = None,
    observe: Ability = POSSIBLE,
    ablate: Ability | None = None,
) -> Site:
    """Make the site of a third-party module.

    The stack is "encoder" or "decoder", from its path or attributes. `ablate` is as `observe`
    unless it is given.
    """
    parts = path.split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    layer = int(parts[numbers[0]]) if numbers else 0
    is_cross = getattr(module, "is_cross_attention", False)
    is_cross = is_cross or any(CROSS_ATTENTION_NAME.search(part) for part in parts[-2:])
    kind = "cross" if is_cross else "attention"
    stack = _stack_name(parts[: numbers[0]] if numbers else parts[:-1], module)
    pattern_text = describe_pattern(module, kind) if pattern is None else pattern
    return Site(
        name=f"{stack}.{layer}.{kind}",
        stack=stack,
        layer=layer,
        kind=kind,
        path=path,
        heads=sizes.num_heads,
        q=sizes.num_heads,
        kv=sizes.num_kv_heads,
        dim=sizes.head_dim,
        pattern=pattern_text,
        spec=None,
        spec_reason="headwise has no spec for this module",
        observe=observe,
        ablate=observe if ablate is None else ablate,
        prune=NOT_PRUNABLE,
        convert=NOT_CONVERTIBLE,
    )


def is_within(path: str, other: str) -> bool:
    """Return True if the module at `path` is the module at `other` or inside it."""
    return path == other or path.startswith(f"{other}.") or not other


def overlaps(path: str, other: str) -> bool:
    """Return True if one of two modules contains the other."""
    return is_within(path, other) or is_within(other, path)


def _stack_name(path_parts: list[str], module: nn.Module) -> str:
    for part in reversed(path_parts):
        if "decoder" in part:
            return "decoder"
        if "encoder" in part:
            return "encoder"
    causal = is_causal(module)
    return UNKNOWN_STACK if causal is None else "decoder" if causal else "encoder"


def read_head_sizes(module: nn.Module) -> HeadSizes:
    """Read head sizes from the attributes of a module or its config."""
    config = getattr(module, "config", None)
    q = read_positive_int(module, NUM_HEADS_NAMES) or read_positive_int(config, NUM_HEADS_NAMES)
    kv = read_positive_int(module, NUM_KV_HEADS_NAMES)
    groups = read_positive_int(module, ("num_key_value_groups",))
    if not kv and groups:
        kv = q // groups
    dim = read_positive_int(module, HEAD_DIM_NAMES)
    dim = dim or read_positive_int(config, ("head_dim", "d_kv"))
    if not dim and q:
        width = read_positive_int(module, WIDTH_NAMES)
        dim = (width or read_positive_int(config, ("hidden_size", "d_model"))) // q
    return HeadSizes(q, kv or q, dim)


def read_positive_int(source: Any, names: tuple[str, ...]) -> int:
    """Return the first of these attributes that is a positive int; 0 if none is."""
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


# --- Banded weights of Longformer and LED ---------------------------------------------------------
#
# A row of weights is [global keys, then keys from `half_window` before to `half_window` behind the
# query]; queries with global attention have separate rows over all keys (Longformer,
# arXiv:2004.05150, section 3.1).

WINDOW_ATTRIBUTE = "one_sided_attn_window_size"


def run_banded(
    module: nn.Module, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, WeightsOnlyCall]:
    """Run a banded module; return its output and its weights [B, H, T, S]."""
    bound = signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    weights_requested = bound.arguments.pop("output_attentions")
    arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
    z, band, *rows = run(**arguments, output_attentions=True)
    is_global = arguments["is_index_global_attn"] if rows else None
    weights = unband_weights(
        band, getattr(module, WINDOW_ATTRIBUTE), is_global, rows[0] if rows else None
    )
    return (z, band, *rows) if weights_requested else (z,), WeightsOnlyCall(weights)


def unband_weights(
    band: Tensor, half_window: int, is_global_BT: Tensor | None, rows: Tensor | None
) -> Tensor:
    """Expand a band [B, T, H, global + 2 half_window + 1] into weights [B, H, T, S].

    The rows of global queries are given separately.

    >>> band = torch.tensor([[0.0, 0.9, 0.1], [0.2, 0.3, 0.5], [0.6, 0.4, 0.0]])[None, :, None]
    >>> unband_weights(band, 1, None, None)[0, 0]
    tensor([[0.9000, 0.1000, 0.0000],
            [0.2000, 0.3000, 0.5000],
            [0.0000, 0.6000, 0.4000]])
    """
    batch, length, heads, band_width = band.shape
    num_global = band_width - 2 * half_window - 1
    padded = band.new_zeros(batch, length, heads, length + 2 * half_window)
    offsets = torch.arange(2 * half_window + 1, device=band.device)
    columns = torch.arange(length, device=band.device)[:, None] + offsets
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


# --- Attention modules with an output projection --------------------------------------------------

SOFTMAX_NAMES = ("softmax", "scaled_dot_product_attention")
WEIGHTS_NOT_VISIBLE = Ability(
    False, f"its code calls no softmax by name, so its weights cannot be traced; {BY_A_RUN}"
)
UNCLEAR_PROJECTION = "unclear projection"
MISMATCH_REASON = "the input of its projection is not weights @ values"


def find_projected_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield sites of declared modules and "...Attention..." modules with a projection found by
    name.

    If the projection is unclear, the site has no abilities.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        declaration = get_declaration(module)
        if declaration is None:
            guess = _guess_projection(path, module, modules)
            if guess is None:
                continue
            if isinstance(guess, str):
                impossible = Ability(False, f"{guess}; {BY_A_RUN}")
                site = make_site(path, module, read_head_sizes(module), observe=impossible)
                yield SiteModule(site, module, UNCLEAR_PROJECTION)
                continue
            declaration = guess
        projection = modules[_projection_path(path, declaration.output_name)]
        declared = declaration.projections
        heads = declaration.heads
        own_kv = read_positive_int(module, NUM_KV_HEADS_NAMES)
        kv_heads = own_kv if own_kv and heads % own_kv == 0 else heads
        if declared is not None:
            kv_heads = declared.num_kv_heads
        sizes = HeadSizes(heads, kv_heads, get_input_width(projection) // heads)
        is_visible = _names_softmax(module)
        site = make_site(
            path,
            module,
            sizes,
            observe=hook_ability(module) if is_visible else WEIGHTS_NOT_VISIBLE,
            ablate=hook_ability(projection),
        )
        if declared is not None:
            site = replace(site, prune=IF_EXACT)
        overrides = (
            ForwardOverride(projection, run_projection, (heads, module)),
            ForwardOverride(module, run_attention, (projection, heads)),
        )
        yield SiteModule(site, module, "output projection", overrides=overrides)


def _guess_projection(
    path: str, module: nn.Module, modules: dict[str, nn.Module]
) -> AttentionDeclaration | str | None:
    """Guess heads and projection from names, or give the reason why they are unclear.

    The projection is a child, or a sibling as in BERT.
    """
    if "Attention" not in type(module).__name__ or isinstance(module, nn.MultiheadAttention):
        return None
    heads = read_positive_int(module, NUM_HEADS_NAMES)
    if not heads:
        return None
    parent = modules.get(path.rpartition(".")[0])
    reason = "it has no output projection of a usual name"
    for name in OUTPUT_PROJECTION_NAMES:
        if name.startswith("^") and "Attention" not in type(parent).__name__:
            continue  # the sibling may belong to a feed-forward layer
        projection = modules.get(_projection_path(path, name))
        width = 0 if projection is None else get_input_width(projection)
        if not width or width % heads:
            continue
        dims = {read_positive_int(module, (attribute,)) for attribute in HEAD_DIM_NAMES} - {0}
        if dims and width // heads not in dims:
            sizes = " or ".join(f"{heads} heads of {dim}" for dim in sorted(dims))
            reason = f"{name.removeprefix('^')} reads {width} channels, which are not {sizes}"
            continue
        others = [
            other
            for other, child in module.named_modules()
            if get_input_width(child) == width
            and "out" in re.split(r"[._]", other)
            and not is_within(other, name)
        ]
        several = f"it has several output projections ({name}, {', '.join(others)})"
        return several if others else AttentionDeclaration(heads, name)
    return reason


def _projection_path(path: str, name: str) -> str:
    parent = path.rpartition(".")[0] if name.startswith("^") else path
    return f"{parent}.{name.removeprefix('^')}".removeprefix(".")


def _names_softmax(module: nn.Module) -> bool:
    """Return True if the code of a module or of its submodules names a softmax function."""
    classes: set[type] = set()
    for part in module.modules():
        if type(part).__name__.lower() in SOFTMAX_NAMES:
            return True
        classes.update(type(part).__mro__)
    for cls in classes:
        if cls.__module__.partition(".")[0] == "torch":
            continue
        for member in vars(cls).values():
            code = getattr(unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and not set(SOFTMAX_NAMES).isdisjoint(code.co_names):
                return True
    return False


def run_attention(
    module: nn.Module,
    run: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    projection: nn.Module,
    heads: int,
) -> Any:
    """Run an attention module; trace its attention if a hook needs it.

    Observes the attention with the head outputs that enter the projection.
    """
    hooks = get_hooks(module)
    if not any(hook.needs_call for hook in hooks):
        return run(*args, **kwargs)
    if isinstance(getattr(module, WINDOW_ATTRIBUTE, None), int):  # it returns weights as a band
        result, call = run_banded(module, run, args, kwargs)
        run_call_hooks(hooks, lambda: call)
        return result
    traced: list[TracedAttention] = []
    inputs: list[Tensor] = []

    def observe(z: Tensor) -> None:
        """Observe the attention with these outputs, at the first call of the projection."""
        inputs.append(z)
        if len(inputs) == 1:
            run_call_hooks(hooks, lambda: _find_call(traced, _split_heads(z, heads)))

    def read_input(_: nn.Module, run: Function, args: Any, kwargs: Any) -> Any:
        observe(args[0])
        return run(*args, **kwargs)

    axes = [JointAxis(heads, order) for order in (BATCH_FIRST, HEADS_FIRST)]
    tracer = AttentionTracer(traced.append, axes)
    with tracer, override_forwards([ForwardOverride(projection, read_input)]):
        result = run(*args, **kwargs)
    z = result[0] if isinstance(result, tuple) else result
    if isinstance(z, Tensor) and z.shape[-1] == get_input_width(projection):
        observe(z)  # the projection is a sibling
    return result


def _find_call(traced: Sequence[TracedAttention], z_BTHV: Tensor) -> ObservedCall:
    """Return the call with these head outputs, or an unreadable call."""
    call: ObservedCall = UnreadableCall(MISMATCH_REASON)
    for attention in reversed(traced):
        other = attention.z_BTHV
        if attention.reason:
            call = attention.call
        elif other.shape == z_BTHV.shape and torch.equal(other.to(z_BTHV.dtype), z_BTHV):
            return attention.call
    return call


def run_projection(
    module: nn.Module,
    run: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    heads: int,
    hooked: nn.Module,
) -> Any:
    """Run an output projection on the head outputs that the hooks of an attention module return."""
    hooks = get_hooks(hooked)
    if not hooks:
        return run(*args, **kwargs)
    z_BTHV = run_output_hooks(hooks, _split_heads(args[0], heads))
    return run(z_BTHV.reshape(args[0].shape), *args[1:], **kwargs)


def _split_heads(z: Tensor, heads: int) -> Tensor:
    """Split the input of a projection as [B, T, heads, head_dim].

    It may have two token axes, or no batch axis.
    """
    return z.reshape(z.shape[0] if z.dim() > 2 else 1, -1, heads, z.shape[-1] // heads)
