"""Texts side by side for a model of ours to learn from, and how well it does, text by text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import IGNORE_INDEX
from ..errors import SpecError
from ..head_analysis.annotated_examples import Example
from ..head_analysis.objectives import EvaluationInput, Objective, choose_objective
from ..masking.sequence_info import SequenceInfo
from ..model_spec import StackSpec
from ..models import Transformer
from ..models.embeddings_heads import TokenTypeInput

STREAM_ARGUMENTS = {"x": "sequence", "source": "source_sequence"}  # what is read, and what says where its tokens stand
STATE_LOSSES = ("cosine", "l2")


class DistillationBatch(NamedTuple):
    """Texts side by side: what a model reads, by name; which places of what it says are a text's; what is wanted there.

    `places` and `labels` are [texts, places]; a text of which one thing is said has one place.
    """

    inputs: Mapping[str, Any]
    positions: Tensor
    labels: Tensor | None = None

    def compute_outputs(self, net: Transformer) -> Tensor:
        """What a model says of them, [texts, places, width]."""
        like = next(net.parameters())
        exact = {name: one.to(like) if _is_float_tensor(one) else one for name, one in self.inputs.items()}
        return net(**exact).reshape(*self.positions.shape, -1)

    def losses(self, outputs: Tensor) -> Tensor:
        """- log p of what is wanted, for each text a mean over the places that are asked."""
        assert self.labels is not None
        exact = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).transpose(1, 2)
        each = F.cross_entropy(exact, self.labels, ignore_index=IGNORE_INDEX, reduction="none")
        return _mean_by_text(each, self.labels != IGNORE_INDEX)

    def kl_divergences(self, outputs: Tensor, teacher_outputs: Tensor, temperature: float = 1.0) -> Tensor:
        """KL(teacher || model), of logits over `temperature`, times its square (1503.02531); for each text a mean.

        >>> lesson = DistillationBatch({}, torch.tensor([[True, False]]))
        >>> said, taught = torch.zeros(1, 2, 2), torch.tensor([[[0.0, 100.0], [7.0, 8.0]]])
        >>> lesson.kl_divergences(said, taught)  # log 2: nothing is learnt where there is no text
        tensor([0.6931])
        """
        new, old = (_to_float32(one / temperature).log_softmax(-1) for one in (outputs, teacher_outputs))
        each = F.kl_div(new, old, reduction="none", log_target=True).sum(-1)
        return _mean_by_text(each, self.positions) * temperature**2

    def state_distances(self, outputs: Tensor, teacher_outputs: Tensor, metric: str = "cosine") -> Tensor:
        """How far states lie from the teacher's, for each text a mean: 1 - cosine, or by="l2" the mean square."""
        new, old = _to_float32(outputs), _to_float32(teacher_outputs)
        each = 1 - F.cosine_similarity(new, old, dim=-1) if metric == "cosine" else (new - old).square().mean(-1)
        return _mean_by_text(each, self.positions)


def _is_float_tensor(one: Any) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()


def _to_float32(one: Tensor) -> Tensor:
    return one.to(torch.promote_types(one.dtype, torch.float32))


def _mean_by_text(each: Tensor, where: Tensor) -> Tensor:
    return each.masked_fill(~where, 0).sum(1) / where.sum(1).clamp(min=1)


class DistillationTexts:
    """What a model is asked in some scenes, by number, and the lessons that some of these make.

    `losses` says whether its own head has a loss in them. `numbers` are those texts that ask something; `notes` say
    what is learned of a model and what was left out.
    """

    def __init__(self, net: Transformer, scenes: Sequence[Example], objective: str | Objective | None = None) -> None:
        if not isinstance(net, Transformer):
            raise SpecError(f"{type(net).__name__} is no model of headwise; read it with hw.load first")
        if not scenes:
            raise SpecError("there are no texts to learn from; give some")
        self.net, self.scenes = net, scenes
        self.objective, note = choose_objective(net, objective, scenes[0])
        first = [self._question(number) for number in range(len(scenes))]
        self.has_loss = first[0].labels is not None
        self.numbers = [number for number, question in enumerate(first) if question.num_targets]
        left = len(scenes) - len(self.numbers)
        self.notes = tuple(filter(None, [note, f"{left} texts ask nothing and are left out" if left else ""]))

    def make_batch(self, numbers: Sequence[int], epoch_seed: int = 0) -> DistillationBatch:
        """These texts side by side; where masks are drawn, every turn draws others."""
        return collate_questions(self.net, [self._question(number, epoch_seed) for number in numbers])

    def _question(self, number: int, epoch_seed: int = 0) -> EvaluationInput:
        """What a text asks, which is all told before anything is learned, so that nothing fails on the way."""
        question = self.objective.prepare_input(self.net, self.scenes[number], number + epoch_seed * len(self.scenes))
        if wrong := [
            name for name in question.inputs.kwargs if name not in (*STREAM_ARGUMENTS, *STREAM_ARGUMENTS.values())
        ]:
            raise SpecError(
                f"text {number} is told with {wrong[0]!r}; a model learns from {' and '.join(STREAM_ARGUMENTS)}"
            )
        if question.inputs.args:
            raise SpecError(f"text {number} is told without names; give inputs such as {{'x': ids}}")
        if epoch_seed == 0:
            _check_labels(self.net, question, number)
        return question


