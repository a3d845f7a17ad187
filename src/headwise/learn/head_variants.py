"""Runs of document 002, section 4: overlapping heads, mixture of heads, and dynamically composed
heads.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import costs
from ..attention.interfaces import Gate
from ..attention.interfaces.core_types import AuxLosses, Probe
from ..attention.presets import design, from_toml
from ..observe.bundled_sample import load_sample_model
from ..observe.head_analysis.head_circuits import get_circuits
from .catalogue import Outcome, judge
from .matrix_figures import Picture, draw_grids, draw_matrices
from .measured_layers import largest_difference, make_layer, sample
from .parameters_and_scaling import change_by_other_heads, mixes_let_heads_interact


def overlapping_heads(*, overlap: int = 1) -> Outcome:
    """Channels of the projected queries and of the concatenated outputs that each head uses."""
    heads = f"heads = {{q = 3, dim = 4, vdim = {4 + 2 * overlap}}}"
    text = f'model = 12\n{heads}\nproject = {{part = "Overlapping", overlap = {overlap}}}'
    layer = make_layer(from_toml(text))
    x = sample(1, 1, 5, 12)
    probe = Probe("q")
    layer(x, probe=probe)
    queries = probe.tensors["q"].detach()
    plain = (x @ layer.state_dict()["project.q"].T)[0]
    own = queries[0, :, 1]
    used = [n for n in range(12) if (own - plain[:, [n]]).abs().amax(0).min() < 1e-12]
    neighbours = list(range(4 - overlap, 8 + overlap))
    width = layer.head_outputs(x).shape[-1] * 3
    columns = layer.state_dict()["output.o"].shape
    is_wider = width == columns[1] == 3 * (4 + 2 * overlap) > columns[0]
    return judge(
        used == neighbours and len(used) > 4 and is_wider,
        used=len(used),
        own=4,
        concat=width,
        w_o=f"{columns[1]} x {columns[0]}",
        figure=_draw_division(overlap),
    )


def _draw_division(overlap: int) -> Picture:
    """The channels of each of 3 heads with a hard and a soft division, and the influence of heads
    on each other.
    """
    masks: list[tuple[str, Tensor]] = []
    for name, more in (("hard division", 0), ("soft division", overlap)):
        places = torch.arange(12)
        starts = torch.tensor([[0], [4], [8]])
        inside = (places >= starts - more) & (places < starts + 4 + more)
        masks.append((name, inside.double()))
    heads = ("0", "1", "2")
    return draw_matrices([*masks, *influence_of_heads().items()], heads)


# Ways of combining heads, each as the lines that differ from multi-head attention with 3 heads of 4
# channels.
COMPOSITIONS = {
    "MHA": "",
    "MOHSA": 'project = {part = "Overlapping", overlap = 1}',
    "collaborative": 'project = {part = "Collaborative", width = 6}',
    "talking heads": (
        'modifiers = [{part = "TalkingHeads", on = "scores"}, {part = '
        '"TalkingHeads", on = "weights"}]'
    ),
    "DCMHA": (
        'modifiers = [{part = "DynamicComposition", on = "scores"}, {part = '
        '"DynamicComposition", on = "weights"}]'
    ),
}


def influence_of_heads() -> dict[str, list[list[float]]]:
    """How the output of each head (row) depends on the key channels of each head (column), as
    shares of a row.

    It is the norm of the derivatives of a head's output by the rows of W_K that belong to a head in
    plain multi-head attention; random weights, 7 tokens of width 12.
    """
    tables: dict[str, list[list[float]]] = {}
    for name, lines in COMPOSITIONS.items():
        vdim = ", vdim = 6" if name == "MOHSA" else ""
        layer = make_layer(from_toml(f"model = 12\nheads = {{q = 3, dim = 4{vdim}}}\n{lines}"))
        x = sample(1, 1, 7, 12)
        weight = next(
            parameter for key, parameter in layer.named_parameters() if key == "project.k"
        )
        rows = []
        for head in range(3):
            outputs = layer.head_outputs(x)[0, :, head]
            (gradient,) = torch.autograd.grad(
                outputs, weight, sample(2 + head, *outputs.shape), retain_graph=True
            )
            norms = gradient.flatten(1).norm(dim=1).split(gradient.shape[0] // 3)
            shares = torch.stack([each.norm() for each in norms])
            rows.append((shares / shares.sum()).tolist())
        tables[name] = rows
    return tables


def heads_do_not_exchange(*, modifiers: str = "") -> Outcome:
    """Change of the first head's output when queries and keys of the other heads are replaced,
    relative to it.
    """
    change = change_by_other_heads(modifiers)
    return judge(change == 0 and mixes_let_heads_interact(), change=change)


def router_parameters(*, router: str = "learned") -> Outcome:
    """Count the parameters of a mixture of heads beyond MHA's, at d = 512 with 8 heads, 2 of them
    always active.
    """
    text = f'modifiers = [{{part = "MixtureOfHeads", always = 2, active = 3, router = "{router}"}}]'
    spec = from_toml(f"model = 512\nheads = {{q = 8, dim = 64}}\n{text}")
    plain = costs.count_parameters(design(model=512, heads=8))
    extra = costs.count_parameters(spec) - plain
    mixture = spec.modifiers[0]
    assert isinstance(mixture, Gate)
    by_norm = replace(spec, modifiers=(replace(mixture, router="norm"),))
    formula = (8 + 2) * 512
    open_heads = sum(mixture.open_fractions(spec) or ())  # headwise skips the others
    is_free = costs.count_parameters(by_norm) == plain
    return judge(
        extra == 0,
        corrected=extra == formula and is_free and open_heads == 2 + 3,
        extra=extra,
        formula=formula,
        plain=plain,
    )


def active_heads(*, active: int = 3) -> Outcome:
    """Heads with a nonzero output for each token of a mixture of 8 heads, 2 always active and
    `active` chosen.
    """
    text = f'modifiers = [{{part = "MixtureOfHeads", always = 2, active = {active}}}]'
    layer = make_layer(from_toml(f"model = 32\nheads = {{q = 8, dim = 4}}\n{text}"))
    x = sample(1, 1, 9, 32)
    is_open = layer.head_outputs(x).detach().abs().amax(-1)[0] > 0
    scores = x[0] @ layer.state_dict()["mixture_of_heads.router"].T
    best = torch.zeros_like(scores).scatter(-1, scores.topk(active).indices, 1.0) > 0
    follows_router = bool(is_open[:, :2].all()) and torch.equal(is_open[:, 2:], best)
    counts = is_open.sum(-1)
    fewest = int(counts.min())
    most = int(counts.max())
    holds = fewest == most < 8 and follows_router
    sizes = layer.head_outputs(x).detach()[0].norm(dim=-1)
    columns = [f"s{n}" for n in range(2)] + [f"r{n}" for n in range(6)]
    figure = draw_grids({"norm of the outputs": sizes}, "head", "token", columns=columns)
    return judge(holds, fewest=fewest, most=most, heads=8, figure=figure)


def balance_loss(*, collapsed: bool = True) -> Outcome:
    """Sum of P_i f_i over 6 routed heads, 3 chosen: even routing, and tokens that choose the same
    heads.

    P_i is the mean probability of head i, f_i the fraction of tokens that chose it.
    """
    even = torch.eye(6, dtype=torch.float64).repeat(4, 1)
    even = 3 * even + 2 * even.roll(1, 1) + even.roll(2, 1)
    same = torch.tensor([3.0, 2, 1, 0, 0, 0], dtype=torch.float64).expand(24, 6)
    inputs = {"even": even, "same": same if collapsed else even}
    numbers = {name: _balance(scores, "paper") for name, scores in inputs.items()}
    in_code = [_balance(scores, "code") for scores in inputs.values()]
    # with even routing P_i = 1/6 and f_i = 3/6
    is_even = abs(numbers["even"] - 0.5) < 1e-9
    has_factor = torch.allclose(torch.tensor(in_code), 6 * torch.tensor(list(numbers.values())))
    return judge(numbers["same"] > numbers["even"] and is_even and has_factor, **numbers)


def _balance(scores: Tensor, norm: str) -> float:
    """The balance loss of a layer with 2 shared and 6 routed heads, for router scores of tokens."""
    text = f'modifiers = [{{part = "MixtureOfHeads", always = 2, active = 3, norm = "{norm}"}}]'
    layer = make_layer(from_toml(f"model = 8\nheads = {{q = 8, dim = 1}}\n{text}"))
    router = torch.eye(6, 8, dtype=torch.float64)
    layer.load_state_dict(layer.state_dict() | {"mixture_of_heads.router": router})
    losses = AuxLosses()
    layer(F.pad(scores, (0, 2))[None], probe=Probe(aux_losses=losses))
    return float(torch.as_tensor(losses.total("balance")).detach())


def composition_cost(*, dynamic: bool = True) -> Outcome:
    """Parameters and FLOPs that dynamic composition adds to MHA at d = 2560 with 32 heads, and its
    share.
    """
    plain = design(model=2560, heads=32, pattern="causal()")
    spec = design(preset="dcmha", model=2560, heads=32) if dynamic else plain
    counts = [costs.count_parameters(each) for each in (plain, spec)]
    flops = [
        costs.required_flops(s, costs.self_attention_work(s, batch=1, queries=2048))
        for s in (plain, spec)
    ]
    share = counts[1] / counts[0] - 1
    work = flops[1] / flops[0] - 1
    identity = _change_by_composition(factor=0.0)
    return judge(
        share < 0.02,
        corrected=0.02 < share < work and identity < 1e-12 < _change_by_composition(factor=1.0),
        share=share,
        flops=work,
        identity=identity,
    )


def _change_by_composition(factor: float) -> float:
    """Difference of dynamic composition from MHA, if all its maps are multiplied by `factor`."""
    spec = from_toml(
        "model = 12\nheads = {q = 3, dim = 4}\n"
        'modifiers = [{part = "DynamicComposition", static = "full"}]'
    )
    layer = make_layer(spec)
    plain = make_layer(design(model=12, heads=3))
    x = sample(1, 1, 7, 12)
    state = {
        name: weight * factor if name.startswith("dynamic_composition.") else weight
        for name, weight in layer.state_dict().items()
    }
    layer.load_state_dict(state | dict(plain.state_dict()))
    return largest_difference(layer(x), plain(x))


def low_rank_scores(*, mixed: bool = True) -> Outcome:
    """Rank of the scores of 3 heads of 5 channels over 11 tokens, alone and composed (DCMHA)."""
    x = sample(1, 1, 11, 12)
    ranks = []
    for modifiers in ("", '{part = "DynamicComposition"}' if mixed else ""):
        text = f"model = 12\nheads = {{q = 3, dim = 5}}\nmodifiers = [{modifiers}]"
        probe = Probe("scores")
        make_layer(from_toml(text))(x, probe=probe)
        ranks.append(int(torch.linalg.matrix_rank(probe.tensors["scores"][0, 0].detach())))
    return judge(ranks[0] == 5 < ranks[1], alone=ranks[0], mixed=ranks[1], tokens=11)


def pairs_of_circuits(*, pairs: bool = True) -> Outcome:
    """Weights mixed over heads by P against h^2 heads with QK of j and OV of i,
    weighted by P_ij.
    """
    text = 'modifiers = [{part = "TalkingHeads", on = "weights"}]'
    layer = make_layer(from_toml(f"model = 12\nheads = {{q = 3, dim = 4}}\n{text}"))
    x = sample(1, 7, 12)
    state = layer.state_dict()
    q, k, v = (
        (x @ state[f"project.{side}"].T).unflatten(-1, (3, 4)).transpose(0, 1) for side in "qkv"
    )
    weights = (q @ k.mT / 2).softmax(-1)
    blocks = state["output.o"].split(4, 1)
    mixing = state["talking_heads.mixing"]
    used = [(i, j) for i, j in product(range(3), repeat=2) if pairs or i == j]
    total = torch.stack([mixing[j, i] * weights[j] @ v[i] @ blocks[i].T for i, j in used]).sum(0)
    difference = largest_difference(total, layer(x[None])[0])
    reached = torch.tensor(influence_of_heads()["DCMHA"]) > 1e-6  # by the dynamic map, all pairs
    holds = difference < 1e-12 and bool(reached.all())
    grids = {"P: QK of a row, OV of a column": mixing.abs()}
    grids |= {f"A head {head}": each for head, each in enumerate(weights)}
    composed = torch.einsum("j,jts->ts", mixing[:, 0], weights).abs()
    figure = draw_grids(grids | {"composed A head 0": composed}, "key", "query")
    return judge(holds, difference=difference, pairs=len(used), figure=figure)


def query_key_circuit(*, width: int = 4) -> Outcome:
    """Test if W_Q W_K is defined for matrices of 12 x width, and scores by x W_Q W_K^T x^T."""
    layer = make_layer(design(model=12, heads=1, dim=width))
    x = sample(1, 7, 12)
    w_q, w_k = (layer.state_dict()[f"project.{side}"].T for side in "qk")
    probe = Probe("scores")
    layer(x[None], probe=probe)
    circuit = next(iter(get_circuits(layer).values())).qk_circuit(0)
    scores = x @ (w_q @ w_k.T) @ x.T
    errors = [
        largest_difference(scores, x @ circuit.left @ circuit.right @ x.T),
        largest_difference(scores / math.sqrt(width), probe.tensors["scores"][0, 0]),
    ]
    difference = max(errors)
    try:
        product = " x ".join(map(str, (w_q @ w_k).shape))
    except RuntimeError:
        product = "-"
    return judge(
        product != "-", corrected=difference < 1e-12, product=product, difference=difference
    )


def circuits_of_a_model(*, site: str = "decoder.1.cross") -> Outcome:
    """x W_Q W_K^T z^T of a head of the bundled translator, against the scores that its layer
    computes.

    A self-attention layer of the translator has rotary embeddings, so its scores depend on the
    distance too.
    """
    circuits = get_circuits(load_sample_model().double())[site]
    head = circuits.qk_circuit(0)
    x = sample(1, 7, circuits.spec.model)
    z = sample(2, 9, circuits.spec.model)
    probe = Probe("scores")
    other = z if site.endswith("cross") else x
    circuits.layer(x[None], source=z[None] if site.endswith("cross") else None, probe=probe)
    scores = (x @ head.left @ head.right @ other.T).detach() / math.sqrt(circuits.spec.heads.dim)
    computed = probe.tensors["scores"][0, 0].detach()
    difference = largest_difference(scores, computed) / float(computed.abs().max())
    return judge(
        difference < 1e-12,
        difference=difference,
        model=circuits.spec.model,
        rank=head.left.shape[1],
    )


def value_output_circuit(*, with_output: bool = True) -> Outcome:
    """The largest error of a head's output against A x W_V W_O; without the output matrix, against
    A x W_V.
    """
    layer = make_layer(design(model=12, heads=3, vdim=12))
    x = sample(1, 1, 7, 12)
    probe = Probe("weights")
    only_first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)[:, None]
    written = layer.merge_heads(layer.head_outputs(x) * only_first)[0].detach()
    layer(x, probe=probe)
    state = layer.state_dict()
    circuit = (
        state["project.v"][:12].T @ state["output.o"][:, :12].T
        if with_output
        else state["project.v"][:12].T
    )
    difference = largest_difference(probe.tensors["weights"][0, 0] @ x[0] @ circuit, written)
    return judge(difference < 1e-12, difference=difference)


def exchange_within_a_token(*, step: str = "output") -> Outcome:
    """Derivative of the output at a token by the heads' outputs at that token, and at others; for
    all of W_O.

    With `step` "attention", differentiate the whole layer by its inputs.
    """
    layer = make_layer(design(model=12, heads=3))
    x = sample(1, 1, 4, 12)
    if step == "output":
        function = layer.merge_heads
        start = layer.head_outputs(x).detach()
    else:
        function = layer
        start = x
    slopes = torch.func.jacrev(lambda each: function(each))(start).detach()  # [1, T, D, 1, T, ...]
    sizes = slopes.squeeze(3).squeeze(0).movedim(2, 1).flatten(2).abs().amax(-1)
    same = torch.eye(4, dtype=torch.bool)
    within = float(sizes[same].max())
    between = float(sizes[~same].max())
    return judge(between < 1e-12 < within, within=within, between=between)


def two_stage_routing(*, stages: int = 2) -> Outcome:
    """Gates of MoH written out, against the layer: the scores of the head and of its kind, shared
    or routed.

    With one of the `stages`, the score of the kind is left out.
    """
    text = 'modifiers = [{part = "MixtureOfHeads", always = 2, active = 3}]'
    layer = make_layer(from_toml(f"model = 32\nheads = {{q = 8, dim = 4}}\n{text}"))
    plain = make_layer(design(model=32, heads=8))
    state = layer.state_dict()
    x = sample(1, 1, 9, 32)
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    plain.requires_grad_(False)
    shared, routed, kind = (
        (x @ state[f"mixture_of_heads.{name}"].T).softmax(-1)
        for name in ("shared", "router", "kind")
    )
    chosen = routed >= routed.sort(-1, descending=True).values[..., 2:3]
    routed = 3 * routed * chosen / (routed * chosen).sum(-1, keepdim=True)
    kind = 2 * kind if stages == 2 else torch.ones_like(kind)
    gates = torch.cat([2 * shared * kind[..., :1], routed * kind[..., 1:]], -1)
    difference = largest_difference(gates[..., None] * plain.head_outputs(x), layer.head_outputs(x))
    return judge(
        difference < 1e-12, difference=difference, sum=float(gates.detach().sum(-1).mean())
    )
