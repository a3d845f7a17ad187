"""Attribution of one attention score, and of one value that a head reads, to the earlier writers of
the residual stream: embeddings, heads, MLPs and biases.

In a run in which every node keeps its output and every norm its scale, queries, keys and values are
affine in these outputs. So each is a sum of terms, one for each writer, and the score q k^T is a
sum over pairs of terms. The term of a writer is its output times the gradient along direct paths.
The parts "earlier biases" and "own biases" are what the terms of writers leave of a sum: biases,
and in 16-bit models rounding. So the sum always holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...kernels.devices import to_float64
from ...models import Transformer
from ...report.data import Column, Estimate, Figure, HeatMap, Item, Table
from ...report.notebook import NotebookResult
from ...report.render import to_plain, to_text
from ...report.text import format_p
from ...util.errors import check_known, pluralise
from ..head_names import locate_head
from ..inspect.attention_sites import check_head_part
from ..inspect.hooks import ForwardOverride, override_forwards, record_modules
from ..inspect.model_inputs import ModelInputs, map_tensors, prepare_inputs
from ..inspect.trace_capture import get_model_name
from .circuit_graph import (
    EMBEDDING,
    HEAD,
    INPUTS_OF_HEAD,
    CircuitModel,
    Node,
    NodeRun,
    change_output,
    require_gradient,
)
from .circuit_metrics import check_token_ids, find_token_ids, resolve_index
from .head_circuits import kv_from_elsewhere
from .head_table import INTERVAL_NOTE
from .path_patching import estimate_effect
from .resampling import Array
from .text_analysis import text_reader

BASELINES = ("zero", "mean")
TOKENS, OTHER_EMBEDDINGS = "token embedding", "other embeddings"
# of the layers before, and of the norm and the projection of the head
EARLIER_BIASES, OWN_BIASES = "earlier biases", "own biases"
SCORE_BIAS = "score bias"  # added to q k^T, as by ALiBi
# operations of a graph that are not affine
CURVED = re.compile("Tanh|Gelu|Relu|Silu|Sigmoid|Softmax")
MAX_CELLS = 2**26  # numbers of gradients that are computed at once
ROUNDING = 1e-6  # of the sum of absolute parts
NUM_SHOWN = 8  # writers, or pairs of them, of a printed table

# --- Norms with constant scales -------------------------------------------------------------------


def _held_layer_norm(
    x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    scale = (centred.square().mean(axes, keepdim=True) + eps).rsqrt().detach()
    y = centred * scale if weight is None else centred * scale * weight
    return y if bias is None else y + bias


def _held_rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    least = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * (x.square().mean(axes, keepdim=True) + least).rsqrt().detach()
    return y if weight is None else y * weight


def _held_normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps).detach()


HELD_NORMS: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _held_layer_norm,
    F.rms_norm: _held_rms_norm,
    F.normalize: _held_normalize,
}
# norms that are written out compute their scale by one of these
INVERSE_ROOTS = (torch.rsqrt, Tensor.rsqrt)


class HeldScales(TorchFunctionMode):
    """Context in which norms return their values, but their scale is a constant of the graph, so
    that they are affine; `count` is the number of norms.
    """

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in HELD_NORMS or func in INVERSE_ROOTS
        if func in HELD_NORMS:
            return HELD_NORMS[func](*args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        return output.detach() if func in INVERSE_ROOTS else output


# --- Terms of one run -----------------------------------------------------------------------------


@dataclass
class _HeadRun(NodeRun):
    """A run that also keeps what the heads of `vector_sites` compute, before it is replaced."""

    computed: Tensor = field(default_factory=lambda: torch.empty(0))

    def write(self, place: str, output: Tensor) -> Tensor:
        if place in self.vector_sites:
            self.computed = output
        return super().write(place, output)


class WriterRun:
    """The run of one text with the outputs of all nodes and the scales of all norms held, for one
    head, query and key.

    `names` are the writers before the head, and the biases; `sites` has the site of each writer
    that is a head.
    """

    def __init__(self, nodes: CircuitModel, head: Node, place: Any) -> None:
        if isinstance(place, (str, Tensor)) or len(place) != 3:
            raise ValueError(f"{place!r} is no place; give (text, query, key)")
        # tensors of inference mode cannot be part of a graph
        inputs = prepare_inputs(nodes.model, map_tensors(Tensor.clone, place[0]), 0)
        if inputs.batch_size != 1:
            raise ValueError(
                f"a place is in one text, got {inputs.batch_size} rows; give several places"
            )
        self.head = head
        self.name = nodes.name(head)
        self._run(nodes, inputs)
        senders = nodes.senders
        writers = senders[: [node.place for node in senders].index(head.place)]
        self.places = list(dict.fromkeys(node.place for node in writers))
        embeddings = [TOKENS, OTHER_EMBEDDINGS] if self.tokens else [EMBEDDING]
        others = [node for node in writers if node.kind != EMBEDDING]
        self.names = (*embeddings, *nodes.names(others), EARLIER_BIASES, OWN_BIASES)
        sites = [node.place if node.kind == HEAD else "" for node in others]
        self.sites = (*[""] * len(embeddings), *sites, "", "")
        self.query = resolve_index("query", place[1], self.vectors.q_BTHK.shape[1])
        self.key = resolve_index("key", place[2], self.vectors.k_BSGK.shape[1])
        self.row = slice(self.query, self.query + 1)
        allowed = self.vectors.allowed_pairs(self.row)[0, :, 0]
        self.allowed = allowed[head.head if len(allowed) > 1 else 0]
        if not self.allowed[self.key]:
            keys = self.allowed.nonzero().flatten().tolist()
            remedy = f"one of its keys, {keys[0]}..{keys[-1]}" if keys else "a query with keys"
            reason = f"key {self.key}" if keys else "any key"
            raise ValueError(
                f"{self.name} at query {self.query} may not attend to {reason}; give {remedy}"
            )
        rows = inputs.token_rows.get("text", ())
        words = dict(enumerate(rows[0].words)) if rows else {}
        query, key = (f"{n} {words.get(n, '')!r}" for n in (self.query, self.key))
        self.title = f"query {query}, key {key}"

    def _run(self, nodes: CircuitModel, inputs: ModelInputs) -> None:
        """Run the text as usual, and then with all outputs and scales held."""
        model = nodes.model
        clean = NodeRun()
        with torch.no_grad():
            nodes.run(inputs, clean)
        del clean.recorded[""]  # nothing comes before the embeddings
        sites = [self.head.place]
        self.run = _HeadRun(clean.recorded, vector_sites=sites, tracks_gradients=True)
        self.tokens: list[Tensor] = []

        def keep(output: Tensor) -> Tensor:
            self.tokens = [require_gradient(output)]
            return self.tokens[0]

        module = _token_embedding(model)
        overrides = (
            [] if module is None else [ForwardOverride(module, partial(change_output, keep))]
        )
        block = model.get_submodule(nodes.block_of_site[self.head.place])
        with override_forwards(overrides), record_modules([block]) as calls, HeldScales() as scales:
            self.logits = nodes.run(inputs, self.run)
        norms = [one for one in model.modules() if "norm" in type(one).__name__.lower()]
        if norms and not scales.count:
            raise ValueError(
                f"{type(norms[0]).__name__} of {type(model).__name__} computes its scale by none "
                "of layer_norm, rms_norm, normalize and rsqrt, so it cannot be held; load the "
                "folder of the model with hw.load"
            )
        call = calls[block][-1]
        dtype = str(self.logits.dtype).removeprefix("torch.")
        is_half = self.logits.element_size() == 2
        self.note = f"biases include the rounding of {dtype}" if is_half else ""
        self.stream: Tensor = call.args[0] if call.args else next(iter(call.kwargs.values()))
        self.vectors = self.run.vectors[self.head.place].inputs

    def terms(self, values: Tensor) -> Tensor:
        """Return what each writer adds to values [n] of the graph, [writers, n], in float64."""
        outputs = [self.run.recorded[place] for place in self.places]
        tensors = [*self.tokens, *outputs, self.stream]
        step = max(1, MAX_CELLS // sum(one.numel() for one in tensors))
        columns: list[Tensor] = []
        for picked in torch.eye(len(values)).to(values).split(step):  # gradients of many at once
            grads = torch.autograd.grad(
                values, tensors, picked, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            columns.append(self._terms_of(tensors, grads, len(picked)))
        terms = torch.cat(columns, 1)
        return torch.cat([terms, (to_float64(values.detach()) - terms.sum(0))[None]])

    def _terms_of(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], count: int
    ) -> Tensor:
        """Return what each writer, and the biases before the layer, add to so many values."""
        products: list[Tensor] = []  # [heads or 1, values]
        for tensor, grad in zip(tensors, grads, strict=True):
            output = to_float64(tensor.detach())
            output = output.flatten(0, 1) if output.dim() == 4 else output.flatten()[:, None, None]
            if grad is None:  # no direct path
                products.append(output.new_zeros(output.shape[1], count))
                continue
            gradient = to_float64(grad).reshape(count, *output.shape)
            products.append(torch.einsum("thv,nthv->hn", output, gradient))
        stream = products.pop()
        if self.tokens:
            products[1] = products[1] - products[0]  # of all embeddings, without those of tokens
        terms = torch.cat(products)
        return torch.cat([terms, stream - terms.sum(0)])


def _token_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module that embeds tokens, if it is known."""
    if isinstance(model, Transformer):
        return next(iter(model.stacks.values())).embedding
    get_embeddings: Any = getattr(model, "get_input_embeddings", None)
    return None if get_embeddings is None else get_embeddings()


