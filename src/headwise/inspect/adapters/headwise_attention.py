"""Attentions of headwise itself, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import backends
from ...backends import CallSignature, CoreInputs, CoreSteps
from ...interfaces.probe import Probe
from ...masking.sequence_info import AttentionMask, SequenceInfo
from ...models import Transformer
from ...nn.attention import Attention
from ...nn.attention_call import AttentionArguments, AttentionCall
from ..hooks import (
    AttentionHook,
    AttentionInputs,
    HeadValues,
    MethodPatch,
    SharedPatch,
    SiteAdapter,
    SiteModule,
    get_hooks,
    run_output_hooks,
)
from ..site import POSSIBLE, Site


class HeadwiseAdapter(SiteAdapter):
    """Every `hw.Attention`: all that its spec says is known, and any of it can be computed again."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        names = [name for name, _ in model.spec.attention_specs()] if isinstance(model, Transformer) else []
        modules = model.named_modules(remove_duplicate=False)
        layers = [(path, module) for path, module in modules if isinstance(module, Attention)]
        for number, (path, module) in enumerate(layers):
            stack, layer, kind = _split_path(path, number) if path in names else ("model", number, "attention")
            name = path if path in names else f"{stack}.{layer}.{kind}"
            yield SiteModule(_make_site(name, (stack, layer, kind), path, module), module, self)

    def patches(self) -> Sequence[SharedPatch]:
        return ATTENTION_PATCHES

    def visible_tensors(self, module: nn.Module) -> str:
        assert isinstance(module, Attention)
        spec = module.spec
        return (
            "scores"
            if backends.is_plain_softmax(CallSignature(spec, spec.core_of(spec.projection_form(one=False))))
            else "weights"
        )


