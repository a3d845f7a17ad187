"""Adapters for `nn.MultiheadAttention` and `hw.Attention`, anywhere in a model.

The forward of `nn.MultiheadAttention` passes the weight of the output projection to a function, so
a hook on that projection never runs; and a whole encoder layer may use a fast path that calls no
forward at all. While hooks are active, the function gets an identity matrix in place of the
projection, the hooks run on the head outputs, and these are then projected. The fast path is
disabled meanwhile. `hw.Attention` is hooked by its probe and its method `attend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
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
from ..hooks import AttentionHook, SiteModule, get_hooks, run_call_hooks, run_output_hooks
from ..method_patches import Function, SharedPatch, patch_method
from ..observed_call import ALL, AttentionInputs, HeadValues, ObservedCall, WeightsOnlyCall
from ..site import POSSIBLE, Site
from .module_tracer import hook_ability
from .output_projection import UNKNOWN_PATTERN, HeadSizes, make_site

# --- `nn.MultiheadAttention` ----------------------------------------------------------------------


def find_torch_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield the site of every nn.MultiheadAttention."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            sizes = HeadSizes(module.num_heads, module.num_heads, module.head_dim)
            site = make_site(
                path, module, sizes, pattern=UNKNOWN_PATTERN, observe=hook_ability(module)
            )
            yield SiteModule(site, module, "torch", patches=(TORCH_FORWARD, SLOW_PATH))


@contextmanager
def _slow_path() -> Iterator[None]:
    """Context without torch's fast path for whole encoder layers."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


SLOW_PATH = SharedPatch(_slow_path)
INPUT_NAMES = ("query", "key", "value")
OPTION_NAMES = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights")
SEPARATE_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _wrap_torch_forward(original: Function) -> Function:
    def forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        hooks = get_hooks(self)
        if not hooks:
            return original(self, *args, **kwargs)
        names = (*INPUT_NAMES, *OPTION_NAMES, "is_causal")
        return _run_torch_attention(self, hooks, dict(zip(names, args, strict=False)) | kwargs)

    return forward


TORCH_FORWARD = patch_method(nn.MultiheadAttention, "forward", _wrap_torch_forward)


