"""Tiny random models of transformers as a whole, and their weights under the names of our
description.

Names are translated by substitution, one after the other; fused tensors are split by
`split_tensor`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import headwise as hw
from anchors.hf import randomised
from headwise.models import families

VOCABULARY = 37
USUAL = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "attn_implementation": "eager"}
GATED = USUAL | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 29,
    "hidden_size": 42,
}
GATED |= {"head_dim": 10, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
BERT = USUAL | {
    "hidden_size": 15,
    "num_attention_heads": 3,
    "intermediate_size": 29,
    "max_position_embeddings": 23,
}
T5 = {
    "d_model": 19,
    "num_heads": 3,
    "d_kv": 5,
    "d_ff": 29,
    "vocab_size": VOCABULARY,
    "num_layers": 3,
}
T5 |= {
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
    "decoder_start_token_id": 0,
}
T5 |= {"num_decoder_layers": 2, "attn_implementation": "eager"}
BART = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", 2), ("ffn_dim", 29))
}
BART |= {
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 5,
    "d_model": 15,
    "vocab_size": VOCABULARY,
}
BART |= {"max_position_embeddings": 23, "attn_implementation": "eager"}
VIT = {
    "hidden_size": 15,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 29,
    "num_labels": 7,
}
VIT |= {"image_size": (11, 9), "patch_size": 3, "num_channels": 2, "attn_implementation": "sdpa"}
LOCAL = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5}
OSS = (
    GATED
    | LOCAL
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}
)
OSS |= {
    "max_position_embeddings": 256,
    "rope_parameters": YARN | {"original_max_position_embeddings": 64},
}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 7,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 5,
}
LATENT |= {
    "v_head_dim": 11,
    "moe_intermediate_size": 9,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 6,
}
LATENT |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 2}
LATENT |= {"experts_implementation": "eager"}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            n_embd=21, n_head=3, n_inner=29, n_layer=3, n_positions=23, vocab_size=VOCABULARY
        )
    ),
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**GATED, attention_bias=True, mlp_bias=True)
    ),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GATED, sliding_window=5)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GATED, tie_word_embeddings=True)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **(GATED | LOCAL),
            query_pre_attn_scalar=3,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.0,
        )
    ),
    "gpt-oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**OSS)),
    "deepseek": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**(GATED | LATENT))),
    "bert-masked": lambda: tf.BertForMaskedLM(tf.BertConfig(**BERT)),
    "bert-classes": lambda: tf.BertForSequenceClassification(tf.BertConfig(**BERT, num_labels=5)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
    "t5-gated": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART, scale_embedding=True)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**VIT)),
}
ROTARY = ("llama", "mistral", "qwen3", "gemma2", "gpt-oss", "deepseek")

# Matrices and biases, wherever they stand.
MAPS = ((r"\.weight$", ""), (r"\.bias$", "_bias"))
LLAMA = (
    (r"^model\.embed_tokens\.weight", "decoder.embedding.tokens"),
    (r"^model\.(layers\.)?", "decoder."),
    (r"self_attn\.([qkv])_proj", r"attention.project.\1"),
    (r"self_attn\.o_proj", "attention.output.o"),
    (r"self_attn\.([qk])_norm", r"attention.qk_norm.\1"),
    (r"self_attn\.sinks", "attention.normaliser.sink"),
    (r"self_attn\.q_a_proj", "attention.project.q_down"),
    (r"self_attn\.q_a_layernorm", "attention.project.q_norm"),
    (r"self_attn\.q_b_proj", "attention.project.q_up"),
    (r"self_attn\.kv_a_proj_with_mqa", "attention.project.kv_down"),
    (r"self_attn\.kv_a_layernorm", "attention.project.kv_norm"),
    (r"mlp\.shared_experts\.(gate|up|down)_proj", r"feed.shared.\1"),
    (r"mlp\.(gate|up|down)_proj", r"feed.\1"),
    (r"mlp\.(gate|router)\.weight", "feed.router"),
    (r"mlp\.(gate\.e_score_correction|router\.)_?bias", "feed.router_bias"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "feed_norm"),
    (r"^lm_head", "head.tokens.weight"),
)
GEMMA = (
    (r"post_attention_layernorm", "attention_norm_after"),
    (r"pre_feedforward_layernorm", "feed_norm"),
    (r"post_feedforward_layernorm", "feed_norm_after"),
    *LLAMA,
)
GPT2 = (
    (r"^transformer\.wte\.weight", "decoder.embedding.tokens"),
    (r"^transformer\.wpe\.weight", "decoder.embedding.positions"),
    (r"^transformer\.ln_f", "decoder.norm"),
    (r"^transformer\.h\.", "decoder."),
    (r"attn\.c_proj", "attention.output.o"),
    (r"mlp\.c_fc", "feed.up"),
    (r"mlp\.c_proj", "feed.down"),
    (r"ln_1", "attention_norm"),
    (r"ln_2", "feed_norm"),
)
BERT_NAMES = (
    (r"^bert\.embeddings\.word_embeddings\.weight", "encoder.embedding.tokens"),
    (r"^bert\.embeddings\.position_embeddings\.weight", "encoder.embedding.positions"),
    (r"^bert\.embeddings\.token_type_embeddings\.weight", "encoder.embedding.types"),
    (r"^bert\.embeddings\.LayerNorm", "encoder.embedding.norm"),
    (r"^bert\.encoder\.layer\.", "encoder."),
    (r"attention\.self\.([qkv])(uery|ey|alue)", r"attention.project.\1"),
    (r"attention\.output\.dense", "attention.output.o"),
    (r"attention\.output\.LayerNorm", "attention_norm"),
    (r"intermediate\.dense", "feed.up"),
    (r"(\d)\.output\.dense", r"\1.feed.down"),
    (r"(\d)\.output\.LayerNorm", r"\1.feed_norm"),
    (r"^bert\.pooler\.dense", "head.classes.transform"),
    (r"^classifier\.", "head.classes."),
    (r"^cls\.predictions\.transform\.dense", "head.tokens.transform"),
    (r"^cls\.predictions\.transform\.LayerNorm", "head.tokens.transform_norm"),
    (r"^cls\.predictions\.bias", "head.tokens.bias"),
)
T5_NAMES = (
    (r"^shared\.weight", "encoder.embedding.tokens"),
    (r"^lm_head", "head.tokens.weight"),
    (r"\.block\.", "."),
    (r"layer\.0\.SelfAttention\.relative_attention_bias", "attention.t5_bias.table"),
    (r"layer\.0\.SelfAttention\.([qkv])", r"attention.project.\1"),
    (r"layer\.0\.SelfAttention\.o", "attention.output.o"),
    (r"layer\.1\.EncDecAttention\.([qkv])", r"cross.project.\1"),
    (r"layer\.1\.EncDecAttention\.o", "cross.output.o"),
    (r"layer\.\d\.DenseReluDense\.(wi_1|wi)\.", "feed.up."),
    (r"layer\.\d\.DenseReluDense\.wi_0", "feed.gate"),
    (r"layer\.\d\.DenseReluDense\.wo", "feed.down"),
    (r"layer\.0\.layer_norm", "attention_norm"),
    (r"^(encoder\.\d+)\.layer\.1\.layer_norm", r"\1.feed_norm"),
    (r"layer\.1\.layer_norm", "cross_norm"),
    (r"layer\.2\.layer_norm", "feed_norm"),
    (r"final_layer_norm", "norm"),
)
BART_NAMES = (
    (r"^model\.shared\.weight", "encoder.embedding.tokens"),
    (r"^model\.", ""),
    (r"embed_positions\.weight", "embedding.positions"),
    (r"layernorm_embedding", "embedding.norm"),
    (r"\.layers\.", "."),
    (r"self_attn\.([qkv])_proj", r"attention.project.\1"),
    (r"encoder_attn\.([qkv])_proj", r"cross.project.\1"),
    (r"self_attn\.out_proj", "attention.output.o"),
    (r"encoder_attn\.out_proj", "cross.output.o"),
    (r"self_attn_layer_norm", "attention_norm"),
    (r"encoder_attn_layer_norm", "cross_norm"),
    (r"final_layer_norm", "feed_norm"),
    (r"fc1", "feed.up"),
    (r"fc2", "feed.down"),
    (r"^final_logits_bias", "head.tokens.bias"),
)
VIT_NAMES = (
    (r"^vit\.embeddings\.cls_token", "encoder.embedding.first"),
    (r"^vit\.embeddings\.position_embeddings", "encoder.embedding.positions"),
    (r"^vit\.embeddings\.patch_embeddings\.projection", "encoder.embedding.patches"),
    (r"^vit\.layernorm", "encoder.norm"),
    (r"^vit\.layers\.", "encoder."),
    (r"attention\.([qkv])_proj", r"attention.project.\1"),
    (r"attention\.o_proj", "attention.output.o"),
    (r"layernorm_before", "attention_norm"),
    (r"layernorm_after", "feed_norm"),
    (r"mlp\.fc1", "feed.up"),
    (r"mlp\.fc2", "feed.down"),
    (r"^classifier\.", "head.classes."),
)
GPTJ = (
    (r"^transformer\.wte\.weight", "decoder.embedding.tokens"),
    (r"^transformer\.ln_f", "decoder.norm"),
    (r"^transformer\.h\.", "decoder."),
    (r"attn\.([qkv])_proj", r"attention.project.\1"),
    (r"attn\.out_proj", "attention.output.o"),
    (r"mlp\.fc_in", "feed.up"),
    (r"mlp\.fc_out", "feed.down"),
    (r"ln_1", "norm"),
    (r"^lm_head\.", "head.tokens."),
)
NAMES = {
    "gptj": GPTJ,
    "gpt2": GPT2,
    "gemma2": GEMMA,
    "bert": BERT_NAMES,
    "t5": T5_NAMES,
    "bart": BART_NAMES,
    "vit": VIT_NAMES,
}


def build_pair(name: str, folder: Path) -> tuple[nn.Module, hw.Transformer]:
    """A model of transformers in float64 with numbers that matter, and ours with the same."""
    theirs = randomised(MODELS[name]())
    theirs.config.architectures = [type(theirs).__name__]
    theirs.config.save_pretrained(folder)
    with torch.no_grad():
        for key, buffer in theirs.named_buffers():
            if key.endswith(("e_score_correction_bias", "final_logits_bias")):
                buffer.normal_()
    ours = hw.build(families.read_model_spec(folder)).double().eval()
    ours.load_state_dict(mapped(theirs, ours))
    return theirs, ours


def mapped(theirs: nn.Module, ours: hw.Transformer) -> dict[str, Tensor]:
    """Their weights under our names; our constants stay, and what they keep twice is left out."""
    expected = ours.state_dict()
    rules = NAMES.get(ours.spec.name, LLAMA)
    found = {}
    for key, tensor in theirs.state_dict().items():
        for name, part in split_tensor(key, tensor, theirs.config):
            for pattern, new in rules:
                name = re.sub(pattern, new, name)
            for pattern, new in MAPS if name not in expected else ():
                name = re.sub(pattern, new, name)
            found[name] = part
    tied = {"head.tokens.weight", "encoder.embedding.tokens", "decoder.embedding.tokens", "lm_head"}
    tied |= {
        "encoder.embed_tokens",
        "decoder.embed_tokens",
        "cls.predictions.decoder",
        "cls.predictions.decoder_bias",
    }
    strange = set(found) - set(expected) - tied
    if strange:
        raise ValueError(f"nothing of ours is called {sorted(strange)}")
    shaped = {
        name: part.reshape(expected[name].shape) for name, part in found.items() if name in expected
    }
    constants = {
        w.name: expected[w.name]
        for w in ours.spec.weights()
        if not w.trainable and w.name not in shaped
    }
    return shaped | constants


def split_tensor(key: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """What lies in one tensor, under names of which each is one of ours; matrices as (out, in)."""
    stem, _, last = key.rpartition(".")
    if key.endswith(("c_attn.weight", "c_attn.bias")):  # Conv1D keeps its matrix as (in, out)
        sides = tensor.T.chunk(3) if last == "weight" else tensor.chunk(3)
        for side, part in zip("qkv", sides, strict=True):
            yield f"{stem.removesuffix('.attn.c_attn')}.attention.project.{side}.{last}", part
    elif re.search(r"\.c_\w+\.weight$", key):
        yield key, tensor.T
    elif (
        last.startswith("gate_up_proj") and config.model_type == "gpt_oss"
    ):  # (expert, in, out), gates between ups
        ending = "_bias" if last.endswith("bias") else ""
        for side, part in (("gate", tensor[..., ::2]), ("up", tensor[..., 1::2])):
            yield (
                f"{stem.removesuffix('mlp.experts')}feed.each.{side}{ending}",
                part if ending else part.mT,
            )
    elif last.startswith("gate_up_proj"):
        for side, part in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
            yield f"{stem.removesuffix('mlp.experts')}feed.each.{side}", part
    elif last.startswith("down_proj") and ".experts" in stem:
        result = tensor.mT if config.model_type == "gpt_oss" and last == "down_proj" else tensor
        yield f"{stem.removesuffix('mlp.experts')}feed.each.{last.replace('_proj', '')}", result
    elif "kv_b_proj" in key:  # keys and values of a head lie together
        each = tensor.unflatten(0, (config.num_attention_heads, -1))
        for side, part in (
            ("k", each[:, : config.qk_nope_head_dim]),
            ("v", each[:, config.qk_nope_head_dim :]),
        ):
            yield f"{stem.removesuffix('self_attn.kv_b_proj')}attention.project.{side}_up", part
    else:
        yield key, tensor
