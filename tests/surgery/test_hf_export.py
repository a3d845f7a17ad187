"""Folders of pruned models: loading in transformers and in headwise, and refusals."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import headwise as hw
from headwise.attention import head_axis_ops
from headwise.attention.parts.relative_position_bias import Alibi
from headwise.hub import transformers_loading
from headwise.hub.pretrained_models import copy_live_model
from headwise.models import Transformer, build
from headwise.models.model_spec.serialization import RECORD_FILE
from headwise.surgery.attention_replacement import (
    AttentionChange,
    get_attention_parameters,
    remove_heads,
    replace_attentions,
)
from headwise.surgery.hf_export import model_folder
from headwise.surgery.hf_export.shard_rewrite import to_canonical_form
from support.transformers_models import (
    FALLBACK,
    LLAMA,
    ZOO,
    TransformersModel,
    run_model,
    transformers,
)

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
OWN, NEXT = "decoder.0.attention", "decoder.1.attention"
MIXTRAL = TransformersModel(
    "MixtralForCausalLM",
    "MixtralConfig",
    {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "o_proj",
)
MODELS = {**ZOO, "bloom": FALLBACK["bloom"], "gptj": FALLBACK["gptj"], "mixtral": MIXTRAL}
transformers.utils.logging.disable_progress_bar()


def source(name: str, folder: Path, **keys: Any) -> Transformer:
    """A tiny model of transformers in a folder, as headwise reads it."""
    one = MODELS[name]
    one._replace(keys={**one.keys, **keys}).build().save_pretrained(folder)
    return hw.load(folder)


def everywhere(net: Transformer, heads: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {site: heads for site, _ in net.spec.attention_specs()}


def inputs_and_outputs(net: Transformer) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs under transformers' names, and what a model says of them."""
    draw, first = torch.Generator().manual_seed(5), net.spec.stacks[0].embedding
    ids = torch.randint(3, 67, (2, 11), generator=draw)
    assert first is not None
    with torch.no_grad():
        if first.patches:
            pixels = torch.randn(2, 3, 16, 16, generator=draw)
            return {"pixel_values": pixels}, net.hidden(pixels)
        if len(net.spec.stacks) > 1:
            return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}, net(ids[:, :7], source=ids)
        tokens = net.spec.heads and net.spec.heads[0].name == "tokens"
        return {"input_ids": ids}, net(ids) if tokens else net.hidden(ids)


def check_same(model: torch.nn.Module, net: Transformer) -> None:
    """A model of transformers says what ours says."""
    inputs, expected = inputs_and_outputs(net)
    assert (run_model(model, inputs) - expected).abs().max() <= 3e-5 * expected.abs().max().clamp(
        min=1
    )


def loaded(folder: Path) -> torch.nn.Module:
    """What transformers makes of a folder by itself; nothing may be missing."""
    named = json.loads((folder / CONFIG).read_text())["architectures"][0]
    model, result = getattr(transformers, named).from_pretrained(folder, output_loading_info=True)
    assert not result["missing_keys"]
    assert not result["unexpected_keys"]
    return model.eval()


