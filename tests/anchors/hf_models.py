"""Tiny random transformers models, and for each of their attention layers our spec and its weights.

Every spec is written by hand from the numbers of the config: nothing here reads a spec out of a
model.
"""

from __future__ import annotations

from typing import Any

import transformers as tf
from torch import Tensor, nn

import headwise as hw
from anchors.hf import Model, Site, blocks, linear, projections, randomised

VOCABULARY = 37
LAYERS = 2
USUAL = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "attn_implementation": "eager"}
GATED = USUAL | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 29}
WEIGHTS = "qkv"


# --- absolute positions ---------------------------------------------------------------------------


def bert() -> Model:
    config = tf.BertConfig(hidden_size=15, num_attention_heads=3, intermediate_size=29, **USUAL)
    model = randomised(tf.BertModel(config))
    spec = hw.design(model=15, heads=3, bias="qkvo")
    sites = []
    for depth, block in enumerate(model.encoder.layer):
        inner, outer = block.attention.self, block.attention.output.dense
        names = ("query", "key", "value")
        weights = [linear(f"project.{name[0]}", getattr(inner, name)) for name in names]
        merged = weights[0] | weights[1] | weights[2] | linear("output.o", outer)
        sites.append(Site(inner, outer, spec, merged, ("attentions", depth)))
    return Model(model, sites, 1e-12)


def gpt2(by_depth: bool = False) -> Model:
    """`by_depth` divides scores by the depth, counted from 1."""
    config = tf.GPT2Config(
        n_embd=21,
        n_head=3,
        n_inner=29,
        scale_attn_by_inverse_layer_idx=by_depth,
        n_layer=LAYERS,
        vocab_size=VOCABULARY,
        attn_implementation="eager",
    )
    model = randomised(tf.GPT2Model(config))
    sites = []
    for depth, block in enumerate(model.h):
        scale = 7**-0.5 / (depth + 1 if by_depth else 1)
        spec = hw.design(
            model=21,
            heads=3,
            pattern="causal()",
            bias="qkvo",
            similarity=hw.parts.DotProduct(scale=scale),
        )
        # Conv1D keeps its matrix as (in, out), and q, k and v side by side.
        sides = (
            block.attn.c_attn.weight.detach().T.chunk(3),
            block.attn.c_attn.bias.detach().chunk(3),
        )
        weights = {
            f"project.{side}": weight for side, weight in zip(WEIGHTS, sides[0], strict=True)
        }
        weights |= {
            f"project.{side}_bias": bias for side, bias in zip(WEIGHTS, sides[1], strict=True)
        }
        weights["output.o"] = block.attn.c_proj.weight.detach().T
        weights["output.o_bias"] = block.attn.c_proj.bias.detach()
        sites.append(Site(block.attn, block.attn, spec, weights, ("attentions", depth)))
    return Model(model, sites, 1e-12)


# --- rotary positions: transformers takes its angles and its softmax in float32, hence 2e-6 -------

SIZES = {"model": 42, "heads": 6, "kv": 2, "dim": 10}  # head_dim is not hidden_size / heads
ROPE = {"rope_type": "default", "rope_theta": 500.0}
LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def gated(
    kind: str,
    spec: dict[str, Any],
    weights: Any = projections,
    patterns: tuple[str, ...] = ("causal()", "causal()"),
    **keys: Any,
) -> Model:
    """A decoder, and the design of its layers, which differ in their patterns."""
    config = getattr(tf, f"{kind}Config")(**(GATED | {"hidden_size": 42, "head_dim": 10} | keys))
    model = randomised(getattr(tf, f"{kind}Model")(config))
    specs = [hw.design(**(SIZES | {"pattern": pattern} | spec)) for pattern in patterns]
    return Model(model, blocks(model, specs.__getitem__, weights), 2e-6)


def llama(rope: dict[str, Any] | None = None, scaling: Any = None, bias: bool = False) -> Model:
    """`rope` is their spelling of what `scaling` says."""
    rotary = (
        hw.parts.Rotary(base=500.0)
        if scaling is None
        else hw.parts.Rotary(base=500.0, scaling=scaling)
    )
    keys = {"max_position_embeddings": 8, "rope_parameters": ROPE | (rope or {})}
    spec = {"modifiers": (rotary,), "bias": "qkvo" if bias else ""}
    return gated("Llama", spec, attention_bias=bias, **keys)


def stablelm() -> Model:
    """Only the first 4 of 10 channels turn."""
    spec = {"model": 60, "modifiers": (hw.parts.Rotary(base=500.0, dims=4),), "bias": "qkv"}
    rope = ROPE | {"partial_rotary_factor": 0.4}
    return gated("StableLm", spec, hidden_size=60, use_qkv_bias=True, rope_parameters=rope)


def normed(attention: nn.Module) -> dict[str, Tensor]:
    norms = {
        "qk_norm.q": attention.q_norm.weight.detach(),
        "qk_norm.k": attention.k_norm.weight.detach(),
    }
    return projections(attention) | norms


def qwen3() -> Model:
    spec = {"modifiers": (hw.parts.QKNorm(eps=1e-2), hw.parts.Rotary(base=10_000.0))}
    return gated("Qwen3", spec, normed, rms_norm_eps=1e-2)


