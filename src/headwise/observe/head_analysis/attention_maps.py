"""Attention of every layer over one text: weights, norm-weighted attention, rollout, aggregates
over heads and layers; and what each head adds to a logit.

For statistics over many texts with confidence intervals see `head_measurement`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.devices import to_float64
from ...models import Transformer
from ...models.feed_forward import NormLayer
from ...report.data import Table
from ...report.notebook import TableResult
from ...report.render import to_plain, to_text
from ...report.text import format_numbers
from ...util.errors import SpecError, check_known
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import AttentionHook, record_head_outputs, record_modules, run_observed
from ..inspect.model_inputs import get_streams, prepare_inputs
from ..inspect.site import ObservedCall
from ..traces.attention_trace import multiply_rollout
from .circuit_metrics import resolve_index
from .head_circuits import AttentionCircuits, as_native_model, get_circuits, get_weight

# --- Attention maps of one text -------------------------------------------------------------------

SELF = "attention"  # kind of sites where a text attends to itself
MAP_QUANTITIES = ("weights", "norms")
TOP_KEYS = 3  # largest entries of a query that are printed


class LayerAttention(NamedTuple):
    """Attention of one layer over one text: its weights, and the norms |v W_O| of what each head
    reads from each key.

    `value_norms_HS` is None where no W_O belongs to a head; `reason` explains it. `queries` and
    `keys` are the strings of the tokens, empty if they are unknown.
    """

    site: str
    stack: str
    kind: str
    weights_HTS: Tensor
    value_norms_HS: Tensor | None
    reason: str = ""
    queries: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def measure(self, quantity: str) -> Tensor:
        """Weights, or norm-weighted attention |w v W_O| (2004.10102), [heads, queries, keys]."""
        if quantity == "weights":
            return self.weights_HTS
        if self.value_norms_HS is None:
            raise SpecError(
                f"norm-weighted attention of {self.site} is unknown: {self.reason}; use the weights"
            )
        return self.weights_HTS.abs() * self.value_norms_HS[:, None, :]


class AttentionTable(NamedTuple):
    """Hold a matrix over the tokens of one text; prints the largest entries of every query."""

    title: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    values: list[list[float]]

    @property
    def data(self) -> dict[str, Any]:
        """The whole matrix as plain values."""
        return self._asdict()

    def __str__(self) -> str:
        texts = iter(format_numbers(list(chain.from_iterable(self.values))))
        rows: list[tuple[str, int, str]] = []
        for position, (query, values) in enumerate(zip(self.queries, self.values, strict=True)):
            numbers = [next(texts) for _ in values]
            order = sorted(range(len(values)), key=lambda key: -values[key])[:TOP_KEYS]
            entries = [f"{self.keys[key]!r} {key}: {numbers[key]}" for key in order if values[key]]
            rows.append((repr(query), position, "  ".join(entries)))
        return to_text(Table(self.title, ("query", "position", "largest keys"), rows))


@dataclass(frozen=True)
class AttentionMaps:
    """Attention maps of every layer of a model over one text; `layers` maps sites to them, in
    order.
    """

    layers: Mapping[str, LayerAttention] = field(repr=False)

    def weights(self, site: str) -> Tensor:
        """Attention weights of a layer, [heads, queries, keys]."""
        return self._layer(site).measure("weights")

    def norms(self, site: str) -> Tensor:
        """Norm-weighted attention |w v W_O| of a layer (2004.10102), [heads, queries, keys].

        A large weight on a key with a short value moves little, as often with separators. Biases of
        keys and values are in v; the bias of the output, and gates, are left out.
        """
        return self._layer(site).measure("norms")

    def aggregate(self, of: str = "weights") -> Tensor:
        """The mean of all self-attention of the last stack, [queries, keys]: of "weights" or
        "norms".
        """
        check_known("quantity", of, MAP_QUANTITIES)
        return torch.stack([layer.measure(of).mean(0) for layer in self._last_stack()]).mean(0)

    def rollout(self) -> Tensor:
        """Attention rollout of the last stack, [outputs, inputs]: how each output mixes the inputs.

        The product over layers of I / 2 + A / 2, where A is the mean of the heads (2005.00928).
        Rows of A are rescaled to sum to one where a sink takes a part. Rollout treats all heads as
        equal and values as equally long; it is a heuristic.
        """
        layers = self._last_stack()
        means = (to_float64(maps.weights_HTS).mean(0).cpu().numpy() for maps in layers)
        return torch.from_numpy(multiply_rollout(means))

    def table(self, matrix: Tensor, title: str, site: str = "") -> AttentionTable:
        """A matrix with the tokens of a site (default: the last self-attention), which prints its
        largest entries.
        """
        layer = self._layer(site) if site else self._last_stack()[-1]
        words: list[tuple[str, ...]] = []
        for strings, count in zip((layer.queries, layer.keys), matrix.shape, strict=True):
            words.append(strings or tuple(map(str, range(count))))
        return AttentionTable(title, words[0], words[1], matrix.tolist())

    def _layer(self, site: str) -> LayerAttention:
        check_known("site", site, self.layers)
        return self.layers[site]

    def _last_stack(self) -> list[LayerAttention]:
        """Return the self-attention layers of the last stack."""
        stack = list(self.layers.values())[-1].stack
        layers = [one for one in self.layers.values() if (one.stack, one.kind) == (stack, SELF)]
        if not layers:
            raise ValueError(f"{stack} has no self-attention; name a site")
        return layers


class _MapHook(AttentionHook):
    """Keep weights and value norms of one layer, for the first text of the batch."""

    def __init__(self, circuits: AttentionCircuits | None) -> None:
        self.circuits = circuits
        self.weights: Tensor | None = None
        self.value_norms: Tensor | None = None
        self.reason = "its weights cannot be read by head" if circuits is None else ""

    def on_call(self, call: ObservedCall) -> None:
        """Keep the weights of the output heads, and compute the norms of their values after W_O."""
        self.weights = call.all_weights()[0].detach().float().cpu()
        if self.circuits is None:
            return
        rows: list[int] = []
        norms: list[Tensor] = []
        try:
            for head in range(len(self.circuits.spec.score_head_of_output)):
                row, v_BSV = call.head_values(head)
                output = self.circuits.ov_circuit(head).right
                rows.append(row)
                output = to_float64(output.to(v_BSV.device))
                norms.append((to_float64(v_BSV[0]) @ output).norm(dim=-1))
        except (SpecError, ValueError, RuntimeError) as error:
            self.reason = str(error)
            return
        self.weights = self.weights[rows]
        self.value_norms = torch.stack(norms).float().cpu()


def compute_attention_maps(model: nn.Module, inputs: Any) -> AttentionMaps:
    """Run a model on one text and return its attention maps.

    `inputs` are ids, a text, or a dictionary of arguments, as for `hw.trace`. Only the first of
    several texts is used.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> maps = compute_attention_maps(net.eval(), torch.tensor([[3, 1, 4]]))
    >>> (
    ...     maps.norms("decoder.1.attention").shape,
    ...     [round(row, 6) for row in maps.rollout().sum(-1).tolist()],
    ... )
    (torch.Size([2, 3, 3]), [1.0, 1.0, 1.0])
    """
    sites = require_ability(model, "observe")
    try:
        circuits = get_circuits(model)
    except SpecError:
        circuits = {}
    hooks = {module.site.name: _MapHook(circuits.get(module.site.name)) for module in sites}
    prepared = prepare_inputs(model, inputs, 0)
    words = {name: rows[0].words if rows else () for name, rows in prepared.token_rows.items()}
    run_observed(model, prepared, sites, hooks)
    layers: dict[str, LayerAttention] = {}
    for module in sites:
        site = module.site
        hook = hooks[site.name]
        if hook.weights is not None:
            streams = get_streams(site, prepared.has_source)
            texts = [words.get(stream, ()) for stream in streams]
            hook_values = (hook.weights, hook.value_norms, hook.reason)
            place = (site.name, site.stack, site.kind)
            layers[site.name] = LayerAttention(*place, *hook_values, *texts)
    return AttentionMaps(layers)


# --- Contributions to one logit -------------------------------------------------------------------


DIRECT_PLACEMENTS = ("pre", "parallel", "parallel_two_norms")


@dataclass(frozen=True)
class LogitShare:
    """The direct contribution of one head to a logit, or to the difference of two."""

    site: str
    head: int
    value: float


@dataclass(frozen=True, repr=False)
class LogitAttribution(TableResult):
    """Direct contributions of heads to the logit of a token at one position.

    `logit` is the sum of `heads` and `rest`: what embeddings, feed-forward layers and biases add.
    `words` are the strings of the token and the baseline.
    """

    position: int
    token: int
    baseline: int | None
    logit: float
    rest: float
    heads: tuple[LogitShare, ...]
    words: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """The contributions, the largest first."""
        tokens = [one for one in (self.token, self.baseline) if one is not None]
        words = [repr(word) for word in self.words] or [""] * len(tokens)
        names = [f"token {one} {word}".strip() for one, word in zip(tokens, words, strict=True)]
        rows = [(share.site, share.head, share.value) for share in self.by_size]
        rows += [("no head", None, self.rest), ("sum", None, self.logit)]
        title = f"logit of {' minus '.join(names)} at position {self.position}"
        return Table(title, ("site", "head", "added"), rows)

    @property
    def data(self) -> dict[str, Any]:
        """The attribution as plain values, the largest contribution first."""
        return to_plain(replace(self, heads=tuple(self.by_size)))

    @property
    def by_size(self) -> list[LogitShare]:
        """The heads, the largest absolute contribution first."""
        return sorted(self.heads, key=lambda share: -abs(share.value))


@torch.inference_mode()
def attribute_logit(
    model: nn.Module,
    inputs: Any,
    *,
    position: int = -1,
    token: int | None = None,
    baseline: int | None = None,
) -> LogitAttribution:
    """Direct logit attribution: what each head adds to the logit of a token through the residual
    stream.

    The logit of `token` is explained (default: the most likely one), or with `baseline` the
    difference of the two logits. The scale of the final norm is held at the value of the text, so
    that contributions add up to the logit exactly. Effects through later layers are not part of it.
    The model is a pre-norm decoder or encoder with one residual stream, no norm after the
    attention, and a linear head over tokens.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> found = attribute_logit(net.eval(), torch.tensor([[3, 1, 4]]), token=5)
    >>> round(found.rest + sum(share.value for share in found.heads) - found.logit, 5)
    0.0
    """
    prepared = prepare_inputs(model, inputs, 0)
    rows = prepared.token_rows.get("text", ())
    token_ids = [one for one in rows[0].ids if one >= 0] if rows else []  # padding is negative
    ids = torch.tensor([token_ids])
    if not token_ids:
        raise ValueError("the inputs hold no token ids; give ids [1, tokens] or a text")
    net = as_native_model(model).eval()
    stack = _check_residual_stream(net)
    circuits = get_circuits(net)
    logits, final, outputs = _run_to_head(net, stack, ids, circuits)
    count = logits.shape[1]
    position = resolve_index("position", position, count)
    explained = to_float64(logits[0, position])
    chosen = int(explained.argmax()) if token is None else token
    head = net.spec.heads[0]
    tokens = [one for one in (chosen, baseline) if one is not None]
    if not all(0 <= one < head.outputs for one in tokens):
        raise ValueError(
            f"token={chosen}, baseline={baseline}: give tokens in 0..{head.outputs - 1}"
        )
    # The product of the readout with a state after the final norm is the logit or the difference.
    rows = _output_table(net)[tokens]
    readout = (rows[0] - rows[1:].sum(0)) * head.scale
    shares: list[LogitShare] = []
    for layer in stack.blocks:
        site = f"{layer.name}.attention"
        if site not in circuits:
            continue
        z_OV = to_float64(outputs[site][position])
        maps = [to_float64(circuits[site].output_map(number)) for number in range(len(z_OV))]
        written = torch.einsum("ov,ovm->om", z_OV, torch.stack(maps)) * layer.scale
        values = _apply_frozen_norm(stack.norm, final[position], written) @ readout
        shares += [LogitShare(site, number, value) for number, value in enumerate(values.tolist())]
    logit = float(explained[tokens[0]] - explained[tokens[1:]].sum())
    rest = logit - sum(share.value for share in shares)
    words = tuple(prepared.decode_token(one) for one in tokens)
    return LogitAttribution(position % count, chosen, baseline, logit, rest, tuple(shares), words)


def _run_to_head(
    net: Transformer, stack: Any, inputs: Any, sites: Collection[str]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Run a model; return its outputs, the last states before its final norm, [tokens, model], in
    float64, and the head outputs [tokens, heads, width] of these sites.
    """
    site_modules = [one for one in require_ability(net, "ablate") if one.site.name in sites]
    module = stack.norm or net.head[net.spec.heads[0].name]
    with record_modules([module]) as calls:
        logits, outputs = record_head_outputs(net, inputs, site_modules)
    return logits, to_float64(calls[module][-1].args[0][0]), outputs


