"""Random inputs and layers of the runs, and the comparison tables of documents 000 and 003.

The tables compare attention, GRU, LSTM and convolution; every cell is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.attention import Attention
from ..attention.interfaces.core_types import Probe
from ..attention.position_embeddings import sinusoidal_table
from ..attention.presets import design
from ..attention.spec.attention_spec import AttentionSpec
from ..costs.complexity import (
    DISTANCES,
    LAYERS,
    MODEL_WIDTH,
    ComplexityTable,
    LayerComplexity,
    LayerReach,
    LayerSizes,
    measure_layer_reach,
    measure_scaling,
)
from ..report.text import NOT_MEASURED, is_missing, median_time
from .catalogue import Number, Outcome, judge
from .matrix_figures import Picture, draw_curves, draw_grids


def sample(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers in float64.

    >>> sample(0, 2, 3).shape, bool((sample(0, 2) == sample(0, 2)).all())
    (torch.Size([2, 3]), True)
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def samples(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return a sample of each shape, by the seeds 1, 2, and so on."""
    return [sample(seed, *shape) for seed, shape in enumerate(shapes, 1)]


def complexity_by_layer(tokens: int, model: int, **sizes: int) -> dict[str, LayerComplexity]:
    """Return the rows of `headwise cost --complexity` by layer."""
    rows = ComplexityTable.from_sizes(LayerSizes(tokens, model, **sizes)).layers
    return {row.name: row for row in rows}


def make_layer(spec: AttentionSpec, seed: int = 0, scale: float | None = None) -> Attention:
    """Make a float64 layer with normal weights of deviation `scale` (default: 1/sqrt(inputs))."""
    layer = Attention(spec).double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            deviation = parameter.shape[-1] ** -0.5 if scale is None else scale
            parameter.copy_(sample(1000 * seed + number, *parameter.shape) * deviation)
    return layer


def draw_flops(names: Sequence[str], model: int) -> Picture:
    """FLOPs of layers of `headwise cost --complexity` by the number of tokens."""
    rows = {tokens: complexity_by_layer(tokens, model) for tokens in (64, 512, 4096, 32768)}
    curves = {name: {n: row[name].flops for n, row in rows.items()} for name in names}
    return draw_curves(curves, "tokens", "FLOPs", log="xy")


def draw_masks(patterns: Mapping[str, str], tokens: int) -> Picture:
    """The pairs with a weight above 0 in a layer with each of these patterns."""
    masks: dict[str, Tensor] = {}
    for name, pattern in patterns.items():
        layer = make_layer(design(model=8, heads=1, pattern=pattern))
        masks[name] = (weights_of(layer, sample(1, 1, tokens, 8))[0, 0] > 0).double()
    return draw_grids(masks, "key", "query")


def weights_of(layer: Attention, x: Tensor, source: Tensor | None = None) -> Tensor:
    """The attention weights of a layer, [B, heads, T, S]."""
    probe = Probe("weights")
    layer(x, source=source, probe=probe)
    return probe.tensors["weights"].detach()


def size_text(tensor: Tensor) -> str:
    """The shape of a tensor as text.

    >>> size_text(torch.zeros(2, 3))
    '2 x 3'
    """
    return " x ".join(map(str, tensor.shape))


def make_gru(width: int) -> nn.GRU:
    """A GRU in float64 with torch's random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.GRU(width, width).double()


def entropy(weights: Tensor) -> Tensor:
    """The entropy in nats of weights along the last axis."""
    return -(weights * weights.clamp(min=1e-300).log()).sum(-1)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference of two tensors."""
    return float((one - other).detach().abs().max())


TOKENS = 64
LENGTHS = (512, 1024)
ROUNDS = 5  # of timing: the range shows whether another process ran at the same time
SHORT = 16
LONG = 64
VALUES = 4
WIDTH = 16  # lengths and sizes of the task of `_train`
STEPS = 200
BATCH = 64
EVALUATED = 512
# A name of `complexity` for each name of `complexity.LAYERS`.
NAMES = {"attention": "self-attention", "GRU": "GRU", "LSTM": "LSTM", "convolution": "convolution"}


