"""Answers of commands, layers, presets and the page, recorded before the package is made smaller.

`python -m goldens.collect` (with `tests` on the path) writes them; test_ledger.py compares. A
change of a golden is a decision with a line in the log. They are deleted when the package has its
new size.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models as tokenizer_models, pre_tokenizers

import headwise as hw
from headwise import cli
from headwise.attention.presets import PRESETS
from support import layer_cases
from support.transformers_models import transformers

HERE = Path(__file__).parent
TENSORS, ANSWERS = HERE / "layers.safetensors", HERE / "answers.json.gz"
TEXTS = [
    "the cat sat on the mat and the cat sat",
    "a dog and a cat ran to the old mat",
    "one, two, three, one, two, three.",
]
# Values that a clock, the machine or the place of a file decides.
VOLATILE = re.compile(
    r"second|time|speed|tokens_per|_per_s|elapsed|date|version|path|folder|file|processor|machine|threads|cpu|"
    r"takeover|kernels|duration|command|reproduce|memory_gib|flops_per|bandwidth|peak_f|prefill|decode_ms|rate$|wall|sha|hash|checksum"
)

# --- Layers ---------------------------------------------------------------------------------------


def layer_tensors(backend: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield output and gradients of every example of every part, by name; None lets dispatch choose
    the backend.
    """
    for name, spec in layer_cases.examples().items():
        torch.manual_seed(len(name))
        layer = layer_cases.layer(spec)
        layer.backend_name = backend
        x, source = layer_cases.tensors(spec)
        x.requires_grad_()
        output = layer(x, source=source)
        (
            output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        ).sum().backward()
        yield f"{name}.output", output.detach()
        leaves = {"x": x, **dict(layer.named_parameters())}
        yield from (
            (f"{name}.{leaf}", value.grad)
            for leaf, value in leaves.items()
            if value.grad is not None
        )


# --- Presets --------------------------------------------------------------------------------------


def preset_answers() -> dict[str, Any]:
    """Return text forms and names of weights of every preset."""
    answers = {}
    for name in PRESETS:
        spec = hw.design(preset=name, model=48, heads=6)
        shapes = {key: list(value.shape) for key, value in hw.Attention(spec).state_dict().items()}
        answers[name] = {"toml": hw.to_toml(spec), "state_dict": shapes, "repr": repr(spec)}
    return answers


# --- Commands -------------------------------------------------------------------------------------

COMMANDS = """
spec gqa
spec mla --set heads.q=16
spec gpt2.json
cost mha gqa mla moh dcmha --model 512 --heads 8 --context 1024
cost gqa --operations --generate 64
cost gpt2.json --context 32 --generate 8
cost llama-3-8b gpt-oss-20b
cost gqa mla --match kv
cost mha --complexity
cost gqa --terms
cost gpt2.json --activations --context 32
cost gpt2.json --optimiser zero
cost deepseek-v3 --batch 4 --context 4096 --dtype fp8
cost gpt2.json --layer 1.attention
walk mha --model 8 --heads 2
walk gqa --model 8 --heads 2 --ops
why gqa
why longformer
why moh
why mla --tokens one --when paged
sites gpt2
sites bert
sites t5
heads gpt2 --data texts.txt
heads llama --data texts.txt --redundancy --spectra --collapse
heads gpt2 --data texts.txt --importance michel
heads gpt2 --data texts.txt --importance leave-one-out
heads llama --data texts.txt --importance shapley --seed 1
heads gpt2 --data texts.txt --circuits --criteria clark
heads bert --data texts.txt --criteria voita
heads gpt2 --data texts.txt --random-baseline
heads gpt2 --text 'the cat sat on the mat'
heads gpt2 --text 'the cat sat' --show norms
heads gpt2 --text 'the cat sat' --show rollout
heads gpt2 --text 'the cat sat' --show logits
prune llama --data texts.txt --keep 0.5 --seconds 0.05 --out o1
prune gpt2 --data texts.txt --heads 0:1 1:0,2 --seconds 0.05 --out o2
prune gpt2 --data texts.txt --keep 0.5 --per model --by michel --fold mean --seconds 0.05 --out o3
prune gpt2 --data texts.txt --budget parameters=0.9 --seconds 0.05 --out o4
prune bert --data texts.txt --keep 0.5 --seconds 0.05 --out o5
prune gpt2 --data texts.txt --clusters --seconds 0.05 --out o6
prune t5 --data texts.txt --keep 0.5 --seconds 0.05 --out o7
convert gpt2 --data texts.txt --kv 2 --seconds 0.05 --out c1
convert gpt2 --data texts.txt --kv 2 --align --seconds 0.05 --out c2
convert llama --data texts.txt --to mha --seconds 0.05 --out c3
convert gpt2 --data texts.txt --to latent --seconds 0.05 --out c4
convert gpt2 --data texts.txt --to routed=1,2 --seconds 0.05 --out c5
convert gpt2 --data texts.txt --to collaborative=24 --seconds 0.05 --out c6
convert gpt2 --data texts.txt --kv 2 --grouping similar --seconds 0.05 --out c7
trace gpt2 --text 'the cat sat' --out a.trace
run llama 'the cat' --max-new-tokens 5
run llama 'the cat' --max-new-tokens 4 --beams 3
train copy --steps 6 --model gqa --seed 1 --out t1
learn --list
learn 003-2.2
learn 000-1.2.2b
"""
GPT2 = {
    "n_embd": 24,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 256,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
BERT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
T5 = {
    "d_model": 24,
    "d_kv": 6,
    "num_heads": 4,
    "num_layers": 2,
    "d_ff": 40,
    "vocab_size": 256,
    "decoder_start_token_id": 0,
}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}


