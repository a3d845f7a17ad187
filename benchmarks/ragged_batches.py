"""Batches of sentences of different lengths: padded, bucketed by length, and
packed into one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from headwise.attention.masking.sequence_info import SequenceInfo
from headwise.models import Transformer, build
from headwise.models.distributed.sharded_model import BatchForward, wrap_single_process
from headwise.models.model_spec import ModelSpec
from headwise.training import Recipe
from headwise.training.data import IGNORE_INDEX, Batch
from headwise.training.data.file_task import IndexArray, make_rng
from headwise.training.data.synthetic_task import ModelShape, make_small_translator
from headwise.training.data.task import pack_batch
from headwise.training.train_step import (
    AdamWOptimiser,
    StepOptions,
    TrainStep,
    count_labels,
    cross_entropy,
    group_parameters,
)

from .harness import BenchmarkCase, CaseKind, MissingPeer, SpeedTarget, TimedCall

VOCABULARY_SIZE = 8000
MODEL_WIDTH = 256
NUM_LAYERS = 2
NUM_PAIRS = 29_000
BATCH_SIZE = 64
NUM_BATCHES = 2
FILL_TOLERANCE = 0.005  # largest difference of the tokens in two kinds of batches, as a share
# Lengths of the 29,000 pairs of Multi30k (German, English) with 8,000 subwords and an end token: 1
# + a log-normal number of these means, deviations and correlation. Percentiles 1, 5, 25, 50, 75, 95
# and 99 agree with the corpus.
LENGTH_LOG_MEANS = (2.636, 2.611)
LENGTH_LOG_DEVIATIONS = (0.354, 0.317)
LENGTH_CORRELATION = 0.858
BUCKETED = "bucketed by length (ours)"
PADDED = "padded (ours)"
Batches = Sequence[Batch]


def ragged_batches_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield a training step in each precision, and a forward pass with the loss."""
    random_batches, bucketed = make_batches()
    for choice in (
        StepOptions("fp32", "off"),
        *(() if quick else (StepOptions("bf16", "off", attention="plain"),)),
    ):
        variants = {
            "ours": (random_batches, "packed"),
            PADDED: (random_batches, "padded"),
            BUCKETED: (bucketed, "padded"),
        }
        runs = {name: _training_step(choice, *variant) for name, variant in variants.items()}
        if not quick:
            runs["padded, nn.Transformer"] = _torch_training_step(random_batches, choice)
        yield _case(f"training step, {choice.precision}", runs, (random_batches, bucketed), None)
    net = build(_make_model(), seed=0).eval()
    runs = {
        "ours": _scoring_pass(net, random_batches, packs=True),
        PADDED: _scoring_pass(net, random_batches, packs=False),
    }
    runs[BUCKETED] = _scoring_pass(net, bucketed, packs=False)
    yield _case("forward pass with loss, fp32", runs, (random_batches, bucketed), 1e-2)


def _sides(batch: Batch) -> tuple[int, int]:
    """Return the number of real tokens of source and target, and the number of positions."""
    real = size = 0
    for x, tokens in ((batch.x, batch.tokens), (batch.source, batch.source_tokens)):
        if x is not None:
            size += x.shape[0] * x.shape[1]
            real += x.numel() if tokens is None else int(tokens.is_real.expand(x.shape).sum())
    return real, size


def _case(
    name: str, runs: dict[str, TimedCall], both: tuple[Batches, Batches], tolerance: float | None
) -> BenchmarkCase:
    ours = runs.pop("ours")
    shares = list[str]()
    num_tokens = sum(_sides(batch)[0] for batch in both[0])
    for run, batches in zip(runs, both, strict=False):
        sides = [_sides(batch) for batch in batches]
        share = np.mean([real / size for real, size in sides])
        shares.append(f"{share:.0%} {run}")
    notes = {"share of real tokens": ", ".join(shares)}
    notes["tokens"] = f"{num_tokens}, source and target"
    peers: dict[str, TimedCall | MissingPeer] = {**runs}
    return BenchmarkCase(
        name,
        ours,
        peers,
        (SpeedTarget(PADDED, 1.5), SpeedTarget(BUCKETED, 1.0)),
        tolerance=tolerance,
        notes=notes,
    )