def _check_residual_stream(net: Transformer) -> Any:
    """Return the only stack, if its heads add to the logits directly; raise otherwise."""
    problem = f"cannot attribute logits of {net.spec.name}"
    stacks = list(net.stacks.values())
    if len(stacks) != 1:
        raise SpecError(f"{problem}: it has {len(stacks)} stacks; give a model with one")
    for layer in stacks[0].blocks:
        if layer.placement not in DIRECT_PLACEMENTS:
            fact = f"its norms are placed {layer.placement!r}, so that a norm follows the heads"
            raise SpecError(
                f"{problem}: {fact} of each layer; use estimate_importance, which needs no such "
                "form"
            )
    head = _linear_head(net)
    if head is None or head.cap is not None:
        fact = "it has no output head that is one linear map of every token"
        raise SpecError(f"{problem}: {fact}; give a model with such a head")
    return stacks[0]


def _linear_head(net: Transformer) -> Any:
    """The first output head if it is a linear map of every token, but for a cap; else None."""
    heads = net.spec.heads
    is_linear = heads and heads[0].at == "each" and heads[0].transform is None
    return heads[0] if is_linear else None


def _output_table(net: Transformer) -> Tensor:
    """Weight of the first output head, [tokens, model], which may be tied to the embedding."""
    weight = get_weight(net, f"head.{net.spec.heads[0].name}.weight")
    assert weight is not None
    return to_float64(weight)


