"""The page docs/findings/rxnmapper.md: a product that consists of one attention head.

    pip download --no-deps rxnmapper && unzip rxnmapper-*.whl
    python studies/pages/rxnmapper_page.py rxnmapper

The package maps the atoms of a product to those of its precursors by head 5 of layer 10 (both from
0, core.py) of an ALBERT model. PACKAGE is its folder. Its pickle is converted once, with
`weights_only=True`, beside the stored results in --runs.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from finding_page import (
    ROOT,
    ResultStore,
    describe_run,
    fill,
    mean_estimate,
    picture,
    write_page,
)
from reactions import (
    Reaction,
    count_equal,
    map_atoms,
    product_to_precursor,
    read_reactions,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers import AlbertForMaskedLM

import headwise as hw
from headwise.report.data import Column, Estimate, Figure, HeatMap, Table

COMMAND = "python studies/pages/rxnmapper_page.py rxnmapper"
CHECKPOINT = "models/transformers/albert_heads_8_uspto_all_1310k"
LAYER, HEAD = 10, 5  # of the product
MASKED = 0.15  # of the tokens, as in training
MODES = ("zero", "mean")


def convert_checkpoint(package: Path, folder: Path) -> Path:
    """Write the weights of the package as safetensors; returns the folder."""
    source = package / CHECKPOINT
    if not (source / "pytorch_model.bin").is_file():
        raise SystemExit(f"{source} holds no pytorch_model.bin; give the folder of rxnmapper")
    if not (folder / "model.safetensors").is_file():
        state = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "vocab.txt"):
            shutil.copy(source / name, folder / name)
        tensors = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def encode(reactions: Sequence[Reaction], vocabulary: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the arguments of the model for a batch: ids between [CLS] and [SEP], and the mask."""
    rows = [["[CLS]", *reaction.tokens, "[SEP]"] for reaction in reactions]
    length = max(map(len, rows))
    padded = [[*row, *["[PAD]"] * (length - len(row))] for row in rows]
    ids = [[vocabulary.get(token, vocabulary["[UNK]"]) for token in row] for row in padded]
    mask = [[int(token != "[PAD]") for token in row] for row in padded]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the number of each token."""
    words = (folder / "vocab.txt").read_text().splitlines()
    return {word: number for number, word in enumerate(words)}


# --- Measurements ---------------------------------------------------------------------------------


def read_mappings(trace: Any, layer: int, head: int, reactions: Sequence[Reaction]) -> list[Any]:
    """Return the scores between the atoms, and the mapping, of one head for each reaction."""
    results: list[Any] = []
    for row, reaction in enumerate(reactions):
        length = len(reaction.tokens) + 2
        weights = trace.head_weights(layer, head, row=row)[:length, :length]
        scores = product_to_precursor(weights, reaction)
        results.append((scores, map_atoms(scores, reaction)[0]))
    return results


def count_atoms(
    results: Sequence[Any], reference: Sequence[Any], reactions: Sequence[Reaction]
) -> dict[str, list[float]]:
    """Return counts of product atoms for each reaction.

    - correct: mapped as is known;
    - agreement: mapped as by `reference`, the mappings of the product;
    - largest: the atom with the largest weight, of any element, is the right one;
    - element: it has the same element.
    """
    counts: dict[str, list[float]] = {}
    for (scores, mapping), (_, own), reaction in zip(results, reference, reactions, strict=True):
        largest = scores.argmax(1)
        product = reaction.elements[reaction.num_precursors :]
        numbers = {
            "correct": count_equal(mapping, reaction.gold, reaction),
            "agreement": count_equal(mapping, own, reaction),
            "largest": count_equal(largest, reaction.gold, reaction),
            "element": int((reaction.elements[largest] == product).sum()),
        }
        for name, number in numbers.items():
            counts.setdefault(name, []).append(number)
    return counts


def measure_heads(model: Any, inputs: Any, reactions: Sequence[Reaction]) -> dict[str, Any]:
    """Return the counts for the mapping that is read from each head, and from equal weights."""
    trace = hw.trace(model, inputs)
    reference = read_mappings(trace, LAYER, HEAD, reactions)
    counts: dict[str, Any] = {}
    for site in trace.layers:
        for head in range(site.heads):
            results = read_mappings(trace, site.layer, head, reactions)
            counts[f"L{site.layer}H{head}"] = count_atoms(results, reference, reactions)
    equal: list[Any] = []
    for scores, _ in reference:
        equal.append(np.ones_like(scores))
    mapped = [map_atoms(one, reaction)[0] for one, reaction in zip(equal, reactions, strict=True)]
    chance = count_atoms(list(zip(equal, mapped, strict=True)), reference, reactions)
    for name, reaction in (("element", "elements"), ("largest", "symmetry")):
        chance[name] = [chance_of(one, reaction) for one in reactions]
    counts["equal weights"] = chance
    return counts


def chance_of(reaction: Reaction, kind: str) -> float:
    """Return the expected number of product atoms for which a precursor atom drawn at random has
    the right element, or is interchangeable with the right one.
    """
    count = reaction.num_precursors
    targets = reaction.symmetry
    wanted = reaction.symmetry[list(reaction.gold)]
    if kind == "elements":
        targets = reaction.elements[:count]
        wanted = reaction.elements[count:]
    return float((wanted[:, None] == targets[None]).mean(1).sum())


def measure_ablated(model: Any, inputs: Any, reactions: Sequence[Reaction]) -> dict[str, Any]:
    """Return the counts of the product without each head of the layers before its own.

    The output of a head is replaced by zero, or by its mean over the tokens of all reactions.
    Later layers, and the heads beside the product's, cannot change its attention.
    """
    capture = hw.Capture(sites=(LAYER,))
    full = hw.trace(model, inputs, capture=capture)
    reference = read_mappings(full, LAYER, HEAD, reactions)
    means = hw.head_means(model, inputs)
    counts: dict[str, Any] = {"full": count_atoms(reference, reference, reactions)}
    for (site, head), mean in means.items():
        layer = layer_of(site)
        if layer >= LAYER:
            continue
        edits = {
            "zero": hw.ablate(model, [(site, head)]),
            "mean": hw.patch(model, {(site, head): mean}),
        }
        for mode, edit in edits.items():
            with edit:
                trace = hw.trace(model, inputs, capture=capture)
            results = read_mappings(trace, LAYER, HEAD, reactions)
            counts[f"L{layer}H{head} {mode}"] = count_atoms(results, reference, reactions)
    return counts


def measure_shared(model: Any, inputs: Any, reactions: Sequence[Reaction]) -> dict[str, Any]:
    """Return the counts of the product without the output of one head in all layers before its own.

    ALBERT uses the weights of one layer at every depth, so zero ablation removes the head's columns
    of the output projection. Its queries and keys stay.
    """
    capture = hw.Capture(sites=(LAYER,))
    reference = read_mappings(hw.trace(model, inputs, capture=capture), LAYER, HEAD, reactions)
    means = hw.head_means(model, inputs)
    counts: dict[str, Any] = {}
    for head in range(hw.sites(model)[0].heads):
        depths = {ref: mean for ref, mean in means.items() if ref[1] == head}
        depths = {ref: mean for ref, mean in depths.items() if layer_of(ref[0]) < LAYER}
        edits = {"zero": hw.ablate(model, depths.keys()), "mean": hw.patch(model, depths)}
        for mode, edit in edits.items():
            with edit:
                trace = hw.trace(model, inputs, capture=capture)
            results = read_mappings(trace, LAYER, HEAD, reactions)
            counts[f"H{head} {mode}"] = count_atoms(results, reference, reactions)
    return counts


def layer_of(site: object) -> int:
    """Return the number of a layer in the name of its site.

    >>> layer_of("encoder.3.attention")
    3
    """
    return int(str(site).split(".")[1])


def mask_tokens(inputs: Mapping[str, Tensor], mask_id: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs with masked tokens, and the labels (-100 where nothing is masked)."""
    generator = torch.Generator().manual_seed(0)
    ids = inputs["input_ids"]
    is_inner = inputs["attention_mask"].bool()
    is_inner[:, 0] = False  # [CLS], and [SEP] at the end of each row
    is_inner[torch.arange(len(ids)), inputs["attention_mask"].sum(1) - 1] = False
    chosen = (torch.rand(ids.shape, generator=generator) < MASKED) & is_inner
    masked = ids.masked_fill(chosen, mask_id)
    return {**inputs, "input_ids": masked}, ids.masked_fill(~chosen, -100)


