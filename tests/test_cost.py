"""Costs before anything runs: golden values, rooflines by hand, the command, and what it refuses."""

from __future__ import annotations

import json

import pytest

import cases
import headwise as hw
from headwise import cli, counting
from headwise.counting.devices import Device
from headwise.counting.pricing import price

# One layer of a released model: its attention, learned numbers, and bytes of a token in bfloat16.
LLAMA3_8B = hw.design(preset="gqa", model=4096, heads=32, kv=8)
GPT2 = hw.design(model=768, heads=12, bias="qkvo", pattern="causal")
V2_LITE = hw.design(preset="mla", model=2048, heads=16)
V3 = hw.design(
    model=7168,
    heads=128,
    dim=128,
    pattern="causal",
    project=hw.Latent(rank=512, rope=64, query_rank=1536),
    modifiers=(hw.Rotary(pairs="interleaved"),),
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
    told = price(spec, hw.Load())
    assert told.parameters.total == params
    assert told.data["kv_bytes_per_token"] == each


def test_the_articles_products():
    """24 b s h^2 + 4 b s^2 h with its feed-forward of 16 b s h^2 left out, full square (zhihu 624740065)."""
    b, s, h = 3, 512, 768
    told = price(hw.design(model=h, heads=12), hw.Load(batch=b, context=s))
    assert told.prefill.total == 8 * b * s * h**2 + 4 * b * s**2 * h
    assert told.backward.total == 2 * told.prefill.total


def test_rooflines_by_hand():
    h200 = Device.named("h200")
    assert h200.ridge("bf16") == pytest.approx(989e12 / 4.8e12)
    assert round(Device.named("a100").ridge("bf16")) == 153
    assert round(Device.named("h100").ridge("bf16")) == 295
    assert h200.time(989 * 10**12, 1, "bf16") == pytest.approx(1.0)
    assert h200.time(1, 48 * 10**11, "bf16") == pytest.approx(1.0)
    assert (h200.bound(1, 10**6, "bf16"), h200.bound(10**12, 1, "bf16")) == ("memory", "compute")
    step = price(LLAMA3_8B, hw.Load(batch=16, context=10**6)).operations["decode"][1]
    assert step.intensity == pytest.approx(4, rel=1e-3)  # 2 r / bytes of a number, r = 4 heads to a key head
    deepseek = price(V3, hw.Load(batch=1, context=10**6)).operations["decode"][1]
    assert deepseek.intensity == pytest.approx(241.8, rel=1e-3)


def test_a_state_is_priced_as_one():
    short, long = (price(hw.design(preset="linear"), hw.Load(context=n)) for n in (10**4, 10**6))
    assert short.decode.total == long.decode.total
    assert short.kept_bytes == long.kept_bytes
    assert long.prefill.total < 101 * short.prefill.total
    assert long.data["kv_bytes_per_token"] is None


def test_a_ring_is_read_as_far_as_it_goes():
    near, far = (
        price(hw.design(model=64, heads=4, pattern="window(100)"), hw.Load(context=n)).operations["decode"][1].moved
        for n in (10**3, 10**6)
    )
    assert near == far == 2 * (100 * 2 * 64 + 2 * 64)


def test_what_reads_ahead_is_not_decoded():
    told = price(hw.design(preset="mha"), hw.Load())
    assert told.decode is None
    assert set(told.data["flops"]) == {"prefill", "backward"}
    assert "-" in str(hw.cost(hw.design(preset="mha")))


def test_numbers_beyond_machine_words_stay_exact():
    told = price(hw.design(model=2**20, heads=2**10, pattern="causal"), hw.Load(batch=2**30, context=2**40))
    pairs = 2**40 * (2**40 + 1) // 2
    assert told.prefill.total == 2**30 * (8 * 2**40 * 2**40 + 4 * pairs * 2**20)
    assert json.loads(json.dumps(told.data))["flops"]["prefill"] == told.prefill.total


@pytest.mark.parametrize("name", hw.PRESETS)
def test_every_preset_is_priced(name):
    spec = hw.design(preset=name, model=256, heads=8)
    told = price(spec, hw.Load(batch=2, context=300, dtype="fp32", device="cpu"), name)
    assert told.parameters.total == counting.params(spec)
    assert sum(term["value"] for term in told.data["terms"] if term["bill"] == "parameters") == told.parameters.total
    assert told.seconds("prefill") > 0


@pytest.mark.parametrize("told", [{}, [GPT2], None])
def test_what_is_no_spec_is_not_priced(told):
    with pytest.raises(hw.SpecError, match="give a spec or a model, or specs by name"):
        hw.cost(told)


def test_what_was_not_priced_is_not_found_and_no_source_is_guessed():
    with pytest.raises(hw.SpecError, match="did you mean 'gpt2'"):
        hw.cost({"gpt2": GPT2})["gpt"]
    with pytest.raises(hw.SpecError, match="a length that no load says"):
        hw.cost(hw.design(model=8, heads=2, source=5))


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_comparison_that_is_asked_for(capsys):
    presets = [word for name in ("mha", "gqa", "mla", "dcmha", "moh") for word in ("--preset", name)]
    sizes = ["--model", "4096", "--heads", "32", "--context", "32768", "--batch", "16", "--dtype", "bf16"]
    code, out, err = run(capsys, *presets, *sizes, "--device", "h200")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "67.11 M    41.94 M    48.50 M    69.80 M    67.25 M" in out


def test_terms_and_json(capsys):
    code, out, _ = run(capsys, "gqa", "--terms")
    assert code == 0
    assert "core (scores) = 2 b pairs q dim" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = run(capsys, "gqa", "--json", "--set", "heads.kv=4")
    told = json.loads(out)
    assert (code, told["version"], told["device"]) == (0, 1, "h200")
    (row,) = told["rows"]
    assert {"name", "params", "flops", "kv_bytes_per_token", "intensity", "bound", "terms"} <= set(row)
    assert row["params"] == counting.params(hw.design(preset="gqa", kv=4))
    assert sum(t["value"] for t in row["terms"] if t["bill"] == "prefill") == row["flops"]["prefill"]


@pytest.mark.parametrize("name", [*hw.PRESETS, *cases.EXAMPLES])
def test_formulas_hold_for_a_small_layer(name):
    spec = cases.EXAMPLES[name] if name in cases.EXAMPLES else hw.design(preset=name)
    checks = hw.audit(spec)
    assert [check for check in checks if not check.holds] == []
    assert len(checks) >= 4


def test_verify_says_what_is_equal_and_fails_when_something_is_not(capsys, monkeypatch):
    code, out, _ = run(capsys, "gqa", "linear", "--verify")
    assert code == 0
    assert out.count("equal") == 16
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setattr(counting, "constants", lambda spec: 7)
    code, out, _ = run(capsys, "gqa", "--verify")
    assert code == 1
    assert "WRONG" in out
    code, out, _ = run(capsys, "gqa", "--verify", "--json")
    told = json.loads(out)["verified"]["gqa"]
    assert (code, [check["what"] for check in told if not check["holds"]]) == (1, ["constants"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "name at least one spec"),
        (("--preset", "gqaa"), "there is no preset 'gqaa'"),
        (("gqa", "--device", "h300"), "there is no device 'h300'"),
        (("gqa", "--dtype", "int3"), "dtype='int3' is unknown"),
        (("gqa", "--context", "0"), "context=0 is no load"),
        (("gqa", "--batch", "-1"), "batch=-1 is no load"),
        (("gqa", "--model", "250"), "does not divide among 8 heads"),
        (("gqa", "--heads", "0"), "a whole number of at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(capsys, argv, said):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
