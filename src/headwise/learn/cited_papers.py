"""Runs of document 002, section 0xFF: claims of its references, on random layers and the bundled
translator.
"""

from __future__ import annotations

import copy
import math
from itertools import chain, combinations, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.attention import Attention
from ..attention.initialisation import depth_scaled_init
from ..attention.interfaces.core_types import Probe
from ..attention.presets import design, from_toml
from ..models import Transformer, build
from ..observe.bundled_sample import TEXTS
from ..observe.head_analysis.rank_analysis import effective_rank, rank_one_residual
from ..observe.inspect.ablation import ablate
from ..observe.inspect.hooks import record_modules
from ..surgery.any_model import convert
from ..surgery.attention_replacement import AttentionChange, replace_attentions
from ..surgery.conversion import Pool, ToCollaborative, convert_native
from ..surgery.model_and_texts import read_model_and_texts
from .catalogue import ItemList, Outcome, judge, judge_condition
from .matrix_figures import draw_curves, draw_grids, draw_numbers
from .measured_layers import make_layer, sample, weights_of
from .translator_runs import (
    NUM_TEXTS,
    Batches,
    batch_log_probs,
    held_out_texts,
    load_translator,
    mean_divergence,
    output_log_probs,
)

PAIRS = [tuple(text.split("\t")) for text in TEXTS]


def read_translator(*, trained: bool = True) -> tuple[Transformer, tuple[dict[str, Tensor], ...]]:
    """The bundled translator in float64, or one of its sizes with random weights, and held-out
    texts.
    """
    net = load_translator()
    if not trained:
        net.load_state_dict(build(net.spec, seed=0).state_dict())
    return net, held_out_texts()


# --- Masks and layer normalisation against rank collapse ------------------------------------------


@torch.no_grad()
def residual_by_layers(
    pattern: str, *, norm: bool, layers: int = 16, values: str = "random"
) -> dict[int, float]:
    """||X - 1 x^T|| / ||X|| of 32 random tokens after each layer of attention alone, without
    residual connections. W_V of each layer is "random", "orthogonal", or "centred": the projection
    that removes the mean of the layer's outputs; W_O is then the identity.
    """
    x = sample(0, 32, 64)
    residuals = {0: rank_one_residual(x)}
    for number in range(1, layers + 1):
        layer = make_layer(design(model=64, heads=1, pattern=pattern), seed=number)
        if values != "random":
            layer.get_parameter("output.o").copy_(torch.eye(64))
            w_v = layer.get_parameter("project.v")
            w_v.copy_(torch.eye(64))
            if values == "centred":
                mean = F.normalize(layer(x[None])[0].mean(0), dim=0)
                w_v.sub_(torch.outer(mean, mean))
            else:
                w_v.copy_(torch.linalg.qr(sample(100 + number, 64, 64)).Q)
        x = layer(x[None])[0]
        x = F.layer_norm(x, (64,)) if norm else x
        residuals[number] = rank_one_residual(x)
    return residuals


def rank_collapse(*, local: str = "window(5)") -> Outcome:
    """Similarity of all tokens after 16 layers of full, causal and local attention, also with layer
    normalisation.
    """
    patterns = {"full": "full()", "causal": "causal()", "local": local}
    curves: dict[str, dict[int, float]] = {}
    for norm, end in ((False, ""), (True, ", layer norm")):
        for name, pattern in patterns.items():
            curves[f"{name}{end}"] = residual_by_layers(pattern, norm=norm)
    plain = {name: curves[name][16] for name in patterns}
    normed = {f"{name}_norm": curves[f"{name}, layer norm"][16] for name in patterns}
    dashed = {name: "--" for name in curves if name.endswith("layer norm")}
    figure = draw_curves(curves, "layers", "distance from rank one", log="y", lines=dashed)
    collapsed = plain["full"] < plain["causal"] < 1e-3 and normed["causal_norm"] < 1e-3
    holds = collapsed and plain["local"] > 100 * plain["causal"]
    return judge(holds, **plain, **normed, figure=figure)


def rank_with_chosen_values(*, chosen: str = "centred") -> Outcome:
    """Similarity of all tokens after 16 layers of causal attention with layer normalisation, for
    three kinds of W_V.
    """
    curves = {
        name: residual_by_layers("causal()", norm=True, values=values)
        for name, values in (
            ("random", "random"),
            ("orthogonal", "orthogonal"),
            ("centred", chosen),
        )
    }
    numbers = {name: curve[16] for name, curve in curves.items()}
    collapse = max(numbers["random"], numbers["orthogonal"]) < 1e-3
    figure = draw_curves(curves, "layers", "distance from rank one", log="y")
    return judge_condition(collapse, numbers["centred"] < 0.5, **numbers, figure=figure)


