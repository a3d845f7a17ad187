"""Every analysis gives the same numbers on a device that is not the CPU, and leaves no tensor
behind on the CPU.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import headwise as hw
from headwise.attention.masking.sequence_info import SequenceInfo
from headwise.models.model_spec import serialization as model_serialization
from headwise.observe.head_analysis.annotated_examples import (
    LABELS_INPUT,
    examples_from_lines,
    examples_from_sentences,
    examples_from_task,
    read_conllu,
)
from headwise.observe.head_analysis.attention_maps import attribute_all_logits
from headwise.observe.head_analysis.dependency_syntax import (
    DependencyScores,
    ProbeOptions,
    train_attention_probe,
)
from headwise.observe.head_analysis.head_circuits import compare_circuits, measure_head_circuits
from headwise.observe.head_analysis.head_importance import IMPORTANCE_METHODS
from headwise.observe.head_analysis.head_measurement import MeasureOptions
from headwise.observe.head_analysis.rank_analysis import measure_rank_collapse
from headwise.observe.inspect import abilities
from headwise.observe.inspect.model_inputs import get_device
from headwise.observe.inspect.model_tokenizer import use_tokenizer
from headwise.studies.cells import describe_task
from headwise.studies.run_cell import ModelEdit, run_cell
from headwise.surgery.attention_replacement import get_attention
from headwise.surgery.verification.efficiency import TimingOptions
from headwise.surgery.verification.verify import VerificationOptions
from headwise.training.recipe import to_dict
from headwise.viewer.answers import ask
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from headwise.viewer.server import ALL_JOBS
from support import conllu_examples
from support.importance_examples import GPT2, LLAMA, build_model, translator
from support.pretended_device import DeviceTensor, pretended_device
from support.small_training import Answered, RoutedEcho, short_recipe
from support.transformers_models import ZOO
from viewer.binary_messages import decode_arrays

TEXTS = ["a, b", "two to", "two x", "is it", "no one", "nine"]
IDS = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(0))
BYTES = GPT2 | {"vocab_size": 256}
FEW = MeasureOptions()
TASK = hw.data.make_task("copy")


def numbers(value: Any) -> list[float]:
    """All numbers in a result, in order."""
    if isinstance(value, bytes):
        return numbers({name: array.copy() for name, array in decode_arrays(value)[1].items()})
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
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


def changed_logits(model: nn.Module, changed: Any) -> Tensor:
    """Logits of a model made from another one, which is on the same device."""
    assert get_device(changed) == get_device(model)
    return logits(changed)


def ablated(model: nn.Module, mode: Any = "zero", **options: Any) -> Tensor:
    with hw.ablate(model, [(0, 1), (1, 2)], mode, **options):
        return hw.run_model(model, IDS)


def parsed_examples(model: nn.Module, words: tuple[str, ...]) -> list[Any]:
    """Sentences that differ in their first word, with parses."""
    texts = [conllu_examples.ROWS.replace("The", word) for word in words]
    read = [read_conllu(conllu_examples.conllu_lines(text)) for text in texts]
    examples = examples_from_sentences(model, list(chain.from_iterable(read)))
    return list(examples.examples_with_frequencies())


def parses(model: nn.Module) -> Any:
    examples = parsed_examples(model, ("the", "a", "b"))
    assert examples
    return measures(hw.measure_heads(model, examples, collectors=[DependencyScores(min_arcs=1)]))


def gradients(model: nn.Module) -> list[Tensor | None]:
    model(IDS.to(get_device(model))).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def trace_weights(model: nn.Module, inputs: Any) -> Any:
    trace = hw.trace(model, inputs)
    return [
        trace.head_weights(layer.name, head)
        for layer in trace.layers
        for head in range(layer.heads)
    ]


def prune_by(selection: Any) -> Callable[[Any], Any]:
    return lambda model: changed_logits(
        model, hw.prune(model, selection, TEXTS, tokenizer="bytes").after
    )


def convert_by(conversion: Any) -> Callable[[Any], Any]:
    return lambda model: changed_logits(
        model, hw.convert(model, conversion, TEXTS, tokenizer="bytes").after
    )


def byte_llama() -> Any:
    """A model of transformers that reads bytes."""
    llama = ZOO["llama"]
    keys = llama.keys | {"vocab_size": 256, "eos_token_id": None}
    return llama._replace(keys=keys).build().double()


def byte_model() -> nn.Module:
    return build_model(BYTES)


def small_model() -> nn.Module:
    return build_model(GPT2)


def task_model() -> nn.Module:
    return hw.build(TASK.model(), seed=0).eval().double()


def layer_of_torch() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0)
    return nn.Sequential(layer).double().eval()


def attention_of_torch() -> nn.Module:
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, batch_first=True).double().eval()


ROWS = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1)).double()
CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "forward": (small_model, logits),
    "gradients": (small_model, gradients),
    "generate": (small_model, lambda m: hw.generate(m, [[1, 2, 3], [4, 5]], max_new_tokens=4)),
    "sites": (small_model, lambda m: [(site.q, site.kv, site.dim) for site in hw.sites(m, IDS)]),
    "trace": (small_model, lambda m: trace_weights(m, IDS)),
    "ablate": (small_model, ablated),
    "ablate to noise": (small_model, lambda m: ablated(m, "noise")),
    "head means": (small_model, lambda m: hw.head_means(m, [IDS])),
    "attention maps": (small_model, lambda m: hw.compute_attention_maps(m, IDS).rollout()),
    "logit": (
        small_model,
        lambda m: [share.value for share in hw.attribute_logit(m, IDS[:1]).heads],
    ),
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
    "prune": (byte_model, prune_by(0.5)),
    "prune transformers": (byte_llama, prune_by(0.5)),
    "convert": (byte_model, convert_by(1)),
    "convert aligned": (byte_model, convert_by(hw.surgery.Pool(1, align="both"))),
    "convert transformers": (byte_llama, convert_by(hw.surgery.ToMHA())),
    "encoder-decoder": (translator, lambda m: hw.run_model(m, {"x": IDS, "source": IDS})),
    "tuple of ids": (small_model, lambda m: hw.run_model(m, (IDS,))),
    "tuple": (attention_of_torch, lambda m: trace_weights(m, (ROWS, ROWS, ROWS))),
    "transformers": (
        lambda: ZOO["llama"].build().double(),
        lambda m: trace_weights(m, {"input_ids": IDS}),
    ),
    "texts of transformers": (ZOO["bert"].build, lambda m: ablated(m)),
}


# --- The page -------------------------------------------------------------------------------------

LAB = {"heads": [[1, 2], [0, 0]]}
JOBS: dict[str, list[dict[str, Any]]] = {
    "ablate": [LAB, LAB | {"random": 1}, {"heads": [[0, 1, "mean"]]}],
    "sweep": [{}],
    "generate": [{"count": 2}],
    "continue": [LAB],
    "evaluate": [LAB | {"texts": TEXTS}],
    "measure": [{"texts": TEXTS}],
    "similarity": [{"texts": TEXTS}],
    "compare": [LAB | {"with": "ablated"}],
    "cost": [{}],
    "surgery": [{}],
    "plan-pruning": [{"keep": 0.5, "texts": TEXTS}],
    "plan-conversion": [{"form": "kv", "kv": 1}],
    "text": [{"text": "two"}],
}
PLACE = "site=1&head=2"
ADDRESSES = ["thumbnails", f"tile?{PLACE}", f"row?{PLACE}&query=3", f"column?{PLACE}&key=1"]
ADDRESSES += ["rows?query=2", f"marginals?{PLACE}&lens=effect", f"peak?{PLACE}&lens=value"]
ADDRESSES += [f"aggregate?site=1&how={how}" for how in ("mean", "max", "rollout")]
ADDRESSES += [f"steps?{PLACE}&query=3&key=1", f"points?{PLACE}", f"products?{PLACE}&query=3"]
ADDRESSES += [f"written?{PLACE}&query=3"]


def open_page(model: Any) -> OpenModel:
    return OpenModel(hw.trace(model, IDS[:1], capture=hw.Capture(extra=("v",))), model)


def answers(model: Any) -> Any:
    page = open_page(model)
    return [ask(page, address) for address in ADDRESSES]


def run_job(kind: str) -> Callable[[Any], Any]:
    def call(model: Any) -> Any:
        with use_tokenizer(model, "bytes") as reader:
            page = open_page(reader)
            progress = JobProgress(Job("test", {}))
            return [ALL_JOBS[kind](page, arguments, progress) for arguments in JOBS[kind]]

    return call


CALLS |= {"answers of the page": (byte_model, answers)}
CALLS |= {f"job {kind} of the page": (byte_model, run_job(kind)) for kind in JOBS}

# --- Circuits, generation, surgery, training ------------------------------------------------------


def circuits(model: Any) -> Any:
    maps: list[Any] = [measure_head_circuits(model), compare_circuits(model).values]
    for own in hw.get_circuits(model).values():
        for head in range(3):
            maps += [own.qk_circuit(head).product, own.ov_circuit(head).singular_values]
    return maps


def engine(model: Any) -> Any:
    batching = hw.generation.BatchingConfig(page=4)
    running = hw.Engine(model, budget=4_000_000, batching=batching)
    prompts = ([1, 2, 3, 4, 5, 6], [7], [1, 2, 3, 4, 8])
    streams = [running.submit(prompt, max_new_tokens=4) for prompt in prompts]
    return [stream.result() for stream in streams]


def attended(model: nn.Module) -> Any:
    q_BHTK = torch.randn(3, 2, 7, 5, generator=torch.Generator().manual_seed(2)).double()
    q_BHTK = q_BHTK.to(get_device(model))
    mask = torch.ones(7, 7, dtype=torch.bool, device=q_BHTK.device).tril()
    calls = ({"causal": True}, {"mask": mask, "need_weights": True}, {"bias": q_BHTK[:, :, :, :1]})
    return [hw.attend(q_BHTK, q_BHTK, q_BHTK, **options) for options in calls]


def patched(model: nn.Module) -> Tensor:
    dim = hw.sites(model, IDS)[0].dim
    values = {(0, 1): torch.ones(dim), (1, 2): hw.Noise(1, torch.zeros(dim), torch.ones(dim))}
    with hw.patch(model, values, tokens=[2, 3, 4]):
        return hw.run_model(model, IDS)


def resampled(model: nn.Module) -> Tensor:
    values = {(0, 1): hw.Resample(seed=3)}
    with hw.patch(model, values):
        return hw.run_model(model, IDS)


def compared_traces(model: nn.Module) -> Any:
    traces = [hw.trace(model, ids, max_new_tokens=2) for ids in (IDS[:1], IDS[1:])]
    return hw.compare_traces(*traces).heads


def verified(model: Any) -> Any:
    result = hw.prune(model, 0.5, TEXTS, fold="mean", tokenizer="bytes")
    timing = TimingOptions(length=8, steps=1, seconds=0.001)
    options = VerificationOptions(result.summary, timing=timing, **result.verification_options)
    report = hw.verify(model, result.after, byte_examples(model), options)
    assert report.holds
    return [changed_logits(model, result.after), report.quality.data, report.savings.data]


def folded(model: Any) -> Any:
    layer = get_attention(model, "decoder.0.attention")
    weights = layer.state_dict()
    return [fold(layer.spec, weights).weights for fold in (hw.fold_bias, hw.fold_qk_transforms)]


def uptrained(model: Any) -> Any:
    student = hw.convert(model, 1).after
    options = hw.surgery.UptrainingOptions(steps=4, batch=3, every=2, rate=1e-2, alpha=0.5)
    result = hw.uptrain(student, model, byte_examples(model), options)
    return [changed_logits(model, result.net), [point.held_out for point in result.curve]]


def trained(model: nn.Module) -> Any:
    recipe = short_recipe(aux_losses=(("balance", 0.1),), device=str(get_device(model)))
    with tempfile.TemporaryDirectory() as folder:
        result = hw.train(RoutedEcho(), None, recipe, Path(folder) / "run", curves=False)
        assert get_device(result.net) == get_device(model)
        return [list(result.net.parameters()), result.metrics]


def studied(model: Any) -> Any:
    """A cell of a study: training, a test, heads, and an edit of the trained model."""
    recipe = short_recipe(steps=2, attention="plain", device=str(get_device(model)))
    task = describe_task(TASK)
    edit = ModelEdit("prune", share=0.5, ranking="michel", texts=4)
    config = {
        "task": task,
        "tests": {"again": task},
        "model": model_serialization.to_dict(model.spec),
        "recipe": to_dict(recipe),
        "head_texts": 3,
        "edits": {"half": vars(edit)},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = run_cell(json.loads(json.dumps(config)), f"{folder}/cell")
    assert result["status"] == "done", result
    return [result[key] for key in ("metrics", "tests", "heads", "heads_at", "edits")]


def saved(model: Any) -> Any:
    """Weights of a model that is written and read on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        hw.save(model, f"{folder}/own")
        hw.export(model, f"{folder}/exported")
        loaded = [hw.load(f"{folder}/{name}") for name in ("own", "exported")]
    return [list(each.state_dict().values()) for each in loaded]


