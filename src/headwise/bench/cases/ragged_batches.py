"""Batches of sentences of many lengths: rows filled up, batches of about one length, and texts one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...data import IGNORE_INDEX, Batch
from ...data.example_order import IndexArray, make_rng, plan_by_length
from ...data.file_task import make_translator
from ...data.translation import pack_batch, real_token_share
from ...distributed.sharded_model import BatchForward, wrap_single_process
from ...masking.sequence_info import SequenceInfo
from ...models import Transformer, build
from ...training import Recipe
from ...training.loss import count_labels, cross_entropy
from ...training.optimiser import AdamWOptimiser, group_parameters
from ...training.train_step import StepOptions, TrainStep
from ..benchmark_case import BenchmarkCase, MissingPeer, SpeedTarget, TimedCall

TITLE = "Ragged batches: 128 pairs of sentences in two batches"
HISTORY = (
    "Texts in groups of about one length, 1.26 to 1.29 times as fast as batches of 32 filled up; one kernel for all of "
    "them, 1.36 to 1.39 there. The head over 8,000 words is a third of the products and leaves padding out in all: "
    "with a share f of text, (3.67 / f + 2.05) / 5.72 is the most, 1.63 at 51 % and 1.05 over buckets of 93 %. See "
    "log/2026-11-22-fast-packing.md."
)
VOCABULARY_SIZE, MODEL_WIDTH, NUM_LAYERS = 8000, 256, 2
NUM_PAIRS, BATCH_SIZE, NUM_BATCHES = 29_000, 64, 2
FILL_TOLERANCE = 0.005  # by which the tokens of two ways to fill batches may differ, as a share
# Lengths of the 29,000 pairs of Multi30k (German, English) in 8,000 pieces, with an end: one more than what is normal
# in its logarithm, of these means, deviations and correlation. Percentiles 1, 5, 25, 50, 75, 95, 99 come out the same.
LENGTH_LOG_MEANS, LENGTH_LOG_DEVIATIONS, LENGTH_CORRELATION = (2.636, 2.611), (0.354, 0.317), 0.858
BUCKETED, PADDED = "in batches of about one length (ours)", "rows filled up (ours)"
Batches = Sequence[Batch]


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """A step of training in each precision, and the loss of every text."""
    mixed, alike = make_batches()
    for choice in (StepOptions("fp32", "off"), *(() if quick else (StepOptions("bf16", "off", attention="plain"),))):
        ways = {"ours": (mixed, "packed"), PADDED: (mixed, "padded"), BUCKETED: (alike, "padded")}
        runs = {name: _training_step(choice, *way) for name, way in ways.items()}
        if not quick:
            runs["rows filled up, nn.Transformer"] = _torch_training_step(mixed, choice)
        yield _case(f"training step, {choice.precision}", runs, (mixed, alike), None)
    net = build(make_translator((VOCABULARY_SIZE, VOCABULARY_SIZE), MODEL_WIDTH, NUM_LAYERS, "one"), seed=0).eval()
    runs = {"ours": _scoring_pass(net, mixed, packs=True), PADDED: _scoring_pass(net, mixed, packs=False)}
    runs[BUCKETED] = _scoring_pass(net, alike, packs=False)
    yield _case("loss of every text, fp32", runs, (mixed, alike), 1e-2)


def _case(
    name: str, runs: dict[str, TimedCall], both: tuple[Batches, Batches], tolerance: float | None
) -> BenchmarkCase:
    ours = runs.pop("ours")
    full = {
        who: f"{np.mean([real_token_share(one) for one in some]):.0%} of rows"
        for who, some in zip(runs, both, strict=False)
    }
    notes = {"no padding": ", ".join(f"{share} where {who}" for who, share in full.items())}
    told = [t for one in both[0] for t in (one.tokens, one.source_tokens) if t is not None]
    notes["tokens"] = f"{sum(int(t.is_real.sum()) for t in told)}, of both sides"
    peers: dict[str, TimedCall | MissingPeer] = {**runs}
    return BenchmarkCase(
        name,
        ours,
        peers,
        (SpeedTarget(PADDED, 1.5), SpeedTarget(BUCKETED, 1.0)),
        tolerance=tolerance,
        history=HISTORY,
        notes=notes,
    )


def make_batches() -> tuple[Batches, Batches]:
    """Pairs in batches as they come, and as many tokens in batches of about one length that a corpus is cut into."""
    draw, each = make_rng(0), (1.0, LENGTH_CORRELATION)
    normal = draw.multivariate_normal([0, 0], [each, each[::-1]], NUM_PAIRS)
    lengths = np.rint(np.exp(normal * LENGTH_LOG_DEVIATIONS + LENGTH_LOG_MEANS)).astype(np.int64) + 1
    mixed = _typical_batches(
        lengths,
        np.array_split(draw.permutation(NUM_PAIRS)[: NUM_PAIRS // BATCH_SIZE * BATCH_SIZE], NUM_PAIRS // BATCH_SIZE),
    )
    plan, wanted = plan_by_length(lengths.max(1), BATCH_SIZE), lengths[np.concatenate(mixed)].sum()
    order, alike = np.argsort(plan.lengths, kind="stable"), list[IndexArray]()
    while not alike or abs(lengths[np.concatenate(alike)].sum() / wanted - 1) > FILL_TOLERANCE:
        units = [
            int((n + draw.random()) * plan.batches / NUM_BATCHES) for n in range(NUM_BATCHES)
        ]  # one of each part by length
        alike = [order[[place for (place,) in plan.units[unit]]] for unit in units]
    return [_make_batch(lengths, some) for some in mixed], [_make_batch(lengths, some) for some in alike]


def _typical_batches(lengths: IndexArray, every: Sequence[IndexArray]) -> Sequence[IndexArray]:
    """The first batches in a row that are together as full as all are on the mean."""
    full = np.array([lengths[own].mean(0) / lengths[own].max(0) for own in every]).mean(1)
    means = np.convolve(full, np.full(NUM_BATCHES, 1 / NUM_BATCHES), "valid")
    first = int(np.argmax(abs(means - full.mean()) < FILL_TOLERANCE))
    return every[first : first + NUM_BATCHES]


def _make_batch(lengths: IndexArray, chosen: IndexArray) -> Batch:
    """Pairs of random ids, each the same whatever stands beside it."""

    def side(number: int, rest: int) -> Tensor:
        rows = [make_rng(number, int(n)).integers(VOCABULARY_SIZE, size=lengths[n, number // 2]) for n in chosen]
        return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=rest)

    source, x, labels = side(0, 0), side(2, 0), side(3, IGNORE_INDEX)
    told = [SequenceInfo.from_batch(ids, lengths=lengths[chosen, n].tolist()) for n, ids in enumerate((source, x))]
    return Batch(x, labels, told[1], source, told[0])


def _training_step(choice: StepOptions, some: Batches, rows: str) -> TimedCall:
    """A step on each batch: gradients, and AdamW."""
    net = build(make_translator((VOCABULARY_SIZE, VOCABULARY_SIZE), MODEL_WIDTH, NUM_LAYERS, "one"), seed=0).train()
    recipe = Recipe(batch=BATCH_SIZE, device="cpu")
    own = StepOptions(choice.precision, "off", attention=choice.attention, rows=rows)
    holding = wrap_single_process(net)
    stepper = TrainStep(holding, recipe, own)
    optimiser = AdamWOptimiser(group_parameters(holding.own, net.spec, recipe.decays), recipe)

    def run() -> None:
        for batch in some:
            net.zero_grad(set_to_none=True)
            stepper.compute_gradients(batch)
            optimiser.step(1e-4)

    return run


def _scoring_pass(net: Transformer, some: Batches, *, packs: bool) -> TimedCall:
    """The loss of a token, over all batches; of other texts it is nearly the same, for nothing was learnt."""
    path = BatchForward(net)

    def run() -> Tensor:
        with torch.no_grad():
            rows = [pack_batch(batch).batch if packs else batch for batch in some]
            losses = [cross_entropy(path(row), row.labels) for row in rows]
            return torch.stack(losses).sum() / sum(map(count_labels, some))

    return run


class TorchSeq2Seq(nn.Module):
    """The same sizes by torch's own modules, norms first, one table of tokens at all three ends, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY_SIZE, MODEL_WIDTH)
        sizes = (MODEL_WIDTH, MODEL_WIDTH // 32, 4 * MODEL_WIDTH, 0.0, "gelu")
        layer = nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, NUM_LAYERS, nn.LayerNorm(MODEL_WIDTH), enable_nested_tensor=False)
        shape = (MODEL_WIDTH, MODEL_WIDTH // 32, NUM_LAYERS, NUM_LAYERS, *sizes[2:])
        self.body = nn.Transformer(*shape, custom_encoder=encoder, batch_first=True, norm_first=True)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, T, words]."""
        assert batch.source is not None
        assert batch.source_tokens is not None
        assert batch.tokens is not None
        asks, told = ~batch.tokens.is_real, ~batch.source_tokens.is_real
        ahead = nn.Transformer.generate_square_subsequent_mask(batch.x.shape[1], dtype=torch.bool)
        more = {"src_key_padding_mask": told, "memory_key_padding_mask": told, "tgt_key_padding_mask": asks}
        h = self.body(self.table(batch.source), self.table(batch.x), tgt_mask=ahead, tgt_is_causal=False, **more)
        return nn.functional.linear(h, self.table.weight)


def _torch_training_step(some: Batches, choice: StepOptions) -> TimedCall:
    net = TorchSeq2Seq().train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        for batch in some:
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=choice.dtype is not None):
                said = net(batch)
            (cross_entropy(said, batch.labels) / count_labels(batch)).backward()
            optimiser.step()

    return run
