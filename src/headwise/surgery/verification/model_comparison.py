"""Comparison of two models' outputs, which must be equal up to rounding, and of the outputs of some
modules of a changed model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...kernels.devices import dtype_name, has_dtype, to_float64
from ...models import Transformer, build
from ...models.model_spec import StackSpec
from ...observe.head_analysis.annotated_examples import Example
from ...observe.head_analysis.objectives import get_output_tensor
from ...observe.inspect.ablation import HeadPatch, HeadRef, ScaledOutput, patch
from ...observe.inspect.adapters.declarations import copy_declared
from ...observe.inspect.attention_sites import find_attention
from ...observe.inspect.model_inputs import (
    ModelInputs,
    get_device,
    prepare_inputs,
    run_prepared,
)
from ...util.errors import SpecError, suggest

# --- Records as JSON ------------------------------------------------------------------------------

# Fields with another name in JSON.
JSON_NAMES = {
    "costs": "numbers",
    "curves": "lines",
    "max_loss_increase": "allowed",
    "num_heads": "left",
    "num_positions": "places",
    "num_texts": "texts",
    "source_length": "source",
}


class JsonRecord:
    """Base class of dataclasses that are written as JSON."""

    @property
    def data(self) -> dict[str, Any]:
        """The fields, and the properties in `computed`, as JSON-serialisable values."""
        return to_data(self)


def to_data(value: Any) -> Any:
    """Return a record as JSON-serialisable values: NaN and infinities are None.

    >>> to_data({"mean": 0.5, "low": float("nan")})
    {'mean': 0.5, 'low': None}
    """
    kind: Any = type(value)
    is_record = is_dataclass(kind)
    names = [one.name for one in fields(kind)] if is_record else getattr(kind, "_fields", ())
    if names:
        names = (*names, *getattr(kind, "computed", ()))
        return {JSON_NAMES.get(name, name): to_data(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(name): to_data(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def get_model_name(model: nn.Module) -> str:
    """Return the name in a headwise model's spec, or the class of another model."""
    return model.spec.name if isinstance(model, Transformer) else type(model).__name__


# --- Runs -----------------------------------------------------------------------------------------


def compute_output(model: nn.Module, inputs: ModelInputs) -> Tensor:
    """Return the output of a model; raise ValueError if it contains NaN or inf, which cannot be
    compared.
    """
    with torch.inference_mode():
        return _check_finite(model, get_output_tensor(run_prepared(model, inputs)))


def _check_finite(model: object, output: Tensor) -> Tensor:
    # aminmax has no result for an empty output; NaN is both ends
    if output.numel() and not bool(torch.stack(output.aminmax()).isfinite().all()):
        raise ValueError(
            f"{type(model).__name__} produced NaN or inf on this text; check the weights, or drop "
            "the text"
        )
    return output


# --- Models that must have equal outputs ----------------------------------------------------------

MAX_DOUBLE_PARAMETERS = (
    2 * 10**7
)  # largest number of parameters for a comparison in double precision
MAX_DOUBLE_TEXTS = 16  # texts compared in double precision
# Tolerated difference in float32 and in float64, relative to the largest output.
OUTPUT_TOLERANCE = 1e-4
DOUBLE_TOLERANCE = 1e-10
ModelCall = Callable[..., Any]  # any model that takes the arguments of the headwise model
Patches = Mapping[HeadRef, HeadPatch | Tensor]
NO_PATCHES: Patches = {}
ABLATION = "heads ablated vs. removed"


class DeferredModel(NamedTuple):
    """A model that is made when it is compared, after copies of the other model are gone."""

    make: Callable[[], ModelCall]


@dataclass(frozen=True)
class OutputDifference(JsonRecord):
    """Largest absolute difference of two models' outputs over texts; `largest` is the largest
    absolute output.

    `tolerance` is relative to the largest output.
    """

    computed: ClassVar = ("allowed", "same")
    what: str
    apart: float
    largest: float
    texts: int
    dtype: str
    tolerance: float = OUTPUT_TOLERANCE

    @property
    def allowed(self) -> float:
        """Largest absolute difference that counts as rounding."""
        return self.tolerance * self.largest

    @property
    def same(self) -> bool:
        """True if the difference is within the tolerance."""
        return self.apart <= self.allowed


