"""Sequence mixers in place of attention: a gated recurrent unit, or a causal convolution, over the tokens of each row.

Also the state of an encoder that a decoder starts from.

Shapes: B batch, T tokens, D model width, R tokens of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..cache import HiddenStateCache
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ConvolutionSpec, RecurrentSpec, SequenceMixerSpec
from ..ops.linear import linear
from .feed_forward import SpecModule


class SequenceMixer(SpecModule):
    """Base class of mixers: a module as wide as the model, with a state of fixed size for each row."""

    def __init__(self, spec: SequenceMixerSpec, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_weights(spec.weights(width))

    def cache(self, batch: int) -> HiddenStateCache:
        """Return an empty cache for the state of each row."""
        weight = next(self.parameters())
        return HiddenStateCache(batch, weight.dtype, weight.device)

    def forward(
        self,
        x_BTD: Tensor,
        sequence: SequenceInfo,
        cache: HiddenStateCache | None = None,
        source_state: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs [B, T, D]; `cache` has the state after the tokens before them.

        `source_state` [B, D] is the encoder's state after its last token. Padding leaves the state as it is.
        """
        _check_one_segment(sequence)
        is_real = None if sequence.start is not None else sequence.is_real.expand(x_BTD.shape[:2])
        state = None if cache is None else cache.state
        state = self.initial_state(x_BTD, source_state) if state is None else state
        y_BTD, state = self.mix(x_BTD, state, is_real)
        if cache is not None:
            # The state of a convolution is a view of all its tokens, which the cache would keep in memory.
            cache.advance(state.clone(), sequence)
        return y_BTD

    def initial_state(self, x_BTD: Tensor, source_state: Tensor | None) -> Tensor:
        """Return the state of each row before its first token."""
        raise NotImplementedError(f"{type(self).__name__} has no first state")

    def mix(self, x_BTD: Tensor, state: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the last state; `is_real` [B, T] is False for padding, None without padding."""
        raise NotImplementedError(f"{type(self).__name__} does not mix")


class GatedRecurrence(SequenceMixer):
    """h_t = (1 - z_t) n_t + z_t h_(t-1) for the tokens of a row in order (1406.1078).

    r_t = sigmoid(W_r x_t + U_r h_(t-1)), z_t likewise, and n_t = tanh(W_n x_t + r_t U_n h_(t-1)), each matrix with a
    bias, as in `torch.nn.GRU`. The outputs are the states.
    """

    def __init__(self, spec: RecurrentSpec, width: int) -> None:
        super().__init__(spec, width)
        self.initial = spec.initial

    def mix(self, x_BTD: Tensor, state: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states after each token, and the last one."""
        inputs = self.linear(x_BTD, "input").unbind(1)
        states_BTD: list[Tensor] = []
        for t, input_BG in enumerate(inputs):
            new_BD = self._next_state(input_BG, state)
            state = new_BD if is_real is None else torch.where(is_real[:, t, None], new_BD, state)
            states_BTD.append(state)
        return torch.stack(states_BTD, 1) if states_BTD else x_BTD, state

    def _next_state(self, input_BG: Tensor, state_BD: Tensor) -> Tensor:
        hidden_BG = linear(state_BD, self.get_parameter("state"), self.get_parameter("state_bias"))
        gates = 2 * self.width
        reset_BD, update_BD = torch.sigmoid(input_BG[:, :gates] + hidden_BG[:, :gates]).chunk(2, -1)
        candidate_BD = torch.tanh(input_BG[:, gates:] + reset_BD * hidden_BG[:, gates:])
        return candidate_BD + update_BD * (state_BD - candidate_BD)

    def initial_state(self, x_BTD: Tensor, source_state: Tensor | None) -> Tensor:
        """Return zeros, or the state that follows from the encoder's last one."""
        if self.initial == "zeros":
            return x_BTD.new_zeros(x_BTD.shape[0], self.width)
        if source_state is None:
            raise ValueError("this recurrence starts from the state of an encoder; call the model with source=")
        return torch.tanh(self.linear(source_state, "start"))


class CausalConvolution(SequenceMixer):
    """y_t = b + the sum of W_j x_(t - j dilation), with zeros before the first token, as in `torch.nn.Conv1d` with
    padding on the left. The state is the last (kernel - 1) dilation tokens.

    The tokens that a token reads are laid side by side, so that one matrix product computes all positions.
    """

    def __init__(self, spec: ConvolutionSpec, width: int) -> None:
        super().__init__(spec, width)
        self.reach, self.dilation = spec.reach, spec.dilation

    def initial_state(self, x_BTD: Tensor, source_state: Tensor | None) -> Tensor:
        """Return zeros, [B, R, D]."""
        return x_BTD.new_zeros(x_BTD.shape[0], self.reach, self.width)

    def mix(self, x_BTD: Tensor, state: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolution over the state and x, and the last tokens of both."""
        if is_real is None:
            return self._convolve(torch.cat([state, x_BTD], 1))
        # Padding is moved to the front of each row, before the state, where no token reads it.
        is_real = torch.cat([is_real.new_ones(state.shape[:2]), is_real], 1)
        order = is_real.byte().argsort(dim=1, stable=True)
        rows = torch.arange(len(order), device=order.device)[:, None]
        y_BTD, state = self._convolve(torch.cat([state, x_BTD], 1)[rows, order])
        # Outputs begin after the first R places, which hold padding or the state alone.
        return y_BTD[rows, (order.argsort(1)[:, self.reach :] - self.reach).clamp(min=0)], state

    def _convolve(self, tokens_BSD: Tensor) -> tuple[Tensor, Tensor]:
        count = tokens_BSD.shape[1] - self.reach
        window = [tokens_BSD[:, first : first + count] for first in range(0, self.reach + 1, self.dilation)]
        return self.linear(torch.cat(window, -1), "taps"), tokens_BSD[:, count:]


MIXERS: Mapping[type[SequenceMixerSpec], Callable[..., SequenceMixer]] = {
    RecurrentSpec: GatedRecurrence,
    ConvolutionSpec: CausalConvolution,
}


def make_mixer(spec: SequenceMixerSpec, width: int) -> SequenceMixer:
    """Return the module of a recurrence or convolution, as wide as the model."""
    return MIXERS[type(spec)](spec, width)


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
        raise ValueError("a recurrence or convolution has one state per row and cannot separate packed texts; pad them")
