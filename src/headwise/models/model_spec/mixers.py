"""Specs of sequence mixers in place of attention: a gated recurrent unit, and a
causal convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...util.size_limits import MAX_WIDTH, check_size
from .components import SpecNode, WeightSpec, make_weight


@dataclass(frozen=True, repr=False)
class SequenceMixerSpec(SpecNode):
    """Base class of mixers of the tokens of a row, in place of attention: matrix products for each
    token, and a state of fixed size between calls.
    """

    @property
    def text(self) -> str:
        """Name in the table of a model's layers."""
        raise NotImplementedError(f"{type(self).__name__} has no name")

    @property
    def starts_from_source(self) -> bool:
        """True if its first state follows from the last state of an encoder."""
        return False

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the weights at this model width."""
        raise NotImplementedError(f"{type(self).__name__} lists no weights")

    def matmul_weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the matrices that multiply each token; the first state's, once a sequence."""
        yield from (w for w in self.weights(width) if len(w.shape) == 2 and w.name != "start")

    @property
    def state_vectors(self) -> int:
        """Vectors of the model width that decoding keeps of each row."""
        raise NotImplementedError(f"{type(self).__name__} does not count its state")

    @property
    def saved_vectors(self) -> Mapping[str, int]:
        """Vectors of the model width that each token saves for the backward pass."""
        raise NotImplementedError(f"{type(self).__name__} does not count what it saves")

    @property
    def ends_with_product(self) -> bool:
        """True if its output is the result of a matrix product."""
        return False


@dataclass(frozen=True, repr=False)
class RecurrentSpec(SequenceMixerSpec):
    """A gated recurrent unit over the tokens, in order, as wide as the model (1406.1078; gates as
    in `torch.nn.GRU`).

    initial="zeros": the state before the first token is 0; "source": tanh(W s + b) of the encoder's
    state s after its last token, the vector of fixed length of an encoder-decoder without
    attention.

    >>> [(w.name, w.shape) for w in RecurrentSpec().weights(5)][:2]
    [('input', (15, 5)), ('input_bias', (15,))]
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"initial": ("zeros", "source")}
    initial: str = "zeros"

    @property
    def text(self) -> str:
        """Name in the table of a model's layers."""
        return "gated recurrence"

    @property
    def state_vectors(self) -> int:
        """The state after the last token."""
        return 1

    @property
    def saved_vectors(self) -> Mapping[str, int]:
        """The input, the states between the tokens, and gates and candidates."""
        return {"input": 1, "states": 1, "gates": 7}

    @property
    def starts_from_source(self) -> bool:
        """True if its first state follows from the last state of an encoder."""
        return self.initial == "source"

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the weights at this model width; a matrix stacks the rows of the reset, update and
        new gates.
        """
        for name in ("input", "state"):
            yield make_weight(name, "gates model", gates=3 * width, model=width)
            yield make_weight(f"{name}_bias", "gates", gates=3 * width)
        if self.initial == "source":
            yield make_weight("start", "hidden model", hidden=width, model=width)
            yield make_weight("start_bias", "hidden", hidden=width)


@dataclass(frozen=True, repr=False)
class ConvolutionSpec(SequenceMixerSpec):
    """A causal convolution: y_t = b + the sum of W_j x_(t - j dilation) for j in 0 .. kernel - 1,
    with zeros before the first token; as `torch.nn.Conv1d` on a row with (kernel - 1) dilation
    zeros on its left.

    >>> [(w.name, w.shape) for w in ConvolutionSpec(kernel=3).weights(5)]
    [('taps', (5, 15)), ('taps_bias', (5,))]
    >>> ConvolutionSpec(kernel=3, dilation=4).reach
    8
    """

    kernel: int
    dilation: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("(kernel - 1) dilation", self.reach, MAX_WIDTH)

    @property
    def text(self) -> str:
        """Name in the table of a model's layers."""
        return f"convolution of {self.kernel} tokens" + (
            f", {self.dilation} apart" if self.dilation > 1 else ""
        )

    @property
    def state_vectors(self) -> int:
        """The last tokens."""
        return self.reach

    @property
    def saved_vectors(self) -> Mapping[str, int]:
        """The tokens that each token reads, side by side."""
        return {"window": self.kernel}

    @property
    def ends_with_product(self) -> bool:
        """True if its output is the result of a matrix product."""
        return True

    @property
    def reach(self) -> int:
        """Distance of the furthest token that a token reads; the state has as many tokens."""
        return (self.kernel - 1) * self.dilation

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the weights at this model width; the columns of the matrix are the furthest token
        first.
        """
        yield make_weight("taps", "hidden window", hidden=width, window=self.kernel * width)
        yield make_weight("taps_bias", "hidden", hidden=width)
