"""Sentences of the server in Chinese: every message, note, reason and progress line of the page has a translation."""

from __future__ import annotations

import ast
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from headwise.viewer import bundled_sample, server
from headwise.viewer.model_actions import measure
from headwise.viewer.model_worker import Job, JobProgress, describe_error
from headwise.viewer.open_model import OpenModel
from headwise.viewer.sentences import CATALOGUE, Template, iter_sentences, read_catalogue, translate
from headwise.viewer.similarity_actions import compute_similarity
from headwise.viewer.tile_encoding import decode_arrays
from support.page_browser import sample_model, served, wait_until

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "headwise"
# The modules whose errors and progress the jobs of the page show.
MODULES = [
    *sorted((PACKAGE / "viewer").glob("*.py")),
    *(path for path in sorted((PACKAGE / "traces").glob("*.py")) if path.name != "import_export.py"),
    *(PACKAGE / "inspect" / name for name in ("model_inputs.py", "trace_capture.py", "site.py", "hooks.py")),
    PACKAGE / "head_analysis" / "head_redundancy.py",
    PACKAGE / "head_analysis" / "model_steps.py",
    PACKAGE / "head_analysis" / "logit_attribution.py",
    *(PACKAGE / "surgery" / name for name in ("attention_replacement.py", "pruning.py", "pruning_plan.py")),
    *(PACKAGE / "surgery" / name for name in ("conversion.py", "head_selection.py")),
    PACKAGE / "surgery" / "verification" / "proof.py",
]
REPORTERS = ("progress", "log", "Ability", "CountedMessage")
FIELDS = ("note", "notes", "reason", "capture", "fact", "remedy", "outputs")
KEY_PARTS = re.compile(r"\{\}|; |: ")
ENGLISH = re.compile(r"[a-z]{2,} [a-z]{2,}")  # two words in a row; one alone is a name or an option


def templates(node: ast.expr) -> list[str]:
    """The texts that an expression can give, with {} for every value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return templates(node.body) + templates(node.orelse)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [text for part in node.elts for text in templates(part)]
    return []


def sentences_of(path: Path) -> Iterator[str]:
    """The messages of errors, the notes of progress and the reasons in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            is_error = name.endswith(("Error", "TooLong", "TooLarge", "QueueFull", "Cancelled", "Exception"))
            if is_error or name in REPORTERS:
                yield from (text for argument in node.args for text in templates(argument))
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in FIELDS:
                    yield from templates(value)


def shown_parts(sentence: str) -> list[str]:
    """The fact and the remedy of a message, as the page shows them, with a name for every value."""
    parts = describe_error(ValueError(sentence.replace("{}", "X").replace("{", "").replace("}", "")))
    return [part for part in parts.values() if re.search("[a-z]{2}", part)]


def is_translated(sentence: str) -> bool:
    text = translate(sentence)
    return text is not None and not ENGLISH.search(re.sub("`[^`]*`", "", text))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_every_sentence_of_a_module_has_a_translation(path: Path):
    parts = dict.fromkeys(part for text in sentences_of(path) if text.strip() for part in shown_parts(text))
    assert [part for part in parts if not is_translated(part)] == []


