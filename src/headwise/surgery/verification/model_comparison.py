"""What a model says of one text: its output, and its states behind every layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import suggest
from ...head_analysis.annotated_examples import Example
from ...head_analysis.objectives import get_output_tensor
from ...inspect.ablation import HeadPatch, HeadRef, ScaledOutput, patch
from ...inspect.model_inputs import ModelInputs, prepare_inputs
from ...inspect.site_hooks import ModelRun
from ...models import Transformer


class OutputAndStates(NamedTuple):
    """The output of a model, and its states behind every layer by the layer's name, "decoder.3"."""

    output: Tensor
    states: Mapping[str, Tensor]


def compute_output_and_states(net: Transformer, given: ModelInputs) -> OutputAndStates:
    """Both, of one call.

    >>> import headwise as hw
    >>> from headwise.inspect.model_inputs import prepare_inputs
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2}), seed=0
    ... ).eval()
    >>> said = compute_output_and_states(net, prepare_inputs(net, torch.tensor([[3, 1, 4]]), 0))
    >>> said.output.shape, {name: states.shape for name, states in said.states.items()}
    (torch.Size([1, 3, 50257]), {'decoder.0': torch.Size([1, 3, 8]), 'decoder.1': torch.Size([1, 3, 8])})
    """
    states: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for stack in net.stacks.values():
            for layer in stack.blocks:
                hooks.callback(layer.register_forward_hook(partial(_store_state, states, layer.name)).remove)
        return OutputAndStates(compute_output(net, given), states)


def compute_output(model: nn.Module, given: ModelInputs) -> Tensor:
    """What a model says, if all of it is finite: of numbers that are not, nothing can be proven."""
    with torch.inference_mode():
        found = get_output_tensor(ModelRun(model, given).run())
    if not bool(found.isfinite().all()):
        raise ValueError(f"{type(model).__name__} says numbers that are not finite; mend the model, or leave the text")
    return found


def _store_state(states: dict[str, Tensor], name: str, module: nn.Module, given: Any, said: Tensor) -> None:
    states[name] = said


# --- How far two models of the same layers go along with each other, layer by layer and in what they say ---


class CosineSummary(NamedTuple):
    """The cosine of what two models hold of a token: its mean over the tokens of all texts, and the lowest."""

    mean: float
    low: float


@dataclass(frozen=True)
class ModelAgreement:
    """The cosine of states behind every layer, and of what is said; where a head says it, how often both hold the same
    for likeliest, and the mean of KL(before || after), in nats."""

    layers: Mapping[str, CosineSummary]
    output: CosineSummary
    top1_match: float | None = None
    kl: float | None = None

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        layers = {name: one._asdict() for name, one in self.layers.items()}
        return {"layers": layers, "output": self.output._asdict(), "same_likeliest": self.top1_match, "kl": self.kl}


@dataclass
class AgreementAccumulator:
    """What was summed over texts; `speaks` says whether what is said are logits: "logits" or "states"."""

    output_kind: str
    sums: dict[str, list[float]] = field(default_factory=dict)
    num_top1_matches: int = 0
    kl: float = 0.0
    num_positions: int = 0

    def update(self, before: OutputAndStates, after: OutputAndStates) -> None:
        """What both made of one text more."""
        if before.states.keys() != after.states.keys():
            layers = f"{len(before.states)} and {len(after.states)}"
            raise ValueError(f"the two models have {layers} layers; compare models whose layers are the same in number")
        for name, states in before.states.items():
            self._add_cosine(name, states, after.states[name])
        self._add_cosine("", before.output, after.output)
        if self.output_kind == "logits":
            own, other = (one.output.double().reshape(-1, one.output.shape[-1]) for one in (before, after))
            self.num_top1_matches += int((own.argmax(-1) == other.argmax(-1)).sum())
            self.kl += float(F.kl_div(other.log_softmax(-1), own.log_softmax(-1), log_target=True, reduction="sum"))
            self.num_positions += len(own)

    def _add_cosine(self, name: str, one: Tensor, other: Tensor) -> None:
        each = F.cosine_similarity(one.double().flatten(0, -2), other.double().flatten(0, -2), dim=-1)
        total = self.sums.setdefault(name, [0.0, 0.0, 1.0])
        total[:] = total[0] + float(each.sum()), total[1] + len(each), min(total[2], float(torch.min(each)))

    @property
    def result(self) -> ModelAgreement:
        """The whole of it."""
        found = {name: CosineSummary(total / count, low) for name, (total, count, low) in self.sums.items()}
        said = found.pop("")
        if self.output_kind != "logits":
            return ModelAgreement(found, said)
        return ModelAgreement(
            found, said, self.num_top1_matches / self.num_positions, max(0.0, self.kl / self.num_positions)
        )


# --- Models that must say the same, held to it ---------------------------------------------------------

MAX_DOUBLE_PARAMETERS = 2 * 10**7  # parameters, up to which copies in double precision are made
MAX_DOUBLE_TEXTS = 16  # texts that are read in double precision
TOLERANCE_STEPS, HALF_TOLERANCE_STEPS = (
    1024,
    16,
)  # of rounding that two ways to one number may lie apart; of numbers of two bytes
FULL_PRECISION_BITS = 32  # bits
ModelCall = Callable[..., Any]  # a model of anybody, called with the names that ours is called with


