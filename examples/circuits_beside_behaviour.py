"""Heads by what they do on texts and by their weights alone, in one table: previous-token and
induction heads both ways, successor heads, and heads that copy names.

python circuits_beside_behaviour.py MODEL [TEXTS.txt]
"""

import sys
from contextlib import suppress
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor

import headwise as hw
from headwise.observe.head_analysis import head_circuits
from headwise.observe.head_analysis.circuit_metrics import find_token_id
from headwise.observe.inspect.model_tokenizer import make_reader
from headwise.report.data import Table
from headwise.report.render import to_text

# An ordinal series ends at the first word that is several tokens.
SERIES = [
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "January February March April May June July August September October November December",
    "one two three four five six seven eight nine ten eleven twelve",
    "first second third fourth fifth sixth seventh eighth ninth tenth",
    "1 2 3 4 5 6 7 8 9",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
]
NAMES = (
    "John Mary Tom James Peter Anna Paul Sarah David Robert Alice Michael Lisa Mark Emma Jack Kate "
    "Martin Laura Simon"
)
TOP = 5  # a head copies a name if it puts it among this many tokens (2211.00593)
POSITIONS = 64
NUM_SHOWN = 12
Heads = dict[tuple[str, int], float]


def find_ids(model: hw.Transformer, words: str, *, is_series: bool) -> list[int]:
    """Return the ids of words, after a space if that is one token. A word that is several tokens is
    left out; a series ends there.
    """
    make_reader(model)  # raises if the model has no tokenizer
    ids: list[int] = []
    for word in words.split():
        for text in (f" {word}", word):
            with suppress(ValueError):
                ids.append(find_token_id(model, text))
                break
        else:
            if is_series:
                break
    return ids


def first_mlp(model: hw.Transformer, embed: Tensor) -> Tensor:
    """Return what the first MLP makes of embeddings, which both papers take as a token's state
    (2312.09230, 2211.00593); the embeddings themselves if there is none.
    """
    block = model.stacks["decoder"].blocks[0]
    norm = {"pre": "feed_norm", "parallel": "norm", "parallel_two_norms": "feed_norm"}
    if "feed" not in block.sublayers or block.placement not in norm:
        return embed
    with torch.no_grad():
        return block.feed(block.get_submodule(norm[block.placement])(embed))


def measure_roles(
    model: hw.Transformer, series: list[list[int]], names: list[int]
) -> tuple[Heads, Heads]:
    """Return of every head the share of ordinals whose successor gets the largest logit of its
    series, and the share of names that are among the 5 largest logits, by the OV circuit.
    """
    successors: Heads = {}
    copies: Heads = {}
    tables = head_circuits.get_token_tables(model, "decoder")
    states = first_mlp(model, tables.embed)
    for site, circuits in head_circuits.get_circuits(model).items():
        is_first = site.startswith("decoder.0.")
        own = tables._replace(embed=tables.embed if is_first else states)
        embed, unembed = (one.float() for one in head_circuits.fold_norms(model, site, own)[:2])
        for head in range(circuits.spec.heads.q):
            ov = circuits.ov_circuit(head)
            left, right = ov.left.to(embed), ov.right.to(embed)
            hits: list[Tensor] = []
            for ids in series:
                logits = embed[ids] @ left @ (right @ unembed[:, ids])
                hits.append(logits[:-1].argmax(-1) == torch.arange(1, len(ids)))
            successors[site, head] = float(torch.cat(hits).double().mean())
            top = (embed[names] @ left @ right @ unembed).topk(TOP).indices
            is_copied = (top == torch.tensor(names)[:, None]).any(-1)
            copies[site, head] = float(is_copied.double().mean())
    return successors, copies


def measure_previous_by_qk(model: hw.Transformer, rows: int = 8) -> Heads:
    """Return how much higher the score of the previous token is than that of other earlier tokens,
    in standard deviations of both, over random tokens. Of models with learned or rotary positions;
    NaN for a head whose scores are all equal.
    """
    draw = torch.Generator().manual_seed(0)
    tokens = head_circuits.get_weight(model, "decoder.embedding.tokens")
    positions = head_circuits.get_weight(model, "decoder.embedding.positions")
    count = POSITIONS if positions is None else min(POSITIONS, len(positions))
    x = tokens[torch.randint(len(tokens), (rows, count), generator=draw)]
    x = x if positions is None else x + positions[:count]
    offsets = torch.arange(count)[:, None] - torch.arange(count)
    advantages: Heads = {}
    for site, circuits in head_circuits.get_circuits(model).items():
        block = model.stacks["decoder"].blocks[int(site.split(".")[1])]
        norm = head_circuits.NORM_BEFORE.get(block.placement)
        probe = hw.Probe("scores")
        with torch.no_grad():
            z = x if norm is None else block.get_submodule(norm)(x)
            circuits.layer(z, probe=probe)
        for head, scores in enumerate(probe.tensors["scores"].transpose(0, 1).double()):
            gap = scores[:, offsets == 1].mean() - scores[:, offsets > 1].mean()
            advantages[site, head] = float(gap / scores[:, offsets >= 1].std())
    return advantages


