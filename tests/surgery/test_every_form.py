"""Every family of transformers in every form: a folder that loads with equal weights, or a refusal with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.errors import SpecError
from headwise.surgery import HeadRanking
from headwise.surgery.conversion import ToCollaborative, ToLatent, ToMHA, ToMixtureOfHeads
from headwise.surgery.hf_export.model_folder import write_model_folder
from support.transformers_models import FALLBACK, LLAMA, WIDE, WORDS, ZOO, TransformersModel

FORMS = {
    "one key-value head": 1,
    "latent": ToLatent(),
    "collaborative": ToCollaborative(16),
    "one key-value head per query head": ToMHA(),
    "mixture of heads": ToMixtureOfHeads(1, 1, HeadRanking("random")),
}
PER_HEAD = "transforms the queries and keys of each head"
ROUTED = "needs queries of different lengths"
CONCATENATED = "have no form for concatenated heads"
PLAIN, RESIZED, OURS = "transformers", "resized", "ours"
# What each family becomes in each form: the kind of its folder, or the reason why it cannot take the form.
RESULTS = {
    "bert": (RESIZED, OURS, OURS, PLAIN, OURS),
    "roberta": (RESIZED, OURS, OURS, PLAIN, OURS),
    "gpt2": (OURS, OURS, OURS, PLAIN, OURS),  # queries, keys and values in one tensor with equal parts
    "neox": (OURS, OURS, PER_HEAD, PLAIN, OURS),
    "llama": (PLAIN, OURS, PER_HEAD, PLAIN, OURS),
    "qwen3": (PLAIN, CONCATENATED, PER_HEAD, PLAIN, ROUTED),
    "mistral": (PLAIN, OURS, PER_HEAD, PLAIN, OURS),
    "gemma2": (PLAIN, OURS, PER_HEAD, PLAIN, OURS),
    "gemma3": (PLAIN, CONCATENATED, PER_HEAD, PLAIN, ROUTED),
    "gpt-oss": (PLAIN, OURS, PER_HEAD, PLAIN, OURS),
    "t5": (RESIZED, OURS, OURS, PLAIN, OURS),
    "bart": (RESIZED, OURS, OURS, PLAIN, OURS),
    "marian": (RESIZED, OURS, OURS, PLAIN, OURS),
    "vit": (RESIZED, OURS, OURS, PLAIN, OURS),
    "deepseek": (
        "needs one key-value head per query head",
        "with project Latent",
        "with project Latent",
        PLAIN,
        "needs queries with heads.dim channels",
    ),
    "olmo2": ("cannot reorder heads", CONCATENATED, PER_HEAD, PLAIN, OURS),
    "phi3": (PLAIN, OURS, PER_HEAD, PLAIN, OURS),
    "gptj": (OURS, OURS, PER_HEAD, PLAIN, OURS),
    "bloom": (OURS, OURS, OURS, PLAIN, OURS),
    "mixtral": (PLAIN, OURS, PER_HEAD, PLAIN, OURS),
}
NEOX = {"hidden_size": WIDE, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    **ZOO,
    **FALLBACK,
    "mixtral": TransformersModel("MixtralForCausalLM", "MixtralConfig", LLAMA | EXPERTS, "o_proj"),
    "neox": TransformersModel("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX | {"vocab_size": WORDS}, "dense"),
}
NOT_LOADED = {"whisper", "falcon", "deberta-v2", "longformer"}  # headwise.load refuses their weights


def test_the_table_has_every_family():
    assert set(RESULTS) | NOT_LOADED == set(FAMILIES)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", RESULTS)
def test_a_converted_model_is_a_folder_or_a_refusal(family: str, form: str, tmp_path: Path, here: None):
    expected = RESULTS[family][list(FORMS).index(form)]
    torch.manual_seed(0)
    FAMILIES[family].build("eager").save_pretrained(tmp_path / "source")
    net = hw.load(tmp_path / "source")
    if expected not in (PLAIN, RESIZED, OURS):
        with pytest.raises(SpecError, match=expected):
            hw.convert(net, FORMS[form])
        return
    done = hw.convert(net, FORMS[form])
    written = write_model_folder(done.after, tmp_path / "source", tmp_path / "new", {"operation": "convert"})
    assert written.kind == expected, written.summary
    loaded = hw.load(tmp_path / "new").state_dict()
    for name, tensor in done.after.state_dict().items():
        torch.testing.assert_close(loaded[name], tensor, msg=name)


@pytest.mark.parametrize("family", sorted(NOT_LOADED))
def test_families_that_are_not_loaded_say_so(family: str, tmp_path: Path):
    FAMILIES[family].build("eager").save_pretrained(tmp_path / "source")
    with pytest.raises(SpecError, match="cannot load weights of"):
        hw.load(tmp_path / "source")
