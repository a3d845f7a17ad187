"""Adapters for `nn.MultiheadAttention` and `hw.Attention`, anywhere in a model.

The forward of `nn.MultiheadAttention` passes the weight of the output projection to a function, so
a hook on that projection never runs; and a whole encoder layer may use a fast path that calls no
forward at all. While hooks are active, the function gets an identity matrix in place of the
projection, the hooks run on the head outputs, and these are then projected. The fast path is
disabled meanwhile. `hw.Attention` is hooked by its probe and its method `attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....attention import backends
from ....attention.attention import Attention
from ....attention.attention_call import AttentionArguments, PlannedCall
from ....attention.backends import CallSignature, CoreInputs, CoreSteps
from ....attention.interfaces.core_types import Probe
from ....attention.masking.sequence_info import AttentionMask, SequenceInfo
from ....models import Transformer
from ..hooks import (
    AttentionHook,
    AttentionInputs,
    HeadValues,
    SiteAdapter,
    SiteModule,
    WeightsOnlyCall,
    get_hooks,
    run_output_hooks,
)
from ..method_patches import MethodPatch, SharedPatch
from ..site import POSSIBLE, Site
from .module_tracer import hook_ability
from .output_projection import UNKNOWN_PATTERN, HeadSizes, make_site

# --- `nn.MultiheadAttention` ----------------------------------------------------------------------


class TorchMHAAdapter(SiteAdapter):
    """Every nn.MultiheadAttention."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, nn.MultiheadAttention):
                sizes = HeadSizes(module.num_heads, module.num_heads, module.head_dim)
                ability = hook_ability(module)
                yield SiteModule(
                    make_site(
                        path,
                        module,
                        sizes,
                        pattern=UNKNOWN_PATTERN,
                        observe=ability,
                        ablate=ability,
                    ),
                    module,
                    self,
                )

    def patches(self) -> list[SharedPatch]:
        return [FORWARD_PATCH, FAST_PATH_SWITCH]


class FastPathSwitch(SharedPatch):
    """Disables torch's fast path for whole encoder layers while hooks are active."""

    was_enabled = True

    def apply(self) -> None:
        self.was_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def revert(self) -> None:
        torch.backends.mha.set_fastpath_enabled(self.was_enabled)


def _wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        hooks = get_hooks(self)
        if not hooks:
            return original(self, query, key, value, *args, **kwargs)
        names = (
            "key_padding_mask",
            "need_weights",
            "attn_mask",
            "average_attn_weights",
            "is_causal",
        )
        options = dict(zip(names, args, strict=False)) | kwargs
        z, weights = _compute_head_outputs(self, (query, key, value), options)
        for hook in hooks:
            if hook.needs_call:
                hook.on_call(WeightsOnlyCall(weights if weights.dim() == 4 else weights[None]))
        y = F.linear(_run_hooks(self, hooks, z), self.out_proj.weight, self.out_proj.bias)
        return y, _format_weights(weights, options)

    return forward


FORWARD_PATCH = MethodPatch(nn.MultiheadAttention, "forward", _wrap_forward)
FAST_PATH_SWITCH = FastPathSwitch()