def k_composition(
    receiver: head_circuits.LowRankMap, senders: list[head_circuits.LowRankMap]
) -> Tensor:
    """K-composition of a head with others (Elhage et al. 2021): the norm of W_Q W_K^T (W_V W_O)^T
    over the norms of both maps, [senders].
    """
    # the norm of L A R is that of the triangles of L and R around A
    left, *lefts = (torch.linalg.qr(one.left.float(), mode="r").R for one in (receiver, *senders))
    rights = torch.stack([one.right.float() for one in senders])
    triangles = torch.stack(lefts)
    both = left @ (receiver.right.float() @ rights.mT) @ triangles.mT
    norms = (left @ receiver.right.float()).norm() * (triangles @ rights).flatten(1).norm(dim=1)
    return both.flatten(1).norm(dim=1) / norms


def measure_k_composition(model: hw.Transformer, previous: Heads, count: int = 3) -> Heads:
    """Return the largest K-composition of every head with a previous-token head of an earlier
    layer, minus the mean over all heads of these layers. The `count` heads with the highest
    `previous` are the previous-token heads.
    """
    circuits = head_circuits.get_circuits(model)
    best = set(sorted(previous, key=lambda place: -previous[place])[:count])
    maps = {place: circuits[place[0]].ov_circuit(place[1]) for place in previous}
    layers = {site: number for number, site in enumerate(circuits)}
    composition: Heads = {}
    for site, head in previous:
        earlier = [one for one in previous if layers[one[0]] < layers[site]]
        is_sender = torch.tensor([one in best for one in earlier])
        if is_sender.any():
            sizes = k_composition(circuits[site].qk_circuit(head), [maps[one] for one in earlier])
            composition[site, head] = float(sizes[is_sender].max() - sizes.mean())
    return composition


def describe_agreement(name: str, behaviour: Heads, circuit: Heads) -> str:
    """Return the rank correlation of two measures over the heads that have both."""
    both = [place for place, value in circuit.items() if value == value]
    rank = spearmanr([behaviour[one] for one in both], [circuit[one] for one in both]).statistic
    return f"{name}: Spearman {rank:.2f} over {len(both)} heads"


def compare(model: hw.Transformer, texts: list[str] | None = None) -> Table:
    """Return the measures of all heads, those that do most induction first."""
    table = hw.heads(model, texts)
    place_of = {table.name(one): (one.site, one.head) for one in table.heads}
    previous, induction = (
        {(one.site, one.head): one.measures[name].value for one in table.heads}
        for name in ("previous", "induction")
    )
    qk = measure_previous_by_qk(model)
    composition = measure_k_composition(model, previous)
    copying = {
        (one.site, one.head): one.copying for one in head_circuits.measure_head_circuits(model)
    }
    found = [find_ids(model, one, is_series=True) for one in SERIES]
    series = [ids for ids in found if len(ids) > 1]
    names = find_ids(model, NAMES, is_series=False)
    if not series:
        raise SystemExit("no series of this script is of single tokens in this model")
    successors, copies = measure_roles(model, series, names)
    measures = (previous, qk, induction, composition, copying, successors, copies)
    ranked = sorted(place_of.items(), key=lambda item: -induction[item[1]])
    rows = [(name, *(one.get(place) for one in measures)) for name, place in ranked]
    pairs = sum(len(ids) - 1 for ids in series)
    chance = sum((len(ids) - 1) / len(ids) for ids in series) / pairs
    notes = (
        describe_agreement("previous token by weights and by scores", previous, qk),
        describe_agreement(
            "induction and K-composition with a previous-token head", induction, composition
        ),
        describe_agreement("induction and copying score", induction, copying),
        f"successors: {pairs} pairs, chance {chance:.2f}",
        f"names: {len(names)} names among {TOP} tokens, chance {TOP / model.spec.heads[0].outputs:.1g}",
    )
    columns = ("head", "previous", "by QK", "induction", "K-comp.", "copying", "succ.", "names")
    return Table(f"{table.model}, {table.texts}", columns, rows, notes)


if __name__ == "__main__":
    net = hw.load(sys.argv[1]).eval()
    lines = Path(sys.argv[2]).read_text("utf-8").splitlines() if sys.argv[2:] else None
    result = compare(net, lines)
    print(to_text(Table(result.title, result.columns, result.rows[:NUM_SHOWN], result.notes)))
