"""Batches of padded texts for retraining, and their losses per text."""

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

# Inputs of a model, and the arguments that hold their positions and segments.
STREAM_ARGUMENTS = {"x": "sequence", "source": "source_sequence"}
STATE_LOSSES = ("cosine", "l2")


class DistillationBatch(NamedTuple):
    """Padded batch: the model's keyword arguments, a mask of output positions that are no padding, and labels.

    `positions` and `labels` are [texts, positions]; a text with one output, such as a class, has one position.
    """

    inputs: Mapping[str, Any]
    positions: Tensor
    labels: Tensor | None = None

    def compute_outputs(self, net: Transformer) -> Tensor:
        """Return the model's outputs, [texts, positions, width]."""
        like = next(net.parameters())
        inputs = {name: value.to(like) if _is_float_tensor(value) else value for name, value in self.inputs.items()}
        return net(**inputs).reshape(*self.positions.shape, -1)

    def losses(self, outputs: Tensor) -> Tensor:
        """Return the cross-entropy of each text, a mean over its labelled positions."""
        assert self.labels is not None
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).transpose(1, 2)
        per_position = F.cross_entropy(logits, self.labels, ignore_index=IGNORE_INDEX, reduction="none")
        return _mean_by_text(per_position, self.labels != IGNORE_INDEX)

    def kl_divergences(self, outputs: Tensor, teacher_outputs: Tensor, temperature: float = 1.0) -> Tensor:
        """Return KL(teacher || model) of each text, averaged over positions.

        Logits are divided by `temperature` and the result is multiplied by its square (1503.02531).

        >>> batch = DistillationBatch({}, torch.tensor([[True, False]]))
        >>> outputs, teacher_outputs = torch.zeros(1, 2, 2), torch.tensor([[[0.0, 100.0], [7.0, 8.0]]])
        >>> batch.kl_divergences(outputs, teacher_outputs)  # log 2: the padding position does not count
        tensor([0.6931])
        """
        log_probs, teacher_log_probs = (
            _to_float32(logits / temperature).log_softmax(-1) for logits in (outputs, teacher_outputs)
        )
        per_position = F.kl_div(log_probs, teacher_log_probs, reduction="none", log_target=True).sum(-1)
        return _mean_by_text(per_position, self.positions) * temperature**2

    def state_distances(self, outputs: Tensor, teacher_outputs: Tensor, metric: str = "cosine") -> Tensor:
        """Return the distance of hidden states from the teacher's, per text: 1 - cosine, or mean square for "l2"."""
        states, teacher_states = _to_float32(outputs), _to_float32(teacher_outputs)
        per_position = (
            1 - F.cosine_similarity(states, teacher_states, dim=-1)
            if metric == "cosine"
            else (states - teacher_states).square().mean(-1)
        )
        return _mean_by_text(per_position, self.positions)


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _mean_by_text(per_position: Tensor, mask: Tensor) -> Tensor:
    return per_position.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)


class DistillationTexts:
    """Training texts of a model, which collates any of them into a batch.

    `has_loss` is true if the objective has labels. `numbers` are the indices of the texts with any target; `notes` name
    the objective and the number of texts left out.
    """

    def __init__(self, net: Transformer, examples: Sequence[Example], objective: str | Objective | None = None) -> None:
        if not isinstance(net, Transformer):
            raise SpecError(f"expected a headwise model, got {type(net).__name__}; load it with hw.load")
        if not examples:
            raise SpecError("no texts to train on; give at least one example")
        self.net, self.examples = net, examples
        self.objective, note = choose_objective(net, objective, examples[0])
        questions = [self._question(number) for number in range(len(examples))]
        self.has_loss = questions[0].labels is not None
        self.numbers = [number for number, question in enumerate(questions) if question.num_targets]
        num_skipped = len(examples) - len(self.numbers)
        self.notes = tuple(
            filter(None, [note, f"{num_skipped} texts without targets were left out" if num_skipped else ""])
        )

    def make_batch(self, numbers: Sequence[int], epoch_seed: int = 0) -> DistillationBatch:
        """Return a padded batch of these texts; random masks, if the objective has any, differ by `epoch_seed`."""
        return collate_questions(self.net, [self._question(number, epoch_seed) for number in numbers])

    def _question(self, number: int, epoch_seed: int = 0) -> EvaluationInput:
        """Return the input and labels of a text; all texts are checked once before training starts."""
        question = self.objective.prepare_input(
            self.net, self.examples[number], number + epoch_seed * len(self.examples)
        )
        if wrong := [
            name for name in question.inputs.kwargs if name not in (*STREAM_ARGUMENTS, *STREAM_ARGUMENTS.values())
        ]:
            raise SpecError(
                f"cannot train on text {number}: it has the input {wrong[0]!r}. Supported are "
                f"{' and '.join(STREAM_ARGUMENTS)}"
            )
        if question.inputs.args:
            raise SpecError(
                f"cannot train on text {number}: it has positional inputs. Give named ones such as {{'x': ids}}"
            )
        if epoch_seed == 0:
            _check_labels(self.net, question, number)
        return question


