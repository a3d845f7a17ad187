"""Every function that runs a model takes every form of inputs, whatever the model calls its
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.models.vocabulary import ByteVocabulary
from headwise.observe.inspect.model_inputs import prepare_inputs
from headwise.observe.inspect.model_tokenizer import find_tokenizer, read_tokenizer
from support.refusals import refused_cases
from support.tiny_configs import model_config
from support.transformers_models import ZOO

x_transformers = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXTS = ("one word", "two more")  # eight bytes each
IDS = torch.tensor([list(text.encode()) for text in TEXTS])
WIDE, HEADS, DIM = 24, 3, 8
REMOVED = 1


class NanoGPT(nn.Module):
    """A decoder whose ids are called idx, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, WIDE), nn.Linear(WIDE, 300)
        self.c_attn, self.c_proj = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(idx)
        q, k, v = (
            y.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for y in self.c_attn(x).split(WIDE, dim=2)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.c_proj(z.transpose(1, 2).flatten(2)))


class SentenceEncoder(nn.Module):
    """An encoder that takes the tokenizer's output as one dictionary and owns a tokenizer, as in
    sentence-transformers.
    """

    def __init__(self) -> None:
        super().__init__()
        bert = ZOO["bert"]
        self.auto_model = bert._replace(keys={**bert.keys, "vocab_size": 300}).build("eager")
        self.tokenizer = fast_tokenizer()

    def forward(self, input: dict[str, Tensor], **kwargs: Any) -> Tensor:
        return self.auto_model(**input).last_hidden_state


def fast_tokenizer() -> Any:
    """A tokenizer of transformers with one token for each byte."""
    bytes_tokenizer = read_tokenizer("bytes")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_tokenizer, pad_token="\x00")


class Case(NamedTuple):
    """A model, how its own code calls it with ids, the input of its first output projection, and a
    tokenizer.
    """

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    projection: nn.Module
    own_inputs: dict[str, Any]
    tokenizer: Any = None


def transformers_case(folder: Path) -> Case:
    gpt2 = ZOO["gpt2"]
    gpt2._replace(keys={**gpt2.keys, "vocab_size": 300}).build("eager").save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteVocabulary().document)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return Case(
        model, lambda ids: model(ids).logits, model.transformer.h[0].attn.c_proj, {"input_ids": IDS}
    )


def plain_case(_: Path) -> Case:
    model = NanoGPT().eval()
    return Case(model, model, model.c_proj, {"idx": IDS}, fast_tokenizer())


def x_transformers_case(_: Path) -> Case:
    layers = x_transformers.Decoder(dim=WIDE, depth=1, heads=HEADS, attn_dim_head=DIM)
    model = x_transformers.TransformerWrapper(
        num_tokens=300, max_seq_len=32, attn_layers=layers
    ).eval()
    projection = next(module for name, module in model.named_modules() if name.endswith("to_out"))
    return Case(model, model, projection, {"x": IDS}, fast_tokenizer())


def headwise_case(_: Path) -> Case:
    config = model_config("gpt2", n_embd=WIDE, n_head=HEADS, n_layer=2, vocab_size=300)
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    return Case(net, net, net, {"x": IDS}, "bytes")


def sentence_case(_: Path) -> Case:
    model = SentenceEncoder().eval()
    projection = model.auto_model.encoder.layer[0].attention.output.dense
    return Case(model, lambda ids: model({"input_ids": ids}), projection, {"input_ids": IDS})


MODELS = {
    "transformers": transformers_case,
    "idx": plain_case,
    "x": x_transformers_case,
    "headwise": headwise_case,
    "sentences": sentence_case,
}
KINDS: dict[str, Callable[[Case], Any]] = {
    "tensor": lambda case: IDS,
    "tuple": lambda case: (IDS,),
    "own names": lambda case: case.own_inputs,
    "one dictionary": lambda case: (case.own_inputs,),
    "batch encoding": lambda case: fast_tokenizer()(list(TEXTS), return_tensors="pt"),
    "batch encoding of lists": lambda case: fast_tokenizer()(list(TEXTS)),
    "texts": lambda case: list(TEXTS),
    "tuple of texts": lambda case: TEXTS,
}
COVERING = pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("transformers", "tensor"),
        ("transformers", "batch encoding"),
        ("idx", "tuple"),
        ("idx", "own names"),
        ("x", "one dictionary"),
        ("headwise", "texts"),
        ("headwise", "batch encoding of lists"),
        ("sentences", "tuple of texts"),
    ],
    indirect=["case"],
)


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.manual_seed(0)
    folder_case = MODELS[request.param](tmp_path_factory.mktemp(request.param))
    hw.sites(folder_case.model, IDS)  # finds the attention of models without an interface
    return folder_case


def outputs_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result.logits


