"""A gated recurrent unit over the tokens of each row, and the state of an encoder that a decoder starts from.

Shapes: B batch, T tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import HiddenStateCache
from ..masking.sequence_info import SequenceInfo
from ..model_spec import RecurrentSpec
from ..ops.linear import linear
from .feed_forward import SpecModule


class GatedRecurrence(SpecModule):
    """h_t = (1 - z_t) n_t + z_t h_(t-1) for the tokens of a row in order (1406.1078).

    r_t = sigmoid(W_r x_t + U_r h_(t-1)), z_t likewise, and n_t = tanh(W_n x_t + r_t U_n h_(t-1)), each matrix with a
    bias, as in `torch.nn.GRU`. Padding leaves the state as it is.
    """

    def __init__(self, spec: RecurrentSpec, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        self.register_weights(spec.weights(width))

    def cache(self, batch: int) -> HiddenStateCache:
        """Return an empty cache for the state of each row."""
        weight = self.get_parameter("state")
        return HiddenStateCache(batch, weight.dtype, weight.device)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceInfo,
        cache: HiddenStateCache | None = None,
        source_state: Tensor | None = None,
    ) -> Tensor:
        """Return the states after each token, [B, T, D]; `cache` has the state after the tokens before them.

        `source_state` [B, D] is the encoder's state after its last token.
        """
        _check_one_segment(sequence)
        is_real = None if sequence.start is not None else sequence.is_real.expand(x_BTD.shape[:2])
        state_BD = self._initial_state(x_BTD, source_state) if cache is None or cache.state is None else cache.state
        inputs = self.linear(x_BTD, "input").unbind(1)
        states_BTD: list[Tensor] = []
        for t, input_BG in enumerate(inputs):
            new_BD = self._next_state(input_BG, state_BD)
            state_BD = new_BD if is_real is None else torch.where(is_real[:, t, None], new_BD, state_BD)
            states_BTD.append(state_BD)
        if cache is not None:
            cache.advance(state_BD, sequence)
        return torch.stack(states_BTD, 1) if states_BTD else x_BTD

    def _next_state(self, input_BG: Tensor, state_BD: Tensor) -> Tensor:
        hidden_BG = linear(state_BD, self.get_parameter("state"), self.get_parameter("state_bias"))
        gates = 2 * self.width
        reset_BD, update_BD = torch.sigmoid(input_BG[:, :gates] + hidden_BG[:, :gates]).chunk(2, -1)
        candidate_BD = torch.tanh(input_BG[:, gates:] + reset_BD * hidden_BG[:, gates:])
        return candidate_BD + update_BD * (state_BD - candidate_BD)

    def _initial_state(self, x_BTD: Tensor, source_state: Tensor | None) -> Tensor:
        if self.spec.initial == "zeros":
            return x_BTD.new_zeros(x_BTD.shape[0], self.width)
        if source_state is None:
            raise ValueError("this recurrence starts from the state of an encoder; call the model with source=")
        return torch.tanh(self.linear(source_state, "start"))


def last_states(states_BTD: Tensor, sequence: SequenceInfo) -> Tensor:
    """Return the state of the last token of each row that is no padding, [B, D].

    >>> states = torch.arange(6.0).view(2, 3, 1)
    >>> last_states(states, SequenceInfo.from_batch(states, lengths=[3, 2])).tolist()
    [[2.0], [4.0]]
    """
    _check_one_segment(sequence)
    if sequence.start is not None:
        return states_BTD[:, -1]
    order = torch.arange(sequence.count, device=states_BTD.device)
    last_B = torch.where(sequence.is_real, order, 0).amax(1).expand(len(states_BTD))
    return states_BTD[torch.arange(len(last_B), device=last_B.device), last_B]


def _check_one_segment(sequence: SequenceInfo) -> None:
    if sequence.start is None and bool((sequence.segment > 0).any()):
        raise ValueError("a recurrence has one state per row and cannot separate packed texts; pad them instead")
