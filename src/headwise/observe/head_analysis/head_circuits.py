"""Circuits of a head from its weights alone: which states it compares (QK), and what it carries to
the output (OV).

Scores are x W_Q W_K^T z and outputs are w z W_V W_O: two maps of the model's width, each kept as
the product of two narrow matrices (Elhage et al. 2021). Biases, norms and transforms of queries and
keys are not part of them; `fold_norms` adds the norms to the maps from tokens to tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.attention import Attention
from ...attention.interfaces import Mix, OutputStep, QKTransform, RowStep
from ...attention.spec.attention_spec import AttentionSpec
from ...hub.checkpoint_weights import build_from_weights, wrap_tensors
from ...hub.transformers_loading import without_hub_kernels
from ...kernels.devices import Placement, to_float64
from ...models import Transformer, build, families
from ...models.block import TransformerLayer
from ...models.families import get_weight_names
from ...models.model_spec.components import NormSpec
from ...report.data import Table
from ...util.errors import SpecError
from ..inspect.attention_sites import find_attention
from ..inspect.model_inputs import get_device
from .head_similarity import HeadLocation

# --- Low-rank maps --------------------------------------------------------------------------------


class LowRankMap(NamedTuple):
    """A linear map x -> x @ left @ right, kept as two narrow matrices left [in, r] and right [r,
    out].
    """

    left: Tensor
    right: Tensor

    @property
    def product(self) -> Tensor:
        """Compute the full matrix, [in, out]."""
        return self.left @ self.right

    @property
    def shape(self) -> tuple[int, int]:
        """Input width and output width."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def singular_values(self) -> Tensor:
        """Compute the r largest singular values, in descending order; all others are zero.

        >>> LowRankMap(
        ...     torch.tensor([[3.0], [4.0]]), torch.tensor([[2.0, 0.0]])
        ... ).singular_values.tolist()
        [10.0]
        """
        left, right = (
            torch.linalg.qr(factor, mode="r").R
            for factor in (to_float64(self.left), to_float64(self.right).T)
        )
        return torch.linalg.svdvals(left @ right.T)

    def inner_product(self, other: LowRankMap) -> Tensor:
        """Compute the Frobenius inner product of two maps on the narrow sides."""
        left = to_float64(self.left).T @ to_float64(other.left)
        return (left * (to_float64(self.right) @ to_float64(other.right).T)).sum()


def copying_score(
    ov: LowRankMap, embed: Tensor | None = None, unembed: Tensor | None = None
) -> float:
    """Copying score of an OV circuit (Elhage et al. 2021): the sum of eigenvalues over the sum of
    their absolute values.

    It is 1 if all eigenvalues are positive, so that the head raises the logits of tokens that it
    attends to, and -1 if all are negative. The map is embed W_V W_O unembed over tokens, with
    `embed` [tokens, model] and `unembed` [model, tokens], or W_V W_O over states without them. Its
    nonzero eigenvalues are computed from an [r, r] matrix.

    >>> ov = LowRankMap(torch.eye(3)[:, :2], torch.eye(3)[:2])
    >>> copying_score(ov), copying_score(LowRankMap(ov.left, -ov.right))
    (1.0, -1.0)
    """
    left = to_float64(ov.left)
    right = to_float64(ov.right)
    if embed is not None and unembed is not None:
        left = to_float64(embed) @ left
        right = right @ to_float64(unembed)
    values = torch.linalg.eigvals(right @ left)
    total = values.abs().sum()
    return float(values.real.sum() / total) if total > 0 else float("nan")


