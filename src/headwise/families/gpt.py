"""GPT-2 and its relatives: GPT-Neo, GPT-J, GPT-NeoX, Pythia, OPT, BLOOM (2211.05100), Falcon and
MPT.
"""

from __future__ import annotations

from typing import Any

from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
    UnsupportedPart,
)
from ..parts.dot_product import Dot
from ..parts.relative_position_bias import Alibi
from ..parts.rotary_embedding import Rotary
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import model_builders
from .attention_config import RopeConfig, make_dot
from .config_reader import (
    TransformersConfig,
    activation_to_config,
    get_first_layer,
    make_decoder_model,
    read_tied_stack,
    register_family,
    register_writer,
)
from .encoder_decoders import name_attention, name_norm
from .weight_names import TensorLocation, WeightNames

# --- GPT-2: learned positions, pre-LayerNorm, biases everywhere, tied embeddings ------------------


@register_family("gpt2", "GPT2", default_task="LMHeadModel")
def read_gpt2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GPT-2; attention scores may be divided by the layer number, counted from 1."""
    model = config.read_int("n_embd", "hidden_size", default=768)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=12)
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=12)
    tokens = config.read_int("vocab_size", default=50257)
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    config.require_default(
        "add_cross_attention",
        False,
        "adds cross-attention to a second model, which is not described",
    )

    default_scale = config.resolve_head_dim(model, heads) ** -0.5
    scale = default_scale if config.read_bool("scale_attn_weights", True) else 1.0
    by_depth = config.read_bool("scale_attn_by_inverse_layer_idx", False)
    design_args: dict[str, Any] = {
        "model": model,
        "heads": heads,
        "pattern": "causal()",
        "bias": "qkvo",
    }
    scales = [
        make_dot(scale / (depth + 1 if by_depth else 1), default_scale) for depth in range(layers)
    ]
    blocks = [
        BlockSpec(design(**design_args, similarity=similarity), feed=feed, norm=norm)
        for similarity in scales
    ]

    positions = PositionSpec(
        "learned", config.read_int("n_positions", "max_position_embeddings", default=1024)
    )
    stack = StackSpec.from_blocks(
        "decoder", model, blocks, embedding=EmbeddingSpec(tokens, positions=positions), norm=norm
    )
    return make_decoder_model(
        config,
        task,
        stack,
        OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", True)),
    )


@register_writer("gpt2")
def write_gpt2_config(model: ModelSpec, name: str) -> dict[str, Any]:
    """Write the config keys of GPT-2; if score scales differ between layers, they are divided by
    the layer number.
    """
    stack, spec, feed = get_first_layer(model, name)
    positions = stack.embedding.positions if stack.embedding else None
    scales = [
        block.attention.similarity
        for block in stack.layers
        if isinstance(block.attention, AttentionSpec)
    ]
    keys: dict[str, Any] = {
        "n_embd": stack.model,
        "n_head": spec.heads.q,
        "n_layer": len(stack.layers),
    }
    keys |= {"n_inner": feed.hidden, "activation_function": activation_to_config(feed.activation)}
    keys |= {"vocab_size": stack.embedding.tokens if stack.embedding else 0}
    keys |= {
        "n_positions": (positions and positions.length) or 1024,
        "layer_norm_epsilon": stack.layers[0].norm.eps,
    }
    keys |= {
        "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1,
        "scale_attn_weights": scales[0] != Dot(scale=1.0),
    }
    keys |= {"tie_word_embeddings": any(head.table for head in model.heads)}
    return keys | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


# --- GPT-2 ----------------------------------------------------------------------------------------

FUSED_QKV, FUSED_QKV_BIAS = ".h.{layer}.attn.c_attn.weight", ".h.{layer}.attn.c_attn.bias"
QKV_AXIS = {"qkv": 3}

GPT2_WEIGHTS = WeightNames(
    families=("gpt2",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".wte.weight",
        "decoder.embedding.positions": ".wpe.weight",
        "decoder.{layer}.attention_norm.weight": ".h.{layer}.ln_1.weight",
        "decoder.{layer}.attention_norm.bias": ".h.{layer}.ln_1.bias",
        "decoder.{layer}.attention.project.q": TensorLocation(
            FUSED_QKV, "model (qkv q dim)", {"qkv": 0}, QKV_AXIS
        ),
        "decoder.{layer}.attention.project.k": TensorLocation(
            FUSED_QKV, "source (qkv kv dim)", {"qkv": 1}, QKV_AXIS
        ),
        "decoder.{layer}.attention.project.v": TensorLocation(
            FUSED_QKV, "source (qkv kv vdim)", {"qkv": 2}, QKV_AXIS
        ),
        "decoder.{layer}.attention.project.q_bias": TensorLocation(
            FUSED_QKV_BIAS, "(qkv q dim)", {"qkv": 0}, QKV_AXIS
        ),
        "decoder.{layer}.attention.project.k_bias": TensorLocation(
            FUSED_QKV_BIAS, "(qkv kv dim)", {"qkv": 1}, QKV_AXIS
        ),
        "decoder.{layer}.attention.project.v_bias": TensorLocation(
            FUSED_QKV_BIAS, "(qkv kv vdim)", {"qkv": 2}, QKV_AXIS
        ),
        "decoder.{layer}.attention.output.o": TensorLocation(
            ".h.{layer}.attn.c_proj.weight", "(out vdim) model"
        ),
        "decoder.{layer}.attention.output.o_bias": ".h.{layer}.attn.c_proj.bias",
        "decoder.{layer}.feed_norm.weight": ".h.{layer}.ln_2.weight",
        "decoder.{layer}.feed_norm.bias": ".h.{layer}.ln_2.bias",
        "decoder.{layer}.feed.up": TensorLocation(".h.{layer}.mlp.c_fc.weight", "model hidden"),
        "decoder.{layer}.feed.up_bias": ".h.{layer}.mlp.c_fc.bias",
        "decoder.{layer}.feed.down": TensorLocation(".h.{layer}.mlp.c_proj.weight", "hidden model"),
        "decoder.{layer}.feed.down_bias": ".h.{layer}.mlp.c_proj.bias",
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),
)

# --- GPT-Neo (unscaled scores, windows in every other layer), GPT-J, GPT-NeoX and Pythia ----------


@register_family("gpt_neo", "GPTNeo")
def read_gpt_neo(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GPT-Neo; of the attention projections only the output has a bias."""
    model = config.read_int("hidden_size", default=2048)
    heads = config.read_num_heads("num_heads", "num_attention_heads", default=16)
    layers = config.read_num_layers("num_layers", "num_hidden_layers", default=24)
    config.resolve_head_dim(model, heads)
    window = config.read_int("window_size", default=256)
    patterns = {"global": "causal()", "local": f"window({window})"}
    design_args: dict[str, Any] = {
        "model": model,
        "heads": heads,
        "bias": "o",
        "similarity": Dot(scale=1.0),
    }
    attentions = model_builders.make_attentions(
        _read_attention_types(config, layers),
        lambda kind: design(**design_args, pattern=patterns[kind]),
    )
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(
        config.read_optional_int("intermediate_size") or 4 * model, act, bias="ud"
    )
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=2048))
    ends = model_builders.DecoderEnds(
        config.read_int("vocab_size", default=50257), True, positions=positions
    )
    return model_builders.build_decoder(
        config, task, model_builders.make_blocks(attentions, feed, norm), norm, ends
    )