# --- Results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WriterPair:
    """The product of one writer's part of the query and another's part of the key, in a score."""

    query: str
    key: str
    effect: Estimate


@dataclass(frozen=True)
class WriterSide:
    """Parts by writer that sum to `total`: a score by parts of its query or of its key, or a value.

    The chance level of a head is the mean of the other heads of its layer. `all_keys` is what the
    values of all keys add together. `note` says if biases include rounding.
    """

    title: str
    total: Estimate
    parts: Mapping[str, Estimate]
    all_keys: Estimate | None = None
    note: str = ""

    @property
    def by_size(self) -> list[tuple[str, Estimate]]:
        """The parts, the largest absolute one first."""
        return sorted(self.parts.items(), key=lambda item: -abs(item[1].value))

    @property
    def table(self) -> Table:
        """The largest parts, and all others together; without those below rounding in float32."""
        rounding = ROUNDING * sum(abs(one.value) for one in self.parts.values())
        shown = [(name, one) for name, one in self.by_size if abs(one.value) > rounding]
        rows: list[Any] = [(name, *one[:4], one.p) for name, one in shown]
        others = rows[NUM_SHOWN:]
        if others:
            rest = Estimate(sum(row[1] for row in others))
            rows[NUM_SHOWN:] = [(pluralise(len(others), "other"), *rest[:4], rest.p)]
        for name, one in (("sum", self.total), ("sum over all keys", self.all_keys)):
            if one is not None:
                rows.append((name, *one[:3], math.nan, math.nan))
        title = f"{self.title}; {INTERVAL_NOTE}" if self.total.rows > 1 else self.title
        columns = ("writer", "part", "low", "high", "chance", Column("p", format_p))
        notes = [self.note] if self.note else []
        return Table(title, columns, rows, notes).without_empty_columns()

    @property
    def panel(self) -> HeatMap:
        """The largest parts as a column."""
        shown = self.by_size[: 2 * NUM_SHOWN]
        largest = abs(shown[0][1].value) or 1.0
        strengths = [[abs(one.value) / largest] for _, one in shown]
        texts = [[f"{one.value:+.3g}"] for _, one in shown]
        return HeatMap(strengths, [name for name, _ in shown], ["part"], self.title, texts=texts)


