"""Bytes of quantised checkpoints, against published files and against tensors that are allocated
one by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import headwise as hw
from headwise import cli
from headwise.costs.cost_estimate import estimate_cost
from headwise.costs.roofline import Device
from headwise.costs.weight_storage import WeightStorage, total_weight_bytes
from headwise.costs.workload import select_layer
from headwise.models.families import read_model_spec
from headwise.models.model_spec import from_toml, to_toml

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "tie_word_embeddings": False,
}


def stored_bytes(config: dict[str, Any]) -> int:
    return estimate_cost(read_model_spec(config), hw.Workload(context=64)).weights_bytes


# --- published checkpoints ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "experts", "gib"),
    [
        ("gpt-oss-20b", 20_914_757_184, 24 * 32, 12.8),
        ("gpt-oss-120b", 116_829_156_672, 36 * 128, 60.8),
    ],
)
def test_gpt_oss_has_the_published_bytes(name: str, parameters: int, experts: int, gib: float):
    """Matrices of experts have 4.25 bits, and everything else 16; the sizes in GiB are of
    2508.10925, table 1.
    """
    model = read_model_spec(name)
    each = 3 * 2880 * 2880
    expected = experts * (each // 2 + each // 32) + 2 * (parameters - experts * each)
    cost = estimate_cost(model, hw.Workload(context=64))
    assert cost.parameters.total == parameters
    assert cost.weights_bytes == expected
    assert cost.weights_bytes == {12.8: 13_761_264_768, 60.8: 65_248_815_744}[gib]
    assert round(expected / 2**30, 1) == gib


def test_deepseek_v3_has_the_published_bytes():
    """The files hold 3,918,786,560 numbers in bfloat16, 680,571,043,840 in fp8 and 41,555,600 in
    float32.

    They include the module that predicts a second token: a 62nd layer, with copies of the embedding
    and of the head, a projection of 2 x 7168 to 7168 channels, and three norms; and in float32 a
    bias for every router.
    """
    width, latents, expert = 7168, 1536 + 512, 3 * 2048 * 7168
    attention = {
        (1536, 7168): 1,
        (24576, 1536): 1,
        (576, 7168): 1,
        (32768, 512): 1,
        (7168, 16384): 1,
    }
    layer = sum(rows * columns for rows, columns in attention) + 257 * expert
    scales = (
        sum(-(-rows // 128) * -(-columns // 128) for rows, columns in attention)
        + 257 * expert // 128**2
    )
    copies = 2 * 129_280 * width + 2 * width**2 + 256 * width + (2 * width + latents) + 3 * width
    bf16, fp8, fp32 = (
        3_918_786_560 - copies,
        680_571_043_840 - layer,
        41_555_600 - scales - 59 * 256,
    )
    assert (
        stored_bytes({"model_type": "deepseek_v3", **_published("deepseek-v3")})
        == 2 * bf16 + fp8 + 4 * fp32
    )


def _published(name: str) -> dict[str, Any]:
    return dict(hw.families.PUBLISHED_MODELS[name])


# --- formats, tensor by tensor --------------------------------------------------------------------


def _linear_maps() -> dict[str, torch.nn.Linear]:
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SMALL))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> int:
    return torch.empty(shape, dtype=dtype).nbytes


def _gptq(rows: int, columns: int) -> int:
    """Tensors of AutoGPTQ in groups of 64: qweight, qzeros, scales and g_idx."""
    groups = columns // 64
    return (
        _empty(columns // 8, rows, dtype=torch.int32)
        + _empty(groups, rows // 8, dtype=torch.int32)
        + _empty(groups, rows, dtype=torch.float16)
        + _empty(columns, dtype=torch.int32)
    )


def _awq(rows: int, columns: int) -> int:
    groups = columns // 128
    return (
        _empty(columns, rows // 8, dtype=torch.int32)
        + _empty(groups, rows // 8, dtype=torch.int32)
        + _empty(groups, rows, dtype=torch.float16)
    )


def _nf4(rows: int, columns: int) -> int:
    return _empty(rows * columns // 2, 1, dtype=torch.uint8) + _empty(rows * columns // 64)


def _double_nf4(rows: int, columns: int) -> int:
    blocks = rows * columns // 64
    return (
        _empty(rows * columns // 2, dtype=torch.uint8)
        + _empty(blocks, dtype=torch.uint8)
        + _empty(-(-blocks // 256))
    )


def _int8(rows: int, columns: int) -> int:
    return _empty(rows, columns, dtype=torch.int8) + _empty(rows)


def _fp8(rows: int, columns: int) -> int:
    scales = _empty(-(-rows // 128), -(-columns // 128))
    return _empty(rows, columns, dtype=torch.float8_e4m3fn) + scales


def _fp8_rows(rows: int, columns: int) -> int:
    return _empty(rows, columns, dtype=torch.float8_e4m3fn) + _empty(rows, 1, dtype=torch.bfloat16)


FORMATS: dict[str, tuple[dict[str, Any], Any, tuple[str, ...]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, _gptq, ("lm_head",)),
    "gptq-some": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 64,
            "modules_in_block_to_quantize": [
                ["self_attn.k_proj", "self_attn.v_proj"],
                ["mlp.up_proj"],
            ],
        },
        _gptq,
        ("lm_head", "q_proj", "o_proj", "gate_proj", "down_proj"),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        _awq,
        ("lm_head",),
    ),
    "awq-skips": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["self_attn", "layers.1"],
        },
        _awq,
        ("lm_head", "self_attn", "layers.1."),
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        _nf4,
        ("lm_head",),
    ),
    "nf4-double": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        _double_nf4,
        ("lm_head",),
    ),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8, ("lm_head",)),
    "int8-head": (
        {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "llm_int8_skip_modules": ["down_proj"],
        },
        _int8,
        ("down_proj",),
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8, ("lm_head",)),
    "compressed": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
            },
            "ignore": ["lm_head", "re:.*layers.0.mlp.*"],
        },
        _fp8_rows,
        ("lm_head", "layers.0.mlp"),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_the_bytes_of_its_tensors(name: str):
    """Linear maps are those of the model in transformers; the vocabulary of 130 leaves blocks that
    are not full.
    """
    config, matrix_bytes, unquantized = FORMATS[name]
    maps = _linear_maps()
    quantized = {
        path: map_ for path, map_ in maps.items() if not any(words in path for words in unquantized)
    }
    assert 0 < len(quantized) < len(maps)
    others = estimate_cost(read_model_spec(SMALL), hw.Workload(context=64)).parameters.total
    others -= sum(map_.weight.numel() for map_ in quantized.values())
    expected = 2 * others + sum(matrix_bytes(*map_.weight.shape) for map_ in quantized.values())
    assert stored_bytes({**SMALL, "quantization_config": config}) == expected


def test_bits_of_a_weight_by_the_papers():
    """4.25 of mxfp4; QLoRA (2305.14314, section 3): 0.5 bits per parameter of scales, or 0.127 with
    double scales.
    """
    bits = {name: f.bits_per_weight for name, f in hw.model_spec.WEIGHT_FORMATS.items()}
    assert bits["mxfp4"] == 4.25
    assert bits["nf4"] == 4.5
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
    }
    quantization = read_model_spec({**SMALL, "quantization_config": config}).quantization
    assert quantization is not None
    assert quantization.format.bits_per_weight - 4 == pytest.approx(0.127, abs=5e-4)


@pytest.mark.parametrize("config", [{"quant_method": "quanto", "bits": 4}, {"bits": 4}])
def test_an_unknown_method_is_noted_and_nothing_is_assumed(config: dict[str, Any]):
    model = read_model_spec({**SMALL, "quantization_config": config})
    assert model.quantization is None
    assert any("stored in fewer bits by quant_method" in note for note in model.notes)
    assert stored_bytes({**SMALL, "quantization_config": config}) == stored_bytes(SMALL)


def test_modules_that_no_table_of_names_knows_are_noted():
    config = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["visual"]}
    model = read_model_spec({"model_type": "gpt_neo", "quantization_config": config})
    assert model.quantization is not None
    assert any(
        "visual are counted as quantised, although they are not" in note for note in model.notes
    )


def test_a_quantised_model_survives_a_trip_through_toml():
    model = read_model_spec("deepseek-v3")
    assert model.quantization is not None
    assert from_toml(to_toml(model)) == model


# --- what a step reads ----------------------------------------------------------------------------


def test_a_step_reads_the_stored_bytes_of_its_weights():
    """One token reads a router, and 4 of 32 experts with their biases in bfloat16."""
    model = read_model_spec("gpt-oss-20b")
    cost = estimate_cost(model, hw.Workload(context=64))
    step = {one.name: one for one in cost.operations["decode"]}
    expert = 3 * 2880 * 2880
    router, chosen = 2 * 32 * 2880 + 2 * 32, 4 * (expert * 17 // 32 + 2 * 3 * 2880)
    flowing = 2 * (2880 + 32 + 4 * 3 * 2 * 2880)
    assert step["feed-forward"].moved == 24 * (router + chosen + flowing)


def test_layers_that_are_stored_differently_are_read_differently():
    """Layer 1 of 3 is not quantised: steps read two quantised layers and one in bfloat16."""
    config = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["layers.1", "lm_head"]}
    model, plain = read_model_spec({**SMALL, "quantization_config": config}), read_model_spec(SMALL)
    # the embedding and the norms, which no operation reads
    table = 2 * 130 * 256 + 2 * 256 * (2 * 3 + 1)
    for of in (model, plain):
        weights = total_weight_bytes(of, WeightStorage("bf16", of.quantization)) - table
        flowing = 2 * (3 * 2 * 256 + 3 * 3 * (256 + 384) + 256 + 130)
        operations = estimate_cost(of, hw.Workload(context=9)).operations["decode"]
        assert (
            sum(one.moved for one in operations if "core" not in one.name)
            == weights + flowing + 2 * 2 * 256
        )
    blocks = [
        estimate_cost(select_layer(model, str(n)), hw.Workload(context=9)).weights_bytes
        for n in range(3)
    ]
    whole = estimate_cost(select_layer(plain, "1"), hw.Workload(context=9)).weights_bytes
    assert blocks[0] == blocks[2] < blocks[1] == whole


def test_fp8_products_run_at_the_rate_of_fp8_where_there_is_one():
    """989 and 1,979 TFLOP/s of an H200; an A100 converts the weights to bfloat16 first."""
    model = read_model_spec("llama-3-8b")
    for device, rate in (("h200", 1979e12), ("a100", 312e12)):
        cost = estimate_cost(model, hw.Workload(context=8192, dtype="fp8", device=device))
        feed = next(one for one in cost.operations["prefill"] if one.name == "feed-forward")
        assert feed.bound == "compute"
        assert feed.seconds == pytest.approx(32 * 6 * 8192 * 4096 * 14336 / rate)
        core = next(one for one in cost.operations["prefill"] if one.name == "attention core")
        assert core.seconds == pytest.approx(core.flops / Device.from_name(device).flops["bf16"])


def test_weights_can_be_counted_in_another_format():
    model = read_model_spec("gpt-oss-20b")
    assert estimate_cost(model, hw.Workload(weights="bf16")).weights_bytes == 2 * 20_914_757_184
    # all but routers, embedding and head
    matrices = 24 * (2 * 4096 * 2880 + 2 * 512 * 2880 + 32 * 3 * 2880**2)
    rows = 24 * (4096 + 2 * 512 + 2880 + 32 * 3 * 2880)
    in_int8 = estimate_cost(model, hw.Workload(dtype="int8"))
    assert in_int8.weights_bytes == matrices + 4 * rows + 2 * (20_914_757_184 - matrices)
    assert in_int8.workload.dtype == "bf16"


def test_the_command_prints_stored_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {**SMALL, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
        )
    )
    argv = ["cost", str(tmp_path), "--context", "64", "--json"]
    sizes = []
    for more in ([], ["--weights", "bf16"], ["--dtype", "fp8"]):
        assert cli.main([*argv, *more]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["rows"][0]["weights_bytes"])
    assert sizes[0] < sizes[2] < sizes[1] == stored_bytes(SMALL)
    assert cli.main([*argv[:-1]]) == 0
    assert "stored in fewer bits, as int4 (4.156 bits" in " ".join(capsys.readouterr().out.split())
    assert cli.main([*argv, "--dtype", "fp7"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert cli.main([*argv, "--dtype", "fp8", "--weights", "int8"]) == 2
    assert "give one of them" in capsys.readouterr().err
