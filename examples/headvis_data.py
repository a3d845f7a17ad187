"""Write the data that HeadVis shows (github.com/anthropics/headvis): for each head of a decoder, the
texts of a data set on which it is strongest, some of each decile, and projections of its vectors.

    python examples/headvis_data.py path/to/model texts.txt data

Put the folder `data` beside the built page of HeadVis. The files follow the contracts in its
`data_pipeline.py`.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import headwise as hw
from headwise.observe.head_analysis.head_metrics import HEAD_METRICS

INTERVALS = 10
KEYS_PER_QUERY, LEAST_WEIGHT = 8, 0.005  # of the weights that are stored
POINTS_PER_TEXT = 8  # pairs of a query and a key whose vectors are projected
DISTANCES = [0, *(2**n for n in range(13))]
PARTS = {"Q": "q", "K": "k", "V": "v", "O": "output"}


def by_interval(sequences):
    """The interval of each text: its decile, or the highest of a text as strong as that."""
    intervals = {one.text: one.decile for one in sequences if one.decile}
    least = min((one.value for one in sequences if one.decile == INTERVALS), default=np.inf)
    for one in sequences:
        if not one.decile and one.value >= least:
            intervals.setdefault(one.text, INTERVALS)
    return intervals


def describe_text(number, interval, tokens, weights):
    """One text of a head; of its weights [T, T] the largest of each query, at q * T + k."""
    count = len(tokens)
    largest = np.sort(weights, 1)[:, -KEYS_PER_QUERY:][:, :1]
    places = np.flatnonzero(weights >= np.maximum(largest, LEAST_WEIGHT))
    return {
        "sequence_id": number,
        "interval": interval,
        "tokens": list(tokens),
        "attention_indices": places.tolist(),
        "attention_values": [round(value, 4) for value in weights.flat[places].tolist()],
        "seq_len": count,
        "max_activation": round(float(weights[1:, 1:].max(initial=0)), 4),  # as the page counts
    }


def describe_head(sequences, values):
    """The file of a head: its texts, and what the metrics tab shows of them."""
    distances, queries, keys = [], Counter(), Counter()
    for one in sequences:
        pairs = np.unravel_index(one["attention_indices"], (one["seq_len"],) * 2)
        distances += np.abs(pairs[0] - pairs[1]).tolist()
        for t, s, weight in zip(*pairs, one["attention_values"], strict=True):
            queries[one["tokens"][t]] += weight
            keys[one["tokens"][s]] += weight
    counts, edges = np.histogram(values, 50, (0, 1))
    return {
        "sequences": sequences,
        "qk_distance_histogram": {
            "bin_edges": DISTANCES,
            "bin_values": np.histogram(distances, DISTANCES)[0].tolist(),
        },
        "top_query_tokens": list_weights(queries),
        "top_key_tokens": list_weights(keys),
        "histogram": {"bin_edges": edges.round(2).tolist(), "bin_values": counts.tolist()},
        "statistics": {"n_samples": len(sequences)},
    }


def list_weights(weights):
    return [{"token": one, "weight": round(weight, 4)} for one, weight in weights.most_common(50)]


def strongest_pairs(weights):
    """The queries and keys with the largest weights, without the first row and column."""
    rest = weights[1:, 1:]
    places = np.argsort(-rest, axis=None, kind="stable")[:POINTS_PER_TEXT]
    places = places[rest.flat[places] >= LEAST_WEIGHT]
    return [place + 1 for place in np.unravel_index(places, rest.shape)]


def project(vectors):
    """Principal components of vectors [N, dim]: three coordinates of each."""
    centred = vectors - vectors.mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh[:3]
    signs = directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
    points = torch.zeros(len(vectors), 3)
    points[:, : len(directions)] = centred @ (directions * signs).T
    return {f"d{n}": [round(value, 4) for value in points[:, n].tolist()] for n in range(3)}


def describe_cloud(triples, vectors):
    """The file of the projection of a head: text, query and key of each point, and coordinates."""
    joined = {part: torch.cat(parts).float() for part, parts in vectors.items()}
    columns = zip(*triples, strict=True)
    return {
        **dict(zip(("seq_idx", "top_q", "top_k"), map(list, columns), strict=True)),
        "norms": [round(value, 4) for value in joined["Q"].norm(dim=1).tolist()],
        "pca": {part: project(joined[part]) for part in PARTS},
        "clusters": [],
    }


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def export(model, texts, folder, tokenizer=None):
    """Write all files; texts are read twice, those that were kept a second time."""
    stacks = {(site.stack, site.kind) for site in hw.sites(model)}
    if len(stacks) > 1 or any(kind == "cross" for _, kind in stacks):
        raise SystemExit("HeadVis shows heads over one text; give a model with one stack")
    if folder.exists():
        raise SystemExit(f"{folder} exists; give the path of a new folder")
    table = hw.heads(model, texts, tokenizer=tokenizer)
    top = hw.head_analysis.find_top_sequences(model, texts, tokenizer=tokenizer)
    layers = {(head.site, head.head): (head.layer, head.head) for head in table.heads}
    intervals = {head: by_interval(sequences) for head, sequences in top.heads.items()}
    sequences = {head: [] for head in layers}
    triples = {head: [] for head in layers}
    vectors = {head: {part: [] for part in PARTS} for head in layers}
    for number, example in top.examples.items():
        heads = [head for head in layers if number in intervals[head]]
        if not heads:
            continue
        inputs = example.model_inputs
        patterns = hw.head_outputs(model, inputs, heads, part="pattern")
        parts = {
            name: hw.head_outputs(model, inputs, heads, part=part) for name, part in PARTS.items()
        }
        for head in heads:
            weights = patterns[head][0].double().numpy()
            tokens = top.words(number, "text")
            sequences[head].append(describe_text(number, intervals[head][number], tokens, weights))
            pairs = strongest_pairs(weights)
            triples[head] += [(number, int(t), int(s)) for t, s in zip(*pairs, strict=True)]
            for name in PARTS:
                places = torch.from_numpy(pairs[name in "KV"])
                vectors[head][name].append(parts[name][head][0, places])
    for head, (layer, number) in layers.items():
        values = [one.value for one in top.heads[head] if one.decile]
        name = f"L{layer}H{number}.json"
        write(folder / "heads" / name, describe_head(sequences[head], values))
        if triples[head]:
            write(folder / "umap" / name, describe_cloud(triples[head], vectors[head]))
    words = {number: list(top.words(number, "text")) for number in top.examples}
    write(folder / "umap" / "sequences.json", words)
    write_overview(
        table, folder, list(layers.values()), [layers[one] for one in layers if triples[one]]
    )


def write_overview(table, folder, heads, with_cloud):
    """The files that name all heads and their measures."""
    rows = []
    for head in table.heads:
        values = {name: one.data["value"] for name, one in head.measures.items()}
        rows.append({"layer": head.layer, "head": head.head, **values})
    metrics = list(table.heads[0].measures)
    config = {
        "model_name": table.model,
        "heads": heads,
        "n_layers": len({layer for layer, _ in heads}),
        "n_heads": len({head for _, head in heads}),
        "n_intervals": INTERVALS,
        "metrics": metrics,
        "metric_descriptions": {name: HEAD_METRICS[name].description for name in metrics},
        "head_data_pattern": "L{layer}H{head}.json",
        "has_umap": bool(with_cloud),
        "umap_heads": with_cloud,
        "custom_plots": [
            {"key": "qk_distance_histogram", "label": "Q-K distance"},
            {"key": "histogram", "label": "Largest weight of a text"},
        ],
        "custom_tables": [
            {"key": "top_query_tokens", "label": "Top query tokens"},
            {"key": "top_key_tokens", "label": "Top key tokens"},
        ],
        "statistics_display": {"n_samples": {"label": "Texts kept", "format": "default"}},
    }
    write(folder / "scatter_data.json", rows)
    write(folder / "config.json", config)
    write(folder / "server_config.json", {})
    write(folder / "attributions" / "manifest.json", {})


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__ if sys.argv[1:] else print(__doc__))
    path, data, folder = sys.argv[1:]
    export(hw.load(path), Path(data).read_text("utf-8").splitlines(), Path(folder))
