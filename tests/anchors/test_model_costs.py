"""Whole models against torch's own counter: tiny random transformers, their config read here, every
FLOP equal.

transformers runs attn_implementation="eager", so that every product is a matrix product which the
counter sees. What it spends otherwise than we ask for stands in `test_latents_are_expanded_there`.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import transformers as tf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.costs.cost_estimate import CostEstimate, estimate_cost
from headwise.hub.module_counting import count_model
from headwise.models import families

BATCH, TOKENS, SOURCE, WRITTEN = 2, 7, 9, 5
EAGER: dict[str, Any] = {"vocab_size": 37, "attn_implementation": "eager"}
USUAL = EAGER | {"num_hidden_layers": 2}
GROUPED = USUAL | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 29}
GROUPED |= {"hidden_size": 42, "head_dim": 10}
SMALL = {"num_attention_heads": 3, "intermediate_size": 29, "hidden_size": 15}
T5 = EAGER | {"d_model": 15, "d_kv": 4, "num_heads": 3, "d_ff": 29, "num_layers": 2}
T5 |= {"decoder_start_token_id": 0}
BART = EAGER | {"d_model": 15, "encoder_layers": 2, "decoder_layers": 3}
BART |= {"max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 3, "decoder_attention_heads": 5, "encoder_ffn_dim": 29}
BART |= {"decoder_ffn_dim": 31}
VIT = SMALL | {"num_hidden_layers": 2, "image_size": [12, 8], "patch_size": 4, "num_labels": 5}
LATENT = USUAL | {"hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 6}
LATENT |= {"intermediate_size": 29}
LATENT |= {"moe_intermediate_size": 13, "first_k_dense_replace": 1, "n_routed_experts": 8}
LATENT |= {"num_experts_per_tok": 2}
LATENT |= {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 11}
LATENT |= {"kv_lora_rank": 12}
LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENT |= {"experts_implementation": "eager"}
OSS = GROUPED | {"sliding_window": 5, "num_local_experts": 3, "num_experts_per_tok": 2}
OSS |= {"experts_implementation": "eager", "layer_types": ["sliding_attention", "full_attention"]}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "mistral": ("Mistral", "ForCausalLM", GROUPED | {"sliding_window": 4}),
    "qwen3": ("Qwen3", "ForCausalLM", GROUPED),
    "gemma2": ("Gemma2", "ForCausalLM", GROUPED | {"sliding_window": 4}),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        EAGER | {"n_embd": 21, "n_head": 3, "n_inner": 29, "n_layer": 2},
    ),
    "bert": ("Bert", "ForMaskedLM", USUAL | SMALL),
    "bert-classifier": ("Bert", "ForSequenceClassification", USUAL | SMALL),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "t5-gated": (
        "T5",
        "ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3},
    ),
    "bart": ("Bart", "ForConditionalGeneration", BART),
    "vit": ("ViT", "ForImageClassification", VIT | {"attn_implementation": "eager"}),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", LATENT),
    "gpt_oss": ("GptOss", "ForCausalLM", OSS),
}
WRITERS = [
    name
    for name in MODELS
    if name not in ("bert", "bert-classifier", "vit", "t5-gated", "deepseek_v3")
]


def build_models(name: str) -> tuple[Any, hw.model_spec.ModelSpec]:
    """Their model, and ours off its config."""
    stem, task, sizes = MODELS[name]
    torch.manual_seed(0)
    net = getattr(tf, stem + task)(getattr(tf, f"{stem}Config")(**sizes)).train()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net, families.read_model_spec(net.config.to_dict() | {"architectures": [stem + task]})


def model_inputs(net: Any) -> dict[str, Any]:
    """What it reads."""
    if net.config.model_type == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 12, 8)}
    draw = lambda length: torch.randint(3, 37, (BATCH, length))  # noqa: E731 - one line, used twice
    both = {"input_ids": draw(SOURCE), "decoder_input_ids": draw(TOKENS)}
    return (both if net.config.is_encoder_decoder else {"input_ids": draw(TOKENS)}) | {
        "use_cache": False
    }


def priced(model: hw.model_spec.ModelSpec, **load: int) -> CostEstimate:
    return estimate_cost(
        model, hw.Workload(**({"batch": BATCH, "context": TOKENS, "source": SOURCE} | load))
    )


@pytest.mark.parametrize("name", MODELS)
def test_training_is_counted_as_torch_counts_it(name):
    net, model = build_models(name)
    with FlopCounterMode(display=False) as counter:
        logits = net(**model_inputs(net)).logits
        ahead = counter.get_total_flops()
        logits.sum().backward()
    one = priced(model)
    assert one.counted_flops["prefill"] == ahead
    assert one.counted_flops["backward"] == counter.get_total_flops() - ahead
    assert one.parameters.total == sum(p.numel() for p in net.parameters())


# --- Models that headwise has no reader for, counted from their modules ---------------------------

ENCODER = USUAL | SMALL | {"embedding_size": 6}
RELATIVE = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
RELATIVE |= {"conv_kernel_size": 3, "pos_att_type": ["c2p", "p2c"]}
EXPERTS = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 24, "num_experts": 4}
GPT = EAGER | {"n_embd": 21, "n_head": 3, "n_layer": 2}
FALCON = USUAL | {"num_attention_heads": 6, "hidden_size": 48}
NEWER = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
IMAGES = VIT | {"image_size": 8, "attn_implementation": "eager"}
SOUND = BART | {"d_model": 30, "vocab_size": 51865, "num_mel_bins": 10}
SOUND |= {"max_source_positions": SOURCE}
DISTIL = EAGER | {"dim": 15, "n_layers": 2, "n_heads": 3, "hidden_dim": 29}
MPT = EAGER | {"d_model": 24, "n_heads": 3, "n_layers": 2}
BLOOM = EAGER | {"hidden_size": 16, "n_layer": 2, "n_head": 2}
TEXT = USUAL | SMALL | {"eos_token_id": 2}


class Counted(NamedTuple):
    """A class, its sizes, and the causal query heads of all layers with their dimension, if the
    pairs are known.
    """

    stem: str
    task: str
    sizes: dict[str, Any]
    causal: tuple[int, int] = (0, 0)


COUNTED = {
    "glm4": Counted("Glm4", "ForCausalLM", GROUPED | {"head_dim": 12, "pad_token_id": 0}, (12, 12)),
    "qwen2_moe": Counted("Qwen2Moe", "ForCausalLM", GROUPED | EXPERTS, (12, 10)),
    "gpt_bigcode": Counted("GPTBigCode", "ForCausalLM", GPT, (6, 7)),
    "gpt_bigcode-many": Counted("GPTBigCode", "ForCausalLM", GPT | {"multi_query": False}, (6, 7)),
    "mpt": Counted("Mpt", "ForCausalLM", MPT, (6, 8)),
    "falcon": Counted("Falcon", "ForCausalLM", FALCON, (12, 8)),
    "falcon-alibi": Counted("Falcon", "ForCausalLM", FALCON | {"alibi": True}, (12, 8)),
    "falcon-newer": Counted("Falcon", "ForCausalLM", NEWER, (12, 8)),
    "bloom": Counted(
        "Bloom", "ForCausalLM", BLOOM | {"apply_residual_connection_post_layernorm": True}, (4, 8)
    ),
    "distilbert": Counted("DistilBert", "ForMaskedLM", DISTIL),
    "mpnet": Counted("MPNet", "ForMaskedLM", USUAL | SMALL),
    "longformer": Counted(
        "Longformer", "ForMaskedLM", USUAL | SMALL | {"attention_window": [4, 8]}
    ),
    "albert": Counted("Albert", "ForMaskedLM", ENCODER),
    "albert-base": Counted("Albert", "Model", ENCODER),
    "electra": Counted("Electra", "ForMaskedLM", ENCODER),
    "electra-pretraining": Counted("Electra", "ForPreTraining", ENCODER),
    "deberta-v2": Counted("DebertaV2", "ForMaskedLM", USUAL | SMALL | RELATIVE),
    "blenderbot": Counted("Blenderbot", "ForConditionalGeneration", BART, (15, 3)),
    "m2m_100": Counted("M2M100", "ForConditionalGeneration", BART | {"d_model": 30}, (15, 6)),
    "whisper": Counted("Whisper", "ForConditionalGeneration", SOUND, (15, 6)),
    "clip-text": Counted("CLIPText", "Model", TEXT, (6, 5)),
    "siglip-text": Counted("SiglipText", "Model", TEXT),
    "clip-vision": Counted("CLIPVision", "ModelWithProjection", IMAGES),
    "siglip-vision": Counted("SiglipVision", "Model", IMAGES),
    "deit": Counted("DeiT", "ForImageClassification", IMAGES),
    "dinov2": Counted("Dinov2", "Model", IMAGES),
}
MULTIPLE = 8  # of Longformer's windows, to which it pads its tokens


@pytest.mark.parametrize("name", COUNTED)
def test_models_without_a_reader_are_counted_as_torch_counts_them(name: str) -> None:
    case = COUNTED[name]
    rows = 1 if name == "deberta-v2" else BATCH  # it projects its table of distances once
    config = getattr(tf, f"{case.stem}Config")(**case.sizes)
    config.architectures = [case.stem + case.task]
    torch.manual_seed(0)
    net = getattr(tf, case.stem + case.task)(copy.deepcopy(config)).eval()
    if net._can_set_experts_implementation():
        net.set_experts_implementation("batched_mm")
    draw = lambda length: torch.randint(3, 37, (rows, length))  # noqa: E731 - one line, used twice
    inputs: dict[str, Any] = {"input_ids": draw(MULTIPLE)}
    if config.is_encoder_decoder:
        inputs = {"input_ids": draw(SOURCE), "decoder_input_ids": draw(MULTIPLE)}
    if case.stem == "Whisper":
        inputs["input_features"] = torch.randn(rows, 10, 2 * SOURCE)
        del inputs["input_ids"]
    if case.sizes is IMAGES:
        inputs = {"pixel_values": torch.randn(rows, 3, 8, 8)}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(**inputs)
    counted = count_model(config)
    workload = hw.Workload(batch=rows, context=MULTIPLE, source=SOURCE, dtype="fp32")
    one = estimate_cost(counted, workload)
    assert one.parameters.total == sum(p.numel() for p in net.parameters())
    assert one.counted_flops["prefill"] == counter.get_total_flops()
    heads, dim = case.causal
    excluded = rows * heads * MULTIPLE * (MULTIPLE - 1) // 2 * 4 * dim
    assert one.required_flops["prefill"] == counter.get_total_flops() - excluded


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    {"glm4": 2, "qwen2_moe": 2, "gpt_bigcode": 1, "mpt": 3, "falcon": 1, "falcon-newer": 2}.items(),
)
def test_their_caches_hold_keys_and_values_of_two_layers(name: str, kv_heads: int) -> None:
    case = COUNTED[name]
    model = count_model(getattr(tf, f"{case.stem}Config")(**case.sizes))
    one = estimate_cost(model, hw.Workload(context=20, dtype="fp32"))
    assert one.cache_bytes_per_token == 2 * 2 * kv_heads * case.causal[1] * 4


def written(net: Any) -> int:
    """FLOPs of their whole generation, greedy."""
    read = model_inputs(net)["input_ids"]
    how = {
        "min_new_tokens": WRITTEN,
        "max_new_tokens": WRITTEN,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net.eval().generate(read, num_beams=1, forced_eos_token_id=None, **how)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", WRITERS)
def test_a_generation_is_counted_as_torch_counts_it(name):
    """The prompt once, its last token scored; then one step for every token but the last, rings in
    their windows.
    """
    net, model = build_models(name)
    one = priced(model, generate=WRITTEN, context=1 if net.config.is_encoder_decoder else TOKENS)
    assert one.counted_flops["generate"] == written(net)


def test_latents_are_expanded_there():
    """Both keep latents; in every step transformers makes keys and values of all, ours reads them
    as they are.
    """
    net, model = build_models("deepseek_v3")
    one = priced(model, generate=WRITTEN)
    heads, dim, rope, vdim, rank = 6, 6, 4, 5, 12
    steps, read = WRITTEN - 1, sum(range(TOKENS + 1, TOKENS + WRITTEN))
    theirs = read * rank * heads * (dim + vdim) + heads * read * (dim + rope + vdim)
    ours = steps * rank * heads * (dim + vdim) + heads * read * (2 * rank + rope)
    assert written(net) - one.counted_flops["generate"] == 2 * 2 * BATCH * (theirs - ours)
