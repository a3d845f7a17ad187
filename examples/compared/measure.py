"""Processor time of both sides of the compared tasks on this machine, and their lines of code.

pip install transformer_lens hf-mem
python examples/compared/measure.py > docs/compared-tasks.json
"""

import ast
import inspect
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.models.vocabulary import ByteVocabulary

sys.path.insert(0, str(Path(__file__).parent))
import attention_and_ablation
import kv_cache_bytes

PEERS = {
    "with_transformer_lens": "transformer_lens",
    "with_hf_mem": "hf-mem",
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
CONFIG = {  # Llama-3.1-8B
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}


def save_checkpoint(folder: Path) -> Path:
    """Save a random Llama with 4 layers of 8 query heads on 4 key-value heads, and a tokenizer of
    bytes, without which TransformerLens opens no model.
    """
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, num_attention_heads=8, num_key_value_heads=4, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteVocabulary().document)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def make_ids() -> torch.Tensor:
    """Four rows of 128 token ids."""
    return torch.randint(0, 256, (4, 128), generator=torch.Generator().manual_seed(0))


def count_lines(function: Callable[..., Any]) -> int:
    """Number of lines of a function without its signature, docstring and blank lines."""
    [definition] = ast.parse(inspect.getsource(function)).body
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body[1:] if ast.get_docstring(definition) else definition.body
    text = inspect.getsource(function).splitlines()
    return sum(bool(text[line - 1].strip()) for one in body for line in _span(one))


def _span(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def call(function: Callable[..., Any]) -> float:
    """Processor seconds of one call on a new checkpoint, with the arguments that the function
    names.
    """
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "checkpoint": save_checkpoint(Path(folder) / "model"),
            "ids": make_ids(),
            "config": CONFIG,
            "context": 32_768,
        }
        names = inspect.signature(function).parameters
        start = processor_time()
        function(*(values[name] for name in names))
        return processor_time() - start


def processor_time() -> float:
    """Processor seconds of this process and of the processes that it started."""
    return sum(os.times()[:4])


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for module in (attention_and_ablation, kv_cache_bytes):
        row: dict[str, Any] = {"task": module.__name__, "sides": {}}
        for name, function in vars(module).items():
            if name.startswith("with_"):
                call(function)  # imports, and code that is compiled once
                seconds = call(function)
                side = {"lines": count_lines(function), "seconds": round(seconds, 3)}
                if name in PEERS:
                    side["version"] = find_version(PEERS[name])
                row["sides"][name.removeprefix("with_")] = side
        rows.append(row)
    [processor] = {
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    } or {platform.processor()}
    machine = {"processor": processor, "threads": 1, "torch": torch.__version__}
    machine |= {"transformers": version("transformers"), "headwise": version("headwise")}
    print(json.dumps({"machine": machine, "tasks": rows}, indent=1))