@dataclass(frozen=True, repr=False)
class WriterAttribution(NotebookResult):
    """Attribution of a score, with the sides "query" and "key", or of a "value", to writers.

    `pairs` are the largest products of a part of the query and a part of the key.
    """

    sides: Mapping[str, WriterSide]
    pairs: tuple[WriterPair, ...] = ()

    @property
    def total(self) -> Estimate:
        """The score, or what the value adds to the logit."""
        return next(iter(self.sides.values())).total

    @property
    def report_items(self) -> Sequence[Item]:
        """A table for each side, and the pairs."""
        tables = [side.table for side in self.sides.values()]
        rows = [(one.query, one.key, *one.effect[:3]) for one in self.pairs]
        if rows:
            columns = ("query", "key", "part", "low", "high")
            tables.append(Table("largest pairs of parts", columns, rows).without_empty_columns())
        return tables

    @property
    def figure(self) -> Figure:
        """The largest parts of each side."""
        return Figure("parts by writer", [side.panel for side in self.sides.values()])

    def __str__(self) -> str:
        return "\n\n".join(map(to_text, self.report_items))

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return to_plain(self)


# --- Attributions ---------------------------------------------------------------------------------


def attribute_score(
    model: Any,
    places: Iterable[Any],
    head: str,
    baseline: str = "zero",
    *,
    tokenizer: object = None,
) -> WriterAttribution:
    """Attribute the score of a query and a key in a head to earlier heads, MLPs and embeddings.

    `places` are (text, query, key), with positions in the text. The score is q k^T with its scale
    and any bias, before a soft-cap, mask and softmax. On the side of the query, each writer's part
    of q meets the whole k; on the side of the key, the whole q meets its part of k. The parts of
    each side sum to the score. With `baseline` "mean", it is the difference of the score to the
    mean over all keys that the query may attend to: softmax ignores what all keys have in common.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> side = attribute_score(net, [(torch.tensor([[3, 1, 4]]), -1, 1)], "L1H0").sides["key"]
    >>> abs(sum(one.value for one in side.parts.values()) - side.total.value) < 1e-6
    True
    """
    check_known("baseline", baseline, BASELINES)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        text_reader(model, tokenizer) as reader,
    ):
        runs, owner = _read_places(reader, places, head)
        products = np.stack([_score_products(run, baseline) for run in runs])
    names = (*runs[0].names, SCORE_BIAS)
    score = estimate_effect(products.sum((1, 2)))
    less = " minus the mean over its keys" if baseline == "mean" else ""
    title = _title(f"{owner}, score of {head}{less}", runs)
    sides: dict[str, WriterSide] = {}
    for side, axis in (("query", 2), ("key", 1)):
        parts = _describe(names, (*runs[0].sites, ""), products.sum(axis))
        sides[side] = WriterSide(
            f"{title}; by parts of the {side}", score, parts, note=runs[0].note
        )
    pairs: list[WriterPair] = []
    for cell in np.abs(products.mean(0)).ravel().argsort()[::-1][:NUM_SHOWN]:
        query, key = divmod(int(cell), len(names))
        effect = estimate_effect(products[:, query, key])
        pairs.append(WriterPair(names[query], names[key], effect))
    return WriterAttribution(sides, tuple(pairs))