def make_batches() -> tuple[Batches, Batches]:
    """Return batches of random pairs, and batches bucketed by length with as many tokens."""
    generator = make_rng(0)
    row = (1.0, LENGTH_CORRELATION)
    normal = generator.multivariate_normal([0, 0], [row, row[::-1]], NUM_PAIRS)
    lengths = (
        np.rint(np.exp(normal * LENGTH_LOG_DEVIATIONS + LENGTH_LOG_MEANS)).astype(np.int64) + 1
    )
    random_batches = _typical_batches(
        lengths,
        np.array_split(
            generator.permutation(NUM_PAIRS)[: NUM_PAIRS // BATCH_SIZE * BATCH_SIZE],
            NUM_PAIRS // BATCH_SIZE,
        ),
    )
    order = np.argsort(lengths.max(1), kind="stable")
    parts = np.array_split(order, -(-NUM_PAIRS // BATCH_SIZE))
    target = lengths[np.concatenate(random_batches)].sum()
    bucketed = list[IndexArray]()
    while (
        not bucketed or abs(lengths[np.concatenate(bucketed)].sum() / target - 1) > FILL_TOLERANCE
    ):
        # one batch from each range of lengths
        places = (np.arange(NUM_BATCHES) + generator.random(NUM_BATCHES)) * len(parts)
        bucketed = [parts[int(place / NUM_BATCHES)] for place in places]
    return [_make_batch(lengths, pairs) for pairs in random_batches], [
        _make_batch(lengths, pairs) for pairs in bucketed
    ]


def _typical_batches(lengths: IndexArray, candidates: Sequence[IndexArray]) -> Sequence[IndexArray]:
    """Return the first consecutive batches whose share of real tokens is the
    mean of all batches.
    """
    shares = np.array(
        [lengths[pairs].mean(0) / lengths[pairs].max(0) for pairs in candidates]
    ).mean(1)
    means = np.convolve(shares, np.full(NUM_BATCHES, 1 / NUM_BATCHES), "valid")
    first = int(np.argmax(abs(means - shares.mean()) < FILL_TOLERANCE))
    return candidates[first : first + NUM_BATCHES]


def _make_batch(lengths: IndexArray, chosen: IndexArray) -> Batch:
    """Return a batch of random ids; the ids of a pair do not depend on the batch it is in."""

    def side(number: int, padding: int) -> Tensor:
        rows = [
            make_rng(number, int(n)).integers(VOCABULARY_SIZE, size=lengths[n, number // 2])
            for n in chosen
        ]
        return pad_sequence(
            [torch.from_numpy(row) for row in rows], batch_first=True, padding_value=padding
        )

    source = side(0, 0)
    x = side(2, 0)
    labels = side(3, IGNORE_INDEX)
    sequences = [
        SequenceInfo.from_batch(ids, lengths=lengths[chosen, n].tolist())
        for n, ids in enumerate((source, x))
    ]
    return Batch(x, labels, sequences[1], source, sequences[0])


def _make_model() -> ModelSpec:
    shape = ModelShape(MODEL_WIDTH, MODEL_WIDTH // 32, NUM_LAYERS, 4 * MODEL_WIDTH)
    return make_small_translator("translator", VOCABULARY_SIZE, shape)


def _training_step(choice: StepOptions, batches: Batches, rows: str) -> TimedCall:
    """Return a training step on each batch: gradients and AdamW."""
    net = build(_make_model(), seed=0).train()
    recipe = Recipe(batch=BATCH_SIZE, device="cpu")
    options = StepOptions(choice.precision, "off", attention=choice.attention, rows=rows)
    sharded = wrap_single_process(net)
    stepper = TrainStep(sharded, recipe, options)
    optimiser = AdamWOptimiser(
        group_parameters(sharded.own, net.spec, recipe.decayed_parameters), recipe
    )

    def run() -> None:
        for batch in batches:
            net.zero_grad(set_to_none=True)
            stepper.compute_gradients(batch)
            optimiser.step(1e-4)

    return run


def _scoring_pass(net: Transformer, batches: Batches, *, packs: bool) -> TimedCall:
    """Return a forward pass with the mean loss per token over all batches."""
    path = BatchForward(net)

    def run() -> Tensor:
        with torch.no_grad():
            rows = [pack_batch(batch).batch if packs else batch for batch in batches]
            losses = [cross_entropy(path(row), row.labels) for row in rows]
            return torch.stack(losses).sum() / sum(map(count_labels, batches))

    return run


class TorchSeq2Seq(nn.Module):
    """The translator in torch's modules: pre-norm, tied embeddings, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY_SIZE, MODEL_WIDTH)
        sizes = (MODEL_WIDTH, MODEL_WIDTH // 32, 4 * MODEL_WIDTH, 0.0, "gelu")
        layer = nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(
            layer, NUM_LAYERS, nn.LayerNorm(MODEL_WIDTH), enable_nested_tensor=False
        )
        shape = (MODEL_WIDTH, MODEL_WIDTH // 32, NUM_LAYERS, NUM_LAYERS, *sizes[2:])
        self.body = nn.Transformer(
            *shape, custom_encoder=encoder, batch_first=True, norm_first=True
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, T, words]."""
        assert batch.source is not None
        assert batch.source_tokens is not None
        assert batch.tokens is not None
        target_padding = ~batch.tokens.is_real
        source_padding = ~batch.source_tokens.is_real
        causal_mask = nn.Transformer.generate_square_subsequent_mask(
            batch.x.shape[1], dtype=torch.bool
        )
        masks = {
            "src_key_padding_mask": source_padding,
            "memory_key_padding_mask": source_padding,
            "tgt_key_padding_mask": target_padding,
        }
        h = self.body(
            self.table(batch.source),
            self.table(batch.x),
            tgt_mask=causal_mask,
            tgt_is_causal=False,
            **masks,
        )
        return nn.functional.linear(h, self.table.weight)


def _torch_training_step(batches: Batches, choice: StepOptions) -> TimedCall:
    net = TorchSeq2Seq().train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        for batch in batches:
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=choice.dtype is not None):
                logits = net(batch)
            (cross_entropy(logits, batch.labels) / count_labels(batch)).backward()
            optimiser.step()

    return run


KINDS = {
    "ragged_batches": CaseKind(
        "Ragged batches: 128 pairs of sentences in two batches", ragged_batches_cases
    ),
}
