"""gpt-oss: mixture of experts, a learned attention sink per head, windows in every other layer, YaRN."""

from __future__ import annotations

from typing import Any

from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    StackSpec,
)
from ..parts.sink_softmax import SinkSoftmax
from ..presets import design
from .attention_config import RopeConfig, alternate_layer_types, read_layer_patterns
from .config_reader import TransformersConfig, make_decoder_model, read_tied_stack, register_family
from .llama import LLAMA_WEIGHTS as LLAMA
from .weight_names import TensorLocation

DEFAULT_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


@register_family("gpt_oss", "GptOss")
def read_gpt_oss(config: TransformersConfig, task: str) -> ModelSpec:
    """Read gpt-oss (2508.10925); the gate and up projections of an expert are clipped before they are multiplied."""
    model = config.read_int("hidden_size", default=2880)
    heads = config.read_num_heads("num_attention_heads", default=64)
    layers = config.read_num_layers("num_hidden_layers", default=36)
    dim = config.resolve_head_dim(model, heads, "head_dim", default=64)
    rope = RopeConfig(
        config, config.read_int("max_position_embeddings", default=131072), theta=150_000.0, default=DEFAULT_YARN
    )

    design_args: dict[str, Any] = {
        "model": model,
        "heads": heads,
        "kv": config.read_num_kv_heads(heads, default=8),
        "dim": dim,
    }
    design_args |= {
        "bias": "qkvo" if config.read_bool("attention_bias", True) else "",
        "modifiers": (rope.make_rotary(dim),),
    }
    patterns = read_layer_patterns(
        config, layers, alternate_layer_types(layers), config.read_optional_int("sliding_window", default=128)
    )
    specs = {
        p: rope.attention_with_limits(design(**design_args, normaliser=SinkSoftmax(), pattern=p)) for p in set(patterns)
    }
    gain, limit = config.read_float("swiglu_alpha", default=1.702), config.read_float("swiglu_limit", default=7.0)
    config.require_default("hidden_act", "silu", "is not the activation of its experts")
    hidden = config.read_int("intermediate_size", default=2880)
    expert = FeedForwardSpec(hidden, f"bounded_silu({gain}, {limit})", "gated", bias="ugd")
    count = config.read_int("num_local_experts", "num_experts", default=128)
    active = config.read_int("num_experts_per_tok", "experts_per_token", default=4, maximum=count)
    feed = ExpertsSpec(expert, count, active, scores="chosen", bias="learned")
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    blocks = [BlockSpec(specs[pattern], feed=feed, norm=norm) for pattern in patterns]

    tokens = config.read_int("vocab_size", default=201088)
    stack = StackSpec.from_blocks("decoder", model, blocks, embedding=EmbeddingSpec(tokens), norm=norm)
    return make_decoder_model(
        config, task, stack, OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", False))
    )


# --- gpt-oss -------------------------------------------------------------------------------------------

FILE_EXPERTS = ".layers.{layer}.mlp.experts"
FILE_GATE_UP, FILE_GATE_UP_BIAS = f"{FILE_EXPERTS}.gate_up_proj", f"{FILE_EXPERTS}.gate_up_proj_bias"
GATE_ROWS, UP_ROWS = ({"side": 0}, {"side": 2}), ({"side": 1}, {"side": 2})

GPT_OSS_WEIGHTS = LLAMA._replace(
    families=("gpt_oss",),
    locations={
        **LLAMA.locations,
        "decoder.{layer}.attention.normaliser.sink": ".layers.{layer}.self_attn.sinks",
        "decoder.{layer}.feed.router": ".layers.{layer}.mlp.router.weight",
        "decoder.{layer}.feed.router_bias": ".layers.{layer}.mlp.router.bias",
        "decoder.{layer}.feed.each.gate": TensorLocation(FILE_GATE_UP, "expert model (hidden side)", *GATE_ROWS),
        "decoder.{layer}.feed.each.up": TensorLocation(FILE_GATE_UP, "expert model (hidden side)", *UP_ROWS),
        "decoder.{layer}.feed.each.down": TensorLocation(f"{FILE_EXPERTS}.down_proj", "expert hidden model"),
        "decoder.{layer}.feed.each.gate_bias": TensorLocation(FILE_GATE_UP_BIAS, "expert (hidden side)", *GATE_ROWS),
        "decoder.{layer}.feed.each.up_bias": TensorLocation(FILE_GATE_UP_BIAS, "expert (hidden side)", *UP_ROWS),
        "decoder.{layer}.feed.each.down_bias": f"{FILE_EXPERTS}.down_proj_bias",
    },
)