# --- Circuits of a model --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionCircuits:
    """QK and OV circuits of the heads of one attention layer; `caveats` name
    what they leave out.
    """

    site: str
    layer: Attention
    caveats: tuple[str, ...]
    kv_from_elsewhere: str = ""  # why keys and values are not those of its own input alone

    @property
    def spec(self) -> AttentionSpec:
        """Spec of the attention layer."""
        return self.layer.spec

    def qk_circuit(self, head: int) -> LowRankMap:
        """W_Q W_K^T of a score head: which states it compares."""
        heads = self.spec.heads
        _check_head(head, heads.q, "score head")
        if head not in self.spec.core_score_heads:
            fact = f"only a gate reads the queries of score head {head} of {self.site}"
            raise SpecError(
                f"cannot get QK circuits: {fact}; name one of {list(self.spec.core_score_heads)}"
            )
        if not self.spec.similarity.linear:
            fact = (
                f"{self.site} scores with {self.spec.similarity!r}, which is not a product of "
                "W_Q and W_K"
            )
            raise SpecError(f"cannot get QK circuits: {fact}")
        q = self._head_matrices("q", "q dim model")
        k = self._head_matrices("k", "kv dim source")
        return LowRankMap(q[head].T, k[heads.kv_head_of_query[head]])

    def ov_circuit(self, head: int) -> LowRankMap:
        """W_V W_O of an output head: what it carries from the tokens that it attends to."""
        spec = self.spec
        _check_head(head, len(spec.score_head_of_output), "output head")
        combining = [step for _, step in spec.parts_of(OutputStep) if step.combines_rows]
        if combining:
            fact = (
                f"{self.site} combines rows by {combining[0]!r}, so that no single W_V belongs "
                "to an output head"
            )
            raise SpecError(f"cannot get OV circuits: {fact}")
        v = self._head_matrices("v", f"{spec.heads.value_axis} vdim source")
        value_head = spec.core_of(spec.projection_form(one=False)).value_head_of_row[head]
        return LowRankMap(v[value_head].T, self.output_map(head))

    def output_map(self, head: int) -> Tensor:
        """W_O of an output head, [vdim, model], measured with one-hot head outputs."""
        spec = self.spec
        weight = self._get_weight(next(iter(spec.project.params(spec))))
        _check_head(head, len(spec.score_head_of_output), "output head")
        vdim = spec.heads.vdim
        one_hot = torch.zeros(1, vdim + 1, len(spec.score_head_of_output), vdim).to(weight)
        one_hot[0, :vdim, head] = torch.eye(vdim).to(weight)
        with torch.inference_mode():
            y = self.layer.merge_heads(one_hot)[0]
        return y[:-1] - y[-1]

    def _head_matrices(self, side: str, axes: str) -> Tensor:
        """Matrices of one side, [heads, width, in]; refuses a projection that does not declare it
        with these axes.
        """
        spec = self.spec
        parameter = spec.project.params(spec).get(side)
        if parameter is None or " ".join(parameter.layout.axes) != axes:
            fact = f"{spec.project!r} of {self.site} has no single matrix per head for {side}"
            raise SpecError(
                f"cannot get circuits: {fact}; they need layers whose {side} is one linear map of "
                "the input"
            )
        sizes = spec.sizes_of(spec.project)
        return self._get_weight(side).view(*(sizes[axis] for axis in parameter.layout.axes))

    def _get_weight(self, name: str) -> Tensor:
        return self.layer.weights["project"][name].detach()


def _check_head(head: int, count: int, kind: str) -> None:
    if not 0 <= head < count:
        raise ValueError(f"{kind} must be in 0..{count - 1}, got {head}")


def get_circuits(model: nn.Module) -> Mapping[str, AttentionCircuits]:
    """Return the circuits of every attention layer by site name.

    The model is a headwise model, or a transformers model of a family that hw.load can read.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     ),
    ...     seed=0,
    ... )
    >>> circuits = get_circuits(net)["decoder.0.attention"]
    >>> circuits.qk_circuit(1).left.shape, circuits.ov_circuit(0).product.shape
    (torch.Size([8, 4]), torch.Size([8, 8]))
    """
    site_modules = find_attention(model)
    if not site_modules or not all(isinstance(one.module, Attention) for one in site_modules):
        model = as_native_model(model)
        site_modules = find_attention(model)
    circuits: dict[str, AttentionCircuits] = {}
    for one in site_modules:
        if isinstance(one.module, Attention):
            spec = one.module.spec
            caveats: list[str] = []  # computations of the layer that these maps leave out
            for _, transform in spec.parts_of(QKTransform):
                sides = [side for side in "qkv" if side in transform.transformed_sides(spec)]
                if sides:
                    caveats.append(f"{transform!r} changes {' and '.join(sides)} token by token")
            for _, step in spec.parts_of(OutputStep):
                caveats.append(f"{step!r} changes head outputs before the output projection")
            for _, mix in spec.parts_of(Mix):
                caveats.append(f"{mix!r} mixes heads, so that no head acts on its own")
            for _, step in spec.parts_of(RowStep):
                caveats.append(f"{step!r} changes scores depending on all keys of the query")
            elsewhere = kv_from_elsewhere(model, one.site.path)
            caveats += [elsewhere] if elsewhere else []
            circuits[one.site.name] = AttentionCircuits(
                one.site.name, one.module, tuple(caveats), elsewhere
            )
    return circuits