def attribute_value(
    model: Any,
    places: Iterable[Any],
    head: str,
    tokens: Sequence[int | str],
    *,
    tokenizer: object = None,
) -> WriterAttribution:
    """Attribute what a head reads at one key, and adds directly to a logit, to earlier writers.

    `places` are (text, query, key). The value of the key, times its attention weight, goes through
    gates, W_O and the final norm, whose scale is held, to the logit of one of `tokens` at the
    query, or to the difference of two. Summed over all keys it is the contribution of
    `hw.attribute_logit`.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> result = attribute_value(net, [(torch.tensor([[3, 1, 4]]), -1, 1)], "L1H0", (2, 7))
    >>> list(result.sides["value"].parts)[-2:]
    ['earlier biases', 'own biases']
    """
    if isinstance(tokens, (int, str)):
        raise ValueError(f"tokens must be a list, got {tokens!r}; give [{tokens!r}]")
    if not 1 <= len(tokens) <= 2:
        raise ValueError(
            f"got {pluralise(len(tokens), 'token')}; give one, or two for the difference of their "
            "logits"
        )
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        text_reader(model, tokenizer) as reader,
    ):
        ids = find_token_ids(reader, tokens)
        runs, owner = _read_places(reader, places, head)
        terms, of_head = map(np.array, zip(*(_value_terms(run, ids) for run in runs), strict=True))
    minus = " minus ".join(map(repr, tokens))
    title = _title(f"{owner}, value of {head}, added to the logit of {minus}", runs)
    parts = _describe(runs[0].names, runs[0].sites, terms)
    side = WriterSide(
        title, estimate_effect(terms.sum(1)), parts, estimate_effect(of_head), runs[0].note
    )
    return WriterAttribution({"value": side})


def _read_places(model: nn.Module, places: Iterable[Any], head: str) -> tuple[list[WriterRun], str]:
    """Return the runs of places for a head, and the name of the model."""
    if any(one.is_inference() for one in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has weights made in torch.inference_mode(), which have no "
            "gradients; load the model outside of it"
        )
    nodes = CircuitModel(model)
    _ = nodes.first_block  # raises unless there is one residual stream
    nodes.check_all_mlps()  # so that what remains are biases
    node = Node(HEAD, *locate_head(head, [one.site for one in nodes.site_modules]))
    (module,) = [one for one in nodes.site_modules if one.site.name == node.place]
    for part in INPUTS_OF_HEAD:
        check_head_part(module, part)
    elsewhere = kv_from_elsewhere(model, module.site.path)
    if elsewhere:
        raise ValueError(
            f"cannot attribute {head} of {node.place} to writers before it: {elsewhere}; measure "
            "the head with hw.head_analysis.patch_paths"
        )
    runs = [WriterRun(nodes, node, place) for place in places]
    if not runs:
        raise ValueError("there is no place; give at least one, (text, query, key)")
    return runs, get_model_name(model)


