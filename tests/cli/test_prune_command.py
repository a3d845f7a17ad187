"""`headwise prune` on folders of every kind: files, verification and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import headwise as hw
from headwise.training.data import make_task
from support.command_errors import run_refused
from support.command_help import run_command, run_json, run_ok
from support.pruning_examples import TEXTS
from support.refusals import refused_cases
from support.saved_models import save_byte_model, save_transformers_model
from support.tiny_configs import model_config

KINDS = {
    "gpt2": "resized",
    "llama": "transformers",
    "bert": "resized",
    "t5": "transformers",
    "bart": "resized",
}
SLOW = ("gpt2", "bert", "t5")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of ours that read bytes, texts for them, and a model of images."""
    base = tmp_path_factory.mktemp("models")
    config = model_config("gpt2", n_embd=24, n_head=4, n_layer=2, vocab_size=300, n_positions=64)
    net = save_byte_model(config, base / "ours")
    net.usage = hw.ProcessorSpec()
    hw.save(net, base / "wordless")
    draw = np.random.default_rng(0)
    images = {
        "images": draw.integers(0, 255, (40, 8, 8), dtype=np.uint8),
        "labels": draw.integers(0, 3, 40),
    }
    np.savez(base / "images.npz", **images)
    task = make_task("images", path=str(base / "images.npz"))
    vision = hw.build(task.model(), seed=0)
    vision.usage = task.usage
    hw.save(vision, base / "vision")
    (base / "texts").write_text(TEXTS)
    (base / "pairs").write_text("".join(f"source {n}\ttarget {n}\n" for n in range(9)))
    (base / "few").write_text("one alone\n")
    return {path.name: path for path in base.iterdir()}


def heads(folder: Path) -> list[int]:
    return [spec.heads.q for _, spec in hw.load(folder).spec.attention_specs()]


FAST = ("--seconds", "0.05", "--length", "8")


@pytest.mark.parametrize(
    "name",
    ["ours", *(pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in KINDS)],
)
def test_one_command_prunes_and_verifies_a_model(name, folders, tmp_path, capsys):
    source = folders.get(name, tmp_path / name)
    if name in KINDS:
        save_transformers_model(name, source)
    texts, out = folders["pairs" if name in ("t5", "bart") else "texts"], tmp_path / "out"
    per = "stack" if name == "t5" else "layer"
    verification = run_json(
        capsys,
        "prune",
        source,
        f"--keep 0.5 --per {per} --by random --data {texts} --out {out}",
        *FAST,
    )
    assert verification["holds"] is True
    assert {one["what"] for one in verification["equal"]} >= {
        "heads ablated vs. removed",
        "headwise.load of the written folder",
    }
    assert verification["folder"]["kind"] == KINDS.get(name, "ours"), verification["folder"][
        "sentence"
    ]
    before, after = heads(source), heads(out)
    assert [round(q / 2) for q in before] == after
    assert json.loads((out / "verification.json").read_text())["quality"] == verification["quality"]
    assert "heads kept" in (out / "VERIFICATION.md").read_text()
    assert json.loads((out / "heads.json").read_text())["change"]["head_counts"] == verified_heads(
        source
    )


def verified_heads(folder: Path) -> dict[str, int]:
    return {
        site: len(spec.score_head_of_output)
        for site, spec in hw.load(folder).spec.attention_specs()
    }


def test_images_by_a_task(folders, tmp_path, capsys):
    out, path = tmp_path / "out", folders["images.npz"]
    stdout = run_ok(
        capsys,
        "prune",
        folders["vision"],
        f"--keep 0.5 --by taylor --task images --set {f'path={path}'} --out {out}",
        *FAST[:2],
        "--json",
    )
    rows = {row["name"]: row for row in json.loads(stdout)["quality"]["rows"]}
    assert {"loss", "accuracy"} <= rows.keys()
    whole, half = hw.load(folders["vision"]), hw.load(out)
    assert 2 * sum(heads(out)) == sum(heads(folders["vision"]))
    with torch.no_grad():
        x = make_task("images", path=str(path)).batch(0, 2, "valid").x
        assert half(x).shape == whole(x).shape


@pytest.mark.parametrize(
    "which", [("--clusters",), ("--keep", "0.5", "--fold", "mean")], ids=lambda way: way[0]
)
def test_examples_of_a_task_choose_in_every_way(which, tmp_path, capsys):
    task = make_task("copy")
    net = hw.build(task.model(), seed=0)
    net.usage = task.usage
    hw.save(net, tmp_path / "net")
    out = run_ok(
        capsys,
        "prune",
        tmp_path / "net",
        *which,
        f"--by michel --task copy --limit 10 --out {tmp_path / 'out'} --seconds 0.05 --json",
    )
    assert json.loads(out)["holds"]


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    """A llama of two layers, whose config.json can name its numbers of heads."""
    save_transformers_model("llama", tmp_path / "llama")
    return tmp_path / "llama"


