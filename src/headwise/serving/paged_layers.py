"""Which layers read cache pages in place, and why others gather them."""

from __future__ import annotations

from typing import NamedTuple

from .. import backends
from ..backends import CallSignature
from ..models import Transformer
from ..nn.attention import Attention


class PagedSupport(NamedTuple):
    """Number of layers with paged caches, and the reasons of those that gather pages to decode, by module path.

    >>> import headwise as hw
    >>> config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    >>> PagedSupport.of(hw.build(hw.families.read_model_spec(config | {"num_hidden_layers": 2, "vocab_size": 11})))
    PagedSupport(layers=2, gathers={})
    """

    layers: int
    gathers: dict[str, str]

    @staticmethod
    def of(net: Transformer) -> PagedSupport:
        """Inspect the last stack, which generates."""
        name, stack = list(net.stacks.items())[-1]
        reasons: dict[str, str] = {}
        layers = 0
        for number, block in enumerate(stack.blocks):
            layer = block.attentions.get("attention")
            if layer is not None and not layer.spec.is_recurrent:
                layers += 1
                if why := _gather_reason(layer):
                    reasons[f"{name}.{number}.attention"] = why
        return PagedSupport(layers, reasons)


def _gather_reason(layer: Attention) -> str:
    if layer.backend_name not in (None, "paged"):
        return f"the layer asks for {layer.backend_name}"
    spec, like = layer.spec, layer.weights["project"].first_parameter
    job = CallSignature(
        spec,
        spec.core_of(spec.projection_form(one=True)),
        like.device.type,
        like.dtype,
        single_query=True,
        has_paged_cache=True,
    )
    return "; ".join(backends.unsupported_reasons_by_backend(job)["paged"])
