"""`headwise convert` on folders of every kind: files, verification and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headwise as hw
from support.command_errors import run_refused
from support.command_help import run_json, run_ok
from support.pruning_examples import TEXTS
from support.refusals import refused_cases
from support.saved_models import save_byte_model, save_transformers_model

FAST = ("--seconds", "0.05", "--length", "8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of ours and of transformers that read bytes, and texts for them."""
    base = tmp_path_factory.mktemp("models")
    config = {
        "model_type": "llama",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    }
    save_byte_model(config, base / "ours")
    save_transformers_model("llama", base / "llama", num_key_value_heads=4, num_attention_heads=4)
    (base / "texts").write_text(TEXTS)
    return {path.name: path for path in base.iterdir()}


@pytest.mark.parametrize(("name", "kind"), [("ours", "ours"), ("llama", "transformers")])
def test_one_command_converts_and_verifies_a_model(name, kind, folders, tmp_path, capsys):
    out = tmp_path / "out"
    verification = run_json(
        capsys,
        "convert",
        folders[name],
        f"--kv 2 --align --grouping similar --data {folders['texts']} --out {out}",
        *FAST,
    )
    assert verification["folder"]["kind"] == kind, verification["folder"]["sentence"]
    assert {one["what"] for one in verification["equal"]} == {
        "aligned, before heads are pooled",
        "headwise.load of the written folder",
    }
    assert verification["holds"] is True
    assert {spec.heads.kv for _, spec in hw.load(out).spec.attention_specs()} == {2}
    done = json.loads((out / "heads.json").read_text())["change"]
    assert done["operation"] == "convert"
    assert all(len(groups) == 2 for groups in done["groups"].values())
    assert any(note.startswith("pooling values loses") for note in done["notes"])


@pytest.mark.parametrize(
    ("options", "uses"),
    [
        ((), []),
        (("--align",), ["heads were aligned"]),
        (("--uptrain", "2"), ["the model was retrained"]),
        (
            ("--grouping", "similar", "--align", "keys"),
            ["heads were grouped", "heads were aligned"],
        ),
    ],
)
def test_notes_name_what_texts_were_used_for(options, uses, folders, tmp_path, capsys):
    verification = run_json(
        capsys,
        "convert",
        folders["ours"],
        "--kv 2",
        *options,
        f"--data {folders['texts']} --out {tmp_path / 'out'}",
        *FAST,
    )
    assert [note for note in verification["notes"] if "the verification" in note] == [
        f"{use} with 6 texts that the verification does not use" for use in uses
    ]
    assert verification["texts"] == (5 if uses else 11)


@pytest.mark.parametrize("form", ["mha", "latent", "collaborative=24", "composed=4", "routed=2,2"])
def test_other_forms(form, folders, tmp_path, capsys):
    name, out = "gpt" if form.startswith("coll") else "ours", tmp_path / "out"
    if name == "gpt":
        config = {
            "model_type": "gpt2",
            "n_embd": 24,
            "n_head": 4,
            "n_layer": 1,
            "vocab_size": 300,
            "n_positions": 64,
        }
        save_byte_model(config, tmp_path / "gpt")
    model = folders.get(name, tmp_path / "gpt")
    stdout = run_ok(
        capsys,
        "convert",
        model,
        f"--to {form} --by michel --data {folders['texts']} --out {out}",
        *FAST,
        "--json",
    )
    quality = json.loads(stdout)["quality"]["rows"][0]
    assert abs(quality["change"]["value"]) < 1e-4
    assert hw.load(out).spec != hw.load(model).spec or form == "mha"


def test_retraining_is_reported(folders, tmp_path, capsys):
    out = tmp_path / "out"
    (tmp_path / "lessons").write_text(
        "\n".join(f"{TEXTS.splitlines()[n % 11]} {n}" for n in range(40))
    )
    stdout = run_ok(
        capsys,
        "convert",
        folders["ours"],
        f"--kv 1 --data {folders['texts']} --distill-data {tmp_path / 'lessons'} --uptrain 12 --lr 0.003 --out {out}",
        *FAST,
    )
    done = json.loads((out / "heads.json").read_text())["change"]["uptraining"]
    assert done["curve"][0]["step"] == 0
    keep = {at["step"]: at["held_out"] for at in done["curve"]}
    assert keep[done["step"]] == min(keep.values()) < keep[0]
    assert "uptrained on 40 texts" in stdout


@pytest.mark.parametrize(("argv", "wrong"), refused_cases(__file__, "convert", globals()))
def test_wrong_arguments(argv, wrong, folders, tmp_path, capsys):
    assert wrong in run_refused(capsys, "convert", argv, folders, tmp_path)
