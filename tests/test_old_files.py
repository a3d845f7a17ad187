"""Files that an earlier commit wrote (tests/old_files/README.md) load with the present code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import headwise as hw
from headwise.data import make_task
from headwise.errors import SpecError
from headwise.model_spec.serialization import find_record, from_dict as model_spec_from_dict
from headwise.surgery.head_selection import HeadRanking, PruneToBudget, PruningBudget
from headwise.surgery.pruning_plan import PruningPlan
from headwise.training import recipe

OLD = Path(__file__).parent / "old_files"
SPECS = json.loads((OLD / "specs.json").read_text())
SPECS_TOML = json.loads((OLD / "specs.toml.json").read_text())
SPEC_OUTPUTS = json.loads((OLD / "spec_outputs.json").read_text())
MODELS = sorted(path.name for path in (OLD / "models").iterdir())
TRACES = sorted(path.name for path in (OLD / "traces").glob("*.trace"))
IDS = torch.arange(12).reshape(2, 6) * 3 % 61


def fill_weights(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for k, (_, weight) in enumerate(sorted(module.named_parameters())):
            values = torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * 0.37 + k) / 4
            weight.copy_((values + (1 if weight.ndim == 1 else 0)).reshape(weight.shape))


@pytest.mark.parametrize("name", sorted(SPECS))
def test_specs_load_and_their_layers_give_the_same_outputs(name: str):
    spec = hw.from_json(json.dumps(SPECS[name]))
    assert spec == hw.from_toml(SPECS_TOML[name])
    layer = hw.Attention(spec).double().eval()
    fill_weights(layer)
    assert {key: list(weight.shape) for key, weight in layer.state_dict().items()} == SPEC_OUTPUTS["shapes"][name]
    if name not in SPEC_OUTPUTS["outputs"]:
        return
    x = torch.sin(torch.arange(2 * 5 * spec.model, dtype=torch.float64)).reshape(2, 5, -1)
    source = None
    if spec.source is not None:
        source = torch.cos(torch.arange(2 * 4 * spec.source, dtype=torch.float64)).reshape(2, 4, -1)
    y = layer(x, source=source).detach()[:, -2:, :3].flatten()
    torch.testing.assert_close(y, torch.tensor(SPEC_OUTPUTS["outputs"][name], dtype=y.dtype), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_model_folders_load_with_the_same_tensors(name: str):
    folder = OLD / "models" / name
    net, tensors = hw.load(folder), load_file(folder / "model.safetensors")
    state = net.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in tensors.items())
    assert (find_record(folder) is not None) == (folder / "heads.json").is_file()


@pytest.mark.parametrize(("name", "operation"), [("pruned", "prune"), ("shared", "convert")])
def test_records_of_surgery_load_with_the_present_keys(name: str, operation: str):
    record = find_record(OLD / "models" / name)
    assert record is not None
    assert record.change["operation"] == operation
    if operation == "prune":
        assert (
            PruningPlan.from_dict(hw.load(OLD / "models" / "decoder").spec, record.change).head_counts
            == record.change["head_counts"]
        )
    else:
        assert record.change["conversion"]["name"] == "pool"
        assert not {"done", "way", "missed"} & set(record.change)


@pytest.mark.parametrize("name", ["decoder", "encoder_decoder", "classifier", "gated"])
def test_models_give_the_same_outputs(name: str):
    net = hw.load(OLD / "models" / name)
    with torch.no_grad():
        y = net(IDS[:, :4], source=IDS) if name == "encoder_decoder" else net(IDS)
    torch.testing.assert_close(y, load_file(OLD / "model_outputs.safetensors")[f"{name}.out"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TRACES)
def test_traces_give_the_same_attention_weights(name: str):
    trace, path = hw.load_trace(OLD / "traces" / name), OLD / "traces" / name
    assert trace.layers
    expected = path.with_suffix(".weights.safetensors")
    for key, weights in load_file(expected).items() if expected.is_file() else ():
        layer, head, row = map(int, key.split("."))
        actual = torch.from_numpy(trace.head_weights(trace.layers[layer].name, head, row=row).copy())
        torch.testing.assert_close(actual, weights, rtol=1e-5, atol=1e-6)


def test_a_run_resumes_from_its_checkpoint_and_ends_with_the_same_weights(tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(OLD / "run", folder)
    with safe_open(folder / "checkpoint" / "0000000004.safetensors", "pt") as file:
        state = json.loads(file.metadata()["state"])
    model_spec = model_spec_from_dict(state["config"]["model"])
    options = recipe.from_toml((OLD / "recipe.toml").read_text())
    hw.train(make_task("copy", symbols=9, block=3, gap=2), model_spec, options, folder, resume="allowed")
    tensors, expected = load_file(folder / "model.safetensors"), load_file(OLD / "run_end.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_state_file_of_pruning_to_a_budget_resumes(tmp_path: Path):
    path = tmp_path / "state.json"
    shutil.copy(OLD / "state.json", path)
    net = hw.load(OLD / "models" / "decoder")
    selection = PruneToBudget(PruningBudget("parameters", 0.97), HeadRanking("michel"), state_path=path)
    plan = selection.plan(net, [], print)  # a search that has ended needs no examples
    assert plan.keep["decoder.1.attention"] == (2, 3)
    other = PruneToBudget(PruningBudget("parameters", 0.96), HeadRanking("michel"), state_path=path)
    with pytest.raises(SpecError, match="Delete the file to start again"):
        other.plan(net, [], print)