def _read_attention_types(config: TransformersConfig, layers: int) -> list[str]:
    """Expand `attention_types`, pairs of patterns and repeats, to "global" or "local" for each
    layer.
    """
    entries: Any = config.values.get("attention_types") or [[["global", "local"], layers // 2]]
    try:
        types = [kind for pattern, times in entries for _ in range(times) for kind in pattern]
    except (TypeError, ValueError):
        config.fail(
            f"attention_types = {entries!r} is not a list of patterns with counts",
            "write it as in [[['global'], 2]]",
        )
    if len(types) != layers or set(types) - {"global", "local"}:
        config.fail(
            f"attention_types names {types!r} for {layers} layers",
            "name 'global' or 'local' for each",
        )
    return types


# --- GPT-J ----------------------------------------------------------------------------------------


@register_family("gptj", "GPTJ")
def read_gptj(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GPT-J: no biases in the attention, a bias in the language-model head."""
    model = config.read_int("n_embd", "hidden_size", default=4096)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=16)
    dim = config.resolve_head_dim(model, heads)
    rotary_dim = config.read_optional_int("rotary_dim", default=64)
    if rotary_dim is None:
        config.fail(
            "rotary_dim = None would rotate more channels than a head has",
            "give at most the head dimension",
        )
    rotary = Rotary(dims=None if rotary_dim == dim else rotary_dim, pairs="interleaved")
    spec = design(model=model, heads=heads, pattern="causal()", modifiers=(rotary,))
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=28)
    blocks = model_builders.make_blocks([spec] * layers, feed, norm, placement="parallel")
    ends = model_builders.DecoderEnds(
        config.read_int("vocab_size", default=50400), head_bias="learned"
    )
    return model_builders.build_decoder(config, task, blocks, norm, ends)


# --- GPT-J ----------------------------------------------------------------------------------------

GPTJ_LAYER, GPTJ_FILE_LAYER = "decoder.{layer}", ".h.{layer}"

GPTJ_WEIGHTS = WeightNames(
    families=("gptj",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".wte.weight",
        f"{GPTJ_LAYER}.norm.weight": f"{GPTJ_FILE_LAYER}.ln_1.weight",
        f"{GPTJ_LAYER}.norm.bias": f"{GPTJ_FILE_LAYER}.ln_1.bias",
        f"{GPTJ_LAYER}.attention.project.q": f"{GPTJ_FILE_LAYER}.attn.q_proj.weight",
        f"{GPTJ_LAYER}.attention.project.k": f"{GPTJ_FILE_LAYER}.attn.k_proj.weight",
        f"{GPTJ_LAYER}.attention.project.v": f"{GPTJ_FILE_LAYER}.attn.v_proj.weight",
        f"{GPTJ_LAYER}.attention.output.o": f"{GPTJ_FILE_LAYER}.attn.out_proj.weight",
        f"{GPTJ_LAYER}.feed.up": f"{GPTJ_FILE_LAYER}.mlp.fc_in.weight",
        f"{GPTJ_LAYER}.feed.up_bias": f"{GPTJ_FILE_LAYER}.mlp.fc_in.bias",
        f"{GPTJ_LAYER}.feed.down": f"{GPTJ_FILE_LAYER}.mlp.fc_out.weight",
        f"{GPTJ_LAYER}.feed.down_bias": f"{GPTJ_FILE_LAYER}.mlp.fc_out.bias",
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.tokens.bias": "lm_head.bias",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),
)

# --- GPT-NeoX and Pythia --------------------------------------------------------------------------


@register_family("gpt_neox", "GPTNeoX")
def read_gpt_neox(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GPT-NeoX and Pythia; attention and feed-forward run in parallel,
    each with its own norm.
    """
    sizes = model_builders.read_decoder_sizes(config, model=6144, heads=64)
    theta, part = (
        config.read_float("rotary_emb_base", default=10_000.0),
        config.read_float("rotary_pct", default=0.25),
    )
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", part)):
        config.require_default(
            name, value, "is not read by transformers, which reads rotary_emb_base and rotary_pct"
        )
    config.require_default(
        "num_key_value_heads", sizes.heads, "is not read by transformers in this family"
    )
    rope = RopeConfig(
        config, model_builders.read_max_length(config, 2048), theta=theta, rotary_fraction=part
    )
    bias = "qkvo" if config.read_bool("attention_bias", True) else ""
    spec = design(
        **sizes.design_args, pattern="causal()", bias=bias, modifiers=(rope.make_rotary(sizes.dim),)
    )
    feed = FeedForwardSpec(
        config.read_int("intermediate_size", default=24576),
        config.read_activation("hidden_act", "gelu"),
        bias="ud",
    )
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    placement = "abreast" if config.read_bool("use_parallel_residual", True) else "pre"
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 44),
        feed,
        norm,
        placement=placement,
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=50432)),
    )


