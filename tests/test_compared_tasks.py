"""The tasks of docs/comparison.md: headwise solves each, with the results of the other tool where it is
installed, and the numbers of lines in the table are those of the code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "compared"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import measure

    return measure


@pytest.fixture
def checkpoint(measure: ModuleType, tmp_path: Path) -> Path:
    return measure.save_checkpoint(tmp_path / "model")


def test_attention_and_ablation(measure: ModuleType, checkpoint: Path):
    """The weights are those that transformers returns; a head is ablated by zeros in the columns of
    the output projection.
    """
    task, ids = measure.attention_and_ablation, measure.make_ids()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
        width = model.config.head_dim
        model.model.layers[1].self_attn.o_proj.weight[:, 2 * width : 3 * width] = 0
        logits = model(ids).logits

    def check(found: tuple[list[torch.Tensor], torch.Tensor]) -> None:
        assert len(found[0]) == len(weights) == 4
        for layer, expected in zip(found[0], weights, strict=True):
            torch.testing.assert_close(torch.as_tensor(layer), expected[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[1], logits, atol=1e-5, rtol=1e-4)

    check(task.with_headwise(checkpoint, ids))
    pytest.importorskip("transformer_lens", reason="pip install transformer_lens")
    check(task.with_transformer_lens(checkpoint, ids))


def test_induction_scores(measure: ModuleType, checkpoint: Path):
    """The mean of the weights that transformers returns, at the token after the first occurrence."""
    task, repeated = measure.induction_heads, measure.make_repeated(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    with torch.no_grad():
        weights = model(repeated, output_attentions=True).attentions
    queries = range(64, 128)
    expected = torch.tensor(
        [[[float(w[0, h, t, t - 63]) for t in queries] for h in range(8)] for w in weights]
    ).mean(-1)
    found = task.with_headwise(checkpoint, repeated)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    pytest.importorskip("transformer_lens", reason="pip install transformer_lens")
    found = task.with_transformer_lens(checkpoint, repeated)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_attribution_patching(measure: ModuleType, checkpoint: Path):
    """(corrupt - clean) times the gradient at the input of the output projection."""
    task = measure.attribution_patching
    given = measure.make_pair(checkpoint) | {"tokens": [77, 74]}  # M and J: tokens are bytes here
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    outputs: list[list[torch.Tensor]] = []
    for ids in given["pair"]:
        outputs.append([])

        def keep(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            args[0].retain_grad()
            outputs[-1].append(args[0])

        hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(keep) for layer in model.model.layers
        ]
        logits = model(ids).logits[0, -1]
        for hook in hooks:
            hook.remove()
        if len(outputs) == 1:
            first, second = given["tokens"]
            (logits[first] - logits[second]).backward()
    products = [
        ((corrupt - clean) * clean.grad).detach().unflatten(-1, (8, -1)).sum((0, 1, 3))
        for clean, corrupt in zip(*outputs, strict=True)
    ]
    expected = torch.stack(products)
    assert expected.abs().max() > 1e-4
    found = task.with_headwise(checkpoint, *given.values())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    pytest.importorskip("transformer_lens", reason="pip install transformer_lens")
    found = task.with_transformer_lens(checkpoint, *given.values())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def kept_heads(smaller: torch.nn.Module, model: torch.nn.Module) -> list[list[int]]:
    """The head of the model that each head of the smaller one is, by the columns of W_O."""
    found = []
    for layer, before in zip(smaller.model.layers, model.model.layers, strict=True):
        heads = before.self_attn.o_proj.weight.unflatten(1, (8, -1)).unbind(1)
        left = layer.self_attn.o_proj.weight.unflatten(1, (4, -1)).unbind(1)
        found.append([n for one in left for n, head in enumerate(heads) if torch.equal(one, head)])
    return found


@pytest.mark.filterwarnings("ignore::UserWarning:torch_pruning")
def test_half_of_the_heads(measure: ModuleType, tmp_path: Path):
    """Plain transformers loads the result, whose logits are those of the model with zeros in the
    columns of the output projection that belong to the other heads.
    """
    task = measure.half_of_the_heads
    plain, ids = measure.save_checkpoint(tmp_path / "plain", kv_heads=8), measure.make_ids()

    def check(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(plain)
        smaller = AutoModelForCausalLM.from_pretrained(folder)
        assert smaller.config.num_attention_heads == 4
        with torch.no_grad():
            for layer, heads in zip(model.model.layers, kept_heads(smaller, model), strict=True):
                assert len(set(heads)) == len(heads) == 4
                columns = layer.self_attn.o_proj.weight.unflatten(1, (8, -1))
                columns[:, [head for head in range(8) if head not in heads]] = 0
            torch.testing.assert_close(smaller(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)

    task.with_headwise(plain, tmp_path / "ours")
    check(tmp_path / "ours")
    pytest.importorskip("torch_pruning", reason="pip install torch-pruning")
    task.with_torch_pruning(plain, tmp_path / "theirs")
    check(tmp_path / "theirs")


def test_bytes_of_the_cache(measure: ModuleType):
    task, config = measure.kv_cache_bytes, measure.CONFIG
    right = 32 * 2 * 8 * 128 * 2 * 32_768  # layers, K and V, heads, channels, bytes, tokens
    assert task.with_headwise(config, 32_768) == right
    pytest.importorskip("hf_mem", reason="pip install hf-mem")
    assert task.with_hf_mem(config, 32_768) == right


def test_the_table_has_the_lines_of_the_code(measure: ModuleType):
    stored = json.loads((ROOT / "docs" / "compared-tasks.json").read_text())
    assert [row["task"] for row in stored["tasks"]] == list(measure.TASKS)
    for row in stored["tasks"]:
        module = getattr(measure, row["task"])
        for name, side in row["sides"].items():
            assert side["lines"] == measure.count_lines(getattr(module, f"with_{name}"))
            assert name == "headwise" or side["version"]
