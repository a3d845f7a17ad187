"""Measurements of `tools/learn_models.py` on MiniLM, on the bundled translator, and on the layers
of the variants' table.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy import stats
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headwise as hw
from headwise.attention.attention import Attention
from headwise.learn.cited_papers import mean_divergence, output_log_probs, read_translator
from headwise.observe.bundled_sample import load_sample_table
from headwise.observe.head_analysis.attention_maps import compute_attention_maps
from headwise.surgery.any_model import convert
from headwise.surgery.conversion import ToCollaborative

DRAWS = 20  # random choices of equally many heads


def measure_subspaces(net: Any) -> dict[str, float]:
    """Mean squared cosine of the principal angles between the spaces that two heads of a layer
    project to, for queries, keys and values; random spaces have dim / model.
    """
    overlaps: dict[str, list[float]] = {"q": [], "k": [], "v": []}
    layers = [module for module in net.modules() if isinstance(module, Attention)]
    for layer in layers:
        for side, found in overlaps.items():
            weight = layer.state_dict()[f"project.{side}"].double()
            spaces = [torch.linalg.qr(rows.T).Q for rows in weight.chunk(layer.spec.heads.q)]
            found += [
                float((a.T @ b).square().sum() / a.shape[1]) for a, b in combinations(spaces, 2)
            ]
    spec = layers[0].spec
    means = {side: float(np.mean(found)) for side, found in overlaps.items()}
    return means | {"chance": spec.heads.dim / spec.model}


def measure_texts(net: Any, tokenizer: Tokenizer, texts: list[str]) -> dict[str, Any]:
    """Weights beside the norms of what they move, and how often heads look at their own token."""
    correlations: list[float] = []
    agree: list[float] = []
    alone: list[float] = []
    together: list[float] = []
    chance: list[float] = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text).ids])
        maps = compute_attention_maps(net, ids)
        for site in maps.layers:
            weights, norms = (each.double() for each in (maps.weights(site), maps.norms(site)))
            for w_TS, n_TS in zip(weights, norms, strict=True):
                found = [stats.spearmanr(w, n).statistic for w, n in zip(w_TS, n_TS, strict=True)]
                correlations.append(float(np.mean(found)))
            agree.append(float((weights.argmax(-1) == norms.argmax(-1)).double().mean()))
            own = weights.argmax(-1) == torch.arange(weights.shape[-1])
            own = own[:, 1:-1]  # special tokens are sinks, which all heads leave on themselves
            alone.append(float(own.double().mean()))
            together.append(float(own.all(0).double().mean()))
            chance.append(1 / weights.shape[-1])
    return {
        "norms": {
            "correlation": float(np.mean(correlations)),
            "same_largest": float(np.mean(agree)),
            "texts": len(texts),
        },
        "own": {
            "one_head": float(np.mean(alone)),
            "all_heads": float(np.mean(together)),
            "chance": float(np.mean(chance)),
        },
    }


def measure_outliers(net: Any, tokenizer: Tokenizer, texts: list[str]) -> dict[str, Any]:
    """The head of each layer with the largest mean divergence from the others, and its rank among
    the heads of its layer by the drift of the sentence vector without it (1: most important).
    """
    inputs = [torch.tensor([tokenizer.encode(text).ids]) for text in texts]
    names = [name for name, module in net.named_modules() if isinstance(module, Attention)]
    divergence: dict[str, Tensor] = {}
    for ids in inputs:
        maps = compute_attention_maps(net, ids)
        for site in names:
            heads = maps.weights(site).double()
            pairs = (heads[:, None] + heads[None]) / 2
            own = entropy(heads)
            js = (entropy(pairs) - (own[:, None] + own[None]) / 2).mean(-1)
            divergence[site] = divergence.get(site, torch.zeros(len(heads))) + js.mean(1)
    before = sentence_vectors(net, inputs)
    ranks: list[int] = []
    drifts: list[float] = []
    for site in names:
        lost = []
        for head in range(len(divergence[site])):
            with hw.ablate(net, [(site, head)]):
                lost.append(1 - float((before * sentence_vectors(net, inputs)).sum(-1).mean()))
        drifts += lost
        outlier = int(divergence[site].argmax())
        ranks.append(1 + sum(one > lost[outlier] for one in lost))
    middle = (len(lost) + 1) / 2
    test = stats.ttest_1samp(np.array(ranks), middle)
    interval = test.confidence_interval(0.95)
    minus_middle = {
        "difference": float(np.mean(ranks)) - middle,
        "low": float(interval.low) - middle,
        "high": float(interval.high) - middle,
        "p": f"{test.pvalue:.3f}",
        "significant": bool(test.pvalue < 0.05),
    }
    return {
        "ranks": ranks,
        "minus_middle": minus_middle,
        "texts": len(texts),
        "largest_drift": max(drifts),
        "median_drift": float(np.median(drifts)),
    }


def entropy(weights: Tensor) -> Tensor:
    """The entropy along the last axis."""
    return -(weights * weights.clamp(min=1e-300).log()).sum(-1)


def sentence_vectors(net: Any, inputs: Iterable[Tensor]) -> Tensor:
    """The mean of the last states of each text, of length 1."""
    with torch.no_grad():
        outputs = [net(ids) for ids in inputs]
    states = [one[0] if isinstance(one, tuple) else one for one in outputs]
    vectors = torch.stack([one.double().reshape(-1, one.shape[-1]).mean(0) for one in states])
    return torch.nn.functional.normalize(vectors, dim=-1)


def measure_translator() -> dict[str, Any]:
    """The bundled translator with fewer shared query-key channels, and with the heads of one class
    alone, in nats per token.
    """
    net, inputs = read_translator()
    expected = output_log_probs(net, inputs)
    curve = {}
    for divisor in (1, 2, 3, 4, 6):
        after = convert(net, ToCollaborative(96 // divisor), kind="cross").after
        curve[str(divisor)] = mean_divergence(expected, output_log_probs(after, inputs))
    places: dict[str, list[tuple[str, int]]] = {}
    for head in load_sample_table().heads:
        name = head.classes[0].name.partition(" ")[0] if head.classes else "unclear"
        places.setdefault(name, []).append((head.site, head.head))
    heads = [place for group in places.values() for place in group]
    generator = random.Random(0)
    classes: dict[str, dict[str, float]] = {}
    for name, group in places.items():
        if len(group) < 5:
            continue
        random_changes = []
        for _ in range(DRAWS):
            kept = set(generator.sample(heads, len(group)))
            random_changes.append(without(net, inputs, expected, set(heads) - kept))
        alone = without(net, inputs, expected, set(heads) - set(group))
        removed = without(net, inputs, expected, set(group))
        classes[name] = {
            "heads": len(group),
            "alone": alone,
            "removed": removed,
            "random": float(np.mean(random_changes)),
            "share_of_draws_better": float(np.mean([one < alone for one in random_changes])),
        }
    return {"curve": curve, "classes": classes, "uniform": float(np.log(expected.shape[-1]))}


def without(net: Any, inputs: Any, expected: Tensor, heads: set[tuple[str, int]]) -> float:
    """Divergence of the outputs without these heads."""
    with hw.ablate(net, sorted(heads)):
        return mean_divergence(expected, output_log_probs(net, inputs))


# --- The variants of 003, 4.3 ---------------------------------------------------------------------

VARIANTS = {
    "vanilla": (hw.design(model=64, heads=4, pattern="causal()"), "dense"),
    "sparse": (hw.design(model=64, heads=4, pattern="window(64)"), "chunked"),
    "linear": (hw.design(preset="linear", model=64, heads=4), "linear"),
    "flash": (hw.design(model=64, heads=4, pattern="causal()"), "sdpa"),
}
LENGTHS = (512, 4096, 32768)
MOST_SCORES = 4096  # longest text of a variant that keeps all scores


class LargestTensor(TorchDispatchMode):
    """Keeps the size of the largest tensor that is made inside the context."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        self.size = max([self.size, *(one.numel() for one in tensors)])
        return made