# --- GPT-NeoX and BLOOM ---------------------------------------------------------------------------

GPT_NEOX_LAYER = "decoder.{layer}"


def name_gpt_neox_layer(file_prefix: str, attention: str) -> dict[str, str | TensorLocation]:
    """Map the tensors of one layer to their stored names."""
    fused, sides = f"{file_prefix}.{attention}.query_key_value", {"qkv": 3}
    rows: dict[str, str | TensorLocation] = {}
    for place, side in enumerate("qkv"):
        at = {"qkv": place}
        matrix = TensorLocation(
            f"{fused}.weight", "(q qkv dim) model", at, sides, own_layout="(q dim) model"
        )
        bias = TensorLocation(f"{fused}.bias", "(q qkv dim)", at, sides, own_layout="(q dim)")
        rows |= {
            f"{GPT_NEOX_LAYER}.attention.project.{side}": matrix,
            f"{GPT_NEOX_LAYER}.attention.project.{side}_bias": bias,
        }
    names = {
        "attention.output.o": f"{attention}.dense.weight",
        "attention.output.o_bias": f"{attention}.dense.bias",
        "attention_norm.weight": "input_layernorm.weight",
        "attention_norm.bias": "input_layernorm.bias",
        "feed_norm.weight": "post_attention_layernorm.weight",
        "feed_norm.bias": "post_attention_layernorm.bias",
        "feed.up": "mlp.dense_h_to_4h.weight",
        "feed.up_bias": "mlp.dense_h_to_4h.bias",
        "feed.down": "mlp.dense_4h_to_h.weight",
        "feed.down_bias": "mlp.dense_4h_to_h.bias",
    }
    return rows | {
        f"{GPT_NEOX_LAYER}.{ours}": f"{file_prefix}.{theirs}" for ours, theirs in names.items()
    }


