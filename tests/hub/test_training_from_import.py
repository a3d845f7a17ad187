"""Training that continues from imported models: weights, tokenizer and processor settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import headwise as hw
from headwise.cli import main
from headwise.models.model_spec import ProcessorSpec
from headwise.models.vocabulary import train_bpe
from headwise.training.data.language_modelling import TextTask
from headwise.util.files import read_lines

SMALL = [
    "--steps",
    "1",
    "--batch",
    "4",
    "--lr",
    "0.000001",
    "--precision",
    "fp32",
    "--compile",
    "off",
]
SMALL += [
    "--device",
    "cpu",
    "--set",
    "recipe.evaluate_batches=1",
    "--set",
    "task.length=8",
    "--set",
    "task.test=0.0",
]
LINE = "the quick brown fox jumps over the lazy dog\n"
WORDS = train_bpe([LINE * 9], vocab_size=280, special_tokens=("<s>",))
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "num_hidden_layers": 1,
}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 13}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(LINE * 60)
    return tmp_path / "a.txt"


def model(rows: int) -> hw.Transformer:
    net = hw.build(hw.families.read_model_spec(CONFIG | {"vocab_size": rows}), seed=0)
    net.usage = ProcessorSpec(prefix_ids=(0,), eos=(0,), tokenizer=WORDS.document)
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [0, 7])
def test_a_folder_of_transformers_is_gone_on_with(
    more: int, dtype: torch.dtype, text: Path, tmp_path: Path
):
    """From its weights, in its tokens, however many rows its table has besides;
    16 bits become 32.
    """
    net = model(WORDS.size + more).to(dtype)
    hw.export(net, tmp_path / "f")
    assert (
        main(
            [
                "train",
                str(text),
                "--model",
                str(tmp_path / "f"),
                "--out",
                str(tmp_path / "out"),
                *SMALL,
            ]
        )
        == 0
    )
    after = hw.load(tmp_path / "out")
    old, new = net.state_dict(), after.state_dict()
    assert all(new[name].dtype == torch.float32 for name, _ in after.named_parameters())
    assert all(
        (new[name] - old[name].float()).abs().max() < 1e-4 for name, _ in after.named_parameters()
    )
    assert not torch.equal(new["decoder.0.feed.up"], old["decoder.0.feed.up"].float())
    assert read_lines(tmp_path / "out" / "metrics.jsonl")[0]["task"]["tokens"] == str(
        tmp_path / "f" / "tokenizer.json"
    )
    assert (after.usage.prefix_ids, after.usage.eos) == ((0,), (0,))
    assert (
        Tokenizer.from_str(after.usage.tokenizer or "").get_vocab()
        == Tokenizer.from_str(WORDS.document).get_vocab()
    )


def test_given_tokens_replace_those_of_the_folder(text: Path, tmp_path: Path):
    net = model(256)
    net.usage = ProcessorSpec()
    hw.export(net, tmp_path / "f")
    result = [
        "--model",
        str(tmp_path / "f"),
        "--out",
        str(tmp_path / "out"),
        *SMALL,
        "--set",
        "task.tokens=bytes",
    ]
    assert main(["train", str(text), *result]) == 0
    assert hw.load(tmp_path / "out").usage.prefix_ids == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["--set", "task.tokens=bytes"], "has 290 rows, but the task's tokenizer has 256 tokens"),
        (
            ["--model", "{}/empty"],
            "contains neither headwise.toml nor config.json; give a folder with a model",
        ),
        (["--model", "{}/config"], "holds a config.json but neither model.safetensors nor"),
    ],
)
def test_unusable_folders_give_one_line(
    value: list[str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    hw.export(model(290), tmp_path / "f")
    (tmp_path / "empty").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text((tmp_path / "f" / "config.json").read_text())
    argv = [
        "train",
        str(text),
        "--model",
        str(tmp_path / "f"),
        "--out",
        str(tmp_path / "out"),
        *SMALL,
    ]
    assert main([*argv, *(word.format(tmp_path) for word in value)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_table_may_be_wider_than_its_own_tokenizer_alone(text: Path, tmp_path: Path):
    """A model that brought no tokenizer, or another, has as many rows as the task knows tokens."""
    (tmp_path / "t.json").write_text(WORDS.document)
    task = TextTask(str(text), tokens=str(tmp_path / "t.json"), length=8, test=0.0)
    recipe = hw.Recipe(
        steps=1, batch=4, precision="fp32", compile="off", attention="fused", evaluate_batches=1
    )
    net = model(WORDS.size + 7)
    net.usage = ProcessorSpec(
        tokenizer=train_bpe([LINE * 9], vocab_size=270, special_tokens=("<s>",)).document
    )
    with pytest.raises(hw.SpecError, match=r"the task's tokenizer has \d+ tokens; use"):
        hw.train(task, net, recipe, tmp_path / "out")


def test_descriptions_are_read_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A folder with weights is still one whose description says what it is and what it costs."""
    hw.export(model(290), tmp_path / "f")
    for verb in ("spec", "cost"):
        assert main([verb, str(tmp_path / "f"), "--json"]) == 0
        assert "decoder" in capsys.readouterr().out
