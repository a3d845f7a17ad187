"""Pages of findings in docs/findings, made from runs.

python tools/findings.py heads DATES TRANSLATOR [PAGE...]
    Analyses of models, each a command and its output. DATES is a run of the task dates, TRANSLATOR
    one of the task parallel on Multi30k, German to English; stories260K, the parsed sentences and
    the pairs are read from ../shared/data. Pages of larger models are made in studies/pages.
python tools/findings.py studies RUNS NAME...
    Writes study-NAME.md with figures. RUNS is the folder of the runs; that of studies/NAME.toml is
    in RUNS/NAME, at the scale "page", or the one in `SCALES`. Cells without a result there or in
    studies/cells/NAME.jsonl.gz are trained, so that an interrupted run goes on. The verdict follows
    from what the study file expects; that of an older study, which a person wrote after reading its
    numbers, is in docs/findings/verdicts.toml.
python tools/findings.py cells RUNS NAME...
    Stores the finished cells of RUNS/NAME in studies/cells/NAME.jsonl.gz; nothing is trained.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.report import plots, render
from headwise.report.data import Axis, Figure, Plot, Series
from headwise.studies.cells import CellGrid
from headwise.studies.process_engine import ProcessEngine
from headwise.studies.run_cell import read_result, write_result
from headwise.studies.seed_statistics import draw_differences, draw_lengths
from headwise.studies.study_file import Study, read_study
from headwise.studies.study_report import (
    StudyReport,
    describe_protocol,
    tabulate_decoding,
    write_report,
)
from headwise.studies.study_runner import CELLS_FOLDER, STUDY_FILE, run_study
from headwise.util.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "studies" / "pages")]
from finding_page import picture  # noqa: E402

from support.stories_model import write_stories_folder  # noqa: E402

# --- Heads ---------------------------------------------------------------------------------------

DATA = Path("../shared/data")
PARSED = DATA / "ud_english_ewt" / "en_ewt-ud-dev.conllu"
PAIRS = DATA / "multi30k"
WIDTH = 120  # of the prose of a page

FINDINGS = ROOT / "docs" / "findings"
CURVES = ROOT / "build" / "curves"  # with figures, which are not in the repository
PAGES = {
    "stories260k": (
        "Heads of stories260K",
        "This page shows what each head of a small language model attends to, and which heads "
        "matter most for its "
        "loss, as an example of the report of the command [heads](../heads.md). The model is "
        "stories260K of llama2.c "
        "(5 layers of 8 heads, trained on short stories); the inputs are 200 sentences of the "
        "treebank UD English EWT, "
        "dev. The random baseline is a randomly initialised model of the same architecture.",
        [
            "stories260K",
            "--conllu",
            PARSED.name,
            "--limit",
            "200",
            "--importance",
            "leave-one-out",
            "--redundancy",
            "--random-baseline",
        ],
        "The sentences are not stories, so they differ from the training data. Importance is "
        "measured by ablating one "
        "head at a time; it does not show what happens if several heads are removed.",
    ),
    "dates": (
        "Heads of a translator of dates and amounts",
        "This page shows what each head of an encoder-decoder attends to, as an example of the "
        "report of the command "
        "[heads](../heads.md) for examples with known alignments. `headwise train dates --steps 800 --lr 0.003` trains "
        "the model "
        "(2 + 2 layers of 4 heads) in a few minutes; the inputs are 200 held-out examples of the "
        "task "
        "[dates](../tasks.md#dates) with their alignments. The random baseline is a randomly "
        "initialised model of the "
        "same architecture.",
        [
            "DATES",
            "--task",
            "dates",
            "--limit",
            "200",
            "--importance",
            "leave-one-out",
            "--redundancy",
            "--random-baseline",
        ],
        "The page describes one model from one seed. Another training run gives other heads other "
        "functions; the "
        "alignment heads in cross-attention were found in both runs that were measured.",
    ),
}
SWEEP = [
    "TRANSLATOR",
    "--sweep",
    "--data",
    "val.tsv",
    "--limit",
    "150",
    "--points",
    "0.9,0.75,0.6,0.45,0.3,0.2,0.1",
    "--gates",
    "150",
    "--random-orders",
    "3",
    "--sample",
    "40",
    "--answers",
    "leave-one-out",
]
SECTION = re.MULTILINE | re.DOTALL
ABOUT = """# Pruning the heads of a translator, German to English

