"""`--import FILE.py`: every command that reads specs or models can use a part that is not
headwise's own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwise as hw
from headwise import cli
from headwise.attention.interfaces import part
from headwise.attention.interfaces.part import find_class
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    OutputHeadSpec,
    StackSpec,
    to_toml,
)
from headwise.models.vocabulary import ByteVocabulary
from support.own_parts import forget_parts, write_part

TEXTS = "The sea is wide.\nA head is small.\nSome heads are warm.\nNo head is cold.\n"
PAIR = ("--clean", "The sea", "--corrupt", "The tea")
# The least arguments that each command needs; MODEL is a folder whose model has the part.
MINIMAL = {
    "view": ["MODEL", "--export", "page.html", "--text", "The sea"],
    "spec": ["mha"],
    "cost": ["mha"],
    "walk": ["mha"],
    "train": ["recall", "--model", "MODEL", "--out", "out"],
    "study": ["study.toml"],
    "run": ["MODEL", "The sea"],
    "sites": ["MODEL"],
    "heads": ["MODEL", "--data", "texts.txt"],
    "circuit": ["MODEL", *PAIR, "--metric", "log_probability:T"],
    "prune": ["MODEL", "--data", "texts.txt", "--out", "out", "--keep", "1"],
    "prune --sweep": ["MODEL", "--data", "texts.txt", "--out", "out"],
    "convert": ["MODEL", "--data", "texts.txt", "--out", "out", "--kv", "1"],
    "trace": ["MODEL", "--text", "The sea", "--out", "sea.trace"],
    "why": ["mha"],
}
STUDY = """
hypothesis = "Warm heads recall as much."
baseline = "mha"
seeds = [1]
head_texts = 0
recipe = { steps = 2, batch = 4, evaluate_batches = 1 }
variants = { mha = {}, warm = { options = { modifiers = [{ part = "Temperature" }] } } }
tasks.recall = { vocabulary = 16, length = 16, pairs = 2 }
"""
READ_MODELS = [verb for verb, argv in MINIMAL.items() if "MODEL" in argv]


def own_model() -> ModelSpec:
    """A small byte model with the part, which must be registered."""
    part = find_class("Temperature")(start=0.5)
    spec = hw.design(
        model=12, heads=2, dim=4, pattern="causal", modifiers=(hw.parts.Rotary(), part)
    )
    block = BlockSpec(spec, feed=FeedForwardSpec(17))
    stack = StackSpec.from_blocks("decoder", 12, [block] * 2, embedding=EmbeddingSpec(256))
    return ModelSpec("own", "decoder", (stack,), (OutputHeadSpec("tokens", 256, table="decoder"),))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file of the part, a saved model, its spec, a spec of
    one layer, and texts.
    """
    base = tmp_path_factory.mktemp("own")
    with forget_parts():
        part.import_part_file(write_part(base))
        net = hw.build(own_model(), seed=0)
        net.usage = hw.ProcessorSpec(tokenizer=ByteVocabulary().document)
        hw.save(net, base / "model")
        (base / "model.toml").write_text(to_toml(own_model()))
        (base / "layer.toml").write_text(
            hw.to_toml(hw.design(model=12, heads=2, modifiers=(find_class("Temperature")(),)))
        )
    (base / "texts.txt").write_text(TEXTS)
    return base