def write_inputs(folder: Path) -> None:
    """Write the models and texts that the commands read."""
    (folder / "texts.txt").write_text("\n".join(TEXTS * 3) + "\n")
    (folder / "gpt2.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2})
    )
    for name, (model_class, config_class, options) in MODELS.items():
        torch.manual_seed(7)
        model = getattr(transformers, model_class)(
            getattr(transformers, config_class)(**options)
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4 if parameter.ndim > 1 else 1)
        model.save_pretrained(folder / name)
        byte_level_tokenizer().save(str(folder / name / "tokenizer.json"))


def byte_level_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte."""
    alphabet = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def command_answer(line: str) -> Any:
    """Return exit code and JSON document of a command, or its text where it prints no JSON."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([*shlex.split(line), "--json"])
        except SystemExit as end:
            code = end.code
    text = out.getvalue()
    try:
        document = json.loads(text)
    except ValueError:
        document = text
    return {
        "code": code,
        "document": document,
        "error": err.getvalue().splitlines()[-1:] if code else [],
    }


def command_answers() -> dict[str, Any]:
    """Return the answers of all commands in a new folder."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        write_inputs(Path(name))
        return {line: steady(command_answer(line)) for line in COMMANDS.strip().splitlines()}


def steady(value: Any, name: str = "") -> Any:
    """Return a JSON value without what a clock or the machine decides."""
    if VOLATILE.search(name.lower()):
        return "volatile"
    if isinstance(value, dict):
        return {str(key): steady(part, str(key)) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [steady(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    return value


# --- The page -------------------------------------------------------------------------------------


def page_answers() -> dict[str, Any]:
    """Return what every route of the page answers about a small model."""
    from hostile import hostile_requests

    view = hostile_requests.open_page()
    client = hostile_requests.page_client(view)
    parameters = {key: str(values[-1]) for key, values in hostile_requests.PARAMETERS.items()}
    answers = {}
    for method, path in hostile_requests.page_routes(view):
        url = re.sub(r"\{(\w+)[^}]*\}", lambda found: parameters.get(found[1], "0"), path)
        answer = client.request(method, url, params=parameters)
        kind = answer.headers.get("content-type", "")
        body = steady(answer.json()) if "json" in kind else len(answer.content)
        answers[f"{method} {path}"] = {"status": answer.status_code, "type": kind, "body": body}
    view.worker.close()
    return answers


# --- Writing and comparing ------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "presets": preset_answers,
    "commands": command_answers,
    "page": page_answers,
}


def differences(found: Any, expected: Any, place: str = "") -> Iterator[str]:
    """Yield where two JSON values differ, numbers by more than rounding."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key not in found or key not in expected:
                yield f"{place}.{key}: {'added' if key in found else 'missing'}"
            else:
                yield from differences(found[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            yield f"{place}: {len(found)} entries, expected {len(expected)}"
        for n, (a, b) in enumerate(zip(found, expected, strict=False)):
            yield from differences(a, b, f"{place}[{n}]")
    elif isinstance(expected, float) or isinstance(found, float):
        is_close = isinstance(found, (int, float)) and isinstance(expected, (int, float))
        if not (is_close and math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-5)):
            yield f"{place}: {found}, expected {expected}"
    elif found != expected:
        yield f"{place}: {found!r:.100}, expected {expected!r:.100}"


def read_answers() -> dict[str, Any]:
    """Return the stored answers."""
    return json.loads(gzip.decompress(ANSWERS.read_bytes()))


def read_tensors() -> dict[str, torch.Tensor]:
    """Return the stored tensors of layers."""
    return load_file(TENSORS)


def main() -> None:
    """Write the goldens, with the settings of conftest.py."""
    os.environ |= {
        "LC_ALL": "C.UTF-8",
        "HEADWISE_KERNELS": "wait",
        "HEADWISE_MACHINE_CLASS": "x86-avx512-bf16",
    }
    torch.set_num_threads(1)
    save_file({name: value.contiguous() for name, value in layer_tensors("dense")}, TENSORS)
    answers = {name: collect() for name, collect in SECTIONS.items()}
    ANSWERS.write_bytes(gzip.compress(json.dumps(answers, indent=0).encode(), mtime=0))
    failed = {
        line: answer for line, answer in answers["commands"].items() if answer["code"] not in (0, 1)
    }
    print(
        f"{len(failed)} commands failed",
        *(f"{line}: {answer['error']}" for line, answer in failed.items()),
        sep="\n",
    )


if __name__ == "__main__":
    sys.exit(main())
