"""GPT-Neo: GPT-2 without a scale of scores, with a window in every other layer."""

from __future__ import annotations

from typing import Any

from ..blueprint import FeedForwardSpec, ModelSpec, NormSpec, PositionSpec
from ..parts.dot import Dot
from ..presets import design
from . import trunk
from .config import TransformersConfig
from .registry import register_family


@register_family("gpt_neo", "GPTNeo")
def read_gpt_neo(config: TransformersConfig, task: str) -> ModelSpec:
    """A bias behind heads alone."""
    model = config.read_int("hidden_size", default=2048)
    heads = config.read_num_heads("num_heads", "num_attention_heads", default=16)
    layers = config.read_num_layers("num_layers", "num_hidden_layers", default=24)
    config.resolve_head_dim(model, heads)
    window = config.read_int("window_size", default=256)
    patterns = {"global": "causal()", "local": f"window({window})"}
    said: dict[str, Any] = {"model": model, "heads": heads, "bias": "o", "similarity": Dot(scale=1.0)}
    attentions = trunk.make_attentions(_read_attention_types(config, layers), lambda kind: design(**said, pattern=patterns[kind]))
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(config.read_optional_int("intermediate_size") or 4 * model, act, bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=2048))
    ends = trunk.DecoderEnds(config.read_int("vocab_size", default=50257), True, positions=positions)
    return trunk.build_decoder(config, task, trunk.make_blocks(attentions, feed, norm), norm, ends)


def _read_attention_types(config: TransformersConfig, layers: int) -> list[str]:
    """Of each layer, as attention_types tells them: patterns, and how often each is repeated."""
    told: Any = config.values.get("attention_types") or [[["global", "local"], layers // 2]]
    try:
        found = [kind for pattern, times in told for _ in range(times) for kind in pattern]
    except (TypeError, ValueError):
        config.fail(f"attention_types = {told!r} is no list of patterns with counts", "write [[['global'], 2]], say")
    if len(found) != layers or set(found) - {"global", "local"}:
        config.fail(f"attention_types names {found!r} for {layers} layers", "name 'global' or 'local' for each")
    return found