def own(folder: Path) -> torch.nn.Module:
    """What the loader in a folder makes of it."""
    spec = importlib.util.spec_from_file_location("load_model", folder / "load_model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RECORD_FILE).read_text())


# --- plain checkpoints ----------------------------------------------------------------------------


def shared(net: Transformer, groups: list[list[int]]) -> Transformer:
    changes = {
        site: AttentionChange(
            *head_axis_ops.share_kv_heads(spec, get_attention_parameters(net, site), groups)
        )
        for site, spec in net.spec.attention_specs()
    }
    return replace_attentions(net, changes)


def keeping(*heads: int) -> Callable[[Transformer], Transformer]:
    return lambda net: remove_heads(net, everywhere(net, heads))


def sharing(*groups: list[int]) -> Callable[[Transformer], Transformer]:
    return lambda net: shared(net, list(groups))


def keep_by_stack(net: Transformer) -> Transformer:
    keep = {site: (0, 3) if site.startswith("e") else (1, 2) for site in everywhere(net, ())}
    return remove_heads(net, keep)


ALONE = {"num_key_value_heads": 4}
Change = Callable[[Transformer], Transformer]
UNIFORM: dict[str, tuple[str, dict[str, Any], Change, dict[str, Any]]] = {
    "llama": ("llama", ALONE, keeping(0, 3), {"num_attention_heads": 2}),
    "llama by groups": ("llama", {}, keeping(2, 3), {"num_key_value_heads": 1}),
    "llama shared": ("llama", ALONE, sharing([0, 1], [2, 3]), {"num_key_value_heads": 2}),
    "llama shared by likeness": (
        "llama", ALONE, sharing([0, 2], [3, 1]), {"num_key_value_heads": 2}
    ),
    "llama of three heads": ("llama", ALONE, keeping(0, 1, 3), {"model_type": "mistral"}),
    "mistral": ("mistral", ALONE, keeping(0, 2, 3), {"num_attention_heads": 3}),
    "qwen3": ("qwen3", {}, keeping(1, 2), {"num_attention_heads": 2}),
    "gemma2": ("gemma2", ALONE, keeping(0, 3), {"num_key_value_heads": 2}),
    "t5": ("t5", {}, keeping(1, 3), {"num_heads": 2}),
    "t5 of other heads": ("t5", {}, keep_by_stack, {"num_heads": 2}),
    "deepseek": ("deepseek", {}, keeping(0, 3), {"head_dim": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNIFORM)
def test_layers_alike_are_a_plain_checkpoint(case: str, tmp_path: Path):
    name, keys, change, expected = UNIFORM[case]
    net = change(source(name, tmp_path / "source", **keys))
    notes = model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {})
    assert notes.kind == "transformers", notes.summary
    assert notes.summary.startswith("A transformers checkpoint: ")
    check_same(loaded(tmp_path / "cut"), net)
    before, after = (
        json.loads((tmp_path / where / CONFIG).read_text()) for where in ("source", "cut")
    )
    assert {key: after[key] for key in expected} == expected
    if after["model_type"] == before["model_type"]:
        assert {key for key in after if after[key] != before.get(key)} <= {
            "num_attention_heads",
            "num_key_value_heads",
            "num_heads",
            "head_dim",
        }
    assert (
        hw.load(tmp_path / "cut").spec.stacks
        == hw.families.read_model_spec(tmp_path / "cut").stacks
    )


def test_shards_dtypes_and_unmapped_tensors_stay(tmp_path: Path):
    """Same files, same names, same kind of numbers; what was not cut is the same to the bit."""
    one = ZOO["llama"].build().to(torch.bfloat16)
    one.save_pretrained(tmp_path / "source", max_shard_size="12KB")
    besides(tmp_path / "source")
    net = remove_heads(hw.load(tmp_path / "source"), {OWN: (2, 3), NEXT: (0, 1)})
    notes = model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {})
    assert notes.kind == "transformers", notes.summary
    where = [json.loads((tmp_path / folder / INDEX).read_text()) for folder in ("source", "cut")]
    assert where[0]["weight_map"] == where[1]["weight_map"]
    stored = 0
    for file in sorted(set(where[0]["weight_map"].values())):
        old, new = (
            safetensors.torch.load_file(tmp_path / folder / file) for folder in ("source", "cut")
        )
        assert list(old) == list(new)
        assert {name: t.dtype for name, t in old.items()} == {
            name: t.dtype for name, t in new.items()
        }
        assert all(torch.equal(old[name], new[name]) or "self_attn" in name for name in old)
        stored += sum(tensor.nbytes for tensor in new.values())
    assert where[1]["metadata"]["total_size"] == stored
    assert len(set(where[0]["weight_map"].values())) > 3
    keep = sorted(
        path.relative_to(tmp_path / "cut").as_posix() for path in (tmp_path / "cut").rglob("*.*")
    )
    assert [name for name in keep if "safetensors" not in name] == [
        *("1_Pooling/config.json", CONFIG, "generation_config.json", RECORD_FILE, "merges.txt"),
        "modules.json",
        "tokenizer_config.json",
        "vocab.json",
    ]


def besides(folder: Path) -> None:
    """What lies beside weights: files that belong to the model, and some that
    must not travel on.
    """
    (folder / "1_Pooling").mkdir()
    expected = (
        "1_Pooling/config.json",
        "modules.json",
        "vocab.json",
        "merges.txt",
        "tokenizer_config.json",
    )
    for name in (
        *expected,
        *("training_args.bin", "modeling_own.py", "optimizer.pt", "1_Pooling/own.py"),
        "scores.json",
    ):
        (folder / name).write_text("{}")
    tensors = safetensors.torch.load_file(folder / first_shard(folder))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(3.0)
    safetensors.torch.save_file(tensors, folder / first_shard(folder), {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = first_shard(folder)
    (folder / INDEX).write_text(json.dumps(index))


def first_shard(folder: Path) -> str:
    return sorted(path.name for path in folder.glob("*-of-*"))[0]


# --- checkpoints with a loader of their own -------------------------------------------------------

A, B, C = (0, 2), (1,), (0, 1, 3)
E0, E1 = "encoder.0.attention", "encoder.1.attention"
X0, X1 = "decoder.0.cross", "decoder.1.cross"
# model, keys of its config, heads kept, and sites that get a constant
UNEVEN: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]], tuple[str, ...]]] = {
    "bert": ("bert", {}, {E0: A}, ()),
    "bert without one": ("bert", {}, {E0: (), E1: B}, ()),
    "gpt2": ("gpt2", {}, {OWN: C, NEXT: C}, ()),
    "gpt2 without one": ("gpt2", {}, {OWN: (), NEXT: A}, (OWN, NEXT)),
    "bart": ("bart", {}, {E1: C, X0: (), NEXT: (), X1: A}, (NEXT,)),
    "t5": ("t5", {}, {E0: C, X0: B, NEXT: A}, (E0,)),
    "t5 without the first": ("t5", {}, {E0: (), E1: A, OWN: ()}, (OWN,)),
    "llama": ("llama", ALONE, {OWN: C, NEXT: B}, (NEXT,)),
    "llama without the first": ("llama", {}, {OWN: (), NEXT: (2, 3)}, (OWN,)),
    "gemma2 without one": ("gemma2", {}, {NEXT: ()}, (NEXT,)),
    "vit": ("vit", {}, {E0: (), E1: C}, (E1,)),
    # the decoder's layers still share one bias
    "t5 in one layer": ("t5", {}, {E0: C}, ()),
    # its forward reads the number of heads from the config of the model
    "phi3": ("phi3", {}, {OWN: (0, 1)}, ()),
    "phi3 without one": ("phi3", {}, {OWN: (), NEXT: (2, 3)}, (OWN,)),
    "mixtral": ("mixtral", {}, {NEXT: (2, 3)}, ()),
    # the norm of its queries and keys needs all heads
    "olmo2": ("olmo2", {}, {OWN: A, NEXT: B}, (NEXT,)),
    "olmo2 in all layers": ("olmo2", {}, {OWN: (0, 1), NEXT: (0, 1)}, ()),
    "gptj": ("gptj", {}, {OWN: A}, ()),  # its rotary_dim is equal to its number of heads
    # the slopes of its heads are in the model, not in the layers
    "bloom": ("bloom", {}, {OWN: A, NEXT: C}, ()),
    "bloom in all layers": ("bloom", {}, {OWN: A, NEXT: A}, ()),
    "gpt-oss": ("gpt-oss", ALONE, {OWN: A, NEXT: C}, ()),
}


