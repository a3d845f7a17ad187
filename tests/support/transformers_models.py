"""Tiny random models of transformers, with the names of their output projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WIDE, HEADS, DIM, WORDS = 32, 4, 8, 67
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": WIDE, "num_hidden_layers": 2, "num_attention_heads": HEADS}
BERT: dict[str, Any] = SIZES | {"intermediate_size": 48, "vocab_size": WORDS}
BERT |= {"max_position_embeddings": 64}
LLAMA: dict[str, Any] = BERT | IDS | {"num_key_value_heads": 2, "head_dim": DIM}
BART: dict[str, Any] = {
    f"{stack}_{name}": size
    for name, size in (("layers", 2), ("attention_heads", HEADS), ("ffn_dim", 48))
    for stack in ("encoder", "decoder")
}
BART |= {"d_model": WIDE, "vocab_size": WORDS, "max_position_embeddings": 64}
BART |= IDS | {"decoder_start_token_id": 1}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
MLA |= {"v_head_dim": DIM}


class TransformersModel(NamedTuple):
    """A model class, its config, the suffix of its output projections, and its kind of input."""

    model: str
    config: str
    keys: dict[str, Any]
    out: str
    reads: str = "ids"

    def build(self, attention: str = "eager") -> nn.Module:
        """The model with random weights large enough for attention to be uneven."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.keys)
        model = getattr(transformers, self.model)._from_config(
            config, attn_implementation=attention
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        return model.eval()

    def inputs(self) -> dict[str, Tensor]:
        """Inputs of two rows."""
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(3, WORDS, (2, 11), generator=draw)
        if self.reads == "pixels":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=draw)}
        if self.reads == "both":
            return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
        if self.reads == "sound":
            return {
                "input_features": torch.randn(2, 16, 26, generator=draw),
                "decoder_input_ids": ids[:, :7],
            }
        return {"input_ids": ids}


def _with(keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**keys, **more}


def _causal(name: str, **more: Any) -> TransformersModel:
    """A decoder with the config keys of Llama."""
    return TransformersModel(f"{name}ForCausalLM", f"{name}Config", _with(LLAMA, **more), "o_proj")


WHISPER = _with(BART, num_mel_bins=16, max_source_positions=13, max_target_positions=32)
GPT = {"n_embd": WIDE, "n_head": HEADS, "n_layer": 2, "vocab_size": WORDS}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": WIDE, "d_kv": DIM, "num_heads": HEADS, "num_layers": 2, "d_ff": 48}
T5 |= {"vocab_size": WORDS, "decoder_start_token_id": 0}
PICTURES = {"image_size": 16, "patch_size": 4}
VIT = SIZES | PICTURES | {"intermediate_size": 48}
FALCON = SIZES | {"vocab_size": WORDS}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = ["sliding_attention", "full_attention"]

ZOO = {
    "bert": TransformersModel("BertModel", "BertConfig", BERT, "output.dense"),
    "roberta": TransformersModel("RobertaModel", "RobertaConfig", BERT, "output.dense"),
    "gpt2": TransformersModel("GPT2LMHeadModel", "GPT2Config", GPT, "c_proj"),
    "llama": _causal("Llama"),
    "qwen3": _causal("Qwen3"),
    "mistral": _causal("Mistral", sliding_window=5),
    "gemma2": _causal(
        "Gemma2", sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=0.5
    ),
    "gemma3": _causal("Gemma3", sliding_window=5, layer_types=LOCAL)._replace(
        config="Gemma3TextConfig"
    ),
    "gpt-oss": _causal("GptOss", sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
    "t5": TransformersModel("T5ForConditionalGeneration", "T5Config", T5, ".o", "both"),
    "bart": TransformersModel(
        "BartForConditionalGeneration", "BartConfig", BART, "out_proj", "both"
    ),
    "marian": TransformersModel("MarianMTModel", "MarianConfig", BART, "out_proj", "both"),
    "whisper": TransformersModel(
        "WhisperForConditionalGeneration", "WhisperConfig", WHISPER, "out_proj", "sound"
    ),
    "vit": TransformersModel("ViTModel", "ViTConfig", VIT, "o_proj|output.dense", "pixels"),
    "deepseek": _causal(
        "DeepseekV3", num_key_value_heads=HEADS, **EXPERTS, **(MLA | {"head_dim": 4})
    ),
    "olmo2": _causal("Olmo2"),
    "phi3": _causal("Phi3"),
}
# Those that ask no interface.
FALLBACK = {
    "gptj": TransformersModel(
        "GPTJForCausalLM", "GPTJConfig", _with(GPT, rotary_dim=4), "out_proj"
    ),
    "bloom": TransformersModel(
        "BloomForCausalLM", "BloomConfig", {"hidden_size": WIDE, "vocab_size": WORDS} | GPT, "dense"
    ),
    "falcon": TransformersModel("FalconForCausalLM", "FalconConfig", FALCON, "dense"),
    "deberta-v2": TransformersModel("DebertaV2Model", "DebertaV2Config", BERT, "output.dense"),
    "longformer": TransformersModel(
        "LongformerModel",
        "LongformerConfig",
        _with(BERT, attention_window=4, pad_token_id=0),
        "output.dense",
    ),
}


def run_model(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The output of a model: logits or hidden states."""
    with torch.no_grad():
        output = model(**inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def without_columns(model: nn.Module, path: str, out: str, head: int, width: int) -> None:
    """Set the columns of one head to zero in the output projection nearest to an attention."""
    columns = slice(head * width, (head + 1) * width)
    prefix = path.rpartition(".")[0] if "|" not in out and out.startswith("output") else path
    projections = [
        module
        for name, module in model.named_modules()
        if name.startswith(prefix)
        and any(name.endswith(end) for end in out.split("|"))
        and "mlp" not in name
    ]
    weight = projections[0].weight
    is_conv1d = type(projections[0]).__name__ == "Conv1D"
    with torch.no_grad():
        weight[columns if is_conv1d else slice(None), slice(None) if is_conv1d else columns] = 0