# --- What one head adds to every logit ------------------------------------------------------------


@torch.inference_mode()
def attribute_all_logits(
    model: nn.Module, inputs: Any, site: str, head: int, position: int
) -> tuple[Tensor, str]:
    """Compute the effect of a head on every logit through the residual stream, [tokens], in
    float64, minus its mean over tokens, which changes no probability. Also names what is left out.

    The scale of the final norm is held at the value of the text. Effects through later layers are
    not part of it. Norms between the head and the end of its stack are left out, with a note.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> effects, note = attribute_all_logits(net, ids, "decoder.1.attention", 0, 2)
    >>> effects.shape, bool(effects.mean().abs() < 1e-9), note
    (torch.Size([11]), True, '')
    """
    net = as_native_model(model).eval()
    problem = "cannot attribute logits"
    output_head = _linear_head(net)
    if output_head is None:
        fact = f"{net.spec.name} has no output head that is one linear map of every token"
        raise SpecError(f"{problem}: {fact}; give a model with such a head")
    name, _, rest = site.partition(".")
    last = list(net.stacks)[-1]
    if name != last:
        fact = f"heads of the {name} add to the states that the {last} attends to"
        raise SpecError(
            f"{problem} to {site}: {fact}, and to no logit directly; choose a head of the {last}"
        )
    stack: Any = net.stacks[last]
    layer = stack.blocks[int(rest.partition(".")[0])]
    _, final, outputs = _run_to_head(net, stack, inputs, [site])
    z_TOV = outputs.get(site, torch.empty(0, 0, 0))
    if not 0 <= position < len(z_TOV) or not 0 <= head < z_TOV.shape[1]:
        raise ValueError(
            f"{site} has no head {head} at position {position}; give both in its ranges"
        )
    output_map = to_float64(get_circuits(net)[site].output_map(head))
    written = to_float64(z_TOV[position, head]) @ output_map
    written = _apply_frozen_norm(stack.norm, final[position], written * layer.scale)
    values = _output_table(net) @ written * output_head.scale
    left_out: list[str] = []
    if any(one.placement not in DIRECT_PLACEMENTS for one in stack.blocks):
        left_out.append("norms after the attention")
    if output_head.cap is not None:
        left_out.append("the soft-cap of the logits")
    note = f"left out: {' and '.join(left_out)}" if left_out else ""
    return values - values.mean(), note


def _apply_frozen_norm(norm: NormLayer | None, h: Tensor, written: Tensor) -> Tensor:
    """Apply the norm to contributions [..., model] to h, with the scale computed from h."""
    if norm is None:
        return written
    weight = norm.get_weight("weight")
    offset = 1 if norm.kind == "rms_unit_offset" else 0
    factor = 1 if weight is None else to_float64(weight) + offset
    if norm.kind in ("rms", "rms_unit_offset"):
        return written * factor / (h.square().mean() + norm.eps).sqrt()
    centred = written - written.mean(-1, keepdim=True)
    return centred * factor / (h.var(unbiased=False) + norm.eps).sqrt()