def kv_from_elsewhere(model: nn.Module, path: str) -> str:
    """Return why keys and values of the attention at this path are not those of its own input
    alone; empty if they are.
    """
    parent, _, role = path.rpartition(".")
    layer = model.get_submodule(parent)
    if isinstance(layer, TransformerLayer) and role == "attention":
        return layer.kv_from_elsewhere
    return ""


class CircuitSimilarity(NamedTuple):
    """Heads and the similarity of every two of their maps, [heads, heads]; NaN for maps of
    different widths.
    """

    heads: tuple[HeadLocation, ...]
    values: Tensor


def compare_circuits(model: nn.Module) -> CircuitSimilarity:
    """Compare the OV circuits of all heads of a model by their cosine similarity as vectors.

    Random maps have a similarity of zero on average; the circuits of `make_random_baseline(model)`
    show how far they scatter.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     ),
    ...     seed=0,
    ... )
    >>> compare_circuits(net).values.shape
    torch.Size([2, 2])
    """
    heads: list[HeadLocation] = []
    maps: list[LowRankMap] = []
    layer_of_site = {module.site.name: module.site.layer for module in find_attention(model)}
    for site, circuits in get_circuits(model).items():
        for head in range(len(circuits.spec.score_head_of_output)):
            heads.append(HeadLocation(site, layer_of_site[site], head))
            maps.append(circuits.ov_circuit(head))
    products = torch.full((len(maps), len(maps)), torch.nan, dtype=torch.float64)
    for i, first in enumerate(maps):
        for j in range(i, len(maps)):
            if first.shape == maps[j].shape:
                product = first.inner_product(maps[j])
                products[i, j] = product
                products[j, i] = product
    norm = products.diagonal().sqrt()
    return CircuitSimilarity(tuple(heads), products / (norm[:, None] * norm))


class TokenTables(NamedTuple):
    """Embedding and unembedding matrices of a model, and a note if one is a substitute or
    incomplete.
    """

    embed: Tensor
    unembed: Tensor
    note: str


def get_weight(net: Transformer, name: str) -> Tensor | None:
    """Return a weight of a headwise model, which may be tied to another; None if there is none."""
    tensor = net.state_dict(keep_vars=True).get(net.spec.tied_weights().get(name, name))
    return None if tensor is None else tensor.detach()


def get_token_tables(model: nn.Module, stack: str) -> TokenTables:
    """Return the embedding [tokens, model] of a stack and the unembedding [model, tokens] of the
    model's token head.

    A model without a token head gets the transposed embedding instead, with a note.
    """
    native = as_native_model(model)
    embed = get_weight(native, f"{stack}.embedding.tokens")
    if embed is None:
        fact = f"{stack} of {native.spec.name} has no token embedding"
        raise SpecError(f"{fact}; use copying_score(ov) without tables for copying of states")
    heads = native.spec.heads
    heads = [one for one in heads if one.outputs == len(embed) and one.at == "each"]
    unembed = get_weight(native, f"head.{heads[0].name}.weight") if heads else None
    if unembed is None or unembed.shape != embed.shape:
        note = "the model predicts no tokens: its embedding is used as unembedding"
        return TokenTables(embed, embed.T, note)
    is_linear = heads[0].transform is None
    note = "" if is_linear else "the transform of the output head is left out"
    return TokenTables(embed, unembed.T, note)


# The norm before the attention and the norm of its output, by placement of the norms. A post-norm
# layer has norms of the residual stream instead, which belong to no single head.
NORM_BEFORE = {
    **dict.fromkeys(("pre", "parallel_two_norms", "sandwich"), "attention_norm"),
    "parallel": "norm",
}
NORM_AFTER = {"sandwich": "attention_norm_after", "post_sublayer": "attention_norm"}


