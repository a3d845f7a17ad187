"""The demo compresses its translator and reports the loss of quality."""

from __future__ import annotations

import io
import json
import shutil
import unicodedata
import xml.dom.minidom
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.demo import before_after, translator as translator_module
from headwise.demo.translator import (
    COMPRESSION_METHODS,
    RECIPE,
    RETRAINING,
    SCORE_NAME,
    CompressedTranslator,
    CompressionScale,
    RetrainingProgress,
    TrainingDemo,
    Translator,
)
from headwise.errors import SpecError
from headwise.generation.decoding_strategies import greedy_decode
from headwise.progress import CountedMessage
from headwise.surgery.distillation import RetrainingPoint
from headwise.surgery.hf_export.model_folder import read_record
from headwise.surgery.pruning_plan import fingerprint_model
from headwise.training import Recipe

BRIEF_RECIPE = {
    "steps": 6,
    "batch": 8,
    "evaluate_every": 6,
    "evaluate_batches": 1,
    "precision": "fp32",
    "compile": "off",
}
SMALL = CompressionScale(
    num_distillation_texts=96,
    num_selection_texts=8,
    num_proof_texts=4,
    num_scored_examples=4,
    seconds=0.05,
)
NAMES = [change.name for change in COMPRESSION_METHODS]


@pytest.fixture(scope="module", autouse=True)
def brief() -> Iterator[None]:
    """Steps as they end, not at their best: so few of them would be thrown away, and nothing
    learned be seen.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translator_module, "RETRAINING", replace(RETRAINING, keep="last", batch=16))
        yield


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    translator = Translator(
        tmp_path_factory.mktemp("demo") / "run", Recipe(**BRIEF_RECIPE, attention="fused")
    )
    assert translator.result.steps == 6
    return translator


@pytest.fixture(scope="module")
def compressed(translator: Translator) -> dict[str, CompressedTranslator]:
    every = {
        change.name: CompressedTranslator(translator, change, SMALL)
        for change in COMPRESSION_METHODS
    }
    assert all(one.data for one in every.values())
    return every


def test_half_of_the_heads_are_gone_and_a_layer_has_one_head_of_keys(
    compressed: dict[str, CompressedTranslator],
):
    """Counted in the tensors that lie in the folders: 24 heads of 32 channels in six attentions 128
    wide.
    """
    nets = {name: hw.load(one.folder) for name, one in compressed.items()}
    tensors = {name: net.state_dict() for name, net in nets.items()}
    rows = {
        name: [t.shape[0] for n, t in own.items() if n.endswith("project.v")]
        for name, own in tensors.items()
    }
    assert sum(rows["pruned"]) == 24 // 2 * 32
    assert rows["shared"] == [32] * 6


@pytest.mark.parametrize("name", NAMES)
def test_the_demo_shows_the_translations_of_its_folders(
    translator: Translator, compressed: dict[str, CompressedTranslator], name: str
):
    """Exact match, before and after, by a loop of its own over held-out examples."""
    task, batch = (
        translator.task,
        translator.task.batch(0, 32, "valid").rows(slice(0, SMALL.num_scored_examples)),
    )
    row, found = before_after.exact_match_rows(compressed[name].data), []
    assert batch.source is not None
    for net in (translator.result.net, hw.load(compressed[name].folder)):
        with torch.no_grad():
            memory = net.eval().encode(batch.source, sequence=batch.source_tokens)
        generated = greedy_decode(
            net,
            task.prompt(batch)[0],
            max_new_tokens=task.answers,
            end_id=task.end,
            encoder_output=memory,
        )
        found.append(
            sum(task.text(s) == one.target for s, one in zip(generated, batch.gold, strict=True))
            / len(batch.gold)
        )
    assert [row["before"]["value"], row["after"]["value"]] == found
    assert compressed[name].data["proof"]["holds"]


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_translator_learns_again_for_a_part_of_the_training(
    compressed: dict[str, CompressedTranslator], name: str
):
    data, part = compressed[name].data, {"pruned": 1 / 2, "shared": 1 / 4}[name]
    assert data["steps"] == max(1, round(part * BRIEF_RECIPE["steps"])) == data["curve"][-1]["step"]
    assert data["kept"] == data["steps"]
    assert compressed[name].retraining.seed == RETRAINING.seed == 0


def test_a_second_run_shows_the_results_of_the_first(
    translator: Translator, compressed: dict[str, CompressedTranslator]
):
    files = {
        path: path.read_bytes() for one in compressed.values() for path in one.folder.iterdir()
    }
    again = {
        change.name: CompressedTranslator(translator, change, SMALL).data
        for change in COMPRESSION_METHODS
    }
    assert again == {name: one.data for name, one in compressed.items()}
    assert {path: path.read_bytes() for path in files} == files


def test_results_of_another_translator_are_replaced(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From examples of training, and judged by those that nothing was learned from."""
    shutil.copytree(translator.folder, tmp_path / "run")
    other = Translator(tmp_path / "run", translator.recipe)
    net = hw.load(translator.folder)
    with torch.no_grad():
        next(net.parameters()).mul_(1.5)
    other._result = replace(translator.result, net=net)
    before = read_record(tmp_path / "run" / "shared").change["model"]
    assert before == fingerprint_model(translator.result.net)
    request, shown = list[str](), type(translator.task).batch
    monkeypatch.setattr(
        type(translator.task), "batch", lambda *a: request.append((*a, "train")[3]) or shown(*a)
    )
    assert (
        CompressedTranslator(other, COMPRESSION_METHODS[1], SMALL).data["model"]
        == fingerprint_model(net)
        != before
    )
    judged = request.index("valid")
    assert request[:judged] == ["train"] * len(request[:judged])
    assert len(request[:judged]) >= SMALL.num_distillation_texts
    assert set(request[judged:]) == {"valid"}