def probed(model: Any) -> Any:
    examples = parsed_examples(model, ("the", "a", "b", "don", "bark"))
    baseline = hw.head_analysis.make_random_baseline(model, seed=1)
    options = ProbeOptions(test_fraction=0.4)
    return train_attention_probe(model, examples, random_baseline=baseline, options=options)


def converted_module(model: nn.Module) -> Tensor:
    """Outputs with shared heads; a tensor of the device cannot take the smaller shape in place."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return hw.run_model(hw.convert_module(model, 1, ROWS).after, ROWS)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


SELECTIONS = {
    "one per cluster": hw.surgery.KeepOnePerCluster(),
    "to a loss": hw.surgery.PruneToBudget(hw.surgery.PruningBudget("loss", 0.5)),
    "by gates": hw.surgery.KeepOpenGates(
        hw.surgery.GateTrainingOptions(steps=4, batch=3, every=2, heads=3)
    ),
}
CONVERSIONS = {
    "to a latent": hw.surgery.ToLatent(),
    "to collaborative heads": hw.surgery.ToCollaborative(12),
    "to a mixture of heads": hw.surgery.ToMixtureOfHeads(1, 2),
}
CALLS |= {
    "attend": (small_model, attended),
    "sample": (
        small_model,
        lambda m: hw.generate(m, [[1, 2, 3]], max_new_tokens=4, temperature=1.0, seed=0),
    ),
    "beams": (
        small_model,
        lambda m: hw.generate(m, [[1, 2, 3]], max_new_tokens=4, config=hw.DecodingConfig(beams=3)),
    ),
    "stream": (small_model, lambda m: list(hw.stream(m, [1, 2, 3], max_new_tokens=4))),
    "engine": (small_model, engine),
    "patch": (small_model, patched),
    "patch with another text": (small_model, resampled),
    "head noise": (small_model, lambda m: hw.head_noise(m, [IDS])),
    "head outputs": (small_model, lambda m: hw.head_outputs(m, IDS)),
    "circuits": (small_model, circuits),
    "spectra": (
        small_model,
        lambda m: hw.head_analysis.measure_qk_spectra(m, num_draws=3),
    ),
    "all logits": (
        small_model,
        lambda m: attribute_all_logits(m, IDS[:1], "decoder.1.attention", 1, 3)[0],
    ),
    "rank collapse": (byte_model, lambda m: measure_rank_collapse(m, byte_examples(m))),
    "attention probe": (conllu_examples.build_encoder, probed),
    "compare traces": (small_model, compared_traces),
    "verify": (byte_model, verified),
    "fold biases and transforms": (lambda: build_model(LLAMA), folded),
    "uptrain": (byte_model, uptrained),
    "train": (task_model, trained),
    "study": (task_model, studied),
    "evaluate answers": (
        lambda: hw.build(Answered().model(), seed=0).eval().double(),
        lambda m: hw.evaluate(m, Answered(), batches=1).metrics,
    ),
    "save": (small_model, saved),
    "prune a module": (
        layer_of_torch,
        lambda m: hw.run_model(hw.prune_module(m, [(0, 1)], ROWS).after, ROWS),
    ),
    "convert a module": (layer_of_torch, converted_module),
}


CALLS |= {f"prune {name}": (byte_model, prune_by(one)) for name, one in SELECTIONS.items()}
CALLS |= {f"convert {name}": (byte_model, convert_by(one)) for name, one in CONVERSIONS.items()}
SLOW = ["importance by lrp", "importance by shapley"]
SLOW += [f"job {kind} of the page" for kind in ("measure", "similarity", "surgery")]


def importance(method: str) -> Callable[[Any], Any]:
    return lambda model: ratings(
        hw.importance(model, [*TEXTS, *(text[::-1] for text in TEXTS)], method, tokenizer="bytes")
    )


CALLS |= {
    f"importance by {method}": (byte_model, importance(method)) for method in IMPORTANCE_METHODS
}


@pytest.fixture(autouse=True)
def device_tensors_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the device have a class of their own, which is not one of packed weights."""
    plain = (*abilities.PLAIN_TENSORS, DeviceTensor)
    monkeypatch.setattr(abilities, "PLAIN_TENSORS", plain)


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