def _score_products(run: WriterRun, baseline: str) -> Array:
    """Return the products of the terms of q and of k, and the bias of the score in the last cell,
    [writers, writers].
    """
    allowed = run.allowed.cpu()
    share = torch.zeros(len(allowed), dtype=torch.float64)
    share[run.key] = 1
    if baseline == "mean":
        share -= allowed.double() / allowed.sum()
    head = run.head.head
    k_SK = run.vectors.k_BSGK[0, :, head]
    k_terms = run.terms(share.to(k_SK) @ k_SK)
    products = run.terms(run.vectors.q_BTHK[0, run.query, head]) @ k_terms.T * run.vectors.scale
    products = F.pad(products.cpu(), (0, 1, 0, 1))
    for bias in run.vectors.additive_masks(run.row):
        if bias.requires_grad and _depends_on(bias, run.stream):
            raise ValueError(
                f"cannot attribute the score of {run.name}: the model adds a bias to it that "
                "depends on the text, so it is not a sum over pairs of writers; measure the head "
                "with hw.head_analysis.patch_paths"
            )
        of_head = bias[0, head if bias.shape[1] > 1 else 0, 0].detach().cpu().expand(len(share))
        products[-1, -1] += of_head.where(allowed, 0).double() @ share
    return products.numpy()


def _value_terms(run: WriterRun, ids: Sequence[int]) -> tuple[Array, float]:
    """Return what each writer adds to the logit through the value of the key, [writers], and what
    the head adds with all its keys.
    """
    head = run.head.head
    curved = _find_curved(run.logits)
    if curved:
        raise ValueError(
            f"cannot attribute a value of {run.name} to a logit: {curved} follows the residual "
            "stream, so logits are not sums of parts; attribute its score, or measure it with "
            "hw.head_analysis.patch_paths"
        )
    output = run.run.recorded[run.head.place]
    logits = run.logits[0, run.query][check_token_ids(ids, run.logits.shape[-1])]
    (grad,) = torch.autograd.grad(logits[0] - logits[1:].sum(), output, retain_graph=True)
    # from the output back to the values, through attention weights and gates
    read = run.run.computed[0, run.query, head] @ grad[0, run.query, head]
    v_BSGV = run.vectors.v_BSGV
    (grad,) = torch.autograd.grad(read, v_BSGV, retain_graph=True)
    values = (v_BSGV * grad)[0, :, head].sum(-1)
    terms = run.terms(values[run.key, None])[:, 0]
    return terms.cpu().numpy(), float(to_float64(values.detach()).sum())


def _depends_on(value: Tensor, source: Tensor) -> bool:
    """True if a value has a path to a source in its graph."""
    grads = torch.autograd.grad(value.sum(), source, retain_graph=True, allow_unused=True)
    return grads[0] is not None


def _find_curved(logits: Tensor) -> str:
    """Return the name of an operation before the logits that is not affine, or ""."""
    pending: list[Any] = [logits.grad_fn]
    visited: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        operation = CURVED.match(node.name())
        if operation:
            return operation[0].lower()
        pending += [following for following, _ in node.next_functions]
    return ""


def _describe(names: Sequence[str], sites: Sequence[str], parts: Array) -> dict[str, Estimate]:
    """Return the parts [places, writers] by writer; writers that add nothing are left out."""
    described: dict[str, Estimate] = {}
    for number, name in enumerate(names):
        if not parts[:, number].any():
            continue
        is_other = np.array([site == sites[number] != "" for site in sites])
        is_other[number] = False
        chance = parts[:, is_other].mean(1) if is_other.any() else None
        described[name] = estimate_effect(parts[:, number], chance)
    return described


def _title(quantity: str, runs: Sequence[WriterRun]) -> str:
    return f"{quantity}: {runs[0].title if len(runs) == 1 else pluralise(len(runs), 'place')}"
