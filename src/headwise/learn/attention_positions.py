"""Runs of document 003, section 5.2: sinusoids, rotary embeddings, and biases by distance."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.interfaces.core_types import Probe
from ..attention.masking.sequence_info import SequenceInfo
from ..attention.position_embeddings import sinusoidal_table
from ..attention.presets import from_toml
from .catalogue import Outcome, judge
from .matrix_figures import draw_grids
from .measured_layers import largest_difference, make_layer, sample


def half_of_the_encoding(*, halves: str = "sine") -> Outcome:
    """Error of writing PE(pos + 5) as a linear map of PE(pos): with sines alone, and with sines and
    cosines.
    """
    table = sinusoidal_table(torch.arange(64), 16)
    errors = {"sine": _shift_error(table[:, ::2]), "both": _shift_error(table)}
    corrected = errors["both"] < 1e-9 < errors["sine"]
    figure = draw_grids({"": (1 + table.T) / 2}, "position", "channel")
    return judge(errors[halves] < 1e-9, corrected=corrected, **errors, figure=figure)


def _shift_error(table: Tensor, shift: int = 5) -> float:
    before = table[:-shift]
    after = table[shift:]
    solution = torch.linalg.lstsq(before, after, rcond=1e-10, driver="gelsd").solution
    return largest_difference(before @ solution, after)


def rotary_scores(*, rotary: bool = True) -> Outcome:
    """Spread of the scores at equal distance, when all tokens are equal: rotary and sinusoidal
    positions; and how much rotary scores differ between distances.
    """
    scores = {is_rotary: _scores_of_equal_tokens(is_rotary) for is_rotary in (True, False)}
    spreads = {
        is_rotary: max(float(s.diagonal(n, -2, -1).std(-1).max()) for n in (-3, 0, 4))
        for is_rotary, s in scores.items()
    }
    by_distance = float(scores[True][:, :, 0].std(-1).min())
    holds = spreads[rotary] < 1e-12 < min(by_distance, spreads[False])
    kinds = {"rotary": scores[True][0, 0], "sinusoids": scores[False][0, 0]}
    above = {name: each - each.min() for name, each in kinds.items()}
    return judge(holds, spread=spreads[rotary], figure=draw_grids(above, "key", "query"))


def _scores_of_equal_tokens(rotary: bool) -> Tensor:
    modifiers = 'modifiers = [{part = "Rotary"}]' if rotary else ""
    layer = make_layer(from_toml(f"model = 16\nheads = {{q = 2, dim = 8}}\n{modifiers}"))
    x = sample(1, 1, 1, 16).expand(1, 9, 16)
    x = x if rotary else x + sinusoidal_table(torch.arange(9), 16)
    probe = Probe("scores")
    layer(x, probe=probe)
    return probe.tensors["scores"].detach()


def relative_positions(*, absolute: bool = False) -> Outcome:
    """Change of the outputs if all tokens move by 100 positions: a bias by distance in the scores,
    or sinusoids.
    """
    modifiers = "" if absolute else 'modifiers = [{part = "Alibi"}]'
    layer = make_layer(
        from_toml(f'model = 16\nheads = {{q = 2, dim = 8}}\npattern = "causal()"\n{modifiers}')
    )
    x = sample(1, 1, 9, 16)
    outputs = []
    near = torch.arange(9)
    moved_positions = torch.where(near == 8, 50, near)  # the last token is farther from the others
    for positions in (near, near + 100, moved_positions):
        tokens = SequenceInfo(positions[None], torch.zeros(1, 9, dtype=torch.long))
        outputs.append(
            layer(x + sinusoidal_table(positions, 16) if absolute else x, sequence=tokens).detach()
        )
    change = largest_difference(*outputs[:2])
    distance_change = largest_difference(outputs[0], outputs[2])
    holds = change < 1e-12 and distance_change > 1e-3
    return judge(holds, change=change, apart=distance_change)
