"""Cost reports: golden values, rooflines by hand, the command, and refusals."""

from __future__ import annotations

import json

import pytest

import headwise as hw
from headwise import cli, costs
from headwise.costs.cost_estimate import estimate_cost
from headwise.costs.roofline import Device

# One layer of a released model: its attention, learned numbers, and bytes of a token in bfloat16.
LLAMA3_8B = hw.design(preset="gqa", model=4096, heads=32, kv=8)
GPT2 = hw.design(model=768, heads=12, bias="qkvo", pattern="causal")
V2_LITE = hw.design(preset="mla", model=2048, heads=16)
V3 = hw.design(
    model=7168,
    heads=128,
    dim=128,
    pattern="causal",
    project=hw.parts.MLAProjection(rank=512, rope=64, query_rank=1536),
    modifiers=(hw.parts.Rotary(pairs="interleaved"),),
)


@pytest.mark.parametrize(
    ("spec", "params", "each"),
    [
        (LLAMA3_8B, 41_943_040, 131_072 // 32),
        (GPT2, 4 * 768**2 + 4 * 768, 3072),
        (V2_LITE, 13_763_072, 1152),
        (V3, 187_107_328, 70_272 // 61),
    ],
    ids=["llama-3-8b", "gpt-2", "deepseek-v2-lite", "deepseek-v3"],
)
def test_released_layers(spec, params, each):
    cost = estimate_cost(spec, hw.Workload())
    assert cost.parameters.total == params
    assert cost.data["kv_bytes_per_token"] == each


def test_the_articles_products():
    """24 b s h^2 + 4 b s^2 h with its feed-forward of 16 b s h^2 left out, full square (zhihu
    624740065).
    """
    b, s, h = 3, 512, 768
    cost = estimate_cost(hw.design(model=h, heads=12), hw.Workload(batch=b, context=s))
    assert cost.prefill_flops.total == 8 * b * s * h**2 + 4 * b * s**2 * h
    assert cost.backward_flops.total == 2 * cost.prefill_flops.total


def test_rooflines_by_hand():
    h200 = Device.from_name("h200")
    assert h200.ridge_point("bf16") == pytest.approx(989e12 / 4.8e12)
    assert round(Device.from_name("a100").ridge_point("bf16")) == 153
    assert round(Device.from_name("h100").ridge_point("bf16")) == 295
    assert h200.min_seconds(989 * 10**12, 1, "bf16") == pytest.approx(1.0)
    assert h200.min_seconds(1, 48 * 10**11, "bf16") == pytest.approx(1.0)
    assert (
        h200.limiting_resource(1, 10**6, "bf16"),
        h200.limiting_resource(10**12, 1, "bf16"),
    ) == (
        "memory",
        "compute",
    )
    step = estimate_cost(LLAMA3_8B, hw.Workload(batch=16, context=10**6)).operations["decode"][1]
    # 2 r / bytes of a number, r = 4 heads to a key head
    assert step.intensity == pytest.approx(4, rel=1e-3)
    deepseek = estimate_cost(V3, hw.Workload(batch=1, context=10**6)).operations["decode"][1]
    assert deepseek.intensity == pytest.approx(241.8, rel=1e-3)


def test_a_state_is_priced_as_one():
    short, long = (
        estimate_cost(hw.design(preset="linear"), hw.Workload(context=n)) for n in (10**4, 10**6)
    )
    assert short.decode_flops.total == long.decode_flops.total
    assert short.cache_bytes == long.cache_bytes
    assert long.prefill_flops.total < 101 * short.prefill_flops.total
    assert long.data["kv_bytes_per_token"] is None


def test_a_ring_is_read_as_far_as_it_goes():
    near, far = (
        estimate_cost(hw.design(model=64, heads=4, pattern="window(100)"), hw.Workload(context=n))
        .operations["decode"][1]
        .moved
        for n in (10**3, 10**6)
    )
    assert near == far == 2 * (100 * 2 * 64 + 2 * 64)


def test_bidirectional_layers_have_no_decode_cost():
    cost = estimate_cost(hw.design(preset="mha"), hw.Workload())
    assert cost.decode_flops is None
    assert set(cost.data["flops"]) == {"prefill", "backward"}
    assert "-" in str(hw.cost(hw.design(preset="mha")))


@pytest.mark.parametrize("name", hw.PRESETS)
def test_every_preset_is_priced(name):
    spec = hw.design(preset=name, model=256, heads=8)
    cost = estimate_cost(spec, hw.Workload(batch=2, context=300, dtype="fp32", device="cpu"), name)
    assert cost.parameters.total == costs.count_parameters(spec)
    assert (
        sum(term["value"] for term in cost.data["terms"] if term["breakdown"] == "parameters")
        == cost.parameters.total
    )
    assert cost.seconds("prefill") > 0


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_requested_comparison(capsys):
    presets = ["mha", "gqa", "mla", "dcmha", "moh"]
    sizes = [
        "--model",
        "4096",
        "--heads",
        "32",
        "--context",
        "32768",
        "--batch",
        "16",
        "--dtype",
        "bf16",
    ]
    code, out, err = run(capsys, *presets, *sizes, "--device", "h200")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    cells = " ".join(out.split())
    assert "parameters 67.11 M 41.94 M 48.50 M 69.80 M 67.25 M" in cells


def test_each_design_has_one_column_in_a_table_of_several_blocks(capsys):
    names = ["mha", "gqa", "mqa", "mla", "moh", "dcmha", "mohsa", "talking", "linear"]
    assert cli.main(["cost", *names]) == 0
    columns = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if set(line.split()) & {*names}
    ]
    blocks = [line for line in columns if {*line} <= {*names}]
    assert len(blocks) > 1
    assert [name for line in blocks for name in line] == names


def test_terms_and_json(capsys):
    code, out, _ = run(capsys, "gqa", "--terms")
    assert code == 0
    assert out.index("B rows, T queries, S keys") < out.index("core (scores) = 2 B pairs q dim")
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = run(capsys, "gqa", "--json", "--set", "heads.kv=4")
    data = json.loads(out)
    assert (code, data["version"], data["device"]) == (0, 1, "h200")
    (row,) = data["rows"]
    assert {"name", "params", "flops", "kv_bytes_per_token", "intensity", "bound", "terms"} <= set(
        row
    )
    assert row["params"] == costs.count_parameters(hw.design(preset="gqa", kv=4))
    assert (
        sum(t["value"] for t in row["terms"] if t["breakdown"] == "prefill")
        == row["flops"]["prefill"]
    )


def test_the_table_names_columns_in_full_and_times_only_for_a_named_device(
    capsys: pytest.CaptureFixture[str],
):
    names = ["llama-3-8b", "deepseek-v3", "gpt-oss-120b"]
    assert cli.main(["cost", *names, "--context", "8k"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("1 row of 8,192 tokens, bf16; llama-3-8b: decoder of 32 layers")
    header = next(line for line in lines if "deepseek-v3  " in line)
    assert header.split() == names
    labels = [line[:23].rstrip() for line in lines]
    first = [labels.index(name) for name in ("parameters", "cache, total bytes")]
    assert max(first) < labels.index("prefill, FLOPs required")
    assert not any("lower bound" in line for line in labels)
    assert cli.main(["cost", "llama-3-8b", "--context", "8192", "--device", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    costs = hw.cost(hw.families.read_model_spec("llama-3-8b"), hw.Workload(context=8192))
    rates = [line.split()[-1] for line in lines if "tokens per second" in line]
    estimate = next(iter(costs))
    assert float(rates[1]) == round(1 / estimate.seconds("decode"))


def test_layers_of_models_are_explained(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["why", "gpt-oss-20b"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpt-oss-20b, decoder.0.attention\n")
    assert out.endswith("Layers differ: add --layer decoder.1.attention for another kind.\n")
    model = hw.families.read_model_spec("gpt-oss-20b")
    for layer, depth in (("1", 1), ("-1", 23), ("decoder.2.attention", 2), ("-2.attention", 22)):
        assert cli.main(["why", "gpt-oss-20b", f"--layer={layer}", "--device=cpu"]) == 0
        spec = dict(model.attention_specs())[f"decoder.{depth}.attention"]
        assert str(hw.why(spec, device="cpu")) in capsys.readouterr().out
