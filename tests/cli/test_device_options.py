"""`--device` and `--dtype` of every command that loads a model, on a pretended accelerator."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.cli import COMMANDS, MODULES, circuit, heads, main, prune, run, trace, view
from headwise.cli.arguments import LoadingOptions
from headwise.cli.options import Options
from headwise.cli.text_arguments import CompressionRun
from headwise.hub import checkpoint_weights
from headwise.kernels import devices
from headwise.observe.inspect.model_inputs import get_device
from headwise.surgery import model_and_texts
from headwise.viewer.view import open_target
from support.pretended_device import NAME, pretended_device
from support.saved_models import save_models

TEXTS = ["ab, cab", "two to", "two x ab", "is it", "no one in"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return save_models(base)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A machine with an accelerator."""
    with pretended_device() as device:
        monkeypatch.setattr(devices, "current_accelerator", lambda: device)
        yield device


def read_json(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    code = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a JSON document with their paths."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from flatten(entry, f"{path}.{key}")
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from flatten(entry, f"{path}.{number}")
    else:
        yield path, value


def check_equal(found: Any, expected: Any) -> None:
    """Two documents have the same keys and, to rounding, the same numbers."""
    pairs = zip(flatten(found), flatten(expected), strict=True)
    count = 0
    for (path, one), (other_path, other) in pairs:
        assert path == other_path
        if isinstance(one, float) and isinstance(other, float):
            assert math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-4), (path, one, other)
            count += 1
    assert count > 0


def test_heads_on_the_device_are_those_of_the_cpu(capsys, models, texts):
    argv = ("heads", models["gpt2"], "--data", texts, "--device")
    expected = read_json(capsys, *argv, "cpu")
    with pretended_device():
        check_equal(read_json(capsys, *argv, NAME), expected)


@pytest.mark.parametrize("name", ["ours", "gpt2"])
def test_traces_on_the_device_are_those_of_the_cpu(capsys, models, tmp_path, name: str):
    traced: list[dict[str, Any]] = []
    for device in ("cpu", NAME):
        out = tmp_path / f"{device}.json"
        argv = ["trace", str(models[name]), "--text", "two to", "--device", device]
        with pretended_device():
            assert main([*argv, "--export", str(out)]) == 0
        traced.append(json.loads(out.read_text()))
    check_equal(traced[1], traced[0])


