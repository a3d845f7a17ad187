"""The wheel and the sdist hold the page, and the wheel works in an empty environment, with each
extra.
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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [extra for extra in PROJECT["optional-dependencies"] if extra != "dev"]
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]
# What a wheel needs besides code: the page with licences, the sample, tables, and the mark of a
# typed package.
DATA = (
    *(
        f"viewer/static/{name}"
        for name in ("index.html", "app.js", "app.css", "report.js", "licences.txt")
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


def make_environment(folder: Path, *requirements: str | Path) -> Path:
    """Make an environment with these packages, and return its folder of commands."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
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


@pytest.fixture(scope="module")
def commands(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel and its dependencies, and nothing
    else.
    """
    return make_environment(tmp_path_factory.mktemp("user") / "venv", archives[1])


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
    report = json.loads(run(headwise, "--version", "--json", cwd=tmp_path))
    assert PROJECT["version"] in str(report)
    assert re.search(
        r"cache, bytes per token +4,096 +1,152",
        run(headwise, "cost", "gqa", "mla", "--model", "4096", "--heads", "32", cwd=tmp_path),
    )
    run(headwise, "view", "--export", "page.html", cwd=tmp_path)
    assert "<html" in (tmp_path / "page.html").read_text("utf-8")[:500]
    assert "pruned" in run(headwise, "demo", cwd=tmp_path)


MAKE_MODEL = """
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
torch.manual_seed(0)
config = Qwen3Config(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=8)
AutoModelForCausalLM.from_config(config).save_pretrained("qwen3")
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
    words = ("--data", texts, "--tokenizer", "bytes")
    assert "previous" in run(headwise, "heads", "qwen3", *words, cwd=tmp_path)
    run(headwise, "prune", "qwen3", "--keep", "0.5", *words, "--out", "smaller", cwd=tmp_path)
    assert (tmp_path / "smaller" / "VERIFICATION.md").is_file()
    load = "from transformers import AutoModel; print(AutoModel.from_pretrained('smaller').config)"
    assert '"num_attention_heads": 2' in run(commands / "python", "-c", load, cwd=tmp_path)
    run(headwise, "view", "smaller", "--export", "page.html", cwd=tmp_path)
    assert "<html" in (tmp_path / "page.html").read_text("utf-8")[:500]


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
    options = ("install", "--dry-run", "--report", "report.json", "-qq", *CONSTRAINTS)
    run(commands / "pip", *options, f"{archives[1]}[{extra}]", cwd=tmp_path)
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
