"""Bad arguments of every command are refused in one line before a model is loaded or a folder is
written.
"""

from __future__ import annotations

import importlib
import pkgutil
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import headwise as hw
from headwise import cli
from headwise.attention.backends import backend_report
from headwise.cli import arguments
from headwise.costs.activations import BACKEND_PROFILES
from headwise.hub import pretrained_models
from headwise.models import save_load
from headwise.models.model_spec import serialization
from headwise.viewer import open_model, view

# The files that the arguments name; `model` looks like a folder of a model, so that only loading it
# would show that it is not one.
FILES = {
    "model/headwise.toml": "format = 1\n",
    "texts.txt": "one\ntwo\nthree\n",
    "empty.txt": "",
    "full/file": "here",
    "no_model/notes.txt": "here",
    "requests.jsonl": '{"prompt": "one"}\n',
    "run/checkpoint/step": "here",
    "done/headwise.toml": "format = 1\n",
    "study.toml": 'hypothesis = "h"\n[variants.mha]\n[tasks.recall]\n',
    "config.json": '{"model_type": "gpt2"}',
    "gpt2/config.json": '{"model_type": "gpt2", "n_layer": 2, "n_head": 4}',
    "vit/config.json": '{"model_type": "vit", "patch_size": 8, "image_size": 32}',
    "part.py": "",
    "curves/curves.json": "{}",
    "pruned/heads.json": "{}",
    "course/000.html": "here",
    "course/004.html": "here",
    "course/index.html": "here",
}
TEXTS = "--data texts.txt"
# Lines of "command line => what the error says".
TABLE = Path(__file__).with_name("refusals.txt").read_text().splitlines()
CASES = [line.partition(" => ")[::2] for line in TABLE if " => " in line]
# Mistakes that are found before torch is imported.
LIGHT = (
    "run model one --batch 0",
    "run model one --top-p 1.5",
    "run nowhere one",
    "heads model --data none.txt",
    "heads model --data empty.txt",
    f"heads model {TEXTS} --budget 0",
    "heads gpt2 --text one --show norm",
    f"heads gpt2 {TEXTS} --show norms",
    f"prune model {TEXTS} --out new --min-heads -1",
    f"convert model {TEXTS} --out new --kv 0",
    f"prune model --sweep {TEXTS} --out new --max-loss-rise 0",
    "study none.toml",
    "study study.toml --jobs -1",
    "view model --port -1",
    "walk mha --batch x",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the arguments name."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "layer.toml").write_text(hw.to_toml(hw.design(model=8, heads=2)))
    model = hw.families.read_model_spec(
        {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    )
    (tmp_path / "whole.toml").write_text(hw.model_spec.to_toml(model))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(*args: object, **options: object) -> NoReturn:
    raise AssertionError(f"a model was loaded: {args}")


@pytest.fixture(scope="module")
def all_modules() -> None:
    """Import everything: a module that is imported while loading is patched would keep the patched
    functions.
    """
    for module in pkgutil.walk_packages(hw.__path__, "headwise."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.fixture
def no_loading(all_modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading any model fails the test."""
    for module, name in (
        *((hw, "load"), (hw.hub, "load"), (hw.models, "load"), (hw.models, "build")),
        (pretrained_models, "load"),
        (pretrained_models, "load_original"),
        (save_load, "load"),
        (open_model, "load_target"),
        (view, "load_target"),
    ):
        monkeypatch.setattr(module, name, loaded, raising=False)


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
@pytest.mark.usefixtures("no_loading")
def test_bad_arguments_are_refused_before_a_model_is_loaded(capsys, folder, line, message):
    before = sorted(folder.rglob("*"))
    code = cli.main(shlex.split(line))
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert message in captured.err
    assert sorted(folder.rglob("*")) == before


def test_every_command_is_in_the_table():
    assert {line.split()[0] for line, _ in CASES} >= set(cli.COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        "run model one",
        f"heads model {TEXTS}",
        f"prune model {TEXTS} --keep 0.5 --out new",
        f"prune model --sweep {TEXTS} --out new",
        f"convert model {TEXTS} --kv 1 --out new",
        "trace model --text one --out a.trace",
    ],
)
@pytest.mark.usefixtures("no_loading")
def test_good_arguments_reach_the_loading_that_is_patched(capsys, folder: Path, line: str):
    assert cli.main(line.split()) == 3
    assert "a model was loaded" in capsys.readouterr().err


def test_mistakes_are_found_without_torch(folder: Path):
    code = "import sys\nfrom headwise.cli import main\nfor line in sys.stdin.read().splitlines():\n"
    code += (
        "    assert main(line.split()) == 2, line\n    assert 'torch' not in sys.modules, line\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(LIGHT), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line for line in ran.stderr.splitlines() if line.startswith("headwise: ")]
    assert len(lines) == len(LIGHT)


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [
        ("cost", "--profile", BACKEND_PROFILES),
        ("why", "--when", backend_report.STATES),
    ],
)
def test_help_lists_every_name(capsys, monkeypatch, command, option, names):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help-all"])
    entry = capsys.readouterr().out.partition(f"  {option} ")[2].partition("  --")[0]
    assert [name for name in names if name not in entry] == []


def test_the_manifest_has_the_name_of_the_library():
    assert arguments.MANIFEST_FILE == serialization.MANIFEST_FILE
