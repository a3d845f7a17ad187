"""What formulas say of whole models, held to the models: every family, two precisions, dropout, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.costs.activations import fused_unsupported_reason
from headwise.costs.saved_tensors import SavedTensorRecorder
from headwise.costs.training_memory import recompute_flops

pytest.importorskip("headwise.models", reason="models are not part of this build")

LLAMA = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 100, "vocab_size": 61, "max_position_embeddings": 40, "rms_norm_eps": 1e-5}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 20}
BERT = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 100}
OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 61, "n_positions": 40},
    "llama": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "mistral": LLAMA | {"sliding_window": 6},
    "gemma2": LLAMA | {"head_dim": 16, "sliding_window": 5},
    "bert": BERT | {"vocab_size": 61, "max_position_embeddings": 40, "architectures": ["BertForMaskedLM"]},
    "vit": BERT | {"image_size": 16, "patch_size": 4, "architectures": ["ViTForImageClassification"]},
    "t5": {"num_layers": 2, "d_model": 48, "d_kv": 12, "num_heads": 4, "d_ff": 100, "vocab_size": 61},
    "bart": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "d_model": 48,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 100,
        "decoder_ffn_dim": 90,
        "vocab_size": 61,
    },
    "deepseek_v3": LLAMA
    | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | LATENT
    | EXPERTS,
    "gpt_oss": LLAMA | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 5} | OSS,
}
BATCH, TOKENS, SOURCE = 2, 11, 13
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def described(name: str) -> hw.model_spec.ModelSpec:
    return hw.families.read_model_spec({"model_type": name, **CONFIGS[name]})


def given(stack: hw.model_spec.StackSpec, tokens: int, dtype: torch.dtype) -> Tensor:
    patches = stack.embedding.patches
    if patches is None:
        return torch.randint(1, stack.embedding.tokens, (BATCH, tokens))
    return torch.randn(
        BATCH, patches.channels, patches.rows * patches.high, patches.columns * patches.wide, dtype=dtype
    )


def measured(model: hw.model_spec.ModelSpec, dtype: torch.dtype, way: hw.ActivationSettings) -> int:
    """Bytes that hooks see of one step of training; ids, pixels and labels are given and do not count."""
    net = hw.build(model, dropout=way.dropout, seed=0).to(dtype).train()
    net.checkpointing = way.checkpoint
    more = {"source": given(model.stacks[0], SOURCE, dtype)} if len(model.stacks) > 1 else {}
    x, labels = given(model.stacks[-1], TOKENS, dtype), torch.zeros(BATCH * 99, dtype=torch.int64)
    with SavedTensorRecorder([*net.parameters(), *net.buffers(), x, *more.values(), labels], {}) as watch:
        y = net(x, **more).flatten(0, -2)
        F.cross_entropy(y, labels[: len(y)])
    return watch.total_bytes


def profile(model: hw.model_spec.ModelSpec, dtype: str = "fp32") -> str:
    """In bfloat16 each attention has its own: the usual one."""
    return (
        "dense"
        if any(fused_unsupported_reason(spec) for _, spec in model.attention_specs())
        else ""
        if dtype == "bf16"
        else "sdpa"
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_keeps_what_its_formula_says(name, dtype, dropout):
    model, load = described(name), hw.Workload(BATCH, TOKENS, dtype, "cpu")
    way = hw.ActivationSettings(
        profile(model, dtype), dropout=dropout, source=SOURCE if len(described(name).stacks) > 1 else None
    )
    assert hw.activation_memory(model, load, way).total == measured(model, DTYPES[dtype], way)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "deepseek_v3", "bert"])
def test_a_model_with_checkpoints_keeps_the_inputs_of_its_blocks(name):
    model, load, way = (
        described(name),
        hw.Workload(BATCH, TOKENS, "fp32", "cpu"),
        hw.ActivationSettings("dense", "block"),
    )
    assert hw.activation_memory(model, load, way).total == measured(model, torch.float32, way)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "deepseek_v3", "gpt_oss"])
def test_a_model_with_checkpoints_does_again_what_its_formula_says(name, dropout):
    from torch.utils.flop_counter import FlopCounterMode

    model, totals = described(name), {}
    for checkpointing in ("none", "block"):
        net = hw.build(model, dropout=dropout, seed=0).train()
        for spec in net.modules():
            if isinstance(spec, hw.Attention):
                spec.backend_name = "dense"
        net.checkpointing = checkpointing
        with FlopCounterMode(display=False) as counted:
            net(torch.randint(1, 61, (BATCH, TOKENS))).sum().backward()
        totals[checkpointing] = counted.get_total_flops()
    way = hw.ActivationSettings("dense", "block", dropout)
    done = recompute_flops(model, hw.Workload(BATCH, TOKENS, "fp32", "cpu"), way).total
    assert done == totals["block"] - totals["none"]
