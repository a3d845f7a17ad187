"""Tiny random models of transformers as a whole, and ours with the same weights."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable

import torch
import transformers as tf
from torch import nn

import headwise as hw
from anchors.hf import randomised

VOCABULARY = 37
USUAL = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "attn_implementation": "eager"}
GATED = USUAL | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 29}
GATED |= {"hidden_size": 42}
GATED |= {"head_dim": 10, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
BERT = USUAL | {"hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 29}
BERT |= {"max_position_embeddings": 23}
T5 = {"d_model": 19, "num_heads": 3, "d_kv": 5, "d_ff": 29, "vocab_size": VOCABULARY}
T5 |= {"num_layers": 3}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 11}
T5 |= {"decoder_start_token_id": 0}
T5 |= {"num_decoder_layers": 2, "attn_implementation": "eager"}
BART = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", 2), ("ffn_dim", 29))
}
BART |= {"encoder_attention_heads": 3, "decoder_attention_heads": 5, "d_model": 15}
BART |= {"vocab_size": VOCABULARY}
BART |= {"max_position_embeddings": 23, "attn_implementation": "eager"}
VIT = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 29}
VIT |= {"num_labels": 7}
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
LATENT = {"num_key_value_heads": 6, "kv_lora_rank": 7, "q_lora_rank": 8, "qk_rope_head_dim": 6}
LATENT |= {"qk_nope_head_dim": 5}
LATENT |= {"v_head_dim": 11, "moe_intermediate_size": 9, "n_routed_experts": 5}
LATENT |= {"num_experts_per_tok": 2, "head_dim": 6}
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


@functools.cache
def _load_pair(name: str) -> tuple[nn.Module, hw.Transformer]:
    theirs = randomised(MODELS[name]())
    with torch.no_grad():
        for key, buffer in theirs.named_buffers():
            if key.endswith(("e_score_correction_bias", "final_logits_bias")):
                buffer.normal_()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, hw.load(folder).double().eval()


def build_pair(name: str) -> tuple[nn.Module, hw.Transformer]:
    """Return a model of transformers in float64 with numbers that matter, and ours from its folder.

    tests/anchors/test_hub.py compares their outputs.
    """
    return copy.deepcopy(_load_pair(name))