def cut(case: str, folder: Path) -> Transformer:
    name, keys, keep, constants = UNEVEN[case]
    net = source(name, folder, **keys)
    draw = torch.Generator().manual_seed(3)
    return remove_heads(net, keep, {site: torch.randn(32, generator=draw) for site in constants})


@pytest.mark.parametrize("case", UNEVEN)
def test_shapes_without_a_config_key_come_with_a_loader(case: str, tmp_path: Path):
    """Our reading, the loader's, and the model agree; transformers alone refuses, and does not make
    numbers up.
    """
    net = cut(case, tmp_path / "source")
    notes = model_folder.write_model_folder(
        net, tmp_path / "source", tmp_path / "cut", {"kept": {OWN: [0]}}
    )
    assert notes.kind == "resized", notes.summary
    assert notes.summary.startswith("Not a plain transformers checkpoint, because ")
    assert notes.summary.endswith("; load it with headwise.load or load_model.py.")
    model = own(tmp_path / "cut")
    check_same(model, net)
    again = hw.load(tmp_path / "cut")
    assert torch.allclose(inputs_and_outputs(again)[1], inputs_and_outputs(net)[1], atol=1e-6)
    assert hw.families.read_model_spec(tmp_path / "cut") == again.spec
    assert type(model) is getattr(transformers, MODELS[UNEVEN[case][0]].model)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        loaded(tmp_path / "cut")