@pytest.fixture(autouse=True)
def fresh(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test in the folder, without the part."""
    monkeypatch.chdir(saved)
    with forget_parts():
        yield


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    return (code, *capsys.readouterr())


def minimal(verb: str) -> list[str]:
    return [*verb.split(), *("model" if word == "MODEL" else word for word in MINIMAL[verb])]


COMMANDS_WITHOUT_PARTS = ("demo", "learn")


def test_every_command_is_in_the_table():
    assert {verb.split()[0] for verb in MINIMAL} == set(cli.COMMANDS) - set(COMMANDS_WITHOUT_PARTS)


@pytest.mark.parametrize("verb", MINIMAL)
def test_every_command_imports_each_file_before_it_works(capsys, monkeypatch, verb):
    imported = []

    def stop_at_the_second(name: str) -> None:
        imported.append(name)
        if len(imported) == 2:
            raise hw.SpecError("imported")

    monkeypatch.setattr(part, "import_part_file", stop_at_the_second)
    code, out, err = run(capsys, *minimal(verb), "--import", "a.py", "--import", "b.py")
    assert (code, out, err) == (2, "", "headwise: imported\n")
    assert imported == ["a.py", "b.py"]


@pytest.mark.parametrize("verb", COMMANDS_WITHOUT_PARTS)
def test_commands_without_specs_have_no_such_option(capsys, verb: str):
    assert "there is no option --import" in run(capsys, verb, "--import", "temperature.py")[2]


@pytest.mark.parametrize("verb", READ_MODELS)
def test_a_model_without_its_part_is_refused_in_one_line(capsys, verb: str):
    code, out, err = run(capsys, *minimal(verb))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        "needs the part Temperature of the module temperature, which is not loaded; add --import "
        "temperature.py"
    ) in err
    assert "temperature" not in sys.modules
    assert not (Path("out") / "model.safetensors").exists()


@pytest.mark.parametrize("target", ["model", "model.toml", "layer.toml"])
def test_costs_are_those_of_the_library(capsys, target: str):
    code, out, err = run(capsys, "cost", target, "--json", "--import", "temperature.py")
    assert (code, err) == (0, "")
    spec = hw.from_toml(Path(target).read_text()) if target == "layer.toml" else own_model()
    assert json.loads(out)["rows"][0]["params"] == hw.costs.count_parameters(spec)


@pytest.mark.parametrize("verb", ["spec", "why", "walk"])
def test_a_layer_with_the_part_is_described(capsys, verb: str):
    code, out, err = run(capsys, verb, "layer.toml", "--import", "temperature.py")
    assert (code, err) == (0, "")
    assert out
    code, out, err = run(
        capsys, verb, "mha", "--set", 'modifiers=[{part = "Temperature", start = 1}]'
    )
    assert (code, err) == (0, "")


def test_a_layer_without_the_part_names_the_option(capsys):
    code, out, err = run(capsys, "spec", "layer.toml")
    assert (code, out) == (2, "")
    assert err == (
        "headwise: there is no part 'Temperature'; if it is your own part, add --import FILE.py, "
        "or import its module "
        "in Python\n"
    )


def test_a_model_with_the_part_runs_and_is_traced(capsys):
    code, out, err = run(
        capsys, "run", "model", "The sea", "--max-new-tokens", "3", "--import", "temperature.py"
    )
    assert (code, err) == (0, "")
    expected = hw.generate(hw.load("model"), ["The sea"], max_new_tokens=3)
    assert out.rstrip("\n") == expected[0]
    code, out, err = run(
        capsys,
        "trace",
        "model",
        "--text",
        "The sea",
        "--out",
        "sea.trace",
        "--import",
        "temperature.py",
    )
    assert code == 0
    assert hw.load_trace("sea.trace").layers


def test_a_trained_model_records_the_part(capsys, tmp_path: Path):
    small = [
        "--steps",
        "1",
        "--batch",
        "2",
        "--precision",
        "fp32",
        "--compile",
        "off",
        "--device",
        "cpu",
    ]
    Path("long.txt").write_text(TEXTS * 40)
    argv = ["train", "long.txt", "--model", "model.toml", "--out", str(tmp_path), *small]
    code, _, err = run(capsys, *argv, "--import", "temperature.py", "--set", "task.tokens=bytes")
    assert code == 0, err
    assert 'file = "temperature.py"' in (tmp_path / "headwise.toml").read_text()


@pytest.mark.slow
def test_the_processes_of_a_study_import_the_part(capsys, tmp_path: Path):
    Path("study.toml").write_text(STUDY)
    argv = [
        *("study", "study.toml", "--jobs", "1", "--out"),
        str(tmp_path),
        "--json",
        "--import",
        "temperature.py",
    ]
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    assert json.loads(out)["failures"] == []
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {(row["variant"], row["status"]) for row in results} == {
        ("mha", "done"),
        ("warm", "done"),
    }
