"""Processor time and memory of both sides of the compared tasks on this machine, and their lines of
code. FOLDER is a language model of transformers for the tasks that need a trained one.

pip install transformer_lens hf-mem torch-pruning
python examples/compared/measure.py FOLDER > docs/compared-tasks.json
"""

import ast
import inspect
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
import attention_and_ablation
import attribution_patching
import half_of_the_heads
import induction_heads
import kv_cache_bytes

TASKS = {
    module.__name__: module
    for module in (
        attention_and_ablation,
        half_of_the_heads,
        kv_cache_bytes,
        induction_heads,
        attribution_patching,
    )
}
ON_FOLDER = ("induction_heads", "attribution_patching")  # tasks on the model that is named
TEXTS = (
    "When Mary and John went to the store, John gave a drink to",
    "When Mary and John went to the store, Mary gave a drink to",
)
NAMES = (" Mary", " John")

PEERS = {
    "with_transformer_lens": "transformer_lens",
    "with_hf_mem": "hf-mem",
    "with_torch_pruning": "torch-pruning",
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


def save_checkpoint(folder: Path, kv_heads: int = 4) -> Path:
    """Save a random Llama with 4 layers of 8 query heads on some key-value heads, and a tokenizer
    of bytes, without which TransformerLens opens no model.
    """
    from headwise.models.vocabulary import ByteVocabulary

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, num_attention_heads=8, num_key_value_heads=kv_heads, **SIZES
    )
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


def make_pair(checkpoint: Path) -> dict[str, Any]:
    """Ids of the two texts, and of the names whose logits are compared."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = [torch.tensor(tokenizer(text)["input_ids"])[None] for text in TEXTS]
    tokens = [tokenizer(name, add_special_tokens=False)["input_ids"][0] for name in NAMES]
    return {"pair": tuple(texts), "tokens": tokens}


def make_repeated(checkpoint: Path) -> torch.Tensor:
    """64 random ids, and the same again."""
    size = AutoConfig.from_pretrained(checkpoint).vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size // 50, size, (1, 64), generator=generator).repeat(1, 2)


def call(function: Callable[..., Any], checkpoint: Path) -> float:
    """Processor seconds of one call with the arguments that the function names."""
    values = {"checkpoint": checkpoint, "ids": make_ids(), "config": CONFIG, "context": 32_768}
    names = inspect.signature(function).parameters
    if "repeated" in names:
        values["repeated"] = make_repeated(checkpoint)
    if "pair" in names:
        values |= make_pair(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        if "plain" in names:
            values["plain"] = save_checkpoint(Path(folder) / "plain", kv_heads=8)
            values["smaller"] = Path(folder) / "smaller"
        start = processor_time()
        function(*(values[name] for name in names))
        return processor_time() - start


def measure_side(task: str, side: str, folder: str) -> dict[str, Any]:
    """Processor seconds of the second call, and the largest memory of this process."""
    torch.set_num_threads(1)
    function = getattr(TASKS[task], side)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(folder) if folder else save_checkpoint(Path(temporary) / "model")
        call(function, checkpoint)  # imports, and code that is compiled once
        seconds = call(function, checkpoint)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # KiB on Linux
    return {"lines": count_lines(function), "seconds": round(seconds, 3), "peak": round(peak, 2)}


def processor_time() -> float:
    """Processor seconds of this process and of the processes that it started."""
    return sum(os.times()[:4])


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    if sys.argv[1] == "--side":
        print(json.dumps(measure_side(*sys.argv[2:])))
        sys.exit()
    rows = []
    for task, module in TASKS.items():
        model = Path(sys.argv[1]) if task in ON_FOLDER else None
        row: dict[str, Any] = {"task": task, "model": model.name if model else "", "sides": {}}
        for name in vars(module):
            if name.startswith("with_"):
                command = [sys.executable, __file__, "--side", task, name, str(model or "")]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                side = json.loads(output.splitlines()[-1])
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
