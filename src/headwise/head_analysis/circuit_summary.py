"""Circuits, spectra and rank collapse of a model as tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..errors import SpecError
from .head_circuits import (
    AttentionCircuits,
    TokenTables,
    copying_score,
    fold_norms,
    get_circuits,
    get_token_tables,
)
from .rank_analysis import DepthSimilarity, LayerSpectrum

# dimensions over those of Gaussian matrices below which a sentence says that heads share dimensions
FEWER = 0.9
COPYING = 0.5  # copying score from which a head is said to copy tokens


class HeadCircuit(NamedTuple):
    """Numbers of one head from its weights: its copying score, the norm of its slice of W_O, and
    that of W_V W_O.

    `copying` and `ov_norm` are NaN where no single W_V belongs to the head. `over` is what the
    copying score is over: "tokens", through embedding and unembedding, or "states".
    """

    site: str
    head: int
    copying: float
    over: str
    output_norm: float
    ov_norm: float

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values; NaN becomes None."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in self._asdict().items()
        }


def measure_head_circuits(model: nn.Module) -> tuple[HeadCircuit, ...]:
    """Copying score, norm of W_O and norm of W_V W_O of every head of a model, from the weights
    alone.

    Norms are Frobenius norms. Self-attention of a stack with a token embedding is scored over
    tokens, with the gains of the norm before it and of the final norm (see `fold_norms`), all other
    attention over states, without any norm.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> [(one.site, one.head, one.over) for one in measure_head_circuits(net)]
    [('decoder.0.attention', 0, 'tokens'), ('decoder.0.attention', 1, 'tokens')]
    """
    circuits_of_heads: list[HeadCircuit] = []
    for circuits in get_circuits(model).values():
        tables = _token_tables(model, circuits.site)
        circuits_of_heads += [
            _measure_head(circuits, head, tables)
            for head in range(len(circuits.spec.score_head_of_output))
        ]
    if not circuits_of_heads:
        raise SpecError("the model has no attention whose weights can be read; see hw.sites(model)")
    return tuple(circuits_of_heads)


def _token_tables(model: nn.Module, site: str) -> TokenTables | None:
    """Embedding and unembedding of a site's stack; None for cross-attention and for stacks without
    tokens.
    """
    if site.rpartition(".")[2] != "attention":
        return None
    try:
        return fold_norms(model, site, get_token_tables(model, site.partition(".")[0]))
    except SpecError:
        return None


def _measure_head(
    circuits: AttentionCircuits, head: int, tables: TokenTables | None
) -> HeadCircuit:
    output_norm = float(circuits.output_map(head).double().norm())
    over = "states" if tables is None else "tokens"
    try:
        ov = circuits.ov_circuit(head)
    except SpecError:
        return HeadCircuit(circuits.site, head, math.nan, over, output_norm, math.nan)
    copying = (
        copying_score(ov) if tables is None else copying_score(ov, tables.embed, tables.unembed)
    )
    ov_norm = float(ov.inner_product(ov).clamp(min=0).sqrt())
    return HeadCircuit(circuits.site, head, copying, over, output_norm, ov_norm)


def describe_circuits(heads: Sequence[HeadCircuit]) -> Iterator[str]:
    """Sentences about copying, and about the norms of the heads' slices of W_O.

    >>> heads = [
    ...     HeadCircuit("a", n, copying, "tokens", norm, 1.0)
    ...     for n, (copying, norm) in enumerate([(0.9, 2), (0, 1)])
    ... ]
    >>> print(*describe_circuits(heads), sep="\\n")
    copying: 1 of 2 heads copies the tokens that it attends to (score above 0.5; random maps: 0 on average),
    most of all a 0 (0.90)
    norm of W_O: largest for a 0 (2.00), smallest for a 1 (1.00), mean 1.50
    """
    scored = [one for one in heads if not math.isnan(one.copying)]
    if scored:
        count = sum(one.copying > COPYING for one in scored)
        top = max(scored, key=lambda one: one.copying)
        verb = "copies" if count == 1 else "copy"
        pronoun = "it attends" if count == 1 else "they attend"
        yield (
            f"copying: {count} of {len(scored)} heads {verb} the {top.over} that {pronoun} to "
            f"(score above {COPYING}; "
            f"random maps: 0 on average), most of all {top.site} {top.head} ({top.copying:.2f})"
        )
    else:
        yield "copying: no head has a W_V and W_O of its own"
    largest, smallest = (pick(heads, key=lambda one: one.output_norm) for pick in (max, min))
    mean = sum(one.output_norm for one in heads) / len(heads)
    yield (
        f"norm of W_O: largest for {largest.site} {largest.head} ({largest.output_norm:.2f}), "
        "smallest for "
        f"{smallest.site} {smallest.head} ({smallest.output_norm:.2f}), mean {mean:.2f}"
    )


def describe_spectrum(spectrum: LayerSpectrum) -> str:
    """One sentence about the dimensions in which the heads of a layer compare tokens.

    >>> from headwise.head_analysis.rank_analysis import DimensionCount, LayerSpectrum
    >>> head = DimensionCount(5, 16, 5.2)
    >>> spectrum = LayerSpectrum("a", (head, head), DimensionCount(47, 128, 48.0), head, head, ())
    >>> print(describe_spectrum(spectrum))
    a: 47 of 128 dimensions carry 90 % of the scores of all heads; Gaussian matrices: 48. Its heads share no dimensions
    beyond chance. A single head uses 5 of 16 on average; Gaussian: 5.2
    """
    summed, heads = spectrum.summed, spectrum.heads
    ratio = summed.dims / summed.chance if summed.chance else 1.0
    verdict = (
        "Its heads compare tokens in fewer dimensions than chance"
        if ratio < FEWER
        else "Its heads share no dimensions beyond chance"
    )
    own, chance = (
        sum(getattr(head, name) for head in heads) / len(heads) for name in ("dims", "chance")
    )
    most = max(head.most for head in heads)
    return (
        f"{spectrum.site}: {summed.dims} of {summed.most} dimensions carry 90 % of the scores of "
        "all heads; Gaussian "
        f"matrices: {summed.chance:.3g}. {verdict}. A single head uses {own:.3g} of {most} on "
        "average; Gaussian: "
        f"{chance:.3g}"
    )


def describe_collapse(depths: Sequence[DepthSimilarity]) -> Iterator[str]:
    """One sentence for each stack: how much its tokens differ before the first layer and after the
    last.

    >>> from headwise.head_analysis.head_table import Measure
    >>> half, tenth = Measure(0.5, 0.4, 0.6, 0.5), Measure(0.1, 0.1, 0.1, 0.5)
    >>> print(
    ...     *describe_collapse(
    ...         [DepthSimilarity("a", 0, half, half), DepthSimilarity("a", 6, tenth, tenth)]
    ...     )
    ... )
    a: tokens differ by 0.50 of their norm before the first layer and by 0.10 after layer 6 (0: all tokens are equal, at
    most 1). The states become more similar with depth
    """
    for stack in dict.fromkeys(depth.stack for depth in depths):
        own = sorted(
            (depth for depth in depths if depth.stack == stack), key=lambda depth: depth.layers
        )
        first, last = own[0], own[-1]
        separated = (
            last.residual.low > first.residual.high or last.residual.high < first.residual.low
        )
        direction = "more" if last.residual.value < first.residual.value else "less"
        verdict = (
            f"become {direction} similar"
            if separated
            else "stay as similar as the intervals can tell"
        )
        yield (
            f"{stack}: tokens differ by {first.residual.value:.2f} of their norm before the first "
            "layer and by "
            f"{last.residual.value:.2f} after layer {last.layers} (0: all tokens are equal, at "
            "most 1). The states "
            f"{verdict} with depth"
        )


def collapse_data(depths: Sequence[DepthSimilarity]) -> list[dict[str, Any]]:
    """The similarities as plain values."""
    return [
        {
            "stack": depth.stack,
            "layers": depth.layers,
            "residual": depth.residual.data,
            "second": depth.second.data,
        }
        for depth in depths
    ]
