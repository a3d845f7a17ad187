"""The tour of the bundled sample: pages that fit a terminal, right numbers, and a report."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.learn import sample_tour
from headwise.learn.language import use_language
from headwise.learn.sample_tour import (
    TEXTS,
    Tour,
    TourScale,
    compare_models,
    describe_classes,
    describe_sample,
    run_sample_tour,
)
from headwise.observe.bundled_sample import SOURCE, load_sample_model
from headwise.report.data import Figure
from headwise.report.render import to_text
from headwise.report.text import text_width
from headwise.util.errors import SpecError

pytestmark = pytest.mark.usefixtures("unrendered_figures")

SMALL = TourScale(
    num_importance_texts=6,
    num_selection_texts=8,
    num_distillation_texts=96,
    num_verification_texts=4,
    num_scored_examples=4,
    steps=4,
    seconds=0.05,
)


class Page(HTMLParser):
    """The tags of a page, with how many of each there are, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert not [name for name, _ in attrs if name == "src" or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def shown() -> list[str]:
    return []


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory, shown: list[str]) -> Tour:
    return run_sample_tour(shown.append, shown.append, tmp_path_factory.mktemp("tour"), SMALL)


def test_pages_fit_a_terminal_and_end_with_the_page(tour: Tour, shown: list[str]):
    own = str(tour.folder)
    lines = [line for text in shown for line in text.replace(own, "FOLDER").splitlines()]
    assert [line for line in lines if text_width(line) > 80] == []
    assert [text.split()[0] for text in shown if re.match(r"\d  ", text)] == ["1", "2", "3", "4"]
    assert "headwise view" in shown[-1]
    assert str(tour.folder / "report.html") in shown[-2]


def test_the_first_page_is_a_picture_and_needs_no_model(tmp_path, monkeypatch):
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sample_tour, "load_sample_model", stop)
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_sample_tour(lines.append, lines.append, tmp_path, SMALL)
    assert "█" in lines[2]
    page = Page((tmp_path / "sample" / "report.html").read_text(encoding="utf-8"))
    assert page.counts["svg"] >= 3


def test_the_ablated_head_is_the_one_that_matters_most(tour: Tour):
    """The translations without the head are those of a model whose weights of
    that head are zero.
    """
    ablation = tour.ablation
    assert ablation is not None
    assert ablation["low"] <= ablation["value"] <= ablation["high"]
    net = load_sample_model()
    with torch.no_grad():
        w_DHV = dict(net.named_parameters())[f"{ablation['site']}.output.o"]
        w_DHV[:, 16 * ablation["head"] : 16 * (ablation["head"] + 1)].zero_()
    without = [after for _, _, after in ablation["outputs"]]
    assert hw.generate(net, [source for source, _, _ in ablation["outputs"]]) == without


def test_half_of_the_heads_are_removed_and_verified(tour: Tour):
    assert tour.pruning is not None
    keep = sum(map(len, tour.pruning["keep"].values()))
    assert (keep, sum(tour.pruning["head_counts"].values())) == (27, 54)
    assert tour.pruning["verification"]["holds"]
    sizes = [
        sum(p.numel() for p in net.parameters())
        for net in (load_sample_model(), hw.load(tour.folder / "pruned"))
    ]
    assert sizes[1] < 0.8 * sizes[0]
    assert json.loads((tour.folder / "pruned" / "verification.json").read_text())["holds"]
    json.dumps(tour.data)


def test_the_report_has_pictures_and_no_scripts(tour: Tour):
    page = Page((tour.folder / "report.html").read_text(encoding="utf-8"))
    assert page.counts["svg"] >= 3
    assert not {"script", "img"} & set(page.counts)
    for text in (SOURCE, "One head ablated", "Half of the heads pruned"):
        assert text in page.text


ENGLISH_NAMES = (
    r"(en|de)coder\.\d\.(attention|cross)|<begin>|AER|dollars|michel|\S*VERIFICATION\.md"
)


def test_sections_in_chinese_have_no_english_words(tour: Tour):
    """The fourth section has the numbers of the English tour; file names and tokens stay."""
    chinese = Tour(tour.folder, "zh")
    assert tour.pruning is not None
    with use_language("zh"):
        sections = [describe_sample(chinese), describe_classes(chinese)]
        items = [item for section in sections for item in section.items]
        items += compare_models(chinese, tour.pruning)
    texts = [to_text(item) for item in items]
    texts += [item.note for item in items if isinstance(item, Figure)]
    assert len(texts) > 9
    english = [re.sub(ENGLISH_NAMES, "", " ".join(text.split())) for text in texts]
    assert [text for text in english if re.search("[A-Za-z]{3}", text)] == []


@pytest.mark.slow
def test_the_quick_tour_in_chinese_prunes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts: list[str] = []
    tour = run_sample_tour(texts.append, texts.append, tmp_path, SMALL, language="zh", quick=True)
    assert tour.pruning is None
    assert not (tour.folder / "pruned").exists()
    assert texts[0] == f"1  {TEXTS['sample'][1]}"
    page = (tour.folder / "report.html").read_text(encoding="utf-8")
    assert '<html lang="zh"' in page
    assert TEXTS["ablated"][1] in page


def test_texts_have_the_same_values_in_both_languages():
    for english, chinese in TEXTS.values():
        fields = [set(re.findall(r"\{(\w+)", text)) for text in (english, chinese)]
        assert fields[1] <= fields[0]


def test_a_folder_with_other_contents_is_left_alone(tmp_path: Path):
    other = tmp_path / "sample" / "pruned"
    other.mkdir(parents=True)
    (other / "notes.txt").write_text("mine")
    with pytest.raises(SpecError):
        run_sample_tour(lambda _: None, lambda _: None, tmp_path, SMALL)
    assert (other / "notes.txt").read_text() == "mine"


def test_a_second_tour_replaces_the_first(tour: Tour):
    sample_tour.check_output_folder(tour.folder / "pruned")
    assert (tour.folder / "pruned").exists()  # until the new one is complete