def parameter_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first parameter."""
    return next(model.parameters()).dtype


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which models of `dtype` are compared: float32, or float64 if that is
    their own.

    >>> full_precision(torch.bfloat16), full_precision(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def cast_model(
    net: Transformer, dtype: torch.dtype, stored: torch.dtype | None = None
) -> Transformer:
    """Return a copy of a model in eval mode with parameters in `dtype`, first rounded to the dtype
    `stored` if given.

    Other floating-point tensors, such as rotary angles, lose no precision. The copy is on the CPU
    if the device of the model lacks the dtype.
    """
    with torch.device("meta"):
        copy = build(net.spec)
    parameter_names = {name for name, _ in net.named_parameters()}
    device = next(net.parameters()).device
    device = device if has_dtype(device, dtype) else torch.device("cpu")

    def cast(name: str, tensor: Tensor) -> Tensor:
        if name in parameter_names:
            return tensor.to(stored or tensor.dtype).to(device, dtype)
        is_float = tensor.is_floating_point()
        wide = torch.promote_types(tensor.dtype, dtype) if is_float else tensor.dtype
        return tensor.to(device if has_dtype(device, wide) else torch.device("cpu"), wide)

    tensors = {name: cast(name, tensor.detach()) for name, tensor in net.state_dict().items()}
    copy.load_state_dict(tensors, assign=True)
    copy.usage = net.usage
    return copy.eval()


class RecordedOutput(NamedTuple):
    """The output of a model for a text, in the dtype of the model."""

    model: nn.Module
    output: Tensor


class OutputComparison:
    """A comparison of the outputs of two models that must be equal, one text at a time.

    Arguments as in `compare_outputs`. Texts can be added with the output of one of the models, so
    that several comparisons share one run.
    """

    def __init__(
        self,
        what: str,
        models: tuple[nn.Module, ModelCall | DeferredModel],
        patches: Patches = NO_PATCHES,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.what = what
        self.first, self.second = models
        self.patches = patches
        self.own_dtype = parameter_dtype(self.first)
        self.dtype = dtype or full_precision(self.own_dtype)
        self.difference = 0.0
        self.largest = 0.0
        self.num_texts = 0

    def takes_outputs(self, model: nn.Module) -> bool:
        """True if one of the compared outputs is that of `model`, in the dtype of its weights."""
        is_first = model is self.first and not self.patches
        return self.dtype == parameter_dtype(model) and (is_first or model is self.second)

    def add(self, inputs: ModelInputs, recorded: RecordedOutput | None = None) -> None:
        """Compare the outputs for a text, of which one may be recorded."""
        inputs = replace(
            inputs,
            args=tuple(v.to(self.dtype) if is_float_tensor(v) else v for v in inputs.args),
            kwargs={
                name: v.to(self.dtype) if is_float_tensor(v) else v
                for name, v in inputs.kwargs.items()
            },
        )
        expected = self._compute(self.first, self.patches, inputs, recorded)
        if isinstance(self.second, DeferredModel):
            self.second = self.second.make()
        actual = self._compute(self.second, NO_PATCHES, inputs, recorded)
        if expected.shape != actual.shape:
            shapes = f"{list(expected.shape)} and {list(actual.shape)}"
            raise ValueError(
                f"cannot compare outputs of shapes {shapes} on text {self.num_texts}. Give models "
                "with equal outputs"
            )
        if not expected.numel():
            raise ValueError(
                f"cannot compare outputs of shape {list(expected.shape)} on text "
                f"{self.num_texts}: they are empty. Leave the text out"
            )
        self.num_texts += 1
        self.largest = max(self.largest, float(expected.abs().max()))
        actual = actual.to(expected.device)
        if not torch.equal(expected, actual):  # most exports are equal, and float64 is slow
            apart = (to_float64(expected) - to_float64(actual)).abs().max()
            self.difference = max(self.difference, float(apart))

    def _compute(
        self,
        model: ModelCall,
        patches: Patches,
        inputs: ModelInputs,
        recorded: RecordedOutput | None,
    ) -> Tensor:
        if recorded is not None and model is recorded.model and not patches:
            return recorded.output
        return _run_in_dtype(self.dtype, model, patches, inputs)

    def finish(self, examples: Sequence[Example]) -> OutputDifference:
        """Return the result, and let go of the second model; compares the outputs for the examples
        unless texts were added.
        """
        if not self.num_texts:
            for example in examples if self.dtype == self.own_dtype else examples[:1]:
                self.add(prepare_inputs(self.first, example.model_inputs, 0))
        self.second = self.first
        tolerance = DOUBLE_TOLERANCE if self.dtype == torch.float64 else OUTPUT_TOLERANCE
        return OutputDifference(
            self.what,
            self.difference,
            self.largest,
            self.num_texts,
            dtype_name(self.dtype),
            tolerance,
        )


def compare_outputs(
    what: str,
    models: tuple[nn.Module, ModelCall | DeferredModel],
    examples: Sequence[Example],
    patches: Patches = NO_PATCHES,
    dtype: torch.dtype | None = None,
) -> OutputDifference:
    """Compare the outputs of two models that must be equal, with `patches` of head outputs in the
    first.

    Models of 16 bits are compared in float32, because their rounding would hide a wrong head: on
    the first example only, with a copy of one model at a time. `dtype` is another precision to
    compare in. A second model that is not an nn.Module is called as it is.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).bfloat16()
    >>> same = compare_outputs(
    ...     "itself", (net, net), [Example({"x": torch.tensor([[3, 1, 4]])}, {})]
    ... )
    >>> same.apart, same.dtype, same.tolerance
    (0.0, 'float32', 0.0001)
    """
    return OutputComparison(what, models, patches, dtype).finish(examples)


def compare_ablated(
    before: nn.Module,
    after: nn.Module | DeferredModel,
    examples: Sequence[Example],
    keep: Mapping[str, Sequence[int]],
    replacements: Mapping[HeadRef, Tensor] | None = None,
    single: OutputDifference | None = None,
) -> tuple[OutputDifference, ...]:
    """Compare the model before, with the removed heads ablated, with the model after; small models
    of headwise in float64 too, because others may compute in float32 inside.

    Removed heads are ablated to zero, or to their constant output in `replacements` if that was
    folded into a bias. `single` is the comparison in the dtype of the models, if it was made.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> texts = [Example({"x": torch.tensor([[3, 1, 4]])}, {})]
    >>> [
    ...     difference.apart
    ...     for difference in compare_ablated(net, net, texts, {"decoder.0.attention": [0, 1]})
    ... ]
    [0.0, 0.0]
    """
    patches = build_ablations(before, keep, replacements or {})
    differences = [single or compare_outputs(ABLATION, (before, after), examples, patches)]
    is_small = sum(p.numel() for p in before.parameters()) <= MAX_DOUBLE_PARAMETERS
    # A constant that was folded into a bias has the precision of the model, so it is not compared
    # in float64.
    is_exact = is_small and not replacements and parameter_dtype(before) != torch.float64
    if is_exact and isinstance(before, Transformer) and isinstance(after, Transformer):
        doubles = cast_model(before, torch.float64), cast_model(after, torch.float64)
        differences.append(
            compare_outputs(f"{ABLATION}, float64", doubles, examples[:MAX_DOUBLE_TEXTS], patches)
        )
    return tuple(differences)


def compare_weights(what: str, after: nn.Module, exact: nn.Module) -> OutputDifference:
    """Compare the weights of a changed model with the same change made in float32.

    The difference of each tensor is relative to its largest value and within one machine epsilon if
    it was rounded.
    """
    dtype = parameter_dtype(after)
    difference = 0.0
    expected = {name: parameter.detach() for name, parameter in exact.named_parameters()}
    for name, parameter in after.named_parameters():
        wide = expected[name]
        error = (parameter.detach().to(wide) - wide).abs().max() / wide.abs().max().clamp_min(1e-30)
        difference = max(difference, float(error))
    return OutputDifference(what, difference, 1.0, 0, dtype_name(dtype), torch.finfo(dtype).eps)


def build_ablations(
    before: nn.Module, keep: Mapping[str, Sequence[int]], replacements: Mapping[HeadRef, Tensor]
) -> dict[HeadRef, HeadPatch | Tensor]:
    """Return the patch of every head that a plan does not keep.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     ),
    ...     seed=0,
    ... )
    >>> build_ablations(net, {"decoder.0.attention": [1]}, {})
    {('decoder.0.attention', 0): ScaledOutput(scale=0.0)}
    """
    counts = {one.site.name: one.site.heads for one in find_attention(before)}
    patches = dict[HeadRef, HeadPatch | Tensor]()
    for site, kept_heads in keep.items():
        if site not in counts:
            raise ValueError(f"the model has no attention {site!r}; {suggest(site, counts)}")
        count = counts[site]
        wrong = [head for head in kept_heads if not 0 <= head < count]
        if wrong:
            raise ValueError(f"{site} has no head {wrong[0]} to keep; give heads in 0..{count - 1}")
        removed = [(site, head) for head in range(count) if head not in kept_heads]
        patches |= {ref: replacements.get(ref, ScaledOutput(0.0)) for ref in removed}
    return patches


def _run_in_dtype(
    dtype: torch.dtype, model: ModelCall, patches: Patches, inputs: ModelInputs
) -> Tensor:
    """Return the output of a model, or of its copy in this dtype."""
    if isinstance(model, nn.Module) and parameter_dtype(model) != dtype:
        is_native = isinstance(model, Transformer)
        model = cast_model(model, dtype) if is_native else copy_declared(model).to(dtype)
    if not isinstance(model, nn.Module):
        with torch.inference_mode():
            return _check_finite(model, get_output_tensor(model(*inputs.args, **inputs.kwargs)))
    with patch(model, patches) if patches else nullcontext():
        return compute_output(model, inputs)


FIRST_TOKEN = 3  # smaller ids are often padding, begin and end of text


def random_input(stack: StackSpec, like: Tensor, batch: int, length: int) -> Tensor:
    """Return the same random input for a stack at every call: token ids, or noise for images and
    vectors.
    """
    generator = torch.Generator().manual_seed(0)
    embedding = stack.embedding
    if embedding is not None and embedding.tokens:
        first = min(FIRST_TOKEN, embedding.tokens - 1)
        ids = torch.randint(first, embedding.tokens, (batch, length), generator=generator)
        return ids.to(like.device)
    patches = None if embedding is None else embedding.patches
    shape: tuple[int, ...] = (batch, length, stack.model)
    if patches is not None:
        size = (patches.rows * patches.patch_height, patches.columns * patches.patch_width)
        shape = (batch, patches.channels, *size)
    return torch.randn(shape, generator=generator).to(like)


def is_language_model(model: Any) -> bool:
    """Return True if token ids are all that a transformers model needs."""
    has_images = getattr(model.config, "vision_config", None) is not None
    return model.main_input_name == "input_ids" and not has_images


def random_ids(model: Any, batch: int = 1, length: int = 16) -> dict[str, Tensor]:
    """Return random token ids for a language model of transformers."""
    count = min(int(model.config.get_text_config().vocab_size), 1000)
    ids = torch.randint(count, (batch, length), generator=torch.Generator().manual_seed(0))
    names = ["input_ids", *(["decoder_input_ids"] if model.config.is_encoder_decoder else [])]
    return dict.fromkeys(names, ids.to(get_device(model)))


def is_float_tensor(value: Any) -> bool:
    """Return True for a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