def rank_of_trained_states(*, trained: bool = True) -> Outcome:
    """Effective rank and mean cosine of encoder states after the last layer, against a randomly
    initialised model.
    """
    net, inputs = read_translator()
    random, _ = read_translator(trained=False)
    numbers: dict[str, float] = {}
    for name, model in (("trained", net), ("random", random)):
        shares = []
        cosines = []
        norm = model.get_submodule("encoder.norm")  # its inputs are [texts, tokens, model]
        with record_modules([norm]) as calls:
            output_log_probs(model, inputs)
        for states in chain.from_iterable(call.args[0] for call in calls[norm]):
            unit = states / states.norm(dim=1, keepdim=True)
            shares.append(float(effective_rank(states[None])[0]) / min(states.shape))
            cosines.append(float((unit @ unit.T).sum() - len(unit)) / (len(unit) * (len(unit) - 1)))
        numbers |= {
            f"rank_{name}": sum(shares) / len(shares),
            f"cosine_{name}": sum(cosines) / len(cosines),
        }
    name = "trained" if trained else "random"
    keeps_rank = numbers[f"rank_{name}"] > 0.7 and numbers[f"cosine_{name}"] > 0.05
    return judge(keeps_rank and numbers["cosine_random"] > 2 * numbers[f"cosine_{name}"], **numbers)


# --- Conversion of trained attention --------------------------------------------------------------


def collaborative_without_retraining(*, share: float = 0.5, trained: bool = True) -> Outcome:
    """Divergence of the translator's outputs when its cross-attentions share a query-key space of
    fewer channels; and without any scores, when they average all source tokens.
    """
    net, inputs = read_translator(trained=trained)
    expected = output_log_probs(net, inputs)
    width = next(spec.model for _, spec in net.spec.attention_specs())
    changes = {}
    sizes = {"whole": 1.0, "reduced": share, "third": 1 / 3, "quarter": 1 / 4, "sixth": 1 / 6}
    for name, part in sizes.items():
        after = convert(net, ToCollaborative(round(width * part)), kind="cross").after
        changes[name] = mean_divergence(expected, output_log_probs(after, inputs))
    without_scores = copy.deepcopy(net)
    for site, _ in net.spec.attention_specs():
        if site.endswith("cross"):
            nn.init.zeros_(without_scores.get_submodule(site).get_parameter("project.q"))
    changes["none"] = mean_divergence(expected, output_log_probs(without_scores, inputs))
    rises = changes["reduced"] < changes["third"] < changes["quarter"] < changes["sixth"]
    is_small = changes["whole"] < 1e-9 and changes["reduced"] < 1e-3 * changes["none"]
    return judge(is_small and rises, **changes, width=width, channels=round(width * share))


def pooled_heads(*, most: int = 3, least: int = 1, alike: bool = False) -> Outcome:
    """Divergence of the translator with fewer key-value heads in one attention at a time, mean over
    all: means of groups, or the first head of each group; with the interval of their difference.

    With heads that are `alike`, both starts are the same.
    """
    net, inputs = read_translator()
    expected = text_log_probs(net, inputs)
    numbers: dict[str, float] = {}
    holds = []
    for name, kv in (("most", most), ("least", least)):
        pooled = convert_native(read_model_and_texts(net, ()), Pool(kv))
        by_start = dict[str, Tensor]()
        for start in ("mean", "first"):
            changes = []
            for site, layer in pooled.layers.items():
                weights = dict(pooled.after.get_submodule(site).state_dict())
                if start == "first" and not alike:
                    weights = _first_heads(net, site, kv)
                changed = replace_attentions(net, {site: AttentionChange(layer.spec, weights)})
                changes.append(text_divergences(expected, text_log_probs(changed, inputs)))
            by_start[start] = torch.stack(changes).mean(0)
            numbers[f"{start}_{name}"] = float(by_start[start].mean())
        gain = by_start["first"] - by_start["mean"]
        half = 1.998 * float(gain.std()) / math.sqrt(len(gain))  # 95 %, t of 63 degrees
        numbers[f"low_{name}"] = float(gain.mean()) - half
        numbers[f"high_{name}"] = float(gain.mean()) + half
        holds.append(numbers[f"low_{name}"] > 0)
    return judge(all(holds), **numbers, texts=NUM_TEXTS)