@dataclass(frozen=True)
class OutputDifference:
    """How far two models lie apart at most, in what they say of so many texts; `largest` is the largest number said."""

    what: str
    apart: float
    largest: float
    texts: int
    dtype: str

    @property
    def allowed(self) -> float:
        """What rounding may make of it."""
        kind = torch.finfo(getattr(torch, self.dtype))
        return (
            (TOLERANCE_STEPS if kind.bits >= FULL_PRECISION_BITS else HALF_TOLERANCE_STEPS)
            * kind.eps
            * max(1.0, self.largest)
        )

    @property
    def same(self) -> bool:
        """Whether it is no more than that."""
        return self.apart <= self.allowed

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"allowed": self.allowed, "same": self.same}


def compare_ablated(
    before: Transformer,
    after: Transformer,
    examples: Sequence[Example],
    keep: Mapping[str, Sequence[int]],
    replacements: Mapping[HeadRef, Tensor] | None = None,
) -> tuple[OutputDifference, ...]:
    """How far the model before, with what is cut made silent, lies from the model after; where it is cheap, in double
    precision too.

    `said` is what heads that are gone say instead of nothing, where that was folded into the layer.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... ).eval()
    >>> texts = [Example({"x": torch.tensor([[3, 1, 4]])}, {})]
    >>> [one.apart for one in compare_ablated(net, net, texts, {"decoder.0.attention": [0, 1]})]
    [0.0, 0.0]
    """
    patches = build_ablations(before, keep, replacements or {})
    what = "silenced = cut"
    found = [_compare_with_patches(what, (before, after), examples, patches)]
    if sum(p.numel() for p in before.parameters()) <= MAX_DOUBLE_PARAMETERS and found[0].dtype != "float64":
        exact = tuple(copy.deepcopy(net).double() for net in (before, after))
        doubled = _compare_with_patches(f"{what}, in double precision", exact, examples[:MAX_DOUBLE_TEXTS], patches)
        # What was folded in is a vector of the model's own precision, however it is computed with.
        found.append(replace(doubled, dtype=found[0].dtype) if replacements else doubled)
    return tuple(found)


def build_ablations(
    before: Transformer, keep: Mapping[str, Sequence[int]], replacements: Mapping[HeadRef, Tensor]
) -> dict[HeadRef, HeadPatch | Tensor]:
    """What is put in the place of every head that a plan does not keep.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0
    ... )
    >>> build_ablations(net, {"decoder.0.attention": [1]}, {})
    {('decoder.0.attention', 0): ScaledOutput(scale=0.0)}
    """
    specs, found = dict(before.spec.attention_specs()), dict[HeadRef, HeadPatch | Tensor]()
    for site, kept in keep.items():
        if site not in specs:
            raise ValueError(f"the model has no site {site!r}; {suggest(site, specs)}")
        count = len(specs[site].score_head_of_output)
        if wrong := [head for head in kept if not 0 <= head < count]:
            raise ValueError(f"{site} has no head {wrong[0]} to keep; give heads in 0..{count - 1}")
        out = [(site, head) for head in range(count) if head not in kept]
        found |= {one: replacements.get(one, ScaledOutput(0.0)) for one in out}
    return found


def compare_reloaded(
    what: str, after: Transformer, model_call: ModelCall, examples: Sequence[Example]
) -> OutputDifference:
    """How far what was read again lies from the model after."""
    return OutputDifference(
        what,
        *_max_difference(
            _iter_inputs(after, examples), partial(compute_output, after), partial(_call_model, model_call)
        ),
    )


def _call_model(says: ModelCall, given: ModelInputs) -> Tensor:
    with torch.inference_mode():
        return get_output_tensor(says(*given.args, **given.kwargs))


def _compare_with_patches(
    what: str, nets: tuple[Transformer, ...], scenes: Sequence[Example], patches: Mapping[HeadRef, HeadPatch | Tensor]
) -> OutputDifference:
    before, after = nets
    quiet: AbstractContextManager[Any] = patch(before, patches) if patches else nullcontext()
    with quiet:
        return OutputDifference(
            what,
            *_max_difference(
                _iter_inputs(before, scenes), partial(compute_output, before), partial(compute_output, after)
            ),
        )


def _iter_inputs(net: Transformer, scenes: Sequence[Example]) -> Iterator[ModelInputs]:
    """The texts as a model reads them, its pixels and frames in its precision."""
    dtype = next(net.parameters()).dtype
    for scene in scenes:
        given = prepare_inputs(net, scene.model_inputs, 0)
        yield replace(
            given,
            args=tuple(_cast_floats(one, dtype) for one in given.args),
            kwargs={name: _cast_floats(one, dtype) for name, one in given.kwargs.items()},
        )


def _cast_floats(one: Any, dtype: torch.dtype) -> Any:
    return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one


def _max_difference(
    givens: Iterator[ModelInputs], one: Callable[[ModelInputs], Tensor], other: Callable[[ModelInputs], Tensor]
) -> tuple[float, float, int, str]:
    """How far they lie apart at most, the largest number said, of how many texts, in which precision."""
    apart, largest, count, dtype = 0.0, 0.0, 0, ""
    for count, given in enumerate(givens, 1):
        first, second = one(given), other(given)
        if first.shape != second.shape:
            shapes = f"{list(first.shape)} and {list(second.shape)}"
            raise ValueError(f"of text {count - 1} the two models say {shapes} numbers; compare models of one shape")
        apart = max(apart, float((first.double() - second.to(first.device).double()).abs().max()))
        largest = max(largest, float(first.abs().max()))
        dtype = str(first.dtype).removeprefix("torch.")
    return apart, largest, count, dtype