CHANGES = {
    "prune": ("prune", "--keep", "0.67", "--by", "random"),
    "convert": ("convert", "--kv", "1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_on_the_device_are_those_of_the_cpu(models, texts, tmp_path, name: str):
    command, *choice = CHANGES[name]
    for device in ("cpu", NAME):
        argv = [command, str(models["ours"]), *choice, "--data", str(texts), "--seconds", "0.1"]
        with pretended_device():
            assert main([*argv, "--device", device, "--out", str(tmp_path / device)]) == 0
    expected = hw.load(tmp_path / "cpu").state_dict()
    for key, tensor in hw.load(tmp_path / NAME).state_dict().items():
        torch.testing.assert_close(tensor, expected[key])


def test_answers_on_the_device_are_those_of_the_cpu(capsys, models):
    argv = ("run", models["ours"], "two to", "--max-new-tokens", "5", "--device")
    expected = read_json(capsys, *argv, "cpu")
    with pretended_device():
        assert read_json(capsys, *argv, NAME) == expected


def load_in_view(args: Any) -> nn.Module:
    opened: list[Any] = []

    def keep(target: Any) -> Any:
        opened.append(open_target(target))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.viewer.view.open_target", keep)
        with pytest.raises(KeyboardInterrupt):
            view.main(args)
    return opened[0].get_model()


# How each command loads its model, from the words after the folder.
LOADERS: dict[str, tuple[Callable[[list[str]], Any], list[str]]] = {
    "heads": (
        lambda argv: heads._load(argv[0], heads.HeadsOptions.parse(argv)),
        ["--text", "two to"],
    ),
    "trace": (
        lambda argv: trace._capture_inputs(trace.TraceOptions.parse(argv))[0],
        ["--text", "two to", "--out", "OUT.trace"],
    ),
    "run": (lambda argv: run.load_model(run.RunOptions.parse(argv)), []),
    "prune": (
        lambda argv: CompressionRun.from_options(prune.PruneOptions.parse(argv)).net,
        ["--keep", "0.5", "--data", "TEXTS", "--out", "OUT"],
    ),
    "prune --sweep": (
        lambda argv: CompressionRun.from_options(prune.SweepCommandOptions.parse(argv)).net,
        ["--data", "TEXTS", "--out", "OUT"],
    ),
    "convert": (
        lambda argv: CompressionRun.from_options(prune.ConvertOptions.parse(argv)).net,
        ["--kv", "1", "--data", "TEXTS", "--out", "OUT"],
    ),
    "view": (load_in_view, ["--text", "two to", "--read-only"]),
    "circuit": (
        lambda argv: circuit._load(circuit.CircuitOptions.parse(argv)),
        ["--clean", "two to", "--corrupt", "one to", "--metric", "log_probability:t"],
    ),
}


def load_by(command: str, folder: Path, texts: Path, *words: str) -> nn.Module:
    load, more = LOADERS[command]
    places = {"TEXTS": str(texts), "OUT": str(texts.parent / "out")}
    places["OUT.trace"] = str(texts.parent / "out.trace")
    return load([str(folder), *(places.get(word, word) for word in more), *words])


# Every command loads a model of one kind, in turn.
KIND_OF_COMMAND = list(zip(LOADERS, itertools.cycle(["ours", "gpt2"])))


@pytest.mark.parametrize(("command", "name"), KIND_OF_COMMAND)
def test_every_command_loads_in_the_dtype(capsys, models, texts, command: str, name: str):
    for dtype in ("float64", "bf16"):
        model = load_by(command, models[name], texts, "--device", "cpu", "--dtype", dtype)
        found = {parameter.dtype for parameter in model.parameters()}
        assert found == {devices.DTYPES[dtype]}
        noted = f"headwise: {models[name]} runs on cpu in {devices.dtype_name(*found)}\n"
        assert capsys.readouterr().err == noted
    model = load_by(command, models[name], texts)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", LOADERS)
def test_the_accelerator_is_the_default(capsys, models, texts, accelerator, command: str):
    model = load_by(command, models["ours"], texts)
    assert {tensor.device for tensor in model.state_dict().values()} == {accelerator}
    assert capsys.readouterr().err == f"headwise: {models['ours']} runs on {accelerator}\n"
    model = load_by(command, models["ours"], texts, "--device", "cpu")
    assert get_device(model) == torch.device("cpu")
    assert capsys.readouterr().err == ""


def test_commands_that_compute_share_the_options():
    for name in COMMANDS:
        import_module(f"headwise.cli.{MODULES.get(name, name)}")
    classes = [Options]
    for kind in classes:
        classes += kind.__subclasses__()
    with_device = {kind for kind in classes if "device" in vars(kind).get("__annotations__", {})}
    assert {kind.__name__ for kind in with_device} == {
        "DeviceOptions",
        *("StudyOptions", "TrainOptions", "WhyOptions"),  # with other defaults or types
        "CostOptions",  # the device whose times are computed
    }
    loading = {kind for kind in classes if issubclass(kind, LoadingOptions)}
    commands = {kind.command for kind in loading if "command" in vars(kind)}
    assert commands == {*LOADERS, "why"}


# --- Bad input ------------------------------------------------------------------------------------


def run_badly(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """A command that is refused in one line."""
    code = main([*map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "nonsense", "", "meta", "hpu"])
def test_a_device_that_is_not_there(capsys, models, device: str):
    err = run_badly(capsys, "run", models["ours"], "two", "--device", device)
    assert err == (
        f"headwise: --device {device!r} is not available; use --device 'auto' or one of cpu\n"
    )


def test_an_unknown_dtype(capsys, models):
    err = run_badly(capsys, "run", models["ours"], "two", "--dtype", "float46")
    assert err == "headwise: --dtype 'float46' is unknown; did you mean 'float64'?\n"
    with pytest.raises(hw.SpecError, match=r"dtype='torch.int8' is unknown; use one of"):
        hw.load(models["ours"], dtype=torch.int8)


def test_a_dtype_that_the_device_lacks(capsys, models, monkeypatch):
    monkeypatch.setattr(devices, "has_dtype", lambda device, dtype: dtype != torch.float64)
    with pretended_device():
        argv = ("run", models["ours"], "two", "--device", NAME, "--dtype", "fp64")
        err = run_badly(capsys, *argv)
    assert err == "headwise: pretend has no float64; use --dtype 'float32', or --device 'cpu'\n"


@pytest.mark.parametrize("name", ["ours", "gpt2"])
def test_a_model_larger_than_its_memory(capsys, models, monkeypatch, name: str):
    parameters = sum(tensor.numel() for tensor in hw.load(models[name]).state_dict().values())
    memory = {NAME: 4 * parameters - 1, "cpu": 4 * parameters}
    monkeypatch.setattr(checkpoint_weights, "free_memory", lambda device: memory[device.type])
    monkeypatch.setattr(checkpoint_weights, "available_memory", lambda: memory["cpu"])
    argv = ("heads", models[name], "--text", "two", "--device")
    with pretended_device():
        code = main([*map(str, argv), NAME])
        err = capsys.readouterr().err.splitlines()[-1]
        assert code == 2
        assert (
            f"headwise: cannot load {models[name]}: its weights need 0.0 GB, and pretend has" in err
        )
        assert err.endswith("0.0 GB free; use --dtype 'bf16' (0.0 GB) or --device 'cpu'")
        memory["cpu"] -= 1
        memory[NAME] = 0
        code = main([*map(str, argv), NAME])
        assert code == 2
        assert capsys.readouterr().err.endswith("0.0 GB free; choose a smaller model\n")
    err = run_badly(capsys, *argv, "cpu")
    assert err.endswith("and this machine has 0.0 GB; use --dtype 'bf16' (0.0 GB)\n")


def test_a_device_that_runs_out_of_memory(capsys, models, texts, tmp_path, monkeypatch):
    def run_out(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(model_and_texts, "verify", run_out)
    out = tmp_path / "out"
    argv = ("prune", models["ours"], "--keep", "0.5", "--data", texts, "--out", out)
    assert run_badly(capsys, *argv).endswith(
        "headwise: the device is out of memory; use a smaller batch, model or number of tokens, "
        "--dtype bf16, or --device cpu\n"
    )
    assert not out.exists()


def test_a_trace_runs_on_no_device(capsys, models, tmp_path):
    path = tmp_path / "one.trace"
    assert main(["trace", str(models["ours"]), "--text", "two", "--out", str(path)]) == 0
    capsys.readouterr()
    err = run_badly(capsys, "view", path, "--device", "cpu", "--export", tmp_path / "one.html")
    assert "--device needs a model, and" in err


def test_a_name_without_a_model_prints_nothing_else(capsys, tmp_path):
    for command in ("heads", "run"):
        assert main([command, str(tmp_path), "--dtype", "bf16"]) != 0
        assert len(capsys.readouterr().err.splitlines()) == 1