def text_log_probs(net: nn.Module, inputs: Batches) -> list[Tensor]:
    """Log-probabilities [target tokens, vocabulary] of every text."""
    return [row for batch in inputs for row in batch_log_probs(net, batch)]


def text_divergences(expected: list[Tensor], changed: list[Tensor]) -> Tensor:
    """`mean_divergence` of every text."""
    return torch.tensor(list(map(mean_divergence, expected, changed)))


def _first_heads(net: Transformer, site: str, kv: int) -> dict[str, Tensor]:
    """The weights of a layer with the keys and values of the first head of each group of
    neighbours.
    """
    weights = dict(net.get_submodule(site).state_dict())
    for name in ("project.k", "project.v"):
        heads = weights[name].unflatten(0, (6, -1))
        weights[name] = heads[:: 6 // kv].flatten(0, 1)
    return weights


def aligned_heads(*, align: str = "both", trained: bool = True) -> Outcome:
    """Divergence of the translator with half of its key-value heads, pooled as they are and after
    an alignment.
    """
    net, inputs = read_translator(trained=trained)
    expected = output_log_probs(net, inputs)
    numbers: dict[str, float] = {}
    for name, choice in (("plain", "none"), ("aligned", align)):
        result = convert_native(read_model_and_texts(net, PAIRS), Pool(kv=3, align=choice))
        numbers[name] = mean_divergence(expected, output_log_probs(result.after, inputs))
        if result.equivalent is not None:
            numbers["before"] = mean_divergence(
                expected, output_log_probs(result.equivalent, inputs)
            )
    keeps_function = numbers.get("before", 1.0) < 1e-9
    is_damaged = numbers["plain"] > 1  # a model that knows nothing loses nothing
    return judge(
        keeps_function and is_damaged and numbers["aligned"] < 0.5 * numbers["plain"],
        **numbers,
        texts=NUM_TEXTS,
    )


# --- Channels, depth, sparsity, and removed heads -------------------------------------------------


def channels_by_distance(*, trained: bool = True) -> Outcome:
    """Correlation of each channel's product q k with the distance, in the translator's encoder:
    Vig's neuron view.
    """
    net, inputs = read_translator(trained=trained)
    of_channel = torch.stack([_distance_correlations(net, layer, inputs) for layer in range(3)])
    mean = of_channel.abs().mean((0, 1))
    pairs = (mean[:8] + mean[8:]) / 2  # rotary rotates channels c and c + 8 together
    best = int(pairs.argmax())
    others = float((pairs.sum() - pairs[best]) / 7)
    largest = float(of_channel.abs().max())
    ratio = float(pairs[best]) / others
    return judge(
        ratio > 2 and float(pairs[best]) > 0.15,
        best=float(pairs[best]),
        others=others,
        pair=ItemList(f"{best}, {best + 8}"),
        largest=largest,
        figure=draw_numbers(
            {"columns": {f"{n}, {n + 8}": str(n) for n in range(8)}, "axis": "correlation"},
            {str(n): correlation for n, correlation in enumerate(pairs.tolist())},
        ),
    )


def _distance_correlations(net: Transformer, layer: int, inputs: Batches) -> Tensor:
    """Correlation [head, channel] of q[t] k[s] with |t - s|, over all pairs of
    tokens of all texts.
    """
    attention = net.get_submodule(f"encoder.{layer}.attention")
    with record_modules([attention]) as calls:
        output_log_probs(net, inputs)
    products = []
    distances = []
    for call in calls[attention]:
        x = call.args[0]
        probe = Probe("q", "k")
        with torch.no_grad():
            attention(x, probe=probe)
        q = probe.tensors["q"]
        k = probe.tensors["k"]
        products.append(torch.einsum("bthd,bshd->hdbts", q, k).flatten(2))
        places = torch.arange(x.shape[1], dtype=torch.float64)
        distances.append((places[:, None] - places).abs().flatten().repeat(len(x)))
    product = torch.cat(products, -1)
    distance = torch.cat(distances)
    product = product - product.mean(-1, keepdim=True)
    distance = distance - distance.mean()
    return (product * distance).sum(-1) / (product.norm(dim=-1) * distance.norm())


def gradient_ratio(depth: int, *, cross: bool, scaled: bool, seed: int) -> float:
    """Norm of the gradient before the first post-norm layer over that before the last, at the
    start.
    """
    width = 32
    x = sample(seed, 2, 16, 32).requires_grad_()
    memory = sample(seed + 50, 2, 4, 32)
    states = [x]
    spec = design(model=width, heads=4)
    for number in range(1, depth + 1):
        own = Attention(spec).double()
        source = Attention(spec).double()
        feed = nn.Sequential(
            nn.Linear(width, 128, bias=False), nn.ReLU(), nn.Linear(128, width, bias=False)
        ).double()
        generator = torch.Generator().manual_seed(1000 * seed + number)
        depth_scaled_init((own, source, feed), depth=number if scaled else 1, generator=generator)
        y = F.layer_norm(states[-1] + own(states[-1]), (width,))
        y = F.layer_norm(y + source(y, source=memory), (width,)) if cross else y
        states.append(F.layer_norm(y + feed(y), (width,)))
    first, last = torch.autograd.grad(
        (states[-1] * sample(seed + 7, 2, 16, width)).sum(), (states[0], states[-2])
    )
    return float(first.norm() / last.norm())


def gradients_of_deep_layers(*, depth: int = 12) -> Outcome:
    """Geometric means over 5 initialisations of `gradient_ratio`, for encoders and decoders, usual
    and depth-scaled.
    """
    numbers = {}
    for stack, cross in (("encoder", False), ("decoder", True)):
        for init, scaled in (("usual", False), ("scaled", True)):
            ratios = [
                gradient_ratio(depth, cross=cross, scaled=scaled, seed=seed) for seed in range(5)
            ]
            numbers[f"{stack}_{init}"] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    vanishes = {
        stack: numbers[f"{stack}_usual"] < 0.5 < numbers[f"{stack}_scaled"]
        for stack in ("encoder", "decoder")
    }
    is_cured = numbers["encoder_scaled"] > 0.5
    return judge_condition(
        vanishes["decoder"] and is_cured, vanishes["encoder"], **numbers, depth=depth
    )


def density_by_alpha(*, alphas: tuple[float, ...] = (1.0, 1.5, 2.0)) -> Outcome:
    """Share of the keys with a weight above 0, for 64 random tokens, by the alpha of entmax."""
    shares = {}
    grids: dict[str, Tensor] = {}
    for name, alpha in zip(("softmax", "entmax", "sparsemax"), alphas, strict=True):
        part = '"Softmax"' if alpha == 1 else f'"Entmax", alpha = {alpha}'
        spec = from_toml(f"model = 16\nheads = {{q = 2, dim = 8}}\nnormaliser = {{part = {part}}}")
        weights = weights_of(make_layer(spec), sample(1, 1, 64, 16))
        shares[name] = float((weights > 0).double().mean())
        grids[f"{name}, alpha {alpha:g}"] = weights[0, 0, :24, :24]
    holds = shares["softmax"] == 1 > shares["entmax"] > shares["sparsemax"]
    return judge(holds, **shares, figure=draw_grids(grids, "key", "query"))


def heads_removed_alone(*, limit: float = 0.1, trained: bool = True) -> Outcome:
    """Divergence of the translator without one head, for each head, without all but one head of a
    layer, and without any head.
    """
    net, inputs = read_translator(trained=trained)
    expected = output_log_probs(net, inputs)

    def divergence_without(*heads: tuple[str, int]) -> float:
        with ablate(net, heads):
            return mean_divergence(expected, output_log_probs(net, inputs))

    alone = list[float]()
    best_single = list[float]()  # of every head; of the best head of every layer by itself
    sites = [site for site, _ in net.spec.attention_specs()]
    for site in sites:
        heads = [(site, head) for head in range(6)]
        alone += [divergence_without(head) for head in heads]
        best_single.append(min(divergence_without(*rest) for rest in combinations(heads, 5)))
    below = sum(change < limit for change in alone)
    without_all = divergence_without(*product(sites, range(6)))
    are_needed = without_all > 1 and max(alone) > limit  # together, and one of them alone
    return judge(
        below > len(alone) / 2 and are_needed,
        without_all=without_all,
        heads=len(alone),
        below=below,
        largest=max(alone),
        layers=len(best_single),
        with_one=sum(change < limit for change in best_single),
        worst=max(best_single),
        texts=NUM_TEXTS,
        figure=draw_curves(
            {"without one head": dict(enumerate(sorted(alone, reverse=True), 1))},
            "head, by its divergence",
            "divergence per token",
            log="y",
            levels={"limit": limit, "without any head": without_all},
        ),
    )
