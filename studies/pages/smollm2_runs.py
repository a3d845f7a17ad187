"""Measurements of the page smollm2: texts, induction, importance, pruning and conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from finding_page import HeadId, ResultStore, draw_others, members, site_of
from tokenizers import Tokenizer
from torch import Tensor

import headwise as hw
from headwise.observe.head_analysis.head_redundancy import RedundancyOptions
from headwise.observe.head_analysis.retrieval_heads import measure_retrieval
from headwise.surgery.verification.efficiency import TimingOptions, compare_cost, compare_speed

METHODS = ("leave-one-out", "michel", "taylor")


class Sizes(NamedTuple):
    """How much each part of the page reads."""

    tokens: int = 64  # of a text for evaluation
    evaluation: int = 12  # texts of each source
    short: int = 32  # tokens of a text for importance, redundancy and distillation
    ranking: int = 8  # texts of each source, for importance, and as many for redundancy
    distillation: int = 120  # texts of each source
    repeated: int = 12  # texts of random tokens
    period: int = 32  # random tokens before the repetition
    draws: int = 3  # random choices of heads
    shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    steps: int = 25  # of distillation
    batch: int = 4


class TextRows(NamedTuple):
    """Texts of equal length as ids [texts, tokens], for one use, and the lines they come from."""

    ids: Tensor
    sources: tuple[str, ...]

    @property
    def texts(self) -> list[Tensor]:
        """Each text as ids [tokens]."""
        return list(self.ids)


class LineReader:
    """Cuts texts of equal length from the lines of a file, one after another."""

    def __init__(self, name: str, lines: Sequence[str], tokenizer: Tokenizer) -> None:
        self.name = name
        self.lines = lines
        self.tokenizer = tokenizer
        self.next_line = 0

    def take(self, count: int, tokens: int) -> tuple[Tensor, str]:
        """Return ids [count, tokens] and the numbers of the lines that they come from."""
        first = self.next_line
        ids: list[int] = []
        while len(ids) < count * tokens:
            ids += self.tokenizer.encode(self.lines[self.next_line] + "\n").ids
            self.next_line += 1
        span = f"{self.name} {first + 1} to {self.next_line}"
        return torch.tensor(ids[: count * tokens]).view(count, tokens), span


def read_rows(data: Path, tokenizer: Tokenizer, sizes: Sizes) -> dict[str, TextRows]:
    """Return the texts of each use; no line has two uses."""
    parsed = (data / "ud_english_ewt/en_ewt-ud-dev.conllu").read_text().splitlines()
    sentences = [line.removeprefix("# text = ") for line in parsed if line.startswith("# text = ")]
    plays = (data / "tinyshakespeare/input.txt").read_text().splitlines()
    readers = (
        LineReader("tinyshakespeare, lines", plays, tokenizer),
        LineReader("UD English EWT dev, sentences", sentences, tokenizer),
    )
    uses = {
        "evaluation": (sizes.evaluation, sizes.tokens),
        "ranking": (sizes.ranking, sizes.short),
        "redundancy": (sizes.ranking, sizes.short),
        "distillation": (sizes.distillation, sizes.short),
    }
    rows: dict[str, TextRows] = {}
    for use, size in uses.items():
        ids, spans = zip(*(reader.take(*size) for reader in readers), strict=True)
        rows[use] = TextRows(torch.cat(ids), spans)
    return rows


# --- Losses ---------------------------------------------------------------------------------------


@torch.inference_mode()
def token_losses(net: Any, ids: Tensor) -> Tensor:
    """Return the loss of each next token, [texts, tokens - 1]."""
    losses: list[Tensor] = []
    for batch in ids.split(4):
        logits = net(batch)[:, :-1].flatten(0, 1).float()
        targets = batch[:, 1:].flatten()
        losses.append(F.cross_entropy(logits, targets, reduction="none").view(len(batch), -1))
    return torch.cat(losses)


def text_losses(net: Any, ids: Tensor) -> list[float]:
    """Return the mean loss of each text."""
    return token_losses(net, ids).mean(1).tolist()


def make_repeated(vocabulary: int, sizes: Sizes) -> Tensor:
    """Return random tokens followed by the same tokens, [texts, 2 periods].

    The first fiftieth of the vocabulary, where special tokens and single bytes are, is left out.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.repeated, sizes.period)
    half = torch.randint(vocabulary // 50, vocabulary, shape, generator=generator)
    return torch.cat([half, half], 1)


def induction_scores(net: Any, ids: Tensor) -> list[float]:
    """Return by how many nats the repetition lowers the loss of each text.

    The first token of the repetition is left out, because nothing predicts it.
    """
    losses = token_losses(net, ids)
    period = ids.shape[1] // 2
    return (losses[:, : period - 1].mean(1) - losses[:, period:].mean(1)).tolist()


# --- Heads ----------------------------------------------------------------------------------------


def measure_circuit(net: Any, table: Mapping[str, Any], ids: Tensor, draws: int) -> dict[str, Any]:
    """Ablate induction heads, heads of the previous token and random heads of the same layers;
    return the induction score of each text of repeated tokens.
    """
    everyone = [site_of(head) for head in table["heads"]]
    induction = members(table, "induction")
    previous = members(table, "previous")
    counts = [4**power for power in range(9) if 4**power < len(induction)]
    sets = {f"induction {count}": induction[:count] for count in (*counts, len(induction))}
    sets |= {"previous": previous[: len(induction)]}
    circuit: dict[str, Any] = {"full": measure_ablated(net, [], ids, induction), "sets": {}}
    for name, heads in sets.items():
        random = [draw_others(heads, everyone, seed) for seed in range(draws)]
        circuit["sets"][name] = {
            "heads": heads,
            "num_random": float(np.mean([len(one) for one in random])),
            "ablated": measure_ablated(net, heads, ids, induction),
            "random": [measure_ablated(net, one, ids, induction) for one in random],
        }
    return circuit


def measure_ablated(
    net: Any, heads: Sequence[HeadId], ids: Tensor, induction: Sequence[HeadId]
) -> dict[str, Any]:
    """Return the induction scores of the model without `heads`, and the mean weight of the
    induction heads on the token after the earlier occurrence.
    """
    if not heads:
        return {"scores": induction_scores(net, ids), "weights": copy_weights(net, ids, induction)}
    with hw.ablate(net, heads):
        return {"scores": induction_scores(net, ids), "weights": copy_weights(net, ids, induction)}


def copy_weights(net: Any, ids: Tensor, heads: Sequence[HeadId], count: int = 4) -> list[float]:
    """Return, for the first texts, the mean weight of these heads on the token that followed the
    earlier occurrence of the query's token.
    """
    trace = hw.trace(net, ids[:count])
    period = ids.shape[1] // 2
    queries = np.arange(period, 2 * period - 1)
    means: list[float] = []
    for row in range(min(count, len(ids))):
        weights = [
            trace.head_weights(*head, row=row)[queries, queries - period + 1] for head in heads
        ]
        means.append(float(np.mean(weights)))
    return means


# --- Importance, pruning, conversion --------------------------------------------------------------


def measure_importance(net: Any, rows: TextRows) -> dict[str, Any]:
    """Return the importance of every head by each method, over the same texts."""
    results: dict[str, Any] = {}
    for method in METHODS:
        print(f"  {method}", flush=True)
        results[method] = hw.importance(net, rows.texts, method).data
    return results


def measure_redundancy(net: Any, rows: TextRows) -> dict[str, Any]:
    """Return how similar the heads are, by the names of the quantities."""
    reader = hw.ExampleReader(net)
    for ids in rows.texts:
        reader.add_inputs(ids)
    options = RedundancyOptions(rows_per_text=8, num_tokens=128, num_permutations=99)
    examples = reader.examples_with_frequencies()
    result: Any = hw.measure_redundancy(net, examples, options=options)
    return result.readers[0].list_findings()


def removal_orders(importance: Mapping[str, Any], draws: int) -> dict[str, list[HeadId]]:
    """Return the heads in the order of their removal: least important first, or random."""
    orders: dict[str, list[HeadId]] = {}
    for method, result in importance.items():
        ranked = sorted(result["heads"], key=lambda head: head["value"])
        orders[method] = [(head["site"], head["head"]) for head in ranked]
    everyone = sorted(orders[METHODS[0]])
    for seed in range(draws):
        order = np.random.default_rng(seed).permutation(len(everyone))
        orders[f"random {seed}"] = [everyone[number] for number in order]
    return orders


def measure_frontier(
    net: Any, orders: Mapping[str, Sequence[HeadId]], rows: TextRows, sizes: Sizes
) -> dict[str, Any]:
    """Return the loss of every text without a growing share of the heads, by order of removal."""
    frontier: dict[str, Any] = {"full": text_losses(net, rows.ids)}
    for name, order in orders.items():
        print(f"  {name}", flush=True)
        frontier[name] = {}
        for share in sizes.shares:
            with hw.ablate(net, order[: round(share * len(order))]):
                frontier[name][str(share)] = text_losses(net, rows.ids)
    return frontier


def verify_removal(
    net: Any, order: Sequence[HeadId], rows: TextRows, share: float
) -> dict[str, Any]:
    """Remove a share of the heads from the weights; return the difference to ablation, sizes and
    speed.
    """
    removed = tuple(order[: round(share * len(order))])
    pruned = hw.prune(net, hw.surgery.DropHeads(removed))
    ids = rows.ids[:1]
    with torch.inference_mode(), hw.ablate(net, removed):
        ablated = net(ids)
    with torch.inference_mode():
        difference = (pruned.after(ids) - ablated).abs().max() / ablated.abs().max()
    return {"share": share, "difference": float(difference), **compare_models(net, pruned.after)}


def compare_models(before: Any, after: Any) -> dict[str, Any]:
    """Return parameters, cache and speed of two models."""
    costs = compare_cost(before, after)
    pairs = {name: costs.get_cost(name) for name in ("parameters", "cache per token")}
    speed = compare_speed(before, after, TimingOptions(length=128, seconds=40.0))
    phases = {
        phase.phase: [
            phase.before,
            phase.after,
            phase.speedup,
            phase.low,
            phase.high,
            phase.verdict,
        ]
        for phase in speed.phases
    }
    sizes = {name: [pair.before, pair.after] for name, pair in pairs.items()}
    return sizes | {"speed": phases, "machine": speed.machine}


def measure_conversion(net: Any, rows: Mapping[str, TextRows], sizes: Sizes) -> dict[str, Any]:
    """Convert to one key-value head per layer, without and with alignment, and distil both."""
    examples = [hw.Example({"x": ids[None]}, {}) for ids in rows["distillation"].texts]
    options = hw.surgery.UptrainingOptions(
        steps=sizes.steps, batch=sizes.batch, rate=1e-4, alpha=1.0, held_out=0.1, every=sizes.steps
    )
    results: dict[str, Any] = {}
    for align in ("none", "both"):
        pool = hw.surgery.Pool(1, align=align)
        converted = hw.convert(net, pool, examples[: 2 * sizes.ranking])
        print(f"  {align}: distillation", flush=True)
        distilled = hw.uptrain(converted.after, net, examples, options)
        results[align] = {
            "notes": converted.notes,
            "converted": text_losses(converted.after, rows["evaluation"].ids),
            "distilled": text_losses(distilled.net, rows["evaluation"].ids),
            "step": distilled.step,
        }
        if align == "both":
            results["sizes"] = compare_models(net, converted.after)
    return results


def measure(net: Any, data: Path, sizes: Sizes, store: ResultStore) -> dict[str, Any]:
    """Measure all parts of the page; returns everything that was stored."""
    tokenizer = Tokenizer.from_str(net.usage.tokenizer)
    rows = read_rows(data, tokenizer, sizes)
    sources = {use: [*one.sources, *one.ids.shape] for use, one in rows.items()}
    table = store.measure("heads", lambda: hw.heads(net).data)
    store.measure("retrieval", lambda: measure_retrieval(net).data)
    repeated = make_repeated(tokenizer.get_vocab_size(), sizes)
    store.measure("circuit", lambda: measure_circuit(net, table, repeated, sizes.draws))
    importance = store.measure("importance", lambda: measure_importance(net, rows["ranking"]))
    orders = removal_orders(importance, sizes.draws)
    store.measure("frontier", lambda: measure_frontier(net, orders, rows["evaluation"], sizes))
    store.measure("removal", lambda: verify_removal(net, orders["michel"], rows["evaluation"], 0.3))
    store.measure("conversion", lambda: measure_conversion(net, rows, sizes))
    store.measure("sources", lambda: sources)
    store.measure("sizes", lambda: sizes._asdict())
    store.measure("redundancy", lambda: measure_redundancy(net, rows["redundancy"]))
    return store.results
