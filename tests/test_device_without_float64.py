"""Models and analyses on a device without float64, such as Apple's: what is summed in float64 is
summed on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.attention.position_embeddings import sinusoidal_table
from headwise.hub.pretrained_models import load_original
from headwise.kernels.devices import has_dtype
from headwise.observe.head_analysis.annotated_examples import examples_from_lines
from headwise.observe.head_analysis.head_circuits import measure_head_circuits
from headwise.observe.head_analysis.rank_analysis import measure_qk_spectra
from headwise.observe.inspect.model_inputs import get_device
from headwise.observe.inspect.model_tokenizer import use_tokenizer
from headwise.report.render import to_plain
from support.importance_examples import GPT2, LLAMA, build_model
from support.pretended_device import NAME, pretended_device

TEXTS = ["a, b", "two to", "two x", "is it", "no one", "nine"]
IDS = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1))
TASK = hw.data.make_task("copy")


def flatten(value: Any) -> list[float]:
    """All numbers in a result, in order."""
    if isinstance(value, Tensor | np.ndarray):
        return torch.as_tensor(value).detach().cpu().double().flatten().tolist()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for entry in value for number in flatten(entry)]
    return [float(value)] if isinstance(value, int | float) else []


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS.to(get_device(model)))


def layer_outputs(layer: nn.Module) -> Tensor:
    with torch.no_grad():
        return layer(ROWS.to(get_device(layer)))


def add_positions(model: nn.Module) -> Tensor:
    return sinusoidal_table(torch.arange(5, device=get_device(model)), 4)


def redundancy(model: Any) -> Any:
    with use_tokenizer(model, "bytes") as reader:
        examples = list(examples_from_lines(reader, TEXTS).examples_with_frequencies())
    return hw.measure_redundancy(model, examples).data


def build_small() -> nn.Module:
    return build_model(GPT2)


def build_bytes() -> nn.Module:
    return build_model(GPT2 | {"vocab_size": 256})


def build_rotary() -> hw.Transformer:
    return build_model(LLAMA)


def build_alibi() -> nn.Module:
    torch.manual_seed(0)
    return hw.Attention(hw.design(model=12, heads=3, modifiers=(hw.parts.Alibi(),))).eval()


def build_of_task() -> nn.Module:
    return hw.build(TASK.model(), seed=0).eval()


ALIGNED = hw.surgery.Pool(1, align="both")
SAMPLED: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "seed": 0}
CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "rotary": (build_rotary, logits),
    "alibi": (build_alibi, layer_outputs),
    "sinusoids": (build_small, add_positions),
    "sampled": (build_rotary, lambda m: hw.generate(m, [[1, 2, 3], [4, 5]], **SAMPLED)),
    "head means": (build_small, lambda m: list(hw.head_means(m, [IDS]).values())),
    "heads": (build_bytes, lambda m: hw.heads(m, TEXTS, tokenizer="bytes").data),
    "importance": (
        build_bytes,
        lambda m: hw.importance(m, TEXTS, "taylor", tokenizer="bytes").data,
    ),
    "redundancy": (build_bytes, redundancy),
    "maps": (build_small, lambda m: hw.compute_attention_maps(m, IDS).rollout()),
    "logit": (
        build_small,
        lambda m: [share.value for share in hw.attribute_logit(m, IDS[:1]).heads],
    ),
    "circuits": (build_small, lambda m: to_plain(measure_head_circuits(m))),
    "spectra": (build_small, lambda m: to_plain(measure_qk_spectra(m))),
    "evaluate": (build_of_task, lambda m: hw.evaluate(m, TASK, batches=1).metrics),
    "prune": (build_bytes, lambda m: logits(hw.prune(m, 0.5, TEXTS, tokenizer="bytes").after)),
    "prune folded": (
        build_bytes,
        lambda m: logits(hw.prune(m, 0.5, TEXTS, fold="mean", tokenizer="bytes").after),
    ),
    "convert": (
        build_bytes,
        lambda m: logits(hw.convert(m, ALIGNED, TEXTS, tokenizer="bytes").after),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_on_the_cpu(name: str):
    build, call = CALLS[name]
    expected = flatten(call(build().float()))
    with pretended_device(missing=[torch.float64]) as device:
        assert not has_dtype(device, torch.float64)
        own = flatten(call(build().float().to(device)))
    assert expected
    np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4)


def test_constants_return_in_full_precision():
    layer = build_rotary()
    before = {name: tensor.clone() for name, tensor in layer.named_buffers()}
    assert {tensor.dtype for tensor in before.values()} >= {torch.float64}
    with pretended_device(missing=[torch.float64]) as device:
        layer = layer.float().to(device)
        assert {parameter.device for parameter in layer.parameters()} == {device}
        layer = layer.to("cpu")
    for name, tensor in layer.named_buffers():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_relevance_is_refused():
    with pretended_device(missing=[torch.float64]) as device:
        model = build_bytes().float().to(device)
        with pytest.raises(ValueError, match=r"it computes in float64, which .* does not have"):
            hw.importance(model, TEXTS, "lrp", tokenizer="bytes")


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_a_float64_model_is_refused(tmp_path: Path, dtype: str | None):
    hw.save(build_rotary(), tmp_path / "ours")
    hw.export(build_rotary(), tmp_path / "theirs")
    with pretended_device(missing=[torch.float64]):
        for name in ("ours", "theirs"):
            for load in (hw.load, load_original):
                with pytest.raises(
                    ValueError, match=r"pretend has no float64; use dtype='float32'"
                ):
                    load(tmp_path / name, device=NAME, dtype=dtype)
                model = load(tmp_path / name, device=NAME, dtype="float32")
                assert get_device(model) == torch.device(NAME, 0)