# --- The check of a changed model by its outputs --------------------------------------------------


TOLERANCE = 1e-4  # largest difference of outputs that must be equal, relative to the largest
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


def run_and_record(
    model: nn.Module,
    inputs: ModelInputs,
    paths: Sequence[str],
    tensors: Mapping[str, Tensor] = NO_TENSORS,
) -> list[Tensor]:
    """Return the outputs of the modules at `paths` in call order, then the model outputs.

    Model outputs alone prove nothing if they do not depend on the modules, as with a zero last
    layer. `tensors` replace parameters during the run.
    """
    recorded: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        # Weights of heads, which nn.MultiheadAttention returns after the output, are not compared.
        recorded.extend(_tensors(output)[:1])

    handles = [model.get_submodule(path).register_forward_hook(record) for path in paths]
    try:
        with torch.set_grad_enabled(any(one.requires_grad for one in tensors.values())):
            outputs = functional_call(model, dict(tensors), inputs.args, dict(inputs.kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return [*recorded, *_tensors(outputs)]


def largest_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of two lists of tensors, relative to the largest value of each."""
    differences = [torch.zeros((), dtype=torch.float64)]
    for tensor, other in zip(actual, expected, strict=True):
        if other.is_floating_point() and other.numel():
            scale = other.abs().max().clamp_min(1e-30)
            differences.append(((tensor - other).abs().max() / scale).cpu().double())
    return float(torch.stack(differences).max())  # NaN if any is


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (Mapping, tuple, list)):
        return []
    return list(chain.from_iterable(map(_tensors, values)))


class ResultCheck(NamedTuple):
    """Outputs that a changed model must have on the example, and words for messages."""

    change: str
    other: str
    remedy: str
    expected: Sequence[Tensor]
    inputs: ModelInputs
    paths: Sequence[str]

    def compare(self, after: nn.Module) -> float:
        """Return the relative difference of the changed model from the expected outputs; raises if
        it is large.
        """
        name = f"{self.change} {type(after).__name__}"
        try:
            actual = run_and_record(after, self.inputs, self.paths)
        except Exception as error:  # the model may raise anything
            message = " ".join(str(error).split())[:200]
            raise SpecError(f"the {name} cannot run: {message}; {self.remedy}") from error
        if [tensor.shape for tensor in actual] != [tensor.shape for tensor in self.expected]:
            raise SpecError(f"the outputs of the {name} have other shapes; {self.remedy}")
        difference = largest_difference(actual, self.expected)
        if not difference <= TOLERANCE:
            raise SpecError(
                f"the {name} differs from the {self.other} by {difference:.2g} of the largest "
                f"output; {self.remedy}"
            )
        return difference