def _check_labels(net: Transformer, question: EvaluationInput, number: int) -> None:
    if question.labels is None:
        return
    places, known = _count_positions(net, question.inputs.kwargs), net.spec.heads[0].outputs
    if len(question.labels) != places:
        fact = f"the model says {places} places of text {number} and {len(question.labels)} labels are given"
        raise SpecError(f"{fact}; give one for each")
    asked = question.labels[question.labels != IGNORE_INDEX]
    if len(wrong := asked[(asked < 0) | (asked >= known)]):
        fact = f"a label of text {number} is {int(wrong[0])}, but the model has {known} of them"
        raise SpecError(f"{fact}; give 0..{known - 1}")


def _count_positions(net: Transformer, names: Mapping[str, Any]) -> int:
    """How many things a model says of a text."""
    heads = net.spec.heads
    return 1 if heads and heads[0].at != "each" else _count_stack_tokens(net.spec.stacks[-1], _ids(names["x"]))


def _ids(x: Tensor | TokenTypeInput) -> Tensor:
    return x.ids if isinstance(x, TokenTypeInput) else x


def _count_stack_tokens(stack: StackSpec, x: Tensor) -> int:
    """How many tokens a stack makes of one text."""
    patches = stack.embedding.patches if stack.embedding else None
    if stack.embedding is None or patches is None:
        return x.shape[1]
    return x.shape[-2] // patches.high * patches.columns + stack.embedding.first


def collate_questions(net: Transformer, questions: Sequence[EvaluationInput]) -> DistillationBatch:
    """One lesson of several texts, the shorter ones with padding behind them."""
    given: dict[str, Any] = {}
    names = set(questions[0].inputs.kwargs)
    if any(
        set(question.inputs.kwargs) | {*STREAM_ARGUMENTS.values()} != names | {*STREAM_ARGUMENTS.values()}
        for question in questions
    ):
        raise SpecError("some texts come with a source and some without; give each one")
    for (stream, told), stack in zip(STREAM_ARGUMENTS.items(), (net.spec.stacks[-1], net.spec.stacks[0]), strict=True):
        if stream in names:
            rows = [question.inputs.kwargs[stream] for question in questions]
            given[stream] = _stack_rows(rows)
            tokens = [_input_sequence(question.inputs.kwargs, stream, stack) for question in questions]
            given[told] = _stack_sequences(tokens, _count_stack_tokens(stack, _ids(given[stream])))
    counts = [_count_positions(net, question.inputs.kwargs) for question in questions]
    places = torch.arange(max(counts))[None] < torch.tensor(counts)[:, None]
    device = next(net.parameters()).device
    told_labels = [question.labels for question in questions if question.labels is not None]
    labels = _pad_rows([row[None] for row in told_labels], IGNORE_INDEX).to(device) if told_labels else None
    return DistillationBatch(given, places.to(device), labels)


def _stack_rows(rows: Sequence[Any]) -> Any:
    if all(isinstance(row, TokenTypeInput) for row in rows):
        return TokenTypeInput(*(_pad_rows([row[n] for row in rows], 0) for n in range(2)))
    return _pad_rows(rows, 0)


def _pad_rows(rows: Sequence[Tensor], value: int) -> Tensor:
    """Rows [1, tokens] of ids, or [1, ..., tokens, width], in one tensor."""
    axis = 1 if rows[0].dim() == 2 else -2
    most = max(row.shape[axis] for row in rows)
    behind = (0,) if axis == 1 else (0, 0, 0)
    try:
        return torch.cat([F.pad(row, (*behind, most - row.shape[axis]), value=value) for row in rows])
    except (RuntimeError, IndexError):
        shapes = sorted({str(list(row.shape[1:])) for row in rows})
        raise SpecError(f"texts of shapes {' and '.join(shapes)} cannot stand side by side; use batch=1") from None


def _input_sequence(names: Mapping[str, Any], stream: str, stack: StackSpec) -> SequenceInfo:
    x = _ids(names[stream])
    told = names.get(STREAM_ARGUMENTS[stream])
    return SequenceInfo.contiguous(0, _count_stack_tokens(stack, x), x.device) if told is None else told


def _stack_sequences(rows: Sequence[SequenceInfo], count: int) -> SequenceInfo | None:
    """Where the tokens of all rows stand; nothing needs to be said of whole rows that begin at 0."""
    if all(row.start == 0 and row.count == count for row in rows):
        return None
    gaps = [(0, count - row.count) for row in rows]
    position = torch.cat([F.pad(row.position, gap) for row, gap in zip(rows, gaps, strict=True)])
    segment = torch.cat([F.pad(row.segment, gap, value=-1) for row, gap in zip(rows, gaps, strict=True)])
    return SequenceInfo(position, segment)
