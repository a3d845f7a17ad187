"""`headwise train`: one document on stdout, logs on stderr, one line for an error."""

from __future__ import annotations

import json
import math
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.cli import main, train
from headwise.costs import count_parameters
from headwise.kernels import devices
from headwise.models import load
from headwise.models.families import read_model_spec
from headwise.models.model_spec import EmbeddingSpec, ModelSpec, PositionSpec
from headwise.training import ConsoleLogger
from headwise.training.data import make_task, open_data
from headwise.training.recipe import from_dict
from headwise.training.run_setup import fit_vocabulary, replace_self_attention
from headwise.training.train_step import check_model
from headwise.util.files import read_lines
from support import command_help

SMALL = [
    "--steps",
    "2",
    "--batch",
    "4",
    "--precision",
    "fp32",
    "--compile",
    "off",
    "--device",
    "cpu",
]
SMALL += ["--set", "recipe.evaluate_batches=1"]


def trained(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    return command_help.run_command(capsys, "train", *argv)


def test_dates_end_with_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code, out, err = trained(capsys, "dates", "--out", str(tmp_path), "--json", *SMALL)
    data = json.loads(out)
    assert code == 0
    assert {
        "task": "dates",
        "steps": 2,
        "model": str(tmp_path),
        "split": "test",
    }.items() <= data.items()
    assert 0 <= data["metrics"]["exact_match"] <= 1
    assert data["seconds"] > 0
    assert "dates into" in err
    assert load(tmp_path).spec.kind == "encoder-decoder"
    assert (tmp_path / "tokenizer.json").is_file()


def test_settings_reach_task_and_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "r.toml").write_text("steps = 9\nlr = 0.01\nclip = 0.5\n")
    result = [
        "--recipe",
        str(tmp_path / "r.toml"),
        *("--set", "task.pairs=3", "--set", "recipe.schedule=wsd"),
    ]
    code, out, _ = trained(capsys, "recall", "--out", str(tmp_path / "a"), *SMALL, *result)
    config = read_lines(tmp_path / "a" / "metrics.jsonl")[0]
    assert (code, config["task"]["pairs"]) == (0, 3)
    keep = {name: config["recipe"][name] for name in ("steps", "lr", "clip", "schedule", "batch")}
    assert keep == {"steps": 2, "lr": 0.01, "clip": 0.5, "schedule": "wsd", "batch": 4}
    assert "recall: 2 steps" in out


def test_options_override_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    trained(capsys, "recall", "--out", str(tmp_path), *SMALL, "--set recipe.steps=5")
    assert read_lines(tmp_path / "metrics.jsonl")[0]["recipe"]["steps"] == 2


def test_a_file_is_learnt_and_a_model_goes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    first = ["--set", "task.length=8", "--set", "task.test=0.2", *SMALL]
    assert trained(capsys, str(tmp_path / "a.txt"), "--out", str(tmp_path / "a"), *first)[0] == 0
    again = ["--model", str(tmp_path / "a"), *first]
    code, out, _ = trained(
        capsys, "--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "b"), "--json", *again
    )
    assert (code, json.loads(out)["task"]) == (0, "text")


@pytest.mark.parametrize("preset", ["mqa", "linear", "longformer", "diff"])
def test_a_preset_takes_the_place_of_every_attention(preset: str):
    plain, changed = (
        make_task("dates").model(),
        replace_self_attention(make_task("dates").model(), preset),
    )
    assert {name for name, _ in plain.attention_specs()} == {
        name for name, _ in changed.attention_specs()
    }
    for (name, before), (_, after) in zip(
        plain.attention_specs(), changed.attention_specs(), strict=True
    ):
        if name.endswith("cross"):
            assert after == before
        else:
            # No token reads more than before, whatever the preset's own pattern is.
            reads = [(i, j) for i in range(9) for j in range(9) if after.pattern.allows(i, j)]
            assert all(before.pattern.allows(i, j) for i, j in reads)
            assert after != before


# --- --model FILE: a spec of one layer ------------------------------------------------------------

LAYER = hw.design(model=64, heads=4, kv=2, dim=10, modifiers=(hw.parts.Softcap(limit=5.0),))


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_spec_file_takes_the_place_of_every_self_attention(capsys, tmp_path, suffix):
    path = tmp_path / f"layer{suffix}"
    path.write_text((hw.to_toml if suffix == ".toml" else hw.to_json)(LAYER))
    code, _, err = trained(
        capsys, "recall", "--model", str(path), "--out", str(tmp_path / "out"), *SMALL
    )
    assert code == 0, err
    net, own = load(tmp_path / "out"), make_task("recall").model()
    new = [spec for _, spec in net.spec.attention_specs()]
    old = [spec for _, spec in own.attention_specs()]
    assert len(new) == len(old) == 2
    # The task's pattern and its positional modifiers stay; everything else is that of the file.
    expected = replace(
        LAYER, pattern=hw.patterns.Causal(), modifiers=(hw.parts.Rotary(), *LAYER.modifiers)
    )
    assert new == [expected, expected]
    assert [block.feed for block in net.spec.stacks[0].layers] == [
        block.feed for block in own.stacks[0].layers
    ]
    changed = [
        (count_parameters(after) - count_parameters(before))
        for after, before in zip(new, old, strict=True)
    ]
    assert sum(p.numel() for p in net.parameters()) == count_parameters(own) + sum(changed)
    keys = [
        tensor for name, tensor in net.state_dict().items() if name.endswith("attention.project.k")
    ]
    assert [key.numel() for key in keys] == [2 * 10 * 64] * 2


