"""OPT: GPT-2's blocks with ReLU, and two unused rows before the first position (2205.01068)."""

from __future__ import annotations

from ..model_spec import FeedForwardSpec, ModelSpec, NormSpec, PositionSpec
from ..presets import design
from . import model_builders
from .bart import name_attention, name_norm
from .config_reader import TransformersConfig, register_family
from .weight_names import WeightNames


@register_family("opt", "OPT")
def read_opt(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OPT; norms precede the sublayers, or follow them in one size, which then has no final norm."""
    sizes = model_builders.read_decoder_sizes(config, model=768, heads=12)
    config.require_default(
        "layer_norm_elementwise_affine", True, "removes the weights of norms, which is not described"
    )
    biased, before = config.read_bool("enable_bias", True), config.read_bool("do_layer_norm_before", True)
    narrow = config.read_optional_int("word_embed_proj_dim") or sizes.model
    spec = design(**sizes.design_args, pattern="causal()", bias="qkvo" if biased else "")
    act = config.read_activation("activation_function", "relu")
    feed = FeedForwardSpec(config.read_int("ffn_dim", default=3072), act, bias="ud" if biased else "")
    norm = NormSpec()
    blocks = model_builders.make_blocks(
        [spec] * model_builders.read_num_layers(config, 12), feed, norm, placement="pre" if before else "post"
    )
    last = norm if before and not config.read_bool("_remove_final_layer_norm", False) else None
    positions = PositionSpec("learned", model_builders.read_max_length(config, 2048), skipped=2)
    tokens = config.read_int("vocab_size", default=50272)
    if narrow != sizes.model:
        config.fail(
            f"word_embed_proj_dim = {narrow} is not hidden_size = {sizes.model}, and token embeddings of another "
            "width are not described",
            "give a config with equal widths",
        )
    return model_builders.build_decoder(
        config, task, blocks, last, model_builders.DecoderEnds(tokens, True, positions=positions)
    )


# --- OPT -----------------------------------------------------------------------------------------------

OWN_LAYER, FILE_LAYER = "decoder.{layer}", ".layers.{layer}"

OPT_WEIGHTS = WeightNames(
    families=("opt",),
    prefixes=("model.decoder", "decoder"),
    locations={
        "decoder.embedding.tokens": ".embed_tokens.weight",
        "decoder.embedding.positions": ".embed_positions.weight",
        **name_attention(f"{OWN_LAYER}.attention", f"{FILE_LAYER}.self_attn"),
        **name_norm(f"{OWN_LAYER}.attention_norm", f"{FILE_LAYER}.self_attn_layer_norm"),
        f"{OWN_LAYER}.feed.up": f"{FILE_LAYER}.fc1.weight",
        f"{OWN_LAYER}.feed.up_bias": f"{FILE_LAYER}.fc1.bias",
        f"{OWN_LAYER}.feed.down": f"{FILE_LAYER}.fc2.weight",
        f"{OWN_LAYER}.feed.down_bias": f"{FILE_LAYER}.fc2.bias",
        **name_norm(f"{OWN_LAYER}.feed_norm", f"{FILE_LAYER}.final_layer_norm"),
        **name_norm("decoder.norm", ".final_layer_norm"),
        "head.tokens.weight": "lm_head.weight",
    },
)