# Both are filled when they are first needed, because the tables of two documents have the same
# cells.
_reach: dict[str, LayerReach] = {}
_cells: dict[str, Number] = {}


def _measure_reach() -> Mapping[str, LayerReach]:
    if not _reach:
        _reach.update({layer.name: layer for layer in measure_layer_reach(TOKENS)})
    return _reach


def measured_cells() -> Mapping[str, Number]:
    """Every measured number of the tables, by row and layer: `field_attention`, `chain_gru`."""
    if not _cells:
        _cells.update(_measure_cells())
    return _cells


def _measure_cells() -> Mapping[str, Number]:
    rounds = [
        measure_scaling(LayerSizes(max(LENGTHS), MODEL_WIDTH), LENGTHS) for _ in range(ROUNDS)
    ]
    less, more = (_count_flops(length) for length in LENGTHS)
    numbers: dict[str, Number] = {
        "tokens": TOKENS,
        "short": LENGTHS[0],
        "long": LENGTHS[1],
        "rounds": ROUNDS,
    }
    for name, layer in _measure_reach().items():
        seconds = [layers[NAMES[name]] for layers in rounds]
        milliseconds = _with_range([1000 * short for short, _ in seconds], ".2g")
        growth = _with_range([long / short for short, long in seconds], ".2g")
        cells = {
            "field": layer.receptive_field,
            "layers": layer.layers,
            "chain": layer.chain,
            "bytes": layer.state_bytes,
        }
        cells |= {f"gradient_{distance}": layer.gradients[distance] for distance in DISTANCES}
        cells |= {
            "shift": layer.shift,
            "permutation": layer.permutation,
            "parameters": layer.parameters,
        }
        cells |= {
            "ms": milliseconds,
            "growth": growth,
            "work": more[NAMES[name]] / less[NAMES[name]],
        }
        numbers |= {f"{row}_{name.lower()}": cell for row, cell in cells.items()}
    return numbers


def _with_range(values: Sequence[float], digits: str) -> str:
    """The median of several measurements with the smallest and the largest; "-" for a median that
    other processes disturbed.

    >>> _with_range([1.3, 1.0, 1.25, 1.2], ".2g"), _with_range([3.0, 1.0, 1.25], ".2g")
    ('1.2 (1–1.3)', '- (1–3)')
    """
    middle = median_time(values)
    shown = NOT_MEASURED if is_missing(middle) else format(middle, digits)
    return f"{shown} ({format(min(values), digits)}–{format(max(values), digits)})"


def _count_flops(tokens: int) -> dict[str, int]:
    """FLOPs of the layers that are timed."""
    return {name: row.flops for name, row in complexity_by_layer(tokens, MODEL_WIDTH).items()}


def table_beside_recurrence(*, local: str = "GRU") -> Outcome:
    """The tables of 000 and of 003, 4.1: attention is global, parallel and without decay; an RNN
    local and serial.

    `local` is the layer that the claim of local dependencies is tested on.
    """
    layers = _measure_reach()
    attention = layers["attention"]
    gru = layers["GRU"]
    others_hold = (
        attention.receptive_field == TOKENS
        and attention.chain < TOKENS < gru.chain
        and attention.gradients[32] > 1e3 * gru.gradients[32]
    )
    corrected = (
        others_hold
        and layers["convolution"].receptive_field < gru.receptive_field == TOKENS
        and gru.gradients[32] < 1e-3 * gru.gradients[1]
        and gru.state_bytes < attention.state_bytes
    )
    holds = others_hold and layers[local].receptive_field < TOKENS
    gradients = {name: layer.gradients for name, layer in layers.items()}
    figure = draw_curves(gradients, "distance", "derivative", log="xy")
    return judge(holds, corrected=corrected, **measured_cells(), figure=figure)