@pytest.mark.parametrize("case", ["llama", "bert without one", "bloom"])
def test_a_trained_model_carries_its_loader(case: str, tmp_path: Path):
    """A step of training, saved by transformers alone, loads by the script of the new folder and
    with headwise.
    """
    model_folder.write_model_folder(
        cut(case, tmp_path / "source"), tmp_path / "source", tmp_path / "cut", {}
    )
    before = record(tmp_path / "cut")
    model = copy.deepcopy(own(tmp_path / "cut"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    shutil.rmtree(tmp_path / "cut")
    model.save_pretrained(tmp_path / "trained")
    again = own(tmp_path / "trained")
    inputs = inputs_and_outputs(hw.load(tmp_path / "trained"))[0]
    assert torch.equal(run_model(again, inputs), run_model(model, inputs))
    check_same(model, hw.load(tmp_path / "trained"))
    after = record(tmp_path / "trained")
    assert after["files"][WEIGHTS] != before["files"][WEIGHTS]
    assert {name: value for name, value in after.items() if name != "files"} == {
        name: value for name, value in before.items() if name != "files"
    }
    again.save_pretrained(tmp_path / "more")
    check_same(own(tmp_path / "more"), hw.load(tmp_path / "trained"))


@pytest.mark.parametrize(
    "case", ["llama without the first", "t5 without the first", "bart", "gpt2 without one"]
)
def test_a_layer_without_heads_counts_tokens(case: str, tmp_path: Path):
    """With a cache and without one a text goes on alike, though nothing is remembered in some
    layers.
    """
    model_folder.write_model_folder(
        cut(case, tmp_path / "source"), tmp_path / "source", tmp_path / "cut", {}
    )
    model = own(tmp_path / "cut")
    ids = torch.randint(3, 67, (2, 6), generator=torch.Generator().manual_seed(2))
    how = {
        "max_new_tokens": 7,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "eos_token_id": None,
    }
    both = [
        model.generate(ids, use_cache=cached, pad_token_id=0, **how) for cached in (True, False)
    ]
    assert both[0].shape[1] > 6 or case[:2] in ("t5", "ba")
    assert torch.equal(both[0], both[1])
    if not model.config.is_encoder_decoder:
        with torch.no_grad():
            outputs = model(ids[:, :4], use_cache=True).past_key_values
            assert torch.allclose(
                model(ids[:, 4:], past_key_values=outputs).logits,
                model(ids).logits[:, 4:],
                atol=1e-5,
            )


FOLDED = {OWN: torch.linspace(-1, 1, 32)}


@pytest.mark.parametrize(
    ("name", "first", "constants", "second", "kind"),
    [
        ("llama", {OWN: (0, 1)}, {}, {NEXT: (2, 3)}, "transformers"),  # plain again
        ("llama", {OWN: (0, 1)}, {}, {OWN: (), NEXT: (2,)}, "resized"),
        ("bert", {E0: (), E1: C}, {}, {E1: (0, 2)}, "resized"),  # empty tensors travel on
        ("llama", {OWN: C}, FOLDED, {NEXT: A}, "resized"),  # a bias that llama's files lack
    ],
)
def test_folders_are_cut_again(name, first, constants, second, kind, tmp_path):
    net = source(name, tmp_path / "source", **(ALONE if name == "llama" else {}))
    once = remove_heads(net, first, constants)
    notes = model_folder.write_model_folder(once, tmp_path / "source", tmp_path / "once", {})
    assert notes.kind == "resized"
    twice = remove_heads(hw.load(tmp_path / "once"), second)
    notes = model_folder.write_model_folder(twice, tmp_path / "once", tmp_path / "twice", {})
    assert notes.kind == kind
    check_same((loaded if kind == "transformers" else own)(tmp_path / "twice"), twice)
    both = [inputs_and_outputs(one)[1] for one in (hw.load(tmp_path / "twice"), twice)]
    assert torch.allclose(*both, atol=1e-6)


CLEAN = """
import sys
sys.modules["headwise"] = None
import torch, transformers
from safetensors.torch import load_file, save_file
other, plain, work = sys.argv[1:]
sys.path.insert(0, other)
from load_model import load
models = {"plain": transformers.AutoModelForCausalLM.from_pretrained(plain), "other": load()}
ids = load_file(work + "/in.safetensors")["ids"]
with torch.no_grad():
    logits = {name: model(input_ids=ids).logits.clone() for name, model in models.items()}
save_file(logits, work + "/out.safetensors")
assert "headwise" not in {name.partition(".")[0] for name in sys.modules if sys.modules[name] is not None}
"""


def test_both_kinds_load_where_headwise_is_not(tmp_path: Path):
    """In a process that cannot import headwise."""
    net = source("llama", tmp_path / "source", **ALONE)
    nets = {
        "other": remove_heads(net, {OWN: C, NEXT: B}),
        "plain": remove_heads(net, everywhere(net, (1, 3))),
    }
    ids = inputs_and_outputs(net)[0]["input_ids"]
    safetensors.torch.save_file({"ids": ids}, tmp_path / "in.safetensors")
    for name, one in nets.items():
        model_folder.write_model_folder(one, tmp_path / "source", tmp_path / name, {})
        assert record(tmp_path / name)["checked"].startswith(
            "loaded by transformers, outputs differ by "
        )
    result = [
        *(sys.executable, "-I", "-B", "-c", CLEAN),
        *(str(tmp_path / name) for name in nets),
        str(tmp_path),
    ]
    ran = subprocess.run(result, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    with torch.no_grad():
        assert all(torch.allclose(found[name], one(ids), atol=1e-5) for name, one in nets.items())


# --- what falls back to our folder ----------------------------------------------------------------


def test_other_sources_give_our_folder(tmp_path: Path):
    net = source("llama", tmp_path / "source")
    hw.save(net, tmp_path / "ours")
    small = remove_heads(net, {OWN: (0, 1)})
    for n, where in enumerate((tmp_path / "ours", None)):
        notes = model_folder.write_model_folder(
            small,
            where,
            tmp_path / f"cut{n}",
            {"kept": {}},
            extra_files={"VERIFICATION.md": b"seen"},
        )
        assert notes.kind == "ours"
        assert set(notes.files) == {
            "README.md",
            "config.json",
            "headwise.toml",
            RECORD_FILE,
            WEIGHTS,
            "VERIFICATION.md",
        }
        assert torch.equal(
            inputs_and_outputs(hw.load(tmp_path / f"cut{n}"))[1], inputs_and_outputs(small)[1]
        )


def test_unloadable_shapes_are_written_as_a_headwise_folder(tmp_path: Path):
    net = remove_heads(source("qwen3", tmp_path / "source"), {OWN: (0, 1, 2), NEXT: (0, 1, 2)})
    notes = model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {})
    assert notes.kind == "ours"
    assert "transformers does not support key-value groups of unequal size" in notes.summary
    names = {"README.md", "config.json", RECORD_FILE, "headwise.toml", WEIGHTS}
    assert {path.name for path in (tmp_path / "cut").iterdir()} == names
    assert torch.equal(inputs_and_outputs(hw.load(tmp_path / "cut"))[1], inputs_and_outputs(net)[1])


def test_a_loader_with_other_outputs_is_not_written(tmp_path, monkeypatch):
    text = model_folder.LOADER_SOURCE.read_text().replace(
        "torch.zeros_like(x) + bias", "torch.zeros_like(x) - bias"
    )
    (tmp_path / "wrong.txt").write_text(text)
    for module in (model_folder, transformers_loading):
        monkeypatch.setattr(module, "LOADER_SOURCE", tmp_path / "wrong.txt")
    notes = model_folder.write_model_folder(
        cut("llama without the first", tmp_path / "source"),
        tmp_path / "source",
        tmp_path / "cut",
        {},
    )
    assert notes.kind == "ours"
    assert "outputs differ by" in notes.summary


# --- heads.json -----------------------------------------------------------------------------------


def test_the_record_lists_the_steps_and_the_source(tmp_path: Path):
    net = remove_heads(source("gpt2", tmp_path / "source"), {OWN: A})
    model_folder.write_model_folder(
        net, tmp_path / "source", tmp_path / "cut", {"kept": {OWN: list(A)}}
    )
    said_there = record(tmp_path / "cut")
    assert (said_there["format"], said_there["change"]) == (1, {"kept": {OWN: [0, 2]}})
    for folder, named in (("source", "source"), ("cut", "files")):
        sums = {
            name: hashlib.sha256((tmp_path / folder / name).read_bytes()).hexdigest()
            for name in said_there[named]
        }
        assert sums == said_there[named]
    assert set(said_there["source"]) == {CONFIG, WEIGHTS}
    assert said_there["loader"] == {
        "name": "load_model.py",
        "sha256": said_there["files"]["load_model.py"],
    }
    plan = model_folder.read_record(tmp_path / "cut")
    assert model_folder.read_record(tmp_path / "cut" / RECORD_FILE) == plan


Harm = Callable[[Path], object]


def edit(name: str, change: Callable[[str], str]) -> Harm:
    return lambda folder: (folder / name).write_text(change((folder / name).read_text()))


def swap(old: str, new: str) -> Harm:
    return edit(RECORD_FILE, lambda text: text.replace(old, new))


LOADER = "load_model.py"
HARM: list[tuple[Harm, str]] = [
    (edit(LOADER, lambda text: text + "\n"), "load_model.py does not match its checksum"),
    (lambda f: (f / LOADER).unlink(), "load_model.py is missing, but heads.json lists it"),
    (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]),
        f"{WEIGHTS} is truncated",
    ),
    (edit(RECORD_FILE, lambda text: text[:40]), "heads.json is not JSON"),
    (swap('"format": 1', '"format": 2'), "format = 2; this version"),
    (swap('"kind": "resized"', '"kind": "own"'), "kind = 'own', not one of"),
    (swap('"model":', '"modell":'), r"is \[48\], the config requires \[96\]"),
    (
        lambda f: (f / RECORD_FILE).write_text(json.dumps(record(f) | {"files": []})),
        "files = \\[\\] is not a table",
    ),
]