This page shows how the quality of a translator changes as its heads are removed
in several orders, as an example of the report of the command
[prune --sweep](../surgery.md#pruning). It tests the claims of two papers.

{about}

Voita et al. (1905.09418) claim that most heads of the encoder can be removed,
that specialised heads are kept longest, and that heads of the encoder can be
removed first and heads of cross-attention last. Michel et al. (1905.10650) claim
that many heads can be removed, and that cross-attention needs its heads most.
Their models are wider and were trained on more data.

Limits: there is one model from one seed, so intervals are over texts, not over
training runs. The model has the width 128. It was not retrained after pruning,
unlike in Voita et al., and the gates were trained with the model frozen. The
texts were not parsed, so no head is classified as syntactic. The texts are
captions: `val.tsv` has the held-out pairs of Multi30k, with a tab between German
and English.

    headwise prune {command}

"""


def write_head_findings(argv: list[str]) -> int:
    """Run every command and write its page."""
    if len(argv) < 2 or set(argv[2:]) - {*PAGES, "translator"}:
        print(__doc__, file=sys.stderr)
        return 2
    stories = Path(tempfile.mkdtemp()) / "stories260K"
    places = {
        "DATES": argv[0],
        "TRANSLATOR": argv[1],
        PARSED.name: str(PARSED),
        "stories260K": str(write_stories_folder(DATA / "model_stories260k", stories)),
    }
    FINDINGS.mkdir(exist_ok=True)
    for name, (title, about, words, limits) in PAGES.items():
        if name in (argv[2:] or PAGES):
            (FINDINGS / f"{name}.md").write_text(
                format_page(title, about, words, run_command("heads", words, places), limits)
            )
            print(name)
    if "translator" in (argv[2:] or ["translator"]):
        (FINDINGS / "translator.md").write_text(translator(places))
        print("translator")
    return 0


def format_page(title: str, about: str, words: list[str], output: str, limits: str) -> str:
    """Return a page: its purpose, a command, the output of this command, and limits."""
    note = (
        "The letters of the grid are explained under [classes](../heads.md#classes), and the last "
        "paragraphs of the "
        "output under [redundancy](../heads.md#redundancy)."
    )
    return (
        f"# {title}\n\n{textwrap.fill(about, WIDTH)}\n\n    headwise heads {' '.join(words)}\n\n"
        f"```text\n{output}\n```\n\n{textwrap.fill(note, WIDTH)}\n\n## "
        f"Limits\n\n{textwrap.fill(limits, WIDTH)}\n"
    )


def run_command(verb: str, words: list[str], places: dict[str, str]) -> str:
    """Return the output of a command."""
    command = [sys.executable, "-m", "headwise", verb, *(places.get(word, word) for word in words)]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"NO_COLOR": "1"}
    )
    return ran.stdout.rstrip()


def translator(places: dict[str, str]) -> str:
    """Return the report of a pruning sweep without its figures, which stay in build/curves."""
    with tempfile.TemporaryDirectory() as folder:
        pairs, out = Path(folder, "val.tsv"), CURVES
        shutil.rmtree(out, ignore_errors=True)
        texts = [
            gzip.decompress((PAIRS / f"val.{code}.gz").read_bytes()).decode().splitlines()
            for code in ("de", "en")
        ]
        pairs.write_text(
            "".join(f"{de}\t{en}\n" for de, en in zip(*texts, strict=True)), encoding="utf-8"
        )
        run_command(
            "prune",
            [*SWEEP, "--out", "curves"],
            places | {"val.tsv": str(pairs), "curves": str(out)},
        )
        page = (out / "CURVES.md").read_text(encoding="utf-8")
    readme = Path(places["TRANSLATOR"], "README.md").read_text(encoding="utf-8")
    model = re.search(r"^A model of kind [^:]*: (.*)\.$", readme, re.MULTILINE)
    trained = re.search(r"^[\d,]+ steps .*$", readme, re.MULTILINE)
    loss, accuracy = (
        re.search(rf"^\| {name} \| ([\d.]+)", readme, re.MULTILINE) for name in ("loss", "accuracy")
    )
    planned = re.search(r"^steps = (\d+)", readme, re.MULTILINE)
    if not (planned and model and trained and loss and accuracy):
        raise SystemExit(
            f"{places['TRANSLATOR']}/README.md has no record of the training; give a folder that "
            "headwise train wrote"
        )
    command = (
        " ".join(SWEEP)
        .replace(" --points", " \\\n        --points")
        .replace(" --random-orders", " \\\n        --random-orders")
    )
    about = (
        f"The model: {model[1]}, with 8 heads in every attention layer. It was trained on "
        f"Multi30k, with {planned[1]} "
        f"steps planned: {trained[0]} On held-out pairs, with teacher forcing, its loss was "
        f"{loss[1]} and its "
        f"accuracy {accuracy[1]}."
    )
    about = ABOUT.format(about=textwrap.fill(about, 80), command=command)
    return with_picture(about + without_figures(page))


def with_picture(page: str) -> str:
    """Draw the loss of the tables of a page by the heads that are left, and put the picture before
    the findings.
    """
    panels: list[Plot] = []
    for title, section in re.findall(r"^## ([^\n]* heads(?: alone)?)$(.*?)(?=^## )", page, SECTION):
        orders = re.findall(r"^([\w-]+)(?:, [^:]*)?:\n\n((?:\|.*\n)+)", section, re.MULTILINE)
        lines = [draw_losses(*order) for order in orders]
        panels.append(Plot(lines, Axis("heads kept"), Axis("rise of the loss"), title=title))
    figure = Figure("Loss of the translator without some of its heads", panels)
    shown = picture(figure, "translator-sweep", "Rise of the loss by the heads that are kept")
    caption = (
        "The rise of the loss in the tables below, with their intervals (of random: the range)."
    )
    place = page.index("## Findings")
    return f"{page[:place]}{shown}\n\n{caption}\n\n{page[place:]}"


def draw_losses(order: str, table: str) -> Series:
    """Return the line of one table: heads kept, and the rise of the loss with its interval."""
    number = r"([-+][\d.]+)"
    rows = re.findall(rf"^\| (\d+) +\| +{number} \({number}, {number}\)", table, re.MULTILINE)
    kept, rise, lows, highs = ([float(row[n]) for row in rows] for n in range(4))
    colour = "muted" if order == "random" else ""
    return Series(order, kept, rise, lows, highs, marker=".", colour=colour)


def without_figures(page: str) -> str:
    """Return the sections of a report that have numbers."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    with_numbers = [
        section
        for section in sections[1:]
        if not section.startswith(("## Figures", "## How to reproduce"))
    ]
    notes = sections[-1][sections[-1].index("\n- ") + 1 :]
    return f"{''.join(with_numbers)}## Notes\n\n{notes}"


