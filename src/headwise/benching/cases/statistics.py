"""What is said of heads over a long text, beside reading it: sums over rows, and how alike rows are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...families import read
from ...heads.block import Block
from ...heads.intervals import interval
from ...heads.likeness import entropies, jensen_shannon
from ...heads.looking import look
from ...heads.measuring import Adding
from ...heads.received import Received
from ...heads.sampled import Choice, rows_of
from ...heads.scene import Scene, Tokens
from ...heads.statistics import STATISTICS
from ...hub.finding import found
from ...models import Transformer, build
from ...probe import Probe
from ..case import Absent, Aim, Case, Run

TITLE = "Statistics of 12 heads of 64, causal"
LONG, SHORT, WORDS, MOST = 8192, 2048, 1000, "1 GB"
SHAPE: dict[str, Any] = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 1, "vocab_size": WORDS}
ASKED = ("entropy", "sink", "first", "previous", "self", "next", "offset", "peak")
FORWARD, EAGER = "one forward", "eager weights of all pairs"
ROWS, DRAWS = Choice(rows=64), 1000


def cases(quick: bool) -> Iterator[Case]:
    """What is summed in one pass; every statistic there is; and Jensen-Shannon of sampled rows, a budget apart."""
    yield _summed(SHORT, ASKED)
    yield _summed(LONG, ASKED)
    if not quick:
        yield _summed(LONG, tuple(STATISTICS))
    yield _alike(LONG)


def _summed(count: int, names: tuple[str, ...]) -> Case:
    net, scene = _net(count), _scene(count)
    those, notes = found(net), dict[str, str]()
    streams = {one.site.name: ("text", "text") for one in those}

    def ours() -> None:
        adding, received = Adding([STATISTICS[name] for name in names]), Received()

        def see(site: str, block: Block) -> None:
            adding.see(site, block)
            received.see(site, block)

        look(net, those, scene, streams, see)

    def watched() -> None:
        if notes or count < LONG:
            ours()
            return
        forward()
        before = peak(anew=True)
        ours()
        grown = peak() - before
        notes["memory beyond the process"] = f"{grown / 1e9:.2f} GB, of {MOST} at most" if before else "not known here"

    forward = _forward(net, scene)
    size = count * count * SHAPE["n_head"] * 4 / 1e9
    refused = Absent(f"scores and weights of {count:,} tokens would hold {2 * size:.1f} GB")
    peers = {FORWARD: forward, EAGER: refused if count == LONG else _eager(net, scene)}
    said = "entropy, sinks, offsets" if names is ASKED else f"all {len(names)} statistics"
    aims = (Aim(FORWARD, 1 / 3),) if count == LONG else ()
    return Case(f"{said}, column mass, {count:,} tokens", watched, peers, aims, tolerance=None, notes=notes)


def _alike(count: int) -> Case:
    """How far apart the rows of each two heads are, with an interval over rows."""
    net, scene = _net(count), _scene(count)
    those = found(net)
    streams = {one.site.name: ("text", "text") for one in those}
    notes = dict[str, str]()

    def ours() -> None:
        with torch.inference_mode():
            (rows,), _ = rows_of(net, those, scene, streams, ROWS)
            each = [jensen_shannon(row[:, None]).numpy() for row in rows.weights.unbind(1)]
        every = np.stack(each)
        above = np.triu_indices(every.shape[1], 1)
        draws = np.random.default_rng(0).integers(len(every), size=(DRAWS, len(every)))
        means = every[:, *above].mean(1)
        low, high = interval(means[draws].mean(1)[:, None])
        told = f"{means.mean():.3f} nats, {low[0]:.3f} to {high[0]:.3f}, over {len(every)} rows of {count:,}"
        notes["distance of two heads"] = told

    name = f"Jensen-Shannon of {ROWS.rows} sampled rows, {count:,} tokens"
    return Case(name, ours, {FORWARD: _forward(net, scene)}, tolerance=None, notes=notes)


def _net(count: int) -> Transformer:
    return build(read(SHAPE | {"n_positions": count}), seed=0).eval()


def _scene(count: int) -> Scene:
    """Random tokens, a seventh of them punctuation and a hundredth separators."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (count,), generator=draw)
    ends = torch.rand(count, generator=draw) < 0.01
    common = torch.bincount(ids, minlength=WORDS)[ids]
    told = Tokens(ids, ("",) * count, ends, ends, ids % 7 == 0, torch.arange(count), common)
    return Scene(ids[None], {"text": told})


def _forward(net: Transformer, scene: Scene) -> Run:
    def forward() -> Tensor:
        with torch.inference_mode():
            return net(scene.inputs)

    return forward


def _eager(net: Transformer, scene: Scene) -> Run:
    """The same sums of weights that are all there at once, as who asks a model to output attentions has them."""
    told = scene.streams["text"]

    def eager() -> tuple[Tensor, ...]:
        (name, _), *_ = net.described.specs()
        probe = Probe("weights")
        net.probes = {name: probe}
        try:
            with torch.inference_mode():
                net(scene.inputs)
        finally:
            net.probes = {}
        w_HTS = probe.seen["weights"][0]
        sinks = w_HTS[..., told.special | told.separator].sum(-1) + w_HTS[..., 0]
        diagonals = [w_HTS.diagonal(offset, 1, 2).mean(-1) for offset in (-1, 0)]
        hits = torch.arange(told.count) - w_HTS.argmax(-1)
        near = torch.stack([(hits == offset).float().mean(-1) for offset in range(9)])
        return entropies(w_HTS), sinks.mean(-1), *diagonals, near, w_HTS.sum(1)

    return eager


def peak(*, anew: bool = False) -> int:
    """The most bytes that this process has held, since it was last asked anew; 0 where the system does not say."""
    try:
        if anew:
            Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5): the high-water mark begins anew
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0