def test_a_harmed_folder_is_refused_in_one_line(tmp_path: Path):
    net = remove_heads(source("gpt2", tmp_path / "source"), {OWN: A})
    model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {})
    whole = {path: path.read_bytes() for path in (tmp_path / "cut").iterdir() if path.is_file()}
    for harm, words in HARM:
        harm(tmp_path / "cut")
        with pytest.raises(hw.SpecError, match=words) as refused:
            hw.load(tmp_path / "cut")
        assert "\n" not in str(refused.value)
        for path, data in whole.items():
            path.write_bytes(data)
    hw.load(tmp_path / "cut")


# --- bad input ------------------------------------------------------------------------------------


def failing(call: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = call.split(".")
    place = {
        "os": os,
        "folders_shards": model_folder.write_shards.__globals__,
        "shutil": model_folder.shutil,
    }[owner]
    real, count = (place[name] if isinstance(place, dict) else getattr(place, name)), [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > after:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    if isinstance(place, dict):
        monkeypatch.setitem(place, name, fails)
    else:
        monkeypatch.setattr(place, name, fails)


@pytest.mark.parametrize(
    ("call", "after"),
    [
        *(("os.fsync", 0), ("os.fsync", 3), ("os.rename", 0), ("folders_shards.save_file", 0)),
    ],
)
def test_a_failing_disk_leaves_no_folder(call, after, tmp_path, monkeypatch):
    net = remove_heads(source("gpt2", tmp_path / "source"), {OWN: A})
    with monkeypatch.context() as patch:
        failing(call, after, patch)
        with pytest.raises(OSError, match=r"cut.* cannot be written: .*; (give|make)") as refused:
            model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {})
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {})


