"""Attention of every layer over one text: weights, norm-weighted attention, rollout, aggregates
over heads and layers.

For statistics over many texts with confidence intervals see `head_measurement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.devices import to_float64
from ...report.data import Table
from ...report.render import to_text
from ...report.text import format_numbers
from ...util.errors import SpecError, check_known
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import AttentionHook, run_observed
from ..inspect.model_inputs import get_streams, prepare_inputs
from ..inspect.site import ObservedCall
from ..traces.attention_trace import multiply_rollout
from .head_circuits import AttentionCircuits, get_circuits

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
