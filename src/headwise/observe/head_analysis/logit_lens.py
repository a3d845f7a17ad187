"""Logit lens: the tokens that a model would predict from the residual stream after each attention
and each block, by its own final norm and output matrix (nostalgebraist, 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...report.data import Figure, HeatMap, Table
from ...report.notebook import TableResult
from ...report.render import to_plain
from ..inspect.hooks import ForwardOverride, override_forwards, record_modules
from ..inspect.model_inputs import ModelInputs, prepare_inputs
from ..inspect.trace_capture import get_model_name
from .circuit_graph import EMBEDDING, CircuitModel, NodeRun, change_input, change_output
from .circuit_metrics import check_token_ids, find_token_ids, resolve_index
from .objectives import detect_head_objective
from .text_analysis import text_reader

LENS_OBJECTIVES = ("next-token", "masked-token")
NUM_LIKELIEST = 5  # tokens of each step
NUM_SHOWN = 2  # likeliest tokens of a printed row


@dataclass(frozen=True)
class LensStep:
    """The prediction after one step: the likeliest tokens with their probabilities, and logit,
    log-probability and rank (1: the likeliest) of a token; `difference` is to a second one.
    """

    step: str
    likeliest: tuple[tuple[str, float], ...]
    logit: float
    log_probability: float
    rank: int
    difference: float | None


@dataclass(frozen=True, repr=False)
class LogitLens(TableResult):
    """Predictions at one position from the residual stream after each step; the last ones are
    those of the model.
    """

    title: str
    steps: tuple[LensStep, ...]

    @property
    def table(self) -> Table:
        """A row for each step."""
        rows: list[tuple[Any, ...]] = []
        for one in self.steps:
            words = [f"{word!r} {value:.2f}" for word, value in one.likeliest]
            numbers = (one.logit, one.log_probability, one.rank, one.difference)
            rows.append((one.step, "  ".join(words[:NUM_SHOWN]), *numbers))
        columns = ("step", "likeliest", "logit", "log p", "rank", "difference")
        return Table(self.title, columns, rows).without_empty_columns()

    @property
    def figure(self) -> Figure:
        """The likeliest tokens of each step, by their probability."""
        values = [[value for _, value in one.likeliest] for one in self.steps]
        texts = [[word for word, _ in one.likeliest] for one in self.steps]
        names = [one.step for one in self.steps]
        ranks = [str(rank + 1) for rank in range(len(texts[0]))]
        grid = HeatMap(values, names, ranks, x_label="rank", texts=texts)
        return Figure(self.title, [grid], scale_label="probability")

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return to_plain(self)


@torch.no_grad()
def logit_lens(
    model: Any,
    inputs: Any,
    tokens: Sequence[int | str] = (),
    *,
    position: int = -1,
    tokenizer: object = None,
) -> LogitLens:
    """Return what a model would predict at a position from the residual stream after each step.

    The steps are the embedding, each attention and each block; the last one gives the model's own
    logits. `tokens` are ids or words: one to follow (default: the likeliest), or two to follow the
    difference of their logits too. A block has no step after its attention if headwise does not
    find its MLP, if it has other writers too, such as a convolution, or if a norm follows the sum
    with its MLP, as in BERT.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> lens = logit_lens(net, torch.tensor([[3, 1, 4]]))
    >>> [one.step for one in lens.steps], lens.steps[-1].rank
    (['embedding', 'attention 0', 'block 0'], 1)
    """
    if len(tokens) > 2:
        raise ValueError(f"got {len(tokens)} tokens; give one, or two for a difference")
    with text_reader(model, tokenizer) as reader:
        nodes = CircuitModel(reader)
        _ = nodes.first_block  # raises unless there is one residual stream
        if detect_head_objective(reader) not in LENS_OBJECTIVES:
            raise ValueError(
                f"{type(reader).__name__} has no output head over the tokens of its text; give a "
                "language model, such as AutoModelForCausalLM of transformers loads"
            )
        prepared = prepare_inputs(reader, inputs, 0)
        if prepared.batch_size != 1:
            raise ValueError(f"got {prepared.batch_size} texts; give one")
        ids = find_token_ids(reader, tokens)
        states, logits = _run_steps(nodes, prepared)
        place = resolve_index("position", position, logits.shape[1])
        rows = _apply_head(nodes, prepared, [state[0, place] for state in states.values()])
        rows[-1] = logits[0, place]  # to the last bit
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        chosen = check_token_ids(ids or [int(rows[-1].argmax())], rows.shape[-1])
        words = [prepared.decode_token(one) for one in chosen]
    minus = " minus ".join(f"{one} {word!r}" for one, word in zip(chosen, words, strict=True))
    title = f"{get_model_name(reader)}, position {place}: predictions by step; token {minus}"
    steps: list[LensStep] = []
    for name, row in zip(states, rows, strict=True):
        (best, best_ids) = row.softmax(-1).topk(min(NUM_LIKELIEST, len(row)))
        words = map(prepared.decode_token, best_ids.tolist())
        likeliest = tuple(zip(words, best.tolist(), strict=True))
        value = float(row[chosen[0]])
        log_probability = float(row.log_softmax(-1)[chosen[0]])
        rank = 1 + int((row > row[chosen[0]]).sum())
        difference = value - float(row[chosen[1]]) if len(chosen) > 1 else None
        steps.append(LensStep(name, likeliest, value, log_probability, rank, difference))
    return LogitLens(title, tuple(steps))


def _run_steps(nodes: CircuitModel, inputs: ModelInputs) -> tuple[dict[str, Tensor], Tensor]:
    """Return the residual stream [1, T, model] after each step, and the logits."""
    clean = NodeRun()
    with record_modules(nodes.layers) as calls:
        logits = nodes.run(inputs, clean)
    outputs = [_first(calls[block][-1].output) for block in nodes.layers]
    entering = [clean.recorded[""], *outputs[:-1]]
    if entering[0].dim() != 3:
        raise ValueError(
            f"{type(nodes.model).__name__} carries states {list(entering[0].shape)} instead of one "
            "residual stream [1, tokens, width]; measure heads with hw.estimate_importance"
        )
    # each block again on its own input, with an MLP that writes nothing
    silent = NodeRun({place: torch.zeros_like(clean.recorded[place]) for place in nodes.mlps})
    restored = [
        ForwardOverride(block, partial(change_input, lambda _, state=state: state))
        for block, state in zip(nodes.layers, entering, strict=True)
    ]
    norms = {one for one in nodes.model.modules() if "norm" in type(one).__name__.lower()}
    with override_forwards(restored), record_modules([*nodes.layers, *norms]) as calls:
        nodes.run(inputs, silent)
    paths = {*nodes.mlps} & {*nodes.blocks} - {*nodes.find_other_weights()}
    with_attention = [nodes.model.get_submodule(path) for path in paths]
    states = {EMBEDDING: entering[0]}
    for number, block in enumerate(nodes.layers):
        state = _first(calls[block][-1].output)
        ends = [calls[one][-1].output for one in block.modules() if one in norms and calls[one]]
        if block in with_attention and not any(torch.equal(one, state) for one in ends):
            states[f"attention {number}"] = state
        states[f"block {number}"] = outputs[number]
    return states, logits


def _apply_head(nodes: CircuitModel, inputs: ModelInputs, states: Sequence[Tensor]) -> Tensor:
    """Return the logits of states [model] by the final norm and the head, [states, tokens]."""

    def replace_output(output: Tensor) -> Tensor:
        count = output.shape[1]
        rows = -(-len(states) // count)  # as many rows of the text's length as hold all states
        padded = torch.zeros(rows * count, output.shape[-1]).to(output)
        padded[: len(states)] = torch.stack([*states])
        return padded.unflatten(0, (rows, count))

    override = ForwardOverride(nodes.last_block, partial(change_output, replace_output))
    with override_forwards([override]):
        return nodes.run(inputs, NodeRun()).flatten(0, 1)[: len(states)]


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
