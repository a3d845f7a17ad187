"""Every analysis gives the same numbers on a device that is not the CPU, and leaves no tensor
behind on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import headwise as hw
from headwise.attention.masking.sequence_info import SequenceInfo
from headwise.observe.head_analysis.annotated_examples import (
    LABELS_INPUT,
    examples_from_lines,
    examples_from_sentences,
    examples_from_task,
    read_conllu,
)
from headwise.observe.head_analysis.dependency_syntax import DependencyScores
from headwise.observe.head_analysis.head_importance import IMPORTANCE_METHODS
from headwise.observe.head_analysis.head_measurement import MeasureOptions
from headwise.observe.inspect.model_inputs import get_device
from headwise.observe.inspect.model_tokenizer import use_tokenizer
from headwise.viewer.lab_actions import compute_effect
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from support import conllu_examples
from support.importance_examples import GPT2, build_model, translator
from support.pretended_device import DeviceTensor, pretended_device
from support.transformers_models import ZOO

TEXTS = ["a, b", "two to", "two x", "is it", "no one", "nine"]
IDS = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(0))
BYTES = GPT2 | {"vocab_size": 256}
FEW = MeasureOptions()
TASK = hw.data.make_task("copy")


def numbers(value: Any) -> list[float]:
    """All numbers in a result, in order."""
    if isinstance(value, Tensor | np.ndarray):
        return torch.as_tensor(value).detach().cpu().double().flatten().tolist()
    if isinstance(value, int | float):
        return [float(value)]
    if isinstance(value, Mapping):
        value = value.values()
    entries = [] if value is None or isinstance(value, str) else value
    return [number for entry in entries for number in numbers(entry)]


def list_examples(model: nn.Module, count: int = 3) -> list[Any]:
    """Examples of a task whose last three tokens are padding."""
    reader = examples_from_task(model, TASK, count)
    examples = []
    for example in reader.examples_with_frequencies():
        inputs = dict(example.inputs)
        length = inputs["x"].shape[1] - 3
        inputs["sequence"] = SequenceInfo.from_batch(inputs["x"], lengths=[length])
        inputs[LABELS_INPUT] = inputs[LABELS_INPUT].clone()
        inputs[LABELS_INPUT][:, length:] = hw.data.IGNORE_INDEX
        examples.append(replace(example, inputs=inputs))
    return examples


def byte_examples(model: Any) -> list[Any]:
    with use_tokenizer(model, "bytes") as reader:
        return list(examples_from_lines(reader, TEXTS).examples_with_frequencies())


def measures(table: Any) -> Any:
    return [[*head.measures.values(), len(head.classes)] for head in table.heads]


def ratings(result: Any) -> Any:
    return [(head.value, head.low, head.high) for head in result.heads]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS.to(get_device(model)))


def ablated(model: nn.Module, mode: Any = "zero", **options: Any) -> Tensor:
    with hw.ablate(model, [(0, 1), (1, 2)], mode, **options):
        return hw.run_model(model, IDS)


def parses(model: nn.Module) -> Any:
    sentences = [
        sentence
        for word in ("the", "a", "b")
        for sentence in read_conllu(
            conllu_examples.conllu_lines(conllu_examples.ROWS.replace("The", word))
        )
    ]
    examples = list(examples_from_sentences(model, sentences).examples_with_frequencies())
    assert examples
    return measures(hw.measure_heads(model, examples, collectors=[DependencyScores(min_arcs=1)]))


def gradients(model: nn.Module) -> list[Tensor | None]:
    model(IDS.to(get_device(model))).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def lab_effect(model: Any) -> Any:
    page = OpenModel(hw.trace(model, IDS[:1]), model)
    effect = compute_effect(page, {"heads": [[1, 2]]}, JobProgress(Job("test", {})))
    return [effect["klByPosition"], effect["loss"]]


def trace_weights(model: nn.Module, inputs: Any) -> Any:
    trace = hw.trace(model, inputs)
    return [
        trace.head_weights(layer.name, head)
        for layer in trace.layers
        for head in range(layer.heads)
    ]


def byte_model() -> nn.Module:
    return build_model(BYTES)


def small_model() -> nn.Module:
    return build_model(GPT2)


def task_model() -> nn.Module:
    return hw.build(TASK.model(), seed=0).eval().double()


def attention_of_torch() -> nn.Module:
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, batch_first=True).double().eval()


ROWS = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1)).double()
ALIGNED = hw.surgery.Pool(1, align="both")
CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "forward": (small_model, logits),
    "gradients": (small_model, gradients),
    "generate": (small_model, lambda m: hw.generate(m, [[1, 2, 3], [4, 5]], max_new_tokens=4)),
    "sites": (small_model, lambda m: [(site.q, site.kv, site.dim) for site in hw.sites(m, IDS)]),
    "trace": (small_model, lambda m: trace_weights(m, IDS)),
    "ablate": (small_model, ablated),
    "ablate to noise": (small_model, lambda m: ablated(m, "noise")),
    "head means": (small_model, lambda m: hw.head_means(m, [IDS])),
    "attention maps": (
        small_model,
        lambda m: hw.compute_attention_maps(m, IDS).rollout(),
    ),
    "logit": (
        small_model,
        lambda m: [share.value for share in hw.attribute_logit(m, IDS[:1]).heads],
    ),
    "lab": (small_model, lab_effect),
    "heads": (byte_model, lambda m: measures(hw.heads(m, TEXTS, tokenizer="bytes"))),
    "heads of Clark et al.": (
        byte_model,
        lambda m: measures(hw.heads(m, TEXTS, criteria="clark", tokenizer="bytes")),
    ),
    "parses": (conllu_examples.build_encoder, parses),
    "padded task": (
        task_model,
        lambda m: measures(hw.measure_heads(m, list_examples(m), options=FEW)),
    ),
    "importance in a padded task": (
        task_model,
        lambda m: ratings(hw.importance(m, list_examples(m))),
    ),
    "evaluate": (task_model, lambda m: hw.evaluate(m, TASK, batches=1).metrics),
    "redundancy": (byte_model, lambda m: hw.measure_redundancy(m, byte_examples(m)).data),
    "prune": (byte_model, lambda m: logits(hw.prune(m, 0.5, TEXTS, tokenizer="bytes").after)),
    "convert": (byte_model, lambda m: logits(hw.convert(m, 1).after)),
    "convert aligned": (
        byte_model,
        lambda m: logits(hw.convert(m, ALIGNED, TEXTS, tokenizer="bytes").after),
    ),
    "encoder-decoder": (translator, lambda m: hw.run_model(m, {"x": IDS, "source": IDS})),
    "tuple of ids": (small_model, lambda m: hw.run_model(m, (IDS,))),
    "tuple": (attention_of_torch, lambda m: trace_weights(m, (ROWS, ROWS, ROWS))),
    "transformers": (
        lambda: ZOO["llama"].build().double(),
        lambda m: trace_weights(m, {"input_ids": IDS}),
    ),
    "texts of transformers": (ZOO["bert"].build, lambda m: ablated(m)),
}
SLOW = ("importance by lrp", "importance by shapley")


def importance(method: str) -> Callable[[Any], Any]:
    return lambda model: ratings(
        hw.importance(model, [*TEXTS, *(text[::-1] for text in TEXTS)], method, tokenizer="bytes")
    )


CALLS |= {
    f"importance by {method}": (byte_model, importance(method)) for method in IMPORTANCE_METHODS
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CALLS]
)
def test_results_equal_those_on_the_cpu(name: str):
    build, call = CALLS[name]
    expected = numbers(call(build()))
    with pretended_device() as device:
        model = build().to(device)
        assert all(isinstance(parameter, DeviceTensor) for parameter in model.parameters())
        own = numbers(call(model))
    assert expected
    np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-6)


def move_block(block: nn.Module, device: torch.device) -> None:
    """Move a block, and its inputs and outputs at each call, as accelerate does for a model on
    several devices.
    """

    def to(where: torch.device, values: Any) -> Any:
        return tree_map(
            lambda value: value.to(where) if isinstance(value, Tensor) else value, values
        )

    block.to(device)
    block.register_forward_pre_hook(
        lambda _, args, kwargs: to(device, (args, kwargs)), with_kwargs=True
    )
    block.register_forward_hook(lambda _, args, output: to(torch.device("cpu"), output))


def test_layers_on_two_devices_are_measured_together():
    llama = ZOO["llama"]._replace(keys=ZOO["llama"].keys | {"vocab_size": 256})

    def call(model: Any) -> list[float]:
        with use_tokenizer(model, "bytes"):
            examples = list(examples_from_lines(model, TEXTS).examples_with_frequencies())
            table = hw.measure_heads(model, examples, options=FEW)
            return numbers([measures(table), hw.measure_redundancy(model, examples).data])

    expected = call(llama.build())
    with pretended_device() as device:
        model: Any = llama.build()
        move_block(model.model.layers[1], device)
        own = call(model)
    np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-6)
