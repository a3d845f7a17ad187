"""Claims of papers that 002 cites: every number against an independent computation, and what
changes it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.attention.initialisation import depth_scaled_init
from headwise.learn import cited_papers
from headwise.learn.measured_layers import make_layer, sample
from learn import learn_entries as learn
from learn.learn_entries import array, layer_output, layer_parts, softmax

ENTRIES = {id: entry for id, entry in learn.entries_of("002").items() if id.startswith("002-FF")}
NET, INPUTS = cited_papers.read_translator()
SITES = [name for name, module in NET.named_modules() if isinstance(module, hw.Attention)]
HEADS = 6


def log_probs(net: nn.Module) -> np.ndarray:
    rows = list[np.ndarray]()
    for tensors in INPUTS:
        with torch.no_grad():
            logits = array(net(tensors["x"], source=tensors["source"]).flatten(0, 1))
        rows.append(
            logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        )
        rows[-1] = rows[-1] - logits.max(-1, keepdims=True)
    return np.concatenate(rows)


BEFORE = log_probs(NET)


def change_of(edit: Callable[[str, nn.Module], None], kind: str = "") -> float:
    """Relative entropy after a change of the weights of every attention whose name ends so."""
    net = copy.deepcopy(NET)
    with torch.no_grad():
        for site in SITES:
            if site.endswith(kind):
                edit(site, net.get_submodule(site))
    return float((np.exp(BEFORE) * (BEFORE - log_probs(net))).sum(-1).mean())


def grouped(kv: int, choose: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Keys and values of all heads of a group replaced by what is chosen of [heads of the group,
    channels, model].
    """

    def edit(_: str, attention: nn.Module) -> None:
        for name in ("k", "v"):
            weight = dict(attention.named_parameters())[f"project.{name}"]
            groups = weight.unflatten(0, (kv, HEADS // kv, -1))
            weight.copy_(
                torch.stack([choose(group).expand_as(group) for group in groups]).flatten(0, 2)
            )

    return change_of(edit)


def collapse() -> dict:
    t = np.arange(32)
    masks = {
        "full": t[:, None] >= -1,
        "causal": t[:, None] >= t,
        "local": (t[:, None] >= t) & (t[:, None] < t + 5),
    }
    numbers = {}
    for name, allowed in masks.items():
        allowed = np.broadcast_to(allowed, (32, 32))
        for suffix, normed in (("", False), ("_norm", True)):
            x = array(sample(0, 32, 64))
            for number in range(16):
                layer = make_layer(hw.design(model=64, heads=1), seed=number + 1)
                x = layer_output(layer, x, 1, allowed=allowed)
                if normed:
                    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            numbers[name + suffix] = float(np.sqrt(((x - x.mean(0)) ** 2).sum() / (x**2).sum()))
    return numbers


def chosen_values() -> dict:
    """W_O is the identity where W_V is chosen, so the outputs are the weights times x W_V^T."""
    numbers = {"random": collapse()["causal_norm"]}
    causal = np.tril(np.ones((32, 32), dtype=bool))
    for name in ("orthogonal", "centred"):
        x = array(sample(0, 32, 64))
        for number in range(1, 17):
            own = make_layer(hw.design(model=64, heads=1), seed=number).state_dict()
            q, k = (x @ array(own[f"project.{side}"]).T for side in "qk")
            y = softmax(np.where(causal, q @ k.T / 8, -np.inf)) @ x
            if name == "orthogonal":
                y = y @ np.linalg.qr(array(sample(100 + number, 64, 64)))[0].T
            else:
                mean = y.mean(0)
                y = y - np.outer(y @ mean, mean) / (mean @ mean)
            x = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
        numbers[name] = float(np.sqrt(((x - x.mean(0)) ** 2).sum() / (x**2).sum()))
    return numbers


def ranks() -> dict:
    numbers = {}
    for name, net in (("trained", NET), ("random", hw.build(NET.spec, seed=0).double().eval())):
        rows = list[tuple[float, float]]()
        for tensors in INPUTS:
            found = list[np.ndarray]()
            hook = net.get_submodule("encoder.2").register_forward_hook(
                lambda *args, to=found: to.extend(array(args[2]))
            )
            with torch.no_grad():
                net(**tensors)
            hook.remove()
            for states in found:
                values = np.linalg.svd(states, compute_uv=False)
                share = values / values.sum()
                norms = np.linalg.norm(states, axis=1)
                cosines = states @ states.T / np.outer(norms, norms)
                rank = float(np.exp(-(share * np.log(share)).sum())) / min(states.shape)
                rows.append((rank, float(cosines[~np.eye(len(cosines), dtype=bool)].mean())))
        numbers |= {
            f"rank_{name}": np.mean([row[0] for row in rows]),
            f"cosine_{name}": np.mean([row[1] for row in rows]),
        }
    return {name: pytest.approx(float(number), rel=1e-6) for name, number in numbers.items()}


def collaborative() -> dict:
    def no_scores(_: str, attention: nn.Module) -> None:
        attention.get_parameter("project.q").zero_()

    return {"width": 96, "channels": 48, "none": change_of(no_scores, "cross")}


def text_changes(site: str, kv: int, choose: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
    """Mean relative entropy of every text if one attention has keys and values of its groups."""
    net = copy.deepcopy(NET)
    weights = net.get_submodule(site)
    with torch.no_grad():
        for name in ("k", "v"):
            weight = weights.get_parameter(f"project.{name}")
            groups = weight.unflatten(0, (kv, HEADS // kv, -1))
            weight.copy_(
                torch.stack([choose(group).expand_as(group) for group in groups]).flatten(0, 2)
            )
    terms = (np.exp(BEFORE) * (BEFORE - log_probs(net))).sum(-1)
    counts = [tensors["x"].shape for tensors in INPUTS]
    rows = np.split(terms, np.cumsum([texts * tokens for texts, tokens in counts])[:-1])
    return np.concatenate(
        [row.reshape(shape).mean(1) for row, shape in zip(rows, counts, strict=True)]
    )


def pooling() -> dict:
    numbers = {"texts": 64}
    for name, kv in (("most", 3), ("least", 1)):
        mean, first = (
            np.mean([text_changes(site, kv, choose) for site in SITES], 0)
            for choose in (lambda group: group.mean(0, keepdim=True), lambda group: group[:1])
        )
        half = 1.998 * (first - mean).std(ddof=1) / 8
        gain = (first - mean).mean()
        numbers |= {f"mean_{name}": mean.mean(), f"first_{name}": first.mean()}
        numbers |= {f"low_{name}": gain - half, f"high_{name}": gain + half}
    return {name: pytest.approx(value, rel=1e-4) for name, value in numbers.items()}


def alignment() -> dict:
    return {"plain": grouped(3, lambda group: group.mean(0, keepdim=True)), "texts": 64}


def rotated(x: np.ndarray) -> np.ndarray:
    """RoPE with halves of 8 channels: x [tokens, heads, 16]."""
    angles = np.arange(len(x))[:, None, None] / 10000 ** (np.arange(8) / 8)
    one, other = x[..., :8], x[..., 8:]
    turned = (
        one * np.cos(angles) - other * np.sin(angles),
        other * np.cos(angles) + one * np.sin(angles),
    )
    return np.concatenate(turned, -1)


def channels() -> dict:
    correlations = np.zeros((3, HEADS, 16))
    for layer in range(3):
        attention, states = NET.get_submodule(f"encoder.{layer}.attention"), list[np.ndarray]()
        hook = attention.register_forward_pre_hook(
            lambda _, args, to=states: to.extend(array(args[0]))
        )
        log_probs(NET)
        hook.remove()
        weights = {name: array(weight) for name, weight in attention.state_dict().items()}
        for head in range(HEADS):
            for channel in range(16):
                rows, places = [], []
                for x in states:
                    q, k = (
                        rotated((x @ weights[f"project.{n}"].T).reshape(len(x), HEADS, 16))
                        for n in "qk"
                    )
                    rows.append(np.outer(q[:, head, channel], k[:, head, channel]).ravel())
                    t = np.arange(len(x))
                    places.append(abs(t[:, None] - t).ravel())
                correlations[layer, head, channel] = np.corrcoef(
                    np.concatenate(rows), np.concatenate(places)
                )[0, 1]
    pairs = abs(correlations).mean((0, 1)).reshape(2, 8).mean(0)
    others = float(np.delete(pairs, 1).mean())
    return {
        "best": float(pairs[1]),
        "others": others,
        "pair": "1, 9",
        "largest": float(abs(correlations).max()),
    }


def gradient(depth: int, cross: bool, scaled: bool, seed: int) -> float:
    """The layers from their formulas: Jacobian-vector products from the last layer to the first."""
    x, memory = sample(seed, 2, 16, 32), sample(seed + 50, 2, 4, 32)
    layers = []
    for number in range(1, depth + 1):
        parts = [hw.Attention(hw.design(model=32, heads=4)).double() for _ in range(2)]
        feed = nn.Sequential(
            nn.Linear(32, 128, bias=False), nn.ReLU(), nn.Linear(128, 32, bias=False)
        ).double()
        generator = torch.Generator().manual_seed(1000 * seed + number)
        depth_scaled_init((*parts, feed), depth=number if scaled else 1, generator=generator)
        layers.append((*(dict(part.named_parameters()) for part in parts), feed))

    def attend(weights: dict, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            torch.stack((side @ weights[f"project.{n}"].T).chunk(4, -1), 1)
            for n, side in (("q", y), ("k", z), ("v", z))
        )
        outputs = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return torch.cat(list(outputs.unbind(1)), -1) @ weights["output.o"].T

    def norm(y: torch.Tensor) -> torch.Tensor:
        return (y - y.mean(-1, keepdim=True)) / (
            y.var(-1, keepdim=True, unbiased=False) + 1e-5
        ).sqrt()

    def step(layer: tuple, y: torch.Tensor) -> torch.Tensor:
        y = norm(y + attend(layer[0], y, y))
        y = norm(y + attend(layer[1], y, memory)) if cross else y
        return norm(y + layer[2](y))

    states = [x]
    for layer in layers:
        states.append(step(layer, states[-1]).detach())
    back, norms = sample(seed + 7, 2, 16, 32), list[float]()
    for layer, y in zip(reversed(layers), reversed(states[:-1]), strict=True):
        (back,) = torch.autograd.functional.vjp(lambda z, layer=layer: step(layer, z), y, back)[1:]
        norms.append(float(back.norm()))
    return norms[-1] / norms[0]


def gradients() -> dict:
    numbers = {"depth": 12}
    for stack, cross in (("encoder", False), ("decoder", True)):
        for init, scaled in (("usual", False), ("scaled", True)):
            ratios = [gradient(12, cross, scaled, seed) for seed in range(5)]
            numbers[f"{stack}_{init}"] = float(np.prod(ratios) ** 0.2)
    return numbers


def densities() -> dict:
    """Weights above 0 by bisection of the threshold: p = ((alpha - 1) s -
    tau)_+^(1 / (alpha - 1)).
    """
    layer, x = make_layer(hw.design(model=16, heads=2)), array(sample(1, 1, 64, 16))[0]
    logits = np.log(layer_parts(layer, x, 2)[0])
    numbers = {"softmax": 1.0}
    for name, alpha in (("entmax", 1.5), ("sparsemax", 2.0)):
        scores = (alpha - 1) * logits
        low, high = scores.max(-1, keepdims=True) - 1, scores.max(-1, keepdims=True)
        for _ in range(200):
            middle = (low + high) / 2
            mass = (np.maximum(scores - middle, 0) ** (1 / (alpha - 1))).sum(-1, keepdims=True)
            low, high = np.where(mass > 1, middle, low), np.where(mass > 1, high, middle)
        numbers[name] = float((scores > low).mean())
    return numbers


def without(site: str, heads: list[int]) -> float:
    """The outputs of these heads no longer pass W_O."""

    def edit(name: str, attention: nn.Module) -> None:
        if name == site:
            for head in heads:
                dict(attention.named_parameters())["output.o"][:, 16 * head : 16 * head + 16] = 0

    return change_of(edit, site)


def removals() -> dict:
    alone = [without(site, [head]) for site in SITES for head in range(HEADS)]
    kept = [
        min(
            without(site, [other for other in range(HEADS) if other != head])
            for head in range(HEADS)
        )
        for site in SITES
    ]

    def no_head(_: str, attention: nn.Module) -> None:
        attention.get_parameter("output.o").zero_()

    counts = {"heads": 54, "below": sum(change < 0.1 for change in alone), "layers": 9}
    counts |= {"texts": 64, "without_all": change_of(no_head)}
    return counts | {
        "largest": max(alone),
        "with_one": sum(change < 0.1 for change in kept),
        "worst": max(kept),
    }


COMPUTED = {
    "002-FF.1": collapse,
    "002-FF.1b": ranks,
    "002-FF.1d": chosen_values,
    "002-FF.2": collaborative,
    "002-FF.3": pooling,
    "002-FF.4": alignment,
    "002-FF.5": channels,
    "002-FF.6": gradients,
    "002-FF.7": densities,
    "002-FF.8": removals,
}


@pytest.mark.lengthy
@pytest.mark.parametrize("id", learn.runnable("002", "F"))
def test_numbers_and_verdict(id: str):
    learn.check_numbers(
        ENTRIES[id],
        COMPUTED,
        globals(),
        counted_elsewhere={
            "002-FF.2": {"whole", "reduced", "third", "quarter", "sixth"},
            "002-FF.4": {"aligned", "before"},
        },
    )


def test_a_smaller_shared_space_is_as_good_as_its_singular_values():
    """The scores that a space of 48 channels can hold: the truncated product of all heads' W_Q and
    W_K.
    """

    def truncate(channels: int) -> Callable[[str, nn.Module], None]:
        def edit(_: str, attention: nn.Module) -> None:
            weights = dict(attention.named_parameters())
            q, k = (weights[f"project.{name}"].clone() for name in "qk")
            products = torch.cat(
                [q[16 * h : 16 * h + 16].T @ k[16 * h : 16 * h + 16] for h in range(HEADS)]
            )
            basis = torch.linalg.svd(products, full_matrices=False)[2][:channels]
            weights["project.k"].copy_(k @ basis.T @ basis)

        return edit

    numbers = learn.checked(ENTRIES["002-FF.2"]).numbers
    assert abs(numbers["whole"]) < 1e-12
    for name, channels in (("reduced", 48), ("third", 32), ("quarter", 24), ("sixth", 16)):
        assert numbers[name] == pytest.approx(change_of(truncate(channels), "cross"), abs=1e-4)


def test_an_alignment_keeps_the_function_and_most_of_the_outputs():
    numbers = learn.checked(ENTRIES["002-FF.4"]).numbers
    assert numbers["before"] < 1e-12
    assert 0 < numbers["aligned"] < numbers["plain"] / 2
    keys = [
        cited_papers.aligned_heads(align=side).numbers["aligned"] for side in ("keys", "values")
    ]
    assert all(numbers["aligned"] < change < numbers["plain"] for change in keys)
