"""Memory of training: formulas against measured models of every family, and the report of `headwise
cost`.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch

import headwise as hw
from headwise import cli
from headwise.costs.training_memory import recompute_flops
from support.saved_bytes import BATCH, SOURCE, TOKENS, backend_profile, model_saved_bytes

LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA |= {
    "intermediate_size": 100,
    "vocab_size": 61,
    "max_position_embeddings": 40,
    "rms_norm_eps": 1e-5,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 20,
}
BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 100,
}
OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 61, "n_positions": 40},
    "llama": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "mistral": LLAMA | {"sliding_window": 6},
    "gemma2": LLAMA | {"head_dim": 16, "sliding_window": 5},
    "bert": BERT
    | {"vocab_size": 61, "max_position_embeddings": 40, "architectures": ["BertForMaskedLM"]},
    "vit": BERT
    | {"image_size": 16, "patch_size": 4, "architectures": ["ViTForImageClassification"]},
    "t5": {
        "num_layers": 2,
        "d_model": 48,
        "d_kv": 12,
        "num_heads": 4,
        "d_ff": 100,
        "vocab_size": 61,
    },
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
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def described(name: str) -> hw.model_spec.ModelSpec:
    return hw.families.read_model_spec({"model_type": name, **CONFIGS[name]})


@pytest.mark.parametrize(
    ("name", "dtype", "dropout"),
    [(name, dtype, 0.1 * (n // 2 % 2)) for n, (name, dtype) in enumerate(product(CONFIGS, DTYPES))],
)
def test_a_model_saves_the_bytes_of_its_formula(name, dtype, dropout):
    model, load = described(name), hw.Workload(BATCH, TOKENS, dtype, "cpu")
    way = hw.costs.ActivationSettings(
        backend_profile(model, dtype),
        dropout=dropout,
        source=SOURCE if len(described(name).stacks) > 1 else None,
    )
    assert hw.costs.activation_memory(model, load, way).total == model_saved_bytes(
        model, DTYPES[dtype], way
    )


@pytest.mark.parametrize(
    ("name", "dropout"), [("gpt2", 0.1), ("gemma2", 0.0), ("bert", 0.1), ("deepseek_v3", 0.0)]
)
def test_a_checkpointed_model_recomputes_the_flops_of_its_formula(name, dropout):
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
    way = hw.costs.ActivationSettings("dense", "block", dropout)
    done = recompute_flops(model, hw.Workload(BATCH, TOKENS, "fp32", "cpu"), way).total
    assert done == totals["block"] - totals["none"]


# --- the report of `headwise cost` ----------------------------------------------------------------

SIZES = ["--model", "64", "--heads", "4", "--context", "32", "--batch", "2"]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_training_is_reported_only_on_request(capsys):
    code, out, _ = run(capsys, "gqa", *SIZES, "--json")
    assert (code, "training" in json.loads(out)) == (0, False)


def test_the_page_shows_every_step(capsys):
    code, out, err = run(capsys, "mha", "dcmha", *SIZES, "--activations")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "mha: in training, flash-cuda, nothing recomputed" in out
    assert "logsumexp 1,024" in " ".join(out.split())
    assert "dcmha: in training, chunked, nothing recomputed" in out


@pytest.mark.parametrize("checkpoint", ["none", "block"])
def test_the_document_has_the_same_numbers(capsys, checkpoint):
    code, out, _ = run(
        capsys, "gqa", *SIZES, "--json", "--profile", "dense", "--checkpoint", checkpoint
    )
    gqa = json.loads(out)["training"]["gqa"]
    spec, load = hw.design(preset="gqa", model=64, heads=4), hw.Workload(2, 32)
    way = hw.costs.ActivationSettings("dense", checkpoint)
    assert code == 0
    assert (gqa["profile"], gqa["checkpoint"], gqa["dropout"]) == ("dense", checkpoint, 0.0)
    assert (
        gqa["kept_bytes"]
        == hw.costs.activation_memory(spec, load, way).total
        == sum(term["value"] for term in gqa["terms"])
    )
    assert (
        gqa["peak_bytes"]
        == hw.costs.activation_memory(spec, load, hw.costs.ActivationSettings("dense")).total
    )
    assert gqa["recomputed_flops"] == recompute_flops(spec, load, way).total
    assert (gqa["recomputed_flops"] > 0) == (checkpoint != "none")