def projection_input(case: Case) -> Tensor:
    """Head outputs of the first layer, by a hook of torch or the layer's own method, [B, T, heads,
    width].
    """
    inputs: list[Tensor] = []
    if isinstance(case.model, hw.Transformer):
        attention = case.model.stacks["decoder"].blocks[0].attentions["attention"]
        handle = attention.register_forward_hook(
            lambda _, args, kwargs, y: inputs.append(args[0]), with_kwargs=True
        )
        case.call(IDS)
        handle.remove()
        return attention.head_outputs(inputs[0])
    handle = case.projection.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    case.call(IDS)
    handle.remove()
    heads = hw.sites(case.model)[0].heads
    return inputs[0].unflatten(-1, (heads, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_runs_on_every_kind_of_input(case: Case, kind: str):
    with torch.no_grad():
        expected = case.call(IDS)
    output = hw.run_model(case.model, KINDS[kind](case), tokenizer=case.tokenizer)
    torch.testing.assert_close(outputs_of(output), expected, rtol=1e-5, atol=1e-5)


@COVERING
def test_sites_trace_every_kind_of_example(case: Case, kind: str):
    named = hw.sites(case.model, KINDS[kind](case), tokenizer=case.tokenizer)
    assert named
    assert [(site.name, site.heads) for site in named] == [
        (site.name, site.heads) for site in hw.sites(case.model)
    ]
    assert named[0].observe.possible


@COVERING
def test_a_trace_records_every_kind_of_input(case: Case, kind: str):
    trace = hw.trace(
        case.model,
        KINDS[kind](case),
        tokenizer=case.tokenizer,
        capture=hw.Capture(extra=("v", "z")),
    )
    record = trace.layers[0]
    expected = projection_input(case).detach()
    torch.testing.assert_close(torch.from_numpy(record.arrays["z"]), expected, rtol=1e-5, atol=1e-5)
    assert [row.ids for row in trace.streams["text"]] == [tuple(row) for row in IDS.tolist()]


@COVERING
def test_means_are_taken_over_every_kind_of_input(case: Case, kind: str):
    expected = projection_input(case).detach().double().flatten(0, 1).mean(0)
    site = hw.sites(case.model)[0].name
    for batches in (KINDS[kind](case), [KINDS[kind](case)]):
        means = hw.head_means(case.model, batches, [(site, REMOVED)], tokenizer=case.tokenizer)
        torch.testing.assert_close(means[site, REMOVED], expected[REMOVED], rtol=1e-5, atol=1e-6)
    outputs = hw.head_outputs(
        case.model, KINDS[kind](case), [(site, REMOVED)], tokenizer=case.tokenizer
    )
    torch.testing.assert_close(
        outputs[site, REMOVED], projection_input(case)[..., REMOVED, :], rtol=1e-5, atol=1e-5
    )


@COVERING
def test_a_head_is_ablated_for_every_kind_of_input(case: Case, kind: str):
    site = hw.sites(case.model)[0]
    with hw.ablate(case.model, [(site.name, REMOVED)]):
        ablated = outputs_of(hw.run_model(case.model, KINDS[kind](case), tokenizer=case.tokenizer))
    width = projection_input(case).shape[-1]

    def silence(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        edited = args[0].clone()
        edited[..., REMOVED * width : (REMOVED + 1) * width] = 0
        return (edited,)

    if isinstance(case.model, hw.Transformer):
        pruned = hw.prune(case.model, hw.surgery.DropHeads(((site.name, REMOVED),))).after
        expected = pruned(IDS)
    else:
        handle = case.projection.register_forward_pre_hook(silence)
        expected = case.call(IDS)
        handle.remove()
    torch.testing.assert_close(ablated, expected.detach(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ablated, case.call(IDS), atol=1e-4)


@pytest.mark.parametrize("name", ["transformers", "headwise", "sentences"])
def test_padding_of_shorter_texts_does_not_count(name: str, tmp_path: Path):
    torch.manual_seed(0)
    case = MODELS[name](tmp_path)
    texts = ["one word", "two"]
    site = hw.sites(case.model)[0].name
    together = hw.head_means(case.model, [texts], [(site, 0)], tokenizer=case.tokenizer)
    encoded = fast_tokenizer()(texts, padding=True, return_tensors="pt")
    encoding = hw.head_means(case.model, encoded, [(site, 0)])
    apart = hw.head_means(case.model, texts[:1], [(site, 0)], tokenizer=case.tokenizer)[site, 0] * 8
    apart += (
        hw.head_means(case.model, texts[1:], [(site, 0)], tokenizer=case.tokenizer)[site, 0] * 3
    )
    torch.testing.assert_close(together[site, 0], apart / 11, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(encoding[site, 0], apart / 11, rtol=1e-5, atol=1e-6)


def test_the_tokenizer_is_found_beside_the_weights_or_given(tmp_path: Path):
    case = transformers_case(tmp_path / "own")
    found = find_tokenizer(case.model)
    assert found is not None
    assert found.encode("né").ids == list("né".encode())
    (tmp_path / "own" / "tokenizer.json").unlink()
    assert find_tokenizer(case.model) is None
    with pytest.raises(ValueError, match="comes with no tokenizer; give tokenizer="):
        hw.trace(case.model, "a text")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(ByteVocabulary().document)
    kinds = [
        "bytes",
        tmp_path / "other",
        str(tmp_path / "other" / "tokenizer.json"),
        fast_tokenizer(),
        found,
    ]
    for tokenizer in kinds:
        ids = prepare_inputs(case.model, "né", 0, tokenizer).kwargs["input_ids"]
        assert ids.tolist() == [list("né".encode())]
    assert find_tokenizer(case.model) is None  # a given tokenizer is not kept


def test_a_model_in_memory_does_not_read_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(ByteVocabulary().document)
    monkeypatch.chdir(tmp_path)
    assert find_tokenizer(ZOO["gpt2"].build()) is None


@pytest.mark.parametrize(("run", "message"), refused_cases(__file__, "inputs", globals()))
def test_wrong_inputs_give_one_line(run: Any, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        run(NanoGPT().eval())
    assert "\n" not in str(caught.value)


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused():
    bert = ZOO["bert"]
    model = bert._replace(keys={**bert.keys, "vocab_size": 100}).build("eager")
    with pytest.raises(hw.SpecError, match="has 256 ids, and BertModel has embeddings for 100"):
        hw.run_model(model, "a", tokenizer="bytes")
