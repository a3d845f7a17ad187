"""Rows that are continued, one token of each at a time, and what the model remembers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, StackSpec
from ..models.embeddings_heads import last
from ..models.model_cache import Memory
from ..models.transformer import Transformer
from .compiled_step import RAGGED, chosen, compiled
from .decoding_config import USUAL, Decoding
from .sampling import Past
from .text_output import Answer

WORTH = 0.75  # rows are left out of the caches once no more than this share of them goes on: copying costs a few steps
Choose = Callable[[Tensor, Past], list[int]]


class Course:
    """Rows of several lengths behind which tokens are said. `logits` [rows, tokens] are of what comes next.

    `rows` are the numbers of the prompts that are still there, `texts` all ids of each. The model takes them as far as
    it knows positions; at the last one a row goes on from its last `how.window` tokens. `choice` says whether steps are
    compiled, and why; rows of several lengths never are.
    """

    def __init__(
        self,
        net: Transformer,
        prompt: Tensor,
        *,
        count: int,
        tokens: SequenceInfo | None = None,
        memory: Memory | None = None,
        how: Decoding = USUAL,
    ) -> None:
        window = how.window
        told = chosen(net, how.compile, count)
        alike = tokens is None or tokens.start is not None
        self.choice = told if alike or not told.compiled else RAGGED
        self._graph = compiled(net) if self.choice.compiled else None
        self._first = True  # no step was made yet that found out what a graph takes for granted
        self.net, self.memory, self.count, self.window = net, memory, count, window
        self.texts = _live(prompt, tokens)
        self.rows = list(range(len(self.texts)))
        self._longest = longest(net.described.stacks[-1])
        self._held = [len(text) for text in self.texts]  # how many tokens of each row the caches hold
        check_room(net.described, max(self._held), count, window)
        self._read(prompt, tokens)

    def _read(self, ids: Tensor, tokens: SequenceInfo | None) -> None:
        """Begin with these."""
        at = tokens or SequenceInfo.contiguous(0, ids.shape[1], ids.device)
        self.cache = self.net.cache(batch=len(ids), capacity=ids.shape[1] + self.count)
        h = self.net.hidden(ids, tokens=at, source=self.memory, cache=self.cache)
        self.logits = self.net.read(last(h, at)[:, None])[:, 0]

    def say(self, ids: Sequence[int]) -> None:
        """One more token of each row."""
        self._held = [held + 1 for held in self._held]
        for text, one in zip(self.texts, ids, strict=True):
            text.append(one)
        if self._longest is not None and max(self._held) > self._longest:
            self._again(self._longest)
            return
        x = torch.tensor(ids, device=self.logits.device)[:, None]
        graph = None if self._first or not self.cache.foreseen else self._graph
        self._first = False
        self.logits = (graph or self.net)(x, source=self.memory, cache=self.cache)[:, -1]

    def _again(self, longest: int) -> None:
        """Rows beyond the last position begin with the end of their text; the others with what they had."""
        self._held = [held if held <= longest else self.window or 1 for held in self._held]
        ends = [text[-held:] for text, held in zip(self.texts, self._held, strict=True)]
        self._read(*side_by_side(ends, self.logits.device))

    def keep(self, index: Sequence[int]) -> None:
        """These of the rows, in this order; one may be taken twice."""
        if list(index) == list(range(len(self.rows))):
            return
        at, rows = torch.tensor(index, device=self.logits.device), [self.rows[n] for n in index]
        self.cache.rows(at)
        if self.memory is not None and rows != self.rows:
            self.memory = self.memory.rows(at)
        self.rows, self.logits = rows, self.logits[at]
        self._held = [self._held[n] for n in index]
        self.texts = [list(self.texts[n]) for n in index]


def steps(course: Course, choose: Choose, answers: Sequence[Answer], count: int) -> Iterator[None]:
    """One token of every answer that is not over, up to `count` of each; `answers` have one for each prompt."""
    ids: list[int] = []
    for _ in range(count):
        if ids:
            course.say(ids)
        ids = choose(course.logits, course.texts)
        for row, one in zip(course.rows, ids, strict=True):
            answers[row].take(one)
        yield
        going = [n for n, row in enumerate(course.rows) if not answers[row].over]
        if not going:
            break
        if len(going) <= WORTH * len(ids):
            course.keep(going)
            ids = [ids[n] for n in going]
    for answer in answers:
        answer.close()


@contextmanager
def answering(net: Transformer) -> Iterator[None]:
    """The model set to answer and not to train, and as it was thereafter."""
    training = [module for module in net.modules() if module.training]
    try:
        with torch.no_grad():
            net.eval()
            yield
    finally:
        for module in training:
            module.training = True


def side_by_side(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, SequenceInfo | None]:
    """Ids [rows, tokens], padded on the left where rows differ, and where their tokens then stand.

    >>> ids, tokens = side_by_side([[3, 1, 4], [1]], torch.device("cpu"))
    >>> ids.tolist(), tokens.segment.tolist()
    ([[3, 1, 4], [0, 0, 1]], [[0, 0, 0], [-1, -1, 0]])
    """
    lengths = [len(row) for row in rows]
    ids = torch.tensor([[0] * (max(lengths) - len(row)) + list(row) for row in rows], device=device)
    return ids, None if min(lengths) == max(lengths) else SequenceInfo.from_batch(ids, lengths=lengths, pad="left")


def longest(stack: StackSpec) -> int | None:
    """How many positions a stack knows, counted from 0; None when there is no last one."""
    positions = stack.embedding.positions if stack.embedding else None
    told = [positions.length if positions and positions.kind == "learned" else None]
    told += [
        part.max_positions(spec)
        for run in stack.runs
        for block in run.blocks
        for spec in block.attention_specs.values()
        for _, part in spec.parts()
    ]
    return min((length for length in told if length is not None), default=None)


def check_room(described: ModelSpec, prompt: int, count: int, window: int | None) -> None:
    """Refuse what does not fit into the positions of the last stack.

    >>> from headwise import families
    >>> check_room(families.read({"model_type": "gpt2", "n_positions": 8}), 5, 6, None)
    Traceback (most recent call last):
    ValueError: 5 tokens and 6 new ones are 2 more than the 8 positions of gpt2 can take; ask for at most 4 new ...
    """
    known = longest(described.stacks[-1])
    if known is None:
        return
    where = f"the {known} positions of {described.name}"
    if window is not None and window > known:
        raise ValueError(f"window={window} is more than {where}; give at most window={known}")
    if prompt > known:
        raise ValueError(f"{prompt} tokens are {prompt - known} more than {where}; read the last with window={known}")
    beyond = prompt + count - 1 - known  # the last new token is not read
    if beyond > 0 and window is None:
        fact = f"{prompt} tokens and {count} new ones are {beyond} more than {where} can take"
        first = f"ask for at most {count - beyond} new ones"
        raise ValueError(f"{fact}; {first}, or go on from the last tokens alone with window={max(1, known // 2)}")


def check_says(described: ModelSpec) -> int:
    """How many tokens its first head tells apart; refuse a model that does not say which token comes next."""
    embedding = described.stacks[-1].embedding
    known = embedding.tokens if embedding else 0
    head = described.heads[0] if described.heads else None
    if not known or head is None or head.at != "each" or head.outputs != known:
        wanted = f"Head('tokens', {known})" if known else "one over tokens that it also reads"
        raise SpecError(f"{described.name} does not say which token comes next; its first head must be {wanted}")
    return known


def _live(prompt: Tensor, tokens: SequenceInfo | None) -> list[list[int]]:
    rows: list[list[int]] = prompt.tolist()
    if tokens is None or tokens.start is not None:
        return rows
    live: list[list[bool]] = tokens.is_real.expand(len(rows), -1).tolist()
    return [[one for one, there in zip(row, own, strict=True) if there] for row, own in zip(rows, live, strict=True)]