# --- Studies -------------------------------------------------------------------------------------

SCALE, JOBS = "page", 1
SCALES = {"variants": "small"}  # studies whose page is made at another scale
ABOUT_DECODING = ("attention-vs-rnn-vs-conv",)  # studies whose page shows decode times
STUDY_PAGE = """# Study: {name}

{hypothesis}

{verdict}

## What can be claimed

{claims}

{figures}

## What was not tested

{limits}

## Results

{tables}

## Protocol and environment

    headwise study studies/{name}.toml --scale {scale} --jobs {jobs} --out RUNS/{name}
    python tools/findings.py studies RUNS {name}

{protocol}
"""
LIMITS = (
    "The models are small ({parameters} parameters) and are trained for {steps} steps on {tasks}: "
    "what is shown holds "
    "for this size and this task. What is not significant may become so with more seeds or longer "
    "training. "
    "[Studies](../studies.md) explains the protocol, and [{name}](../../studies/{name}.toml) is "
    "the study file."
)


def store_cells(name: str, runs: Path) -> Path:
    """Write the finished cells of a run to one packed file, with equal bytes for equal cells."""
    path = ROOT / "studies" / CELLS_FOLDER / f"{name}.jsonl.gz"
    grid = CellGrid(read_study(ROOT / "studies" / f"{name}.toml", SCALES.get(name, SCALE)))
    cells = grid.tuning_cells()
    for variant, task in grid.pairs:
        for rate in grid.rates(variant, task):
            cells += [grid.cell(variant, task, rate, seed) for seed in grid.study.seeds]
    lines: list[str] = []
    for id in sorted(cell.id for cell in cells):
        result = read_result(runs / name / CELLS_FOLDER / id)
        if result is not None:
            lines.append(json.dumps({"id": id, "result": result}, sort_keys=True) + "\n")
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, gzip.compress("".join(lines).encode(), mtime=0))
    print(f"{path.relative_to(ROOT)}: {len(lines)} cells")
    return path


def restore_cells(name: str, runs: Path) -> None:
    """Write stored cells to the folder of a run, where they are not trained again."""
    path = ROOT / "studies" / CELLS_FOLDER / f"{name}.jsonl.gz"
    if path.exists() and not (runs / name / STUDY_FILE).exists():
        (runs / name).mkdir(parents=True, exist_ok=True)
        write_atomically(runs / name / STUDY_FILE, json.dumps({"study": name}).encode() + b"\n")
    for line in gzip.decompress(path.read_bytes()).splitlines() if path.exists() else ():
        cell = json.loads(line)
        folder = runs / name / CELLS_FOLDER / cell["id"]
        if read_result(folder) is None:
            write_result(folder, cell["result"])


