"""Adapt attention with known calls: `hw.Attention` and transformers' `AttentionInterface`.

`hw.Attention` is read by its probe and its method `attend`. Two thirds of transformers' model files
use `AttentionInterface`.

Their forward gets a function from `AttentionInterface.get_interface`, and calls it with queries,
keys and values after position encoding; it returns the head outputs. While hooks are active, that
function is wrapped: the model's choice of function, and the mask made for it, stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from ....attention import backends
from ....attention.attention import Attention
from ....attention.attention_call import AttentionArguments, PlannedCall
from ....attention.backends import CallSignature, CoreInputs
from ....attention.interfaces.core_types import Probe
from ....attention.masking.sequence_info import AttentionMask, SequenceInfo
from ....models import Transformer
from ..hooks import (
    Function,
    SharedPatch,
    SiteModule,
    get_hooks,
    patch_method,
    run_call_hooks,
    run_output_hooks,
    run_vector_hooks,
)
from ..site import ALL, POSSIBLE, Ability, AttentionInputs, ObservedCall
from .declarations import get_declaration
from .output_path import INTERFACE_GETTER, edit_behind_function, edit_place, projection_overrides
from .output_projection import HeadSizes, make_site, read_head_sizes

BACKEND_NAME = "headwise"  # name of headwise's attention function in transformers
# Their mask covers all hidden pairs, so they ignore `sliding_window` and packed positions.
MASK_BASED = ("eager", "sdpa", "flex_attention", BACKEND_NAME)
# Options of the function that are applied when weights are recomputed, and options that do not
# affect scores. A tensor under any other name makes the call unsupported.
SUPPORTED_OPTIONS = frozenset(
    {"dropout", "scaling", "is_causal", "sliding_window", "softcap", "s_aux", "position_bias"}
)
IGNORED_OPTIONS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "output_attentions",
        "use_cache",
        "cache_position",
        "deterministic",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "position_embeddings",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "past_key_values",
        "logits_to_keep",
        "token_type_ids",
    }
)
KNOWN_OPTIONS = {"query", "key", "value"} | SUPPORTED_OPTIONS | IGNORED_OPTIONS


def find_interface_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield the sites of modules that use transformers' attention interface."""
    if "transformers" not in sys.modules:
        return
    for path, module in model.named_modules(remove_duplicate=False):
        declaration = get_declaration(module)
        has_declared_heads = declaration is not None and declaration.projections is None
        code = getattr(unwrap(type(module).forward), "__code__", None)
        uses_interface = code is not None and INTERFACE_GETTER in code.co_names
        if uses_interface and not has_declared_heads:
            sizes = read_head_sizes(module)
            reason = edit_place(module).reason
            site = make_site(path, module, sizes, observe=Ability(not reason, reason))
            overrides = projection_overrides(module, sizes.num_heads)
            yield SiteModule(
                site, module, "transformers", patches=(_interface_patch(),), overrides=overrides
            )


@cache
def _interface_patch() -> SharedPatch:
    from transformers.modeling_utils import AttentionInterface

    return patch_method(AttentionInterface, INTERFACE_GETTER, _wrap_getter)


def _wrap_getter(original: Function) -> Function:
    def get_interface(self: Any, name: str | None, default: Function) -> Function:
        return partial(_call_with_hooks, original(self, name, default), str(name))

    return get_interface


def _call_with_hooks(
    function: Function, name: str, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    hooks = get_hooks(module)
    if not hooks:
        return function(module, *args, **kwargs)
    make_call = partial(inputs_of_call, name, module, args, kwargs)
    run_call_hooks(hooks, make_call)
    z, *rest = function(module, *args, **kwargs)
    z = run_vector_hooks(hooks, make_call, z)
    return edit_behind_function(module, hooks, z), *rest


def inputs_of_call(
    name: str, module: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]
) -> AttentionInputs:
    """Build attention inputs from the arguments of the attention function called `name`."""
    names = ("query", "key", "value", "attention_mask")
    arguments = {**dict(zip(names, args, strict=False)), **options}
    q, k, v = (arguments[side].transpose(1, 2) for side in ("query", "key", "value"))
    mask = arguments.get("attention_mask")
    scale = arguments.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sinks = arguments.get("s_aux", getattr(module, "sinks", None))
    is_causal = _is_causal_call(name, module, arguments, q.shape[1])
    unsupported = _unsupported_options(name, arguments, mask)
    if mask is None and not _is_mask_based(name):
        mask = _flash_mask(arguments, is_causal)
        is_causal = is_causal and mask is None
    return AttentionInputs(
        q,
        k,
        v,
        float(scale),
        mask,
        is_causal,
        arguments.get("position_bias"),
        arguments.get("softcap"),
        sinks if isinstance(sinks, Tensor) else None,
        unsupported,
    )