def measure_losses(model: Any, inputs: Any, mask_id: int) -> dict[str, list[float]]:
    """Return the summed masked-token loss of each reaction without each head, and the numbers of
    masked tokens.
    """
    masked, labels = mask_tokens(inputs, mask_id)

    @torch.inference_mode()
    def losses() -> list[float]:
        logits = model(**masked).logits.transpose(1, 2)
        return F.cross_entropy(logits, labels, reduction="none").sum(1).tolist()

    results = {"full": losses(), "counts": (labels >= 0).sum(1).tolist()}
    for site in hw.sites(model):
        for head in range(site.heads):
            with hw.ablate(model, [(site.name, head)]):
                results[f"L{site.layer}H{head}"] = losses()
    return results


def measure(model: Any, vocabulary: Mapping[str, int], store: ResultStore) -> dict[str, Any]:
    """Measure all parts of the page; returns everything that was stored."""
    reactions = read_reactions()
    inputs = encode(reactions, vocabulary)
    atoms = [len(reaction.gold) for reaction in reactions]
    store.measure("atoms", lambda: atoms)
    store.measure("heads", lambda: measure_heads(model, inputs, reactions))
    store.measure("ablated", lambda: measure_ablated(model, inputs, reactions))
    store.measure("shared", lambda: measure_shared(model, inputs, reactions))
    store.measure("losses", lambda: measure_losses(model, inputs, vocabulary["[MASK]"]))
    return store.results


