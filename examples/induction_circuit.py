"""The induction circuit of a decoder: the heads that attend behind an earlier occurrence of the
token, the earlier heads that write their keys, what one score is made of, and what is lost without
these heads, beside random heads of the same layers.

python induction_circuit.py MODEL
"""

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.report.data import Column, Table
from headwise.report.render import to_text

NUM_PREVIOUS = 3  # heads that attend to the previous token, as senders of paths
DRAWS = 10  # of random heads
Head = tuple[int, int]  # layer and number


class Circuit(NamedTuple):
    """The heads of both kinds, strongest first, and the results of the steps."""

    induction: list[Head]
    previous: list[Head]
    paths: Any
    score: Any
    losses: Table


def repeat_tokens(size: int, count: int, period: int, seed: int = 0) -> Tensor:
    """Rows of different random tokens, each row twice: [count, 2 * period]. The first ids, which
    are often special, are left out.
    """
    if size < 2 * period:
        raise ValueError(f"{size} tokens are too few for {period} different ones; give a period=")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(min(size - 2 * period, 1000), size)
    rows = [ids[torch.randperm(len(ids), generator=generator)[:period]] for _ in range(count)]
    return torch.stack(rows).repeat(1, 2)


def make_pairs(rows: Tensor, size: int) -> list[tuple[Tensor, Tensor, Any]]:
    """Each row up to the repetition of a token, the same with another token at its first place,
    and the logit of the token that followed it minus that of a later one.
    """
    period = rows.shape[1] // 2
    place = period // 2
    pairs: list[tuple[Tensor, Tensor, Any]] = []
    for row in rows:
        clean = row[None, : period + place + 1]
        corrupt = clean.clone()
        corrupt[0, place] = max({*range(size)} - {*row.tolist()})
        tokens = (int(row[place + 1]), int(row[(place + 2) % period]))
        metric = hw.head_analysis.TokenMetric("logit_difference", tokens)
        pairs.append((clean, corrupt, metric))
    return pairs


def strongest(table: Any, measure: str, count: int) -> list[Head]:
    """The heads with the largest values of a measure, as (layer, head)."""
    return [(head.layer, head.head) for head in table.sorted_by(measure)[:count]]


def name_of(head: Head, part: str = "") -> str:
    return f"L{head[0]}H{head[1]}{part}"


def repeat_loss(model: Any, rows: Tensor) -> float:
    """The mean loss of the repeated tokens but the first, in nats."""
    period = rows.shape[1] // 2
    with torch.no_grad():
        output = model(rows)
    logits = getattr(output, "logits", output)[:, period:-1]
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, period + 1 :].flatten()))


def measure_losses(
    model: Any, rows: Tensor, sets: Mapping[str, Sequence[Head]], heads: int
) -> Table:
    """The rise of the loss without each set of heads, and without random others of its layers."""
    draw = random.Random(0)
    full = repeat_loss(model, rows)
    lines: list[tuple[Any, ...]] = []
    for name, chosen in sets.items():
        with hw.ablate(model, chosen):
            rise = repeat_loss(model, rows) - full
        rises: list[float] = []
        for _ in range(DRAWS):
            others = [(layer, n) for layer, _ in chosen for n in range(heads)]
            others = sorted({*others} - {*chosen})
            with hw.ablate(model, draw.sample(others, min(len(chosen), len(others)))):
                rises.append(repeat_loss(model, rows) - full)
        lines.append((name, len(chosen), rise, sum(rises) / DRAWS, max(rises)))
    names = ("rise of the loss", "random heads", "at most")
    columns = ("without", "heads", *(Column(one, "{:+.2f}".format) for one in names))
    return Table(f"loss of the repetition: {full:.2f} nats", columns, lines)


def find_circuit(model: Any, *, texts: int = 8, period: int = 16, count: int = 5) -> Circuit:
    """Find the circuit on random tokens that are repeated once; other tokens are ablated on."""
    size = vocabulary_size(model)
    table = hw.heads(model, repeat_tokens(size, texts, period))
    induction = strongest(table, "induction", count)
    first = min(layer for layer, _ in induction)
    previous = [head for head in strongest(table, "previous", len(table.heads)) if head[0] < first]
    previous = previous[:NUM_PREVIOUS]
    if not previous:
        raise ValueError(f"{name_of(induction[0])} is in the first layer: no head writes its keys")
    rows = repeat_tokens(size, texts, period, seed=1)
    pairs = make_pairs(rows, size)
    keys, values = ([name_of(head, part) for head in induction] for part in (".k", ".v"))
    paths = [(name_of(sender), keys) for sender in previous]
    paths += [(name_of(previous[0]), values), (name_of(previous[0]), "logits")]
    effects = hw.head_analysis.patch_paths(model, pairs, pairs[0][2], paths)
    places = [(clean, -1, period // 2 + 1) for clean, _, _ in pairs]
    score = hw.head_analysis.attribute_score(model, places, name_of(induction[0]), "mean")
    sets = {"the induction heads": induction, name_of(previous[0]): previous[:1]}
    other_rows = repeat_tokens(size, texts, period, seed=2)
    heads = 1 + max(head.head for head in table.heads)
    return Circuit(
        induction, previous, effects, score, measure_losses(model, other_rows, sets, heads)
    )


def vocabulary_size(model: Any) -> int:
    """The number of tokens that the model has logits for."""
    with torch.no_grad():
        output = model(torch.tensor([[0]]))
    return getattr(output, "logits", output).shape[-1]


def main(name: str) -> None:
    """Print the circuit of a model."""
    circuit = find_circuit(hw.load(name).eval())
    print("induction heads:", *map(name_of, circuit.induction))
    print("previous-token heads before them:", *map(name_of, circuit.previous), "\n")
    print(circuit.paths, "\n")
    print(circuit.score, "\n")
    print(to_text(circuit.losses))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except (ValueError, OSError) as error:
        sys.exit(f"induction_circuit.py: {error}")