def _is_causal_call(
    name: str, module: nn.Module, arguments: Mapping[str, Any], queries: int
) -> bool:
    """Return True if the function applies a causal mask, as SDPA does without a mask."""
    if name == "eager" or arguments.get("attention_mask") is not None or queries == 1:
        return False
    is_causal = arguments.get("is_causal")
    if name == BACKEND_NAME:  # gets explicit masks, so only is_causal=True counts
        return bool(is_causal)
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _is_mask_based(name: str) -> bool:
    """Return True if the function gets a mask of pairs.

    It is one of the known functions, or is registered with their mask.
    """
    from transformers.masking_utils import AttentionMaskInterface

    masks = AttentionMaskInterface()
    return name in MASK_BASED or (
        name in masks and masks[name] in [masks.get(other) for other in MASK_BASED]
    )


def _flash_mask(arguments: Mapping[str, Any], is_causal: bool) -> Tensor | None:
    """Build the mask [1, 1, queries, keys] of a FlashAttention call; None if `is_causal` is enough.

    The last query is at the position of the last key. `sliding_window` is the number of keys up to
    the query's own, and, without causality, also from it.
    """
    query = arguments["query"]
    key = arguments["key"]
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    window = arguments.get("sliding_window") or 0
    has_window = 0 < window < num_keys
    if not has_window and (not is_causal or num_queries == num_keys):
        return None
    positions = torch.arange(num_keys, device=query.device)
    distance = positions[num_keys - num_queries :, None] - positions
    allowed = distance.abs() < window if has_window else torch.ones_like(distance, dtype=torch.bool)
    return (allowed & (distance >= 0) if is_causal else allowed)[None, None]


def _is_packed(arguments: Mapping[str, Any]) -> bool:
    """Return True if FlashAttention separates several texts in one row.

    The texts are separated by their lengths, or by positions that start again.
    """
    if arguments.get("cu_seq_lens_q") is not None:
        return True
    positions = arguments.get("position_ids")
    is_one_row = (
        isinstance(positions, Tensor) and positions.dim() == 2 and len(arguments["query"]) == 1
    )
    return is_one_row and bool((torch.as_tensor(positions).diff() != 1).any())


def _unsupported_options(name: str, arguments: Mapping[str, Any], mask: object) -> str:
    tensors = [key for key, value in arguments.items() if isinstance(value, Tensor)]
    unknown = [key for key in tensors if key not in KNOWN_OPTIONS]
    if unknown:
        return f"the layer also gets {', '.join(unknown)}"
    if arguments.get("cache") is not None:
        return "its keys and values are in the paged cache of continuous batching"
    if mask is None and not _is_mask_based(name) and _is_packed(arguments):
        return "its texts are packed into one row"
    if isinstance(mask, Tensor) and mask.dim() != 4:
        return f"its mask has {mask.dim()} axes"
    is_known = mask is None or isinstance(mask, Tensor)
    return "" if is_known else f"its mask is a {type(mask).__name__}"


# --- `hw.Attention` -------------------------------------------------------------------------------