GPT_NEOX_WEIGHTS = WeightNames(
    families=("gpt_neox",),
    prefixes=("gpt_neox", ""),
    locations={
        "decoder.embedding.tokens": ".embed_in.weight",
        **name_gpt_neox_layer(".layers.{layer}", "attention"),
        "decoder.norm.weight": ".final_layer_norm.weight",
        "decoder.norm.bias": ".final_layer_norm.bias",
        "head.tokens.weight": "embed_out.weight",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
)

# --- OPT: GPT-2's blocks with ReLU, and two unused rows before the first position (2205.01068) ----


@register_family("opt", "OPT")
def read_opt(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OPT; norms precede the sublayers, or follow them in one size, which then has no final
    norm.
    """
    sizes = model_builders.read_decoder_sizes(config, model=768, heads=12)
    config.require_default(
        "layer_norm_elementwise_affine",
        True,
        "removes the weights of norms, which is not described",
    )
    config.require_default(
        "num_key_value_heads", sizes.heads, "is not read by transformers in this family"
    )
    biased, before = (
        config.read_bool("enable_bias", True),
        config.read_bool("do_layer_norm_before", True),
    )
    narrow = config.read_optional_int("word_embed_proj_dim") or sizes.model
    spec = design(**sizes.design_args, pattern="causal()", bias="qkvo" if biased else "")
    act = config.read_activation("activation_function", "relu")
    feed = FeedForwardSpec(
        config.read_int("ffn_dim", default=3072), act, bias="ud" if biased else ""
    )
    norm = NormSpec()
    blocks = model_builders.make_blocks(
        [spec] * model_builders.read_num_layers(config, 12),
        feed,
        norm,
        placement="pre" if before else "post",
    )
    last = norm if before and not config.read_bool("_remove_final_layer_norm", False) else None
    positions = PositionSpec("learned", model_builders.read_max_length(config, 2048), skipped=2)
    tokens = config.read_int("vocab_size", default=50272)
    if narrow != sizes.model:
        config.fail(
            f"word_embed_proj_dim = {narrow} is not hidden_size = {sizes.model}, and token "
            "embeddings of another "
            "width are not described",
            "give a config with equal widths",
        )
    return model_builders.build_decoder(
        config, task, blocks, last, model_builders.DecoderEnds(tokens, True, positions=positions)
    )


# --- OPT ------------------------------------------------------------------------------------------

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


@register_family("bloom", "Bloom")
def read_bloom(config: TransformersConfig, task: str) -> ModelSpec:
    """Read BLOOM; Q, K and V of each head are stored next to each other."""
    model = config.read_int("n_embed", "hidden_size", default=64)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=8)
    config.resolve_head_dim(model, heads)
    spec = design(model=model, heads=heads, pattern="causal()", bias="qkvo", modifiers=(Alibi(),))
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    feed = FeedForwardSpec(4 * model, "gelu_tanh", bias="ud")
    blocks = model_builders.make_blocks(
        [spec] * config.read_num_layers("n_layer", "num_hidden_layers", default=2), feed, norm
    )
    normed = config.read_bool("apply_residual_connection_post_layernorm", False)
    reason = (
        "apply_residual_connection_post_layernorm adds to the normalised input, which "
        "BlockSpec lacks"
    )
    ends = model_builders.DecoderEnds(
        config.read_int("vocab_size", default=250880), True, embedding_norm=norm
    )
    return model_builders.build_decoder(
        config, task, blocks, norm, ends, (UnsupportedPart(reason),) if normed else ()
    )


# --- BLOOM ----------------------------------------------------------------------------------------

BLOOM_WEIGHTS = WeightNames(
    families=("bloom",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".word_embeddings.weight",
        "decoder.embedding.norm.weight": ".word_embeddings_layernorm.weight",
        "decoder.embedding.norm.bias": ".word_embeddings_layernorm.bias",
        **name_gpt_neox_layer(".h.{layer}", "self_attention"),
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
    },
)

# --- Falcon ---------------------------------------------------------------------------------------


@register_family("falcon", "Falcon")
def read_falcon(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Falcon; its newer architecture has grouped heads and separate norms for attention and
    feed-forward.
    """
    model = config.read_int("n_embed", "hidden_size", default=4544)
    heads = config.read_num_heads("num_attention_heads", default=71)
    newer, parallel = (
        config.read_bool("new_decoder_architecture", False),
        config.read_bool("parallel_attn", True),
    )
    biased = config.read_bool("bias", False)
    design_args = model_builders.DecoderSizes(
        model, heads, _read_num_kv_heads(config, heads), config.resolve_head_dim(model, heads)
    ).design_args
    design_args |= {"pattern": "causal()", "bias": "qkvo" if biased else ""}
    rope = RopeConfig(config, model_builders.read_max_length(config, 2048))
    attention = rope.attention_with_limits(
        design(**design_args, modifiers=(rope.make_rotary(design_args["dim"]),))
    )
    if config.read_bool("alibi", False):
        attention = ApproximateAttention(
            design(**design_args),
            "alibi adds 16-bit slopes before scores are scaled, which Alibi does not",
        )

    act = config.read_activation("activation", "gelu")
    feed = FeedForwardSpec(
        config.read_optional_int("ffn_hidden_size") or 4 * model, act, bias="ud" if biased else ""
    )
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    norms = config.read_optional_int("num_ln_in_parallel_attn") or (2 if newer else 1)
    placement = "pre" if not parallel else "abreast" if newer and norms == 2 else "parallel"
    blocks = model_builders.make_blocks(
        [attention] * model_builders.read_num_layers(config, 32), feed, norm, placement=placement
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=65024), True),
    )


