"""The catalogue of translations: every sentence of the page's server and of the translated commands
is in it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from string import Formatter

import pytest

from headwise import cli
from headwise.learn.catalogue import load_entries
from headwise.translation.language import (
    CATALOGUE,
    Template,
    iter_sentences,
    read_catalogue,
    translate,
    use_language,
)
from headwise.translation.terminal_text import text_width
from headwise.viewer import bundled_sample
from headwise.viewer.binary_answers import decode_arrays
from headwise.viewer.model_actions import measure
from headwise.viewer.model_worker import Job, JobProgress, describe_error
from headwise.viewer.open_model import OpenModel
from headwise.viewer.similarity_actions import compute_similarity
from support.page_browser import sample_model
from support.syntax_trees import syntax_nodes

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "headwise"
# The modules whose errors and progress the jobs of the page show.
MODULES = [
    *sorted((PACKAGE / "viewer").glob("*.py")),
    *(
        path
        for path in sorted((PACKAGE / "traces").glob("*.py"))
        if path.name != "import_export.py"
    ),
    *(
        PACKAGE / "inspect" / name
        for name in ("model_inputs.py", "trace_capture.py", "site.py", "hooks.py")
    ),
    PACKAGE / "head_analysis" / "head_redundancy.py",
    PACKAGE / "head_analysis" / "model_steps.py",
    PACKAGE / "head_analysis" / "logit_attribution.py",
    *(
        PACKAGE / "surgery" / name
        for name in ("attention_replacement.py", "pruning.py", "pruning_plan.py")
    ),
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
        return [
            "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        ]
    if isinstance(node, ast.IfExp):
        return templates(node.body) + templates(node.orelse)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [text for part in node.elts for text in templates(part)]
    return []


def sentences_of(path: Path) -> Iterator[str]:
    """The messages of errors, the notes of progress and the reasons in a module."""
    for node in syntax_nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            is_error = name.endswith(
                ("Error", "TooLong", "TooLarge", "QueueFull", "Cancelled", "Exception")
            )
            if is_error or name in REPORTERS:
                yield from (text for argument in node.args for text in templates(argument))
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in FIELDS:
                    yield from templates(value)


def shown_parts(sentence: str) -> list[str]:
    """The fact and the remedy of a message, as the page shows them, with a name for every value."""
    parts = describe_error(
        ValueError(sentence.replace("{}", "X").replace("{", "").replace("}", ""))
    )
    return [part for part in parts.values() if re.search("[a-z]{2}", part)]


def is_translated(sentence: str) -> bool:
    text = translate(sentence)
    return text is not None and not ENGLISH.search(re.sub("`[^`]*`", "", text))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_every_sentence_of_a_module_has_a_translation(path: Path):
    parts = dict.fromkeys(
        part for text in sentences_of(path) if text.strip() for part in shown_parts(text)
    )
    assert [part for part in parts if not is_translated(part)] == []


def test_the_catalogue_has_no_sentence_that_nothing_says():
    files = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    texts = [
        node.value
        for text in files
        for node in syntax_nodes(text)
        if isinstance(node, ast.Constant)
    ]
    texts += [entry.reference for entry in load_entries()]
    said = "\n".join(text for text in texts if isinstance(text, str)).lower()
    sections = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
    joined = list(sections.pop("joined by the code"))
    assert {word for key in joined for word in re.findall("[a-z]{3,}", key.lower())} <= set(
        re.findall("[a-z]+", said)
    )
    parts = {
        key: [part.strip(" ,;:()").lower() for part in KEY_PARTS.split(key)]
        for one in sections.values()
        for key in one
    }
    assert [
        key for key, literals in parts.items() if not all(part in said for part in literals)
    ] == []


def test_translations_have_the_values_of_their_sentences():
    for key, text in read_catalogue().items():
        used = {int(field) for _, field, _, _ in Formatter().parse(text) if field is not None}
        assert used == set(range(key.count("{}"))), key
        assert re.search("[\u4e00-\u9fff]", text) or not ENGLISH.search(text), key


def words_of(sentence: str) -> list[str]:
    """The parts of a translation between its full-width commas, colons and semicolons."""
    return re.split("[\uff0c\uff1a\uff1b]", translate(sentence) or "")


def test_values_keep_their_words_and_unknown_sentences_stay():
    assert words_of("there is no site 9: the trace has 3") == ["没有编号为 9 的层", "记录中有 3 层"]
    assert words_of(
        "cannot ablate heads of a.b: it is compiled, and compiled models cannot be observed"
    ) == [
        "不能消融 a.b 的头",
        "它已编译",
        "无法观察编译后的模型",
    ]
    assert words_of("the text is empty; enter at least one word") == [
        "文本为空",
        "请至少输入一个词",
    ]
    assert '`{"source": TEXT, "text": TEXT}`' in str(
        translate('give {"source": TEXT, "text": TEXT}, or set max_new_tokens')
    )
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
    shown = [
        *opened.table.notes,
        *(one.evidence for head in opened.table.heads for one in head.classes),
    ]
    assert [sentence for sentence in shown if not is_translated(sentence)] == []


def test_the_comparison_of_heads_is_translated(sample: OpenModel):
    header, _ = decode_arrays(
        compute_similarity(sample, {"texts": list(bundled_sample.TEXTS[:6])}, progress())
    )
    sentences = [
        text
        for text in (*(group["sentence"] for group in header["groups"]), *header["notes"])
        if text
    ]
    assert len(sentences) >= 3
    assert [sentence for sentence in sentences if not is_translated(sentence)] == []


# --- the translated commands ----------------------------------------------------------------------

COMMANDS = ("cost", "demo", "heads", "learn", "view")
SHARED = (
    "one_text",
    "text_arguments",
    "argument_checks",
    "arguments",
    "command_parser",
    "exit_status",
)
COMMAND_MODULES = [
    *sorted((PACKAGE / "cli" / "cost").glob("*.py")),
    *(PACKAGE / "cli" / f"{name}.py" for name in (*COMMANDS[1:], *SHARED)),
]
REPORT_MODULES = [
    *sorted((PACKAGE / "costs").glob("*.py")),
    *sorted((PACKAGE / "demo").glob("*.py")),
    *(
        PACKAGE / "head_analysis" / name
        for name in ("head_figures.py", "measure_tables.py", "circuit_summary.py")
    ),
]
TEXT_FUNCTIONS = ("localise", "paragraph", "label_cell", "heading_cell")
GRAMMAR = (
    "{}{} {} --help",
    "{} {} --help",
    "needs {}, got {}",
    "there is no {} {}",
)  # their values are sentences


@pytest.mark.parametrize(
    "path", COMMAND_MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}"
)
def test_every_error_of_a_translated_command_has_a_translation(path: Path):
    texts = [text for text in sentences_of(path) if text.strip()]
    parts = dict.fromkeys(part for text in texts for part in shown_parts(text))
    allowed = {part for text in GRAMMAR for part in shown_parts(text)}
    assert [part for part in parts if not is_translated(part) and part not in allowed] == []


@pytest.mark.parametrize(
    "path", [*COMMAND_MODULES, *REPORT_MODULES], ids=lambda path: f"{path.parent.name}.{path.stem}"
)
def test_every_text_that_a_report_makes_has_a_translation(path: Path):
    missing = []
    for node in syntax_nodes(path.read_text(encoding="utf-8")):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in TEXT_FUNCTIONS
            and node.args
        ):
            missing += [
                text
                for text in templates(node.args[0])
                if ENGLISH.search(text) and not is_translated(filled(text))
            ]
    assert missing == []


def filled(text: str) -> str:
    """The text with a number for every value, and without spaces at its ends."""
    return (
        text.replace("{} --help-all lists {}", "it --help-all lists 7 more options")
        .replace("{}", "7")
        .strip()
    )


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_whole_help_is_chinese(command: str, capsys: pytest.CaptureFixture[str]):
    argv = [command, "--help-all", "--lang", "zh"] if command else ["--help"]
    with use_language("zh") if not command else nullcontext(), suppress(SystemExit):
        cli._run_command(argv) if not command else cli.main(argv)
    lines = capsys.readouterr().out.split("\n\n")
    prose = [
        line for part in lines[1:] if not part.startswith("例子") for line in part.splitlines()
    ]
    assert len(prose) > 10
    assert [line for line in prose if ENGLISH.search(re.sub("`.*`", "", line))] == []
    assert max(map(text_width, prose)) <= 82


FIRST_ERRORS = """
learn softmax-scael
learn --lang xx
learn 003 --html FILE
learn 003 --html FOLDER
learn --html
demo extra
demo --steps abc
demo --out FILE
demo --out FOLDER
demo --quick --train
heads
heads nothing
heads mha
heads FOLDER
heads SAMPLE
heads SAMPLE --data nofile
heads SAMPLE --task nothing
heads SAMPLE --task dates --limit 0
heads SAMPLE --limit abc
cost
cost nothing
cost nofile.toml
cost FILE
cost mha --model 0
cost mha --model 100 --heads 7
cost mha --context 0
cost mha --device toaster
cost mha --set heads.kv=5
cost mha --set nothing=5
cost mha --dtype int7
cost mha --plot costs.doc
cost mha gqa --layer 3
cost gpt2 --published nothing
"""


@pytest.mark.parametrize("line", FIRST_ERRORS.split("\n")[1:-1])
def test_errors_of_wrong_arguments_are_chinese(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for path in ("file.toml", "folder/file"):
        (tmp_path / path).write_text("x = [")
    for word, path in {
        "FILE": "file.toml",
        "FOLDER": "folder",
        "SAMPLE": str(bundled_sample.MODEL),
    }.items():
        line = line.replace(word, path)
    assert cli.main(line.split()) == 2
    error = capsys.readouterr().err.removeprefix("headwise: ")
    assert re.search("[\u4e00-\u9fff]{2}", error)
    message = re.sub(
        "`[^`]*`|Invalid value.*?\\)", "", error
    )  # commands, and the words of Python's parser
    assert not re.search("[a-z]{2,} [a-z]{2,}(?! (GOLD|TARGET))", message), error
    assert "headwise " in re.sub("[^`]*`([^`]*)`[^`]*", "\\1", error) or "--help" not in error