def _compute_head_outputs(
    self: nn.MultiheadAttention, inputs: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Concatenated head outputs, shaped like the output, and the weights of each head."""
    transpose = self.batch_first and inputs[0].dim() == 3
    query, key, value = (x.transpose(0, 1) if transpose else x for x in inputs)
    identity = torch.eye(self.embed_dim, dtype=query.dtype, device=query.device)
    separate = (
        {}
        if self._qkv_same_embed_dim
        else {
            "use_separate_proj_weight": True,
            "q_proj_weight": self.q_proj_weight,
            "k_proj_weight": self.k_proj_weight,
            "v_proj_weight": self.v_proj_weight,
        }
    )
    z, weights = F.multi_head_attention_forward(
        query,
        key,
        value,
        self.embed_dim,
        self.num_heads,
        cast(Tensor, self.in_proj_weight),
        self.in_proj_bias,
        self.bias_k,
        self.bias_v,
        self.add_zero_attn,
        self.dropout,
        identity,
        None,
        training=self.training,
        key_padding_mask=options.get("key_padding_mask"),
        need_weights=True,
        attn_mask=options.get("attn_mask"),
        average_attn_weights=False,
        is_causal=options.get("is_causal", False),
        **separate,
    )
    return z.transpose(0, 1) if transpose else z, cast(Tensor, weights)


def _run_hooks(self: nn.MultiheadAttention, hooks: Any, z: Tensor) -> Tensor:
    """Run the hooks on head outputs in the layout [B, T, heads, head_dim] that they expect."""
    by_head = z.unflatten(-1, (self.num_heads, self.head_dim))
    if z.dim() == 2:
        return run_output_hooks(hooks, by_head[None])[0].flatten(-2)
    if self.batch_first:
        return run_output_hooks(hooks, by_head).flatten(-2)
    return run_output_hooks(hooks, by_head.transpose(0, 1)).transpose(0, 1).flatten(-2)


def _format_weights(weights: Tensor, options: dict[str, Any]) -> Tensor | None:
    if not options.get("need_weights", True):
        return None
    return weights.mean(-3) if options.get("average_attn_weights", True) else weights


# --- `hw.Attention` -------------------------------------------------------------------------------


class HeadwiseAdapter(SiteAdapter):
    """Every `hw.Attention`. Its spec describes it completely, so its weights can be recomputed for
    any queries.
    """

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        names = (
            [name for name, _ in model.spec.attention_specs()]
            if isinstance(model, Transformer)
            else []
        )
        modules = model.named_modules(remove_duplicate=False)
        layers = [(path, module) for path, module in modules if isinstance(module, Attention)]
        for number, (path, module) in enumerate(layers):
            stack, layer, kind = (
                _split_path(path, number) if path in names else ("model", number, "attention")
            )
            name = path if path in names else f"{stack}.{layer}.{kind}"
            yield SiteModule(_make_site(name, (stack, layer, kind), path, module), module, self)

    def patches(self) -> Sequence[SharedPatch]:
        return ATTENTION_PATCHES

    def visible_tensors(self, module: nn.Module) -> str:
        assert isinstance(module, Attention)
        spec = module.spec
        return (
            "scores"
            if backends.is_softmax_with_bias(
                CallSignature(spec, spec.core_of(spec.projection_form(one=False)))
            )
            else "weights"
        )


class HeadwiseCall:
    """One call of an `hw.Attention`; recomputes any rows of its weights."""

    def __init__(
        self, signature: CallSignature, mask: AttentionMask, inputs: CoreInputs, steps: CoreSteps
    ) -> None:
        self.signature = signature
        self.steps = steps
        self.mask, self.inputs = backends.gather_pages(mask, inputs)
        self._by_head: CoreInputs | None = None

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Attention weights of one head for a range of queries, [B, T, S]."""
        return self.all_weights(queries)[:, head]

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Attention weights of all heads for a range of queries, [B, H, T, S]. `keys` must include
        all allowed keys.
        """
        if backends.is_softmax_with_bias(self.signature):
            return self._make_inputs(
                *_slice_call(self.mask, self._inputs_by_head, queries, keys)
            ).all_weights()
        signature = replace(self.signature, probed_tensors=frozenset({"weights"}), training=False)
        probe = Probe("weights")
        sliced = _slice_call(self.mask, self.inputs, queries)
        backends.make_dispatch(signature).attend(*sliced, self.steps, probe)
        return probe.tensors["weights"][..., keys]

    @property
    def _inputs_by_head(self) -> CoreInputs:
        """Inputs with the keys stored contiguously by head, for repeated reads
        by bands of queries.
        """
        if self._by_head is None:
            self._by_head = self.inputs._replace(
                k=self.inputs.k.transpose(1, 2).contiguous().transpose(1, 2)
            )
        return self._by_head

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Boolean mask of the keys that a range of queries may attend to, [B or 1, 1, T, S]."""
        return _slice_call(self.mask, self.inputs, queries)[0].allowed

    def head_values(self, head: int) -> HeadValues:
        """Row of weights and values of an output head."""
        spec = self.signature.spec
        row = spec.score_head_of_row.index(spec.score_head_of_output[head])
        return HeadValues(row, self.inputs.v[:, :, self.signature.core.value_head_of_row[row]])

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        """The inputs as tensors if the layer is plain softmax attention, else None."""
        return (
            self._make_inputs(self.mask, self.inputs)
            if backends.is_softmax_with_bias(self.signature)
            else None
        )

    def _make_inputs(self, mask: AttentionMask, inputs: CoreInputs) -> AttentionInputs:
        softmax_args = backends.softmax_args(mask, inputs, self.steps)
        core = self.signature.core
        k = inputs.k
        v = inputs.v
        kv_heads = None if self.signature.group_size else core.key_head_of_query
        if (
            core.value_head_of_row != core.key_head_of_query
        ):  # different groups: give each head its own key and value
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
            key_positions=self.key_positions,
        )

    @property
    def key_positions(self) -> Tensor | None:
        """Positions of the keys in the text, -1 for an empty slot; None if rows differ."""
        return _token_numbers(self.mask.keys)


