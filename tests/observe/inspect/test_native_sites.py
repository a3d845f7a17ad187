"""Attention sites of our own layers: ablated equals pruned, and rows equal the definition."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise import cli
from headwise.attention import head_axis_ops
from support import layer_cases as cases
from support.layer_cases import check_close
from support.site_recording import record_sites
from support.tiny_configs import model_config

PRESETS = {name: hw.design(preset=name, model=16, heads=4) for name in hw.PRESETS}
CAUSAL = hw.design(pattern="causal", model=16, heads=4)
GPT = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=11, n_positions=16)


@pytest.mark.parametrize("name", PRESETS)
def test_ablated_heads_equal_pruned_heads(name: str):
    spec = PRESETS[name]
    layer = cases.layer(spec)
    x, z = cases.tensors(spec)
    outs = len(spec.score_head_of_output)
    (site,) = hw.sites(layer)
    assert site.heads == outs
    quiet = [0, outs - 1] if outs > 2 else [0]
    with torch.no_grad(), hw.ablate(layer, [(0, head) for head in quiet]):
        silenced = layer(x, source=z)
    small, weights = head_axis_ops.keep_heads(
        spec, layer.state_dict(), [head for head in range(outs) if head not in quiet]
    )
    cut = hw.Attention(small).double().eval()
    cut.load_state_dict(weights, strict=True)
    with torch.no_grad():
        check_close(silenced, cut(x, source=z))


def test_a_model_of_ours_and_a_copy_of_it():
    net = hw.build(hw.families.read_model_spec(GPT), seed=0)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    sites = hw.sites(net)
    assert [site.name for site in sites] == ["decoder.0.attention", "decoder.1.attention"]
    assert [site.spec for site in sites] == [spec for _, spec in net.spec.attention_specs()]
    with torch.no_grad():
        whole = net(ids)
        with hw.ablate(net, [(1, 2)], scale=0.5):
            half, copied = net(ids), copy.deepcopy(net)
            assert torch.equal(copied(ids), whole)
        copied.decoder.blocks[1].attention.output.o[:, 8:] *= 0.5
        check_close(half, copied(ids), atol=1e-6)
        assert torch.equal(net(ids), whole)


def test_a_probe_of_ones_own_looks_on():
    net = hw.build(hw.families.read_model_spec(GPT), seed=0)
    ids = torch.tensor([[3, 1, 4]])
    probe = hw.Probe("heads", "weights")
    net.probes = {"decoder.0.attention": probe}
    with torch.no_grad(), hw.ablate(net, [(0, 1)]):
        net(ids)
    assert not probe.tensors["heads"][:, :, 1].any()
    assert probe.tensors["weights"].shape == (1, 3, 3, 3)


def test_only_some_tokens():
    net = hw.build(hw.families.read_model_spec(GPT), seed=0)
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    at = torch.tensor([[False, True, False], [False, False, False]])
    recorded: list[Tensor] = []
    net.probes = {
        "decoder.1.attention": hw.Probe("heads", callback=lambda _, z: recorded.append(z))
    }
    with torch.no_grad():
        net(ids)
        with hw.ablate(net, [(1, 0)], tokens=at):
            net(ids)
    before, after = recorded
    assert not after[0, 1, 0].any()
    after[0, 1, 0] = before[0, 1, 0]
    assert torch.equal(before, after)


def test_weights_of_padded_rows_are_those_that_the_layer_has():
    """Queries that are padding have no weights, whole and by bands."""
    layer, x = hw.Attention(CAUSAL), torch.randn(2, 9, 16)
    sequence, probe = hw.SequenceInfo.from_batch(x, lengths=[9, 4]), hw.Probe("weights")
    with torch.no_grad(), record_sites(layer) as recorders:
        layer(x, sequence=sequence, probe=probe)
    (call,) = recorders["model.0.attention"].seen
    wanted = probe.tensors["weights"]
    assert not wanted[1, :, 4:].any()
    check_close(call.all_weights(), wanted, atol=1e-6)
    bands = [call.all_weights(slice(start, start + 3)) for start in (0, 3, 6)]
    check_close(torch.cat(bands, 2), wanted, atol=1e-6)
    for inputs in (call.attention_inputs, call.streamable_inputs):
        assert inputs is not None
        assert not inputs.causal
        check_close(inputs.all_weights(), wanted, atol=1e-6)


def run_command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    return code, *capsys.readouterr()


def test_the_command_on_a_folder(capsys, tmp_path: Path):
    net = hw.build(hw.families.read_model_spec(GPT), seed=0)
    hw.save(net, tmp_path / "ours")
    hw.export(net, tmp_path / "theirs")
    for name in ("ours", "theirs"):
        code, out, err = run_command(capsys, "sites", str(tmp_path / name))
        assert (code, err) == (0, "")
        assert "decoder.1.attention" in out
        assert max(map(len, out.splitlines())) <= 80
        data = json.loads(run_command(capsys, "sites", str(tmp_path / name), "--json")[1])
        assert [site["q"] for site in data["sites"]] == [3, 3]
    (tmp_path / "theirs" / "model.safetensors").unlink()
    code, out, err = run_command(capsys, "sites", str(tmp_path / "theirs"))
    assert code == 0
    assert "meta" in out


@pytest.mark.parametrize("what", ["nowhere", "empty", "strange"])
def test_the_command_without_sites(capsys, tmp_path: Path, what: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "nosuch"}')
    code, out, err = run_command(capsys, "sites", str(tmp_path / what))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