def test_a_killed_export_leaves_no_folder(tmp_path: Path):
    """Nothing stands at the name asked for until all of it does."""
    net, points = remove_heads(source("gpt2", tmp_path / "source"), {OWN: A}), (0, 2, 4)
    for point in points:
        if (child := os.fork()) == 0:
            count, real = [0], os.fsync

            def dies(
                handle: int, count: list[int] = count, point: int = point, real: Any = real
            ) -> None:
                count[0] += 1
                if count[0] > point:
                    os._exit(9)
                real(handle)

            os.fsync = dies
            with contextlib.suppress(BaseException):
                model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert not (tmp_path / "cut").exists()
    model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {})
    hw.load(tmp_path / "cut")


# --- the parts ------------------------------------------------------------------------------------


def test_the_plain_form_is_the_same_function(tmp_path: Path):
    """Heads in another order, columns of a shared table, and words that follow by themselves; in
    float32 this net, of logits up to 14, is up to 8e-5 away from float64.
    """
    net = remove_heads(
        source("t5", tmp_path), {s: (1, 3) if s.startswith("e") else (0, 1, 2) for s in sites("t5")}
    )
    specs = {
        site: head_axis_ops.transform_axes(spec, get_attention_parameters(net, site), turned(spec))
        for site, spec in net.spec.attention_specs()
    }
    odd = build(net.spec)
    odd.load_state_dict(
        {
            name: specs.get(".".join(name.split(".")[:3]), {}).get(
                ".".join(name.split(".")[3:]), tensor
            )
            for name, tensor in net.state_dict().items()
        }
    )
    assert torch.allclose(inputs_and_outputs(odd.eval())[1], inputs_and_outputs(net)[1], atol=3e-4)
    form = to_canonical_form(odd)
    same = build(form.model_spec)
    same.load_state_dict(dict(form.tensors))
    assert torch.allclose(inputs_and_outputs(same.eval())[1], inputs_and_outputs(net)[1], atol=3e-4)
    columns = {n: t.tolist() for n, t in form.tensors.items() if n.endswith("column")}
    assert set(map(tuple, columns.values())) == {(0, 1), (0, 1, 2)}
    widths = {
        n.split(".")[0]: t.shape[1] for n, t in form.tensors.items() if n.endswith("t5_bias.table")
    }
    assert widths == {"encoder": 2, "decoder": 3}