def test_a_foreign_folder_is_refused_before_training(tmp_path: Path):
    mine = tmp_path / "run" / "pruned"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(SpecError, match=r"pruned: it contains thesis.txt"):
        CompressedTranslator(Translator(tmp_path / "run"), COMPRESSION_METHODS[0])
    assert (mine / "thesis.txt").read_text() == "mine"


def wide(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in line)


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_fit_a_terminal(compressed: dict[str, CompressedTranslator], name: str):
    page = before_after.format_comparison(compressed[name].data)
    assert max(map(wide, page.splitlines())) <= 80
    assert (
        str(compressed[name].folder / "PROOF.md") in " ".join(page.split()).replace("- ", "-")
        or len(str(compressed)) > 80
    )
    for number in (
        "before",
        "compressed",
        "retrained",
        "exact match",
        "cache per token",
        "decode, tokens/s",
    ):
        assert number in page


def test_the_report_holds_every_page_and_number(
    translator: Translator, compressed: dict[str, CompressedTranslator]
):
    story = TrainingDemo(translator.folder, translator.recipe, SMALL)
    path = story.report(
        [("Soft look-up", "1 < 2"), *((one.change.title, "as text") for one in compressed.values())]
    )
    page = path.read_text()
    assert path == translator.folder / "report.html"
    assert "1 &lt; 2" in page
    assert "as text" not in page
    for one in compressed.values():
        for line in before_after.comparison_rows(one.data):
            assert "".join(f"<td>{cell}</td>" for cell in line) in page
        assert before_after.change_verdict(one.data) in page
    assert "http" not in page  # nothing is fetched
    xml.dom.minidom.parseString(
        page[page.index("<body>") : page.index("</html>")]
    )  # every tag is closed


@pytest.mark.parametrize(
    ("lost", "value"),
    [(0.0, "at most one"), (0.01, "at most one"), (0.02, "MORE"), (-0.01, "at most one")],
)
def test_the_verdict_is_honest(lost: float, value: str):
    row = {
        "name": SCORE_NAME,
        "change": {"value": -lost, "low": -lost - 0.01, "high": -lost + 0.01},
    }
    verdict = before_after.change_verdict(
        {"cut": {"name": SCORE_NAME}, "proof": {"quality": {"rows": [row]}}}
    )
    assert f"That is {value} " in verdict
    assert (
        f"lost: {100 * lost:.1f} points (95% interval: {100 * lost - 1:.1f} to "
        f"{100 * lost + 1:.1f})"
    ) in verdict


def test_progress_is_printed_as_lines_without_a_terminal():
    string_io = io.StringIO()
    retraining_progress = RetrainingProgress("pruned", 300, string_io)
    for step in (0, 1, 2, 300):
        retraining_progress.report_step(RetrainingPoint(step, 0.5 if step else None))
    assert string_io.getvalue().splitlines()[0] == "pruned: step 0 of 300"
    assert [line.split(",")[0] for line in string_io.getvalue().splitlines()] == [
        "pruned: step 0 of 300",
        "pruned: step 300 of 300",
    ]


def test_counts_are_printed_at_intervals_without_a_terminal():
    string_io = io.StringIO()
    progress = RetrainingProgress("pruned", 300, string_io)
    progress.report_stage("ranking heads")
    for message in [CountedMessage("ranking heads", number, 64, "texts") for number in range(64)]:
        progress.report_stage(message)
    assert string_io.getvalue() == "pruned: ranking heads\n"


def test_the_numbers_are_plain_values(compressed: dict[str, CompressedTranslator]):
    for one in compressed.values():
        assert json.loads(json.dumps(one.data)) == one.data


@pytest.mark.slow
def test_half_of_the_heads_go_for_a_point_and_keys_are_shared_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The demo as it is: a translator of its own, half of 24 heads, one head of keys and values for
    four.
    """
    monkeypatch.setattr(translator_module, "RETRAINING", RETRAINING)
    learned = Translator(tmp_path / "run", RECIPE)
    assert learned.result.metrics[SCORE_NAME] >= 0.98
    for change in COMPRESSION_METHODS:
        data = CompressedTranslator(learned, change).data
        row = before_after.exact_match_rows(data)
        assert row["before"]["value"] - row["after"]["value"] <= before_after.SIGNIFICANT_CHANGE, (
            change.name,
            row,
        )
        assert data["cut"]["after"]["value"] < 0.5  # it is learning that brings it back