class HeadwiseCall:
    """What an attention of ours worked with: any rows of its weights are computed again, as its definition says."""

    def __init__(self, job: CallSignature, sight: AttentionMask, inputs: CoreInputs, bound: CoreSteps) -> None:
        self.job, self.bound = job, bound
        self.sight, self.inputs = backends.gather_pages(sight, inputs)
        self._by_head: CoreInputs | None = None

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S]."""
        return self.all_weights(queries)[:, head]

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]; of `keys` that are all they may read, if not all."""
        if backends.is_plain_softmax(self.job):
            return self._make_inputs(*_slice_call(self.sight, self._inputs_by_head, queries, keys)).all_weights()
        job = replace(self.job, probed_tensors=frozenset({"weights"}), training=False)
        probe = Probe("weights")
        sliced = _slice_call(self.sight, self.inputs, queries)
        backends.make_dispatch(job).attend(*sliced, self.bound, probe)
        return probe.tensors["weights"][..., keys]

    @property
    def _inputs_by_head(self) -> CoreInputs:
        """The inputs with the keys of each head side by side, which are read again for each band of queries."""
        if self._by_head is None:
            self._by_head = self.inputs._replace(k=self.inputs.k.transpose(1, 2).contiguous().transpose(1, 2))
        return self._by_head

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Which keys some queries may read, [B or 1, 1, T, S]."""
        return _slice_call(self.sight, self.inputs, queries)[0].allowed

    def head_values(self, head: int) -> HeadValues:
        """What one head that speaks reads, whatever it compares."""
        row = self.job.spec.score_head_of_output[head]
        return HeadValues(row, self.inputs.v[:, :, self.job.core.value_head_of_row[row]])

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        """The same as tensors, if softmax of scaled products is all that the layer does with them."""
        return self._make_inputs(self.sight, self.inputs) if backends.is_plain_softmax(self.job) else None

    def _make_inputs(self, sight: AttentionMask, inputs: CoreInputs) -> AttentionInputs:
        plain, core = backends.softmax_args(sight, inputs, self.bound), self.job.core
        k, v, reads = inputs.k, inputs.v, None if self.job.group_size else core.key_head_of_query
        if (
            core.value_head_of_row != core.key_head_of_query
        ):  # values are grouped otherwise: each head is given its own of both
            k, v, reads = (
                k[:, :, list(core.key_head_of_query)],
                v[:, :, list(core.value_head_of_row)],
                tuple(range(len(core.key_head_of_query))),
            )
        return AttentionInputs(
            inputs.q,
            k,
            v,
            inputs.query_context.scale,
            plain.mask,
            plain.causal,
            plain.bias,
            sinks=plain.sinks,
            kv_head_of_query=reads,
            key_positions=self.key_positions,
        )

    @property
    def key_positions(self) -> Tensor | None:
        """The numbers of its keys among all tokens."""
        return _token_numbers(self.sight.keys)


def _token_numbers(keys: SequenceInfo) -> Tensor | None:
    """Which tokens these are, -1 for none, where all rows hold the same: then positions number them."""
    position, segment = keys.position[:1], keys.segment[:1]
    if keys.num_visible is not None:  # all of them are read; a cache may write segments later
        return position[0] if bool((keys.position == position).all()) else None
    alike = bool((keys.position == position).all()) and bool((keys.segment == segment).all())
    return torch.where(segment[0] < 0, -1, position[0]) if alike and not bool((segment > 0).any()) else None


def _slice_call(
    sight: AttentionMask, inputs: CoreInputs, queries: slice, keys: slice = slice(None)
) -> tuple[AttentionMask, CoreInputs]:
    """The same call for some of its queries, and of some of its keys if all that happens to scores is additive."""
    at, told, asked, mask = sight.queries, sight.keys, inputs.query_context, sight.mask
    some = SequenceInfo(at.position[:, queries], at.segment[:, queries], checked=True)
    if keys != slice(None):
        filled = None if told.num_visible is None else len(range(told.num_visible)[keys])
        told = SequenceInfo(told.position[:, keys], told.segment[:, keys], checked=True, num_visible=filled)
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        mask = mask if mask.shape[3] == 1 else mask[..., keys]
    asked = asked._replace(x_BTD=asked.x_BTD[:, queries], q_BTHK=asked.q_BTHK[:, queries], sequence=some)
    inputs = inputs._replace(q=inputs.q[:, queries], k=inputs.k[:, keys], v=inputs.v[:, keys], query_context=asked)
    return AttentionMask(some, told, sight.pattern, mask), inputs


def _split_path(path: str, number: int) -> tuple[str, int, str]:
    stack, layer, kind = path.split(".")
    return stack, int(layer), kind


def _make_site(name: str, where: tuple[str, int, str], path: str, module: Attention) -> Site:
    spec = module.spec
    heads = spec.heads
    stack, layer, kind = where
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
        unsaid="",
        see=POSSIBLE,
        silence=POSSIBLE,
        cut=POSSIBLE,
        share=POSSIBLE,
    )


def _wrap_head_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def head_outputs_and_gates(self: Attention, arguments: AttentionArguments) -> Any:
        if hooks := get_hooks(self):
            arguments = arguments._replace(probe=_join_probe(hooks, arguments.probe))
        return original(self, arguments)

    return head_outputs_and_gates


def _wrap_attend(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(self: Attention, call: AttentionCall, attention_mask: AttentionMask, inputs: CoreInputs) -> Tensor:
        if hooks := [hook for hook in get_hooks(self) if hook.needs_call]:
            seen = HeadwiseCall(call.plan.call, attention_mask, inputs, self.core_steps)
            for hook in hooks:
                hook.on_call(seen)
        return original(self, call, attention_mask, inputs)

    return attend


ATTENTION_PATCHES = (
    MethodPatch(Attention, "head_outputs_and_gates", _wrap_head_outputs),
    MethodPatch(Attention, "attend", _wrap_attend),
)


def _join_probe(those: tuple[AttentionHook, ...], probe: Probe | None) -> Probe:
    """A probe that lets watchers change what heads say, and whoever looked already look on."""
    own = probe.points if probe is not None else frozenset[str]()

    def see(place: str, tensor: Tensor) -> Tensor | None:
        if place == "heads":
            tensor = run_output_hooks(those, tensor)
        return probe(place, tensor) if probe is not None and place in own else tensor

    return Probe(*own, "heads", callback=see, aux_losses=probe.aux_losses if probe is not None else None)