def fold_norms(model: nn.Module, site: str, tables: TokenTables) -> TokenTables:
    """Fold the norms between tokens and the self-attention at `site` into the token tables, as
    linear maps.

    The norm before the attention becomes part of the embedding; a norm of its output and the final
    norm become part of the unembedding. Of each norm, the gain and the subtraction of the mean
    (layer norm) are folded. The division by the standard deviation only scales each token, and
    biases add the same to all of them: both are left out, and so are norms of the residual stream
    in post-norm layers.
    """
    native = as_native_model(model)
    stack_name, layer, _ = site.split(".")
    stack = next(stack for stack in native.spec.stacks if stack.name == stack_name)
    block = stack.layers[int(layer)]
    last = native.spec.stacks[-1]
    place = f"{stack_name}.{layer}"

    def fold(norm: NormSpec | None, name: str, table: Tensor, axis: int) -> Tensor:
        """Apply a norm's linear part to the channels on `axis` of a table, before or after the
        table.
        """
        if norm is None:
            return table
        gain = get_weight(native, f"{name}.weight")
        factor: Any = 1.0
        if gain is not None:
            factor = to_float64(gain) + (norm.kind == "rms_unit_offset")
            factor = factor if axis else factor[:, None]
        table = table if axis else factor * table  # the gain comes first in its rows
        if norm.kind in ("layer", "layer_no_bias", "layer_no_affine"):  # these subtract the mean
            table = table - table.mean(axis, keepdim=True)
        return factor * table if axis else table

    embed = to_float64(tables.embed)
    unembed = to_float64(tables.unembed)
    before = NORM_BEFORE.get(block.placement)
    if before is not None:
        embed = fold(block.norm, f"{place}.{before}", embed, axis=1)
    unembed = fold(last.norm, f"{last.name}.norm", unembed, axis=0)
    after = NORM_AFTER.get(block.placement)
    if after is not None:
        unembed = fold(block.norm, f"{place}.{after}", unembed, axis=0)
    return TokenTables(embed, unembed, tables.note)


class FoldedCircuits(NamedTuple):
    """QK and OV circuit of one head between residual streams, with the norms around it folded."""

    qk: LowRankMap
    ov: LowRankMap


def fold_circuits(model: nn.Module, site: str, head: int) -> FoldedCircuits:
    """Return the QK and OV circuits of a head with the norms of `fold_norms`: the QK circuit
    compares two states of the residual stream, and the OV circuit maps one to what enters the
    output matrix, with the layer's residual multiplier. Positions and biases are no part of them.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> fold_circuits(net, "decoder.0.attention", 1).qk.product.sum().abs() < 1e-5  # centred
    tensor(True)
    """
    native = as_native_model(model)
    last = native.spec.stacks[-1].name
    sites = [
        name for name in get_circuits(native) if re.fullmatch(rf"{last}\.\d+\.attention", name)
    ]
    if site not in sites:
        raise SpecError(
            f"cannot fold the circuits of {site!r}: it is no self-attention of the {last}, whose "
            f"states reach the final norm; give one of {', '.join(sites)}"
        )
    circuits = get_circuits(native)[site]
    if circuits.kv_from_elsewhere:
        raise SpecError(
            f"cannot fold the circuits of {site}: {circuits.kv_from_elsewhere}; give another site"
        )
    qk = circuits.qk_circuit(head)
    ov = circuits.ov_circuit(head)
    states = torch.eye(circuits.spec.model, dtype=torch.float64, device=qk.left.device)
    before, after, _ = fold_norms(native, site, TokenTables(states, states, ""))
    scale = native.stacks[last].blocks[int(site.split(".")[1])].scale
    compared = LowRankMap(before @ to_float64(qk.left), to_float64(qk.right) @ before.T)
    return FoldedCircuits(
        compared, LowRankMap(before @ to_float64(ov.left), to_float64(ov.right) @ after * scale)
    )


