"""Direct logit attribution: what each head adds to a logit through the residual stream, on one
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models import Transformer
from ...models.feed_forward import NormLayer
from ...report.data import Table
from ...report.render import to_text
from ...util.errors import SpecError
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import AttentionHook, ModelRun, record_modules
from ..inspect.model_inputs import prepare_inputs
from .head_circuits import get_circuits
from .random_baseline import as_native_model

DIRECT_PLACEMENTS = ("pre", "parallel", "abreast")


class LogitShare(NamedTuple):
    """The direct contribution of one head to a logit, or to the difference of two."""

    site: str
    head: int
    value: float


@dataclass(frozen=True)
class LogitAttribution:
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

    def __str__(self) -> str:
        return to_text(self.table)

    @property
    def data(self) -> dict[str, Any]:
        """The attribution as plain values, the largest contribution first."""
        return {
            "position": self.position,
            "token": self.token,
            "baseline": self.baseline,
            "logit": self.logit,
            "rest": self.rest,
            "words": self.words,
            "heads": [share._asdict() for share in self.by_size],
        }

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

    `token` is the token whose logit is explained (default: the most likely one); with `baseline`,
    the difference of the two logits is. The scale of the final norm is held at the value of the
    text, so that contributions add up to the logit exactly. Effects through later layers are not
    part of it. The model is a decoder or encoder whose layers add to one residual stream without a
    norm after the attention (pre-norm), with a linear head over tokens.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> found = attribute_logit(net.eval(), torch.tensor([[3, 1, 4]]), token=5)
    >>> round(found.rest + sum(share.value for share in found.heads) - found.logit, 5)
    0.0
    """
    prepared = prepare_inputs(model, inputs, 0)
    rows = prepared.token_rows.get("text", ())
    ids = torch.tensor(
        [[token for token in row.ids if token >= 0] for row in rows[:1]]
    )  # padding is negative
    if ids.numel() == 0:
        raise ValueError("the inputs hold no token ids; give ids [1, tokens] or a text")
    net = as_native_model(model).eval()
    stack = _check_residual_stream(net)
    circuits = get_circuits(net)
    hooks = {name: _OutputHook() for name in circuits}
    logits, final = _run_to_head(net, stack, ids, hooks)
    count = logits.shape[1]
    if not -count <= position < count:
        raise ValueError(f"there is no position {position}; give one in 0..{count - 1}")
    explained = logits[0, position].double()
    chosen = int(explained.argmax()) if token is None else token
    readout = _readout(net, chosen, baseline)
    shares: list[LogitShare] = []
    for layer in stack.blocks:
        site = f"{layer.name}.attention"
        if site not in circuits:
            continue
        z_OV = hooks[site].outputs[position].double()
        maps = [circuits[site].output_map(head).double() for head in range(len(z_OV))]
        written = torch.einsum("ov,ovm->om", z_OV, torch.stack(maps)) * layer.scale
        values = _apply_frozen_norm(stack.norm, final[position], written) @ readout
        shares += [LogitShare(site, head, value) for head, value in enumerate(values.tolist())]
    logit = float(explained[chosen] - (explained[baseline] if baseline is not None else 0))
    rest = logit - sum(share.value for share in shares)
    words = tuple(prepared.decode_token(one) for one in (chosen, baseline) if one is not None)
    return LogitAttribution(position % count, chosen, baseline, logit, rest, tuple(shares), words)