def _run_torch_attention(
    module: nn.MultiheadAttention, hooks: tuple[AttentionHook, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Run a module with hooks on its head outputs; returns what its forward returns."""
    is_transposed = module.batch_first and options["query"].dim() == 3
    query, key, value = (options[name] for name in INPUT_NAMES)
    if is_transposed:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    separate: dict[str, Any] = {}
    if not module._qkv_same_embed_dim:
        weights_of = {name: getattr(module, name) for name in SEPARATE_WEIGHTS}
        separate = {"use_separate_proj_weight": True, **weights_of}
    z, weights = F.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        cast(Tensor, module.in_proj_weight),
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        module.dropout,
        torch.eye(module.embed_dim, dtype=query.dtype, device=query.device),
        None,
        training=module.training,
        key_padding_mask=options.get("key_padding_mask"),
        need_weights=True,
        attn_mask=options.get("attn_mask"),
        average_attn_weights=False,
        is_causal=options.get("is_causal", False),
        **separate,
    )
    weights = cast(Tensor, weights)
    run_call_hooks(hooks, lambda: WeightsOnlyCall(weights if weights.dim() == 4 else weights[None]))
    # hooks get head outputs as [B, T, heads, head_dim]; torch returns [T, B, ...] or [T, ...]
    by_head = z.unflatten(-1, (module.num_heads, module.head_dim))
    if z.dim() == 2:
        z = run_output_hooks(hooks, by_head[None])[0].flatten(-2)
    else:
        z = run_output_hooks(hooks, by_head.transpose(0, 1)).flatten(-2)
        z = z if module.batch_first else z.transpose(0, 1)
    y = F.linear(z, module.out_proj.weight, module.out_proj.bias)
    if not options.get("need_weights", True):
        return y, None
    return y, weights.mean(-3) if options.get("average_attn_weights", True) else weights


# --- `hw.Attention` -------------------------------------------------------------------------------


def find_headwise_attention(model: nn.Module) -> Iterator[SiteModule]:
    """Yield the site of every `hw.Attention`. Its spec describes it completely, so its weights can
    be recomputed for any queries.
    """
    names: set[str] = set()
    if isinstance(model, Transformer):
        names.update(name for name, _ in model.spec.attention_specs())
    modules = model.named_modules(remove_duplicate=False)
    layers = [(path, module) for path, module in modules if isinstance(module, Attention)]
    for number, (path, module) in enumerate(layers):
        name = path if path in names else f"model.{number}.attention"
        stack, layer, kind = name.split(".")
        spec = module.spec
        site = Site(
            name=name,
            stack=stack,
            layer=int(layer),
            kind=kind,
            path=path,
            heads=len(spec.score_head_of_output),
            q=spec.heads.q,
            kv=spec.heads.kv,
            dim=spec.heads.dim,
            pattern=spec.pattern.text,
            spec=spec,
            spec_reason="",
            observe=POSSIBLE,
            ablate=POSSIBLE,
            prune=POSSIBLE,
            convert=POSSIBLE,
        )
        yield SiteModule(site, module, "headwise", patches=ATTENTION_PATCHES)


class HeadwiseCall(ObservedCall):
    """One call of an `hw.Attention`; recomputes any rows of its weights."""

    def __init__(
        self, signature: CallSignature, mask: AttentionMask, inputs: CoreInputs, steps: CoreSteps
    ) -> None:
        self.signature = signature
        self.steps = steps
        self.mask, self.inputs = backends.gather_pages(mask, inputs)

    def all_weights(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        if backends.is_softmax_with_bias(self.signature):
            return self._make_inputs(
                *_slice_call(self.mask, self._inputs_by_head, queries, keys)
            ).all_weights()
        signature = replace(self.signature, probed_tensors=frozenset({"weights"}), training=False)
        probe = Probe("weights")
        sliced = _slice_call(self.mask, self.inputs, queries)
        backends.make_dispatch(signature).attend(*sliced, self.steps, probe)
        return probe.tensors["weights"][..., keys]

    @cached_property
    def _inputs_by_head(self) -> CoreInputs:
        """Inputs with the keys stored contiguously by head, for repeated reads by bands."""
        by_head = self.inputs.k.transpose(1, 2).contiguous().transpose(1, 2)
        return self.inputs._replace(k=by_head)

    def allowed_pairs(self, queries: slice = ALL) -> Tensor:
        return _slice_call(self.mask, self.inputs, queries)[0].allowed

    def head_values(self, head: int) -> HeadValues:
        spec = self.signature.spec
        row = spec.score_head_of_row.index(spec.score_head_of_output[head])
        return HeadValues(row, self.inputs.v[:, :, self.signature.core.value_head_of_row[row]])

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        """The inputs as tensors if the layer is plain softmax attention, else None."""
        if not backends.is_softmax_with_bias(self.signature):
            return None
        return self._make_inputs(self.mask, self.inputs)

    def _make_inputs(self, mask: AttentionMask, inputs: CoreInputs) -> AttentionInputs:
        softmax_args = backends.softmax_args(mask, inputs, self.steps)
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
            key_positions=self.key_positions,
        )

    @property
    def key_positions(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride] - computed when read
        """Positions of the keys, -1 for an empty slot; None unless all rows have the same positions
        and one segment.
        """
        keys = self.mask.keys
        position = keys.position[:1]
        segment = keys.segment[:1]
        if not bool((keys.position == position).all()):
            return None
        if keys.num_visible is not None:  # all keys are visible; a cache may set segments later
            return position[0]
        if not bool((keys.segment == segment).all()) or bool((segment > 0).any()):
            return None
        return torch.where(segment[0] < 0, -1, position[0])


def _slice_call(
    attention_mask: AttentionMask, inputs: CoreInputs, queries: slice, keys: slice = ALL
) -> tuple[AttentionMask, CoreInputs]:
    """Restrict a call to a range of queries, and to a range of keys if scores are only changed by
    adding to them.
    """
    keys_info = attention_mask.keys
    mask = attention_mask.mask
    sliced_queries = _slice_sequence(attention_mask.queries, queries)
    if keys != ALL:
        keys_info = _slice_sequence(keys_info, keys)
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        mask = mask if mask.shape[3] == 1 else mask[..., keys]
    context = inputs.query_context
    context = context._replace(
        x_BTD=context.x_BTD[:, queries], q_BTHK=context.q_BTHK[:, queries], sequence=sliced_queries
    )
    inputs = inputs._replace(
        q=inputs.q[:, queries], k=inputs.k[:, keys], v=inputs.v[:, keys], query_context=context
    )
    return AttentionMask(sliced_queries, keys_info, attention_mask.pattern, mask), inputs


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
            arguments = arguments._replace(probe=_join_probe(hooks, arguments.probe))
        return original(self, arguments)

    return head_outputs_and_gates


def _wrap_attend(original: Function) -> Function:
    def attend(
        self: Attention, call: PlannedCall, attention_mask: AttentionMask, inputs: CoreInputs
    ) -> Tensor:
        signature = call.plan.signature
        make_call = partial(HeadwiseCall, signature, attention_mask, inputs, self.core_steps)
        run_call_hooks(get_hooks(self), make_call)
        return original(self, call, attention_mask, inputs)

    return attend


ATTENTION_PATCHES = (
    patch_method(Attention, "head_outputs_and_gates", _wrap_head_outputs),
    patch_method(Attention, "attend", _wrap_attend),
)


def _join_probe(hooks: tuple[AttentionHook, ...], probe: Probe | None) -> Probe:
    """A probe that runs the hooks on head outputs, and then the caller's own probe."""
    own = Probe() if probe is None else probe

    def callback(point: str, tensor: Tensor) -> Tensor | None:
        return own(point, run_output_hooks(hooks, tensor) if point == "heads" else tensor)

    return Probe(*own.points, "heads", callback=callback, aux_losses=own.aux_losses)