def _token_numbers(keys: SequenceInfo) -> Tensor | None:
    """Positions of the keys, -1 for an empty slot; None unless all rows have the same positions and
    one segment.
    """
    position = keys.position[:1]
    segment = keys.segment[:1]
    if keys.num_visible is not None:  # all keys are visible; a cache may set segments later
        return position[0] if bool((keys.position == position).all()) else None
    rows_equal = bool((keys.position == position).all()) and bool((keys.segment == segment).all())
    return (
        torch.where(segment[0] < 0, -1, position[0])
        if rows_equal and not bool((segment > 0).any())
        else None
    )


def _slice_call(
    attention_mask: AttentionMask, inputs: CoreInputs, queries: slice, keys: slice = slice(None)
) -> tuple[AttentionMask, CoreInputs]:
    """Restrict a call to a range of queries, and to a range of keys if scores are only changed by
    adding to them.
    """
    queries_info = attention_mask.queries
    keys_info = attention_mask.keys
    context = inputs.query_context
    mask = attention_mask.mask
    sliced_queries = SequenceInfo(
        queries_info.position[:, queries], queries_info.segment[:, queries], checked=True
    )
    if keys != slice(None):
        num_visible = (
            None if keys_info.num_visible is None else len(range(keys_info.num_visible)[keys])
        )
        keys_info = SequenceInfo(
            keys_info.position[:, keys],
            keys_info.segment[:, keys],
            checked=True,
            num_visible=num_visible,
        )
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        mask = mask if mask.shape[3] == 1 else mask[..., keys]
    context = context._replace(
        x_BTD=context.x_BTD[:, queries], q_BTHK=context.q_BTHK[:, queries], sequence=sliced_queries
    )
    inputs = inputs._replace(
        q=inputs.q[:, queries], k=inputs.k[:, keys], v=inputs.v[:, keys], query_context=context
    )
    return AttentionMask(sliced_queries, keys_info, attention_mask.pattern, mask), inputs


def _split_path(path: str, number: int) -> tuple[str, int, str]:
    stack, layer, kind = path.split(".")
    return stack, int(layer), kind


def _make_site(name: str, place: tuple[str, int, str], path: str, module: Attention) -> Site:
    spec = module.spec
    heads = spec.heads
    stack, layer, kind = place
    return Site(
        name=name,
        stack=stack,
        layer=layer,
        kind=kind,
        path=path,
        heads=len(spec.score_head_of_output),
        q=heads.q,
        kv=heads.kv,
        dim=heads.dim,
        pattern=spec.pattern.text,
        spec=spec,
        spec_reason="",
        observe=POSSIBLE,
        ablate=POSSIBLE,
        prune=POSSIBLE,
        convert=POSSIBLE,
    )


def _wrap_head_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def head_outputs_and_gates(self: Attention, arguments: AttentionArguments) -> Any:
        hooks = get_hooks(self)
        if hooks:
            arguments = arguments._replace(probe=_join_probe(hooks, arguments.probe))
        return original(self, arguments)

    return head_outputs_and_gates


def _wrap_attend(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(
        self: Attention, call: PlannedCall, attention_mask: AttentionMask, inputs: CoreInputs
    ) -> Tensor:
        hooks = [hook for hook in get_hooks(self) if hook.needs_call]
        if hooks:
            observed_call = HeadwiseCall(
                call.plan.signature, attention_mask, inputs, self.core_steps
            )
            for hook in hooks:
                hook.on_call(observed_call)
        return original(self, call, attention_mask, inputs)

    return attend


ATTENTION_PATCHES = (
    MethodPatch(Attention, "head_outputs_and_gates", _wrap_head_outputs),
    MethodPatch(Attention, "attend", _wrap_attend),
)


def _join_probe(hooks: tuple[AttentionHook, ...], probe: Probe | None) -> Probe:
    """A probe that runs the hooks on head outputs, and then the caller's own probe."""
    own_points = probe.points if probe is not None else frozenset[str]()

    def callback(point: str, tensor: Tensor) -> Tensor | None:
        if point == "heads":
            tensor = run_output_hooks(hooks, tensor)
        return probe(point, tensor) if probe is not None and point in own_points else tensor

    return Probe(
        *own_points,
        "heads",
        callback=callback,
        aux_losses=probe.aux_losses if probe is not None else None,
    )