def test_a_spec_file_of_another_width_is_refused_and_the_remedy_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    main(["spec", "gqa", "--toml"])
    Path("gqa.toml").write_text(capsys.readouterr().out)
    code, out, err = trained(capsys, "recall", "--model gqa.toml --out x", *SMALL)
    remedy = "headwise spec gqa.toml --set model=64 --toml"
    assert (code, out) == (2, "")
    assert err == (
        "headwise: gqa.toml is for models of width 512, but the model of the task recall has "
        "width 64; write a file "
        f"for it with {remedy}\n"
    )
    assert not Path("x").exists()
    assert main(shlex.split(remedy)[1:]) == 0
    Path("gqa.toml").write_text(capsys.readouterr().out)
    assert trained(capsys, "recall", "--model gqa.toml --out x", *SMALL)[0] == 0


def test_a_spec_file_of_cross_attention_is_refused(capsys, tmp_path):
    (tmp_path / "cross.toml").write_text(hw.to_toml(replace(LAYER, source=32)))
    code, _, err = trained(
        capsys, "recall", "--model", str(tmp_path / "cross.toml"), "--out", str(tmp_path / "x")
    )
    assert code == 2
    assert "cross.toml describes cross-attention, with source = 32; give a self-attention" in err


def test_every_command_reads_a_spec_file_or_states_what_it_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("layer.toml").write_text(hw.to_toml(LAYER))
    Path("texts.txt").write_text("one\ntwo\n")
    for verb in ("spec", "cost", "walk", "why", "sites"):
        code = main([verb, "layer.toml"])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, ""), verb
        assert captured.out
    texts = ["--data", "texts.txt"]
    for argv in (
        ["run", "layer.toml"],
        ["heads", "layer.toml", *texts],
        ["prune", "layer.toml", "--keep", "0.5", "--out", "x", *texts],
        ["prune", "layer.toml", "--sweep", "--out", "x", *texts],
        ["convert", "layer.toml", "--kv", "1", "--out", "x", *texts],
        ["trace", "layer.toml", "--text", "one", "--out", "a.trace"],
        ["view", "layer.toml", "--export", "a.html"],
    ):
        code = main(argv)
        captured = capsys.readouterr()
        assert (code, captured.out) == (2, ""), argv
        assert captured.err == (
            "headwise: layer.toml describes one attention layer, without weights; train a model "
            "with it: headwise "
            "train TASK --model layer.toml --out DIR\n"
        ), argv
    assert main(["study", "layer.toml"]) == 2
    assert (
        'write a study with a variant of it, [variants.mine] with spec = "layer.toml"'
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["layer.toml", "model.toml", "gqa", "gpt3"])
def test_sites_lists_the_layers_of_a_description(capsys, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    Path("layer.toml").write_text(hw.to_toml(LAYER))
    Path("model.toml").write_text(hw.model_spec.to_toml(make_task("dates").model()))
    assert main(["sites", name, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sites"]
    counts = {
        "layer.toml": (1, 4, 2),
        "model.toml": (6, 4, 4),
        "gqa": (1, 8, 2),
        "gpt3": (96, 96, 96),
    }
    assert (len(rows), rows[0]["q"], rows[0]["kv"]) == counts[name]


def test_ctrl_c_saves_the_current_step_and_prints_how_to_resume(capsys, monkeypatch, tmp_path):
    result = ["recall", "--out", str(tmp_path), *SMALL, "--steps", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(
            ConsoleLogger,
            "write",
            lambda self, record: record["event"] == "step" and signal.raise_signal(2),
        )
        code, out, err = trained(capsys, *result)
    assert (code, out) == (130, "")
    remedy = "run the same command with --resume to continue"
    assert (
        err.splitlines()[-1]
        == f"headwise: interrupted at step 1; the checkpoint is in {tmp_path}; {remedy}"
    )
    code, _, err = trained(capsys, *result)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds a run of 1 step; continue it with" in err
    code, out, err = trained(capsys, *result, "--resume --json")
    assert (code, json.loads(out)["steps"]) == (0, 3)
    assert "from step 1 on" in err


def test_numbers_of_the_result_are_in_one_column():
    metrics = {"loss": 3.25, "accuracy@distance<=16": 0.5, "exact_match@block=20": 12.5}
    lines = train._format_result(
        {"task": "copy", "steps": 1, "seconds": 1.0, "metrics": metrics}, "runs"
    ).splitlines()
    assert lines[0] == "copy: 1 step in 1 s, saved in runs"
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "llama-65b",
            "cannot train llama-65b: weights, gradients, first moments and second moments need "
            "1,036.2 GB",
        ),
        (
            "transformer-base",
            "its kind is 'encoder-decoder', and the task needs 'decoder'; give a model of that "
            "kind",
        ),
        (
            "bert-base",
            "cannot train bert-base on copy: its kind is 'encoder', and the task needs 'decoder'",
        ),
    ],
)
def test_published_models_that_cannot_be_trained_are_refused(model, message, tmp_path, capsys):
    assert main(["train", "copy", "--model", model, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "task", "rows", "parameters"),
    [
        (
            *("transformer-base", "dates", 63, 44_170_752),
        ),  # 6 x 3,152,384 + 6 x 4,204,032 + 63 x 512, bias included
        ("gpt2", "copy", 35, 124_439_808 - (50_257 - 35) * 768),
        ("bert-base", "graph", 2, None),
    ],
)
def test_published_models_get_the_vocabulary_of_the_task(model, task, rows, parameters):
    made = make_task(task)
    spec = train._make_model(model, made, from_dict({"device": "cpu"}))
    assert isinstance(spec, ModelSpec)
    check_model(spec, made)
    assert [stack.embedding and stack.embedding.tokens for stack in spec.stacks] == [rows] * len(
        spec.stacks
    )
    assert spec.heads[0].outputs == made.model().heads[0].outputs
    assert [stack.model for stack in spec.stacks] == [
        768 if model != "transformer-base" else 512
    ] * len(spec.stacks)
    if parameters is not None:
        assert count_parameters(spec) == parameters


def test_a_model_with_the_vocabulary_of_the_task_is_trained(tmp_path: Path):
    sizes = {
        f"{side}_{key}": 2
        for side in ("encoder", "decoder")
        for key in ("layers", "attention_heads")
    }
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "vocab_size": 999}
    spec, task = read_model_spec({"model_type": "marian"} | sizes), make_task("dates")
    fitted = fit_vocabulary(spec, task.model())
    result = hw.train(
        task, fitted, from_dict({"steps": 2, "batch": 4, "device": "cpu"}), tmp_path / "run"
    )
    assert math.isfinite(result.metrics["loss"])
    separate = tuple(replace(stack, embedding=EmbeddingSpec(63)) for stack in task.model().stacks)
    own = fit_vocabulary(spec, replace(task.model(), stacks=separate))
    assert [stack.embedding and stack.embedding.table for stack in own.stacks] == ["", ""]
    assert own.heads[0].table == "decoder"