DIVIDED: dict[str, Callable[[Any], Any]] = {
    "measures": lambda m: measures(hw.measure_heads(m, byte_examples(m), options=FEW)),
    "redundancy": lambda m: hw.measure_redundancy(m, byte_examples(m)).data,
    "trace": lambda m: trace_weights(m, {"input_ids": IDS}),
    "maps": lambda m: hw.compute_attention_maps(m, {"input_ids": IDS[:1]}).rollout(),
    "ablate": lambda m: ablated(m).logits,
    "head means": lambda m: hw.head_means(m, [{"input_ids": IDS}]),
    "head outputs": lambda m: hw.head_outputs(m, {"input_ids": IDS}),
    "patch": lambda m: patched(m).logits,
    "circuits": measure_head_circuits,
    "logit": lambda m: hw.attribute_logit(m, IDS[:1]).heads,
    "prune": lambda m: logits(hw.prune(m, 0.5, TEXTS, tokenizer="bytes").after),
    "convert": lambda m: logits(hw.convert(m, hw.surgery.ToMHA()).after),
} | {f"importance by {name}": importance(name) for name in ("leave-one-out", "michel")}


@pytest.mark.parametrize("name", DIVIDED)
def test_layers_on_two_devices_are_analysed_together(name: str):
    expected = numbers(DIVIDED[name](byte_llama()))
    with pretended_device() as device:
        model = byte_llama()
        move_block(model.model.layers[1], device)
        own = numbers(DIVIDED[name](model))
    assert expected
    np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-6)
