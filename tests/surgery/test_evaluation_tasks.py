"""Tasks of lm-evaluation-harness before and after surgery. Every test needs the extra `eval`, which
`make judge` installs beside .venv.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import headwise as hw
from headwise.models.vocabulary import ByteVocabulary
from headwise.surgery.verification.evaluation_tasks import (
    EvaluationTasks,
    check_evaluation_tasks,
    compare_on_tasks,
)
from headwise.util.errors import SpecError
from support.byte_llama import build_byte_llama

pytestmark = pytest.mark.judge

DOCUMENTS = [
    {"question": "two plus two", "choices": ["four", "five", "nine"], "gold": 0},
    {"question": "grass is", "choices": ["blue", "green"], "gold": 1},
    {"question": "the sun rises in the", "choices": ["east", "west", "north"], "gold": 0},
    {"question": "water is", "choices": ["dry", "wet"], "gold": 1},
    {"question": "a cat says", "choices": ["meow", "bark"], "gold": 0},
    {"question": "ice is", "choices": ["hot", "cold", "warm"], "gold": 1},
]
HEADER = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
"""
BODIES = {
    "choice": """\
output_type: multiple_choice
doc_to_text: "{{question}}:"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
    "rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "answer": """\
output_type: generate_until
doc_to_text: "{{question}}:"
doc_to_target: "{{choices[gold]}}"
generation_kwargs:
  until: ["e", "\\n"]
  max_gen_toks: 9
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random Llama with a byte tokenizer, and a file of each kind of task."""
    pytest.importorskip("lm_eval", reason="needs the extra eval; make judge installs it")
    root = tmp_path_factory.mktemp("judge")
    model = build_byte_llama(257, bos_token_id=256, eos_token_id=256)
    model.save_pretrained(root / "model")
    tokens: Any = ByteVocabulary()
    tokens = tokens._tokenizer
    tokens.add_special_tokens(["<s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="<s>")
    fast.save_pretrained(root / "model")
    data = root / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for kind, body in BODIES.items():
        (root / f"{kind}.yaml").write_text(HEADER.format(name=f"tiny_{kind}", data=data) + body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", root / "cache")
        yield root


def log_likelihood(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Sum of the log-probabilities of an answer, one forward call for each of its tokens."""
    total = 0.0
    for at, token in enumerate(answer):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer[:at]]])).logits[0, -1]
        total += float(logits.double().log_softmax(-1)[token])
    return total


def evaluate(folder: Path, kind: str, limit: int | None = None) -> dict[str, Any]:
    net = hw.load(folder / "model")
    tasks = EvaluationTasks((str(folder / f"{kind}.yaml"),), limit)
    rows, notes = compare_on_tasks(net, net, tasks)
    assert notes[0].startswith("tasks were run by lm_eval ")
    return {row.name: row for row in rows}


def test_choices_are_scored_by_their_log_likelihood(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    hits = list[bool]()
    for document in DOCUMENTS:
        prompt = list(f"{document['question']}:".encode())
        scores = [
            log_likelihood(model, prompt, list(f" {choice}".encode()))
            for choice in document["choices"]
        ]
        hits.append(max(range(len(scores)), key=scores.__getitem__) == document["gold"])
    row = evaluate(folder, "choice")["tiny_choice acc"]
    task = EvaluationTasks((str(folder / "choice.yaml"),))
    assert compare_on_tasks(model, model, task)[0][0] == row
    assert row.after.value == sum(hits) / len(hits)
    assert row.better == "higher"
    assert row.change.value == 0
    few = evaluate(folder, "choice", limit=3)["tiny_choice acc"]
    assert few.after.value == sum(hits[:3]) / 3


def test_rolling_log_likelihoods_are_those_of_whole_texts(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    total = 0.0
    words = 0
    num_bytes = 0
    for document in DOCUMENTS:
        text = f"{document['question']} {document['choices']}"
        total += log_likelihood(model, [256], list(text.encode()))
        words += len(text.split())
        num_bytes += len(text.encode())
    rows = evaluate(folder, "rolling")
    word_perplexity = rows["tiny_rolling word_perplexity"]
    assert word_perplexity.better == "lower"
    assert math.log(word_perplexity.after.value) == pytest.approx(-total / words, rel=1e-5)
    bits = rows["tiny_rolling bits_per_byte"].after.value
    assert bits == pytest.approx(-total / num_bytes / math.log(2), rel=1e-5)


def test_generated_answers_end_before_a_stop_text(folder: Path) -> None:
    """Greedy answers equal those of transformers, and end before a stop text."""
    from headwise.surgery.verification.evaluation_tasks import make_harness_model

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    net = hw.load(folder / "model")

    class Request:
        args = ("two plus two:", {"until": ["\x00"], "max_gen_toks": 9})

    answer = make_harness_model(net).generate_until([Request])[0]
    prompt = torch.tensor([list(b"two plus two:")])
    ids = model.generate(prompt, max_new_tokens=9, do_sample=False)[0, prompt.shape[1] :]
    assert answer == bytes(ids.tolist()).decode(errors="replace")
    assert make_harness_model(model).generate_until([Request]) == [answer]
    stop = answer[4]
    Request.args = ("two plus two:", {"until": [stop], "max_gen_toks": 9})
    assert make_harness_model(net).generate_until([Request])[0] == answer.partition(stop)[0]
    rows = evaluate(folder, "answer")
    assert rows["tiny_answer exact_match"].after.value == 0


def test_prune_reports_tasks_and_perplexity(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{document['question']}\n" for document in DOCUMENTS))
    long = tmp_path / "long.txt"
    long.write_text("all heads read what they are told to read. " * 9)
    command = [sys.executable, "-m", "headwise", "prune", str(folder / "model"), "--keep", "0.5"]
    command += ["--data", str(texts), "--out", str(tmp_path / "out"), "--seconds", "0.1"]
    command += ["--eval", f"{folder / 'choice.yaml'}", "--eval-limit", "4"]
    command += ["--perplexity", str(long), "--context", "32"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    assert "not a git repository" not in run.stderr
    page = (tmp_path / "out" / "VERIFICATION.md").read_text()
    assert "tiny_choice acc" in page
    assert "perplexity of long.txt, context 32, stride 16" in page
    assert "lm_eval" in page


def test_tasks_that_do_not_exist_are_one_line(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: broken\ndataset_path: json\noutput_type: multiple_choice\n")
    net = hw.load(folder / "model")
    with pytest.raises(SpecError, match=r"there is no task file .*no\.yaml"):
        check_evaluation_tasks(EvaluationTasks((str(tmp_path / "no.yaml"),)))
    with pytest.raises(SpecError, match="nonsense_task is not a task of lm_eval"):
        compare_on_tasks(net, net, EvaluationTasks(("nonsense_task",)))
    with pytest.raises(SpecError, match=r"cannot load .*broken\.yaml: .*\. Check the task file"):
        compare_on_tasks(net, net, EvaluationTasks((str(broken),)))
