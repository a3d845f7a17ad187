"""Adapter for `hw.Attention` anywhere in a model, by its probe and its method `attend`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ....attention import backends
from ....attention.attention import Attention
from ....attention.attention_call import AttentionArguments, PlannedCall
from ....attention.backends import CallSignature, CoreInputs, CoreSteps
from ....attention.interfaces.core_types import Probe
from ....attention.masking.sequence_info import AttentionMask, SequenceInfo
from ....models import Transformer
from ..hooks import AttentionHook, SiteModule, get_hooks, run_call_hooks, run_output_hooks
from ..method_patches import Function, patch_method
from ..observed_call import ALL, AttentionInputs, HeadValues, ObservedCall
from ..site import POSSIBLE, Site


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
