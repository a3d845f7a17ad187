"""Adapter for `nn.MultiheadAttention`, alone and inside `nn.Transformer`.

Its forward passes the weight of the output projection to a function, so a hook on that projection never runs; and a
whole encoder layer may use a fast path that calls no forward at all. While hooks are active, the function gets an
identity matrix in place of the projection, the hooks run on the head outputs, and these are then projected. The fast
path is disabled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hooks import MethodPatch, SharedPatch, SiteAdapter, SiteModule, WeightsOnlyCall, get_hooks, run_output_hooks
from .module_attributes import UNKNOWN_PATTERN, HeadSizes, make_site
from .module_tracer import hook_ability


class TorchMHAAdapter(SiteAdapter):
    """Every nn.MultiheadAttention."""

    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, nn.MultiheadAttention):
                sizes = HeadSizes(module.num_heads, module.num_heads, module.head_dim)
                ability = hook_ability(module)
                yield SiteModule(
                    make_site(path, module, sizes, pattern=UNKNOWN_PATTERN, see=ability, silence=ability), module, self
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
        self: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        hooks = get_hooks(self)
        if not hooks:
            return original(self, query, key, value, *args, **kwargs)
        names = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
        options = dict(zip(names, args, strict=False)) | kwargs
        z, weights = _compute_head_outputs(self, (query, key, value), options)
        for hook in hooks:
            if hook.needs_call:
                hook.on_call(WeightsOnlyCall(weights if weights.dim() == 4 else weights[None]))
        y = F.linear(_run_hooks(self, hooks, z), self.out_proj.weight, self.out_proj.bias)
        return y, _format_weights(weights, options)

    return forward


FORWARD_PATCH, FAST_PATH_SWITCH = MethodPatch(nn.MultiheadAttention, "forward", _wrap_forward), FastPathSwitch()


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