def sites(name: str) -> list[str]:
    return [s for s, _ in copy_live_model(ZOO[name].build()).spec.attention_specs()]


def turned(spec: hw.AttentionSpec) -> dict[str, Any]:
    back = head_axis_ops.select_heads(range(spec.heads.q - 1, -1, -1))
    return {"q": back, "out": back, "kv": back}


def test_groups_in_any_order_are_made_regular():
    """Every head still reads what it read: checked against the layer computed as it was given."""
    spec = hw.design(
        model=7, heads=6, kv=3, dim=5, modifiers=(hw.parts.QKNorm(), Alibi()), bias="qkvo"
    )
    spec = spec.with_heads(kv_head_of_query=(2, 0, 1, 0, 1, 2))
    stack = hw.model_spec.StackSpec.from_blocks(
        "decoder", 7, [hw.model_spec.BlockSpec(spec)], embedding=hw.model_spec.EmbeddingSpec(67)
    )
    net = build(hw.model_spec.ModelSpec("x", "decoder", (stack,)), seed=3).eval()
    form = to_canonical_form(net)
    assert dict(form.model_spec.attention_specs())[OWN].heads == hw.Heads.grouped(q=6, kv=3, dim=5)
    same = build(form.model_spec)
    same.load_state_dict(dict(form.tensors))
    assert torch.allclose(inputs_and_outputs(same.eval())[1], inputs_and_outputs(net)[1], atol=1e-6)
    assert "decoder.0.attention.alibi.slope" in form.find_extra_constants(
        hw.families.get_weight_names("llama")
    )