def table_beside_convolution(*, positions: bool = False) -> Outcome:
    """The table of 003, 4.2: a convolution has a fixed field and a bias for shifts; attention has
    no strong bias.

    Attention has one if it commutes with every permutation; with `positions` it gets sinusoids.
    """
    layer = make_layer(design(model=WIDTH, heads=2))
    x = sample(1, TOKENS, WIDTH)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))
    errors = [
        largest_difference(layer((x[order] + table)[None])[0], layer((x + table)[None])[0, order])
        for table in (torch.zeros(()), sinusoidal_table(torch.arange(TOKENS), WIDTH))
    ]
    layers = _measure_reach()
    is_local = layers["convolution"].receptive_field < TOKENS == layers["attention"].receptive_field
    no_bias = errors[1 if positions else 0] > 1e-9
    others_hold = is_local and layers["convolution"].shift < 1e-12
    corrected = (
        others_hold
        and max(errors[0], layers["attention"].permutation) < 1e-12 < errors[1]
        and layers["convolution"].permutation > 1e-3
    )
    return judge(
        others_hold and no_bias,
        corrected=corrected,
        **measured_cells(),
        explicit_attention=errors[1],
    )


# --- Extrapolation: trained on short sequences, tested on long ones -------------------------------


def table_of_lengths(*, steps: int = STEPS, marked_last: bool = False) -> Outcome:
    """Accuracy at 16 tokens, the length of training, and at 64: name the value of the one token
    that is marked.

    Training takes `steps`. With `marked_last`, the marked token is the last one, so that no layer
    needs any range.
    """
    numbers: dict[str, Number] = {"short": SHORT, "long": LONG, "chance": 1 / VALUES}
    with torch.random.fork_rng(devices=[]):
        for name in LAYERS:
            torch.manual_seed(0)
            numbers |= _train(name, steps, marked_last)
    sees_too_little = max(float(numbers["short_convolution"]), float(numbers["long_convolution"]))
    holds = float(numbers["long_attention"]) > 0.9
    return judge(holds and (marked_last or sees_too_little < 0.6), **numbers)


def _train(name: str, steps: int, marked_last: bool) -> dict[str, float]:
    layer = Attention(design(model=WIDTH, heads=2)) if name == "attention" else LAYERS[name]()
    embed = nn.Linear(VALUES + 1, WIDTH)
    head = nn.Linear(WIDTH, VALUES)

    def predict(x_BTC: Tensor) -> Tensor:
        x_BTD = embed(x_BTC)
        return head(x_BTD[:, -1] + _apply(layer, x_BTD)[:, -1])

    optimiser = torch.optim.Adam(nn.ModuleList((embed, layer, head)).parameters(), lr=1e-2)
    for _ in range(steps):
        x_BTC, goal_B = marked_values(BATCH, SHORT, marked_last)
        loss = F.cross_entropy(predict(x_BTC), goal_B)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    cells = {}
    with torch.no_grad():
        for row, tokens in (("short", SHORT), ("long", LONG)):
            x_BTC, goal_B = marked_values(EVALUATED, tokens, marked_last)
            cells[f"{row}_{name.lower()}"] = float(
                (predict(x_BTC).argmax(-1) == goal_B).float().mean()
            )
    return cells


def _apply(layer: nn.Module, x_BTD: Tensor) -> Tensor:
    """Run a layer over a batch; layers of `complexity` take one sequence, their inner layers
    several.
    """
    if isinstance(layer, Attention):
        output = layer(x_BTD)
        assert isinstance(output, Tensor)
        return output
    inner = layer.inner
    assert isinstance(inner, nn.Module)
    return (
        inner(x_BTD.mT).mT
        if isinstance(inner, nn.Conv1d)
        else inner(x_BTD.transpose(0, 1))[0].transpose(0, 1)
    )


def marked_values(batch: int, tokens: int, marked_last: bool = False) -> tuple[Tensor, Tensor]:
    """One-hot values with a mark on one token of each row, and the marked value."""
    values_BT = torch.randint(VALUES, (batch, tokens))
    place_B = torch.full((batch,), tokens - 1) if marked_last else torch.randint(tokens, (batch,))
    mark_BT = F.one_hot(place_B, tokens)
    x_BTC = torch.cat([F.one_hot(values_BT, VALUES), mark_BT[..., None]], -1).float()
    return x_BTC, values_BT[torch.arange(batch), place_B]