def test_a_dry_run_shows_plan_sizes_and_folder(plain_model, folders, tmp_path, capsys):
    base = ["prune", plain_model, "--data", folders["texts"], "--dry-run"]
    first = next(spec for _, spec in hw.load(plain_model).spec.attention_specs()).heads
    stdout = run_ok(capsys, *base, "--by", "random", "--keep", "0.5")
    assert "the folder will be a plain transformers checkpoint" in stdout
    assert "nothing was written" in stdout
    row = next(line for line in stdout.splitlines() if line.startswith("decoder.0.attention"))
    assert row.split()[:5] == [
        *("decoder.0.attention", str(first.q), str(first.q // 2)),
        *(str(first.kv), str(first.kv // 2)),
    ]
    plan = json.loads(run_ok(capsys, *base, "--by", "random", "--keep", "0.5", "--json"))
    assert [*map(int, row.split()[5:])] == plan["keep"]["decoder.0.attention"]
    assert len(plan["keep"]["decoder.0.attention"]) == first.q // 2
    out = ["--out", tmp_path / "never"]
    assert "nothing was written" in run_ok(capsys, *base, "--by", "random", "--keep", "0.5", *out)
    small = hw.prune(hw.load(plain_model), 0.5, TEXTS.splitlines()).after
    assert f"{sum(one.numel() for one in small.parameters()):,}" in stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]
    group = ",".join(map(str, range(first.q // first.kv)))
    uneven = " ".join(run_ok(capsys, *base, "--heads", f"0:{group}").split())
    assert "will not be a plain transformers checkpoint, because layer 1 keeps" in uneven
    assert f"equal numbers of heads would give one: --keep {first.q // 2}" in uneven
    code, _, err = run_command(capsys, *base[:-1], "--keep", "0.5")
    assert (code, err) == (2, "headwise: missing --out DIR; add it; see headwise prune --help\n")


def test_a_verification_without_speed(plain_model, folders, tmp_path, capsys):
    out = tmp_path / "out"
    base = ["prune", plain_model, "--data", folders["texts"], "--out", out, "--no-speed"]
    code, stdout, err = run_command(capsys, *base, "--heads", "0:0,1")
    assert code == 0
    assert "tokens/s" not in stdout
    assert "the folder will not be a plain transformers checkpoint, because layer 1 keeps" in err
    assert json.loads((out / "verification.json").read_text())["speeds"]["phases"] == []
    assert "No speed was measured." in (out / "VERIFICATION.md").read_text()


def test_the_terminal_shows_progress_and_result(folders, tmp_path, capsys):
    out = tmp_path / "out"
    stdout = run_ok(
        capsys,
        "prune",
        folders["ours"],
        f"--heads 0:1,3 1:0 --fold mean --data {folders['texts']} --out {out}",
        *FAST,
    )
    assert stdout.startswith("gpt2: 5 of 8 heads kept, all but the listed heads")
    assert max(map(len, stdout.replace(str(out), "OUT").splitlines())) <= 80
    assert "mean outputs were computed with 6 texts that the verification does not use" in stdout
    assert "heads were chosen" not in stdout
    assert [
        len(keep)
        for keep in json.loads((out / "heads.json").read_text())["change"]["keep"].values()
    ] == [2, 3]


def test_a_share_that_is_no_number_of_groups_is_reported(folders, tmp_path, capsys):
    config = {
        "model_type": "llama",
        "hidden_size": 36,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 300,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 64,
    }
    save_byte_model(config, tmp_path / "groups")
    stdout = run_ok(
        capsys,
        "prune",
        tmp_path / "groups",
        f"--keep 0.75 --by random --data {folders['texts']} --out {tmp_path / 'out'}",
        *FAST,
    )
    assert heads(tmp_path / "out") == [6, 6]
    note = "keep=0.75 was rounded to whole key-value groups: 6 of 9 heads (0.667) in each layer"
    assert note in " ".join(stdout.split())
    assert note in json.loads((tmp_path / "out" / "verification.json").read_text())["notes"]
    assert (
        "heads were chosen" not in stdout
    )  # at random, so that the verification takes all 11 texts
    assert json.loads((tmp_path / "out" / "verification.json").read_text())["texts"] == 11


@pytest.mark.parametrize(("argv", "wrong"), refused_cases(__file__, "prune", globals()))
def test_wrong_arguments(argv, wrong, folders, tmp_path, capsys):
    assert wrong in run_refused(capsys, "prune", argv, folders, tmp_path)


def test_a_model_without_words_is_given_bytes(folders, tmp_path, capsys):
    out = tmp_path / "out"
    run_ok(
        capsys,
        "prune",
        folders["wordless"],
        f"--keep 2 --by random --data {folders['texts']} --tokenizer bytes --out {out}",
        *FAST,
    )
    assert heads(out) == [2, 2]


HYBRID = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny Qwen3-Next, which headwise does not load as its own, and texts: words of a command."""
    import transformers

    root = tmp_path_factory.mktemp("hybrid")
    config = transformers.Qwen3NextConfig(**HYBRID)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / "model")
    texts = root / "texts.txt"
    texts.write_text("one text\nanother text\na third text\n")
    return [str(root / "model"), "--data", str(texts), "--tokenizer", "bytes"]


def test_options_of_own_models_are_named_for_hybrids(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, hybrid: list[str]
) -> None:
    """A hybrid is changed on its own modules, which headwise does not retrain."""
    out = str(tmp_path / "out")
    code, _, err = run_command(
        capsys, "prune", *hybrid, "--keep", "0.5", "--out", out, "--uptrain", "2"
    )
    assert code == 2
    assert "--uptrain needs a model that headwise loads as its own" in err
    assert err.splitlines()[-1].endswith("leave --uptrain out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "change"), [("prune", "--keep 0.5"), ("convert", "--kv 1")])
def test_a_changed_hybrid_comes_with_a_report(
    command: str, change: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, hybrid: list[str]
) -> None:
    """Parameters by numel, and a cache of one key-value head less, by hand."""
    import transformers

    out = tmp_path / "out"
    words = [*hybrid, *change.split(), "--out", str(out), "--no-speed", "--context", "8"]
    code, text, err = run_command(capsys, command, *words, "--perplexity", hybrid[2])
    assert code == 0, err
    assert "VERIFICATION.md in this folder has the full report" in text
    page = (out / "VERIFICATION.md").read_text()
    assert "perplexity of texts.txt, context 8, stride 4" in page
    data = json.loads((out / "verification.json").read_text())
    names = [check["what"] for check in data["equal"]]
    first = "heads ablated vs. removed"
    second = "the model before, with equal heads in each group"
    assert (first if command == "prune" else second) in names
    assert "transformers of the written folder" in names
    assert data["holds"]
    costs = {row["name"]: (row["before"], row["after"]) for row in data["savings"]["numbers"]}
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (hybrid[0], out)
    ]
    assert costs["parameters"] == tuple(sum(p.numel() for p in one.parameters()) for one in models)
    assert costs["cache per token"] == (2 * 2 * 8 * 4, 2 * 8 * 4)
    removed = 2 * 8 * 32 + (6 * 8 * 32 if command == "prune" else 0)
    assert costs["parameters"][0] - costs["parameters"][1] == removed


@pytest.mark.parametrize("rope", ["default", "dynamic"])  # the second runs as a module
def test_a_named_tokenizer_is_written_with_the_smaller_model(rope, tmp_path, capsys):
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        pad_token_id=None,
        rope_parameters={"rope_type": rope, "factor": 2.0, "rope_theta": 1e4},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    (tmp_path / "texts.txt").write_text(TEXTS)
    words = ("--data", tmp_path / "texts.txt", "--no-speed", "--out", tmp_path / "smaller")
    run_ok(capsys, "prune", tmp_path / "tiny", "--heads", "0:1", "--tokenizer", "bytes", *words)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "smaller")
    assert tokenizer("a b").input_ids == [97, 32, 98]
    report = (tmp_path / "smaller" / "VERIFICATION.md").read_text()
    assert "the folder was loaded by transformers, outputs differ by " in report
    record = json.loads((tmp_path / "smaller" / "heads.json").read_text())
    if rope == "default":
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")
        name = type(model).__name__
        assert f"transformers.{name}.from_pretrained loads it" in record["sentence"]
    again = ("prune", tmp_path / "tiny", "--heads", "0:1", "--tokenizer", "bytes", *words)
    _, _, err = run_command(capsys, *again)
    assert "smaller: it exists; add --overwrite to replace it, or give a new folder" in err
    run_ok(capsys, *again, "--overwrite")
    (tmp_path / "smaller" / "texts.txt").write_text("of the user")
    code, _, err = run_command(capsys, *again, "--overwrite")
    assert code == 2
    assert "it contains texts.txt, which is not part of a pruned or converted model" in err
