"""Findings on a Chinese-English translator: `python tools/chinese_english_findings.py RUN TREEBANK`
writes two pages.

RUN is a run of the task parallel with the recipe docs/findings/chinese-english.toml, and TREEBANK
is zh_hk-ud-test.conllu of UD_Chinese-HK. The pages docs/findings/chinese-english.md and
chinese-english.zh.md have commands and their outputs. Words are aligned by eflomal and Chinese
words found by jieba: `pip install eflomal jieba`. It takes about half an hour. "What was found" is
written by a person in chinese_english_pages.toml; write it anew for another run.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from head_findings import FINDINGS, run_command, without_figures
from headwise.data import open_data
from headwise.data.translation import SentencePair, normalise_sentence

CORPUS = "../shared/data/tatoeba_cmn_eng/cmn.txt"
TASK = {
    "columns": (2, 1),
    "vocabularies": "separate",
    "vocab": 6000,
    "split_by": "sources",
}  # of the stored run
LONGEST_SENTENCE = (
    16  # words of the treebank's sentences, because the translator was trained on short ones
)
ALIGNED_PAIRS = 400
ENGLISH_TOKENS = re.compile(
    r"\w+(?:'\w+)?|[^\w\s]"
)  # of an English word between spaces, for the aligner
SWEEP = (
    "--sweep --data valid.tsv --limit 150 --points 0.9,0.75,0.6,0.45,0.3,0.2,0.1 --gates 150 "
    "--random-orders 3 "
    "--sample 40 --answers leave-one-out"
)
COMMANDS = {
    "score": ("run", "RUN --beams 5 --score test.en < test.zh"),
    "alignment": (
        "heads",
        "RUN --align words.zh words.en links.txt --importance leave-one-out --redundancy",
    ),
    "syntax": ("heads", "RUN --conllu zh_hk-ud-test.conllu --random-baseline"),
    "voita": ("heads", "RUN --conllu zh_hk-ud-test.conllu --criteria voita"),
    "pruning": ("prune", f"RUN {SWEEP}"),
}
PAGES = tomllib.loads(
    Path(__file__).with_name("chinese_english_pages.toml").read_text(encoding="utf-8")
)


def main(argv: Sequence[str]) -> int:
    """Write the held-out data, run every command, and write the pages."""
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_held_out_pairs(folder)
        treebank = short_sentences(Path(argv[1]).read_text(encoding="utf-8"))
        (folder / "zh_hk-ud-test.conllu").write_text(treebank, encoding="utf-8")
        places = {path.name: str(path) for path in folder.iterdir()}
        places |= {"RUN": argv[0], "curves": str(folder / "curves")}
        outputs = {"score": score(folder, argv[0])}
        for kind in ("alignment", "syntax", "voita"):
            verb, options = COMMANDS[kind]
            outputs[kind] = run_command(verb, options.split(), places)
        for language, template in PAGES.items():
            if "pruning" not in outputs:
                run_command("prune", [*COMMANDS["pruning"][1].split(), "--out", "curves"], places)
                report = without_figures(
                    (folder / "curves" / "CURVES.md").read_text(encoding="utf-8")
                )
                outputs["pruning"] = report.replace("## ", "### ").strip()
            commands = {
                kind: f"    headwise {verb} {options}" for kind, (verb, options) in COMMANDS.items()
            }
            page = template.format(commands=commands, longest=LONGEST_SENTENCE, **outputs)
            suffix = "" if language == "en" else f".{language}"
            (FINDINGS / f"chinese-english{suffix}.md").write_text(page, encoding="utf-8")
    return 0


def write_held_out_pairs(folder: Path) -> None:
    """Write the held-out pairs whose English sentence is in no training pair, and word alignments
    of the test pairs.
    """
    pairs: dict[str, list[SentencePair]] = open_data(f"parallel:{CORPUS}", TASK).data.pairs
    known = {normalise_sentence(pair.target) for pair in pairs["train"]}
    valid, test = (
        [pair for pair in pairs[split] if normalise_sentence(pair.target) not in known]
        for split in ("valid", "test")
    )
    for split in (valid, test):
        random.Random(0).shuffle(split)  # the corpus is sorted by length
    (folder / "valid.tsv").write_text(
        "".join(f"{pair.source}\t{pair.target}\n" for pair in valid), encoding="utf-8"
    )
    for name, side in (
        ("test.zh", [pair.source for pair in test]),
        ("test.en", [pair.target for pair in test]),
    ):
        (folder / name).write_text("".join(f"{text}\n" for text in side), encoding="utf-8")
    aligned = [pair for pair in test if 4 <= len(chinese_words(pair.source)) <= 20][:ALIGNED_PAIRS]
    links = align([*aligned, *pairs["train"]])[: len(aligned)]
    (folder / "words.zh").write_text(
        "".join(f"{' '.join(chinese_words(p.source))}\n" for p in aligned), "utf-8"
    )
    (folder / "words.en").write_text(
        "".join(f"{pair.target}\n" for pair in aligned), encoding="utf-8"
    )
    (folder / "links.txt").write_text("".join(f"{line}\n" for line in links), encoding="utf-8")


def chinese_words(sentence: str) -> list[str]:
    """The words that jieba finds."""
    import jieba

    return [word for word in jieba.cut(sentence) if word.strip()]


def align(pairs: Sequence[SentencePair]) -> list[str]:
    """Links between Chinese words and English words of each pair: sure (1-2) in both of eflomal's
    directions, possible (1?2) in one of them.
    """
    tokens = [[ENGLISH_TOKENS.findall(word) for word in pair.target.split()] for pair in pairs]
    with tempfile.TemporaryDirectory() as name:
        files = {key: Path(name, key) for key in ("source", "target", "forward", "backward")}
        sources = "".join(f"{' '.join(chinese_words(pair.source))}\n" for pair in pairs)
        files["source"].write_text(sources, encoding="utf-8")
        targets = (" ".join(token for word in words for token in word).lower() for words in tokens)
        files["target"].write_text("".join(f"{text}\n" for text in targets), encoding="utf-8")
        options = [
            "-s",
            files["source"],
            "-t",
            files["target"],
            "-f",
            files["forward"],
            "-r",
            files["backward"],
        ]
        subprocess.run(["eflomal-align", *map(str, options), "--overwrite"], check=True)
        directions = [
            files[key].read_text(encoding="utf-8").splitlines() for key in ("forward", "backward")
        ]
    lines = []
    for words, *found in zip(tokens, *directions, strict=True):
        word_of_token = [n for n, word in enumerate(words) for _ in word]
        forward, backward = (
            {link_words(link, word_of_token) for link in line.split()} for line in found
        )
        sure = sorted(forward & backward)
        possible = sorted((forward | backward) - {*sure})
        lines.append(" ".join([*(f"{s}-{t}" for s, t in sure), *(f"{s}?{t}" for s, t in possible)]))
    return lines


def link_words(link: str, word_of_token: Sequence[int]) -> tuple[int, int]:
    """The source word and the target word of a link between a source word and a target token."""
    source, target = map(int, link.split("-"))
    return source, word_of_token[target]


def short_sentences(treebank: str) -> str:
    """The sentences of a treebank with at most `LONGEST_SENTENCE` words."""
    sentences = treebank.strip().split("\n\n")
    short = [
        s for s in sentences if len(re.findall(r"^\d+\t", s, re.MULTILINE)) <= LONGEST_SENTENCE
    ]
    return "\n\n".join(short) + "\n\n"


def score(folder: Path, run: str) -> str:
    """The output of the command that translates the test sentences, without the translations."""
    command = [
        sys.executable,
        "-m",
        "headwise",
        "run",
        run,
        "--beams",
        "5",
        "--score",
        str(folder / "test.en"),
    ]
    with (folder / "test.zh").open(encoding="utf-8") as sources:
        ran = subprocess.run(command, stdin=sources, capture_output=True, text=True, check=True)
    return "\n".join(line for line in ran.stderr.splitlines() if line.startswith(("BLEU", "chrF")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
