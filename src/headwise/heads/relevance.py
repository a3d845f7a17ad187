"""Layer-wise relevance propagation: what every number had a share in, from an output back, nothing added or lost.

The relevance of an output is divided among inputs by what each contributes to it, positive and negative contributions
apart, alpha and beta of it; a bias is shared alike by all inputs. What an operation hands back is brought to the sum of
what it was handed (1905.09418; Bach et al. 2015 for the rule).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALPHA = BETA = 0.5
STABILISER = 1e-5
MAX_CELLS = 2**22  # contributions that are looked at together
BackwardRule = Callable[[Tensor], list[Tensor]]


@dataclass(eq=False)
class RelevanceNode:
    """Numbers [tokens, ...] on the way, and the relevance that has come back to them."""

    value: Tensor
    received: Tensor | None = field(default=None)

    def add_relevance(self, relevance: Tensor) -> None:
        """More of it."""
        self.received = relevance if self.received is None else self.received + relevance

    @property
    def relevance(self) -> Tensor:
        """All of it; none where nothing came."""
        return torch.zeros_like(self.value) if self.received is None else self.received


def alpha_beta_shares(relevance: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """What one contribution of 1 gets back of a relevance, if positive and if negative, of the sums of either sign."""
    return ALPHA * relevance / (positive + STABILISER), BETA * relevance / (negative - STABILISER)


class RelevanceTape:
    """Operations in their order, each of which knows how to hand relevance back."""

    def __init__(self) -> None:
        self.steps: list[tuple[RelevanceNode, Sequence[RelevanceNode], BackwardRule]] = []

    def _record(self, value: Tensor, inputs: Sequence[RelevanceNode], back: BackwardRule) -> RelevanceNode:
        out = RelevanceNode(value)
        self.steps.append((out, inputs, back))
        return out

    def linear(self, x: RelevanceNode, weight: Tensor, bias: Tensor | None, value: Tensor | None = None) -> RelevanceNode:
        """W x + b of [tokens, in], by weight [out, in]."""
        weight = weight.double()
        constant = weight.new_zeros(len(weight)) if bias is None else bias.double()
        y = x.value @ weight.T + constant if value is None else value

        def back(relevance: Tensor) -> list[Tensor]:
            step = max(1, MAX_CELLS // weight.numel())
            bands = zip(x.value.split(step), relevance.split(step), strict=True)
            return [torch.cat([_linear_backward(own, weight, constant, told) for own, told in bands])]

        return self._record(y, [x], back)

    def elementwise_linear(self, x: RelevanceNode, weight: Tensor, bias: Tensor | None) -> RelevanceNode:
        """One output of each token: w_t x_t + b_t, by weight [tokens, in]."""
        weight = weight.double()
        constant = 0 if bias is None else bias.double()[:, None] / weight.shape[1]
        contributed = weight * x.value + constant
        return self._record(contributed.sum(1), [x], lambda told: [_divide_relevance(contributed, told[:, None])])

    def sum_terms(self, *terms: RelevanceNode) -> RelevanceNode:
        """Terms of one shape, added up."""
        stacked = torch.stack([one.value for one in terms], -1)
        return self._record(stacked.sum(-1), terms, lambda told: list(_divide_relevance(stacked, told[..., None]).unbind(-1)))

    def identity(self, x: RelevanceNode, value: Tensor) -> RelevanceNode:
        """Each number changed by itself: it alone contributed, so relevance goes back as it is."""
        return self._record(value, [x], lambda told: [told])

    def attention_read(self, v: RelevanceNode, w_HTS: Tensor, kv_head_of_query: Sequence[int]) -> RelevanceNode:
        """[T, H, V]: what each row of constant weights reads of values [S, G, V]; row h reads values reads[h]."""
        w_HTS, v_HSV = w_HTS.double(), v.value[:, list(kv_head_of_query)].transpose(0, 1)

        def back(relevance: Tensor) -> list[Tensor]:
            parts = _attention_read_backward(w_HTS, v_HSV, relevance.transpose(0, 1)).transpose(0, 1)
            index = torch.tensor(list(kv_head_of_query), device=v.value.device)
            return [torch.zeros_like(v.value).index_add_(1, index, parts)]

        return self._record((w_HTS @ v_HSV).transpose(0, 1), [v], back)

    def reshape(self, x: RelevanceNode, shape: Sequence[int]) -> RelevanceNode:
        """The same numbers side by side in another way."""
        return self._record(x.value.reshape(*shape), [x], lambda told: [told.reshape(x.value.shape)])

    def backward(self, out: RelevanceNode, relevance: Tensor) -> None:
        """Hand the relevance of an output back to everything that had a share in it."""
        out.add_relevance(relevance)
        for node, inputs, rule in reversed(self.steps):
            if node.received is None:
                continue
            found, total = rule(node.received), node.received.sum()
            came = torch.stack([one.sum() for one in found]).sum()
            if came == 0 and total != 0:
                raise ValueError("relevance has nowhere to go: an operation on the way had inputs of zeros alone")
            for one, told in zip(inputs, found, strict=True):
                one.add_relevance(told * (total / came) if total != 0 else torch.zeros_like(told))


def _divide_relevance(contributed: Tensor, relevance: Tensor) -> Tensor:
    """Relevance divided along the last axis by contributions."""
    positive, negative = contributed.clamp(min=0), contributed.clamp(max=0)
    gain, loss = alpha_beta_shares(relevance, positive.sum(-1, keepdim=True), negative.sum(-1, keepdim=True))
    return positive * gain + negative * loss


def _linear_backward(x: Tensor, weight: Tensor, bias: Tensor, relevance: Tensor) -> Tensor:
    """Of a few tokens: every contribution [tokens, out, in] is written out, for a bias takes part in its sign."""
    contributed = weight * x[:, None] + (bias / weight.shape[1])[:, None]
    return _divide_relevance(contributed, relevance[..., None]).sum(1)


def _attention_read_backward(w: Tensor, v: Tensor, relevance: Tensor) -> Tensor:
    """Of contributions w_ts v_s: those of either sign are sums of two products."""
    more, less, up, down = w.clamp(min=0), w.clamp(max=0), v.clamp(min=0), v.clamp(max=0)
    gain, loss = alpha_beta_shares(relevance, more @ up + less @ down, more @ down + less @ up)
    return up * (more.mT @ gain + less.mT @ loss) + down * (less.mT @ gain + more.mT @ loss)