def measure_variants() -> dict[str, Any]:
    """Milliseconds and largest tensor of a forward pass of each variant, and its relative error
    against softmax attention with the same weights at the first length.
    """
    state = Attention(VARIANTS["vanilla"][0]).state_dict()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, max(LENGTHS), 64, generator=generator)
    table: dict[str, dict[str, Any]] = {}
    exact = torch.empty(0)
    for name, (spec, backend) in VARIANTS.items():
        layer = Attention(spec, backend=backend).eval()
        layer.load_state_dict(state)
        row: dict[str, Any] = {}
        for tokens in LENGTHS:
            if backend == "dense" and tokens > MOST_SCORES:
                row[f"numbers_{tokens}"] = spec.heads.q * tokens**2  # of the scores; not run
                continue
            with torch.no_grad(), LargestTensor() as largest:
                output = layer(x[:, :tokens])
            row[f"numbers_{tokens}"] = largest.size
            seconds = []
            for _ in range(3 if tokens > MOST_SCORES else 7):
                start = time.process_time()
                with torch.no_grad():
                    layer(x[:, :tokens])
                seconds.append(time.process_time() - start)
            row[f"ms_{tokens}"] = 1000 * float(np.median(seconds))
            if tokens == LENGTHS[0]:
                exact = output if name == "vanilla" else exact
                row["error"] = float((output - exact).norm() / exact.norm())
        table[name] = row
    return table
