"""OPT: GPT-2's blocks with a relu, and two rows of positions before the first (2205.01068)."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, NormSpec, PositionSpec
from ..presets import design
from . import trunk
from .config import TransformersConfig
from .registry import register_family


@register_family("opt", "OPT")
def read_opt(config: TransformersConfig, task: str) -> ModelSpec:
    """Norms stand before, or behind in one size of it, which then has none at the end."""
    sizes = trunk.read_decoder_sizes(config, model=768, heads=12)
    config.require_default("layer_norm_elementwise_affine", True, "leaves out weights of norms, which is not described")
    biased, before = config.read_bool("enable_bias", True), config.read_bool("do_layer_norm_before", True)
    narrow = config.read_optional_int("word_embed_proj_dim") or sizes.model
    spec = design(**sizes.design_args, pattern="causal()", bias="qkvo" if biased else "")
    act = config.read_activation("activation_function", "relu")
    feed = FeedForwardSpec(config.read_int("ffn_dim", default=3072), act, bias="ud" if biased else "")
    norm = NormSpec()
    blocks = trunk.make_blocks([spec] * trunk.read_num_layers(config, 12), feed, norm, placement="pre" if before else "post")
    last = norm if before and not config.read_bool("_remove_final_layer_norm", False) else None
    positions = PositionSpec("learned", trunk.read_max_length(config, 2048), skipped=2)
    tokens = config.read_int("vocab_size", default=50272)
    if narrow != sizes.model:
        config.fail(
            f"word_embed_proj_dim = {narrow} is not hidden_size = {sizes.model}, and a table of tokens of another "
            "width is not described",
            "read its layers as a model without a table",
        )
    return trunk.build_decoder(config, task, blocks, last, trunk.DecoderEnds(tokens, True, positions=positions))