def test_the_catalogue_has_no_sentence_that_nothing_says():
    files = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    texts = [node.value for text in files for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    said = "\n".join(text for text in texts if isinstance(text, str)).lower()
    sections = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
    joined = list(sections.pop("joined by the code"))
    assert {word for key in joined for word in re.findall("[a-z]{3,}", key.lower())} <= set(re.findall("[a-z]+", said))
    parts = {
        key: [part.strip(" ,;:()").lower() for part in KEY_PARTS.split(key)] for one in sections.values() for key in one
    }
    assert [key for key, literals in parts.items() if not all(part in said for part in literals)] == []


def test_translations_have_the_values_of_their_sentences():
    for key, text in read_catalogue().items():
        used = {int(field) for _, field, _, _ in Formatter().parse(text) if field is not None}
        assert used <= set(range(key.count("{}"))), key
        assert re.search("[\u4e00-\u9fff]", text) or not ENGLISH.search(text), key


def words_of(sentence: str) -> list[str]:
    """The parts of a translation between its full-width commas, colons and semicolons."""
    return re.split("[\uff0c\uff1a\uff1b]", translate(sentence) or "")


def test_values_keep_their_words_and_unknown_sentences_stay():
    assert words_of("there is no site 9: the trace has 3") == ["没有编号为 9 的层", "记录中有 3 层"]
    assert words_of("cannot ablate heads of a.b: it is compiled, and compiled models cannot be observed") == [
        "不能消融 a.b 的头",
        "它已编译",
        "无法观察编译后的模型",
    ]
    assert words_of("the text is empty; enter at least one word") == ["文本为空", "请至少输入一个词"]
    assert translate("Something else went wrong.") is None
    assert translate("x" * 5_000) is None
    assert Template(("a ", " b ", ""), "").match("a 1 b 2") == ["1", "2"]
    assert Template(("a ", " b ", ""), "").match("a 1 c 2") is None


def test_long_hostile_sentences_are_answered_at_once():
    assert translate("the " * 240) is None
    assert translate(", ".join(["x"] * 300)) is None


def progress() -> JobProgress:
    return JobProgress(Job("measure", {}))


@pytest.fixture(scope="module")
def sample() -> OpenModel:
    return sample_model()


def test_what_the_sample_shows_is_translated(sample: OpenModel):
    assert sample.table is not None
    evidence = [one.evidence for head in sample.table.heads for one in head.classes]
    shown = [*iter_sentences(sample.describe()), sample.table.texts, *sample.table.notes, *evidence]
    assert len(shown) > 40
    assert [sentence for sentence in shown if not is_translated(sentence)] == []


def test_measures_of_one_text_are_translated():
    opened = sample_model()
    measure(opened, {}, progress())
    assert opened.table is not None
    shown = [*opened.table.notes, *(one.evidence for head in opened.table.heads for one in head.classes)]
    assert [sentence for sentence in shown if not is_translated(sentence)] == []


def test_the_comparison_of_heads_is_translated(sample: OpenModel):
    header, _ = decode_arrays(compute_similarity(sample, {"texts": list(bundled_sample.TEXTS[:6])}, progress()))
    sentences = [text for text in (*(group["sentence"] for group in header["groups"]), *header["notes"]) if text]
    assert len(sentences) >= 3
    assert [sentence for sentence in sentences if not is_translated(sentence)] == []


# --- on the page -----------------------------------------------------------------------------------------

# Texts of the page that are neither code nor tokens, in which two English words stand together.
ENGLISH_TEXTS = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = new Set();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const holder = node.parentElement;
    if (holder.closest('code, .mono, .chip, .tok, .pair-row, script, style, noscript')) continue;
    if (holder.closest('[lang=en], textarea, option, svg')) continue;
    const text = node.data.replace(/`[^`]*`/g, '');
    if (/[a-z]{2,} [a-z]{2,}/.test(text)) found.add(text);
  }
  return [...found];
}"""


def open_chinese(page: Any, url: str) -> None:
    page.goto(url.replace("/#", "/?lang=zh#"))
    page.get_by_role("gridcell").first.wait_for()


def wait_for_chinese(page: Any, address: str) -> None:
    page.evaluate(f"location.hash = '{address}'")
    page.get_by_role("heading", level=1).first.wait_for()
    wait_until(page, "!document.querySelector('.jobs .note:not(.bad)')")
    wait_until(page, f"({ENGLISH_TEXTS})().length === 0")


@pytest.mark.parametrize("with_model", [True, False])
def test_no_screen_has_an_english_sentence_in_chinese(page: Any, with_model: bool):
    with served(sample_model(with_model=with_model)) as url:
        open_chinese(page, url)
        screens = page.get_by_role("navigation").get_by_role("link").evaluate_all("all => all.map((a) => a.hash)")
        assert len(screens) >= 11
        for address in (*screens, "#/classify?table=1", "#/map?table=1", "#/head?table=1", "#/steps?table=1"):
            wait_for_chinese(page, address)


def test_an_error_is_chinese(page: Any):
    with served(sample_model()) as url:
        open_chinese(page, url)
        events = f"data: {json.dumps({'state': 'failed', 'error': FAILED})}\n\n"
        page.route("**/api/jobs/*/events", lambda route: route.fulfill(content_type="text/event-stream", body=events))
        page.evaluate("location.hash = '#/cost'")
        page.get_by_role("button", name="计算开销").click()
        alert = page.get_by_role("alert")
        alert.get_by_text("没有编号为 9 的层").wait_for()
        assert alert.inner_text().splitlines()[-1] == "请给出 0 到 2"


def test_progress_is_chinese(page: Any, monkeypatch: pytest.MonkeyPatch):
    is_seen = threading.Event()

    def slow_cost(model: OpenModel, arguments: Any, progress: JobProgress) -> dict[str, Any]:
        progress(1, 3, "3 heads ablated")
        is_seen.wait(30)
        return {"rows": [], "notes": [], "workload": {}}

    monkeypatch.setitem(server.ALL_JOBS, "cost", slow_cost)
    with served(sample_model()) as url:
        open_chinese(page, url)
        page.evaluate("location.hash = '#/cost'")
        page.get_by_role("button", name="计算开销").click()
        page.get_by_text("1 / 3 已消融 3 个头").wait_for()
        assert page.get_by_text("heads ablated").count() == 0
        is_seen.set()


def test_an_exported_file_holds_its_translations(page: Any, tmp_path: Path):
    from headwise.viewer.view import render_export

    (tmp_path / "page.html").write_text(render_export(sample_model(with_model=False)), encoding="utf-8")
    page.goto(f"{(tmp_path / 'page.html').as_uri()}?lang=zh")
    page.get_by_role("gridcell").first.wait_for()
    wait_for_chinese(page, "#/open")
    page.get_by_text("查询和键").first.wait_for()
    assert page.get_by_text("queries and keys").count() == 0
    wait_for_chinese(page, "#/classify")


FAILED = describe_error(ValueError("there is no site 9: the trace has 3; give 0 to 2"))