# --- The page -------------------------------------------------------------------------------------

NAME = f"L{LAYER}H{HEAD}"
ABOUT = """This page shows which attention head is a product. RXNMapper (Schwaller et al. 2021, [Science
Advances 7, eabe4166](https://www.science.org/doi/10.1126/sciadv.abe4166)) maps the atoms of a reaction's
product to the atoms of its precursors. It does so by the attention of one head of an ALBERT model
that was trained on masked tokens of reactions alone: head {head} of layer {layer}, both counted from 0
(`core.py` of the package rxnmapper, MIT). The mapping is read from all {heads} heads here, and from the
product with other heads [ablated](../heads.md#importance)."""
MEASURES = """**Correct** is the share of product atoms that are mapped to the right precursor atom by the
method of the package: atoms are assigned greedily within their element, and neighbours of assigned
atoms get {factor:.0f} times the weight. **Agreement** compares this mapping with that of the product.
**Largest weight** is the share of product atoms whose largest weight, over atoms of all elements and
without any of these aids, is on the right atom, and **element** the share for which it is on an
atom of the same element. Interchangeable atoms, such as those of a phenyl ring, count as equal."""
LIMITS = """The {count} reactions ({atoms:,} product atoms) are written by a script from building blocks, eight of
each of ten kinds, because their mapping is then known ([reactions.tsv](../../studies/pages/reactions.tsv)). They
are simpler than those of patents. The intervals are over reactions. Heads were ablated one at a
time; pairs of heads may replace each other. The greedy method finds many atoms from few good ones, so
even equal weights map {chance:.0f} % of the atoms correctly."""


def share(counts: Sequence[float], atoms: Sequence[int]) -> Estimate:
    """Return a share of all atoms with its interval over reactions."""
    estimate = mean_estimate(counts, atoms)
    return estimate._replace(low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))


def percent(estimate: Estimate) -> str:
    """Return a share in percent, with its interval if it has one."""
    value, low, high = (100 * number for number in estimate[:3])
    return f"{value:.1f} [{low:.1f}, {high:.1f}]" if low < high else f"{value:.1f}"


def points(difference: Estimate) -> str:
    """Return a difference of shares in points, with its interval."""
    value, low, high = difference[:3]
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]" if low < high else f"{value:+.1f}"


