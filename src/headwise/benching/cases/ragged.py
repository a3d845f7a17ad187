"""Batches of sentences of many lengths: rows filled up, batches of about one length, and texts one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...models import Transformer, build
from ...spread.holding import alone
from ...spread.path import Path
from ...tasks import IGNORED, Batch
from ...tasks.order import Numbers, bucketed, drawn
from ...tasks.packing import filled, packed
from ...tasks.sizes import translator
from ...tokens import Tokens
from ...training import Recipe
from ...training.choosing import Choice
from ...training.loss import asked, cross_entropy
from ...training.optimiser import Optimiser, grouped
from ...training.stepping import Stepper
from ..case import Absent, Aim, Case, Run

TITLE = "Ragged batches: 128 pairs of sentences in two batches"
TRIED = (
    "Texts in groups of about one length, 1.26 to 1.29 times as fast as batches of 32 filled up; one kernel for all of "
    "them, 1.36 to 1.39 there. The head over 8,000 words is a third of the products and leaves padding out in all: "
    "with a share f of text, (3.67 / f + 2.05) / 5.72 is the most, 1.63 at 51 % and 1.05 over buckets of 93 %. See "
    "log/2026-11-22-fast-packing.md."
)
WORDS, WIDTH, LAYERS = 8000, 256, 2
PAIRS, SIZE, COUNT = 29_000, 64, 2
CLOSE = 0.005  # by which the tokens of two ways to fill batches may differ, as a share
# Lengths of the 29,000 pairs of Multi30k (German, English) in 8,000 pieces, with an end: one more than what is normal
# in its logarithm, of these means, deviations and correlation. Percentiles 1, 5, 25, 50, 75, 95, 99 come out the same.
MEANS, DEVIATIONS, TOGETHER = (2.636, 2.611), (0.354, 0.317), 0.858
BUCKETED, PADDED = "in batches of about one length (ours)", "rows filled up (ours)"
Batches = Sequence[Batch]


def cases(quick: bool) -> Iterator[Case]:
    """A step of training in each precision, and the loss of every text."""
    mixed, alike = batches()
    for choice in (Choice("fp32", "off"), *(() if quick else (Choice("bf16", "off", attention="plain"),))):
        ways = {"ours": (mixed, "packed"), PADDED: (mixed, "padded"), BUCKETED: (alike, "padded")}
        runs = {name: _training(choice, *way) for name, way in ways.items()}
        if not quick:
            runs["rows filled up, nn.Transformer"] = _theirs(mixed, choice)
        yield _case(f"training step, {choice.precision}", runs, (mixed, alike), None)
    net = build(translator((WORDS, WORDS), WIDTH, LAYERS, "one"), seed=0).eval()
    runs = {"ours": _scoring(net, mixed, packs=True), PADDED: _scoring(net, mixed, packs=False)}
    runs[BUCKETED] = _scoring(net, alike, packs=False)
    yield _case("loss of every text, fp32", runs, (mixed, alike), 1e-2)


def _case(name: str, runs: dict[str, Run], both: tuple[Batches, Batches], tolerance: float | None) -> Case:
    ours = runs.pop("ours")
    full = {who: f"{np.mean([filled(one) for one in some]):.0%} of rows" for who, some in zip(runs, both, strict=False)}
    notes = {"no padding": ", ".join(f"{share} where {who}" for who, share in full.items())}
    told = [t for one in both[0] for t in (one.tokens, one.source_tokens) if t is not None]
    notes["tokens"] = f"{sum(int(t.live.sum()) for t in told)}, of both sides"
    peers: dict[str, Run | Absent] = {**runs}
    return Case(
        name, ours, peers, (Aim(PADDED, 1.5), Aim(BUCKETED, 1.0)), tolerance=tolerance, tried=TRIED, notes=notes
    )


def batches() -> tuple[Batches, Batches]:
    """Pairs in batches as they come, and as many tokens in batches of about one length that a corpus is cut into."""
    draw, each = drawn(0), (1.0, TOGETHER)
    normal = draw.multivariate_normal([0, 0], [each, each[::-1]], PAIRS)
    lengths = np.rint(np.exp(normal * DEVIATIONS + MEANS)).astype(np.int64) + 1
    mixed = _usual(lengths, np.array_split(draw.permutation(PAIRS)[: PAIRS // SIZE * SIZE], PAIRS // SIZE))
    plan, wanted = bucketed(lengths.max(1), SIZE), lengths[np.concatenate(mixed)].sum()
    order, alike = np.argsort(plan.levels, kind="stable"), list[Numbers]()
    while not alike or abs(lengths[np.concatenate(alike)].sum() / wanted - 1) > CLOSE:
        units = [int((n + draw.random()) * plan.batches / COUNT) for n in range(COUNT)]  # one of each part by length
        alike = [order[[place for (place,) in plan.units[unit]]] for unit in units]
    return [_batch(lengths, some) for some in mixed], [_batch(lengths, some) for some in alike]


def _usual(lengths: Numbers, every: Sequence[Numbers]) -> Sequence[Numbers]:
    """The first batches in a row that are together as full as all are on the mean."""
    full = np.array([lengths[own].mean(0) / lengths[own].max(0) for own in every]).mean(1)
    means = np.convolve(full, np.full(COUNT, 1 / COUNT), "valid")
    first = int(np.argmax(abs(means - full.mean()) < CLOSE))
    return every[first : first + COUNT]


def _batch(lengths: Numbers, chosen: Numbers) -> Batch:
    """Pairs of random ids, each the same whatever stands beside it."""

    def side(number: int, rest: int) -> Tensor:
        rows = [drawn(number, int(n)).integers(WORDS, size=lengths[n, number // 2]) for n in chosen]
        return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=rest)

    source, x, labels = side(0, 0), side(2, 0), side(3, IGNORED)
    told = [Tokens.of(ids, lengths=lengths[chosen, n].tolist()) for n, ids in enumerate((source, x))]
    return Batch(x, labels, told[1], source, told[0])


def _training(choice: Choice, some: Batches, rows: str) -> Run:
    """A step on each batch: gradients, and AdamW."""
    net = build(translator((WORDS, WORDS), WIDTH, LAYERS, "one"), seed=0).train()
    recipe = Recipe(batch=SIZE, device="cpu")
    own = Choice(choice.precision, "off", attention=choice.attention, rows=rows)
    holding = alone(net)
    stepper = Stepper(holding, recipe, own)
    optimiser = Optimiser(grouped(holding.own, net.described, recipe.decays), recipe)

    def run() -> None:
        for batch in some:
            net.zero_grad(set_to_none=True)
            stepper.gradients(batch)
            optimiser.step(1e-4)

    return run


def _scoring(net: Transformer, some: Batches, *, packs: bool) -> Run:
    """The loss of a token, over all batches; of other texts it is nearly the same, for nothing was learnt."""
    path = Path(net)

    def run() -> Tensor:
        with torch.no_grad():
            rows = [packed(batch).batch if packs else batch for batch in some]
            losses = [cross_entropy(path(row), row.labels) for row in rows]
            return torch.stack(losses).sum() / sum(map(asked, some))

    return run


class Theirs(nn.Module):
    """The same sizes by torch's own modules, norms first, one table of tokens at all three ends, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        sizes = (WIDTH, WIDTH // 32, 4 * WIDTH, 0.0, "gelu")
        layer = nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        shape = (WIDTH, WIDTH // 32, LAYERS, LAYERS, *sizes[2:])
        self.body = nn.Transformer(*shape, custom_encoder=encoder, batch_first=True, norm_first=True)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, T, words]."""
        assert batch.source is not None
        assert batch.source_tokens is not None
        assert batch.tokens is not None
        asks, told = ~batch.tokens.live, ~batch.source_tokens.live
        ahead = nn.Transformer.generate_square_subsequent_mask(batch.x.shape[1], dtype=torch.bool)
        more = {"src_key_padding_mask": told, "memory_key_padding_mask": told, "tgt_key_padding_mask": asks}
        h = self.body(self.table(batch.source), self.table(batch.x), tgt_mask=ahead, tgt_is_causal=False, **more)
        return nn.functional.linear(h, self.table.weight)


def _theirs(some: Batches, choice: Choice) -> Run:
    net = Theirs().train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        for batch in some:
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=choice.dtype is not None):
                said = net(batch)
            (cross_entropy(said, batch.labels) / asked(batch)).backward()
            optimiser.step()

    return run
