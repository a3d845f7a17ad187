"""Every family of transformers in every form: a folder that loads with equal weights, or a refusal
with its reason.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.surgery import AttentionConversion, HeadRanking, Pool
from headwise.surgery.conversion import (
    ToCollaborative,
    ToComposed,
    ToLatent,
    ToMHA,
    ToMixtureOfHeads,
)
from headwise.surgery.hf_export.model_folder import write_model_folder
from headwise.util.errors import SpecError
from support.transformers_models import FALLBACK, LLAMA, WIDE, WORDS, ZOO, TransformersModel

FORMS = {
    "one key-value head": 1,
    "latent": ToLatent(),
    "collaborative": ToCollaborative(16),
    "one key-value head per query head": ToMHA(),
    "mixture of heads": ToMixtureOfHeads(1, 1, HeadRanking("random")),
    "composed": ToComposed(2),
}
PER_HEAD = "transforms the queries and keys of each head"
ROUTED = "needs queries of different lengths"
CONCATENATED = "have no form for concatenated heads"
PLAIN, RESIZED, OURS = "transformers", "resized", "ours"
# What each family becomes in each form: the kind of its folder, or the reason why it cannot take
# the form.
RESULTS = {
    "bert": (RESIZED, OURS, OURS, PLAIN, OURS),
    "roberta": (RESIZED, OURS, OURS, PLAIN, OURS),
    "gpt2": (
        *(OURS, OURS, OURS, PLAIN, OURS),
    ),  # queries, keys and values in one tensor with equal parts
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
        "with project MLAProjection",
        "with project MLAProjection",
        PLAIN,
        "needs queries with heads.dim channels",
    ),
    "olmo2": (PLAIN, CONCATENATED, PER_HEAD, PLAIN, OURS),
    "phi3": (PLAIN, OURS, PER_HEAD, PLAIN, OURS),
    "gptj": (RESIZED, OURS, PER_HEAD, PLAIN, OURS),
    "bloom": (OURS, OURS, OURS, PLAIN, OURS),
    "mixtral": (PLAIN, OURS, PER_HEAD, PLAIN, OURS),
}
SLICE = "only a slice of the queries and keys"
NOT_COMPOSED = {"deepseek": "with project MLAProjection"}  # and those with norms of queries
NOT_COMPOSED |= dict.fromkeys(("qwen3", "gemma3", "olmo2"), SLICE)
RESULTS = {family: (*row, NOT_COMPOSED.get(family, OURS)) for family, row in RESULTS.items()}
NEOX = {
    "hidden_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    **ZOO,
    **FALLBACK,
    "mixtral": TransformersModel("MixtralForCausalLM", "MixtralConfig", LLAMA | EXPERTS, "o_proj"),
    "neox": TransformersModel(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX | {"vocab_size": WORDS}, "dense"
    ),
}
NOT_LOADED = {
    "whisper",
    "falcon",
    "deberta-v2",
    "longformer",
}  # headwise.load refuses their weights


def test_the_table_has_every_family():
    assert set(RESULTS) | NOT_LOADED == set(FAMILIES)


@pytest.fixture(scope="module", params=RESULTS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def source(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    FAMILIES[family].build("eager").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def net(source: Path) -> torch.nn.Module:
    """The model of that folder; conversions copy it."""
    return hw.load(source)


# All refusals, and every family in half of the forms that it can take.
CASES = [
    (family, form)
    for (n, family), (k, form) in itertools.product(enumerate(RESULTS), enumerate(FORMS))
    if (n + k) % 2 == 0 or RESULTS[family][k] not in (PLAIN, RESIZED, OURS)
]


@pytest.mark.parametrize(("family", "form"), CASES, indirect=["family"])
def test_a_converted_model_is_a_folder_or_a_refusal(family, form, source, net, tmp_path):
    expected = RESULTS[family][list(FORMS).index(form)]
    if expected not in (PLAIN, RESIZED, OURS):
        with pytest.raises(SpecError, match=expected):
            hw.convert(net, FORMS[form])
        return
    done = hw.convert(net, FORMS[form])
    written = write_model_folder(done.after, source, tmp_path / "new", {"operation": "convert"})
    assert written.kind == expected, written.summary
    assert (
        "Error" not in written.summary
    )  # another computation is refused before a loader script fails on it
    loaded = hw.load(tmp_path / "new").state_dict()
    for name, tensor in done.after.state_dict().items():
        torch.testing.assert_close(loaded[name], tensor, msg=name)


# Ways of pooling that read examples: "" for a folder, or the reason of the refusal; transformers
# loads none of them.
OTHER_FORMS: dict[str, AttentionConversion] = {
    "two key-value heads": Pool(2),
    "two aligned ones": Pool(2, align="both"),
    "two of similar ones": Pool(2, grouping="similar"),
}
OTHER_REFUSALS = {
    "deepseek": "MLAProjection needs one key-value head per query head, not kv=2; use kv=4",
}
# Every family in one of these forms, in turn; four kinds of models (encoder, rotary, two stacks,
# images) in all.
FORM_OF_FAMILY = [
    (family, [*OTHER_FORMS][n % len(OTHER_FORMS)]) for n, family in enumerate(RESULTS)
]
KINDS = [(family, form) for family in ("bert", "llama", "t5", "vit") for form in OTHER_FORMS]


def random_examples(net: Any) -> list[Example]:
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(3, WORDS, (1, count), generator=draw)

    if net.spec.stacks[0].embedding.patches:
        return [Example({"x": torch.randn(1, 3, 16, 16, generator=draw)}, {}) for _ in range(3)]
    sources = [{"source": ids(9)} if len(net.spec.stacks) > 1 else {} for _ in range(3)]
    return [Example({"x": ids(7), **source}, {}) for source in sources]


@pytest.mark.parametrize(
    ("family", "form"), dict.fromkeys(FORM_OF_FAMILY + KINDS), indirect=["family"]
)
def test_every_other_form_is_a_folder_or_a_refusal(
    family: str, form: str, source: Path, net: Any, tmp_path: Path
):
    if refusal := OTHER_REFUSALS.get(family):
        with pytest.raises(SpecError, match=refusal):
            hw.convert(net, OTHER_FORMS[form], random_examples(net))
        return
    done = hw.convert(net, OTHER_FORMS[form], random_examples(net))
    write_model_folder(done.after, source, tmp_path / "new", {"operation": "convert"})
    loaded = hw.load(tmp_path / "new")
    heads = [[spec.heads for _, spec in one.spec.attention_specs()] for one in (loaded, done.after)]
    assert heads[0] == heads[1]
    for name, tensor in done.after.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, msg=name)


@pytest.mark.parametrize("family", ["bert", "bart", "vit"], indirect=True)
def test_the_loader_repeats_shared_keys_where_transformers_cannot(
    family: str, source: Path, net: Any, tmp_path: Path
):
    """Two key-value heads for four heads, in families whose attention has no groups."""
    done = hw.convert(net, 2)
    written = write_model_folder(done.after, source, tmp_path / "new", {"operation": "convert"})
    assert written.kind == RESIZED, written.summary
    record = json.loads((tmp_path / "new" / "heads.json").read_text())
    repeats = [change["repeat"] for change in record["modules"].values() if "repeat" in change]
    assert repeats == [{"count": 2, "width": 8}] * 2 * len([*done.after.spec.attention_specs()])
    sizes = [
        sum(tensor.numel() for tensor in net.parameters())
        for net in (done.after, hw.load(tmp_path / "new"))
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", sorted(NOT_LOADED))
def test_families_that_are_not_loaded_say_so(name: str, tmp_path: Path):
    FAMILIES[name].build("eager").save_pretrained(tmp_path / "source")
    with pytest.raises(SpecError, match=f"model_type {name!r} is not known; "):
        hw.load(tmp_path / "source")
