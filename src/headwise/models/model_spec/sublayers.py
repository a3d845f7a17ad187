"""Specs of sublayers: feed-forwards, experts, and sequence mixers in place of attention (a gated
recurrent unit, and a causal convolution).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ...util.errors import SpecError
from ...util.size_limits import MAX_WIDTH, check_size
from .components import SpecNode, WeightSpec, add_prefix, make_weight


@dataclass(frozen=True, repr=False)
class FeedForwardSpec(SpecNode):
    """y = W_down act(W_up x), or W_down (act(W_gate x) * W_up x) when form="gated"; `bias` lists
    their biases.

    `bias` holds the initials of the matrices with a bias, such as "ud" (up and down). The gated
    feed-forward of Llama-2-7B has 3 d f parameters:

    >>> sum(w.numel for w in FeedForwardSpec(11008, "silu", form="gated").weights(4096))
    135266304
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"form": ("plain", "gated")}
    hidden: int
    activation: str = "gelu"
    form: str = "plain"
    bias: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        letters = "".join(name[0] for name in self.matrix_layouts)
        if set(self.bias) - set(letters) or len(set(self.bias)) != len(self.bias):
            raise SpecError(
                f"FeedForwardSpec(bias={self.bias!r}) names unknown biases; use letters of "
                f"{letters!r}, each once"
            )

    @property
    def matrix_layouts(self) -> dict[str, str]:
        """The axes of each matrix by its name."""
        gate = {"gate": "hidden model"} if self.form == "gated" else {}
        return {"up": "hidden model"} | gate | {"down": "model hidden"}

    def weights(self, width: int, num_experts: int = 0) -> Iterator[WeightSpec]:
        """Yield the weights at this model width; with `num_experts`, stacked along a first axis of
        experts.
        """
        expert_axis, sizes = ("expert ", {"expert": num_experts}) if num_experts else ("", {})
        sizes |= {"model": width, "hidden": self.hidden}
        for name, axes in self.matrix_layouts.items():
            yield make_weight(name, expert_axis + axes, **sizes)
            if name[0] in self.bias:
                yield make_weight(f"{name}_bias", expert_axis + axes.split()[0], **sizes)

    def matmul_weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the matrices that each token is multiplied with."""
        yield from (
            make_weight(name, axes, model=width, hidden=self.hidden)
            for name, axes in self.matrix_layouts.items()
        )

    def active_params(self, width: int, num_tokens: int) -> int:
        """Return how many parameters `num_tokens` tokens use: all of them."""
        return sum(w.numel for w in self.weights(width))


@dataclass(frozen=True, repr=False)
class ExpertsSpec(SpecNode):
    """Mixture of experts: a router picks `top_k` of `count` feed-forwards per token; `shared`
    processes every token.

    scores="softmax" is a softmax over all experts, "softmax_of_top_k" a softmax over the chosen
    experts, "sigmoid" a sigmoid of each score, normalised over the chosen experts, "sigmoid_sum"
    the same without normalisation. bias="learned" adds a trained bias to the router's logits;
    "constant" a bias that only affects the choice of experts and is set by load balancing
    (DeepSeek-V3, 2412.19437). The sum of the chosen experts' outputs is multiplied by `scale`.

    Experts form `groups` of equal size, and each token uses experts of only `top_k_groups` of
    them: the groups with the highest single score (group_score="max", DeepSeek-V2, 2405.04434) or
    sum of two scores ("top2", DeepSeek-V3).

    >>> [w.name for w in ExpertsSpec(FeedForwardSpec(3), count=4, top_k=2).weights(7)]
    ['router', 'expert.up', 'expert.down']
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scores": ("softmax", "softmax_of_top_k", "sigmoid", "sigmoid_sum"),
        "bias": ("", "learned", "constant"),
        "group_score": ("max", "top2"),
    }
    expert: FeedForwardSpec
    count: int
    top_k: int
    shared: FeedForwardSpec | None = None
    scores: str = "softmax"
    bias: str = ""
    scale: float = 1.0
    groups: int = 1
    top_k_groups: int = 1
    group_score: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.count:
            raise SpecError(
                f"ExpertsSpec(top_k={self.top_k}) is more than count={self.count}; use at most "
                f"{self.count}"
            )
        if self.groups > 1:
            self._check_groups()

    def _check_groups(self) -> None:
        """Raise if the experts cannot be chosen within groups of equal size."""
        size = self.count // self.groups
        if self.count % self.groups:
            raise SpecError(
                f"ExpertsSpec(groups={self.groups}) must divide count={self.count}; give a divisor"
            )
        if self.top_k_groups > self.groups:
            limit = f"use at most {self.groups}"
            raise SpecError(
                f"ExpertsSpec(top_k_groups={self.top_k_groups}) exceeds groups={self.groups}; "
                f"{limit}"
            )
        if self.top_k > self.top_k_groups * size:
            fact = (
                f"ExpertsSpec(top_k={self.top_k}) is more than {self.top_k_groups} groups "
                f"of {size} experts hold"
            )
            raise SpecError(
                f"{fact}; use at most {self.top_k_groups * size}, or a larger top_k_groups"
            )
        if self.group_score == "top2" and size < 2:
            raise SpecError(
                f"ExpertsSpec(group_score='top2') needs two experts per group, got {size}; use "
                "fewer groups"
            )

    def weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the weights at this model width."""
        yield make_weight("router", "expert model", expert=self.count, model=width)
        if self.bias:
            bias = make_weight("router_bias", "expert", expert=self.count)
            yield replace(bias, trainable=self.bias == "learned")
        yield from add_prefix("expert", "", self.expert.weights(width, self.count))
        if self.shared:
            yield from add_prefix("shared", "", self.shared.weights(width))

    def matmul_weights(self, width: int) -> Iterator[WeightSpec]:
        """Yield the matrices that each token is multiplied with: the router, the chosen experts and
        the shared one.
        """
        yield make_weight("router", "expert model", expert=self.count, model=width)
        for name, axes in self.expert.matrix_layouts.items():
            yield make_weight(
                f"expert.{name}",
                f"active {axes}",
                active=self.top_k,
                model=width,
                hidden=self.expert.hidden,
            )
        yield from (
            add_prefix("shared", "", self.shared.matmul_weights(width)) if self.shared else ()
        )

    def active_params(self, width: int, num_tokens: int) -> int:
        """Return how many parameters `num_tokens` tokens use, with the expected number of different
        experts.

        >>> experts = ExpertsSpec(
        ...     FeedForwardSpec(3), count=4, top_k=2
        ... )  # router: 20 parameters, each expert: 30
        >>> [experts.active_params(5, tokens) for tokens in (0, 1, 2, 3)]
        [20, 80, 110, 125]
        """
        total = sum(w.numel for w in self.weights(width))
        per_expert = self.expert.active_params(width, num_tokens)
        return total - round(per_expert * (self.count - self.expected_experts(num_tokens)))

    def expected_experts(self, num_tokens: int) -> float:
        """Return the expected number of different experts that `num_tokens` tokens choose: E (1 -
        (1 - k/E)^n).

        Every token chooses k of E experts, each with the same probability and independently of
        other tokens. Of 128 experts, 32 tokens that choose 4 each meet about 82:

        >>> experts = ExpertsSpec(FeedForwardSpec(3), count=128, top_k=4)
        >>> experts.expected_experts(0), experts.expected_experts(32)
        (0.0, 81.65...)
        """
        if self.top_k == self.count:
            return float(self.count if num_tokens else 0)
        log_share_unused = num_tokens * math.log1p(-self.top_k / self.count)
        return -self.count * math.expm1(log_share_unused)


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