@pytest.mark.parametrize(
    ("changes", "bytes_per_parameter", "tensors"),
    [
        ({}, 16, "weights, gradients, first moments and second moments"),
        (
            {"parallelism": "data=2,shards=2"},
            8,
            "weights, gradients, first moments and second moments",
        ),
        ({"parallelism": "shards=8"}, 4, "the whole weights"),
        ({"device": "cuda"}, 16, "weights, gradients, first moments and second moments"),
    ],
)
def test_the_memory_of_training_is_that_of_ranks_and_device(
    changes, bytes_per_parameter, tensors, monkeypatch
):
    recipe, spec = from_dict({"device": "cpu"} | changes), make_task("copy").model()
    needed = bytes_per_parameter * count_parameters(spec)
    memory = {"cpu": 10**15, "cuda": 10**15, recipe.device: needed}
    monkeypatch.setattr(devices, "resolve_device", torch.device)
    monkeypatch.setattr(devices, "free_memory", lambda device: memory[device.type])
    train._check_memory(spec, "small", recipe)
    memory[recipe.device] -= 1
    with pytest.raises(ValueError, match=f"cannot train small: {tensors} need") as caught:
        train._check_memory(spec, "small", recipe)
    size = f"{needed / 1e9:,.1f} GB"
    assert f"need {size}{' per rank' if 'parallelism' in changes else ''}, and " in str(
        caught.value
    )
    free = " free" if recipe.device == "cuda" else ""
    assert f" has {size}{free}; choose a smaller model" in str(caught.value)


def test_frames_get_the_positions_of_the_named_model(tmp_path: Path):
    """The task's own model has rotary positions, which BERT has not: without its table it would see
    no order.
    """
    rng = np.random.default_rng(0)
    frames, labels = (
        rng.normal(size=(40, 12, 5)).astype(np.float32),
        rng.integers(0, 3, size=(40, 12)),
    )
    np.savez(tmp_path / "frames.npz", frames=frames, labels=labels)
    task = open_data(str(tmp_path / "frames.npz"), {})
    embedding = fit_vocabulary(read_model_spec("bert-base"), task.model()).stacks[0].embedding
    assert embedding is not None
    assert embedding.positions == PositionSpec("learned", 12)