class _OutputHook(AttentionHook):
    """Hook that keeps the head outputs of the first text, [tokens, heads, width]."""

    def __init__(self) -> None:
        self.outputs = torch.empty(0)

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Keep the outputs of the first text."""
        self.outputs = outputs[0].detach()


def _run_to_head(
    net: Transformer, stack: Any, inputs: Any, hooks: Mapping[str, _OutputHook]
) -> tuple[Tensor, Tensor]:
    """Run a model with hooks; return its outputs, and the last states before its final norm,
    [tokens, model], in float64.
    """
    module = stack.norm or net.head[net.spec.heads[0].name]
    run = ModelRun(net, prepare_inputs(net, inputs, 0))
    with record_modules([module]) as calls:
        outputs = run.run_with_hooks(require_ability(net, "ablate"), hooks)
    return outputs, calls[module][-1].args[0][0].double()


def _check_residual_stream(net: Transformer) -> Any:
    """The only stack of a model; raises if heads do not add to its logits through one residual
    stream.
    """
    name = net.spec.name
    stacks = list(net.stacks.values())
    if len(stacks) != 1:
        raise SpecError(
            f"cannot attribute logits of {name}: it has {len(stacks)} stacks; give a model with one"
        )
    placed = [
        layer.placement for layer in stacks[0].blocks if layer.placement not in DIRECT_PLACEMENTS
    ]
    if placed:
        fact = f"its norms are placed {placed[0]!r}, so that a norm follows the heads of each layer"
        raise SpecError(
            f"cannot attribute logits of {name}: {fact}; use estimate_importance, which needs no "
            "such form"
        )
    heads = net.spec.heads
    if (
        not heads
        or heads[0].at != "each"
        or heads[0].transform is not None
        or heads[0].cap is not None
    ):
        fact = "it has no output head that is one linear map of every token"
        raise SpecError(f"cannot attribute logits of {name}: {fact}; give a model with such a head")
    return stacks[0]


def _readout(net: Transformer, token: int, baseline: int | None) -> Tensor:
    """The vector whose product with a state after the final norm is the logit of a token, or the
    difference of two.
    """
    head = net.spec.heads[0]
    if not all(0 <= index < head.outputs for index in (token, 0 if baseline is None else baseline)):
        raise ValueError(
            f"token={token}, baseline={baseline}: give tokens in 0..{head.outputs - 1}"
        )
    table = _output_table(net)
    return (table[token] - (0 if baseline is None else table[baseline])) * head.scale


def _output_table(net: Transformer) -> Tensor:
    """Weight of the first output head, [tokens, model], which may be tied to the embedding."""
    name = f"head.{net.spec.heads[0].name}.weight"
    state = net.state_dict(keep_vars=True)
    return state[net.spec.tied_weights().get(name, name)].detach().double()


# --- What one head adds to every logit ------------------------------------------------------------


class LogitEffects(NamedTuple):
    """Direct effects of a head on every logit at one position, minus their mean over all tokens;
    and what is left out.

    A number that is added to all logits changes no probability, so only differences from the mean
    count.
    """

    values: Tensor
    note: str


@torch.inference_mode()
def attribute_all_logits(
    model: nn.Module, inputs: Any, site: str, head: int, position: int
) -> LogitEffects:
    """The effect of a head on the logit of every token through the residual stream, [tokens], in
    float64.

    The scale of the final norm is held at the value of the text. Effects through later layers are
    not part of it, and norms between the head and the end of its stack are left out, which the note
    then says.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> effects = attribute_all_logits(net, torch.tensor([[3, 1, 4]]), "decoder.1.attention", 0, 2)
    >>> effects.values.shape, bool(effects.values.mean().abs() < 1e-9), effects.note
    (torch.Size([11]), True, '')
    """
    net = as_native_model(model).eval()
    stack, layer = _find_writing_layer(net, site)
    hook = _OutputHook()
    _, final = _run_to_head(net, stack, inputs, {site: hook})
    if not 0 <= position < len(hook.outputs) or not 0 <= head < hook.outputs.shape[1]:
        raise ValueError(
            f"{site} has no head {head} at position {position}; give both in its ranges"
        )
    written = (
        hook.outputs[position, head].double()
        @ get_circuits(net)[site].output_map(head).double()
        * layer.scale
    )
    written = _apply_frozen_norm(stack.norm, final[position], written)
    values = _output_table(net) @ written * net.spec.heads[0].scale
    return LogitEffects(values - values.mean(), _describe_left_out(net, stack))


def _find_writing_layer(net: Transformer, site: str) -> tuple[Any, Any]:
    """The stack whose end gives the logits, and the layer of a site in it; raises if its heads
    reach no logit.
    """
    heads = net.spec.heads
    if not heads or heads[0].at != "each" or heads[0].transform is not None:
        fact = f"{net.spec.name} has no output head that is one linear map of every token"
        raise SpecError(f"cannot attribute logits: {fact}; give a model with such a head")
    name, _, rest = site.partition(".")
    last = list(net.stacks)[-1]
    if name != last:
        fact = (
            f"heads of the {name} add to the states that the {last} attends to, and to no "
            "logit directly"
        )
        raise SpecError(f"cannot attribute logits to {site}: {fact}; choose a head of the {last}")
    stack = net.stacks[last]
    return stack, stack.blocks[int(rest.partition(".")[0])]


def _apply_frozen_norm(norm: NormLayer | None, h: Tensor, written: Tensor) -> Tensor:
    """Contributions [..., model] to the state h after the norm, whose scale is held at that of h."""
    if norm is None:
        return written
    weight = norm.get_weight("weight")
    factor = 1 if weight is None else weight.double() + (1 if norm.kind == "offset" else 0)
    if norm.kind in ("rms", "offset"):
        return written * factor / (h.square().mean() + norm.eps).sqrt()
    centred = written - written.mean(-1, keepdim=True)
    return centred * factor / (h.var(unbiased=False) + norm.eps).sqrt()


def _describe_left_out(net: Transformer, stack: Any) -> str:
    """The parts that direct effects of a model leave out; empty if they add up to its logits."""
    left_out: list[str] = []
    if any(layer.placement not in DIRECT_PLACEMENTS for layer in stack.blocks):
        left_out.append("norms after the attention")
    if net.spec.heads[0].cap is not None:
        left_out.append("the soft-cap of the logits")
    return f"left out: {' and '.join(left_out)}" if left_out else ""
