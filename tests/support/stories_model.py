"""stories260K, a language model trained by others, as a folder of transformers.

Its weights and pieces are read from `shared/data/model_stories260k` with numpy.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from support.tiny_configs import model_config

SPECIALS = ("<unk>", "<s>", "</s>")
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}


def read_pieces(file: Path) -> list[tuple[str, float]]:
    """Pieces of the tokenizer and their scores, by id."""
    data = file.read_bytes()
    pieces = list[tuple[str, float]]()
    at = 4
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        pieces.append((data[at + 8 : at + 8 + size].decode(), score))
        at += 8 + size
    return pieces


def make_tokenizer(pieces: list[tuple[str, float]]) -> Tokenizer:
    """A tokenizer that splits texts as `reference_tokenize` does."""
    vocabulary = {text: number for number, (text, _) in enumerate(pieces)}
    words = set(list(vocabulary)[259:])  # after the special pieces and the bytes
    merges = list[tuple[str, str]]()
    for text, _ in sorted(pieces[259:], key=lambda piece: -piece[1]):
        pairs = [(text[:at], text[at:]) for at in range(1, len(text))]
        merges += [pair for pair in pairs if words.issuperset(pair)]
    ids = dict(zip(SPECIALS, range(3), strict=True)) | dict(list(vocabulary.items())[3:])
    bpe = BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Prepend(" ")
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def write_stories_folder(data: Path, folder: Path) -> Path:
    """Write the model of the folder `data` in the format of transformers, and return `folder`.

    The file rotates neighbouring channels 2c and 2c + 1, a Llama the channels c and c + half: rows
    of q and k change their order.
    """
    sizes: dict[str, Any] = json.loads((data / "golden.json").read_text())["config"]
    config = model_config(
        "llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=sizes["dim"],
        intermediate_size=sizes["hidden_dim"],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=sizes["n_kv_heads"],
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=sizes["seq_len"],
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=1,
    )
    stored = np.load(data / "weights.npz")
    tensors = {
        "model.embed_tokens.weight": stored["tok_embeddings"],
        "model.norm.weight": stored["norm"],
    }
    for name, ours in LAYER_NAMES.items():
        for layer, value in enumerate(stored[name]):
            if name in ("wq", "wk"):
                pairs = value.reshape(-1, sizes["dim"] // sizes["n_heads"] // 2, 2, sizes["dim"])
                value = pairs.swapaxes(1, 2).reshape(value.shape)
            tensors[f"model.layers.{layer}.{ours}.weight"] = np.ascontiguousarray(value)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    make_tokenizer(read_pieces(data / "tok512.bin")).save(str(folder / "tokenizer.json"))
    return folder
