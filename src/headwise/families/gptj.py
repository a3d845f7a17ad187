"""GPT-J: the first channels of a head turn in neighbouring pairs; attention and feed-forward share a norm."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, NormSpec
from ..parts.rotary import Rotary
from ..presets import design
from . import trunk
from .config import TransformersConfig
from .registry import register_family


@register_family("gptj", "GPTJ")
def read_gptj(config: TransformersConfig, task: str) -> ModelSpec:
    """A head over tokens with a bias; attention has none."""
    model = config.read_int("n_embd", "hidden_size", default=4096)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=16)
    dim = config.resolve_head_dim(model, heads)
    turned = config.read_optional_int("rotary_dim", default=64)
    if turned is None:
        config.fail("rotary_dim = None turns as many channels as the model has", "give one of at most a head's width")
    turn = Rotary(dims=None if turned == dim else turned, pairs="interleaved")
    spec = design(model=model, heads=heads, pattern="causal()", modifiers=(turn,))
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=28)
    blocks = trunk.make_blocks([spec] * layers, feed, norm, placement="parallel")
    ends = trunk.DecoderEnds(config.read_int("vocab_size", default=50400), head_bias="learned")
    return trunk.build_decoder(config, task, blocks, norm, ends)