def write_page(name: str, runs: Path) -> Path:
    """Write the page of one study from its run and its stored cells; returns its path."""
    study = read_study(ROOT / "studies" / f"{name}.toml", SCALES.get(name, SCALE))
    restore_cells(name, runs)
    results = run_study(
        study, runs / name, ProcessEngine(JOBS), progress=lambda line: print(line, file=sys.stderr)
    )
    report = write_report(results, runs / name)
    is_judged = any(contrast.expected for contrast in study.contrasts)
    verdicts = tomllib.loads((FINDINGS / "verdicts.toml").read_text(encoding="utf-8"))
    verdict = " ".join(report.verdict.sentences) if is_judged else verdicts[name]
    tables = [table for task in study.tasks.values() for table in report.tables(task)]
    if name in ABOUT_DECODING and report.decoding.get("variants"):
        tables.append(tabulate_decoding(report.decoding))
    page = STUDY_PAGE.format(
        name=name,
        scale=study.scale,
        jobs=JOBS,
        hypothesis=_fill(f"**Hypothesis, stated before the runs.** {study.hypothesis}"),
        verdict=_fill(
            f"**Verdict, {'by rules' if is_judged else 'written after them'}.** {verdict}"
        ),
        claims=_list(report.claims),
        figures="\n\n".join(_write_figures(report)),
        limits=_list(_list_limits(report)),
        tables="\n\n".join(render.to_markdown(table, level=3) for table in tables),
        protocol=_list([*report.failures, *describe_protocol(report)]),
    )
    seeds: dict[str, dict[str, list[float]]] = {}  # differences, which the tables do not have
    for (compared, task), one in report.comparisons.items():
        label = f"{compared} minus {study.baseline}" if compared in study.variants else compared
        seeds.setdefault(task, {})[label] = [round(value, 4) for value in one.pairs]
    write_atomically(FINDINGS / f"study-{name}-seeds.json", json.dumps(seeds).encode() + b"\n")
    path = FINDINGS / f"study-{name}.md"
    path.write_text(page, encoding="utf-8")
    return path


def _write_figures(report: StudyReport) -> Iterator[str]:
    """Write the figures of the page beside it; yields the lines that show them."""
    results, name = report.results, report.results.study.name
    for task in results.study.tasks.values():
        scores = {variant: report.scores[variant, task.name] for variant in results.study.variants}
        drawings = {
            "differences": draw_differences(results, task, report.comparisons),
            "lengths": draw_lengths(results, task, scores),
        }
        for kind, figures in drawings.items():
            for figure in figures:
                file = f"study-{name}-{task.name}-{kind}.svg"
                write_atomically(FINDINGS / file, plots.to_svg(figure).encode())
                yield f"![{figure.title}]({file})\n\n{_fill(figure.title)}"


def _list_limits(report: StudyReport) -> Iterator[str]:
    """What the page does not show: the size of its models, and what the scale leaves out of the
    study file.
    """
    study, grid = report.results.study, report.results.grid
    full = read_study(ROOT / "studies" / f"{study.name}.toml")
    sizes = [model.parameters for model in grid.models.values()]
    steps = [recipe.steps for recipe in grid.recipes.values()]
    yield LIMITS.format(
        name=study.name,
        tasks=", ".join(study.tasks),
        parameters=" to ".join(dict.fromkeys((f"{min(sizes):,}", f"{max(sizes):,}"))),
        steps=" to ".join(dict.fromkeys((f"{min(steps):,}", f"{max(steps):,}"))),
    )
    for kind, before, after in _left_out(full, study):
        if missing := [one for one in before if one not in after]:
            yield (
                f"{kind} of the study file that were left out at this scale: {', '.join(missing)}."
            )
    given, tried = full.recipe.get("lr", ()), study.recipe.get("lr", ())
    if len(given) > 1 and len(tried) == 1:
        rates = ", ".join(f"{rate:g}" for rate in given)
        yield (
            f"A single learning rate, {tried[0]:g}, although the study file tries {rates} "
            "for each variant."
        )


def _left_out(
    full: Study, study: Study
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    yield "Tasks", full.tasks, study.tasks
    yield "Variants", full.variants, study.variants
    yield "Edits", full.edits, study.edits
    for name, task in study.tasks.items():
        yield f"Tests on {name}", full.tasks[name].tests, task.tests


def _fill(text: str) -> str:
    return "\n\n".join(textwrap.fill(part, 118) for part in text.strip().split("\n\n"))


def _list(lines: Iterable[str]) -> str:
    return "\n".join(textwrap.fill(f"- {line}", 118, subsequent_indent="  ") for line in lines)


def write_study_findings(argv: list[str]) -> int:
    """Write the pages of the studies that are named."""
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    for name in argv[1:]:
        print(write_page(name, Path(argv[0])))
    return 0


def store_study_cells(argv: list[str]) -> int:
    """Store the finished cells of the studies that are named."""
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    for name in argv[1:]:
        store_cells(name, Path(argv[0]))
    return 0


# --- Command --------------------------------------------------------------------------------------

COMMANDS = {
    "heads": write_head_findings,
    "studies": write_study_findings,
    "cells": store_study_cells,
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