def olmo2() -> Model:
    spec = {
        "model": 24,
        "dim": 4,
        "modifiers": (hw.parts.QKNorm(scope="full", eps=1e-2), hw.parts.Rotary(base=10_000.0)),
    }
    keys = {"hidden_size": 24, "head_dim": 4, "pad_token_id": 0, "eos_token_id": 1}
    return gated("Olmo2", spec, normed, rms_norm_eps=1e-2, **keys)


def gemma2() -> Model:
    """The softcap bites, the scale follows no width, and every second layer sees 5 keys."""
    modifiers = (hw.parts.Rotary(), hw.parts.Softcap(1.5))
    spec = {"similarity": hw.parts.DotProduct(scale=3**-0.5), "modifiers": modifiers}
    keys = LOCAL | {"query_pre_attn_scalar": 3, "attn_logit_softcapping": 1.5}
    return gated("Gemma2", spec, patterns=("window(5)", "causal()"), **keys)


def gpt_oss() -> Model:
    """A sink in every head, biases everywhere, YaRN, and every second layer sees 5 keys."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5}
    rotary = hw.parts.Rotary(
        base=500.0, scaling=hw.parts.YaRN(4.0, original=64, beta_fast=8.0, beta_slow=0.5)
    )
    spec = {"bias": "qkvo", "modifiers": (rotary,), "normaliser": hw.parts.SinkSoftmax()}
    keys = {
        "num_local_experts": 3,
        "experts_implementation": "eager",
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "rope_parameters": ROPE | yarn | {"original_max_position_embeddings": 64},
    }

    def weights(attention: nn.Module) -> dict[str, Tensor]:
        return projections(attention) | {"normaliser.sink": attention.sinks.detach()}

    return gated("GptOss", spec, weights, ("window(5)", "causal()"), **(LOCAL | keys))


# --- T5: buckets in float32 on both sides, all else in float64 ------------------------------------


def t5() -> Model:
    config = tf.T5Config(
        d_model=19,
        num_heads=3,
        d_kv=5,
        d_ff=29,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=11,
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    model = randomised(tf.T5Model(config))
    sites = []
    for stack, looking, pattern in (
        (model.encoder, "both", "full()"),
        (model.decoder, "back", "causal()"),
    ):
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.detach()
        bias = hw.parts.T5Bias(buckets=8, reach=11, looking=looking)
        spec = hw.design(
            model=19,
            heads=3,
            dim=5,
            pattern=pattern,
            modifiers=(bias,),
            similarity=hw.parts.DotProduct(scale=1.0),
        )
        for depth, block in enumerate(stack.block):
            attention = block.layer[0].SelfAttention
            message = f"{'encoder' if looking == 'both' else 'decoder'}_attentions"
            weights = projections(attention, "qkvo") | {"t5_bias.table": table}
            sites.append(Site(attention, attention, spec, weights, (message, depth)))
    cross = hw.design(model=19, heads=3, dim=5, similarity=hw.parts.DotProduct(scale=1.0))
    for depth, block in enumerate(model.decoder.block):
        attention = block.layer[1].EncDecAttention
        sites.append(
            Site(
                attention,
                attention,
                cross,
                projections(attention, "qkvo"),
                ("cross_attentions", depth),
            )
        )
    return Model(model, sites, 1e-12)


# --- latent attention -----------------------------------------------------------------------------


def deepseek(
    query_rank: int | None = None,
    interleaved: bool = True,
    rope: dict[str, Any] | None = None,
    scaling: Any = None,
    scale: float | None = None,
) -> Model:
    keys = {
        "hidden_size": 23,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": query_rank,
        "kv_lora_rank": 7,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 5,
        "v_head_dim": 11,
        "head_dim": 6,
        "first_k_dense_replace": LAYERS,
        "rope_interleave": interleaved,
        "max_position_embeddings": 256,
        "rope_parameters": ROPE | (rope or {}),
    }
    turned = {} if scaling is None else {"scaling": scaling}
    rotary = hw.parts.Rotary(base=500.0, pairs="interleaved" if interleaved else "half", **turned)
    sizes = {"model": 23, "heads": 3, "kv": None, "dim": 5, "vdim": 11}
    spec = sizes | {
        "project": hw.parts.MLAProjection(rank=7, rope=6, query_rank=query_rank, eps=1e-6),
        "modifiers": (rotary,),
        "similarity": hw.parts.DotProduct(scale=scale),
    }
    return gated("DeepseekV3", spec, latent, **keys)


def latent(attention: nn.Module) -> dict[str, Tensor]:
    """Keys and values of a head lie together in kv_b_proj: 5 rows of one, 11 of the other."""
    up = attention.kv_b_proj.weight.detach().unflatten(0, (3, 16))
    down = {
        "project.kv_down": attention.kv_a_proj_with_mqa.weight.detach(),
        "project.kv_norm": attention.kv_a_layernorm.weight.detach(),
        "project.k_up": up[:, :5].flatten(0, 1),
        "project.v_up": up[:, 5:].flatten(0, 1),
        "output.o": attention.o_proj.weight.detach(),
    }
    if attention.q_lora_rank is None:
        return down | {"project.q": attention.q_proj.weight.detach()}
    return down | {
        "project.q_down": attention.q_a_proj.weight.detach(),
        "project.q_norm": attention.q_a_layernorm.weight.detach(),
        "project.q_up": attention.q_b_proj.weight.detach(),
    }