def _read_num_kv_heads(config: TransformersConfig, heads: int) -> int:
    """Return the key-value heads: num_kv_heads in the newer architecture, else one, or one per
    head.
    """
    if config.read_bool("new_decoder_architecture", False):
        kv = config.read_optional_int("num_kv_heads") or heads
    else:
        kv = 1 if config.read_bool("multi_query", True) else heads
    if heads % kv:
        config.fail(
            f"num_attention_heads = {heads} is not a multiple of num_kv_heads = {kv}",
            "give a divisor",
        )
    return kv


# --- MPT ------------------------------------------------------------------------------------------


@register_family("mpt", "Mpt")
def read_mpt(config: TransformersConfig, task: str) -> ModelSpec:
    """Read MPT; ALiBi applies whatever the config contains, as in transformers."""
    model = config.read_int("d_model", "hidden_size", default=2048)
    heads = config.read_num_heads("n_heads", "num_attention_heads", default=16)
    dim = config.resolve_head_dim(model, heads)
    attention_config = config.read_table("attn_config") or TransformersConfig({}, config.source)
    scale = make_dot(attention_config.read_optional_float("softmax_scale") or dim**-0.5, dim**-0.5)
    spec = design(
        model=model, heads=heads, pattern="causal()", similarity=scale, modifiers=(Alibi(),)
    )
    steepest = attention_config.read_int("alibi_bias_max", default=8)
    clip = attention_config.read_optional_float("clip_qkv")
    attention: model_builders.LayerAttention = spec
    if heads & (heads - 1) or steepest != 8:
        attention = ApproximateAttention(
            spec, f"alibi_bias_max = {steepest} over {heads} heads gives slopes other than Alibi's"
        )
    elif clip is not None:
        attention = ApproximateAttention(
            spec, f"clip_qkv clips queries, keys and values at {clip:g}, which AttentionSpec lacks"
        )
    norm = NormSpec("unbiased", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layers", "num_hidden_layers", default=24)
    blocks = model_builders.make_blocks(
        [attention] * layers, FeedForwardSpec(4 * model, "gelu"), norm
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=50368), True),
    )