@pytest.mark.parametrize(
    "name", ["llama", "bert", "gpt2", "t5", "bart", "vit", "gemma2", "deepseek", "gpt-oss"]
)
def test_a_model_in_memory_is_copied(name: str):
    model = ZOO[name].build()
    net = copy_live_model(model)
    check_same(model, net)
    with torch.no_grad():
        before = inputs_and_outputs(net)[1]
        for tensor in model.parameters():
            tensor.zero_()
        assert torch.equal(inputs_and_outputs(net)[1], before)


def test_uncopyable_models_are_refused():
    with pytest.raises(hw.SpecError, match="model_type 'whisper' is not known"):
        copy_live_model(ZOO["whisper"].build())
    with (
        torch.device("meta"),
        pytest.raises(hw.SpecError, match="its weights are on the meta device"),
    ):
        copy_live_model(transformers.GPT2Model(transformers.GPT2Config(**ZOO["gpt2"].keys)))
    fewer = ZOO["gpt2"].build()
    fewer.transformer.h[0].attn.c_attn.weight = torch.nn.Parameter(
        torch.ones(32, 96, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(
        hw.SpecError, match="GPT2LMHeadModel cannot be copied: its weights are quantised"
    ):
        copy_live_model(fewer)


def test_the_loader_is_text_for_others():
    """Short, of torch, transformers and the standard library alone; of headwise, only the module of
    loaders runs it, from the package and not from the folder.
    """
    text = model_folder.LOADER_SOURCE.read_text()
    assert len(text.splitlines()) < 210
    assert "headwise" not in text.split('"""')[2]
    names = {
        line.split()[1].partition(".")[0]
        for line in text.splitlines()
        if line.startswith(("import ", "from "))
    }
    assert names == {"hashlib", "inspect", "json", "pathlib", "torch", "transformers", "types"}
    compile(text, "load_model.py", "exec")
    package = Path(hw.__file__).parent
    message = [
        p.name
        for p in package.rglob("*.py")
        if "load_model.txt" in p.read_text() or "load_model.py" in p.read_text()
    ]
    assert sorted(message) == ["model_folder.py", "transformers_loading.py"]
    assert not list(package.rglob("load_model.py"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*UNIFORM, *UNEVEN])
def test_every_kind_in_a_process_of_its_own(case: str, tmp_path: Path):
    if case in UNIFORM:
        name, keys, change, _ = UNIFORM[case]
        net, kind = change(source(name, tmp_path / "source", **keys)), "transformers"
    else:
        net, kind = cut(case, tmp_path / "source"), "resized"
    assert (
        model_folder.write_model_folder(net, tmp_path / "source", tmp_path / "cut", {}).kind == kind
    )
