"""Tiny models of transformers with random weights, and where each keeps its output projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WIDE, HEADS, DIM, WORDS = 32, 4, 8, 67
LLAMA: dict[str, Any] = {
    "hidden_size": WIDE, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": DIM,
    "intermediate_size": 48, "vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT: dict[str, Any] = {
    "hidden_size": WIDE, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48,
    "vocab_size": WORDS, "max_position_embeddings": 64,
}  # fmt: skip
BART: dict[str, Any] = {
    "d_model": WIDE, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": WORDS,
    "max_position_embeddings": 64, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": DIM}


class Foreign(NamedTuple):
    """A class of models, its config, the last part of the name of its output projections, and what it reads."""

    model: str
    config: str
    keys: dict[str, Any]
    out: str
    reads: str = "ids"

    def build(self, attention: str = "eager") -> nn.Module:
        """The model with random weights large enough for attention to be uneven."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.keys)
        model = getattr(transformers, self.model)._from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        return model.eval()

    def inputs(self) -> dict[str, Tensor]:
        """Something to read: two rows."""
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(3, WORDS, (2, 11), generator=draw)
        if self.reads == "pixels":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=draw)}
        if self.reads == "both":
            return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
        if self.reads == "sound":
            return {"input_features": torch.randn(2, 16, 26, generator=draw), "decoder_input_ids": ids[:, :7]}
        return {"input_ids": ids}


def _small(**more: Any) -> dict[str, Any]:
    return {**LLAMA, **more}


ZOO = {
    "bert": Foreign("BertModel", "BertConfig", BERT, "output.dense"),
    "roberta": Foreign("RobertaModel", "RobertaConfig", BERT, "output.dense"),
    "gpt2": Foreign("GPT2LMHeadModel", "GPT2Config", {"n_embd": WIDE, "n_head": HEADS, "n_layer": 2, "vocab_size": WORDS}, "c_proj"),
    "llama": Foreign("LlamaForCausalLM", "LlamaConfig", LLAMA, "o_proj"),
    "qwen3": Foreign("Qwen3ForCausalLM", "Qwen3Config", LLAMA, "o_proj"),
    "mistral": Foreign("MistralForCausalLM", "MistralConfig", _small(sliding_window=5), "o_proj"),
    "gemma2": Foreign("Gemma2ForCausalLM", "Gemma2Config", _small(sliding_window=5, query_pre_attn_scalar=8), "o_proj"),
    "gemma3": Foreign("Gemma3ForCausalLM", "Gemma3TextConfig", _small(sliding_window=5, layer_types=["sliding_attention", "full_attention"]), "o_proj"),
    "gpt-oss": Foreign("GptOssForCausalLM", "GptOssConfig", _small(sliding_window=5, num_local_experts=4, num_experts_per_tok=2), "o_proj"),
    "t5": Foreign("T5ForConditionalGeneration", "T5Config", {"d_model": WIDE, "d_kv": DIM, "num_heads": HEADS, "num_layers": 2, "d_ff": 48, "vocab_size": WORDS, "decoder_start_token_id": 0}, ".o", "both"),
    "bart": Foreign("BartForConditionalGeneration", "BartConfig", BART, "out_proj", "both"),
    "marian": Foreign("MarianMTModel", "MarianConfig", BART, "out_proj", "both"),
    "whisper": Foreign("WhisperForConditionalGeneration", "WhisperConfig", BART | {"num_mel_bins": 16, "max_source_positions": 13, "max_target_positions": 32}, "out_proj", "sound"),
    "vit": Foreign("ViTModel", "ViTConfig", {"hidden_size": WIDE, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48, "image_size": 16, "patch_size": 4}, "o_proj|output.dense", "pixels"),
    "deepseek": Foreign("DeepseekV3ForCausalLM", "DeepseekV3Config", _small(head_dim=4, num_key_value_heads=HEADS, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, **MLA), "o_proj"),
    "olmo2": Foreign("Olmo2ForCausalLM", "Olmo2Config", LLAMA, "o_proj"),
    "phi3": Foreign("Phi3ForCausalLM", "Phi3Config", LLAMA, "o_proj"),
}  # fmt: skip


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What a model says in the end, logits or states."""
    with torch.no_grad():
        said = model(**inputs)
    return said.logits if "logits" in said else said.last_hidden_state


def without_columns(model: nn.Module, path: str, out: str, head: int, width: int) -> None:
    """Set the columns of one head to zero in the output projection that stands nearest to an attention."""
    columns = slice(head * width, (head + 1) * width)
    near = path.rpartition(".")[0] if "|" not in out and out.startswith("output") else path
    found = [
        module
        for name, module in model.named_modules()
        if name.startswith(near) and any(name.endswith(end) for end in out.split("|")) and "mlp" not in name
    ]
    weight = found[0].weight
    conv = type(found[0]).__name__ == "Conv1D"
    with torch.no_grad():
        weight[columns if conv else slice(None), slice(None) if conv else columns] = 0


Check = Callable[[nn.Module], None]