def _check_labels(net: Transformer, question: EvaluationInput, number: int) -> None:
    if question.labels is None:
        return
    num_positions, num_classes = _count_positions(net, question.inputs.kwargs), net.spec.heads[0].outputs
    if len(question.labels) != num_positions:
        fact = f"text {number} has {num_positions} output positions and {len(question.labels)} labels"
        raise SpecError(f"{fact}; give one label per position")
    labels = question.labels[question.labels != IGNORE_INDEX]
    if len(wrong := labels[(labels < 0) | (labels >= num_classes)]):
        fact = f"text {number} has the label {int(wrong[0])}, the model has {num_classes} outputs"
        raise SpecError(f"{fact}; give labels in 0..{num_classes - 1}")


def _count_positions(net: Transformer, inputs: Mapping[str, Any]) -> int:
    """Return the number of output positions of a text."""
    heads = net.spec.heads
    return 1 if heads and heads[0].at != "each" else _count_stack_tokens(net.spec.stacks[-1], _ids(inputs["x"]))


def _ids(x: Tensor | TokenTypeInput) -> Tensor:
    return x.ids if isinstance(x, TokenTypeInput) else x


def _count_stack_tokens(stack: StackSpec, x: Tensor) -> int:
    """Return the number of tokens that a stack computes for one text."""
    patches = stack.embedding.patches if stack.embedding else None
    if stack.embedding is None or patches is None:
        return x.shape[1]
    return x.shape[-2] // patches.high * patches.columns + stack.embedding.first


def collate_questions(net: Transformer, questions: Sequence[EvaluationInput]) -> DistillationBatch:
    """Collate texts into one batch; shorter ones are padded on the right."""
    inputs: dict[str, Any] = {}
    names = set(questions[0].inputs.kwargs)
    sequence_arguments = {*STREAM_ARGUMENTS.values()}
    if any(set(question.inputs.kwargs) | sequence_arguments != names | sequence_arguments for question in questions):
        raise SpecError("some texts have a source and some have none; give a source with every text")
    for (stream, sequence_argument), stack in zip(
        STREAM_ARGUMENTS.items(), (net.spec.stacks[-1], net.spec.stacks[0]), strict=True
    ):
        if stream in names:
            rows = [question.inputs.kwargs[stream] for question in questions]
            inputs[stream] = _stack_rows(rows)
            sequences = [_input_sequence(question.inputs.kwargs, stream, stack) for question in questions]
            inputs[sequence_argument] = _stack_sequences(sequences, _count_stack_tokens(stack, _ids(inputs[stream])))
    counts = [_count_positions(net, question.inputs.kwargs) for question in questions]
    positions = torch.arange(max(counts))[None] < torch.tensor(counts)[:, None]
    device = next(net.parameters()).device
    label_rows = [question.labels for question in questions if question.labels is not None]
    labels = _pad_rows([row[None] for row in label_rows], IGNORE_INDEX).to(device) if label_rows else None
    return DistillationBatch(inputs, positions.to(device), labels)


def _stack_rows(rows: Sequence[Any]) -> Any:
    if all(isinstance(row, TokenTypeInput) for row in rows):
        return TokenTypeInput(*(_pad_rows([row[n] for row in rows], 0) for n in range(2)))
    return _pad_rows(rows, 0)


def _pad_rows(rows: Sequence[Tensor], value: int) -> Tensor:
    """Rows [1, tokens] of ids, or [1, ..., tokens, width], in one tensor."""
    axis = 1 if rows[0].dim() == 2 else -2
    longest = max(row.shape[axis] for row in rows)
    no_padding = (0,) if axis == 1 else (0, 0, 0)
    try:
        return torch.cat([F.pad(row, (*no_padding, longest - row.shape[axis]), value=value) for row in rows])
    except (RuntimeError, IndexError):
        shapes = sorted({str(list(row.shape[1:])) for row in rows})
        raise SpecError(f"cannot batch texts of shapes {' and '.join(shapes)}. Use batch=1") from None


def _input_sequence(inputs: Mapping[str, Any], stream: str, stack: StackSpec) -> SequenceInfo:
    x = _ids(inputs[stream])
    sequence = inputs.get(STREAM_ARGUMENTS[stream])
    return SequenceInfo.contiguous(0, _count_stack_tokens(stack, x), x.device) if sequence is None else sequence


def _stack_sequences(rows: Sequence[SequenceInfo], count: int) -> SequenceInfo | None:
    """Return padded positions and segments of all rows; None if all rows start at 0 and have no padding."""
    if all(row.start == 0 and row.count == count for row in rows):
        return None
    gaps = [(0, count - row.count) for row in rows]
    position = torch.cat([F.pad(row.position, gap) for row, gap in zip(rows, gaps, strict=True)])
    segment = torch.cat([F.pad(row.segment, gap, value=-1) for row, gap in zip(rows, gaps, strict=True)])
    return SequenceInfo(position, segment)