# --- Numbers of every head ------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadCircuit:
    """Measure one head from its weights: copying score, norm of its slice of W_O, norm of W_V W_O.

    `copying` and `ov_norm` are NaN where no W_V of its own belongs to the head alone. `over` is
    what the copying score is over: "tokens", through embedding and unembedding, or "states".
    """

    site: str
    head: int
    copying: float
    over: str
    output_norm: float
    ov_norm: float


def measure_head_circuits(model: nn.Module) -> tuple[HeadCircuit, ...]:
    """Measure copying score, norm of W_O and norm of W_V W_O of every head, from weights alone.

    Norms are Frobenius norms. Self-attention of a stack with a token embedding is scored over
    tokens, with the gains of the norm before it and of the final norm (see `fold_norms`), all other
    attention over states, without any norm.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> [(one.site, one.head, one.over) for one in measure_head_circuits(net)]
    [('decoder.0.attention', 0, 'tokens'), ('decoder.0.attention', 1, 'tokens')]
    """
    rows: list[HeadCircuit] = []
    for site, circuits in get_circuits(model).items():
        tables: list[Tensor] = []
        stack, _, kind = site.partition(".")
        if kind.endswith(".attention"):
            with suppress(SpecError):  # a stack without tokens
                tables = list(fold_norms(model, site, get_token_tables(model, stack))[:2])
        over = "tokens" if tables else "states"
        for head in range(len(circuits.spec.score_head_of_output)):
            output_norm = float(to_float64(circuits.output_map(head)).norm())
            copying = math.nan
            ov_norm = math.nan
            with suppress(SpecError):  # no single W_V belongs to the head
                if circuits.kv_from_elsewhere:
                    raise SpecError(circuits.kv_from_elsewhere)
                ov = circuits.ov_circuit(head)
                copying = copying_score(ov, *tables)
                ov_norm = float(ov.inner_product(ov).clamp(min=0).sqrt())
            rows.append(HeadCircuit(site, head, copying, over, output_norm, ov_norm))
    if not rows:
        raise SpecError("the model has no attention whose weights can be read; see hw.sites(model)")
    return tuple(rows)


def circuit_table(heads: Sequence[HeadCircuit]) -> Table:
    """Return the numbers of every head, the most copying first; random maps have 0 on average."""
    columns = ("site", "head", "copying", "over", "norm of W_O", "norm of W_V W_O")
    rows = sorted(heads, key=lambda one: math.inf if math.isnan(one.copying) else -one.copying)
    title = "copying scores and norms of the heads' weights"
    return Table(title, columns, list(map(astuple, rows)))


def make_random_baseline(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Return a model of the same architecture with freshly initialised weights: what a measure
    finds without any training.

    A headwise model is rebuilt from its spec, a transformers model from its config. Torch's global
    generator is not changed.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> make_random_baseline(net, seed=1).spec == net.spec
    True
    """
    parameter = next(model.parameters(), torch.empty(0))
    if isinstance(model, Transformer):
        baseline: nn.Module = build(model.spec, seed=seed)
        baseline.usage = model.usage
    else:
        config: Any = getattr(model, "config", None)
        from_config = getattr(type(model), "_from_config", None)
        if config is None or from_config is None:
            fact = (
                f"cannot rebuild {type(model).__name__} with random weights: it has neither a "
                "spec nor a config"
            )
            raise ValueError(f"{fact}; build a randomly initialised one yourself and measure both")
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            with without_hub_kernels():
                baseline = from_config(config)
    return baseline.to(parameter.device, parameter.dtype).eval()


def as_native_model(model: nn.Module) -> Transformer:
    """Return a transformers model as a headwise model with its current weights; a headwise model is
    returned as it is.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     )
    ... )
    >>> as_native_model(net) is net
    True
    """
    if isinstance(model, Transformer):
        return model
    as_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if as_dict is None:
        fact = f"cannot read the weights of {type(model).__name__} by head: it has no config"
        raise SpecError(f"{fact}; use a model of hw.build, of hw.load or of transformers")
    config: dict[str, Any] = as_dict() | {"architectures": [type(model).__name__]}
    spec = families.read_model_spec(config)
    source = wrap_tensors(type(model).__name__, model.state_dict())
    names = get_weight_names(spec.name)
    return build_from_weights(spec, names, source, 0.0, placement=Placement(get_device(model)))