def head_table(heads: Mapping[str, Any], atoms: Sequence[int]) -> Table:
    """Return the heads from which most atoms are mapped correctly, the median, and chance."""
    names = [name for name in heads if name != "equal weights"]
    names.sort(key=lambda name: -sum(heads[name]["largest"]))
    kinds = ("correct", "agreement", "largest", "element")
    rows: list[list[Any]] = []
    for name in (*names[:8], "equal weights"):
        is_chance = name == "equal weights"
        values = {kind: share(heads[name][kind], atoms) for kind in kinds}
        difference = np.subtract(heads[NAME]["largest"], heads[name]["largest"])
        paired = None if name == NAME else mean_estimate(100 * difference, atoms)
        label = f"{name}, the product" if name == NAME else name
        rows.append([label, *(percent(one) for one in values.values()), paired])
        if is_chance:
            rows[-1][0] = "equal weights (largest weight: drawn at random)"
    middle = names[len(names) // 2]
    rows.insert(
        -1,
        [
            f"median of all, {middle}",
            *(percent(share(heads[middle][one], atoms)) for one in kinds),
            None,
        ],
    )
    columns = (
        *("read from", "correct, %", "agreement, %", "largest weight, %", "element, %"),
        Column(f"largest weight: {NAME} - this head, points", points),
    )
    return Table("", columns, rows)


def ablation_table(
    counts: Mapping[str, Any], full: Mapping[str, Any], atoms: Sequence[int]
) -> Table:
    """Return the ablations that move most of the product's largest weights, and none."""
    kinds = ("agreement", "largest", "element")
    # a set has another order in every run, and so other heads among equal ones
    names = dict.fromkeys(name.split()[0] for name in counts if name != "full")
    ranked = sorted(names, key=lambda name: sum(counts[f"{name} zero"]["largest"]))
    rows: list[list[Any]] = []
    for name in ranked[:8]:
        cells: list[Any] = [name]
        for mode in MODES:
            one = counts[f"{name} {mode}"]
            cells += [percent(share(one[kind], atoms)) for kind in kinds]
        rows.append(cells)
    untouched = [percent(share(full[kind], atoms)) for kind in kinds]
    rows.append(["none", *untouched, *untouched])
    words = {"agreement": "agreement", "largest": "largest weight", "element": "element"}
    columns = [f"{mode}: {words[kind]}, %" for mode in MODES for kind in kinds]
    return Table("", ["ablated", *columns], rows)


def head_map(value: Callable[[str], float], title: str, layers: int, heads: int) -> HeatMap:
    """Return a grid of all heads with a share in percent in each cell."""
    grid = [[value(f"L{layer}H{head}") for head in range(heads)] for layer in range(layers)]
    texts = [[f"{100 * one:.0f}" for one in row] for row in grid]
    return HeatMap(
        grid,
        [str(layer) for layer in range(layers)],
        [str(head) for head in range(heads)],
        title,
        "head",
        "layer",
        texts,
        marked=[(LAYER, HEAD)] if layers > LAYER else (),
    )


def head_figure(results: Mapping[str, Any]) -> Figure:
    """Return the share of atoms mapped correctly from each head, and the agreement of the product
    without each head.
    """
    heads = results["heads"]
    total = sum(results["atoms"])
    layers, count = (
        max(int(part) for part in column) + 1
        for column in zip(*map(split_name, heads), strict=True)
    )
    correct = head_map(
        lambda name: sum(heads[name]["largest"]) / total,
        "largest weight on the right atom, %",
        layers,
        count,
    )
    ablated = results["ablated"]
    agreement = head_map(
        lambda name: sum(ablated[f"{name} zero"]["largest"]) / total,
        f"that of {NAME} without this head, %",
        LAYER,
        count,
    )
    return Figure(
        f"Mappings from each head, and from {NAME} without each head", [correct, agreement]
    )


def split_name(name: str) -> tuple[int, int]:
    """Return the layer and the number of a head; (0, 0) for anything else."""
    layer, _, head = name.removeprefix("L").partition("H")
    return (int(layer), int(head)) if layer.isdigit() else (0, 0)


def loss_text(losses: Mapping[str, Any]) -> str:
    """Return where the product's head stands among the heads that lower the masked-token loss."""
    names = [name for name in losses if name not in ("full", "counts")]
    changes = {
        name: mean_estimate(np.subtract(losses[name], losses["full"]).tolist(), losses["counts"])
        for name in names
    }
    ranked = sorted(names, key=lambda name: -changes[name].value)
    own = changes[NAME]
    first = changes[ranked[0]]
    full = mean_estimate(losses["full"], losses["counts"])
    return fill(
        f"""The model was trained to fill in masked tokens. With {sum(losses["counts"])} masked tokens of
        these reactions its loss is {full.value:.3f} ({full.low:.3f} to {full.high:.3f}). Without {NAME} it
        changes by {own.value:+.3f} ({own.low:+.3f} to {own.high:+.3f}), rank {ranked.index(NAME) + 1} of
        {len(names)}; the most important head for the loss is {ranked[0]} ({first.value:+.3f}, {first.low:+.3f} to
        {first.high:+.3f})."""
    )


def ablation_text(ablated: Mapping[str, Any], total: int) -> str:
    """Return how many heads the product depends on."""
    sentences: list[str] = []
    for mode in MODES:
        numbers = [sum(one["agreement"]) for name, one in ablated.items() if name.endswith(mode)]
        same = sum(number == total for number in numbers)
        sentences.append(
            f"with {mode} ablation, {same} of {len(numbers)} heads change no atom of it"
        )
    return fill(
        f"""Ablating a head before layer {LAYER} changes what {NAME} reads, and so perhaps the mapping:
        {sentences[0]}; {sentences[1]}. Ablating {NAME} itself, the heads of its layer or later ones cannot
        change its weights. The heads whose zero ablation moves most of the largest weights:"""
    )


def list_parts(results: Mapping[str, Any]) -> list[str | Table]:
    """Return the parts of the page."""
    heads = results["heads"]
    atoms = results["atoms"]
    total = sum(atoms)
    full = results["ablated"]["full"]
    chance = 100 * sum(heads["equal weights"]["correct"]) / total
    return [
        fill(ABOUT.format(head=HEAD, layer=LAYER, heads=len(heads) - 1)),
        describe_run(COMMAND, dict(results)),
        "## The mapping, read from each head",
        fill(MEASURES.format(factor=90)),
        fill(head_text(heads, atoms)),
        picture(head_figure(results), "rxnmapper-heads", "Shares of atoms by head"),
        head_table(heads, atoms),
        f"## {NAME} without other heads",
        ablation_text(results["ablated"], total),
        ablation_table(results["ablated"], full, atoms),
        fill(
            f"""The output of one head ablated in all layers before {LAYER} at once. The queries and keys of
            H{HEAD} stay, and {NAME} still computes the weights that the mapping reads:"""
        ),
        ablation_table(results["shared"], full, atoms),
        "## What the model needs the head for",
        loss_text(results["losses"]),
        "## Limits",
        fill(LIMITS.format(count=len(atoms), atoms=total, chance=chance)),
    ]


def head_text(heads: Mapping[str, Any], atoms: Sequence[int]) -> str:
    """Return how the product compares with the other heads of its number, and with all others."""
    layers = [name for name in heads if name.endswith(f"H{HEAD}") and name != NAME]
    others = [name for name in heads if split_name(name)[1] != HEAD]
    as_good = sum(sum(heads[name]["correct"]) >= sum(heads[NAME]["correct"]) for name in layers)
    best = max(others, key=lambda name: sum(heads[name]["largest"]))
    own, other = (share(heads[name]["largest"], atoms) for name in (NAME, best))
    return (
        f"ALBERT uses the weights of one layer at every depth, so {NAME} is one of {len(layers) + 1} "
        f"uses of the same head. {as_good} of the {len(layers)} others map at least as many atoms "
        f"correctly. The largest weight of {NAME} is on the right atom for {percent(own)} % of the atoms; "
        f"of the heads with other numbers, {best} is the best with {percent(other)} %."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="rxnmapper_page.py")
    parser.add_argument("package", type=Path, help="the folder rxnmapper of the package")
    runs = ROOT / "runs" / "findings"
    parser.add_argument("--runs", type=Path, default=runs, metavar="DIR", help="stored results")
    args = parser.parse_args()
    folder = convert_checkpoint(args.package, args.runs / "rxnmapper-model")
    model = AlbertForMaskedLM.from_pretrained(folder).eval()
    store = ResultStore(args.runs / "rxnmapper.json")
    results = measure(model, read_vocabulary(folder), store)
    write_page("rxnmapper", "The attention head that is RXNMapper", list_parts(results))


if __name__ == "__main__":
    main()
