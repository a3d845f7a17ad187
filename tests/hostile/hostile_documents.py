"""Every parser of headwise that reads what others wrote: hostile inputs for it, and the call that
reads one.
"""

from __future__ import annotations

import functools
import json
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import headwise as hw
from headwise.attention.masking.patterns import parse_pattern
from headwise.attention.parts.rotary_embedding import Rotary
from headwise.attention.spec.serialization import to_dict as spec_to_dict
from headwise.hub import checkpoint_weights, transformers_loading
from headwise.models import families, model_spec, vocabulary
from headwise.models.generation.text_output import ModelTokenizer
from headwise.models.model_spec.serialization import ModelManifest, SurgeryRecord
from headwise.observe.head_analysis.annotated_examples import parse_alignment_links, read_conllu
from headwise.observe.traces import trace_file
from headwise.studies.study_file import read_study
from headwise.training import recipe
from headwise.training.data import images, open_data, text_files
from hostile.hostile_values import (
    DOCUMENTS,
    SEEDS,
    damaged_bytes,
    hostile_trees,
    texts_of,
    to_toml_text,
)
from support.tiny_configs import model_config

GPT2 = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=40, n_positions=64)


class Parser(NamedTuple):
    """One parser: a strategy of its inputs, and the call that reads one."""

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], object]
    seconds: float = 5.0  # for one input


@functools.cache
def scratch_folder() -> Path:
    """Return a folder of this process for the files that parsers read."""
    folder = tempfile.TemporaryDirectory(prefix="headwise-hostile-")
    FOLDERS.append(folder)
    return Path(folder.name)


FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def write_file(name: str, content: str | bytes) -> Path:
    """Write a file that a parser reads, in place of the one before."""
    path = scratch_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    )
    return path


def reads_file(name: str, read: Callable[[Path], object]) -> Callable[[str | bytes], object]:
    """Return a call that writes an input to a file and reads that."""
    return lambda content: read(write_file(name, content))


# --- Specs, models, recipes, plans ----------------------------------------------------------------

SPECS = [
    spec_to_dict(
        hw.design(model=8, heads=4, kv=2, pattern="causal() & window(3)", modifiers=(Rotary(),))
    ),
    spec_to_dict(hw.design(preset="mla", model=16, heads=2)),
    spec_to_dict(hw.design(preset="dcmha", model=8, heads=2)),
    spec_to_dict(hw.design(preset="entmax", model=8, heads=2)),
]
RECIPES = [
    recipe.to_dict(recipe.Recipe()),
    {"steps": 5, "batch": 8, "accumulate": 2, "aux_losses": {"l0": 0.5}},
]
MODELS = [model_spec.to_dict(families.read_model_spec(GPT2))]


def _manifest_seeds() -> list[Any]:
    return [
        tomllib.loads((SEEDS / f"{name}.headwise.toml").read_text())
        for name in ("decoder", "gated")
    ]


def _read_config(tree: Any) -> object:
    return families.read_model_spec(tree if isinstance(tree, dict) else {"model_type": tree})


# --- Traces ---------------------------------------------------------------------------------------

TRACE = SEEDS / "generated.trace"


@functools.cache
def _trace_parts() -> tuple[Any, dict[str, np.ndarray]]:
    document, _, arrays = trace_file._read_safetensors(TRACE)
    return json.loads(document), {name: np.array(array) for name, array in arrays.items()}


def read_trace_document(text: str) -> object:
    """Read a trace whose document was replaced, with the right checksum, and everything that its
    pictures need.
    """
    from safetensors.numpy import save_file

    arrays = _trace_parts()[1]
    metadata = {
        trace_file.DOCUMENT_KEY: text,
        trace_file.CHECKSUM_KEY: trace_file._compute_checksum(text, arrays),
    }
    path = scratch_folder() / "a.trace"
    save_file(arrays, path, metadata)
    trace = hw.load_trace(path)
    for layer in trace.layers:
        for head in range(min(layer.heads, 3)):
            trace.head_weights(layer.name, head)
            trace.head_mask(layer.name, head)
    return trace.data


# --- Texts, tokenizers, data ----------------------------------------------------------------------


def _read_tokenizer(text: str) -> object:
    path = write_file("tokenizer.json", text)
    vocabulary.read_tokenizer_file(path)
    try:
        tokenizer = ModelTokenizer(text)
    except ValueError:
        raise
    except (
        Exception
    ) as error:  # parse_tokenizer raises what the library raises; its callers say which file it was
        raise ValueError(str(error)) from None
    return tokenizer.text(tokenizer.ids("ab")[:3])


