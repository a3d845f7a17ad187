"""Runs of statements of several documents: what queries, keys and values do, several things that
are wanted at once, ways to encode positions, and what composition, routing, merging and variants
compute and cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import costs
from ..attention.composite_attention import MergedAttention
from ..attention.interfaces.core_types import AuxLosses, Probe
from ..attention.masking.sequence_info import SequenceInfo
from ..attention.position_embeddings import sinusoidal_table
from ..attention.presets import design, from_toml
from ..attention.tensor_attention import attend
from ..costs.published_article import list_gpt3_rows, list_llama_rows
from ..models import build, model_spec as models
from ..observe.head_analysis.rank_analysis import rank_one_residual
from ..training.train_step import compute_aux_loss
from .catalogue import Number, Outcome, judge, judge_condition
from .matrix_figures import draw_curves, draw_grids
from .measured_layers import largest_difference, make_layer, sample, samples, weights_of

# --- Queries, keys, values and several heads ------------------------------------------------------


def roles_of_projections(*, together: bool = False) -> Outcome:
    """Rows of the weights and of the output that change with the query, the key or the value of one
    of 5 tokens. `together` changes all three.
    """
    tensors = dict(zip(("query", "key", "value"), samples((5, 4), (5, 4), (5, 3)), strict=True))
    output, weights = attend(*tensors.values(), need_weights=True)
    numbers: dict[str, Number] = {}
    moved: dict[str, Tensor] = {}
    for name in tensors:
        changed = {
            other: tensor + (torch.arange(5) == 2)[:, None] if together or other == name else tensor
            for other, tensor in tensors.items()
        }
        new_output, new_weights = attend(*changed.values(), need_weights=True)
        assert weights is not None
        assert new_weights is not None
        moved[f"weights, by the {name}"] = (new_weights - weights).abs()
        moved[f"output, by the {name}"] = (new_output - output).abs()
        numbers[f"{name}_weights"] = int(((new_weights - weights).abs().amax(1) > 1e-12).sum())
        numbers[f"{name}_outputs"] = int(((new_output - output).abs().amax(1) > 1e-12).sum())
    expected = {"query": (1, 1), "key": (5, 5), "value": (0, 5)}
    changes = {name: (numbers[f"{name}_weights"], numbers[f"{name}_outputs"]) for name in tensors}
    figure = draw_grids(moved, "key or channel", "query")
    return judge(changes == expected, **numbers, figure=figure)


def smallest_wanted_weight(heads: int, aspects: int, tokens: int, gap: float) -> float:
    """The smallest weight that any wanted key gets from the head that looks for it.

    Each of the `aspects` has one key that matches it by a score of `gap`; other keys have score 0.
    Aspects are divided over the heads.
    """
    keys = torch.zeros(tokens, aspects, dtype=torch.float64)
    keys[:aspects] = gap * torch.eye(aspects)
    queries = torch.eye(aspects, dtype=torch.float64).unflatten(0, (heads, -1)).sum(1)
    weights = attend(queries, keys, keys, need_weights=True, scale=1.0)[1]
    assert weights is not None
    return float(weights[:, :aspects].amax(0).min())


def aspects_by_heads(*, gap: float = 6.0, aspects: int = 4) -> Outcome:
    """Weight of a wanted key among 16 and 4,096 tokens if 1, 2 or 4 heads share these aspects: it
    grows with the heads, and falls with the number of tokens whatever their number.
    """
    numbers = {
        f"h{heads}_{tokens}": smallest_wanted_weight(heads, aspects, tokens, gap)
        for heads, tokens in product((1, aspects // 2, aspects), (16, 4096))
    }
    shared = numbers[f"h{aspects}_16"] > 2 * numbers["h1_16"]
    undiluted = numbers[f"h{aspects}_4096"] > 0.9 * numbers[f"h{aspects}_16"]
    return judge_condition(shared, undiluted, **numbers)


def one_head_inside_several(*, width: int = 4) -> Outcome:
    """One head of 12 channels against 3 heads that keep them, with W_O of the other two at 0, and
    the share of the scores that heads of `width` channels cannot express.
    """
    one = make_layer(design(model=12, heads=1))
    several = make_layer(design(model=12, heads=3, dim=12))
    state = {name: weight.clone() for name, weight in several.state_dict().items()}
    for name, weight in one.state_dict().items():
        rows, columns = weight.shape
        state[name].zero_() if name == "output.o" else None
        state[name][:rows, :columns] = weight
    several.load_state_dict(state)
    x = sample(1, 1, 9, 12)
    difference = largest_difference(several(x), one(x))
    circuit = one.state_dict()["project.q"].T @ one.state_dict()["project.k"]
    energy = torch.linalg.svdvals(circuit).square()
    lost = float(energy[width:].sum() / energy.sum())
    return judge_condition(difference < 1e-12, lost < 1e-12, difference=difference, lost=lost)


# --- Positions ------------------------------------------------------------------------------------

RELATIVE = ("Alibi", "T5Bias", "Shaw", "Rotary")


def positions_in_scores(*, kinds: Sequence[str] = RELATIVE) -> Outcome:
    """For each way to encode positions: change of the outputs of 9 tokens if all of them move by
    100 positions, and if all distances are ten times as large.
    """
    x = sample(1, 1, 9, 16)
    numbers: dict[str, Number] = {}
    for kind in (*kinds, "sinusoids"):
        part = "" if kind == "sinusoids" else f'modifiers = [{{part = "{kind}"}}]'
        layer = make_layer(from_toml(f"model = 16\nheads = {{q = 2, dim = 8}}\n{part}"))
        outputs: list[Tensor] = []
        for positions in (torch.arange(9), torch.arange(100, 109), 10 * torch.arange(9)):
            sequence = SequenceInfo(positions[None], torch.zeros(1, 9, dtype=torch.long))
            tokens = x if part else x + sinusoidal_table(positions, 16)
            outputs.append(layer(tokens, sequence=sequence).detach())
        numbers[f"{kind.lower()}_moved"] = largest_difference(outputs[0], outputs[1])
        numbers[f"{kind.lower()}_used"] = largest_difference(outputs[0], outputs[2])
    relative = all(
        float(numbers[f"{kind.lower()}_moved"]) < 1e-9 < float(numbers[f"{kind.lower()}_used"])
        for kind in kinds
    )
    return judge(relative, **numbers, message=_refusal_beyond(9))


def _refusal_beyond(length: int) -> str:
    """The message of a small decoder with learned positions for one token too many."""
    block = models.BlockSpec(design(model=16, heads=2, pattern="causal()"))
    embedding = models.EmbeddingSpec(7, positions=models.PositionSpec("learned", length))
    stack = models.StackSpec.from_blocks("decoder", 16, (block,), embedding=embedding)
    outputs = (models.OutputHeadSpec("tokens", 7),)
    net = build(models.ModelSpec("small", "decoder", (stack,), outputs), seed=0)
    try:
        net(torch.zeros(1, length + 1, dtype=torch.long))
    except ValueError as error:
        return str(error)
    return "-"


# --- Depth ----------------------------------------------------------------------------------------


def rank_with_skips_and_feed(*, skip: bool = True) -> Outcome:
    """||X - 1 x^T|| / ||X|| of 32 random tokens after 16 random layers of attention, with residual
    connections, with feed-forward layers, and with both (2103.03404).
    """
    numbers: dict[str, Number] = {}
    curves: dict[str, dict[int, float]] = {}
    for name, has_skip, has_feed in (
        ("alone", False, False),
        ("skip", skip, False),
        ("feed", False, True),
        ("both", skip, True),
    ):
        x = sample(0, 32, 64)
        curve = curves.setdefault(name, {})
        for layer in range(1, 17):
            y = make_layer(design(model=64, heads=1), seed=layer)(x[None])[0].detach()
            x = x + y if has_skip else y
            if has_feed:
                up, down = (sample(100 * layer + n, 64, 64) / 8 for n in (0, 1))
                y = 2**0.5 * F.relu(x @ up) @ down
                x = x + y if has_skip else y
            curve[layer] = rank_one_residual(x)
        numbers[name] = curve[16]
    holds = float(numbers["skip"]) > 1e-3 > max(float(numbers["alone"]), float(numbers["feed"]))
    figure = draw_curves(curves, "layers", "distance from rank one", log="y")
    return judge(holds, **numbers, figure=figure)


# --- Variants -------------------------------------------------------------------------------------


def composed_by_hand(*, rank: int = 2) -> Outcome:
    """Compose of DCMHA written out for the weights of 3 heads, against the layer: a map from heads
    to heads for each pair of tokens, W_b + w_1 w_2 + diag(w_g) of the query and of the key, plus 1.
    """
    part = f'{{part = "DynamicComposition", on = "weights", static = "full", rank = {rank}}}'
    layer = make_layer(from_toml(f"model = 12\nheads = {{q = 3, dim = 4}}\nmodifiers = [{part}]"))
    plain = make_layer(design(model=12, heads=3))
    state = layer.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    own = {name.rpartition(".")[2]: weight for name, weight in state.items()}
    x = sample(1, 7, 12)
    maps: list[Tensor] = []
    ranks: list[int] = []
    for side in ("query", "key"):
        hidden = F.gelu(x @ own[f"{side}_hidden"].T)
        factors = [hidden @ own[f"{side}_{end}"].T for end in ("source", "target")]
        first, second = (factor.unflatten(-1, (rank, 3)) for factor in factors)
        first = first / (first.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        low_rank = first.mT @ second
        ranks.append(int(torch.linalg.matrix_rank(low_rank).max()))
        maps.append(low_rank + torch.diag_embed(torch.tanh(x @ own[f"{side}_gate"].T)))
    mixing_TSHO = torch.eye(3) + own["static"] + maps[0][:, None] + maps[1][None]
    weights = weights_of(plain, x[None])[0]
    composed = torch.einsum("hts,tsho->ots", weights, mixing_TSHO)
    values = (x @ state["project.v"].T).unflatten(-1, (3, 4))
    outputs = torch.einsum("ots,sov->tov", composed, values)
    difference = largest_difference(outputs, layer.head_outputs(x[None])[0])
    return judge(
        difference < 1e-12 and max(ranks) <= 2,
        difference=difference,
        rank=max(ranks),
        changed=largest_difference(outputs, plain.head_outputs(x[None])[0]),
    )


def total_loss_of_routing(*, norm: str = "paper", weight: float = 0.01) -> Outcome:
    """Compare the auxiliary loss that MoH adds to the loss of a task with the formula."""
    part = f'{{part = "MixtureOfHeads", always = 2, active = 3, norm = "{norm}"}}'
    layer = make_layer(from_toml(f"model = 32\nheads = {{q = 8, dim = 4}}\nmodifiers = [{part}]"))
    x = sample(1, 4, 9, 32)
    losses = AuxLosses()
    probabilities = (x @ layer.state_dict()["mixture_of_heads.router"].T).softmax(-1)
    chosen = F.one_hot(probabilities.topk(3).indices, 6).sum(-2).double()
    balance = float((probabilities.mean((0, 1)) * chosen.mean((0, 1))).sum())
    with torch.no_grad():
        layer(x, probe=Probe(aux_losses=losses))
    added = float(compute_aux_loss(losses, [("balance", weight)]))
    difference = abs(added - weight * balance)
    return judge(difference < 1e-9, balance=balance, added=added, difference=difference)


def merged_attention(*, shared: bool = True) -> Outcome:
    """Parameters of MAtt, and of self-attention and cross-attention, and the largest difference
    between MAtt and cross-attention plus the running mean of x W_V W_O.
    """
    block = MergedAttention(design(model=12, heads=3)).double()
    x, source = samples((1, 7, 12), (1, 9, 12))
    state = block.state_dict()
    mean = x.cumsum(1) / torch.arange(1, 8)[:, None]
    average = mean @ state["cross.project.v"].T @ state["cross.output.o"].T
    difference = largest_difference(
        block(x, source=source), average + block.cross(x, source=source)
    )
    merged = sum(parameter.numel() for parameter in block.parameters())
    both = (2 if shared else 1) * costs.count_parameters(block.cross.spec)
    return judge(
        difference < 1e-12 and merged < both, difference=difference, merged=merged, both=both
    )


# --- Memory and cost ------------------------------------------------------------------------------


def numbers_of_the_article(*, tolerance: float = 0.01) -> Outcome:
    """Rows of the linked article that agree with what headwise counts, within this tolerance. The
    parameters and the forward FLOPs of GPT-3 equal their formulas.
    """
    rows = [*list_gpt3_rows(), *list_llama_rows()]
    errors = [abs(row.headwise / row.article - 1) for row in rows]
    close = sum(error < tolerance for error in errors)
    worst = rows[errors.index(max(errors))]
    numbers = {"close": close, "rows": len(rows), "parameters": int(rows[0].headwise)}
    numbers |= {"article": worst.article, "headwise": worst.headwise}
    layers, width, tables = 96, 12288, 50257 + 2048
    formula = layers * (12 * width**2 + 13 * width) + 2 * width + tables * width
    exact = rows[0].headwise == formula and rows[1].headwise == rows[1].article
    return judge_condition(exact and close > 0, close == len(rows), **numbers)