def find_headwise_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield the site of every `hw.Attention`.

    Its spec describes it completely, so its weights can be recomputed for any queries.
    """
    names: set[str] = set()
    if isinstance(model, Transformer):
        names.update(name for name, _ in model.spec.attention_specs())
    modules = model.named_modules(remove_duplicate=False)
    layers = [(path, module) for path, module in modules if isinstance(module, Attention)]
    for number, (path, module) in enumerate(layers):
        name = path if path in names else f"model.{number}.attention"
        stack, layer, kind = name.split(".")
        site = make_site(path, module, HeadSizes(0, 0, 0), pattern="")
        site = replace(site, name=name, stack=stack, layer=int(layer), kind=kind)
        site = site.with_spec(module.spec, POSSIBLE)
        yield SiteModule(site, module, "headwise", patches=ATTENTION_PATCHES)


class HeadwiseCall(ObservedCall):
    """Recompute any rows of weights of one `hw.Attention` call."""

    def __init__(self, signature: CallSignature, inputs: CoreInputs) -> None:
        self.signature = signature
        self.inputs = backends.gather_pages(inputs)

    @property
    def queries(self) -> Tensor | None:
        return self.inputs.q

    def all_weights(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        if backends.is_softmax_with_bias(self.signature):
            if self._causal_inputs is not None:
                return self._causal_inputs.all_weights(queries, keys)
            return self._make_inputs(_slice_call(self._inputs_by_head, queries, keys)).all_weights()
        signature = replace(self.signature, probed_tensors=frozenset({"weights"}), training=False)
        probe = Probe("weights")
        sliced = _slice_call(self.inputs, queries)._replace(probe=probe)
        backends.make_dispatch(signature).attend(sliced)
        return probe.tensors["weights"][..., keys]

    @cached_property
    def _inputs_by_head(self) -> CoreInputs:
        """Return inputs with keys contiguous by head, for repeated reads by bands."""
        by_head = self.inputs.k.transpose(1, 2).contiguous().transpose(1, 2)
        return self.inputs._replace(k=by_head)

    @cached_property
    def _causal_inputs(self) -> AttentionInputs | None:
        """Return the whole call if its mask is causal and nothing else changes scores."""
        if self.inputs.steps.scores or self.inputs.mask.shape != "triangle":
            return None
        return self._make_inputs(self._inputs_by_head)

    def allowed_pairs(self, queries: slice = ALL) -> Tensor:
        return _slice_call(self.inputs, queries).mask.allowed

    def head_values(self, head: int) -> tuple[int, Tensor]:
        spec = self.signature.spec
        row = spec.score_head_of_row.index(spec.score_head_of_output[head])
        return row, self.inputs.v[:, :, self.signature.core.value_head_of_row[row]]

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        """Return the inputs as tensors if the layer is plain softmax attention, else None."""
        if not backends.is_softmax_with_bias(self.signature):
            return None
        inputs = self._make_inputs(self.inputs)
        return replace(inputs, key_positions=self.key_positions)

    @property
    def streamable_inputs(self) -> AttentionInputs | None:
        if self.inputs.steps.scores or not backends.is_softmax_with_bias(self.signature):
            return None
        return self._make_inputs(self.inputs)

    def _make_inputs(self, inputs: CoreInputs) -> AttentionInputs:
        softmax_args = backends.softmax_args(inputs)
        core = self.signature.core
        k = inputs.k
        v = inputs.v
        kv_heads = None if self.signature.group_size else core.key_head_of_query
        if core.value_head_of_row != core.key_head_of_query:
            # different groups: give each head its own key and value
            k = k[:, :, list(core.key_head_of_query)]
            v = v[:, :, list(core.value_head_of_row)]
            kv_heads = tuple(range(len(core.key_head_of_query)))
        return AttentionInputs(
            inputs.q,
            k,
            v,
            inputs.query_context.scale,
            softmax_args.mask,
            softmax_args.causal,
            softmax_args.bias,
            sinks=softmax_args.sinks,
            kv_head_of_query=kv_heads,
        )

    @property
    def key_positions(  # pyright: ignore[reportIncompatibleVariableOverride] - computed when read
        self,
    ) -> Tensor | None:
        """Return key positions, -1 for an empty slot.

        None unless all rows have the same positions and one segment.
        """
        keys = self.inputs.mask.keys
        position = keys.position[:1]
        segment = keys.segment[:1]
        if not bool((keys.position == position).all()):
            return None
        if keys.num_visible is not None:  # all keys are visible; a cache may set segments later
            return position[0]
        if not bool((keys.segment == segment).all()) or bool((segment > 0).any()):
            return None
        return torch.where(segment[0] < 0, -1, position[0])


def _slice_call(inputs: CoreInputs, queries: slice, keys: slice = ALL) -> CoreInputs:
    """Restrict a call to a range of queries.

    Also restricts it to a range of keys if scores are only changed by adding to them.
    """
    keys_info = inputs.mask.keys
    mask = inputs.mask.mask
    sliced_queries = _slice_sequence(inputs.mask.queries, queries)
    if keys != ALL:
        keys_info = _slice_sequence(keys_info, keys)
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        mask = mask if mask.shape[3] == 1 else mask[..., keys]
    context = inputs.query_context
    context = context._replace(
        x_BTD=context.x_BTD[:, queries], q_BTHK=context.q_BTHK[:, queries], sequence=sliced_queries
    )
    return inputs._replace(
        q=inputs.q[:, queries],
        k=inputs.k[:, keys],
        v=inputs.v[:, keys],
        mask=AttentionMask(sliced_queries, keys_info, inputs.mask.pattern, mask),
        query_context=context,
    )


def _slice_sequence(tokens: SequenceInfo, part: slice) -> SequenceInfo:
    visible = tokens.num_visible
    return SequenceInfo(
        tokens.position[:, part],
        tokens.segment[:, part],
        checked=True,
        num_visible=None if visible is None else len(range(visible)[part]),
    )


def _wrap_head_outputs(original: Function) -> Function:
    def head_outputs_and_gates(self: Attention, arguments: AttentionArguments) -> Any:
        hooks = get_hooks(self)
        if hooks:
            own = Probe() if arguments.probe is None else arguments.probe

            def callback(point: str, tensor: Tensor) -> Tensor | None:
                return own(point, run_output_hooks(hooks, tensor) if point == "heads" else tensor)

            arguments = arguments._replace(
                probe=Probe(*own.points, "heads", callback=callback, aux_losses=own.aux_losses)
            )
        return original(self, arguments)

    return head_outputs_and_gates


def _wrap_attend(original: Function) -> Function:
    def attend(self: Attention, call: PlannedCall, inputs: CoreInputs) -> Tensor:
        hooks = get_hooks(self)
        make_call = partial(HeadwiseCall, call.plan.signature, inputs)
        run_call_hooks(hooks, make_call)
        return run_vector_hooks(hooks, make_call, original(self, call, inputs))

    return attend


ATTENTION_PATCHES = (
    patch_method(Attention, "head_outputs_and_gates", _wrap_head_outputs),
    patch_method(Attention, "attend", _wrap_attend),
)