def _safetensors_bytes() -> bytes:
    from safetensors.numpy import save

    return save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)}, {"format": "pt"})


def _read_safetensors_folder(content: bytes) -> object:
    path = write_file("weights/model.safetensors", content)
    return [
        tensor.sum() for _, tensor in checkpoint_weights.open_folder(path.parent).iter_tensors()
    ]


def _read_index(text: str) -> object:
    path = write_file("index/model.safetensors.index.json", text)
    write_file("index/one.safetensors", _safetensors_bytes())
    return checkpoint_weights.open_folder(path.parent).infos


def _read_image_array(kind: str) -> Callable[[bytes], object]:
    readers: Mapping[str, Callable[[Path], Any]] = {
        "npz": text_files.read_npz,
        "npy": text_files.open_npy,
    }
    return reads_file(f"array.{kind}", readers[kind])


def _array_bytes(kind: str) -> bytes:
    path = scratch_folder() / f"seed.{kind}"
    if kind == "npz":
        np.savez(path, images=np.zeros((2, 4, 4), np.uint8), labels=np.arange(2))
    else:
        np.save(path, np.arange(12, dtype=np.uint16))
    return path.read_bytes()


def _png_bytes() -> bytes:
    from PIL import Image

    path = scratch_folder() / "seed.png"
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(path)
    return path.read_bytes()


def _read_picture(content: bytes) -> object:
    path = write_file("pictures/a/a.png", content)
    return images.ImageFiles([path], ()).take(np.array([0]))


def _read_pairs(text: str) -> object:
    valid = "".join(f"a few words {n}\twords {n}\n" for n in range(50))
    return open_data(str(write_file("texts.tsv", valid + text)), {"vocab": 300})


RECORDS = [json.loads((SEEDS / f"{name}.heads.json").read_text()) for name in ("pruned", "latent")]


def _decoded(seed: str) -> st.SearchStrategy[str]:
    return damaged_bytes(seed.encode(), 6).map(lambda data: data.decode("utf-8", "replace"))


PARSERS: dict[str, Parser] = {
    "spec TOML": Parser(texts_of(SPECS, to_toml_text), hw.from_toml),
    "spec JSON": Parser(texts_of(SPECS), hw.from_json),
    "pattern": Parser(st.one_of([_decoded(text) for text in DOCUMENTS["patterns"]]), parse_pattern),
    "recipe TOML": Parser(texts_of(RECIPES, to_toml_text), recipe.from_toml),
    "model TOML": Parser(texts_of(MODELS, to_toml_text), model_spec.from_toml),
    "model JSON": Parser(texts_of(MODELS), model_spec.from_json),
    "headwise.toml": Parser(
        texts_of(_manifest_seeds(), to_toml_text), lambda text: ModelManifest.from_toml(text, "it")
    ),
    "config.json": Parser(hostile_trees(DOCUMENTS["configs"]), _read_config),
    "trace document": Parser(
        st.deferred(lambda: texts_of([_trace_parts()[0]])), read_trace_document
    ),
    "trace bytes": Parser(
        st.deferred(lambda: damaged_bytes(TRACE.read_bytes())), reads_file("b.trace", hw.load_trace)
    ),
    "heads.json": Parser(texts_of(RECORDS), reads_file("heads.json", SurgeryRecord.from_file)),
    "CoNLL-U": Parser(
        _decoded(DOCUMENTS["conllu"]), lambda text: list(read_conllu(text.split("\n")))
    ),
    "word alignments": Parser(_decoded("0-0 1-2 2?1"), lambda text: parse_alignment_links(text, 1)),
    "tokenizer.json": Parser(texts_of(DOCUMENTS["tokenizers"]), _read_tokenizer),
    "study TOML": Parser(
        texts_of(DOCUMENTS["studies"], to_toml_text), reads_file("study.toml", read_study)
    ),
    "safetensors": Parser(damaged_bytes(_safetensors_bytes()), _read_safetensors_folder),
    "safetensors index": Parser(
        texts_of(
            [{"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}]
        ),
        _read_index,
    ),
    "preprocessor_config.json": Parser(
        texts_of(DOCUMENTS["processors"]), reads_file("a.json", transformers_loading.read_json)
    ),
    "sentence pairs": Parser(st.text(), _read_pairs),
    "npz": Parser(
        st.deferred(lambda: damaged_bytes(_array_bytes("npz"))), _read_image_array("npz")
    ),
    "npy": Parser(
        st.deferred(lambda: damaged_bytes(_array_bytes("npy"))), _read_image_array("npy")
    ),
    "PNG": Parser(st.deferred(lambda: damaged_bytes(_png_bytes())), _read_picture),
}
