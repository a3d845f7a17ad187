"""StableLM, Cohere and StarCoder 2: Llama's names, norms with biases, one norm for both sublayers, plain feed-forwards."""

from __future__ import annotations

from .llama import MAP as LLAMA

LAYER, THERE = "decoder.{layer}", ".layers.{layer}"
MORE = {
    f"{LAYER}.attention_norm.bias": f"{THERE}.input_layernorm.bias",
    f"{LAYER}.feed_norm.bias": f"{THERE}.post_attention_layernorm.bias",
    f"{LAYER}.norm.weight": f"{THERE}.input_layernorm.weight",
    f"{LAYER}.norm.bias": f"{THERE}.input_layernorm.bias",
    "decoder.norm.bias": ".norm.bias",
}
MAP = LLAMA._replace(families=("stablelm", "cohere", "cohere2"), slots={**LLAMA.slots, **MORE})
